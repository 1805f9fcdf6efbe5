"""Values of Python literals, and of small computations with them, in the text of a test. Nothing else is evaluated."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, SyntaxError, MemoryError, RecursionError)
"""Errors of text that cannot be read, or is too large to be."""

_BUILT: Mapping[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (set, frozenset, tuple, list, dict, float, range)},
    "sorted": sorted,
}
"""Functions that an expected value may be made with."""
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
}
_MOST = 4_300
"""Digits of a number, and items of a value at all depths, that may come out of a computation."""


def constant(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal, or of one in `set(...)` and the like, in a tuple of one; None for anything else."""
    try:
        return (_value(node),)
    except UNREADABLE:
        return None


def _value(node: ast.expr) -> Any:
    """`10**9 + 7`, `[0] * 5`, `list(range(3))`. Raises `ValueError` for what has other parts, or is large."""
    match node:
        case ast.Call(func=ast.Name(name), args=arguments, keywords=[]) if name in _BUILT:
            given = [_value(each) for each in arguments]
            if name == "range":
                _bounded(max(abs(each) for each in given))
            return _BUILT[name](*given)
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return _DISPLAYS[type(node)](map(_value, parts))
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.BinOp(left=left, op=joined, right=right) if type(joined) in _OPERATORS:
            one = _value(left)
            other = _value(right)
            if isinstance(joined, ast.Pow):
                _bounded(_size(one) * abs(other))
            elif isinstance(joined, ast.Mult) and not isinstance(one, int | float | complex):
                _bounded(_size(one) * other)
            elif isinstance(joined, ast.Mult) and not isinstance(other, int | float | complex):
                _bounded(_size(other) * one)
            return _OPERATORS[type(joined)](one, other)
    return ast.literal_eval(node)


_DISPLAYS: Mapping[type, Callable[..., Any]] = {ast.List: list, ast.Tuple: tuple, ast.Set: set}


def _bounded(size: float) -> None:
    if size > _MOST:
        raise ValueError(size)


def _size(value: Any) -> int:
    """Digits of a number, characters of a text, items of anything else with the sizes of those."""
    if isinstance(value, Mapping):
        return 1 + sum(_size(key) + _size(each) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return 1 + sum(map(_size, value))
    return 1 + len(value if isinstance(value, str | bytes) else str(value))
