"""A run in stages: a trainer for each, one set of weights that goes from one to the next.

    for stage: begin(policy, boundary) -> train -> boundary

A boundary is a complete checkpoint in the stage's folder, and a line in `stages.json` of the run's folder.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import set_seed

from podium.checks import as_error, check
from podium.console.terminal import is_main
from podium.data.files import dataset_of
from podium.data.rows import load_data, shaped
from podium.errors import CheckpointError, ConfigError, Finding
from podium.models import loading
from podium.models.reference import (
    add_reference_adapter,
    copy_to_reference_adapter,
    freeze_reference_adapter,
    has_reference_adapter,
)
from podium.recipe import arguments_of, load
from podium.recipe.document import Document, fail
from podium.recipe.recipe import Recipe, Stage
from podium.recipe.stages import STAGES, labelled, reference_start, schedule_steps, survey_stages, whole
from podium.runs import checkpoint
from podium.runs.occupied import occupying
from podium.runs.recording import RunFolder, final_model, reported, set_aside, set_earlier_run_aside
from podium.runs.redaction import without_secrets
from podium.runs.run import CONFIG
from podium.runs.run import STAGES as RECORD
from podium.stages.trainers import Boundary, StageTrainer, StopConditionCallback, follow_on, sft_trainer, was_met
from podium.trainer.assembly import load_settings
from podium.trainer.checkpointing import EndsOnSignal
from podium.trainer.config import GRPOConfig
from podium.trainer.processes import refuse_sharded_stage
from podium.trainer.snapshot import same_random_numbers
from podium.trainer.trainer import GRPOTrainer

logger = logging.getLogger(__name__)


@dataclass
class StagedRun:
    """One run through all stages of a recipe.

    Attributes:
        callbacks: of each stage's trainer.
        began: called with each stage, its trainer and the checkpoint inside it to go on from, before it trains.
        policy: the weights there are; None before they are loaded.
        stopped: whether a finding ended the run.
    """

    recipe: Recipe
    callbacks: Callable[[Stage], Sequence[TrainerCallback]] = lambda stage: ()
    began: Callable[[Stage, Any, str | None], None] = lambda stage, trainer, inside: None
    policy: Any = None
    tokenizer: PreTrainedTokenizerBase | None = None
    stopped: bool = False
    ended: list[dict[str, Any]] = field(default_factory=list)
    """`steps`, `ended_by` and `checkpoint` of the stages that are done, in order."""

    @property
    def folder(self) -> Path:
        return self.recipe.folder

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.recipe.stages

    def train(self, *, resume_from_checkpoint: str | bool | None = None) -> Any:
        """All stages, or those that are left; the trainer of the last, or None where nothing was left to do.

        Raises:
            CheckpointError: nothing to resume from.
            PodiumError: what a stage's trainer raises.
        """
        with occupying(self.folder) if is_main() else contextlib.nullcontext():
            return self._train(asked=checkpoint.resolve_auto(self.folder, asked=resume_from_checkpoint))

    def _train(self, *, asked: str | bool | None) -> Any:
        for stage in self.stages:
            refuse_sharded_stage(stage.recipe.config)
        inside = self._find_place(asked=asked)
        if self.ended:  # what may have been loaded to look at is where the run began
            self.policy = None
            gc.collect()
        recorded = [entry for entry in _recorded(self.folder) if entry.get("ended_by")]
        if len(self.ended) == len(self.stages) > len(recorded):
            self._save_last()
        self._write()
        trainer = None
        for stage in self.stages[len(self.ended) :]:
            if trainer is not None:
                del trainer
                gc.collect()  # optimizer and reference of the stage before
            trainer = self._trainer(stage)
            self.began(stage, trainer, inside)
            trainer.train(resume_from_checkpoint=inside)
            inside = None
            if isinstance(trainer, GRPOTrainer) and trainer.health.decision == "stop":
                self.stopped = True
                break
            if any(
                isinstance(callback, EndsOnSignal) and callback.agreed
                for callback in trainer.callback_handler.callbacks
            ):
                break  # in the middle of this stage
            self._end(stage, trainer)
        return trainer

    def _find_place(self, *, asked: str | bool | None) -> str | None:
        """Read which stages are done; the checkpoint inside the next one to go on from, if there is one."""
        if not asked:
            if is_main():
                stages = [stage.folder for stage in self.stages]
                set_earlier_run_aside(self.folder, None, self.recipe.model, stages)
            return None
        done = self._done()
        if asked is not True:
            return self._place_of(Path(str(asked)), done)
        self.ended = done
        found = self._newest_inside(self.stages[len(done)]) if len(done) < len(self.stages) else None
        if found is not None and was_met(json.loads((found / "trainer_state.json").read_text(encoding="utf-8"))):
            self.ended.append(_ending(checkpoint.step_of(found), "gate"))  # killed before it could be written down
            return None
        self._set_aside([])
        return None if found is None else str(found)

    def _newest_inside(self, stage: Stage) -> Path | None:
        """The newest checkpoint of a stage that verifies; None: begin the stage again, after those that are done."""
        try:
            found = checkpoint.newest(self.folder / stage.folder)
        except CheckpointError as error:
            if not self.ended:
                raise
            logger.warning("%s Stage %s begins again.", error.what, stage.name)
            return None
        if found is None and not self.ended:
            raise CheckpointError(
                f"There is no checkpoint in {self.folder}. Start without resume_from_checkpoint.",
                settings=("resume_from_checkpoint",),
                folder=self.folder,
            )
        return found

    def _place_of(self, path: Path, done: list[dict[str, Any]]) -> str:
        """A checkpoint that was named: its stage, if those before it are done."""
        numbers = {stage.folder: index for index, stage in enumerate(self.stages)}
        index = numbers.get(path.resolve().parent.name)
        if index is None or path.resolve().parent.parent != self.folder.resolve():
            what = f"{path} is not a checkpoint of a stage of {self.folder}: those are in {', '.join(numbers)}. "
            raise CheckpointError(what + "resume_from_checkpoint=True takes the newest that is whole.")
        if index > len(done):
            raise CheckpointError(f"{path} is of stage {index + 1}, but only {len(done)} stages before it are done.")
        found = str(checkpoint.verified(path))
        self.ended = done[:index]
        step = checkpoint.step_of(path)
        siblings = checkpoint.checkpoints(path.parent)
        later = [sibling for sibling in siblings if checkpoint.step_of(sibling) > step]
        self._set_aside([*later, *(self.folder / stage.folder for stage in self.stages[index + 1 :])])
        return found

    def _done(self) -> list[dict[str, Any]]:
        """The first stages that were recorded as done and whose boundaries verify (the last stage needs none)."""
        done: list[dict[str, Any]] = []
        for stage, entry in zip(self.stages, _recorded(self.folder), strict=False):
            is_last = stage is self.stages[-1]
            known = entry.keys() >= {"folder", "steps", "ended_by", "checkpoint"}
            if not known or entry["folder"] != stage.folder or not entry["ended_by"]:
                break
            wrong = None if is_last else checkpoint.damage(self.folder / stage.folder / entry["checkpoint"])
            if wrong is not None:
                logger.warning("The checkpoint at the end of stage %s cannot be used: %s.", stage.name, wrong)
                break
            done.append({name: entry[name] for name in ("steps", "ended_by", "checkpoint")})
        return done

    def _set_aside(self, paths: Sequence[Path]) -> None:
        """Set paths aside, and with them the final model and the report; nothing where no stage is left to train."""
        if is_main() and len(self.ended) < len(self.stages):
            set_aside(self.folder, [*paths, *reported(self.folder), *final_model(self.folder, self.recipe.model)])

    def load_policy(self) -> Any:
        """The current policy: the model of the recipe, or the result of the last stage that is done."""
        if self.policy is None:
            if self.tokenizer is None:
                self.tokenizer = loading.load_tokenizer(self.recipe.model, None, self._settings)
            self.policy = self._start_of(len(self.ended))
        return self.policy

    def judge(self) -> GRPOTrainer:
        """A trainer as the last stage's around the weights there are, to sample and score held-out prompts."""
        recipe = self.stages[-1].recipe
        idle = {"beta": 0.0, "sync_ref_model": False, "report_to": "none", "output_dir": str(self.folder)}
        idle |= {"async_rollouts": 0, "rollout_device": None, "model_init_kwargs": None}
        rows, held_out = self.stages[-1].load_rows()
        return GRPOTrainer(
            model=self.load_policy(),
            reward_funcs=[spec.function for spec in recipe.rewards],
            args=arguments_of(replace(recipe, config={**recipe.config, **idle})),
            train_dataset=rows,
            eval_dataset=held_out,
            processing_class=self.tokenizer,
            **recipe.agents.arguments(),
        )

    @cached_property
    def _settings(self) -> loading.LoadSettings:
        """Made once, before any trainer: a new `GRPOConfig` takes accelerate's state from a trainer that runs."""
        recipe = self.recipe
        settings = load_settings(arguments_of(recipe), recipe.quantization_config(), recipe.peft_config())
        return replace(settings, needs_reference=False)

    def _start_of(self, index: int) -> Any:
        """The policy at the beginning of a stage, loaded."""
        settings = self._settings
        set_seed(int(self.stages[0].recipe.config.get("seed", 42)))  # a new adapter is random
        boundary = self._boundary(index)
        if boundary is not None and settings.peft_config is None:
            own = {name: value for name, value in settings.init_kwargs.items() if name != "revision"}
            return loading.load_policy(str(boundary.checkpoint), replace(settings, init_kwargs=own))
        policy = loading.load_policy(self.recipe.model, settings)
        if isinstance(policy, PeftModel):
            if any(stage.recipe.config.get("beta") for stage in self.stages):
                add_reference_adapter(policy)
            if boundary is not None:
                trained = policy.active_adapter
                policy.load_adapter(str(boundary.checkpoint), trained, is_trainable=True)
                if has_reference_adapter(policy):
                    policy.load_adapter(str(boundary.checkpoint / "ref"), "ref")
                    policy.set_adapter(trained)
                    freeze_reference_adapter(policy)
        return policy

    def _boundary(self, index: int) -> Boundary | None:
        """Between stage `index` and the one before it."""
        if index == 0:
            return None
        before = self.stages[index - 1]
        return Boundary(checkpoint=self.folder / before.folder / self.ended[index - 1]["checkpoint"])

    def _trainer(self, stage: Stage) -> Any:
        """The stage's trainer, around the weights there are."""
        policy = self.load_policy()
        index = stage.number - 1
        assert self.tokenizer is not None
        rows, held_out = stage.load_rows()
        if stage.kind == "sft":
            callbacks = [StopConditionCallback(stage.until), *self.callbacks(stage)]
            return sft_trainer(stage, policy, self.tokenizer, rows, callbacks)
        if stage.reference == "last_stage" and has_reference_adapter(policy):
            copy_to_reference_adapter(policy)
        boundary = self._boundary(index)
        trainer = StageTrainer(
            model=policy,
            reward_funcs=[spec.function for spec in stage.recipe.rewards],
            args=self._arguments(stage, boundary),
            train_dataset=rows,
            eval_dataset=held_out,
            processing_class=self.tokenizer,
            callbacks=[*self.callbacks(stage)],
            **stage.recipe.agents.arguments(),
            boundary=boundary,
            keeps=stage.kept,
            schedule_steps=schedule_steps(self.stages, index),
        )
        trainer.add_callback(StopConditionCallback(stage.until, lambda: trainer.health.latest))
        trainer.health.config = without_secrets(stage.recipe.given)
        self._set_reference(trainer, index)
        return trainer

    def _arguments(self, stage: Stage, boundary: Boundary | None) -> GRPOConfig:
        arguments = arguments_of(stage.recipe)
        if not any(isinstance(spec.function, str) for spec in stage.recipe.rewards):
            arguments.model_init_kwargs = None  # the policy is loaded; only reward models would ask for them
        if boundary is not None and boundary.product_precision and arguments.product_precision == "auto":
            arguments.product_precision = boundary.product_precision
        return arguments

    def _set_reference(self, trainer: StageTrainer, index: int) -> None:
        """The full copy of a reference that is kept is loaded from where it started; an adapter has brought its own."""
        reference = trainer.run.objective.reference
        start = reference_start(self.stages, index)
        if reference is None or reference.copy is None or start == index:
            return
        boundary = self._boundary(index)
        assert boundary is not None
        if not follow_on(reference, boundary):
            reference.copy = None  # one copy at a time
            gc.collect()
            with same_random_numbers():
                reference.copy = self._start_of(start).eval().requires_grad_(False)
        reference.to(trainer.args.device)

    def _end(self, stage: Stage, trainer: Any) -> None:
        """Leaves the weights, clean, and whatever a resumed run needs."""
        step = trainer.state.global_step
        is_last = stage is self.stages[-1]
        final = self.folder / stage.folder / f"{checkpoint.PREFIX}{step}"
        if not is_last and (not final.is_dir() or checkpoint.damage(final) is not None):
            trainer._save_checkpoint(trainer.model, trial=None)
        self.policy = released(trainer)
        if is_last:
            trainer.save_model(str(self.folder))
        met = any(isinstance(c, StopConditionCallback) and c.met for c in trainer.callback_handler.callbacks)
        self.ended.append(_ending(step, "gate" if met else "bound"))
        self._write()

    def _save_last(self) -> None:
        """The final model of a run that was killed between its last step and this."""
        policy = self.load_policy()
        assert self.tokenizer is not None
        if is_main():
            policy.save_pretrained(str(self.folder))
            self.tokenizer.save_pretrained(str(self.folder))

    def _write(self) -> None:
        """`stages.json` and `config.yaml`: by these the folder reads as one run."""
        if not is_main():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        writer = RunFolder(self.folder)
        entries: list[dict[str, Any]] = []
        for index, stage in enumerate(self.stages):
            until = stage.until.text if stage.until else None
            entry = {"name": stage.name, "folder": stage.folder, "type": stage.kind, "max_steps": stage.max_steps}
            entries.append({**entry, "until": until, **(self.ended[index] if index < len(self.ended) else {})})
        writer.write_json(RECORD, {"stages": entries})
        writer.write_yaml(CONFIG, without_secrets(self.recipe.given))


