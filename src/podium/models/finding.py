"""What a name on the command line stands for: a run, a model's folder, a hub id, `builtin:...`; and its weights.

source = find_model("runs/quickstart")
model, tokenizer = load(source)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.checkpoint import checkpoints
from podium.errors import ModelError
from podium.models.builtin import name_of_copy, resolve_model
from podium.models.check import check_model_name
from podium.run import RECORD

if TYPE_CHECKING:
    import torch

ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where weights lie."""

    base: str
    """What `from_pretrained` takes: the folder or hub id of the whole model, or of the one the adapter belongs to."""
    adapter: Path | None = None
    """A folder with an adapter to put on it."""


def find_model(name: str) -> ModelSource:
    """What to load. A run's folder stands for its final model, else for its newest checkpoint. Loads no weights.

    Raises:
        ModelError: nothing there, or not a language model.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        folder = _saved(folder)
        name = str(folder)
    if (folder / ADAPTER).is_file():
        return ModelSource(base=_base_of(folder), adapter=folder)
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


def _base_of(adapter: Path) -> str:
    """The base of an adapter. PEFT writes down where it lay when training: the built-in model's copy may lie in
    another cache by now.
    """
    try:
        base = json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{adapter / ADAPTER} does not say which model the adapter belongs to.", code="M012"
        ) from error
    base = name_of_copy(base) or base
    try:
        check_model_name(base)
    except ModelError as error:
        raise ModelError(
            f"The adapter {adapter} belongs to {base}, which cannot be had: {error.what}",
            code=error.code,
            fix=error.fix,
        ) from error
    return resolve_model(base)


def load(source: ModelSource, *, dtype: torch.dtype | str = "auto") -> tuple[Any, Any]:
    """Model and tokenizer, in evaluation mode, on the accelerator if there is one.

    Args:
        source: from `find_model`.
        dtype: of the weights; "auto" is the type they are stored in.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source.base, dtype=dtype)
    if source.adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(source.adapter))
    own_tokenizer = source.adapter is not None and (source.adapter / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(str(source.adapter) if own_tokenizer else source.base)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.to(device).eval(), tokenizer
