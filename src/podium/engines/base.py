"""What every rollout engine can do, and what they share: text from ids, one group from G completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import nn
from transformers import PreTrainedTokenizerBase

from podium.records import Completion, Group, Prompt, SamplingSettings


class RolloutEngine(Protocol):
    """Turns prompts into groups of completions."""

    def generate(self, prompts: Sequence[Prompt], settings: SamplingSettings, *, policy_step: int) -> list[Group]:
        """One group per prompt, in order, sampled from the weights as they are now."""
        ...


@runtime_checkable
class OwnWeights(Protocol):
    """An engine that samples from a copy of the policy, so that the policy may move meanwhile."""

    def sync(self, policy: nn.Module, version: int) -> None:
        """Take the policy's weights as they are now, after `version` optimizer steps; until the next call they stay."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """An engine that can be told, from another thread, to give up what it is sampling."""

    def interrupt(self) -> None:
        """`generate` raises `Interrupted`, soon and until the next `sync`."""
        ...


class Interrupted(Exception):
    """What was being sampled is no longer wanted."""


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
    return [
        Group(
            prompt=prompt,
            completions=tuple(
                Completion(
                    token_ids=tuple(token_ids),
                    logps=tuple(logps),
                    finish="stop" if token_ids[-1] in settings.end_ids else "length",
                    text=next(texts),
                    policy_step=policy_step,
                )
                for token_ids, logps in group
            ),
        )
        for prompt, group in zip(prompts, sampled, strict=True)
    ]
