"""The pages of `podium rewards list` and `show`: all of it read from the functions themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from podium.errors import ConfigError, did_you_mean
from podium.rewards import FACTORIES, LIBRARY

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of every reward; the others are columns and settings."""

PAGE = """\
{name}

{doc}
{columns}{settings}
In a recipe:

  rewards:
    - {entry}

In Python:

  from podium.rewards import library_reward

  GRPOTrainer(..., reward_funcs=[library_reward("{name}"{arguments})])

Try it: podium rewards test {name} --data train.jsonl{flags}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryReward:
    """A reward of the library, as its signature and docstring describe it."""

    name: str
    function: Callable[..., Any]
    columns: tuple[str, ...]
    settings: dict[str, inspect.Parameter]
    is_factory: bool

    @property
    def about(self) -> str:
        """The docstring's first paragraph on one line."""
        return " ".join((inspect.getdoc(self.function) or "").split("\n\n")[0].split())

    @property
    def family(self) -> str:
        """The file it is in."""
        return self.function.__module__.rpartition(".")[2].replace("_", " ")

    @property
    def needed(self) -> list[str]:
        """Settings without a default."""
        return [key for key, each in self.settings.items() if each.default is each.empty]


def library_entry(name: str) -> LibraryReward:
    """A reward by name. Raises `ConfigError` for a name the library lacks."""
    if name not in LIBRARY:
        fix = did_you_mean(name, LIBRARY) or "podium rewards list"
        raise ConfigError(f"no reward `{name}` in the library.", fix=fix)
    parameters, is_factory = inspect.signature(LIBRARY[name]).parameters, name in FACTORIES
    settings = {key: each for key, each in parameters.items() if is_factory or each.kind is each.KEYWORD_ONLY}
    columns = tuple(key for key in parameters if key not in settings and key not in GIVEN)
    return LibraryReward(name=name, function=LIBRARY[name], columns=columns, settings=settings, is_factory=is_factory)


def catalogue() -> str:
    """Names by family with the first sentence of each."""
    families: dict[str, list[str]] = {}
    for reward in map(library_entry, LIBRARY):
        families.setdefault(reward.family, []).append(f"  {reward.name:<30} {reward.about}")
    blocks = ["\n".join([family, *lines]) for family, lines in families.items()]
    return "\n\n".join([*blocks, "More of one: podium rewards show NAME\n"])


def entry(name: str) -> dict[str, Any]:
    """One reward as plain values."""
    reward, settings = library_entry(name), {}
    for key, each in reward.settings.items():
        default = None if key in reward.needed else each.default
        is_plain = default is None or isinstance(default, (bool, int, float, str, tuple, list, dict))
        settings[key] = {"needed": key in reward.needed, "default": default if is_plain else repr(default)}
    return {
        "name": name,
        "family": reward.family,
        "about": reward.about,
        "columns": list(reward.columns),
        "settings": settings,
    }


def page(name: str) -> str:
    """Docstring, columns, settings and examples of one reward."""
    reward = library_entry(name)
    needed = reward.needed
    settings = ""
    for key, each in reward.settings.items():
        kind = "" if each.annotation is each.empty else str(each.annotation)
        settings += f"  {key:<24} {kind:<32} {'needed' if key in needed else f'default {each.default!r}'}\n"
    args = f"name: {name}\n      args: {{{', '.join(f'{key}: ...' for key in needed)}}}"
    return PAGE.format(
        name=name,
        doc=inspect.getdoc(reward.function) or "",
        columns="" if reward.is_factory else f"\nColumns: {', '.join(reward.columns) or 'none'}\n",
        settings=f"\nSettings:\n{settings}" if settings else "",
        entry=args if needed else name,
        arguments="".join(f", {key}=..." for key in needed),
        flags="".join(f" --args {key}=..." for key in needed),
    )
