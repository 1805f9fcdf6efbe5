"""The state of a step in a folder: written as a whole, and read into the model that it is of, or not at all."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors import SafetensorError
from safetensors.torch import load_model
from transformers import PreTrainedTokenizerBase

from podium.errors import CheckpointError
from podium.errors.texts import listed
from podium.models import adapters
from podium.models.forward import base_model, unwrap
from podium.models.modes import replaced
from podium.models.stored import as_stored, configs_as_loaded, write_processor
from podium.runs.find_model import ModelSource
from podium.runs.shipping.card import CARD, model_card
from podium.runs.shipping.origin import LOCAL_KEYS, base_named, edited

MODEL = "model"
OPTIMIZER = "optimizer.pt"
RANDOM = "random.pt"
"""Parts of a state, by their names in its folder."""

_SCALES = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""Arguments of an adapter by which its weights mean something else, or have another shape."""
_UNREADABLE = (SafetensorError, UnpicklingError, EOFError, KeyError, TypeError)
"""Errors of a file that is cut off or something else, beside those of reading and of shapes."""


def random_states() -> dict[str, list[torch.Tensor]]:
    """The states of torch's random generators, by kind of device: dropout draws from them."""
    states = {"cpu": [torch.get_rng_state()]}
    kind = torch.accelerator.current_accelerator()
    if kind is not None and hasattr(module := torch.get_device_module(kind), "get_rng_state_all"):
        states[kind.type] = module.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Set the generators that there are to what `random_states` gave, maybe on another machine."""
    kind = torch.accelerator.current_accelerator()
    if "cpu" in states:
        torch.set_rng_state(states["cpu"][0])
    if kind is not None and kind.type in states:
        module = torch.get_device_module(kind)
        module.set_rng_state_all(states[kind.type][: module.device_count()])


def save_policy(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    base: adapters.BaseHash | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a model as `from_pretrained` reads it, with its tokenizer.

    Args:
        model: with an adapter, whose weights alone are written, or all weights.
        tokenizer: without what training has set in it, and what is of this machine.
        folder: is made where it is not there.
        base: of the weights under an adapter; None: it is computed.
        state: the weights, where the model holds only a part of them.
    """
    plain = None if isinstance(model, PeftModel) else unwrap(model)
    with contextlib.ExitStack() as inside:
        if plain is not None:
            inside.enter_context(configs_as_loaded(plain))
        # By transformers' own answer only the first process of all machines would save.
        if hasattr(plain, "should_save_on_this_rank"):
            always = (plain, "should_save_on_this_rank", lambda is_main_process: is_main_process)
            inside.enter_context(replaced([always]))
        model.save_pretrained(folder, state_dict=state if plain is None else as_stored(plain, state))
    getattr(tokenizer, "podium_processor", tokenizer).save_pretrained(folder)
    write_processor(model if plain is None else plain, folder)
    config = folder / "tokenizer_config.json"
    if config.is_file():
        stored = getattr(tokenizer, "podium_stored", {})
        config.write_bytes(edited(config, **dict.fromkeys(LOCAL_KEYS), **stored))
    adapters.record(folder, adapters.base_hash(model) if base is None else base)


def write_card(
    source: Any, model: Any, folder: Path, *, address: str, title: str | None, metadata: Mapping[str, Any]
) -> None:
    """Write README.md beside a model that was trained.

    Args:
        source: the model as it was given to the trainer.
        model: that was trained.
        folder: of its weights.
        address: the argument of `from_pretrained`.
        title: None: that of the weights.
        metadata: keys that the hub reads, or transformers' names of them.
    """
    renamed = {"finetuned_from": "base_model", "dataset": "datasets", "dataset_tags": "datasets"}
    base = source if isinstance(source, str) else base_model(model).config._name_or_path or type(source).__name__
    adapter = folder if isinstance(model, PeftModel) else None
    text = model_card(
        ModelSource(base=base if adapter else str(folder), adapter=adapter),
        address=address,
        base=base_named(base),
        title=title,
        metadata={renamed.get(name, name): value for name, value in metadata.items()},
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CARD).write_text(text, encoding="utf-8")


def load_weights(model: Any, folder: Path) -> None:
    """Load weights that a trainer has saved, or those of an adapter alone."""
    if (folder / "adapter_config.json").is_file():
        _load_adapter(model, folder)
    else:
        load_model(model, str(folder / "model.safetensors"))


def _load_adapter(model: Any, folder: Path) -> None:
    """Load the adapter in a folder into that of a model. Raises `CheckpointError` where they differ."""
    if not isinstance(model, PeftModel):
        raise CheckpointError(
            f"{folder} holds an adapter, and this loop has none.",
            fix="give the loop the peft_config that it was saved with",
            folder=folder,
        )
    saved = json.loads((folder / "adapter_config.json").read_text())
    own = model.active_peft_config.to_dict()
    for name in _SCALES:
        if saved.get(name) != own.get(name):
            raise CheckpointError(
                f"The adapter in {folder} has {name}={saved.get(name)}, and that of this loop {own.get(name)}.",
                fix="give the loop the peft_config that it was saved with",
                folder=folder,
                name=name,
                saved=saved.get(name),
                own=own.get(name),
            )
    found = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    lacking = sorted(trained.intersection(found.missing_keys))
    beside = sorted(found.unexpected_keys)
    if lacking or beside:
        shown_lacking = lacking[:1]
        shown_beside = beside[:1]
        raise CheckpointError(
            (
                f"The adapter in {folder} is on other modules than that of this loop"
                + (f": it lacks {listed(shown_lacking)}" if shown_lacking else "")
                + (f": only it has {listed(shown_beside)}" if shown_beside else "")
                + "."
            ),
            fix="give the loop the peft_config that it was saved with",
            folder=folder,
            lacking=shown_lacking,
            beside=shown_beside,
        )


@contextlib.contextmanager
def putting_back(model: Any, *, always: bool) -> Iterator[None]:
    """Restore the weights that loading overwrites as they were: `always`, or where loading fails."""
    is_adapter = isinstance(model, PeftModel)
    is_done = False
    written = [x for x in (*model.parameters(), *model.buffers()) if x.requires_grad or not is_adapter]
    kept = [x.detach().clone() for x in written]
    try:
        yield
        is_done = True
    finally:
        if always or not is_done:
            with torch.no_grad():
                for x, own in zip(written, kept, strict=True):
                    x.copy_(own)


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to write to, which is renamed to `folder` when all is written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
        made = Path(staging) / "state"
        made.mkdir()
        yield made
        if folder.exists():
            folder.rename(Path(staging) / "before")
        made.rename(folder)


@contextlib.contextmanager
def of_this_model(folder: Path) -> Iterator[None]:
    """Raises `CheckpointError` in place of what loading raises where the state is of another model, or broken."""
    try:
        yield
    except CheckpointError:
        raise
    except (*_UNREADABLE, RuntimeError, ValueError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"The state in {folder} is not one of this model and optimizer: {reason}",
            fix="load it into a loop with the model and the settings that it was saved with",
            folder=folder,
            error=reason,
        ) from None
