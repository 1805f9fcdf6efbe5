"""Layers that keep less for the backward and pass over memory less often, and decoder layers as one function each.

On a CPU, where a forward's time outside its matrix products goes into reading and writing activations, and that of a
sampling step into its many small operations. `LeanLayers` are norms, gated units and token lookups. `Blocks`, for
sampling alone, are Llama's layers (Touvron et al., arXiv:2302.13971, section 2.2), which Qwen and others share:

    x <- x + O attend(rotate(Q n(x)), rotate(K n(x)), V n(x)),    x <- x + W (silu(G m(x)) * (U m(x)))

with root mean square norms n and m. The formulas are the model's own; a layer is replaced only where a trial has shown
that (PyTorch's own lookup needs none).

Shape letters: T tokens, D width (of a head in a block), I inner width, V vocabulary, H query heads, J key/value heads,
E width of the model in a block.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podium.models.attention import NAME, Attends, LayerShape, attention_implementation
from podium.models.devices import kind_of
from podium.models.modes import replaced
from podium.models.precision import ProductPrecision, accumulated, narrow_product, product, rounded_weight

CLOSE = 1e-4
"""Largest difference from a layer's own output, relative to that output's size, at which it may be replaced."""

NORMS = ("input_layernorm", "post_attention_layernorm")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
"""Qwen 3 has them (Henry et al., arXiv:2010.04245)."""


def lean_precision(model: nn.Module, *, enabled: bool) -> ProductPrecision:
    """Products of a model in evaluation mode, rounded or not, with everything lean around them."""
    return ProductPrecision(model, enabled=enabled, lean=LeanLayers(model), blocks=Blocks(model))


class LeanLayers:
    """Inside `with lean():` the layers that it knows compute the same with less memory."""

    def __init__(self, model: nn.Module) -> None:
        self._forwards = {module: forward for module in model.modules() if (forward := lean_forward(module))}

    def __len__(self) -> int:
        return len(self._forwards)

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        """The context; entering it inside itself changes nothing."""
        own = self._forwards.items()
        return replaced((module, "forward", forward) for module, forward in own if "forward" not in vars(module))


def lean_forward(module: nn.Module) -> Callable[..., Tensor] | None:
    """The function that replaces a layer's forward; None: the layer is left alone."""
    for recognised, forward in LAYERS:
        if recognised(module) and _same(module, candidate := functools.partial(forward, module)):
            return candidate
    return None


@torch.no_grad()
def _same(module: nn.Module, candidate: Callable[[Tensor], Tensor]) -> bool:
    """Whether a candidate gives what the layer gives, on made-up input."""
    if isinstance(module, nn.Embedding):
        return True
    weights = list(module.parameters())
    if any(weight.dtype != torch.float32 or not kind_of(weight.device).lean_layers for weight in weights):
        return False
    x = torch.linspace(-2, 3, 2 * weights[0].shape[-1]).sin().view(1, 2, -1)
    expected = module(x)
    return bool((candidate(x) - expected).abs().max() <= CLOSE * expected.abs().max())


# ---- root mean square norm ----


def is_norm(module: nn.Module) -> bool:
    """By its name and its parts; what it computes shows in a trial."""
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm")
    return named and isinstance(weight, Tensor) and weight.dim() == 1 and epsilon(module) is not None


def epsilon(module: nn.Module) -> float | None:
    """The number that a norm adds to the mean square."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def inverse_size(x: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x^2) + epsilon) over the last dimension, which is kept."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return size.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


class RMSNorm(torch.autograd.Function):
    """y = w x / sqrt(mean(x^2) + epsilon) (Zhang and Sennrich 2019, equation 4); keeps x and one number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        scale = inverse_size(x, epsilon)
        ctx.save_for_backward(x, weight_D, scale)
        return (x * scale).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With n = x s: dw = sum g n; dx = s (g w - n mean(g w n))."""
        x, weight_D, scale = ctx.saved_tensors
        normal = x * scale
        product = grad * normal
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = product.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            mean = (product @ weight_D).div_(x.shape[-1]).unsqueeze(-1)
            grad_x = (grad * weight_D).sub_(normal.mul_(mean)).mul_(scale)
        return grad_x, grad_weight, None


# ---- gated linear unit ----


def is_gated(module: nn.Module) -> bool:
    """By its parts; what it computes shows in a trial."""
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return all(isinstance(getattr(module, name, None), nn.Module) for name in parts)


def _gated(module: nn.Module, x: Tensor) -> Tensor:
    gate = narrow_product(module.gate_proj, x)
    up = narrow_product(module.up_proj, x)
    down16_DI = rounded_weight(module.down_proj) if torch.is_grad_enabled() else None
    if down16_DI is None:
        return module.down_proj(SwiGLU.apply(gate, up))
    return GatedProduct.apply(gate, up, module.down_proj.weight, down16_DI).float()


UNIT_ROWS = 128
"""Tokens whose unit is computed at once: float32 copies of more of them leave a processor's cache."""


