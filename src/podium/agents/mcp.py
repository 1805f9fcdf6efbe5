"""Tools of MCP servers (Model Context Protocol) among the tools of a run.

    tools = [*mcp_tools(command=["python", "-m", "mcp_server_time"]), multiply]

A worker process holds the client of a server (`mcp_client`), so a call that takes too long ends the worker and the
server with it, and the next call starts both again. All completions share one server, which is called by one of them at
a time; with `each` an episode gets a server of its own at its first call, which no episode before it has called.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template
from typing import Any

from podium.agents.outcome import Outcome, Side, failure, sent
from podium.agents.tools import Tool, overrun
from podium.errors import ConfigError
from podium.errors.texts import as_yaml, did_you_mean, listed
from podium.isolation.workers import Pool, Unanswered, Worker, pool_of

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Longest time that a server may take to start and to list its tools."""

GRACE_SECONDS = 10.0
"""Behind that, how long the worker has to report why it did not."""

CONNECTIONS = 8
"""Connections to a server at an address, at most: as many calls run at the same time."""

KEYS = ("command", "url", "headers", "env", "only", "prefix", "each")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A server as a recipe names it."""

    command: tuple[str, ...] = ()
    url: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    """HTTP headers of every request to `url`; `${NAME}` in a value is replaced when the client connects."""
    folder: str = ""
    """Working directory of the command."""
    env: tuple[str, ...] = ()
    each: bool = False

    @property
    def shown(self) -> str:
        return self.url or shlex.join(self.command)

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the environment variables that `env` and `headers` name."""
        return (*self.env, *(name for _, value in self.headers for name in Template(value).get_identifiers()))


def mcp_tools(
    *,
    command: Sequence[str] | str = (),
    url: str = "",
    headers: Mapping[str, str] | None = None,
    env: Sequence[str] = (),
    only: Sequence[str] = (),
    prefix: str = "",
    each: bool = False,
    folder: Path | None = None,
) -> tuple[Tool, ...]:
    """The tools of an MCP server, as it lists them.

    Args:
        command: starts a server that talks over its standard input and output; `python` is the Python of this process.
        url: of a server that runs, in place of a command.
        headers: of every request to it; `${NAME}` in a value is an environment variable.
        env: names of environment variables that the server sees besides `PATH`, `HOME` and `USER`.
        only: names of the tools to take; empty: all.
        prefix: put in front of all names; empty: the server's name, where another tool has the name already.
        each: whether every episode gets a server of its own, in place of one for all.
        folder: working directory of the command; None: the one of this process.

    Raises:
        ConfigError: `mcp` is not installed; the server does not start, does not answer or lists no tool; a name in
            `only`, `env` or `headers` that there is not.
    """
    command = tuple(shlex.split(command) if isinstance(command, str) else map(str, command))
    if bool(command) == bool(url):
        raise _wrong({"command": list(command), "url": url}, "needs a command or a url")
    if headers and command:
        entry = {"command": list(command), "headers": [*headers]}
        raise _wrong(entry, "has headers, which go to a url")
    if not _is_installed():
        raise ConfigError(
            "tools of MCP servers need the package mcp, 2.3 or later, which is not installed.",
            code="C066",
            fix="Type: pip install 'podium[mcp]'",
            settings=("tools",),
        )
    spec = Spec(
        command=command,
        url=url,
        headers=tuple((headers or {}).items()),
        folder=str((folder or Path()).resolve()),
        env=tuple(env),
        each=each,
    )
    if missing := [name for name in spec.variables if name not in os.environ]:
        raise ConfigError(
            f"MCP server `{spec.shown}`: its `env` or `headers` name {missing[0]}, which is not set here.",
            code="C066",
            fix=f"export {missing[0]}=..., or take it out",
            settings=("tools",),
            server=spec.shown,
            name=missing[0],
        )
    server = McpServer(spec)
    named = [tool for tool in server.listed if not only or tool["name"] in only]
    if lacking := [name for name in only if name not in [tool["name"] for tool in named]]:
        names = [tool["name"] for tool in server.listed]
        near = did_you_mean(lacking[0], names)
        raise ConfigError(
            f"MCP server `{spec.shown}` has no tool `{lacking[0]}`, which `only` names. It has {listed(names)}.",
            code="C066",
            fix=near or f"only: [{listed(names)}]",
            settings=("tools",),
            server=spec.shown,
            name=lacking[0],
            names=names,
            near=near,
        )
    return tuple(_tool(server, tool, prefix) for tool in named)


def _is_installed() -> bool:
    """Whether `mcp` is here in a version that has `Client`."""
    try:
        return int(version("mcp").partition(".")[0]) >= 2
    except PackageNotFoundError:
        return False