def _ending(step: int, ended_by: str) -> dict[str, Any]:
    return {"steps": step, "ended_by": ended_by, "checkpoint": f"{checkpoint.PREFIX}{step}"}


def _recorded(folder: Path) -> list[Mapping[str, Any]]:
    try:
        return [dict(entry) for entry in json.loads((folder / RECORD).read_text(encoding="utf-8"))["stages"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{folder / RECORD} cannot be read. Start without resume_from_checkpoint.") from None


def released(trainer: Any) -> Any:
    """The trained model without what a trainer has put on it."""
    policy = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    policy.zero_grad()
    if getattr(policy, "is_gradient_checkpointing", False):
        policy.gradient_checkpointing_disable()
        policy.config.use_cache = True
    for module in policy.modules():  # TRL's SFT puts a forward of its own on the model
        if isinstance(module, nn.Module) and getattr(module.__dict__.get("forward"), "__self__", None) is module:
            del module.__dict__["forward"]
    return policy


# ---- from Python ----

GIVEN = "train_dataset"
"""In place of a dataset's name, where rows are given."""
_NAMED = {"dataset", "dataset_name", "datasets"}
"""Keys of a stage that loads its rows by name."""


class Stages:
    """A run in stages.

        run = podium.Stages(
            [
                {"name": "format", "rewards": [in_tags], "until": "rewards/in_tags/mean >= 0.9", "max_steps": 50},
                {"name": "correctness", "rewards": [in_tags, right], "max_steps": 200, "learning_rate": 1e-6},
            ],
            model="Qwen/Qwen2.5-0.5B-Instruct",
            train_dataset=rows,
            output_dir="runs/two",
            num_generations=8,
        )
        run.train()

    Args:
        stages: a mapping each, with the keys that `stages:` of a recipe has; `rewards` may hold functions, and
            `train_dataset`, `eval_dataset` rows of their own.
        train_dataset: rows for all stages that bring none; or `dataset=` with a name, as in a recipe.
        eval_dataset: held-out rows.
        callbacks: of every stage's trainer.
        **keys: the keys of a recipe that stand beside `stages`: `model` (a name or a folder, as a later stage may have
            to load it again), `lora`, and those of `GRPOConfig`.

    Raises `ConfigError` with everything that is wrong with the settings, and `DataError` where the keys about rows do
    not fit rows that are given; `train` reports problems in the rows themselves.
    """

    def __init__(
        self,
        stages: Sequence[Mapping[str, Any]],
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[Any] = (),
        **keys: Any,
    ) -> None:
        if not isinstance(keys.get("model"), str):
            raise ConfigError(
                "Stages: `model` must be a name or a folder: a later stage may have to load it again.",
                settings=("model",),
            )
        shared = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        rows = [_given({**({} if _NAMED & stage.keys() else shared), **stage}) for stage in stages]
        base = {**_as_list(keys), **({} if train_dataset is None else {"dataset": GIVEN})}
        base[STAGES] = [_as_written(stage) for stage in stages]
        document = Document(name="stages", folder=Path.cwd(), values=base, lines={})
        surveyed = survey_stages(document, {})
        fail("Stages", labelled(surveyed))
        for part, (train, held_out) in zip(surveyed, rows, strict=True):
            if part.stage is not None and (train is not None or held_out is not None):
                part.stage = replace(part.stage, rows=_rows(part.stage, train, held_out))
        self._use(whole(document, {}, surveyed), callbacks)

    @classmethod
    def load(
        cls, path: str | Path, overrides: Mapping[str, Any] | None = None, callbacks: Sequence[Any] = ()
    ) -> Stages:
        """The stages of a recipe: a YAML file, or the name of one that comes with Podium.

        Raises:
            ConfigError: it has no stages, or something is wrong with it.
        """
        recipe = load(path, overrides)
        if not recipe.stages:
            raise ConfigError(f"{path} has no `stages`. In Python: podium.recipe.load({str(path)!r}).trainer()")
        made = cls.__new__(cls)
        made._use(recipe, callbacks)
        return made

    def _use(self, recipe: Recipe, callbacks: Sequence[Any]) -> None:
        self.recipe = recipe
        self.run = StagedRun(recipe, callbacks=lambda stage: callbacks)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, resolved."""
        return self.recipe.stages

    def check(self) -> list[Finding]:
        """Findings of all stages, errors first; nothing heavy is loaded."""
        return check(self.recipe)

    def train(self, *, resume_from_checkpoint: str | bool | None = None) -> Any:
        """Run all stages, or those that are left; the trainer of the last one that ran.

        Raises:
            ConfigError: an error that `check` finds, before any weight is loaded.
            PodiumError: what a stage's trainer raises.
        """
        if wrong := [finding for finding in self.check() if finding.severity == "error"]:
            raise as_error(self.recipe.name, wrong)
        return self.run.train(resume_from_checkpoint=resume_from_checkpoint)


def _given(values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Rows that are given; None: they have a name, or there are none."""
    held_out = values.get("eval_dataset")
    return values.get("train_dataset"), None if isinstance(held_out, str) else held_out


def _as_written(stage: Mapping[str, Any]) -> dict[str, Any]:
    """The stage as a recipe has it, with names in place of rows."""
    rows = {"train_dataset"} | ({"eval_dataset"} if not isinstance(stage.get("eval_dataset"), str) else set())
    values = {key: value for key, value in _as_list(stage).items() if key not in rows}
    return values if stage.get("train_dataset") is None else {"dataset": GIVEN, **values}


def _as_list(values: Mapping[str, Any]) -> dict[str, Any]:
    """One reward function alone is a list of one."""
    rewards = values.get("rewards")
    return {**values, "rewards": [rewards]} if callable(rewards) else dict(values)


def _rows(stage: Stage, train: Any, held_out: Any) -> tuple[Any, Any]:
    """A stage's rows where some are given, as its keys make them. Raises `DataError`."""
    spec = stage.recipe.data
    if train is not None:
        spec = replace(spec, dataset=_dataset(train))
    if held_out is None:
        return load_data(spec)
    loaded = load_data(replace(spec, eval_dataset=None, held_out=None, use_test_split="no"))
    if isinstance(held_out, Mapping):
        return loaded.train, {name: shaped(_dataset(rows), spec.columns, name) for name, rows in held_out.items()}
    return loaded.train, shaped(_dataset(held_out), spec.columns, "eval_dataset")


def _dataset(rows: Any) -> Any:
    return dataset_of(rows) if isinstance(rows, list) else rows
