"""Python files of the user: found, imported, looked up in; errors name near files, lines and functions.

`used_digest` is of the part of a file that one of its functions runs, which a change of the rest leaves as it is.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from podium.errors import ConfigError, odd_path, pip_line
from podium.errors.texts import did_you_mean, quoted

IN_FILE = re.compile(r"(?P<file>[^?]+\.py):\w+(\?.*)?", re.DOTALL)
"""`file.py:function`, with arguments behind a question mark."""

_kept: dict[str, bytes] = {}
"""By path, the contents of the user's modules of which this process runs the code, whatever the files hold now."""


def find_file(file: str, folder: Path) -> Path:
    """Path of a file in `folder`, else in the working directory. Raises `ConfigError` with similar names."""
    candidates = [base / Path(file).expanduser() for base in (folder, Path.cwd())]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is not None:
        return path.resolve()
    what, fix = odd_path(file)
    if what:
        raise ConfigError(what, fix=fix)
    looked = " and ".join(dict.fromkeys([str(folder.resolve()), str(Path.cwd())]))
    stems = {entry.stem for path in candidates if path.parent.is_dir() for entry in path.parent.glob("*.py")}
    near = [f"{stem}.py" for stem in get_close_matches(candidates[0].stem, sorted(stems), n=3, cutoff=0.6)]
    what = f"there is no file {file} (looked in {looked})."
    if near:
        what = f"{what} Similar: {', '.join(near)}."
    instead = f"write `{near[0]}` in its place" if near else "write the path of a file that is there"
    raise ConfigError(what, fix=f"{instead}, as seen from here (`ls`)")


def module_from_file(path: Path, shown: str) -> ModuleType:
    """The module of a file, imported once a process. Raises `ConfigError` for whatever it raises."""
    module_name = f"podium_rewards_{abs(hash(path))}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path, loader=_Loader(module_name, str(path)))
    assert spec is not None
    loader = spec.loader
    assert loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        run_users_code(lambda: loader.exec_module(module), shown, path)
    except ConfigError:
        del sys.modules[module_name]
        raise
    return module


class _Loader(SourceFileLoader):
    """Runs the source, as it was kept or is now: bytecode may be of an edit in the same second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(_kept.get(self.path) or self.get_data(self.path), self.path)


class _Finder(PathFinder):
    """Finds the modules that were kept."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target)
        if spec is None or spec.origin not in _kept:
            return None
        spec.loader = _Loader(fullname, spec.origin)
        return spec


def keep(sources: Mapping[str, bytes]) -> None:
    """From now on import these files as they are given here."""
    _kept.update(sources)
    sys.dont_write_bytecode = True
    if sources and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


@functools.cache
def kept(folder: Path) -> Mapping[str, bytes]:
    """The user's modules below a folder that this process has imported, by path, as they were at the first call."""
    files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())} - _kept.keys()
    _kept.update({file: Path(file).read_bytes() for file in sorted(files) if _is_users(file, folder)})
    return _kept


def _is_users(file: str, folder: Path) -> bool:
    path = Path(os.path.realpath(file))
    if path.suffix != ".py" or not path.is_relative_to(folder):
        return False
    below = [Path(__file__).parents[1], Path(os.path.realpath(sysconfig.get_path("stdlib")))]  # a folder may hold all
    installed = any(path.is_relative_to(place) and place.is_relative_to(folder) for place in below)
    return not installed and "site-packages" not in path.relative_to(folder).parts


def make_importable(*folders: str) -> None:
    """Folders of the user on the import path: before packages, behind the standard library, whose `random` stays."""
    rest = [entry for entry in sys.path if (entry or os.getcwd()) not in folders]
    standard = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    last = max(
        (at for at, entry in enumerate(rest, 1) if entry.startswith(standard) and "-packages" not in entry), default=0
    )
    sys.path[:] = [*rest[:last], *dict.fromkeys(folders), *rest[last:]]


def function_from_file(path: Path, name: str, shown: str, *, rule: str) -> Callable[..., Any]:
    """The callable of that name in a file, whose folder is importable from then on. Raises `ConfigError`."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return attribute(module_from_file(path, shown), name, shown, rule=rule)


def run_users_code(run: Callable[[], Any], name: str, path: Path) -> Any:
    """Import a user's file; whatever it raises becomes a `ConfigError` with the file's own line."""
    try:
        return run()
    except SyntaxError as error:
        file = error.filename
        number = error.lineno
        raise ConfigError(
            f"{file}:{number}: {error.msg}",
            fix=f"correct line {number} of {file}; python -m py_compile {file} says when it is right",
            file=file,
            number=number,
            msg=error.msg,
        ) from error
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        tail = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in tail if Path(frame.filename).resolve() == path.resolve()]
        line, fix = (f":{frames[-1].lineno}", f"correct line {frames[-1].lineno} of {path}") if frames else ("", "")
        if install := pip_line(error):
            fix = f"{install}, or {fix}" if fix else install
        raise ConfigError(
            f"importing {name} failed at {path}{line}: {type(error).__name__}: {quoted(error)}",
            fix=fix,
            name=name,
            path=path,
            line=line,
            kind=type(error).__name__,
            error=error,
        ) from error


def attribute(module: ModuleType, name: str, shown: str, *, rule: str = "a reward is a function") -> Callable[..., Any]:
    """The callable of that name in a module. Raises `ConfigError` with near names, or with `rule` for other values."""
    value = getattr(module, name, None)
    if callable(value):
        return value
    own = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
    if value is not None:
        raise ConfigError(
            f"`{name}` in {shown} is {type(value).__name__}; {rule}",
            fix=f"{shown}:FUNCTION",
            name=name,
            shown=shown,
            kind=type(value).__name__,
            rule=rule,
        )
    listed = f"It has {', '.join(own[:10])}." if own else "It has no functions."
    fix = did_you_mean(name, own) or f"{shown}:{own[0] if own else 'FUNCTION'}"
    if "." in name:  # a method, which needs an object
        owner, _, method = name.rpartition(".")
        taken = _taken(getattr(getattr(module, owner, None), method, None)) or "completions, **kwargs"
        call = f"def {method}({taken}): return {owner}().{method}({taken})"
        fix = f"a function in {shown}, `{call}`; then {shown}:{method}"
    missing = f"{shown} has no function `{name}`." if name else f"`{shown}` names no function of the file."
    raise ConfigError(f"{missing} {listed}", fix=fix, missing=missing, listed=listed)


def _taken(method: Any) -> str:
    """The parameters of a method without `self`, separated by commas; empty where its signature is not known."""
    try:
        parameters = [*inspect.signature(method).parameters.values()][1:]
    except (TypeError, ValueError):
        return ""
    return ", ".join(str(one.replace(annotation=one.empty, default=one.empty)) for one in parameters)


# --- the part that a function runs ------------------------------------------------------------------------------------

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
        statements = [statement for statement in ast.parse(text).body if not _does_nothing(statement)]
    except (SyntaxError, ValueError, RecursionError):
        return [text]
    bound = [set(_bound(statement)) for statement in statements]
    named = [_named(statement) for statement in statements]
    reached = [not names or _registers(statement) for statement, names in zip(statements, bound, strict=True)]
    wanted = {name}
    if not any(name in names for names in bound):
        reached = [True] * len(statements)
    while True:
        wanted |= {other for names, used in zip(named, reached, strict=True) if used for other in names}
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
