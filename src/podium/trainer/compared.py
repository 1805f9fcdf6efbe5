"""Log-probabilities of the policies that a round is compared with: the sampler, a reference, a teacher.

Shape letters: A drawn tokens of a sample, N those of all samples of a round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn

from podium.algorithm.covariance import CONTROLS, KL_COEF, covariances
from podium.algorithm.metrics import Mean
from podium.errors import Finding
from podium.models.forward import Forward
from podium.models.modes import evaluation_mode
from podium.models.packing import dummy_pack, pack
from podium.records import Sample
from podium.trainer.policy_state import PolicyState, ScoredRound
from podium.trainer.teacher import as_teacher_sees, distilled, teachers_prompt


def with_other_policies(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """The samples with log-probabilities under the sampling policy and the reference, where those are needed.

    Where the policy has moved since it sampled, its old log-probabilities are those that the sampler recorded.
    """
    now = scored.now
    is_stale = scored.staleness > 0
    samples = _with_sampled(samples, now) if is_stale else list(samples)
    with scored.measured.timed("compare_seconds"):
        if now.parts.plan.reuses_rollouts and not is_stale:
            old = policy_logps(now.model, samples, now)
            samples = [dataclasses.replace(each, old_logps_A=x_A) for each, x_A in zip(samples, old, strict=True)]
        if now.parts.reference is not None:
            with now.parts.reference.model(now.model) as reference:
                ref = policy_logps(reference, samples, now)
            samples = [dataclasses.replace(each, ref_logps_A=x_A) for each, x_A in zip(samples, ref, strict=True)]
    return samples


def with_teacher(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """The samples with what a teacher adds to the advantage of each token.

    Measures the mean of log pi - log pi_teacher over all ranks.
    """
    parts = scored.now.parts
    teacher = parts.teacher
    if teacher is None:
        return list(samples)
    with scored.measured.timed("teacher_seconds"):
        prompts = {p: teachers_prompt(each.group.prompt, parts.builder) for p, each in scored.groups.items()}
        seen = as_teacher_sees(samples, prompts)
        if teacher.served is not None:
            theirs = teacher.served.logps(seen)
        else:
            model = scored.now.model if teacher.model is None else teacher.model
            theirs = policy_logps(model, seen, scored.now, teacher.forward)
        own = drawn_logps(samples, scored.now)
        differences = [float((x_A - y_A).sum()) for x_A, y_A in zip(own, theirs, strict=True)]
        impossible = [int((np.exp(y_A.astype(np.float64)) == 0).sum()) for y_A in theirs]
        apart = gather_object([(float(sum(differences)), sum(map(len, own)), sum(impossible))])
        total = sum(each for each, _, _ in apart)
        count = sum(each for _, each, _ in apart)
        forbidden = sum(each for _, _, each in apart)
        coef = teacher.coef_at(scored.now.step, scored.now.trainer_state.max_steps)
        made = [distilled(*each, coef) for each in zip(samples, own, theirs, strict=True)]
    scored.measured.add({"teacher/kl": Mean(total / max(count, 1), count)})
    if forbidden:
        scored.say(
            Finding(
                code="C063",
                severity="warning",
                what=f"The teacher gives {forbidden} drawn tokens of this round a probability of 0 (a "
                "log-probability below -745): their advantages outweigh all others.",
                why="Its head forbids tokens that the policy draws: an lm_head.bias of -1e20, or a "
                "vocabulary of its own.",
                fix="a teacher_model without forbidden tokens, or generation_kwargs: {suppress_tokens: [IDS]}",
                step=scored.now.step + 1,
                facts={"count": forbidden},
            ),
        )
    return made


def with_covariance_control(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """The samples with the tokens that `covariance_control` chooses in the round of all ranks left out of the policy
    term ("clip") or held back by a penalty ("kl")."""
    args = scored.now.parts.args
    if args.covariance_control == "none":
        return list(samples)
    logps = drawn_logps(samples, scored.now)
    mine = [(each.rollout[0], each.advantages_A, x_A) for each, x_A in zip(samples, logps, strict=True)]
    everyone = sorted(gather_object(mine), key=lambda block: block[0])
    cov_N = covariances(
        np.concatenate([advantages_A for _, advantages_A, _ in everyone]),
        np.concatenate([logps_A for _, _, logps_A in everyone]),
    )
    rng = np.random.default_rng([scored.now.parts.order.seed, scored.key.epoch, scored.key.number, 3])
    chosen_N = CONTROLS[args.covariance_control](cov_N, args.covariance_share, rng)
    cut = np.split(chosen_N, np.cumsum([len(advantages_A) for _, advantages_A, _ in everyone])[:-1])
    mine_of: dict[int, list[np.ndarray]] = {}
    for (place, *_), chosen_A in zip(everyone, cut, strict=True):
        mine_of.setdefault(place, []).append(chosen_A)
    left = {place: iter(of_place) for place, of_place in mine_of.items()}
    return [controlled(each, next(left[each.rollout[0]]), args.covariance_control) for each in samples]


def controlled(sample: Sample, chosen_A: np.ndarray, control: str) -> Sample:
    """A sample with the tokens in `chosen_A`, bool, left out ("clip") or held back ("kl")."""
    if control == "kl":
        return dataclasses.replace(sample, penalties_A=(KL_COEF * chosen_A).astype(np.float32))
    return dataclasses.replace(sample, advantages_A=np.where(chosen_A, np.float32(0), sample.advantages_A))


def drawn_logps(samples: Sequence[Sample], now: PolicyState) -> list[np.ndarray]:
    """Log-probabilities of the drawn tokens under the policy that drew them, without what filters did to them."""
    sampled = [each.sampled_logps_A for each in samples]
    if now.parts.filtered_logps or any(np.isnan(x_A).any() for x_A in sampled):
        return policy_logps(now.model, samples, now)
    return sampled


def _with_sampled(samples: Sequence[Sample], now: PolicyState) -> list[Sample]:
    """The sampler's log-probabilities as the old ones; for tokens without one, those of now."""
    sampled = [each.sampled_logps_A for each in samples]
    current = policy_logps(now.model, samples, now) if any(np.isnan(x_A).any() for x_A in sampled) else sampled
    old = [np.where(np.isnan(x_A), y_A, x_A) for x_A, y_A in zip(sampled, current, strict=True)]
    return [dataclasses.replace(each, old_logps_A=x_A) for each, x_A in zip(samples, old, strict=True)]


@torch.no_grad()
def policy_logps(
    model: nn.Module, samples: Sequence[Sample], now: PolicyState, forward: Forward | None = None
) -> list[np.ndarray]:
    """Log-probabilities of the drawn tokens of each sample, in order, under a model: the policy, the reference or a
    teacher.

    `forward`: settings of the model's forward passes; None: those of the policy.
    """
    parts = now.parts
    device = now.parts.args.device
    found: list[np.ndarray] = []
    forward = forward or parts.forward
    packs = pack(samples, tokens_per_pack=parts.tokens_per_pack, device=device)
    dummies = now.processes.num_dummy_forwards(len(packs))
    with evaluation_mode(model), forward.context(model):
        for packed in packs:
            found += packed.split(forward.token_logps(model, packed).logps_N)
        for _ in range(dummies):
            forward.token_logps(model, dummy_pack(device))
    now.processes.reshard(model)
    return found
