"""The trainers of stages: GRPO that begins where another ended, supervised fine-tuning, and the callback of a gate.

Optimizer, schedule, adaptive weights and reference go from one stage to the next by the checkpoint between them. They
are always read from there, also in a run that was never stopped: so one that is killed at a stage's end and resumed
follows the same trajectory bit for bit. The checkpoints of supervised fine-tuning are as complete as those of
`GRPOTrainer`, and its logs are recorded in its folder in the same form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_model
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from trl import SFTTrainer

from podium.data.completions import Completions
from podium.errors import ConfigError
from podium.models.reference import Reference
from podium.recipe.gates import Gate, absent
from podium.recipe.recipe import Stage
from podium.records import StepMetrics
from podium.runs.recording import RunFolder
from podium.runs.redaction import without_secrets
from podium.runs.run import CONFIG
from podium.trainer.checkpointing import AtomicTrainer
from podium.trainer.resume import REFERENCE, STATE
from podium.trainer.trainer import GRPOTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The end of one stage and the beginning of the next: a complete checkpoint."""

    checkpoint: Path

    @property
    def state(self) -> Mapping[str, Any]:
        """`podium_state.json`; empty behind a stage that was not GRPO."""
        path = self.checkpoint / STATE
        return json.loads(path.read_text()) if path.is_file() else {}

    @property
    def product_precision(self) -> str | None:
        """Kept from the stage before, as a CPU may measure otherwise another time. None: unknown."""
        rounds = self.state.get("bfloat16_products")
        if rounds is None:
            return None
        return "bfloat16" if rounds else "float32"

    def saved(self, part: str) -> dict[str, Any]:
        """The state of the `optimizer` or the `scheduler`."""
        return torch.load(self.checkpoint / f"{part}.pt", map_location="cpu", weights_only=True)


