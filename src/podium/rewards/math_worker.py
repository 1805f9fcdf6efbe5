"""A process that compares formulas, one line of JSON in, two out. Run by `podium.rewards.math_pool`, by path.

What it reads may never end (`9^{9^{9^9}}`) or fill the memory; it is written so that it can be killed at any moment. It
imports nothing of podium, is given no secrets, and ends by itself where whoever started it is gone.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES = 4 << 30
"""Address space of a worker; a comparison that asks for more is lost."""
STRING_LENGTH = 500
"""Characters of a parsed formula that are sent back."""


def main() -> None:
    """Answers until the input ends. First line of an answer: that the gold was read; second: the comparison."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no reply
    logging.disable(logging.CRITICAL)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    _gold("1")  # the first one is slow
    _say(replies, {"ready": True})
    for line in sys.stdin:
        task = json.loads(line)
        # Without a handler this ends the process: it must not go on where nobody is left to kill it.
        signal.setitimer(signal.ITIMER_REAL, 2 * task["timeout_seconds"] + 5)
        gold = _gold(task["gold"])
        _say(replies, {"gold": _shown(gold)})
        if gold:
            _say(replies, _compared(gold, task["text"], repairs=task["repairs"]))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _compared(gold: list[Any], text: str, *, repairs: bool) -> dict[str, Any]:
    from math_verify import verify

    try:
        answer = _answer(text, repairs=repairs)
        correct = bool(verify(gold, answer, timeout_seconds=None))
    except (Exception, MemoryError, RecursionError):  # noqa: BLE001  # it raises whatever sympy raises
        return {"correct": False, "answer": ""}
    return {"correct": correct, "answer": _shown(answer)}


@functools.lru_cache(maxsize=256)
def _gold(text: str) -> list[Any]:
    """The formulas of a right answer; none where it cannot be read. All completions of a prompt have the same.

    It is compared once with a plain number: one that cannot be worked out at all is found here, before any answer.
    """
    from math_verify import parse, verify

    try:
        gold = parse(text, parsing_timeout=None)
        verify(gold, _answer(r"\boxed{0.5}"), timeout_seconds=None)
        return gold
    except (Exception, MemoryError, RecursionError):  # noqa: BLE001
        return []


def _answer(text: str, *, repairs: bool = False) -> list[Any]:
    r"""The formulas of a completion: LaTeX between dollars, or in `\boxed{}`, which is tried first."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True, malformed_operators=repairs),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    return parse(text, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=None)


def _shown(parsed: list[Any]) -> str:
    try:
        return str(parsed)[:STRING_LENGTH] if parsed else ""
    except (ValueError, MemoryError, RecursionError):  # integers of more digits than Python writes
        return "[too large to show]"


def _say(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
