"""Tests of a program, in the forms that datasets give them.

    {"stdin": "3\\n", "stdout": "9\\n"}                                  # or "input" and "output"
    {"call": "square", "args": [3], "expected": 9}                       # "Solution.square" makes a Solution first
    "assert square(3) == 9"                                              # MBPP, AceCode
    "def test_three(): assert square(3) == 9"                            # KodCode: functions of pytest
    {"inputs": ["3\\n"], "outputs": ["9\\n"], "fn_name": "square"}       # APPS, TACO, CodeContests; fn_name: a function
    {"language": "python", "test_cases": [{"input": "3\\n", "output": "9\\n"}]}

An assertion is taken apart: the side with the call is evaluated in the sandbox, what is expected is compared outside.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import json
import logging
import operator
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podium.errors import RewardError

logger = logging.getLogger(__name__)

Test = dict[str, Any]

_SCHEMA = (
    'A test is {"stdin": "3", "stdout": "9"}, {"call": "square", "args": [3], "expected": 9} or '
    '"assert square(3) == 9"; see docs/rewards.md for the forms of datasets.'
)
_UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, SyntaxError, MemoryError, RecursionError)


def read_rows(rows: Sequence[Any]) -> list[list[Test] | None]:
    """The tests of each row; None for rows that have none, or none that can be read, of which the first is logged.

    Raises `RewardError` where no row has any that can be read.
    """
    read: list[list[Test] | None] = []
    errors = []
    for index, tests in enumerate(rows):
        try:
            read.append(read_tests(tests, index))
        except RewardError as error:
            errors.append(error)
            read.append(None)
    if errors and not any(read):
        raise errors[0]
    if errors:
        _say_first(_NOT_SCORED, str(errors[0]))
    return read


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
    tests = tests.tolist() if hasattr(tests, "tolist") else tests
    if tests is None or (isinstance(tests, str) and not tests.strip()):
        return None
    if isinstance(tests, str):
        tests = _parsed(tests, index)
    if isinstance(tests, Mapping):
        tests = _spread(tests, index)
    if not isinstance(tests, Sequence) or not all(isinstance(test, Mapping | str | None) for test in tests):
        raise RewardError("rewards.tests_completion_not", index=index, tests=str(tests)[:80], schema=_SCHEMA)
    return [test for each in tests if each is not None for test in _read(each, index)] or None


def _parsed(text: str, index: int) -> Any:
    """JSON, a list or mapping in Python's notation, or Python text with assertions as a list of one."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text.strip())
        except _UNREADABLE:
            continue
    if "assert" in text:
        return [text]
    raise RewardError("rewards.tests_completion_text", index=index, text=text[:120], schema=_SCHEMA)


def _spread(tests: Mapping[str, Any], index: int) -> Any:
    """The tests of a mapping of lists, one by one; the mapping itself where it is none."""
    language = tests.get("language") or "python"
    if str(language).casefold() not in ("python", "python3", "py"):
        raise RewardError("rewards.tests_language", index=index, language=language)
    if "test_cases" in tests:
        return tests["test_cases"]
    for key, other in (("inputs", "outputs"), ("input", "output")):
        given, expected = tests.get(key), tests.get(other)
        if isinstance(given, list) and isinstance(expected, list) and len(given) == len(expected):
            pairs = zip(given, expected, strict=True)
            return [{"input": one, "output": told, "fn_name": tests.get("fn_name")} for one, told in pairs]
    return tests


def _read(test: Mapping[str, Any] | str, index: int) -> Sequence[Test]:
    """A test with its own keys alone: a table of rows has every key everywhere, and nulls where it was not set."""
    if isinstance(test, str):
        if (asserted := _asserted(test)) is None:
            raise RewardError("rewards.test_completion", index=index, dict=test[:120], schema=_SCHEMA)
        return asserted
    by_call = isinstance(test.get("call"), str)
    if by_call and "expected" in test and isinstance(test.get("args") or [], list):
        own = {"call": test["call"], "args": test.get("args") or [], "kwargs": test.get("kwargs") or {}}
        return [own | {"expected": test["expected"]}]
    given, expected = (test.get(key) if test.get(key) is not None else test.get(other) for key, other in _ALIKE)
    name, is_function = _function_of(test)
    read = None
    if name is not None:
        read = _called(name, given, expected)
    elif not by_call and not is_function:
        read = {"stdin": _lines(given or ""), "stdout": _lines(expected)}
    if read is None or None in read.values():
        raise RewardError("rewards.test_completion", index=index, dict=str(dict(test))[:120], schema=_SCHEMA)
    return [read]


