"""Log-probabilities of the policies that a round is compared with: the sampler, a reference, a teacher.

Shape letters: N tokens of all completions of a round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn

from podium.algorithm.covariance import CONTROLS, covariances
from podium.algorithm.metrics import Mean
from podium.models.forward import Forward
from podium.models.modes import evaluation_mode
from podium.models.packing import dummy_pack, pack
from podium.records import Prompt, TrainingGroup
from podium.trainer.policy_state import PolicyState
from podium.trainer.rounds import RoundKey, drawn_advantages
from podium.trainer.teacher import as_teacher_sees, distilled, teachers_prompt
from podium.trainer.training_groups import with_covariance


def with_other_policies(
    groups: Sequence[TrainingGroup], kept: Sequence[np.ndarray], now: PolicyState, *, staleness: int = 0
) -> list[TrainingGroup]:
    """The groups with log-probabilities under the sampling policy and the reference, where those are needed.

    Where the policy has moved since it sampled, its old log-probabilities are those that the sampler recorded.
    """
    groups = _with_sampled(groups, now) if staleness else list(groups)
    used = [i for i, keeps in enumerate(kept) if keeps.any()]
    needed: dict[str, contextlib.AbstractContextManager[nn.Module]] = {}
    if now.parts.plan.reuses_rollouts and not staleness:
        needed["old_logps"] = contextlib.nullcontext(now.model)
    if now.parts.reference is not None:
        needed["ref_logps"] = now.parts.reference.model(now.model)
    for field, model_now in needed.items():
        with model_now as model:
            logps = iter(policy_logps(model, [groups[i] for i in used], now))
        for i in used:
            made: dict[str, Any] = {field: tuple(itertools.islice(logps, len(groups[i].completion_ids)))}
            groups[i] = dataclasses.replace(groups[i], **made)
    return groups


def with_teacher(
    groups: Sequence[TrainingGroup], prompts: Sequence[Prompt], now: PolicyState
) -> tuple[list[TrainingGroup], dict[str, float], int]:
    """The groups with advantages of tokens by the teacher; over all ranks the mean of log pi - log pi_teacher, and the
    number of drawn tokens that the teacher never writes."""
    parts = now.parts
    teacher = now.parts.teacher
    assert teacher is not None
    seen = [
        as_teacher_sees(group, teachers_prompt(prompt, parts.builder))
        for group, prompt in zip(groups, prompts, strict=True)
    ]
    if teacher.served is not None:
        theirs = teacher.served.logps(seen)
    else:
        theirs = policy_logps(now.model if teacher.model is None else teacher.model, seen, now, teacher.forward)
    own = drawn_logps(groups, now)
    apart = gather_object(
        [
            (
                float(sum((x - y).sum() for x, y in zip(own, theirs, strict=True))),
                sum(map(len, own)),
                sum(int((np.exp(y.astype(np.float64)) == 0).sum()) for y in theirs),
            )
        ]
    )
    coef = teacher.coef_at(now.step, now.trainer_state.max_steps)
    pairs = iter(zip(own, theirs, strict=True))
    made = []
    for group in groups:
        both = [*itertools.islice(pairs, len(group.completion_ids))]
        made.append(distilled(group, [x for x, _ in both], [y for _, y in both], coef))
    total, count, forbidden = (sum(each) for each in zip(*apart, strict=True))
    return made, {"teacher/kl": Mean(total / max(count, 1), count)}, int(forbidden)


def covariance_controlled(
    groups: Sequence[TrainingGroup], places: Sequence[int], key: RoundKey, now: PolicyState
) -> list[TrainingGroup]:
    """The groups with what `covariance_control` says of the tokens that it chooses in the round of all ranks."""
    args = now.parts.args
    logps = iter(drawn_logps(groups, now))
    blocks = []
    for place, group in zip(places, groups, strict=True):
        own = np.concatenate([*itertools.islice(logps, len(group.completion_ids))])
        blocks.append((place, np.concatenate(drawn_advantages(group)), own))
    blocks = sorted(gather_object(blocks), key=lambda block: block[0])
    cov_N = covariances(*(np.concatenate([block[i] for block in blocks]) for i in (1, 2)))
    rng = np.random.default_rng([now.parts.order.seed, key.epoch, key.number, 3])
    chosen_N = CONTROLS[args.covariance_control](cov_N, args.covariance_share, rng)
    cut = np.split(chosen_N, np.cumsum([len(block[1]) for block in blocks])[:-1])
    chosen = dict(zip((block[0] for block in blocks), cut, strict=True))
    return [
        with_covariance(group, chosen[place], args.covariance_control)
        for place, group in zip(places, groups, strict=True)
    ]


def drawn_logps(groups: Sequence[TrainingGroup], now: PolicyState) -> list[np.ndarray]:
    """Log-probabilities of the drawn tokens under the policy that drew them, without what filters did to them."""
    sampled = [x for group in groups for x in group.sampled_logps]
    if now.parts.filtered_logps or any(np.isnan(x).any() for x in sampled):
        return policy_logps(now.model, groups, now)
    return sampled


def _with_sampled(groups: Sequence[TrainingGroup], now: PolicyState) -> list[TrainingGroup]:
    """The sampler's log-probabilities as the old ones; for tokens without one, those of now."""
    sampled = [x for group in groups for x in group.sampled_logps]
    current = policy_logps(now.model, groups, now) if any(np.isnan(x).any() for x in sampled) else sampled
    old = iter([np.where(np.isnan(x), y, x) for x, y in zip(sampled, current, strict=True)])
    cut = [tuple(itertools.islice(old, len(group.completion_ids))) for group in groups]
    return [dataclasses.replace(group, old_logps=logps) for group, logps in zip(groups, cut, strict=True)]


@torch.no_grad()
def policy_logps(
    model: nn.Module, groups: Sequence[TrainingGroup], now: PolicyState, forward: Forward | None = None
) -> list[np.ndarray]:
    """Log-probabilities of every rollout, in order, under a model: the policy, the reference or a teacher.

    `forward`: settings of the model's forward passes; None: those of the policy.
    """
    parts = now.parts
    device = now.parts.args.device
    found = list[np.ndarray]()
    forward = forward or parts.forward
    packs = pack(groups, tokens_per_pack=parts.tokens_per_pack, device=device)
    dummies = now.processes.num_dummy_forwards(len(packs))
    with evaluation_mode(model), forward.context(model):
        for packed in packs:
            found += packed.split(forward.token_logps(model, packed).logps_N)
        for _ in range(dummies):
            forward.token_logps(model, dummy_pack(device))
    now.processes.reshard(model)
    return found
