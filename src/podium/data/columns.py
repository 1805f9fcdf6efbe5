"""Prompts and answers from the columns of a row: templates, turns in front of the prompt, the answer in a solution.

    columns = Columns(prompt="{question}", answer="{solution}", answer_from="after ####", system="Answer briefly.")
    columns({"question": "1+1", "solution": "it is\n#### 2"})

The other columns stay, for the reward functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.data.extract import Extractor, extractor
from podium.data.images import COLUMNS, image_values, located
from podium.data.templates import as_text, column_of, field_of, has_field, parse
from podium.errors import ConfigError, DataError
from podium.errors.texts import as_yaml, named_list, nearest

Row = dict[str, Any]

TEMPLATES = ("prompt", "answer", "system")  # keys that hold templates

# Usual names of columns, the likeliest first; others are proposed and not assumed.
QUESTIONS = ("question", "prompt", "problem", "instruction", "query")
ANSWERS = ("expert_answer", "answer", "solution", "completion", "output", "response", "target")
ALSO_QUESTIONS = ("input", "text", "sentence", "messages", "conversations", "prompts")
ALSO_ANSWERS = (
    *("label", "labels", "gold", "gold_answer", "ground_truth", "reference", "expected", "completions", "answers"),
    "chosen",
)

GOLD = ("answer", "answers", "solution", "target", "label", "ground_truth", "reference", "gold", "expected")
"""Names of columns with the right answer, for rewards and reports."""

TESTS = (
    *("tests", "test", "test_list", "test_cases", "input_output", "public_tests", "unit_tests", "verification_info"),
    *("private_tests", "generated_tests", "public_test_cases", "private_test_cases", "official_tests"),
)
"""Names of columns with the tests of a program."""

PROGRAMS = ("code", "canonical_solution", "solutions")
"""Names of columns with a program that passes the tests."""

NOT_ASKED = ("id", "index", "idx", "source", "split", "category", "level", "difficulty")
"""Columns that are neither question nor answer."""

USUAL = frozenset((*QUESTIONS, *ANSWERS, *ALSO_QUESTIONS, *ALSO_ANSWERS, *GOLD, *NOT_ASKED))
"""Names that a column is likely to have."""

LAST_TURN = "last turn"
"""The `answer_from` of conversations that end with the answer."""

SERVICES = ("trainer_state", "log_extra", "log_metric")
"""Arguments of a reward that are no lists with an entry for each completion."""

RESERVED = ("prompts", "completions", *SERVICES, "environments")
"""Names under which reward functions get something else; a template that names such a column takes it away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A way to make `prompt`, `answer` and others from a dataset's columns; with nothing set a row stays as it is."""

    prompt: str | None = None  # template; None: the column `prompt`
    answer: str | None = None  # template; None: the column `answer`, if there is one
    system: str | None = None  # template of a system message in front
    examples: tuple[Mapping[str, Any], ...] = ()
    """Rows that the same templates make into earlier turns of user and assistant. Between the two stand the `calls` of
    an example, each with `name`, `arguments` and `result`: a worked example of the use of tools."""
    answer_from: str | None = None
    """Place of the final answer in the answer: `after ####`, `last number`, `boxed`, or a regular expression; with
    `last turn` it is the last message of the conversation in `prompt`, which is taken out of it. Of an answer
    that is a mapping, `json:ground_truth` takes the field."""
    chat: bool = False
    """Whether a text becomes a conversation of one turn. It does in any case with `system` or `examples`."""
    columns: Mapping[str, str] | None = None
    """Columns under other names, for reward functions that ask for those: `{"tests": "test_list"}`."""
    may_lack_prompt: bool = False
    """Whether environments write the prompts of rows that have none."""
    folder: Path | None = None
    """Folder that paths of images are relative to; None: where Python runs."""

    @property
    def is_chat(self) -> bool:
        return self.chat or self.system is not None or bool(self.examples)

    @property
    def changes(self) -> bool:
        return self != Columns()

    def __call__(self, row: Mapping[str, Any]) -> Row:
        """The row with its `prompt` and `answer`.

        >>> made = Columns(prompt="{q}", answer="{a}", answer_from="after ####", chat=True)({"q": "1+1", "a": "#### 2"})
        >>> made["prompt"], made["answer"]
        ([{'role': 'user', 'content': '1+1'}], '2')
        """
        made = dict(row)
        if any(name in made for name in RESERVED):
            for name in self.taken:
                made.pop(name, None)
        if self.prompt is not None or self.is_chat or self.ends_with_answer:
            made["prompt"] = self._prompt(row)
        if self.answer is not None or self.answer_from is not None:
            made["answer"] = self._final(self._whole_answer(row))
        made |= {name: field_of(row, column) for name, column in (self.columns or {}).items()}
        return made if self.folder is None else located(made, self.folder)

    @property
    def images(self) -> tuple[str, ...]:
        """The columns that hold images, as the rows come.

        >>> Columns(columns={"image": "photo"}).images
        ('images', 'photo')
        """
        return tuple((self.columns or {}).get(name, name) for name in COLUMNS)

    @property
    def taken(self) -> tuple[str, ...]:
        """Columns that do not stay, as reward functions get something else under their names.

        >>> Columns(prompt="{prompts}").taken
        ('prompts',)
        """
        written = [text for key in TEMPLATES if (text := getattr(self, key)) is not None and "{" in text]
        named = {name for text in written for name in parse(text).columns} if written else set()
        return tuple(name for name in RESERVED if name in named)

    def identity(self, row: Mapping[str, Any]) -> Any:
        """The question of a row without the words of the template around it: the columns that `prompt` names, or all.

        All are it for a row without a prompt, which an environment writes.

        >>> [Columns(prompt=each).identity({"a": 1, "b": 2}) for each in ("{a} + {b} = ?", "Add {b} to {a}.", "{a}")]
        ['1 2', '1 2', 1]
        >>> Columns(prompt="Find the number.").identity({"number": 3, "seed": 1})
        '3 1'
        >>> Columns().identity({"prompt": None, "number": 3, "seed": 1})
        '3 1'
        >>> Columns(prompt="{a}").identity({"a": "What is this?", "image": "1.png"})
        ['What is this?', '1.png']
        """
        images = image_values({name: field_of(row, own) for name, own in zip(COLUMNS, self.images, strict=True)})
        others = sorted(name for name in row if not (images and name in self.images))
        if self.prompt is not None:
            names = sorted(set(parse(self.prompt).columns)) or others
        elif row.get("prompt") is not None:
            names = ["prompt"]
        else:
            names = [name for name in others if name != "prompt"]
        if len(names) == 1:
            asked = _as_question(as_messages(field_of(row, names[0])))
        else:
            asked = " ".join(as_text(field_of(row, name)) for name in names)
        if not images:
            return asked
        messages = asked if isinstance(asked, list | tuple) else [asked]
        return [*messages, *images]

    def question(self, row: Mapping[str, Any]) -> Any:
        """The question of a row, a text or messages, before anything is put in front of it.

        >>> turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
        >>> columns = Columns(prompt="{messages}", answer_from="last turn")
        >>> columns.question({"messages": turns}), columns({"messages": turns})["answer"]
        ([{'role': 'user', 'content': '1+1'}], '2')
        """
        asked = self._asked(row)
        return asked[:-1] if self.ends_with_answer and ends_with_answer(asked) else asked

    @property
    def ends_with_answer(self) -> bool:
        """Whether the answer is the last turn of the conversation."""
        return self.answer_from == LAST_TURN

    def _asked(self, row: Mapping[str, Any]) -> Any:
        asked = as_messages(row.get("prompt") if self.prompt is None else parse(self.prompt)(row))
        return asked if self.prompt is None else _as_question(asked)

    def _prompt(self, row: Mapping[str, Any]) -> Any:
        asked = self.question(row)
        if asked is None and self.may_lack_prompt and self.is_chat:
            asked = [_message("user", "")]
        if not self.is_chat or not isinstance(asked, (str, list, tuple)):
            return asked
        if not asked or (isinstance(asked, str) and asked.isspace()):
            return [_message("user", asked or "")]  # nothing in front of it, so that it is found to be empty
        before = [] if self.system is None else [_message("system", parse(self.system)(row))]
        return [*before, *self._turns(), *([_message("user", asked)] if isinstance(asked, str) else asked)]

    def opening(self) -> list[dict[str, Any]]:
        """The messages in front of every question; a system message that differs from row to row is not among them.

        >>> Columns(system="Add.", prompt="{q}").opening()
        [{'role': 'system', 'content': 'Add.'}]
        >>> Columns(system="Write {language}.").opening()
        []
        """
        same = self.system is not None and not parse(self.system).columns
        return [*([_message("system", parse(self.system or "")({}))] if same else []), *self._turns()]

    def _turns(self) -> list[dict[str, Any]]:
        """The examples as messages.

        >>> example = {"prompt": "1+1", "calls": [{"name": "add", "result": 2}], "answer": "2"}
        >>> made = Columns(examples=(example,))._turns()
        >>> [message["role"] for message in made], made[1]["tool_calls"][0]["function"]
        (['user', 'assistant', 'tool', 'assistant'], {'name': 'add', 'arguments': {}})
        """
        return [
            message
            for example in self.examples
            for message in (
                _message("user", self.question(example)),
                *(made for call in example.get("calls") or () for made in _called(call)),
                _message("assistant", self._whole_answer(example)),
            )
        ]

    def _whole_answer(self, row: Mapping[str, Any]) -> Any:
        if self.ends_with_answer and ends_with_answer(asked := self._asked(row)):
            return asked[-1]["content"]
        answer = as_messages(row.get("answer") if self.answer is None else parse(self.answer)(row))
        is_turn = (
            isinstance(answer, list)
            and answer
            and isinstance(answer[-1], Mapping)
            and answer[-1].get("role") == "assistant"
        )
        return answer[-1].get("content") if is_turn else answer

    def _final(self, answer: Any) -> Any:
        if self.answer_from is None or answer is None or self.ends_with_answer:
            return answer
        take = answer_extractor(self.answer_from)
        if isinstance(answer, Mapping) and self.answer_from.startswith("json:"):
            return answer.get(self.answer_from.removeprefix("json:"))
        return [take(str(value)) for value in answer] if isinstance(answer, (list, tuple)) else take(str(answer))

    def problems(self) -> list[DataError]:
        """Errors that do not depend on the rows; the first setting of each is the key that it is about."""
        found = [error for key in TEMPLATES if (error := self._wrong(key, parse)) is not None]
        if not self.ends_with_answer and (error := self._wrong("answer_from", answer_extractor)) is not None:
            found.append(error)
        if self.columns and not isinstance(self.columns, Mapping):
            wrong = DataError(
                f"`columns` is {self.columns!r}, and must be a mapping of names to columns.",
                code="D052",
                fix="columns: {tests: test_list}",
                settings=("columns",),
                columns=self.columns,
            )
            return [*found, wrong]
        taken = [name for name in self.columns or {} if name in ("prompt", "answer", "completion_ids", *RESERVED)]
        if self.columns and taken:
            found.append(_taken_name(taken[0], self.columns[taken[0]]))
        unread = {error.settings[0] for error in found}
        if not unread & {"prompt", "answer"} and (error := self._example_problem()) is not None:
            found.append(error)
        return found

    def _wrong(self, key: str, read: Callable[[str], object]) -> DataError | None:
        """The error of a value that cannot be read."""
        value = getattr(self, key)
        if value is None:
            return None
        try:
            read(value)
        except (DataError, ConfigError) as error:
            return DataError(
                f"`{key}`: {error.what}",
                code=error.code or "D053",
                fix=error.fix or "answer_from: last number",
                settings=(key,),
                setting=key,
                what=error.what,
            )
        return None

    def _example_problem(self) -> DataError | None:
        for number, example in enumerate(self.examples, start=1):
            for key in ("prompt", "answer"):
                for column in self._named(key):
                    if not isinstance(example, Mapping) or field_of(example, column) is None:
                        has = names_or_none(example) if isinstance(example, Mapping) else f"`{example}`"
                        named = f"which `{key}` names"
                        other = ""
                        if getattr(self, key) is None:
                            named = "its answer" if key == "answer" else "its question"
                            other = f', or name its column: {key}: "{{COLUMN}}"'
                        return DataError(
                            f"`examples`: number {number} has no `{column}`, {named}; it has {has}.",
                            code="D052",
                            fix=f"Give every example a `{column}`{other}.",
                            settings=("examples",),
                            number=number,
                            column=column,
                            named=named,
                            has=has,
                            other=other,
                        )
            calls = example.get("calls") or ()
            if not (isinstance(calls, (list, tuple)) and all(isinstance(x, Mapping) and x.get("name") for x in calls)):
                return DataError(
                    f"`examples`: the `calls` of number {number} are no list of calls with a `name`: `{calls}`.",
                    code="D052",
                    fix="calls: [{name: multiply, arguments: {a: 2, b: 3}, result: 6}]",
                    settings=("examples",),
                    number=number,
                    calls=calls,
                )
        return None

    def _named(self, key: str) -> tuple[str, ...]:
        template = getattr(self, key)
        return (key,) if template is None else parse(template).columns

    def check_names(self, names: Iterable[str], dataset: str) -> None:
        """Raises one `DataError` (D052) for the columns that the dataset lacks."""
        names = list(names)
        for key, column in self._all_named():
            if column_of(column, names) is None:
                what = (
                    f"`{key}` names the column `{column}`, which {dataset} does not have; its columns are "
                    f"{names_or_none(names)}."
                )
                if any(mark in column for mark in ".[:!("):
                    what = f"{what} A name in braces is a column's, without attributes, indices or formats."
                near = nearest(column, names)
                raise DataError(
                    what,
                    code="D052",
                    fix=f"Did you mean `{near}`?" if near else "Write a column that is there.",
                    settings=(key,),
                    setting=key,
                    column=column,
                    dataset=dataset,
                    names=names_or_none(names),
                    near=near,
                )

    def check_fields(self, rows: Callable[[], Iterable[Any]], dataset: str) -> None:
        """Raises `DataError` (D052) for a field that the values of its column lack in all rows."""
        for key, name in self._all_named():
            column, _, field = name.partition(".")
            if not field:
                continue
            first = None
            for row in rows():
                if not isinstance(row, Mapping) or (name not in row and row.get(column) is None):
                    continue
                if has_field(row, name):
                    break
                first = row[column] if first is None else first
            else:
                if first is not None:
                    value = as_text(first)[:60]
                    raise DataError(
                        f"`{key}` names the field `{field}` of the objects in the column `{column}`, but "
                        f"in no row of {dataset} is that an object with such a field; the first value is `{value}`.",
                        code="D052",
                        fix="Write a column, or a field that its objects have, as in {column.field}.",
                        settings=(key,),
                        setting=key,
                        column=column,
                        field=field,
                        dataset=dataset,
                        value=value,
                    )

    def _all_named(self) -> list[tuple[str, str]]:
        """The settings that name columns, and the columns, or fields of objects in them, that each names."""
        keys = [key for key in TEMPLATES if getattr(self, key) is not None]
        if self.is_chat and "prompt" not in keys and not self.may_lack_prompt:
            keys.append("prompt")
        if self.answer_from not in (None, LAST_TURN) and "answer" not in keys:
            keys.append("answer")
        named = [(key, column) for key in keys for column in self._named(key)]
        return [*named, *(("columns", column) for column in (self.columns or {}).values())]


