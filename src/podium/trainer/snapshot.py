"""Try things on a model and leave no trace: a proof or a measurement before training must not change it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from podium.models.modes import evaluation_mode


@contextlib.contextmanager
def preserve_training_state(model: nn.Module) -> Iterator[None]:
    """Afterwards gradients, random states and modes of modules are what they were.

    Dropout is off inside, so that two forwards can be compared. Weights are left to the caller.
    """
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with same_random_numbers(), without_dropout(model), evaluation_mode(model):
        try:
            yield
        finally:
            model.eval()
            for name, parameter in model.named_parameters():
                parameter.grad = gradients.get(name)


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Afterwards every global generator is in the state it was in."""
    python = random.getstate()
    numpy = np.random.get_state()
    # Of the GPU in use alone: asking another one for its generator makes a context of half a gigabyte there.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """No dropout inside, in training mode either: of layers, of attention, of whole layers, of routers' inputs."""
    changed: list[tuple[Any, str, float]] = []
    for module in model.modules():
        rates = {name: x for name, x in vars(module).items() if isinstance(x, float)}
        named = [name for name in rates if "drop" in name or "jitter" in name]
        changed += [(module, name, rates[name]) for name in (["p"] if isinstance(module, nn.Dropout) else named)]
    for module, name, _ in changed:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, rate in changed:
            setattr(module, name, rate)
