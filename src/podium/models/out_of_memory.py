"""A GPU that runs out of memory, as one message: what took it, and which setting to lower."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from podium.errors import ModelError
from podium.errors.texts import as_line
from podium.models.memory import LEAST_PACK


@contextlib.contextmanager
def explained(doing: str, held: Callable[[], dict[str, int]], fix: Callable[[], str]) -> Iterator[None]:
    """Raise a `ModelError` in place of torch's out-of-memory error.

    Args:
        doing: `sampling` or `training`.
        held: bytes by what holds them; asked for when it is too late.
        fix: what to lower.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        parts = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in held().items() if size)
        device = ""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            device = f"of the device's {total / 1e9:.1f} GB {free / 1e9:.1f} are free (other processes count, too); "
        raise ModelError(
            "M024.memory_device_used",
            fix=fix(),
            doing=doing,
            parts=parts,
            device=device,
            reason=str(error).splitlines()[0][:200],
        ) from error


def held_by(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states on this device."""
    parameters = list(model.parameters())
    states = optimizer.state.values() if optimizer is not None else ()
    return {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "optimizer states": sum(x.nbytes for state in states for x in state.values() if isinstance(x, Tensor)),
    }


def smaller_packs(tokens_per_pack: int, *, checkpointing: bool) -> str:
    """Setting to type when activations did not fit."""
    if tokens_per_pack >= 2 * LEAST_PACK:
        return as_line("tokens_per_pack", tokens_per_pack // 2)
    return as_line("max_completion_length", "a smaller number") if checkpointing else "gradient_checkpointing: true"


def fewer_rows(batch: int, group: int) -> str:
    """Setting to type when too many completions were sampled at once."""
    smaller = batch // 2 // group * group
    if smaller:
        return as_line("per_device_train_batch_size", smaller) + ", with gradient_accumulation_steps twice as large"
    return as_line("num_generations", max(2, group // 2))
