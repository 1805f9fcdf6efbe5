"""Computation on each kind of device: one table, read wherever a CPU and a GPU are treated differently.

Kept in one place so that tests can put a GPU's row under `cpu` and run the GPU's branches without one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.errors.texts import listed, nearest

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One row of the table."""

    autocast: bool
    """Whether half precision is torch's autocast; else products round their own factors (`ProductPrecision`)."""
    half_attention: bool
    """Whether attention computes in the model's half precision. A CPU's kernels for it are several times slower."""
    joined_attention: bool
    """Whether the attention kernel returns a log-sum-exp by which parts are joined (`attention.Joined`)."""
    lean_layers: bool
    """Whether norms, gated units and lookups are replaced by ones that keep less (`models.lean`)."""
    immediate: bool
    """Whether an operation is over when it returns, so that looking at its result costs nothing. On a GPU the host
    queues operations, and a look waits for all of them."""
    graphs: bool
    """Whether decoding steps have a fixed shape, which is captured and replayed (`engines.live.graphs`)."""
    host_memory: bool
    """Whether tensors live in the C allocator's memory, which is slow to allocate again and must be told to shrink."""
    logits_bytes: int
    """Size of one float32 block of logits in the head: a processor's cache, or enough rows to fill a GPU."""
    drawn_bytes: int | None
    """Size of the logits that are drawn from at once; None: all."""
    max_rows: int
    """Completions decoding at once; more wait. Beyond this a CPU's products get no faster and the cache only grows."""
    activation_bytes: int
    """Budget for the activations of a pack where the free memory is not known."""
    beginnings_per_pack: int
    """A pack may hold this many times the tokens that its rollouts share at the beginning, whatever its budget."""
    runtime_bytes: int
    """Python with torch, transformers and peft imported; on a GPU the context and the libraries' workspaces."""
    working_bytes: int
    """Added by the first forwards whatever their size: threads, compiled products, holes of the allocator."""


KINDS: dict[str, DeviceKind] = {
    "cpu": DeviceKind(
        autocast=False,
        half_attention=False,
        joined_attention=True,
        lean_layers=True,
        immediate=True,
        graphs=False,
        host_memory=True,
        logits_bytes=32 * MIB,
        drawn_bytes=4 * MIB,
        max_rows=128,
        activation_bytes=272 * MIB,
        beginnings_per_pack=5,
        runtime_bytes=500 * MIB,
        working_bytes=192 * MIB,
    ),
    "cuda": DeviceKind(
        autocast=True,
        half_attention=True,
        joined_attention=False,
        lean_layers=False,
        immediate=False,
        graphs=True,
        host_memory=False,
        logits_bytes=1024 * MIB,
        drawn_bytes=None,
        max_rows=512,
        activation_bytes=12 * GIB,
        beginnings_per_pack=2,
        runtime_bytes=600 * MIB,
        working_bytes=128 * MIB,
    ),
}


def kind_of(device: torch.device | str) -> DeviceKind:
    """The row of a device; accelerators of other makers are treated as CUDA's."""
    name = device if isinstance(device, str) else device.type
    return KINDS.get(name.partition(":")[0], KINDS["cuda"])


def free_bytes(device: torch.device | str) -> int | None:
    """Memory of a GPU that this process could still take, its allocator's cache included; None: not known."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def put(values: np.ndarray, device: torch.device | str) -> Tensor:
    """An array on a device, without waiting for what the device is doing."""
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# ---- GPUs that are not here, for a plan ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that a run is planned for."""

    name: str
    num_bytes: int
    bfloat16: bool = True
    """Whether it multiplies bfloat16 itself; else a run computes in float16."""

    @property
    def described(self) -> str:
        """The name with the size, to be written behind a number of them."""
        size = f"{round(self.num_bytes / 1e9, 1):g} GB"
        return f"GPUs of {size}" if self.name == size else f"{self.name} ({size})"


_SIZES: Mapping[str, int] = {
    "b200": 180,
    "h200": 141,
    "gh200": 96,
    "h100-nvl": 94,
    "h100": 80,
    "a100-80": 80,
    "a100-40": 40,
    "l40s": 48,
    "l40": 48,
    "l4": 24,
    "a40": 48,
    "a10": 24,
    "a10g": 24,
    "rtx-6000-ada": 48,
    "rtx-a6000": 48,
    "rtx-5090": 32,
    "rtx-4090": 24,
    "rtx-3090": 24,
    "v100-32": 32,
    "v100-16": 16,
    "t4": 16,
}
_WITHOUT_BFLOAT16 = ("v100-32", "v100-16", "t4")

GPUS: Mapping[str, Gpu] = {
    name: Gpu(name=name, num_bytes=size * 10**9, bfloat16=name not in _WITHOUT_BFLOAT16)
    for name, size in _SIZES.items()
}
"""By name. The size is the nominal one in GB of 10^9 bytes; nvidia-smi reports up to 8 % more."""


def gpu_named(asked: str) -> Gpu:
    """The GPU of a name, however it is separated (`RTX 4090`), or of a size, which is taken to have bfloat16.

    >>> gpu_named("H100"), gpu_named("RTX4090").name, gpu_named("80 GB").num_bytes
    (Gpu(name='h100', num_bytes=80000000000, bfloat16=True), 'rtx-4090', 80000000000)

    Raises `ConfigError` for neither.
    """
    word = _joined(asked)
    found = next((gpu for name, gpu in GPUS.items() if _joined(name) == word), None)
    size = re.fullmatch(r"(\d+(?:\.\d+)?)(gb|gib)", word)
    if size is not None:
        num_bytes = int(float(size[1]) * (GIB if size[2] == "gib" else 10**9))
        found = Gpu(name=f"{round(num_bytes / 1e9, 1):g} GB", num_bytes=num_bytes) if num_bytes else None
    if found is None:
        near = next((name for name in GPUS if _joined(name).startswith(word)), nearest(asked.lower(), GPUS))
        raise ConfigError(
            f"--gpu {asked}: this is no GPU of the table ({listed(GPUS)}), and no size such as 80GB.",
            fix=f"--gpu {near or '80GB'}",
            asked=asked,
            near=near,
        )
    return found


def _joined(name: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce", "", name.lower())
