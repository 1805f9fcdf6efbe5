"""The first half of the sentence: prompts become groups, groups are scored, scores become advantages.

    rollouts.draw(RoundKey(epoch=0, number=3)) -> Round
    rollouts.start(RoundKey(epoch=0, number=4))       with `async_rollouts`: in a thread, while the round before trains

A round is first sampled and scored, by this process alone (`Sampled`); then processes compare, and it is measured.
Only the first half may run in a thread: it looks at nothing that training changes, and leaves its numbers in `Sampled`.

Sees the policy only through the engine and the log-probabilities it is compared by; knows nothing of optimizers.

Shape letters: P prompts of a round over all ranks, G completions per prompt.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn

from podium.algorithm.advantages import Advantages, advantages
from podium.algorithm.metrics import MetricsBuffer, Mode, RolloutTable, rollout_metrics, rollout_table, unstack
from podium.engines.base import OwnWeights, make_groups
from podium.models.packing import nothing, pack
from podium.records import Group, Prompt, SamplingSettings, ScoredGroup, TrainingGroup
from podium.rewards.score import repeat_findings, score
from podium.trainer.assembly import Parts
from podium.trainer.config import GRPOConfig
from podium.trainer.health import Health
from podium.trainer.prefetch import Flight, Landed, Measured, Sampled, from_arrays
from podium.trainer.rounds import Round, RoundKey, shares
from podium.trainer.settings import call_settings, sampling_settings
from podium.trainer.snapshot import same_random_numbers

EVALUATION = -1
"""Round number of evaluations: always the same random numbers, so that before and after are drawn alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySnapshot:
    """What sampling and scoring see of a run: as it was when they began, whatever it does meanwhile."""

    policy_step: int
    trainer_state: Any
    weights_K: np.ndarray
    """Of the reward functions."""
    metrics: list[Measured] = field(default_factory=list)
    """Filled by sampling and scoring, as the next."""
    seconds: list[Measured] = field(default_factory=list)


