"""Rollouts of a generation round: prompts become groups, groups are scored, scores become advantages.

    drawn = rollouts.draw(RoundKey(epoch=0, number=3), now)
    rollouts.prefetch(RoundKey(epoch=0, number=4), now)     with `async_rollouts`: in a thread, during training

`now`, a `PolicyState`, is the only view of the run here; what is measured is returned. A round is first sampled and
scored, by this process alone (`SampledRound`); then processes compare. Only the first half may run in a thread: nothing
that it reads is changed by training.

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

from podium.agents.rollout_func import foreign_logps
from podium.agents.setup import Acted, bare_prompt
from podium.algorithm.advantages import Advantages, advantages, combine, has_spread
from podium.algorithm.metrics import RolloutTable, counted, rollout_metrics, rollout_rows, turn_metrics
from podium.errors import ConfigError, Finding
from podium.isolation.threads import in_thread
from podium.models.forward import base_model
from podium.models.packing import given_places
from podium.records import Group, Prompt, Sample, SamplingSettings, ScoredGroup
from podium.rewards.adaptive import AdaptiveWeights
from podium.rewards.score import repeat_findings, score, warn_of_values
from podium.runs.monitors.drift import APART, OF_THESE_IDS
from podium.trainer.assembly import Parts
from podium.trainer.compared import policy_logps, with_covariance_control, with_other_policies, with_teacher
from podium.trainer.policy_state import PolicyState, ScoredRound
from podium.trainer.processes import ScoresByProcess
from podium.trainer.rounds import Measurements, Round, RoundKey, SampledRound, cut_round
from podium.trainer.samples import loss_tokens, of_trained_prompts, samples_of_round, trained, turn_credit
from podium.trainer.settings import call_settings
from podium.trainer.snapshot import same_random_numbers

EVALUATION = -1
"""Round number of evaluations: always the same random numbers, so that before and after are drawn alike."""

JOIN_TIMEOUT = 5.0
"""Seconds that the end of a run waits for a prefetched round; a reward function cannot always be interrupted."""


STEPS: tuple[Callable[[Sequence[Sample], ScoredRound], list[Sample]], ...] = (
    turn_credit,
    with_teacher,
    with_covariance_control,
    of_trained_prompts,
    with_other_policies,
    trained,
)
"""Functions that change the samples of a round before training, in order."""


class Rollouts:
    """Draws generation rounds, one of them ahead of training where asked to."""

    def __init__(self) -> None:
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

    def draw(self, key: RoundKey, now: PolicyState) -> tuple[Round, AdaptiveWeights]:
        """Draw a round: prompts -> groups -> scores -> samples -> micro-batches; and weigh rewards for the next."""
        parts = now.parts
        measured = Measurements()
        findings: list[Finding] = []
        sampled = self._sampled(key, now, measured, findings)
        table, result = gathered_advantages(sampled.scored, sampled.places, now)
        weights = counted_round(sampled, table, result, now, measured)
        scored = ScoredRound(
            key=key,
            groups=dict(zip(sampled.places, sampled.scored, strict=True)),
            result=result,
            counted_PG=loss_tokens(table, result.advantages_PG.shape, parts.args),
            policy_step=sampled.policy_step,
            now=now,
            measured=measured,
            say=functools.partial(self._say, findings),
        )
        samples = samples_of_round(scored)
        rollouts_PG = counts_of(samples, scored, lambda _: 1) if parts.agents.program is not None else None
        findings += self._unscored(table, sampled.places, now)
        findings += self._textless(sampled.scored, now)
        findings += self._foreign(samples, now)
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
                parts.plan,
                rollouts_PG=rollouts_PG,
                observed_PG=counts_of(samples, scored, num_given) if parts.loss.observation_coef else None,
            ),
            scored=sampled.scored,
            advantages=[result.advantages_PG[place] for place in sampled.places],
            kept=[kept_PG[place] for place in sampled.places],
            num_tokens=table.num_tokens,
            measured=measured,
            findings=tuple(findings),
        )
        return drawn, weights

    def _sampled(
        self, key: RoundKey, now: PolicyState, measured: Measurements, findings: list[Finding]
    ) -> SampledRound:
        """The round as this process sampled and scored it, ahead of training or now."""
        sampled = self._prefetched(key, measured)
        written = False
        if sampled is None:
            prompts = round_prompts(now.parts, key)
            self.sync(now, measured)
            before = _versions(now)
            sampled = sample_round(key, prompts, now)
            written = before != _versions(now)
        findings += self._repeated(sampled, now)
        if written:
            findings.append(WRITTEN)
        measured.extend(sampled.measured)
        return sampled

    def _say(self, findings: list[Finding], finding: Finding) -> None:
        """Take a finding, unless its code was told in this run."""
        if finding.code not in self._told:
            self._told.add(finding.code)
            findings.append(finding)

    def _repeated(self, sampled: SampledRound, now: PolicyState) -> tuple[Finding, ...]:
        """Score the first round of a run a second time, by functions that are fast; findings where scores differ."""
        args = now.parts.args
        is_first = sampled.key == RoundKey(epoch=0, number=0) and not now.step and not self._has_repeated
        if not (args.prove_first_batch and args.should_log and is_first):
            return ()
        self._has_repeated = True
        seconds = dict(sampled.measured.seconds)
        fast = [each for each in now.parts.rewards if seconds.get(f"reward/{each.name}_seconds", 9.0) < 1.0]
        with same_random_numbers():
            found = repeat_findings(
                sampled.scored,
                fast,
                trainer_state=now.trainer_state,
                settings=call_settings(args),
                environments=now.parts.agents.pools is not None,
            )
            return tuple(dataclasses.replace(finding, step=1) for finding in found)

    def _unscored(self, table: RolloutTable, places: Sequence[int], now: PolicyState) -> tuple[Finding, ...]:
        """W019, once a run: reward functions give None on other processes than the first."""
        plan = now.parts.plan
        if plan.ranks == 1:
            return ()
        ranks_P = _of_all_ranks(places, [plan.rank] * len(places))
        if plan.rank:
            return ()
        if self._scores is None:
            self._scores = ScoresByProcess(len(table.names_K), plan.ranks)
        rewards_PGK = table.rewards_RK.reshape(len(ranks_P), -1, len(table.names_K))
        found = self._scores.findings(rewards_PGK, table.names_K, ranks_P)
        return tuple(dataclasses.replace(finding, step=now.step + 1) for finding in found)

    def _textless(self, scored: Sequence[ScoredGroup], now: PolicyState) -> tuple[Finding, ...]:
        """M035, once a run: tokens were drawn for which the tokenizer has no text."""
        if "M035" in self._told:
            return ()
        drawn_N = np.concatenate([[*each.token_ids] for x in scored for each in x.group.completions] or [[]])
        self._known = self._known or sorted(now.parts.tokenizer.get_vocab().values())
        counts = gather_object([(int(np.isin(drawn_N, self._known, invert=True).sum()), len(drawn_N))])
        count, total = map(sum, zip(*counts, strict=True))
        if not count:
            return ()
        share = f"{100 * count / total:.2g}"
        rows = base_model(now.model).config.get_text_config().vocab_size
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
                step=now.step + 1,
                facts={"count": count, "total": total, "share": share, "rows": rows, "tokens": tokens},
            ),
        )

    def _foreign(self, samples: Sequence[Sample], now: PolicyState) -> tuple[Finding, ...]:
        """M135 before the first step: a `rollout_func` returned log-probabilities that are not the policy's."""
        args = now.parts.args
        parts = now.parts
        if now.rollout_func is None or not args.prove_first_batch or self._has_compared or parts.filtered_logps:
            return ()
        self._has_compared = True
        returned = [each.sampled_logps_A for each in samples]
        own = policy_logps(now.model, samples, now)
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

    def prefetch(self, key: RoundKey, now: PolicyState) -> Measurements:
        """Sample and score a round in a thread, from the weights of this moment."""
        measured = Measurements()
        if self._next is not None and self._next[0] == key:
            return measured
        self.abandon()
        prompts = round_prompts(now.parts, key)
        state = copy.copy(now.trainer_state)
        state.log_history = list(state.log_history)
        self.sync(now, measured)
        now = dataclasses.replace(now, trainer_state=state)
        self._interrupt = now.parts.engine.interrupt
        self._next = key, in_thread(lambda: sample_round(key, prompts, now), "podium-rollouts")
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

    def sync(self, now: PolicyState, measured: Measurements | None = None) -> None:
        """Give an engine with weights of its own the policy's. Waits for the round that is being sampled."""
        self.wait()
        if now.parts.engine.own_weights:
            with (measured or Measurements()).timed("sync_seconds"):
                now.parts.engine.sync(now.model, now.step)

    def generate(self, prompts: Sequence[Prompt], settings: SamplingSettings, now: PolicyState) -> list[Group]:
        """One turn of each completion, unscored, by the run's own engine: what replaces `generate` is not called."""
        self.sync(now)
        return now.parts.engine.generate(prompts, settings, policy_step=now.step)

    def sample(self, prompts: Sequence[Prompt], settings: SamplingSettings, now: PolicyState) -> Acted:
        """Sample completions with all their turns, unscored."""
        self.sync(now)
        return now.sample(prompts, settings, evaluation=settings.round == EVALUATION)

    def sample_and_score(
        self, prompts: Sequence[Prompt], settings: SamplingSettings, now: PolicyState
    ) -> tuple[list[ScoredGroup], Measurements]:
        """Sample groups of completions and have every function score them."""
        measured = Measurements()
        self.sync(now, measured)
        with now.gathered():
            with measured.timed("generate_seconds"):
                acted = now.sample(prompts, settings, evaluation=settings.round == EVALUATION)
            measured.add(acted.metrics)
            return score_groups(acted, now, measured), measured


