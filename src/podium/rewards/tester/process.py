"""A reward in a process of its own, which can be killed, and started anew to forget what earlier calls left behind."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from podium.errors import PodiumError, RewardError
from podium.rewards.resolve import Reward, resolve_rewards
from podium.rewards.tester.asking import FIRST_CALL_SECONDS, Answer, Described, Problem, Request, call, describe

LOAD_SECONDS = 120.0
"""Limit of importing the function."""
GRACE_SECONDS = 2.0
"""After the limit, for the boundary inside the process to end the call itself."""
MAX_RESTARTS = 6
"""Hangs and crashes after which the rest is not asked any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """How another process gets the function: `loader` is `module:function`, called with `arguments`."""

    loader: str
    arguments: tuple[Any, ...]
    limit_seconds: float = 10.0
    path: tuple[str, ...] = ()
    """In front of the import path."""


class RemoteAsker:
    """Calls a function that a process of its own loads; the process is killed when it hangs.

    Raises:
        PodiumError: what the loader said, as it said it.
    """

    can_restart = True

    def __init__(self, source: Source) -> None:
        self.source = source
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._restarts = 0
        self._is_new = True
        self._first: Request | None = None
        """The first call that went well; a new process makes it before others."""
        self.described = self._start()

    def ask(self, request: Request) -> Answer:
        """One call; a process that was lost before is started anew."""
        if self._restarts >= MAX_RESTARTS:
            return Answer(
                values=None, problem=Problem(code="W016", message="not asked: too many calls hung or crashed")
            )
        if self._first is None:
            answer = self._exchange(request, max(self.source.limit_seconds, FIRST_CALL_SECONDS))
            self._first = request if answer.problem is None else None
            return answer
        if self._is_new:  # what took long at the first call takes long again
            self._exchange(self._first, max(self.source.limit_seconds, FIRST_CALL_SECONDS))
        return self._exchange(request, self.source.limit_seconds)

    def _exchange(self, request: Request, limit: float) -> Answer:
        start = time.perf_counter()
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(request)
            if not self._connection.poll(limit + GRACE_SECONDS):
                return self._lost(time.perf_counter() - start, limit)
            self._is_new = False
            return self._connection.recv()
        except (EOFError, OSError):
            return self._lost(time.perf_counter() - start, None)

    def restart(self) -> None:
        """A new process at the next call."""
        self.close()

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._errors.close()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        self._is_new = True

    def _start(self) -> Described:
        ours, theirs = Pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # what a function prints is not the tester's output
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_PACKAGES), os.environ.get("PYTHONPATH", "")])},
        )
        theirs.close()
        self._connection = ours
        ours.send(replace(self.source, path=tuple(sys.path)))
        try:
            found = ours.recv() if ours.poll(LOAD_SECONDS) else None
        except EOFError:
            found = None
        if isinstance(found, Described):
            return found
        said = self._said()
        self.close()
        raise (
            found
            if isinstance(found, PodiumError)
            else RewardError(f"loading the reward ended its process\n{said}", code="W013")
        )

    def _lost(self, seconds: float, limit: float | None) -> Answer:
        """The process hangs (with a `limit`) or has ended; the next call starts another."""
        assert self._process is not None
        said = self._said()
        status = self._process.poll()
        self.close()
        self._restarts += 1
        who = str(self.described)
        if limit is not None:
            problem = Problem(code="W016", message=f"{who} did not return within {limit:g} s\n{said}")
            return Answer(values=None, problem=problem, seconds=seconds)
        how = f"signal {-status}" if status is not None and status < 0 else f"exit code {status}"
        message = f"{who} ended the process it ran in ({how})\n{said}".rstrip()
        return Answer(values=None, problem=Problem(code="W017", message=message), seconds=seconds)

    def _said(self) -> str:
        """The stack that the process dumped, or the last it wrote to its stderr."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", errors="replace").splitlines()
        stack = [line for line in lines if line.startswith("  File ") and not any(ours in line for ours in _OURS)]
        return "\n".join(f"  {line}" for line in (stack or lines)[:MAX_SAID])


MAX_SAID = 12
"""Lines of a stack that are passed on."""

_PACKAGES = Path(__file__).parents[3]
_OURS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "score.py"), "<string>")
_CHILD = "import sys; from podium.rewards.tester.process import serve; serve(int(sys.argv[1]))"


def serve(fd: int) -> None:
    """The process of a `RemoteAsker`: loads the function, says what it is, answers until the other end goes."""
    connection: Connection[Any, Any] = Connection(fd)
    source: Source = connection.recv()
    sys.path[:] = source.path
    try:
        reward = load(source)
        connection.send(describe(reward))
    except PodiumError as error:
        connection.send(_portable(error))
        return
    is_first = True
    while True:
        try:
            request: Request = connection.recv()
        except EOFError:
            return
        limit = max(source.limit_seconds, FIRST_CALL_SECONDS) if is_first else source.limit_seconds
        answer = call(reward, request, limit)
        is_first = is_first and answer.problem is not None
        connection.send(answer)


def load(source: Source) -> Reward:
    """The reward that a source stands for."""
    module, _, name = source.loader.partition(":")
    found = getattr(importlib.import_module(module), name)(*source.arguments)
    return resolve_rewards([found])[0]


def _portable(error: PodiumError) -> PodiumError:
    """The error, if it can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except (pickle.PicklingError, TypeError, AttributeError):
        return RewardError(error.what, code="W013", fix=error.fix)
    return error
