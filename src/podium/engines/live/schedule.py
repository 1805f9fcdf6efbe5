"""The completions that decode now, and their rows of the cache: plain Python and numpy, no tensors.

Completions of a request that have begun with the same tokens are one row; where they draw different tokens, or are
given different ones, the row forks. So a policy that has become sure of how an answer begins computes that beginning
once for a group.

A request enters when there is room for a row for each of its completions. Rows leave as soon as they end: the last
running row takes the empty place, so the running rows are always the first ones. Prompts hold slots in the same manner.
Where sequences are kept for requests that continue them, a row that has ended waits at the far end of the cache: kept
row `i` at place `max_rows - 1 - i`. It still counts, so that running and kept rows never need the same place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from podium.engines.base import EndedCompletion
from podium.engines.sampling import stream_key
from podium.errors import EngineError
from podium.models.images import ImageOrder
from podium.models.prefix_tree import prefix_tree
from podium.records import RolloutRequest, SamplingSettings

Item = TypeVar("Item")


class CompletionKey(NamedTuple):
    """A completion by its request and its place in that, by its prompt and its number in the prompt's group; and the
    key of its random numbers."""

    request: int
    place: int
    prompt_id: int
    completion: int
    key: np.uint64


@dataclass(slots=True)
class Row:
    """Running completions with the same tokens so far, and the same settings."""

    request: RolloutRequest
    """Request of the first completion, whose sampling settings all of them use."""
    settings: SamplingSettings
    slot: int
    """Index of the cached prompt that it continues."""
    completions: list[CompletionKey]
    token_ids: list[int] = field(default_factory=list)
    """Tokens behind the cached prompt; all but the last one drawn are in the cache."""
    logps: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens that its request has drawn."""
    candidates: list[np.ndarray] = field(default_factory=list)
    """The tokens that filters left for each drawn token; empty if they are not kept."""
    start: int = 0
    """Place of the first token that its request draws."""
    cached: int = 0
    """Tokens of its own that were in the cache when its request began."""

    @property
    def num_drawn(self) -> int:
        """Tokens that its request has drawn."""
        return len(self.token_ids) - self.start


class Moves(NamedTuple):
    """Copies in the cache after rows have forked or left, (source, target) each, for rows and for prompt slots.

    All at once: a target may be another's source.
    """

    rows: list[tuple[int, int]]
    slots: list[tuple[int, int]]


