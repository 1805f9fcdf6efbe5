"""A recipe: one flat YAML file, with flags that override it, becomes everything a run needs.

    recipe = load("run.yaml", {"learning_rate": 2e-6})
    trainer = recipe.trainer()

The keys are `GRPOConfig`'s own, `model`, `dataset`, `rewards`, `lora`, and those of a `trl grpo` file. All mistakes are
reported at once, with file and line, before any weight is loaded. Importing this module is cheap; `load` imports
transformers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError
from podium.recipe.document import Document, fail, open_document, shipped_recipes, variables
from podium.recipe.recipe import Recipe

if TYPE_CHECKING:
    from podium.trainer.config import GRPOConfig
    from podium.trainer.trainer import GRPOTrainer

__all__ = ["LoadedRecipe", "Recipe", "arguments_of", "load", "open_document", "shipped_recipes", "trainer_of"]


def arguments_of(recipe: Recipe) -> GRPOConfig:
    """The run's `GRPOConfig`. Raises `ConfigError` for a contradiction, with the line of what is named first."""
    from podium.trainer.config import GRPOConfig, survey

    problems, args = survey(GRPOConfig, recipe.config)
    if problems or args is None:
        raise recipe.placed(problems[0])
    return args


def trainer_of(recipe: Recipe, train_dataset: Any = None, eval_dataset: Any = None, **more: Any) -> GRPOTrainer:
    """The trainer, with its model loaded; datasets are those of the recipe unless given.

    `more` goes to `GRPOTrainer` (callbacks, optimizers, ...).

    Raises:
        PodiumError: settings, rows, rewards or a model that cannot work, before any weight is loaded.
    """
    from podium.trainer.trainer import GRPOTrainer

    if recipe.stages:
        raise ConfigError(
            f"{recipe.name} has {len(recipe.stages)} stages, each with a trainer of its own.",
            fix=f"podium train {recipe.name}, or in Python: podium.Stages.load({recipe.name!r}).train()",
            settings=(recipe.name,),
            name=recipe.name,
            stages_count=len(recipe.stages),
        )
    arguments = arguments_of(recipe)
    if train_dataset is None:
        train_dataset, eval_dataset = recipe.rows or recipe.load_rows()
    return GRPOTrainer(
        model=recipe.model,
        reward_funcs=[spec.function for spec in recipe.rewards],
        args=arguments,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=recipe.peft_config(),
        quantization_config=recipe.quantization_config(),
        **recipe.agents.arguments(),
        **more,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe(Recipe):
    """A recipe with its trainer, for scripts."""

    def arguments(self) -> GRPOConfig:
        """As `arguments_of`."""
        return arguments_of(self)

    def trainer(self, train_dataset: Any = None, eval_dataset: Any = None, **more: Any) -> GRPOTrainer:
        """As `trainer_of`."""
        return trainer_of(self, train_dataset, eval_dataset, **more)


def load(path: str | Path | Document, overrides: Mapping[str, Any] | None = None) -> LoadedRecipe:
    """Read and check a recipe: a YAML file, the name of one that comes with Podium, or a document that was read.

    `overrides` are values by key, as from the command line; they win over the file. `env:` is set in this process.

    Raises:
        ConfigError: with everything that is wrong, each with file and line (or flag).
    """
    document = open_document(path)
    overrides = dict(overrides or {})
    os.environ.update(variables(document, overrides))  # before transformers is imported, which reads some of them once
    from podium.recipe.stages import labelled, survey, whole

    surveyed = survey(document, overrides)
    fail(document.name, labelled(surveyed))
    recipe = whole(document, overrides, surveyed)
    return LoadedRecipe(**{part.name: getattr(recipe, part.name) for part in fields(recipe)})
