"""The policy's weights for vLLM: its tensors as a checkpoint of the base model names them, and their way to a server.

The policy is not changed: an adapter is merged into one layer at a time, whose weights are put back bit by bit. They go
by a checkpoint in a folder that the server reads, or over NCCL, and come under a version; `again` brings the same ones
to a server that has lost them, without looking at the policy, which may be training.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from podium.engines.vllm.server import ServerGone, ServerRefused, VllmServer
from podium.errors import EngineError, ModelError
from podium.isolation.machine import own_address
from podium.lazy import imported
from podium.models.builtin import quiet_transformers
from podium.models.forward import base_model, is_quantized, unwrap
from podium.models.stored import outside, saved_names

PREFIX = "podium-"
"""Begins the versions that Podium gives to weights."""
FILE_BYTES = 64 << 20
"""Most bytes of one file of weights for a server, unless a tensor alone is larger."""
LOADING = "-loading"
"""At the end of a version: weights that are not all there yet."""
BACKENDS = {"nccl": "vllm.distributed.weight_transfer.nccl_engine:NCCLTrainerInitInfo"}
"""The ways of vLLM's `--weight-transfer-config` that are taken, with the class that says how a trainer joins them."""
ADAPTER_ALONE = (
    "Have the adapter sent alone: start a server (vllm_mode: server) with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and "
    "--enable-lora, as `podium check` prints it"
)
"""A fix."""
# fmt: off
PLAIN_LORA = frozenset({
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "init_lora_weights", "task_type", "inference_mode", "base_model_name_or_path", "revision",
    "peft_version", "auto_mapping",
})
# fmt: on
"""Options of LoRA that vLLM's adapters have, or that say nothing about the adapter; vLLM reads no others."""
KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base as it was; others put a share of it into the adapter."""


def rank_alone(adapter: Any) -> int | None:
    """Return the rank of an adapter that vLLM can have without its base; None for one that has to be merged.

    Args:
        adapter: PEFT's configuration; None where all weights are trained.
    """
    if type(adapter) is not LoraConfig:
        return None
    defaults = LoraConfig().to_dict()
    others = [name for name, value in adapter.to_dict().items() if name not in PLAIN_LORA and value != defaults[name]]
    return None if others or adapter.init_lora_weights not in KEEPS_BASE else adapter.r


def is_alone(policy: nn.Module) -> bool:
    """Return whether the policy trains nothing but an adapter that vLLM can have without its base."""
    model = unwrap(policy)
    if not isinstance(model, PeftModel) or model.active_adapters != ["default"]:
        return False
    base = base_model(policy)
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    adapted = any(isinstance(end, BaseTunerLayer) for end in ends)
    only_adapter = all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    of_encoder = any("lora_" in name for name in outside(model))  # which vLLM's adapters are not
    return rank_alone(model.peft_config["default"]) is not None and only_adapter and not adapted and not of_encoder


class ParameterFacts(NamedTuple):
    """A tensor that will be sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def described(policy: nn.Module, dtype: torch.dtype) -> list[ParameterFacts]:
    """Return what `tensors` will give, in order, without gathering anything. Raises `ModelError`."""
    return [
        ParameterFacts(name, dtype if tensor.is_floating_point() else tensor.dtype, tuple(tensor.shape))
        for name, _, tensor in _sent(policy)
    ]


