"""Logits -> tokens, with random numbers that are a pure function of who is drawing.

The uniform numbers for token t of completion g of prompt p in round s depend on (seed, s, p, g, t) alone: not on which
rows share its batch, on when it got its place there, or on a restart. The logits do depend on the batch, in their last
bits, as products of other shapes add up in another order; so a token that is drawn very near an edge may change.

Shape letters: R rows of logits, M completions that draw from them, V vocabulary, L levels of the tree of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from podium.models.candidates import packed_bits
from podium.records import RolloutRequest, SamplingSettings

_BRANCHES = 32
"""Choices at a level of the tree whose leaves are the tokens."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio, SplitMix64's step."""


class DrawnTokens(NamedTuple):
    """One token a completion, and its log-probability under `logits / temperature`."""

    token_M: Tensor
    logp_M: Tensor
    bits_MB: Tensor | None = None
    """The tokens that each could have been, as bits, none where all could; None: nothing was filtered."""


def joined(parts: Sequence[DrawnTokens]) -> DrawnTokens:
    """The tokens of several draws, one after the other."""
    if len(parts) == 1:
        return parts[0]
    known = [part.bits_MB for part in parts if part.bits_MB is not None]
    bits_MB = None
    if known:
        width = known[0].shape[1]
        none = [
            known[0].new_zeros(len(part.token_M), width) if part.bits_MB is None else part.bits_MB for part in parts
        ]
        bits_MB = torch.cat(none)
    return DrawnTokens(torch.cat([part.token_M for part in parts]), torch.cat([part.logp_M for part in parts]), bits_MB)


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64-bit words that looks random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_key(*parts: int) -> np.uint64:
    """The key of one completion's stream of random numbers: seed, round, prompt, completion."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = mix(key + _GOLDEN + mix(np.array([part], np.int64).view(np.uint64)))
    return key[0]


def stream_key(request: RolloutRequest, settings: SamplingSettings, place: int) -> np.uint64:
    """The key of completion `place` of a request: its turns share it, unless they have numbers of their own."""
    turn = [request.turn] if request.turn else []
    return row_key(settings.seed, settings.round, request.prompt_id, request.completion + place, *turn)


def levels(vocabulary: int) -> int:
    """Number of random numbers that a token takes: one choice among `_BRANCHES` each.

    >>> [levels(size) for size in (2, 32, 33, 49_152)]
    [1, 1, 2, 4]
    """
    return 1 if vocabulary <= _BRANCHES else 1 + levels(-(-vocabulary // _BRANCHES))


def uniforms(keys_R: np.ndarray, positions_R: np.ndarray, count: int) -> np.ndarray:
    """Uniform numbers [R, count] in [0, 1), float32 with 24 random bits: those of token `positions_R[r]` of stream
    `keys_R[r]`."""
    counters = positions_R.astype(np.uint64) + np.uint64(1)
    words = mix(keys_R + counters * _GOLDEN)[:, None] + np.arange(count, dtype=np.uint64) * _GOLDEN
    return (mix(words) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def draw(
    logits_RV: Tensor,
    uniform_ML: Tensor,
    settings: SamplingSettings,
    seen_RV: Tensor | None = None,
    row_M: Tensor | None = None,
) -> DrawnTokens:
    """One token for each completion, which draws from row `row_M` (None: each from its own).

    `logits_RV` is float32 and is overwritten; `seen_RV` marks tokens to penalise.
    """
    row_M = torch.arange(len(logits_RV), device=logits_RV.device) if row_M is None else row_M
    if not settings.greedy and settings.temperature != 1:
        logits_RV = logits_RV.div_(settings.temperature)
    if settings.keeps_candidates:
        choices_RV = filtered(logits_RV, settings, seen_RV)
        kept_RV = choices_RV > -torch.inf
        token_M, _ = invert(choices_RV, uniform_ML, row_M)
        log_total_R = logits_RV.masked_fill(~kept_RV, -torch.inf).logsumexp(-1)
        return DrawnTokens(token_M, logits_RV[row_M, token_M] - log_total_R[row_M], packed_bits(kept_RV)[row_M])
    if settings.greedy or settings.filtered or settings.never:
        top_R = logits_RV.amax(-1)
        rest_R = (logits_RV - top_R[:, None]).logsumexp(-1)
        chosen = settings.filtered or settings.never
        choices = filtered(logits_RV, settings, seen_RV) if chosen else logits_RV
        token_M = choices.argmax(-1)[row_M] if settings.greedy else invert(choices, uniform_ML, row_M)[0]
    else:
        token_M, (top_R, rest_R) = invert(logits_RV, uniform_ML, row_M)
    return DrawnTokens(token_M, logits_RV[row_M, token_M] - top_R[row_M] - rest_R[row_M])


def invert(logits_RV: Tensor, uniform_ML: Tensor, row_M: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A token of row `row_M`'s distribution by the numbers `uniform_ML`, and log sum exp of every row.

    The latter in two parts, whose sum would round: the largest logit, and log sum exp of the distances from it.
    Without `row_M` each line of numbers is for a row of its own.

    One exp and one sum over the vocabulary serve both. Tokens are the leaves of a tree: first a branch by its mass,
    with a number of its own, then one of its branches. So rounding moves edges between few branches, not between all
    tokens. A token of mass zero is never drawn.
    """
    row_M = torch.arange(len(logits_RV), device=logits_RV.device) if row_M is None else row_M
    top_R1 = logits_RV.amax(-1, keepdim=True)
    masses = [(logits_RV - top_R1).exp_()]
    while (width := masses[-1].shape[1]) > _BRANCHES:
        if width % _BRANCHES:
            masses[-1] = torch.nn.functional.pad(masses[-1], (0, -width % _BRANCHES))
        masses.append(masses[-1].unflatten(1, (-1, _BRANCHES)).sum(-1))
    node_M = torch.zeros_like(row_M)
    for level, mass in enumerate(reversed(masses)):
        branches = min(_BRANCHES, mass.shape[1])
        of_node = mass.unflatten(1, (-1, branches))[row_M, node_M]
        up_to = of_node.cumsum(-1)
        chosen = (up_to <= uniform_ML[:, level, None] * up_to[:, -1:]).sum(-1)
        numbers = torch.arange(branches, device=row_M.device, dtype=torch.int32)
        last = (of_node > 0).int().mul_(numbers).amax(-1)  # where a number rounds up to 1
        node_M = node_M * branches + torch.minimum(chosen, last)
    return node_M, (top_R1[:, 0], masses[-1].sum(-1).log())


def filtered(logits_RV: Tensor, settings: SamplingSettings, seen_RV: Tensor | None) -> Tensor:
    """A copy with what may not be drawn at minus infinity, in the order of transformers' `generate`.

    Tokens that are never drawn, repetition penalty, then top-k, top-p, min-p. The penalty is meant for raw logits,
    before the temperature.
    """
    logits = logits_RV.clone()
    if settings.never:
        logits[:, list(settings.never)] = float("-inf")
    if settings.repetition_penalty != 1 and seen_RV is not None:
        penalty = torch.where(logits < 0, settings.repetition_penalty, 1 / settings.repetition_penalty)
        logits = torch.where(seen_RV, logits * penalty, logits)
    if settings.top_k > 0:
        kth = logits.topk(min(settings.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if settings.top_p < 1:
        ordered, order = logits.sort(dim=-1)
        unlikely = ordered.softmax(-1).cumsum(-1) <= 1 - settings.top_p
        unlikely[:, -1] = False
        logits = logits.masked_fill(unlikely.scatter(1, order, unlikely), float("-inf"))
    if settings.min_p > 0:
        probability = logits.softmax(-1)
        logits = logits.masked_fill(probability < settings.min_p * probability.amax(-1, keepdim=True), float("-inf"))
    return logits