def gated_unit(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up [..., I], computed in float32, in the precision of its factors."""
    if gate.numel() <= UNIT_ROWS * gate.shape[-1]:
        return F.silu(gate.float()).mul_(up).to(gate.dtype)
    unit = torch.empty_like(gate, memory_format=torch.contiguous_format)
    tensors = (x.flatten(0, -2).split(UNIT_ROWS) for x in (gate, up, unit))
    for gate_XI, up_XI, unit_XI in zip(*tensors, strict=True):
        unit_XI.copy_(F.silu(gate_XI.float()).mul_(up_XI))
    return unit


def _unit_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both factors; some rows at a time, as in `gated_unit`."""
    grad_gate, grad_up = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    tensors = (x.flatten(0, -2).split(UNIT_ROWS) for x in (grad, gate, up, grad_gate, grad_up))
    for grad_XI, gate_XI, up_XI, grad_gate_XI, grad_up_XI in zip(*tensors, strict=True):
        gate32 = gate_XI.float()
        grad32 = grad_XI.float()
        grad_up_XI.copy_(F.silu(gate32).mul_(grad32))
        grad_gate_XI.copy_(torch.ops.aten.silu_backward(grad32.mul_(up_XI), gate32))
    return grad_gate, grad_up


class SwiGLU(torch.autograd.Function):
    """silu(gate) up (Shazeer 2020, equation 6); keeps its two factors only, in the precision in which they came."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gated_unit(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _unit_backward(grad, *ctx.saved_tensors)


class GatedProduct(torch.autograd.Function):
    """(silu(gate) up) W^T in bfloat16; the unit is computed again in the backward, where W's gradient needs it."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight_DI: Tensor, rounded_DI: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.weight_DI = weight_DI
        ctx.rounded_DI = rounded_DI
        return F.linear(gated_unit(gate, up), rounded_DI)

    @staticmethod
    def backward(ctx: Any, grad16: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[2]:
            product = grad16.flatten(0, -2).T @ gated_unit(gate, up).flatten(0, -2)
            grad_weight = accumulated(ctx.weight_DI, lambda total: total.add_(product))
        return *_unit_backward(grad16 @ ctx.rounded_DI, gate, up), grad_weight, None


# ---- token lookup ----


def _is_lookup(module: nn.Module) -> bool:
    if type(module) is not nn.Embedding or module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return False
    return module.weight.dtype == torch.float32 and kind_of(module.weight.device).lean_layers


def _lookup(module: nn.Embedding, ids: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and module.weight.requires_grad):
        return F.embedding(ids, module.weight)
    return Lookup.apply(ids, module.weight, module.padding_idx)


class Lookup(torch.autograd.Function):
    """Rows of a table; their gradients are added where they belong, without a table of mostly zeros."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VD: Tensor, padding: int | None) -> Tensor:
        ctx.ids = ids
        ctx.weight_VD = weight_VD
        ctx.padding = padding
        return F.embedding(ids, weight_VD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        ids = ctx.ids.flatten()
        grad = grad.flatten(0, -2)
        if ctx.padding is not None:
            kept = ids != ctx.padding
            ids = ids[kept]
            grad = grad[kept]
        return None, accumulated(ctx.weight_VD, lambda total: total.index_add_(0, ids, grad)), None


LAYERS: tuple[tuple[Callable[[Any], bool], Callable[[Any, Tensor], Tensor]], ...] = (
    (is_norm, lambda module, x: RMSNorm.apply(x, module.weight, epsilon(module))),
    (is_gated, _gated),
    (_is_lookup, _lookup),
)
"""Layers by the function that recognises them, with their replacement."""


# ---- decoder layers, for sampling ----


class Blocks:
    """Inside `with blocks():` the layers that it knows compute the same in fewer operations, without gradients."""

    def __init__(self, model: nn.Module) -> None:
        """The model must be in evaluation mode: the layers are tried."""
        rotary = next((m for name, m in model.named_modules() if name.endswith("rotary_emb")), None)
        rotation = Rotation()
        tried = (block_of(layer, rotary, rotation) for layer in model.modules() if rotary and _is_known(layer))
        self._blocks = [block for block in tried if block is not None]

    def __len__(self) -> int:
        return len(self._blocks)

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        """The context; entering it inside itself changes nothing. A layer with hooks inside is left alone."""
        entered = []
        for block in self._blocks:
            inside = (module for module in block.layer.modules() if module is not block.layer)
            if "forward" not in vars(block.layer) and not any(m._forward_hooks or m._forward_pre_hooks for m in inside):
                entered.append((block.layer, "forward", block))
        return replaced(entered)


class Rotation:
    """Rotary positions (Su et al., arXiv:2104.09864, equation 34), halves apart, prepared once for all layers."""

    def __init__(self) -> None:
        self._made_of: Tensor | None = None

    def __call__(self, x_THD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor) -> Tensor:
        """Queries and keys [T, H, D] turned by their positions' angles."""
        if self._made_of is not sin_1TD:
            half = sin_1TD.shape[-1] // 2
            self._made_of = sin_1TD
            self._cos = cos_1TD[0].unsqueeze(1)
            self._sin = torch.cat([-sin_1TD[0, :, :half], sin_1TD[0, :, half:]], -1).unsqueeze(1)
        return torch.addcmul(x_THD * self._cos, x_THD.roll(x_THD.shape[-1] // 2, -1), self._sin)


class DecoderBlock:
    """One layer."""

    def __init__(self, layer: nn.Module, shape: LayerShape, rotation: Rotation) -> None:
        self.layer = layer
        self.shape = shape
        self.rotation = rotation
        self.head_width = layer.self_attn.head_dim

    def __call__(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], podium: Attends, **_: Any
    ) -> Tensor:
        """As the layer's forward: [1, T, E] -> [1, T, E]."""
        assert not torch.is_grad_enabled(), "a block has no backward"
        layer = self.layer
        attention = layer.self_attn
        mlp = layer.mlp
        x = hidden_states[0]
        normal = _normal(layer.input_layernorm, x)
        qkv_THD = product((attention.q_proj, attention.k_proj, attention.v_proj), normal).float()
        qkv_THD = qkv_THD.view(len(x), -1, self.head_width)
        heads = attention.o_proj.in_features // self.head_width
        turned = (qkv_THD.shape[1] + heads) // 2  # query and key heads
        query_key_THD = qkv_THD[:, :turned]
        if getattr(attention, "q_norm", None) is not None:
            query_THD = _normal(attention.q_norm, query_key_THD[:, :heads])
            key_THD = _normal(attention.k_norm, query_key_THD[:, heads:])
            query_key_THD = torch.cat([query_THD, key_THD], 1)
        turned_THD = self.rotation(query_key_THD, *position_embeddings)
        seen = podium.attend(
            turned_THD[:, :heads].transpose(0, 1),
            turned_THD[:, heads:].transpose(0, 1),
            qkv_THD[:, turned:].transpose(0, 1),
            self.shape,
        )
        x = x + product((attention.o_proj,), seen.flatten(1))
        gate, up = product((mlp.gate_proj, mlp.up_proj), _normal(layer.post_attention_layernorm, x)).chunk(2, -1)
        return x.add_(product((mlp.down_proj,), gated_unit(gate, up)))[None]


def _normal(norm: nn.Module, x: Tensor) -> Tensor:
    return (x * inverse_size(x, epsilon(norm))).mul_(norm.weight)


def _is_known(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    if set(children) != {"self_attn", "mlp", *NORMS} or not is_gated(children["mlp"]):
        return False
    attention = dict(children["self_attn"].named_children())
    with_norms = {*PROJECTIONS, *HEAD_NORMS}
    return set(attention) in (set(PROJECTIONS), with_norms) and all(is_norm(children[name]) for name in NORMS)


@torch.no_grad()
def block_of(layer: nn.Module, rotary: nn.Module, rotation: Rotation) -> DecoderBlock | None:
    """The layer as a `DecoderBlock`, or None where a trial on made-up input fails or gives something else."""
    if any(weight.dtype != torch.float32 or not kind_of(weight.device).lean_layers for weight in layer.parameters()):
        return None
    positions = torch.tensor([[0, 3, 50]])
    x = torch.linspace(-2, 3, 3 * len(layer.input_layernorm.weight)).sin().view(1, 3, -1)
    causal = _Causal()
    try:
        inputs = {"position_embeddings": rotary(x, positions), "position_ids": positions, "attention_mask": None}
        with attention_implementation(layer, NAME):
            expected = layer(x, **inputs, podium=causal)
        assert causal.shape is not None
        block = DecoderBlock(layer, causal.shape, rotation)
        difference = (block(x, **inputs, podium=causal) - expected).abs().max()
    except Exception:  # noqa: BLE001  any failure means the same: this layer is left alone
        return None
    return block if bool(difference <= CLOSE * expected.abs().max()) else None


class _Causal:
    """Plain causal attention that remembers what the layer says of itself."""

    shape: LayerShape | None = None

    def attend(self, query_HTD: Tensor, key_JTD: Tensor, value_JTD: Tensor, shape: LayerShape) -> Tensor:
        self.shape = shape
        output = F.scaled_dot_product_attention(
            query_HTD[None], key_JTD[None], value_JTD[None], is_causal=True, scale=shape.scaling, enable_gqa=True
        )
        return output[0].transpose(0, 1)
