"""Time and tokens of a run, from a short measurement on the loaded trainer.

    measured = measure(trainer)                 seconds: one batch of completions, scored and trained on
    estimate = estimate_time(trainer.args, measured, num_rows=len(dataset))

`measure` changes nothing that a later `trainer.train()` sees. `estimate_time` is pure: numbers of another
sampling serve as well, as a `Measurement`.

The cost model. The cost of a completion, in sampling and training, is proportional to the tokens that are computed for
it: its own, and its share of what the group shares. A first batch shows the cost of a token, warm. Three things then
change while a policy learns, and a first batch cannot show how far:

- Completions that are cut off at the limit learn to end, and are then as long as those of the first batch that ended.
- Groups come to agree, and what is agreed on is not trained on. `SIGNAL_LATER` of the groups still differ later, or as
  many as at first where those are fewer.
- The form of an answer is learnt, and common beginnings of completions are computed once: `ALIKE_TOKENS` of each, at
  most `ALIKE_SHARE` of it. That is much of a short answer, and nothing of a long one.

All are reached as exp(-step / `SETTLING_STEPS`). The constants are those of recorded runs of the quickstart: over 60
steps 0.37, 0.43, 0.44 and 0.46 of the groups had signal, 0.4 from the fourth step on; sampling took 0.4 of what it took
at first, and training 0.4 of what the share of groups with signal explains. A run with other rewards may keep all of
its signal: `most_seconds` is the run in which nothing changes.
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

from podium.algorithm.advantages import combine, has_spread
from podium.models.devices import kind_of
from podium.models.prefixes import common_beginning
from podium.records import Prompt, TrainingGroup
from podium.rewards.score import score
from podium.runs.pace import clock
from podium.trainer.assembly import plan_of
from podium.trainer.config import GRPOConfig
from podium.trainer.policy_state import PolicyState
from podium.trainer.rollouts import EVALUATION, round_prompts
from podium.trainer.rounds import MicroBatch, Plan, RoundKey, TrialSettings, micro_batches
from podium.trainer.snapshot import preserve_training_state
from podium.trainer.training_groups import training_group

if TYPE_CHECKING:
    from podium.trainer.trainer import GRPOTrainer

SIGNAL_LATER = 0.4
"""Share of the groups that have signal once a policy has learnt what is easy."""

ALIKE_TOKENS = 5.5
"""Tokens of a completion that cost nothing later, since others of its group began with the same."""

ALIKE_SHARE = 0.6
"""Largest share of a completion that this can be."""

SETTLING_STEPS = 3.0
"""Optimizer steps in which two thirds of that change happen."""

OPTIMIZER_SAMPLE = 1 << 22
"""Parameters on which a step of the optimizer is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Seconds for a batch of completions, part by part. All counts are of that batch."""

    num_completions: int
    prompt_tokens: int
    """Computed for all completions: a prompt once for its group, what all prompts begin with once."""
    completion_tokens: int
    ended_tokens: float
    """Mean length of a completion that ended by itself; NaN: none did."""
    generate_seconds: float
    reward_seconds: float
    train_seconds: float
    """Forward and backward of all of them."""
    trained_share: float
    """Share of the completions that have an advantage; the others are not trained on."""
    skips_flat: bool
    """Whether groups without signal are left out of training."""
    shares: bool
    """Whether common beginnings of completions are computed once."""
    optimizer_seconds: float
    """One step, with what follows from new weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step, part by part."""

    generate: float
    reward: float
    train: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.generate + self.reward + self.train + self.optimizer

    def __str__(self) -> str:
        parts = (f"{name} {seconds:.2f}" for name, seconds in dataclasses.asdict(self).items())
        return f"{self.total:.2f} s ({', '.join(parts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """Time and tokens of a run."""

    num_steps: int
    first: StepTime
    """As it was measured."""
    mean: StepTime
    """Over the run, by the cost model."""
    completion_tokens: float
    """Sampled in one optimizer step on average, on all processes."""
    evaluation_seconds: float
    """Seconds of the held-out completions before and after."""

    @property
    def total_seconds(self) -> float:
        """The run, without loading the model."""
        return self.num_steps * self.mean.total + self.evaluation_seconds

    @property
    def most_seconds(self) -> float:
        """The run, if every step takes as long as the first."""
        return self.num_steps * self.first.total + self.evaluation_seconds

    @property
    def total_tokens(self) -> float:
        """Completion tokens of the run."""
        return self.num_steps * self.completion_tokens

    def rows(self) -> list[tuple[str, str]]:
        """A short table: what, how much."""
        in_all = f"about {clock(self.total_seconds)}"
        if self.most_seconds > self.total_seconds:
            in_all += f"; at most {clock(self.most_seconds)}, if nothing changes"
        rows = [
            ("first step", str(self.first)),
            ("a step on average", str(self.mean)),
            ("completion tokens", f"{self.completion_tokens:,.0f} a step, {self.total_tokens:,.0f} in all"),
            (f"{self.num_steps:,} steps", clock(self.num_steps * self.mean.total)),
        ]
        if self.evaluation_seconds:
            rows.append(("evaluation", clock(self.evaluation_seconds)))
        return [*rows, ("in all", in_all)]


def estimate_time(
    args: GRPOConfig, measured: Measurement, *, num_rows: int | None, evaluation_completions: int = 0
) -> TimeEstimate:
    """The run's time by the cost model above.

    Args:
        args: the run's.
        measured: on this machine, with this model.
        num_rows: of the training set, to count the steps of an epoch; None: a stream.
        evaluation_completions: held-out completions before and after training, together.
    """
    plan = plan_of(args)
    steps = num_steps(args, plan, num_rows)
    rounds_per_step = plan.accumulation / plan.micro_steps_per_round
    completions = plan.prompts_per_round * plan.num_generations * rounds_per_step
    prompt = measured.prompt_tokens / measured.num_completions
    length = measured.completion_tokens / measured.num_completions
    later = length if math.isnan(measured.ended_tokens) else min(length, measured.ended_tokens)
    early = early_share(steps)
    mean_length = early * length + (1 - early) * later
    alike = min(ALIKE_TOKENS, ALIKE_SHARE * later) if measured.shares else 0.0
    work_later = (prompt + later - alike) / (prompt + length)
    work = early + (1 - early) * work_later
    signal_later = min(measured.trained_share, SIGNAL_LATER) if measured.skips_flat else measured.trained_share
    signal = early * measured.trained_share + (1 - early) * signal_later

    def step(work: float, signal: float) -> StepTime:
        share = completions / plan.ranks / measured.num_completions
        return StepTime(
            generate=share * measured.generate_seconds * work,
            reward=share * measured.reward_seconds,
            train=share * plan.iterations * signal * measured.train_seconds * work,
            optimizer=measured.optimizer_seconds,
        )

    a_completion = measured.generate_seconds / measured.num_completions
    return TimeEstimate(
        num_steps=steps,
        first=step(1.0, measured.trained_share),
        mean=step(work, signal),
        completion_tokens=completions * mean_length,
        evaluation_seconds=evaluation_completions * a_completion * (1 + work_later) / 2,
    )


def early_share(steps: int) -> float:
    """Share of a run of so many steps that is still as its first step: the mean of exp(-step / `SETTLING_STEPS`).

    >>> early_share(1), round(early_share(60), 3)
    (1.0, 0.059)
    """
    decay = math.exp(-1 / SETTLING_STEPS)
    return (1 - decay**steps) / (steps * (1 - decay)) if steps else 1.0


def num_steps(args: GRPOConfig, plan: Plan, num_rows: int | None) -> int:
    """Optimizer steps of the run on so many rows; None: a stream's, which `max_steps` ends."""
    if num_rows is None:
        return max(args.max_steps, 0)
    return plan.num_steps(args, num_rows // plan.prompts_per_round * plan.micro_steps_per_round)


def measure(trainer: GRPOTrainer) -> Measurement:
    """Sample, score and train on one batch of the first prompts, as many as run side by side.

    Gradients, random states and metrics are put back. Reward functions are called once.
    """
    with preserve_training_state(trainer.model):
        prompts, now = _first_prompts(trainer), PolicyState.of(trainer)
        # what is made once: rounded weights, kernels
        trainer.rollouts.sample_and_score(prompts[:1], now.settings(2, EVALUATION), now)
        start = time.perf_counter()
        acted = trainer.rollouts.sample(prompts, now.settings(trainer.args.num_generations, 0), now)
        sampled = time.perf_counter()
        scored = score(
            groups := acted.groups,
            trainer.parts.rewards,
            trainer_state=trainer.state,
            log_metric=lambda *_: None,
            environments=acted.environments,
        )
        rewarded = time.perf_counter()
        signs = [np.where(np.arange(group.num_completions) % 2, 1.0, -1.0) for group in scored]
        train_seconds = _train(trainer, [training_group(*pair) for pair in zip(scored, signs, strict=True)])
    weights_K, precision = trainer.parts.advantage.weights_K, trainer.parts.forward.precision
    differ = [has_spread(combine(group.rewards_GK, weights_K)) for group in scored]
    completions = [c for group in groups for c in group.completions]
    ended = [len(c.logps) for c in completions if c.finish != "length"]
    asked = [group.prompt.token_ids for group in groups]
    return Measurement(
        num_completions=len(completions),
        prompt_tokens=sum(map(len, asked)) - (len(asked) - 1) * common_beginning(asked),
        ended_tokens=float(np.mean(ended)) if ended else math.nan,
        skips_flat=trainer.parts.skips_zero_advantage,
        shares=trainer.parts.forward.path == "shared",
        completion_tokens=sum(len(c.logps) for c in completions),
        generate_seconds=sampled - start,
        reward_seconds=rewarded - sampled,
        train_seconds=train_seconds,
        trained_share=float(np.mean(differ)) if trainer.parts.skips_zero_advantage else 1.0,
        optimizer_seconds=optimizer_seconds(trainer.model, rounds=bool(getattr(precision, "rounds", False))),
    )


def _first_prompts(trainer: GRPOTrainer) -> list[Prompt]:
    """Prompts of the first round, as many as the live engine decodes at once."""
    count = max(1, kind_of(trainer.args.device).max_rows // trainer.args.num_generations)
    places = range(min(count, trainer.parts.plan.prompts_per_round))
    return round_prompts(trainer.parts, RoundKey(0, 0), places)


def _train(trainer: GRPOTrainer, groups: Sequence[TrainingGroup]) -> float:
    """Seconds of the forward and backward of these groups; a first group goes before the clock starts."""
    lengths = [len(ids) for group in groups for ids in group.completion_ids]
    tokens, parts = sum(lengths), trainer.parts
    trial = TrialSettings(
        tokens_per_pack=parts.tokens_per_pack,
        precision=parts.forward.precision,
        router_coef=parts.router_coef,
        top_entropy_quantile=parts.args.top_entropy_quantile,
    )
    for chosen in (groups[:1], groups):
        counted = MicroBatch(groups=tuple(chosen), local_tokens=tokens, num_tokens=tokens, num_rollouts=len(lengths))
        [batch] = micro_batches([counted], per_micro_batch=False, ranks=1)
        start = time.perf_counter()
        trainer.training_step(trainer.model, dataclasses.replace(batch, is_last=False, trial=trial))
        _wait(trainer.args.device)
    return time.perf_counter() - start


def optimizer_seconds(model: nn.Module, *, rounds: bool) -> float:
    """Clipping, one step of Adam, and where the run rounds its products the new weights' copies.

    Timed on some of the trained parameters, as it is all reading and writing.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    sample = nn.Parameter(torch.zeros(min(count, OPTIMIZER_SAMPLE), dtype=trained[0].dtype, device=trained[0].device))
    sample.grad = torch.ones_like(sample)
    adam = torch.optim.AdamW([sample], fused=sample.device.type in ("cpu", "cuda"))
    copy = torch.empty_like(sample, dtype=torch.bfloat16) if rounds else None
    seconds = []
    for _ in range(3):  # the first makes the state
        start = time.perf_counter()
        nn.utils.clip_grad_norm_([sample], 1.0)
        adam.step()
        if copy is not None:
            copy.copy_(sample.detach())
        _wait(sample.device)
        seconds.append(time.perf_counter() - start)
    return min(seconds) * count / sample.numel()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
