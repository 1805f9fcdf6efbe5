"""Prefix trees: what several sequences of tokens begin with is stored, computed and attended to once.

`prefix_tree` finds all beginnings that sequences share, `Segment.blocks` chooses those that are worth sharing, and
`lay_out` puts the tokens side by side. Packs of training are such layouts, and so is a prefill by the live engine,
whose kept sequences are found again in the same tree. Nothing else depends on which beginnings are shared.

Shape letters: T positions in a layout, B rows of attention, L queries a row, K keys a row, M of them behind a prefix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from podium.models.devices import put

FOLDED_ROW = 256
"""A subtree of at most this many tokens attends as one row under a tree mask: fewer, larger products."""

WORTH_SHARING = 1 / 32
"""Least tokens saved by sharing, for each token below what is shared: attention is joined there from one more part."""

SHORTEST_TRUNK = 16
"""A common beginning of fewer tokens is not worth a place of its own in a cache of keys and values."""

CHUNK = 128
"""Tokens that attend among themselves in one row of a long text; to all before them they attend in another."""


# ---- what sequences share ----


@dataclass(eq=False)
class Segment:
    """Consecutive tokens that the same sequences contain, and the segments that follow it."""

    rows: list[int]
    """Numbers of the sequences, in increasing order."""
    start: int
    """Tokens before it in its sequences; `stop` counts its own, too."""
    stop: int = 0
    children: list[Segment] = field(default_factory=list)
    size: int = 0
    """Its tokens and those of all segments below it."""

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def ended(self) -> list[int]:
        """The sequences that end with it."""
        return sorted(set(self.rows).difference(*(child.rows for child in self.children)))

    @property
    def branches(self) -> bool:
        """Whether segments follow, and all of it is too large for one attention row."""
        return bool(self.children) and self.size > FOLDED_ROW

    def between(self, first: int, end: int) -> Segment:
        """The tree of sequences `first` to `end - 1` alone, as `prefix_tree` makes it of these."""
        if first <= self.rows[0] and self.rows[-1] < end:
            return self

        def following(segment: Segment) -> list[tuple[Segment, list[int]]]:
            """The segments that follow in the whole tree, and which of the chosen sequences go on with each."""
            near = [child for child in segment.children if child.rows[0] < end and child.rows[-1] >= first]
            cut = [(x, x.rows[bisect_left(x.rows, first) : bisect_left(x.rows, end)]) for x in near]
            return [(child, rows) for child, rows in cut if rows]

        chosen = self.rows[bisect_left(self.rows, first) : bisect_left(self.rows, end)]
        found = [(self, Segment(chosen, self.start))]
        for origin, segment in found:  # which grows, parents before children
            below = following(origin)
            while len(below) == 1 and len(below[0][1]) == len(segment.rows):  # nothing parts here any more
                origin = below[0][0]
                below = following(origin)
            segment.stop = origin.stop
            for child, rows in sorted(below, key=lambda pair: pair[1][0]):
                segment.children.append(Segment(rows, segment.stop))
                found.append((child, segment.children[-1]))
        return _summed([segment for _, segment in found])

    def nearest(self, row: int, among: Container[int]) -> tuple[list[int], int]:
        """Those `among` the sequences that begin with the most tokens of `row`, and how many these are."""
        found: tuple[list[int], int] = ([], 0)
        segment: Segment | None = self
        while segment is not None:
            candidates = [r for r in segment.rows if r in among]
            if not candidates:
                break
            found = (candidates, segment.stop) if segment.stop else found
            segment = next((child for child in segment.children if row in child.rows), None)
        return found

    @property
    def num_stored(self) -> int:
        """Tokens of all its blocks."""
        return sum(len(segment) for block in self.blocks for segment in block.segments)

    @cached_property
    def blocks(self) -> list[Block]:
        """The tree with only those beginnings shared that are worth it, as blocks, parents before children.

        Where copies of a segment cost less than joint attention, each that follows gets one of its own. A subtree of at
        most `FOLDED_ROW` tokens is one block. Above such subtrees a block is several short segments, if they are worth
        sharing and no larger than that together, or one segment of any length.
        """
        blocks: list[Block] = []
        following: list[tuple[Segment, Segment | None]] = [(self, None)]
        for segment, parent in following:  # which grows
            ended = segment.ended
            ways = len(segment.children) + bool(ended)
            below = segment.size - len(segment)
            if segment.children and (ways - 1) * len(segment) < max(1, WORTH_SHARING * below):
                copies = [
                    replace(child, start=segment.start, size=child.size + len(segment)) for child in segment.children
                ]
                if ended:
                    copies.append(Segment(ended, segment.start, segment.stop, size=len(segment)))
                following += ((copy, parent) for copy in copies)
                continue
            folded = segment.size <= FOLDED_ROW
            block = [segment]
            for node in block:  # which grows
                block += (child for child in node.children if folded or child.branches)
            tokens = sum(map(len, block))
            saved = sum((len(node.rows) - 1) * len(node) for node in block[1:])
            if not folded and (tokens > FOLDED_ROW or saved < WORTH_SHARING * (segment.size - tokens)):
                block = [segment]
            inside = set(block)
            blocks.append(Block(block, parent))
            following += ((child, node) for node in block for child in node.children if child not in inside)
        return blocks


class Block(NamedTuple):
    """Segments that attend to each other in one row, and to the same tokens of the blocks above."""

    segments: list[Segment]
    """Parents before children."""
    parent: Segment | None
    """What the first of them follows, in another block."""


def prefix_tree(sequences: Sequence[np.ndarray]) -> Segment:
    """The root of the tree of all beginnings that sequences share."""
    found = [Segment(list(range(len(sequences))), 0)]
    for segment in found:  # which grows, parents before children
        segment.stop = segment.start + common_prefix([sequences[r][segment.start :] for r in segment.rows])
        following: dict[int, list[int]] = {}
        for r in segment.rows:
            if len(sequences[r]) > segment.stop:
                following.setdefault(int(sequences[r][segment.stop]), []).append(r)
        segment.children = [Segment(rows, segment.stop) for rows in following.values()]
        found += segment.children
    return _summed(found)


def _summed(segments: Sequence[Segment]) -> Segment:
    """The first of the segments of a tree, parents before children, after all have got their sizes."""
    for segment in reversed(segments):
        segment.size = len(segment) + sum(child.size for child in segment.children)
    return segments[0]


def common_prefix(sequences: Sequence[np.ndarray]) -> int:
    """Number of tokens that all sequences begin with."""
    first, *others = sequences
    shared = min(map(len, sequences))
    for other in others:
        shared = int(np.append(first[:shared] != other[:shared], True).argmax())
    return shared


def trunk_length(common: int, prompt_lengths: Sequence[int]) -> int:
    """Tokens of a common beginning of prompts that are stored once if that pays; never a prompt's last.

    >>> trunk_length(40, [42, 41]), trunk_length(40, [40, 40]), trunk_length(2, [3, 3]), trunk_length(40, [40])
    (40, 39, 0, 0)
    """
    shared = min(common, min(prompt_lengths) - 1)
    return shared if shared >= SHORTEST_TRUNK and len(prompt_lengths) > 1 else 0


# ---- who attends to whom ----


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Queries, keys and which query sees which key."""

    queries: np.ndarray
    keys: np.ndarray
    mask: np.ndarray | None = None  # over the keys behind the prefix; None: causal, or open
    open: bool = False  # every query sees every key
    prefix: int = 0  # keys at the beginning that every query sees

    @property
    def causal(self) -> bool:
        """Whether a query sees the keys up to its own place."""
        return self.mask is None and not self.open and not self.prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A prefix tree as flat tokens, and their attention in two forms for two kinds of kernels.

    A token attends to itself and to those before it in its sequences. Without tensors; a kernel asks for the form that
    it can take.
    """

    token_ids_T: np.ndarray
    position_T: np.ndarray
    """Tokens before each, in its sequences."""
    paths: tuple[np.ndarray, ...]
    """For each sequence the positions in T of its tokens, in increasing order."""
    rows: tuple[AttentionRow, ...]
    """Every position of T is a query of exactly one row."""
    part_rows: tuple[tuple[AttentionRow, ...], ...]
    """The same cut up: every position is a query of one of the first; those that follow add keys to some of them."""

    def buckets(self, device: torch.device | str = "cpu") -> tuple[tuple[Bucket, ...], Tensor]:
        """The rows side by side, and where position t's output stands in the buckets' flattened outputs [T]."""
        found = []
        output_T = np.zeros(len(self.position_T), np.int64)
        offset = 0
        position_T = put(self.position_T.astype(np.int32), device)
        for members in _by_kind(self.rows):
            query_BL, key_BK, mask_BLM = _stacked(members)
            for i, row in enumerate(members):
                output_T[row.queries] = offset + i * query_BL.shape[1] + np.arange(len(row.queries))
            bucket = Bucket(
                query_BL=put(query_BL, device),
                key_BK=put(key_BK, device),
                prefix_B=put(np.array([row.prefix for row in members]), device),
                mask_BLM=None if mask_BLM is None else put(mask_BLM, device),
                position_T=position_T,
                causal=members[0].causal,
            )
            found.append(bucket)
            offset += query_BL.size
        return tuple(found), put(output_T, device)

    def parts(self) -> tuple[Part, ...]:
        """The parts, on the CPU."""
        found = []
        for depth, rows in enumerate(self.part_rows):
            for members in _by_kind(rows):
                query_BL, key_BK, mask_BLK = _stacked(members)
                is_query_BL = np.arange(query_BL.shape[1]) < np.array([[len(row.queries)] for row in members])
                is_key_BK = np.arange(key_BK.shape[1]) < np.array([[len(row.keys)] for row in members])
                part = Part(
                    query_BL=torch.from_numpy(query_BL),
                    key_BK=torch.from_numpy(key_BK),
                    queries_N=torch.from_numpy(np.flatnonzero(is_query_BL)),
                    keys_M=torch.from_numpy(np.flatnonzero(is_key_BK)),
                    mask_BLK=None if mask_BLK is None else torch.from_numpy(mask_BLK),
                    causal=members[0].causal,
                    adds=depth > 0,
                )
                found.append(part)
        return tuple(found)


def lay_out_prompts(prompts: Sequence[np.ndarray]) -> Layout:
    """Prompts of which only the beginning of all of them is stored once, where that pays."""
    trunk = trunk_length(common_prefix(prompts), [len(prompt) for prompt in prompts])
    apart = [Segment([r], trunk, len(prompt)) for r, prompt in enumerate(prompts)]
    if not trunk:
        return lay_out([Block([segment], None) for segment in apart], prompts)
    stem = Segment(list(range(len(prompts))), 0, trunk)
    return lay_out([Block([stem], None), *(Block([segment], stem) for segment in apart)], prompts)


Above = tuple[tuple[int, np.ndarray], ...]
"""From the root down: the number of a block, and the positions in it that are seen from below."""


def lay_out(blocks: Sequence[Block], sequences: Sequence[np.ndarray]) -> Layout:
    """The tokens of a tree block by block.

    >>> sequences = [np.array([5, 6, 7]), np.array([5, 6, 8])]
    >>> layout = lay_out(prefix_tree(sequences).blocks, sequences)
    >>> layout.token_ids_T, layout.position_T, layout.paths
    (array([5, 6, 7, 8]), array([0, 1, 2, 2]), (array([0, 1, 2]), array([0, 1, 3])))
    """
    token_ids = []
    positions = []
    paths: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    rows: list[AttentionRow] = []
    above: list[Above] = []
    seen_behind: dict[Segment, Above] = {}
    count = 0
    for number, block in enumerate(blocks):
        above.append(() if block.parent is None else seen_behind[block.parent])
        inside = set(block.segments)
        texts = {block.segments[0]: np.empty(0, np.int64)}
        for segment in block.segments:
            token_ids.append(sequences[segment.rows[0]][segment.start : segment.stop])
            positions.append(np.arange(segment.start, segment.stop))
            places = np.arange(count, count + len(segment))
            count += len(segment)
            for r in segment.rows:
                paths[r].append(places)
            text = np.concatenate([texts.pop(segment), places])
            seen_behind[segment] = (*above[-1], (number, text))
            going_on = [child for child in segment.children if child in inside]
            texts |= dict.fromkeys(going_on or [segment], text)
        rows.append(_folded([*texts.values()]))
    return Layout(
        token_ids_T=np.concatenate(token_ids),
        position_T=np.concatenate(positions),
        paths=tuple(np.concatenate(paths[r]) for r in sorted(paths)),
        rows=tuple(
            replace(row, keys=np.concatenate([*seen, row.keys]), prefix=sum(map(len, seen)))
            for row, seen in zip(rows, ([places for _, places in parts] for parts in above), strict=True)
        ),
        part_rows=_in_parts(rows, above),
    )


def _folded(texts: Sequence[np.ndarray]) -> AttentionRow:
    """Texts that share beginnings as one row under a tree mask: each token sees itself and what comes before it."""
    if len(texts) == 1:
        return AttentionRow(texts[0], texts[0])
    tokens = np.unique(np.concatenate(texts))
    visible = np.zeros((len(tokens), len(tokens)), bool)
    for text in texts:
        places = np.searchsorted(tokens, text)
        visible[np.ix_(places, places)] |= np.tri(len(places), dtype=bool)
    return AttentionRow(tokens, tokens, visible)


def _in_parts(rows: Sequence[AttentionRow], above: Sequence[Above]) -> tuple[tuple[AttentionRow, ...], ...]:
    """Blocks over themselves, long ones in chunks; chunks over what is before them; then a part for every depth.

    In that of a depth the tokens below a block of this depth are queries, and the block's are keys. Kernels compute the
    masked half of a causal square, too; in chunks that half is smaller.
    """
    own: list[AttentionRow] = []
    earlier: list[AttentionRow] = []
    below: list[dict[int, list[tuple[np.ndarray, np.ndarray]]]] = []  # by depth, then by block: queries, keys they see
    for row, seen in zip(rows, above, strict=True):
        if row.mask is None:
            for start in range(0, len(row.queries), CHUNK):
                chunk = row.queries[start : start + CHUNK]
                own.append(AttentionRow(chunk, chunk))
                if start:
                    earlier.append(AttentionRow(chunk, row.queries[:start], open=True))
        else:
            own.append(row)
        below += ({} for _ in range(len(seen) - len(below)))
        for at_depth, (number, places) in zip(below, seen, strict=False):
            at_depth.setdefault(number, []).append((row.queries, places))
    deeper: list[list[AttentionRow]] = []
    for at_depth in below:
        deeper.append([])
        for number, pairs in at_depth.items():
            keys = rows[number].keys
            queries = np.concatenate([places for places, _ in pairs])
            if all(len(seen) == len(keys) for _, seen in pairs):
                deeper[-1].append(AttentionRow(queries, keys, open=True))
                continue
            mask = [np.tile(np.isin(keys, seen, assume_unique=True), (len(places), 1)) for places, seen in pairs]
            deeper[-1].append(AttentionRow(queries, keys, np.concatenate(mask)))
    return tuple(map(tuple, (own, earlier, *deeper)))


# ---- as kernels take it ----


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


def _by_kind(rows: Sequence[AttentionRow]) -> list[list[AttentionRow]]:
    """Rows that are computed together: those of similar widths, or of the same where no mask hides padding."""
    kinds: defaultdict[tuple[bool | int, ...], list[AttentionRow]] = defaultdict(list)
    for row in rows:
        sizes = len(row.queries), len(row.keys)
        widths = sizes if row.open else (max(16, 1 << (n - 1).bit_length()) for n in sizes)  # powers of two
        kinds[row.mask is None, bool(row.prefix), row.open, *widths].append(row)
    return list(kinds.values())


def _stacked(rows: Sequence[AttentionRow]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Queries, keys and masks of rows of one kind, padded to the longest; masks are over the keys behind the prefix."""
    length = max(len(row.queries) for row in rows)
    width = length if rows[0].causal else max(len(row.keys) for row in rows)
    query_BL = np.empty((len(rows), length), np.int64)
    key_BK = np.empty((len(rows), width), np.int64)
    for padded, row in zip(query_BL, rows, strict=True):
        padded[: len(row.queries)] = row.queries
        padded[len(row.queries) :] = row.queries[0]
    for padded, row in zip(key_BK, rows, strict=True):
        padded[: len(row.keys)] = row.keys
        padded[len(row.keys) :] = row.keys[0]
    masks = [row.mask for row in rows if row.mask is not None]
    if not masks:
        return query_BL, key_BK, None
    mask_BLM = np.zeros((len(rows), length, max(mask.shape[1] for mask in masks)), bool)
    for padded, mask in zip(mask_BLM, masks, strict=True):
        padded[: len(mask), : mask.shape[1]] = mask
        padded[len(mask) :] = padded[0]  # a padded query repeats the first one
    return query_BL, key_BK, mask_BLM
