"""What became of a call, as plain data: numbers and text that may cross the border of a process as JSON.

    Returned   a list of numbers and None, or what came instead of a list
    Raised     an exception: its kind, text, place and completion in hand
    Stopped    the call was cut short: it ran over its limit, or its process died

The same functions read what a call in this process returned and what one in a worker did, so both are judged alike.
"""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import FrameType, TracebackType
from typing import Any, TypeAlias

LONGEST_TEXT = 500
"""Characters of an exception's text that are kept."""


@dataclass(frozen=True, slots=True)
class InvalidValue:
    """A value that is no number."""

    kind: str
    shown: str


Value: TypeAlias = "float | InvalidValue | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """`values`, or where there is no list `instead` (what came) and `fix` (what to do about it)."""

    values: tuple[Value, ...] = ()
    instead: str = ""
    fix: str = ""
    awaitable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception."""

    kind: str
    text: str
    trace: tuple[str, ...]
    """Lines of the user's part of the traceback."""
    at: str
    """`line 2 of my_rewards.py`: where in the user's file that part begins; empty where it was never entered."""
    index: int | None
    """The completion in hand."""
    is_shape_error: bool = False
    error: BaseException | None = None
    """Only where it was raised in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A call that did not come to its end."""

    how: str
    """`ran over its limit of 60 s`, `ended its process with SIGSEGV`."""
    fix: str
    trace: tuple[str, ...] = ()
    """Lines of where it was, the outermost call first."""
    index: int | None = None
    """The completion in hand, or the last that it took."""
    is_overrun: bool = False


Outcome: TypeAlias = Returned | Raised | Stopped


# ---- returned ----


def returned(answer: Any) -> Returned:
    """A function's return value, each value a float, None or `InvalidValue`. Runs code of the answer (`tolist`, ...).

    >>> returned([1, None, "2"]).values
    (1.0, None, InvalidValue(kind='str', shown="'2'"))
    >>> returned(0.5).instead
    'float 0.5'
    """
    shape = getattr(answer, "shape", None)
    if isinstance(answer, (list, tuple, array)):
        values = list(answer)
    elif hasattr(answer, "tolist") and shape is not None and len(shape) == 1:  # numpy, torch, pandas
        values = list(answer.tolist())
    else:
        return _mistake(answer)
    return Returned(values=tuple(_plain(value) for value in values))


def _plain(value: Any) -> Value:
    if value is None:
        return None
    if getattr(value, "shape", None) == () and hasattr(value, "tolist"):  # a numpy or torch scalar
        value = value.tolist()
    if not isinstance(value, (numbers.Real, Decimal)):
        return InvalidValue(type(value).__name__, shown(value))
    try:
        return float(value)
    except ValueError:  # a signalling NaN of Decimal
        return math.nan
    except OverflowError:  # an int beyond 1e308
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def _mistake(answer: Any) -> Returned:
    one_each = "return a list with one number (or None) for each completion, in their order"
    kind = type(answer).__name__
    if answer is None:
        return Returned(instead="None", fix=f"{one_each}; does the function end without `return`?")
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()  # or Python complains that it was never awaited
        fix = "write the reward itself with `async def`, and await inside"
        return Returned(instead=f"a {kind} that nobody awaited", fix=fix, awaitable=True)
    if getattr(answer, "shape", ()):
        fix = "return one dimension, for example with `.flatten()`"
        return Returned(instead=f"a {kind} of shape {tuple(answer.shape)}", fix=fix)
    if isinstance(answer, Iterator):
        return Returned(instead=f"a {kind}", fix="wrap it: `list(...)`")
    return Returned(instead=f"{kind} {shown(answer)}", fix=one_each)