def tools_of_entry(entry: Mapping[str, Any], folder: Path) -> tuple[Tool, ...]:
    """The tools of `{mcp: {...}}` in a recipe. Raises `ConfigError`, as `mcp_tools` does, also for another form."""
    options = entry.get("mcp")
    if set(entry) != {"mcp"} or not isinstance(options, Mapping):
        raise _wrong(dict(entry), "is no `mcp:` with a command or a url below it")
    for key, value in options.items():
        if key not in KEYS:
            raise _wrong(dict(entry), f"has a key `{key}`, which there is not: {', '.join(KEYS)}")
        if (expected := _expected(key, value)) is not None:
            raise _wrong(dict(entry), f"has {key}: {value!r}, which is no {expected}")
    return mcp_tools(**{**options, "folder": folder})


def _wrong(entry: dict[str, Any], why: str) -> ConfigError:
    """The error of an entry of `tools` that names no server as it should."""
    return ConfigError(
        f"`{as_yaml(entry)}` {why}.",
        code="C066",
        fix="tools: [{mcp: {command: [python, -m, mcp_server_time]}}], or {mcp: {url: http://127.0.0.1:8000/mcp}}",
        settings=("tools",),
        entry=entry,
        why=why,
    )


def _expected(key: str, value: Any) -> str | None:
    """The expected form of this key's value, where the value does not have it; else None."""
    if key == "each":
        return None if isinstance(value, bool) else "true or false"
    if isinstance(value, str) and key in ("command", "url", "prefix"):
        return None
    if key == "headers":
        is_text = isinstance(value, Mapping) and all(isinstance(word, str) for pair in value.items() for word in pair)
        return None if is_text else "mapping of names to texts"
    is_list = isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value)
    if is_list and key in ("command", "env", "only"):
        return None
    return "text" if key in ("url", "prefix") else "list"


def _tool(server: McpServer, listed: Mapping[str, Any], prefix: str) -> Tool:
    name = f"{prefix}_{listed['name']}" if prefix else str(listed["name"])
    schema = {"type": "function", "function": {**listed, "name": name}}
    return Tool(
        name=name,
        function=ServerTool(server, str(listed["name"]), schema),
        schema=schema,
        source=f"`{listed['name']}` (MCP server {server.name})",
        prefix=re.sub(r"\W+", "_", server.name),
    )


