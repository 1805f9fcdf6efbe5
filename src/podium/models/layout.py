"""Attention of a pack as rows over flat positions, in two forms for two kinds of kernels.

A pack is a tree of blocks; a token attends to the tokens before it on its path from the root. Only this module depends
on which beginnings are shared.

Shape letters: T positions in the pack, B rows of a bucket, L queries a row, K keys a row, M of them behind a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from podium.models.devices import put

CHUNK = 128
"""Tokens that attend among themselves in one row of a long text; to all before them they attend in another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Attention rows of similar width, on a device: queries `query_BL` and keys `key_BK` of row b.

    Every query of row b sees the row's first `prefix_B` keys; those behind them causally, or as `mask_BLM` says. What
    is dense (`seen`, `positions`) is made on the device and only where a kernel cannot do without.
    """

    query_BL: Tensor
    """int64 positions in T; padded with the row's first query."""
    key_BK: Tensor
    """int64 positions in T; padded with the row's first key."""
    prefix_B: Tensor
    mask_BLM: Tensor | None
    """bool, over the keys behind the prefix; None: causal."""
    position_T: Tensor
    causal: bool
    """Plain causal attention of sequences padded on the right: no prefix and no mask."""

    def seen(self) -> Tensor:
        """Which keys a query sees, bool [B, L, K]; at least one, so that no softmax is empty."""
        device = self.query_BL.device
        length = self.query_BL.shape[1]
        behind_BK = torch.arange(self.key_BK.shape[1], device=device)[None] - self.prefix_B[:, None]
        if self.mask_BLM is None:
            return behind_BK[:, None, :] <= torch.arange(length, device=device)[None, :, None]
        last = self.mask_BLM.shape[2] - 1
        place_BLK = behind_BK.clamp(0, last)[:, None, :].expand(-1, length, -1)
        inside_BK = (behind_BK >= 0) & (behind_BK <= last)
        return (behind_BK < 0)[:, None, :] | (self.mask_BLM.gather(2, place_BLK) & inside_BK[:, None, :])

    def positions(self) -> tuple[Tensor, Tensor]:
        """Positions of the queries [B, L, 1] and of the keys [B, 1, K]."""
        return self.position_T[self.query_BL][:, :, None], self.position_T[self.key_BK][:, None, :]


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
    """Indices of the rows' own queries, without padding, in the flattened `query_BL`."""
    keys_M: Tensor
    """Indices of the rows' own keys in the flattened `key_BK`."""
    mask_BLK: Tensor | None
    """bool; None: causal, or everything is seen."""
    causal: bool
    adds: bool
    """Whether its queries were in a part before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Attention of a pack as rows without tensors; a kernel asks for the form that it can take."""

    rows: tuple[_Row, ...]
    """Every position of T is a query of exactly one row."""
    part_rows: tuple[tuple[_Row, ...], ...]
    """The same cut up: every position is a query of one of the first; those that follow add keys to some of them."""
    position_T: np.ndarray
    """Position ids."""

    def buckets(self, device: torch.device | str = "cpu") -> tuple[tuple[Bucket, ...], Tensor]:
        """The rows side by side, and where position t's output stands in the buckets' flattened outputs [T]."""
        found = []
        output_T = np.zeros(len(self.position_T), np.int64)
        offset = 0
        position_T = put(self.position_T.astype(np.int32), device)
        for members in _by_kind(self.rows):
            query_BL, key_BK = _stacked(members)
            for i, row in enumerate(members):
                output_T[row.queries] = offset + i * query_BL.shape[1] + np.arange(len(row.queries))
            bucket = Bucket(
                query_BL=put(query_BL, device),
                key_BK=put(key_BK, device),
                prefix_B=put(np.array([row.prefix for row in members]), device),
                mask_BLM=None if members[0].mask is None else put(_stacked_masks(members, query_BL.shape[1]), device),
                position_T=position_T,
                causal=members[0].causal,
            )
            found.append(bucket)
            offset += query_BL.size
        return tuple(found), put(output_T, device)

    def parts(self) -> tuple[Part, ...]:
        """The parts, on the CPU."""
        levels = enumerate(self.part_rows)
        return tuple(_part(members, adds=level > 0) for level, rows in levels for members in _by_kind(rows))


# ---- who attends to whom ----


@dataclass(frozen=True, slots=True)
class _Row:
    """One attention row: its queries, its keys and which query sees which key."""

    queries: np.ndarray
    keys: np.ndarray
    mask: np.ndarray | None = None  # over the keys behind the prefix; None: causal, or open
    open: bool = False  # every query sees every key
    prefix: int = 0  # keys at the beginning that every query sees

    @property
    def causal(self) -> bool:
        return self.mask is None and not self.open and not self.prefix

    @property
    def kind(self) -> tuple[bool, bool, bool, int, int]:
        """Rows of a kind are computed together: they have similar widths, or the same where no mask hides padding."""
        sizes = len(self.queries), len(self.keys)
        widths = sizes if self.open else (max(16, 1 << (n - 1).bit_length()) for n in sizes)  # powers of two
        return (self.mask is None, bool(self.prefix), self.open, *widths)


