"""Assertions of Python text, taken apart: the side with the call, and what it is compared with.

What is compared with is a literal, or a small computation with literals (`constant`). Nothing else is evaluated here.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import operator
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Test = dict[str, Any]

UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, SyntaxError, MemoryError, RecursionError)
"""Errors of text that cannot be read, or is too large to be."""


@functools.lru_cache(maxsize=4096)  # every completion of a group has the same
def asserted(text: str) -> tuple[Sequence[Test], Sequence[str]] | None:
    """The tests of Python text, and what cannot be compared from outside.

    None where it has other things than assertions, test functions and imports.
    """
    try:
        body = ast.parse(textwrap.dedent(text).strip()).body
        imports = [part for part in body if isinstance(part, ast.Import | ast.ImportFrom)]
        functions = [part for part in body if isinstance(part, ast.FunctionDef) and part.name.startswith("test")]
        found = [part for part in body if isinstance(part, ast.Assert)]
        known = len(imports) + len(functions) + len(found)
        written = [_written_out(function) for function in functions]
        unread = [ast.unparse(function) for function, inner in zip(functions, written, strict=True) if inner is None]
        found += [assertion for inner in written for assertion in inner or ()]
        read = [next((test for form in _FORMS if (test := form(assertion.test))), None) for assertion in found]
        setup = "\n".join(ast.unparse(part) for part in imports if not _modules(part) <= _OWN)
        unread += [ast.unparse(assertion) for assertion, test in zip(found, read, strict=True) if test is None]
    except UNREADABLE:
        return None
    if not (found or functions) or known < len(body):
        return None
    return [test | ({"setup": setup} if setup else {}) for test in read if test is not None], unread


_OWN = frozenset({"solution", "pytest"})
"""Modules that need no import: the program, as KodCode's tests name it, and what no assertion calls."""
_PARTS = 1_000
"""Parts of an expression that is written out: each use repeats it, and `b = [a, a]; c = [b, b]` doubles."""


def _modules(imported: ast.Import | ast.ImportFrom) -> set[str | None]:
    return {imported.module} if isinstance(imported, ast.ImportFrom) else {name.name for name in imported.names}


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
    sign = node.ops[0]
    left = node.left
    right = node.comparators[0]
    if isinstance(sign, ast.Eq) and constant(left) is not None:
        left, right = right, left
    expected = constant(right)
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
            limits = {str(word.arg): constant(word.value) for word in words}
        case ast.Compare(
            left=ast.Call(func=ast.Name("abs"), args=[ast.BinOp(left=left, op=ast.Sub(), right=right)]),
            ops=[ast.Lt() | ast.LtE() as sign],
            comparators=[limit],
        ):
            distance = constant(limit)
            limits = {"below": distance} if isinstance(sign, ast.Lt) else {"rel_tol": (0.0,), "abs_tol": distance}
        case _:
            return None
    expected = constant(right)
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
    nested = any(isinstance(inner, ast.Call) for call in calls for part in call.args for inner in ast.walk(part))
    truth = any(word in repr(one_of) for word in ("True", "False"))
    method = any(isinstance(call.func, ast.Attribute) and _has_arguments(call.func.value) for call in calls)
    if not calls or compares or any(map(_may_compare, calls)) or (truth and (nested or method)):
        return None
    return {"expression": ast.unparse(node), "one_of": one_of, **more}


def _may_compare(call: ast.Call) -> bool:
    """Whether a call of a function that is not Python's has the value of another one beside more arguments."""
    if len(call.args) + len(call.keywords) < 2 or _is_known(call.func):
        return False
    arguments = (*call.args, *call.keywords)
    inner = [part for argument in arguments for part in ast.walk(argument) if isinstance(part, ast.Call)]
    return not all(_is_known(part.func) for part in inner)


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
    return any(isinstance(part, ast.Call) and bool(part.args or part.keywords) for part in ast.walk(node))


# --- what is expected -------------------------------------------------------------------------------------------------

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
            values = [_value(argument) for argument in arguments]
            if name == "range":
                _bounded(max(abs(number) for number in values))
            return _BUILT[name](*values)
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
        return 1 + sum(_size(key) + _size(entry) for key, entry in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return 1 + sum(map(_size, value))
    return 1 + len(value if isinstance(value, str | bytes) else str(value))
