"""A recipe for a table: the columns, the shape of the answers, and the settings that follow from both.

    wishes = Wishes(sentence="Say whether a review is positive.")
    proposal = propose(Table(names=("review", "label"), rows=rows), wishes)
    proposal.settings["rewards"]

`podium init table.csv` writes these settings into a file; `podium train --dataset table.csv` runs them.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import quantiles
from typing import Any

from podium.data.columns import GOLD, LAST_TURN, PROGRAMS, TESTS, Columns, ends_with_answer
from podium.data.extract import last_number
from podium.data.query import as_json
from podium.data.selection import is_held_out, plain
from podium.data.templates import CHOICES, as_text, column_of, field_of, parse
from podium.errors import ModelError, RewardError
from podium.models.builtin import BUILTIN, resolve_model
from podium.planning.columns import JSON_PLACES, ChosenColumns, chosen_columns
from podium.planning.shapes import (
    EXACT_MATCH,
    MOST_LABELS,
    REASONING,
    SHAPES,
    TAGS,
    Shape,
    labels_of,
    shape_of,
    written_differently,
)
from podium.records import last_user_turn
from podium.rewards.program_tests import read_tests

RUN: Mapping[str, Any] = {
    "eval_samples": 4,  # completions for each held-out question, so that 50 questions give 200 verdicts
    "eval_temperature": 1.0,  # the policy as it is trained
    "eval_rows": 50,  # bounds the time of both evaluations
    "per_device_train_batch_size": 64,  # completions of an optimizer step: 8 questions
    "num_generations": 8,  # 16 cost twice the time; with 4 most groups of a hard task are flat
    "temperature": 1.0,  # above it a small model's completions turn into noise on a task of one's own
    "loss_type": "dapo",  # every token counts alike, whatever the length of its completion
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
"""Settings of a run, whatever the model."""
SMALL_MODEL: Mapping[str, Any] = {
    "learning_rate": 2e-5,  # of all weights; `Shape.learning_rate` where the shape of the answers is known
    "max_steps": 40,  # `steps` where their length is known
    "lr_scheduler_type": "linear",
    "adam_beta2": 0.99,  # the default 0.999 averages over more steps than there are
    "max_grad_norm": 1.0,
}
"""Further settings of the built-in model; other models have TRL's defaults."""
ADAPTER: Mapping[str, Any] = {"learning_rate": 3e-4, "lora_target_modules": "all-linear"}
"""Settings of an adapter on the built-in model, as in the recipe `csv`."""

