"""A Trainer whose checkpoints are written as a whole or not at all, and what ends a run with one."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from podium.errors import CheckpointError, LostProcessError
from podium.isolation.machine import drop_if_gone, on_end_signals
from podium.models import adapters
from podium.models.forward import unwrap
from podium.models.stored import load_renamed
from podium.runs import checkpoint
from podium.runs.occupied import NAME
from podium.trainer.processes import lost_process
from podium.trainer.states import save_policy

logger = logging.getLogger(__name__)

SAME_SIGNAL_SECONDS = 5.0
"""A signal so soon after the first is the same: schedulers send it to every process, and launchers pass it on."""


class EndsOnSignal(TrainerCallback):
    """Ends training after the step in which a signal to end came, with a checkpoint, as job schedulers expect.

    Args:
        grace: seconds from the signal until the checkpoint must be written; then the run ends as it is, without one.
            None: a step may take as long as it takes.
    """

    def __init__(self, grace: float | None = None) -> None:
        self.grace = grace
        self.asked = 0
        """Number of the signal that came to this process; 0: none has come."""
        self.agreed = 0
        """The same after the step in which all processes have heard of it: training ends there."""
        self._say: Callable[[str], object] = lambda text: None

    @contextlib.contextmanager
    def listening(self, say: Callable[[str], object]) -> Iterator[None]:
        """Within this context signals to end and Ctrl-C are taken; a later one ends the run at once."""
        first = 0.0
        is_over = threading.Event()

        def end_of_grace() -> None:
            is_over.set()
            os.kill(os.getpid(), self.asked)

        def handle(number: int, frame: Any) -> None:
            nonlocal first
            if is_over.is_set():
                say(f"--grace {self.grace:g} is over: the run ends without a checkpoint of this step.")
                raise KeyboardInterrupt
            if self.asked:
                is_same = number != signal.SIGINT and time.monotonic() - first < SAME_SIGNAL_SECONDS
                if is_same:
                    return
                raise KeyboardInterrupt
            first = time.monotonic()
            self.asked = number
            if self.grace is not None:
                timers.append(threading.Timer(self.grace, end_of_grace))
                timers[0].start()
            for stream in (1, 2) if number == signal.SIGHUP else ():
                drop_if_gone(stream)
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                say(f"{_name(number)}: a checkpoint is saved after this step, then the run ends. {AT_ONCE}")

        self._say = say
        timers: list[threading.Timer] = []
        try:
            with on_end_signals(handle, interrupts=True):
                yield
        finally:
            for timer in timers:
                timer.cancel()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.asked = self.agreed = max(gather_object([self.asked]))
        if self.agreed:
            control.should_save = control.should_training_stop = True
            if args.world_size > 1:  # one whose neighbour was killed gets SIGTERM, too, and comes to no end of a step
                self._say(f"{_name(self.agreed)}: a checkpoint is saved, then the run ends. {AT_ONCE}")


AT_ONCE = "A second one ends it at once."


def _name(number: int) -> str:
    return signal.Signals(number).name


@contextlib.contextmanager
def losses_named(folder: Path) -> Iterator[None]:
    """Within it a lost process ends a run in one message, with the checkpoint in `folder` to go on from."""
    try:
        yield
    except RuntimeError as error:
        if (lost := lost_process(error)) is None:
            raise
        newest = next(iter(checkpoint.checkpoints(folder)), None)
        way = f"to go on from {newest}: the same with resume_from_checkpoint: true"
        again = LostProcessError(lost.what, fix="; ".join(filter(None, (lost.fix, way if newest else ""))))
        again.is_silent = lost.is_silent
        raise again from None


def agreed_checkpoint(folder: Path, asked: str | bool | None) -> str | None:
    """The checkpoint to resume from, as `checkpoint.to_resume_from`: the newest that all processes have.

    Machines may have folders of their own, of which one lacks a checkpoint where the machine was lost while it saved.

    Raises:
        CheckpointError: there is none, or machines have none in common.
    """
    asked = checkpoint.resolve_auto(folder, asked=asked)
    wanted = gather_object([bool(asked)])
    if any(wanted) and not all(wanted):
        raise _nothing_in_common(folder, [rank for rank, wants in enumerate(wanted) if not wants])
    if asked is not True or len(wanted) == 1:
        return checkpoint.to_resume_from(folder, asked=asked)
    until = None
    while True:
        try:
            found = checkpoint.newest(folder, until=until)
        except CheckpointError as error:  # the others wait for what this one has
            logger.warning("%s", error.what)
            found = None
        steps = gather_object([-1 if found is None else checkpoint.step_of(found)])
        if found is not None and len(set(steps)) == 1:
            return str(found)
        if until is None and max(steps) < 0:
            return checkpoint.to_resume_from(folder, asked=True)  # says that there is none, or which are damaged
        until = min(steps)
        if until < 0:
            raise _nothing_in_common(folder, [rank for rank, step in enumerate(steps) if step < 0])


def _nothing_in_common(folder: Path, without: list[int]) -> CheckpointError:
    named = ", ".join(map(str, without))
    return CheckpointError(
        f"No whole checkpoint in {folder} is on all machines; that of process {named} has none.",
        fix="copy the newest one there from another machine; or start without resume_from_checkpoint",
        folder=folder,
        without=without,
    )


def save_where_folders_are_own(args: Any) -> bool:
    """Have each machine write its own checkpoints if `output_dir` is not on a file system that all share.

    Call it once the first process has reserved the folder (`occupying`). Returns whether each machine writes its own.
    """
    gather_object([None])  # until the first process has written who holds it
    file = Path(str(args.output_dir)) / NAME
    holders = gather_object([file.read_text(encoding="utf-8") if file.is_file() else ""])
    if len(set(holders)) == 1:
        return False
    args.save_on_each_node = True
    return True


class AtomicTrainer(Trainer):
    """A Trainer whose checkpoints are staged, flushed and renamed into place; see `podium.runs.checkpoint`."""

    base: adapters.BaseHash | None = None
    """Of the weights under the adapter; None: not made yet, or there is none."""
    best: Path | None = None
    """The checkpoint whose weights were loaded at the end of training, as `load_best_model_at_end` asks."""

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
        """As the Trainer, but the hub's token goes into no file, and weights are as readable as other files."""
        if not self.args.should_save:  # transformers 5.23 comes here on every process, older ones on those that write
            return
        folder = Path(output_dir or str(self.args.output_dir))
        token = self.args.hub_token
        self.args.hub_token = None
        try:
            staged = folder.name.startswith(checkpoint.STAGING)  # the checkpoint's own message is the better one
            with contextlib.nullcontext() if staged else checkpoint.storing(folder / "model.safetensors"):
                if self.base is None:
                    self.base = adapters.base_hash(self.accelerator.unwrap_model(cast(nn.Module, self.model)))
                save_policy(self.model, self.processing_class, folder, base=self.base, state=state_dict)
                torch.save(self.args, folder / "training_args.bin")
                checkpoint.copy_permissions(folder / "training_args.bin", folder)
                if folder.resolve() == Path(str(self.args.output_dir)).resolve():
                    weights = self.state.global_step if self.best is None else checkpoint.step_of(self.best)
                    checkpoint.record_model_step(folder, weights=weights, training=self.state.global_step)
        finally:
            self.args.hub_token = token

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As the Trainer, which leaves out every tensor that has another name in its file than in the model."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_renamed(unwrap(self.model if model is None else model), Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        super()._load_optimizer_and_scheduler(folder)
        self._find_best(folder)

    def _find_best(self, folder: str | None) -> None:
        """Take the best checkpoint from beside the one that is resumed from, as a run may have been moved.

        The Trainer knows it by the path at which it was saved. Where it is gone, the best is that of the steps to come.
        """
        step = self.state.best_global_step
        if folder is None or not step or not self.args.load_best_model_at_end:
            return
        beside = Path(folder).parent / f"{checkpoint.PREFIX}{step}"
        if beside.is_dir():
            self.state.best_model_checkpoint = str(beside)
            return
        logger.warning("%s, the best until now, is not there: the best of the checkpoints to come counts.", beside)
        self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.best = Path(self.state.best_model_checkpoint)
        load_renamed(unwrap(self.model), self.best)
        name = self.args.metric_for_best_model
        value = self.state.best_metric
        logger.info("The best checkpoint was loaded: %s (%s %.4g).", self.best, name, value)

    def _save_own(self, staging: Path) -> None:
        """Files of a checkpoint besides the Trainer's."""

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
                name = type(callback).__name__
                state = callback.state()
                if isinstance(self.state.stateful_callbacks[name], list):
                    self.state.stateful_callbacks[name].append(state)
                else:
                    self.state.stateful_callbacks[name] = state
