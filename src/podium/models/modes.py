"""Contexts that change a model, or another object, and put it back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)
_NOTHING = object()


@contextlib.contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, objects have other values of attributes; afterwards their own, or none of their own, as before."""
    changes = list(changes)
    before = [vars(owner).get(name, _NOTHING) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(changes, before, strict=True):
            if value is _NOTHING:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout is off inside; afterwards every module is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Within this context layers with weights in half precision compute in float32, so that rounding hides nothing.

    Only the layer that is computing has a float32 copy of its weights: an element of a list of layers as a whole, since
    its code may read the weights of a module that it does not call, and every other module by itself.
    """
    handles: list[Any] = []
    in_4_bits = [m for m in model.modules() if getattr(m, "compute_dtype", None) in HALF]  # of bitsandbytes
    layers = {layer for modules in model.modules() if isinstance(modules, nn.ModuleList) for layer in modules}
    for module in model.modules():
        wide = _Wide(module, recurse=module in layers)
        if any(x.dtype in HALF for x in wide.tensors):
            handles.append(module.register_forward_pre_hook(wide.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(wide.leave, always_call=True))
    try:
        with replaced((layer, "compute_dtype", torch.float32) for layer in in_4_bits):
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Wide:
    """A layer's parameters and buffers, in float32 from its forward's beginning to its end."""

    def __init__(self, layer: nn.Module, *, recurse: bool) -> None:
        self.tensors = [*layer.parameters(recurse), *layer.buffers(recurse)]
        self._halves: list[tuple[Tensor, Tensor]] = []

    def enter(self, _layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """Widen what no layer around this one has widened, and what the layer is given."""
        self._halves = [(x, x.data) for x in self.tensors if x.dtype in HALF]
        for x, half in self._halves:
            x.data = half.float()
        return tuple(map(_widened, args)), {name: _widened(x) for name, x in named.items()}

    def leave(self, *_: Any) -> None:
        for x, half in self._halves:
            x.data = half


def _widened(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in HALF else x
