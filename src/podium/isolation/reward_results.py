"""The result of a call of a reward function: one record of plain data, in this process and from a worker alike.

CallResult(values=(1.0, None))                       one number or None for each completion
CallResult(values=..., failures=(Failure(kind="value", what="returned NaN", index=0, ...),))
CallResult(failures=(Failure(kind="raised", what="raised ValueError: no", ...),))
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import numbers
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

from podium.errors import pip_line
from podium.isolation.functions import in_hand, raised_by, shown

LARGEST = 3.4e38
"""No reward is larger: in single precision, which advantages have, it would be infinite."""
MOST_VALUES = 1_000_000
"""Values that are read, more than any round has completions: an iterator may have no end."""

FailureKind = Literal[
    "value",  # one value that cannot be used; the others count
    "returned",  # no list of numbers
    "raised",  # an exception
    "stopped",  # the call ran over its limit, or its process ended
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A call, or one of its values, that cannot be used."""

    kind: FailureKind
    what: str  # read behind the name of the function: `raised ValueError: no`, `ran over its limit of 60 s`
    fix: str = ""
    code: str = "W010"
    index: int | None = None  # the completion of the value, or the one in hand
    trace: tuple[str, ...] = ()
    """Lines of the user's part of the traceback, or of where it was, the outermost call first."""
    is_shape_error: bool = False  # raised as where a function takes message lists for strings, or the other way round


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The values of a call, what the function logged, and what went wrong."""

    values: tuple[float | None, ...] = ()
    extras: tuple[tuple[str, list[Any]], ...] = ()  # columns given to `log_extra` in a worker
    metrics: tuple[tuple[str, float], ...] = ()  # numbers given to `log_metric` in a worker
    failures: tuple[Failure, ...] = ()  # one of the whole call, or one for each value that cannot be used
    seconds: float = 0.0
    error: BaseException | None = None  # the exception, if it was raised in this process

    @property
    def failure(self) -> Failure | None:
        """The one of the whole call; None where its values count."""
        return next((failure for failure in self.failures if failure.kind != "value"), None)


def result_from(reply: Mapping[str, Any]) -> CallResult:
    """The `CallResult` that a worker sent as JSON; a failure for what no worker sends.

    >>> import dataclasses
    >>> result_from(dataclasses.asdict(read_values([1, "a"]))).failures[0].what
    "returned str 'a'"
    """
    try:
        return CallResult(
            values=tuple(None if value is None else float(value) for value in reply["values"]),
            extras=tuple((str(column), list(values)) for column, values in reply["extras"]),
            metrics=tuple((str(name), float(value)) for name, value in reply["metrics"]),
            failures=tuple(map(_failure_from, reply["failures"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"sent what is no reply ({error})"
        fix = "do not write to the worker's files"
        return CallResult(failures=(Failure(kind="stopped", what=what, fix=fix, code="W017"),))


def _failure_from(sent: Mapping[str, Any]) -> Failure:
    if sent["kind"] not in get_args(FailureKind):
        raise ValueError(f"{sent['kind']!r}")
    return Failure(
        kind=sent["kind"],
        **{name: str(sent[name]) for name in ("what", "fix", "code")},
        index=None if sent["index"] is None else int(sent["index"]),
        trace=tuple(map(str, sent["trace"])),
        is_shape_error=bool(sent["is_shape_error"]),
    )


def read_values(answer: Any) -> CallResult:
    """A function's return value, each value a float or None, or a failure. Runs code of the answer (`tolist`, ...).

    Any ordered iterable is read: a list, a generator, an array of one dimension.

    >>> read_values([1, None, "2"]).values
    (1.0, None, None)
    >>> read_values(map(float, range(2))).values
    (0.0, 1.0)
    >>> read_values(0.5).failure.what
    'returned float 0.5'
    """
    values = None
    try:
        shape = getattr(answer, "shape", None)
        has_an_order = not isinstance(answer, (str, bytes, bytearray, Mapping, Set))
        is_flat = shape is None or len(shape) == 1
        if has_an_order and is_flat and not inspect.isawaitable(answer):  # a future is iterable, too
            values = iter(answer.tolist() if hasattr(answer, "tolist") else answer)
    except TypeError:
        pass
    if values is None:
        return CallResult(failures=(_no_list(answer),))
    read = [_value(index, value) for index, value in enumerate(itertools.islice(values, MOST_VALUES))]
    failures = tuple(failure for _, failure in read if failure is not None)
    return CallResult(values=tuple([number for number, _ in read]), failures=failures)


def _value(index: int, value: Any) -> tuple[float | None, Failure | None]:
    """A value as a number, or None for no opinion; and why it cannot be trained on."""
    if getattr(value, "shape", None) == () and hasattr(value, "tolist"):  # a numpy or torch scalar
        value = value.tolist()
    if value is None:
        return None, None
    failure = functools.partial(Failure, kind="value", index=index)
    if not isinstance(value, (numbers.Real, Decimal)):
        what = f"returned {type(value).__name__} {shown(value)}"
        return None, failure(what=what, fix="return numbers, or None for no opinion", code="W004")
    try:
        number = float(value)
    except ValueError:  # a signalling NaN of Decimal
        number = math.nan
    except OverflowError:  # an int beyond 1e308
        number = math.inf if value > 0 else -math.inf  # type: ignore[operator]
    if math.isnan(number):
        return number, failure(what="returned NaN", fix="return None where the reward has no opinion", code="W006")
    if math.isinf(number):
        return number, failure(what=f"returned {number}", fix="clip it to a finite number, or return None", code="W007")
    if abs(number) > LARGEST:
        fix = "scale it: only differences within a group count"
        return number, failure(what=f"returned {number:g}, which is infinite in float32", fix=fix, code="W007")
    return number, None


def _no_list(answer: Any) -> Failure:
    kind = type(answer).__name__
    code = "W005"
    what = f"{kind} {shown(answer)}"
    fix = "return a list with one number (or None) for each completion, in their order"
    if answer is None:
        what = "None"
        fix = f"{fix}; does the function end without `return`?"
    elif inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()  # or Python complains that it was never awaited
        what = f"a {kind} that was not awaited"
        code = "W014"
        fix = "write the reward itself with `async def`, and await inside"
    elif getattr(answer, "shape", ()):
        what = f"a {kind} of shape {tuple(answer.shape)}"
        fix = "return one dimension, for example with `.flatten()`"
    elif isinstance(answer, AsyncIterator):
        what = f"a {kind}"
        fix = "read it with `async for` in an `async def` that returns a list"
    return Failure(kind="returned", what=f"returned {what}", fix=fix, code=code)


_SHAPE_ERRORS = (TypeError, AttributeError, KeyError, IndexError)


def raised(error: BaseException, ours: frozenset[str], completions: Sequence[Any]) -> Failure:
    """An exception as a failure. `ours`: files whose frames are not the user's; `completions`: the objects handed."""
    found = raised_by(error, ours)
    tried = f"correct {found.place}; podium rewards test FILE:FUNCTION tries it" if found.place else ""
    return Failure(
        kind="raised",
        what=f"raised {found.what}",
        fix=pip_line(error) or tried,
        index=in_hand(found.frames, completions),
        trace=found.trace,
        is_shape_error=isinstance(error, _SHAPE_ERRORS),
    )
