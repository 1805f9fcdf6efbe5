"""`podium.GRPOTrainer`: the trainer, with what `podium train` prints around a run: findings first, held-out numbers."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.checks import as_error, check_arguments, worth_saying
from podium.console.held_out import Size, measure_held_out, print_before_and_after
from podium.console.next_command import print_next
from podium.data.sources import is_read_once, is_stream
from podium.errors import Finding, ModelError
from podium.errors.texts import clean
from podium.recipe.recipe import EVAL_ROWS, EVAL_SAMPLES
from podium.runs.checkpoint import resolve_auto
from podium.runs.occupied import occupying
from podium.runs.recording import set_earlier_run_aside
from podium.trainer import trainer
from podium.trainer.assembly import prepare_run
from podium.trainer.attributes import refuse_another_model
from podium.trainer.config import GRPOConfig
from podium.trainer.run import Arguments, Prepared

logger = logging.getLogger(__name__)

FATAL_LATER = frozenset({"M015", "M020", "M022"})
"""Codes of errors with which a model, given by its name, cannot be loaded."""


class GRPOTrainer(trainer.GRPOTrainer):
    """TRL's `GRPOTrainer`, with the findings of `podium.check` first and held-out numbers around training.

    Arguments are those of `podium.trainer.trainer.GRPOTrainer`. Raises `ConfigError`, `DataError`, `ModelError` or
    `RewardError`, before weights are loaded where possible, for a run that cannot work; other findings are logged.
    """

    def _prepared(self, given: Arguments) -> Prepared:
        """The run before its weights are loaded, and the findings of `podium.check` about it, logged."""
        found, checked = check_arguments(given, test_rewards=False)
        prepared = prepare_run(checked)
        fatal = [finding for finding in found if finding.severity == "error" and finding.code in FATAL_LATER]
        if fatal and isinstance(given.model, str):
            raise ModelError(as_error("GRPOTrainer", fatal).what, findings=fatal)
        if prepared.args.process_index == 0:
            _log(found)
        self._found = found
        return prepared

    def _begin(self, *given: Any) -> None:
        super()._begin(*given)
        self.health.overruled_before(self._found)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As `Trainer.train`, between two measurements of rows of `eval_dataset`; none with `eval_rows` 0.

        Of several sets the first is measured. Of a dataset that can be read only once, none is. `True` resumes from
        the newest checkpoint that verifies.
        """
        self.rollouts.refuse_nested()
        refuse_another_model(self)
        rows = self.eval_dataset
        data = "eval_dataset"
        if isinstance(rows, Mapping):
            name, rows = next(iter(rows.items()), ("", None))
            data = f"eval_dataset[{name!r}]"
        if rows is None or self.args.eval_rows == 0 or is_read_once(rows):
            return super().train(resume_from_checkpoint, **kwargs)
        size = _size(self.args)
        rows = [*itertools.islice(rows, size.prompts)] if is_stream(rows) else rows
        folder = Path(str(self.args.output_dir))
        resume_from_checkpoint = resolve_auto(folder, asked=resume_from_checkpoint)
        where: dict[str, Any] = {"folder": folder, "data": data, "size": size}
        with occupying(folder) if self.is_world_process_zero() else contextlib.nullcontext():
            if not resume_from_checkpoint and self.is_world_process_zero():
                set_earlier_run_aside(folder, None, self.run.policy.source)  # before anything of this one is written
            before = measure_held_out(self, rows, "before", hint=" (eval_rows=0: none)", **where)
            result = super().train(resume_from_checkpoint, **kwargs)
            if self.health.decision != "stop":
                after = measure_held_out(self, rows, "after", **where)
                if before is not None and after is not None:
                    print_before_and_after(folder, before, after)
        if self.is_world_process_zero():
            print_next("train, in Python", run=str(folder))
        return result


def _log(found: Sequence[Finding]) -> None:
    """Log findings for which training goes on, errors as warnings."""
    for finding in [error for error in found if error.severity == "error"] + worth_saying(found):
        level = logging.INFO if finding.severity == "note" else logging.WARNING
        logger.log(level, "%s %s", finding.code, clean(str(finding).partition(" ")[2]))


def _size(args: GRPOConfig) -> Size:
    """The size of an evaluation: a round's completions, of as many prompts as possible, unless it is set."""
    if args.eval_rows is None and args.eval_samples is None:
        return Size(min(EVAL_ROWS, args.generation_batch_size), 1)
    return Size(EVAL_ROWS if args.eval_rows is None else args.eval_rows, args.eval_samples or EVAL_SAMPLES)
