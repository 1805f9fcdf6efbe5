"""The part of a Python file that one of its functions runs: a change of the rest is no change of the function."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def used_digest(text: str, name: str) -> str:
    """SHA-256 of the statements that a name of a file needs, without comments and layout; of the whole file where it
    is no Python, or has no such name.

    Functions, classes, constants and imports count if the name needs them, directly or by others. All other statements
    run when the file is imported, and count.

    >>> one = used_digest("import re\\nN = 2\\ndef f(x): return x * N", "f")
    >>> one == used_digest("N = 2\\n\\n# twice\\ndef f(x):\\n    return x * N\\ndef g(x): return x", "f")
    True
    >>> one == used_digest("N = 3\\ndef f(x): return x * N", "f")
    False
    """
    return hashlib.sha256("\n".join(_used(text, name)).encode("utf-8", "surrogatepass")).hexdigest()


def _used(text: str, name: str) -> list[str]:
    try:
        statements = [each for each in ast.parse(text).body if not _does_nothing(each)]
    except (SyntaxError, ValueError, RecursionError):
        return [text]
    bound = [set(_bound(statement)) for statement in statements]
    named = [_named(statement) for statement in statements]
    reached = [not names or _registers(statement) for statement, names in zip(statements, bound, strict=True)]
    wanted = {name}
    if not any(name in names for names in bound):
        reached = [True] * len(statements)
    while True:
        wanted |= {each for names, used in zip(named, reached, strict=True) if used for each in names}
        now = [used or bool(wanted & names) for names, used in zip(bound, reached, strict=True)]
        if now == reached:
            return [ast.dump(statement) for statement, used in zip(statements, reached, strict=True) if used]
        reached = now


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a definition, an import or an assignment makes; none for any other statement."""
    if isinstance(statement, _DEFINITIONS):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        names = [(alias.asname or alias.name).partition(".")[0] for alias in statement.names]
        if "*" not in names:
            yield from names
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if len(names) == len(targets):
            yield from names


def _registers(statement: ast.stmt) -> bool:
    """Whether a definition may do more than bind its name: by a decorator, or the class that it is of."""
    if not isinstance(statement, _DEFINITIONS):
        return False
    derived = isinstance(statement, ast.ClassDef) and bool(statement.bases or statement.keywords)
    return derived or bool(statement.decorator_list)


def _does_nothing(statement: ast.stmt) -> bool:
    """Whether it is a docstring, or what runs only where the file is a script."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'"


def _named(statement: ast.stmt) -> set[str]:
    """Names that a statement uses; texts, too, by which `globals()` or `getattr` may look them up."""
    nodes = list(ast.walk(statement))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
