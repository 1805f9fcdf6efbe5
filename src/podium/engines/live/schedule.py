"""Who decodes now, in which row of the cache: plain Python and numpy, no tensors.

A group enters when all its rows fit. Rows leave as soon as they end: the last running row takes the empty place, so the
running rows are always the first ones. Prompts hold slots in the same manner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from podium.engines.sampling import row_key
from podium.records import Prompt, SamplingSettings


@dataclass(slots=True)
class Row:
    """One running completion."""

    prompt: int
    """Index into the prompts given to `generate`."""
    completion: int
    slot: int
    """Which cached prompt it continues."""
    position: int
    """Position of its next token in the model's sequence: prompt length + tokens so far."""
    key: np.uint64
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Moves:
    """What the cache must copy after rows have left, (source, target) each, for rows and for prompt slots."""

    rows: list[tuple[int, int]]
    slots: list[tuple[int, int]]


class Schedule:
    """The running rows, the waiting prompts and the finished completions of one `generate`."""

    def __init__(self, prompts: Sequence[Prompt], settings: SamplingSettings, max_rows: int) -> None:
        self.prompts = prompts
        self.settings = settings
        self.max_rows = max(max_rows, settings.num_completions)
        self.waiting = deque(range(len(prompts)))
        self.rows: list[Row] = []
        self.slots: list[int] = []  # slot -> index of the prompt that holds it
        self.done: list[list[tuple[list[int], list[float]] | None]] = [
            [None] * settings.num_completions for _ in prompts
        ]

    def admit(self) -> list[int]:
        """Prompts that get their rows now; their slots and rows come after those already running."""
        admitted = []
        free = self.max_rows - len(self.rows)
        while self.waiting and free >= self.settings.num_completions:
            admitted.append(self.waiting.popleft())
            free -= self.settings.num_completions
        return admitted

    def start(self, prompt: int) -> list[Row]:
        """The new rows of an admitted prompt, in the next free slot."""
        slot = len(self.slots)
        self.slots.append(prompt)
        settings = self.settings
        rows = [
            Row(
                prompt=prompt,
                completion=g,
                slot=slot,
                position=len(self.prompts[prompt].token_ids),
                key=row_key(settings.seed, settings.round, self.prompts[prompt].id, g),
            )
            for g in range(settings.num_completions)
        ]
        self.rows += rows
        return rows

    def append(self, rows: Sequence[Row], tokens: Sequence[int], logps: Sequence[float]) -> Moves:
        """Record one token for each of `rows`; let those that ended leave."""
        ended = False
        for row, token, logp in zip(rows, tokens, logps, strict=True):
            row.token_ids.append(token)
            row.logps.append(logp)
            row.position += 1
            if token in self.settings.end_ids or len(row.token_ids) == self.settings.max_tokens:
                self.done[row.prompt][row.completion] = (row.token_ids, row.logps)
                ended = True
        return self._leave() if ended else Moves([], [])

    def _leave(self) -> Moves:
        running = [self.done[row.prompt][row.completion] is None for row in self.rows]
        row_moves = _fill_holes(self.rows, running)
        needed = {row.slot for row in self.rows}
        slot_moves = _fill_holes(self.slots, [slot in needed for slot in range(len(self.slots))])
        moved = dict(slot_moves)
        for row in self.rows:
            row.slot = moved.get(row.slot, row.slot)
        return Moves(row_moves, slot_moves)


def _fill_holes(items: list[Any], kept: Sequence[bool]) -> list[tuple[int, int]]:
    """Drop the items that are not kept, moving later ones into the holes; gives the moves (from, to).

    >>> items = list("abcde")
    >>> _fill_holes(items, [True, False, True, False, True]), items
    ([(4, 1)], ['a', 'e', 'c'])
    """
    count = sum(kept)
    holes = [i for i in range(count) if not kept[i]]
    movers = [i for i in range(count, len(items)) if kept[i]]
    moves = list(zip(movers, holes, strict=True))
    for source, target in moves:
        items[target] = items[source]
    del items[count:]
    return moves
