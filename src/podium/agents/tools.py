"""Tools: functions that a completion may call, and their calls within limits.

    tools = as_tools([multiply])                           # schemas from type hints and docstrings
    runner = ToolRunner()
    runner.run(message["tool_calls"], by_name(tools), CallLimits(timeout=60.0))     # one `Call` each, in their order

Nothing that a tool does reaches the run: what it raises, and a call that does not end, become the content of its tool
message, as in TRL: `{'error': '...'}`. A call in this process that hangs is given up and its thread left behind; tools
in files (`tool_files`) run in processes, which are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from podium.agents.outcome import Outcome, Side, call, call_async, failure, keep, raised
from podium.data.images import DATA_URL, image_blocks, with_opened
from podium.errors import ConfigError, DataError
from podium.errors.texts import quoted
from podium.isolation.functions import function_name, is_async, location
from podium.isolation.threads import abandon, background_loop, in_thread
from podium.records import Call, content_of

logger = logging.getLogger(__name__)

GRACE_SECONDS = 0.5
"""After the limit, how long the event loop has to report which calls have ended."""

LONGEST_TOKEN = 32
"""Characters that a token has at most on average: so many for each token allowed are looked at."""


T = TypeVar("T")


@runtime_checkable
class BoundedFunction(Protocol):
    """A function whose calls end at a limit of their own."""

    def within(self, arguments: Any, *, limit: float | None, cut: Side, seed: int | None) -> Outcome: ...


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a completion may call.

    A function with the attribute `serial = True` is called by one thread at a time.
    """

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    is_async: bool = False
    source: str = ""
    """The function and its place, for messages: `multiply (tools.py:3)`."""
    lock: threading.Lock | None = field(default=None, compare=False)
    prefix: str = ""
    """Put in front of its name where another tool has it already; empty: that is refused."""


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """Limits of each call."""

    timeout: float | None = 60.0
    """Seconds; None: no limit."""
    max_result_tokens: int | None = None
    cut: Side = "right"
    """The side where a result that is too long is cut off."""
    count: Callable[[str], int] = len
    """Gives the number of tokens of a text; by default every character is one."""
    reads_images: bool = False
    """Whether the model does; else it is told `[image]` for each."""


def as_tools(functions: Sequence[Callable[..., Any]]) -> tuple[Tool, ...]:
    """The functions as tools, with the schemas of `transformers.utils.get_json_schema`.

    Raises `ConfigError` for what has no schema (no docstring, an argument without a type hint or a description), and
    for two functions of one name.
    """
    tools = tuple(_tool(function) for function in functions)
    by_name(tools)
    return tools


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """The tools by their names. Raises `ConfigError` where two have the same name; in TRL the later one replaces it."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in found:
            source = found[tool.name].source
            raise ConfigError(
                f"two tools are called `{tool.name}`: {source} and {tool.source}.",
                fix="rename one of them: a model calls tools by name",
                each_name=tool.name,
                source=source,
                each_source=tool.source,
            )
        found[tool.name] = tool
    return found


def distinct(tools: Iterable[Tool], *, taken: Iterable[str] = ()) -> tuple[Tool, ...]:
    """The tools with names that differ from each other and from those `taken`; what is renamed is logged.

    A tool with a prefix gives way to those without, and to those before it. Raises `ConfigError` for two without.
    """
    tools = tuple(tools)
    used = {*by_name(tool for tool in tools if not tool.prefix), *taken}
    found = []
    for tool in tools:
        other = _renamed(tool, used | {known.name for known in tools}) if tool.prefix and tool.name in used else tool
        used.add(other.name)
        found.append(other)
    by_name(found)
    return tuple(found)


def _renamed(tool: Tool, used: Container[str]) -> Tool:
    """The tool with its prefix, and where that is used too, with a number."""
    base = f"{tool.prefix}_{tool.name}"
    names = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(2)))
    name = next(free for free in names if free not in used)
    logger.warning("Tool %s is called `%s` here: another tool is called `%s`.", tool.source, name, tool.name)
    return replace(tool, name=name, schema={**tool.schema, "function": {**tool.schema["function"], "name": name}})


def _tool(function: Any) -> Tool:
    name = function_name(function)
    place = location(function)
    source = f"`{name}` ({place})" if place else f"`{name}`"
    return Tool(
        name=name,
        function=function,
        schema=json_schema(function, source),
        is_async=is_async(function),
        source=source,
        lock=threading.Lock() if getattr(function, "serial", False) else None,
    )


def json_schema(function: Any, source: str) -> dict[str, Any]:
    """The schema of a function. Raises `ConfigError` that names `source` where it cannot be made."""
    from transformers.utils.chat_template_utils import get_json_schema

    if not callable(function) or not hasattr(function, "__name__"):
        raise ConfigError(
            f"{source} is no function that a model can call by name.",
            fix="write `def name(argument: type): ...` around it, with a docstring",
            source=source,
        )
    try:
        return get_json_schema(function)
    except Exception as error:  # docstrings, hints, names in hints that do not resolve
        raise ConfigError(
            f"tool {source} has no schema for the model: {quoted(error)}",
            fix="give every argument a type hint, and in the docstring a line under `Args:`, such as `a: The "
            "first factor.`",
            source=source,
            error=error,
        ) from error


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call as the model wrote it, with its tool; or with the reason why there is none."""

    name: str
    arguments: Any
    tool: Tool | None = None
    refusal: Outcome | None = None


