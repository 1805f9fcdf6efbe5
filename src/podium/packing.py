"""Ragged groups -> flat tensors: the only border between Python lists and tensors of tokens.

A pack lays out each prompt once and then its completions, without padding. `predict_N` says which position predicts
which trained token, many to one: the first token of all G completions is predicted by the prompt's last position. So
the shared prefix is invisible to the head, the losses and the metrics; only attention sees the tree, through `Layout`.

A completion's last token predicts nothing, so it is a target but never an input.

Shape letters: T tokens in the pack, N trained tokens, R rollouts, B rows of a bucket, L queries a row, K keys a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from podium.records import TrainingGroup

FOLDED_ROW = 256
"""A group of at most this many tokens attends as one row under a tree mask: fewer, larger products."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who attends to whom in a pack: every position of T is a query of exactly one bucket."""

    buckets: tuple[Bucket, ...]
    output_T: Tensor
    """Where position t's output stands in the flattened, concatenated outputs of the buckets."""

    def to(self, device: torch.device | str) -> Layout:
        """The same layout on a device."""
        buckets = tuple(
            Bucket(
                query_BL=b.query_BL.to(device),
                key_BK=b.key_BK.to(device),
                mask_BLK=b.mask_BLK.to(device),
                distance_BLK=b.distance_BLK.to(device),
                causal=b.causal,
                reach=b.reach,
            )
            for b in self.buckets
        )
        return Layout(buckets=buckets, output_T=self.output_T.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where one rollout stands in T: its prompt, then its own input tokens."""

    prompt_start: int
    prompt_length: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Some groups as flat tensors, small enough for one forward and backward."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    layout: Layout
    spans_R: tuple[Span, ...]
    predict_N: Tensor
    """Position in T whose output predicts trained token n."""
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

    @property
    def num_inputs(self) -> int:
        """T."""
        return len(self.input_ids_T)

    def split(self, values_N: Tensor) -> list[np.ndarray]:
        """Per-token values [N] cut into one float32 array per rollout."""
        flat = values_N.detach().float().cpu().numpy()
        lengths = torch.bincount(self.rollout_N, minlength=self.num_rollouts).tolist()
        return np.split(flat, np.cumsum(lengths)[:-1])


def pack(groups: Sequence[TrainingGroup], *, tokens_per_pack: int, device: torch.device | str = "cpu") -> list[Pack]:
    """Packs of at most `tokens_per_pack` input tokens each; a single larger rollout still makes a pack of its own.

    Groups stay whole while they fit; a larger group is cut between completions and its prompt repeated. A part may
    always hold as many completion tokens as prompt tokens, so that no long prompt is repeated for every completion.
    """
    return [_pack(chunk, device) for chunk in _chunks(_fit(groups, tokens_per_pack), tokens_per_pack)]


def num_input_tokens(group: TrainingGroup) -> int:
    """Positions a group takes in a pack."""
    return len(group.prompt_ids) + sum(len(ids) - 1 for ids in group.completion_ids)


def keep(group: TrainingGroup, index: Sequence[int]) -> TrainingGroup:
    """The group with only the completions in `index`."""

    def chosen(values: tuple[np.ndarray, ...] | None) -> tuple[np.ndarray, ...] | None:
        return None if values is None else tuple(values[i] for i in index)

    return TrainingGroup(
        prompt_ids=group.prompt_ids,
        completion_ids=tuple(group.completion_ids[i] for i in index),
        advantages_G=group.advantages_G[list(index)],
        sampled_logps=tuple(group.sampled_logps[i] for i in index),
        old_logps=chosen(group.old_logps),
        ref_logps=chosen(group.ref_logps),
    )


def _fit(groups: Iterable[TrainingGroup], budget: int) -> Iterable[TrainingGroup]:
    """Cut every group that is larger than the budget between its completions."""
    for group in groups:
        start, size = 0, len(group.prompt_ids)
        room = max(budget, 2 * size)
        for i, ids in enumerate(group.completion_ids):
            if i > start and size + len(ids) - 1 > room:
                yield keep(group, range(start, i))
                start, size = i, len(group.prompt_ids)
            size += len(ids) - 1
        if start < len(group.completion_ids):
            yield group if start == 0 else keep(group, range(start, len(group.completion_ids)))


def _chunks(groups: Iterable[TrainingGroup], budget: int) -> Iterable[list[TrainingGroup]]:
    """Consecutive groups, together at most `budget` tokens, of even size: five groups for a pack of four make 3 + 2."""
    groups = list(groups)
    total = sum(map(num_input_tokens, groups))
    even = min(
        budget, max(1, -(-total // max(1, -(-total // budget))) + max(map(num_input_tokens, groups), default=0) // 2)
    )
    chunk: list[TrainingGroup] = []
    size = 0
    for group in groups:
        tokens = num_input_tokens(group)
        if chunk and size + tokens > even:
            yield chunk
            chunk, size = [], 0
        chunk.append(group)
        size += tokens
    if chunk:
        yield chunk


def _pack(groups: Sequence[TrainingGroup], device: torch.device | str) -> Pack:
    ids: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    spans: list[Span] = []
    for group in groups:
        prompt_start, prompt_length = len(ids), len(group.prompt_ids)
        ids += group.prompt_ids
        positions += range(prompt_length)
        for completion in group.completion_ids:
            start, length = len(ids), len(completion) - 1
            spans.append(Span(prompt_start=prompt_start, prompt_length=prompt_length, start=start, length=length))
            ids += completion[:-1]
            positions += range(prompt_length, prompt_length + length)
            predict += [prompt_start + prompt_length - 1, *range(start, start + length)]
    completions = [completion for group in groups for completion in group.completion_ids]
    return Pack(
        input_ids_T=torch.tensor(ids, device=device),
        position_ids_T=torch.tensor(positions, device=device),
        layout=tree_layout(spans, positions).to(device),
        spans_R=tuple(spans),
        predict_N=torch.tensor(predict, device=device),
        target_N=torch.tensor([token for completion in completions for token in completion], device=device),
        rollout_N=torch.repeat_interleave(torch.tensor([len(c) for c in completions])).to(device),
        advantages_R=_flat([group.advantages_G for group in groups], device),
        sampled_logps_N=_flat([x for group in groups for x in group.sampled_logps], device),
        old_logps_N=_optional([group.old_logps for group in groups], device),
        ref_logps_N=_optional([group.ref_logps for group in groups], device),
    )


def _flat(arrays: Sequence[np.ndarray], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.float32)).to(device)


def _optional(per_group: Sequence[tuple[np.ndarray, ...] | None], device: torch.device | str) -> Tensor | None:
    missing = [arrays is None for arrays in per_group]
    assert all(missing) or not any(missing), "some groups of a pack have log-probabilities that others lack"
    return None if any(missing) else _flat([x for arrays in per_group for x in arrays or ()], device)


# ---- who attends to whom ----


@dataclass(frozen=True, slots=True)
class _Row:
    """One attention row: its queries, its keys and which query sees which key."""

    queries: np.ndarray
    keys: np.ndarray
    mask: np.ndarray | None  # None: causal over itself


def tree_layout(spans: Sequence[Span], positions: Sequence[int]) -> Layout:
    """The attention of prompts with shared completions: causal in a prompt; a completion sees its prompt and itself."""
    rows: list[_Row] = []
    start = 0
    while start < len(spans):
        end = start
        while end < len(spans) and spans[end].prompt_start == spans[start].prompt_start:
            end += 1
        rows += _group_rows(spans[start:end])
        start = end
    return layout_of(rows, np.asarray(positions))


def causal_layout(lengths: Sequence[int]) -> Layout:
    """Independent sequences, one after the other, each causal: the layout of a prefill."""
    starts = np.cumsum([0, *lengths[:-1]])
    rows = [_Row(np.arange(s, s + n), np.arange(s, s + n), None) for s, n in zip(starts, lengths, strict=True)]
    return layout_of(rows, np.concatenate([np.arange(n) for n in lengths]))


def _group_rows(spans: Sequence[Span]) -> list[_Row]:
    prompt = np.arange(spans[0].prompt_start, spans[0].prompt_start + spans[0].prompt_length)
    own = [np.arange(s.start, s.start + s.length) for s in spans if s.length]
    tokens = np.concatenate([prompt, *own])
    if len(tokens) <= FOLDED_ROW:
        owner = np.concatenate([np.full(len(prompt), -1), *(np.full(len(x), i) for i, x in enumerate(own))])
        visible = (owner[None] == -1) | (owner[None] == owner[:, None])
        return [_Row(tokens, tokens, visible & np.tri(len(tokens), dtype=bool))]
    rows = [_Row(prompt, prompt, None)]
    for x in own:
        mask = np.concatenate([np.ones((len(x), len(prompt)), bool), np.tri(len(x), dtype=bool)], axis=1)
        rows.append(_Row(x, np.concatenate([prompt, x]), mask))
    return rows


def layout_of(rows: Sequence[_Row], positions_T: np.ndarray) -> Layout:
    """Rows of one kind and similar width, in powers of two, side by side in buckets."""
    kinds: dict[tuple[bool, int, int], list[_Row]] = {}
    for row in rows:
        kinds.setdefault((row.mask is None, _width(len(row.queries)), _width(len(row.keys))), []).append(row)
    buckets, output_T, offset = [], np.zeros(len(positions_T), np.int64), 0
    for (causal, _, _), members in kinds.items():
        length = max(len(row.queries) for row in members)
        width = length if causal else max(len(row.keys) for row in members)
        query_BL = np.stack([_pad(row.queries, length) for row in members])
        key_BK = np.stack([_pad(row.keys, width) for row in members])
        mask_BLK = np.zeros((len(members), length, width), bool)
        for i, row in enumerate(members):
            n, k = len(row.queries), len(row.keys)
            mask_BLK[i, :n, :k] = np.tri(n, dtype=bool) if row.mask is None else row.mask
            mask_BLK[i, n:] = mask_BLK[i, 0]  # a padded query repeats the first one
            output_T[row.queries] = offset + i * length + np.arange(n)
        distance_BLK = positions_T[query_BL][:, :, None] - positions_T[key_BK][:, None, :]
        buckets.append(
            Bucket(
                query_BL=torch.from_numpy(query_BL),
                key_BK=torch.from_numpy(key_BK),
                mask_BLK=torch.from_numpy(mask_BLK),
                distance_BLK=torch.from_numpy(distance_BLK.astype(np.int32)),
                causal=causal,
                reach=int(distance_BLK.max()),
            )
        )
        offset += query_BL.size
    return Layout(buckets=tuple(buckets), output_T=torch.from_numpy(output_T))


def _width(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _pad(index: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([index, np.full(length - len(index), index[0])])