WRITTEN = Finding(
    code="M135",
    severity="warning",
    what="The weights changed while completions were sampled and scored, so the policy that is trained did not "
    "sample them.",
    why="A tool, an environment or a reward function wrote to the model.",
    fix="Leave trainer.model as it is there; give them a copy.",
)


def _versions(now: PolicyState) -> list[int] | None:
    """Counts of the writes to each tensor that is trained; None where sampling itself writes to them.

    Frozen ones are left out: peft writes to an expert's in every forward, and puts them back.
    """
    whole = now.processes.division in ("one", "ddp")
    return [each._version for each in now.parts.policy.parameters() if each.requires_grad] if whole else None


# ---- sampling and scoring ----


def make_prompt(parts: Parts, row: Mapping[str, Any], id: int, index: int) -> Prompt:
    """One row as a prompt; with environments as it is before they add to it, without tokens."""
    if parts.agents.pools is not None:
        return bare_prompt(row, id, index)
    prompt = parts.builder(row, id=id, row_index=index)
    assert prompt is not None, "overlong rows are dropped before training"
    return prompt


def round_prompts(parts: Parts, key: RoundKey, places: Sequence[int] | None = None) -> list[Prompt]:
    """The prompts at these places of a round (default: at all)."""
    places = range(parts.plan.prompts_per_round) if places is None else places
    rows = parts.order.rows(key, places)
    return [make_prompt(parts, row, place, index) for place, (index, row) in zip(places, rows, strict=True)]


