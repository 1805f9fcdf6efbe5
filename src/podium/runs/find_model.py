"""Resolves a model's name on the command line (a run, a model's folder, a hub id, `builtin:...`) and loads it.

source = find_model("runs/quickstart")
model, tokenizer = load_model(source)
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import ModelError
from podium.models.builtin import name_of_copy, resolve_model
from podium.models.check import check_model_name, not_loadable, reading
from podium.runs.checkpoint import PREFIX, checkpoints, model_step, step_of
from podium.runs.run import RECORD, Run

if TYPE_CHECKING:
    import torch

    from podium.models.adapters import Origin

ADAPTER = "adapter_config.json"
MERGED = "merged"
"""Subfolder of an adapter's folder with the merged model, for servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The location of weights."""

    base: str
    """Argument of `from_pretrained`: the folder or hub id of the model, or of the adapter's base."""
    adapter: Path | None = None
    """A folder with an adapter to put on it."""
    ignored: frozenset[str] = frozenset()
    """Codes of refusals that the user overrules."""

    @property
    def folder(self) -> Path | None:
        """The local folder of what was trained; None: it is on the hub."""
        folder = self.adapter or Path(self.base)
        return folder if folder.is_dir() else None

    @property
    def tokenizer(self) -> str:
        """The place of the tokenizer: beside the adapter if one was saved there, else the base."""
        own = self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file()
        return str(self.adapter) if own else self.base

    @property
    def processor(self) -> str:
        """The place of the processor of images: beside the adapter if one was saved there, else the base."""
        own = self.adapter is not None and any(self.adapter.glob("*processor_config.json"))
        return str(self.adapter) if own else self.base


def find_model(name: str, *, base: str | None = None, ignore: Collection[str] | None = None) -> ModelSource:
    """Find a model without loading it. A run's folder stands for its final model, else for its newest checkpoint.

    A checkpoint that is newer than the final model goes before it: the run was resumed, and has not ended again.

    Args:
        name: a run's folder, a checkpoint, a model's or adapter's folder, a hub id, `builtin:...`.
        base: an adapter's base, in place of the one that PEFT recorded.
        ignore: codes of refusals of an adapter on its base that are overruled.

    Raises:
        ModelError: no model there, or not a language model.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        folder = _saved(folder)
        name = str(folder)
    if (folder / ADAPTER).is_file():
        return ModelSource(base=_base_of(folder, base), adapter=folder, ignored=frozenset(ignore or ()))
    check_model_name(name)
    return ModelSource(base=resolve_model(name))


def _saved(folder: Path) -> Path:
    """The first of the folder itself and its checkpoints, newest first, that holds a model; else the folder."""
    final = model_step(folder)
    saved = checkpoints(folder)
    newer = [place for place in saved if final is not None and step_of(place) > final[1]]
    for place in (*newer, folder, *saved):
        if any((place / file).is_file() for file in ("config.json", ADAPTER)):
            return place
    if _is_run(folder):
        raise ModelError(
            f"The run {folder} has saved no model: it has neither a final one nor a checkpoint.",
            code="M016",
            fix="Wait for its first checkpoint, or train it to the end (`save_steps` says how often one is written).",
            folder=folder,
        )
    return folder


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RECORD)


def run_of(source: ModelSource) -> Run | None:
    """The run of a model: its own folder, or the one that contains its checkpoint or merged model."""
    if source.folder is None:
        return None
    folder = source.folder.resolve()
    while folder.name == MERGED or folder.name.startswith(PREFIX):
        folder = folder.parent
    return Run(folder=folder) if _is_run(folder) else None


def _base_of(adapter: Path, asked: str | None) -> str:
    try:
        named = json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
        if not isinstance(asked or named, str):
            raise TypeError(named)
        base = asked or portable_name(named)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{adapter / ADAPTER} does not say which model the adapter belongs to."
        raise ModelError(what, code="M012") from error
    try:
        check_model_name(base)
    except ModelError as error:
        raise ModelError(
            f"The adapter {adapter} belongs to {base}, which cannot be had: {error.what}",
            code=error.code,
            fix=error.fix,
            adapter=adapter,
            base=base,
            what=error.what,
        ) from error
    return resolve_model(base)


_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/[0-9a-f]+/?$")


def portable_name(base: str) -> str:
    """The name of a base on every machine. PEFT records the path that was loaded, which may be one of a cache.

    >>> portable_name("/home/a/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2")
    'Qwen/Qwen3-0.6B'
    >>> portable_name("/home/a/.cache/podium/models/smollm2-135m-instruct-1")
    'builtin:smollm2-135m-instruct'
    >>> portable_name("models/mine")
    'models/mine'
    """
    snapshot = _SNAPSHOT.search(base)
    return f"{snapshot['owner']}/{snapshot['name']}" if snapshot else name_of_copy(base) or base


def load_model(source: ModelSource, *, dtype: torch.dtype | str = "auto") -> tuple[Any, Any]:
    """Model and tokenizer, in evaluation mode, on the accelerator if there is one. Dtype "auto" is the stored one."""
    import torch

    from podium.models.stored import load

    with reading(functools.partial(not_loadable, source.base)):
        model = load(source.base, dtype=dtype)
    model, _ = with_adapter(model, source)
    tokenizer = load_tokenizer(source)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.to(device).eval(), tokenizer


def load_tokenizer(source: ModelSource) -> Any:
    """The tokenizer saved beside the adapter, else the base's."""
    from podium.models.loading import read_tokenizer

    return read_tokenizer(source.tokenizer)


def with_adapter(model: Any, source: ModelSource) -> tuple[Any, Origin | None]:
    """The base with the source's adapter on it, if it has one, and its origin. Raises as `adapters.put_on`."""
    from podium.models.adapters import put_on

    return (model, None) if source.adapter is None else put_on(model, source.adapter, source.ignored)
