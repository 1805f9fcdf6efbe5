"""A recipe for a table: the columns, the shape of the answers, and the settings that follow from both.

    proposal = propose(Table(names=("review", "label"), rows=rows), Given(sentence="Say whether a review is positive."))
    proposal.settings["rewards"]

`podium init table.csv` writes these settings into a file; `podium train --dataset table.csv` runs them.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from podium.data.columns import GOLD, LAST_TURN, PROGRAMS, TESTS, Columns, ends_with_answer
from podium.data.extract import last_number
from podium.data.query import as_json
from podium.data.selection import is_held_out, plain
from podium.data.templates import CHOICES, as_text, column_of, field_of, parse
from podium.errors import ModelError, RewardError
from podium.models.builtin import BUILTIN, resolve_model
from podium.planning.answer_columns import Chosen, chosen_columns
from podium.planning.understood import case_is_free, lines
from podium.rewards.program_tests import read_tests

# ---- settings ----

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
MOST_LABELS = 12
"""Distinct answers up to which they are labels, if each occurs `ROWS_PER_LABEL` times on average."""
ROWS_PER_LABEL = 4
LONG = 240
"""Characters from which an answer is long: words in common are rewarded, and equality never occurs."""
ROOM = 1.25
"""Completion limit over the longest answer seen, in tokens."""
MOST_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of a dataset, as they come."""

    names: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    """The first `READ` of them."""
    has_test: bool = False
    """Whether held-out rows of its own exist, as a test split or a second file."""

    @property
    def tests(self) -> str | None:
        """The column with the tests of a program: one of the usual names, whose first values are tests."""
        return next((name for name in TESTS if name in self.names and self._are_tests(name)), None)

    def _are_tests(self, name: str) -> bool:
        try:
            read = [read_tests(row.get(name)) for row in self.rows[:20]]
        except RewardError:
            return False
        return any(read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The decisions that are not left to a proposal."""

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
    """A key of `SHAPES`."""
    about: str
    """The answers in words: `one of 2 labels (positive, negative)`."""
    settings: Mapping[str, Any]
    """Keys of a recipe, in the order of a file; without `dataset`."""
    understood: tuple[str, ...] = ()
    """The reading in lines: question and answer with an example of each, and what is called right."""
    chosen: Chosen
    """The columns, and the other reading where a second one is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of answer, and the settings for it."""

    fits: Callable[[Sequence[Any]], bool]
    """Whether all answers of a table have this shape; each is a text, a number or a mapping."""
    about: str
    form: str
    """The sentence behind the user's own; `{labels}`, `{fields}` and `{words}` come from the answers."""
    rewards: tuple[Any, ...]
    accuracy: str | None
    """The reward that decides right or wrong; None where the form of the answers allows none."""
    right: str
    """What this reward calls right, as the end of a sentence."""
    least_tokens: int = 8
    settings: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 2e-5
    """Rate for all weights of the built-in model. Answers of one token need less: 2e-5 soon makes one of them the
    answer to every question, and then no group has spread any more."""
    tagged: bool = False
    """Whether the answer stands in tags, because the completion has more than the answer in it."""
    examples: bool = True


# ---- shapes of answers ----

_DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}( 00:00:00)?|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d\d)|"
    r"(\d{1,2}(st|nd|rd|th|\.)? )?(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.? "
    r"(\d{1,2}(st|nd|rd|th)?,? )?\d{4}",
    re.IGNORECASE,
)


def _is_number(answer: Any) -> bool:
    """Whether an answer is a finite number alone, a currency or per cent sign aside.

    >>> [_is_number(each) for each in (7, "1,234.5", "$7", "\u22122", "12,50 €", "1/4", "1e-3")]
    [True, True, True, True, True, True, True]
    >>> [_is_number(each) for each in ("4 apples", "nan", "July 4", True, "02139")]
    [False, False, False, False, False]
    """
    written = str(answer).strip("$%€£¥₹ \n").replace("\u2212", "-")
    is_code = isinstance(answer, bool) or re.match(r"0\d", written) is not None  # a zero in front has a meaning
    return not is_code and re.fullmatch(_NUMBER, written.replace(",", ""), re.IGNORECASE) is not None


