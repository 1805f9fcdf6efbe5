"""Ragged samples -> flat tensors: the only boundary between Python lists and tensors of tokens.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from podium.models.candidates import ALL, Candidates
from podium.models.devices import kind_of, put
from podium.models.images import ImageOrder
from podium.models.prefix_tree import Layout, Segment, lay_out, prefix_tree, trunk_length
from podium.records import GivenImages, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Which of P rows of hidden states predicts which of N trained tokens."""

    row_N: Tensor
    order_N: Tensor
    """The tokens by their rows."""
    host_row_N: np.ndarray
    host_order_N: np.ndarray
    """Both again, known on the host."""
    first_P: np.ndarray
    """First token of each row in that order, and N; known on the host."""
    candidates: Candidates | None = None
    """Tokens over which log-probabilities are normalized; None: all."""

    def with_candidates(self, candidates_N: Sequence[np.ndarray] | None) -> Places:
        """The same with the candidates of each of its first tokens, as `models.candidates` stores them."""
        if candidates_N is None:
            return self
        found = Candidates.of(candidates_N, self.host_row_N, self.host_order_N, self.row_N.device)
        return replace(self, candidates=found)

    @classmethod
    def of(cls, row_N: np.ndarray, device: torch.device | str) -> Places:
        """Places of rows 0 to P - 1, each with at least one token."""
        first_P = np.concatenate([[0], np.cumsum(np.bincount(row_N))])
        order_N = np.argsort(row_N, kind="stable")
        return cls(
            row_N=put(row_N, device),
            order_N=put(order_N, device),
            host_row_N=row_N,
            host_order_N=order_N,
            first_P=first_P,
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Some samples as flat tensors, small enough for one forward and backward."""

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
    """Advantages of whole rollouts, for loss terms that have one value per rollout."""
    advantages_N: Tensor
    penalties_N: Tensor | None
    """Weights of |log(pi / pi_old)|; None: 0."""
    sampled_logps_N: Tensor
    old_logps_N: Tensor | None
    ref_logps_N: Tensor | None
    candidates_N: tuple[np.ndarray, ...] | None
    """Candidates of each trained token, as `models.candidates` stores them; None: all tokens."""
    images: tuple[GivenImages, ...] = ()
    """Each once."""
    images_R: tuple[tuple[GivenImages, ...], ...] = ()
    """Those of each rollout."""
    feature_T: np.ndarray | None = None
    """The feature of the pack's images that each position is a placeholder of; -1: none. None: there are no images."""

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
    samples: Sequence[Sample],
    *,
    tokens_per_pack: int,
    device: torch.device | str = "cpu",
    observed: bool = False,
) -> list[Pack]:
    """Packs of at most `tokens_per_pack` input tokens each; a single larger sample still makes a pack of its own.

    Consecutive samples of one prompt stay together while they fit; more of them are cut between samples, and their
    common beginning is repeated. A part may always hold `beginnings_per_pack` times the tokens of that beginning, and a
    pack those of the common beginning of all prompts, so that nothing long is repeated for every sample, or for every
    prompt.

    `observed`: whether given tokens are to be predicted, too.
    """
    if not samples:  # of a micro-batch without a gradient
        return []
    order = ImageOrder()
    sequences = []
    for sample in samples:
        last = np.flatnonzero(sample.actions)[-1:]
        stop = last[0] if len(last) else 0  # the last drawn token predicts nothing
        sequences.append(order.told_apart((*sample.prompt_ids, *sample.token_ids[:stop]), sample.images))
    tree = prefix_tree(sequences)

    def prompt_of(r: int) -> tuple[tuple[int, ...], tuple[GivenImages, ...]]:
        prompt_ids = samples[r].prompt_ids
        return prompt_ids, tuple(x for x in samples[r].images if x.start < len(prompt_ids))

    runs = [[*run] for _, run in itertools.groupby(range(len(samples)), key=prompt_of)]
    trunk = trunk_length(tree.stop, [len(samples[run[0]].prompt_ids) for run in runs])
    times = kind_of(device).beginnings_per_pack
    room = max(tokens_per_pack, times * trunk)
    parts = [part for run in runs for part in _parts(tree.between(run[0], run[-1] + 1), tokens_per_pack, times)]
    packs = []
    first = 0
    for count in _counts([part.num_stored - trunk for part in parts], room - trunk):
        chunk = tree.between(parts[first].rows[0], parts[first + count - 1].rows[-1] + 1)
        layout = lay_out(chunk.blocks, sequences)
        packs.append(_pack([samples[r] for r in chunk.rows], layout, device, observed=observed))
        first += count
    return packs


def unscored(prompt_ids: Sequence[int], token_ids: Sequence[int], images: tuple[GivenImages, ...] = ()) -> Sample:
    """A sample of which only log-probabilities are wanted; all tokens behind the prompt count as drawn."""
    zeros_A = np.zeros(len(token_ids), np.float32)
    return Sample(
        prompt_ids=tuple(prompt_ids),
        token_ids=tuple(token_ids),
        actions=np.ones(len(token_ids), bool),
        advantage=0.0,
        advantages_A=zeros_A,
        sampled_logps_A=zeros_A,
        images=images,
    )


