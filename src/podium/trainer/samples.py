"""A scored round as samples: the token sequences that are trained on, and each token's advantage.

`samples_of_round` makes them; functions `(samples, scored round) -> samples` then change them, each for one feature, in
the order of a list (`STEPS`) that says which runs have the feature. A new feature of a step is one more row.

Shape letters: P prompts of a round over all ranks, G completions per prompt, R = P * G, K reward functions, T turns,
A drawn tokens of a sample, N those of all samples of a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from accelerate.utils import gather_object

from podium.algorithm.advantages import Advantages, turn_advantages
from podium.algorithm.covariance import CONTROLS, KL_COEF, covariances
from podium.algorithm.metrics import Mean, RolloutTable
from podium.errors import Finding
from podium.records import Sample, ScoredGroup
from podium.rewards.adaptive import AdaptiveWeights
from podium.trainer.config import GRPOConfig
from podium.trainer.rounds import Measurements, Plan, RoundKey
from podium.trainer.run import TrainingRun
from podium.trainer.step import Objective
from podium.trainer.teacher import as_teacher_sees, distilled, teachers_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRound:
    """A round with the rewards of all ranks, as the functions that change samples see it."""

    key: RoundKey
    groups: Mapping[int, ScoredGroup]
    """This process's, by the places of their prompts in the round."""
    result: Advantages
    """Of all ranks."""
    counted_PG: np.ndarray
    """Loss tokens of every completion; 0 where settings leave it out of the loss."""
    policy_step: int
    """Optimizer steps the sampling weights had taken."""
    run: TrainingRun
    state: Any
    """The `TrainerState` of now."""
    weights: AdaptiveWeights
    """Weights of the reward functions."""
    measured: Measurements
    say: Callable[[Finding], None]
    """Takes a finding; one code is told once a run."""

    @property
    def staleness(self) -> int:
        """Optimizer steps since the sampling weights."""
        return self.state.global_step - self.policy_step


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
            actions=np.array(sequence.action_mask, bool),
            advantage=float(advantages_G[g]),
            advantages_A=np.full(len(sequence.logps), advantages_G[g], np.float32),
            sampled_logps_A=np.array(sequence.logps, np.float32),
            candidates=sequence.candidates,
            rollout=(place, g),
            images=(sequence.prompt or scored.group.prompt).images + sequence.images,
        )
        for g, completion in enumerate(scored.group.completions)
        for sequence in completion.sequences
    ]


# ---- functions of the list ----


