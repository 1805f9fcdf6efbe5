"""Limits a folder to one run at a time: the file `.running` names the process that trains there.

The file is locked (`flock`) where the file system can, so a killed process leaves no obstacle. Elsewhere, and where a
child has inherited the lock, the folder is free once the named process is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import psutil

from podium.errors import ConfigError
from podium.runs.checkpoint import storing
from podium.runs.run import json_object

NAME = ".running"

_ours: set[Path] = set()
"""Folders that this process trains in."""


@contextlib.contextmanager
def occupying(folder: Path) -> Iterator[None]:
    """Reserve a folder for this process, reentrantly.

    Raises:
        ConfigError: another process holds it.
        CheckpointError: nothing can be written there.
    """
    folder = folder.absolute()
    if folder in _ours:
        yield
        return
    path = folder / NAME
    with storing(path):
        folder.mkdir(parents=True, exist_ok=True)
    if error := occupied(folder):
        raise error
    with storing(path):
        file = path.open("a+", encoding="utf-8")
    with file:
        # False: another process was quicker, or a child of a dead one has inherited the lock.
        if _lock(file) is False and (error := occupied(folder)):
            raise error
        me = psutil.Process()
        with storing(path):
            file.truncate(0)
            text = json.dumps({"host": socket.gethostname(), "pid": me.pid, "began": me.create_time()})
            os.write(file.fileno(), text.encode())  # what a buffer still holds would be written again at the end
        _ours.add(folder)
        try:
            yield
        finally:
            _ours.discard(folder)
            path.unlink(missing_ok=True)


def occupied(folder: Path) -> ConfigError | None:
    """The error for a folder in which another process is training, else None. Changes nothing."""
    path = folder.absolute() / NAME
    if path.parent in _ours:
        return None
    try:
        with path.open("r+", encoding="utf-8") as file:
            text = file.read()
            if _lock(file):
                return None
    except (OSError, ValueError):  # ValueError: a name with a null byte
        return None
    holder = json_object(text)
    host = holder.get("host")
    pid = holder.get("pid")
    here = host == socket.gethostname()
    if here and not _is_alive(holder):
        return None
    end = f"end it (kill {pid})" if here else f"end it there; if it runs no more: rm {path}"
    return ConfigError(
        f"output_dir is {folder}, where another run is writing: process {pid} on {host}.",
        code="C036",
        fix=f"output_dir: {folder.name}-2, or another folder; or {end}",
        settings=("output_dir",),
        folder=folder,
        pid=pid,
        host=host,
        folder_name=folder.name,
        end=end,
    )


def died(folder: Path) -> str | None:
    """The process that trained in a folder and ended without its own end (killed, out of memory); None: none did."""
    path = folder.absolute() / NAME
    if path.parent in _ours or not path.is_file() or occupied(folder):
        return None
    with contextlib.suppress(OSError):
        return f"process {json_object(path.read_text(errors='replace')).get('pid')}"
    return None


def _lock(file: TextIO) -> bool | None:
    """Whether the file could be locked; None: the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_alive(holder: dict[str, object]) -> bool:
    """Whether the process still runs; another one may have got its number."""
    try:
        return abs(psutil.Process(int(str(holder["pid"]))).create_time() - float(str(holder["began"]))) < 2
    except (psutil.Error, KeyError, ValueError):
        return False
