"""A function run in a forked child: it sees this process as it is, and changes nothing in it.

    for message in forked(lambda send: send(1), seconds=10.0):
        ...

Rewards given in Python hold state that cannot be sent to another process (closures, counters, models); a fork has it,
and keeps its changes. A child that hangs is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

Send = Callable[[Any], None]


class Ended(Exception):
    """The child ended early; the message is how."""


def forked(work: Callable[[Send], None], *, seconds: float) -> Iterator[Any]:
    """The messages of `work`, in their order. The child's output is dropped; without a fork it runs in this process.

    Args:
        work: called in the child with a function that sends one object.
        seconds: wall-clock time after which the child is killed.

    Raises:
        Ended: the child was killed, crashed, or raised.
    """
    if not hasattr(os, "fork"):
        sent: list[Any] = []
        work(sent.append)
        yield from sent
        return
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
        process = os.fork()
    if process == 0:
        os.close(reading)
        _child(work, writing)
    os.close(writing)
    try:
        yield from _messages(reading, time.monotonic() + seconds, seconds)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _child(work: Callable[[Send], None], writing: int) -> None:
    """Run `work` and leave without the parent's cleanup: its files and its workers are not the child's to close."""
    from podium.isolation.workers.process import stop_all

    def send(message: Any) -> None:
        body = pickle.dumps(message)
        _write(writing, len(body).to_bytes(8, "big") + body)

    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        logging.disable()
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)  # the parent's pool of threads does not exist here
        try:
            work(send)
            send(_DONE)
        except BaseException as error:  # noqa: BLE001  the parent is told
            send(Ended(f"{type(error).__name__}: {error}"))
        stop_all()
    finally:
        os._exit(0)


_DONE = "podium: done"


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _messages(reading: int, deadline: float, seconds: float) -> Iterator[Any]:
    """Messages up to the last; raises `Ended` where there is no last."""
    buffer = b""
    while True:
        while len(buffer) < 8 or len(buffer) < 8 + int.from_bytes(buffer[:8], "big"):
            ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Ended(f"it did not end within {seconds:g} s")
            part = os.read(reading, 1 << 16)
            if not part:
                raise Ended("its process ended")
            buffer += part
        size = 8 + int.from_bytes(buffer[:8], "big")
        message, buffer = pickle.loads(buffer[8:size]), buffer[size:]
        if isinstance(message, Ended):
            raise message
        if message == _DONE:
            return
        yield message
