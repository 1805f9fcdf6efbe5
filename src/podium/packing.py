"""Ragged groups -> flat tensors: the only border between Python lists and tensors of tokens.

A pack is a tree without padding: first what all its prompts begin with (a system prompt, worked examples), the trunk;
then each prompt's rest, once, and behind it the completions, which share what they begin with alike. `predict_N` says
which position predicts which trained token, many to one: the first token of all G completions is predicted by the
prompt's last position. So what is shared is invisible to the losses and the metrics; only attention sees the tree,
through `Layout`.

A completion's last token predicts nothing, so it is a target but never an input.

Shape letters: T tokens in the pack, N trained tokens, R rollouts, B rows of a bucket, L queries a row, K keys a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from podium.records import TrainingGroup

FOLDED_ROW = 256
"""A group, or its completions, of at most this many tokens attends as one row under a tree mask: fewer, larger
products, and completions may share their beginnings."""

SHORTEST_TRUNK = 16
"""A common beginning of fewer tokens is not worth an attention row of its own."""

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


def nothing(device: torch.device | str = "cpu") -> Pack:
    """One rollout of one token: what a process without work sends through the model where the others wait for it."""
    zero = np.zeros(1, np.float32)
    group = TrainingGroup(prompt_ids=(0,), completion_ids=((0,),), advantages_G=zero, sampled_logps=(zero,))
    [packed] = pack([group], tokens_per_pack=1, device=device)
    return packed


class Tree(NamedTuple):
    """A group's completions, their last tokens left out, with what they begin with alike once."""

    token_ids: list[int]
    depths: list[int]
    """Tokens before each, in its completion."""
    paths: list[np.ndarray]
    """Of each completion, where its tokens stand in `token_ids`, in increasing order."""


def tree_of(completions: Sequence[Sequence[int]]) -> Tree:
    """Completions that take more than `FOLDED_ROW` tokens even so share nothing.

    >>> tree_of([[5, 6, 7, 9], [5, 6, 8, 9]])
    Tree(token_ids=[5, 6, 7, 8], depths=[0, 1, 2, 2], paths=[array([0, 1, 2]), array([0, 1, 3])])
    """
    places: dict[tuple[int, int], int] = {}  # (place before, token) -> place
    tree = Tree([], [], [])
    for completion in completions:
        path, place = [], -1
        for depth, token in enumerate(completion[:-1]):
            known = places.setdefault((place, token), len(places))
            if known == len(tree.token_ids):
                tree.token_ids.append(token)
                tree.depths.append(depth)
            path.append(place := known)
        if len(places) > FOLDED_ROW:
            return _side_by_side(completions)
        tree.paths.append(np.array(path, np.int64))
    return tree


def _side_by_side(completions: Sequence[Sequence[int]]) -> Tree:
    lengths = [len(completion) - 1 for completion in completions]
    ends = np.cumsum(lengths)
    return Tree(
        token_ids=[token for completion in completions for token in completion[:-1]],
        depths=[depth for length in lengths for depth in range(length)],
        paths=[np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)],
    )


def num_input_tokens(group: TrainingGroup) -> int:
    """Positions a group takes in a pack without a trunk."""
    return len(group.prompt_ids) + len(tree_of(group.completion_ids).token_ids)


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
        if num_input_tokens(group) <= room:
            yield group
            continue
        for i, ids in enumerate(group.completion_ids):
            if i > start and size + len(ids) - 1 > room:
                yield keep(group, range(start, i))
                start, size = i, len(group.prompt_ids)
            size += len(ids) - 1
        if start < len(group.completion_ids):
            yield group if start == 0 else keep(group, range(start, len(group.completion_ids)))


def _chunks(groups: Iterable[TrainingGroup], budget: int, trunk: int) -> Iterable[list[TrainingGroup]]:
    """Consecutive groups, together at most `budget` tokens, of even size: five groups for a pack of four make 3 + 2."""
    groups = list(groups)
    room = max(budget, 2 * trunk) - trunk
    sizes = [num_input_tokens(group) - trunk for group in groups]
    packs = max(1, -(-sum(sizes) // room))
    even = min(room, -(-sum(sizes) // packs) + max(sizes, default=0) // 2)
    chunk: list[TrainingGroup] = []
    filled = 0
    for group, size in zip(groups, sizes, strict=True):
        if chunk and filled + size > even:
            yield chunk
            chunk, filled = [], 0
        chunk.append(group)
        filled += size
    if chunk:
        yield chunk


def _pack(groups: Sequence[TrainingGroup], device: torch.device | str) -> Pack:
    trunk = common_beginning([group.prompt_ids for group in groups])
    ids: list[int] = list(groups[0].prompt_ids[:trunk])
    positions: list[int] = list(range(trunk))
    predict: list[int] = []
    spans: list[Span] = []
    for group in groups:
        prompt_start, prompt_length = len(ids), len(group.prompt_ids)
        ids += group.prompt_ids[trunk:]
        positions += range(trunk, prompt_length)
        last = len(ids) - 1
        tree = tree_of(group.completion_ids)
        for path in tree.paths:
            own = len(ids) + path
            spans.append(Span(trunk=trunk, prompt_start=prompt_start, prompt_length=prompt_length, own=own))
            predict += [last, *own]
        ids += tree.token_ids
        positions += (prompt_length + depth for depth in tree.depths)
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
    rows: list[_Row] = []
    own: list[_Row] = []
    shared: list[_Row] = []
    for _, spans_of_group in itertools.groupby(spans, key=lambda span: span.prompt_start):
        group = list(spans_of_group)
        prompt, completions = group[0].prompt, [span.own for span in group if span.length]
        places = np.unique(np.concatenate(completions)) if completions else prompt[:0]
        if len(prompt) + len(places) <= FOLDED_ROW:
            folded = _folded([prompt, *(np.concatenate([prompt, x]) for x in completions)])
            rows.append(folded)
            own.append(folded)
            continue
        alike = len(places) < sum(map(len, completions))
        texts = [_Row(prompt, prompt)]
        behind = [_folded(completions)] if alike else [_Row(x, x) for x in completions]
        rows += [*texts, *(_above(row, prompt) for row in behind)]
        shared += [_Row(places, prompt, open=True)] if completions else []
        if alike:
            own += behind
        else:
            texts += behind
        for text in texts:
            chunks, earlier = _chunked(text.queries)
            own += chunks
            shared += earlier
    return _layout(rows, own, shared, trunk=spans[0].trunk, positions_T=np.asarray(positions))


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
