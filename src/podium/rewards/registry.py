"""The table of the library's rewards, filled by the package, and the way to get one by its name with its settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from podium.errors import ConfigError
from podium.errors.texts import as_line, did_you_mean
from podium.rewards.resolve import SERVICES

FACTORIES: dict[str, Callable[..., Callable[..., Any]]] = {}
"""Called with their settings, they give a reward function."""

LIBRARY: dict[str, Callable[..., Any]] = {}
"""Every reward by its name in recipes."""


def library_reward(name: str, **arguments: Any) -> Callable[..., Any]:
    """The reward function of that name with these settings. Raises `ConfigError` for a name or setting it lacks.

    >>> library_reward("regex_format", pattern="[0-9]+")(completions=["7", "seven"])
    [1.0, 0.0]
    """
    if name not in LIBRARY:
        raise ConfigError(
            f"no reward `{name}` in the library. It has {', '.join(LIBRARY)}.",
            fix=did_you_mean(name, LIBRARY) or "podium rewards list",
        )
    function = LIBRARY[name]
    settings = settings_of_reward(name)
    for argument in arguments:
        if argument not in settings:
            known = f"It takes {', '.join(settings)}." if settings else "It takes no settings."
            what = f"reward `{name}` has no setting `{argument}`. {known}"
            raise ConfigError(what, fix=did_you_mean(argument, settings) or as_line(argument, None))
    needed = [key for key, each in settings.items() if each.default is each.empty and key not in arguments]
    if needed:
        raise ConfigError(f"reward `{name}` needs {', '.join(f'`{setting}`' for setting in needed)}.")
    if name in FACTORIES:
        return function(**arguments)
    made = functools.partial(function, **arguments) if arguments else function
    _try_settings(name, made)
    return made


def _try_settings(name: str, made: Callable[..., Any]) -> None:
    """Scores no completions at all, so that a setting that cannot work is found now and not in the first round."""
    data = set(inspect.signature(LIBRARY[name]).parameters) - set(settings_of_reward(name)) - {*SERVICES}
    try:
        made(**{column: [] for column in data})
    except ConfigError as error:
        raise ConfigError(f"reward `{name}`: {error.what}", code=error.code, fix=error.fix) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward `{name}` cannot work with these settings: {error}") from error


def settings_of_reward(name: str) -> dict[str, inspect.Parameter]:
    """The parameters that a recipe may set: all of a factory; those behind the `*` of a reward function."""
    parameters = inspect.signature(LIBRARY[name]).parameters
    return {key: each for key, each in parameters.items() if name in FACTORIES or each.kind is each.KEYWORD_ONLY}
