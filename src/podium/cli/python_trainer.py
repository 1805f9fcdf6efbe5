"""`podium.GRPOTrainer`: the trainer, with what `podium train` prints around a run: findings first, held-out numbers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.cli.next_command import next_line
from podium.cli.terminal import print_on_main
from podium.records import clean
from podium.runs.occupied import occupying
from podium.trainer import trainer
from podium.trainer.assembly import Given, TrainingPlan, before_weights
from podium.trainer.health import LEVELS

logger = logging.getLogger(__name__)


class GRPOTrainer(trainer.GRPOTrainer):
    """TRL's `GRPOTrainer`, with the findings of `podium.check` first and held-out numbers around training.

    Arguments are those of `podium.trainer.trainer.GRPOTrainer`. Raises `ConfigError`, `DataError`, `ModelError` or
    `RewardError`, before weights are loaded where possible.
    """

    def _plan(self, given: Given) -> TrainingPlan:
        """The run before its weights are loaded; what `podium.check` finds is logged, its errors are raised."""
        from podium.recipe.checks import as_error, check_arguments, worth_saying

        found, surveyed = check_arguments(given, test_rewards=False)
        plan = before_weights(surveyed)
        if errors := [finding for finding in found if finding.severity == "error"]:
            raise as_error("GRPOTrainer", errors)
        if plan.args.process_index == 0:
            for finding in worth_saying(found):
                logger.log(LEVELS[finding.severity], "%s %s", finding.code, clean(str(finding).partition(" ")[2]))
        return plan

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As `Trainer.train`, between two measurements of the held-out rows (`eval_dataset`, `eval_rows` of them).

        `True` resumes from the newest checkpoint that verifies.
        """
        rows = self.eval_dataset
        if isinstance(rows, Mapping):
            rows = next(iter(rows.values()), None)
        if rows is None or not self.args.eval_rows:
            return super().train(resume_from_checkpoint, **kwargs)
        from podium.cli.held_out import measure_held_out, print_before_and_after

        where: dict[str, Any] = {"folder": Path(str(self.args.output_dir)), "data": "eval_dataset"}
        with occupying(where["folder"]) if self.is_world_process_zero() else contextlib.nullcontext():
            before = measure_held_out(self, rows, "before", **where)
            result = super().train(resume_from_checkpoint, **kwargs)
            if self.health.decision != "stop":
                after = measure_held_out(self, rows, "after", **where)
                if self.is_world_process_zero():
                    print_before_and_after(where["folder"], before, after)
        print_on_main(next_line("train, in Python", run=str(where["folder"])))
        return result
