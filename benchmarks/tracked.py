"""Peak memory of a training step, found without a GPU: torch's memory tracker over fake tensors.

    peak = track(config, trained="lora", tokens_per_pack=4096)
    peak.weights, peak.gradients, peak.optimizer, peak.activations

A fake tensor has a shape and no storage, so a model of any size goes through Podium's own forward and backward, and
through an optimizer step, in seconds. The tensors say that they are on a CPU; the table of devices says that a CPU
computes as a GPU does, and attention calls the operators that CUDA would choose: flash attention where a row is causal,
memory-efficient attention where it has a mask. What no tensor shows is not counted: the CUDA context, workspaces of
libraries, memory that the allocator holds in pieces.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import DeviceMesh
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, PretrainedConfig

from podium.models import devices, head, precision
from podium.models.attention import tree_attention
from podium.models.forward import token_logps
from podium.models.head import LogitScaling
from podium.models.packing import Pack, pack, unscored
from podium.records import Sample

Trained = Literal["full", "lora", "qlora"]
Division = Literal["one", "ddp", "fsdp2"]
LARGEST_GROUP = 16
"""Processes of the fake group; a mesh may have fewer."""

LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
BLOCK = 64
"""Weights of 4 bits that share a scale in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes of one device when the most is allocated."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Everything else: what is kept for the backward, weights rounded by autocast, logits, temporaries."""

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def at_depth(self, other: Peak, layers: tuple[int, int], depth: int) -> Peak:
        """The peak at `depth` layers, on the line through this one and another at these two numbers of layers."""
        steps = (depth - layers[0]) / (layers[1] - layers[0])
        names = ("weights", "gradients", "optimizer", "activations")
        values = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return Peak(**{name: round(first + steps * (second - first)) for name, (first, second) in values.items()})


def track(
    config: PretrainedConfig,
    *,
    trained: Trained,
    tokens_per_pack: int,
    prompts: int = 8,
    num_generations: int = 8,
    prompt_tokens: int = 300,
    completion_tokens: int = 1024,
    checkpointing: bool = False,
    division: Division = "one",
    ranks: int = 1,
    layers: tuple[int, int] | None = (2, 3),
) -> Peak:
    """The peak of a training step with AdamW and bfloat16 autocast, on the largest pack, when gradients are there.

    With `layers` the model is run at these two depths, and the peak is on the line through both: every layer adds the
    same. DDP is one process with a wrapper's hooks on its gradients, and the reducer's buckets: 4 bytes a trained
    parameter, as accelerate does not set `gradient_as_bucket_view`.
    """
    depth = config.num_hidden_layers
    samples = made_up_samples(prompts, num_generations, prompt_tokens, completion_tokens)

    def at(count: int) -> Peak:
        return _track(
            _shallow(config, count),
            trained,
            samples,
            tokens_per_pack,
            checkpointing=checkpointing,
            division=division,
            ranks=ranks,
        )

    if layers is None:
        return at(depth)
    return at(layers[0]).at_depth(at(layers[1]), layers, depth)


def made_up_samples(prompts: int, num_generations: int, prompt_tokens: int, completion_tokens: int) -> list[Sample]:
    """Samples of random tokens, all of the greatest length: prompts and completions share next to nothing."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, 1000, count).tolist())

    return [
        unscored(prompt, tokens(completion_tokens))
        for prompt in (tokens(prompt_tokens) for _ in range(prompts))
        for _ in range(num_generations)
    ]


def _shallow(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The same model with fewer layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config


def _track(
    config: PretrainedConfig,
    trained: Trained,
    samples: Sequence[Sample],
    tokens_per_pack: int,
    *,
    checkpointing: bool,
    division: Division,
    ranks: int,
) -> Peak:
    mesh = fake_mesh(ranks) if division == "fsdp2" else None
    with as_if_cuda(alone=division == "one"), FakeTensorMode(allow_non_fake_inputs=True):
        model = build(config, trained)
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if mesh is not None:
            shard(model, mesh)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, fused=True)
        packed = max(pack(samples, tokens_per_pack=tokens_per_pack), key=lambda x: len(x.input_ids_T))
        _backward(model, packed)
        optimizer.step()
        tracker = MemTracker() if mesh is None else FSDPMemTracker(model, optimizer)
        tracker.track_external(model, optimizer)
        nothing = RemovableHandle(OrderedDict())
        for frozen in (p for p in model.parameters() if not p.requires_grad):  # it would put hooks on their gradients
            tracker._param_to_grad_hook_handles[frozen] = (nothing, nothing)
        with tracker:
            _backward(model, packed)  # gradients are there, as for every pack of a step but the first
            if mesh is None:  # of sharded tensors whole ones are made to find shapes, and would be counted
                optimizer.step()
        found = _peak(tracker)
        buckets = 4 * sum(p.numel() for p in parameters) if division == "ddp" else 0
        return replace(found, gradients=found.gradients + buckets)


def fake_mesh(ranks: int) -> DeviceMesh:
    """A process group of so many processes of which this is the first, and the others do not exist."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", rank=0, world_size=LARGEST_GROUP, store=FakeStore())
    return DeviceMesh("cpu", torch.arange(ranks))


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Divide the model as accelerate does for FSDP2: layers, the input embedding, the head; adapters stay whole."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)
    adapters = {p for p in model.parameters() if p.requires_grad} if hasattr(model, "get_base_model") else None
    divide = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=adapters)
    inner, head = model.get_decoder(), model.get_output_embeddings()
    embedding = inner.embed_tokens
    for layer in inner.layers:
        divide(layer)
    tail = [inner.norm, embedding, head] if embedding.weight is head.weight else [inner.norm, head]
    if len(tail) == 2:
        divide(embedding)
    divide(tail, reshard_after_forward=False)
    divide(model, reshard_after_forward=False)