class Schedule:
    """The running rows, the waiting requests, the kept rows and the completions that have ended."""

    def __init__(
        self,
        settings: SamplingSettings,
        max_rows: int,
        *,
        shared: bool = True,
        keeps: bool = False,
        rewinds: bool = True,
    ) -> None:
        """`settings`: of requests without their own; `shared`: completions with the same tokens are one row, else each
        has its own after its first token; `keeps`: rows that have ended wait for requests that continue them;
        `rewinds`: a request may go on behind a beginning of a kept row, else only behind all that is in the cache."""
        self.settings = settings
        self.max_rows = max_rows
        self.shared = shared
        self.keeps = keeps
        self.rewinds = rewinds
        self.waiting: dict[int, RolloutRequest] = {}
        self.rows: list[Row] = []
        self.kept: list[Row] = []
        self.slots: list[tuple[int, ...]] = []
        """The tokens of each cached prompt."""
        self.ended: list[EndedCompletion] = []
        self._numbers = itertools.count()

    def submit(self, request: RolloutRequest) -> int:
        """Let a request wait for its rows; the id that its completions will have.

        Raises:
            EngineError: it can never get them.
        """
        if request.num_completions > self.max_rows:
            what = f"A request asks for {request.num_completions} completions; the engine decodes {self.max_rows} at a"
            raise EngineError(f"{what} time, and those of a request enter together.", fix="ask for fewer at a time")
        if not request.token_ids or request.max_tokens < 1:
            what = f"A request has {len(request.token_ids)} tokens and asks for {request.max_tokens} more"
            raise EngineError(f"{what}; both must be at least 1.", fix="give a prompt, and max_tokens of 1 or more")
        number = next(self._numbers)
        self.waiting[number] = request
        return number

    def cancel(self, request: int, place: int | None = None) -> None:
        """Stop a request, or one of its completions, and keep nothing of it; its rows go before the next step."""
        self.waiting.pop(request, None)
        for row in (*self.rows, *self.kept):
            row.completions = [x for x in row.completions if x.request != request or place not in (None, x.place)]

    @property
    def taken(self) -> int:
        """Completions that hold a place."""
        return sum(len(row.completions) for row in (*self.rows, *self.kept))

    def admit(self, most_tokens: int) -> list[list[int]]:
        """Requests that get their rows now, in parts of at most so many tokens (or one request); their slots and rows
        come after those already running."""
        taken = self.taken
        admitted: list[int] = []
        for number, request in self.waiting.items():
            taken += request.num_completions
            if taken > self.max_rows:
                break
            admitted.append(number)
        return in_parts(admitted, [len(self.waiting[number].token_ids) for number in admitted], most_tokens)

    def start(self, number: int) -> Row:
        """The row of an admitted request, all its completions in it, in the next free slot."""
        row = self._row(number, len(self.slots))
        self.slots.append(row.request.token_ids)
        self.rows.append(row)
        return row

    def _row(self, number: int, slot: int) -> Row:
        request = self.waiting.pop(number)
        settings = request.settings or self.settings
        keys = []
        for place in range(request.num_completions):
            g = request.completion + place
            keys.append(CompletionKey(number, place, request.prompt_id, g, stream_key(request, settings, place)))
        return Row(request=request, settings=settings, slot=slot, completions=keys)

    def append(
        self,
        rows: Sequence[Row],
        tokens: Sequence[int],
        logps: Sequence[float],
        candidates: Sequence[np.ndarray] | None = None,
    ) -> Moves:
        """Record one token for every completion of `rows`, the last of the running ones; rows fork and end."""
        before = len(self.rows)
        first = before - len(rows)
        drawn = iter(zip(tokens, logps, candidates or itertools.repeat(None, len(tokens)), strict=True))
        origins = list(range(before))
        for i, row in enumerate(rows, first):
            forks = _divide(row, drawn, shared=self.shared)
            self.rows += forks
            origins += [i] * len(forks)
        running = [True] * len(self.rows)
        sources: dict[int, int] = {}
        for i, row in enumerate(self.rows[first:], first):
            if row.token_ids[-1] not in row.settings.end_ids and row.num_drawn < row.request.max_tokens:
                continue
            running[i] = False
            for completion in row.completions:
                drawn_ids = row.token_ids[row.start :]
                candidates_kept = list(row.candidates) or None
                self.ended.append(
                    EndedCompletion(completion.request, completion.place, drawn_ids, list(row.logps), candidates_kept)
                )
            if self.keeps:
                sources[self._keep(row)] = origins[i]
        if all(running) and len(self.rows) == before:
            return Moves([], [])
        sources |= enumerate(origins[i] for i in _compact(self.rows, running))
        return self._moves(sources, range(len(self.slots)))

    def resume(self) -> Moves:
        """Give waiting requests the kept rows that they continue, as the last running rows; cancelled rows go."""
        if not self.kept and all(row.completions for row in self.rows):
            return Moves([], [])
        sources = dict(enumerate(_compact(self.rows, [bool(row.completions) for row in self.rows])))
        continued = self._continued()
        kept = self.kept
        self.kept = []
        origins = list(range(len(self.slots)))
        for i, row in enumerate(kept):
            place = self.max_rows - 1 - i
            alike: dict[Any, Row] = {}
            for number, common in continued.get(i, ()):
                new = self._continuation(number, common, row, origins)
                request = new.request.max_tokens, new.request.position, id(new.settings)
                past = tuple(new.token_ids), new.slot, new.cached
                first = alike.setdefault((*request, *past, 0 if self.shared else number), new)
                if first is not new:
                    first.completions += new.completions
            for new in alike.values():
                sources[len(self.rows)] = place
                self.rows.append(new)
            if row.completions:
                sources[self._keep(row)] = place
        return self._moves(sources, origins)

    def _continued(self) -> dict[int, list[tuple[int, int]]]:
        """By kept row, the waiting requests that continue it now, each with the length of what both begin with.

        Only later turns look for what is kept: so what a first turn draws does not depend on who was there before.
        """
        later = [number for number, request in self.waiting.items() if request.position or request.turn]
        kept = self.kept
        if not (kept and later):
            return {}
        order = ImageOrder()
        sequences = [order.told_apart([*self.slots[x.slot], *x.token_ids], x.request.images) for x in kept]
        asked = [self.waiting[number] for number in later]
        tree = prefix_tree([*sequences, *(order.told_apart(x.token_ids, x.images) for x in asked)])
        among = [i for i, row in enumerate(kept) if row.completions]
        room = self.max_rows - self.taken
        found: dict[int, list[tuple[int, int]]] = {}
        for r, number in enumerate(later, len(kept)):
            candidates, common = tree.nearest(r, among)
            request = self.waiting[number]
            behind = min(common, len(request.token_ids) - 1)
            candidates = [i for i in candidates if self.rewinds or behind >= self._cached(kept[i])]
            own = {i: completion for i in among if (completion := _own(kept[i], request)) is not None}
            needed = request.num_completions - len(own)
            if needed > room or not (candidates or (own and not self.rewinds)):
                continue
            room -= needed
            if candidates:
                found.setdefault(next((i for i in candidates if i in own), candidates[0]), []).append((number, common))
            for i, completion in own.items():  # it is kept no longer
                kept[i].completions.remove(completion)
        return found

    def _cached(self, row: Row) -> int:
        """Tokens of a kept row in the cache: all but the last one drawn."""
        return len(self.slots[row.slot]) + len(row.token_ids) - 1

    def _continuation(self, number: int, common: int, row: Row, origins: list[int]) -> Row:
        """The row of a request behind the `common` tokens that a kept row begins with."""
        new = self._row(number, row.slot)
        prompt = self.slots[row.slot]
        token_ids = new.request.token_ids
        stop = min(common, len(token_ids) - 1)
        if stop < len(prompt):  # it parts from the prompt itself, whose beginning becomes a slot of its own
            new.slot = len(self.slots)
            self.slots.append(prompt[:stop])
            origins.append(origins[row.slot])
        behind = len(self.slots[new.slot])
        new.token_ids = list(token_ids[behind:])
        new.start = len(token_ids) - behind
        new.cached = min(max(stop - behind, 0), len(row.token_ids) - 1)
        return new

    def _keep(self, row: Row) -> int:
        """Keep a row; its place in the cache."""
        self.kept.append(row)
        return self.max_rows - len(self.kept)

    def _moves(self, sources: Mapping[int, int], origins: Sequence[int]) -> Moves:
        """Leave the slots of prompts without rows; the moves of the others, and of rows from the source of each place.

        `origins`: where in the cache each slot's prompt is.
        """
        rows = [*self.rows, *self.kept]
        needed = {row.slot for row in rows}
        slots = _compact(self.slots, [slot in needed for slot in range(len(self.slots))])
        target_of = {slot: i for i, slot in enumerate(slots)}
        for row in rows:
            row.slot = target_of[row.slot]
        return Moves(
            rows=[(source, target) for target, source in sources.items() if source != target],
            slots=[(origins[slot], i) for i, slot in enumerate(slots) if origins[slot] != i],
        )


def _own(row: Row, request: RolloutRequest) -> CompletionKey | None:
    """The kept completion that a request goes on with."""
    wanted = request.prompt_id, request.completion
    return next(
        (completion for completion in row.completions if (completion.prompt_id, completion.completion) == wanted), None
    )


def _divide(row: Row, drawn: Iterator[tuple[int, float, np.ndarray | None]], *, shared: bool) -> list[Row]:
    """Append each completion's token: `row` goes on with the first one's, and the rows returned with the others."""
    alike: dict[tuple[int, float, int], list[CompletionKey]] = {}
    candidates: np.ndarray | None = None  # the same for all of them, as they are drawn from one row of logits
    for completion in row.completions:
        token, logp, candidates = next(drawn)
        alike.setdefault((token, logp, 0 if shared else completion.completion), []).append(completion)
    if candidates is not None:
        row.candidates.append(candidates)
    forks = [
        replace(row, token_ids=list(row.token_ids), logps=list(row.logps), candidates=list(row.candidates))
        for _ in range(len(alike) - 1)
    ]
    for child, ((token, logp, _), completions) in zip([row, *forks], alike.items(), strict=True):
        child.completions = completions
        child.token_ids.append(token)
        child.logps.append(logp)
    return forks


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
