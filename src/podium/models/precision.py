"""Matrix products in bfloat16 over float32 weights: for processors that multiply half precision faster.

Weights, gradients, optimizer, norms, attention and the residual stream stay float32; only the two factors of a product
are rounded. The rounded copy of a weight is made once per optimizer step and serves sampling, scoring and training
alike, so what is sampled and what is trained agree. (Autocast makes one for every forward, and for frozen weights
for every token.)

Shape letters: T tokens, I input width, O output width.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import operator
import os
import timeit
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from podium.models.devices import kind_of
from podium.models.modes import replaced

# Every pack has a shape of its own, and oneDNN keeps what it compiled for the last 1024 of them: 20 MB more with every
# step of the quickstart. Read when the first product is computed.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "32")

WORTH_IT = 1.3
"""Least advantage of bfloat16 products that is worth their rounding."""


def release_free_memory() -> None:
    """Give what the C allocator keeps for later back to the system.

    Sampling and training allocate in different sizes; without this a run on a CPU keeps the holes of both and grows by
    a quarter within some dozens of steps.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # not every C library has it
        trim(0)


LARGE_BLOCK = 1 << 20
"""Bytes from which a block of memory goes back to the system as soon as it is free, under checkpointing."""
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of the C library's malloc.h


def return_large_blocks() -> None:
    """Have the C allocator keep no large blocks for later.

    Under checkpointing a layer's large results come and go between small ones that stay. The holes they leave took as
    much memory as checkpointing saves: an adapter on the built-in model, packs of 1,272 tokens, had its peak at 2.9 GB
    and has it at 1.9 GB with this.
    """
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(_MMAP_THRESHOLD, LARGE_BLOCK)


class MeasuredProducts(NamedTuple):
    """Matrix rates in GFLOP/s."""

    float32: float
    bfloat16: float

    @property
    def bfloat16_pays(self) -> bool:
        """Whether to use it."""
        return self.bfloat16 > WORTH_IT * self.float32

    def __str__(self) -> str:
        return f"{self.float32:.0f} GFLOP/s in float32, {self.bfloat16:.0f} in bfloat16"


def rounds_products(product_precision: str) -> bool:
    """Whether a CPU is to round the factors of products under this setting; `auto` measures."""
    return product_precision == "bfloat16" or (product_precision == "auto" and measured_products().bfloat16_pays)


def measure_products(rows: int = 256, width: int = 576, inner: int = 1536, repeats: int = 5) -> MeasuredProducts:
    """The rate of a product [rows, width] x [width, inner] in both precisions on this CPU, now; takes about 20 ms."""
    rates: list[float] = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(rows, width, dtype=dtype)
        weight = torch.ones(inner, width, dtype=dtype)
        seconds = timeit.repeat(functools.partial(F.linear, x, weight), number=1, repeat=1 + repeats)
        rates.append(2e-9 * rows * width * inner / min(seconds[1:]))
    return MeasuredProducts(*rates)


measured_products = functools.cache(measure_products)
"""Called without arguments it measures once a process, so that all decisions in it agree."""


ROUNDED = "_podium_rounded_weight"

_steps_taken = itertools.count(1)
_latest_step = [0]


def _count_step(*_: Any) -> None:
    _latest_step[0] = next(_steps_taken)


# Fused optimizers write to weights without raising their version, so every step of any optimizer counts.
register_optimizer_step_post_hook(_count_step)


def _state(weight: Tensor) -> tuple[int, int, int]:
    """Changes whenever the weight may have."""
    return weight._version, weight.data_ptr(), _latest_step[0] if weight.requires_grad else 0


NARROW = 64
"""Layers thinner than this (adapters) stay in float32: their products are cheap, and their changes small."""

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one parent that multiply one and the same input."""


class Place(NamedTuple):
    """Which of a family's members a layer is."""

    family: Family
    number: int

    def rounded(self) -> Tensor:
        """The copy of the layer's weight."""
        return self.family.rounded().split(self.family.widths)[self.number]


