"""Rollouts of a generation round: prompts become groups, groups are scored, scores become advantages.

    drawn, weights = rollouts.draw(RoundKey(epoch=0, number=3), state, weights)
    rollouts.prefetch(RoundKey(epoch=0, number=3), state, weights)    with `async_rollouts`: those after it, in threads

`state` is the Trainer's and `weights` those of the reward functions, both of now; what is measured is returned. A round
is first sampled and scored, by this process alone (`SampledRound`); then processes compare. Only the first half may run
in a thread, during training: nothing that it reads is changed by it.

Shape letters: P prompts of a round over all ranks, G completions per prompt.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from transformers import TrainerState

from podium.agents.rollout_func import RolloutFunction
from podium.agents.rollouts import sample_groups
from podium.agents.setup import SampledGroups, bare_prompt
from podium.algorithm.advantages import Advantages, advantages, combine, has_spread
from podium.algorithm.metrics import Mean, RolloutTable, counted, rollout_metrics, rollout_rows, turn_metrics
from podium.data.images import SEARCHED_ROWS
from podium.data.sources import keeps_rows
from podium.errors import ConfigError, DataError, Finding
from podium.models.candidates import num_candidates
from podium.models.packing import given_places
from podium.records import Prompt, Sample, SamplingSettings, ScoredGroup
from podium.rewards.adaptive import AdaptiveWeights
from podium.rewards.score import score, warn_of_values
from podium.trainer.ahead import RoundsAhead
from podium.trainer.processes import of_all_ranks
from podium.trainer.round_checks import RoundChecks
from podium.trainer.rounds import Measurements, Round, RoundKey, SampledRound, cut_round
from podium.trainer.run import TrainingRun
from podium.trainer.samples import STEPS, ScoredRound, changed, dealt, loss_tokens, samples_of_round
from podium.trainer.settings import call_settings

EVALUATION = -1
"""Round number of evaluations: always the same random numbers, so that before and after are drawn alike."""


class Rollouts:
    """Draws generation rounds, some of them ahead of training where asked to."""

    def __init__(self, run: TrainingRun, rollout_func: RolloutFunction | None = None) -> None:
        """`rollout_func`: the user's, with the trainer."""
        self.run = run
        self.rollout_func = rollout_func
        self.ahead = RoundsAhead()
        self._checks = RoundChecks()
        self._is_training = False

    @contextlib.contextmanager
    def of_a_run(self) -> Iterator[None]:
        """Around the training of a run; what is still sampled at its end is forgotten."""
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False
            self.ahead.abandon()

    def refuse_nested(self) -> None:
        """Raise `ConfigError` in the middle of a run, where a tool or a reward function may call `train` again."""
        if self._is_training:
            raise ConfigError(
                "trainer.train() was called while the trainer trains: by a tool, an environment, a reward function "
                "or a callback.",
                fix="call it once, where the others are not running",
            )

    def draw(self, key: RoundKey, state: TrainerState, weights: AdaptiveWeights) -> tuple[Round, AdaptiveWeights]:
        """Draw a round: prompts -> groups -> scores -> samples -> micro-batches; and weigh rewards for the next."""
        run = self.run
        measured = Measurements()
        findings: list[Finding] = []
        sampled = self._sampled(key, state, weights, measured)
        measured.extend(sampled.measured)
        table, result = gathered_advantages(sampled.scored, sampled.places, run, weights)
        scored = ScoredRound(
            key=key,
            groups=dict(zip(sampled.places, sampled.scored, strict=True)),
            result=result,
            counted_PG=loss_tokens(table, result.advantages_PG.shape, run.args),
            policy_step=sampled.policy_step,
            run=run,
            state=state,
            weights=weights,
            measured=measured,
            say=functools.partial(self._checks.say, findings),
        )
        next_weights = counted_round(sampled, table, scored)
        samples = samples_of_round(scored)
        rollouts_PG = counts_of(samples, scored, lambda _: 1) if run.agents.program is not None else None
        findings += self._checks.findings(sampled, scored, table, samples)
        samples = changed(samples, scored, STEPS)
        kept_PG = np.zeros(scored.counted_PG.shape, bool)
        for sample in samples:
            kept_PG[sample.rollout] = True
        observed_PG = counts_of(samples, scored, num_given) if run.objective.loss.observation_coef else None
        if run.plan.ranks > 1 and run.objective.loss.loss_type != "bnpo":  # which divides by the tokens of a process
            samples = dealt(samples, run.plan)
        drawn = Round(
            key=key,
            micro_batches=cut_round(
                samples,
                sampled.places,
                scored.counted_PG,
                run.plan,
                rollouts_PG=rollouts_PG,
                observed_PG=observed_PG,
            ),
            scored=sampled.scored,
            advantages=[result.advantages_PG[place] for place in sampled.places],
            kept=[kept_PG[place] for place in sampled.places],
            num_tokens=table.num_tokens,
            measured=measured,
            findings=tuple(findings),
        )
        return drawn, next_weights

    def _sampled(
        self, key: RoundKey, state: TrainerState, weights: AdaptiveWeights, measured: Measurements
    ) -> SampledRound:
        """The round as this process sampled and scored it, ahead of training or now."""
        if key in self.ahead:
            with measured.timed("wait_seconds"):
                return self.ahead.take(key)
        self.ahead.abandon()
        prompts = round_prompts(self.run, key)
        self.sync(state.global_step, measured)
        before = self._versions
        sampled = self.sample_round(key, prompts, state, weights)
        return dataclasses.replace(sampled, written=before != self._versions)

    @property
    def _versions(self) -> list[int]:
        """Counts of the writes to each tensor that is trained; none where sampling itself writes to them.

        Frozen ones are left out: peft writes to an expert's in every forward, and puts them back.
        """
        step = self.run.step
        if step.processes.in_lockstep:
            return []
        return [parameter._version for parameter in step.model.parameters() if parameter.requires_grad]

    def prefetch(self, key: RoundKey, state: TrainerState, weights: AdaptiveWeights) -> Measurements:
        """Sample and score the `async_rollouts` rounds after one, in threads, from the weights of this moment.

        Rounds that were begun earlier, from earlier weights, stay as they are.
        """
        measured = Measurements()
        following: RoundKey | None = key
        for _ in range(self.run.args.async_rollouts):
            following = self.run.rows.order.after(following, state.max_steps)
            if following is None:
                break
            if following not in self.ahead:
                self._begin(following, state, weights, measured)
        return measured

    def _begin(self, key: RoundKey, state: TrainerState, weights: AdaptiveWeights, measured: Measurements) -> None:
        """Sample and score a round in a thread, when those before it are there, from the weights of this moment."""
        prompts = round_prompts(self.run, key)
        of_now = copy.copy(state)
        of_now.log_history = list(state.log_history)
        step = self.run.step
        load: Callable[[], None] | None = None
        if self.ahead.is_sampling:
            with measured.timed("sync_seconds"):
                load = step.engine.snapshot(step.model, state.global_step)
        else:
            self.sync(state.global_step, measured)
            if self.ahead.ended is not None:
                measured.seconds.append(("idle_seconds", time.perf_counter() - self.ahead.ended))

        def sample() -> SampledRound:
            if load is not None:
                load()
            return self.sample_round(key, prompts, of_now, weights)

        self.ahead.begin(key, sample, step.engine.interrupt)

    # ---- from the weights of this moment ----

    def sync(self, taken: int, measured: Measurements | None = None) -> None:
        """Give an engine with weights of its own the policy's. Waits for the rounds that are being sampled.

        `taken`: optimizer steps that the weights have taken.
        """
        self.ahead.wait()
        if self.run.step.engine.own_weights:
            with (measured or Measurements()).timed("sync_seconds"):
                self.run.step.sync(taken)

    def sample(self, prompts: Sequence[Prompt], settings: SamplingSettings, taken: int) -> SampledGroups:
        """Groups of completions with all their turns, unscored, by an engine that has the weights of now."""
        run = self.run
        return sample_groups(
            run.agents,
            run.step.sampler,
            prompts,
            settings,
            builder=run.rows.builder,
            policy_step=taken,
            evaluation=settings.round == EVALUATION,
            rollout_func=self.rollout_func,
        )

    def sample_and_score(
        self, prompts: Sequence[Prompt], settings: SamplingSettings, state: TrainerState
    ) -> tuple[list[ScoredGroup], Measurements]:
        """Sample groups of completions and have every function score them."""
        measured = Measurements()
        self.sync(state.global_step, measured)
        with self.run.step.whole_weights():
            with measured.timed("generate_seconds"):
                sampled = self.sample(prompts, settings, state.global_step)
            measured.add(sampled.metrics)
            return score_groups(sampled, self.run, state, measured), measured

    def sample_round(
        self, key: RoundKey, prompts: Sequence[Prompt], state: TrainerState, weights: AdaptiveWeights
    ) -> SampledRound:
        """Sample and score this process's prompts of a round.

        With DAPO's dynamic sampling (arXiv:2503.14476, eq. 11), fresh prompts replace groups of equal rewards.
        """
        run = self.run
        plan = run.plan
        measured = Measurements()
        num_fresh = 0
        places = tuple(plan.assign_to_ranks([len(prompt.token_ids) for prompt in prompts])[plan.rank])
        settings = run.step.sampling(plan.num_generations, (key.epoch << 32) + key.number)
        wanted = {i: prompts[place] for i, place in enumerate(places)}
        chosen: dict[int, ScoredGroup] = {}

        def differs(group: ScoredGroup) -> bool:
            return has_spread(combine(group.rewards_GK, weights.weights_K))

        with run.step.whole_weights():
            for attempt in itertools.count(1):
                with measured.timed("generate_seconds"):
                    sampled = self.sample([*wanted.values()], settings, state.global_step)
                measured.add(sampled.metrics)
                for i, group in zip(wanted, score_groups(sampled, run, state, measured), strict=True):
                    if i not in chosen or differs(group):
                        chosen[i] = group
                if not run.args.dynamic_sampling or attempt > run.args.max_resamples:
                    break
                flat = [i for i, group in chosen.items() if not differs(group)]
                if not flat:
                    break
                rows = run.rows.order.fresh(key, attempt - 1, [places[i] for i in flat])
                first = attempt * plan.prompts_per_round
                checked = keeps_rows(run.rows.train)
                wanted = {
                    i: make_prompt(run, row, first + places[i], at, checked=checked)
                    for i, (at, row) in zip(flat, rows, strict=True)
                }
                num_fresh += len(flat)
        return SampledRound(
            key=key,
            policy_step=state.global_step,
            places=places,
            scored=tuple(chosen.values()),
            measured=measured,
            num_fresh=num_fresh,
        )


