"""Norms, gated units and token lookups that keep less for the backward and pass over memory less often.

On a CPU, where a forward's time outside its matrix products goes into reading and writing activations. The formulas are
the model's own; a layer is replaced only where a trial has shown that (PyTorch's own lookup needs none).

Shape letters: T tokens, D width, I inner width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podium.models.devices import kind_of
from podium.models.modes import replaced
from podium.models.precision import accumulated, narrow_product, rounded_weight

CLOSE = 1e-4
"""Largest difference from a layer's own output, relative to that output's size, at which it may be replaced."""


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
