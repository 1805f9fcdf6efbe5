"""Logits -> tokens, with random numbers that are a pure function of who is drawing.

The uniform number for token t of completion g of prompt p in round s depends on (seed, s, p, g, t) alone. So a
completion does not depend on which rows share its batch, on when it got its place there, or on a restart.

Shape letters: R rows of logits, M completions that draw from them, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from podium.records import SamplingSettings

_BLOCK = 128
"""Tokens a block in the two-level inverse of the cumulative distribution."""


class Drawn(NamedTuple):
    """One token a completion, and its log-probability under `logits / temperature`."""

    token_M: Tensor
    logp_M: Tensor


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64-bit words that looks random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_key(seed: int, round_number: int, prompt: int, completion: int) -> np.uint64:
    """The key of one completion's stream of random numbers."""
    key = np.zeros(1, np.uint64)
    for part in (seed, round_number, prompt, completion):
        key = mix(key + np.uint64(0x9E3779B97F4A7C15) + mix(np.array([part], np.int64).view(np.uint64)))
    return key[0]


def uniforms(keys_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), float32 with 24 random bits: number `positions_R[r]` of stream `keys_R[r]`."""
    counters = positions_R.astype(np.uint64) + np.uint64(1)
    words = mix(keys_R + counters * np.uint64(0x9E3779B97F4A7C15))
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def draw(
    logits_RV: Tensor,
    uniform_M: Tensor,
    settings: SamplingSettings,
    seen_RV: Tensor | None = None,
    row_M: Tensor | None = None,
) -> Drawn:
    """One token for each completion, which draws from row `row_M` (None: each from its own).

    `logits_RV` is float32 and is overwritten; `seen_RV` marks tokens to penalise.
    """
    if row_M is None:
        row_M = torch.arange(len(logits_RV), device=logits_RV.device)
    if not settings.greedy and settings.temperature != 1:
        logits_RV = logits_RV.div_(settings.temperature)
    if settings.greedy or settings.filtered:
        lse_R = logits_RV.logsumexp(-1)
        choices = filtered(logits_RV, settings, seen_RV) if settings.filtered else logits_RV
        token_M = choices.argmax(-1)[row_M] if settings.greedy else invert(choices, uniform_M, row_M)[0]
    else:
        token_M, lse_R = invert(logits_RV, uniform_M, row_M)
    return Drawn(token_M, logits_RV[row_M, token_M] - lse_R[row_M])


def invert(logits_RV: Tensor, uniform_M: Tensor, row_M: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The token at which row `row_M`'s cumulative distribution passes `uniform_M`, and log sum exp of every row.

    Without `row_M` each number is for a row of its own.

    One exp and one sum over the vocabulary serve both. First the block, by its mass, then the token within it. A token
    of mass zero is never drawn.
    """
    rows, vocabulary = logits_RV.shape
    if row_M is None:
        row_M = torch.arange(rows, device=logits_RV.device)
    top_R1 = logits_RV.amax(-1, keepdim=True)
    mass_RV = (logits_RV - top_R1).exp_()
    if vocabulary % _BLOCK:
        mass_RV = torch.nn.functional.pad(mass_RV, (0, -vocabulary % _BLOCK))
    blocks = mass_RV.view(rows, -1, _BLOCK)
    of_block = blocks.sum(-1)
    up_to = of_block.cumsum(-1)[row_M]
    target = uniform_M[:, None] * up_to[:, -1:]
    block = (up_to <= target).sum(-1, keepdim=True).clamp_(max=up_to.shape[1] - 1)
    # Rounding may leave less than nothing of a number that just reached this block: its first token is not meant then.
    rest = (target - up_to.gather(1, block) + of_block[row_M].gather(1, block)).clamp_(min=0)
    within = blocks[row_M, block[:, 0]]
    last = (within > 0).int().mul_(torch.arange(_BLOCK, device=block.device, dtype=torch.int32)).amax(-1, keepdim=True)
    token = torch.minimum((within.cumsum(-1) <= rest).sum(-1, keepdim=True), last)
    return (block * _BLOCK + token)[:, 0], top_R1[:, 0] + of_block.sum(-1).log()


def filtered(logits_RV: Tensor, settings: SamplingSettings, seen_RV: Tensor | None) -> Tensor:
    """A copy with what may not be drawn at minus infinity, in the order of transformers' `generate`.

    Repetition penalty, then top-k, top-p, min-p. The penalty is meant for raw logits, before the temperature.
    """
    logits = logits_RV.clone()
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
