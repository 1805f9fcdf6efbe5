"""Public names of a base model, of files, of a recipe's values: without local paths and secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.models.builtin import PREFIX, builtin_model
from podium.runs.find_model import portable_name
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
        return {str(key): without_folders(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(each) for each in value]
    return _LOCAL.sub(lambda m: re.split(r"[/\\]", m[0].rstrip("/\\"))[-1], value) if isinstance(value, str) else value


def publishable(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe to train again, without secrets and local paths."""
    return without_folders(without_secrets(recipe))
