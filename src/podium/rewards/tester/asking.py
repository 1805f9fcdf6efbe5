"""Calls to the function under audit, each with a limit: in a process that can be killed, or in a thread.

    asker = RemoteAsker(Source(loader="podium.recipe.rewards:find_reward", arguments=("my.py:correct", {}, folder)))
    asker.ask(Request(groups=groups))         # an Answer: values, or the problem that came instead

All calls go through `podium.rewards.score`, so the function gets what it gets in training.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import functools
import inspect
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from podium.errors import PodiumError, RewardError
from podium.records import Group
from podium.rewards.resolve import GIVEN, Reward
from podium.rewards.score import score

LOAD_SECONDS = 120.0
"""Limit of importing the function."""
FIRST_CALL_SECONDS = 30.0
"""Least limit of the first call: it may import libraries or load a model."""
MAX_RESTARTS = 6
"""Hangs and crashes after which the rest is not asked any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why there are no values."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of the function."""

    groups: tuple[Group, ...]
    seed: int = 0
    """Of `random` and numpy's global generator, set before the call."""
    check_inputs: bool = False
    """Whether to look for changes to the arguments afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one call."""

    values: tuple[float, ...] | None
    """One for each completion, NaN for None; None where there is a problem."""
    problem: Problem | None = None
    seconds: float = 0.0
    mutated: tuple[str, ...] = ()
    """Arguments that the function changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What a signature says, without the function."""

    name: str
    where: str
    wants: frozenset[str] | None
    needs: tuple[str, ...]
    is_async: bool
    code_text: str
    """The function's source, for the tags it names; empty where Python does not have it."""


class Asker(Protocol):
    """Whoever calls the function."""

    described: Described
    can_restart: bool

    def ask(self, request: Request) -> Answer:
        """One call, at most as long as the limit."""

    def restart(self) -> None:
        """Forget all that earlier calls may have left behind."""

    def close(self) -> None:
        """End what is still running."""


def describe(reward: Reward) -> Described:
    """The part of a reward that can cross to another process."""
    try:
        code_text = inspect.getsource(inspect.unwrap(_inner(reward.function)))
    except (OSError, TypeError):
        code_text = ""
    function = reward.function
    settings = " ".join(map(str, function.keywords.values())) if isinstance(function, functools.partial) else ""
    return Described(
        name=reward.name,
        where=reward.where,
        wants=reward.wants,
        needs=reward.needs,
        is_async=reward.is_async,
        code_text=f"{code_text}\n{settings}",
    )


def _inner(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function)


# --- one call --------------------------------------------------------------------------------------------------------


