"""Rewards for the right answer: 1 or 0 (by degrees in one), and None where a row has no answer to compare with.

Each takes plain and chat completions. `extract` finds the final answer in a completion; the ways are listed
in `podium.data.extract`. Where the `answer` column holds a list, each of its entries is right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from podium.data.extract import Extract, extractor, last_number, tagged
from podium.errors import ConfigError
from podium.rewards.text import text_of


def answer_correct(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where the text inside the last `<answer>` tags is the `answer` column, character for character.

    White space around both is left out of the comparison. Numbers are compared as they are written: `07` is not `7`
    (`numeric_match` compares values).

    >>> answer_correct(["<answer>7</answer>", "<answer>17</answer>", "7"], answer=["7", "7", "7"])
    [1.0, 0.0, 0.0]
    """
    return _each(completions, answer, lambda text: tagged(text, "answer"), _same)


def exact_match(
    completions: Sequence[Any], answer: Sequence[Any], *, extract: Extract = "text", ignore_case: bool = False
) -> list[float | None]:
    r"""1 where the final answer (by default the whole completion) is the `answer` column, white space around it aside.

    >>> exact_match(["Paris", "It is Paris"], answer=["Paris", "Paris"])
    [1.0, 0.0]
    >>> exact_match([r"It is \boxed{paris}"], answer=[["Paris", "City of Light"]], extract="boxed", ignore_case=True)
    [1.0]
    """
    same = (lambda given, gold: _same(given.casefold(), str(gold).casefold())) if ignore_case else _same
    return _each(completions, answer, extractor(extract), same)


def numeric_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    tolerance: float | None = None,
    extract: Extract = ("tag:answer", "text"),
) -> list[float | None]:
    """1 where the number in the completion is the number in the `answer` column.

    Read is the last number of the final answer: by default of what the last `<answer>` tags hold, or of the whole text
    where there are no tags. Of a text in the `answer` column it is also the last number, so that GSM8K's solutions can
    stay as they are. Commas between digits are ignored, and 7% is 7 and 0.07. Whole numbers must be equal; others may
    differ by a millionth. A `tolerance` is for both, and is multiplied by the larger of 1 and the answer. Fractions are
    read as two numbers (`math_match` knows them). None where the column has no number.

    >>> numeric_match(["It is 1,000.0", "<answer>41</answer> of 42", "12345678"], answer=["1000", 42, "12345679"])
    [1.0, 0.0, 0.0]
    >>> numeric_match(["about 3.1"], answer=["3.14159"], tolerance=0.02)
    [1.0]
    >>> numeric_match(["5 + 2\\n#### 7", "5 + 2 = 7"], answer=["7", "7"], extract="####")
    [1.0, 0.0]
    """
    if tolerance is not None and not tolerance >= 0:
        raise ConfigError(f"`tolerance` must be 0 or more; it is {tolerance}.")

    def close(given: str, gold: Any) -> bool | None:
        expected, number = last_number(str(gold)), last_number(given)
        if expected is None:
            return None
        if number is None:
            return False
        percent = re.search(r"[0-9.]\s*\\?%\W*\Z", given) is not None and "%" not in str(gold)
        return _close(number, expected, tolerance) or (percent and _close(number, expected, tolerance, shift=-2))

    return _each(completions, answer, extractor(extract), close)


def numeric_closeness(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    scale: float = 1.0,
    extract: Extract = ("tag:answer", "text"),
) -> list[float | None]:
    """How near the number in the completion is to that in the `answer` column: 1 / (1 + error / `scale`).

    Partial credit where groups would otherwise be all wrong: 1 for the right number, one half at `scale` away from it,
    0 where there is no number. Numbers are read as `numeric_match` reads them. Keep a reward for the right answer
    beside it, of a larger weight, or the policy may settle for being near; where a form is to be learnt, too, read
    inside it (`extract: tag:answer`), or answers without it are worth as much.

    >>> numeric_closeness(["<answer>42</answer>", "about 43", "39", "many"], answer=["42"] * 4)
    [1.0, 0.5, 0.25, 0.0]
    """
    if not scale > 0:
        raise ConfigError(f"`scale` must be above 0; it is {scale}.")

    def near(given: str, gold: Any) -> float | None:
        expected, number = last_number(str(gold)), last_number(given)
        if expected is None or not math.isfinite(float(expected)):
            return None
        return 0.0 if number is None else 1 / (1 + abs(float(number) - float(expected)) / scale)

    return _each(completions, answer, extractor(extract), near)


