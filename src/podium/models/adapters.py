"""Whether an adapter and its base are those that training recorded, by one hash of each.

    record(folder, base_hash(policy))         beside a saved adapter: `adapter_digests.json`
    policy, origin = put_on(base, folder)     the base with the adapter on it, and what the record says of both

A hash covers of every tensor its name, its shape, the sum of all its bits read as integers, and some of its numbers,
spread evenly: one pass over memory, whatever its device. An edit that keeps all of these is not seen. Weights in 4 or 8
bits are left out, so a base that had some is never called the one that was trained on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from podium.errors import ModelError

logger = logging.getLogger(__name__)

FILE = "adapter_digests.json"
"""In an adapter's folder: hashes of its tensors and of the base that it was trained on, and its settings."""

FORMAT = 2
"""Version of the file's format. Version 1 held a digest of every tensor."""

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
NO_EFFECT = "M034"

NUMBERS = 1024
"""Numbers of a tensor that its hash holds one by one."""

_AT_ONCE = 1 << 24
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
"""Dtypes whose numbers are hashed."""
_PLACES = ("base_model_name_or_path", "revision", "inference_mode", "peft_version")
"""Settings of an adapter that may change though it does not."""
_SHARED = ("vblora_vector_bank", "prompt_encoder", "unilora_theta_d")
"""Tensors that PEFT keeps once and names in every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseHash:
    """The frozen tensors under an adapter."""

    names: tuple[str, ...]
    """Those that are hashed."""
    dtype: str
    """The narrowest type among them, to which all were brought."""
    in_dtype: str
    """Their hash in that type."""
    in_bfloat16: str
    """Their hash after rounding, for a base in float32 that is loaded in bfloat16 later."""
    is_whole: bool
    """Whether no tensor is left out because it has 4 or 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whether an adapter and the base that it was put on are those of the run that recorded them."""

    is_base: bool | None = None
    """Whether the base is the recorded one; None where that is not recorded or cannot be compared."""
    other_adapter: tuple[str, ...] = ()
    """Parts of the adapter that differ from what was saved: names of settings, or its tensors."""
    not_loaded: tuple[str, ...] = ()
    """Names that only the adapter's file has, or only the model."""
    no_effect: bool = False
    """Every matrix B of the adapter is zero."""

    @property
    def known(self) -> bool:
        """Whether the whole base and the whole adapter were compared, and are the same."""
        return self.is_base is True and not self.other_adapter and not self.not_loaded

    def __str__(self) -> str:
        """Name of the model in messages, as far as its record allows."""
        if self.known:
            return "trained model"
        changes = (
            ("another base than trained on", self.is_base is False),
            ("another adapter than saved", self.other_adapter),
            ("only partly loaded", self.not_loaded),
        )
        found = [change for change, is_so in changes if is_so]
        return f"adapter on this base ({', '.join(found)}: overruled)" if found else "adapter on this base"

    @property
    def grounds(self) -> str:
        """Grounds of that name."""
        if self.is_base is None:
            return "whether this is the base that was trained on is not recorded"
        if not self.is_base:
            return "this is not the base that training recorded"
        if not self.known:
            return "the base is the one that training recorded"
        return "base and adapter are those that training recorded"

    def refusals(self, adapter: str, base: str) -> Iterator[ModelError]:
        """Everything that is wrong."""
        if self.is_base is False:
            what = f"{base} is not the base that the adapter {adapter} was trained on: its weights have other numbers"
            yield _refusal("M031", what, _rebase(adapter))
        if self.other_adapter:
            what = f"The adapter {adapter} is not as training saved it: {', '.join(self.other_adapter)} changed"
            yield _refusal("M032", what, "Take the folder that the run wrote, or a checkpoint of it.")
        if self.not_loaded:
            what = (
                f"The adapter {adapter} does not fit {base}: {len(self.not_loaded)} names are only in its file or only "
                f"in the model, as `{self.not_loaded[0]}`, so it is not all loaded"
            )
            yield _refusal("M033", what, _rebase(adapter))
        if self.no_effect:
            what = f"The adapter {adapter} changes nothing: all its matrices B are zero, so this is the base alone"
            yield _refusal(NO_EFFECT, what, "Train it first, or name the base itself.")