Above = tuple[tuple[int, np.ndarray], ...]
"""From the root down: the number of a block, and the positions in it that are seen from below."""


class Block(NamedTuple):
    """Tokens that attend to each other in one row, and to the same tokens of the blocks above."""

    texts: Sequence[np.ndarray]
    """Positions in T of one causal text, or of several that share beginnings, which get a tree mask."""
    above: Above = ()


def tree_layout(blocks: Sequence[Block], positions: Sequence[int]) -> Layout:
    """The attention of a tree of blocks, each of which sees itself and its path to the root.

    There is a part for every depth. In it the tokens below a block of that depth are queries, and the block's are keys.
    """
    rows = [_folded(block.texts) for block in blocks]
    whole = []
    own: list[_Row] = []
    earlier: list[_Row] = []
    below: list[dict[int, list[tuple[np.ndarray, np.ndarray]]]] = []  # by depth, then by block: queries, keys they see
    for row, block in zip(rows, blocks, strict=True):
        seen = [places for _, places in block.above]
        whole.append(replace(row, keys=np.concatenate([*seen, row.keys]), prefix=sum(map(len, seen))))
        chunks, before = _chunked(row.queries) if row.mask is None else ([row], [])
        own += chunks
        earlier += before
        below += ({} for _ in range(len(block.above) - len(below)))
        for at_depth, (number, places) in zip(below, block.above, strict=False):
            at_depth.setdefault(number, []).append((row.queries, places))
    deeper = [[_over(rows[number].keys, pairs) for number, pairs in at_depth.items()] for at_depth in below]
    parts = tuple(map(tuple, (own, earlier, *deeper)))
    return Layout(rows=tuple(whole), part_rows=parts, position_T=np.asarray(positions))


def _over(keys: np.ndarray, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> _Row:
    """Queries over a block's keys, of which each sees those of its own path."""
    queries = np.concatenate([own for own, _ in pairs])
    if all(len(seen) == len(keys) for _, seen in pairs):
        return _Row(queries, keys, open=True)
    seen = [np.tile(np.isin(keys, seen, assume_unique=True), (len(own), 1)) for own, seen in pairs]
    return _Row(queries, keys, np.concatenate(seen))


def _chunked(text: np.ndarray) -> tuple[list[_Row], list[_Row]]:
    """A causal text as rows of chunks over themselves, and of chunks over everything before them.

    Kernels compute the masked half of a causal square, too; in chunks that half is smaller.
    """
    starts = range(0, len(text), CHUNK)
    chunks = [text[start : start + CHUNK] for start in starts]
    earlier = [_Row(x, text[:start], open=True) for x, start in zip(chunks[1:], starts[1:], strict=True)]
    return [_Row(x, x) for x in chunks], earlier


def _folded(paths: Sequence[np.ndarray]) -> _Row:
    """Texts that share beginnings as one row under a tree mask: each token sees itself and what comes before it."""
    if len(paths) == 1:
        return _Row(paths[0], paths[0])
    tokens = np.unique(np.concatenate(paths))
    visible = np.zeros((len(tokens), len(tokens)), bool)
    for path in paths:
        places = np.searchsorted(tokens, path)
        visible[np.ix_(places, places)] |= np.tri(len(places), dtype=bool)
    return _Row(tokens, tokens, visible)


def _by_kind(rows: Sequence[_Row]) -> list[list[_Row]]:
    kinds: dict[tuple[bool, bool, bool, int, int], list[_Row]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    return list(kinds.values())


def _stacked(rows: Sequence[_Row]) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys of rows of one kind, padded to the longest."""
    length = max(len(row.queries) for row in rows)
    width = length if rows[0].causal else max(len(row.keys) for row in rows)
    return np.stack([_pad(row.queries, length) for row in rows]), np.stack([_pad(row.keys, width) for row in rows])


def _stacked_masks(rows: Sequence[_Row], length: int) -> np.ndarray:
    """Masks [B, L, M] of rows that have one, over the keys behind their prefixes."""
    masks = [row.mask for row in rows if row.mask is not None]
    stacked = np.zeros((len(rows), length, max(mask.shape[1] for mask in masks)), bool)
    for i, mask in enumerate(masks):
        stacked[i, : len(mask), : mask.shape[1]] = mask
        stacked[i, len(mask) :] = stacked[i, 0]  # a padded query repeats the first one
    return stacked


def _part(rows: Sequence[_Row], *, adds: bool) -> Part:
    query_BL, key_BK = _stacked(rows)
    return Part(
        query_BL=torch.from_numpy(query_BL),
        key_BK=torch.from_numpy(key_BK),
        queries_N=_without_padding([len(row.queries) for row in rows], query_BL.shape[1]),
        keys_M=_without_padding([len(row.keys) for row in rows], key_BK.shape[1]),
        mask_BLK=None if rows[0].mask is None else torch.from_numpy(_stacked_masks(rows, query_BL.shape[1])),
        causal=rows[0].causal,
        adds=adds,
    )


def _without_padding(lengths: Sequence[int], width: int) -> Tensor:
    return torch.from_numpy(np.concatenate([i * width + np.arange(n) for i, n in enumerate(lengths)]))


def _pad(index: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([index, np.full(length - len(index), index[0])])
