"""The result of one call of a tool, here or in a worker: text for the model, whatever the tool does.

It imports nothing heavy, since workers import it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast, get_args

from podium.records import CallProblem, data_url, is_picture

Side = Literal["left", "middle", "right"]

LONGEST_RESULT = 1_000_000
"""Characters of a result that are kept, whatever the limit of tokens: more than any context holds."""

CUT_MARK = "...(truncated)..."


class Outcome(NamedTuple):
    """The content of a tool message, and what was wrong with the call."""

    content: str | list[Any]
    problem: CallProblem = ""
    length: int = 0
    """Characters of the result before any were cut off."""


def call(function: Callable[..., Any], arguments: Any, cut: Side) -> Outcome:
    """Call a function with these arguments, of which it gets a copy.

    >>> call(lambda x: 2 * x, {"x": 2}, "right").content, call(lambda x: x, {"y": 2}, "right").problem
    ('4', 'arguments')
    """
    try:
        result = function(**_plain_copy(arguments, arguments))
    except BaseException as error:  # noqa: BLE001  also `exit()`: a call of the model's ends no run
        return raised(error, function, arguments)
    return read(result, cut)


async def call_async(function: Callable[..., Any], arguments: Any, cut: Side) -> Outcome:
    """The same for an `async` function."""
    try:
        result = await function(**_plain_copy(arguments, arguments))
    except BaseException as error:  # noqa: BLE001  `SystemExit` would end the event loop
        return raised(error, function, arguments)
    return read(result, cut)


def raised(error: BaseException, function: Callable[..., Any], arguments: Any) -> Outcome:
    """The outcome of a call that raised; wrong arguments are told apart from errors of the function itself."""
    fits = not isinstance(error, TypeError) or _fits(function, arguments)
    text = _text_of(error)
    if not isinstance(error, Exception):  # TRL ends here, so the text is ours
        text = f"{type(error).__name__}: {text}"
    return failure(text, "error" if fits else "arguments")


def failure(text: str, problem: CallProblem) -> Outcome:
    """An outcome with TRL's content for errors."""
    content = str({"error": _encodable(text[:LONGEST_RESULT])})
    return Outcome(content, problem, len(content))


def read(result: Any, cut: Side) -> Outcome:
    """The result as content: `str(result)`; a list of plain data and of images stays a list, as in TRL."""
    try:
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()  # or Python complains that it was never awaited
            raise TypeError("the tool returned a coroutine that was not awaited; write the tool with `async def`")
        if isinstance(result, (Iterator, AsyncIterator)):  # generators, `map`, open files
            what = f"the tool returned a {type(result).__name__}, which is no text"
            raise TypeError(f"{what}; return list(...) of it, or a text")
        if isinstance(result, list):
            result = [_in_text(item) for item in result]
        text = str.__str__(str(_without_images(result)))
        if isinstance(result, list) and len(text) <= LONGEST_RESULT and (copied := _plain_copy(result)) is not None:
            return Outcome(copied, length=len(text))
        return Outcome(_encodable(keep(text, LONGEST_RESULT, cut)), length=len(text))
    except BaseException as error:  # noqa: BLE001  `__str__` is the user's, too
        return failure(_text_of(error), "result")


def _without_images(result: Any) -> Any:
    """A result by whose text its length is measured."""
    if not isinstance(result, list):
        return result
    return [item for item in result if not (isinstance(item, dict) and str(item.get("image")).startswith("data:"))]


def _in_text(block: Any) -> Any:
    """A content block whose image is a Pillow image, or its bytes, with a data URL in its place."""
    image: Any = block.get("image") if isinstance(block, dict) and block.get("type") == "image" else None
    if not (isinstance(image, bytes) or is_picture(image)):
        return block
    return {**block, "image": data_url(image)}


def sent(reply: Mapping[str, Any]) -> Outcome:
    """The outcome that a worker sent as JSON; a failure for what no worker sends."""
    content, problem, length = (reply.get(key) for key in Outcome._fields)
    if isinstance(content, (str, list)) and problem in get_args(CallProblem) and type(length) is int:
        return Outcome(content, cast(CallProblem, problem), length)
    return failure("the tool's process sent what is no result", "error")


def keep(text: str, length: int, cut: Side) -> str:
    """At most `length` characters of a text, with a mark where the others were cut off.

    >>> [keep("0123456789" * 9, 25, cut) for cut in ("left", "middle", "right")]
    ['...(truncated)...23456789', '0123...(truncated)...6789', '01234567...(truncated)...']
    """
    if len(text) <= length:
        return text
    room = length - len(CUT_MARK)
    mark, room = (CUT_MARK, room) if room > 0 else ("", max(0, length))
    head = {"left": 0, "middle": room // 2, "right": room}[cut]
    return text[:head] + mark + text[len(text) - (room - head) :]


def _plain_copy(value: Any, other: Any = None) -> Any:
    """A copy of plain data; `other` for what JSON does not give back as it is."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        copied = json.loads(text)
        return copied if text.encode() and copied == value else other
    except Exception:  # noqa: BLE001  circular, too deep, other types, lone surrogates
        return other


def _fits(function: Callable[..., Any], arguments: Any) -> bool:
    """Whether a function can be called with these arguments; True where Python cannot tell (written in C)."""
    try:
        signature = inspect.signature(function)
    except Exception:  # noqa: BLE001
        return True
    try:
        signature.bind(**arguments)
    except TypeError:
        return False
    return True


def _text_of(error: BaseException) -> str:
    try:
        return str.__str__(str(error))
    except BaseException:  # noqa: BLE001
        return f"{type(error).__name__} without a text"


def _encodable(text: str) -> str:
    """Without lone surrogates, which no tokenizer takes."""
    return text.encode(errors="replace").decode()
