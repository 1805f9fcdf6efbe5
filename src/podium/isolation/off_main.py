"""Handlers of signals that a user's function asks for where Python has none: outside of the main thread.

    with signals_said("reward function `timed` (mine.py:3)", fix="..."):
        function(**arguments)

`signal.signal` raises a ValueError there, and a `try` around it turns that into a score or a result without a word.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import contextvars
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger(__name__)

_caller: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar("podium_caller")
_said: set[str] = set()


@contextlib.contextmanager
def signals_said(label: str, fix: str) -> Iterator[None]:
    """Warn once of a call of `signal.signal` in the block that Python refuses; `label` is the function's."""
    _watch()
    token = _caller.set((label, fix))
    try:
        yield
    finally:
        _caller.reset(token)


@functools.cache
def _watch() -> None:
    # What `signal.signal` calls, as user code may have imported that by its name before.
    _signal.signal = _saying(_signal.signal)


def _saying(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        label, fix = _caller.get(("", ""))
        if label and label not in _said and threading.current_thread() is not threading.main_thread():
            _said.add(label)
            logger.warning(
                "%s calls signal.signal outside of the main thread, where Python refuses it with a ValueError: what it "
                "does then, also behind a `try`, is what counts. To mend it, %s. (Said once.)",
                label,
                fix,
            )
        return function(*arguments)

    return called
