"""A call in this process that ends at its limit, whatever it does.

    result = limited(Call(function, arguments, "reward function `judge` (my.py:3)"), limit=60.0)

Three layers, from kind to blunt:

1. On the main thread the function is interrupted where it is, by a signal that a timer sends: a sleep, a lock, a
   socket, a loop, a regular expression. A timer on the processor's time reaches calls that keep Python's lock to
   themselves, such as `9**9**9`. The signal is SIGVTALRM; `signal.alarm` stays the function's own.
2. On another thread the function runs in a thread of its own, which is left behind at the limit.
3. What neither reaches, a call into C that never looks for signals, ends the process `LAST_RESORT_SECONDS` later:
   stacks on stderr, among them a frame that names the function, and exit code 1. Functions given as files never need
   this: their process is killed.

`async` functions run at the same time, on a loop in the background, each within its limit (`call_together`).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NamedTuple

from podium.errors import PodiumError
from podium.isolation import off_main
from podium.isolation.event_loop import abandon, background_loop
from podium.isolation.off_main import signals_said
from podium.isolation.workers import calls
from podium.isolation.workers.call_result import CallResult, Failure, in_hand, is_ours, raised, read_values, trace_lines
from podium.rewards.from_file import OVERRUN_FIX
from podium.rewards.process_state import ends_nothing

logger = logging.getLogger(__name__)

LAST_RESORT_SECONDS = 0.7
"""After the limit, how long a call may resist before the process ends."""

AGAIN_SECONDS = 0.1
"""Between two interrupts of a call that swallowed the first."""

TICK_SECONDS = 0.05
"""Processor time between two looks at the clock during a call that lets no other thread run."""

LONG_SECONDS = 60.0
"""Of a call before it is said that the run waits for it."""

STDERR = 2

OFF_MAIN_FIX = (
    "name the function by its file, `FILE.py:FUNCTION`, in `rewards` or `reward_funcs`: it then runs on the main "
    "thread of a process of its own"
)

OWN_FRAMES = frozenset(
    [
        calls.__file__,
        off_main.__file__,
        *(str(Path(__file__).with_name(f"{x}.py")) for x in ("limits", "combine", "score", "process_state")),
    ]
)
"""Files whose frames do not belong in a user's traceback."""


class Call(NamedTuple):
    """A function with what it is called with."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    label: str

    @property
    def completions(self) -> Any:
        """The very objects that the function is handed."""
        return self.arguments.get("completions", ())


def limited(call: Call, limit: float | None) -> CallResult:
    """The result of a call.

    A `PodiumError` is let through, since it is a message already; so is an interrupt by the user (Ctrl-C). Everything
    else that is raised is part of the result.
    """
    run = named(_run, call.label, limit)
    if limit is None:
        return run(call)
    with last_resort(limit):
        if threading.current_thread() is threading.main_thread():
            return _interruptible(run, call, limit)
        return _left_behind(run, call, limit)


def _run(call: Call) -> CallResult:
    """The call, and a look at its result, which may run code of the user's, too."""
    try:
        with ends_nothing(call.label), signals_said(call.label, OFF_MAIN_FIX):
            return read_values(call.function(**call.arguments))
    except (PodiumError, Overrun):
        raise
    except BaseException as error:  # also `exit()`: a run must not end without a word
        if type(error) is KeyboardInterrupt:
            raise
        return CallResult(failures=(raised(error, OWN_FRAMES, call.completions),), error=error)


def named(function: Any, label: str, limit: float | None) -> Any:
    """The function with a frame that names the reward it runs: all that the last resort can print are frames."""
    what = (
        f"<reward {label.removeprefix('reward ')} did not stop at its limit of {limit} s, in a call that Python cannot "
    )
    code = function.__code__.replace(
        co_filename=f"{what}interrupt; the run ends with exit code 1. Give it as a file, `file.py:function`>"
    )
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


