"""The pages of `podium rewards list` and `show`: all of it read from the functions themselves."""

from __future__ import annotations

import inspect
from typing import Any

from podium.errors import ConfigError
from podium.errors.texts import nearest
from podium.rewards import FACTORIES, LIBRARY
from podium.rewards.resolve import GIVEN, library_function, settings_of_reward

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


def _read(name: str) -> tuple[str, list[str], dict[str, inspect.Parameter]]:
    """Docstring, columns and settings of a reward. Raises `ConfigError` for a name the library lacks."""
    if name not in LIBRARY:
        near = nearest(name, LIBRARY)
        raise ConfigError(
            f"no reward `{name}` in the library.",
            fix=f"Did you mean `{near}`?" if near else "podium rewards list",
            settings=(name,),
            name=name,
            near=near,
        )
    settings = settings_of_reward(name)
    function = library_function(name)
    columns = [key for key in inspect.signature(function).parameters if key not in settings and key not in GIVEN]
    return inspect.getdoc(function) or "", columns, settings


def _is_needed(setting: inspect.Parameter) -> bool:
    return setting.default is setting.empty


def catalogue() -> str:
    """Names by family with the first sentence of each."""
    families: dict[str, list[str]] = {}
    for described in map(entry, LIBRARY):
        families.setdefault(described["family"], []).append(f"  {described['name']:<30} {described['about']}")
    blocks = ["\n".join([family, *lines]) for family, lines in families.items()]
    return "\n\n".join([*blocks, "More of one: podium rewards show NAME\n"])


def entry(name: str) -> dict[str, Any]:
    """One reward as plain values: its family is the file it is in."""
    doc, columns, parameters = _read(name)
    settings = {}
    for key, parameter in parameters.items():
        default = None if _is_needed(parameter) else parameter.default
        is_plain = default is None or isinstance(default, (bool, int, float, str, tuple, list, dict))
        settings[key] = {"needed": _is_needed(parameter), "default": default if is_plain else repr(default)}
    return {
        "name": name,
        "family": library_function(name).__module__.rpartition(".")[2].replace("_", " "),
        "about": " ".join(doc.split("\n\n")[0].split()),
        "columns": columns,
        "settings": settings,
    }


def page(name: str) -> str:
    """Docstring, columns, settings and examples of one reward."""
    doc, columns, parameters = _read(name)
    needed = [key for key, parameter in parameters.items() if _is_needed(parameter)]
    settings = ""
    for key, parameter in parameters.items():
        kind = "" if parameter.annotation is parameter.empty else str(parameter.annotation)
        settings += f"  {key:<24} {kind:<32} {'needed' if key in needed else f'default {parameter.default!r}'}\n"
    args = f"name: {name}\n      args: {{{', '.join(f'{key}: ...' for key in needed)}}}"
    return PAGE.format(
        name=name,
        doc=doc,
        columns="" if name in FACTORIES else f"\nColumns: {', '.join(columns) or 'none'}\n",
        settings=f"\nSettings:\n{settings}" if settings else "",
        entry=args if needed else name,
        arguments="".join(f", {key}=..." for key in needed),
        flags="".join(f" --args {key}=..." for key in needed),
    )
