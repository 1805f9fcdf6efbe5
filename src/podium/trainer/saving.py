"""Checkpoints of a Trainer that are whole and verified, or not there: see `podium.runs.checkpoint`."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from podium.runs import checkpoint


class StopsOnTerm(TrainerCallback):
    """Ends training after the step in which SIGTERM came, with a checkpoint: as schedulers of jobs ask for it."""

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def listening(self, say: Callable[[str], object]) -> Iterator[None]:
        """Within this context SIGTERM is taken; a second one interrupts at once, as Ctrl-C does."""

        def handle(*_: Any) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True
            say("SIGTERM: a checkpoint is saved after this step, then the run ends. A second one ends it at once.")

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        asked = any(gather_object([self.asked])) if args.world_size > 1 else self.asked
        if asked:
            self.asked = control.should_save = control.should_training_stop = True


class AtomicCheckpointMixin(Trainer):
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

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """As the Trainer, but the hub's token goes into no file, and weights may be read as other files may."""
        folder = Path(output_dir or str(self.args.output_dir))
        token, self.args.hub_token = self.args.hub_token, None
        try:
            staged = folder.name.startswith(checkpoint.STAGING)  # the checkpoint's own message is the better one
            with contextlib.nullcontext() if staged else checkpoint.storing(folder / "model.safetensors"):
                super()._save(output_dir, state_dict=state_dict)
                checkpoint.copy_permissions(folder / "training_args.bin", folder)
        finally:
            self.args.hub_token = token

    def _save_own(self, staging: Path) -> None:
        """What a checkpoint holds beyond the Trainer's."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Everything the Trainer saves, and `_save_own`."""
        self.store_flos()
        final = Path(self._get_output_dir(trial=trial)) / f"{checkpoint.PREFIX}{self.state.global_step}"
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(final)
        barrier = self.accelerator.wait_for_everyone
        with checkpoint.atomic_folder(final, is_main=self.args.should_save, barrier=barrier) as staging:
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
