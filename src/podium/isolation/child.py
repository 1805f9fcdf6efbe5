"""The process of a worker: takes requests and answers them until its parent closes the connection.

    python -m podium.isolation.child TARGET SOCKET SCRATCH PARENT DIE_WITH

`TARGET` is `module:function` or `file.py:function`. It is called with each request and a function to note in `SCRATCH`
which completion is in hand, and yields the replies to that request: plain data, or records of plain data. A
`PodiumError` that it raises is the reply `{"refused": ..., "fix": ..., "code": ...}`. A request is two pickles, the
import path and what was sent (from the parent alone); a reply is JSON. `SCRATCH` is a file that outlives this process:
its first eight bytes are the number noted last, then come the stacks that `faulthandler` writes when the process is
asked for them (SIGUSR1, also in the middle of a C call) or crashes.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import importlib
import io
import json
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podium.errors import PodiumError
from podium.isolation.user_files import module_from_file

LENGTH = struct.Struct("!Q")
INDEX = struct.Struct("=q")
NOTHING_TAKEN = -1
PR_SET_PDEATHSIG = 1


def serve(connection: socket.socket, scratch: int, target: str) -> None:
    """Answer requests until the parent closes the connection."""

    def took(index: int) -> None:
        os.pwrite(scratch, INDEX.pack(index), 0)

    while (frame := _receive(connection)) is not None:
        took(NOTHING_TAKEN)
        try:
            request = _unpickled(frame)
        except Exception as error:  # noqa: BLE001  a class that only the parent has
            what = f"what it is called with cannot be read in a worker: {type(error).__name__}: {error}"
            replies = iter([{"refused": what}])
        else:
            replies = _target(target)(request, took)
        try:
            for reply in replies:
                _send(connection, reply)
        except PodiumError as error:
            _send(connection, {"refused": error.what, "fix": error.fix, "code": error.code})


def _send(connection: socket.socket, reply: Any) -> None:
    message = json.dumps(reply, default=dataclasses.asdict).encode()
    connection.sendall(LENGTH.pack(len(message)) + message)


def _target(target: str) -> Callable[..., Any]:
    place, _, function = target.rpartition(":")
    module = module_from_file(Path(place), place) if place.endswith(".py") else importlib.import_module(place)
    return getattr(module, function)


def _unpickled(frame: bytes) -> Any:
    """The second of two pickles, read once the first, the parent's import path, is in force."""
    stream = io.BytesIO(frame)
    path = pickle.load(stream)
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    return pickle.load(stream)


def _receive(connection: socket.socket) -> bytes | None:
    header = _exactly(connection, LENGTH.size)
    return None if header is None else _exactly(connection, *LENGTH.unpack(header))


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    buffer = bytearray()
    while len(buffer) < count:
        chunk = connection.recv(min(count - len(buffer), 1 << 20))
        if not chunk:
            return None
        buffer += chunk
    return bytes(buffer)


def end_with(parent: int, *, of_thread: bool) -> None:
    """Die when the parent does, however it does.

    `of_thread`: the kernel may do it (Linux); its signal comes when the parent's *thread* ends that started this
    process, so only the main thread's children use it.
    """
    if of_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Set the process up and serve."""
    target, *numbers = sys.argv[1:]
    descriptor, scratch, parent, of_thread = map(int, numbers)
    for number in (descriptor, scratch):
        os.set_inheritable(number, False)
    end_with(parent, of_thread=bool(of_thread))
    with contextlib.suppress(OSError):  # where memory runs out, this process goes before the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.enable(file=scratch, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=scratch, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), socket.socket(fileno=descriptor) as connection:
        serve(connection, scratch, target)
    os._exit(0)  # no thread that a function left behind holds this process


if __name__ == "__main__":
    main()
