"""Ragged groups -> flat tensors: the only boundary between Python lists and tensors of tokens.

A pack is a prefix tree of prompts and completions, without padding. `predict_N` maps trained tokens to the positions
that predict them, many to one: the first token of all G completions is predicted by the prompt's last position. So
losses and metrics are independent of what is shared; only attention depends on the tree, through its `layout`.

A token that the policy did not draw (a tool's answer) is an input and never a target. A completion's last drawn token
predicts nothing, so it is a target and never an input; given tokens after it are left out.

Shape letters: T tokens in the pack, N trained tokens, R rollouts.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from podium.models.devices import kind_of, put
from podium.models.layout import Above, Block, Layout, tree_layout
from podium.records import TrainingGroup

FOLDED_ROW = 256
"""A subtree of at most this many tokens attends as one row under a tree mask: fewer, larger products."""

WORTH_SHARING = 1 / 32
"""Least tokens saved by sharing, for each token below what is shared: attention is joined there from one more part."""

SHORTEST_TRUNK = 16
"""A common beginning of fewer tokens is not worth a place of its own in a cache of keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Which of P rows of hidden states predicts which of N trained tokens."""

    row_N: Tensor
    order_N: Tensor
    """The tokens by their rows."""
    first_P: np.ndarray
    """First token of each row in that order, and N; known on the host."""

    @classmethod
    def of(cls, row_N: np.ndarray, device: torch.device | str) -> Places:
        """Places of rows 0 to P - 1, each with at least one token."""
        first_P = np.concatenate([[0], np.cumsum(np.bincount(row_N))])
        return cls(row_N=put(row_N, device), order_N=put(np.argsort(row_N, kind="stable"), device), first_P=first_P)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Positions of one rollout in a pack."""

    tokens: np.ndarray
    """Positions in T of its inputs, in order; other rollouts may have the first ones, too."""
    prompt_length: int
    predicting: np.ndarray
    """The inputs that predict a trained token, as indices of `tokens`."""

    @property
    def own(self) -> np.ndarray:
        """Positions in T of the completion's inputs."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Some groups as flat tensors, small enough for one forward and backward."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    layout: Layout
    spans_R: tuple[Span, ...]
    predict_N: Tensor
    """Position in T whose output predicts trained token n."""
    predict_P: Tensor
    """The same positions, each once, in increasing order."""
    places: Places
    """Which of these predicts which token."""
    target_N: Tensor
    rollout_N: Tensor
    """Which of the R rollouts trained token n belongs to."""
    advantages_R: Tensor
    token_advantages_N: Tensor | None
    """Advantages of tokens, where turns have their own; None: those of their rollouts."""
    sampled_logps_N: Tensor
    old_logps_N: Tensor | None
    ref_logps_N: Tensor | None

    @property
    def num_rollouts(self) -> int:
        """R."""
        return len(self.spans_R)

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.target_N)

    def split(self, values_N: Tensor) -> list[np.ndarray]:
        """Per-token values [N] cut into one float32 array per rollout."""
        flat = values_N.detach().float().cpu().numpy()
        lengths = torch.bincount(self.rollout_N, minlength=self.num_rollouts).tolist()
        return np.split(flat, np.cumsum(lengths)[:-1])


def pack(groups: Sequence[TrainingGroup], *, tokens_per_pack: int, device: torch.device | str = "cpu") -> list[Pack]:
    """Packs of at most `tokens_per_pack` input tokens each; a single larger rollout still makes a pack of its own.

    Groups stay whole while they fit; a larger group is cut between completions, whose common beginning is repeated. A
    part may always hold `beginnings_per_pack` times the tokens of that beginning, and a pack those of the common
    beginning of all prompts, so that nothing long is repeated for every completion, or for every group.
    """
    times = kind_of(device).beginnings_per_pack
    alone = [part for group in groups for part in _by_prompt(group)]
    trunk = common_beginning([group.prompt_ids for group in alone])
    sized = [part for group in alone for part in _fit(group, tokens_per_pack, times)]
    return [_pack(chunk, device) for chunk in _chunks(sized, max(tokens_per_pack, times * trunk), trunk)]


def common_beginning(prompts: Sequence[Sequence[int]]) -> int:
    """Number of tokens that several prompts share at the beginning, if computing them once pays; never a prompt's last.

    >>> common_beginning([[*range(40), 7, 8], [*range(40), 9]])
    40
    >>> common_beginning([range(40), range(40)]), common_beginning([[1, 2, 3], [1, 2, 4]])
    (39, 0)
    """
    if len(prompts) < 2:
        return 0
    ends = zip(min(map(tuple, prompts)), max(map(tuple, prompts)), strict=False)  # all others lie between these two
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    shared = min(shared, min(map(len, prompts)) - 1)
    return shared if shared >= SHORTEST_TRUNK else 0


def dummy_pack(device: torch.device | str = "cpu") -> Pack:
    """One rollout of one token: what a process without work sends through the model where the others wait for it."""
    zero = np.zeros(1, np.float32)
    group = TrainingGroup(prompt_ids=(0,), completion_ids=((0,),), advantages_G=zero, sampled_logps=(zero,))
    [packed] = pack([group], tokens_per_pack=1, device=device)
    return packed


class Rollout(NamedTuple):
    """A completion behind its prompt, up to the last token that the policy drew."""

    text: np.ndarray
    """Token ids."""
    prompt_length: int
    drawn: np.ndarray
    """Indices in `text`; the token before each predicts it."""

    @property
    def inputs(self) -> np.ndarray:
        """The last drawn token predicts nothing."""
        return self.text[: max(self.prompt_length, len(self.text) - 1)]


def _rollouts(group: TrainingGroup) -> list[Rollout]:
    found = []
    for g, ids in enumerate(group.completion_ids):
        drawn = np.arange(len(ids)) if group.drawn is None else np.flatnonzero(group.drawn[g])
        text = np.array((*group.prompt_ids, *ids[: drawn[-1] + 1 if len(drawn) else 0]))
        found.append(Rollout(text, len(group.prompt_ids), len(group.prompt_ids) + drawn))
    return found


@dataclass(slots=True, eq=False)
class _Segment:
    """Consecutive tokens that the same rows contain, and the segments that follow it."""

    rows: list[int]
    start: int
    """Tokens before it in its rows; `stop` counts its own, too."""
    stop: int = 0
    children: list[_Segment] = field(default_factory=list)
    size: int = 0
    """Its tokens and those of all segments below it."""

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def branches(self) -> bool:
        """Whether segments follow, and all of it is too large for one attention row."""
        return bool(self.children) and self.size > FOLDED_ROW

    def parts(self) -> list[_Segment]:
        """The segments that follow, each extended by a copy of this one, where copies cost less than joint attention.

        Empty where they do not.
        """
        ended = sorted(set(self.rows).difference(*(child.rows for child in self.children)))
        ways = len(self.children) + bool(ended)
        if not self.children or (ways - 1) * len(self) >= max(1, WORTH_SHARING * (self.size - len(self))):
            return []
        for child in self.children:
            child.start, child.size = self.start, child.size + len(self)
        return self.children + [_Segment(ended, self.start, self.stop, size=len(self))] * bool(ended)

    def block(self) -> list[_Segment]:
        """This segment and those below it that attend in the same row, parents before children."""
        folded, found = self.size <= FOLDED_ROW, [self]
        for segment in found:  # which grows
            found += (child for child in segment.children if folded or child.branches)
        tokens = sum(map(len, found))
        saved = sum((len(segment.rows) - 1) * len(segment) for segment in found[1:])
        fits = tokens <= FOLDED_ROW and saved >= WORTH_SHARING * (self.size - tokens)
        return found if folded or fits else [self]


def _segments(rows: Sequence[np.ndarray]) -> _Segment:
    """The root of the tree of all beginnings that rows share."""
    found = [_Segment(list(range(len(rows))), 0)]
    for segment in found:  # which grows, parents before children
        first, *others = (rows[r][segment.start :] for r in segment.rows)
        shared = min(map(len, (first, *others)))
        for other in others:
            shared = int(np.append(first[:shared] != other[:shared], True).argmax())
        segment.stop = segment.start + shared
        following: dict[int, list[int]] = {}
        for r in segment.rows:
            if len(rows[r]) > segment.stop:
                following.setdefault(int(rows[r][segment.stop]), []).append(r)
        segment.children = [_Segment(members, segment.stop) for members in following.values()]
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

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self.token_ids: list[int] = []
        self.depths: list[int] = []
        """Tokens before each, in its rows."""
        self.blocks: list[Block] = []
        self._parts: list[list[np.ndarray]] = [[] for _ in rows]
        roots: list[tuple[_Segment, Above]] = [(_segments(rows), ())]
        for root, above in roots:  # which grows
            if parts := root.parts():
                roots += ((part, above) for part in parts)
            else:
                roots += self._add(root.block(), above, rows)

    @property
    def paths(self) -> list[np.ndarray]:
        """For each row the indices of its tokens in `token_ids`, in increasing order."""
        return [np.concatenate(parts) for parts in self._parts]

    def _add(
        self, segments: Sequence[_Segment], above: Above, rows: Sequence[np.ndarray]
    ) -> list[tuple[_Segment, Above]]:
        """Store a block; the segments below it, with what those see."""
        texts, number, inside = {segments[0]: np.empty(0, np.int64)}, len(self.blocks), set(segments)
        below: list[tuple[_Segment, Above]] = []
        for segment in segments:
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


_Sized = tuple[TrainingGroup, int]
"""A group with a single prompt, and its positions in a pack of its own."""


def select_completions(group: TrainingGroup, index: Sequence[int]) -> TrainingGroup:
    """The group with only the completions in `index`."""

    per_completion = (
        "completion_ids",
        "sampled_logps",
        "old_logps",
        "ref_logps",
        "drawn",
        "prompts",
        "token_advantages",
    )
    given = {name: values for name in per_completion if (values := getattr(group, name)) is not None}
    chosen = {name: tuple(values[i] for i in index) for name, values in given.items()}
    return replace(group, advantages_G=group.advantages_G[list(index)], **chosen)


def _by_prompt(group: TrainingGroup) -> Iterable[TrainingGroup]:
    """A group whose completions have prompts of their own as groups of consecutive ones with the same prompt."""
    if group.prompts is None:
        return [group]
    runs = itertools.groupby(range(len(group.prompts)), key=group.prompts.__getitem__)
    parts = [(prompt, select_completions(group, [*run])) for prompt, run in runs]
    return [replace(part, prompt_ids=prompt, prompts=None) for prompt, part in parts]


def _fit(group: TrainingGroup, budget: int, times: int) -> Iterable[_Sized]:
    """A group with its size, cut between its completions where it is larger than budget and beginning allow."""
    rows = [rollout.inputs for rollout in _rollouts(group)]
    room, stop = max(budget, times * _segments(rows).stop), 0
    if (size := len(PrefixTree(rows).token_ids)) <= room:
        return [(group, size)]
    parts = []
    while (start := stop) < len(rows):
        several = range(start + 2, len(rows) + 1)
        stop = start + 1 + bisect_right(several, room, key=lambda end: len(PrefixTree(rows[start:end]).token_ids))
        parts.append((select_completions(group, range(start, stop)), len(PrefixTree(rows[start:stop]).token_ids)))
    return parts


def _chunks(groups: Sequence[_Sized], budget: int, trunk: int) -> Iterable[list[TrainingGroup]]:
    """Consecutive groups, together at most `budget` tokens, of even size: five groups for a pack of four make 3 + 2."""
    room = budget - trunk
    sizes = [size - trunk for _, size in groups]
    packs = max(1, -(-sum(sizes) // room))
    even = min(room, -(-sum(sizes) // packs) + max(sizes, default=0) // 2)
    chunk: list[TrainingGroup] = []
    filled = 0
    for (group, _), size in zip(groups, sizes, strict=True):
        if chunk and filled + size > even:
            yield chunk
            chunk, filled = [], 0
        chunk.append(group)
        filled += size
    if chunk:
        yield chunk


def _pack(groups: Sequence[TrainingGroup], device: torch.device | str) -> Pack:
    rows = [rollout for group in groups for rollout in _rollouts(group)]
    tree = PrefixTree([row.inputs for row in rows])
    spans = [
        Span(tokens=path, prompt_length=row.prompt_length, predicting=row.drawn - 1)
        for row, path in zip(rows, tree.paths, strict=True)
    ]
    predict_N = np.concatenate([span.tokens[span.predicting] for span in spans])
    predict_P, row_N = np.unique(predict_N, return_inverse=True)
    return Pack(
        input_ids_T=put(np.array(tree.token_ids), device),
        position_ids_T=put(np.array(tree.depths), device),
        layout=tree_layout(tree.blocks, tree.depths),
        spans_R=tuple(spans),
        predict_N=put(predict_N, device),
        predict_P=put(predict_P, device),
        places=Places.of(row_N, device),
        target_N=put(np.concatenate([row.text[row.drawn] for row in rows]), device),
        rollout_N=put(np.repeat(np.arange(len(rows)), [len(row.drawn) for row in rows]), device),
        advantages_R=_flat([group.advantages_G for group in groups], device),
        token_advantages_N=_optional([group.token_advantages for group in groups], device),
        sampled_logps_N=_flat([x for group in groups for x in group.sampled_logps], device),
        old_logps_N=_optional([group.old_logps for group in groups], device),
        ref_logps_N=_optional([group.ref_logps for group in groups], device),
    )


def _flat(arrays: Sequence[np.ndarray], device: torch.device | str) -> Tensor:
    return put(np.concatenate(arrays).astype(np.float32), device)


def _optional(per_group: Sequence[tuple[np.ndarray, ...] | None], device: torch.device | str) -> Tensor | None:
    missing = [arrays is None for arrays in per_group]
    assert all(missing) or not any(missing), "some groups of a pack have values that others lack"
    return None if any(missing) else _flat([x for arrays in per_group for x in arrays or ()], device)
