"""`async` reward functions: at the same time, on a loop in the background, each within its limit."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, replace
from typing import Any

from podium.errors import PodiumError
from podium.isolation.event_loop import abandon, background_loop
from podium.isolation.workers.call_result import CallResult, Failure, raised, read_values
from podium.rewards.limits import OWN_FRAMES, Call, frames_above, last_resort, named, overran
from podium.rewards.process_state import ends_nothing

GRACE_SECONDS = 0.2
"""After the limit, how long the loop has to cancel a function; then one of them does not let go."""


@dataclass(slots=True)
class _Pending:
    call: Call
    run: Any
    """`_run` with a frame that names the function."""
    result: CallResult | None = None
    error: PodiumError | None = None


def call_together(calls: Sequence[Call], limit: float | None) -> list[CallResult]:
    """The result of every call; the caller may have a loop of its own. A `PodiumError` is let through."""
    if not calls:
        return []
    pending = [_Pending(call, named(_run, call.label, limit)) for call in calls]
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


async def _run(call: Call) -> Any:
    with ends_nothing(call.label):
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
