"""A stage of supervised fine-tuning: TRL's `SFTTrainer` on the rows of the recipe and their right completions.

Its checkpoints are as complete as those of `GRPOTrainer`, and its logs are recorded in its folder in the same form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from trl import SFTTrainer

from podium.data.completions import Completions
from podium.recipe.recipe import Stage
from podium.records import StepMetrics
from podium.runs.recording import RunFolder
from podium.runs.redaction import without_secrets
from podium.runs.run import CONFIG
from podium.trainer.checkpointing import AtomicCheckpointMixin

COUNTED = "sft_state.json"
"""In a checkpoint: the counts that `SFTTrainer` does not save."""


class StageSFTTrainer(AtomicCheckpointMixin, SFTTrainer):
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
