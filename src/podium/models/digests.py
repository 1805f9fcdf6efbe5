"""Digests of a base and of an adapter, recorded by training: whether they are the same ones is known later.

    record(folder, base_digests(policy))      beside a saved adapter: `adapter_digests.json`
    policy, origin = put_on(base, folder)     the base with the adapter on it, and what the record says of both

A tensor's digest covers its shape, the sum of all its bits read as integers, and some of its numbers, spread evenly:
one pass over memory, whatever its device. An edit that keeps all three is not seen. Weights in 4 or 8 bits have none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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
"""In an adapter's folder: digests of its tensors, of its settings and of the base that it was trained on."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

NUMBERS = 1024
"""Numbers of a tensor that its digest holds one by one."""

_AT_ONCE = 1 << 24
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
"""Dtypes that have digests."""
_PLACES = ("base_model_name_or_path", "revision", "inference_mode", "peft_version")
"""Settings of an adapter that may change though it does not."""
_SHARED = ("vblora_vector_bank", "prompt_encoder", "unilora_theta_d")
"""Tensors that PEFT keeps once and names in every layer."""

Digest = tuple[str, str, str]
"""A tensor's dtype, the digest of its numbers, and of its numbers in bfloat16; of weights in 4 or 8 bits: none."""

OTHER_BASE, OTHER_ADAPTER, NOT_LOADED, NO_EFFECT = "M031", "M032", "M033", "M034"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whether an adapter and the base that it was put on are those of the run that recorded them."""

    num_recorded: int = 0
    """Tensors of the base whose digests are recorded; 0: nothing is."""
    num_compared: int = 0
    """Those of them that could be compared."""
    other_base: tuple[str, ...] = ()
    """Those of them that have other numbers."""
    other_adapter: tuple[str, ...] = ()
    """Tensors and settings of the adapter that are not as they were saved."""
    not_loaded: tuple[str, ...] = ()
    """Names that only the adapter's file has, or only the model."""
    no_effect: bool = False
    """Every matrix B of the adapter is zero."""

    @property
    def known(self) -> bool:
        """Whether every recorded tensor of the base and of the adapter was compared, and is the same."""
        return 0 < self.num_compared == self.num_recorded and not any(
            (self.other_base, self.other_adapter, self.not_loaded)
        )

    def __str__(self) -> str:
        """Name of the model in messages, as far as its record allows."""
        if self.known:
            return "trained model"
        changes = (
            ("another base than trained on", self.other_base),
            ("another adapter than saved", self.other_adapter),
            ("only partly loaded", self.not_loaded),
        )
        said = [what for what, found in changes if found]
        return f"adapter on this base ({', '.join(said)}: overruled)" if said else "adapter on this base"

    @property
    def grounds(self) -> str:
        """Grounds of that name."""
        if self.known:
            return f"base and adapter are those that training recorded (all {self.num_recorded} tensors of the base)"
        if not self.num_recorded:
            return "whether this is the base that was trained on is not recorded"
        return f"{self.num_compared} of {self.num_recorded} recorded tensors of the base could be compared"

    def refusals(self, adapter: str, base: str) -> Iterator[ModelError]:
        """Everything that is wrong."""
        compared = f"{len(self.other_base)} of {self.num_compared} compared tensors have other numbers"
        found: dict[str, tuple[Any, str, str]] = {
            OTHER_BASE: (
                self.other_base,
                f"{base} is not the base that the adapter {adapter} was trained on: {compared}, as "
                f"{_first(self.other_base)}",
                _rebase(adapter),
            ),
            OTHER_ADAPTER: (
                self.other_adapter,
                f"The adapter {adapter} is not as training saved it: {_first(self.other_adapter)} changed",
                "Take the folder that the run wrote, or a checkpoint of it.",
            ),
            NOT_LOADED: (
                self.not_loaded,
                f"The adapter {adapter} does not fit {base}: {len(self.not_loaded)} names are only in its file or only "
                f"in the model, as {_first(self.not_loaded)}, so it is not all loaded",
                _rebase(adapter),
            ),
            NO_EFFECT: (
                self.no_effect,
                f"The adapter {adapter} changes nothing: all its matrices B are zero, so this is the base alone",
                "Train it first, or name the base itself.",
            ),
        }
        for code, (wrong, what, fix) in found.items():
            if wrong:
                yield ModelError(
                    f"{what}.",
                    code=code,
                    fix=f"{fix} To go on with it as it is: --ignore {code}",
                    what=what,
                    cure=fix,
                    rule=code,
                )


def base_digests(policy: torch.nn.Module) -> dict[str, Digest]:
    """Digests of the frozen tensors under an adapter; empty where there is none, or no process has all."""
    if not isinstance(policy, PeftModel):
        return {}
    tensors = {name: x for name, x in _base(policy).items() if not x.requires_grad}
    if any(isinstance(x, DTensor) or hasattr(x, "ds_id") or x.is_meta for x in tensors.values()):
        return {}
    return {name: _described(x) for name, x in tensors.items()}


