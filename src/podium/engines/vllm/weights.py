"""The policy's tensors as a checkpoint of its base model names them, adapters merged, and when they are sent.

The policy is not changed: an adapter is merged into one layer at a time, whose weights are put back bit by bit.
"""

from __future__ import annotations

import contextlib
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from podium.engines.base import RolloutEngine
from podium.errors import ModelError
from podium.models.builtin import quiet_transformers
from podium.models.forward import base_model, is_quantized, unwrap

PREFIX = "podium-"
"""Begins the versions that Podium gives to weights."""


class SyncedEngine(RolloutEngine):
    """An engine whose weights are the policy's of the last `sync`, under a version of their own."""

    name = "vllm"
    own_weights = True
    processed_logps = True

    def __init__(self, agree: Callable[[Any], Any] = lambda value: value) -> None:
        """`agree` gives the first process's value on every process."""
        self._agree = agree
        self._run = uuid.uuid4().hex[:8]
        self._count = 0
        self._sent: tuple[int, int] | None = None
        self._version = ""

    def sync(self, policy: nn.Module, version: int) -> None:
        """Bring the policy's weights, unless they are those that were brought last. All processes call it."""
        if (state := (version, changes(policy))) == self._sent:
            return
        self._count += 1
        self._version = self._agree(f"{PREFIX}{self._run}-{self._count}-step-{version}")
        self.bring(policy)
        self._sent = state

    @abstractmethod
    def bring(self, policy: nn.Module) -> None:
        """Make the policy's weights the engine's, under the version that has been set."""


def changes(policy: nn.Module) -> int:
    """A number that grows whenever a parameter is written to, by an optimizer or by anyone else."""
    return sum(p._version for p in policy.parameters())


@torch.no_grad()
def tensors(policy: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the base model once, in `dtype` where it is floating point, with the adapters' share in it.

    Of sharded weights each is gathered when its turn comes, so all processes have to iterate together.

    Raises:
        ModelError: a quantized base, or an adapter that cannot be merged here.
    """
    base = base_model(policy)
    model = unwrap(policy)
    adapters = list(getattr(model, "active_adapters", [])) if isinstance(model, PeftModel) else []
    layers = {path: m for path, m in base.named_modules() if isinstance(m, BaseTunerLayer)}
    _check(base, layers)
    inside = {id(x) for m in layers.values() for x in m.state_dict(keep_vars=True).values()}
    inside -= {id(x) for m in layers.values() for x in m.get_base_layer().state_dict(keep_vars=True).values()}
    seen = set(inside)
    for name, tensor in base.state_dict(keep_vars=True).items():
        plain = _plain(name, adapters)
        if id(tensor) in seen or plain is None:
            continue
        seen.add(id(tensor))  # tied weights have two names
        with _merged(layers.get(name.rpartition(".base_layer.")[0]), adapters):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            copied = whole.detach().to(dtype if whole.is_floating_point() else whole.dtype, copy=True)
        yield plain, copied


def write(policy: nn.Module, folder: Path, dtype: torch.dtype, *, here: bool) -> None:
    """A checkpoint of the base model. With sharded weights all processes call it; the one that is `here` writes."""
    state = {name: x.cpu() if here else x.new_empty(0) for name, x in tensors(policy, dtype)}
    if here:
        with quiet_transformers():
            base_model(policy).save_pretrained(folder, state_dict=state)


def _check(base: Any, layers: dict[str, Any]) -> None:
    tokens = [path for path in layers if "token_adapter" in path]
    ends = [each for each in (base.get_input_embeddings(), base.get_output_embeddings()) if each is not None]
    is_adapted = any(isinstance(each, BaseTunerLayer | ModulesToSaveWrapper) for each in ends)
    mistakes = (
        (
            is_quantized(base),
            "vLLM cannot take the weights of a quantized base: with the adapter merged they would be rounded again.",
            "Load the base in bfloat16, or take use_vllm out: the live engine samples from it as it is.",
        ),
        (
            tokens,
            f"The adapter trains single tokens ({next(iter(tokens), '')}), which cannot be sent to vLLM.",
            "Take trainable_token_indices out, or use_vllm.",
        ),
        (
            is_adapted and base.config.get_text_config().tie_word_embeddings,
            "The adapter changes the input embedding or head, which share one weight in vLLM (tie_word_embeddings).",
            "Take embed_tokens and lm_head out of target_modules and modules_to_save, or take use_vllm out.",
        ),
        (
            any(isinstance(p, DTensor) for layer in layers.values() for p in layer.parameters()),
            "vLLM gets the adapter merged into its base, and here the base is divided over processes.",
            "Train the adapter with DDP instead of FSDP, or take use_vllm out.",
        ),
    )
    for found, what, fix in mistakes:
        if found:
            raise ModelError(what, code="C014", fix=fix)


def _plain(name: str, adapters: Sequence[str]) -> str | None:
    """The name without what PEFT wraps around layers; None for what the base model's checkpoint does not have.

    >>> _plain("model.layers.0.mlp.up_proj.base_layer.weight", ["default"])
    'model.layers.0.mlp.up_proj.weight'
    >>> _plain("lm_head.modules_to_save.default.weight", ["default"])
    'lm_head.weight'
    >>> _plain("lm_head.original_module.weight", ["default"]) is None
    True
    """
    name = name.replace(".base_layer.", ".")
    for adapter in adapters:
        name = name.replace(f".modules_to_save.{adapter}.", ".")
    return None if ".original_module." in name or ".modules_to_save." in name else name


@contextlib.contextmanager
def _merged(layer: Any, adapters: Sequence[str]) -> Iterator[None]:
    """Inside, an adapted layer's base has the adapters in its weights; afterwards it is as before, to the bit."""
    if layer is None or layer.merged:
        yield
        return
    own = dict(layer.get_base_layer().named_parameters())
    before = {name: p.detach().clone() for name, p in own.items()}
    layer.merge(adapter_names=[name for name in adapters if name in layer.active_adapters])
    try:
        yield
    finally:
        layer.unmerge()
        for name, p in own.items():
            p.data.copy_(before[name])
