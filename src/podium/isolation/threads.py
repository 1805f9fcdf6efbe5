"""Work in a thread of its own, which is left behind where it does not end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run in a daemon thread: unlike an executor's, it cannot keep a process that has ended from exiting."""
    future: Future[T] = Future()

    def run() -> None:
        settle: Callable[[Any], None] = future.set_result
        try:
            result: Any = work()
        except BaseException as error:  # noqa: BLE001  raised again by `result`
            settle = future.set_exception
            result = error
        with contextlib.suppress(InvalidStateError):  # it was given up
            settle(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