def sample_round(key: RoundKey, prompts: Sequence[Prompt], now: PolicyState) -> SampledRound:
    """Sample and score this process's prompts of a round.

    With DAPO's dynamic sampling (arXiv:2503.14476, eq. 11), fresh prompts replace groups of equal rewards.
    """
    parts = now.parts
    args = now.parts.args
    measured = Measurements()
    num_fresh = 0
    places = tuple(parts.plan.assign_to_ranks([len(prompt.token_ids) for prompt in prompts])[parts.plan.rank])
    settings = now.settings(parts.plan.num_generations, (key.epoch << 32) + key.number)
    wanted = {i: prompts[place] for i, place in enumerate(places)}
    chosen = dict[int, ScoredGroup]()

    def differs(group: ScoredGroup) -> bool:
        return has_spread(combine(group.rewards_GK, now.weights.weights_K))

    with now.gathered():
        for attempt in itertools.count(1):
            with measured.timed("generate_seconds"):
                acted = now.sample([*wanted.values()], settings)
            measured.add(acted.metrics)
            for i, group in zip(wanted, score_groups(acted, now, measured), strict=True):
                if i not in chosen or differs(group):
                    chosen[i] = group
            if not args.dynamic_sampling or attempt > args.max_resamples:
                break
            flat = [i for i, group in chosen.items() if not differs(group)]
            if not flat:
                break
            rows = parts.order.fresh(key, attempt - 1, [places[i] for i in flat])
            first = attempt * parts.plan.prompts_per_round
            wanted = {
                i: make_prompt(parts, row, first + places[i], at) for i, (at, row) in zip(flat, rows, strict=True)
            }
            num_fresh += len(flat)
    return SampledRound(
        key=key,
        policy_step=now.step,
        places=places,
        scored=tuple(chosen.values()),
        measured=measured,
        num_fresh=num_fresh,
    )


