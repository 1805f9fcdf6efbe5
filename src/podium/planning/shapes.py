"""Shapes of answers: how each is told, and the instruction, rewards and settings that follow from it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.data.query import as_json
from podium.data.selection import plain

MOST_LABELS = 12
"""Distinct answers up to which they are labels, if each occurs `ROWS_PER_LABEL` times on average."""
ROWS_PER_LABEL = 4
LONG = 240
"""Characters from which an answer is long: words in common are rewarded, and equality never occurs."""
REASONING = 256
"""Tokens that an answer with its reasoning has at least."""
EXACT_MATCH: Mapping[str, Any] = {"name": "exact_match", "weight": 2}
CODE_STAGES: Mapping[str, Any] = {
    "name": "code_stages",
    "args": {"extract": "fence", "timeout": 1, "sandbox": "auto"},
}
TAGS = "Put the final answer inside tags, like this: <answer>{}</answer>."
_EQUAL = "equal to the answer, capitals included; white space around it does not count"
_DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}( 00:00:00)?|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d\d)|"
    r"(\d{1,2}(st|nd|rd|th|\.)? )?(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.? "
    r"(\d{1,2}(st|nd|rd|th)?,? )?\d{4}",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+]?(\d+/\d+|(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)", re.IGNORECASE)
_FORMULA = re.compile(r"\\([dt]?frac|sqrt|pi|text|left|circ|infty|cdot|times|begin)\b")
_CHOICE = re.compile(r"\(?[A-Ea-e][).]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of answer, and the settings for it."""

    fits: Callable[[Sequence[Any]], bool]
    """Whether the answers of a table have this shape; each is a text, a number or a mapping."""
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


def is_object(answer: Any) -> bool:
    """Whether an answer is a mapping, or a JSON object."""
    return isinstance(as_json(answer) if isinstance(answer, str) else answer, Mapping)


def _is_number(answer: Any) -> bool:
    """Whether an answer is a finite number alone, a currency or per cent sign aside.

    >>> [_is_number(answer) for answer in (7, "1,234.5", "$7", "\u22122", "12,50 €", "1/4", "1e-3")]
    [True, True, True, True, True, True, True]
    >>> [_is_number(answer) for answer in ("4 apples", "nan", "July 4", True, "02139")]
    [False, False, False, False, False]
    """
    written = str(answer).strip("$%€£¥₹ \n").replace("\u2212", "-")
    is_code = isinstance(answer, bool) or re.match(r"0\d", written) is not None  # a zero in front has a meaning
    return not is_code and _NUMBER.fullmatch(written.replace(",", "")) is not None


def _is_list(answer: Any) -> bool:
    """Whether an answer is a JSON list, or short items with commas between them.

    >>> [_is_list(text) for text in ("duck, goat", "[1, 2]", "red", "No, I have never been to that city in my life.")]
    [True, True, False, False]
    """
    text = str(answer).strip()
    if text.startswith("["):
        return isinstance(as_json(text), list)
    items = [item.strip() for item in re.split(r"[,;]", text)]
    return len(items) > 1 and all(item and len(item.split()) <= 4 for item in items) and not text.endswith((".", "!"))


