"""Ragged groups -> flat tensors: the only boundary between Python lists and tensors of tokens.

A pack is a prefix tree of prompts and completions, without padding. `predict_N` maps trained tokens to the positions
that predict them, many to one: the first token of all G completions is predicted by the prompt's last position. So
losses and metrics are independent of what is shared; only attention depends on the tree, through its `layout`.

A token that the policy did not draw (a tool's answer) is an input and never one of the N targets. A completion's last
drawn token predicts nothing, so it is a target and never an input; given tokens after it are left out. Where the loss
asks for them, given tokens are M targets apart; their inputs are there anyway.

Shape letters: T tokens in the pack, N trained tokens, M given tokens that are to be predicted, R rollouts.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from podium.models.devices import kind_of, put
from podium.models.layout import Layout, tree_layout
from podium.models.prefixes import PrefixTree, common_beginning, common_prefix
from podium.records import TrainingGroup


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
    observing: np.ndarray
    """Those that predict a given token of the M."""

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
    """The same positions and those that predict given tokens, each once, in increasing order."""
    places: Places
    """Which of these predicts which token, of the N and after them of the M."""
    target_N: Tensor
    observed_M: Tensor
    """The given tokens that are to be predicted."""
    rollout_N: Tensor
    """Which of the R rollouts trained token n belongs to."""
    advantages_R: Tensor
    token_advantages_N: Tensor | None
    """Advantages of tokens, where turns have their own; None: those of their rollouts."""
    token_penalties_N: Tensor | None
    """Weights of |log(pi / pi_old)|; None: 0."""
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

    @property
    def num_observed(self) -> int:
        """M."""
        return len(self.observed_M)

    def split(self, values_N: Tensor) -> list[np.ndarray]:
        """Per-token values [N] cut into one float32 array per rollout."""
        flat = values_N.detach().float().cpu().numpy()
        lengths = torch.bincount(self.rollout_N, minlength=self.num_rollouts).tolist()
        return np.split(flat, np.cumsum(lengths)[:-1])


def pack(
    groups: Sequence[TrainingGroup],
    *,
    tokens_per_pack: int,
    device: torch.device | str = "cpu",
    observed: bool = False,
) -> list[Pack]:
    """Packs of at most `tokens_per_pack` input tokens each; a single larger rollout still makes a pack of its own.

    Groups stay whole while they fit; a larger group is cut between completions, whose common beginning is repeated. A
    part may always hold `beginnings_per_pack` times the tokens of that beginning, and a pack those of the common
    beginning of all prompts, so that nothing long is repeated for every completion, or for every group.

    `observed`: whether given tokens are to be predicted, too.
    """
    times = kind_of(device).beginnings_per_pack
    alone = [part for group in groups for part in _by_prompt(group)]
    trunk = common_beginning([group.prompt_ids for group in alone])
    sized = [part for group in alone for part in _fit(group, tokens_per_pack, times)]
    chunks = _chunks(sized, max(tokens_per_pack, times * trunk), trunk)
    return [_pack(chunk, device, observed=observed) for chunk in chunks]


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
    given: np.ndarray
    """Indices in `text` of the completion's other tokens."""

    @property
    def inputs(self) -> np.ndarray:
        """The last drawn token predicts nothing."""
        return self.text[: max(self.prompt_length, len(self.text) - 1)]


def _rollouts(group: TrainingGroup) -> list[Rollout]:
    found = []
    for g, ids in enumerate(group.completion_ids):
        drawn = np.arange(len(ids)) if group.drawn is None else np.flatnonzero(group.drawn[g])
        text = np.array((*group.prompt_ids, *ids[: drawn[-1] + 1 if len(drawn) else 0]))
        given = np.empty(0, int) if group.drawn is None else given_places(group.drawn[g])
        found.append(Rollout(text, len(group.prompt_ids), *(len(group.prompt_ids) + x for x in (drawn, given))))
    return found


def given_places(drawn: np.ndarray) -> np.ndarray:
    """Indices of the tokens that the policy was given before its last one, of a completion's bool `drawn`.

    >>> given_places(np.array([True, False, False, True, False]))
    array([1, 2])
    """
    last = np.flatnonzero(drawn)[-1:]
    return np.flatnonzero(~drawn[: last[0] if len(last) else 0])


def num_given(group: TrainingGroup) -> np.ndarray:
    """Given tokens of each completion that can be predicted, int."""
    return np.array([len(rollout.given) for rollout in _rollouts(group)], int)


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
        "token_penalties",
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
    room, stop = max(budget, times * common_prefix(rows)), 0
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


def _pack(groups: Sequence[TrainingGroup], device: torch.device | str, *, observed: bool = False) -> Pack:
    rows = [rollout for group in groups for rollout in _rollouts(group)]
    rows = rows if observed else [row._replace(given=row.given[:0]) for row in rows]
    tree = PrefixTree([row.inputs for row in rows])
    spans = [
        Span(tokens=path, prompt_length=row.prompt_length, predicting=row.drawn - 1, observing=row.given - 1)
        for row, path in zip(rows, tree.paths, strict=True)
    ]
    predict_N = np.concatenate([span.tokens[span.predicting] for span in spans])
    predict_M = np.concatenate([span.tokens[span.observing] for span in spans])
    predict_P, row_X = np.unique(np.concatenate([predict_N, predict_M]), return_inverse=True)
    return Pack(
        input_ids_T=put(np.array(tree.token_ids), device),
        position_ids_T=put(np.array(tree.depths), device),
        layout=tree_layout(tree.blocks, tree.depths),
        spans_R=tuple(spans),
        predict_N=put(predict_N, device),
        predict_P=put(predict_P, device),
        places=Places.of(row_X, device),
        target_N=put(np.concatenate([row.text[row.drawn] for row in rows]), device),
        observed_M=put(np.concatenate([row.text[row.given] for row in rows]), device),
        rollout_N=put(np.repeat(np.arange(len(rows)), [len(row.drawn) for row in rows]), device),
        advantages_R=_flat([group.advantages_G for group in groups], device),
        token_advantages_N=_optional([group.token_advantages for group in groups], device),
        token_penalties_N=_optional([group.token_penalties for group in groups], device),
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
