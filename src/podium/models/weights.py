"""Whether a model's files hold the weights that its config.json describes: names and shapes, as in transformers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from podium.errors import Finding, ModelError
from podium.models.builtin import quiet_transformers
from podium.models.check import reading, stored_entries
from podium.models.whole import auto_class


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by its name, from the headers of the safetensors files that transformers would load."""
    return {name: tuple(entry["shape"]) for name, entry in stored_entries(folder).items()}


def check_buildable(name: str, config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Build the model that a configuration describes, without storage, unless only code of its own can.

    Raises `ModelError` for values with which transformers cannot, and for a number of layers that no files have.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and (layers < 1 or 0 < 10 * len(shapes) < layers):
        raise ModelError(
            f"{name}: config.json says num_hidden_layers: {layers}, and the files hold {len(shapes)} tensors in all.",
            code="M016",
            fix="correct config.json, or copy it again from the original model",
            model=name,
            layers=layers,
            size=len(shapes),
        )
    kind = auto_class(config)._model_mapping.get(type(config), None)
    if kind is not None:
        refused = reading(
            lambda line: ModelError(
                f"{name}: transformers cannot build the model that its config.json describes ({line}).",
                code="M016",
                fix="correct config.json, or copy it again from the original model",
                model=name,
                line=line,
            )
        )
        with refused, torch.device("meta"), quiet_transformers():
            kind._from_config(config)


def misfits(name: str, config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    """Differences between files with tensors of these shapes and the model that a configuration describes.

    transformers itself matches the names, tied and renamed ones included, on a model without storage. Where it cannot
    (code of the model's own, quantized weights), nothing is said.
    """
    if not shapes or hasattr(config, "quantization_config"):
        return
    try:
        kind = auto_class(config)._model_mapping[type(config)]
        empty = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
        with quiet_transformers():
            asked = {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
            model, info = kind.from_pretrained(None, config=config, state_dict=empty, **asked)
    except Exception:  # noqa: BLE001 - as above
        return
    yield from judged(name, with_ignored(info, model, shapes), shapes)


def with_ignored(info: Mapping[str, Any], model: Any, stored: Collection[str]) -> dict[str, Any]:
    """The loader's report with the left-over tensors that it does not report, as the model's class has it.

    Constants that a model computes by itself are not among them.
    """
    constants = ("inv_freq", *(f".{'.'.join(name.split('.')[-2:])}" for name, _ in model.named_buffers()))
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = {key for key in stored if any(re.search(pattern, key) for pattern in patterns)}
    left = {key for key in ignored - set(model.state_dict()) if not key.endswith(constants)}
    return {**info, "unexpected_keys": {*info["unexpected_keys"], *left}}


def judged(name: str, info: Mapping[str, Any], known: Collection[str] = ()) -> Iterator[Finding]:
    """Findings from the loader's report of missing, left-over and misshapen tensors.

    Args:
        name: the model's.
        info: `output_loading_info` of `from_pretrained`.
        known: names of tensors in the files or the model, by which layers are told from parts for other purposes.
    """
    missing = sorted(info["missing_keys"])
    unexpected = sorted(info["unexpected_keys"])
    patterns = {_numberless(key) for key in known if key not in info["unexpected_keys"]}
    layers = [key for key in unexpected if _numberless(key) in patterns]
    wrong = [
        f"`{key}` is {_times(stored)} in the files and {_times(described)} by config.json"
        for key, stored, described in sorted(info["mismatched_keys"])[:1]
    ]
    if len(info["mismatched_keys"]) > 1:
        wrong[0] += f" (and {len(info['mismatched_keys']) - 1} others)"
    if missing:
        wrong.append(f"config.json describes {_some(missing)} not in the files: random numbers would take their place")
    if layers:
        wrong.append(f"the files hold {_some(layers)} not described by config.json: they would be left out")
    if wrong:
        yield Finding(
            code="M022",
            severity="error",
            what=f"{name}: {'; '.join(wrong)}",
            why="the weights belong to another configuration",
            fix="copy config.json and the weights from one place again",
            facts={"name": name, "wrong": "; ".join(wrong)},
        )
    elif unexpected:
        yield Finding(
            code="M022",
            severity="note",
            what=f"{name}: the files hold {_some(unexpected)} not part of the model that is trained, and left out",
            why="a model saved by this run will not have them",
            facts={"name": name, "some": _some(unexpected)},
        )


def _numberless(key: str) -> str:
    """A name without the number of its layer.

    >>> _numberless("model.layers.31.mlp.up_proj.weight")
    'model.layers.#.mlp.up_proj.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", key)


def _some(keys: list[str]) -> str:
    return f"{len(keys)} tensors (`{keys[0]}`, ...) that are" if len(keys) > 1 else f"a tensor (`{keys[0]}`) that is"


def _times(shape: Collection[int]) -> str:
    return " x ".join(f"{n:,}" for n in shape)