def as_messages(asked: Any) -> Any:
    """A conversation of `from` and `value`, as ShareGPT's, in messages; everything else as it is.

    >>> as_messages([{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}])
    [{'role': 'user', 'content': '1+1'}, {'role': 'assistant', 'content': '2'}]
    """
    turns = asked if isinstance(asked, (list, tuple)) else ()
    if not turns or not all(isinstance(turn, Mapping) and {"from", "value"} <= turn.keys() for turn in turns):
        return asked
    return [_message(_SPEAKERS.get(turn["from"], turn["from"]), turn["value"]) for turn in turns]


_SPEAKERS = {"human": "user", "gpt": "assistant"}


def _as_question(asked: Any) -> Any:
    """A list that is no conversation as its text, a mapping that is no message as JSON; everything else as it is."""
    if isinstance(asked, Mapping) and "role" not in asked:
        return as_text(asked)
    turns = asked if isinstance(asked, (list, tuple)) else ()
    return str(asked) if turns and not any(isinstance(turn, Mapping) for turn in turns) else asked


def ends_with_answer(turns: Any) -> bool:
    """Whether a question is a conversation of several turns, the last of which is a text of the assistant.

    >>> [ends_with_answer(each) for each in ("1+1", [{"role": "assistant", "content": "2"}])]
    [False, False]
    """
    turns = as_messages(turns)
    last = turns[-1] if isinstance(turns, (list, tuple)) and len(turns) > 1 else None
    return isinstance(last, Mapping) and last.get("role") == "assistant" and isinstance(last.get("content"), str)


