"""`builtin:tiny-functions`: one-line functions to write in Python, each with tests. For rewards that run code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyFunction:
    """A function to write: its signature, what it is to return, and the same in Python for the tests."""

    name: str
    parameters: tuple[str, ...]
    returns: str
    solve: Callable[..., Any]


def _one(name: str, returns: str, solve: Callable[[int], Any]) -> TinyFunction:
    return TinyFunction(name=name, parameters=("x",), returns=returns, solve=solve)


def _two(name: str, returns: str, solve: Callable[[int, int], Any]) -> TinyFunction:
    return TinyFunction(name=name, parameters=("a", "b"), returns=returns, solve=solve)


FUNCTIONS = (
    _one("double", "two times x", lambda x: 2 * x),
    _one("triple", "three times x", lambda x: 3 * x),
    _one("square", "x times x", lambda x: x * x),
    _one("cube", "x times x times x", lambda x: x**3),
    _one("negate", "minus x", lambda x: -x),
    _one("increment", "x plus 1", lambda x: x + 1),
    _one("decrement", "x minus 1", lambda x: x - 1),
    _one("is_even", "whether x is even", lambda x: x % 2 == 0),
    _one("is_odd", "whether x is odd", lambda x: x % 2 == 1),
    _one("is_positive", "whether x is greater than 0", lambda x: x > 0),
    _one("is_zero", "whether x is 0", lambda x: x == 0),
    _one("last_digit", "the remainder of x divided by 10", lambda x: x % 10),
    _one("identity", "x", lambda x: x),
    _one("to_text", "x as a string", lambda x: str(x)),
    _two("add", "a plus b", lambda a, b: a + b),
    _two("subtract", "a minus b", lambda a, b: a - b),
    _two("multiply", "a times b", lambda a, b: a * b),
    _two("power", "a to the power of b", lambda a, b: a**b),
    _two("remainder", "the remainder of a divided by b", lambda a, b: a % b),
    _two("larger", "the larger of a and b", lambda a, b: max(a, b)),
    _two("smaller", "the smaller of a and b", lambda a, b: min(a, b)),
    _two("is_equal", "whether a and b are equal", lambda a, b: a == b),
    _two("is_greater", "whether a is greater than b", lambda a, b: a > b),
    _two("first", "a", lambda a, b: a),
    _two("as_list", "a list of a and b", lambda a, b: [a, b]),
)
HELD_OUT = ("decrement", "is_odd", "smaller", "is_zero")
PHRASES = ("Write a Python function {signature} that returns {returns}.", "{signature} returns {returns}. Write it.")
_VALUES = {1: ((0,), (1,), (4,), (7,), (12,)), 2: ((5, 2), (2, 5), (3, 3), (10, 4), (1, 7))}


def tiny_functions() -> tuple[list[Row], list[Row]]:
    """Functions to train on and others that are held out, each asked for in two ways: `prompt` and `tests`.

    `tests` is JSON text of five calls with what they return. An example in every prompt shows a fenced block.

    >>> train, held_out = tiny_functions()
    >>> len(train), len(held_out), held_out[0]["prompt"][-1]["content"]
    (42, 8, 'Write a Python function decrement(x) that returns x minus 1.')
    """
    rows: tuple[list[Row], list[Row]] = ([], [])
    for function in FUNCTIONS:
        for phrase in PHRASES:
            rows[function.name in HELD_OUT].append(
                {"prompt": _conversation(function, phrase), "tests": tests(function)}
            )
    return rows


def tests(function: TinyFunction) -> str:
    """Five calls, as JSON text: rows of a table cannot have values of several types."""
    calls = _VALUES[len(function.parameters)]
    return json.dumps([{"call": function.name, "args": args, "expected": function.solve(*args)} for args in calls])


def _conversation(function: TinyFunction, phrase: str) -> list[dict[str, str]]:
    signature = f"{function.name}({', '.join(function.parameters)})"
    return [
        {"role": "system", "content": "Answer with one Python function in a code block."},
        {"role": "user", "content": "Write a Python function half(x) that returns x divided by 2."},
        {"role": "assistant", "content": "```python\ndef half(x):\n    return x / 2\n```"},
        {"role": "user", "content": phrase.format(signature=signature, returns=function.returns)},
    ]
