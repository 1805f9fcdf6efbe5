"""The completions that decode now, and their rows of the cache: plain Python and numpy, no tensors.

Completions of a prompt that have begun with the same tokens are one row; where they draw different tokens the row
forks. So a policy that has become sure of how an answer begins computes that beginning once for a group.

A group enters when there is room for a row for each of its completions. Rows leave as soon as they end: the last
running row takes the empty place, so the running rows are always the first ones. Prompts hold slots in the same manner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from podium.engines.sampling import row_key
from podium.records import Prompt, SamplingSettings


class CompletionKey(NamedTuple):
    """The number of a completion in its group, and the key of its random numbers."""

    completion: int
    key: np.uint64


@dataclass(slots=True)
class Row:
    """Running completions of one prompt with the same tokens so far."""

    prompt: int
    """Index into the prompts given to `generate`."""
    slot: int
    """Which cached prompt it continues."""
    completions: list[CompletionKey]
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def fork(self) -> Row:
        """Another row with the same past."""
        return replace(self, token_ids=list(self.token_ids), logps=list(self.logps))


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies in the cache after rows have forked or left, (source, target) each, for rows and for prompt slots.

    All at once: a target may be another's source.
    """

    rows: list[tuple[int, int]]
    slots: list[tuple[int, int]]


class Schedule:
    """The running rows, the waiting prompts and the finished completions of one `generate`."""

    def __init__(
        self, prompts: Sequence[Prompt], settings: SamplingSettings, max_rows: int, *, shared: bool = True
    ) -> None:
        """`shared`: completions with the same tokens are one row; else each has its own after its first token."""
        self.shared = shared
        self.prompts = prompts
        self.settings = settings
        self.max_rows = max(max_rows, settings.num_completions)
        self.waiting = deque(range(len(prompts)))
        self.rows: list[Row] = []
        self.slots: list[int] = []  # slot -> index of the prompt that holds it
        none: list[tuple[list[int], list[float]] | None] = [None] * settings.num_completions
        self.done = [list(none) for _ in prompts]

    def admit(self, most_tokens: int) -> list[list[int]]:
        """Prompts that get their rows now, in parts of at most so many tokens (or one prompt); their slots and rows
        come after those already running."""
        parts: list[list[int]] = []
        free, tokens = self.max_rows - sum(len(row.completions) for row in self.rows), 0
        while self.waiting and free >= self.settings.num_completions:
            prompt = self.waiting.popleft()
            length = len(self.prompts[prompt].token_ids)
            if not parts or tokens + length > most_tokens:
                parts.append([])
                tokens = 0
            parts[-1].append(prompt)
            tokens += length
            free -= self.settings.num_completions
        return parts

    def start(self, prompt: int) -> Row:
        """The row of an admitted prompt, all its completions in it, in the next free slot."""
        settings = self.settings
        stream = settings.seed, settings.round, self.prompts[prompt].id
        completions = [CompletionKey(g, row_key(*stream, g)) for g in range(settings.num_completions)]
        row = Row(prompt=prompt, slot=len(self.slots), completions=completions)
        self.slots.append(prompt)
        self.rows.append(row)
        return row

    def append(self, rows: Sequence[Row], tokens: Sequence[int], logps: Sequence[float]) -> Moves:
        """Record one token for every completion of `rows`, the last of the running ones; rows fork and end."""
        first, before = len(self.rows) - len(rows), len(self.rows)
        drawn = iter(zip(tokens, logps, strict=True))
        origins = list(range(before))
        for i, row in enumerate(rows, first):
            forks = _divide(row, drawn, shared=self.shared)
            self.rows += forks
            origins += [i] * len(forks)
        running = [i < first or not self._ended(row) for i, row in enumerate(self.rows)]
        if all(running) and len(self.rows) == before:
            return Moves([], [])
        indices = _compact(self.rows, running)
        needed = {row.slot for row in self.rows}
        slots = _compact(self.slots, [slot in needed for slot in range(len(self.slots))])
        moved = {slot: i for i, slot in enumerate(slots)}
        for row in self.rows:
            row.slot = moved[row.slot]
        return Moves(_moves([origins[i] for i in indices]), _moves(slots))

    def _ended(self, row: Row) -> bool:
        """Whether a row has drawn its last token; its completions are then done."""
        if row.token_ids[-1] not in self.settings.end_ids and len(row.token_ids) < self.settings.max_tokens:
            return False
        for each in row.completions:
            self.done[row.prompt][each.completion] = (row.token_ids, row.logps)
        return True


def _divide(row: Row, drawn: Iterator[tuple[int, float]], *, shared: bool) -> list[Row]:
    """Append each completion's token: `row` goes on with the first one's, and the rows returned with the others."""
    alike: dict[tuple[int, float, int], list[CompletionKey]] = {}
    for each in row.completions:
        alike.setdefault((*next(drawn), 0 if shared else each.completion), []).append(each)
    children = [row, *(row.fork() for _ in range(len(alike) - 1))]
    for child, ((token, logp, _), completions) in zip(children, alike.items(), strict=True):
        child.completions = completions
        child.token_ids.append(token)
        child.logps.append(logp)
    return children[1:]


def _compact(items: list[Any], kept: Sequence[bool]) -> list[int]:
    """Drop the items that are not kept, moving later ones into the holes; gives where each item was before.

    >>> items = list("abcde")
    >>> _compact(items, [True, False, True, False, True]), items
    ([0, 4, 2], ['a', 'e', 'c'])
    """
    count = sum(kept)
    movers = (i for i in range(count, len(items)) if kept[i])
    indices = [i if kept[i] else next(movers) for i in range(count)]
    items[:] = [items[i] for i in indices]
    return indices


def _moves(indices: Sequence[int]) -> list[tuple[int, int]]:
    return [(source, target) for target, source in enumerate(indices) if source != target]
