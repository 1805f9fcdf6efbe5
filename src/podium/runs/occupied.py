"""One run at a time in a folder: whoever trains there holds a file `.running`, which names the process.

The file is locked (`flock`) where the file system can, so a killed process leaves no obstacle. Elsewhere, and where a
child has inherited the lock, the process that it names decides: if that is dead, the folder is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from podium.errors import ConfigError

NAME = ".running"

_ours: set[Path] = set()
"""Folders that this process trains in."""


@contextlib.contextmanager
def occupying(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; within itself as often as it likes.

    Raises:
        ConfigError: another process holds it.
    """
    folder = folder.absolute()
    if folder in _ours:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    if error := occupied(folder):
        raise error
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process was quicker, or a child of a dead one has inherited the lock
            if error := occupied(folder):
                raise error from None
        except OSError:  # no flock here
            pass
        file.truncate(0)
        me = psutil.Process()
        file.write(json.dumps({"host": socket.gethostname(), "pid": me.pid, "began": me.create_time()}))
        file.flush()
        _ours.add(folder)
        try:
            yield
        finally:
            _ours.discard(folder)
            path.unlink(missing_ok=True)


def occupied(folder: Path) -> ConfigError | None:
    """The error of a folder in which another process trains at this moment. Changes nothing."""
    path = folder.absolute() / NAME
    if path.parent in _ours:
        return None
    try:
        with path.open("r+", encoding="utf-8") as file:
            holder = _holder(file.read())
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            except OSError:  # held, or no flock here
                pass
    except OSError:
        return None
    host, pid = holder.get("host"), holder.get("pid")
    here = host == socket.gethostname()
    if here and not _is_alive(holder):
        return None
    end = f"end it (kill {pid})" if here else f"end it there; if it runs no more: rm {path}"
    what = f"output_dir is {folder}, where another run is writing: process {pid} on {host}."
    return ConfigError(what, code="C036", fix=f"output_dir: {folder.name}-2, or another folder; or {end}")


def _holder(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_alive(holder: dict[str, object]) -> bool:
    """Whether the process still runs; another may have its number by now."""
    try:
        return abs(psutil.Process(int(str(holder["pid"]))).create_time() - float(str(holder["began"]))) < 2
    except (psutil.Error, KeyError, ValueError):
        return False
