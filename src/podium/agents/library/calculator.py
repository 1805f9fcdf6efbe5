"""`builtin:calculator`: arithmetic. The expression is parsed, never evaluated as Python; sizes are bounded."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LONGEST = 200
"""Characters of an expression."""

MOST_BITS = 4096
"""Largest size of a whole number, intermediate results included."""

_SIGNS = str.maketrans({"^": "**", "\u00d7": "*", "\u00f7": "/", "\u2212": "-"})
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def make(*, folder: Path) -> Callable[[str], str]:
    """The tool."""

    def calculator(expression: str) -> str:
        """Compute the value of an arithmetic expression.

        Args:
            expression: Numbers, + - * / // % ** and parentheses, for example "(127 + 5) * 46".

        Returns:
            The value.
        """
        if not isinstance(expression, str) or len(expression) > LONGEST:
            raise ValueError(f"the expression must be a text of at most {LONGEST} characters")
        try:
            value = _value(ast.parse(_THOUSANDS.sub("", expression.translate(_SIGNS)).strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"{expression!r} is no arithmetic expression") from None
        except ZeroDivisionError:
            raise ValueError("division by zero") from None
        return str(value) if isinstance(value, int) else f"{value:.12g}"

    return calculator


def _value(node: ast.expr) -> int | float:
    value: Any
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left = _value(node.left)
        right = _value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and left.bit_length() * abs(right) > MOST_BITS:
            raise ValueError("the power is too large")
        value = _BINARY[type(node.op)](left, right)
    else:
        raise ValueError(f"only numbers and + - * / // % ** ( ) can be computed, not {ast.unparse(node)[:40]!r}")
    if isinstance(value, complex):
        raise ValueError("the value is not a real number")
    if value.bit_length() > MOST_BITS if isinstance(value, int) else not math.isfinite(value):
        raise ValueError("the value is too large")
    return value