_ALIKE = (("stdin", "input"), ("stdout", "output"))


def _function_of(test: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The function that a test calls, and whether it calls one at all."""
    metadata = test.get("metadata") or {}
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            metadata = {}
    name = test.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    kind = str(test.get("testtype") or test.get("type") or "")
    return (name if isinstance(name, str) and "stdin" not in kind else None), kind in ("functional", "function_call")


def _called(name: str, given: Any, expected: Any) -> Test | None:
    """A call, of arguments in a list or as lines of JSON. APPS wraps what a function returns in a list of one."""
    try:
        arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
        values = [json.loads(expected) if isinstance(given, str) and isinstance(expected, str) else expected]
    except ValueError:
        return None
    if isinstance(expected, list) and len(expected) == 1:
        values.append(expected[0])
    return {"call": name, "args": arguments, "kwargs": {}, "one_of": values} if isinstance(arguments, list) else None


def _lines(text: Any) -> str | None:
    """Input or output as a text; lists are of lines."""
    if isinstance(text, list) and all(isinstance(line, str) for line in text):
        return "\n".join(text)
    return text if isinstance(text, str) else None


# ---- assertions ----


@functools.lru_cache(maxsize=4096)  # every completion of a group has the same
def _asserted(text: str) -> Sequence[Test] | None:
    """The tests of Python text; None where it has other things than assertions, test functions and imports."""
    try:
        body = ast.parse(textwrap.dedent(text).strip()).body
        imports = [each for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
        functions = [each for each in body if isinstance(each, ast.FunctionDef) and each.name.startswith("test")]
        asserted = [each for each in body if isinstance(each, ast.Assert)]
        known = len(imports) + len(functions) + len(asserted)
        written = [_written_out(each) for each in functions]
        unread = [ast.unparse(each) for each, inner in zip(functions, written, strict=True) if inner is None]
        asserted += [each for inner in written for each in inner or ()]
        read = [next((found for form in _FORMS if (found := form(each.test))), None) for each in asserted]
        setup = "\n".join(ast.unparse(each) for each in imports if not _modules(each) <= _OWN)
        unread += [ast.unparse(each) for each, test in zip(asserted, read, strict=True) if test is None]
    except _UNREADABLE:
        return None
    if not (asserted or functions) or known < len(body):
        return None
    if unread:
        _say_first(_LEFT_OUT, unread[0][:200])
    return [test | ({"setup": setup} if setup else {}) for test in read if test is not None]


_OWN = frozenset({"solution", "pytest"})
"""Modules that need no import: the program, as KodCode's tests name it, and what no assertion calls."""
_PARTS = 1_000
"""Parts of an expression that is written out: each use repeats it, and `b = [a, a]; c = [b, b]` doubles."""


def _modules(each: ast.Import | ast.ImportFrom) -> set[str | None]:
    return {each.module} if isinstance(each, ast.ImportFrom) else {name.name for name in each.names}


def _written_out(function: ast.FunctionDef) -> list[ast.Assert] | None:
    """The assertions of a test function, with its variables written out; None where it has other statements.

    `values = [1, 2]`, `found = f(values)`, `assert found == 3` is `assert f([1, 2]) == 3`.
    """
    values: dict[str, ast.expr] = {}
    asserted = []
    for statement in function.body:
        named = [part for part in ast.walk(statement) if isinstance(part, ast.comprehension | ast.Lambda)]
        if named and values:  # their own variables may have the same names
            return None
        match _Variables(values).visit(copy.deepcopy(statement)):
            case ast.Assign(targets=[ast.Name(name)], value=value) if sum(1 for _ in ast.walk(value)) < _PARTS:
                values[name] = value
            case ast.Assert() as found:
                asserted.append(found)
            case ast.Expr(value=ast.Constant(str())):
                pass
            case _:
                return None
    return None if function.args.args else asserted


class _Variables(ast.NodeTransformer):
    """Puts what variables were given in their places."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_read = isinstance(node.ctx, ast.Load) and node.id in self.values
        return copy.deepcopy(self.values[node.id]) if is_read else node


def _compared(node: ast.expr) -> Test | None:
    """`f(3) == 9`, `f(3) is None`, `f(3) in (9, -9)`."""
    if not isinstance(node, ast.Compare) or len(node.ops) > 1:
        return None
    sign, left, right = node.ops[0], node.left, node.comparators[0]
    if isinstance(sign, ast.Eq) and _constant(left) is not None:
        left, right = right, left
    expected = _constant(right)
    if expected is None:
        return None
    if isinstance(sign, ast.In) and isinstance(expected[0], list | tuple | set | frozenset):
        return _evaluated(left, [*expected[0]])
    if isinstance(sign, ast.Is) and (expected[0] is None or isinstance(expected[0], bool)):
        return _evaluated(left, [*expected], exact=True)
    return _evaluated(left, [*expected]) if isinstance(sign, ast.Eq) else None


def _near(node: ast.expr) -> Test | None:
    """`math.isclose(f(2), 1.41, rel_tol=0.01)`, `abs(f(2) - 1.41) < 0.01`."""
    match node:
        case ast.Call(
            func=ast.Name("isclose") | ast.Attribute(value=ast.Name("math"), attr="isclose"),
            args=[left, right],
            keywords=words,
        ) if {word.arg for word in words} <= {"rel_tol", "abs_tol"}:
            limits = {str(word.arg): _constant(word.value) for word in words}
        case ast.Compare(
            left=ast.Call(func=ast.Name("abs"), args=[ast.BinOp(left=left, op=ast.Sub(), right=right)]),
            ops=[ast.Lt() | ast.LtE() as sign],
            comparators=[limit],
        ):
            distance = _constant(limit)
            limits = {"below": distance} if isinstance(sign, ast.Lt) else {"rel_tol": (0.0,), "abs_tol": distance}
        case _:
            return None
    expected = _constant(right)
    if expected is None or None in limits.values():
        return None
    return _evaluated(left, [*expected], within={name: limit[0] for name, limit in limits.items() if limit})


def _true(node: ast.expr) -> Test | None:
    """`f(3)`, `not f(3)`, `Solution().f(3)`."""
    call = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else node
    match call:
        case ast.Call(func=ast.Name(name)) if not hasattr(builtins, name) and "close" not in name:
            pass
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(), args=[], keywords=[]))):
            pass
        case _:
            return None
    test = _evaluated(call, [call is node])
    return test and test | {"expression": f"bool({test['expression']})"}


_FORMS: tuple[Callable[[ast.expr], Test | None], ...] = (_near, _compared, _true)


def _evaluated(node: ast.expr, one_of: list[Any], **more: Any) -> Test | None:
    """A test of an expression; None where the expression may compare by itself, so that what is expected is in it.

    A helper that compares (`same(f(3), 9) == 1`) would be the program's. It is told by a call among two arguments or
    more, or by a truth value that is expected and any call in its arguments.
    """
    parts = [*ast.walk(node)]
    calls = [part for part in parts if isinstance(part, ast.Call)]
    compares = any(isinstance(part, ast.Compare | ast.BoolOp) for part in parts)
    nested = any(isinstance(inner, ast.Call) for call in calls for each in call.args for inner in ast.walk(each))
    truth = any(word in repr(one_of) for word in ("True", "False"))
    method = any(isinstance(call.func, ast.Attribute) and _has_arguments(call.func.value) for call in calls)
    if not calls or compares or any(map(_may_compare, calls)) or (truth and (nested or method)):
        return None
    return {"expression": ast.unparse(node), "one_of": one_of, **more}


def _may_compare(call: ast.Call) -> bool:
    """Whether a call of a function that is not Python's has the value of another one beside more arguments."""
    if len(call.args) + len(call.keywords) < 2 or _is_known(call.func):
        return False
    inner = [part for each in (*call.args, *call.keywords) for part in ast.walk(each) if isinstance(part, ast.Call)]
    return not all(_is_known(each.func) for each in inner)


def _is_known(function: ast.expr) -> bool:
    """Whether a function is Python's own, or one of `math`."""
    match function:
        case ast.Name(name):
            return hasattr(builtins, name)
        case ast.Attribute(value=ast.Name("math"), attr=name):
            return name != "isclose"
    return False


def _has_arguments(node: ast.expr) -> bool:
    """Whether the object of a method is what a call with arguments gave: `f(3).startswith("a")`."""
    return any(isinstance(each, ast.Call) and bool(each.args or each.keywords) for each in ast.walk(node))


# ---- what is expected ----

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


def _constant(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal, or of one in `set(...)` and the like, in a tuple of one; None for anything else."""
    try:
        return (_value(node),)
    except _UNREADABLE:
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
            one, other = _value(left), _value(right)
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


# ---- what is said ----

_NOT_SCORED = "Rows whose tests cannot be read are not scored: %s"
_LEFT_OUT = "A test that cannot be compared from outside is left out, and others like it: %s"


@functools.cache
def _said() -> set[str]:
    return set()


def _say_first(what: str, text: str) -> None:
    """Log a message, the first of its kind in a process."""
    if what not in _said():
        logger.warning(what, text)
    _said().add(what)