def _refusal(code: str, what: str, fix: str) -> ModelError:
    return ModelError(
        f"{what}.", code=code, fix=f"{fix} To go on with it as it is: --ignore {code}", what=what, cure=fix, rule=code
    )


def base_hash(policy: torch.nn.Module) -> BaseHash | None:
    """The hash of the frozen tensors under an adapter; None where there is none, or no process has all."""
    if not isinstance(policy, PeftModel):
        return None
    frozen = {name: x for name, x in _base(policy).items() if not x.requires_grad}
    if not frozen or any(isinstance(x, DTensor) or hasattr(x, "ds_id") or x.is_meta for x in frozen.values()):
        return None
    hashed = {name: x for name, x in frozen.items() if x.dtype in _TYPES.values()}
    dtype = _narrowest(hashed.values())
    return BaseHash(
        names=tuple(hashed),
        dtype=str(dtype).removeprefix("torch."),
        in_dtype=_hash(hashed, dtype),
        in_bfloat16=_hash(hashed, torch.bfloat16),
        is_whole=len(hashed) == len(frozen),
    )


def record(folder: Path, base: BaseHash | None) -> None:
    """Write the hashes of the adapter in a folder, if one is there, and of its base."""
    if base is not None and (folder / WEIGHTS).is_file():
        contents = {
            "format": FORMAT,
            "base": asdict(base),
            "adapter": _hash(load_file(folder / WEIGHTS)),
            "settings": _settings(folder),
        }
        (folder / FILE).write_text(json.dumps(contents), encoding="utf-8")


def put_on(model: Any, folder: Path, ignore: Collection[str] = ()) -> tuple[PeftModel, Origin]:
    """The base with the adapter in a folder on it, and its origin.

    Raises:
        ModelError: shapes differ (P013); and unless `ignore` has the code: the base is another one than was trained on
            (M031), the adapter is not as it was saved (M032), is only partly loaded (M033) or changes nothing (M034),
            which is a warning where training recorded this very adapter.
    """
    base = getattr(model.config, "_name_or_path", "") or "the base"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of missing keys, which `load_adapter` returns
            policy = PeftModel.from_pretrained(model, str(folder))
            loaded = policy.load_adapter(str(folder), policy.active_adapter)
    except Exception as error:  # of settings of wrong types, too
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        mismatch = next((line for line in lines if "mismatch" in line), lines[0]).rstrip(".")
        raise ModelError(
            f"The adapter {folder} does not fit {base}: {mismatch}.",
            code="P013",
            fix=_rebase(str(folder)),
            folder=folder,
            base=base,
            mismatch=mismatch,
        ) from error
    missing = [name for name in loaded.missing_keys if not any(part in name for part in _SHARED)]
    origin = _compared(policy, folder, (*missing, *loaded.unexpected_keys))
    for refusal in origin.refusals(str(folder), base):
        as_saved = refusal.code == NO_EFFECT and origin.known
        if refusal.code not in ignore and not as_saved:
            raise refusal
        logger.warning("%s [%s, %s]", refusal.what, refusal.code, "as training saved it" if as_saved else "overruled")
    return policy.eval(), origin


