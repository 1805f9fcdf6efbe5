"""Rollouts of a generation round: prompts become groups, groups are scored, scores become advantages.

    drawn, weights = rollouts.draw(RoundKey(epoch=0, number=3), state, weights)
    rollouts.prefetch(RoundKey(epoch=0, number=4), state, weights)    with `async_rollouts`: in a thread

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from transformers import TrainerState

from podium.agents.rollout_func import RolloutFunction, foreign_logps
from podium.agents.rollouts import Acted, sample_groups
from podium.agents.setup import bare_prompt
from podium.algorithm.advantages import Advantages, advantages, combine, has_spread
from podium.algorithm.metrics import RolloutTable, counted, rollout_metrics, rollout_rows, turn_metrics
from podium.data.survey import keeps_rows
from podium.errors import ConfigError, Finding
from podium.isolation.threads import in_thread
from podium.models.forward import base_model
from podium.models.packing import given_places
from podium.records import Prompt, Sample, SamplingSettings, ScoredGroup
from podium.rewards.adaptive import AdaptiveWeights
from podium.rewards.score import repeat_findings, score, warn_of_values
from podium.runs.monitors.drift import APART, OF_THESE_IDS
from podium.trainer.processes import ScoresByProcess
from podium.trainer.rounds import Measurements, Round, RoundKey, SampledRound, cut_round
from podium.trainer.run import TrainingRun
from podium.trainer.samples import STEPS, ScoredRound, loss_tokens, samples_of_round
from podium.trainer.settings import call_settings
from podium.trainer.snapshot import same_random_numbers
from podium.trainer.step import Step

EVALUATION = -1
"""Round number of evaluations: always the same random numbers, so that before and after are drawn alike."""

JOIN_TIMEOUT = 5.0
"""Seconds that the end of a run waits for a prefetched round; a reward function cannot always be interrupted."""


class Rollouts:
    """Draws generation rounds, one of them ahead of training where asked to."""

    def __init__(self, run: TrainingRun, rollout_func: RolloutFunction | None = None) -> None:
        """`rollout_func`: the user's, with the trainer."""
        self.run = run
        self.rollout_func = rollout_func
        self._next: tuple[RoundKey, Future[SampledRound]] | None = None
        self._interrupt: Callable[[], None] = lambda: None
        self._has_repeated = False
        self._has_compared = False
        self._is_training = False
        self._told: set[str] = set()
        """Codes of findings that are told once a run."""
        self._known: Sequence[int] = ()
        """Ids of the tokens that have a text."""
        self._scores: ScoresByProcess | None = None

    @contextlib.contextmanager
    def of_a_run(self) -> Iterator[None]:
        """Around the training of a run; what is still sampled at its end is forgotten."""
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False
            self.abandon()

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
        sampled = self._sampled(key, state, weights, measured, findings)
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
            say=functools.partial(self._say, findings),
        )
        next_weights = counted_round(sampled, table, scored)
        samples = samples_of_round(scored)
        rollouts_PG = counts_of(samples, scored, lambda _: 1) if run.agents.program is not None else None
        findings += self._unscored(table, sampled.places, state.global_step)
        findings += self._textless(sampled.scored, state.global_step)
        findings += self._foreign(samples)
        for change in STEPS:
            samples = change(samples, scored)
        kept_PG = np.zeros(scored.counted_PG.shape, bool)
        for sample in samples:
            kept_PG[sample.rollout] = True
        drawn = Round(
            key=key,
            micro_batches=cut_round(
                samples,
                sampled.places,
                scored.counted_PG,
                run.plan,
                rollouts_PG=rollouts_PG,
                observed_PG=counts_of(samples, scored, num_given) if run.objective.loss.observation_coef else None,
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
        self,
        key: RoundKey,
        state: TrainerState,
        weights: AdaptiveWeights,
        measured: Measurements,
        findings: list[Finding],
    ) -> SampledRound:
        """The round as this process sampled and scored it, ahead of training or now."""
        sampled = self._prefetched(key, measured)
        written = False
        if sampled is None:
            prompts = round_prompts(self.run, key)
            self.sync(state.global_step, measured)
            before = _versions(self.run.step)
            sampled = self.sample_round(key, prompts, state, weights)
            written = before != _versions(self.run.step)
        findings += self._repeated(sampled, state)
        if written:
            findings.append(WRITTEN)
        measured.extend(sampled.measured)
        return sampled

    def _say(self, findings: list[Finding], finding: Finding) -> None:
        """Take a finding, unless its code was told in this run."""
        if finding.code not in self._told:
            self._told.add(finding.code)
            findings.append(finding)

    def _repeated(self, sampled: SampledRound, state: TrainerState) -> tuple[Finding, ...]:
        """Score the first round of a run a second time, by functions that are fast; findings where scores differ."""
        args = self.run.args
        is_first = sampled.key == RoundKey(epoch=0, number=0) and not state.global_step and not self._has_repeated
        if not (args.prove_first_batch and args.should_log and is_first):
            return ()
        self._has_repeated = True
        seconds = dict(sampled.measured.seconds)
        fast = [each for each in self.run.scoring.rewards if seconds.get(f"reward/{each.name}_seconds", 9.0) < 1.0]
        with same_random_numbers():
            found = repeat_findings(
                sampled.scored,
                fast,
                trainer_state=state,
                settings=call_settings(args),
                environments=self.run.agents.pools is not None,
            )
            return tuple(dataclasses.replace(finding, step=1) for finding in found)

    def _unscored(self, table: RolloutTable, places: Sequence[int], step: int) -> tuple[Finding, ...]:
        """W019, once a run: reward functions give None on other processes than the first."""
        plan = self.run.plan
        if plan.ranks == 1:
            return ()
        ranks_P = _of_all_ranks(places, [plan.rank] * len(places))
        if plan.rank:
            return ()
        if self._scores is None:
            self._scores = ScoresByProcess(len(table.names_K), plan.ranks)
        rewards_PGK = table.rewards_RK.reshape(len(ranks_P), -1, len(table.names_K))
        found = self._scores.findings(rewards_PGK, table.names_K, ranks_P)
        return tuple(dataclasses.replace(finding, step=step + 1) for finding in found)

    def _textless(self, scored: Sequence[ScoredGroup], step: int) -> tuple[Finding, ...]:
        """M035, once a run: tokens were drawn for which the tokenizer has no text."""
        if "M035" in self._told:
            return ()
        drawn_N = np.concatenate([[*each.token_ids] for x in scored for each in x.group.completions] or [[]])
        self._known = self._known or sorted(self.run.policy.tokenizer.get_vocab().values())
        counts = gather_object([(int(np.isin(drawn_N, self._known, invert=True).sum()), len(drawn_N))])
        count, total = map(sum, zip(*counts, strict=True))
        if not count:
            return ()
        share = f"{100 * count / total:.2g}"
        rows = base_model(self.run.step.model).config.get_text_config().vocab_size
        tokens = self._known[-1] + 1
        self._told.add("M035")
        return (
            Finding(
                code="M035",
                severity="warning",
                what=f"{count:,} of {total:,} drawn tokens of this round ({share} %) have no text: the model has "
                f"{rows:,} tokens to draw, the tokenizer {tokens:,}.",
                why="Reward functions do not see them, and a completion's text, tokenized again, lacks them.",
                fix=f"the model's own tokenizer, or once: model.resize_token_embeddings({tokens}); "
                "model.save_pretrained(folder)",
                step=step + 1,
                facts={"count": count, "total": total, "share": share, "rows": rows, "tokens": tokens},
            ),
        )

    def _foreign(self, samples: Sequence[Sample]) -> tuple[Finding, ...]:
        """M135 before the first step: a `rollout_func` returned log-probabilities that are not the policy's."""
        step = self.run.step
        if self.rollout_func is None or not self.run.args.prove_first_batch:
            return ()
        if self._has_compared or step.filters_logps:
            return ()
        self._has_compared = True
        returned = [each.sampled_logps_A for each in samples]
        own = step.logps(samples)
        doubts = [doubt for doubt in gather_object([foreign_logps(returned, own, APART)]) if doubt]
        if not doubts:
            return ()
        return (
            Finding(
                code="M135",
                severity="warning",
                what=f"The log-probabilities that rollout_func returned {doubts[0]}.",
                fix=OF_THESE_IDS,
                step=1,
            ),
        )

    # ---- a round ahead of training ----

    def prefetch(self, key: RoundKey, state: TrainerState, weights: AdaptiveWeights) -> Measurements:
        """Sample and score a round in a thread, from the weights of this moment."""
        measured = Measurements()
        if self._next is not None and self._next[0] == key:
            return measured
        self.abandon()
        prompts = round_prompts(self.run, key)
        of_now = copy.copy(state)
        of_now.log_history = list(state.log_history)
        self.sync(state.global_step, measured)
        self._interrupt = self.run.step.engine.interrupt
        self._next = key, in_thread(lambda: self.sample_round(key, prompts, of_now, weights), "podium-rollouts")
        return measured

    def restore(self, sampled: SampledRound) -> None:
        """Take the prefetched round of a run that stopped."""
        future: Future[SampledRound] = Future()
        future.set_result(sampled)
        self._next = sampled.key, future

    def wait(self) -> SampledRound | None:
        """Until nothing is being sampled; the prefetched round, unless there is none, or it failed."""
        if self._next is None:
            return None
        future = self._next[1]
        return None if future.exception() is not None else future.result()

    def abandon(self) -> None:
        """Forget the prefetched round."""
        if self._next is not None:
            (_, future), self._next = self._next, None
            self._interrupt()
            wait([future], JOIN_TIMEOUT)

    def _prefetched(self, key: RoundKey, measured: Measurements) -> SampledRound | None:
        """The prefetched round, if it is this one. Raises the error of its sampling or its rewards."""
        if self._next is None or self._next[0] != key:
            self.abandon()
            return None
        (_, future), self._next = self._next, None
        with measured.timed("wait_seconds"):
            return future.result()

    # ---- from the weights of this moment ----

    def sync(self, taken: int, measured: Measurements | None = None) -> None:
        """Give an engine with weights of its own the policy's. Waits for the round that is being sampled.

        `taken`: optimizer steps that the weights have taken.
        """
        self.wait()
        if self.run.step.engine.own_weights:
            with (measured or Measurements()).timed("sync_seconds"):
                self.run.step.sync(taken)

    def act(self, prompts: Sequence[Prompt], settings: SamplingSettings, taken: int) -> Acted:
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
                acted = self.act(prompts, settings, state.global_step)
            measured.add(acted.metrics)
            return score_groups(acted, self.run, state, measured), measured

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
        settings = run.sampling(plan.num_generations, (key.epoch << 32) + key.number)
        wanted = {i: prompts[place] for i, place in enumerate(places)}
        chosen: dict[int, ScoredGroup] = {}

        def differs(group: ScoredGroup) -> bool:
            return has_spread(combine(group.rewards_GK, weights.weights_K))

        with run.step.whole_weights():
            for attempt in itertools.count(1):
                with measured.timed("generate_seconds"):
                    acted = self.act([*wanted.values()], settings, state.global_step)
                measured.add(acted.metrics)
                for i, group in zip(wanted, score_groups(acted, run, state, measured), strict=True):
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


WRITTEN = Finding(
    code="M135",
    severity="warning",
    what="The weights changed while completions were sampled and scored, so the policy that is trained did not "
    "sample them.",
    why="A tool, an environment or a reward function wrote to the model.",
    fix="Leave trainer.model as it is there; give them a copy.",
)


def _versions(step: Step) -> list[int] | None:
    """Counts of the writes to each tensor that is trained; None where sampling itself writes to them.

    Frozen ones are left out: peft writes to an expert's in every forward, and puts them back.
    """
    whole = step.processes.division in ("one", "ddp")
    return [each._version for each in step.model.parameters() if each.requires_grad] if whole else None


# ---- prompts and scores ----


def make_prompt(run: TrainingRun, row: Mapping[str, Any], id: int, index: int, *, checked: bool = False) -> Prompt:
    """One row as a prompt; with environments as it is before they add to it, without tokens.

    `checked`: whether it is the very row that was checked before training.
    """
    if run.agents.pools is not None:
        return bare_prompt(row, id, index)
    prompt = run.rows.builder(row, id=id, row_index=index, checked=checked)
    assert prompt is not None, "overlong rows are dropped before training"
    return prompt


def round_prompts(run: TrainingRun, key: RoundKey, places: Sequence[int] | None = None) -> list[Prompt]:
    """The prompts at these places of a round (default: at all)."""
    places = range(run.plan.prompts_per_round) if places is None else places
    rows = run.rows.order.rows(key, places)
    checked = keeps_rows(run.rows.train)
    return [
        make_prompt(run, row, place, index, checked=checked) for place, (index, row) in zip(places, rows, strict=True)
    ]


def score_groups(acted: Acted, run: TrainingRun, state: TrainerState, measured: Measurements) -> list[ScoredGroup]:
    """Rewards of every function."""
    with measured.timed("reward_seconds"):
        scored = score(
            acted.groups,
            run.scoring.rewards,
            trainer_state=state,
            log_metric=lambda name, value: measured.metrics.append((name, float(value))),
            log_seconds=lambda name, value: measured.seconds.append((name, value)),
            settings=call_settings(run.args),
            environments=acted.environments,
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
    measured.add(gathered_turns(sampled.scored, run))
    weights = scored.weights.after(table.rewards_RK)
    measured.add(rollout_metrics(table, scored.result, run.scoring.accuracy))
    measured.add(scored.weights.metrics(after=weights))
    if run.args.async_rollouts:
        measured.add({"rollouts/staleness": scored.staleness})
    return weights


def gathered_advantages(
    scored: Sequence[ScoredGroup], places: Sequence[int], run: TrainingRun, weights: AdaptiveWeights
) -> tuple[RolloutTable, Advantages]:
    """Table and advantages of all ranks, in the order of the round's prompts, the same on every rank."""
    names = tuple(reward.name for reward in run.scoring.rewards)
    blocks = _of_all_ranks(places, [rollout_rows(group) for group in scored])
    table = RolloutTable.of(names, np.concatenate(blocks))
    settings = dataclasses.replace(run.scoring.advantage, weights_K=weights.weights_K)
    rewards_PGK = table.rewards_RK.reshape(len(blocks), -1, len(names))
    return table, advantages(rewards_PGK, settings, table.tokens_R.reshape(rewards_PGK.shape[:2]))


def _of_all_ranks(places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Values of this process's prompts and of all others', in the order of the round."""
    gathered = gather_object([*zip(places, values, strict=True)])
    return [value for _, value in sorted(gathered, key=lambda each: each[0])]


def counts_of(samples: Sequence[Sample], scored: ScoredRound, count: Callable[[Sample], int]) -> np.ndarray:
    """Sums of a number of each sample, for every completion of all ranks [P, G]."""
    mine_PG = np.zeros(scored.counted_PG.shape, int)
    for sample in samples:
        mine_PG[sample.rollout] += count(sample)
    return np.stack(_of_all_ranks([*scored.groups], [mine_PG[place] for place in scored.groups]))


def num_given(sample: Sample) -> int:
    """Given tokens of a sample that can be predicted."""
    return len(given_places(sample.actions))


def gathered_turns(scored: Sequence[ScoredGroup], run: TrainingRun) -> dict[str, float]:
    """Metrics of the turns of all ranks; nothing where every completion is one turn."""
    agents = run.agents
    if not agents.takes_turns:
        return {}
    everyone = gather_object([each for group in scored for each in counted(group)])
    cuts = agents.call_limits.max_result_tokens is not None
    values = turn_metrics(everyone, agents.tool_names, cuts=cuts)
    if agents.pools is not None:
        differing = gather_object([any(each.prompt for each in group.group.completions) for group in scored])
        values["turns/differing_prompts"] = sum(differing) / max(len(differing), 1)
    return values
