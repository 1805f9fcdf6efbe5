"""A model's files: loaded as the class that their configuration names, compared with it, and saved again as they were.

They may hold more than a language model, such as an encoder of images. What is outside the language model is frozen and
gets no adapter, and is saved under its names, in its types and with its values, beside the files of its processor.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations import deepspeed

from podium.errors import Finding, ModelError
from podium.models.builtin import quiet_transformers
from podium.models.check import read_config, reading, stored_entries
from podium.models.forward import base_model
from podium.models.modes import replaced

PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files of a processor besides those of its tokenizer."""

SET_BY_TRAINERS = ("bos_token_id", "pad_token_id", "use_cache")
"""Values of a model's configurations that transformers' Trainer, or Podium, sets to train, and no weight depends on."""

_AUTO = (AutoModelForCausalLM, AutoModelForImageTextToText)

_TYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
"""By their names in safetensors files."""


def auto_class(config: PretrainedConfig) -> Any:
    """The auto class that makes the model which a configuration names.

    That is the class in `architectures`; where neither auto class knows it, the first that knows the configuration.
    """
    kinds = {auto: auto._model_mapping.get(type(config), None) for auto in _AUTO}
    named = [auto for auto, kind in kinds.items() if getattr(kind, "__name__", "") in (config.architectures or ())]
    return next(iter(named or [auto for auto, kind in kinds.items() if kind is not None]), AutoModelForCausalLM)


@contextlib.contextmanager
def made_whole() -> Iterator[None]:
    """Within this context each process makes models whole, by itself; under ZeRO-3 all would make parts together."""
    with replaced([(deepspeed, "_hf_deepspeed_config_weak_ref", None)]):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What training leaves alone in the files that a model was loaded from."""

    types: Mapping[str, torch.dtype] = field(default_factory=dict)
    """By the tensors' names in the files."""
    processor: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of `PROCESSOR` files by name."""
    configs: Sequence[Mapping[str, Any]] = ()
    """`SET_BY_TRAINERS` of each of `_configs`, as loaded; a value that one lacks is left out."""


def load(name: str, *, revision: str | None = None, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """`from_pretrained` of the class that the model's configuration names; the files are remembered for `as_stored`."""
    own: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    loaded = auto_class(read_config(name, **own)).from_pretrained(name, **own, **kwargs)
    remember(loaded[0] if isinstance(loaded, tuple) else loaded, name, revision)
    return loaded


def remember(model: Any, name: str, revision: str | None = None) -> None:
    """Keep with a model what `Stored` says of the folder, or the cached files, that `name` stands for."""
    folder = files_of(name, revision)
    entries = {} if folder is None else stored_entries(folder)
    types = {tensor: _TYPES[entry["dtype"]] for tensor, entry in entries.items() if entry["dtype"] in _TYPES}
    here = [] if folder is None else [path for path in map(folder.joinpath, PROCESSOR) if path.is_file()]
    model.podium_stored = Stored(
        types=types, processor={path.name: path.read_bytes() for path in here}, configs=_set_values(model)
    )
    _unset_ignored(getattr(model, "generation_config", None))


def _configs(model: Any) -> list[Any]:
    """A model's configuration, that of its language model, and its generation configuration."""
    return [model.config, model.config.get_text_config(), getattr(model, "generation_config", None)]


def _set_values(model: Any) -> list[dict[str, Any]]:
    kept = [{} if config is None else vars(config) for config in _configs(model)]
    return [{name: values[name] for name in SET_BY_TRAINERS if name in values} for values in kept]


@contextlib.contextmanager
def configs_as_loaded(model: Any) -> Iterator[None]:
    """Within it a model's configurations have the values of `SET_BY_TRAINERS` that they were loaded with, to be saved.

    A pad id that is an end id, as training may set it, has whoever trains the saved model on mask the ends of texts.
    """
    now = _set_values(model)
    stored = getattr(model, "podium_stored", Stored()).configs or now
    try:
        _set(model, stored)
        yield
    finally:
        _set(model, now)


def _set(model: Any, values: Sequence[Mapping[str, Any]]) -> None:
    for config, own in zip(_configs(model), values, strict=True):
        for name in SET_BY_TRAINERS if config is not None else ():
            vars(config).pop(name, None)
        for name, value in own.items():
            setattr(config, name, value)


def _unset_ignored(config: GenerationConfig | None) -> None:
    """Unset values of a generation config that have no effect, such as a `temperature` beside `do_sample: false`.

    transformers reads them with a warning, and refuses to save them, which would end a run where it saves its model.
    """
    try:
        if config is not None:
            config.validate(strict=True)
    except ValueError as error:
        for name in re.findall(r"^- `(\w+)`:", str(error), re.MULTILINE):
            setattr(config, name, None)