def labels_of(answers: Sequence[Any]) -> list[str]:
    """The distinct answers, white space and capitals aside, each as it is most often written, the commonest first.

    >>> labels_of(["yes", "no", "No", "no ", "yes", "no"])
    ['no', 'yes']
    """
    spelled = Counter(str(answer).strip() for answer in answers)
    counts: Counter[str] = Counter()
    for text, count in spelled.items():
        counts[plain(text)] += count
    first = {plain(text): text for text, _ in reversed(spelled.most_common())}
    return [first[key] for key, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def _are_labels(answers: Sequence[Any]) -> bool:
    labels = labels_of(answers)
    few = 1 < len(labels) <= min(MOST_LABELS, len(answers) // ROWS_PER_LABEL)
    return few and all(len(label) <= 40 for label in labels)


def _count_long(answers: Sequence[Any]) -> int:
    return sum(len(str(answer)) > LONG for answer in answers)


def _count(pattern: re.Pattern[str], answers: Sequence[Any]) -> int:
    return sum(pattern.fullmatch(str(answer).strip()) is not None for answer in answers)


def _are_formulas(answers: Sequence[Any]) -> bool:
    formulas = sum(_FORMULA.search(str(answer)) is not None for answer in answers)
    return formulas >= len(answers) / 10 and not _count_long(answers)


SHAPES: Mapping[str, Shape] = {
    "worked": Shape(
        fits=lambda answers: all("####" in str(answer) for answer in answers),
        about="a solution that ends with `####` and the number",
        form="Work it out step by step. " + TAGS.format("7"),
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
        fits=lambda answers: all(r"\boxed{" in str(answer) for answer in answers),
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
        fits=_are_formulas,
        about="a formula in LaTeX",
        form=r"Work it out step by step, and put the final answer inside \boxed{{}}.",
        rewards=({"name": "math_match", "weight": 2},),
        accuracy="math_match",
        right="the same formula as the answer",
        least_tokens=REASONING,
        examples=False,
    ),
    "json": Shape(
        fits=lambda answers: all(map(is_object, answers)),
        about="a JSON object with the fields {fields}",
        form="Answer with one JSON object with the fields {fields}, and nothing else.",
        rewards=({"name": "json_match", "weight": 2}, "json_format"),
        accuracy="json_match",
        right="the share of the fields that are equal to the answer's",
    ),
    "number": Shape(
        fits=lambda answers: all(map(_is_number, answers)),
        about="a number",
        form="Answer with the number alone.",
        rewards=({"name": "numeric_match", "weight": 2}, "numeric_closeness"),
        accuracy="numeric_match",
        right="the same number as the answer",
        learning_rate=1e-5,
    ),
    "choice": Shape(
        fits=lambda answers: _count(_CHOICE, answers) == len(answers) and len(labels_of(answers)) > 1,
        about="the letter of a choice ({labels})",
        form="Answer with the letter alone.",
        rewards=({"name": "multiple_choice", "weight": 2},),
        accuracy="multiple_choice",
        right="the same letter as the answer, and no other",
        learning_rate=1e-5,
    ),
    "date": Shape(
        fits=lambda answers: _count(_DATE, answers) == len(answers),
        about="a date",
        form="Answer with the date alone.",
        rewards=(EXACT_MATCH, "text_similarity"),
        accuracy="exact_match",
        right=_EQUAL,
    ),
    "label": Shape(
        fits=_are_labels,
        about="one of few labels ({labels})",
        form="Answer with one of these alone: {labels}.",
        rewards=(EXACT_MATCH,),
        accuracy="exact_match",
        right=_EQUAL,
        learning_rate=1e-5,
    ),
    "list": Shape(
        fits=lambda answers: all(map(_is_list, answers)),
        about="a list",
        form="Answer with the list alone.",
        rewards=(EXACT_MATCH, {"name": "text_similarity", "args": {"unit": "word"}}),
        accuracy="exact_match",
        right=_EQUAL,
    ),
    "text": Shape(
        fits=lambda answers: _count_long(answers) <= len(answers) // 10,
        about="a short text",
        form="Write the answer alone, without an explanation.",
        rewards=(EXACT_MATCH, "text_similarity"),
        accuracy="exact_match",
        right=_EQUAL,
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
    "length": Shape(
        fits=lambda answers: False,  # the task says it: the number is a setting, and a reward of one's own decides
        about="a text of the length that the number asks for",
        form="",
        rewards=({"function": "rewards.py:near", "weight": 0.5},),
        accuracy="right",
        right="what `right` in rewards.py says, a function of yours",
        least_tokens=96,
        examples=False,
    ),
    "code": Shape(
        fits=lambda answers: False,  # a column of tests says it
        about="Python code that passes tests",
        form="Answer with Python code in one code block: the function, or a program that reads its input and prints.",
        rewards=(CODE_STAGES,),
        accuracy="code_stages",
        right="passing the tests",
        least_tokens=128,
        examples=False,
    ),
}
"""By name, in the order in which they are tried."""


def shape_of(answers: Sequence[Any]) -> str:
    r"""The name of the first shape that fits all answers.

    >>> answers = (["7", "-1.5"], ["B", "A"], ["2024-01-31"], ["a, b", "c, d"], ["240 minutes"])
    >>> [shape_of(some) for some in answers]
    ['number', 'choice', 'date', 'list', 'text']
    >>> shape_of([r"\frac{1}{2}", "6 - 5i", "p", r"3\sqrt{13}"])
    'formula'
    >>> [shape_of(some) for some in (["yes", "no"] * 9, ['{"a": 1}'], ["so #### 7"], ["word " * 80])]
    ['label', 'json', 'worked', 'long']
    """
    return next(name for name, shape in SHAPES.items() if shape.fits(answers))


def written_differently(labels: Sequence[Any]) -> bool:
    """Whether the same label is written with other capitals, so that these cannot decide.

    >>> written_differently(["Yes", "yes", "no"]), written_differently(["yes", "no"])
    (True, False)
    """
    spelled = {str(label).strip() for label in labels}
    return len({text.casefold() for text in spelled}) < len(spelled)
