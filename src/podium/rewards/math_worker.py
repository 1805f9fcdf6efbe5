"""Comparisons of formulas, inside a worker process of `podium.rewards.mathematics`.

What it reads may never end (`9^{9^{9^9}}`) or fill the memory; it is written so that it can be killed at any moment.
Loaded by path and imports nothing of podium: the rewards package is large.
"""

from __future__ import annotations

import functools
import logging
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MEMORY_BYTES = 4 << 30
"""Address space of a worker; a comparison that asks for more is lost."""
STRING_LENGTH = 500
"""Characters of a parsed formula that are sent back."""


def answer(task: Mapping[str, Any] | None, took: Callable[[int], None]) -> Iterator[dict[str, Any]]:
    """First how the gold was read, then, where it was, how the answer compares with it; for None, once ready."""
    if task is None:
        _prepare()
        yield {"ready": True}
        return
    # Without a handler this ends the process: it must not go on once its parent is gone.
    signal.setitimer(signal.ITIMER_REAL, 2 * task["timeout_seconds"] + 5)
    gold = _gold(task["gold"])
    yield {"gold": _shown(gold)}
    if gold:
        yield _compared(gold, task["text"], repairs=task["repairs"])
    signal.setitimer(signal.ITIMER_REAL, 0)


@functools.cache
def _prepare() -> None:
    logging.disable(logging.CRITICAL)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    _gold("1")  # the first one is slow


def _compared(gold: list[Any], text: str, *, repairs: bool) -> dict[str, Any]:
    from math_verify import verify

    try:
        parsed = _answer(text, repairs=repairs)
        correct = bool(verify(gold, parsed, timeout_seconds=None))
        if repairs and not correct and (meant := _meant(parsed)) != parsed:
            correct = bool(verify(_meant(gold), meant, timeout_seconds=None))
    except (Exception, MemoryError, RecursionError):  # noqa: BLE001  # it raises whatever sympy raises
        return {"correct": False, "answer": ""}
    return {"correct": correct, "answer": _shown(parsed)}


def _meant(parsed: list[Any]) -> list[Any]:
    """Formulas with the imaginary unit for `i`, exact decimals, and for an inequality the set that it describes."""
    import sympy

    def one(formula: Any) -> Any:
        exact = {number: sympy.Rational(str(number)) for number in formula.atoms(sympy.Float)}
        formula = formula.xreplace(exact | {symbol: sympy.I for symbol in formula.free_symbols if symbol.name == "i"})
        return formula.as_set() if isinstance(formula, (sympy.And, sympy.Rel)) else formula

    return [one(formula) if isinstance(formula, sympy.Basic) else formula for formula in parsed]


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
