"""The result of a call to a reward function, as one float per completion, or as one message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podium.errors import RewardError
from podium.isolation.workers.call_result import CallResult, Failure
from podium.rewards.resolve import Reward

HUGE = 1e6
"""A reward above it is said: beside it the others count for nothing."""
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
        """The row of a completion, and how it starts."""
        row = f"row {self.rows[index]}" if self.rows[index] >= 0 else f"prompt {excerpt(str(self.prompts[index]))}"
        return f"{row}, completion {self.places[index]}: {excerpt(self.texts[index])}"


def excerpt(text: str, length: int = EXCERPT_LENGTH) -> str:
    """The start of a text, in quotes and on one line.

    >>> excerpt("one two", 3)
    "'one'..."
    """
    return repr(text[:length]) + "..." * (len(text) > length)


def fitted(result: CallResult, batch: Batch) -> CallResult:
    """The result with one number for each completion: NaN for None, and where it failed."""
    if result.failure is None and len(result.values) != len(batch):
        what = f"returned {len(result.values)} values for {len(batch)} completions"
        if len(result.values) < len(batch):
            what += f". The first without one is {batch.place(len(result.values))}"
        fix = "return one number (or None) for each completion, in their order"
        result = replace(result, failures=(Failure(kind="returned", what=what, fix=fix, code="W003"),))
    failed = {each.index for each in result.failures}
    values = result.values if result.failure is None else (None,) * len(batch)
    numbers = tuple(math.nan if value is None or r in failed else value for r, value in enumerate(values))
    return replace(result, values=numbers)


def failed_R(result: CallResult) -> list[bool]:
    """Whether each value of a fitted result failed."""
    failed = {each.index for each in result.failures}
    return [result.failure is not None or r in failed for r in range(len(result.values))]


def error_of(result: CallResult, reward: Reward, batch: Batch) -> RewardError | None:
    """The first failure of a fitted result: what the function did, at which completion, where in its code."""
    if not result.failures:
        return None
    failure = result.failures[0]
    lines = [f"{reward} {failure.what}"]
    if failure.kind == "value":
        lines[0] += f" as value {failure.index}"
    if failure.kind == "returned":
        lines[0] += f"; expected a list of {len(batch)} numbers" * (failure.code != "W003")
    elif failure.index is None or not 0 <= failure.index < len(batch):
        lines.append(f"  while scoring {len(batch)} completions, the first of them {batch.place(0)}")
    else:
        lines.append(f"  at {batch.place(failure.index)}")
    if failure.is_shape_error:
        is_plain = isinstance(batch.completions[0], str)
        note = "conversations, so the text of a completion is `completion[0]['content']`"
        lines.append(f"  note: the prompts are {'plain, so each completion is a string' if is_plain else note}")
    lines += [f"  {line}" for line in failure.trace]
    return RewardError("\n".join(lines), code=failure.code, fix=failure.fix)