def _asked(entry: Any, tools: Mapping[str, Tool]) -> _Asked:
    """An entry of a message's `tool_calls`, also one without the level `function` (TRL raises `KeyError`)."""
    entry = entry if isinstance(entry, Mapping) else {}
    kind = entry.get("type", "function")
    if kind != "function":
        name = str(entry.get("name", "unknown"))
        return _Asked(name, {}, refusal=failure(f"Unsupported tool call type: {kind}", "unknown"))
    inner = entry.get("function", entry)
    inner = inner if isinstance(inner, Mapping) else {}
    name = str(inner.get("name", "unknown"))
    arguments = inner.get("arguments", {})
    if name not in tools:
        return _Asked(name, arguments, refusal=failure(f"Tool {name} not found.", "unknown"))
    return _Asked(name, {} if arguments is None else arguments, tool=tools[name])


class ToolRunner:
    """Runs calls of tools. `run` may be called from several threads; `close` ends their waiting."""

    def __init__(self) -> None:
        self._pending: set[Future[Any]] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def run(
        self, calls: Sequence[Any], tools: Mapping[str, Tool], limits: CallLimits, *, seed: int | None = None
    ) -> tuple[Call, ...]:
        """The calls of one turn, and their results in the order of the calls.

        As in TRL, the synchronous ones run one after the other, then the asynchronous ones together.

        Args:
            calls: entries of a message's `tool_calls`.
            tools: by name.
            limits: of each call.
            seed: of the random numbers in a worker; each call counts one further. None: they are not seeded.
        """
        asked = [_asked(request, tools) for request in calls]
        done: dict[int, tuple[Outcome, float]] = {}
        for index, request in enumerate(asked):
            if request.tool is None:
                done[index] = (request.refusal or failure("no tool", "unknown"), 0.0)
            elif self._is_closed:
                done[index] = (overrun(request.name, None), 0.0)
            elif not request.tool.is_async:
                started = time.perf_counter()
                outcome = self._in_thread(
                    request.tool, request.arguments, limits, None if seed is None else seed + index
                )
                done[index] = (outcome, time.perf_counter() - started)
        later = {index: request for index, request in enumerate(asked) if index not in done}
        if later:
            done |= self._together(later, limits)
        made = []
        for index, request in enumerate(asked):
            outcome, seconds = done[index]
            outcome = _with_images(outcome, reads=limits.reads_images)
            content, cut = _shortened(outcome, limits)
            made.append(
                Call(
                    name=request.name,
                    arguments=dict(request.arguments) if isinstance(request.arguments, Mapping) else {},
                    content=content,
                    failed=bool(outcome.problem),
                    seconds=seconds,
                    cut=cut,
                    problem=outcome.problem,
                )
            )
        return tuple(made)

    def close(self) -> None:
        """Let every waiting `run` return at once, with failures for the calls that have not ended."""
        with self._lock:
            self._is_closed = True
            for future in self._pending:
                future.cancel()

    def _in_thread(self, tool: Tool, arguments: Any, limits: CallLimits, seed: int | None) -> Outcome:
        """One call in a thread of its own, which is left behind at the limit."""
        work = functools.partial(call, tool.function, arguments, limits.cut)
        limit = limits.timeout
        if isinstance(tool.function, BoundedFunction):
            work = functools.partial(tool.function.within, arguments, limit=limit, cut=limits.cut, seed=seed)
            limit = None

        def run() -> Outcome:
            try:
                return work()
            except BaseException as error:  # noqa: BLE001  memory or the stack ran out once more
                return raised(error, tool.function, arguments)

        with tool.lock or contextlib.nullcontext():
            try:
                future = in_thread(run, f"podium-tool-{tool.name}")
            except RuntimeError as error:  # no thread is left
                return failure(f"{tool.name} was not called: {error}", "error")
            return self._wait(future, limit) or overrun(tool.name, limits.timeout)

    def _together(self, asked: Mapping[int, _Asked], limits: CallLimits) -> dict[int, tuple[Outcome, float]]:
        """Asynchronous calls at the same time, on the loop that they share with asynchronous rewards."""
        done: dict[int, tuple[Outcome, float]] = {}
        started = time.perf_counter()

        async def awaited(index: int, function: Callable[..., Any], arguments: Any) -> None:
            outcome = await call_async(function, arguments, limits.cut)
            task = asyncio.current_task()
            if task and task.cancelling():  # it was given up, and raised for no reason of its own
                return
            done[index] = (outcome, time.perf_counter() - started)

        async def gathered() -> dict[int, tuple[Outcome, float]]:
            calls = [awaited(i, call.tool.function, call.arguments) for i, call in asked.items() if call.tool]
            tasks = [asyncio.ensure_future(awaitable) for awaitable in calls]
            try:
                await asyncio.wait(tasks, timeout=limits.timeout)
                return dict(done)
            finally:
                for task in tasks:
                    task.cancel()

        loop, _ = background_loop(os.getpid())
        future = asyncio.run_coroutine_threadsafe(gathered(), loop)
        ended = self._wait(future, None if limits.timeout is None else limits.timeout + GRACE_SECONDS)
        if ended is None:  # one of them blocks the loop
            abandon(loop)
            ended = dict(done)
        seconds = time.perf_counter() - started
        return {i: ended.get(i, (overrun(call.name, limits.timeout), seconds)) for i, call in asked.items()}

    def _wait(self, future: Future[T], limit: float | None) -> T | None:
        """The result; None at the limit, and when the runner is closed."""
        with self._lock:
            self._pending.add(future)
            if self._is_closed:
                future.cancel()
        try:
            return future.result(limit)
        except (TimeoutError, CancelledError):
            future.cancel()
            return None
        finally:
            with self._lock:
                self._pending.discard(future)


