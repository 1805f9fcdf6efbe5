r"""Rewards for the right formula, whichever way it is written: `\frac{1}{2}`, `0.5` and `1/2` are the same.

By math-verify, in processes that can be killed (`podium.rewards.math_pool`): a completion that takes the
computer algebra more than five seconds is wrong. Each takes plain and chat completions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from podium.data.extract import Extract, extractor
from podium.rewards.math_pool import Formula, Verdict, compare
from podium.rewards.text import text_of

LogExtra = Callable[[str, list[Any]], None]


def math_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    log_extra: LogExtra | None = None,
    *,
    extract: Extract = "boxed",
    timeout_seconds: float = 5.0,
) -> list[float | None]:
    r"""1 where the final answer is the same formula as the `answer` column, by math-verify.

    `extract` names the place of the final answer (`podium.data.extract`). 0 for a completion without one, for one that
    takes longer than `timeout_seconds`, has another unit, or is a chain of different numbers. The column's answer is
    what is in `\boxed{}` or follows `####`, else all of it. None for a column that cannot be read.

    >>> math_match([r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{2}", "1/2"], answer=[r"\frac{1}{2}"] * 4)
    [1.0, 1.0, 0.0, 0.0]
    >>> math_match(["<answer>$x + 1$</answer>"], answer=["1 + x"], extract="tag")
    [1.0]
    """
    take = extractor(extract)
    golds = [None if each is None else _as_boxed(_gold_of(str(each))) for each in answer]
    pairs = zip([_as_boxed(take(text_of(each))) for each in completions], golds, strict=True)
    texts = [None if text and gold and _cannot_be(text, gold) else text for text, gold in pairs]
    return _scores(texts, golds, timeout_seconds, log_extra, shown=answer, repairs=True)


_gold_of = extractor(["boxed", "####", "text"])


def _as_boxed(formula: str | None) -> str | None:
    """In the form that math-verify looks for first, with or without dollars around it, numbers in plain digits."""
    plain = _SPACED.sub("", (formula or "").strip("$ "))
    plain = _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", plain)
    return rf"\boxed{{{plain}}}" if plain else None


_SPACED = re.compile(r"(?<=\d)\\[,!;: ](?=\d{3}(?!\d))")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)")
_UNITS = (
    "nm|mm|cm|dm|m|km|ms|s|min|h|mg|g|kg|t|ml|l|N|kN|J|kJ|W|kW|MW|V|mV|kV|A|mA|K|Hz|kHz|MHz|GHz|Pa|kPa|MPa|in|ft|yd|mi"
)
_UNIT = re.compile(rf"\d[\s~\\,]*(?:\\(?:text|mathrm|textrm)\{{\s*)?({_UNITS})(?:\s*\}})?((?:\^\{{?\d\}}?)?)\}}$")


def _cannot_be(text: str, gold: str) -> bool:
    """Whether it is wrong though math-verify passes it: another unit, or a chain with only the last number right."""
    units = [found[1] + found[2].strip("^{}") for each in (text, gold) if (found := _UNIT.search(each))]
    chain = re.sub(r"^\\boxed\{|\}$", "", text).split("=")
    numbers = {float(part) for part in chain if re.fullmatch(r"\s*[-+]?\d+(?:\.\d+)?\s*", part)}
    return len(set(units)) > 1 or len(numbers) > 1


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: LogExtra | None = None
) -> list[float | None]:
    r"""TRL's `accuracy_reward`: 1 where the LaTeX in the completion equals the `solution` column, by math-verify.

    None where the solution cannot be parsed. TRL's takes chat completions only, this one plain text too.

    >>> accuracy_reward([r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"], solution=[r"\frac{1}{3}", r"\frac{1}{3}"])
    [1.0, 0.0]
    """
    return _scores([text_of(each) for each in completions], solution, 5.0, log_extra, shown=solution)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    log_extra: LogExtra | None = None,
    *,
    reasoning_delimiters: Sequence[str] | None = None,
) -> list[float | None]:
    r"""TRL's `reasoning_accuracy_reward`: `accuracy_reward` of what follows `</think>`; 0 where nothing does.

    `reasoning_delimiters` are the marks after which the final answer may stand; the first of them that there is counts.

    >>> reasoning_accuracy_reward([r"<think>so</think> \boxed{4}", r"\boxed{4}"], solution=["4", "4"])
    [1.0, 0.0]
    """
    marks = ["</think>"] if reasoning_delimiters is None else list(reasoning_delimiters)
    given = [text_of(each) for each in completions]
    texts = [next((text.split(mark)[-1] for mark in marks if mark in text), None) for text in given]
    return _scores(texts, solution, 5.0, log_extra, shown=solution, without="[incomplete reasoning]")


def _scores(
    texts: Sequence[str | None],
    golds: Sequence[str | None],
    timeout_seconds: float,
    log_extra: LogExtra | None,
    shown: Sequence[Any],
    without: str = "[no answer]",
    *,
    repairs: bool = False,
) -> list[float | None]:
    """0 where there is no text (`without` says so in the table), None where there is no gold that can be read."""
    pairs = list(zip(texts, golds, strict=True))
    formulas = [
        Formula(gold=gold, text=text, repairs=repairs) for text, gold in pairs if text is not None and gold is not None
    ]
    verdicts = iter(compare(formulas, timeout_seconds=timeout_seconds))
    found = [
        (None, "[unparseable]", "[skipped]") if gold is None
        else (0.0, without, without) if text is None
        else _row(next(verdicts))
        for text, gold in pairs
    ]  # fmt: skip
    if log_extra is not None:
        log_extra("solution", list(shown))
        log_extra("gold_parsed", [gold for _, gold, _ in found])
        log_extra("answer_parsed", [answer for _, _, answer in found])
    return [score for score, _, _ in found]


def _row(verdict: Verdict) -> tuple[float | None, str, str]:
    """The reward, and how gold and answer were understood."""
    if verdict.correct is None:
        return None, "[unparseable]", "[skipped]"
    nothing = "[took too long]" if verdict.timed_out else "[unparseable]"
    return float(verdict.correct), verdict.gold, verdict.answer or nothing
