"""Who attends to whom in a pack: attention rows over flat positions, in two forms for two kinds of kernels.

A prompt's text is causal; a completion sees its prompt and itself; everything sees the trunk. Nothing else of Podium
needs to know that beginnings are shared.

Shape letters: T positions in the pack, B rows of a bucket, L queries a row, K keys a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FOLDED_ROW = 256
"""A group of at most this many tokens attends as one row under a tree mask: fewer, larger products. So does what the
completions of a larger one share."""

CHUNK = 128
"""Tokens that attend among themselves in one row of a long text; to all before them they attend in another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Attention rows of similar width. Row b's queries `query_BL` see its keys `key_BK` where `mask_BLK` allows."""

    query_BL: Tensor
    """int64 positions in T; padded with the row's first query."""
    key_BK: Tensor
    """int64 positions in T; padded with the row's first key."""
    mask_BLK: Tensor
    """bool; every query sees at least one key, so that no softmax is empty."""
    distance_BLK: Tensor
    """int32 position of the query minus position of the key: what a sliding window looks at."""
    causal: bool
    """The mask is plain causal attention of sequences padded on the right: a kernel may do without it."""
    reach: int
    """The largest distance."""

    def to(self, device: torch.device | str) -> Bucket:
        """The same bucket on a device."""
        return _on(self, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Attention rows of one kind, for kernels that give the log-sum-exp of a row with its output.

    A query may be in several parts, each over other keys; its output is joined from theirs. No position is twice a
    query, or twice a key, of the same part, padding aside.
    """

    query_BL: Tensor
    """int64 positions in T; padded with the row's first query."""
    key_BK: Tensor
    """int64 positions in T; padded with the row's first key."""
    queries_N: Tensor
    """Where the rows' own queries, without padding, stand in the flattened `query_BL`."""
    keys_M: Tensor
    """Where the rows' own keys stand in the flattened `key_BK`."""
    mask_BLK: Tensor | None
    """bool; None: causal, or everything is seen."""
    causal: bool

    def to(self, device: torch.device | str) -> Part:
        """The same part on a device."""
        return _on(self, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who attends to whom in a pack, in two forms; a kernel takes the one it can."""

    buckets: tuple[Bucket, ...]
    """Every position of T is a query of exactly one bucket."""
    output_T: Tensor
    """Where position t's output stands in the flattened, concatenated outputs of the buckets."""
    parts: tuple[Part, ...]
    """Every position is a query of exactly one of the first parts; those that follow add keys to some of them."""

    def to(self, device: torch.device | str) -> Layout:
        """The same layout on a device."""
        return Layout(
            buckets=tuple(bucket.to(device) for bucket in self.buckets),
            output_T=self.output_T.to(device),
            parts=tuple(part.to(device) for part in self.parts),
        )


def _on(record: Any, device: torch.device | str) -> Any:
    moved = {f.name: getattr(record, f.name) for f in fields(record)}
    return type(record)(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in moved.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where one rollout stands in T: the trunk at 0, the rest of its prompt, its own input tokens."""

    trunk: int
    """Tokens of the prompt that stand in the trunk."""
    prompt_start: int
    prompt_length: int
    """With the trunk."""
    own: np.ndarray
    """Positions in T of the completion's input tokens; others may share the first ones."""

    @property
    def length(self) -> int:
        """Input tokens of the completion."""
        return len(self.own)

    @property
    def prompt(self) -> np.ndarray:
        """Positions in T of the rest of the prompt; at least one."""
        return np.arange(self.prompt_start, self.prompt_start + self.prompt_length - self.trunk)

    @property
    def tokens(self) -> np.ndarray:
        """Positions in T of the whole rollout, in its order."""
        return np.concatenate([np.arange(self.trunk), self.prompt, self.own])


# ---- who attends to whom ----


@dataclass(frozen=True, slots=True)
class _Row:
    """One attention row: its queries, its keys and which query sees which key."""

    queries: np.ndarray
    keys: np.ndarray
    mask: np.ndarray | None = None  # None: causal over itself, or open
    open: bool = False  # every query sees every key

    @property
    def causal(self) -> bool:
        return self.mask is None and not self.open

    @property
    def kind(self) -> tuple[bool, bool, int, int]:
        """Rows of a kind are computed together: they have similar widths, or the same where no mask hides padding."""
        sizes = len(self.queries), len(self.keys)
        return (self.causal, self.open, *(sizes if self.open else map(_width, sizes)))


def tree_layout(spans: Sequence[Span], positions: Sequence[int]) -> Layout:
    """The attention of prompts with shared completions: causal in a prompt; a completion sees its prompt and itself."""
    found = _Rows([], [], [])
    for _, group in itertools.groupby(spans, key=lambda span: span.prompt_start):
        for rows, more in zip(found, _rows_of_group(list(group)), strict=True):
            rows += more
    return _layout(*found, trunk=spans[0].trunk, positions_T=np.asarray(positions))


class _Rows(NamedTuple):
    """Attention rows as a whole, and the same in parts: over what is a text's own, and over what is before it."""

    whole: list[_Row]
    own: list[_Row]
    shared: list[_Row]


def _rows_of_group(group: Sequence[Span]) -> _Rows:
    prompt, completions = group[0].prompt, [span.own for span in group if span.length]
    places = np.unique(np.concatenate(completions)) if completions else prompt[:0]
    if len(prompt) + len(places) <= FOLDED_ROW:
        folded = _folded([prompt, *(np.concatenate([prompt, x]) for x in completions)])
        return _Rows([folded], [folded], [])
    stem, parted = part_ways(completions)
    tails = [(behind, tail) for behind, tail in parted if len(tail)]
    rows = _Rows(
        [_Row(prompt, prompt), *(_above(_Row(tail, tail), np.concatenate([prompt, behind])) for behind, tail in tails)],
        [],
        [_Row(places, prompt, open=True)] if completions else [],
    )
    if len(stem):
        folded = _folded([behind for behind, _ in parted if len(behind)])
        rows.whole.append(_above(folded, prompt))
        rows.own.append(folded)
    rows.shared.extend(_over_stem(tails))
    for text in (prompt, *(tail for _, tail in tails)):
        chunks, earlier = _chunked(text)
        rows.own.extend(chunks)
        rows.shared.extend(earlier)
    return rows


def part_ways(completions: Sequence[np.ndarray]) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """The stem, which is one attention row, and each completion as its part of the stem and the rest.

    The stem is what several completions share; everything, where they share something and that is small.

    >>> part_ways([np.arange(300), np.append(np.arange(2), 300)])[1][1]
    (array([0, 1]), array([300]))
    """
    places, uses = np.unique(np.concatenate(completions), return_counts=True) if completions else (np.empty(0),) * 2
    stem = places if len(places) <= FOLDED_ROW and (uses > 1).any() else places[uses > 1]
    within = [np.isin(x, stem, assume_unique=True) for x in completions]
    return stem, [(x[inside], x[~inside]) for x, inside in zip(completions, within, strict=True)]


def _over_stem(tails: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[_Row]:
    """What completions have for themselves sees all of its own part of the stem."""
    pairs = [(behind, tail) for behind, tail in tails if len(behind)]
    if not pairs:
        return []
    keys = np.unique(np.concatenate([behind for behind, _ in pairs]))
    seen = [np.tile(np.isin(keys, behind, assume_unique=True), (len(tail), 1)) for behind, tail in pairs]
    return [_Row(np.concatenate([tail for _, tail in pairs]), keys, np.concatenate(seen))]


def prefill_layout(lengths: Sequence[int], *, trunk: int = 0) -> Layout:
    """Independent sequences, one after the other, each causal, behind a trunk that all of them see."""
    starts = trunk + np.cumsum([0, *lengths[:-1]])
    texts = [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
    chunked = [_chunked(x) for x in texts]
    return _layout(
        [_Row(x, x) for x in texts],
        [row for rows, _ in chunked for row in rows],
        [row for _, rows in chunked for row in rows],
        trunk=trunk,
        positions_T=np.concatenate([np.arange(trunk), *(trunk + np.arange(n) for n in lengths)]),
    )


def _layout(rows: list[_Row], own: list[_Row], shared: list[_Row], *, trunk: int, positions_T: np.ndarray) -> Layout:
    """What the rows see, and below it the trunk, which everything else sees whole."""
    if not trunk:
        return layout_of(rows, positions_T, [own, shared])
    below, rest = np.arange(trunk), np.arange(trunk, len(positions_T))
    chunks, earlier = _chunked(below)
    return layout_of(
        [_Row(below, below), *(_above(row, below) for row in rows)],
        positions_T,
        [[*own, *chunks], [*shared, *earlier], [_Row(rest, below, open=True)]],
    )


def _above(row: _Row, trunk: np.ndarray) -> _Row:
    """The row with the trunk's keys, which every query sees, before its own."""
    seen = np.tri(len(row.queries), dtype=bool) if row.mask is None else row.mask
    mask = np.concatenate([np.ones((len(row.queries), len(trunk)), bool), seen], axis=1)
    return _Row(row.queries, np.concatenate([trunk, row.keys]), mask)


def _chunked(text: np.ndarray) -> tuple[list[_Row], list[_Row]]:
    """A causal text as rows of chunks over themselves, and of chunks over everything before them.

    Kernels compute the half of a causal square that nobody looks at; in chunks that half is smaller.
    """
    starts = range(0, len(text), CHUNK)
    chunks = [text[start : start + CHUNK] for start in starts]
    earlier = [_Row(x, text[:start], open=True) for x, start in zip(chunks[1:], starts[1:], strict=True)]
    return [_Row(x, x) for x in chunks], earlier


def _folded(paths: Sequence[np.ndarray]) -> _Row:
    """Texts that share beginnings as one row under a tree mask: each token sees itself and what comes before it."""
    tokens = np.unique(np.concatenate(paths))
    visible = np.zeros((len(tokens), len(tokens)), bool)
    for path in paths:
        places = np.searchsorted(tokens, path)
        visible[np.ix_(places, places)] |= np.tri(len(places), dtype=bool)
    return _Row(tokens, tokens, visible)


def layout_of(rows: Sequence[_Row], positions_T: np.ndarray, parts: Sequence[Sequence[_Row]]) -> Layout:
    """Rows of one kind and similar width, in powers of two, side by side in buckets; `parts` as rows, in order."""
    buckets, output_T, offset = [], np.zeros(len(positions_T), np.int64), 0
    for members in _by_kind(rows):
        query_BL, key_BK, mask_BLK = _stacked(members)
        for i, row in enumerate(members):
            output_T[row.queries] = offset + i * query_BL.shape[1] + np.arange(len(row.queries))
        distance_BLK = positions_T[query_BL][:, :, None] - positions_T[key_BK][:, None, :]
        buckets.append(
            Bucket(
                query_BL=torch.from_numpy(query_BL),
                key_BK=torch.from_numpy(key_BK),
                mask_BLK=torch.from_numpy(mask_BLK),
                distance_BLK=torch.from_numpy(distance_BLK.astype(np.int32)),
                causal=members[0].causal,
                reach=int(distance_BLK.max()),
            )
        )
        offset += query_BL.size
    return Layout(
        buckets=tuple(buckets),
        output_T=torch.from_numpy(output_T),
        parts=tuple(_part(members) for rows in parts for members in _by_kind(rows)),
    )


def _by_kind(rows: Sequence[_Row]) -> list[list[_Row]]:
    kinds: dict[tuple[bool, bool, int, int], list[_Row]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    return list(kinds.values())


def _stacked(rows: Sequence[_Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and mask of rows of one kind, padded to the longest."""
    length = max(len(row.queries) for row in rows)
    width = length if rows[0].causal else max(len(row.keys) for row in rows)
    query_BL = np.stack([_pad(row.queries, length) for row in rows])
    key_BK = np.stack([_pad(row.keys, width) for row in rows])
    mask_BLK = np.zeros((len(rows), length, width), bool)
    for i, row in enumerate(rows):
        n, k = len(row.queries), len(row.keys)
        mask_BLK[i, :n, :k] = np.tri(n, dtype=bool) if row.causal else True if row.mask is None else row.mask
        mask_BLK[i, n:] = mask_BLK[i, 0]  # a padded query repeats the first one
    return query_BL, key_BK, mask_BLK


def _part(rows: Sequence[_Row]) -> Part:
    query_BL, key_BK, mask_BLK = _stacked(rows)
    return Part(
        query_BL=torch.from_numpy(query_BL),
        key_BK=torch.from_numpy(key_BK),
        queries_N=_without_padding([len(row.queries) for row in rows], query_BL.shape[1]),
        keys_M=_without_padding([len(row.keys) for row in rows], key_BK.shape[1]),
        mask_BLK=None if rows[0].mask is None else torch.from_numpy(mask_BLK),
        causal=rows[0].causal,
    )


def _without_padding(lengths: Sequence[int], width: int) -> Tensor:
    return torch.from_numpy(np.concatenate([i * width + np.arange(n) for i, n in enumerate(lengths)]))


def _width(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _pad(index: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([index, np.full(length - len(index), index[0])])