@contextlib.contextmanager
def last_resort(limit: float | None) -> Iterator[None]:
    """Ends the process if the block is not left some time after the limit."""
    if limit is None:
        yield
        return
    faulthandler.dump_traceback_later(limit + LAST_RESORT_SECONDS, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def overran(limit: float, frames: list[FrameType], completions: Any) -> CallResult:
    """The result of a call that was in these frames, outermost first, when its time was up."""
    theirs = [i for i, frame in enumerate(frames) if not is_ours(frame, OWN_FRAMES)]
    users = frames[theirs[0] : theirs[-1] + 1] if theirs else []
    failure = Failure(
        kind="stopped",
        what=f"ran over its limit of {limit:g} s",
        fix=OVERRUN_FIX,
        code="W016",
        trace=trace_lines(traceback.StackSummary.extract((frame, frame.f_lineno) for frame in users)),
        index=in_hand(users, completions),
    )
    return CallResult(failures=(failure,))


@contextlib.contextmanager
def said_when_long(*labels: str) -> Iterator[None]:
    """Warn when a block has lasted `LONG_SECONDS`, and whenever it has lasted twice as long, with the line it is at.

    It ends nothing: whether the call hangs or the machine is slow cannot be known here.
    """
    done, caller, base = threading.Event(), threading.get_ident(), sys._getframe()

    def watch() -> None:
        seconds = waited = LONG_SECONDS
        while not done.wait(waited):
            frames = frames_above(base, sys._current_frames().get(caller))
            theirs = [frame for frame in frames if not is_ours(frame, OWN_FRAMES)]
            at = f", now in line {theirs[-1].f_lineno} of {theirs[-1].f_code.co_filename}" if theirs else ""
            what = f"{', '.join(labels)} has run for {seconds:g} s{at}; the run waits for it"
            logger.warning("%s. To end such calls set `reward_timeout` (in seconds).", what)
            seconds, waited = 2 * seconds, seconds

    threading.Thread(target=watch, name="podium-reward", daemon=True).start()
    try:
        yield
    finally:
        done.set()


# ---- on the main thread ----


class Overrun(BaseException):
    """Thrown into a call whose time is up."""


@dataclass(slots=True)
class _Watch:
    limit: float
    completions: Any
    deadline: float
    base: FrameType
    """The frame that makes the call."""
    overrun: CallResult | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        """Interrupt the call, again and again where it goes on."""
        now = time.monotonic()
        if self.done.is_set() or now < self.deadline:
            return
        self.deadline = now + AGAIN_SECONDS
        if self.overrun is None:
            self.overrun = overran(self.limit, frames_above(self.base, frame), self.completions)
        raise Overrun

    def send_signals(self) -> None:
        """Reach a main thread that waits: for a lock, a socket, the clock."""
        if not self.done.wait(self.limit):
            while not self.done.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGVTALRM)
                self.done.wait(AGAIN_SECONDS)


def _interruptible(run: Callable[[Call], CallResult], call: Call, limit: float) -> CallResult:
    watch = _Watch(limit, call.completions, time.monotonic() + limit, sys._getframe())
    with _watched(watch):
        try:
            result = run(call)
        except Overrun:
            result = None
        watch.done.set()
    # A function that swallowed the interrupt may have returned something made up on the way out.
    return watch.overrun or result  # type: ignore[return-value]


@contextlib.contextmanager
def _watched(watch: _Watch) -> Iterator[None]:
    before = signal.signal(signal.SIGVTALRM, watch.on_signal)
    sender = threading.Thread(target=watch.send_signals, daemon=True)
    sender.start()
    # It counts this process's time on the processor, which may be a small part of the clock's on a busy machine.
    signal.setitimer(signal.ITIMER_VIRTUAL, watch.limit / 10, TICK_SECONDS)
    try:
        yield
    finally:
        watch.done.set()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        sender.join()
        # The default action is to die; a signal on its way must not meet it.
        signal.signal(signal.SIGVTALRM, before if callable(before) else signal.SIG_IGN)


def frames_above(base: FrameType | None, frame: FrameType | None) -> list[FrameType]:
    """Outermost first, without `base`."""
    frames = []
    while frame is not None and frame is not base:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


