"""The live engine on a second copy of the policy, for rollouts that overlap training.

The copy has modules of its own, so that sampling may run in a thread while the policy's are trained; what is frozen and
lies on the same device is shared. It is as new as its last `sync`.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from podium.engines.base import Interrupted
from podium.engines.live.engine import LiveEngine
from podium.models.blocks import lean_precision
from podium.models.forward import Precision, unwrap
from podium.models.precision import ProductPrecision


class CopyEngine(LiveEngine):
    """The live engine with weights of its own, which can be interrupted."""

    own_weights = True

    def __init__(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        precision: Precision,
        max_rows: int | None = None,
    ) -> None:
        """`precision` is the policy's context; the copy computes as it does."""
        model = copy_of(policy, device)
        self._theirs, self._own = precision, None
        if isinstance(precision, ProductPrecision):
            self._own = lean_precision(model, enabled=precision.enabled)
        sampling = precision if self._own is None else self._own.sampling
        super().__init__(model, tokenizer, precision=sampling, max_rows=max_rows)
        self._unwanted = threading.Event()
        self._taken: dict[str, tuple[int, int]] = {}
        model.register_forward_pre_hook(self._go_on)

    @torch.no_grad()
    def sync(self, policy: nn.Module, version: int) -> None:
        """Everything that is trained, LoRA included; what is frozen once. Also whether products are rounded."""
        self._unwanted.clear()
        if isinstance(self._theirs, ProductPrecision) and self._own is not None:
            self._own.enabled = self._theirs.enabled
        own = dict(tensors_of(self.model))
        for name, theirs in tensors_of(unwrap(policy)):
            state = theirs._version, theirs.data_ptr()
            if own[name] is not theirs and (theirs.requires_grad or self._taken.get(name) != state):
                own[name].copy_(theirs)
                self._taken[name] = state
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()

    def interrupt(self) -> None:
        """Before its next forward."""
        self._unwanted.set()

    def _go_on(self, *_: Any) -> None:
        if self._unwanted.is_set():
            raise Interrupted


def copy_of(policy: nn.Module, device: torch.device) -> nn.Module:
    """A frozen copy; on the policy's own device it shares the parameters that are not trained."""
    shared = {id(p): p for p in policy.parameters() if not p.requires_grad and p.device == device}
    copied = copy.deepcopy(policy, dict(shared)).eval().requires_grad_(False)
    return copied if all(p.device == device for p in copied.parameters()) else copied.to(device)


def tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers by their names."""
    return [*model.named_parameters(), *model.named_buffers()]