def record(folder: Path, base: Mapping[str, Digest]) -> None:
    """Write the digests of the adapter in a folder, if one is there, and of its base."""
    if base and (folder / WEIGHTS).is_file():
        adapter = {name: digest(x) for name, x in load_file(folder / WEIGHTS).items()}
        contents = {"base": base, "adapter": adapter, "settings": _settings(folder)}
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


def adapter_changes(folder: Path) -> tuple[str, ...]:
    """Tensors and settings of an adapter that are not as its record has them; empty without a record."""
    recorded = _recorded(folder)
    if not recorded:
        return ()
    then, now = recorded["adapter"], {}
    if (folder / WEIGHTS).is_file():
        now = {name: digest(x) for name, x in load_file(folder / WEIGHTS).items()}
    tensors = [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    was, settings = recorded["settings"], _settings(folder)
    changed = [name for name in was if name in settings and was[name] != settings[name]]
    return (*(f"{name} {was[name]} -> {settings[name]}" for name in changed), *tensors)


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """Digest of a tensor's shape and numbers, in its own dtype, the same on every device.

    >>> digest(torch.ones(2, 3)) == digest(torch.ones(3, 2)), digest(torch.ones(2)) == digest(torch.ones(2).clone())
    (False, True)
    """
    bits = tensor.detach().reshape(-1).contiguous().view(_BITS[tensor.element_size()])
    total = sum(int(part.sum(dtype=torch.int64)) for part in bits.split(_AT_ONCE))
    places = torch.linspace(0, max(len(bits) - 1, 0), min(len(bits), NUMBERS), dtype=torch.float64).long()
    some = bits[places.to(bits.device)].cpu().numpy().tobytes()
    return hashlib.sha256(f"{tuple(tensor.shape)} {total} ".encode() + some).hexdigest()[:16]


def _described(tensor: Tensor) -> Digest:
    name = str(tensor.dtype).removeprefix("torch.")
    return (name, digest(tensor), digest(tensor.to(torch.bfloat16))) if name in _TYPES else (name, "", "")


def _base(policy: PeftModel) -> dict[str, Tensor]:
    """The base's own parameters, under the names that they have without an adapter."""
    found = {}
    for name, parameter in policy.get_base_model().named_parameters():
        parts = name.split(".")
        if not any(part in policy.peft_config for part in parts):
            found[".".join(part for part in parts if part not in ("base_layer", "original_module"))] = parameter
    return found


def _compared(policy: PeftModel, folder: Path, not_loaded: tuple[str, ...]) -> Origin:
    then, now = _recorded(folder).get("base", {}), _base(policy)
    alike = {name: _alike(now[name], tuple(each)) for name, each in then.items() if name in now}
    compared = {name: same for name, same in alike.items() if same is not None}
    return Origin(
        num_recorded=len(then),
        num_compared=len(compared),
        other_base=tuple(name for name, same in compared.items() if not same),
        other_adapter=adapter_changes(folder),
        not_loaded=not_loaded,
        no_effect=_is_zero(policy),
    )


def _alike(tensor: Tensor, recorded: Digest) -> bool | None:
    """Whether a tensor has the recorded numbers; None: in the types then and now they cannot be compared."""
    then, now = _TYPES.get(recorded[0]), tensor.dtype
    if then is None or now not in _TYPES.values():
        return None
    if digest(tensor.to(then)) == recorded[1]:
        return True
    if now in (then, torch.float32):  # of these the recorded type is a rounding
        return False
    comparable = (then, now) == (torch.float32, torch.bfloat16)
    return digest(tensor) == recorded[2] if comparable else None


def _is_zero(policy: PeftModel) -> bool:
    """Whether a LoRA adapter's matrices B are all zero, and it has nothing else that could change the model."""
    own = {name: x for name, x in policy.named_parameters() if f".{policy.active_adapter}" in name}
    second = [x for name, x in own.items() if "lora_B" in name or "lora_embedding_B" in name]
    plain = all(any(part in name for part in ("lora_A", "lora_B", "lora_embedding_")) for name in own)
    return bool(second) and plain and not any(bool(x.any()) for x in second)


def _recorded(folder: Path) -> dict[str, Any]:
    """The record beside an adapter; empty where there is none that can be read."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return {name: dict(found[name]) for name in ("base", "adapter", "settings")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _settings(folder: Path) -> dict[str, Any]:
    """An adapter's settings, without places and in one order."""
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    ordered = {name: sorted(x, key=str) if isinstance(x, list) else x for name, x in settings.items()}
    return {name: x for name, x in ordered.items() if name not in _PLACES}


def _rebase(adapter: str) -> str:
    how = f"podium merge {shlex.quote(adapter)} --out DIR --base OWNER/NAME (or a folder)"
    return f"Name the base that was trained on, with the weights it had then: {how}."


def _first(names: Collection[str]) -> str:
    return f"`{next(iter(names), '')}`"
