"""Tests of a program, in the forms that datasets give them.

    {"stdin": "3\\n", "stdout": "9\\n"}                                  # or "input" and "output"
    {"call": "square", "args": [3], "expected": 9}                       # "Solution.square" makes a Solution first
    "assert square(3) == 9"                                              # MBPP, AceCode
    {"inputs": ["3\\n"], "outputs": ["9\\n"], "fn_name": "square"}       # APPS, TACO, CodeContests; fn_name: a function
    {"language": "python", "test_cases": [{"input": "3\\n", "output": "9\\n"}]}

An assertion is taken apart: the side with the call is evaluated in the sandbox, what is expected is compared outside.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

from podium.errors import RewardError

logger = logging.getLogger(__name__)

Test = dict[str, Any]

_SCHEMA = (
    'A test is {"stdin": "3", "stdout": "9"}, {"call": "square", "args": [3], "expected": 9} or '
    '"assert square(3) == 9"; see docs/rewards.md for the forms of datasets.'
)


def read_tests(tests: Any, index: int = 0) -> list[Test] | None:
    """The tests of a row as a list; None where the row has none. `index` is for the message.

    Assertions whose expected value is no literal are left out, and the first of a process is logged. Raises
    `RewardError` for what is no list of tests.

    >>> read_tests('[{"stdin": "1", "stdout": "2"}]')
    [{'stdin': '1', 'stdout': '2'}]
    >>> read_tests({"inputs": ["1", "2"], "outputs": ["1", "4"]})
    [{'stdin': '1', 'stdout': '1'}, {'stdin': '2', 'stdout': '4'}]
    >>> read_tests(["assert set(f((1, 2))) == set((2, 1))"])
    [{'expression': 'set(f((1, 2)))', 'one_of': [{1, 2}]}]
    """
    if tests is None:
        return None
    if isinstance(tests, str):
        tests = _parsed(tests, index)
    if isinstance(tests, Mapping):
        tests = _spread(tests)
    if not isinstance(tests, Sequence) or not all(isinstance(test, Mapping | str) for test in tests):
        raise RewardError("rewards.tests_completion_not", index=index, tests=str(tests)[:80], schema=_SCHEMA)
    return [test for each in tests for test in _read(each, index)] or None


def _parsed(text: str, index: int) -> Any:
    """JSON, or Python text of assertions as a list of one."""
    try:
        return json.loads(text)
    except ValueError as error:
        if text.lstrip().startswith(("assert ", "import ", "from ")):
            return [text]
        raise RewardError("rewards.tests_completion_text", index=index, error=error) from error


def _spread(tests: Mapping[str, Any]) -> Any:
    """The tests of a mapping of lists, one by one; the mapping itself where it is none."""
    if "test_cases" in tests:
        return tests["test_cases"]
    for given, expected in (("inputs", "outputs"), ("input", "output")):
        if isinstance(tests.get(given), list) and isinstance(tests.get(expected), list):
            function = {"fn_name": tests.get("fn_name")}
            pairs = zip(tests[given], tests[expected], strict=False)
            return [{"input": one, "output": other, **function} for one, other in pairs]
    return tests


def _read(test: Mapping[str, Any] | str, index: int) -> Iterator[Test]:
    """A test with its own keys alone: a table of rows has every key everywhere, and nulls where it was not set."""
    if isinstance(test, str):
        yield from _asserted(test, index)
        return
    given, expected = (test.get(key) if test.get(key) is not None else test.get(other) for key, other in _ALIKE)
    by_call = isinstance(test.get("call"), str)
    if by_call and "expected" in test and isinstance(test.get("args") or [], list):
        own = {"call": test["call"], "args": test.get("args") or [], "kwargs": test.get("kwargs") or {}}
        yield own | {"expected": test["expected"]}
    elif isinstance(test.get("fn_name"), str) and isinstance(given, list):
        alone = [expected[0]] if isinstance(expected, list) and len(expected) == 1 else []
        yield {"call": test["fn_name"], "args": given, "kwargs": {}, "one_of": [expected, *alone]}
    elif not by_call and not test.get("fn_name") and isinstance(expected, str) and isinstance(given or "", str):
        yield {"stdin": given or "", "stdout": expected}
    else:
        raise RewardError("rewards.test_completion", index=index, dict=str(dict(test))[:120], schema=_SCHEMA)


_ALIKE = (("stdin", "input"), ("stdout", "output"))


# ---- assertions ----


def _asserted(text: str, index: int) -> Iterator[Test]:
    """The tests of Python text. Raises `RewardError` where it has more than assertions and imports."""
    try:
        body = ast.parse(text.strip()).body
    except (SyntaxError, ValueError):
        body = []
    others = [each for each in body if not isinstance(each, ast.Import | ast.ImportFrom)]
    if not others or not all(isinstance(each, ast.Assert) for each in others):
        raise RewardError("rewards.test_completion", index=index, dict=text[:120], schema=_SCHEMA)
    for each in others:
        assert isinstance(each, ast.Assert)
        test = next((found for form in _FORMS if (found := form(each.test)) is not None), None)
        if test is None:
            _say_once(ast.unparse(each)[:200])
        else:
            yield test


def _compared(node: ast.expr) -> Test | None:
    """`f(3) == 9`, `f(3) is None`, `f(3) in (9, -9)`."""
    if not isinstance(node, ast.Compare) or len(node.ops) > 1:
        return None
    sign, left, right = node.ops[0], node.left, node.comparators[0]
    if isinstance(sign, ast.Eq) and _constant(left) is not None:
        left, right = right, left
    expected = _constant(right)
    if expected is None or _constant(left) is not None:
        return None
    if isinstance(sign, ast.Eq | ast.Is):
        return {"expression": ast.unparse(left), "one_of": [*expected]}
    if isinstance(sign, ast.In) and isinstance(expected[0], list | tuple | set | frozenset):
        return {"expression": ast.unparse(left), "one_of": [*expected[0]]}
    return None


def _near(node: ast.expr) -> Test | None:
    """`math.isclose(f(2), 1.41, rel_tol=0.01)`, `abs(f(2) - 1.41) < 0.01`."""
    match node:
        case ast.Call(func=ast.Name("isclose") | ast.Attribute(attr="isclose"), args=[left, right], keywords=words):
            limits = {word.arg: _constant(word.value) for word in words}
        case ast.Compare(
            left=ast.Call(func=ast.Name("abs"), args=[ast.BinOp(left=left, op=ast.Sub(), right=right)]),
            ops=[ast.Lt() | ast.LtE()],
            comparators=[limit],
        ):
            limits = {"rel_tol": (0.0,), "abs_tol": _constant(limit)}
        case _:
            return None
    expected = _constant(right)
    if expected is None or _constant(left) is not None or not {*limits} <= {"rel_tol", "abs_tol"}:
        return None
    if any(limit is None for limit in limits.values()):
        return None
    within = {name: limit[0] for name, limit in limits.items() if limit}
    return {"expression": ast.unparse(left), "one_of": [*expected], "within": within}


def _true(node: ast.expr) -> Test | None:
    """`f(3)`, `not f(3)` and `Solution().f(3)`; of no function that may compare, such as `all` and `isclose`."""
    call = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else node
    match call:
        case ast.Call(func=ast.Name(name)) if name != "isclose" and not hasattr(builtins, name):
            pass
        case ast.Call(func=ast.Attribute(value=ast.Call())):
            pass
        case _:
            return None
    return {"expression": f"bool({ast.unparse(call)})", "one_of": [call is node]}


_FORMS: tuple[Callable[[ast.expr], Test | None], ...] = (_near, _compared, _true)
_BUILT: Mapping[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (set, frozenset, tuple, list, dict, float, range)},
    "sorted": sorted,
}
"""Functions that an expected value may be made with."""
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_MOST_DIGITS = 4_300
"""Digits of a number, and length of a text or list, that an expected value may be computed to have."""


def _constant(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal, or of one in `set(...)` and the like, in a tuple of one; None for anything else."""
    try:
        return (_value(node),)
    except (ValueError, TypeError, ArithmeticError, MemoryError, RecursionError):
        return None