def score_groups(acted: Acted, now: PolicyState, measured: Measurements) -> list[ScoredGroup]:
    """Rewards of every function."""
    with measured.timed("reward_seconds"):
        scored = score(
            acted.groups,
            now.parts.rewards,
            trainer_state=now.trainer_state,
            log_metric=lambda name, value: measured.metrics.append((name, float(value))),
            log_seconds=lambda name, value: measured.seconds.append((name, value)),
            settings=call_settings(now.parts.args),
            environments=acted.environments,
        )
    warn_of_values(scored, now.parts.said)
    return scored


# ---- advantages ----


def counted_round(
    sampled: SampledRound, table: RolloutTable, result: Advantages, now: PolicyState, measured: Measurements
) -> AdaptiveWeights:
    """Measure a round; return the weights of rewards of the next. `table`, `result`: of all ranks."""
    parts = now.parts
    if parts.args.dynamic_sampling:
        measured.add({"resampled_prompts": sum(gather_object([sampled.num_fresh]))})
    measured.add(gathered_turns(sampled.scored, now))
    weights = now.weights.after(table.rewards_RK)
    measured.add(
        {**rollout_metrics(table, result, parts.accuracy), **now.weights.weight_metrics(), **weights.rate_metrics()}
    )
    if parts.args.async_rollouts:
        measured.add({"rollouts/staleness": now.step - sampled.policy_step})
    return weights


def gathered_advantages(
    scored: Sequence[ScoredGroup], places: Sequence[int], now: PolicyState
) -> tuple[RolloutTable, Advantages]:
    """Table and advantages of all ranks, in the order of the round's prompts, the same on every rank."""
    names = tuple(reward.name for reward in now.parts.rewards)
    blocks = _of_all_ranks(places, [rollout_rows(group) for group in scored])
    table = RolloutTable.of(names, np.concatenate(blocks))
    settings = dataclasses.replace(now.parts.advantage, weights_K=now.weights.weights_K)
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


def gathered_turns(scored: Sequence[ScoredGroup], now: PolicyState) -> dict[str, float]:
    """Metrics of the turns of all ranks; nothing where every completion is one turn."""
    agents = now.parts.agents
    if not agents.takes_turns:
        return {}
    everyone = gather_object([each for group in scored for each in counted(group)])
    cuts = agents.call_limits.max_result_tokens is not None
    values = turn_metrics(everyone, agents.tool_names, cuts=cuts)
    if agents.pools is not None:
        differing = gather_object([any(each.prompt for each in group.group.completions) for group in scored])
        values["turns/differing_prompts"] = sum(differing) / max(len(differing), 1)
    return values
