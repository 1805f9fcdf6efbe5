"""Rewards for the right answer: 1 or 0, and None (no opinion) where a row has no answer to compare with.

Each takes plain and chat completions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from podium.rewards.text import as_chat, tagged, text_of

_NUMBER = re.compile(r"(?<!\d)[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")


def answer_correct(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where the text inside the last `<answer>` tags is the `answer` column, character for character.

    White space around both is left out of the comparison. Numbers are compared as they are written: `07` is not `7`
    (`numeric_match` compares values).

    >>> answer_correct(["<answer>7</answer>", "<answer>17</answer>", "7"], answer=["7", "7", "7"])
    [1.0, 0.0, 0.0]
    """
    return _compare(lambda text: tagged(text, "answer"), completions, answer)


def exact_match(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where the whole completion is the `answer` column, white space around both aside.

    >>> exact_match(["Paris", "It is Paris"], answer=["Paris", "Paris"])
    [1.0, 0.0]
    """
    return _compare(str.strip, completions, answer)


def numeric_match(completions: Sequence[Any], answer: Sequence[Any], *, tolerance: float = 1e-6) -> list[float | None]:
    """1 where the number in the completion is the number in the `answer` column.

    Read is the last number inside the last `<answer>` tags, or of the whole text where there are no tags; of a text in
    the `answer` column also the last number, so that GSM8K's solutions can stay as they are. Commas between digits are
    ignored. The difference may be `tolerance` times the larger of 1 and the answer. None where the column has no
    number.

    >>> numeric_match(["It is 1,000.0", "<answer>41</answer> of 42"], answer=["1000", 42])
    [1.0, 0.0]
    >>> numeric_match(["about 3.1"], answer=["3.14159"], tolerance=0.02)
    [1.0]
    """
    return [_close(text_of(each), gold, tolerance) for each, gold in zip(completions, answer, strict=True)]


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: Callable[[str, list[Any]], None] | None = None
) -> list[float | None]:
    r"""TRL's `accuracy_reward`: 1 where the LaTeX in the completion equals the `solution` column, by math-verify.

    None where the solution cannot be parsed. TRL's takes chat completions only, this one plain text too.

    >>> accuracy_reward([r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"], solution=[r"\frac{1}{3}", r"\frac{1}{3}"])
    [1.0, 0.0]
    """
    from trl.rewards import accuracy_reward as verified

    return verified([as_chat(each) for each in completions], solution, log_extra=log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: list[str] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
) -> list[float | None]:
    r"""TRL's `reasoning_accuracy_reward`: `accuracy_reward` of what follows `</think>`; 0 where nothing does.

    >>> reasoning_accuracy_reward([r"<think>so</think> \boxed{4}", r"\boxed{4}"], solution=["4", "4"])
    [1.0, 0.0]
    """
    from trl.rewards import reasoning_accuracy_reward as verified

    chats = [as_chat(each) for each in completions]
    return verified(chats, solution, reasoning_delimiters=reasoning_delimiters, log_extra=log_extra)


def _compare(
    read: Callable[[str], str | None], completions: Sequence[Any], answer: Sequence[Any]
) -> list[float | None]:
    return [
        None if gold is None else float(read(text_of(each)) == str(gold).strip())
        for each, gold in zip(completions, answer, strict=True)
    ]


def _close(text: str, gold: Any, tolerance: float) -> float | None:
    expected = _last_number(str(gold))
    if expected is None:
        return None
    inside = tagged(text, "answer")
    given = _last_number(text if inside is None else inside)
    return float(given is not None and abs(given - expected) <= tolerance * max(1.0, abs(expected)))


def _last_number(text: str) -> float | None:
    """
    >>> _last_number("5-3 is 2, not -1,000.5e1"), _last_number("none")
    (-10005.0, None)
    """
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
