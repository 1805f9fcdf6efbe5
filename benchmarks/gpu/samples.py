"""Prompts and completions of random tokens, the same on every call."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from podium.models.packing import unscored
from podium.records import Prompt, Sample

HIGHEST_TOKEN = 250
"""Below the vocabulary of every model here, the tiny ones included."""


def tokens(generator: np.random.Generator, count: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(generator.integers(4, HIGHEST_TOKEN, count).tolist())


def prompts(count: int, length: int) -> list[Prompt]:
    """Different prompts of equal length."""
    generator = np.random.default_rng(0)
    ids = [tokens(generator, length) for _ in range(count)]
    return [Prompt(id=i, row=i, token_ids=x, text="", content="") for i, x in enumerate(ids)]


def samples(count: int, completions: int, prompt_length: int, completion_length: int) -> list[Sample]:
    """Samples of different prompts to pack, with advantages of both signs."""
    generator = np.random.default_rng(1)
    return [
        replace(
            unscored(prompt.token_ids, tokens(generator, completion_length)),
            advantage=advantage,
            advantages_A=np.full(completion_length, advantage, np.float32),
        )
        for prompt in prompts(count, prompt_length)
        for advantage in np.linspace(-1, 1, completions).tolist()
    ]
