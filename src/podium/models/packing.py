"""Ragged groups -> flat tensors: the only boundary between Python lists and tensors of tokens.

A pack is a tree without padding: first what all its prompts begin with (a system prompt, worked examples), the trunk;
then each prompt's rest, once, and behind it the completions, which share common beginnings. `predict_N` says
which position predicts which trained token, many to one: the first token of all G completions is predicted by the
prompt's last position. So what is shared is invisible to the losses and the metrics; only attention sees the tree,
through its `layout`.

A completion's last token predicts nothing, so it is a target but never an input.

Shape letters: T tokens in the pack, N trained tokens, R rollouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from podium.models.devices import put
from podium.models.layout import FOLDED_ROW, Layout, Span, split_at_divergence, tree_layout
from podium.records import TrainingGroup

WORTH_SHARING = 1 / 8
"""Least part of a large group's completions that is worth an attention row of its own for what they share."""

SHORTEST_TRUNK = 16
"""A common beginning of fewer tokens is not worth an attention row of its own."""


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

    Groups stay whole while they fit; a larger group is cut between completions and its prompt repeated. A part may
    always hold as many completion tokens as prompt tokens, and a pack as many other tokens as its trunk has, so that
    nothing long is repeated for every completion, or for every group.
    """
    trunk = common_beginning([group.prompt_ids for group in groups])
    return [_pack(chunk, device) for chunk in _chunks(_fit(groups, tokens_per_pack), tokens_per_pack, trunk)]


def common_beginning(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all of several prompts begin with, if computing them once pays; a prompt's last stays its own.

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


class PrefixTree(NamedTuple):
    """A group's completions, their last tokens left out, with common beginnings once."""

    token_ids: list[int]
    depths: list[int]
    """Tokens before each, in its completion."""
    paths: list[np.ndarray]
    """For each completion the indices of its tokens in `token_ids`, in increasing order."""


def prefix_tree(completions: Sequence[Sequence[int]]) -> PrefixTree:
    """Completions of a large group share nothing where that saves little, or where what they share is large itself.

    >>> prefix_tree([[5, 6, 7, 9], [5, 6, 8, 9]])
    PrefixTree(token_ids=[5, 6, 7, 8], depths=[0, 1, 2, 2], paths=[array([0, 1, 2]), array([0, 1, 3])])
    """
    places: dict[tuple[int, int], int] = {}  # (place before, token) -> place
    tree = PrefixTree([], [], [])
    for completion in completions:
        path, place = [], -1
        for depth, token in enumerate(completion[:-1]):
            known = places.setdefault((place, token), len(places))
            if known == len(tree.token_ids):
                tree.token_ids.append(token)
                tree.depths.append(depth)
            path.append(place := known)
        tree.paths.append(np.array(path, np.int64))
    if len(places) <= FOLDED_ROW:
        return tree
    tokens = sum(map(len, tree.paths))
    pays = tokens - len(places) >= WORTH_SHARING * tokens and len(split_at_divergence(tree.paths)[0]) <= FOLDED_ROW
    return tree if pays else _side_by_side(completions)


def _side_by_side(completions: Sequence[Sequence[int]]) -> PrefixTree:
    lengths = [len(completion) - 1 for completion in completions]
    ends = np.cumsum(lengths)
    return PrefixTree(
        token_ids=[token for completion in completions for token in completion[:-1]],
        depths=[depth for length in lengths for depth in range(length)],
        paths=[np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)],
    )


def select_completions(group: TrainingGroup, index: Sequence[int]) -> TrainingGroup:
    """The group with only the completions in `index`."""

    per_completion = ("completion_ids", "sampled_logps", "old_logps", "ref_logps")
    given = {name: values for name in per_completion if (values := getattr(group, name)) is not None}
    chosen = {name: tuple(values[i] for i in index) for name, values in given.items()}
    return replace(group, advantages_G=group.advantages_G[list(index)], **chosen)


_TreeGroup = tuple[TrainingGroup, PrefixTree]
"""A group with the tree of its completions."""


def _num_tokens(group: TrainingGroup, tree: PrefixTree) -> int:
    """Positions in a pack without a trunk."""
    return len(group.prompt_ids) + len(tree.token_ids)


