"""Tools that stay in their file: called in worker processes, which their limit ends.

    [multiply] = resolve_tools(["tools.py:multiply"])

The file is never imported into the run's own process, so that nothing in it can take the run down: an endless loop, a
crash in C code and `os._exit` end the worker, and the next call starts another. Calls at the same time run in several
workers, so what one call leaves behind in the module may not be there for the next.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from podium.agents.outcome import Outcome, Side, call, call_async, failure
from podium.agents.tools import Tool, json_schema, overrun
from podium.errors import ConfigError, PodiumError
from podium.isolation.user_files import find_file, function_from_file
from podium.isolation.workers import calls
from podium.isolation.workers.functions import is_async, location
from podium.isolation.workers.process import FOR_EVER, Lost, Pool, Worker, exchange, framed, load, pool_of
from podium.records import CallProblem

logger = logging.getLogger(__name__)

WORKERS = 8
"""Processes of a file, at most: as many of its calls run at the same time."""


class FileTool:
    """A function in a file, called in a worker. Raises `ConfigError` where it cannot be imported or has no schema."""

    def __init__(self, path: Path, attribute: str, shown: str, env: Sequence[str] = ()) -> None:
        self.path = path.resolve()
        self._function = (str(self.path), attribute, shown)
        self._env = tuple(env)
        with self._workers().lend(WORKERS) as worker:
            described = load([worker], {"function": self._function, "describe": True}, shown)
        self.schema: Mapping[str, Any] = described["schema"]
        self.__name__ = str(self.schema["function"]["name"])
        self.where = str(described["where"])
        self._was_lost = False

    def _workers(self) -> Pool[Worker]:
        """The workers of the file, held so that they live as long as a tool of it."""
        make = functools.partial(Worker, target="podium.agents.tool_files:answer", variables=self._env)
        self._pool = pool_of(("tools", self._function[0], self._env), make)
        return self._pool

    def __call__(self, **arguments: Any) -> Any:
        """The content of the tool message for these arguments; for use outside of a run."""
        return self.within(arguments, limit=60.0, cut="right", seed=None).content

    def within(self, arguments: Any, *, limit: float | None, cut: Side, seed: int | None) -> Outcome:
        """One call in a worker that no other call uses. A worker that ends gives a failure; the first one is logged."""
        request = {"function": self._function, "arguments": arguments, "cut": cut, "seed": seed}
        try:
            message = framed(request)
        except Exception as error:  # noqa: BLE001  any class may refuse in its own way
            return failure(str(error), "arguments")
        with self._workers().lend(WORKERS) as worker:
            try:
                load([worker] * (not worker.alive), {"function": self._function}, self._function[2])
            except ConfigError as error:
                return failure(error.what, "error")
            [reply] = exchange([worker], [message], FOR_EVER if limit is None else limit)
        if not isinstance(reply, Lost):
            return _outcome(reply)
        if not self._was_lost:
            self._was_lost = True
            logger.warning("\n  ".join([f"Tool `{self.__name__}` ({self.where}) {reply.how}.", *reply.trace]))
        return overrun(self.__name__, limit) if reply.is_overrun else failure(f"{self.__name__} {reply.how}", "error")


def file_tool(name: str, folder: Path, env: Sequence[str] = ()) -> Tool:
    """`file.py:function` as a tool; the file is looked for in `folder`, then in the working directory.

    `env`: names of environment variables that the function needs; others, such as keys, it does not see.
    """
    file, _, attribute = name.rpartition(":")
    function = FileTool(find_file(file, folder), attribute, file, env)
    name = function.__name__
    return Tool(name=name, function=function, schema=function.schema, source=f"`{name}` ({function.where})")


def _outcome(reply: Mapping[str, Any]) -> Outcome:
    """The outcome that a worker sent as JSON; a failure for what no worker sends."""
    content, problem, length = (reply.get(key) for key in Outcome._fields)
    if isinstance(content, (str, list)) and problem in get_args(CallProblem) and type(length) is int:
        return Outcome(content, cast(CallProblem, problem), length)
    return failure(str(reply.get("refused", "the tool's process sent what is no result")), "error")


# ---- in the worker ----


def answer(request: Mapping[str, Any], took: Callable[[int], None]) -> Iterator[Any]:
    """The reply to one request: the schema of the function, or what came of calling it."""
    path, attribute, shown = request["function"]
    try:
        function = function_from_file(Path(path), attribute, shown, rule="a tool is a function")
        described = (
            {"schema": _schema(function, attribute), "where": location(function)} if "describe" in request else {}
        )
    except PodiumError as error:
        yield {"refused": error.what, "fix": error.fix, "code": error.code}
        return
    if "arguments" not in request:
        yield described
        return
    if request["seed"] is not None:
        calls.seed(request["seed"])
    arguments, cut = request["arguments"], request["cut"]
    if is_async(function):
        yield calls.loop().run_until_complete(call_async(function, arguments, cut))._asdict()
    else:
        yield call(function, arguments, cut)._asdict()


def _schema(function: Any, name: str) -> dict[str, Any]:
    """The schema, without the import of torch that transformers makes for its hint `torch.Tensor` alone."""
    from transformers.utils import chat_template_utils

    chat_template_utils.is_torch_available = lambda: False
    return {**json_schema(function, f"`{name}` ({location(function)})")}
