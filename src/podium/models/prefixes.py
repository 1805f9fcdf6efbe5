"""Prefix trees of tokens: what several rows begin with is stored, computed and attended to once.

Packs of training are such trees, and so is a prefill of prompts by the live engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from podium.models.layout import Above, Block

FOLDED_ROW = 256
"""A subtree of at most this many tokens attends as one row under a tree mask: fewer, larger products."""

WORTH_SHARING = 1 / 32
"""Least tokens saved by sharing, for each token below what is shared: attention is joined there from one more part."""

SHORTEST_TRUNK = 16
"""A common beginning of fewer tokens is not worth a place of its own in a cache of keys and values."""


def common_prefix(rows: Sequence[np.ndarray]) -> int:
    """Number of tokens that all rows begin with."""
    first, *others = rows
    shared = min(map(len, rows))
    for other in others:
        shared = int(np.append(first[:shared] != other[:shared], True).argmax())
    return shared


def common_beginning(prompts: Sequence[Sequence[int]]) -> int:
    """Number of tokens that several prompts share at the beginning, if computing them once pays; never a prompt's last.

    >>> common_beginning([[*range(40), 7, 8], [*range(40), 9]])
    40
    >>> common_beginning([range(40), range(40)]), common_beginning([[1, 2, 3], [1, 2, 4]])
    (39, 0)
    """
    if len(prompts) < 2:
        return 0
    shared = min(common_prefix([np.array(prompt) for prompt in prompts]), min(map(len, prompts)) - 1)
    return shared if shared >= SHORTEST_TRUNK else 0


@dataclass(slots=True, eq=False)
class Segment:
    """Consecutive tokens that the same rows contain, and the segments that follow it."""

    rows: list[int]
    start: int
    """Tokens before it in its rows; `stop` counts its own, too."""
    stop: int = 0
    children: list[Segment] = field(default_factory=list)
    size: int = 0
    """Its tokens and those of all segments below it."""

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def branches(self) -> bool:
        """Whether segments follow, and all of it is too large for one attention row."""
        return bool(self.children) and self.size > FOLDED_ROW

    def parts(self) -> list[Segment]:
        """The segments that follow, each extended by a copy of this one, where copies cost less than joint attention.

        Empty where they do not.
        """
        ended = sorted(set(self.rows).difference(*(child.rows for child in self.children)))
        ways = len(self.children) + bool(ended)
        if not self.children or (ways - 1) * len(self) >= max(1, WORTH_SHARING * (self.size - len(self))):
            return []
        for child in self.children:
            child.size += len(self)
            child.start = self.start
        if not ended:
            return list(self.children)
        return [*self.children, Segment(ended, self.start, self.stop, size=len(self))]

    def block(self) -> list[Segment]:
        """This segment and those below it that attend in the same row, parents before children."""
        folded = self.size <= FOLDED_ROW
        found = [self]
        for segment in found:  # which grows
            found += (child for child in segment.children if folded or child.branches)
        tokens = sum(map(len, found))
        saved = sum((len(segment.rows) - 1) * len(segment) for segment in found[1:])
        fits = tokens <= FOLDED_ROW and saved >= WORTH_SHARING * (self.size - tokens)
        return found if folded or fits else [self]


def segments(rows: Sequence[np.ndarray]) -> Segment:
    """The root of the tree of all beginnings that rows share."""
    found = [Segment(list(range(len(rows))), 0)]
    for segment in found:  # which grows, parents before children
        segment.stop = segment.start + common_prefix([rows[r][segment.start :] for r in segment.rows])
        following: dict[int, list[int]] = {}
        for r in segment.rows:
            if len(rows[r]) > segment.stop:
                following.setdefault(int(rows[r][segment.stop]), []).append(r)
        segment.children = [Segment(members, segment.stop) for members in following.values()]
        found += segment.children
    for segment in reversed(found):
        segment.size = len(segment) + sum(child.size for child in segment.children)
    return found[0]


class PrefixTree:
    """Rows of tokens with the beginnings that they share stored once, where that saves enough.

    A subtree of at most `FOLDED_ROW` tokens is one block, that is, one attention row. Above such subtrees a block is
    several short segments, if they are worth sharing and no larger than that together, or one segment of any length.

    >>> tree = PrefixTree([np.array([5, 6, 7]), np.array([5, 6, 8])])
    >>> tree.token_ids, tree.depths, tree.paths
    ([5, 6, 7, 8], [0, 1, 2, 2], [array([0, 1, 2]), array([0, 1, 3])])
    """

    def __init__(self, rows: Sequence[np.ndarray], *, trunk: int | None = None) -> None:
        """`trunk`: all rows begin with so many tokens, and only these are stored once; each block is one segment."""
        self.token_ids: list[int] = []
        self.depths: list[int] = []
        """Tokens before each, in its rows."""
        self.blocks: list[Block] = []
        self._parts: list[list[np.ndarray]] = [[] for _ in rows]
        if trunk is not None:
            apart = [Segment([r], trunk, len(row)) for r, row in enumerate(rows)]
            stem = Segment(list(range(len(rows))), 0, trunk, apart)
            for segment, above in self._add([stem], (), rows) if trunk else [(each, ()) for each in apart]:
                self._add([segment], above, rows)
            return
        roots: list[tuple[Segment, Above]] = [(segments(rows), ())]
        for root, above in roots:  # which grows
            if parts := root.parts():
                roots += ((part, above) for part in parts)
            else:
                roots += self._add(root.block(), above, rows)

    @property
    def paths(self) -> list[np.ndarray]:
        """For each row the indices of its tokens in `token_ids`, in increasing order."""
        return [np.concatenate(parts) for parts in self._parts]

    def _add(self, block: Sequence[Segment], above: Above, rows: Sequence[np.ndarray]) -> list[tuple[Segment, Above]]:
        """Store a block; the segments below it, with what those see."""
        texts = {block[0]: np.empty(0, np.int64)}
        number = len(self.blocks)
        inside = set(block)
        below: list[tuple[Segment, Above]] = []
        for segment in block:
            places = len(self.token_ids) + np.arange(len(segment))
            self.token_ids += rows[segment.rows[0]][segment.start : segment.stop].tolist()
            self.depths += range(segment.start, segment.stop)
            for r in segment.rows:
                self._parts[r].append(places)
            path = np.concatenate([texts.pop(segment), places])
            going_on = [child for child in segment.children if child in inside]
            texts |= dict.fromkeys(going_on or [segment], path)
            below += ((child, (*above, (number, path))) for child in segment.children if child not in inside)
        self.blocks.append(Block([*texts.values()], above))
        return below