def call(reward: Reward, request: Request) -> Answer:
    """One call in this thread; whatever goes wrong becomes a `Problem`."""
    _seed(request.seed)
    changed: list[str] = []
    if request.check_inputs and not reward.is_async:
        reward = replace(reward, function=_watched(reward.function, changed))
    start = time.perf_counter()
    try:
        scored = score(request.groups, [reward], trainer_state=_trainer_state(reward))
    except PodiumError as error:
        code = error.code if isinstance(error, RewardError) else "W010"
        return Answer(values=None, problem=Problem(code=code, message=str(error)), seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    values = np.concatenate([group.rewards_GK[:, 0] for group in scored])
    return Answer(values=tuple(values.tolist()), seconds=seconds, mutated=tuple(changed))


def _watched(function: Any, changed: list[str]) -> Any:
    """The function, noting which of its arguments are other than before."""

    def watched(**arguments: Any) -> Any:
        data = {name: value for name, value in arguments.items() if name not in GIVEN[3:]}
        before = copy.deepcopy(data)
        answer = function(**arguments)
        changed.extend(name for name, value in data.items() if not _same(value, before[name]))
        return answer

    return watched


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arrays inside
        return repr(one) == repr(other)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


@functools.cache
def _first_state() -> Any:
    from transformers import TrainerState

    return TrainerState(global_step=0, max_steps=100)


def _trainer_state(reward: Reward) -> Any:
    """A real one, made only for those who name it: the import takes seconds."""
    return _first_state() if "trainer_state" in (reward.wants or ()) else None


# --- in a thread -----------------------------------------------------------------------------------------------------


class LocalAsker:
    """Calls a function of this process. A call that hangs is left behind in its thread, and no other is made."""

    can_restart = False

    def __init__(self, reward: Reward, limit_seconds: float) -> None:
        self.reward = reward
        self.limit_seconds = limit_seconds
        self.described = describe(reward)
        self._hangs: Problem | None = None
        self._asked = False

    def ask(self, request: Request) -> Answer:
        """In a thread, with the random generators of the process as they were afterwards."""
        if self._hangs is not None:
            return Answer(values=None, problem=self._hangs)
        answers: list[Answer] = []
        states = random.getstate(), np.random.get_state()
        thread = threading.Thread(target=lambda: answers.append(call(self.reward, request)), daemon=True)
        thread.start()
        limit = self.limit_seconds if self._asked else max(self.limit_seconds, FIRST_CALL_SECONDS)
        thread.join(limit)
        random.setstate(states[0])
        np.random.set_state(states[1])
        if not answers:
            self._hangs = _hang(str(self.reward), limit, _stack_of(thread))
            return Answer(values=None, problem=self._hangs, seconds=limit)
        self._asked = True
        return answers[0]

    def restart(self) -> None:
        """What a function keeps in this process cannot be taken from it."""

    def close(self) -> None:
        """A daemon thread ends with the process."""


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)[-3:]) if frame else ""


def _hang(who: str, limit: float, stack: str) -> Problem:
    place = f"\n  it was at\n{stack.rstrip()}" if stack.strip() else ""
    return Problem(code="W009", message=f"{who} did not return within {limit:g} s{place}")


# --- in a process ----------------------------------------------------------------------------------------------------


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
                values=None, problem=Problem(code="W009", message="not asked: too many calls hung or crashed")
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
            if not self._connection.poll(limit):
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
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
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
        who = f"reward function `{self.described.name}`" + (
            f" ({self.described.where})" if self.described.where else ""
        )
        if limit is not None:
            return Answer(values=None, problem=_hang(who, limit, said), seconds=seconds)
        how = f"signal {-status}" if status is not None and status < 0 else f"exit code {status}"
        message = f"{who} ended the process it ran in ({how})\n{said}".rstrip()
        return Answer(values=None, problem=Problem(code="W010", message=message), seconds=seconds)

    def _said(self, num_lines: int = 12) -> str:
        """The stack that the process dumped, or the last it wrote to its stderr."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", errors="replace").splitlines()
        stack = [line for line in lines if line.startswith("  File ") and not any(ours in line for ours in _OURS)]
        return "\n".join(f"  {line}" for line in (stack or lines)[:num_lines])


_PACKAGES = Path(__file__).parents[3]
_OURS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "score.py"), "<string>")
_CHILD = "import sys; from podium.rewards.tester.asking import serve; serve(int(sys.argv[1]))"


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
    while True:
        try:
            request: Request = connection.recv()
        except EOFError:
            return
        # Said before the other end loses patience; kept for functions that hang in C, where no signal is handled.
        faulthandler.dump_traceback_later(max(0.1, 0.9 * source.limit_seconds), exit=False)
        answer = call(reward, request)
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)


def load(source: Source) -> Reward:
    """The reward that a source stands for."""
    import importlib

    from podium.rewards.resolve import resolve_rewards

    module, _, name = source.loader.partition(":")
    found = getattr(importlib.import_module(module), name)(*source.arguments)
    return resolve_rewards([found])[0]


def _portable(error: PodiumError) -> PodiumError:
    """The error, if it can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except (pickle.PicklingError, TypeError, AttributeError):
        return RewardError(str(error), code="W013")
    return error
