"""Whether a test was passed, decided outside the sandbox from plain data alone.

Types count: `True` is not 1, 1 is not 1.0, and lists of other lengths are other lists. Floats may differ by one part
in a thousand million. Tuples come back as lists. What is not strict JSON (NaN, keys given twice) passes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from podium.isolation.sandbox.process import Result

DEPTH = 60
TOLERANCE = 1e-9


def passed(test: Mapping[str, Any], result: Result) -> bool:
    """Whether the outcome is what the test expects: the same standard output, or the same value.

    Of standard output, white space at the end of lines and of the whole is left out.

    >>> passed({"stdin": "3", "stdout": "9"}, Result(outcome="ok", stdout="9\\n"))
    True
    >>> passed({"stdin": "3", "stdout": "9\\n16"}, Result(outcome="ok", stdout="9\\n"))
    False
    >>> passed({"call": "f", "expected": 1}, Result(outcome="ok", value="true"))
    False
    """
    if result.outcome != "ok":
        return False
    if "call" not in test:
        return lines(result.stdout) == lines(str(test["stdout"]))
    try:
        value = json.loads(result.value or "", parse_constant=_refuse, object_pairs_hook=_distinct)
        return same(value, test["expected"])
    except (ValueError, RecursionError):
        return False


def lines(text: str) -> list[str]:
    """
    >>> lines("a  \\nb\\n\\n") == lines("a\\nb")
    True
    """
    return [line.rstrip() for line in text.rstrip().split("\n")]


def same(value: Any, expected: Any, depth: int = 0) -> bool:
    """
    >>> same([1, 2], [1, 2]), same([1], [1, 2]), same(1.0, 1), same(0.1 + 0.2, 0.3), same([1, 2], (1, 2))
    (True, False, False, True, True)
    >>> same(0.1 + 0.2 - 0.3, 0.0), same(0.0, 1e-10)
    (True, False)
    """
    if depth > DEPTH:
        return False
    if isinstance(expected, tuple):
        expected = list(expected)
    if type(value) is not type(expected):
        return False
    if isinstance(value, Mapping):
        return value.keys() == expected.keys() and all(same(value[key], expected[key], depth + 1) for key in value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return len(value) == len(expected) and all(map(same, value, expected, [depth + 1] * len(value)))
    if isinstance(value, float):
        absolute = 1e-12 if expected else TOLERANCE
        return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=absolute) and math.isfinite(value)
    return bool(value == expected)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)
