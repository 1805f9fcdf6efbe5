"""Prompts and completions of random tokens, the same on every call."""

from __future__ import annotations

import numpy as np

from podium.records import Prompt, TrainingGroup

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


def training_groups(count: int, completions: int, prompt_length: int, completion_length: int) -> list[TrainingGroup]:
    """Groups to pack, with advantages of both signs."""
    generator = np.random.default_rng(1)
    zeros = np.zeros(completion_length, np.float32)
    return [
        TrainingGroup(
            prompt_ids=prompt.token_ids,
            completion_ids=tuple(tokens(generator, completion_length) for _ in range(completions)),
            advantages_G=np.linspace(-1, 1, completions, dtype=np.float32),
            sampled_logps=(zeros,) * completions,
        )
        for prompt in prompts(count, prompt_length)
    ]
