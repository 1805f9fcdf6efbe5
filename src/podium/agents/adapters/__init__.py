"""Environments of other libraries as `TextEnvironment`s, and the names under which a recipe gives them.

factory = resolve_environment("gymnasium:FrozenLake-v1?is_slippery=false")
GRPOTrainer(..., environment_factory=factory)
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from podium.data.query import parse_query
from podium.errors import ConfigError
from podium.errors.texts import did_you_mean
from podium.isolation.user_files import find_file, function_from_file


class Adapter(NamedTuple):
    """A library of environments."""

    package: str
    """The package to import; the extra of the same name in podium's requirements installs it."""
    factory: str
    """`module:function` here, called with the name, the folder of the recipe, and the arguments."""
    example: str
    extra: str


ADAPTERS = {
    "builtin": Adapter("podium", "builtin:factory", "builtin:guess", ""),
    "gymnasium": Adapter("gymnasium", "gymnasium:factory", "gymnasium:FrozenLake-v1?is_slippery=false", "gymnasium"),
    "textarena": Adapter("textarena", "textarena:factory", "textarena:GuessTheNumber-v0", "textarena"),
    "openenv": Adapter("openenv", "openenv:factory", "openenv:http://127.0.0.1:8000", "openenv"),
    "reasoning_gym": Adapter("reasoning_gym", "reasoning_gym:factory", "reasoning_gym:chain_sum?attempts=3", "tasks"),
}
"""Libraries by the word before the colon."""


def resolve_environment(spec: str, folder: Path | None = None) -> Callable[[], Any]:
    """The environment factory of a name: `file.py:Class`, or `library:name`, each with `?argument=value&...` behind it.

    Args:
        spec: as in a recipe.
        folder: where files are looked for first; None: the working directory.

    Raises `ConfigError` for an unknown library or one that is not installed, and for a file or class that is not there.
    """
    target, arguments = parse_query(spec)
    library, colon, name = target.partition(":")
    adapter = ADAPTERS.get(library.replace("-", "_"))
    if adapter is None and ".py:" in target:
        made = from_file(target, folder)
        return functools.partial(made, **arguments) if arguments else made
    if adapter is None or not (colon and name):
        known = ", ".join(["game.py:Guess", *(each.example for each in ADAPTERS.values())])
        fix = did_you_mean(library, ADAPTERS) if adapter is None else f"environment: {adapter.example}"
        raise ConfigError(
            f"`{spec}` is no environment. Environments are written as in {known}.",
            fix=fix or "environment: game.py:Guess",
            spec=spec,
            known=known,
        )
    if importlib.util.find_spec(adapter.package) is None:
        raise ConfigError(
            f"{adapter.package} is not installed.",
            fix=f"Type: pip install 'podium[{adapter.extra}]'",
            package=adapter.package,
            extra=adapter.extra,
        )
    module, _, function = adapter.factory.partition(":")
    make: Callable[..., Callable[[], Any]] = getattr(import_module(f"{__name__}.{module}"), function)
    return make(name, folder or Path(), **arguments)


def from_file(target: str, folder: Path | None = None) -> Callable[..., Any]:
    """The class or function `file.py:name`. Raises `ConfigError`."""
    file, _, name = target.rpartition(":")
    rule = "an environment is a class, or a function that makes one"
    return function_from_file(find_file(file, folder or Path()), name, file, rule=rule)
