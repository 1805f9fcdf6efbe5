"""Checkpoints of weights that FSDP2 divides: a file of each process, put together again for any number of them.

A run of as many processes, divided alike, reads its own files and goes on bit by bit. Any other one joins the parts of
all processes, one tensor at a time, and takes what is its own; that may be all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from podium.errors import CheckpointError
from podium.errors.texts import listed

WEIGHTS = "weights-part-{}.safetensors"
REFERENCE = "reference-part-{}.safetensors"
OPTIMIZER = "optimizer-part-{}.pt"
"""Files of one process in a checkpoint, by its rank."""


def num_parts(folder: Path, kind: str = WEIGHTS) -> int:
    """Return how many processes have written parts; 0: weights were whole."""
    return len(list(folder.glob(kind.format("*"))))


def local(x: Tensor) -> Tensor:
    """This process's part of a tensor, or of a parameter that ZeRO-3 has sharded."""
    part: Tensor = getattr(x, "ds_tensor", x)
    return part.to_local() if isinstance(part, DTensor) else part


# ---- weights ----


def save_weights(model: nn.Module, folder: Path, kind: str, rank: int, *, trained: bool = False) -> None:
    """Write this process's part of a model, or of its trained tensors."""
    parts = {name: local(p.detach()) for name, p in _parameters(model, trained=trained).items()}
    save_file(parts, folder / kind.format(rank))


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path, kind: str, *, trained: bool = False) -> None:
    """Read what `save_weights` wrote on all processes into this process's part of a model.

    Raises:
        CheckpointError: the files hold other tensors.
    """
    parameters = _parameters(model, trained=trained)
    files = [safe_open(folder / kind.format(r), "pt") for r in range(num_parts(folder, kind))]
    saved = set(files[0].keys())
    if saved != parameters.keys():
        different = sorted(saved ^ parameters.keys())[:3]
        raise CheckpointError(
            f"{folder} holds other tensors than this run trains: {listed(different)}.",
            folder=folder,
            different=different,
        )
    for name, parameter in parameters.items():
        slices = [file.get_slice(name) for file in files]
        is_whole = not isinstance(parameter, DTensor) and slices[0].get_shape() == [*parameter.shape]
        local(parameter).copy_(files[0].get_tensor(name) if is_whole else _rows(slices, *_place(parameter)))


def _parameters(model: nn.Module, *, trained: bool) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad or not trained}


# ---- optimizers ----


def save_optimizer(optimizer: Any, folder: Path, rank: int) -> None:
    """Write this process's part of an optimizer's states."""
    torch.save(tree_map(_to_part, optimizer.state_dict()), folder / OPTIMIZER.format(rank))


def load_optimizer(optimizer: Any, folder: Path) -> None:
    """Read what `save_optimizer` wrote on all processes into this process's part of an optimizer's states."""
    files = [folder / OPTIMIZER.format(rank) for rank in range(num_parts(folder, OPTIMIZER))]
    of_all = [torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def state(index: int, name: str, first: Any) -> Any:
        if not isinstance(first, Mapping):
            return first
        parameter = parameters[index]
        parts = [saved["state"][index][name]["podium_part"] for saved in of_all]
        return _as_divided(_rows(parts, *_place(parameter)), parameter)

    states = {
        index: {name: state(index, name, first) for name, first in of_parameter.items()}
        for index, of_parameter in of_all[0]["state"].items()
    }
    optimizer.load_state_dict({**of_all[0], "state": states})


def _to_part(x: Any) -> Any:
    """A sharded tensor as this process's rows of it: nothing that needs unpickling."""
    return {"podium_part": x.to_local()} if isinstance(x, DTensor) else x


# ---- tensors ----


def _rows(parts: Sequence[Any], start: int, stop: int) -> Tensor:
    """Return rows of a tensor, of which each process has saved some; those of further copies (HSDP) are not read.

    >>> first, second = torch.tensor([1, 2]), torch.tensor([3])
    >>> _rows([first, second, first, second], 1, 3)
    tensor([2, 3])
    """
    taken = [parts[0][0:0]]
    offset = 0
    for part in parts:
        size = part.get_shape()[0] if hasattr(part, "get_shape") else len(part)
        taken.append(part[max(start - offset, 0) : max(min(stop - offset, size), 0)])
        offset += size
        if offset >= stop:
            break
    return torch.cat(taken)


def _place(parameter: Tensor) -> tuple[int, int]:
    """Return the rows of a parameter that are here; FSDP2 divides the first dimension, as `torch.chunk` does."""
    start = 0
    stop = parameter.shape[0]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                size = -(-parameter.shape[0] // mesh.size(axis))
                start = min(mesh.get_local_rank(axis) * size, parameter.shape[0])
                stop = min(start + size, parameter.shape[0])
    return start, stop


def _as_divided(part: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's part as a tensor that is divided as a parameter is."""
    part = part.to(local(parameter).device)
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
