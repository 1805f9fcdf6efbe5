"""Tokens are drawn from the distribution that transformers' logits processors leave, with numbers that are uniform."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from podium.engines.sampling import draw, invert, row_key, uniforms
from podium.records import SamplingSettings

VOCABULARY = 300
GRID = 60_000
EVENLY = (torch.arange(GRID, dtype=torch.float64) + 0.5).div(GRID).float()
"""Uniform numbers that miss no token of more than 1 / GRID."""


def logits_of(seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def settings(**overrides: float) -> SamplingSettings:
    return SamplingSettings(**{"num_completions": 1, "max_tokens": 1, **overrides})


def shares_of(tokens: Tensor) -> Tensor:
    return torch.bincount(tokens, minlength=VOCABULARY).double() / len(tokens)


def seen_tokens() -> Tensor:
    return torch.tensor([[3, 3, 17, 120, 299, 41, 42, 43]])


FILTERS = [
    {},
    {"temperature": 0.5},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"repetition_penalty": 1.5},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 0.3, "top_p": 0.05},
    {"top_k": 1},
    {"repetition_penalty": 0.7, "temperature": 2.0},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_distribution_is_that_of_transformers(filters: dict[str, float]) -> None:
    logits_V = logits_of(0)
    processors = LogitsProcessorList()
    for name, processor in (
        ("repetition_penalty", RepetitionPenaltyLogitsProcessor),
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if name in filters:
            processors.append(processor(filters[name]))
    expected_V = processors(seen_tokens(), logits_V[None].clone())[0].double().softmax(-1)
    seen_RV = torch.zeros(1, VOCABULARY, dtype=torch.bool)
    seen_RV[0, seen_tokens()[0]] = True
    drawn = draw(logits_V.repeat(GRID, 1), EVENLY, settings(**filters), seen_RV.expand(GRID, -1))
    assert (shares_of(drawn.token_M) - expected_V).abs().max() < 2 / GRID
    whole_V = (logits_V / filters.get("temperature", 1.0)).log_softmax(-1)
    assert (drawn.logp_M - whole_V[drawn.token_M]).abs().max() < 1e-5, "log-probabilities are before any filter"


def test_draws_pass_a_chi_square_test() -> None:
    """The real random numbers of 200 completions of 500 tokens against the distribution."""
    logits_V = logits_of(1, spread=1.0)
    keys = np.array([row_key(0, 1, p, g) for p, g in itertools.product(range(20), range(10))], np.uint64)
    numbers = np.concatenate([uniforms(keys, np.full(len(keys), t)) for t in range(500)])
    tokens, _ = invert(logits_V.repeat(len(numbers), 1), torch.from_numpy(numbers))
    expected_V = logits_V.double().softmax(-1) * len(numbers)
    assert expected_V.min() > 5
    found_V = torch.bincount(tokens, minlength=VOCABULARY).double()
    chi_square = float(((found_V - expected_V) ** 2 / expected_V).sum())
    freedom = VOCABULARY - 1
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


def test_random_numbers_are_uniform_and_their_streams_are_apart() -> None:
    keys = np.array(
        [row_key(s, r, p, g) for s, r, p, g in itertools.product(range(3), (-1, 0, 1 << 32), range(8), range(8))]
    )
    assert len(np.unique(keys)) == len(keys)
    numbers = np.stack([uniforms(keys, np.full(len(keys), t)) for t in range(300)])
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    mean = numbers.size / 64
    assert abs(float(((counts - mean) ** 2 / mean).sum()) - 63) < 5 * math.sqrt(2 * 63)
    between_streams = np.corrcoef(numbers[:, :40].T)
    between_positions = np.corrcoef(numbers[:40])
    for correlation, samples in ((between_streams, 300), (between_positions, len(keys))):
        assert np.abs(correlation - np.eye(40)).max() < 6 / math.sqrt(samples)


def test_a_number_depends_on_its_place_alone() -> None:
    keys = np.array([row_key(1, 2, p, 0) for p in range(5)])
    together = uniforms(keys, np.array([0, 9, 3, 3, 7]))
    alone = [uniforms(keys[i : i + 1], np.array([t]))[0] for i, t in enumerate([0, 9, 3, 3, 7])]
    assert together.tolist() == alone


@pytest.mark.parametrize("vocabulary", [5, 128, 129, 1000, 1024])
def test_a_token_without_mass_is_never_drawn(vocabulary: int) -> None:
    """Not even where a number falls on the edge between two blocks, and rounding decides."""
    generator = torch.Generator().manual_seed(0)
    possible_RV = torch.rand(3000, vocabulary, generator=generator) < 0.1
    possible_RV[torch.arange(3000), torch.randint(vocabulary, (3000,), generator=generator)] = True
    logits_RV = torch.randn(3000, vocabulary, generator=generator).mul_(2).masked_fill_(~possible_RV, float("-inf"))
    cumulative_RV = logits_RV.double().softmax(-1).cumsum(-1)
    edge_R = cumulative_RV.gather(1, torch.randint(vocabulary, (3000, 1), generator=generator))[:, 0]
    last = 1 - 2**-24
    for numbers in (
        torch.zeros(3000),
        torch.full((3000,), last),
        *(((edge_R * 2**24).floor() + step).div(2**24).clamp(0, last).float() for step in range(-3, 4)),
    ):
        token_R, _ = invert(logits_RV.clone(), numbers)
        assert bool(possible_RV.gather(1, token_R[:, None]).all())


def test_edges_between_blocks_never_yield_what_is_filtered_out() -> None:
    """Each block's first half has no mass: a number that rounds to just below a block must not take its first."""
    generator = torch.Generator().manual_seed(1)
    rows, blocks = 500, 24
    logits_RBX = torch.randn(rows, blocks, 128, generator=generator)
    logits_RBX[:, :, :64] = float("-inf")
    logits_RV = logits_RBX.flatten(1)
    mass = (logits_RV - logits_RV.amax(-1, keepdim=True)).exp().view(rows, blocks, 128)
    up_to = mass.sum(-1).cumsum(-1)
    for block in range(blocks - 1):
        exact = (up_to[:, block] / up_to[:, -1] * 2**24).round()
        for step in (-1, 0, 1):
            token_R, _ = invert(logits_RV.clone(), (exact + step).div(2**24))
            assert int((token_R % 128).min()) >= 64


def test_greedy_takes_the_likeliest_whatever_the_number() -> None:
    logits_RV = torch.stack([logits_of(seed) for seed in range(6)])
    best = logits_RV.argmax(-1)
    drawn = draw(logits_RV.clone(), torch.rand(6), settings(greedy=True, temperature=0.5))
    assert torch.equal(drawn.token_M, best)
    assert torch.allclose(drawn.logp_M, logits_RV.log_softmax(-1).gather(1, best[:, None])[:, 0], atol=1e-5)
