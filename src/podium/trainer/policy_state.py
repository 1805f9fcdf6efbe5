"""A run at one moment, and a round of it: the only views that sampling, scoring and comparing have."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from podium.agents.rollout_func import RolloutFunction, checked_output
from podium.agents.setup import Acted
from podium.algorithm.advantages import Advantages
from podium.engines.base import RolloutEngine
from podium.engines.transformers import TransformersEngine
from podium.errors import Finding
from podium.models.forward import base_model
from podium.records import Prompt, SamplingSettings, ScoredGroup
from podium.rewards.adaptive import AdaptiveWeights
from podium.trainer.assembly import Parts
from podium.trainer.processes import Processes
from podium.trainer.rounds import Measurements, RoundKey
from podium.trainer.settings import sampling_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """A run at one moment, as sampling, scoring and comparing see it."""

    parts: Parts
    processes: Processes
    model: nn.Module
    wrapped: nn.Module
    """The same, as accelerate prepared it."""
    trainer_state: Any
    weights: AdaptiveWeights
    """Weights of the reward functions."""
    rollout_func: RolloutFunction | None = None
    """The user's, with the trainer."""

    @classmethod
    def of(cls, trainer: Any) -> PolicyState:
        """The state of a trainer at this moment."""
        given = trainer.parts.agents.rollout_func
        function = None if given is None else lambda prompts: checked_output(given(prompts, trainer), trainer.model)
        return cls(
            parts=trainer.parts,
            processes=trainer.processes,
            model=trainer.model,
            wrapped=trainer.model_wrapped,
            trainer_state=trainer.state,
            weights=trainer.weights,
            rollout_func=function,
        )

    @property
    def step(self) -> int:
        return self.trainer_state.global_step

    def settings(
        self, num_completions: int, round_number: int, *, temperature: float | None = None, **given: Any
    ) -> SamplingSettings:
        """The run's, for one round, at the temperature at which log-probabilities are computed unless one is given."""
        given["temperature"] = self.parts.forward.temperature if temperature is None else temperature
        args = self.parts.args
        end_ids = self.parts.end_ids
        return sampling_settings(args, end_ids, num_completions=num_completions, round_number=round_number, **given)

    @property
    def engine(self) -> RolloutEngine:
        """The run's; transformers' `generate` where the user has replaced it on the model, as code for TRL does."""
        engine = self.parts.engine
        policy = self.parts.policy
        if engine.name != "live" or engine.own_weights or not any(map(_replaced, (policy, base_model(policy)))):
            return engine
        return TransformersEngine(
            policy, self.parts.tokenizer, forward=self.parts.forward, tokens_per_pack=self.parts.tokens_per_pack
        )

    def sample(self, prompts: Sequence[Prompt], settings: SamplingSettings, *, evaluation: bool = False) -> Acted:
        """Groups of completions with all their turns, and their environments."""
        return self.parts.agents.sample(
            self.engine,
            prompts,
            settings,
            builder=self.parts.builder,
            policy_step=self.step,
            evaluation=evaluation,
            rollout_func=self.rollout_func,
        )

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Around sampling: sharded weights, gathered, unless the engine has weights of its own."""
        own = self.parts.engine.own_weights
        return contextlib.nullcontext() if own else self.processes.full_weights(self.wrapped)


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
    now: PolicyState
    measured: Measurements
    say: Callable[[Finding], None]
    """Takes a finding; one code is told once a run."""

    @property
    def staleness(self) -> int:
        """Optimizer steps since the sampling weights."""
        return self.now.step - self.policy_step


def _replaced(model: nn.Module) -> bool:
    """Whether `generate` of this instance is not its class's. FSDP2's wrapper around that is no replacement."""
    own, original = (inspect.unwrap(getattr(x, "generate", _replaced)) for x in (model, type(model)))
    return getattr(own, "__func__", own) is not getattr(original, "__func__", original)
