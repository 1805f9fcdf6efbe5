"""Matrix products in bfloat16 over float32 weights: for processors that multiply half precision faster.

Weights, gradients, optimizer, norms, attention and the residual stream stay float32; only the two factors of a product
are rounded. The rounded copy of a weight is made once per optimizer step and serves sampling, scoring and training
alike, so what is sampled and what is trained agree. (Autocast makes it anew for every forward, and for frozen weights
for every token.)

Shape letters: T tokens, I input width, O output width.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

WORTH_IT = 1.3
"""Least advantage of bfloat16 products that is worth their rounding."""


def release_free_memory() -> None:
    """Give what the C allocator keeps for later back to the system.

    Sampling and training allocate in different sizes; without this a run on a CPU keeps the holes of both and grows by
    a quarter within some dozens of steps. Does nothing where the C library has no `malloc_trim`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Measured(NamedTuple):
    """Matrix rates in GFLOP/s."""

    float32: float
    bfloat16: float

    @property
    def bfloat16_pays(self) -> bool:
        """Whether to use it."""
        return self.bfloat16 > WORTH_IT * self.float32


def measure_products(rows: int = 256, width: int = 576, inner: int = 1536, repeats: int = 5) -> Measured:
    """The rate of a product [rows, width] x [width, inner] in both precisions on this CPU, now; takes about 20 ms."""
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(rows, width, dtype=dtype), torch.ones(inner, width, dtype=dtype)
        F.linear(x, weight)
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            F.linear(x, weight)
            best = min(best, time.perf_counter() - start)
        rates[str(dtype).removeprefix("torch.")] = 2e-9 * rows * width * inner / best
    return Measured(**rates)


ROUNDED = "_podium_rounded_weight"


class _Copy(NamedTuple):
    made_of: tuple[int, int, int]
    rounded: Tensor


_steps_taken = itertools.count()
_latest_step = [0]


def _count_step(*_: Any) -> None:
    _latest_step[0] = 1 + next(_steps_taken)


# Fused optimizers write to weights without raising their version, so every step of any optimizer counts.
register_optimizer_step_post_hook(_count_step)


def _state(weight: Tensor) -> tuple[int, int, int]:
    """Changes whenever the weight may have."""
    return weight._version, weight.data_ptr(), _latest_step[0] if weight.requires_grad else 0


NARROW = 64
"""Layers thinner than this (adapters) stay in float32: their products are cheap, and their changes small."""


class ProductPrecision:
    """Inside `with precision():` every wide `nn.Linear` of the model multiplies in bfloat16."""

    def __init__(
        self,
        model: nn.Module,
        *,
        enabled: bool,
        lean: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`lean` is entered with it: see `models.lean`."""
        self.enabled = enabled
        self._lean = lean
        self._linears = [
            m
            for m in model.modules()
            if type(m) is nn.Linear and m.weight.dtype == torch.float32 and min(m.weight.shape) >= NARROW
        ]
        self._last: tuple[Tensor, Tensor] | None = None
        self._copies: weakref.WeakKeyDictionary[nn.Module, _Copy] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """The context; entering it inside itself changes nothing."""
        entered = [m for m in self._linears if self.enabled and ROUNDED not in m.__dict__]
        for module in entered:
            setattr(module, ROUNDED, functools.partial(self.rounded, module))
            module.forward = functools.partial(self._linear, module)
        try:
            with self._lean():
                yield
        finally:
            for module in entered:
                delattr(module, ROUNDED)
                del module.forward
            self._last = None

    def rounded(self, module: nn.Linear) -> Tensor:
        """The bfloat16 copy of a layer's weight, as new as the weight."""
        weight, copy = module.weight, self._copies.get(module)
        if copy is None or copy.made_of != _state(weight):
            rounded = weight.detach().to(torch.bfloat16) if copy is None else copy.rounded.copy_(weight.detach())
            copy = self._copies[module] = _Copy(_state(weight), rounded)
        return copy.rounded

    def _linear(self, module: nn.Linear, x: Tensor, *, narrow: bool = False) -> Tensor:
        rounded_OI = self.rounded(module)
        x16 = self._rounded_input(x)
        if torch.is_grad_enabled():
            y = _Product.apply(x, x16, module.weight, rounded_OI)
        else:
            y = F.linear(x16, rounded_OI)
        if module.bias is None:
            return y if narrow else y.float()
        return y + module.bias

    def _rounded_input(self, x: Tensor) -> Tensor:
        """Queries, keys and values (gate and up) are products of one input: it is rounded, and kept, once."""
        if x.dtype == torch.bfloat16:
            return x
        if self._last is None or self._last[0] is not x:
            self._last = (x, x.detach().to(torch.bfloat16))
        return self._last[1]


def product_weight(module: nn.Module, x: Tensor) -> Tensor:
    """The weight [O, I] of a linear layer as its products take it here and now: ours, autocast's, or as it is."""
    rounded = module.__dict__.get(ROUNDED)
    if rounded is not None:
        return rounded()
    device = x.device.type
    return module.weight.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else module.weight


def narrow_product(module: nn.Module, x: Tensor) -> Tensor:
    """A linear layer's output in the precision in which its product is computed here and now."""
    return module(x, narrow=True) if ROUNDED in module.__dict__ else module(x)


def rounded_weight(module: nn.Module) -> Tensor | None:
    """The bfloat16 weight that a plain linear layer multiplies by here and now, or None where it does not."""
    rounded = module.__dict__.get(ROUNDED)
    return rounded() if rounded is not None and module.bias is None else None


def accumulated(weight: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor | None:
    """A weight's gradient for autograd; or None, when it has been added to `weight.grad` here.

    `add` adds it to a tensor in place and returns that. Doing so saves passes over a copy of the weight's size. Where
    somebody listens to the gradient (data-parallel reduction, optimizers that step in the backward) it goes the
    ordinary way.
    """
    listened = weight._backward_hooks or weight._post_accumulate_grad_hooks or torch.distributed.is_initialized()
    if weight.grad is None or listened:
        return add(torch.zeros_like(weight))
    add(weight.grad)
    return None


class _Product(torch.autograd.Function):
    """y = x W^T with both factors rounded, forward and backward; what is kept for the backward is half as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, x16: Tensor, weight_OI: Tensor, rounded_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x16 if weight_OI.requires_grad else None)
        # Not saved tensors: the copy is renewed in place, but never between forward and backward.
        ctx.weight_OI, ctx.rounded_OI, ctx.dtype = weight_OI, rounded_OI, x.dtype
        return F.linear(x16, rounded_OI)

    @staticmethod
    def backward(ctx: Any, grad16: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (x16,) = ctx.saved_tensors
        needs_x, _, needs_weight, _ = ctx.needs_input_grad
        grad_x = (grad16 @ ctx.rounded_OI).to(ctx.dtype) if needs_x else None
        grad_weight = None
        if needs_weight:
            product = grad16.flatten(0, -2).T @ x16.flatten(0, -2)
            grad_weight = accumulated(ctx.weight_OI, lambda total: total.add_(product))
        return grad_x, None, grad_weight, None