_NUMBER = r"[-+]?(\d+/\d+|(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)"


def _is_object(answer: Any) -> bool:
    return isinstance(as_json(answer) if isinstance(answer, str) else answer, Mapping)


def _is_formula(answer: Any) -> bool:
    return re.search(r"\\([dt]?frac|sqrt|pi|text|left|circ|infty|cdot|times|begin)\b", str(answer)) is not None


def _is_long(answer: Any) -> bool:
    return len(str(answer)) > LONG


def _is_choice(answer: Any) -> bool:
    return re.fullmatch(r"\(?[A-Ea-e][).]?", str(answer).strip()) is not None


def _is_list(answer: Any) -> bool:
    """Whether an answer is a JSON list, or short items with commas between them.

    >>> [_is_list(each) for each in ("duck, goat", "[1, 2]", "red", "No, I have never been to that city in my life.")]
    [True, True, False, False]
    """
    text = str(answer).strip()
    if text.startswith("["):
        return isinstance(as_json(text), list)
    items = [item.strip() for item in re.split(r"[,;]", text)]
    return len(items) > 1 and all(item and len(item.split()) <= 4 for item in items) and not text.endswith((".", "!"))


def _every(fits: Callable[[Any], bool]) -> Callable[[Sequence[Any]], bool]:
    return lambda answers: all(map(fits, answers))


def labels_of(answers: Sequence[Any]) -> list[str]:
    """The distinct answers, white space and capitals aside, each as it is most often written, the commonest first.

    >>> labels_of(["yes", "no", "No", "no ", "yes", "no"])
    ['no', 'yes']
    """
    spelled = Counter(str(answer).strip() for answer in answers)
    counts = Counter[str]()
    for text, count in spelled.items():
        counts[plain(text)] += count
    first = {plain(text): text for text, _ in reversed(spelled.most_common())}
    return [first[key] for key, _ in sorted(counts.items(), key=lambda each: (-each[1], each[0]))]