def overrun(name: str, limit: float | None) -> Outcome:
    """The outcome of a call that was given up."""
    return failure(f"{name} was stopped" if limit is None else f"{name} did not return within {limit:g} s", "timeout")


def _with_images(outcome: Outcome, *, reads: bool) -> Outcome:
    """The outcome with its images opened; a failure where one cannot be. Paths are none: what a tool has read may name
    any file.

    `reads`: whether the model reads images; else the outcome becomes text with a mark for each.
    """
    blocks = image_blocks({"content": outcome.content})
    if not blocks:
        return outcome
    if not all(str(block.get("image")).startswith(DATA_URL) for block in blocks):
        return outcome._replace(content=str(outcome.content))
    if not reads:
        return outcome._replace(content=content_of({"content": outcome.content}))
    try:
        return outcome._replace(content=with_opened(outcome.content, "the image"))
    except DataError as error:
        return failure(error.what, "result")


def _shortened(outcome: Outcome, limits: CallLimits) -> tuple[str | list[Any], int]:
    """The content within `max_result_tokens`, and how many tokens were cut off; a list that is too long becomes text,
    one with images is not cut.

    >>> _shortened(Outcome("0123456789" * 9, length=90), CallLimits(max_result_tokens=25))
    ('01234567...(truncated)...', 65)
    """
    most = limits.max_result_tokens
    if most is None or image_blocks({"content": outcome.content}):
        return outcome.content, 0
    whole = str(outcome.content)
    kept = keep(whole, LONGEST_TOKEN * most, limits.cut)
    used = limits.count(kept)
    if used <= most and len(kept) == outcome.length:
        return outcome.content, 0
    tokens = round(used * outcome.length / max(1, len(kept)))  # an estimate where not all was looked at
    while used > most and kept:
        kept = keep(whole, min(len(kept) - 1, int(len(kept) * most / used)), limits.cut)
        used = limits.count(kept)
    return kept, max(0, tokens - used)
