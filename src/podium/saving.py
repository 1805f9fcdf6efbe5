"""Checkpoints of a Trainer that are whole and verified, or not there: see `podium.checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from podium import checkpoint


class SavesWhole(Trainer):
    """A Trainer whose checkpoints are staged, flushed and renamed into place."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Nothing where there is no step left to take."""
        return ([], None) if self._is_done() else super().get_batch_samples(epoch_iterator, num_batches, device)

    def _is_done(self) -> bool:
        """Whether all steps are taken, as when a run that had ended is resumed: the Trainer looks only after a step."""
        done = self.state.global_step >= self.state.max_steps
        if done:
            self.control.should_training_stop = True
        return done

    def _save_own(self, staging: Path) -> None:
        """What a checkpoint holds beyond the Trainer's."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Everything the Trainer saves, and `_save_own`."""
        self.store_flos()
        final = Path(self._get_output_dir(trial=trial)) / f"{checkpoint.PREFIX}{self.state.global_step}"
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(final)
        barrier = self.accelerator.wait_for_everyone
        with checkpoint.staged(final, is_main=self.args.should_save, barrier=barrier) as staging:
            self.save_model(str(staging), _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(staging))
                self._save_scaler(str(staging))
                self._save_rng_state(str(staging))
                self._save_own(staging)
            if self.args.should_save:
                self._export_callback_states()
                self.state.save_to_json(str(staging / "trainer_state.json"))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            checkpoint.rotate(final.parent, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _export_callback_states(self) -> None:
        """Stateful callbacks into the trainer's state, as `Trainer._save_checkpoint` does."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                if isinstance(self.state.stateful_callbacks[name], list):
                    self.state.stateful_callbacks[name].append(state)
                else:
                    self.state.stateful_callbacks[name] = state