def _value(node: ast.expr) -> Any:
    """`10**9 + 7`, `[0] * 5`, `list(range(3))`. Raises `ValueError` for what has other parts, or is large."""
    match node:
        case ast.Call(func=ast.Name(name), args=arguments, keywords=[]) if name in _BUILT:
            given = [_value(each) for each in arguments]
            if name == "range" and any(abs(each) > _MOST_DIGITS for each in given):
                raise ValueError(name)
            return _BUILT[name](*given)
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return _DISPLAYS[type(node)](map(_value, parts))
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.BinOp(left=ast.expr() as left, op=ast.Pow(), right=ast.Constant(value=int() as power)):
            base = _value(left)
            if abs(power) * len(str(base)) > _MOST_DIGITS:
                raise ValueError(power)
            return base**power
        case ast.BinOp(left=left, op=joined, right=right) if type(joined) in _OPERATORS:
            pair = _value(left), _value(right)
            sizes = [len(each) if isinstance(each, Sized) else each for each in pair]
            if isinstance(joined, ast.Mult) and sizes != [*pair] and sizes[0] * sizes[1] > _MOST_DIGITS:
                raise ValueError(sizes)
            return _OPERATORS[type(joined)](*pair)
    return ast.literal_eval(node)


_DISPLAYS: Mapping[type, Callable[..., Any]] = {ast.List: list, ast.Tuple: tuple, ast.Set: set}


@functools.cache
def _left_out() -> set[str]:
    return set()


def _say_once(text: str) -> None:
    """The first assertion of a process that cannot be compared from outside."""
    if not _left_out():
        logger.warning("A test that compares with no literal is left out, and others like it: %s", text)
    _left_out().add(text)
