"""Facts about a run that tests prepare: those of a recipe's settings, with no model, rows or rewards on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from podium.checks import process_as_it_was
from podium.checks.setup import Setup, from_recipe
from podium.checks.table import findings
from podium.data.rows import DataSpec
from podium.errors import Finding
from podium.recipe.document import Document
from podium.recipe.stages import survey

RECIPE = {
    "model": "builtin:smollm2",
    "dataset": "builtin:additions",
    "rewards": ["exact_match"],
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 16,
    "learning_rate": 1e-5,
    "max_steps": 8,
}


def written(text: str = "", **keys: Any) -> str:
    """A recipe with these keys, a line each, and `text` below them; a key that is None is left out."""
    values = {key: value for key, value in {**RECIPE, **keys}.items() if value is not None}
    lines = (yaml.safe_dump({key: value}, default_flow_style=True)[1:-2] + "\n" for key, value in values.items())
    return "".join(lines) + text


def settings_in(document: Document, flags: Mapping[str, Any] | None = None) -> Setup:
    """What is known of a run by its settings alone. Inside `process_as_it_was`."""
    [read] = survey(document, flags or {})
    return from_recipe(replace(read, recipe=replace(read.recipe, model="", data=DataSpec(), rewards=())))


def found_in(document: Document, flags: Mapping[str, Any] | None = None) -> list[Finding]:
    """The findings of settings alone."""
    with process_as_it_was({}):
        return findings(settings_in(document, flags))
