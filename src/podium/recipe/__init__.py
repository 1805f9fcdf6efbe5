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
from pathlib import Path
from typing import Any

from podium.recipe.document import Document, fail, open_document, shipped_recipes, variables
from podium.recipe.recipe import Recipe

__all__ = ["Recipe", "load", "open_document", "shipped_recipes"]


def load(path: str | Path | Document, overrides: Mapping[str, Any] | None = None) -> Recipe:
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
    return whole(document, overrides, surveyed)