def files_of(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model's files: its own, or the hub's cache; None: neither."""
    from huggingface_hub import try_to_load_from_cache

    if name and (folder := Path(name).expanduser()).is_dir():
        return folder
    with contextlib.suppress(ValueError):  # no possible name of the hub
        if isinstance(cached := try_to_load_from_cache(name, "config.json", revision=revision), str):
            return Path(cached).parent
    return None


# ---- whether the files hold the weights that config.json describes: names and shapes, as in transformers ----


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


# ---- outside the language model ----


def outside(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a model that are neither of its language model nor of its head, by name; often none."""
    base = base_model(model)
    if not hasattr(base, "get_decoder") or base.config.get_text_config() is base.config:
        return {}
    head = base.get_output_embeddings()
    inside = {id(p) for part in (base.get_decoder(), head) if part is not None for p in part.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in inside}


def freeze_outside(model: nn.Module) -> int:
    """Freeze what `outside` finds; the number of parameters that were trainable."""
    found = [p for p in outside(model).values() if p.requires_grad]
    for parameter in found:
        parameter.requires_grad_(False)
    return sum(p.numel() for p in found)


def only_inside(model: nn.Module, config: Any) -> Any:
    """An adapter's configuration whose targets leave out the layers outside the language model, if there are any."""
    paths = {name.rpartition(".")[0] for name in outside(model)} - {""}
    if not paths or not hasattr(config, "exclude_modules"):
        return config
    tops = sorted(paths - {path for path in paths if any(path.startswith(f"{other}.") for other in paths)})
    inner = base_model(model).get_decoder()
    parents = {name for name, m in model.named_modules() if any(x is inner for x in m.modules())}
    shortest = {next(p for p in _prefixes(top) if p not in parents) for top in tops if top not in parents}
    patterns = [rf"{re.escape(path)}(\..*)?" for path in sorted(shortest)]
    excluded = config.exclude_modules or []
    patterns += [excluded] if isinstance(excluded, str) else [rf"(.*\.)?{re.escape(name)}" for name in excluded]
    config = copy.deepcopy(config)
    config.exclude_modules = "|".join(patterns)
    return config


def _prefixes(path: str) -> list[str]:
    """The path's own beginnings, shortest first.

    >>> _prefixes("model.visual.merger")
    ['model', 'model.visual', 'model.visual.merger']
    """
    parts = path.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


# ---- saving ----


@torch.no_grad()
def as_stored(
    model: Any, state: Mapping[str, Tensor] | None = None, *, dtype: torch.dtype | None = None
) -> dict[str, Tensor] | None:
    """A model's tensors for saving, what is outside its language model in the types of the files it came from.

    Args:
        model: without an adapter.
        state: its tensors, where they are not in it; None: its own.
        dtype: the type of all others that the files lack, the rest of which are cast to their types there; None: they
            stay as they are.

    Returns:
        `state`, where nothing is known of the files or all tensors are of the language model.
    """
    stored = getattr(model, "podium_stored", Stored())
    found = outside(model)
    if not stored.types or (dtype is None and not found):
        return None if state is None else dict(state)
    tensors: Mapping[str, Tensor] = model.state_dict() if state is None else state
    names = saved_names(model, tensors)
    cast: dict[tuple[int, Any, torch.dtype], Tensor] = {}  # tied tensors stay one

    def one(name: str, tensor: Tensor) -> Tensor:
        asked = stored.types.get(names.get(name, name), dtype)
        if asked is None or not tensor.is_floating_point() or (dtype is None and name not in found):
            return tensor
        new = cast.setdefault((tensor.data_ptr(), tensor.shape, asked), tensor.to(asked))
        return new if dtype is not None or torch.equal(new.to(tensor.dtype), tensor) else tensor

    return {name: one(name, tensor) for name, tensor in tensors.items()}


def saved_names(model: Any, names: Mapping[str, Any]) -> dict[str, str]:
    """The name that each tensor has in a saved file, where it is saved alone and not as a part of another."""
    marks = {name: torch.empty(number, device="meta") for number, name in enumerate(names)}
    try:
        renamed = {len(mark): new for new, mark in revert_weight_conversion(model, marks).items() if mark.dim() == 1}
    except (RuntimeError, ValueError, IndexError):  # tensors that are split or joined, which marks cannot be
        return {}
    return {name: renamed[number] for number, name in enumerate(names) if number in renamed}


def load_renamed(model: Any, folder: Path) -> None:
    """Load a saved model into one of its class, where tensors have other names in the files, or are split or joined."""
    names = set(stored_entries(folder)) if (folder / "config.json").is_file() else set()
    if names - set(model.state_dict()):
        model.load_state_dict(type(model).from_pretrained(folder, dtype=model.dtype).state_dict())


def write_processor(model: Any, folder: Path) -> None:
    """Write the processor's files into a folder with a saved model, except those that are there."""
    for name, content in getattr(model, "podium_stored", Stored()).processor.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(content)
