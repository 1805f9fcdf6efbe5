"""What a name on the command line stands for: a run, a model's folder, a hub id, `builtin:...`; and its weights.

source = find_model("runs/quickstart")
model, tokenizer = load(source)
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import ModelError
from podium.models.builtin import name_of_copy, resolve_model
from podium.models.check import check_model_name
from podium.runs.checkpoint import PREFIX, checkpoints
from podium.runs.run import RECORD, Run

if TYPE_CHECKING:
    import torch

ADAPTER = "adapter_config.json"
MERGED = "merged"
"""In an adapter's folder: the model that it was merged into, for servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where weights lie."""

    base: str
    """What `from_pretrained` takes: the folder or hub id of the whole model, or of the one the adapter belongs to."""
    adapter: Path | None = None
    """A folder with an adapter to put on it."""

    @property
    def folder(self) -> Path | None:
        """Where training has saved it; None: it is on the hub."""
        folder = self.adapter or Path(self.base)
        return folder if folder.is_dir() else None


def find_model(name: str, *, base: str | None = None) -> ModelSource:
    """What to load. A run's folder stands for its final model, else for its newest checkpoint. Loads no weights.

    Args:
        name: a run's folder, a checkpoint, a model's or adapter's folder, a hub id, `builtin:...`.
        base: the model an adapter is put on, in place of the one that PEFT wrote down.

    Raises:
        ModelError: nothing there, or not a language model.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        folder = _saved(folder)
        name = str(folder)
    if (folder / ADAPTER).is_file():
        return ModelSource(base=_base_of(folder, base), adapter=folder)
    check_model_name(name)
    return ModelSource(base=resolve_model(name))


def _saved(folder: Path) -> Path:
    """The folder itself where it holds a model, else its newest checkpoint that does."""
    if _is_model(folder):
        return folder
    saved = next((path for path in checkpoints(folder) if _is_model(path)), None)
    if saved is None and any((folder / name).exists() for name in RECORD):
        raise ModelError(
            f"The run {folder} has saved no model: it has neither a final one nor a checkpoint.",
            code="M016",
            fix="Wait for its first checkpoint, or train it to the end (`save_steps` says how often one is written).",
        )
    return saved or folder


def _is_model(folder: Path) -> bool:
    return any((folder / file).is_file() for file in ("config.json", ADAPTER))


def run_of(source: ModelSource) -> Run | None:
    """The run a model comes from: its own folder, or the one that its checkpoint or merged model lies in."""
    if source.folder is None:
        return None
    folder = source.folder.resolve()
    while folder.name == MERGED or folder.name.startswith(PREFIX):
        folder = folder.parent
    return Run(folder=folder) if any((folder / name).exists() for name in RECORD) else None


def _base_of(adapter: Path, given: str | None) -> str:
    base = given or portable_name(_written_base(adapter))
    try:
        check_model_name(base)
    except ModelError as error:
        raise ModelError(
            f"The adapter {adapter} belongs to {base}, which cannot be had: {error.what}",
            code=error.code,
            fix=error.fix,
        ) from error
    return resolve_model(base)


def _written_base(adapter: Path) -> str:
    try:
        return str(json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError) as error:
        what = f"{adapter / ADAPTER} does not say which model the adapter belongs to."
        raise ModelError(what, code="M012") from error


_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/[0-9a-f]+/?$")


def portable_name(base: str) -> str:
    """What a base is called on every machine. PEFT writes down the path that was loaded, which may be one of a cache.

    >>> portable_name("/home/a/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2")
    'Qwen/Qwen3-0.6B'
    >>> portable_name("/home/a/.cache/podium/models/smollm2-135m-instruct-1")
    'builtin:smollm2-135m-instruct'
    >>> portable_name("models/mine")
    'models/mine'
    """
    snapshot = _SNAPSHOT.search(base)
    return f"{snapshot['owner']}/{snapshot['name']}" if snapshot else name_of_copy(base) or base


def load(source: ModelSource, *, dtype: torch.dtype | str = "auto") -> tuple[Any, Any]:
    """Model and tokenizer, in evaluation mode, on the accelerator if there is one.

    Args:
        source: from `find_model`.
        dtype: of the weights; "auto" is the type they are stored in.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = with_adapter(AutoModelForCausalLM.from_pretrained(source.base, dtype=dtype), source)
    tokenizer = load_tokenizer(source)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.to(device).eval(), tokenizer


def load_tokenizer(source: ModelSource) -> Any:
    """The tokenizer saved beside the adapter, else the base's."""
    from transformers import AutoTokenizer

    own = source.adapter is not None and (source.adapter / "tokenizer_config.json").is_file()
    return AutoTokenizer.from_pretrained(str(source.adapter) if own else source.base)


def with_adapter(model: Any, source: ModelSource) -> Any:
    """The base with the source's adapter on it, if it has one.

    Raises:
        ModelError: its weights have other shapes than the base.
    """
    if source.adapter is None:
        return model
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(source.adapter)).eval()
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"The adapter {source.adapter} does not fit {source.base}: {_first_mismatch(error)}.",
            code="P013",
            fix="Name the base that was trained on: --base OWNER/NAME or a folder.",
        ) from error


def _first_mismatch(error: Exception) -> str:
    """
    >>> _first_mismatch(RuntimeError("Error(s) in loading:\\n  size mismatch for q.lora_A: copying [4, 32] to [4, 64]"))
    'size mismatch for q.lora_A: copying [4, 32] to [4, 64]'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "mismatch" in line), lines[0]).rstrip(".")
