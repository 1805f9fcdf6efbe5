"""Calls of reward functions in this process: waited for, and said where they take long.

    result = call_here(reward, arguments, long_after=60.0)

Nothing ends such a call: whether it hangs or the machine is slow cannot be known, and Python has no safe way to stop a
function. One that may hang belongs into a file, `FILE.py:FUNCTION`; its process can be killed (`reward_timeout`).

`async` functions run at the same time, on a loop in the background (`call_together`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from podium.errors import PodiumError
from podium.isolation import functions, reward_calls, reward_results
from podium.isolation.reward_results import CallResult, raised, read_values
from podium.isolation.threads import background_loop
from podium.rewards.process_state import ends_nothing, restored
from podium.rewards.resolve import Reward

logger = logging.getLogger(__name__)

LONG_SECONDS = 60.0
"""Seconds that a call may run before a warning names it, unless `reward_timeout` is set."""

OWN_FRAMES = frozenset(
    [
        functions.__file__,
        reward_calls.__file__,
        reward_results.__file__,
        *(str(Path(__file__).with_name(f"{name}.py")) for name in ("call", "combine", "score", "process_state")),
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
