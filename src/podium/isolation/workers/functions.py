"""Reward functions with their arguments filled in, and described. Calls nothing but what makes a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.errors.texts import did_you_mean, quoted
from podium.isolation.workers.verl import as_reward, is_compute_score, parameters_by_name

GIVEN_TO_ALL = ("prompts", "completions", "completion_ids")


def apply_args(found: Callable[..., Any], args: Mapping[str, Any], name: str) -> Callable[..., Any]:
    """A reward function with `args` filled in, or made with them. Raises `ConfigError` for unknown and missing ones."""
    parameters = parameters_by_name(found)
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
        what = (
            f"reward `{name}` asks for {', '.join(needed)}, and for none of {', '.join(GIVEN_TO_ALL)}, one of which "
            "every reward takes."
        )
        fix = (
            f"write `def {found.__name__}(completions, **kwargs):`, with columns of the rows by their names; or "
            "give it what it needs under `args`, if it makes a reward function"
        )
        raise ConfigError(what, code="W001", fix=fix)
    try:
        made = found(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward `{name}` cannot be made with these `args`: {quoted(error)}",
            fix=f"args that `{name}` takes: {', '.join(parameters) or 'none'}",
            name=name,
            error=error,
        ) from error
    if not callable(made):
        gave = type(made).__name__
        raise ConfigError(
            f"reward `{name}` takes no `completions`, so it was called to make a reward, and gave {gave}.",
            code="W001",
            fix=f"def {found.__name__}(completions, **kwargs), with one number for each of the completions",
            name=name,
            gave=gave,
            found=found.__name__,
        )
    return made


def _makes_rewards(found: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> bool:
    """A class, or a function that asks for nothing that every reward is given (verl's `compute_score` is a reward)."""
    if inspect.isclass(found):
        return True
    if is_compute_score(found):
        return False
    given = set(GIVEN_TO_ALL) & set(parameters)
    catches_all = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())
    return inspect.isfunction(found) and not given and not catches_all and not inspect.iscoroutinefunction(found)


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


def location(function: Any) -> str:
    """`file.py:12`, relative to the working directory where it is inside; empty where Python does not know."""
    function = inspect.unwrap(unwrapped(function))
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return ""
    path = Path(code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{code.co_firstlineno}"
