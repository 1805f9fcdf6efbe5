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
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

from podium.isolation.workers import stop_all

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
    reading, writing = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
        process = os.fork()
    if process == 0:
        reading.close()
        _child(work, writing)
    writing.close()
    try:
        yield from _messages(reading, time.monotonic() + seconds, seconds)
    finally:
        reading.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _child(work: Callable[[Send], None], writing: Connection) -> None:
    """Run `work` and leave without the parent's cleanup: its files and its workers are not the child's to close."""

    def send(message: Any) -> None:
        writing.send_bytes(pickle.dumps(message))  # as `send` would share the memory of tensors

    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        logging.disable()
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)  # the parent's pool of threads does not exist here
        if (tqdm := sys.modules.get("tqdm")) is not None:
            tqdm.tqdm.set_lock(threading.RLock())  # tqdm's own is shared: killed with it, a child would stop the parent
        try:
            work(send)
            send(_DONE)
        except BaseException as error:  # noqa: BLE001  the parent is told
            send(Ended(f"{type(error).__name__}: {error}"))
        stop_all()
    finally:
        os._exit(0)


_DONE = "podium: done"


def _messages(reading: Connection, deadline: float, seconds: float) -> Iterator[Any]:
    """Messages up to the last; raises `Ended` where there is no last."""
    while True:
        if not reading.poll(max(0.0, deadline - time.monotonic())):
            raise Ended(f"it did not end within {seconds:g} s")
        try:
            message = pickle.loads(reading.recv_bytes())
        except (EOFError, OSError):  # between two messages, or within one
            raise Ended("its process ended") from None
        if isinstance(message, Ended):
            raise message
        if message == _DONE:
            return
        yield message