# ---- prompts and scores ----


def make_prompt(run: TrainingRun, row: Mapping[str, Any], id: int, index: int, *, checked: bool = False) -> Prompt:
    """One row as a prompt; with environments as it is before they add to it, without tokens.

    `checked`: whether it is the very row that was checked before training.
    """
    if run.agents.pools is not None:
        return bare_prompt(row, id, index)
    prompt = run.rows.builder(row, id=id, row_index=index, checked=checked)
    assert prompt is not None, "overlong rows are dropped before training"
    which = f"row {index}" if index >= 0 else "a row of the stream"
    if prompt.images and not run.policy.tried_images:
        raise DataError(
            f"{which} has images, and none of the first {SEARCHED_ROWS:,} training rows has any: how this model "
            "computes behind images was not tried.",
            code="D063",
            fix="put a row with images first",
            row=index,
        )
    if not prompt.images and run.policy.tried_images and (token := run.rows.builder.spelled(prompt.content)):
        raise DataError(
            f"{which} has no image, and its text has `{token}`, which stands for one.",
            code="D063",
            fix="take it out",
            row=index,
            token=token,
        )
    return prompt


def round_prompts(run: TrainingRun, key: RoundKey, places: Sequence[int] | None = None) -> list[Prompt]:
    """The prompts at these places of a round (default: at all)."""
    places = range(run.plan.prompts_per_round) if places is None else places
    rows = run.rows.order.rows(key, places)
    checked = keeps_rows(run.rows.train)
    return [
        make_prompt(run, row, place, index, checked=checked) for place, (index, row) in zip(places, rows, strict=True)
    ]