NUM_EXAMPLES = 4
MOST_EXAMPLES = 8
"""Worked examples in front of every question: fewer in a table of less than 40 rows, more where there are more labels,
so that each has one."""
LONGEST_EXAMPLE = 500
"""Characters of a row that is shown as an example."""
LOOKED_AT = 200
"""Rows that decide the columns and the shape of the answers."""
READ = 501
"""Rows that are read: from this many on, a smaller share is held out."""
HELD_OUT_SMALL = 0.2
HELD_OUT = 0.1
"""Shares of the questions that are held out, below `READ` rows and from there on."""
ROOM = 1.25
"""Completion limit over the longest answer seen, in tokens."""
MOST_TOKENS = 512
SHOWN = 60
"""Characters of a value in a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of a dataset, as they come."""

    names: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    """The first `READ` of them."""
    has_test: bool = False
    """Whether held-out rows of its own exist, as a test split or a second file."""

    @property
    def first(self) -> tuple[Mapping[str, Any], ...]:
        """The rows that decide the columns and the shape of the answers."""
        return self.rows[:LOOKED_AT]

    @property
    def tests(self) -> str | None:
        """The column with the tests of a program: one of the usual names, whose first values are tests."""
        return next((name for name in TESTS if name in self.names and self._are_tests(name)), None)

    def _are_tests(self, name: str) -> bool:
        try:
            tests = [read_tests(row.get(name)) for row in self.rows[:20]]
        except RewardError:
            return False
        return any(tests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user decides; the rest is proposed."""

    prompt: str | None = None
    """Column or template of the question; None: it is found by its name, else it is the left one of two."""
    answer: str | None = None
    """Column or template of the answer, in the same way."""
    answer_from: str | None = None
    """Place of the final answer in the answer, as the recipe's key."""
    sentence: str = ""
    """The task in the user's words, the beginning of the system message."""
    shape: str | None = None
    """A key of `SHAPES`; None: the answers decide."""
    model: str = BUILTIN
    """The model to train; the built-in one has settings of its own."""
    tagged: bool = False
    """Whether rewards that were chosen elsewhere read the answer inside tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Settings for a table, and the observations that led to them."""

    shape: str
    """A key of `SHAPES`; empty where no answers were found."""
    about: str
    """The answers in words: `one of 2 labels (positive, negative)`."""
    settings: Mapping[str, Any]
    """Keys of a recipe, in the order of a file; without `dataset`."""
    understood: tuple[str, ...] = ()
    """The reading in lines: question and answer with an example of each, and what is called right."""
    chosen: ChosenColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A table as it was understood."""

    table: Table
    """Without the rows that `conditions` leave out."""
    chosen: ChosenColumns
    columns: Columns
    """From a row to its prompt and answer."""
    conditions: tuple[str, ...]
    """The `filter` of a recipe: rows with an empty question or answer are left out, where there are such rows."""
    answers: tuple[Any, ...]
    """Of the rows; the first, where several are right."""


def read(table: Table, wishes: Wishes) -> Reading:
    """The columns and answers of a table. Raises `ConfigError`, with the flags to type, where they cannot be told."""
    chosen = chosen_columns(table.names, table.first, wishes.prompt, wishes.answer)
    if table.tests is not None and wishes.answer is None and chosen.answer_column not in {*GOLD, *PROGRAMS}:
        chosen = replace(chosen, answer=None, answer_column="")  # no program: the tests decide
    place = wishes.answer_from or _place_of_answer(table, chosen)
    columns = Columns(prompt=chosen.prompt, answer=chosen.answer, answer_from=place)
    used = _used_columns(table, columns)
    empty = [name for name in used if any(_is_empty(row, name) for row in table.rows)]
    full = tuple(row for row in table.rows if not any(_is_empty(row, name) for name in empty))
    table = replace(table, rows=full or table.rows)
    answers = [answer for row in table.rows if (answer := columns(row).get("answer")) is not None]
    return Reading(
        table=table,
        chosen=chosen,
        columns=columns,
        conditions=tuple(f"{name} != ''" for name in empty),
        answers=tuple(map(_first_of_several, answers)),
    )


def _place_of_answer(table: Table, chosen: ChosenColumns) -> str | None:
    """The `answer_from` of answers that are mappings, and of conversations that end with one that no column has."""
    values = [field_of(row, chosen.answer_column) for row in table.rows]
    for field, place in JSON_PLACES.items():
        if values and all(isinstance(value, Mapping) and field in value for value in values):
            return place
    if chosen.answer is not None or "answer" in table.names or not table.rows:
        return None
    columns = Columns(prompt=chosen.prompt)
    return LAST_TURN if all(ends_with_answer(columns.question(row)) for row in table.first) else None


def propose(table: Table, wishes: Wishes | None = None, *, count: Callable[[str], int] | None = None) -> Proposal:
    """Settings for a table; all of them but rewards and templates where it has no answers.

    `count` is the number of tokens of a text; None: that of the built-in model's tokenizer, else a third of the
    characters. Raises `ConfigError`, with the flags to type, where the columns cannot be told.
    """
    wishes = wishes or Wishes()
    reading = read(table, wishes)
    chosen = reading.chosen
    columns = reading.columns
    settings: dict[str, Any] = {"model": wishes.model, **chosen.keys}
    if reading.conditions:
        settings["filter"] = list(reading.conditions)
    if columns.answer_from and not wishes.answer_from:
        settings["answer_from"] = columns.answer_from
    split = _split(reading.table, columns)
    run = {**RUN, **(SMALL_MODEL if wishes.model == BUILTIN else {})}
    beside = _shape_beside_answers(reading)
    name = wishes.shape or beside or (shape_of(reading.answers[:LOOKED_AT]) if reading.answers else "")
    if not name:
        return Proposal(shape="", about="", settings={**settings, **split, **run}, chosen=chosen)
    shape = SHAPES[name]
    if name == "code":
        settings |= _tested(reading.table, columns, settings.get("prompt", "{prompt}"))
    if columns.answer_from is None:
        settings |= shape.settings
    answers = reading.answers or ("",)  # of code the tests decide
    facts = _facts(answers[:LOOKED_AT])
    settings |= _instructions(reading, wishes, shape, facts, split.get("held_out", 0.0)) | split
    ignore_case = name == "label" and written_differently(answers[:LOOKED_AT])
    settings["rewards"] = [_fitted(reward, answers, ignore_case=ignore_case) for reward in shape.rewards]
    if shape.accuracy is not None:
        settings["accuracy"] = shape.accuracy
    least = REASONING if _says_how(columns) else shape.least_tokens
    limit = _limit(answers, count or token_counter(wishes.model), least=least)
    settings |= {**run, "max_completion_length": limit}
    if wishes.model == BUILTIN:
        settings |= {"learning_rate": shape.learning_rate, "max_steps": steps(limit)}
    about = "the right one of its choices" if beside == "choice" else shape.about.format(**facts)
    right = shape.right.replace("included", "aside") if ignore_case else shape.right
    lines = _understood(table.first, columns, chosen, about, right)
    if name == "code" and table.tests is not None:
        is_shown = f"{{{table.tests}}}" in settings.get("prompt", "")
        lines.append(f"tests: {{{table.tests}}}" + (", which the prompt shows" if is_shown else ""))
    return Proposal(shape=name, about=about, settings=settings, understood=tuple(lines), chosen=chosen)


def _shape_beside_answers(reading: Reading) -> str:
    """The shape that a column of tests or choices tells; empty where the answers decide."""
    if reading.table.tests is not None:
        return "code"
    return "choice" if CHOICES in parse(reading.columns.prompt or "").columns else ""


def _says_how(columns: Columns) -> bool:
    """Whether the prompts say how to answer, and ask for reasoning: verl's."""
    return columns.answer_from == JSON_PLACES["ground_truth"]


def _used_columns(table: Table, columns: Columns) -> list[str]:
    """The columns and fields that question and answer name."""
    templates = (columns.prompt or "{prompt}", columns.answer or "{answer}")
    names = dict.fromkeys(name for template in templates for name in parse(template).columns)
    return [name for name in names if column_of(name, table.names) is not None]


def _is_empty(row: Mapping[str, Any], name: str) -> bool:
    return field_of(row, name) in (None, "")


def _first_of_several(answer: Any) -> Any:
    """An answer of a row; the first, where several are right."""
    return answer[0] if isinstance(answer, (list, tuple)) and answer else answer


def _is_bare(question: Any) -> bool:
    """Whether a question is a text, or a conversation without a system message of its own."""
    turns = question if isinstance(question, (list, tuple)) else ()
    return isinstance(question, str) or bool(turns and turns[0].get("role") != "system")


def _split(table: Table, columns: Columns) -> dict[str, Any]:
    """The share to hold out; nothing where held-out rows exist, or all rows would be on one side."""
    share = HELD_OUT_SMALL if len(table.rows) < READ else HELD_OUT
    sides = {is_held_out(columns.identity(row), share) for row in table.rows}
    return {} if table.has_test or len(sides) < 2 else {"held_out": share}


# ---- tests of programs ----


def _tested(table: Table, columns: Columns, prompt: str) -> dict[str, Any]:
    """The tests under the name of the rewards, and in the prompt where a function is named in them alone."""
    if table.tests is None:
        return {}
    made: dict[str, Any] = {}
    if table.tests != "tests":
        made["columns"] = {"tests": table.tests}
    if not all(_names_function(str(columns.question(row)), row.get(table.tests)) for row in table.rows[:20]):
        made["prompt"] = f"{prompt} It must pass these tests: {{{table.tests}}}"
    return made


def _names_function(question: str, tests: Any) -> bool:
    """Whether a question writes out what assertions call, as `area(` or in backquotes; other tests name none."""
    expressions = [test["expression"] for test in read_tests(tests) or () if "expression" in test]
    called = [node.id for text in expressions[:1] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    return not called or any(f"{name}(" in question or f"`{name}`" in question for name in called)


# ---- instruction and worked examples ----


def _facts(answers: Sequence[Any]) -> dict[str, str]:
    """The pieces of the sentences about a shape."""
    values = (as_json(answer) if isinstance(answer, str) else answer for answer in answers)
    fields = dict.fromkeys(name for value in values if isinstance(value, Mapping) for name in value)
    words = sorted(len(str(answer).split()) for answer in answers)[len(answers) // 2]
    return {
        "labels": ", ".join(labels_of(answers)[:MOST_LABELS]),
        "fields": ", ".join(map(str, fields)),
        "words": str(words if words < 10 else round(words, -1)),
    }


def _instructions(
    reading: Reading, wishes: Wishes, shape: Shape, facts: Mapping[str, str], share: float
) -> dict[str, Any]:
    """System message and worked examples; nothing where the prompts have a system message, or say how to answer."""
    table = reading.table
    columns = reading.columns
    if _says_how(columns) or (table.rows and not _is_bare(columns.question(table.rows[0]))):
        return {}
    tagged = wishes.tagged and not shape.tagged
    form = TAGS.format("your answer") if tagged else shape.form.format(**facts)
    number = NUM_EXAMPLES
    if shape is SHAPES["label"]:
        labels = facts["labels"].split(", ")
        number = min(MOST_EXAMPLES, max(NUM_EXAMPLES, len(labels)))
        if not tagged and set(map(plain, labels)) <= set(re.findall(r"\w+", plain(wishes.sentence))):
            form = ""  # the sentence names all labels already
    system = " ".join(filter(None, (_sentence(wishes.sentence), form)))
    made: dict[str, Any] = {"system": system.replace("{", "{{").replace("}", "}}")}
    if not shape.examples or CHOICES in table.names or columns.answer_from not in (None, LAST_TURN):
        return made
    examples = _examples(table, columns, share, count=number)
    names = _answer_columns(columns)
    if tagged and len(names) == 1:
        examples = [{**example, names[0]: f"<answer>{example[names[0]]}</answer>"} for example in examples]
    return {**made, "examples": examples} if examples else made


def _sentence(text: str) -> str:
    """The user's sentence with a full stop.

    >>> _sentence(" Sort the words"), _sentence("Which one?"), _sentence("")
    ('Sort the words.', 'Which one?', '')
    """
    text = " ".join(text.split())
    return text if not text or text[-1] in ".!?:" else f"{text}."


def _answer_columns(columns: Columns) -> tuple[str, ...]:
    return parse(columns.answer).columns if columns.answer else ("answer",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A row that may become an example."""

    example: dict[str, str]
    answer: str
    words: frozenset[str]
    """Distinct words of the question."""
    size: int
    """Characters of the row."""

    def likeness(self, examples: Sequence[_Candidate]) -> tuple[int, float]:
        """The number of examples with the same answer, and the largest share of words in common with one."""
        overlaps = [len(self.words & other.words) / max(1, len(self.words | other.words)) for other in examples]
        return sum(self.answer == other.answer for other in examples), max(overlaps, default=0.0)


def _examples(table: Table, columns: Columns, share: float, *, count: int) -> list[dict[str, str]]:
    """Short rows that are not held out, as different as can be: few equal answers, few words in common."""
    question_names = parse(columns.prompt).columns if columns.prompt else ("prompt",)
    answer_names = _answer_columns(columns)
    by_question: dict[str, _Candidate] = {}
    for row in table.first:
        values = {name: _shown_whole(field_of(row, name)) for name in question_names}
        values |= {name: _one_turn(field_of(row, name)) for name in answer_names if name not in values}
        if any(value is None or isinstance(value, (list, tuple)) for value in values.values()):
            continue
        example = {name: as_text(value) for name, value in values.items()}
        size = sum(map(len, example.values()))
        if 0 < size <= LONGEST_EXAMPLE and not is_held_out(columns.identity(row), share):
            question = plain(" ".join(example[name] for name in question_names))
            answer = plain(" ".join(example[name] for name in answer_names))
            candidate = _Candidate(example=example, answer=answer, words=frozenset(question.split()), size=size)
            by_question.setdefault(question, candidate)
    candidates = list(by_question.values())
    most = min(count, max(1, len(table.rows) // 10), len(candidates) - 1)  # one question is left to train on
    middle = sorted(candidate.size for candidate in candidates)[len(candidates) // 2] if candidates else 0
    short = [candidate for candidate in candidates if candidate.size <= 1.5 * middle]
    examples: list[_Candidate] = []
    while short and len(examples) < most:
        best = min(range(len(short)), key=lambda index: (*short[index].likeness(examples), index))
        examples.append(short.pop(best))
    return [candidate.example for candidate in examples]


def _one_turn(value: Any) -> Any:
    """A value for an example: of a conversation of one turn its text, of a list one item, which is as right as another.

    A conversation of several turns stays a list, and is no example.
    """
    one = _first_of_several(value)
    if isinstance(one, Mapping) and {"role", "content"} <= one.keys():
        return one["content"] if len(value) == 1 else value
    return one


def _shown_whole(value: Any) -> Any:
    """The same in the question, which asks about all items of a list."""
    one = _one_turn(value)
    is_list = isinstance(value, (list, tuple)) and one is _first_of_several(value)
    return as_text(value) if is_list else one


# ---- rewards, completion limit, steps ----


def _fitted(reward: Any, answers: Sequence[Any], *, ignore_case: bool) -> Any:
    """`exact_match` that ignores case where it is to; `numeric_closeness` with a scale from the answers.

    The scale is a quarter of the distance between their quartiles.
    """
    if reward == EXACT_MATCH and ignore_case:
        return {**EXACT_MATCH, "args": {"ignore_case": True}}
    if reward != "numeric_closeness":
        return reward
    numbers = [number for answer in answers if (number := _size(answer)) is not None]
    low, _, high = quantiles(numbers, n=4) if len(numbers) > 1 else (0.0, 0.0, 4.0)
    return {"name": reward, "args": {"scale": float(f"{(high - low) / 4 or 1.0:.2g}")}}


def _size(answer: Any) -> float | None:
    """The number that an answer states, a fraction as its quotient.

    >>> _size("1/4"), _size("12,50 €"), _size("a cat")
    (0.25, 12.5, None)
    """
    if fraction := re.fullmatch(r"\s*([-+]?\d+)/(\d*[1-9]\d*)\s*", str(answer)):
        return int(fraction[1]) / int(fraction[2])
    number = last_number(str(answer))
    return None if number is None else float(number)


def token_counter(model: str) -> Callable[[str], int]:
    """A function from a text to its number of tokens: exact for the built-in model, else a third of the characters."""
    if model == BUILTIN:
        try:
            return _counter(str(Path(resolve_model(model)) / "tokenizer.json"))
        except ModelError:
            pass
    return lambda text: math.ceil(len(text) / 3)


@functools.cache
def _counter(file: str) -> Callable[[str], int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _limit(answers: Sequence[Any], count: Callable[[str], int], *, least: int) -> int:
    """Completion limit in tokens: the longest answer, its end and some room, in steps of 4."""
    longest = max(count(as_text(answer)) for answer in answers) + 1
    return min(MOST_TOKENS, max(least, 4 * math.ceil(longest * ROOM / 4)))


def steps(limit: int) -> int:
    """Optimizer steps of the built-in model in about five minutes of one core, for a completion limit in tokens.

    Measured on one core: 20 s and 2.1 s a token for loading, the proof and both evaluations; then 1.9 s a step and
    0.15 s a token of the limit. With half as many, tasks with many different answers were not learnt
    (benchmarks/RESULTS.md).

    >>> steps(8), steps(16), steps(32), steps(256)
    (75, 50, 25, 10)
    """
    return max(10, 5 * round((250 - 2.1 * limit) / (1.9 + 0.15 * limit) / 5))


# ---- the reading in words ----


def _understood(
    rows: Sequence[Mapping[str, Any]], columns: Columns, chosen: ChosenColumns, about: str, right: str
) -> list[str]:
    """Question, answer with its kind, and what is called right, each with an example; and columns that are not used."""
    question = next((last_user_turn(text) for row in rows if (text := columns.question(row))), "")
    answers = [answer for row in rows if (answer := columns(row).get("answer")) not in (None, "")]
    lines = [f"question: {columns.prompt or '{prompt}'}, such as `{shown(question)}`"]
    if answers:
        source = "the last turn" if columns.ends_with_answer else columns.answer or "{answer}"
        if any(isinstance(answer, (list, tuple)) and len(answer) > 1 for answer in answers):
            source = f"any one of the items of {source}"
        example = answers[0][0] if isinstance(answers[0], list) else answers[0]
        lines.append(f"answer: {shown(source)}, {about}, such as `{shown(example)}`")
    lines.append(f"right: {right}")
    if chosen.unused:
        lines.append(f"not used: {', '.join(f'`{name}`' for name in chosen.unused)}")
    # lines that any terminal and any YAML comment can hold
    lines = [" ".join(line.split()) for line in lines]
    return ["".join(char if char.isprintable() else "?" for char in line) for line in lines]


def shown(value: Any) -> str:
    r"""A value in one short line.

    >>> shown("a\nb"), len(shown("x" * 99)), shown({"a": True})
    ('a b', 60, '{"a": true}')
    """
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, Mapping) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
