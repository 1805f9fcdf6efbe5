"""Time and tokens of a run, from a short measurement on the loaded trainer.

    measured = measure(trainer)                 seconds: one batch of completions, scored and trained on
    estimate = estimate_time(trainer.args, measured, num_rows=len(dataset))

`measure` changes nothing that a later `trainer.train()` sees. `estimate_time` is pure: whoever has sampled already
makes a `Measurement` of those numbers.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from podium.assembly import plan_of
from podium.config import GRPOConfig, sampling_settings
from podium.engines.live.engine import MAX_ROWS
from podium.records import Prompt, SamplingSettings, TrainingGroup
from podium.rewards.score import score
from podium.rollouts import EVALUATION, training_group
from podium.rounds import Plan, RoundKey, Share, micro_batches
from podium.untouched import untouched

if TYPE_CHECKING:
    from podium.trainer import GRPOTrainer

OPTIMIZER_SAMPLE = 1 << 22
"""Parameters on which a step of the optimizer is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Seconds for a batch of completions, part by part. All counts are of that batch."""

    num_completions: int
    completion_tokens: int
    generate_seconds: float
    reward_seconds: float
    train_seconds: float
    """Forward and backward of all of them."""
    trained_share: float
    """Share of the completions that have an advantage; the others are not trained on."""
    optimizer_seconds: float
    """One step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """A run's time and tokens."""

    num_steps: int
    generate_seconds: float
    """Of one optimizer step on average, as are the next three."""
    reward_seconds: float
    train_seconds: float
    optimizer_seconds: float
    completion_tokens: float
    """Sampled in one optimizer step, on all processes."""
    evaluation_seconds: float
    """Of the held-out completions before and after."""

    @property
    def step_seconds(self) -> float:
        """One optimizer step."""
        return self.generate_seconds + self.reward_seconds + self.train_seconds + self.optimizer_seconds

    @property
    def total_seconds(self) -> float:
        """The run, without loading the model."""
        return self.num_steps * self.step_seconds + self.evaluation_seconds

    @property
    def total_tokens(self) -> float:
        """Completion tokens of the run."""
        return self.num_steps * self.completion_tokens

    def rows(self) -> list[tuple[str, str]]:
        """A short table: what, how much."""
        parts = ("generate", "reward", "train", "optimizer")
        shares = ", ".join(f"{part} {getattr(self, part + '_seconds'):.2f}" for part in parts)
        rows = [
            ("one step", f"{self.step_seconds:.2f} s ({shares})"),
            ("completion tokens", f"{self.completion_tokens:,.0f} a step, {self.total_tokens:,.0f} in all"),
            (f"{self.num_steps:,} steps", clock(self.num_steps * self.step_seconds)),
        ]
        if self.evaluation_seconds:
            rows += [("evaluation", clock(self.evaluation_seconds)), ("in all", clock(self.total_seconds))]
        return rows


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def estimate_time(
    args: GRPOConfig, measured: Measurement, *, num_rows: int | None, evaluation_completions: int = 0
) -> TimeEstimate:
    """The run's time if it goes on as it was measured: lengths and rewards change while a policy learns.

    Args:
        args: the run's.
        measured: on this machine, with this model.
        num_rows: of the training set, to count the steps of an epoch; None: a stream.
        evaluation_completions: held-out completions before and after training, together.
    """
    plan = plan_of(args)
    rounds_per_step = plan.accumulation / plan.micro_steps_per_round
    completions = plan.prompts_per_round * plan.num_generations * rounds_per_step
    mine = completions / plan.ranks
    trained = mine * plan.iterations * measured.trained_share
    a_completion = measured.generate_seconds / measured.num_completions
    return TimeEstimate(
        num_steps=num_steps(args, plan, num_rows),
        generate_seconds=mine * a_completion,
        reward_seconds=mine * measured.reward_seconds / measured.num_completions,
        train_seconds=trained * measured.train_seconds / measured.num_completions,
        optimizer_seconds=measured.optimizer_seconds,
        completion_tokens=completions * measured.completion_tokens / measured.num_completions,
        evaluation_seconds=evaluation_completions * a_completion,
    )