def shown(value: Any) -> str:
    """The start of its `repr`, which may be as broken as everything else of a user's class.

    >>> shown("x" * 99)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001
        return "without a repr"
    return text if len(text) <= 40 else text[:40] + "..."


# ---- raised ----

_SHAPE_ERRORS = (TypeError, AttributeError, KeyError, IndexError)
"""What is raised where a function takes message lists for strings, or the other way round."""


def raised(error: BaseException, ours: frozenset[str], completions: Sequence[Any]) -> Raised:
    """An exception as data.

    Args:
        error: what was raised.
        ours: files whose frames are not the user's.
        completions: what the function was handed, the very objects.
    """
    tb = user_traceback(error, ours)
    entries = traceback.extract_tb(tb)
    while entries and entries[-1].filename in ours:  # what the user called of ours
        entries.pop()
    try:
        text = str(error)
    except Exception:  # noqa: BLE001
        text = "(its text cannot be made)"
    return Raised(
        kind=type(error).__name__,
        text=text[:LONGEST_TEXT] + "..." * (len(text) > LONGEST_TEXT),
        trace=tuple(line for entry in traceback.format_list(entries) for line in entry.rstrip().splitlines()),
        at=f"line {entries[0].lineno} of {entries[0].filename}" if entries else "",
        index=in_hand([frame for frame, _ in traceback.walk_tb(tb)], completions),
        is_shape_error=isinstance(error, _SHAPE_ERRORS),
        error=error,
    )


def user_traceback(error: BaseException, ours: frozenset[str]) -> TracebackType | None:
    """The part of the traceback that begins in the user's function; None where it was never entered."""
    tb = error.__traceback__
    while tb is not None and is_ours(tb.tb_frame, ours):
        tb = tb.tb_next
    return tb


def is_ours(frame: FrameType, ours: frozenset[str]) -> bool:
    """Whether a frame is the house's; `<reward ...>` is a name that it gives to frames (see `rewards.limits`)."""
    name = frame.f_code.co_filename
    return name in ours or name.startswith("<reward ")


def in_hand(frames: Sequence[FrameType], completions: Sequence[Any]) -> int | None:
    """Index of the completion that a variable of the innermost frames holds; None where there is no such variable.

    `frames` are outermost first. Identity decides, not equality: what a function was handed are copies made for it
    alone.
    """
    index_by_id = {id(each): index for index, each in reversed(list(enumerate(completions)))}
    for index, each in enumerate(completions):
        if not isinstance(each, str):
            index_by_id |= {id(part): index for part in (each[0], each[0]["content"]) if id(part) not in index_by_id}
    for frame in reversed(frames):
        for value in reversed(list(frame.f_locals.values())):
            if id(value) in index_by_id:
                return index_by_id[id(value)]
    return None


# ---- as JSON ----


def to_json(outcome: Returned | Raised) -> dict[str, Any]:
    """Plain dicts, lists, numbers and text; infinities and NaN as Python's `json` writes them.

    >>> from_json(to_json(returned([1, "a"]))).values
    (1.0, InvalidValue(kind='str', shown="'a'"))
    """
    if isinstance(outcome, Raised):
        kept = ("kind", "text", "trace", "at", "index", "is_shape_error")
        return {"raised": {name: getattr(outcome, name) for name in kept}}
    values = [[value.kind, value.shown] if isinstance(value, InvalidValue) else value for value in outcome.values]
    return {"values": values, "instead": outcome.instead, "fix": outcome.fix, "awaitable": outcome.awaitable}


def from_json(reply: Mapping[str, Any]) -> Returned | Raised:
    """The inverse of `to_json`. Raises `ValueError` for what it never writes."""
    try:
        if "raised" in reply:
            error = reply["raised"]
            return Raised(
                kind=str(error["kind"]),
                text=str(error["text"]),
                trace=tuple(map(str, error["trace"])),
                at=str(error["at"]),
                index=None if error["index"] is None else int(error["index"]),
                is_shape_error=bool(error["is_shape_error"]),
            )
        return Returned(
            values=tuple(_value(value) for value in reply["values"]),
            instead=str(reply["instead"]),
            fix=str(reply["fix"]),
            awaitable=bool(reply["awaitable"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no reply: {error}") from error


def _value(value: Any) -> Value:
    if isinstance(value, list):
        kind, text = value
        return InvalidValue(str(kind), str(text))
    return None if value is None else float(value)