@torch.no_grad()
def _hash(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """Hash of the names, shapes and numbers of tensors, the same on every device.

    Args:
        tensors: by name; their order makes no difference.
        dtype: that all are brought to; None: each has its own.

    >>> ones = {"x": torch.ones(2, 3)}
    >>> _hash(ones) == _hash({"x": torch.ones(3, 2)})
    False
    >>> _hash(ones, torch.bfloat16) == _hash({"x": torch.ones(2, 3, dtype=torch.bfloat16)})
    True
    """
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to(dtype or tensors[name].dtype)
        bits = tensor.reshape(-1).contiguous().view(_BITS[tensor.element_size()])
        total = sum(int(part.sum(dtype=torch.int64)) for part in bits.split(_AT_ONCE))
        places = torch.linspace(0, max(len(bits) - 1, 0), min(len(bits), NUMBERS), dtype=torch.float64).long()
        some = bits[places.to(bits.device)].cpu().numpy().tobytes()
        whole.update(f"{name} {tuple(tensor.shape)} {total} ".encode() + some)
    return whole.hexdigest()


def _narrowest(tensors: Iterable[Tensor]) -> torch.dtype:
    return min((x.dtype for x in tensors), key=lambda dtype: dtype.itemsize, default=torch.float32)


def _base(policy: PeftModel) -> dict[str, Tensor]:
    """The base's own parameters, under the names that they have without an adapter."""
    found = {}
    for name, parameter in policy.get_base_model().named_parameters():
        parts = name.split(".")
        if not any(part in policy.peft_config for part in parts):
            found[".".join(part for part in parts if part not in ("base_layer", "original_module"))] = parameter
    return found


def _compared(policy: PeftModel, folder: Path, not_loaded: tuple[str, ...]) -> Origin:
    """The origin by the record beside the adapter. A record that cannot be read is a warning."""
    no_effect = _is_zero(policy)
    if not (folder / FILE).is_file():
        return Origin(not_loaded=not_loaded, no_effect=no_effect)
    try:
        recorded = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if recorded["format"] != FORMAT:
            raise ValueError(recorded["format"])
        base = BaseHash(**recorded["base"])
        settings = dict(recorded["settings"])
        tensors = recorded["adapter"]
    except (OSError, ValueError, KeyError, TypeError):
        logger.warning(
            "%s: %s has the format of another release: base and adapter cannot be compared with it", folder, FILE
        )
        return Origin(not_loaded=not_loaded, no_effect=no_effect)
    now = _settings(folder)
    changed = [
        f"{name} {settings[name]} -> {now[name]}" for name in settings if name in now and settings[name] != now[name]
    ]
    if not (folder / WEIGHTS).is_file() or _hash(load_file(folder / WEIGHTS)) != tensors:
        changed.append("its tensors")
    return Origin(
        is_base=_is_base(_base(policy), base),
        other_adapter=tuple(changed),
        not_loaded=not_loaded,
        no_effect=no_effect,
    )


def _is_base(tensors: Mapping[str, Tensor], recorded: BaseHash) -> bool | None:
    """Whether the tensors of a base are the recorded ones; None where they cannot be compared, or only some can."""
    then = _TYPES.get(recorded.dtype)
    found = {name: tensors[name] for name in recorded.names if name in tensors}
    if then is None or not found or len(found) < len(recorded.names):
        return None
    if any(x.dtype not in _TYPES.values() for x in found.values()):
        return None
    now = _narrowest(found.values())
    is_same = _hash(found, then) == recorded.in_dtype
    if (then, now) == (torch.float32, torch.bfloat16):
        is_same = is_same or _hash(found, now) == recorded.in_bfloat16
    elif not is_same and now not in (then, torch.float32):  # the recorded type is no rounding of this one
        return None
    if is_same and not recorded.is_whole:
        return None
    return is_same


def _is_zero(policy: PeftModel) -> bool:
    """Whether a LoRA adapter's matrices B are all zero, and it has nothing else that could change the model."""
    own = {name: x for name, x in policy.named_parameters() if f".{policy.active_adapter}" in name}
    second = [x for name, x in own.items() if "lora_B" in name or "lora_embedding_B" in name]
    plain = all(any(part in name for part in ("lora_A", "lora_B", "lora_embedding_")) for name in own)
    return bool(second) and plain and not any(bool(x.any()) for x in second)


def _settings(folder: Path) -> dict[str, Any]:
    """An adapter's settings, without places and in one order."""
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    ordered = {name: sorted(x, key=str) if isinstance(x, list) else x for name, x in settings.items()}
    return {name: x for name, x in ordered.items() if name not in _PLACES}


def _rebase(adapter: str) -> str:
    line = f"podium merge {shlex.quote(adapter)} --out DIR --base OWNER/NAME (or a folder)"
    return f"Name the base that was trained on, with the weights it had then: {line}."