# ---- on any other thread ----


def _left_behind(run: Callable[[Call], CallResult], call: Call, limit: float) -> CallResult:
    """The function in a thread of its own, for a caller that is not on the main thread, which alone gets signals."""
    results: list[CallResult | BaseException] = []

    def work() -> None:
        try:
            results.append(run(call))
        except BaseException as error:  # noqa: BLE001  raised again below
            results.append(error)

    thread = threading.Thread(target=work, name="podium-reward", daemon=True)
    thread.start()
    thread.join(limit)
    if not results:
        frame = sys._current_frames().get(thread.ident or 0)
        return overran(limit, frames_above(sys._getframe(), frame), call.completions)
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


GRACE_SECONDS = 0.2
"""After the limit, how long the loop has to cancel a function; then one of them does not let go."""


@dataclass(slots=True)
class _Pending:
    call: Call
    run: Any
    """`_run_async` with a frame that names the function."""
    result: CallResult | None = None
    error: PodiumError | None = None


def call_together(calls: Sequence[Call], limit: float | None) -> list[CallResult]:
    """The result of every call; the caller may have a loop of its own. A `PodiumError` is let through."""
    if not calls:
        return []
    pending = [_Pending(call, named(_run_async, call.label, limit)) for call in calls]
    grace = None if limit is None else limit + GRACE_SECONDS
    start = time.perf_counter()

    async def gather() -> None:
        await asyncio.gather(*(_awaited(each, limit) for each in pending))

    future = asyncio.run_coroutine_threadsafe(gather(), background_loop(os.getpid())[0])
    try:
        with last_resort(grace):
            future.result(grace)
    except NotDone:
        _give_up(pending, limit or 0.0, time.perf_counter() - start)
    except BaseException:  # an interrupted run leaves no task behind
        future.cancel()
        raise
    for each in pending:
        if each.error is not None:
            raise each.error
    return [each.result for each in pending if each.result is not None]


async def _awaited(pending: _Pending, limit: float | None) -> None:
    start, call = time.perf_counter(), pending.call
    try:
        async with asyncio.timeout(limit) as scope:
            result = read_values(await pending.run(call))
    except PodiumError as error:
        pending.error = error
        return
    # Caught in the task itself: `SystemExit` and interrupts would end the loop and leave the caller waiting.
    except BaseException as error:  # noqa: BLE001
        if limit is not None and scope.expired() and isinstance(error, TimeoutError):
            inner = error.__context__ or error  # before Python 3.11.3 there is no __cause__
            frames = [frame for frame, _ in traceback.walk_tb(inner.__traceback__)]
            result = overran(limit, frames, call.completions)
        else:
            result = CallResult(failures=(raised(error, OWN_FRAMES, call.completions),), error=error)
    pending.result = replace(result, seconds=time.perf_counter() - start)


async def _run_async(call: Call) -> Any:
    with ends_nothing(call.label), signals_said(call.label, OFF_MAIN_FIX):
        return await call.function(**call.arguments)


def _give_up(pending: Sequence[_Pending], limit: float, seconds: float) -> None:
    """Leave the loop behind, with what does not let go of it; the next round gets a fresh one."""
    loop, thread = background_loop(os.getpid())
    frames = frames_above(None, sys._current_frames().get(thread.ident or 0))
    abandon(loop)
    codes = [id(each.f_code) for each in frames]  # code objects are equal whatever their files are called
    stuck = next((each for each in pending if id(each.run.__code__) in codes), None)
    for each in pending:
        if each.result is not None or each.error is not None:
            continue
        own = frames[codes.index(id(each.run.__code__)) :] if each is stuck else []
        result = overran(limit, own, each.call.completions)
        if stuck is not None and each is not stuck:
            what = f"could not finish within {limit:g} s: {stuck.call.label} blocks the event loop they share"
            fix = "await in that function, or write it without `async`"
            result = CallResult(failures=(Failure(kind="stopped", what=what, fix=fix, code="W016"),))
        each.result = replace(result, seconds=seconds)
