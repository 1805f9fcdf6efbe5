"""Cores and memory that this process may use, as affinity masks and control groups limit them; signals to end.

Containers are limited by control groups, which neither `os.cpu_count` nor torch looks at. Everything that cannot be
found out is no limit.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

GROUPS = Path("/sys/fs/cgroup")  # directory in which Linux shows the control group of this process
END_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals with which schedulers, and terminals that are closed, end a run."""


def own_address(host: str, port: int = 1) -> str:
    """Return the address of this machine on the way to another. Raises `OSError` where there is no way."""
    kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect(place)
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def on_end_signals(handle: Callable[[int, Any], object], *, interrupts: bool = False) -> Iterator[None]:
    """Call `handle` where one of `END_SIGNALS` comes, unless it is ignored, as `nohup` has it for SIGHUP.

    Only the main thread may say what a signal does; in another one nothing changes. `interrupts`: whether Ctrl-C is
    handled alike.
    """
    signals = (*END_SIGNALS, signal.SIGINT) if interrupts else END_SIGNALS
    possible = signals if threading.current_thread() is threading.main_thread() else ()
    asked = [number for number in possible if signal.getsignal(number) != signal.SIG_IGN]
    before = [signal.signal(number, handle) for number in asked]
    try:
        yield
    finally:
        for number, handler in zip(asked, before, strict=True):
            signal.signal(number, handler)


def drop_if_gone(descriptor: int) -> None:
    """Send what is written to a terminal that was closed nowhere, as every write to it would fail."""
    try:
        os.write(descriptor, b"")
    except OSError:
        to_nowhere(descriptor)


def to_nowhere(descriptor: int) -> None:
    """Discard what is written to a descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def cores() -> int:
    """Whole cores' worth of time that this process may use; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _quota() -> float | None:
    """Cores of time a control group grants: version 2 of the interface, then version 1; None without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        words = " ".join(_read(name) for name in names).split()
        if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
            return int(words[0]) / int(words[1])
    return None


def group_memory() -> int | None:
    """Bytes that the control group still leaves; None without a limit.

    The page cache counts as used there, and is given back when memory gets scarce: it counts as free here.
    """
    for limit, used, statistics, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        most = _read(limit).strip()
        now = _read(used).strip()
        if most.isdigit() and now.isdigit():
            cached = dict(line.split() for line in _read(statistics).splitlines() if len(line.split()) == 2)
            return int(most) - int(now) + int(cached.get(cache, 0))
    return None


def _read(name: str) -> str:
    try:
        return (GROUPS / name).read_text()
    except OSError:
        return ""


def fit_threads() -> None:
    """Give torch no more threads than there are cores, unless the environment says how many.

    Threads beyond a container's quota wait for each other: two cores' worth of time spread over 64 threads is several
    times slower than two threads.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > (most := cores()):
        logger.info("%d threads instead of %d: the container may use no more.", most, torch.get_num_threads())
        torch.set_num_threads(most)
