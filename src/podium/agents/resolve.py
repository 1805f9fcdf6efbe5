"""Tools by name: functions as they are, `file.py:function`, the library's (`builtin:calculator`), and MCP servers.

`tools.py:search?env=SEARCH_KEY` names the environment variables that a function in a file needs.

A function in a file is called in worker processes, which its limit ends. The file is never imported into the run's own
process, so that nothing in it can take the run down: an endless loop, a crash in C code and `os._exit` end the worker,
and the next call starts another. Calls at the same time run in several workers, so what one call leaves behind in the
module may not be there for the next.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.agents.mcp import tools_of_entry
from podium.agents.outcome import Outcome, Side, call, call_async, failure, sent
from podium.agents.table import LIBRARY, PREFIX, library_tool
from podium.agents.tools import Tool, as_tools, distinct, json_schema, overrun
from podium.data.query import parse_query
from podium.errors import ConfigError
from podium.isolation.functions import Call, FileFunction, Took, answering, awaited, is_async, location
from podium.isolation.user_files import find_file
from podium.isolation.workers import Pool, Unanswered, Worker, load, pool_of

logger = logging.getLogger(__name__)

WORKERS = 8
"""Processes of a file, at most: as many of its calls run at the same time."""


Entry = str | Mapping[str, Any] | Callable[..., Any] | Tool | Sequence[Tool]
"""A name, a function, a tool as it is, or all tools of an MCP server: `{"mcp": {...}}`, or what `mcp_tools` made."""


def resolve_tools(entries: Sequence[Entry], folder: Path | None = None) -> tuple[Tool, ...]:
    """The tools of these entries, in their order; files are looked for in `folder`, then in the working directory.

    Raises `ConfigError` for a name that is not known, a file or function that is not there or cannot be imported, a
    function without a schema, an MCP server that cannot be used, and two tools of one name where neither is a server's.

    >>> [multiply] = resolve_tools(["builtin:calculator"])
    >>> multiply.function("3 * (4 + 5)")
    '27'
    """
    return distinct(tool for entry in entries for tool in _tools_of(entry, folder or Path()))


def _tools_of(entry: Entry, folder: Path) -> Sequence[Tool]:
    if isinstance(entry, Mapping):
        return tools_of_entry(entry, folder)
    if isinstance(entry, Sequence) and not isinstance(entry, str):
        return entry
    return (entry if isinstance(entry, Tool) else _resolved(entry, folder),)


def _resolved(entry: str | Callable[..., Any], folder: Path) -> Tool:
    if not isinstance(entry, str):
        return as_tools([entry])[0]
    if entry.startswith(PREFIX):
        return as_tools([_builtin(entry, folder)])[0]
    if ".py:" in entry:
        name, settings = parse_query(entry)
        if set(settings) - {"env"}:
            raise ConfigError(
                f"`{entry}`: a tool in a file has the setting `env` alone.",
                fix=f"{name}?env=SEARCH_KEY",
                settings=("env",),
                entry=entry,
                name=name,
            )
        env = settings.get("env", [])
        return file_tool(name, folder, env=[str(variable) for variable in (env if isinstance(env, list) else [env])])
    names = [f"{PREFIX}{name}" for name in LIBRARY]
    near = [name for name in names if name.startswith(f"{PREFIX}{entry}")]
    what = f"there is no tool `{entry}`: give a function in a file, `tools.py:name`, or one of {', '.join(names)}."
    own = f"{entry}:name, with the name of a function in it" if entry.endswith(".py") else f"tools.py:{entry}"
    raise ConfigError(what, fix=near[0] if near else own)


def _builtin(entry: str, folder: Path) -> Callable[..., Any]:
    """`builtin:lookup?path=prices.json&name=price`."""
    full, settings = parse_query(entry)
    name = full.removeprefix(PREFIX)
    called = settings.pop("name", None)
    if name not in LIBRARY:
        what = f"there is no tool `{full}`; the library has {', '.join(LIBRARY)}."
        near = [f"{PREFIX}{known}" for known in LIBRARY if known.startswith(name[:3])]
        raise ConfigError(what, fix=", or ".join(near))
    make = library_tool(name)
    own = {key: parameter for key, parameter in inspect.signature(make).parameters.items() if key != "folder"}
    wrong = [key for key in settings if key not in own]
    missing = [key for key, parameter in own.items() if parameter.default is parameter.empty and key not in settings]
    if wrong or missing:
        what = f"`{entry}`: tool `{name}` " + (f"has no setting `{wrong[0]}`" if wrong else f"needs `{missing[0]}`")
        raise ConfigError(f"{what}. Its settings: {', '.join([*own, 'name'])}.", fix=LIBRARY[name])
    function: Callable[..., Any] = make(folder=folder, **settings)
    function.__name__ = str(called or name)
    return function


class FileTool:
    """A function in a file, called in a worker. Raises `ConfigError` where it cannot be imported or has no schema."""

    def __init__(self, path: Path, attribute: str, shown: str, env: Sequence[str] = ()) -> None:
        self.path = path.resolve()
        self._function = FileFunction(path=str(self.path), name=attribute, shown=shown)
        self._env = tuple(env)
        with self._workers().lend(WORKERS) as worker:
            described = load([worker], ToolCall(function=self._function, with_schema=True), shown)
        self.schema: Mapping[str, Any] = described["schema"]
        self.__name__ = str(self.schema["function"]["name"])
        self.where = str(described["where"])
        self._was_lost = False

    def _workers(self) -> Pool[Worker]:
        """The workers of the file, held so that they live as long as a tool of it."""
        make = functools.partial(Worker, target="podium.agents.resolve:answer", variables=self._env)
        self._pool = pool_of(("tools", self._function.path, self._env), make)
        return self._pool

    def __call__(self, **arguments: Any) -> Any:
        """The content of the tool message for these arguments; for use outside of a run."""
        return self.within(arguments, limit=60.0, cut="right", seed=None).content

    def within(self, arguments: Any, *, limit: float | None, cut: Side, seed: int | None) -> Outcome:
        """One call in a worker that no other call uses. A worker that ends gives a failure; the first one is logged."""
        with self._workers().lend(WORKERS) as worker:
            try:
                new = [] if worker.alive else [worker]
                load(new, ToolCall(function=self._function), self._function.shown)
            except ConfigError as error:
                return failure(error.what, "error")
            reply = worker.ask(ToolCall(function=self._function, arguments=arguments, seed=seed, cut=cut), limit)
        if not isinstance(reply, Unanswered):
            return sent(reply)
        if not reply.has_ended:
            return failure(reply.how, "arguments" if reply.cause == "unsent" else "error")
        if not self._was_lost:
            self._was_lost = True
            logger.warning("\n  ".join([f"Tool `{self.__name__}` ({self.where}) {reply.how}.", *reply.trace]))
        if reply.cause == "limit":
            return overrun(self.__name__, limit)
        return failure(f"{self.__name__} {reply.how}", "error")


def file_tool(name: str, folder: Path, env: Sequence[str] = ()) -> Tool:
    """`file.py:function` as a tool; the file is looked for in `folder`, then in the working directory.

    `env`: names of environment variables that the function needs; others, such as keys, it does not see.
    """
    file, _, attribute = name.rpartition(":")
    function = FileTool(find_file(file, folder), attribute, file, env)
    name = function.__name__
    return Tool(name=name, function=function, schema=function.schema, source=f"`{name}` ({function.where})")


# --- in a worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall(Call):
    """A call of a tool in a file, or without arguments its description."""

    cut: Side = "right"
    with_schema: bool = False
    """Whether the description has the schema, which takes an import of transformers."""


def _described(function: Callable[..., Any], request: ToolCall) -> Mapping[str, Any]:
    if not request.with_schema:
        return {}
    return {"schema": _schema(function, request.function.name), "where": location(function)}


def _result(function: Callable[..., Any], request: ToolCall, _: Took) -> Mapping[str, Any]:
    if is_async(function):
        return awaited(call_async(function, request.arguments, request.cut))._asdict()
    return call(function, request.arguments, request.cut)._asdict()


answer = answering("a tool is a function", _described, _result)


def _schema(function: Any, name: str) -> dict[str, Any]:
    """The schema, without the import of torch that transformers makes for its hint `torch.Tensor` alone."""
    from transformers.utils import chat_template_utils

    chat_template_utils.is_torch_available = lambda: False
    return {**json_schema(function, f"`{name}` ({location(function)})")}
