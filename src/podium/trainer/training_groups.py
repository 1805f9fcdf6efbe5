"""Scored groups as `TrainingGroup` records: the tokens that are trained on, and each one's advantage.

Shape letters: P prompts of a round over all ranks, G completions per prompt, R = P * G, K reward functions, T turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from podium.algorithm.advantages import Advantages, turn_advantages
from podium.algorithm.covariance import KL_COEF
from podium.algorithm.metrics import RolloutTable
from podium.records import Completion, ScoredGroup, TrainingGroup
from podium.trainer.assembly import Parts
from podium.trainer.config import GRPOConfig
from podium.trainer.rounds import drawn_advantages


def masked_completions(table: RolloutTable, shape: tuple[int, ...], args: GRPOConfig) -> tuple[np.ndarray, np.ndarray]:
    """The completions that settings leave out of the loss, bool [P, G], and the loss tokens of all of them [P, G]."""
    masked_R = (args.mask_truncated_completions & table.truncated_R) | (args.mask_void_turns & table.void_R)
    masked = masked_R.reshape(shape)
    return masked, np.where(masked, 0, table.tokens_R.reshape(shape))


def turn_credit(
    scored: ScoredGroup, place: int, result: Advantages, parts: Parts, weights_K: np.ndarray
) -> tuple[np.ndarray, ...] | None:
    """Advantages of every completion's drawn tokens, each that of its turn; None where turns have none of their own."""
    completions = scored.group.completions
    if parts.advantage.turn_discount is None or parts.agents.pools is None:
        return None
    num_own = len(parts.agents.pools.reward_functions())
    is_own_GK = ~np.isnan(scored.rewards_GK[:, -num_own:])
    weights_G = is_own_GK @ weights_K[-num_own:]  # of the reward that the environment of each brings
    steps_GT = np.zeros((len(completions), max(len(each.turns) for each in completions)))
    for g, each in enumerate(completions):
        steps_GT[g, : len(each.turns)] = [weights_G[g] * (turn.reward or 0.0) for turn in each.turns]
    steps_GT[~is_own_GK.any(axis=1)] = np.nan
    found_GT = turn_advantages(steps_GT, result.advantages_PG[place], result.std_PG[place], parts.advantage)
    sizes = [[turn.stop - turn.start for turn in each.turns] for each in completions]
    return tuple(np.repeat(x_T[: len(n)], n) for x_T, n in zip(found_GT.astype(np.float32), sizes, strict=True))


def has_gradient(group: TrainingGroup, parts: Parts) -> np.ndarray:
    """bool [G]: sequences with drawn tokens and an advantage that is not 0; with any where other terms need them."""
    drew_G = np.array([len(each) > 0 for each in group.sampled_logps])  # a program may have asked for nothing
    if not parts.skips_zero_advantage:
        return drew_G
    if group.token_penalties is not None:  # which are there on tokens without an advantage, too
        return drew_G
    if group.token_advantages is not None:
        return np.array([each.any() for each in group.token_advantages])
    return drew_G & (group.advantages_G != 0)


def with_covariance(group: TrainingGroup, chosen_N: np.ndarray, control: str) -> TrainingGroup:
    """The group with the tokens that `covariance_control` chose left out ("clip") or held back ("kl").

    `chosen_N`: bool over the drawn tokens of all its completions, one after the other.
    """
    chosen = np.split(chosen_N, np.cumsum([len(x) for x in group.sampled_logps])[:-1])
    if control == "kl":
        return replace(group, token_penalties=tuple((KL_COEF * x).astype(np.float32) for x in chosen))
    pairs = zip(drawn_advantages(group), chosen, strict=True)
    return replace(group, token_advantages=tuple(np.where(x, np.float32(0), a) for a, x in pairs))


def training_groups(
    scored: Sequence[ScoredGroup], places: Sequence[int], result: Advantages, parts: Parts, weights_K: np.ndarray
) -> list[TrainingGroup]:
    """The parts of scored groups that are trained on. `places`: the groups' indices in `result`."""
    return [
        training_group(group, result.advantages_PG[place], turn_credit(group, place, result, parts, weights_K))
        for group, place in zip(scored, places, strict=True)
    ]


def training_group(
    scored: ScoredGroup, advantages_G: np.ndarray, token_advantages: tuple[np.ndarray, ...] | None = None
) -> TrainingGroup:
    """The part of a scored group that is trained on: every sequence of a completion has its advantage."""
    owners = owners_of(scored)
    completions = [each for completion in scored.group.completions for each in completion.sequences]
    return TrainingGroup(
        prompt_ids=scored.group.prompt.token_ids,
        completion_ids=tuple(completion.token_ids for completion in completions),
        advantages_G=np.asarray(advantages_G, np.float32)[owners],
        sampled_logps=tuple(np.array(completion.logps, np.float32) for completion in completions),
        drawn=_drawn(completions),
        prompts=_prompts(completions),
        token_advantages=token_advantages,
    )


def owners_of(scored: ScoredGroup) -> np.ndarray:
    """Index of the completion that each sequence of a group belongs to."""
    counts = [len(completion.sequences) for completion in scored.group.completions]
    return np.repeat(np.arange(len(counts)), counts)


def _drawn(completions: Sequence[Completion]) -> tuple[np.ndarray, ...] | None:
    """Which tokens the policy drew; None: all."""
    masks = [completion.is_drawn for completion in completions]
    if all(mask is None for mask in masks):
        return None
    whole = (np.ones(len(completion.token_ids), bool) for completion in completions)
    return tuple(all_ if mask is None else np.array(mask) for mask, all_ in zip(masks, whole, strict=True))


def _prompts(completions: Sequence[Completion]) -> tuple[tuple[int, ...], ...] | None:
    """The prompt of each completion; None: they are the group's."""
    own = [None if each.prompt is None else each.prompt.token_ids for each in completions]
    return None if len(set(own)) == 1 else tuple(ids for ids in own if ids is not None)