def build(config: PretrainedConfig, trained: Trained) -> Any:
    """The model as Podium loads it for a GPU: float32 where it is trained, bfloat16 where it is frozen."""
    dtype = torch.float32 if trained == "full" else torch.bfloat16
    with torch.device("meta"):  # PEFT moves the adapter's tensors, which fake ones refuse
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        if trained != "full":
            model = get_peft_model(model, copy.deepcopy(LORA))
    if trained == "qlora":
        _round_linears(model)
    return _with_storage(model)


def _with_storage(model: nn.Module) -> nn.Module:
    """A new tensor for every one on the meta device; tied ones stay tied."""
    made: dict[Tensor, Tensor] = {}

    def replaced(tensor: Tensor) -> Tensor:
        if tensor not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return made[tensor]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: replaced(tensor) for name, tensor in held.items() if tensor is not None})
    return model


def _backward(model: nn.Module, packed: Pack) -> None:
    """Forward, a policy loss and backward of one pack, in the contexts in which the trainer runs them."""
    with tree_attention(model), torch.autocast("cpu", dtype=torch.bfloat16):
        out = token_logps(model, packed, temperature=1.0, head=LogitScaling())
        loss = -((out.logps_N - out.logps_N.detach()).exp() * packed.advantages_N).mean()
        loss.backward()


def _peak(tracker: MemTracker) -> Peak:
    [snapshot] = [parts for device, parts in tracker.get_tracker_snapshot("peak").items() if device.type == "cpu"]
    found = {str(getattr(name, "value", name)): size for name, size in snapshot.items()}
    weights, gradients, optimizer = (sum(found.get(name, 0) for name in names) for names in KEPT)
    return Peak(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=found["Total"] - weights - gradients - optimizer,
    )


KEPT = (
    ("Parameter", "Sharded Param", "Unsharded Param", "All Gather"),
    ("Gradient", "Sharded Grad", "Unsharded Grad", "Reduce Scatter"),
    ("Optstate", "OptState"),
)
"""The trackers' names for weights, gradients and optimizer."""


# ---- a CPU in a GPU's place ----


@contextlib.contextmanager
def as_if_cuda(*, alone: bool = True) -> Iterator[None]:
    """Within this context a CPU computes as CUDA does. `alone`: as one process, without data-parallel hooks."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(devices.KINDS, cpu=devices.KINDS["cuda"]))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", cuda_attention))
        stack.enter_context(mock.patch.object(precision, "_returns_float32", return_value=True))
        if alone:  # the tracker's own hooks would look like those of a wrapper
            stack.enter_context(mock.patch.object(head, "accumulated", _accumulated))
        yield


def _accumulated(weight: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor | None:
    """`precision.accumulated` where nobody listens to gradients."""
    if weight.grad is None:
        return add(torch.zeros_like(weight))
    add(weight.grad)
    return None


ALIGNED = 8
"""Elements that a row of a mask must be a multiple of."""


def cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the operator that CUDA chooses for bfloat16, called by name: a CPU would choose another one.

    Both keep the output and a log-sum-exp. The memory-efficient one keeps its mask as well, in rows of a multiple of
    eight: where they are not, it makes a copy in every layer (`pad_bias` in ATen's attention.cpp).
    """
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[
            0
        ]
    width = attn_mask.shape[-1]
    if width % ALIGNED:
        attn_mask = F.pad(attn_mask, (0, -width % ALIGNED))[..., :width]
    mask = attn_mask.expand(*query.shape[:3], width)
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, dropout_p, is_causal, scale=scale
    )[0]


# ---- weights in 4 bits ----


class Rounded(nn.Linear):
    """Stands for bitsandbytes' linear layer: 4 bits a weight, made bfloat16 for each product, forward and backward."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        count = linear.weight.numel()
        rounded = torch.empty(count // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.scales = nn.Parameter(torch.empty(count // BLOCK, device="meta"), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., O], in the type of x."""
        y = _RoundedProduct.apply(x.to(torch.bfloat16), self).to(x.dtype)
        return y if self.bias is None else y + self.bias


class _RoundedProduct(torch.autograd.Function):
    """y = x W^T; keeps neither x nor the wide weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Rounded) -> Tensor:
        ctx.layer = layer
        return x @ _wide(layer).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ _wide(ctx.layer), None


def _wide(layer: Rounded) -> Tensor:
    return torch.empty(layer.out_features, layer.in_features, dtype=torch.bfloat16)


def _round_linears(model: Any) -> None:
    """Put `Rounded` in place of every linear layer that has an adapter."""
    for parent in list(model.modules()):
        if isinstance(base := getattr(parent, "base_layer", None), nn.Linear):
            parent.base_layer = Rounded(base)