def num_steps(args: GRPOConfig, plan: Plan, num_rows: int | None) -> int:
    """Optimizer steps of the run, as the Trainer counts them."""
    if args.max_steps > 0 or num_rows is None:
        return max(args.max_steps, 0)
    micro_steps = num_rows // plan.prompts_per_round * plan.micro_steps_per_round
    return math.ceil(args.num_train_epochs * max(micro_steps // plan.accumulation, 1))


# ---- the measurement ----


def measure(trainer: GRPOTrainer) -> Measurement:
    """Sample, score and train on one batch of the first prompts, as many as run side by side.

    Gradients, random states and metrics are put back. Reward functions are called once.
    """
    with untouched(trainer):
        prompts = _first_prompts(trainer)
        trainer.rollouts.sample_and_score(prompts[:1], 2, EVALUATION)  # what is made once: rounded weights, kernels
        start = time.perf_counter()
        groups = trainer.parts.engine.generate(prompts, _settings(trainer), policy_step=0)
        sampled = time.perf_counter()
        scored = score(groups, trainer.parts.rewards, trainer_state=trainer.state, log_metric=lambda *_: None)
        rewarded = time.perf_counter()
        trained = [training_group(group, _alternating(group.num_completions)) for group in scored]
        train_seconds = _train(trainer, trained)
    has_spread = [trainer.parts.has_spread(group) for group in scored]
    completions = [c for group in groups for c in group.completions]
    return Measurement(
        num_completions=len(completions),
        completion_tokens=sum(len(c.token_ids) for c in completions),
        generate_seconds=sampled - start,
        reward_seconds=rewarded - sampled,
        train_seconds=train_seconds,
        trained_share=float(np.mean(has_spread)) if trainer.parts.skips_zero_advantage else 1.0,
        optimizer_seconds=optimizer_seconds(trainer.model),
    )


def _first_prompts(trainer: GRPOTrainer) -> list[Prompt]:
    """Of the first round, as many as the live engine decodes at once."""
    rows = MAX_ROWS.get(trainer.args.device.type, 128)
    count = max(1, rows // trainer.args.num_generations)
    return trainer.rollouts.prompts(RoundKey(0, 0), trainer.parts.plan.mine()[:count])


def _settings(trainer: GRPOTrainer) -> SamplingSettings:
    count = trainer.args.num_generations
    return sampling_settings(trainer.args, trainer.parts.end_ids, num_completions=count, round_number=0)


def _alternating(count: int) -> np.ndarray:
    return np.where(np.arange(count) % 2, 1.0, -1.0)


def _train(trainer: GRPOTrainer, groups: Sequence[TrainingGroup]) -> float:
    """Seconds of the forward and backward of these groups; a first group goes before the clock starts."""
    counts = {
        "num_rollouts": sum(len(group.completion_ids) for group in groups),
        "num_tokens": sum(len(ids) for group in groups for ids in group.completion_ids),
    }
    for chosen in (groups[:1], groups):
        share = Share(groups=tuple(chosen), local_tokens=counts["num_tokens"], **counts)
        [batch] = micro_batches([share], per_micro_batch=False, ranks=1)
        start = time.perf_counter()
        trainer.training_step(trainer.model, dataclasses.replace(batch, is_last=False))
        _wait(trainer.args.device)
    return time.perf_counter() - start


def optimizer_seconds(model: nn.Module) -> float:
    """One step of Adam on the trained parameters: timed on some of them, as it is all reading and writing."""
    trained = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    sample = nn.Parameter(torch.zeros(min(count, OPTIMIZER_SAMPLE), dtype=trained[0].dtype, device=trained[0].device))
    sample.grad = torch.ones_like(sample)
    adam = torch.optim.AdamW([sample], fused=sample.device.type in ("cpu", "cuda"))
    seconds = []
    for _ in range(3):  # the first makes the state
        start = time.perf_counter()
        adam.step()
        _wait(sample.device)
        seconds.append(time.perf_counter() - start)
    return min(seconds) * count / sample.numel()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