def score_groups(
    sampled: SampledGroups, run: TrainingRun, state: TrainerState, measured: Measurements
) -> list[ScoredGroup]:
    """Rewards of every function."""
    with measured.timed("reward_seconds"):
        scored = score(
            sampled.groups,
            run.scoring.rewards,
            trainer_state=state,
            log_metric=lambda name, value: measured.metrics.append((name, float(value))),
            log_seconds=lambda name, value: measured.seconds.append((name, value)),
            settings=call_settings(run.args),
            environments=sampled.environments,
        )
    warn_of_values(scored, run.scoring.warned)
    return scored


# ---- advantages ----


def counted_round(sampled: SampledRound, table: RolloutTable, scored: ScoredRound) -> AdaptiveWeights:
    """Measure a round; return the weights of rewards of the next. `table`: of all ranks."""
    run = scored.run
    measured = scored.measured
    if run.args.dynamic_sampling:
        measured.add({"resampled_prompts": sum(gather_object([sampled.num_fresh]))})
    if run.agents.takes_turns:
        measured.add(gathered_turns(sampled.scored, run))
    weights = scored.weights.after(table.rewards_RK)
    measured.add(rollout_metrics(table, scored.result, run.scoring.accuracy))
    measured.add(scored.weights.metrics(after=weights))
    if run.step.sampling(1, 0).keeps_candidates:
        measured.add({"rollouts/candidates": gathered_candidates(sampled.scored, run)})
    if run.args.async_rollouts:
        measured.add({"rollouts/staleness": scored.staleness})
    return weights


