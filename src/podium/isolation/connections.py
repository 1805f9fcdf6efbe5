"""A server of HTTP with a thread for each connection, and no more of them than it can bear."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from http.server import ThreadingHTTPServer
from typing import Any

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
            self._over(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The whole connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._over(request)

    def _over(self, request: Any) -> None:
        self._open.discard(request)
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away while it is answered is no error; all else keeps its traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def drop(self) -> None:
        """End all connections, and with them their threads."""
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