def _are_labels(answers: Sequence[Any]) -> bool:
    labels = labels_of(answers)
    few = 1 < len(labels) <= min(MOST_LABELS, len(answers) // ROWS_PER_LABEL)
    return few and all(len(label) <= 40 for label in labels)


_EXACT: Mapping[str, Any] = {"name": "exact_match", "weight": 2}
_EQUAL = "equal to the answer, capitals included; white space around it does not count"
_IN_TAGS = "Put the final answer inside tags, like this: <answer>{}</answer>."

REASONING = 256
"""Tokens that an answer with its reasoning has at least."""
VERL_ANSWER = "json:ground_truth"
_FIELDS = {"ground_truth": VERL_ANSWER, "answer_start": "json:text", "aliases": "json:aliases"}
"""The `answer_from` of answers that are mappings, by a field that tells them: those of verl, SQuAD and TriviaQA."""

SHAPES: Mapping[str, Shape] = {
    "worked": Shape(
        fits=_every(lambda answer: "####" in str(answer)),
        about="a solution that ends with `####` and the number",
        form="Work it out step by step. " + _IN_TAGS.format("7"),
        rewards=(
            {
                "name": "xml_format_partial",
                "args": {"sections": ["answer"], "penalty_per_character": 0.0},
                "weight": 0.5,
            },
            {"name": "numeric_match", "weight": 2},
        ),
        accuracy="numeric_match",
        right="the same number as the answer",
        least_tokens=REASONING,
        settings={"answer_from": "after ####"},
        tagged=True,
        examples=False,  # solutions are long, and their form is another one
    ),
    "boxed": Shape(
        fits=_every(lambda answer: r"\boxed{" in str(answer)),
        about=r"a solution with its result in \boxed{{}}",
        form=r"Work it out step by step, and put the final answer inside \boxed{{}}.",
        rewards=({"name": "math_match", "weight": 2},),
        accuracy="math_match",
        right="the same formula as the result",
        least_tokens=REASONING,
        settings={"answer_from": "boxed"},
        examples=False,
    ),
    "formula": Shape(
        fits=lambda answers: sum(map(_is_formula, answers)) >= len(answers) / 10 and not any(map(_is_long, answers)),
        about="a formula in LaTeX",
        form=r"Work it out step by step, and put the final answer inside \boxed{{}}.",
        rewards=({"name": "math_match", "weight": 2},),
        accuracy="math_match",
        right="the same formula as the answer",
        least_tokens=REASONING,
        examples=False,
    ),
    "json": Shape(
        fits=_every(_is_object),
        about="a JSON object with the fields {fields}",
        form="Answer with one JSON object with the fields {fields}, and nothing else.",
        rewards=({"name": "json_match", "weight": 2}, "json_format"),
        accuracy="json_match",
        right="the share of the fields that are equal to the answer's",
    ),
    "number": Shape(
        fits=_every(_is_number),
        about="a number",
        form="Answer with the number alone.",
        rewards=({"name": "numeric_match", "weight": 2}, "numeric_closeness"),
        accuracy="numeric_match",
        right="the same number as the answer",
        learning_rate=1e-5,
    ),
    "choice": Shape(
        fits=lambda answers: _every(_is_choice)(answers) and len(labels_of(answers)) > 1,
        about="the letter of a choice ({labels})",
        form="Answer with the letter alone.",
        rewards=({"name": "multiple_choice", "weight": 2},),
        accuracy="multiple_choice",
        right="the same letter as the answer, and no other",
        learning_rate=1e-5,
    ),
    "date": Shape(
        fits=_every(lambda answer: _DATE.fullmatch(str(answer).strip()) is not None),
        about="a date",
        form="Answer with the date alone.",
        rewards=(_EXACT, "text_similarity"),
        accuracy="exact_match",
        right=_EQUAL,
    ),
    "label": Shape(
        fits=_are_labels,
        about="one of few labels ({labels})",
        form="Answer with one of these alone: {labels}.",
        rewards=(_EXACT,),
        accuracy="exact_match",
        right=_EQUAL,
        learning_rate=1e-5,
    ),
    "list": Shape(
        fits=_every(_is_list),
        about="a list",
        form="Answer with the list alone.",
        rewards=(_EXACT, {"name": "text_similarity", "args": {"unit": "word"}}),
        accuracy="exact_match",
        right=_EQUAL,
    ),
    "text": Shape(
        fits=lambda answers: sum(map(_is_long, answers)) <= len(answers) // 10,
        about="a short text",
        form="Write the answer alone, without an explanation.",
        rewards=(_EXACT, "text_similarity"),
        accuracy="exact_match",
        right=_EQUAL,
    ),
    "length": Shape(
        fits=lambda answers: False,  # told by the sentence: the number is a setting, and a reward of one's own decides
        about="a text of the length that the number asks for",
        form="",
        rewards=({"function": "rewards.py:near", "weight": 0.5},),
        accuracy="right",
        right="what `right` in rewards.py says, a function of yours",
        least_tokens=96,
        examples=False,
    ),
    "long": Shape(
        fits=lambda answers: True,
        about="a text of about {words} words",
        form="Answer in about {words} words.",
        rewards=("answer_f1",),
        accuracy=None,
        right="not decided: words in common with the answer are rewarded",
        least_tokens=64,
    ),
    "code": Shape(
        fits=lambda answers: False,  # told by a column of tests
        about="Python code that passes tests",
        form="Answer with Python code in one code block: the function, or a program that reads its input and prints.",
        rewards=({"name": "code_stages", "args": {"extract": "fence", "timeout": 1, "sandbox": "auto"}},),
        accuracy="code_stages",
        right="passing the tests",
        least_tokens=128,
        examples=False,
    ),
}
"""By name, in the order in which they are tried."""


def shape_of(answers: Sequence[Any]) -> str:
    r"""The name of the first shape that fits all answers.

    >>> [shape_of(each) for each in (["7", "-1.5"], ["B", "A"], ["2024-01-31"], ["a, b", "c, d"], ["240 minutes"])]
    ['number', 'choice', 'date', 'list', 'text']
    >>> shape_of([r"\frac{1}{2}", "6 - 5i", "p", r"3\sqrt{13}"])
    'formula'
    >>> [shape_of(each) for each in (["yes", "no"] * 9, ['{"a": 1}'], ["so #### 7"], ["word " * 80])]
    ['label', 'json', 'worked', 'long']
    """
    return next(name for name, shape in SHAPES.items() if shape.fits(answers))


# ---- the proposal ----


def propose(table: Table, given: Given | None = None, *, count: Callable[[str], int] | None = None) -> Proposal:
    """Settings for a table; all of them but rewards and templates where it has no answers.

    `count` is the number of tokens of a text; None: that of the built-in model's tokenizer, else a third of the
    characters. Raises `ConfigError`, with the flags to type, where the columns cannot be told.
    """
    given = given or Given()
    looked_at = table.rows[:LOOKED_AT]
    chosen = chosen_columns(table.names, looked_at, given.prompt, given.answer)
    if table.tests is not None and given.answer is None and chosen.told not in {*GOLD, *PROGRAMS}:
        chosen = replace(chosen, answer=None, told="")  # no program: the tests decide
    columns = Columns(
        prompt=chosen.prompt, answer=chosen.answer, answer_from=given.answer_from or place_of_answer(table, chosen)
    )
    kept, table = _filter(table, columns)
    answers = [_one(answer) for row in table.rows if (answer := columns(row).get("answer")) is not None]
    split = _split(table, columns)
    run = {**RUN, **(SMALL_MODEL if given.model == BUILTIN else {})}
    settings: dict[str, Any] = {"model": given.model, **chosen.keys, **kept}
    if columns.answer_from and not given.answer_from:
        settings["answer_from"] = columns.answer_from
    told = _shape_told(table, columns)
    name = given.shape or told or (shape_of(answers[:LOOKED_AT]) if answers else "")
    if not name:
        return Proposal(shape="", about="", settings={**settings, **split, **run}, chosen=chosen)
    shape = SHAPES[name]
    if name == "code":
        settings |= _tested(table, columns, settings.get("prompt", "{prompt}"))
    answers = answers or [""]  # of code the tests decide
    if columns.answer_from is None:
        settings |= shape.settings
    facts = _facts(answers[:LOOKED_AT])
    says_how = columns.answer_from == VERL_ANSWER  # verl's prompts do, and ask for reasoning
    if not says_how and (not table.rows or _is_bare(columns.question(table.rows[0]))):
        settings |= _instructions(table, columns, given, shape, facts, split.get("held_out", 0.0))
    free = case_is_free(answers[:LOOKED_AT], name, given.sentence) and _EXACT in shape.rewards
    settings |= {**split, "rewards": [_fitted(reward, answers, ignore_case=free) for reward in shape.rewards]}
    if shape.accuracy is not None:
        settings["accuracy"] = shape.accuracy
    limit = max(_limit(shape, answers, count or token_counter(given.model)), REASONING if says_how else 0)
    settings |= {**run, "max_completion_length": limit}
    if given.model == BUILTIN:
        settings |= {"learning_rate": shape.learning_rate, "max_steps": steps(limit)}
    about = "the right one of its choices" if told == "choice" else shape.about.format(**facts)
    read = lines(columns, chosen, looked_at, about, shape.right.replace("included", "aside") if free else shape.right)
    if table.tests is not None and name == "code":
        is_shown = f"{{{table.tests}}}" in settings.get("prompt", "")
        read = (*read, f"tests: {{{table.tests}}}" + (", which the prompt shows" if is_shown else ""))
    return Proposal(shape=name, about=about, settings=settings, understood=read, chosen=chosen)


def _shape_told(table: Table, columns: Columns) -> str:
    """The shape that the table itself tells, without its answers; empty: none."""
    if table.tests is not None:
        return "code"
    return "choice" if CHOICES in parse(columns.prompt or "").columns else ""


def _tested(table: Table, columns: Columns, prompt: str) -> dict[str, Any]:
    """The tests under the name of the rewards, and in the prompt where a function is named in them alone."""
    if table.tests is None:
        return {}
    made = {} if table.tests == "tests" else {"columns": {"tests": table.tests}}
    if all(_names_function(str(columns.question(row)), row.get(table.tests)) for row in table.rows[:20]):
        return made
    return {"prompt": f"{prompt} It must pass these tests: {{{table.tests}}}", **made}


def _names_function(question: str, tests: Any) -> bool:
    """Whether a question writes out what assertions call, as `area(` or in backquotes; other tests name none."""
    expressions = [test["expression"] for test in read_tests(tests) or () if "expression" in test]
    called = [node.id for text in expressions[:1] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    return not called or any(f"{name}(" in question or f"`{name}`" in question for name in called)


def _is_bare(question: Any) -> bool:
    """Whether a question is a text, or a conversation without a system message of its own."""
    turns = question if isinstance(question, (list, tuple)) else ()
    return isinstance(question, str) or bool(turns and turns[0].get("role") != "system")


def place_of_answer(table: Table, chosen: Chosen) -> str | None:
    """The `answer_from` of answers that are mappings, and of conversations that end with one that no column has."""
    columns = Columns(prompt=chosen.prompt)
    told = [field_of(row, chosen.told) for row in table.rows]
    for name, way in _FIELDS.items():
        if told and all(isinstance(each, Mapping) and name in each for each in told):
            return way
    looked_at = table.rows[:LOOKED_AT] if chosen.answer is None and "answer" not in table.names else ()
    return LAST_TURN if looked_at and all(ends_with_answer(columns.question(row)) for row in looked_at) else None


def _filter(table: Table, columns: Columns) -> tuple[dict[str, Any], Table]:
    """Conditions that leave out rows with an empty question or answer, where there are such rows; and the others."""
    written = (columns.prompt or "{prompt}", columns.answer or "{answer}")
    used = (name for text in written for name in parse(text).columns)
    names = dict.fromkeys(name for name in used if column_of(name, table.names) is not None)
    full = tuple(row for row in table.rows if all(field_of(row, name) not in (None, "") for name in names))
    empty = [f"{name} != ''" for name in names if any(field_of(row, name) in (None, "") for row in table.rows)]
    return {"filter": empty} if empty else {}, replace(table, rows=full) if full else table


def _instructions(
    table: Table, columns: Columns, given: Given, shape: Shape, facts: Mapping[str, str], share: float
) -> dict[str, Any]:
    """System message and worked examples."""
    tagged = given.tagged and not shape.tagged
    labels = facts["labels"].split(", ") if shape is SHAPES["label"] else []
    form = _IN_TAGS.format("your answer") if tagged else shape.form.format(**facts)
    if labels and not tagged and set(map(plain, labels)) <= set(re.findall(r"\w+", plain(given.sentence))):
        form = ""  # the sentence names all labels already
    system = " ".join(filter(None, (_sentence(given.sentence), form)))
    made: dict[str, Any] = {"system": system.replace("{", "{{").replace("}", "}}")}
    number = NUM_EXAMPLES if shape is not SHAPES["label"] else min(MOST_EXAMPLES, max(NUM_EXAMPLES, len(labels)))
    whole = CHOICES not in table.names and columns.answer_from in (None, LAST_TURN)
    if shape.examples and whole and (examples := _examples(table, columns, share, count=number)):
        told = parse(columns.answer).columns if columns.answer else ("answer",)
        if tagged and len(told) == 1:
            [name] = told
            examples = [{**each, name: f"<answer>{each[name]}</answer>"} for each in examples]
        made["examples"] = examples
    return made


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


def _one(answer: Any) -> Any:
    """An answer of a row; the first, where several are right."""
    return answer[0] if isinstance(answer, (list, tuple)) and answer else answer


def _facts(answers: Sequence[Any]) -> dict[str, str]:
    """The pieces of the sentences about a shape."""
    read = (as_json(answer) if isinstance(answer, str) else answer for answer in answers)
    fields = dict.fromkeys(name for answer in read if isinstance(answer, Mapping) for name in answer)
    words = sorted(len(str(answer).split()) for answer in answers)[len(answers) // 2]
    return {
        "labels": ", ".join(labels_of(answers)[:MOST_LABELS]),
        "fields": ", ".join(map(str, fields)),
        "words": str(words if words < 10 else round(words, -1)),
    }


def _sentence(text: str) -> str:
    """The user's sentence with a full stop.

    >>> _sentence(" Sort the words"), _sentence("Which one?"), _sentence("")
    ('Sort the words.', 'Which one?', '')
    """
    text = " ".join(text.split())
    return text if not text or text[-1] in ".!?:" else f"{text}."


def _split(table: Table, columns: Columns) -> dict[str, Any]:
    """The share to hold out; nothing where held-out rows exist, or all rows would be on one side."""
    share = HELD_OUT_SMALL if len(table.rows) < READ else HELD_OUT
    sides = {is_held_out(columns.identity(row), share) for row in table.rows}
    return {} if table.has_test or len(sides) < 2 else {"held_out": share}


def _limit(kind: Shape, answers: Sequence[Any], count: Callable[[str], int]) -> int:
    """Completion limit in tokens: the longest answer, its end and some room, in steps of 4."""
    longest = max(count(as_text(answer)) for answer in answers) + 1
    return min(MOST_TOKENS, max(kind.least_tokens, 4 * math.ceil(longest * ROOM / 4)))


def steps(limit: int) -> int:
    """Optimizer steps of the built-in model in about five minutes of one core, for a completion limit in tokens.

    Measured on one core: 20 s and 2.1 s a token for loading, the proof and both evaluations; then 1.9 s a step and
    0.15 s a token of the limit. With half as many, tasks with many different answers were not learnt
    (benchmarks/RESULTS.md).

    >>> steps(8), steps(16), steps(32), steps(256)
    (75, 50, 25, 10)
    """
    return max(10, 5 * round((250 - 2.1 * limit) / (1.9 + 0.15 * limit) / 5))


def _fitted(reward: Any, answers: Sequence[Any], *, ignore_case: bool) -> Any:
    """`exact_match` that ignores case where it is to; `numeric_closeness` with a scale from the answers.

    The scale is a quarter of the distance between their quartiles.
    """
    if reward == _EXACT and ignore_case:
        return {**_EXACT, "args": {"ignore_case": True}}
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


def _examples(table: Table, columns: Columns, share: float, *, count: int) -> list[dict[str, Any]]:
    """Short rows that are not held out, as different as can be: few equal answers, few words in common."""
    asked = parse(columns.prompt).columns if columns.prompt else ("prompt",)
    told = parse(columns.answer).columns if columns.answer else ("answer",)
    found: dict[str, tuple[int, _Candidate]] = {}
    for row in table.rows[:LOOKED_AT]:
        example = {name: _shown(field_of(row, name), is_asked=name in asked) for name in dict.fromkeys((*asked, *told))}
        if any(value is None or isinstance(value, (list, tuple)) for value in example.values()):
            continue
        example = {name: as_text(value) for name, value in example.items()}
        size = sum(map(len, example.values()))
        question = plain(" ".join(example[name] for name in asked))
        if 0 < size <= LONGEST_EXAMPLE and not is_held_out(columns.identity(row), share):
            answer = plain(" ".join(example[name] for name in told))
            found.setdefault(question, (size, _Candidate(example, answer, frozenset(question.split()))))
    middle = sorted(size for size, _ in found.values())[len(found) // 2] if found else 0
    rest = [candidate for size, candidate in found.values() if size <= 1.5 * middle]
    taken: list[_Candidate] = []
    most = min(count, max(1, len(table.rows) // 10), len(found) - 1)  # one question is left to train on
    while rest and len(taken) < most:
        best = min(range(len(rest)), key=lambda index: (*_likeness(rest[index], taken), index))
        taken.append(rest.pop(best))
    return [dict(each.example) for each in taken]


def _shown(value: Any, *, is_asked: bool) -> Any:
    """A value for an example: of a conversation of one turn its text; a longer one is none.

    Of a list in the answer one item is as right as another; in the question all of them are asked about.
    """
    one = _one(value)
    if isinstance(one, Mapping) and {"role", "content"} <= one.keys():
        return one["content"] if len(value) == 1 else value
    return as_text(value) if is_asked and isinstance(value, (list, tuple)) else one


class _Candidate(NamedTuple):
    """A row that may become an example."""

    example: Mapping[str, str]
    answer: str
    words: frozenset[str]
    """Distinct words of the question."""


def _likeness(row: _Candidate, taken: Sequence[_Candidate]) -> tuple[int, float]:
    """The number of examples with the same answer, and the largest share of words in common with one."""
    overlaps = [len(row.words & each.words) / max(1, len(row.words | each.words)) for each in taken]
    return sum(each.answer == row.answer for each in taken), max(overlaps, default=0.0)