class Family:
    """Linear layers with one input, multiplied as one; most have a single member.

    The first member that is called computes for all; the others, called with the same tensor, find their part ready.
    """

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        self.members = tuple(members)
        self.widths = [member.out_features for member in members]
        self._made_of: list[tuple[int, int, int] | None] = [None] * len(self.members)
        self._rounded_OI: Tensor | None = None
        self.packs = False
        """Whether weights stay as they are for many small forwards, so that packing them pays."""
        self._packed_OI: Tensor | None = None
        self._input: Tensor | None = None
        self._ready: dict[int, Tensor] = {}

    def rounded(self) -> Tensor:
        """The bfloat16 copies of the members' weights, one above the other, as new as the weights."""
        if self._rounded_OI is None:
            shape = sum(self.widths), self.members[0].in_features
            self._rounded_OI = torch.empty(shape, dtype=torch.bfloat16, device=self.members[0].weight.device)
        for i, (member, part) in enumerate(zip(self.members, self._rounded_OI.split(self.widths), strict=True)):
            state = _state(member.weight)
            if self._made_of[i] != state:
                part.copy_(member.weight.detach())
                self._made_of[i] = state
        return self._rounded_OI

    def is_plain(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these are the members, all of them, packed, and nothing but products with or without a bias."""
        same = len(modules) == len(self.members) and all(map(operator.is_, modules, self.members))
        return same and self.packs and len({member.bias is None for member in self.members}) == 1

    def product(self, i: int, x: Tensor, x16: Tensor, dtype: torch.dtype) -> Tensor:
        """Member i's output in `dtype`, without its bias."""
        if self._input is not x or i not in self._ready:
            self._ready = dict(enumerate(self._products(x, x16, dtype)))
            self._input = x
        y = self._ready.pop(i)
        if not self._ready:
            self._input = None
        return y.to(dtype)  # computed for a sibling that may have asked for another: only one may have an adapter

    def _products(self, x: Tensor, x16: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        if torch.is_grad_enabled():
            return _Products.apply(x, x16, dtype, self.rounded(), *(member.weight for member in self.members))
        y = self.packed_product(x16) if self.packs else F.linear(x16, self.rounded())
        y = y.to(dtype)
        return y.split_with_sizes(self.widths, -1) if len(self.widths) > 1 else (y,)

    def packed_product(self, x16: Tensor) -> Tensor:
        """All outputs side by side, in bfloat16; the packed weight is as new as the sampling context around it.

        The plain product where this processor cannot multiply packed weights.
        """
        if self._packed_OI is None and can_pack(self.rounded()):
            self._packed_OI = _pack(self.rounded())
        return F.linear(x16, self.rounded()) if self._packed_OI is None else _packed_linear(x16, self._packed_OI)

    def forget(self) -> None:
        """Drop what only the running forward needs."""
        self._input = self._packed_OI = None
        self._ready = {}


PACKED_ROWS = 64
"""Rows that a packed weight expects; with others it works as well, if not as fast."""


def _pack(weight_OI: Tensor) -> Tensor:
    """A bfloat16 weight in the order in which oneDNN's products read it."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight_OI, PACKED_ROWS)


def _packed_linear(x16: Tensor, packed_OI: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x16, packed_OI, None, "none", [], "")


_packable: dict[tuple[int, ...], bool] = {}
"""Outcomes of `can_pack` in this process, by the shape of the weight."""


def can_pack(weight_OI: Tensor) -> bool:
    """Whether this processor multiplies packed bfloat16 weights of this shape; tried once a process.

    The operators are private to torch: a build may lack them, and they raise on processors without AVX-512 or
    AVX-NE-CONVERT. The trial multiplies by `weight_OI`, with one row and with many. Both products sum in float32 and
    round to bfloat16 (8 significant bits) at the end, so they differ by at most one step of the largest output.
    """
    shape = tuple(weight_OI.shape)
    if shape not in _packable:
        x16 = torch.linspace(-1, 1, PACKED_ROWS * shape[1]).sin().view(PACKED_ROWS, -1).to(torch.bfloat16)
        expected = F.linear(x16, weight_OI).float()
        try:
            packed_OI = _pack(weight_OI)
            got = torch.cat([_packed_linear(x16[:1], packed_OI), _packed_linear(x16[1:], packed_OI)]).float()
            _packable[shape] = bool((got - expected).abs().max() <= 2**-7 * expected.abs().max())
        except (RuntimeError, AttributeError):
            _packable[shape] = False
    return _packable[shape]


def families_of(model: nn.Module) -> list[Family]:
    """Every wide float32 `nn.Linear` of a model, siblings together."""
    linears = {
        id(m): m
        for m in model.modules()
        if type(m) is nn.Linear and m.weight.dtype == torch.float32 and min(m.weight.shape) >= NARROW
    }
    families = []
    for parent in model.modules():
        for names in SIBLINGS:
            children = [getattr(parent, name, None) for name in names]
            members = [getattr(child, "base_layer", child) for child in children]  # under an adapter
            alike = {(m.in_features, m.weight.requires_grad) for m in members if id(m) in linears}
            if len(alike) == 1 and all(id(m) in linears for m in members):
                families.append(Family([linears.pop(id(m)) for m in members]))
    return families + [Family([m]) for m in linears.values()]


class ProductPrecision:
    """Inside `with precision():` every wide `nn.Linear` of the model multiplies in bfloat16."""

    def __init__(
        self,
        model: nn.Module,
        *,
        enabled: bool,
        lean: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        blocks: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`lean` is entered with it, `blocks` where it samples: see `models.lean`."""
        self.enabled = enabled
        self._lean = lean
        self._blocks = blocks
        self._families = families_of(model)
        self._last: tuple[Tensor, Tensor] | None = None

    @property
    def rounds(self) -> bool:
        """Whether any product of the model is rounded."""
        return self.enabled and bool(self._families)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """The context; entering it inside itself changes nothing."""
        entered = [
            (member, family, i)
            for family in self._families
            for i, member in enumerate(family.members)
            if self.enabled and ROUNDED not in member.__dict__
        ]
        places = [(member, ROUNDED, Place(family, i)) for member, family, i in entered]
        forwards = [(place[0], "forward", functools.partial(self._linear, *place)) for place in entered]
        try:
            with replaced([*places, *forwards]), self._lean():
                yield
        finally:
            for _, family, _ in entered:
                family.forget()
            self._last = None

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """The same context for many small forwards with unchanging weights, which are packed for that."""
        try:
            with replaced((family, "packs", True) for family in self._families), self(), self._blocks():
                yield
        finally:
            for family in self._families:
                family.forget()

    def _linear(self, module: nn.Linear, family: Family, i: int, x: Tensor, *, narrow: bool = False) -> Tensor:
        dtype = torch.bfloat16 if narrow else torch.float32
        y = family.product(i, x, self._rounded_input(x), dtype)
        return y if module.bias is None else (y + module.bias).to(dtype)

    def _rounded_input(self, x: Tensor) -> Tensor:
        """The input of several products is rounded, and kept, once."""
        if x.dtype == torch.bfloat16:
            return x
        if self._last is None or self._last[0] is not x:
            self._last = (x, x.detach().to(torch.bfloat16))
        return self._last[1]


@functools.cache
def _returns_float32(device: str, dtype: torch.dtype) -> bool:
    """Whether matrix products of this type can leave their float32 sums as they are; tried once a process."""
    a = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.mm(a, a, out_dtype=torch.float32)
        torch.bmm(a[None], a[None], out_dtype=torch.float32)
        torch.addmm(a.float(), a, a, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b [..., float32] of factors in half precision, not rounded to their type on the way out.

    A logit of 20 in bfloat16 is off by up to 0.06, and an entropy with it.
    """
    if a.dtype == torch.float32:
        return a @ b
    if not _returns_float32(a.device.type, a.dtype):
        return a.float() @ b.float()
    return (torch.bmm if a.dim() == 3 else torch.mm)(a, b, out_dtype=torch.float32)


PRODUCT_ROWS = 8192
"""Rows of a product that are computed, and added to a sum on a CPU, at once: what stays in a processor's cache."""


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where `total` is float32: summed in it, where the device's kernels for half precision do that.

    On a CPU some rows at a time, as a whole product in half precision would be as large as the sum.
    """
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif not kind_of(total.device).autocast:
        for start in range(0, len(total), PRODUCT_ROWS):
            rows = slice(start, start + PRODUCT_ROWS)
            total[rows].add_(a[rows] @ b)
    elif _returns_float32(a.device.type, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def product_weight(module: nn.Module, x: Tensor) -> Tensor:
    """The weight [O, I] of a linear layer as its products take it here and now: ours, autocast's, or as it is."""
    place = module.__dict__.get(ROUNDED)
    if place is not None:
        return place.rounded()
    device = x.device.type
    return module.weight.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else module.weight


def product(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Outputs of linear layers with one input, side by side, in the precision of their products; for sampling."""
    place = modules[0].__dict__.get(ROUNDED)
    if place is not None and place.family.is_plain(modules):
        y = place.family.packed_product(x.to(torch.bfloat16))
        biases = [module.bias for module in modules if module.bias is not None]
        return y + torch.cat(biases) if biases else y
    return modules[0](x) if len(modules) == 1 else torch.cat([module(x) for module in modules], -1)


def narrow_product(module: nn.Module, x: Tensor) -> Tensor:
    """A linear layer's output in the precision in which its product is computed here and now."""
    return module(x, narrow=True) if ROUNDED in module.__dict__ else module(x)


def rounded_weight(module: nn.Module) -> Tensor | None:
    """The bfloat16 weight, where a linear layer is nothing but its product with it here and now; or None."""
    place = module.__dict__.get(ROUNDED)
    watched = module._forward_hooks or module._forward_pre_hooks
    return place.rounded() if place is not None and module.bias is None and not watched else None


def accumulated(weight: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor | None:
    """A weight's gradient for autograd; or None, when it has been added to `weight.grad` here.

    `add` adds it to a tensor in place and returns that. Doing so saves passes over a copy of the weight's size. Where
    hooks listen to the gradient (data-parallel reduction, optimizers that step in the backward) it goes the
    ordinary way.
    """
    listened = weight._backward_hooks or weight._post_accumulate_grad_hooks or torch.distributed.is_initialized()
    if weight.grad is None or listened:
        return add(torch.zeros_like(weight))
    add(weight.grad)
    return None


def norm_of(x: Tensor) -> float:
    """The Euclidean norm; in float64 where the squares of finite numbers are too large for float32.

    >>> norm_of(torch.tensor([3.0, -4.0]) * 2.0**100) == 5 * 2.0**100
    True
    """
    norm = float(torch.linalg.vector_norm(x, dtype=torch.float32))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(x, dtype=torch.float64))


def compute_in_full(precision: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Make no rounded copies of weights: those of sharded weights would be gathered."""
    if isinstance(precision, ProductPrecision):
        precision.enabled = False


class _Products(torch.autograd.Function):
    """y = x W^T with both factors rounded, forward and backward, for the weights of a family; keeps half the memory."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, x16: Tensor, dtype: torch.dtype, rounded_OI: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x16 if any(weight.requires_grad for weight in weights) else None)
        # Not saved tensors: the copy is renewed in place, but never between forward and backward.
        ctx.weights = weights
        ctx.rounded_OI = rounded_OI
        ctx.dtype = x.dtype
        y = F.linear(x16, rounded_OI).to(dtype)
        return y.split([len(weight) for weight in weights], -1) if len(weights) > 1 else (y,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x16,) = ctx.saved_tensors
        grad16 = (torch.cat(grads, -1) if len(grads) > 1 else grads[0]).to(torch.bfloat16)
        needs_x = ctx.needs_input_grad[0]
        needs_weights = ctx.needs_input_grad[4:]
        grad_x = (grad16 @ ctx.rounded_OI).to(ctx.dtype) if needs_x else None
        grad_weights: list[Tensor | None] = [None] * len(ctx.weights)
        if any(needs_weights):
            parts = (grad16.flatten(0, -2).T @ x16.flatten(0, -2)).split([len(weight) for weight in ctx.weights])
            grad_weights = [
                accumulated(weight, functools.partial(Tensor.add_, other=part)) if needed else None
                for weight, part, needed in zip(ctx.weights, parts, needs_weights, strict=True)
            ]
        return grad_x, None, None, None, *grad_weights
