"""`podium.Stages`: a run in stages, from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from podium.checks import as_error, check
from podium.data.files import dataset_of
from podium.data.rows import load_data, shaped
from podium.errors import ConfigError, Finding
from podium.recipe import load
from podium.recipe.document import Document, fail
from podium.recipe.recipe import Recipe, Stage
from podium.recipe.stages import STAGES, labelled, survey_stages, whole
from podium.stages.running import StagedRun

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
        rows = [_given({**({} if _NAMED & each.keys() else shared), **each}) for each in stages]
        base = {**_as_list(keys), **({} if train_dataset is None else {"dataset": GIVEN})}
        base[STAGES] = [_as_written(each) for each in stages]
        document = Document(name="stages", folder=Path.cwd(), values=base, lines={})
        surveyed = survey_stages(document, {})
        fail("Stages", labelled(surveyed))
        for each, (train, held_out) in zip(surveyed, rows, strict=True):
            if each.stage is not None and (train is not None or held_out is not None):
                each.stage = replace(each.stage, rows=_rows(each.stage, train, held_out))
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
