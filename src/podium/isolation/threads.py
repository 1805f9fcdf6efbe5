"""Threads of this process: work in one, the event loop of `async` functions in one, a server with one a connection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from http.server import ThreadingHTTPServer
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


# --- the event loop of functions that users give ---------------------------------------------------------------------

_LOCK = threading.Lock()


def background_loop(process_id: int) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """One loop per process, on a daemon thread, for rewards and tools, so that what they opened in it stays usable.

    A forked child gets its own, since threads do not survive a fork.
    """
    with _LOCK:
        return _loop_of(process_id)


@functools.cache
def _loop_of(process_id: int) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=f"podium-async-{process_id}", daemon=True)
    thread.start()
    return loop, thread


def abandon(loop: asyncio.AbstractEventLoop) -> None:
    """Leave a loop that is blocked to its thread; the next call of `background_loop` starts another."""
    with _LOCK:
        if _loop_of(os.getpid())[0] is loop:
            _loop_of.cache_clear()


# --- a server --------------------------------------------------------------------------------------------------------

MOST_CONNECTIONS = 1024


class BoundedServer(ThreadingHTTPServer):
    """Closes a connection beyond `MOST_CONNECTIONS` at once; those that are open are served on."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._open: set[socket.socket] = set()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._open.add(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread is left
            self._closed(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The whole connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._closed(request)

    def _closed(self, request: Any) -> None:
        self._open.discard(request)
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away while it is answered is no error; all else keeps its traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def drop(self) -> None:
        """End all connections, and with them their threads."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
