"""What became of a call to a reward function, as one float per completion, or as one message.

Knows the completions of a round; calls nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.errors import RewardError
from podium.isolation.workers.replies import InvalidValue, Outcome, Raised, Returned, Stopped, Value
from podium.rewards.resolve import Reward

EXCERPT_LENGTH = 80
"""Characters of a completion that messages show."""

LARGEST = 1e6
"""No reward is larger: single precision, which advantages have, would lose the differences that are learnt from."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What one function said of the R completions."""

    values: tuple[float, ...]
    """NaN for None, and where it failed."""
    failed: tuple[bool, ...]
    error: RewardError | None = None
    """The first failure, in words."""


def column_of(outcome: Outcome, reward: Reward, batch: Batch) -> Column:
    """The values of a call, and where it failed: everywhere, or where a value is no finite number and not None."""
    error = _failure(outcome, reward, batch)
    if error is not None:
        return Column(values=(math.nan,) * len(batch), failed=(True,) * len(batch), error=error)
    assert isinstance(outcome, Returned)
    wrong = [_problem(value) for value in outcome.values]
    values = tuple(
        math.nan if bad or value is None else float(value)  # type: ignore[arg-type]
        for value, bad in zip(outcome.values, wrong, strict=True)
    )
    first = next((index for index, bad in enumerate(wrong) if bad), None)
    if first is not None:
        what, fix, code = wrong[first]  # type: ignore[misc]
        error = RewardError(f"{reward} returned {what} as value {first}\n  at {batch.place(first)}", code=code, fix=fix)
    return Column(values=values, failed=tuple(map(bool, wrong)), error=error)


def _failure(outcome: Outcome, reward: Reward, batch: Batch) -> RewardError | None:
    """What is wrong with the call as a whole."""
    if isinstance(outcome, Raised):
        fix = f"correct {outcome.at}; podium rewards test FILE:FUNCTION tries it" if outcome.at else ""
        return RewardError(_raised(outcome, reward, batch), fix=fix)
    if isinstance(outcome, Stopped):
        code = "W016" if outcome.is_overrun else "W017"
        return RewardError(_stopped(outcome, reward, batch), code=code, fix=outcome.fix)
    if outcome.instead:
        what = f"{reward} returned {outcome.instead}; expected a list of {len(batch)} numbers"
        return RewardError(what, code="W014" if outcome.awaitable else "W005", fix=outcome.fix)
    if len(outcome.values) != len(batch):
        fix = "return one number (or None) for each completion, in their order"
        return RewardError(_wrong_number(len(outcome.values), reward, batch), code="W003", fix=fix)
    return None


def _wrong_number(num_values: int, reward: Reward, batch: Batch) -> str:
    start = f"{reward} returned {num_values} values for {len(batch)} completions"
    if num_values < len(batch):
        start += f". The first without one is {batch.place(num_values)}"
    return start


def _problem(value: Value) -> tuple[str, str, str] | None:
    """(what, fix, code) of a value that cannot be trained on."""
    if value is None:
        return None
    if isinstance(value, InvalidValue):
        return f"{value.kind} {value.shown}", "return numbers, or None for no opinion", "W004"
    if math.isnan(value):
        return "NaN", "return None where the reward has no opinion", "W006"
    if math.isinf(value):
        return f"{value}", "clip it to a finite number, or return None", "W007"
    if abs(value) > LARGEST:
        return f"{value:g}", f"scale it: only differences within a group count, and {LARGEST:g} is the limit", "W007"
    return None


# --- in words --------------------------------------------------------------------------------------------------------


def _raised(outcome: Raised, reward: Reward, batch: Batch) -> str:
    """Which function, what it raised, which completion it had in hand, where in the user's code."""
    lines = [f"{reward} raised {outcome.kind}" + (f": {outcome.text}" if outcome.text else "")]
    lines.append(_where(outcome.index, batch))
    if outcome.is_shape_error:
        lines.append(f"  note: {_shape_note(batch)}")
    return "\n".join([*lines, *(f"  {line}" for line in outcome.trace)])


def _stopped(outcome: Stopped, reward: Reward, batch: Batch) -> str:
    """Which function, what stopped it, which completion it took last, where it was."""
    lines = [f"{reward} {outcome.how}", _where(outcome.index, batch)]
    return "\n".join([*lines, *(f"  {line}" for line in outcome.trace)])


def _where(index: int | None, batch: Batch) -> str:
    if index is None or not 0 <= index < len(batch):
        return f"  while scoring {len(batch)} completions, the first of them {batch.place(0)}"
    return f"  at {batch.place(index)}"


def _shape_note(batch: Batch) -> str:
    if isinstance(batch.completions[0], str):
        return "the prompts are plain, so each completion is a string"
    return "the prompts are conversations, so the text of a completion is `completion[0]['content']`"
