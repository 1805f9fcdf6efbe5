"""Calls of reward functions in this process: waited for, and said where they take long.

    result = call_here(reward, arguments, long_after=60.0)

Nothing ends such a call: whether it hangs or the machine is slow cannot be known, and Python has no safe way to stop a
function. One that may hang belongs into a file, `FILE.py:FUNCTION`; its process can be killed (`reward_timeout`).

State of the process that a function may change and that the run needs is put back after the call, and named
(`restored`); so are an end of this process and a copy of it (`ends_nothing`). Functions in files change their own
process alone. `async` functions run at the same time, on a loop in the background (`call_together`).
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import functools
import itertools
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from podium.errors import PodiumError
from podium.isolation import functions, reward_calls, reward_results
from podium.isolation.reward_results import CallResult, raised, read_values
from podium.isolation.threads import background_loop
from podium.rewards.resolve import Reward

logger = logging.getLogger(__name__)

LONG_SECONDS = 60.0
"""Seconds that a call may run before a warning names it, unless `reward_timeout` is set."""

OWN_FRAMES = frozenset(
    [
        functions.__file__,
        reward_calls.__file__,
        reward_results.__file__,
        *(str(Path(__file__).with_name(f"{name}.py")) for name in ("call", "combine", "score")),
    ]
)
"""Files whose frames do not belong in a user's traceback."""


def call_here(reward: Reward, arguments: Mapping[str, Any], *, long_after: float | None = None) -> CallResult:
    """The result of a call, and of a look at what it returned, which may run code of the user's, too.

    A `PodiumError` is let through, since it is a message already; so is an interrupt by the user (Ctrl-C). Everything
    else that is raised is part of the result. After `long_after` seconds a warning says that the run waits.
    """
    label = str(reward)
    with said_when_long(label, after=long_after), restored(label):
        try:
            with ends_nothing(label):
                return read_values(reward.function(**arguments))
        except PodiumError:
            raise
        except BaseException as error:  # also `exit()`: a run must not end without a word
            if type(error) is KeyboardInterrupt:
                raise
            return _failed(error, arguments)


def _failed(error: BaseException, arguments: Mapping[str, Any]) -> CallResult:
    """The result of a call that raised; the completions are the very objects that it was handed."""
    failure = raised(error, OWN_FRAMES, arguments.get("completions", ()))
    return CallResult(failures=(failure,), error=error)


def call_together(
    calls: Sequence[tuple[Reward, Mapping[str, Any]]], *, long_after: float | None = None
) -> list[CallResult]:
    """The result of every call of an `async` function with its arguments; the caller may have a loop of its own.

    A `PodiumError` is let through.
    """

    async def gather() -> list[CallResult | PodiumError]:
        return await asyncio.gather(*itertools.starmap(_awaited, calls))

    with said_when_long(*(str(reward) for reward, _ in calls), after=long_after):
        future = asyncio.run_coroutine_threadsafe(gather(), background_loop(os.getpid())[0])
        try:
            answers = future.result()
        except BaseException:  # an interrupted run leaves no task behind
            future.cancel()
            raise
    results = []
    for answer in answers:
        if isinstance(answer, PodiumError):
            raise answer
        results.append(answer)
    return results


async def _awaited(reward: Reward, arguments: Mapping[str, Any]) -> CallResult | PodiumError:
    start = time.perf_counter()
    try:
        with ends_nothing(str(reward)):
            result = read_values(await reward.function(**arguments))
    except PodiumError as error:
        return error
    # Caught in the task itself: `SystemExit` and interrupts would end the loop and leave the caller waiting.
    except BaseException as error:  # noqa: BLE001
        result = _failed(error, arguments)
    return replace(result, seconds=time.perf_counter() - start)


_said: set[str] = set()