class Rollouts:
    """Draws generation rounds and evaluations. `trainer` is asked for its parts, state and policy as they are now."""

    def __init__(self, trainer: Any, measured: MetricsBuffer, health: Health) -> None:
        self.trainer = trainer
        self.measured = measured
        self.health = health
        self._flight: Flight | None = None
        self._asked_again = False
        self.scored: list[ScoredGroup] = []
        """Of the latest round, as scored: what the proof on the first batch compares with what is trained on."""

    @property
    def parts(self) -> Parts:
        """The trainer's."""
        return self.trainer.parts

    @property
    def args(self) -> GRPOConfig:
        """The trainer's."""
        return self.parts.args

    def draw(self, key: RoundKey) -> Round:
        """Prompts -> groups -> scores -> advantages -> what the micro-steps of this round will train on."""
        sampled = self._landed(key)
        if sampled is None:
            sampled = self._sampling(key)()
        places, scored = sampled.places, sampled.scored
        self.scored = list(scored)
        if self.args.prove_first_batch and key == RoundKey(epoch=0, number=0) and not self.trainer.state.global_step:
            self._score_again(sampled)
        self._log("train", sampled.metrics, sampled.seconds)
        if self.args.dynamic_sampling:
            self.measured.add("train", {"resampled_prompts": sum(gather_object([sampled.num_fresh]))})
        table, result = self.advantages(scored, places)
        self.measure("train", table, result)
        self._adapt(table)
        kept_PG, counted_PG = self.trained(table, result)
        kept = [kept_PG[place] for place in places]
        groups = [training_group(s, result.advantages_PG[place]) for s, place in zip(scored, places, strict=True)]
        groups = self.with_other_policies(groups, kept, staleness=self._staleness(sampled))
        own = [result.advantages_PG[place] for place in places]
        self.health.saw_round(scored, own, kept, step=self.trainer.state.global_step + 1)
        if self.args.log_completions:
            self.parts.completions.add(scored, own)
        return Round(key=key, shares=shares(groups, places, kept, counted_PG, self.parts.plan))

    def _score_again(self, sampled: Sampled) -> None:
        """The first round of a run a second time by functions that are fast: do they say the same?"""
        seconds = dict(sampled.seconds)
        fast = [reward for reward in self.parts.rewards if seconds.get(f"reward/{reward.name}_seconds", 9.0) < 1.0]
        if self._asked_again or not self.args.should_log:
            return
        self._asked_again = True
        with same_random_numbers():
            for finding in repeat_findings(
                sampled.scored, fast, trainer_state=self.trainer.state, settings=call_settings(self.args)
            ):
                self.health.say(dataclasses.replace(finding, step=1))

    # ---- a round ahead ----

    def start(self, key: RoundKey) -> None:
        """Sample and score a round in a thread, from the weights of this moment."""
        if self._flight is not None and self._flight.key == key:
            return
        self.abandon()
        self._flight = Flight(key, self._sampling(key), self.parts.engine)

    def wait(self) -> Sampled | None:
        """Until nothing is being sampled; the round ahead, unless there is none, or it failed."""
        return None if self._flight is None else self._flight.wait()

    def abandon(self) -> None:
        """Forget the round ahead."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.abandon()

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """The round ahead of a run that stopped."""
        settings = self._settings(self.args.num_generations, 0)

        def group(prompt: Prompt, sampled: Sequence[tuple[list[int], list[float]]], policy_step: int) -> Group:
            return make_groups([prompt], [sampled], self.parts.tokenizer, settings, policy_step)[0]

        self._flight = Landed(from_arrays(arrays, self._prompt_again, group))

    def _landed(self, key: RoundKey) -> Sampled | None:
        """The round ahead, if it is this one. Raises what its sampling or its rewards raised."""
        if self._flight is None or self._flight.key != key:
            self.abandon()
            return None
        flight, self._flight = self._flight, None
        with self.timed("wait_seconds", "train"):
            return flight.land()

    def _staleness(self, sampled: Sampled) -> int:
        staleness = self.trainer.state.global_step - sampled.policy_step
        if self.args.async_rollouts:
            self.measured.add("train", {"rollouts/staleness": staleness})
        return staleness

    def _prompt_again(self, key: RoundKey, id: int, index: int) -> Prompt:
        """A prompt that was drawn before: the rows of a stream are known by their place alone."""
        if index < 0:
            return self.prompts(key, [id])[0]
        return self.prompt(self.parts.order.dataset[index], id, index)

    # ---- sampling and scoring ----

    def prompt(self, row: Mapping[str, Any], id: int, index: int) -> Prompt:
        """One row as a prompt."""
        prompt = self.parts.builder(row, id=id, row_index=index)
        assert prompt is not None, "overlong rows are dropped before training"
        return prompt

    def prompts(self, key: RoundKey, places: Sequence[int]) -> list[Prompt]:
        """The prompts at the given places of a round."""
        rows = self.parts.order.rows(key, places)
        return [self.prompt(row, place, index) for place, (index, row) in zip(places, rows, strict=True)]

    def _sampling(self, key: RoundKey) -> Callable[[], Sampled]:
        """What samples and scores a round from here on; everything that training may change is taken now."""
        plan = self.parts.plan
        prompts = self.prompts(key, range(plan.prompts_per_round))
        places = tuple(plan.deal([len(prompt.token_ids) for prompt in prompts])[plan.rank])
        settings = self._settings(self.args.num_generations, (key.epoch << 32) + key.number)
        moment = self._moment()
        self.sync()

        def work() -> Sampled:
            with self._whole():
                scored = self._score([prompts[place] for place in places], settings, moment)
                scored, num_fresh = self._refill(scored, places, key, settings, moment)
            return Sampled(
                key=key,
                policy_step=moment.policy_step,
                places=places,
                scored=tuple(scored),
                metrics=tuple(moment.metrics),
                seconds=tuple(moment.seconds),
                num_fresh=num_fresh,
            )

        return work

    def _settings(self, num_generations: int, round_number: int, **given: Any) -> SamplingSettings:
        return sampling_settings(
            self.args, self.parts.end_ids, num_completions=num_generations, round_number=round_number, **given
        )

    def _moment(self) -> PolicySnapshot:
        state = self.trainer.state
        if self.args.async_rollouts:
            state = copy.copy(state)
            state.log_history = list(state.log_history)
        return PolicySnapshot(
            policy_step=state.global_step, trainer_state=state, weights_K=self.trainer.weights.weights_K
        )

    def _whole(self) -> contextlib.AbstractContextManager[None]:
        """Around sampling: what is sharded, gathered. An engine with weights of its own needs none of the policy's."""
        own = isinstance(self.parts.engine, OwnWeights)
        return contextlib.nullcontext() if own else self.trainer.processes.whole(self.trainer.model_wrapped)

    def sync(self) -> None:
        """From here on the engine samples from the weights of this moment. Waits for what is being sampled."""
        self.wait()
        if isinstance(self.parts.engine, OwnWeights):
            with self.timed("sync_seconds", "train"):
                self.parts.engine.sync(self.trainer.model, self.trainer.state.global_step)

    def generate(self, prompts: Sequence[Prompt], settings: SamplingSettings) -> list[Group]:
        """Completions from the weights of this moment, unscored."""
        self.sync()
        return self.parts.engine.generate(prompts, settings, policy_step=self.trainer.state.global_step)

    def sample_and_score(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        round_number: int,
        *,
        greedy: bool = False,
        temperature: float | None = None,
    ) -> list[ScoredGroup]:
        """Groups of completions with what every reward function says about them."""
        settings = self._settings(num_generations, round_number, greedy=greedy, temperature=temperature)
        self.sync()
        moment = self._moment()
        with self._whole():
            scored = self._score(prompts, settings, moment)
        self._log("eval" if round_number == EVALUATION else "train", moment.metrics, moment.seconds)
        return scored

    def _score(
        self, prompts: Sequence[Prompt], settings: SamplingSettings, moment: PolicySnapshot
    ) -> list[ScoredGroup]:
        start = time.perf_counter()
        groups = self.parts.engine.generate(prompts, settings, policy_step=moment.policy_step)
        sampled = time.perf_counter()
        moment.seconds.append(("generate_seconds", sampled - start))
        scored = score(
            groups,
            self.parts.rewards,
            trainer_state=moment.trainer_state,
            log_metric=lambda name, value: moment.metrics.append((name, float(value))),
            log_seconds=lambda name, value: moment.seconds.append((name, value)),
            settings=call_settings(self.args),
        )
        moment.seconds.append(("reward_seconds", time.perf_counter() - sampled))
        return scored

    def _refill(
        self,
        scored: Sequence[ScoredGroup],
        places: Sequence[int],
        key: RoundKey,
        settings: SamplingSettings,
        moment: PolicySnapshot,
    ) -> tuple[list[ScoredGroup], int]:
        """DAPO's dynamic sampling (arXiv:2503.14476, eq. 11): groups of equal rewards make room for fresh prompts.

        Also how many of these there were.
        """
        scored = list(scored)
        num_fresh = 0
        for attempt in range(self.args.max_resamples if self.args.dynamic_sampling else 0):
            flat = [i for i, group in enumerate(scored) if not self.parts.has_spread(group, moment.weights_K)]
            if not flat:
                break
            rows = self.parts.order.fresh(key, attempt, [places[i] for i in flat])
            first_id = (attempt + 1) * self.parts.plan.prompts_per_round
            fresh = [self.prompt(row, first_id + places[i], index) for i, (index, row) in zip(flat, rows, strict=True)]
            for i, group in zip(flat, self._score(fresh, settings, moment), strict=True):
                if self.parts.has_spread(group, moment.weights_K):
                    scored[i] = group
            num_fresh += len(flat)
        return scored, num_fresh

    # ---- advantages ----

    def advantages(self, scored: Sequence[ScoredGroup], places: Sequence[int]) -> tuple[RolloutTable, Advantages]:
        """Of all ranks, in the order of the round's prompts, the same on every rank."""
        names = tuple(reward.name for reward in self.parts.rewards)
        blocks = [(place, rollout_table([group], names).stack()) for place, group in zip(places, scored, strict=True)]
        blocks = sorted(gather_object(blocks), key=lambda block: block[0])
        table = unstack(np.concatenate([rows for _, rows in blocks]), names)
        settings = dataclasses.replace(self.parts.advantage, weights_K=self.trainer.weights.weights_K)
        return table, advantages(table.rewards_RK.reshape(len(blocks), -1, len(names)), settings)

    def _adapt(self, table: RolloutTable) -> None:
        """The weights of the next round, from the rewards of all ranks in this one."""
        used = self.trainer.weights
        self.trainer.weights = used.after(table.rewards_RK)
        self.measured.add("train", {**used.weight_metrics(), **self.trainer.weights.rate_metrics()})

    def trained(self, table: RolloutTable, result: Advantages) -> tuple[np.ndarray, np.ndarray]:
        """Which completions are trained on, bool [P, G], and the loss tokens of all of them [P, G]."""
        shape = result.advantages_PG.shape
        masked = self.args.mask_truncated_completions & table.truncated_R.reshape(shape)
        flat = (result.advantages_PG == 0) & self.parts.skips_zero_advantage
        return ~masked & ~flat, np.where(masked, 0, table.tokens_R.reshape(shape))

    # ---- the policies to compare with ----

    def with_other_policies(
        self, groups: Sequence[TrainingGroup], kept: Sequence[np.ndarray], *, staleness: int = 0
    ) -> list[TrainingGroup]:
        """The groups with log-probabilities under the sampling policy and the reference, where those are needed.

        Where the policy has moved since it sampled, its old log-probabilities are those that the sampler recorded.
        """
        groups = self._with_sampled(groups) if staleness else list(groups)
        used = [i for i, keeps in enumerate(kept) if keeps.any()]
        with self.timed("compare_seconds", "train"):
            for field, model_now in self._comparisons(on_policy=not staleness).items():
                with model_now() as model:
                    logps = self._logps(model, [groups[i] for i in used])
                for i, values in zip(used, logps, strict=True):
                    groups[i] = dataclasses.replace(groups[i], **{field: values})
        return groups

    def _with_sampled(self, groups: Sequence[TrainingGroup]) -> list[TrainingGroup]:
        """The sampler's log-probabilities as the old ones; where it has none of a token, those of now."""
        if any(np.isnan(x).any() for group in groups for x in group.sampled_logps):
            now = self._logps(self.trainer.model, groups)
        else:
            now = [group.sampled_logps for group in groups]
        return [
            dataclasses.replace(
                group,
                old_logps=tuple(np.where(np.isnan(x), y, x) for x, y in zip(group.sampled_logps, logps, strict=True)),
            )
            for group, logps in zip(groups, now, strict=True)
        ]

    def _comparisons(self, *, on_policy: bool) -> dict[str, Callable[[], contextlib.AbstractContextManager[nn.Module]]]:
        policy, reference = self.trainer.model, self.parts.reference
        needed: dict[str, Callable[[], contextlib.AbstractContextManager[nn.Module]]] = {}
        if self.parts.plan.reuses_rollouts and on_policy:
            needed["old_logps"] = lambda: contextlib.nullcontext(policy)
        if reference is not None:
            needed["ref_logps"] = lambda: reference.model(policy)
        return needed

    @torch.no_grad()
    def _logps(self, model: nn.Module, groups: Sequence[TrainingGroup]) -> list[tuple[np.ndarray, ...]]:
        training = model.training
        model.eval()
        flat: list[np.ndarray] = []
        packs = pack(groups, tokens_per_pack=self.parts.tokens_per_pack, device=self.args.device)
        idle = [nothing(self.args.device)] * self.trainer.processes.missing(len(packs))
        with self.parts.attention(model), self.parts.precision():
            for packed in packs:
                flat += packed.split(self.parts.token_logps(model, packed).logps_N)
            for packed in idle:
                self.parts.token_logps(model, packed)
        self.trainer.processes.reshard(model)
        model.train(training)
        values = iter(flat)
        return [tuple(itertools.islice(values, len(group.completion_ids))) for group in groups]

    # ---- numbers ----

    def measure(self, mode: Mode, table: RolloutTable, result: Advantages) -> None:
        """Lengths, rewards and tokens of a round."""
        state = self.trainer.state
        if mode == "train":
            state.num_input_tokens_seen += table.num_tokens
        self.measured.add(mode, rollout_metrics(table, result))
        self.measured.replace(mode, {"num_tokens": state.num_input_tokens_seen})

    @contextlib.contextmanager
    def timed(self, name: str, mode: Mode) -> Iterator[None]:
        """Seconds of a part of a training step."""
        start = time.perf_counter()
        yield
        self._add_seconds(name, mode, time.perf_counter() - start)

    def _add_seconds(self, name: str, mode: Mode, seconds: float) -> None:
        if mode == "train" and self.trainer.is_in_train:
            self.measured.add("train", {f"time/{name}": seconds})

    def _log(self, mode: Mode, metrics: Sequence[Measured], seconds: Sequence[Measured]) -> None:
        for name, value in metrics:
            self.measured.add(mode, {name: value})
        for name, value in seconds:
            self._add_seconds(name, mode, value)


def training_group(scored: ScoredGroup, advantage_G: np.ndarray) -> TrainingGroup:
    """The part of a scored group that is trained on."""
    completions = scored.group.completions
    return TrainingGroup(
        prompt_ids=scored.group.prompt.token_ids,
        completion_ids=tuple(completion.token_ids for completion in completions),
        advantages_G=np.asarray(advantage_G, np.float32),
        sampled_logps=tuple(np.array(completion.logps, np.float32) for completion in completions),
    )