class McpServer:
    """A server that has listed its tools. Raises `ConfigError` where it has not."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.losses = 0
        self._lock = threading.Lock()
        program, *arguments = spec.command or ("",)
        program = sys.executable if program in ("python", "python3") else program
        self._command = [program, *arguments]
        place = str(Path(spec.folder, program)) if os.sep in program else program
        if program and shutil.which(place) is None:
            raise self._unusable(f"cannot be started: there is no program `{program}`")
        with self.lend() as worker:
            found = self._open(worker, listing=True)
        self.name = str(found["name"]) or spec.shown
        self.listed: list[Mapping[str, Any]] = found["tools"]
        if not self.listed:
            raise self._unusable("lists no tools")

    def lend(self) -> AbstractContextManager[Worker]:
        """A worker for one thread alone."""
        client = "podium.agents.mcp_client:answer"
        make = functools.partial(Worker, target=client, variables=self.spec.env, has_children=True)
        self._pool: Pool[Worker] = pool_of(("mcp", self.spec), make)
        if self.spec.each:
            return self._pool.lend(None)
        return self._pool.lend(CONNECTIONS if self.spec.url else 1)

    def call(self, name: str, arguments: Any, limit: float | None, cut: Side) -> Outcome:
        """The outcome of a call in a worker that no other call uses."""
        with self.lend() as worker:
            return self.call_in(worker, name, arguments, limit, cut)

    def call_in(
        self, worker: Worker, name: str, arguments: Any, limit: float | None, cut: Side, *, fresh: bool = False
    ) -> Outcome:
        """The outcome of a call. A server that ends, or is ended at the limit, gives a failure.

        `fresh`: the worker's server is started again, if it was called before.
        """
        if not isinstance(arguments, Mapping):
            return _NO_OBJECT
        try:
            self._open(worker, fresh=fresh)
        except ConfigError as error:
            return self._lost(name, error.what)
        reply = worker.ask({"call": name, "arguments": {**arguments}, "cut": cut}, limit)
        if isinstance(reply, Unanswered) and reply.cause == "unsent":
            return _NO_OBJECT
        if isinstance(reply, Unanswered):
            outcome = self._lost(name, f"{name}: MCP server {self.name}: its client {reply.how}")
            return overrun(name, limit) if reply.cause == "limit" else outcome
        if "lost" in reply:
            worker.kill()
            return self._lost(name, f"{name}: MCP server {self.name} {reply['lost']}", str(reply["log"]))
        return sent(reply)

    def _open(self, worker: Worker, *, fresh: bool = False, listing: bool = False) -> Mapping[str, Any]:
        """Have the worker start the server, unless it has. Raises `ConfigError`.

        `fresh`: also where it was called before. `listing`: the reply has the tools.
        """
        headers = {name: Template(value).safe_substitute(os.environ) for name, value in self.spec.headers}
        spec = {**asdict(self.spec), "command": self._command, "headers": headers}
        request = {"open": spec, "fresh": fresh, "listing": listing, "seconds": START_SECONDS}
        reply = worker.ask(request, START_SECONDS + GRACE_SECONDS)
        if isinstance(reply, Unanswered):
            raise self._unusable(f"cannot be used: its client {reply.how}", "\n  ".join(reply.trace))
        if "unusable" in reply:
            worker.kill()
            raise self._unusable(str(reply["unusable"]), str(reply["log"]))
        return reply

    def _unusable(self, how: str, log: str = "") -> ConfigError:
        line = ""
        fix = "Start it, or correct its address or its `headers`."
        if not self.spec.url:
            line = f"(cd {shlex.quote(self.spec.folder)}; {shlex.join(self._command)})"
            fix = f"Start it by hand and correct what it says: {line}"
        return ConfigError(
            "\n  ".join(filter(None, [f"MCP server `{self.spec.shown}` {how}.", log])),
            code="C066",
            fix=fix,
            settings=("tools",),
            server=self.spec.shown,
            how=how,
            log=log,
            line=line,
        )

    def _lost(self, name: str, what: str, log: str = "") -> Outcome:
        """The outcome of a call whose server is gone, which is counted; the first is logged."""
        with self._lock:
            self.losses += 1
            is_first = self.losses == 1
        if is_first:
            logger.warning("%s", "\n  ".join(filter(None, [f"{what}. It is started again.", log])))
        return failure(what, "lost")


_NO_OBJECT = failure("the arguments are no JSON object", "arguments")


class McpSession:
    """The server of one episode: taken at the first call, started afresh, given back with `close`."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self._held = ExitStack()
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._is_closed = False

    def call(self, name: str, arguments: Any, limit: float | None, cut: Side) -> Outcome:
        """The outcome of a call."""
        with self._lock:
            if self._is_closed:
                return overrun(name, None)
            is_first = self._worker is None
            worker = self._worker = self._worker or self._held.enter_context(self.server.lend())
            return self.server.call_in(worker, name, arguments, limit, cut, fresh=is_first)

    def close(self) -> None:
        """Give the server back. A call that was given up and goes on ends with it."""
        self._is_closed = True
        while not self._lock.acquire(timeout=0.1):
            if self._worker is not None:
                self._worker.end()
        self._held.close()
        self._lock.release()


class ServerTool:
    """A tool of a server, as a function."""

    def __init__(self, server: McpServer | McpSession, name: str, schema: Mapping[str, Any]) -> None:
        self.server = server
        self.schema = schema
        self.__name__ = name
        self.digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()
        """In the run's `environment.json`: a run that is resumed says that the server lists something else."""

    def __call__(self, **arguments: Any) -> Any:
        """The content of the tool message for these arguments; for use outside of a run."""
        return self.within(arguments, limit=60.0, cut="right", seed=None).content

    def within(self, arguments: Any, *, limit: float | None, cut: Side, seed: int | None) -> Outcome:
        """One call within its limit. `seed` is of no use to a server."""
        return self.server.call(self.__name__, arguments, limit, cut)


def in_episode(tools: Mapping[str, Tool], ending: ExitStack) -> dict[str, Tool]:
    """The tools of one episode: for servers with `each` they share a session, which `ending` closes."""
    sessions: dict[McpServer, McpSession] = {}

    def bound(tool: Tool) -> Tool:
        function = tool.function
        if not isinstance(function, ServerTool) or not isinstance(function.server, McpServer):
            return tool
        if not function.server.spec.each:
            return tool
        if (session := sessions.get(function.server)) is None:
            session = sessions[function.server] = McpSession(function.server)
            ending.callback(session.close)
        return replace(tool, function=ServerTool(session, function.__name__, function.schema))

    return {name: bound(tool) for name, tool in tools.items()}


def servers_of(tools: Iterable[Tool]) -> dict[McpServer, list[str]]:
    """The servers of these tools, with the names of their tools."""
    found: dict[McpServer, list[str]] = {}
    for tool in tools:
        if isinstance(tool.function, ServerTool) and isinstance(tool.function.server, McpServer):
            found.setdefault(tool.function.server, []).append(tool.name)
    return found