def dummy_pack(device: torch.device | str = "cpu") -> Pack:
    """One sample of one token: what a process without work sends through the model where the others wait for it."""
    [packed] = pack([unscored([0], [0])], tokens_per_pack=1, device=device)
    return packed


def given_places(actions: np.ndarray) -> np.ndarray:
    """Indices of the tokens that the policy was given before its last one, of a sample's action mask.

    >>> given_places(np.array([True, False, False, True, False]))
    array([1, 2])
    """
    last = np.flatnonzero(actions)[-1:]
    return np.flatnonzero(~actions[: last[0] if len(last) else 0])


def _parts(tree: Segment, budget: int, times: int) -> Iterator[Segment]:
    """Samples of one prompt, cut where they are together larger than budget and beginning allow."""
    room = max(budget, times * tree.stop)
    if tree.num_stored <= room:
        yield tree
        return
    stop = tree.rows[0]
    end = tree.rows[-1] + 1
    while stop < end:
        start = stop
        several = range(start + 2, end + 1)
        stop = start + 1 + bisect_right(several, room, key=lambda stop: tree.between(start, stop).num_stored)
        yield tree.between(start, stop)


def _counts(sizes: Sequence[int], room: int) -> Iterator[int]:
    """Numbers of consecutive parts, together at most `room` tokens, of even size: five for a pack of four are 3 + 2."""
    packs = max(1, -(-sum(sizes) // room))
    even = min(room, -(-sum(sizes) // packs) + max(sizes, default=0) // 2)
    count = filled = 0
    for size in sizes:
        if count and filled + size > even:
            yield count
            count = filled = 0
        count += 1
        filled += size
    if count:
        yield count


def _pack(samples: Sequence[Sample], layout: Layout, device: torch.device | str, *, observed: bool) -> Pack:
    spans = []
    targets = []
    given = []
    for sample, path in zip(samples, layout.paths, strict=True):
        drawn = np.flatnonzero(sample.actions)
        between = given_places(sample.actions) if observed else drawn[:0]
        token_ids = np.array(sample.token_ids, np.int64)
        targets.append(token_ids[drawn])
        given.append(token_ids[between])
        start = len(sample.prompt_ids)
        span = Span(tokens=path, prompt_length=start, predicting=start + drawn - 1, observing=start + between - 1)
        spans.append(span)
    predict_N = np.concatenate([span.tokens[span.predicting] for span in spans])
    predict_M = np.concatenate([span.tokens[span.observing] for span in spans])
    predict_P, row_X = np.unique(np.concatenate([predict_N, predict_M]), return_inverse=True)
    order = ImageOrder()
    images_R = tuple(  # given behind the last drawn token they are no input
        tuple(x for x in sample.images if x.start < len(path))
        for sample, path in zip(samples, layout.paths, strict=True)
    )
    ids_T, feature_T = layout.token_ids_T, None
    if any(images_R):
        whole = [((*sample.prompt_ids, *sample.token_ids), sample.images) for sample in samples]
        ids_T, feature_T = order.laid_out(layout, whole)
    return Pack(
        input_ids_T=put(ids_T, device),
        position_ids_T=put(layout.position_T, device),
        layout=layout,
        spans_R=tuple(spans),
        predict_N=put(predict_N, device),
        predict_P=put(predict_P, device),
        places=Places.of(row_X, device),
        target_N=put(np.concatenate(targets), device),
        observed_M=put(np.concatenate(given), device),
        rollout_N=put(np.repeat(np.arange(len(samples)), [len(target) for target in targets]), device),
        advantages_R=put(np.array([sample.advantage for sample in samples], np.float32), device),
        advantages_N=put(np.concatenate([sample.advantages_A for sample in samples]).astype(np.float32), device),
        penalties_N=_optional([sample.penalties_A for sample in samples], device),
        sampled_logps_N=put(np.concatenate([sample.sampled_logps_A for sample in samples]).astype(np.float32), device),
        old_logps_N=_optional([sample.old_logps_A for sample in samples], device),
        ref_logps_N=_optional([sample.ref_logps_A for sample in samples], device),
        candidates_N=_candidates(samples),
        images=order.images,
        images_R=images_R,
        feature_T=feature_T,
    )


def _candidates(samples: Sequence[Sample]) -> tuple[np.ndarray, ...] | None:
    if all(sample.candidates is None for sample in samples):
        return None
    known = [sample.candidates or itertools.repeat(ALL, len(sample.sampled_logps_A)) for sample in samples]
    return tuple(itertools.chain.from_iterable(known))


def _optional(arrays: Sequence[np.ndarray | None], device: torch.device | str) -> Tensor | None:
    given = [array for array in arrays if array is not None]
    assert len(given) in (0, len(arrays)), "some samples of a pack have values that others lack"
    return put(np.concatenate(given).astype(np.float32), device) if given else None