def _fit(groups: Iterable[TrainingGroup], budget: int) -> Iterable[_TreeGroup]:
    """Every group that is larger than the budget cut between its completions."""
    for group in groups:
        tree, room = prefix_tree(group.completion_ids), max(budget, 2 * len(group.prompt_ids))
        if _num_tokens(group, tree) <= room:
            yield group, tree
        else:
            parts = (select_completions(group, part) for part in _cuts(group, room))
            yield from ((part, prefix_tree(part.completion_ids)) for part in parts)


def _cuts(group: TrainingGroup, room: int) -> Iterable[range]:
    """Consecutive completions that fit behind their prompt, should they share nothing."""
    start, size = 0, len(group.prompt_ids)
    for i, ids in enumerate(group.completion_ids):
        if i > start and size + len(ids) - 1 > room:
            yield range(start, i)
            start, size = i, len(group.prompt_ids)
        size += len(ids) - 1
    yield range(start, len(group.completion_ids))


def _chunks(groups: Iterable[_TreeGroup], budget: int, trunk: int) -> Iterable[list[_TreeGroup]]:
    """Consecutive groups, together at most `budget` tokens, of even size: five groups for a pack of four make 3 + 2."""
    groups = list(groups)
    room = max(budget, 2 * trunk) - trunk
    sizes = [_num_tokens(*group) - trunk for group in groups]
    packs = max(1, -(-sum(sizes) // room))
    even = min(room, -(-sum(sizes) // packs) + max(sizes, default=0) // 2)
    chunk: list[_TreeGroup] = []
    filled = 0
    for group, size in zip(groups, sizes, strict=True):
        if chunk and filled + size > even:
            yield chunk
            chunk, filled = [], 0
        chunk.append(group)
        filled += size
    if chunk:
        yield chunk


def _pack(tree_groups: Sequence[_TreeGroup], device: torch.device | str) -> Pack:
    groups = [group for group, _ in tree_groups]
    trunk = common_beginning([group.prompt_ids for group in groups])
    ids: list[int] = list(groups[0].prompt_ids[:trunk])
    positions: list[int] = list(range(trunk))
    predict: list[int] = []
    spans: list[Span] = []
    for group, tree in tree_groups:
        prompt_start, prompt_length = len(ids), len(group.prompt_ids)
        ids += group.prompt_ids[trunk:]
        positions += range(trunk, prompt_length)
        last = len(ids) - 1
        for path in tree.paths:
            own = len(ids) + path
            spans.append(Span(trunk=trunk, prompt_start=prompt_start, prompt_length=prompt_length, own=own))
            predict += [last, *own]
        ids += tree.token_ids
        positions += (prompt_length + depth for depth in tree.depths)
    completions = [completion for group in groups for completion in group.completion_ids]
    predict_P, row_N = np.unique(predict, return_inverse=True)
    lengths_R = np.array([len(completion) for completion in completions])
    return Pack(
        input_ids_T=put(np.array(ids), device),
        position_ids_T=put(np.array(positions), device),
        layout=tree_layout(spans, positions),
        spans_R=tuple(spans),
        predict_N=put(np.array(predict), device),
        predict_P=put(predict_P, device),
        places=Places.of(row_N, device),
        target_N=put(np.array([token for completion in completions for token in completion]), device),
        rollout_N=put(np.repeat(np.arange(len(lengths_R)), lengths_R), device),
        advantages_R=_flat([group.advantages_G for group in groups], device),
        sampled_logps_N=_flat([x for group in groups for x in group.sampled_logps], device),
        old_logps_N=_optional([group.old_logps for group in groups], device),
        ref_logps_N=_optional([group.ref_logps for group in groups], device),
    )


def _flat(arrays: Sequence[np.ndarray], device: torch.device | str) -> Tensor:
    return put(np.concatenate(arrays).astype(np.float32), device)


def _optional(per_group: Sequence[tuple[np.ndarray, ...] | None], device: torch.device | str) -> Tensor | None:
    missing = [arrays is None for arrays in per_group]
    assert all(missing) or not any(missing), "some groups of a pack have log-probabilities that others lack"
    return None if any(missing) else _flat([x for arrays in per_group for x in arrays or ()], device)
