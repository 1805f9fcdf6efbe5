"""Functions in the user's files: found by name, given their arguments, described.

What is wrong is a `ConfigError` with near names and the file's own line. Calls nothing but what makes a function.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from podium.errors import ConfigError, did_you_mean
from podium.isolation.workers.verl import as_reward, is_compute_score

GIVEN_TO_ALL = ("prompts", "completions", "completion_ids")


# ---- finding ----


def find_file(file: str, folder: Path) -> Path:
    """Where a file is: in `folder`, else in the working directory. Raises `ConfigError` with similar names."""
    candidates = [base / Path(file).expanduser() for base in (folder, Path.cwd())]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        looked = " and ".join(dict.fromkeys([str(folder.resolve()), str(Path.cwd())]))
        near = _near_files(candidates)
        similar = f" Similar: {', '.join(near)}." if near else ""
        what = f"there is no file {file} (looked in {looked}).{similar}"
        instead = f"write `{near[0]}` in its place" if near else "write the path of a file that is there"
        raise ConfigError(what, fix=f"{instead}, as seen from here (`ls`)")
    return path.resolve()


def _near_files(candidates: list[Path]) -> list[str]:
    stems = {entry.stem for path in candidates if path.parent.is_dir() for entry in path.parent.glob("*.py")}
    return [f"{stem}.py" for stem in get_close_matches(candidates[0].stem, sorted(stems), n=3, cutoff=0.6)]


def module_from_file(path: Path, shown: str) -> ModuleType:
    """The module of a file, imported once a process. Raises `ConfigError` for whatever it raises."""
    module_name = f"podium_rewards_{abs(hash(path))}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
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


def run_users_code(run: Callable[[], Any], name: str, path: Path) -> Any:
    """Import a user's file; whatever it raises becomes a `ConfigError` with the file's own line."""
    try:
        return run()
    except SyntaxError as error:
        file, number = error.filename, error.lineno
        fix = f"correct line {number} of {file}; python -m py_compile {file} says when it is right"
        raise ConfigError(f"{file}:{number}: {error.msg}", fix=fix) from error
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        tail = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in tail if Path(frame.filename).resolve() == path.resolve()]
        line, fix = (f":{frames[-1].lineno}", f"correct line {frames[-1].lineno} of {path}") if frames else ("", "")
        if isinstance(error, ModuleNotFoundError):
            fix = f"install `{error.name}`" + f", or {fix}" * bool(fix)
        what = f"importing {name} failed at {path}{line}: {type(error).__name__}: {error}"
        raise ConfigError(what, fix=fix) from error


def attribute(module: ModuleType, name: str, shown: str, *, rule: str = "a reward is a function") -> Callable[..., Any]:
    """What a module has under a name, if it can be called. Raises `ConfigError` with near names.

    `rule`: what to say where it cannot.
    """
    value = getattr(module, name, None)
    if callable(value):
        return value
    own = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
    if value is not None:
        raise ConfigError(f"`{name}` in {shown} is {type(value).__name__}; {rule}", fix=f"{shown}:FUNCTION")
    listed = f"It has {', '.join(own[:10])}." if own else "It has no functions."
    fix = did_you_mean(name, own) or f"{shown}:{own[0] if own else 'FUNCTION'}"
    raise ConfigError(f"{shown} has no function `{name}`. {listed}", fix=fix)


def apply_args(found: Callable[..., Any], args: Mapping[str, Any], name: str) -> Callable[..., Any]:
    """A reward function with `args` filled in; whatever makes reward functions is called with them.

    Raises:
        ConfigError: an argument that it does not take, or one that it needs and that is missing.
    """
    parameters = {each.name: each for each in _signature(found) or ()}
    takes_any = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [arg for arg in args if arg not in parameters and not takes_any]
    if unknown:
        takes = ", ".join(p for p in parameters if p not in GIVEN_TO_ALL)
        what = f"reward `{name}` takes no argument `{unknown[0]}`. It takes: {takes or 'none'}"
        raise ConfigError(what, fix=did_you_mean(unknown[0], parameters) or f"take `{unknown[0]}` out")
    if not _makes_rewards(found, parameters):
        return as_reward(functools.partial(found, **args) if args else found)
    needed = [each.name for each in parameters.values() if each.default is each.empty and each.name not in args]
    if needed and not args and inspect.isfunction(found):
        raise ConfigError(
            f"reward `{name}` asks for {', '.join(needed)}, and for none of {', '.join(GIVEN_TO_ALL)}, one of which "
            "every reward takes.",
            code="W001",
            fix=f"write `def {found.__name__}(completions, **kwargs):`, with columns of the rows by their names; or "
            "give it what it needs under `args`, if it makes a reward function",
        )
    try:
        return found(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward `{name}` cannot be made with these `args`: {error}") from error


def _makes_rewards(found: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> bool:
    """A class, or a function that asks for nothing that every reward is given (verl's `compute_score` is a reward)."""
    if inspect.isclass(found):
        return True
    if is_compute_score(found):
        return False
    given = set(GIVEN_TO_ALL) & set(parameters)
    catches_all = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())
    return inspect.isfunction(found) and not given and not catches_all and not inspect.iscoroutinefunction(found)


# ---- describing ----


def unwrapped(function: Any) -> Any:
    """The function inside partials."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def function_name(function: Any) -> str:
    """The name TRL's metrics use: of the function inside partials, of an object its class.

    >>> function_name(functools.partial(function_name)), function_name(3)
    ('function_name', 'int')
    """
    inner = unwrapped(function)
    return str(getattr(inner, "__name__", type(inner).__name__))


def is_async(function: Any) -> bool:
    """Whether a call gives something to await; also for partials, and objects with an `async` call."""
    inner = unwrapped(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def parameters_of(function: Any) -> list[inspect.Parameter] | None:
    """None where Python cannot tell (some functions written in C).

    A decorator that takes `*args, **kwargs` alone passes them on, so what counts is what it wraps.
    """
    try:
        own = list(inspect.signature(function, follow_wrapped=False).parameters.values())
        passes_on = all(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in own)
        return list(inspect.signature(function).parameters.values()) if passes_on else own
    except (ValueError, TypeError):
        return None


def _signature(found: Any) -> list[inspect.Parameter] | None:
    """As a maker of rewards is called: a class by its `__init__`."""
    try:
        return list(inspect.signature(found).parameters.values())
    except (ValueError, TypeError):
        return None


def location(function: Any) -> str:
    """`file.py:12`, relative to the working directory where it is inside; empty where Python does not know."""
    function = inspect.unwrap(unwrapped(function))
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return ""
    path = Path(code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{code.co_firstlineno}"