class StageTrainer(GRPOTrainer):
    """`GRPOTrainer` that begins where another ended: at `boundary` (None: nothing came before).

    `keeps` are those of `optimizer`, `schedule` and `adaptive_weights` that are taken over, `schedule_steps` is the
    length of a schedule that spans several stages (None: it is this stage's own).
    """

    def __init__(
        self,
        *args: Any,
        boundary: Boundary | None = None,
        keeps: frozenset[str] = frozenset(),
        schedule_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.boundary = boundary
        self.keeps = keeps
        self.schedule_steps = schedule_steps

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Spans all stages that share it. States are taken over here; a checkpoint inside the stage replaces them."""
        scheduler = super().create_scheduler(self.schedule_steps or num_training_steps, optimizer)
        if self.boundary is not None:
            self._take_over(self.boundary)
        return scheduler

    def _take_over(self, boundary: Boundary) -> None:
        if "optimizer" in self.keeps:
            own = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": boundary.saved("optimizer")["state"], "param_groups": own})
        if "schedule" in self.keeps:
            state = boundary.saved("scheduler")
            self.lr_scheduler.load_state_dict(state)
            for group, rate in zip(self.optimizer.param_groups, state["_last_lr"], strict=True):
                group["lr"] = rate
        if "adaptive_weights" in self.keeps:
            self.weights = self.weights.restored(boundary.state.get("reward_weights", {}))


def follow_on(reference: Reference, boundary: Boundary) -> bool:
    """Load the reference of the stage before, if that one had moved. Returns whether it had."""
    moved = boundary.checkpoint / REFERENCE
    if reference.copy is None or not moved.is_file():
        return False
    load_model(reference.copy, str(moved))
    reference.moved = True
    return True


COUNTED = "sft_state.json"
"""In a checkpoint: the counts that `SFTTrainer` does not save."""


class StageSFTTrainer(AtomicTrainer, SFTTrainer):
    """`SFTTrainer` with checkpoints that verify; a resumed one goes on counting tokens where it was."""

    def _save_own(self, staging: Path) -> None:
        if self.args.should_save:
            (staging / COUNTED).write_text(json.dumps({"num_tokens": self._total_train_tokens}))

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        super()._load_optimizer_and_scheduler(folder)
        if folder is not None and (Path(folder) / COUNTED).is_file():
            self._total_train_tokens = json.loads((Path(folder) / COUNTED).read_text())["num_tokens"]


def sft_trainer(
    stage: Stage, policy: Any, tokenizer: Any, rows: Any, callbacks: list[TrainerCallback]
) -> StageSFTTrainer:
    """The trainer of an SFT stage, which trains `policy` further (with its adapter, if there is one) on `rows`."""
    columns = columns_of(rows)
    right = Completions.of(stage.completion, columns)
    pairs = rows.map(right, remove_columns=[name for name in columns if name not in ("prompt", "completion")])
    arguments = stage.sft_arguments()
    return StageSFTTrainer(
        model=policy,
        args=arguments,
        train_dataset=pairs,
        processing_class=tokenizer,
        callbacks=[LossRecord(Path(str(arguments.output_dir)), stage.recipe.given), *callbacks],
    )


def columns_of(rows: Any) -> list[str]:
    """The columns of a dataset; of a stream without a list of them, those of its first row."""
    known = getattr(rows, "column_names", None)
    return list(known) if known else list(next(iter(rows)))


class LossRecord(TrainerCallback):
    """Writes what is logged as the lines of `metrics.jsonl`."""

    def __init__(self, folder: Path, given: Mapping[str, Any]) -> None:
        self.folder = RunFolder(folder)
        self.given = given

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.folder.begin(resumed_step=state.global_step or None)
            self.folder.write_yaml(CONFIG, without_secrets(self.given))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if state.is_world_process_zero and logs and "train_runtime" not in logs:
            values = {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}
            self.folder.add_metrics(StepMetrics(step=state.global_step, values=values))


_CALLBACK = "StopConditionCallback"
"""Under which `trainer_state.json` holds its state: the class's name."""


class StopConditionCallback(TrainerCallback, ExportableState):
    """Feeds a gate with numbers; its memory is part of every checkpoint.

    `gate` None: the stage ends at its bound alone. `step_values` returns the numbers of the optimizer step that has
    just ended; None: those of the log are taken (as another trainer than Podium's measures no more).
    """

    def __init__(self, gate: Gate | None, step_values: Callable[[], Mapping[str, float]] | None = None) -> None:
        self.gate = gate
        self.step_values = step_values
        self.values: list[float] = []
        self.met = False

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"values": self.values, "met": self.met}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """A run that is resumed has its callbacks' states in `state`; one that begins has this one's."""
        saved = _saved(state.stateful_callbacks)
        self.values = list(saved.get("values", []))
        self.met = bool(saved.get("met", False))

    def on_step_end(self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if self.step_values is not None:
            self._add(self.step_values, args, control, held_out=False)

    def on_log(self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if self.step_values is None and logs and "train_runtime" not in logs:
            self._add(lambda: logs, args, control, held_out=None)

    def on_evaluate(self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if self.step_values is not None:
            self._add(lambda: kwargs.get("metrics") or {}, args, control, held_out=True)

    def _add(
        self, numbers: Callable[[], Mapping[str, Any]], args: Any, control: TrainerControl, *, held_out: bool | None
    ) -> None:
        """Numbers of training, of an evaluation, or (None) of both. The main process decides for all."""
        gate = self.gate
        if gate is None or (held_out is not None and gate.held_out is not held_out):
            return
        decided: list[Any] = [None, None]
        if args.process_index == 0:
            measured = numbers()
            value = measured.get(gate.metric)
            missing = gate.metric not in measured and not self.values
            decided = [float("nan") if value is None else float(value), absent(gate, measured) if missing else ""]
        if args.world_size > 1:
            broadcast_object_list(decided)
        value, problem = decided
        if problem:
            raise ConfigError(problem, code="C060")
        self.values = [*self.values, value][-gate.steps :]
        if gate.is_met(self.values):
            self.met = control.should_training_stop = control.should_save = True


def _saved(states: Any) -> Mapping[str, Any]:
    saved = states.get(_CALLBACK) if isinstance(states, Mapping) else None
    kept = saved.get("attributes") if isinstance(saved, Mapping) else None
    return kept if isinstance(kept, Mapping) else {}


def was_met(trainer_state: Mapping[str, Any]) -> bool:
    """Whether the gate was met when this `trainer_state.json` was written."""
    return bool(_saved(trainer_state.get("stateful_callbacks")).get("met"))
