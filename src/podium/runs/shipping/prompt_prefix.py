"""The system prompt and few-shot examples of training, so that chatting and serving can use the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from podium.data.columns import Columns
from podium.data.tasks import TASKS
from podium.errors import PodiumError
from podium.runs.find_model import ModelSource, run_of

Message = dict[str, str]

RECORD = "merge.json"
"""File of an exported folder: digest of the trained weights, the proof, and the opening."""

OPENING = "opening"
"""The opening's key in it."""


def opening(source: ModelSource) -> list[Message]:
    """The messages that every prompt of a model's training began with; empty where that is unknown."""
    run = run_of(source)
    return _exported(source) if run is None else _recorded(run.given)


def _recorded(recipe: Mapping[str, Any]) -> list[Message]:
    """By the recipe's `system` and `examples`, or the built-in task's own messages."""
    dataset = recipe.get("dataset") or recipe.get("dataset_name")
    try:
        columns = Columns(
            prompt=recipe.get("prompt"),
            answer=recipe.get("answer"),
            system=recipe.get("system"),
            examples=tuple(recipe.get("examples") or ()),
        )
        messages = columns.opening() if isinstance(dataset, str) else []
    except (PodiumError, TypeError, AttributeError):  # a record that was changed by hand
        return []
    prefix, _, task = str(dataset).partition(":")
    if messages or prefix != "builtin" or task not in TASKS:
        return messages
    prompt = TASKS[task]()[0][0].get("prompt")
    return prompt[:-1] if isinstance(prompt, list) else []


def _exported(source: ModelSource) -> list[Message]:
    if source.folder is None:
        return []
    try:
        said = json.loads((source.folder / RECORD).read_text(encoding="utf-8"))[OPENING]
        return [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in said]
    except (OSError, ValueError, KeyError, TypeError):
        return []
