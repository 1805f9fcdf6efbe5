"""The optional parts of agents by name: built-in tools, environments of libraries, programs.

    factory = resolve_environment("gymnasium:FrozenLake-v1?is_slippery=false")
    GRPOTrainer(..., environment_factory=factory)

Their modules, in `library`, `adapters` and `programs`, are imported when a run names them, and are known here alone.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from podium.data.query import parse_query
from podium.errors import ConfigError
from podium.errors.texts import did_you_mean
from podium.isolation.user_files import find_file, function_from_file
from podium.lazy import imported

if TYPE_CHECKING:
    from podium.agents.setup import Agents, Program, SampledGroups
    from podium.engines.base import RolloutEngine
    from podium.records import Prompt, SamplingSettings

PREFIX = "builtin:"

LIBRARY: Mapping[str, str] = {
    "calculator": "builtin:calculator",
    "python": "builtin:python?seconds=5&megabytes=512",
    "lookup": "builtin:lookup?path=prices.json",
    "search": "builtin:search?path=documents&results=3",
}
"""Name -> an example of its settings; `name=...` besides, where two tools would have the same name."""


def library_tool(name: str) -> Callable[..., Callable[..., Any]]:
    """The factory of the built-in tool of that name: it takes the tool's settings, and `folder`."""
    make: Callable[..., Callable[..., Any]] = imported(f"podium.agents.library.{name}:make")
    return make


class Adapter(NamedTuple):
    """A library of environments."""

    package: str
    """The package to import; the extra of the same name in podium's requirements installs it."""
    example: str
    extra: str


ADAPTERS = {
    "builtin": Adapter("podium", "builtin:guess", ""),
    "gymnasium": Adapter("gymnasium", "gymnasium:FrozenLake-v1?is_slippery=false", "gymnasium"),
    "textarena": Adapter("textarena", "textarena:GuessTheNumber-v0", "textarena"),
    "openenv": Adapter("openenv", "openenv:http://127.0.0.1:8000", "openenv"),
    "reasoning_gym": Adapter("reasoning_gym", "reasoning_gym:chain_sum?attempts=3", "tasks"),
}
"""Libraries by the word before the colon, which is the module of `agents.adapters` with their `factory`, too."""


def resolve_environment(spec: str, folder: Path | None = None) -> Callable[[], Any]:
    """The environment factory of a name: `file.py:Class`, or `library:name`, each with `?argument=value&...` behind it.

    Args:
        spec: as in a recipe.
        folder: where files are looked for first; None: the working directory.

    Raises `ConfigError` for an unknown library or one that is not installed, and for a file or class that is not there.
    """
    target, arguments = parse_query(spec)
    word, colon, name = target.partition(":")
    library = word.replace("-", "_")
    adapter = ADAPTERS.get(library)
    if adapter is None and ".py:" in target:
        made = from_file(target, folder)
        return functools.partial(made, **arguments) if arguments else made
    if adapter is None or not (colon and name):
        known = ", ".join(["game.py:Guess", *(row.example for row in ADAPTERS.values())])
        fix = did_you_mean(word, ADAPTERS) if adapter is None else f"environment: {adapter.example}"
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
    make: Callable[..., Callable[[], Any]] = imported(f"podium.agents.adapters.{library}:factory")
    return make(name, folder or Path(), **arguments)


def from_file(target: str, folder: Path | None = None) -> Callable[..., Any]:
    """The class or function `file.py:name`. Raises `ConfigError`."""
    file, _, name = target.rpartition(":")
    rule = "an environment is a class, or a function that makes one"
    return function_from_file(find_file(file, folder or Path()), name, file, rule=rule)


def resolve_program(spec: Any, folder: Path | None = None) -> Program:
    """The program of `agent=`: a function, `file.py:run`, `{"command": [...]}`, or one that is resolved.

    Raises `ConfigError` for what is none, and for a file that is not there or cannot be imported.
    """
    program: Program = imported("podium.agents.programs.program:resolve_program")(spec, folder)
    return program


def program_rollouts(
    agents: Agents,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    *,
    policy_step: int = 0,
    evaluation: bool = False,
) -> SampledGroups:
    """Groups of the rollouts of `agents.program`, one per prompt."""
    play = imported("podium.agents.programs.episode:program_rollouts")
    sampled: SampledGroups = play(
        agents.program,
        engine,
        prompts,
        settings,
        chat=agents.chat,
        limits=agents.program_limits,
        policy_step=policy_step,
        evaluation=evaluation,
    )
    return sampled


def program_reward(*, failed: float | None, capped: float | None) -> Callable[..., Any]:
    """A reward function that gives what each program has returned.

    Args:
        failed: reward of a program that has failed.
        capped: of one that gave up at a limit of turns or tokens.
    """
    make: Callable[..., Callable[..., Any]] = imported("podium.agents.programs.report:program_reward")
    return make(failed=failed, capped=capped)
