"""A scored round as samples: the token sequences that are trained on, and each token's advantage.

`samples_of_round` makes them; functions `(samples, scored round) -> samples` then change them, each for one feature, in
the order of a list (`podium.trainer.rollouts`). Each returns the samples as they are where its feature is off.

Shape letters: P prompts of a round over all ranks, G completions per prompt, R = P * G, K reward functions, T turns,
A drawn tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from podium.algorithm.advantages import turn_advantages
from podium.algorithm.metrics import RolloutTable
from podium.records import Completion, Sample, ScoredGroup
from podium.trainer.assembly import Parts
from podium.trainer.config import GRPOConfig
from podium.trainer.policy_state import ScoredRound


def loss_tokens(table: RolloutTable, shape: tuple[int, ...], args: GRPOConfig) -> np.ndarray:
    """Loss tokens of every completion [P, G]; 0 where settings leave it out of the loss."""
    masked_R = (args.mask_truncated_completions & table.truncated_R) | (args.mask_void_turns & table.void_R)
    return np.where(masked_R, 0, table.tokens_R).reshape(shape)


def samples_of_round(scored: ScoredRound) -> list[Sample]:
    """The samples of this process's groups, in order; every token has the advantage of its completion."""
    return [
        sample
        for place, group in scored.groups.items()
        for sample in samples_of(group, scored.result.advantages_PG[place], place)
    ]


def samples_of(scored: ScoredGroup, advantages_G: np.ndarray, place: int = 0) -> list[Sample]:
    """The samples of one group: every sequence of a completion has the advantage of the completion.

    `place`: of its prompt in the round.
    """
    advantages_G = np.asarray(advantages_G, np.float32)
    return [
        Sample(
            prompt_ids=(sequence.prompt or scored.group.prompt).token_ids,
            token_ids=sequence.token_ids,
            actions=action_mask(sequence),
            advantage=float(advantages_G[g]),
            advantages_A=np.full(len(sequence.logps), advantages_G[g], np.float32),
            sampled_logps_A=np.array(sequence.logps, np.float32),
            rollout=(place, g),
        )
        for g, completion in enumerate(scored.group.completions)
        for sequence in completion.sequences
    ]


def action_mask(completion: Completion) -> np.ndarray:
    """Whether the policy drew each token of a completion, bool."""
    drawn = completion.is_drawn
    return np.ones(len(completion.token_ids), bool) if drawn is None else np.array(drawn, bool)


# ---- functions of the list ----


def turn_credit(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """Samples of environments that reward steps, each turn's tokens with the advantage of the turn."""
    parts = scored.now.parts
    if parts.advantage.turn_discount is None or parts.agents.pools is None:
        return list(samples)
    of_place = {place: _turn_advantages(group, place, scored, parts) for place, group in scored.groups.items()}
    return [replace(each, advantages_A=of_place[each.rollout[0]][each.rollout[1]]) for each in samples]


def _turn_advantages(group: ScoredGroup, place: int, scored: ScoredRound, parts: Parts) -> list[np.ndarray]:
    """Advantages of every completion's drawn tokens, each that of its turn."""
    assert parts.agents.pools is not None
    completions = group.group.completions
    weights_K = scored.now.weights.weights_K
    num_own = len(parts.agents.pools.reward_functions())
    is_own_GK = ~np.isnan(group.rewards_GK[:, -num_own:])
    weights_G = is_own_GK @ weights_K[-num_own:]  # of the reward that the environment of each brings
    steps_GT = np.zeros((len(completions), max(len(each.turns) for each in completions)))
    for g, each in enumerate(completions):
        steps_GT[g, : len(each.turns)] = [weights_G[g] * (turn.reward or 0.0) for turn in each.turns]
    steps_GT[~is_own_GK.any(axis=1)] = np.nan
    result = scored.result
    found_GT = turn_advantages(steps_GT, result.advantages_PG[place], result.std_PG[place], parts.advantage)
    sizes = [[turn.stop - turn.start for turn in each.turns] for each in completions]
    return [np.repeat(x_T[: len(n)], n) for x_T, n in zip(found_GT.astype(np.float32), sizes, strict=True)]


def counted(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """The samples of completions that count in the loss."""
    return [each for each in samples if scored.counted_PG[each.rollout]]


def trained(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """The samples that can change the gradient."""
    return [each for each in samples if scored.counted_PG[each.rollout] and has_gradient(each, scored.now.parts)]


def of_trained_prompts(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """The samples of prompts of which at least one sample can change the gradient."""
    places = {each.rollout[0] for each in trained(samples, scored)}
    return [each for each in samples if each.rollout[0] in places]


def has_gradient(sample: Sample, parts: Parts) -> bool:
    """Whether a sample can change the gradient; one whose advantages are all 0 may not."""
    if not len(sample.sampled_logps_A):  # a program may have asked for nothing
        return False
    if not parts.skips_zero_advantage or sample.penalties_A is not None:  # penalties are also on tokens without one
        return True
    return bool(sample.advantages_A.any())