def turn_credit(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """Samples of environments that reward steps, each turn's tokens with the advantage of the turn."""
    of_place = {place: _turn_advantages(group, place, scored) for place, group in scored.groups.items()}
    return [replace(sample, advantages_A=of_place[sample.rollout[0]][sample.rollout[1]]) for sample in samples]


def _turn_advantages(group: ScoredGroup, place: int, scored: ScoredRound) -> list[np.ndarray]:
    """Advantages of every completion's drawn tokens, each that of its turn."""
    pools = scored.run.agents.pools
    assert pools is not None
    completions = group.group.completions
    weights_K = scored.weights.weights_K
    num_own = len(pools.reward_functions())
    is_own_GK = ~np.isnan(group.rewards_GK[:, -num_own:])
    weights_G = is_own_GK @ weights_K[-num_own:]  # of the reward that the environment of each brings
    steps_GT = np.zeros((len(completions), max(len(completion.turns) for completion in completions)))
    for g, completion in enumerate(completions):
        steps_GT[g, : len(completion.turns)] = [weights_G[g] * (turn.reward or 0.0) for turn in completion.turns]
    steps_GT[~is_own_GK.any(axis=1)] = np.nan
    result = scored.result
    settings = scored.run.scoring.advantage
    found_GT = turn_advantages(steps_GT, result.advantages_PG[place], result.std_PG[place], settings)
    sizes = [[turn.stop - turn.start for turn in completion.turns] for completion in completions]
    return [np.repeat(x_T[: len(n)], n) for x_T, n in zip(found_GT.astype(np.float32), sizes, strict=True)]


def counted(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """The samples of completions that count in the loss."""
    return [sample for sample in samples if scored.counted_PG[sample.rollout]]


def trained(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """The samples that can change the gradient."""
    return [
        sample for sample in samples if scored.counted_PG[sample.rollout] and has_gradient(sample, scored.run.objective)
    ]


def of_trained_prompts(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """The samples of prompts of which at least one sample can change the gradient."""
    places = {sample.rollout[0] for sample in trained(samples, scored)}
    return [sample for sample in samples if sample.rollout[0] in places]


def has_gradient(sample: Sample, objective: Objective) -> bool:
    """Whether a sample can change the gradient; one whose advantages are all 0 may not."""
    if not len(sample.sampled_logps_A):  # a program may have asked for nothing
        return False
    if not objective.skips_zero_advantage or sample.penalties_A is not None:  # penalties are also on tokens without one
        return True
    return bool(sample.advantages_A.any())


def with_other_policies(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """The samples with log-probabilities under the policy of now and the reference, where those are needed.

    The ratio of the loss is to the policy that training on the round began with, also where an older one has sampled:
    how likely that one found a token is a weight of its own (`losses.Correction`).
    """
    run = scored.run
    samples = list(samples)
    with scored.measured.timed("compare_seconds"):
        if run.plan.reuses_rollouts:
            old = run.step.logps(samples)
            samples = [replace(sample, old_logps_A=x_A) for sample, x_A in zip(samples, old, strict=True)]
        if run.objective.reference is not None:
            with run.objective.reference.model(run.step.model) as reference:
                ref = run.step.logps(samples, reference)
            samples = [replace(sample, ref_logps_A=x_A) for sample, x_A in zip(samples, ref, strict=True)]
    return samples


def with_teacher(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """The samples with what a teacher adds to the advantage of each token.

    Measures the mean of log pi - log pi_teacher over all ranks.
    """
    run = scored.run
    teacher = run.objective.teacher
    assert teacher is not None
    with scored.measured.timed("teacher_seconds"):
        prompts = {p: teachers_prompt(group.group.prompt, run.rows.builder) for p, group in scored.groups.items()}
        seen = as_teacher_sees(samples, prompts)
        if teacher.served is not None:
            theirs = teacher.served.logps(seen)  # over all tokens, and so are its own
            if any(sample.candidates for sample in samples):
                own = run.step.logps([replace(sample, candidates=None) for sample in samples])
            else:
                own = drawn_logps(samples, run)
        else:
            theirs = run.step.logps(seen, teacher.model, teacher.forward)
            own = drawn_logps(samples, run)
        differences = [float((x_A - y_A).sum()) for x_A, y_A in zip(own, theirs, strict=True)]
        impossible = [int((np.exp(y_A.astype(np.float64)) == 0).sum()) for y_A in theirs]
        apart = gather_object([(float(sum(differences)), sum(map(len, own)), sum(impossible))])
        total = sum(kl for kl, _, _ in apart)
        count = sum(tokens for _, tokens, _ in apart)
        forbidden = sum(number for _, _, number in apart)
        coef = teacher.coef_at(scored.state.global_step, scored.state.max_steps)
        made = [distilled(sample, x_A, y_A, coef) for sample, x_A, y_A in zip(samples, own, theirs, strict=True)]
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
                step=scored.state.global_step + 1,
                facts={"count": forbidden},
            ),
        )
    return made


def with_covariance_control(samples: Sequence[Sample], scored: ScoredRound) -> list[Sample]:
    """The samples with the tokens that `covariance_control` chooses in the round of all ranks left out of the policy
    term ("clip") or held back by a penalty ("kl")."""
    args = scored.run.args
    logps = drawn_logps(samples, scored.run)
    mine = [(sample.rollout[0], sample.advantages_A, x_A) for sample, x_A in zip(samples, logps, strict=True)]
    everyone = sorted(gather_object(mine), key=lambda block: block[0])
    cov_N = covariances(
        np.concatenate([advantages_A for _, advantages_A, _ in everyone]),
        np.concatenate([logps_A for _, _, logps_A in everyone]),
    )
    rng = np.random.default_rng([scored.run.rows.order.seed, scored.key.epoch, scored.key.number, 3])
    chosen_N = CONTROLS[args.covariance_control](cov_N, args.covariance_share, rng)
    cut = np.split(chosen_N, np.cumsum([len(advantages_A) for _, advantages_A, _ in everyone])[:-1])
    mine_of: dict[int, list[np.ndarray]] = {}
    for (place, *_), chosen_A in zip(everyone, cut, strict=True):
        mine_of.setdefault(place, []).append(chosen_A)
    left = {place: iter(of_place) for place, of_place in mine_of.items()}
    return [controlled(sample, next(left[sample.rollout[0]]), args.covariance_control) for sample in samples]


def controlled(sample: Sample, chosen_A: np.ndarray, control: str) -> Sample:
    """A sample with the tokens in `chosen_A`, bool, left out ("clip") or held back ("kl")."""
    if control == "kl":
        return replace(sample, penalties_A=(KL_COEF * chosen_A).astype(np.float32))
    return replace(sample, advantages_A=np.where(chosen_A, np.float32(0), sample.advantages_A))


def drawn_logps(samples: Sequence[Sample], run: TrainingRun) -> list[np.ndarray]:
    """Log-probabilities of the drawn tokens under the policy that drew them, without what filters did to them."""
    sampled = [sample.sampled_logps_A for sample in samples]
    if run.step.filters_logps or any(np.isnan(x_A).any() for x_A in sampled):
        return run.step.logps(samples)
    return sampled


def dealt(samples: Sequence[Sample], plan: Plan) -> list[Sample]:
    """Exchange samples between processes, whole groups, so that each of them trains on about as many tokens.

    Completions differ in length, and groups without a signal are left out; until then each process has what it sampled.
    """
    parts: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        parts.setdefault((plan.share_of(*sample.rollout), sample.rollout[0]), []).append(sample)
    sizes = gather_object([(key, num_tokens(part)) for key, part in parts.items()])
    ranks = plan.deal(dict(sorted(sizes)))
    leaving = [(ranks[key], part) for key, part in parts.items() if ranks[key] != plan.rank]
    staying = [part for key, part in parts.items() if ranks[key] == plan.rank]
    arriving = [part for rank, part in gather_object(leaving) if rank == plan.rank]
    return sorted(itertools.chain(*staying, *arriving), key=lambda sample: sample.rollout)


def num_tokens(samples: Sequence[Sample]) -> int:
    """Count the tokens that a forward over samples of one prompt computes, as far as they share no more than it."""
    return len(samples[0].prompt_ids) + sum(len(sample.token_ids) for sample in samples)


class Feature(NamedTuple):
    """A function that changes samples, and which runs have it."""

    change: Callable[[Sequence[Sample], ScoredRound], list[Sample]]
    applies: Callable[[TrainingRun], bool] = lambda _: True


_TURN_CREDIT = Feature(
    turn_credit, lambda run: run.scoring.advantage.turn_discount is not None and run.agents.pools is not None
)

STEPS = (
    _TURN_CREDIT,
    Feature(with_teacher, lambda run: run.objective.teacher is not None),
    Feature(with_covariance_control, lambda run: run.args.covariance_control != "none"),
    Feature(of_trained_prompts),
    Feature(with_other_policies),
    Feature(trained),
)
"""What is done to the samples of a round before training, in order."""

EVALUATION_STEPS = (_TURN_CREDIT, Feature(counted), Feature(with_other_policies))
"""The same before the loss of an evaluation is computed."""


def changed(samples: list[Sample], scored: ScoredRound, steps: Sequence[Feature]) -> list[Sample]:
    """The samples after each function that applies to the run."""
    for feature in steps:
        if feature.applies(scored.run):
            samples = feature.change(samples, scored)
    return samples
