"""Checkpoints of a run: written atomically, with everything that training continues from, and read back.

Besides the Trainer's own files: numpy arrays, safetensors and JSON, of which nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from peft import PeftModel
from safetensors.torch import load_model, save_model
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from podium.algorithm.losses import EntropyControl
from podium.errors import CheckpointError, LostProcessError, way_on
from podium.isolation.machine import drop_if_gone, on_end_signals
from podium.models import digests, loading
from podium.models.forward import base_model, unwrap
from podium.models.precision import ProductPrecision
from podium.models.whole import load_renamed
from podium.records import Call, Completion, Group, Prompt, Sample, ScoredGroup, Turn
from podium.rewards.adaptive import AdaptiveWeights
from podium.runs import checkpoint
from podium.runs.find_model import ModelSource
from podium.runs.shipping import CARD, base_named, model_card, one_message
from podium.trainer import resume
from podium.trainer.health import Health
from podium.trainer.processes import Processes, lost_process
from podium.trainer.resume import REFERENCE, STATE
from podium.trainer.rollouts import Rollouts, make_prompt, round_prompts
from podium.trainer.rounds import Measurements, MicroBatch, Plan, Round, RoundKey, SampledRound
from podium.trainer.run import TrainingRun
from podium.trainer.states import save_policy

logger = logging.getLogger(__name__)

FORMAT = 5
"""Version of `round-*.npz` and `ahead-*.npz`."""


SAME_SIGNAL_SECONDS = 5.0
"""A signal so soon after the first is the same: schedulers send it to every process, and launchers pass it on."""


class StopsOnTerm(TrainerCallback):
    """Ends training after the step in which SIGTERM or SIGHUP came, with a checkpoint, as job schedulers expect."""

    def __init__(self) -> None:
        self.asked = 0
        """Number of the signal that came to this process; 0: none has come."""
        self.agreed = 0
        """The same after the step in which all processes have heard of it: training ends there."""
        self._say: Callable[[str], object] = lambda text: None

    @contextlib.contextmanager
    def listening(self, say: Callable[[str], object]) -> Iterator[None]:
        """Within this context both are taken; a later one interrupts at once, as Ctrl-C does."""
        first = 0.0

        def handle(number: int, frame: Any) -> None:
            nonlocal first
            if self.asked:
                if time.monotonic() - first < SAME_SIGNAL_SECONDS:
                    return
                raise KeyboardInterrupt
            first = time.monotonic()
            self.asked = number
            for stream in (1, 2) if number == signal.SIGHUP else ():
                drop_if_gone(stream)
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                say(f"{_name(number)}: a checkpoint is saved after this step, then the run ends. {AT_ONCE}")

        self._say = say
        with on_end_signals(handle):
            yield

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


class AtomicCheckpointMixin(Trainer):
    """A Trainer whose checkpoints are staged, flushed and renamed into place; see `podium.runs.checkpoint`."""

    base: digests.BaseHash | None = None
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
                    self.base = digests.base_hash(self.accelerator.unwrap_model(cast(nn.Module, self.model)))
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


class CheckpointMixin(AtomicCheckpointMixin):
    """Checkpoints of GRPO: rounds, reference and controllers; parts of weights where those are sharded."""

    processes: Processes
    rollouts: Rollouts
    health: Health
    round: Round | None
    entropy: EntropyControl
    weights: AdaptiveWeights
    _random_numbers_in: str | None
    """A checkpoint whose random state is still to be loaded."""
    _others_state: frozenset[str]
    """Changed settings for which the states of optimizer and schedule in the checkpoint are not loaded."""

    @property
    def run(self) -> TrainingRun:
        raise NotImplementedError

    # ---- saving ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer; from sharded weights, too, whatever accelerate's `state_dict_type` is."""
        if self.processes.division != "fsdp2":
            super().save_model(output_dir, _internal_call)
            return
        state = self.processes.full_state(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Iterable[str] | None = None,
        **metadata: Any,
    ) -> None:
        """TRL's: README.md in `output_dir`. It is the card of `podium push`.

        `metadata`: other keys that the hub reads, as `license`, and those of `transformers.Trainer`'s method.
        """
        if not self.is_world_process_zero():
            return
        renamed = {"finetuned_from": "base_model", "dataset": "datasets", "dataset_tags": "datasets"}
        policy = self.accelerator.unwrap_model(cast(nn.Module, self.model))
        folder = Path(str(self.args.output_dir))
        given = self.run.policy.source
        base = given if isinstance(given, str) else base_model(policy).config._name_or_path or type(given).__name__
        adapter = folder if isinstance(policy, PeftModel) else None
        text = model_card(
            ModelSource(base=base if adapter else str(folder), adapter=adapter),
            address=self.hub_model_id or folder.name,
            base=base_named(base),
            title=model_name,
            metadata={
                "tags": tags if tags is None or isinstance(tags, str) else list(tags),
                "datasets": dataset_name,
                **{renamed.get(name, name): value for name, value in metadata.items()},
            },
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CARD).write_text(text, encoding="utf-8")

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer, with `create_model_card`'s arguments. Raises `HubError`."""
        with one_message(self.args.hub_model_id or Path(str(self.args.output_dir)).name):
            return super().push_to_hub(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As the Trainer; where weights are sharded, every process writes its own part of all that moves."""
        if self.processes.division != "fsdp2":
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.processes.save_parts(Path(output_dir), self.model, self.optimizer, self.run.objective.reference)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """With the prefetched round: once it is scored, reward functions draw no random numbers meanwhile."""
        self.rollouts.wait()
        super()._save_checkpoint(model, trial)

    def _save_own(self, staging: Path) -> None:
        """This process's rounds; on the first process also what all share."""
        rank = self.args.process_index
        reference = self.run.objective.reference
        precision = self.run.policy.forward.precision
        for name, record in (("round", self.round), ("ahead", self.rollouts.wait())):
            if record is not None:
                arrays: dict[str, Any] = to_arrays(record)
                np.savez(staging / f"{name}-{rank}.npz", **arrays)
        if rank:
            return
        contents = {
            "entropy": {k: x if math.isfinite(x) else None for k, x in dataclasses.asdict(self.entropy).items()},
            "reward_weights": self.weights.to_json(),
            "bfloat16_products": precision.enabled if isinstance(precision, ProductPrecision) else None,
            "plan": _arithmetic(self.run.plan),
            "made_of": self.health.made_of,
        }
        (staging / STATE).write_text(json.dumps(contents))
        if reference is not None and reference.moved and not self.processes.sharded:
            assert reference.copy is not None
            save_model(reference.copy, str(staging / REFERENCE))

    # ---- loading ----

    def _refuse_others(self, found: Path) -> None:
        """Raise `CheckpointError` where this run cannot continue from a checkpoint; log the changes since it."""
        self.processes.check_parts(found)
        with resume.readable(str(found), "trainer_state.json"):
            TrainerState.load_from_json(str(found / "trainer_state.json"))
        with resume.readable(str(found), STATE):
            differences = list(resume.differences(found, self.health.made_of))
        for finding in differences:
            if self.health.overrules(finding):
                self._others_state |= finding.changes.keys()
            elif finding.severity == "error":
                raise CheckpointError(
                    f"{finding.what}.", code=finding.code, fix=way_on(finding), findings=[finding], what=finding.what
                )
            elif self.is_world_process_zero():
                logger.warning("%s; %s.", finding.what, finding.why)

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        with resume.readable(folder, "optimizer and schedule"):
            if folder is not None and self.processes.division == "fsdp2":
                self.processes.load_optimizer(Path(folder), self.optimizer)
                self.lr_scheduler.load_state_dict(torch.load(Path(folder) / "scheduler.pt", weights_only=True))
            elif self._others_state & {*resume.OF_OPTIMIZER}:
                logger.warning("The optimizer and its schedule begin anew: %s holds those of another kind.", folder)
            else:
                super()._load_optimizer_and_scheduler(folder)
        self._find_best(folder)
        if folder is not None and not self._others_state & {*resume.OF_OPTIMIZER}:
            resume.apply_settings(Path(folder), self.args, self.optimizer, self.lr_scheduler)
        if folder is not None:
            with resume.readable(folder, STATE):
                self._load_own(Path(folder))
            self._random_numbers_in = folder
            self.health.slow_down(self.optimizer, self.lr_scheduler)

    def _load_own(self, folder: Path) -> None:
        """Read what `_save_own` wrote; a checkpoint of another trainer has none of it and changes nothing.

        The precision is restored as well: a resumed run must compute as it did, whatever would be measured now.
        """
        self.round = None
        rank = self.args.process_index
        reference = self.run.objective.reference
        if not (folder / STATE).is_file():
            return
        saved = json.loads((folder / STATE).read_text())
        if saved["bfloat16_products"] is not None and isinstance(self.run.policy.forward.precision, ProductPrecision):
            self.run.policy.forward.precision.enabled = saved["bfloat16_products"]
        if reference is not None and (folder / REFERENCE).is_file():
            assert reference.copy is not None
            load_model(reference.copy, str(folder / REFERENCE))
            reference.moved = True
        self.entropy = EntropyControl(**{k: math.inf if v is None else v for k, v in saved["entropy"].items()})
        self.weights = self.weights.restored(saved.get("reward_weights", {}))
        saved_round, ahead = (folder / f"{name}-{rank}.npz" for name in ("round", "ahead"))
        if not saved_round.is_file() or _replanned(saved["plan"], _arithmetic(self.run.plan), folder):
            return
        with np.load(saved_round, allow_pickle=False) as arrays:
            self.round = from_arrays(dict(arrays), self._prompt)
        if self.args.async_rollouts and ahead.is_file():
            with np.load(ahead, allow_pickle=False) as arrays:
                self.rollouts.restore(from_arrays(dict(arrays), self._prompt))

    def _prompt(self, key: RoundKey, id: int, index: int) -> Prompt:
        """A prompt that was drawn before; rows of a stream (index -1) are found by their place in the round."""
        if index < 0:
            return round_prompts(self.run, key, [id])[0]
        return make_prompt(self.run, self.run.rows.order.dataset[index], id, index)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Once and before the first rollouts, as reward functions may draw, too; the Trainer would load them after."""
        if checkpoint is not None and checkpoint == self._random_numbers_in:
            self._random_numbers_in = None
            with resume.readable(checkpoint, "random numbers"):
                super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """As the Trainer; one of a run in float16 is of no use to a run without loss scaling."""
        if self.accelerator.scaler is not None:
            with resume.readable(checkpoint, "loss scaling"):
                super()._load_scaler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As the Trainer, which leaves out the trained adapter where a second one lies in a folder of its own."""
        policy = self.model if model is None else model
        if self.processes.division == "fsdp2":
            self.processes.load_weights(Path(resume_from_checkpoint), policy, self.run.objective.reference)
            return
        with resume.readable(resume_from_checkpoint, "weights"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if loading.has_reference_adapter(policy) and (Path(resume_from_checkpoint) / "adapter_config.json").is_file():
            cast(Any, policy).load_adapter(resume_from_checkpoint, "default", is_trainable=True)
            loading.freeze_reference_adapter(policy)


def _arithmetic(plan: Plan) -> dict[str, int]:
    """The part of the plan that all ranks share."""
    return {**{name: value for name, value in dataclasses.asdict(plan).items() if name != "rank"}, "format": FORMAT}


def _replanned(saved: dict[str, int], now: dict[str, int], folder: Path) -> bool:
    """Whether rounds are cut differently than when the checkpoint was written, so that its round cannot be used."""
    changed = [f"{name} {saved.get(name)} -> {value}" for name, value in now.items() if saved.get(name) != value]
    if changed:
        logger.warning(
            "%s was written with other batch settings (%s): its generation round is drawn again, so the run will not "
            "be bit-equal to one that was never stopped.",
            folder.name,
            ", ".join(changed),
        )
    return bool(changed)


# ---- rounds as arrays ----

_SAVED = (Round, RoundKey, MicroBatch, Sample, SampledRound, Measurements, ScoredGroup, Group, Completion)
_RECORDS: Mapping[str, type] = {record.__name__: record for record in _SAVED}


_PLAIN: Mapping[type, Callable[[Any], dict[str, Any]]] = {
    Prompt: lambda x: {"prompt": [x.id, x.row, x.token_ids, x.text, x.content]},
    Turn: lambda x: {"turn": dataclasses.asdict(x)},
}
"""Records that are plain data all through. What an environment added to a prompt is not in its row."""


def _own_prompt(token_ids: Sequence[int], text: str, content: Any) -> dict[str, Any]:
    return {"token_ids": tuple(token_ids), "text": text, "content": content}


def _turn(fields: Mapping[str, Any]) -> Turn:
    calls = tuple(Call(**call) for call in fields["calls"])
    return Turn(**{**fields, "calls": calls, "replies": tuple(fields["replies"])})


def saved_fields(record: Any) -> list[str]:
    """Names of the fields of a record that a checkpoint has."""
    return [field.name for field in dataclasses.fields(record) if field.metadata.get("saved", True)]


def to_arrays(record: Round | SampledRound) -> dict[str, np.ndarray]:
    """A round as JSON with the numbers of its arrays beside it. Prompts are saved by id and row, and made again."""
    flat: dict[str, list[np.ndarray]] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            flat.setdefault(value.dtype.name, []).append(value.ravel())
            return {"array": [value.dtype.name, *value.shape]}
        if type(value) in _PLAIN:
            return _PLAIN[type(value)](value)
        if type(value).__name__ in _RECORDS:
            names = getattr(value, "_fields", None) or saved_fields(value)
            return {type(value).__name__: {name: plain(getattr(value, name)) for name in names}}
        if isinstance(value, Mapping):
            return {"columns": dict(value)}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return value.item() if isinstance(value, np.generic) else value

    text = json.dumps(plain(record), default=str)
    joined = {name: np.concatenate(arrays) for name, arrays in flat.items()}
    return {"json": np.frombuffer(text.encode(), np.uint8), **joined}


def from_arrays(arrays: Mapping[str, np.ndarray], prompt: Callable[[RoundKey, int, int], Prompt]) -> Any:
    """The inverse of `to_arrays`. `prompt` makes a prompt of a round from its id and row."""
    read = dict.fromkeys(arrays, 0)
    contents = json.loads(arrays["json"].tobytes())
    [fields] = contents.values()
    key = RoundKey(**fields["key"]["RoundKey"])

    made: Mapping[str, Callable[[Any], Any]] = {
        "prompt": lambda inside: dataclasses.replace(prompt(key, *inside[:2]), **_own_prompt(*inside[2:])),
        "turn": _turn,
        "columns": lambda inside: {name: tuple(values) for name, values in inside.items()},
    }

    def record(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(record, value))
        if not isinstance(value, dict):
            return value
        [(kind, inside)] = value.items()
        if kind == "array":
            name, *shape = inside
            start = read[name]
            read[name] = read[name] + math.prod(shape)
            return arrays[name][start : read[name]].reshape(shape)
        if kind in made:
            return made[kind](inside)
        return _RECORDS[kind](**{name: record(each) for name, each in inside.items()})

    return record(contents)
