"""The completions that decode now, and their rows of the cache: plain Python and numpy, no tensors.

Completions of a prompt that have begun with the same tokens are one row; where they draw different tokens, or
are given different ones, the row forks. So a policy that has become sure of how an answer begins computes that
beginning once for a group.

A group enters when there is room for a row for each of its completions. Rows leave as soon as they end: the last
running row takes the empty place, so the running rows are always the first ones. Prompts hold slots in the same manner.
A row whose turn has ended, and may have another, waits for its answer at the far end of the cache: row `i` of those
between turns at place `max_rows - 1 - i`. It still counts, so that running and waiting rows never need the same place.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from podium.engines.base import Answer, Sampled
from podium.engines.sampling import row_key
from podium.records import RolloutRequest, SamplingSettings

Item = TypeVar("Item")


class CompletionKey(NamedTuple):
    """The number of a completion in its group, and the key of its random numbers."""

    completion: int
    key: np.uint64


@dataclass(slots=True)
class Row:
    """Running completions of one prompt with the same tokens so far."""

    prompt: int
    """Index of its request."""
    slot: int
    """Index of the cached prompt that it continues."""
    completions: list[CompletionKey]
    token_ids: list[int] = field(default_factory=list)
    """Drawn and given tokens; all but the last one drawn are in the cache."""
    logps: list[float] = field(default_factory=list)
    """Log-probabilities of the drawn tokens."""
    earlier: int = 0
    """Tokens of the completion that are part of the request."""
    turn_start: int = 0
    """Place of the first token of its present turn."""
    cached: int = 0
    """Tokens of its own that were in the cache when its present turn began."""

    def fork(self) -> Row:
        """Another row with the same past."""
        return replace(self, token_ids=list(self.token_ids), logps=list(self.logps))

    def answered(self, token_ids: Sequence[int], completions: list[CompletionKey]) -> Row:
        """Row of some of its completions, which are given these tokens and begin a turn."""
        start = len(self.token_ids) + len(token_ids)
        return replace(
            self,
            completions=completions,
            token_ids=[*self.token_ids, *token_ids],
            logps=list(self.logps),
            turn_start=start,
            cached=len(self.token_ids) - 1,
        )


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
        self,
        requests: Sequence[RolloutRequest],
        settings: SamplingSettings,
        max_rows: int,
        *,
        shared: bool = True,
        several_turns: bool = False,
    ) -> None:
        """`shared`: completions with the same tokens are one row; else each has its own after its first token."""
        self.shared = shared
        self.several_turns = several_turns
        self.requests = requests
        self.settings = settings
        self.max_rows = max([max_rows, *(request.num_completions for request in requests)])
        self.waiting = deque(range(len(requests)))
        self.firsts = [0, *itertools.accumulate(request.num_completions for request in requests)]
        self.rows: list[Row] = []
        self.between_turns: list[Row] = []
        self.slots: list[int] = []  # slot -> index of the prompt that holds it
        self.done: list[list[Sampled | None]] = [[None] * request.num_completions for request in requests]

    def admit(self, most_tokens: int) -> list[list[int]]:
        """Prompts that get their rows now, in parts of at most so many tokens (or one prompt); their slots and rows
        come after those already running."""
        taken = sum(len(row.completions) for row in (*self.rows, *self.between_turns))
        admitted = []
        while self.waiting and taken + self.requests[self.waiting[0]].num_completions <= self.max_rows:
            admitted.append(self.waiting.popleft())
            taken += self.requests[admitted[-1]].num_completions
        return in_parts(admitted, [len(self.requests[each].token_ids) for each in admitted], most_tokens)

    def start(self, prompt: int) -> Row:
        """The row of an admitted prompt, all its completions in it, in the next free slot."""
        settings, given = self.settings, self.requests[prompt]
        stream, turn = (settings.seed, settings.round, given.prompt_id), [given.turn] * bool(given.turn)
        numbers = range(given.num_completions)
        completions = [CompletionKey(g, row_key(*stream, given.completion + g, *turn)) for g in numbers]
        row = Row(prompt=prompt, slot=len(self.slots), completions=completions, earlier=given.position)
        self.slots.append(prompt)
        self.rows.append(row)
        return row

    def append(self, rows: Sequence[Row], tokens: Sequence[int], logps: Sequence[float]) -> Moves:
        """Record one token for every completion of `rows`, the last of the running ones; rows fork and end.

        Rows whose turn has ended, and may have another, become the last ones between turns.
        """
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
        sources: dict[int, int] = {}
        for i, row in enumerate(self.rows):
            if self.several_turns and not running[i]:
                sources[self._wait(row)] = origins[i]
        sources |= enumerate(origins[i] for i in _compact(self.rows, running))
        return Moves(_moves(sources), self._free_slots())

    def resume(self, answers: Sequence[Answer]) -> Moves:
        """Record what completions between turns are given; rows that go on become the last running ones."""
        given = {(answer.prompt, answer.completion): answer for answer in answers}
        sources: dict[int, int] = {}
        rows, self.between_turns = self.between_turns, []
        for i, row in enumerate(rows):
            place = self._waiting_place(i)
            alike: dict[tuple[tuple[int, ...], int], list[CompletionKey]] = {}
            unanswered = []
            for each in row.completions:
                answer = given.get(self.place(row, each))
                if answer is None:
                    unanswered.append(each)
                elif answer.over:
                    self.done[row.prompt][each.completion] = ([*row.token_ids, *answer.token_ids], list(row.logps))
                else:
                    length = len(row.token_ids) + len(answer.token_ids)
                    assert length < self.requests[row.prompt].max_tokens, "no room for a token of the next turn"
                    alike.setdefault((answer.token_ids, 0 if self.shared else each.completion), []).append(each)
            for (token_ids, _), completions in alike.items():
                sources[len(self.rows)] = place
                self.rows.append(row.answered(token_ids, completions))
            if unanswered:
                sources[self._wait(replace(row, completions=unanswered))] = place
        return Moves(_moves(sources), self._free_slots())

    def place(self, row: Row, each: CompletionKey) -> tuple[int, int]:
        """Group and completion, as episodes number them."""
        return divmod(self.firsts[row.prompt] + each.completion, self.settings.num_completions)

    def _wait(self, row: Row) -> int:
        self.between_turns.append(row)
        return self._waiting_place(len(self.between_turns) - 1)

    def _waiting_place(self, index: int) -> int:
        return self.max_rows - 1 - index

    def _free_slots(self) -> list[tuple[int, int]]:
        """Leave the slots of prompts without rows; the moves of the others."""
        rows = [*self.rows, *self.between_turns]
        needed = {row.slot for row in rows}
        slots = _compact(self.slots, [slot in needed for slot in range(len(self.slots))])
        moved = {slot: i for i, slot in enumerate(slots)}
        for row in rows:
            row.slot = moved[row.slot]
        return _moves(dict(enumerate(slots)))

    def _ended(self, row: Row) -> bool:
        """Whether a row has drawn the last token of its turn; without further turns its completions are then done."""
        most = self.requests[row.prompt].max_tokens
        if row.token_ids[-1] not in self.settings.end_ids and len(row.token_ids) < most:
            return False
        if not self.several_turns:
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


def in_parts(items: Sequence[Item], lengths: Sequence[int], most: int) -> list[list[Item]]:
    """The items in consecutive parts of at most so many tokens together, or of one item.

    >>> in_parts("abcd", [3, 2, 9, 1], 5)
    [['a', 'b'], ['c'], ['d']]
    """
    parts: list[list[Item]] = []
    tokens = 0
    for item, length in zip(items, lengths, strict=True):
        if not parts or tokens + length > most:
            parts.append([])
            tokens = 0
        parts[-1].append(item)
        tokens += length
    return parts


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


def _moves(sources: Mapping[int, int]) -> list[tuple[int, int]]:
    """Copies (source, target) from the source of every target."""
    return [(source, target) for target, source in sources.items() if source != target]
