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

from podium.recipe.document import Document, fail, open_document, shipped_recipes, variables
from podium.recipe.recipe import Recipe

if TYPE_CHECKING:
    from podium.trainer.config import GRPOConfig
    from podium.trainer.trainer import GRPOTrainer

__all__ = ["LoadedRecipe", "Recipe", "load", "open_document", "shipped_recipes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe(Recipe):
    """A recipe with its trainer, for scripts."""

    def arguments(self) -> GRPOConfig:
        """As `recipe.running.arguments_of`."""
        from podium.recipe.running import arguments_of

        return arguments_of(self)

    def trainer(self, train_dataset: Any = None, eval_dataset: Any = None, **more: Any) -> GRPOTrainer:
        """As `recipe.running.trainer_of`."""
        from podium.recipe.running import trainer_of

        return trainer_of(self, train_dataset, eval_dataset, **more)


def load(path: str | Path | Document, overrides: Mapping[str, Any] | None = None) -> LoadedRecipe:
    """Read and check a recipe: a YAML file, the name of one that comes with Podium, or a document that was read.

    `overrides` are values by key, as from the command line; they win over the file. `env:` is set in this process.

    Raises:
        ConfigError: with everything that is wrong, each with file and line (or flag).
    """
    document, overrides = open_document(path), dict(overrides or {})
    os.environ.update(variables(document, overrides))  # before transformers is imported, which reads some of them once
    from podium.recipe.stages import labelled, survey, whole

    surveyed = survey(document, overrides)
    fail(document.name, labelled(surveyed))
    recipe = whole(document, overrides, surveyed)
    return LoadedRecipe(**{each.name: getattr(recipe, each.name) for each in fields(recipe)})