@contextlib.contextmanager
def said_when_long(*labels: str, after: float | None = None) -> Iterator[None]:
    """Warn once of each function when the block has lasted so many seconds, with the line that it is at."""
    new = [label for label in labels if label not in _said]
    if not new:
        yield
        return
    caller = threading.get_ident()
    seconds = LONG_SECONDS if after is None else after

    def say() -> None:
        _said.update(new)
        logger.warning(
            "%s has run for %g s%s; the run waits for it. So that a call can be ended, give the function as "
            "`FILE.py:FUNCTION` and set `reward_timeout` (in seconds). (Said once.)",
            ", ".join(new),
            seconds,
            _where(sys._current_frames().get(caller)),
        )

    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _where(frame: FrameType | None) -> str:
    """The innermost line of a call of `call_here`, from the frame that a thread is in; empty outside of such a call."""
    innermost = frame
    while frame is not None and frame.f_code is not call_here.__code__:
        frame = frame.f_back
    if frame is None or innermost is None or innermost.f_code.co_filename in OWN_FRAMES:
        return ""
    return f", now in line {innermost.f_lineno} of {innermost.f_code.co_filename}"


# --- state of this process --------------------------------------------------------------------------------------------

_changes_said: set[tuple[str, str]] = set()


@contextlib.contextmanager
def restored(label: str) -> Iterator[None]:
    """Puts back what the block changes; a warning names `label` and what it was, once for each."""
    before = {what: read() for what, (read, _) in _STATE.items()}
    try:
        yield
    finally:
        for what, (read, restore) in _STATE.items():
            if before[what] is not None and read() != before[what]:
                restore(before[what])
                if (label, what) not in _changes_said:
                    _changes_said.add((label, what))
                    logger.warning("%s changed %s, which is put back after every call. (Said once.)", label, what)


_calls: list[int] = []
"""The process of every call that is under way; a forked child has its parent's, too."""


@contextlib.contextmanager
def ends_nothing(label: str) -> Iterator[None]:
    """Raise `SystemExit` where a call would end or replace this process; end forked copies that leave the block."""
    _refuse_endings()
    process = os.getpid()
    _calls.append(process)
    try:
        yield
    finally:
        if os.getpid() != process:
            what = f"{label} forked this process; the copy, which went on with the run, is ended."
            os.write(2, f"warning: {what} Let a child end with os._exit(0).\n".encode())
            os._exit(0)
        _calls.remove(process)


@functools.cache
def _refuse_endings() -> None:
    for name in ("_exit", "execv", "execve"):  # the other kinds of exec call one of the two
        setattr(os, name, _refused_in_calls(name, getattr(os, name)))


def _refused_in_calls(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        if os.getpid() in _calls:  # children that a call has forked may end
            raise SystemExit(f"os.{name} would have ended the run without a word")
        return function(*arguments)

    return called


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _umask() -> int | None:
    """Read without setting it, which other threads would see."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1], 8) if found else None
    return None


def _of_torch(read: str) -> Callable[[], Any]:
    return lambda: getattr(sys.modules["torch"], read)() if "torch" in sys.modules else None


def _to_torch(write: str) -> Callable[[Any], None]:
    return lambda value: getattr(sys.modules["torch"], write)(value)


def _builtins() -> dict[str, Any]:
    return {name: value for name, value in vars(builtins).items() if not name.startswith("_")}


def _restore_builtins(before: Mapping[str, Any]) -> None:
    for name in _builtins().keys() - before.keys():
        delattr(builtins, name)
    vars(builtins).update(before)


_STATE: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the working directory": (_folder, os.chdir),
    "the recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "the umask": (_umask, os.umask),
    "the alarm clock": (  # whether it is set: it ends a process that does not expect it
        lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        lambda before: before or signal.setitimer(signal.ITIMER_REAL, 0),
    ),
    "Python's builtins": (_builtins, _restore_builtins),
    "whether torch computes gradients": (_of_torch("is_grad_enabled"), _to_torch("set_grad_enabled")),
    "torch's default dtype": (_of_torch("get_default_dtype"), _to_torch("set_default_dtype")),
}
"""By what it is: how it is read (None: not known) and put back."""
