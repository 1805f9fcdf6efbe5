"""The scorer of reasoning-gym inside the sandbox, which evaluates nothing but literals and formulas.

Imports nothing of Podium: its text is sent into the sandbox.
"""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Callable
from typing import Any

_FUNCTIONS = (
    "Abs acos acosh asin asinh atan atanh cbrt ceiling cos cosh cot csc exp factorial floor gcd lcm ln log sec sin "
    "sinh sqrt tan tanh pi"
)
_NAMES = frozenset([*_FUNCTIONS.split(), *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMPRTUVWXYZ"])
"""Names in a formula: functions of one number, and variables of one letter (N, O, Q and S are sympy's own)."""
_FORMULA = re.compile(r"[\w\s+\-*/^().,!]*")
_NUMBER = re.compile(r"(?<!\w)\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[^\W\d]\w*")
_LONGEST = 2000


def make_scorer(dataset: str) -> Callable[[Any, Any], float]:
    """`score_answer` of the named dataset with its default settings."""
    _leave_out_plots()
    import reasoning_gym
    import sympy

    scorer: Callable[[Any, Any], float] = reasoning_gym.get_score_answer_fn(dataset)
    module: Any = sys.modules[scorer.__self__.__class__.__module__]  # type: ignore[attr-defined]
    parse_expr = sympy.parse_expr

    trusted: set[str] = set()
    """Texts of the row itself."""

    def parse_formula(text: str, *args: Any, **kwargs: Any) -> Any:
        return parse_expr(text if text in trusted else checked_formula(text), *args, **kwargs)

    sympy.parse_expr = parse_formula
    if getattr(module, "parse_expr", None) is parse_expr:
        module.parse_expr = parse_formula
    if dataset in LITERALS:
        module.eval = ast.literal_eval

    def score(answer: Any, entry: dict[str, Any]) -> float:
        if re.fullmatch(r"[\s(+-]*(?:nan|inf|infinity)[\w\s*+)-]*", str(answer), re.IGNORECASE):
            return 0.0
        if dataset in TUPLES:  # JSON made lists of what these compare with tuples
            entry = {**entry, "metadata": _tuples(entry["metadata"])}
        trusted.clear()
        trusted.add(str(entry["answer"]))
        trusted.update(value for value in entry["metadata"].values() if isinstance(value, str))
        return scorer(answer, entry)

    return score


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


_PLOTS = (
    *("matplotlib", "matplotlib.animation", "matplotlib.collections", "matplotlib.pyplot"),
    *("mpl_toolkits", "mpl_toolkits.mplot3d"),
)


def _leave_out_plots() -> None:
    """One task imports matplotlib by way of a library, which needs a folder to write to; no scorer draws."""
    for name in _PLOTS:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = lambda attribute: object  # type: ignore[method-assign]
        sys.modules[name] = module


TUPLES = ("arc_agi", "rearc")
"""Scorers that compare an answer with tuples."""

LITERALS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Scorers that evaluate an answer for a list in it."""


def checked_formula(text: str) -> str:
    """The text, where it is arithmetic of numbers, variables and functions. Raises `ValueError` for anything else.

    >>> checked_formula("2*x**3 + sin(x)/4 + C")
    '2*x**3 + sin(x)/4 + C'
    >>> checked_formula("open(x)")
    Traceback (most recent call last):
    ValueError: not a formula: open
    """
    strange = [word for word in _WORD.findall(_NUMBER.sub(" ", text)) if word not in _NAMES]
    if len(text) > _LONGEST or strange or not _FORMULA.fullmatch(text) or re.search(r"\.\s*[^\W\d]", text):
        raise ValueError(f"not a formula: {strange[0] if strange else text[:80]}")
    return text