@torch.no_grad()
def tensors(policy: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the base model once, in `dtype` where it is floating point, with the adapters' share in it.

    Of sharded weights each is gathered when its turn comes, so all processes have to iterate together. None is kept.

    Raises:
        ModelError: a quantized base, or an adapter that cannot be merged here.
    """
    for name, layer, tensor in _sent(policy):
        yield name, _whole(tensor, layer, dtype, _adapters(policy))


def _whole(tensor: Tensor, layer: Any, dtype: torch.dtype, adapters: Sequence[str]) -> Tensor:
    """Return a tensor of its own, gathered where it is sharded, with the adapters merged into its layer."""
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().to(dtype)
    with _merged(layer, adapters):
        return tensor.detach().to(dtype, copy=True)


def _adapters(policy: nn.Module) -> list[str]:
    """Return the names of the active adapters."""
    model = unwrap(policy)
    return list(model.active_adapters) if isinstance(model, PeftModel) else []


def _sent(policy: nn.Module) -> list[tuple[str, Any, Tensor]]:
    """Every tensor of the base model once: its name in a checkpoint, the adapted layer around it or None, itself.

    Where a checkpoint joins tensors or splits them, names are the model's.
    """
    own = [*_own(policy)]
    names = _renamed(base_model(policy), [name for name, _, _ in own])
    return [(names.get(name, name), layer, tensor) for name, layer, tensor in own]


def _renamed(base: Any, own: Sequence[str]) -> dict[str, str]:
    """The names of tensors in a checkpoint by those in the model; empty where one joins tensors, or splits them."""
    names = saved_names(base, dict.fromkeys(own))
    return names if len(names) == len(own) else {}


def _own(policy: nn.Module) -> Iterator[tuple[str, Any, Tensor]]:
    """The same with the model's names."""
    base = base_model(policy)
    adapters = _adapters(policy)
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
        yield plain, layers.get(name.rpartition(".base_layer.")[0]), tensor


def _check(base: Any, layers: dict[str, Any]) -> None:
    tokens = [path for path in layers if "token_adapter" in path]
    ends = [end for end in (base.get_input_embeddings(), base.get_output_embeddings()) if end is not None]
    is_adapted = any(isinstance(end, BaseTunerLayer | ModulesToSaveWrapper) for end in ends)
    mistakes = (
        (
            is_quantized(base),
            "vLLM cannot take the weights of a quantized base: with the adapter merged they would be rounded again.",
            f"{ADAPTER_ALONE}; or load the base in bfloat16, or take use_vllm out: the live engine samples from it as "
            "it is.",
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
            f"{ADAPTER_ALONE}; or train the adapter with DDP instead of FSDP, or take use_vllm out.",
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


class Transfer(ABC):
    """The way of a policy's weights to the servers of a run."""

    @abstractmethod
    def bring(self, server: VllmServer, policy: nn.Module, version: str, *, here: bool) -> None:
        """Send the policy's weights to a server, under their version.

        Args:
            server: one of those of the run.
            policy: it is not changed. All processes call the method, as sharded weights are gathered together.
            version: the name of the weights.
            here: whether this process talks to the server.

        Raises:
            EngineError: they cannot be sent, or the server does not take them.
        """

    def keep(self, policy: nn.Module, version: str) -> None:
        """Keep the policy's weights for `again`, while earlier ones are sampled from.

        Args:
            policy: the whole of it, in a run of one process. It is not changed.
            version: the name of the weights.
        """
        raise NotImplementedError

    @abstractmethod
    def again(self, server: VllmServer, version: str) -> None:
        """Send the weights of the last `bring`, or of a later `keep`, to a server, without looking at the policy."""

    def version_at(self, server: VllmServer) -> str:
        """Return the version of the weights that the server has."""
        return server.weight_version()

    def asked(self, model: str, version: str) -> str:
        """Return the name under which the server samples from the weights; `model` is the name that it serves."""
        return model


class Folder(Transfer):
    """Through files: any device, any server that sees the folder under the same path."""

    def __init__(self, root: Path, dtype: torch.dtype, *, here: bool = True) -> None:
        """`dtype` is the server's: what it would round anyway need not travel. `here`: this process writes."""
        self.root = root.absolute()
        self.dtype = dtype
        self._versions: list[str] = []
        """Those that are in the folder."""
        self._current = ""
        """The version that servers sample from; empty: none yet."""
        if here:
            shutil.rmtree(self.root, ignore_errors=True)  # of a run that was killed
            weakref.finalize(self, _remove, self.root, self._versions)

    def bring(self, server: VllmServer, policy: nn.Module, version: str, *, here: bool) -> None:
        """See `Transfer`; a version is written once, for all servers."""
        if version not in self._versions:
            self._add(policy, version, here=here)
        self._current = version
        if here:
            self.again(server, version)

    def keep(self, policy: nn.Module, version: str) -> None:
        """See `Transfer`."""
        self._add(policy, version, here=True)

    def _add(self, policy: nn.Module, version: str, *, here: bool) -> None:
        """Write a version. Those before the one that servers sample from go first."""
        old = self._versions[: self._versions.index(self._current)] if self._current else []
        for name in old:
            shutil.rmtree(self.root / name, ignore_errors=True)
        self._versions[: len(old)] = []
        self._versions.append(version)
        self._write(policy, self.root / version, here=here)

    def _write(self, policy: nn.Module, folder: Path, *, here: bool) -> None:
        base = base_model(policy)
        if not here:
            for _ in tensors(policy, self.dtype):
                pass
        elif _renamed(base, [name for name, _, _ in _own(policy)]):
            with _written(folder):
                folder.mkdir(parents=True)
                base.config.save_pretrained(folder)
                _stream(tensors(policy, self.dtype), folder)
        else:  # a checkpoint joins tensors of the model, or splits them
            state = {name: x.cpu() for name, x in tensors(policy, self.dtype)}
            with _written(folder), quiet_transformers():
                base.save_pretrained(folder, state_dict=state)

    def again(self, server: VllmServer, version: str) -> None:
        """See `Transfer`."""
        self._current = version
        server.set_weight_version(version + LOADING)
        server.reload_weights(str(self.root / version))
        server.reset_prefix_cache()
        server.set_weight_version(version)


class AdapterFolder(Folder):
    """The adapter alone, through files: the server keeps the base that it was started with.

    The base may be divided over processes or rounded to 4 bits; it is never merged. Every version is an adapter of its
    own at the server, so that no request is answered by another one.
    """

    def __init__(self, root: Path, dtype: torch.dtype, *, here: bool = True) -> None:
        super().__init__(root, dtype, here=here)
        self._sent: set[str] = set()

    def _write(self, policy: nn.Module, folder: Path, *, here: bool) -> None:
        if here:  # every process has the whole adapter
            model: Any = unwrap(policy)
            with _written(folder):
                model.save_pretrained(folder, save_embedding_layers=False)

    def again(self, server: VllmServer, version: str) -> None:
        """See `Transfer`. Adapters that this run has sent before are taken off the server."""
        self._current = version
        before = server.adapters()
        if version not in before:
            try:
                server.load_adapter(version, str(self.root / version))
            except ServerRefused:
                if version not in server.adapters():  # another process may have sent it meanwhile
                    raise
        for name in self._sent.intersection(before) - {version}:
            server.unload_adapter(name)
        self._sent.add(version)

    def version_at(self, server: VllmServer) -> str:
        """See `Transfer`.

        Raises:
            EngineError: a run has replaced the base weights.
        """
        base = server.weight_version()
        if base.startswith(PREFIX):
            raise EngineError(
                f"The base weights of the vLLM server at {server.url} were replaced by a run's ({base}), and an "
                "adapter needs those that the server was started with.",
                fix="Start the server again.",
                url=server.url,
                version=base,
            )
        return self._current if self._current in server.adapters() else base

    def asked(self, model: str, version: str) -> str:
        """See `Transfer`: vLLM serves an adapter as a model."""
        return version


def _remove(root: Path, versions: list[str]) -> None:
    """Remove what a run has written, and the folder if no other run, such as a later one, writes into it."""
    for version in versions:
        shutil.rmtree(root / version, ignore_errors=True)
    with contextlib.suppress(OSError):
        root.rmdir()


def _stream(named: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write tensors into files of about `FILE_BYTES`, so that few are in memory at once, and their index."""
    files: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}
    total = 0

    def write() -> None:
        name = f"model-{len(set(files.values())):05d}.safetensors"
        save_file(waiting, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(waiting, name))
        waiting.clear()

    for name, tensor in named:
        if waiting and sum(x.nbytes for x in waiting.values()) + tensor.nbytes > FILE_BYTES:
            write()
        waiting[name] = tensor.cpu().contiguous()
        total += tensor.nbytes
    write()
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Raise an `EngineError` where a folder cannot be written inside of the context."""
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"Cannot write weights for vLLM into {folder}: {error.strerror or error}.",
            fix="Set vllm_weights_folder to a folder with room for two copies of the model.",
        ) from error


class Broadcast(Transfer):
    """Through a network, by vLLM's interface for weights: its engine of the same name here and in the server's workers.

    Every tensor is gathered, sent and forgotten, so that no process holds the whole model.
    """

    def __init__(self, server: VllmServer, backend: str, dtype: torch.dtype, *, port: int, here: bool = True) -> None:
        """Prepare to join the server's workers in a group of processes.

        Args:
            server: it was started with `--weight-transfer-config` for the same backend.
            backend: a key of `BACKENDS`.
            dtype: the server's.
            port: of this machine, where the group meets.
            here: whether this process talks to the server.
        """
        self.server = server
        self.dtype = dtype
        self._backend = backend
        self._port = port
        self._here = here
        self._version = ""
        self._policy: nn.Module | None = None
        self._engine: Any = None

    def _join(self) -> None:
        """Form the group, of this process and the server's workers. Raises `EngineError`."""
        if self._engine is not None:
            self._engine.shutdown()
        workers = int(self.server.call("/get_world_size")["world_size"]) if self._here else 0
        address = own_address(str(urlparse(self.server.url).hostname))
        place = imported(BACKENDS[self._backend])
        info = place(address, self._port, 1 + workers, rank=0 if self._here else 1)
        factory = imported("vllm.distributed.weight_transfer:WeightTransferTrainerFactory")
        self._engine = factory.trainer_init(info, client=self, source=self)

    def bring(self, server: VllmServer, policy: nn.Module, version: str, *, here: bool) -> None:
        """See `Transfer`. A server that was restarted joins a new group."""
        self._policy = policy
        if self._engine is None or (here and server.weight_version() != self._version):
            self._join()
        self._version = version
        if here:
            server.set_weight_version(version + LOADING)
        self._engine.send_weights()
        self._policy = None
        if here:
            server.refresh_head()
            server.reset_prefix_cache()

    def again(self, server: VllmServer, version: str) -> None:
        """Raise the error of a group that died with the server."""
        lost = f"The vLLM server at {server.url} was restarted and has lost the weights"
        raise ServerGone(f"{lost}, which go to it through a group of processes, and only between rounds.", lost=lost)

    # ---- the source of weights, as vLLM's engine reads it ----

    def metadata(self) -> list[ParameterFacts]:
        """Return what iteration will give."""
        assert self._policy is not None
        return described(self._policy, self.dtype)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        assert self._policy is not None
        return tensors(self._policy, self.dtype)

    # ---- the server, as vLLM's engine asks it ----

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the server's workers join the group."""
        self.server.call("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Have them expect weights."""
        self.server.call("/start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        """Have them receive tensors; returns when they have all."""
        self.server.call("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have them sample from the new weights, under their version."""
        self.server.call("/finish_weight_update", {"weight_version": weight_version or self._version})
