"""Tools by name: functions as they are, `file.py:function`, and the tools of the library, `builtin:calculator`.

`tools.py:search?env=SEARCH_KEY` names the environment variables that a function in a file needs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from podium.agents.library import LIBRARY, PREFIX
from podium.agents.tool_files import file_tool
from podium.agents.tools import Tool, as_tools, by_name
from podium.data.query import parse_query
from podium.errors import ConfigError


def resolve_tools(entries: Sequence[str | Callable[..., Any] | Tool], folder: Path | None = None) -> tuple[Tool, ...]:
    """The tools of these entries, in their order; files are looked for in `folder`, then in the working directory.

    Raises `ConfigError` for a name that is not known, a file or function that is not there or cannot be imported, a
    function without a schema, and two tools of one name.

    >>> [multiply] = resolve_tools(["builtin:calculator"])
    >>> multiply.function("3 * (4 + 5)")
    '27'
    """
    tools = [_resolved(each, folder or Path()) for each in entries]
    by_name(tools)
    return tuple(tools)


def _resolved(entry: str | Callable[..., Any] | Tool, folder: Path) -> Tool:
    if isinstance(entry, Tool):
        return entry
    if not isinstance(entry, str):
        return as_tools([entry])[0]
    if entry.startswith(PREFIX):
        return as_tools([_builtin(entry, folder)])[0]
    if ".py:" in entry:
        name, settings = parse_query(entry)
        if set(settings) - {"env"}:
            raise ConfigError("agents.tool_file_setting", entry=entry, name=name)
        env = settings.get("env", [])
        return file_tool(name, folder, env=[str(each) for each in (env if isinstance(env, list) else [env])])
    names = [f"{PREFIX}{name}" for name in LIBRARY]
    near = [name for name in names if name.startswith(f"{PREFIX}{entry}")]
    what = f"there is no tool `{entry}`: give a function in a file, `tools.py:name`, or one of {', '.join(names)}."
    own = f"{entry}:name, with the name of a function in it" if entry.endswith(".py") else f"tools.py:{entry}"
    raise ConfigError(what, fix=near[0] if near else own)


def _builtin(entry: str, folder: Path) -> Callable[..., Any]:
    """`builtin:lookup?path=prices.json&name=price`."""
    full, settings = parse_query(entry)
    name, called = full.removeprefix(PREFIX), settings.pop("name", None)
    if name not in LIBRARY:
        what = f"there is no tool `{full}`; the library has {', '.join(LIBRARY)}."
        near = [f"{PREFIX}{each}" for each in LIBRARY if each.startswith(name[:3])]
        raise ConfigError(what, fix=", or ".join(near))
    make = importlib.import_module(f"podium.agents.library.{name}").make
    own = {key: each for key, each in inspect.signature(make).parameters.items() if key != "folder"}
    wrong = [key for key in settings if key not in own]
    missing = [key for key, each in own.items() if each.default is each.empty and key not in settings]
    if wrong or missing:
        what = f"`{entry}`: tool `{name}` " + (f"has no setting `{wrong[0]}`" if wrong else f"needs `{missing[0]}`")
        raise ConfigError(f"{what}. Its settings: {', '.join([*own, 'name'])}.", fix=LIBRARY[name])
    function: Callable[..., Any] = make(folder=folder, **settings)
    function.__name__ = str(called or name)
    return function
