"""A recipe: one flat YAML file, with flags that override it, becomes everything a run needs.

    recipe = load("run.yaml", {"learning_rate": 2e-6})
    trainer = recipe.trainer()

The keys are `GRPOConfig`'s own, `model`, `dataset`, `rewards`, `lora`, and whatever a `trl grpo` file may have. What
is wrong is all said at once, with file and line, before any weight is loaded. Importing this module is cheap; `load`
imports transformers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.data.loading import DataSpec
from podium.errors import ConfigError, did_you_mean
from podium.recipe.document import Document, read_document

if TYPE_CHECKING:
    from podium.recipe.rewards import RewardSpec
    from podium.recipe.stage import Stage
    from podium.trainer.config import GRPOConfig
    from podium.trainer.trainer import GRPOTrainer

SHIPPED = Path(__file__).parent / "recipes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a run needs, checked; nothing heavy is loaded yet."""

    name: str
    """As the user wrote it, for messages."""
    model: str
    model_settings: Mapping[str, Any]
    """Arguments of `from_pretrained`: revision, dtype, attn_implementation."""
    data: DataSpec
    rewards: tuple[RewardSpec, ...]
    lora: Mapping[str, Any] | None
    """Arguments of peft's `LoraConfig`."""
    quantization: Mapping[str, Any] | None
    """Arguments of `BitsAndBytesConfig`."""
    config: Mapping[str, Any]
    """Arguments of `GRPOConfig`."""
    resume: str | bool | None = None
    accuracy: str | None = None
    """Name of the reward that says right (at least 1) or wrong; None: the one that sounds like it."""
    eval_samples: int = 4
    """Completions per held-out prompt, before and after."""
    eval_temperature: float | None = None
    """Of those completions; None: as in training."""
    eval_rows: int = 200
    """Most held-out prompts that are looked at, before and after."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Where each key was set: `run.yaml:7`, or `--flag`."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """The keys and values as written, flags included: what `config.yaml` in the run's folder holds."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Those of `given` that nobody wrote."""
    stages: tuple[Stage, ...] = ()
    """The parts of a run in stages, in order; the other fields are then those of the last, by which it is judged."""

    def arguments(self) -> GRPOConfig:
        """The run's `GRPOConfig`.

        Raises:
            ConfigError: two settings that do not go together, with the line of the one that is named first.
        """
        from podium.trainer.config import GRPOConfig

        try:
            return GRPOConfig(**self.config)
        except ConfigError as error:
            what, code = f"{self.place_of(str(error))}: {error.what}", error.code or "C030"
            raise ConfigError(what, code=code, fix=error.fix) from error
        except ValueError as error:
            raise ConfigError(f"{self.place_of(str(error))}: {error}", code="C030") from error

    def place_of(self, message: str) -> str:
        """Where the first argument of `GRPOConfig` that a message mentions was set."""
        words = (word for word in re.findall(r"\w+", message) if word in self.config)
        return next((self.places[word] for word in words if word in self.places), self.name)

    def trainer(self, train_dataset: Any = None, eval_dataset: Any = None, **more: Any) -> GRPOTrainer:
        """The trainer, with its model loaded; datasets are those of the recipe unless given.

        `more` goes to `GRPOTrainer` (callbacks, optimizers, ...).

        Raises:
            PodiumError: settings, rows, rewards or a model that cannot work, before any weight is loaded.
        """
        from podium.data.loading import load_data
        from podium.trainer.trainer import GRPOTrainer

        if self.stages:
            raise ConfigError(
                f"{self.name} has {len(self.stages)} stages, each with a trainer of its own.",
                fix=f"podium train {self.name}, or in Python: podium.Stages.load({self.name!r}).train()",
            )
        arguments = self.arguments()
        if train_dataset is None:
            train_dataset, eval_dataset = load_data(self.data)
        return GRPOTrainer(
            model=self.model,
            reward_funcs=[spec.function for spec in self.rewards],
            args=arguments,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            peft_config=self.peft_config(),
            quantization_config=self.quantization_config(),
            **more,
        )

    def peft_config(self) -> Any:
        """`LoraConfig`, or None. Raises `ConfigError`."""
        if self.lora is None:
            return None
        from peft import LoraConfig

        try:
            return LoraConfig(**{"task_type": "CAUSAL_LM", **self.lora})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name}: `lora`: {error}", code="C003") from error

    def quantization_config(self) -> Any:
        """`BitsAndBytesConfig`, or None."""
        if self.quantization is None:
            return None
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(**self.quantization)


def load(path: str | Path | Document, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read and check a recipe: a YAML file, the name of one that comes with Podium, or a document that was read.

    `overrides` are values by key, as from the command line; they win over the file. `env:` is set in this process.

    Raises:
        ConfigError: with everything that is wrong, each with file and line (or flag).
    """
    document = open_document(path)
    overrides = dict(overrides or {})
    for variables in (document.values.get("env"), overrides.get("env")):
        if isinstance(variables, Mapping):  # before transformers is imported, which reads some of them once
            os.environ.update({str(key): str(value) for key, value in variables.items()})
    from podium.recipe.reading import read
    from podium.recipe.stage import is_staged, read_stages

    return read_stages(document, overrides) if is_staged(document) else read(document, overrides)


def open_document(path: str | Path | Document) -> Document:
    """The YAML file at `path`, or the shipped recipe of that name.

    Raises:
        ConfigError: neither is there.
    """
    if isinstance(path, Document):
        return path
    file = Path(path).expanduser()
    if file.is_file():
        return read_document(file, str(path))
    shipped = shipped_recipes()
    if str(path) in shipped:
        return read_document(shipped[str(path)], f"{path}.yaml")
    if file.is_dir():
        raise ConfigError(f"{path} is a folder; a recipe is a YAML file.", fix=_run_hint(file))
    beside = sorted(entry.name for entry in file.parent.glob("*.y*ml")) if file.parent.is_dir() else []
    near = did_you_mean(file.name, [*beside, *shipped]) or did_you_mean(f"{file.name}.yaml", beside)
    what = f"There is no recipe {path}. Recipes that come with Podium: {', '.join(shipped)}."
    raise ConfigError(what, fix=near or "the path of a YAML file that is there, or one of these names")


def _run_hint(folder: Path) -> str:
    return f"Did you mean `{folder / 'config.yaml'}`?" if (folder / "config.yaml").is_file() else ""


def shipped_recipes() -> dict[str, Path]:
    """Name and file of every recipe that comes with the package."""
    return {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}
