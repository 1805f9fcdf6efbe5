"""The event loop of `async` functions that users give: rewards and tools share it, and what they opened in it."""

from __future__ import annotations

import asyncio
import functools
import os
import threading

_LOCK = threading.Lock()


def background_loop(process_id: int) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """One loop per process, on a daemon thread; a forked child gets its own, since threads do not survive a fork."""
    with _LOCK:
        return _made(process_id)


@functools.cache
def _made(process_id: int) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=f"podium-async-{process_id}", daemon=True)
    thread.start()
    return loop, thread


def abandon(loop: asyncio.AbstractEventLoop) -> None:
    """Leave a loop that is blocked to its thread; the next call of `background_loop` starts another."""
    with _LOCK:
        if _made(os.getpid())[0] is loop:
            _made.cache_clear()
