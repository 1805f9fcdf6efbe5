"""Provenance of a model: the public name of its base, its files and recipe, and the messages its prompts began with.

Names are without local paths and secrets. The opening (system prompt and few-shot examples) is read from the run, or
from an exported folder, so that chatting and serving can use the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.data.columns import Columns
from podium.data.rows import DataSpec, opening_of
from podium.data.sources import is_lines
from podium.errors import PodiumError
from podium.models.builtin import PREFIX, builtin_model
from podium.runs.find_model import ModelSource, portable_name, run_of
from podium.runs.redaction import without_secrets

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model that training started from."""

    name: str
    """A hub id, `builtin:...`, or a folder's own name."""
    hub_id: str | None
    """Its name on the hub, or that of the model it is a copy of; None: a local folder."""

    @property
    def is_copy(self) -> bool:
        """Whether it is a built-in copy, whose weights are rounded to 4 bits."""
        return self.name.startswith(PREFIX)


def base_named(written: str) -> Base:
    """The base that a config names.

    >>> base_named("builtin:smollm2-135m-instruct").hub_id
    'HuggingFaceTB/SmolLM2-135M-Instruct'
    >>> base_named("/home/me/models/mine")
    Base(name='mine', hub_id=None)
    """
    name = portable_name(written)
    if name.startswith(PREFIX):
        return Base(name=name, hub_id=builtin_model(name).hub_id)
    if HUB_ID.fullmatch(name) and not Path(name).exists():
        return Base(name=name, hub_id=name)
    return Base(name=Path(name).name, hub_id=None)


_LOCAL = re.compile(r"""(?:(?<=[\s'"=(\[,])|^)(?:~|\.{0,2}/|[A-Za-z]:\\)[^\s'",;)\]]*""")


def without_folders(value: Any) -> Any:
    """Plain data in which local paths are reduced to their last part, at any depth.

    >>> without_folders({"rewards": ["/home/me/rewards.py:correct"], "dataset": "~/data/x.jsonl", "url": "http://h/v1"})
    {'rewards': ['rewards.py:correct'], 'dataset': 'x.jsonl', 'url': 'http://h/v1'}
    """
    if isinstance(value, Mapping):
        return {str(key): without_folders(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(part) for part in value]
    return _LOCAL.sub(lambda m: re.split(r"[/\\]", m[0].rstrip("/\\"))[-1], value) if isinstance(value, str) else value


def publishable(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe to train again, without secrets and local paths."""
    return without_folders(without_secrets(recipe))


LOCAL_KEYS = ("is_local", "local_files_only", "name_or_path")
"""Keys of a tokenizer's config that depend on the machine it was loaded on."""


def edited(path: Path, **changes: Any) -> bytes:
    """A JSON file with some values replaced; None removes them."""
    values = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    kept = {name: value for name, value in values.items() if value is not None or name not in changes}
    return (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()


Message = dict[str, str]

RECORD = "merge.json"
"""File of an exported folder: digest of the trained weights, the proof, and the opening."""

OPENING = "opening"
"""The opening's key in it."""

TEMPLATE = "chat_template_kwargs"
"""The key of the arguments of the chat template, there and in a recipe."""


def opening(source: ModelSource) -> list[Message]:
    """The messages that every prompt of a model's training began with; empty where that is unknown."""
    run = run_of(source)
    return _exported(source) if run is None else _recorded(run.given)


def template_kwargs(source: ModelSource) -> dict[str, Any]:
    """The arguments of the chat template (`enable_thinking: false`) with which a model's prompts were rendered."""
    run = run_of(source)
    found = _in_record(source).get(TEMPLATE) if run is None else run.given.get(TEMPLATE)
    return dict(found) if isinstance(found, Mapping) else {}


def _recorded(recipe: Mapping[str, Any]) -> list[Message]:
    """By the recipe's `system` and `examples`, or what the rows of a built-in task or of a file begin with."""
    dataset = recipe.get("dataset") or recipe.get("dataset_name")
    try:
        columns = Columns(
            prompt=recipe.get("prompt"),
            answer=recipe.get("answer"),
            system=recipe.get("system"),
            examples=tuple(recipe.get("examples") or ()),
            answer_from=recipe.get("answer_from"),
        )
        if not isinstance(dataset, str):
            return []
        if columns.is_chat or not (dataset.startswith(PREFIX) or is_lines(dataset)):
            return columns.opening()
        return opening_of(DataSpec(dataset=dataset, columns=columns)) or []
    except (PodiumError, TypeError, AttributeError):  # a record that was changed by hand, or data that is gone
        return []


def _exported(source: ModelSource) -> list[Message]:
    try:
        turns = _in_record(source)[OPENING]
        return [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in turns]
    except (KeyError, TypeError):
        return []


def _in_record(source: ModelSource) -> dict[str, Any]:
    """The record (`merge.json`) of an exported folder; empty if there is none or it cannot be read."""
    try:
        found = json.loads((source.folder / RECORD).read_text(encoding="utf-8")) if source.folder else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
