"""State of this process that a reward function may change and that the run needs: put back after the call, and named.

    with restored(str(reward)):
        function(**arguments)

So are an end of this process and a copy of it (`ends_nothing`). Functions in files change their own process alone.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_said: set[tuple[str, str]] = set()


@contextlib.contextmanager
def restored(label: str) -> Iterator[None]:
    """Puts back what the block changes; a warning names `label` and what it was, once for each."""
    before = {what: read() for what, (read, _) in _STATE.items()}
    try:
        yield
    finally:
        for what, (read, restore) in _STATE.items():
            if before[what] is not None and read() != before[what]:
                restore(before[what])
                if (label, what) not in _said:
                    _said.add((label, what))
                    logger.warning("%s changed %s, which is put back after every call. (Said once.)", label, what)


_calls: list[int] = []
"""The process of every call that is under way; a forked child has its parent's, too."""


@contextlib.contextmanager
def ends_nothing(label: str) -> Iterator[None]:
    """Raise `SystemExit` where a call would end or replace this process; end forked copies that leave the block."""
    _refuse_endings()
    process = os.getpid()
    _calls.append(process)
    try:
        yield
    finally:
        if os.getpid() != process:
            what = f"{label} forked this process; the copy, which went on with the run, is ended."
            os.write(2, f"warning: {what} Let a child end with os._exit(0).\n".encode())
            os._exit(0)
        _calls.remove(process)


@functools.cache
def _refuse_endings() -> None:
    for name in ("_exit", "execv", "execve"):  # the other kinds of exec call one of the two
        setattr(os, name, _refused_in_calls(name, getattr(os, name)))


def _refused_in_calls(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        if os.getpid() in _calls:  # children that a call has forked may end
            raise SystemExit(f"os.{name} would have ended the run without a word")
        return function(*arguments)

    return called


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _umask() -> int | None:
    """Read without setting it, which other threads would see."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1], 8) if found else None
    return None


def _of_torch(read: str) -> Callable[[], Any]:
    return lambda: getattr(sys.modules["torch"], read)() if "torch" in sys.modules else None


def _to_torch(write: str) -> Callable[[Any], None]:
    return lambda value: getattr(sys.modules["torch"], write)(value)


def _builtins() -> dict[str, Any]:
    return {name: value for name, value in vars(builtins).items() if not name.startswith("_")}


def _restore_builtins(before: Mapping[str, Any]) -> None:
    for name in _builtins().keys() - before.keys():
        delattr(builtins, name)
    vars(builtins).update(before)


_STATE: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the working directory": (_folder, os.chdir),
    "the recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "the umask": (_umask, os.umask),
    "the alarm clock": (  # whether it is set: it ends a process that does not expect it
        lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        lambda before: before or signal.setitimer(signal.ITIMER_REAL, 0),
    ),
    "Python's builtins": (_builtins, _restore_builtins),
    "whether torch computes gradients": (_of_torch("is_grad_enabled"), _to_torch("set_grad_enabled")),
    "torch's default dtype": (_of_torch("get_default_dtype"), _to_torch("set_default_dtype")),
}
"""By what it is: how it is read (None: not known) and put back."""
