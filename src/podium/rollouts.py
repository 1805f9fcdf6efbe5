"""The first half of the sentence: prompts become groups, groups are scored, scores become advantages.

    rollouts.draw(RoundKey(epoch=0, number=3)) -> Round

Sees the policy only through the engine and the log-probabilities it is compared by; knows nothing of optimizers.

Shape letters: P prompts of a round over all ranks, G completions per prompt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn

from podium.advantages import Advantages, advantages
from podium.assembly import Parts
from podium.config import GRPOConfig, call_settings, sampling_settings
from podium.health import Health
from podium.metrics import MetricsBuffer, Mode, RolloutTable, rollout_metrics, rollout_table, unstack
from podium.packing import nothing, pack
from podium.records import Prompt, ScoredGroup, TrainingGroup
from podium.rewards.score import score
from podium.rounds import Round, RoundKey, shares

EVALUATION = -1
"""Round number of evaluations: always the same random numbers, so that before and after are drawn alike."""


class Rollouts:
    """Draws generation rounds and evaluations. `trainer` is asked for its parts, state and policy as they are now."""

    def __init__(self, trainer: Any, measured: MetricsBuffer, health: Health) -> None:
        self.trainer = trainer
        self.measured = measured
        self.health = health
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
        plan = self.parts.plan
        prompts = self.prompts(key, range(plan.prompts_per_round))
        places = plan.deal([len(prompt.token_ids) for prompt in prompts])[plan.rank]
        with self.trainer.processes.whole(self.trainer.model_wrapped):
            scored = self._sample([prompts[place] for place in places], key)
            if self.args.dynamic_sampling:
                scored = self._refill(scored, places, key)
        self.scored = list(scored)
        table, result = self.advantages(scored, places)
        self.measure("train", table, result)
        self._adapt(table)
        kept_PG, counted_PG = self.trained(table, result)
        kept = [kept_PG[place] for place in places]
        groups = [training_group(s, result.advantages_PG[place]) for s, place in zip(scored, places, strict=True)]
        groups = self.with_other_policies(groups, kept)
        own = [result.advantages_PG[place] for place in places]
        self.health.saw_round(scored, own, kept, step=self.trainer.state.global_step + 1)
        if self.args.log_completions:
            self.parts.completions.add(scored, own)
        return Round(key=key, shares=shares(groups, places, kept, counted_PG, plan))

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

    def _sample(self, prompts: Sequence[Prompt], key: RoundKey) -> list[ScoredGroup]:
        return self.sample_and_score(prompts, self.args.num_generations, (key.epoch << 32) + key.number)

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
        mode: Mode = "eval" if round_number == EVALUATION else "train"
        settings = sampling_settings(
            self.args,
            self.parts.end_ids,
            num_completions=num_generations,
            round_number=round_number,
            greedy=greedy,
            temperature=temperature,
        )
        with self.timed("generate_seconds", mode), self.trainer.processes.whole(self.trainer.model_wrapped):
            groups = self.parts.engine.generate(prompts, settings, policy_step=self.trainer.state.global_step)
        with self.timed("reward_seconds", mode):
            return score(
                groups,
                self.parts.rewards,
                trainer_state=self.trainer.state,
                log_metric=lambda name, value: self.measured.add(mode, {name: value}),
                log_seconds=lambda name, value: self._add_seconds(name, mode, value),
                settings=call_settings(self.args),
            )

    def _refill(self, scored: Sequence[ScoredGroup], places: Sequence[int], key: RoundKey) -> list[ScoredGroup]:
        """DAPO's dynamic sampling (arXiv:2503.14476, eq. 11): groups of equal rewards make room for fresh prompts."""
        scored = list(scored)
        num_fresh = 0
        for attempt in range(self.args.max_resamples):
            weights_K = self.trainer.weights.weights_K
            flat = [i for i, group in enumerate(scored) if not self.parts.has_spread(group, weights_K)]
            if not flat:
                break
            rows = self.parts.order.fresh(key, attempt, [places[i] for i in flat])
            first_id = (attempt + 1) * self.parts.plan.prompts_per_round
            fresh = [self.prompt(row, first_id + places[i], index) for i, (index, row) in zip(flat, rows, strict=True)]
            for i, group in zip(flat, self._sample(fresh, key), strict=True):
                if self.parts.has_spread(group, weights_K):
                    scored[i] = group
            num_fresh += len(flat)
        self.measured.add("train", {"resampled_prompts": sum(gather_object([num_fresh]))})
        return scored

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

    def with_other_policies(self, groups: Sequence[TrainingGroup], kept: Sequence[np.ndarray]) -> list[TrainingGroup]:
        """The groups with log-probabilities under the sampling policy and the reference, where those are needed."""
        groups = list(groups)
        used = [i for i, keeps in enumerate(kept) if keeps.any()]
        with self.timed("compare_seconds", "train"):
            for field, model_now in self._comparisons().items():
                with model_now() as model:
                    logps = self._logps(model, [groups[i] for i in used])
                for i, values in zip(used, logps, strict=True):
                    groups[i] = dataclasses.replace(groups[i], **{field: values})
        return groups

    def _comparisons(self) -> dict[str, Callable[[], contextlib.AbstractContextManager[nn.Module]]]:
        policy, reference = self.trainer.model, self.parts.reference
        needed: dict[str, Callable[[], contextlib.AbstractContextManager[nn.Module]]] = {}
        if self.parts.plan.reuses_rollouts:
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
        self.trainer.processes.let_go(model)
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


def training_group(scored: ScoredGroup, advantage_G: np.ndarray) -> TrainingGroup:
    """The part of a scored group that is trained on."""
    completions = scored.group.completions
    return TrainingGroup(
        prompt_ids=scored.group.prompt.token_ids,
        completion_ids=tuple(completion.token_ids for completion in completions),
        advantages_G=np.asarray(advantage_G, np.float32),
        sampled_logps=tuple(np.array(completion.logps, np.float32) for completion in completions),
    )
