"""What a reward function returned, checked; what it raised, said in one message.

Knows the completions of a round; calls nothing.
"""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from podium.errors import RewardError
from podium.rewards.resolve import Reward

EXCERPT_LENGTH = 80
"""Characters of a completion that messages show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The R completions of one round as reward functions see them: R values in each list."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    """Strings, or lists of one message where the prompt is a conversation."""
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    texts: Sequence[str]
    rows: Sequence[int]
    """Dataset rows; -1 in a stream."""
    places: Sequence[str]
    """`3 of 8`: which completion of its prompt it is."""

    def __len__(self) -> int:
        return len(self.texts)

    def place(self, index: int) -> str:
        """Where a completion is from, and how it starts."""
        row = f"row {self.rows[index]}" if self.rows[index] >= 0 else f"prompt {excerpt(str(self.prompts[index]))}"
        return f"{row}, completion {self.places[index]}: {excerpt(self.texts[index])}"


def excerpt(text: str, length: int = EXCERPT_LENGTH) -> str:
    """The start of a text, in quotes and on one line.

    >>> excerpt("one two", 3)
    "'one'..."
    """
    return repr(text[:length]) + "..." * (len(text) > length)


def values_of(answer: Any, reward: Reward, batch: Batch) -> list[float]:
    """One float per completion, NaN for None. Raises `RewardError` for anything else than finite numbers and None."""
    values = _listed(answer, reward, len(batch))
    if len(values) != len(batch):
        raise RewardError(_wrong_number(len(values), reward, batch), code="W003")
    return [_number(value, index, reward, batch) for index, value in enumerate(values)]


def _wrong_number(num_values: int, reward: Reward, batch: Batch) -> str:
    start = f"{reward} returned {num_values} values for {len(batch)} completions"
    if num_values < len(batch):
        start += f". The first without one is {batch.place(num_values)}"
    return f"{start}\n  fix: return one number (or None) for each completion, in their order"


def _listed(answer: Any, reward: Reward, num_completions: int) -> list[Any]:
    if isinstance(answer, (list, tuple)):
        return list(answer)
    shape = getattr(answer, "shape", None)
    if hasattr(answer, "tolist") and shape is not None and len(shape) == 1:  # numpy, torch, pandas
        return list(answer.tolist())
    returned, fix = _mistake(answer)
    if inspect.iscoroutine(answer):
        answer.close()  # or Python complains that it was never awaited
    code = "W014" if inspect.isawaitable(answer) else "W005"
    message = f"{reward} returned {returned}; expected a list of {num_completions} numbers\n  fix: {fix}"
    raise RewardError(message, code=code)


def _mistake(answer: Any) -> tuple[str, str]:
    """What was returned instead of a list, and what to do about it."""
    one_each = "return a list with one number (or None) for each completion, in their order"
    kind = type(answer).__name__
    if answer is None:
        return "None", f"{one_each}; does the function end without `return`?"
    if inspect.isawaitable(answer):
        return f"a {kind} that nobody awaited", "write the reward itself with `async def`, and await inside"
    if getattr(answer, "shape", ()):
        return f"a {kind} of shape {tuple(answer.shape)}", "return one dimension, for example with `.flatten()`"
    if isinstance(answer, Iterator):
        return f"a {kind}", "wrap it: `list(...)`"
    return f"{kind} {_shown(answer)}", one_each


def _number(value: Any, index: int, reward: Reward, batch: Batch) -> float:
    if value is None:
        return math.nan
    if getattr(value, "shape", None) == () and hasattr(value, "tolist"):  # a numpy or torch scalar
        value = value.tolist()
    if not isinstance(value, numbers.Real):
        what, fix = f"{type(value).__name__} {_shown(value)}", "return numbers, or None for no opinion"
        raise RewardError(_bad_value(what, fix, index, reward, batch), code="W004")
    number = _as_float(value)
    if math.isnan(number):
        fix = "return None where the reward has no opinion"
        raise RewardError(_bad_value("NaN", fix, index, reward, batch), code="W006")
    if math.isinf(number):
        fix = "clip it to a finite number, or return None"
        raise RewardError(_bad_value(f"{number}", fix, index, reward, batch), code="W007")
    return number


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond 1e308
        return math.inf if value > 0 else -math.inf


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _bad_value(what: str, fix: str, index: int, reward: Reward, batch: Batch) -> str:
    return f"{reward} returned {what} as value {index}\n  at {batch.place(index)}\n  fix: {fix}"


# --- what was raised -------------------------------------------------------------------------------------------------

_OURS = {str(Path(__file__).with_name(name)) for name in ("score.py", "results.py")}
_SHAPE_ERRORS = (TypeError, AttributeError, KeyError, IndexError)
"""What is raised where a function takes message lists for strings, or the other way round."""


def user_traceback(error: BaseException) -> TracebackType | None:
    """The part of the traceback that begins in the user's function; None where it was never entered."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in _OURS:
        tb = tb.tb_next
    return tb


def describe_raised(error: BaseException, reward: Reward, arguments: Mapping[str, Any], batch: Batch) -> str:
    """Which function, what it raised, which completion it had in hand, where in the user's code."""
    tb = user_traceback(error)
    text = str(error)
    said = f": {text[:500]}{'...' * (len(text) > 500)}" if text else ""
    lines = [f"{reward} raised {type(error).__name__}{said}"]
    index = _in_hand(tb, arguments.get("completions", ()))
    if index is None:
        lines.append(f"  while scoring {len(batch)} completions, the first of them {batch.place(0)}")
    else:
        lines.append(f"  at {batch.place(index)}")
    if isinstance(error, _SHAPE_ERRORS):
        lines.append(f"  note: {_shape_note(batch)}")
    lines += [f"  {line}" for entry in traceback.format_tb(tb) for line in entry.rstrip().splitlines()]
    return "\n".join(lines)


def _shape_note(batch: Batch) -> str:
    if isinstance(batch.completions[0], str):
        return "the prompts are plain, so each completion is a string"
    return "the prompts are conversations, so the text of a completion is `completion[0]['content']`"


def _in_hand(tb: TracebackType | None, completions: Sequence[Any]) -> int | None:
    """Index of the completion that a variable of the innermost frames holds; None where there is no such variable.

    Identity decides, not equality: what a function was handed are copies made for it alone.
    """
    index_by_id = {id(each): index for index, each in reversed(list(enumerate(completions)))}
    for index, each in enumerate(completions):
        if not isinstance(each, str):
            index_by_id |= {id(part): index for part in (each[0], each[0]["content"]) if id(part) not in index_by_id}
    for frame in reversed(list(_frames(tb))):
        for value in reversed(list(frame.f_locals.values())):
            if id(value) in index_by_id:
                return index_by_id[id(value)]
    return None


def _frames(tb: TracebackType | None) -> Iterator[FrameType]:
    while tb is not None:
        yield tb.tb_frame
        tb = tb.tb_next