def multiple_choice(
    completions: Sequence[Any],
    answer: Sequence[Any],
    choices: Sequence[Any] | None = None,
    *,
    extract: Extract = ("tag:answer", "boxed", r"regex:(?i)\b(?:answer|choice|option)(?: is|:)\s*([^\n]*)", "text"),
) -> list[float | None]:
    r"""1 where the completion names the right choice, and only that one: `B`, `(B)`, `B.`, `B) Paris`, or its text.

    The `answer` column is a letter, the number of a choice from 0 on, or a choice's text. The `choices` column, where
    there is one, is a list of texts, or a mapping with `text` and `label`, as ARC has it. None where the `answer` is
    none of the choices.

    >>> multiple_choice(["The answer is (B).", "A or B", "B) Paris", "<answer>C</answer>"], answer=["B", "B", 1, "B"])
    [1.0, 0.0, 1.0, 0.0]
    >>> multiple_choice(["paris", "Rome"], answer=[0, 0], choices=[["Paris", "Rome"]] * 2)
    [1.0, 0.0]
    """
    take, scores = extractor(extract), list[float | None]()
    offered = [None] * len(completions) if choices is None else choices
    for each, gold, own in zip(completions, answer, offered, strict=True):
        options, given = _labelled(own), take(text_of(each))
        right = _label_of_gold(gold, options)
        named = None if given is None else _label_of_text(given, options)
        scores.append(None if right is None else float(named == right))
    return scores


def _each(
    completions: Sequence[Any],
    answer: Sequence[Any],
    take: Callable[[str], str | None],
    right: Callable[[str, Any], float | None],
) -> list[float | None]:
    """`right` of what `take` finds; 0 where it finds nothing, None where there is no gold to compare with."""
    scores = []
    for each, gold in zip(completions, answer, strict=True):
        found = take(text_of(each))
        verdicts = [right(_NOTHING if found is None else found, one) for one in golds_of(gold)]
        scores.append(max((float(verdict) for verdict in verdicts if verdict is not None), default=None))
    return scores


_NOTHING = "\0no answer\0"
"""Is no gold: compared like an answer, so that what cannot be compared at all is None with and without one."""


def golds_of(gold: Any) -> list[Any]:
    """The right answers of a row: one, or those of a list."""
    return [one for one in (gold if isinstance(gold, (list, tuple)) else [gold]) if one is not None]


def _same(given: str, gold: Any) -> bool:
    return given == str(gold).strip()


def _close(number: str, expected: str, tolerance: float | None, *, shift: int = 0) -> bool:
    """Whether a number times ten to `shift` is the expected one; without a tolerance whole numbers must be equal."""
    given, right = _decimal(number).scaleb(shift), _decimal(expected)
    if given == right:
        return True
    if tolerance is None and right == right.to_integral_value():
        return False
    error = abs(float(given) - float(right))
    return error <= (1e-6 if tolerance is None else tolerance) * max(1.0, abs(float(right)))


def _decimal(number: str) -> Decimal:
    """Exactly what is written; NaN for an exponent that is beyond all use."""
    try:
        return Decimal(number)
    except ArithmeticError:
        return Decimal("nan")


# --- choices ---------------------------------------------------------------------------------------------------------

_MARKED = re.compile(r"[\s*_$(\[]*([A-Za-z]|[0-9]{1,2})(?:[\s*_$)\].:]*$|[*_]*[)\].:]+[*_]*\s(.*))", re.DOTALL)
"""A label alone, or one with a mark behind it and then anything."""
_OTHER_LABEL = re.compile(
    r"(?<![A-Za-z0-9])[(\[]?([A-Z])[)\].:](?!\w)|(?<![A-Za-z0-9])([a-z])[)\]](?!\w)|\b(?:or|and)\s+\W{0,3}([A-HJ-Z])\b(?!')"
)
_DENIED = re.compile(r"\W*(?:is|are)?\s*(?:not|wrong|incorrect|false)\b", re.I)
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textrm)\{([^{}]*)\}")


def _labelled(options: Any) -> dict[str, str]:
    """Labels with the texts that they stand for; without any texts the letters alone."""
    if options is None:
        return {chr(ord("A") + index): "" for index in range(26)}
    if isinstance(options, Mapping):
        return {str(label).upper(): str(text) for label, text in zip(options["label"], options["text"], strict=True)}
    return {chr(ord("A") + index): str(text) for index, text in enumerate(options)}


def _label_of_gold(gold: Any, options: Mapping[str, str]) -> str | None:
    if isinstance(gold, int) and not isinstance(gold, bool):
        return list(options)[gold] if 0 <= gold < len(options) else None
    label = str(gold).strip().upper()
    return label if label in options else _by_text(str(gold), options)


def _label_of_text(given: str, options: Mapping[str, str]) -> str | None:
    given = _WRAPPED.sub(r"\1", given).strip("$ ")
    by_text = _by_text(given, options)
    match = _MARKED.match(given)
    if by_text is not None or match is None:
        return by_text
    named, rest = match[1].upper(), match[2] or ""
    others = {"".join(found).upper() for found in _OTHER_LABEL.findall(rest)} & options.keys() - {named}
    return named if named in options and not others and not _DENIED.match(rest) else None


def _by_text(given: str, options: Mapping[str, str]) -> str | None:
    plain = given.strip(" \t\n*_").rstrip(".").strip("*_").casefold()
    labels = [label for label, text in options.items() if plain and text.strip().rstrip(".").casefold() == plain]
    return labels[0] if len(labels) == 1 else None
