"""When the proof runs: before the first rollouts, before the first step, after the first step that moves weights.

    proof = FirstBatch(trainer)                  a callback of the trainer, too
    proof.before_rollouts()
    proof.before_step(batches)

Every process runs the checks on its own groups and model; the results are gathered, so that all stop where one fails.
The first process prints the table and writes `proof.json`. After a resume only what needs no first batch is checked:
weights, trained tensors, end tokens. Likewise where weights are sharded (FSDP, DeepSpeed): no process has them whole.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate.utils import gather_object
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from podium.errors import ProofError
from podium.models.forward import unwrap
from podium.records import Prompt, TrainingGroup
from podium.trainer.proof.checks import AFTER_STEP, BEFORE_ROLLOUTS, BEFORE_STEP, enough, reference_logps, shortened
from podium.trainer.proof.evidence import exactly, take_sample, telling_prompts, training_logps, weight_traces
from podium.trainer.proof.plain import first_not_finite
from podium.trainer.proof.records import After, Before, Check, Proof
from podium.trainer.rollouts import training_group
from podium.trainer.rounds import MicroBatch
from podium.trainer.snapshot import preserve_training_state

if TYPE_CHECKING:
    from podium.trainer.trainer import GRPOTrainer

logger = logging.getLogger(__name__)

FILE = "proof.json"


class FirstBatch(TrainerCallback):
    """Runs the checks of one run, once each, and remembers what they said."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self.checks: list[Check] = []
        self.seconds = 0.0
        self.step = 0
        self.begun = False
        self.waiting = False
        """Whether a batch is being looked at whose step has not been taken."""
        self.after: After | None = None
        self.may_stand_still = False

    @property
    def proof(self) -> Proof:
        """What has been shown so far."""
        return Proof(
            checks=tuple(self.checks),
            step=self.step,
            processes=self.trainer.accelerator.num_processes,
            seconds=self.seconds,
        )

    # ---- the three moments ----

    def before_rollouts(self) -> None:
        """Raises `ProofError`, as the other two do."""
        if self.begun or not self.trainer.args.prove_first_batch:
            return
        self.begun, self.step = True, self.trainer.state.global_step
        self.waiting = not self.step and not self._sharded
        self._show(BEFORE_ROLLOUTS, self.trainer, final=not self.waiting)

    def before_step(self, batches: Sequence[MicroBatch]) -> None:
        """With what the first step will be trained on."""
        groups = [group for batch in batches for group in batch.groups]
        if self.after is not None:
            self._before_the_move(batches, groups)
        if not self.waiting:
            return
        self.waiting = False
        if self.trainer.is_world_process_zero():
            logger.info(
                "The first batch is sampled; proving sampling and training on it takes about as long as a step."
            )
        started = time.perf_counter()
        scored = tuple(self.trainer.rollouts.scored)
        with preserve_training_state(self.trainer):
            sample = take_sample(self.trainer, self._prompts())
            self.seconds += time.perf_counter() - started
            before = Before(trainer=self.trainer, trained=tuple(groups), scored=scored, sample=sample)
            self._show(BEFORE_STEP, before, final=True)
        self._before_the_move(batches, groups or [training_group(s, np.zeros(s.num_completions)) for s in scored])

    def _before_the_move(self, batches: Sequence[MicroBatch], groups: Sequence[TrainingGroup]) -> None:
        """What a step that may move the weights is to be compared with."""
        started = time.perf_counter()
        trainer, looked_at, trained = self.trainer, shortened(groups), enough(groups)
        with preserve_training_state(trainer):
            with exactly(trainer):
                trained_before = tuple(training_logps(trainer, trained))
            self.after = After(
                trainer=trainer,
                weights_before=weight_traces(unwrap(trainer.model)),
                groups=looked_at,
                logps_before=tuple(training_logps(trainer, looked_at)),
                reference_before=tuple(reference_logps(trainer, looked_at)),
                trained=trained,
                trained_before=trained_before,
            )
        self._note_standstill(batches)
        self.seconds += time.perf_counter() - started

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the first step that should have moved the weights: one with a learning rate and something to learn."""
        if self.after is None or self.may_stand_still:
            return
        now = weight_traces(unwrap(self.trainer.model))
        before = self.after.weights_before
        if self.trainer.args.fp16 and all(np.array_equal(now[n].numbers, t.numbers) for n, t in before.items()):
            return  # a step that overflowed
        after, self.after = self.after, None
        with preserve_training_state(self.trainer):
            self._show(AFTER_STEP, after, final=True)

    # ---- how ----

    @property
    def _sharded(self) -> bool:
        return bool(self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled)

    def _prompts(self) -> list[Prompt]:
        """Of the first round; made up on a process that has none."""
        prompts = telling_prompts(self.trainer.rollouts.scored)
        made_up = Prompt(id=0, row=-1, token_ids=tuple(range(1, 9)), text="", content="")
        return prompts or [made_up]

    def _note_standstill(self, batches: Sequence[MicroBatch]) -> None:
        """Whether the coming step may change nothing: no signal, or a learning rate of 0, as warmups begin.

        Weight decay alone moves an adapter's first matrix, which the second, still zero, hides.
        """
        signal = any(gather_object([any(batch.groups for batch in batches)]))
        rates = [group["lr"] for group in self.trainer.optimizer.param_groups]
        self.may_stand_still = not signal or max(rates, default=0.0) == 0

    def _show(self, table: Sequence[Callable[[Any], Check]], evidence: Any, *, final: bool) -> None:
        """Run checks, gather them, print and write; raise where one failed."""
        started = time.perf_counter()
        mine = [dataclasses.asdict(self._with_layer(check(evidence), evidence)) for check in table]
        for columns in zip(*_per_process(gather_object([mine])), strict=True):
            self.checks.append(worst(columns))
        self.seconds += time.perf_counter() - started
        proof = self.proof
        if self.trainer.is_world_process_zero() and (final or proof.failures):
            proof.write(Path(self.trainer.args.output_dir) / FILE)
            new = dataclasses.replace(proof, checks=proof.checks[-len(table) :]) if table is AFTER_STEP else proof
            logger.info("%s", new.table())
            for check in proof.checks[-len(table) :]:
                if check.word == "WARNING":
                    self.trainer.health.say(check.finding)
        if proof.failures:
            raise failure(proof)

    def _with_layer(self, check: Check, evidence: Any) -> Check:
        """For log-probabilities that are not numbers: the layer from which they come."""
        if check.passed is not False or not isinstance(evidence, Before) or check.code not in ("P004", "P005"):
            return check
        if np.isfinite(evidence.sample.packed_N).all():
            return check
        model: nn.Module = unwrap(self.trainer.model)
        groups = evidence.sample.groups
        where = first_not_finite(model, lambda: training_logps(self.trainer, groups))
        return dataclasses.replace(check, detail=f"{check.detail}; not finite from {where or 'the head'} on")


def _per_process(gathered: list[Any]) -> list[list[Check]]:
    return [[Check(**check) for check in checks] for checks in gathered]


def worst(checks: Sequence[Check]) -> Check:
    """Of one check on all processes: the first failure, with its process, else the first that was checked."""
    for rank, check in enumerate(checks):
        if check.passed is False:
            where = f"process {rank}: " if len(checks) > 1 else ""
            return dataclasses.replace(check, detail=f"{where}{check.detail}")
    return next((check for check in checks if check.passed is not None), checks[0])


def failure(proof: Proof) -> ProofError:
    """All that failed, in one message."""
    lines = [f"  {check.code} {check.name}: {check.detail}\n    fix: {check.fix}" for check in proof.failures]
    return ProofError(
        f"The proof on the first batch failed in {len(lines)} of {len(proof.checks)} checks, so the run stops:\n"
        + "\n".join(lines)
        + f"\n`podium explain {proof.failures[0].code}` says more; `prove_first_batch: false` trains without a proof.",
        code=proof.failures[0].code,
        findings=[check.finding for check in proof.failures],
    )