def gathered_advantages(
    scored: Sequence[ScoredGroup], places: Sequence[int], run: TrainingRun, weights: AdaptiveWeights
) -> tuple[RolloutTable, Advantages]:
    """Table and advantages of all ranks, in the order of the round's prompts, the same on every rank."""
    names = tuple(reward.name for reward in run.scoring.rewards)
    blocks = of_all_ranks(places, [rollout_rows(group) for group in scored])
    table = RolloutTable.of(names, np.concatenate(blocks))
    settings = dataclasses.replace(run.scoring.advantage, weights_K=weights.weights_K)
    rewards_PGK = table.rewards_RK.reshape(len(blocks), -1, len(names))
    return table, advantages(rewards_PGK, settings, table.tokens_R.reshape(rewards_PGK.shape[:2]))


def counts_of(samples: Sequence[Sample], scored: ScoredRound, count: Callable[[Sample], int]) -> np.ndarray:
    """Sums of a number of each sample, for every completion of all ranks [P, G]."""
    mine_PG = np.zeros(scored.counted_PG.shape, int)
    for sample in samples:
        mine_PG[sample.rollout] += count(sample)
    return np.stack(of_all_ranks([*scored.groups], [mine_PG[place] for place in scored.groups]))


def num_given(sample: Sample) -> int:
    """Given tokens of a sample that can be predicted."""
    return len(given_places(sample.actions))


def gathered_candidates(scored: Sequence[ScoredGroup], run: TrainingRun) -> Mean:
    """Mean number of candidates of the drawn tokens of all ranks that have some."""
    config: Any = run.step.model.config
    vocabulary = config.get_text_config().vocab_size
    counts = [
        num_candidates(candidates, vocabulary)
        for group in scored
        for completion in group.group.completions
        for sequence in completion.sequences
        for candidates in sequence.candidates or ()
    ]
    of_ranks = gather_object([(sum(counts), len(counts))])
    total = sum(of_rank for of_rank, _ in of_ranks)
    count = sum(of_rank for _, of_rank in of_ranks)
    return Mean(total / max(count, 1), count)


def gathered_turns(scored: Sequence[ScoredGroup], run: TrainingRun) -> dict[str, float]:
    """Metrics of the turns of all ranks; nothing where every completion is one turn."""
    agents = run.agents
    if not agents.takes_turns:
        return {}
    everyone = gather_object([row for group in scored for row in counted(group)])
    cuts = agents.call_limits.max_result_tokens is not None
    values = turn_metrics(everyone, agents.tool_names, cuts=cuts)
    if agents.pools is not None:
        differing = gather_object(
            [any(completion.prompt for completion in group.group.completions) for group in scored]
        )
        values["turns/differing_prompts"] = sum(differing) / max(len(differing), 1)
    return values
