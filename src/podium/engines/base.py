"""What every rollout engine can do, and what they share: text from ids, one group from G completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from podium.records import Completion, Group, Prompt, SamplingSettings


class RolloutEngine(Protocol):
    """Turns prompts into groups of completions."""

    def generate(self, prompts: Sequence[Prompt], settings: SamplingSettings, *, policy_step: int) -> list[Group]:
        """One group per prompt, in order, sampled from the weights as they are now."""
        ...


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
