"""Functions of the user, the same for rewards, tools and programs: described, called in a worker, and what they raise.

    FileFunction(path="/home/me/tools.py", name="search", shown="tools.py")     which one
    Call(function=..., arguments={"text": "7"}, seed=1)                         a request to a worker; its reply is JSON
    answer = answering("a tool is a function", describe, call)                  what answers there: a worker's target

What becomes of a request that has no reply is `workers.Unanswered`; what a function raised is `Raised`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

from podium.errors.texts import quoted
from podium.isolation.user_files import function_from_file

LONGEST_TEXT = 500
"""Characters of an exception's text that are kept."""


# --- calls in a worker -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFunction:
    """A function in a file of the user."""

    path: str
    name: str
    shown: str
    """The file as the user wrote it, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request to a worker: to call a function, or without arguments to describe it."""

    function: FileFunction
    arguments: Any = None
    seed: int | None = None
    """Of the random numbers; None: they go on from where they are."""


AnyCall = TypeVar("AnyCall", bound=Call)
Took = Callable[[int], None]
"""Notes which completion is in hand."""


def answering(
    rule: str,
    describe: Callable[[Callable[..., Any], AnyCall], Any],
    call: Callable[[Callable[..., Any], AnyCall, Took], Any],
) -> Callable[[AnyCall, Took], Iterator[Any]]:
    """Function that answers requests in a worker, for one kind of user function.

    Args:
        rule: sentence for a name that is no function: `a tool is a function`.
        describe: the reply to a request without arguments, as plain data.
        call: the reply to one with arguments.
    """

    def answer(request: AnyCall, took: Took) -> Iterator[Any]:
        source = request.function
        function = function_from_file(Path(source.path), source.name, source.shown, rule=rule)
        if request.arguments is None:
            yield describe(function, request)
            return
        if request.seed is not None:
            seed(request.seed)
        yield call(function, request, took)

    return answer


def seed(number: int) -> None:
    """The global generators of Python and, where the file imported them, numpy and torch."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        torch: Any = sys.modules["torch"]
        # Without a device torch keeps each seed for later, with a stack trace: a millisecond for every call.
        (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(number)


def awaited(coroutine: Coroutine[Any, Any, Any], *, ends_tasks: bool = False) -> Any:
    """Its result, in the one event loop of this process, so that sessions and pools opened in it stay usable.

    `ends_tasks`: whether tasks that it leaves behind are ended.
    """
    loop = _loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        left = asyncio.all_tasks(loop) if ends_tasks else ()
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


# --- descriptions ----------------------------------------------------------------------------------------------------


def unwrapped(function: Any) -> Any:
    """The function inside partials."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def function_name(function: Any) -> str:
    """The name TRL's metrics use: of the function inside partials, of an object its class.

    >>> function_name(functools.partial(function_name)), function_name(3)
    ('function_name', 'int')
    """
    inner = unwrapped(function)
    return str(getattr(inner, "__name__", type(inner).__name__))


def is_async(function: Any) -> bool:
    """Whether a call gives something to await; also for partials, and objects with an `async` call."""
    inner = unwrapped(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def parameters_of(function: Any) -> list[inspect.Parameter] | None:
    """None where Python cannot tell (some functions written in C).

    A decorator that takes `*args, **kwargs` alone passes them on, so what counts is what it wraps.
    """
    try:
        own = list(inspect.signature(function, follow_wrapped=False).parameters.values())
        passes_on = all(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in own)
        return list(inspect.signature(function).parameters.values()) if passes_on else own
    except (ValueError, TypeError):
        return None


def location(function: Any) -> str:
    """`file.py:12`, relative to the working directory where it is inside; empty where Python does not know."""
    function = inspect.unwrap(unwrapped(function))
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return ""
    path = Path(code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{code.co_firstlineno}"


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


# --- exceptions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception of a user's function, as plain data."""

    what: str
    """`ValueError: no number`: its class, and its text where it has one, no longer than `LONGEST_TEXT`."""
    place: str
    """`line 3 of my.py`, of the user's function; empty where that was never entered."""
    trace: tuple[str, ...]
    """Lines of the user's part of the traceback, the outermost call first."""
    frames: tuple[FrameType, ...]
    """Of that part, outermost first."""


def raised_by(error: BaseException, ours: frozenset[str]) -> Raised:
    """An exception as data. `ours`: files whose frames are not the user's."""
    part = user_traceback(error, ours)
    entries = traceback.extract_tb(part)
    while entries and entries[-1].filename in ours:  # what the user called of ours
        entries.pop()
    try:
        text = str(error)
    except Exception:  # noqa: BLE001
        text = "(its text cannot be made)"
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]}..."
    return Raised(
        what=f"{type(error).__name__}: {quoted(text)}" if text else type(error).__name__,
        place=f"line {entries[0].lineno} of {entries[0].filename}" if entries else "",
        trace=tuple(line for entry in traceback.format_list(entries) for line in entry.rstrip().splitlines()),
        frames=tuple(frame for frame, _ in traceback.walk_tb(part)),
    )


def user_traceback(error: BaseException, ours: frozenset[str]) -> TracebackType | None:
    """The part of the traceback that begins in the user's function; None where it was never entered.

    Behind it an exception object that was raised before still has the frames of that time. They are left out.
    """
    parts: list[TracebackType] = []
    frames: list[FrameType] = []
    entries: list[CodeType] = []  # of Podium's first frame, and of the functions that Podium called
    part = error.__traceback__
    while part is not None:
        frame = part.tb_frame
        if frame.f_code in entries and frame not in frames and frame.f_back not in frames:
            break
        if not frames or frames[-1].f_code.co_filename in ours:
            entries.append(frame.f_code)
        parts.append(part)
        frames.append(frame)
        part = part.tb_next
    while parts and parts[0].tb_frame.f_code.co_filename in ours:
        parts.pop(0)
    made = None
    for part in reversed(parts):
        made = TracebackType(made, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return made


def in_hand(frames: Sequence[FrameType], completions: Sequence[Any]) -> int | None:
    """Index of the completion that a variable of the innermost frames holds; None where there is no such variable.

    `frames` are outermost first. Identity decides, not equality: what a function was handed are copies made for it
    alone.
    """
    index_by_id = {id(completion): index for index, completion in reversed(list(enumerate(completions)))}
    for index, completion in enumerate(completions):
        if not isinstance(completion, str):
            parts = (completion[0], completion[0]["content"])
            index_by_id |= {id(part): index for part in parts if id(part) not in index_by_id}
    for frame in reversed(frames):
        for value in reversed(list(frame.f_locals.values())):
            if id(value) in index_by_id:
                return index_by_id[id(value)]
    return None