def _taken_name(name: str, column: str) -> DataError:
    """The error about a name that `columns` gives to a column, and that another thing has."""
    if name in TEMPLATES:
        return DataError(
            f"`columns` gives `{column}` the name `{name}`, which has a key of its own.",
            code="D052",
            fix=f'{name}: "{{{column}}}"',
            settings=("columns", name),
            name=name,
            column=column,
        )
    return DataError(
        f"`columns` gives `{column}` the name `{name}`, under which reward functions get something else.",
        code="D052",
        fix="give it another name",
        settings=("columns",),
        name=name,
        column=column,
    )


def names_or_none(names: Iterable[Any]) -> str:
    """Names for a message."""
    return named_list(names) or "none"


def _called(call: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The messages of one call of a tool and of its result."""
    function = {"name": call["name"], "arguments": dict(call.get("arguments") or {})}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return asked, {"role": "tool", "name": call["name"], "content": str(call.get("result", ""))}


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@functools.cache
def answer_extractor(way: str) -> Extractor:
    """The function that takes the final answer: `podium.data.extract`'s ways, in words too, or a regular expression.

    `after ####` ends with its line. Raises `ConfigError` for a pattern that is none.

    >>> [answer_extractor(way)("so 3+4 = 7.\\n#### 7 apples") for way in ("after ####", "last number", "[0-9]+")]
    ['7 apples', '7', '7']
    """
    words = way.strip()
    if words in ("after ####", "####"):
        return extractor("####")
    if words == "last number":
        return extractor("last_number")
    if words.startswith("after "):
        return extractor(f"after:{words.removeprefix('after ')}")
    known = words.partition(":")[0] in ("text", "boxed", "last_number", "tag", "json", "after", "regex")
    return extractor(words if known else f"regex:{way}")


def usual(names: Sequence[str]) -> tuple[str, str] | None:
    """The columns with question and answer, by their usual names, capitals aside; None where one of them has none.

    >>> usual(["id", "Question", "expert_answer"]), usual(["text"])
    (('Question', 'expert_answer'), None)
    """
    question = named(names, QUESTIONS)
    answer = named([name for name in names if name != question], ANSWERS)
    return None if question is None or answer is None else (question, answer)


def named(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    """The column with the first of the wanted names, capitals aside."""
    spelled = {name.casefold(): name for name in reversed(names)}
    return next((spelled[name] for name in wanted if name in spelled), None)


def likely(names: Sequence[str]) -> tuple[str, str | None]:
    """The columns that may hold question and answer, for a fix: by their names, else the first and the next.

    >>> likely(["id", "frage", "antwort"]), likely(["text", "label"]), likely(["x"])
    (('frage', 'antwort'), ('text', 'label'), ('x', None))
    """
    rest = [name for name in names if name.casefold() not in NOT_ASKED] or list(names) or ["COLUMN"]
    answer = named(rest[1:] if len(rest) == 2 else rest, (*ANSWERS, *ALSO_ANSWERS))
    asked = [name for name in rest if name != answer] or rest
    question = named(asked, (*QUESTIONS, *ALSO_QUESTIONS)) or asked[0]
    return question, answer or next((name for name in rest if name != question), None)


def as_flags(templates: Mapping[str, str]) -> str:
    """The flags and keys to type where no column is called `prompt`; no flag has several lines.

    >>> as_flags({"prompt": "{frage}", "answer": "{antwort}"})
    '--prompt "{frage}" --answer "{antwort}"; in a recipe: prompt: "{frage}" and answer: "{antwort}"'
    """
    written = {key: as_yaml(text) for key, text in templates.items()}
    lines = " and ".join(f"{key}: {text}" for key, text in written.items())
    if any("\n" in text for text in templates.values()):
        return lines
    return " ".join(f"--{key} {text}" for key, text in written.items()) + f"; in a recipe: {lines}"


def features(columns: Columns, given: Any) -> Any:
    """Types of the columns after `columns` (`datasets.Features`); None where those of the prompt cannot be told."""
    from datasets import Features, List, Value

    from podium.data.json_values import JsonValue

    if given is None:
        return None
    text = Value("string")
    made = {name: kind for name, kind in given.items() if name not in columns.taken}
    if columns.prompt is not None or columns.is_chat:
        asked = _type_of(columns.prompt or "{prompt}", given)
        of_texts = isinstance(asked, List) and isinstance(asked.feature, Value)
        asked = text if of_texts or (isinstance(asked, dict) and "role" not in asked) else asked
        turns = List({"role": text, "content": text})
        made["prompt"] = turns if columns.is_chat and asked == text else asked
        if any(example.get("calls") for example in columns.examples):
            made["prompt"] = JsonValue()  # in a typed column every message would have the keys of a call
    if columns.answer is not None or columns.answer_from is not None:
        feature = _type_of(columns.answer or "{answer}", given)
        of_completion = isinstance(feature, List) and isinstance(feature.feature, dict) and "role" in feature.feature
        feature = (
            feature.get(str(columns.answer_from).removeprefix("json:"), feature)
            if isinstance(feature, dict)
            else feature
        )
        made["answer"] = text if columns.ends_with_answer or of_completion else feature
    named = {name: field_of(given, column) for name, column in (columns.columns or {}).items()}
    made |= {name: kind for name, kind in named.items() if kind is not None}
    if columns.folder is not None and made.get("images") == text:
        made["images"] = List(text)
    return Features(made)


def _type_of(template: str, given: Mapping[str, Any]) -> Any:
    """The type that a template makes: text, unless it is a column alone that holds lists or mappings."""
    from datasets import List, Value

    pieces = parse(template).pieces
    alone = pieces[1] if len(pieces) == 3 and not pieces[0] + pieces[2] else ""
    own = field_of(given, alone)
    if isinstance(own, List) and isinstance(own.feature, dict) and {"from", "value"} <= own.feature.keys():
        return List({"role": Value("string"), "content": Value("string")})  # as `as_messages` makes them
    return Value("string") if own is None or isinstance(own, Value) else own
