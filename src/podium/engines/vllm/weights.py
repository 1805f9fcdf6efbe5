"""The policy's weights for vLLM: its tensors as a checkpoint of the base model names them, and their way to a server.

The policy is not changed: an adapter is merged into one layer at a time, whose weights are put back bit by bit. They go
by a checkpoint in a folder that the server reads, or over NCCL, and come under a version; `again` brings the same ones
to a server that has lost them, without looking at the policy, which may be training.
"""

from __future__ import annotations

import contextlib
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from trl.generation.vllm_client import VLLMClient

from podium.engines.vllm.server import VllmServer
from podium.errors import EngineError, ModelError
from podium.models.builtin import quiet_transformers
from podium.models.forward import base_model, is_quantized, unwrap

LOADING = "-loading"
"""At the end of a version: weights that are not all there yet."""


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


def _check(base: Any, layers: dict[str, Any]) -> None:
    tokens = [path for path in layers if "token_adapter" in path]
    ends = [end for end in (base.get_input_embeddings(), base.get_output_embeddings()) if end is not None]
    is_adapted = any(isinstance(end, BaseTunerLayer | ModulesToSaveWrapper) for end in ends)
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


# ---- their way to a server ----


class Folder:
    """Through files: any device, any server that sees the folder under the same path."""

    def __init__(
        self, server: VllmServer, root: Path, dtype: torch.dtype, *, here: bool = True, refresh: bool = False
    ) -> None:
        """`dtype` is the server's: what it would round anyway need not travel. `here`: this process talks to it."""
        self.server = server
        self.root = root.absolute()
        self.dtype = dtype
        self.refresh = refresh
        self._count = 0
        if here:
            shutil.rmtree(self.root, ignore_errors=True)  # of a run that was killed
            weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    @property
    def _newest(self) -> Path:
        return self.root / str(self._count)

    def bring(self, policy: nn.Module, version: str, *, here: bool) -> None:
        """All processes call it; the one that is `here` writes. The checkpoint before goes when the new one is there.

        Raises:
            EngineError: the checkpoint cannot be written, or the server does not take it.
        """
        old = self._newest
        self._count += 1
        state = {name: x.cpu() if here else x.new_empty(0) for name, x in tensors(policy, self.dtype)}
        if not here:
            return
        try:
            with quiet_transformers():
                base_model(policy).save_pretrained(self._newest, state_dict=state)
        except OSError as error:
            raise EngineError(
                f"Cannot write weights for vLLM into {self._newest}: {error.strerror or error}.",
                fix="Set vllm_weights_folder to a folder with room for two copies of the model.",
            ) from error
        self.again(version)
        shutil.rmtree(old, ignore_errors=True)

    def again(self, version: str) -> None:
        """Have the server, which may have been restarted, read the newest checkpoint."""
        self.server.set_weight_version(version + LOADING)
        self.server.reload_weights(str(self._newest), refresh=self.refresh)
        self.server.reset_prefix_cache()
        self.server.set_weight_version(version)


class Nccl(VLLMClient):
    """From GPU to GPU, by TRL's client: its packing and its groups, our HTTP and versions."""

    def __init__(
        self, server: VllmServer, *, group_port: int, device: torch.device, dtype: torch.dtype, here: bool = True
    ) -> None:
        # Not TRL's: it waits for the server in its own way, and repeats requests that are not to be repeated.
        self.server = server
        self.base_url = server.url
        self.group_port = group_port
        self.dtype = dtype
        self.communicator: Any = None
        self._updating_weights = False
        self._version = ""
        self._metadata: list[tuple[str, str, list[int]]] | None = None
        if here:
            self.init_communicator(device=device)

    def bring(self, policy: nn.Module, version: str, *, here: bool) -> None:
        """As `Folder.bring`. The server must know every tensor before the first comes: the first time costs twice."""
        kind = str(self.dtype).removeprefix("torch.")
        if self._metadata is None:
            self._metadata = [(name, kind, list(x.shape)) for name, x in tensors(policy, self.dtype)]
        if not here:
            for _ in tensors(policy, self.dtype):
                pass
            return
        self._version = version
        self.server.set_weight_version(version + LOADING)
        self.update_named_params(self._metadata, tensors(policy, self.dtype))
        self.server.reset_prefix_cache()

    def again(self, version: str) -> None:
        """NCCL's group died with the server."""
        lost = f"The vLLM server at {self.server.url} was restarted and has lost the weights"
        raise EngineError(f"{lost}; NCCL cannot join it again.", lost=lost)

    # ---- what TRL's client asks of HTTP ----

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self.server.call(url.removeprefix(self.base_url))

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self.server.call(url.removeprefix(self.base_url), kwargs.get("json") or {})

    def get_server_info(self) -> dict[str, Any]:
        """The server's configuration."""
        return self.server.info()

    def _finish_weight_update(self) -> None:
        self.server.call("/finish_weight_update", {"weight_version": self._version})
