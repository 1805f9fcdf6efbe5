"""What stood in front of every question in training: where it stands again, a model answers as it was trained to."""

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
"""In an exported folder: which weights it was made from, the proof, and the opening."""

OPENING = "opening"
"""The opening's key in it."""

_BUILTIN = "builtin:"


def opening(source: ModelSource) -> list[Message]:
    """The messages that every prompt of a model's training began with; none where that is not known.

    Args:
        source: from `find_model`: of a run, a checkpoint, or an exported folder.
    """
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
        said = columns.opening() if isinstance(dataset, str) else []
        return said or _of_task(str(dataset))
    except (PodiumError, TypeError, AttributeError):  # a record that was changed by hand
        return []


def _of_task(dataset: str) -> list[Message]:
    make = TASKS.get(dataset.removeprefix(_BUILTIN)) if dataset.startswith(_BUILTIN) else None
    asked = make()[0][0].get("prompt") if make is not None else None
    return asked[:-1] if isinstance(asked, list) else []


def _exported(source: ModelSource) -> list[Message]:
    if source.folder is None:
        return []
    try:
        said = json.loads((source.folder / RECORD).read_text(encoding="utf-8"))[OPENING]
        return [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in said]
    except (OSError, ValueError, KeyError, TypeError):
        return []
