"""The interface of rollout engines, and the making of groups from sampled ids."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from itertools import starmap
from typing import Protocol

from torch import nn
from transformers import PreTrainedTokenizerBase

from podium.models.forward import Precision
from podium.records import Completion, Group, Prompt, SamplingSettings


class RolloutEngine(Protocol):
    """Turns prompts into groups of completions; a class inherits from it what engines are and do by default."""

    name: str = ""
    """As `rollout_engine` names it."""
    own_weights: bool = False
    """Whether it samples from a copy of the policy, which only `sync` renews, so that the policy may move meanwhile."""
    processed_logps: bool = False
    """Whether its log-probabilities are those of the distribution that is drawn from, after all filters."""
    casts_weights: bool = False
    """Whether it computes in half precision whatever training does."""
    precision: Precision = contextlib.nullcontext

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], settings: SamplingSettings, *, policy_step: int = 0) -> list[Group]:
        """One group per prompt, in order, sampled from the weights as they are now."""

    def sync(self, policy: nn.Module, version: int) -> None:
        """Take the policy's weights as they are now, after `version` optimizer steps; until the next call they stay."""
        return

    def interrupt(self) -> None:
        """Have `generate`, in another thread, raise `Interrupted` soon and until the next `sync`, if it can."""
        return


class Interrupted(Exception):
    """Sampling was given up: its completions are no longer wanted."""


def make_groups(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[tuple[list[int], list[float]]]],
    tokenizer: PreTrainedTokenizerBase,
    settings: SamplingSettings,
    policy_step: int,
) -> list[Group]:
    """Groups from `sampled[p][g] = (token_ids, logps)`; a completion that ends in an end token has stopped."""
    ids = [token_ids for group in sampled for token_ids, _ in group]
    texts = iter(tokenizer.batch_decode(ids, skip_special_tokens=True))

    def completion(token_ids: list[int], logps: list[float]) -> Completion:
        return Completion(
            token_ids=tuple(token_ids),
            logps=tuple(logps),
            finish="stop" if token_ids[-1] in settings.end_ids else "length",
            text=next(texts),
            policy_step=policy_step,
        )

    pairs = zip(prompts, sampled, strict=True)
    return [Group(prompt=prompt, completions=tuple(starmap(completion, group))) for prompt, group in pairs]
