"""The worker of an MCP server: holds a client of the official package `mcp`, lists the tools and calls them.

`answer` is the target of an `isolation.workers.Worker`. The server, a process of its own, ends with the worker. It
gets `PATH`, `HOME` and `USER` of the environment, and the variables that were named.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from podium.agents.outcome import Outcome, Side, failure, read
from podium.isolation.threads import background_loop
from podium.isolation.workers import MARK

CONNECTION_CLOSED = -32000
"""The code with which `mcp` ends calls of a server that is gone."""

LINES = 5
"""Lines that a server wrote last to its standard error which an error shows."""

LOG_BYTES = 1 << 20
"""Size at which what it has written there is dropped."""

END_SECONDS = 10.0
"""Longest time to wait until a client has ended its server."""

_DIE_TOGETHER = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
"""Linux ends the server when the worker is gone, also one that does not read its closed input (PR_SET_PDEATHSIG)."""


class Held:
    """A client in a task of its own, which enters and leaves it: `mcp` allows no other.

    Args:
        spec: `command`, `folder` and `env`, or `url` and `headers`; see `agents.mcp.mcp_tools`.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.loop, _ = background_loop(os.getpid())
        self.log = tempfile.TemporaryFile("a+", encoding="utf-8", errors="replace")  # noqa: SIM115  the server's stderr
        self.listed: Future[dict[str, Any]] = Future()
        self.was_called = False
        self.client: Any = None
        self._leave = asyncio.Event()
        self._task = asyncio.run_coroutine_threadsafe(self._hold(spec), self.loop)

    async def _hold(self, spec: Mapping[str, Any]) -> None:
        from mcp import Client

        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # what goes wrong is in the replies
        try:
            async with contextlib.AsyncExitStack() as inside:
                self.client = await inside.enter_async_context(Client(await self._transport(spec, inside)))
                self.listed.set_result(await _listed(self.client))
                await self._leave.wait()
        except BaseException as error:
            if not self.listed.done():
                self.listed.set_exception(error)
            raise

    async def _transport(self, spec: Mapping[str, Any], inside: contextlib.AsyncExitStack) -> Any:
        from mcp import StdioServerParameters, stdio_client

        if spec["url"]:
            from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

            requests = await inside.enter_async_context(create_mcp_http_client(spec["headers"]))
            return streamable_http_client(spec["url"], http_client=requests)
        env = {"PYTHONHASHSEED": "0", MARK: os.environ.get(MARK, "")}
        env |= {name: os.environ[name] for name in spec["env"] if name in os.environ}
        command = [*spec["command"]]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _DIE_TOGETHER, *command]
        server = StdioServerParameters(command=command[0], args=command[1:], env=env, cwd=spec["folder"])
        return stdio_client(server, errlog=self.log)

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The result of one call. Raises whatever the client does."""
        self.was_called = True
        if os.fstat(self.log.fileno()).st_size > LOG_BYTES:
            self.log.truncate(0)
        return asyncio.run_coroutine_threadsafe(self.client.call_tool(name, arguments), self.loop).result()

    def last_lines(self) -> str:
        """The end of what the server has written to its standard error."""
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 4096))
        return "\n  ".join(self.log.read().strip().splitlines()[-LINES:])

    def end(self) -> None:
        """Leave the client, which ends its server."""
        self.loop.call_soon_threadsafe(self._leave.set)
        self._task.exception(END_SECONDS)
        self.log.close()


_held: Held | None = None


def answer(request: Mapping[str, Any], took: Callable[[int], None]) -> Iterator[Any]:
    """The reply to one request: `open` lists the tools of a server, `call` gives what came of calling one of them.

    A server that is open stays so; with `fresh` it is started again if it was called.
    """
    yield _opened(request) if "open" in request else _called(request["call"], request["arguments"], request["cut"])


def _opened(request: Mapping[str, Any]) -> Mapping[str, Any]:
    global _held
    try:
        if _held is not None and request["fresh"] and _held.was_called:
            _held.end()
            _held = None
        _held = _held or Held(request["open"])
        listed = _held.listed.result(request["seconds"])
        return listed if request["listing"] else {}
    except TimeoutError:
        return {
            "unusable": f"did not answer within {request['seconds']:g} s",
            "log": _held.last_lines() if _held else "",
        }
    except BaseException as error:  # noqa: BLE001  whatever a server, a network or a schema causes
        is_gone = getattr(_cause(error), "code", None) == CONNECTION_CLOSED
        how = "ends, or closes its output, at once" if is_gone else f"cannot be used: {_text_of(error)}"
        return {"unusable": how, "log": _held.last_lines() if _held else ""}


async def _listed(client: Any) -> dict[str, Any]:
    """The name of the server and its tools, page by page, as JSON."""
    tools = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            described = {"name": tool.name, "description": tool.description or tool.title or ""}
            tools.append({**described, "parameters": tool.input_schema})
        if not (cursor := page.next_cursor):
            return {"name": client.server_info.name if client.server_info else "", "tools": tools}


def _called(name: str, arguments: dict[str, Any], cut: Side) -> Mapping[str, Any]:
    assert _held is not None
    try:
        result = _held.call(name, arguments)
    except BaseException as error:  # noqa: BLE001  the model sees what the client says
        if getattr(_cause(error), "code", None) == CONNECTION_CLOSED:
            return {"lost": "closed its connection", "log": _held.last_lines()}
        return failure(_text_of(error), "error")._asdict()
    return _outcome(result, cut)._asdict()


def _outcome(result: Any, cut: Side) -> Outcome:
    """The texts of a result, one below the other; other parts by their kinds; content blocks where images are among
    them. What the server calls an error is one."""
    if not result.is_error and any(part.type == "image" for part in result.content):
        return read([_block_of(part) for part in result.content], cut)
    parts = [_text_of_part(part) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    return failure(text, "error") if result.is_error else read(text, cut)


def _block_of(part: Any) -> dict[str, str]:
    """A part as a content block."""
    if part.type == "image":
        return {"type": "image", "image": f"data:{part.mime_type};base64,{part.data}"}
    return {"type": "text", "text": _text_of_part(part)}


def _text_of_part(part: Any) -> str:
    """The text of a part; `[audio: audio/wav]` for what is none."""
    text = getattr(part, "text", None) or getattr(getattr(part, "resource", None), "text", None)
    if isinstance(text, str):
        return text
    kind = getattr(part, "mime_type", None) or getattr(getattr(part, "resource", None), "mime_type", None)
    return f"[{part.type}: {getattr(part, 'uri', None) or kind or 'of no known type'}]"


def _text_of(error: BaseException) -> str:
    return str(_cause(error)) or type(_cause(error)).__name__


def _cause(error: BaseException) -> BaseException:
    """The first error in a group of them, as task groups raise it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
