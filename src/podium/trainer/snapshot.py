"""Try things on a trainer and leave no trace: what a proof or a measurement does before training must not change it.

    with preserve_training_state(trainer):
        trainer.training_step(trainer.model, batch)

Weights are the caller's own business: see `perturbed` in `podium.trainer.proof.evidence`.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from podium.trainer.trainer import GRPOTrainer


@contextlib.contextmanager
def preserve_training_state(trainer: GRPOTrainer) -> Iterator[None]:
    """Afterwards gradients, random states, module modes, metrics and counters are what they were.

    Dropout is off inside, so that two forwards can be compared. The time spent does not count as the step's. No round
    is being sampled meanwhile, as its reward functions may draw random numbers.
    """
    trainer.rollouts.wait()
    model = trainer.model
    started, step_started = time.perf_counter(), trainer._step_started
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    training = [module for module in model.modules() if module.training]
    mine = {name: copy.deepcopy(getattr(trainer, name)) for name in ("_measured", "_sums", "_loss", "entropy")}
    buffer, tokens = trainer._measured, trainer.state.num_input_tokens_seen
    gaps = list(trainer.health._gaps)
    clear_gradients(model)
    try:
        with same_random_numbers(), without_dropout(model):
            yield
    finally:
        clear_gradients(model)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients.get(name)
        model.eval()
        for module in training:
            module.training = True
        buffer._windows, buffer._step = (
            mine["_measured"]._windows,
            mine["_measured"]._step,
        )  # the rollouts hold the buffer, too
        trainer._sums, trainer._loss, trainer.entropy = mine["_sums"], mine["_loss"], mine["entropy"]
        trainer.health._gaps[:] = gaps
        trainer.state.num_input_tokens_seen = tokens
        trainer._step_started = step_started + time.perf_counter() - started


def clear_gradients(model: nn.Module) -> None:
    """No parameter has a gradient."""
    for parameter in model.parameters():
        parameter.grad = None


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Afterwards every global generator stands where it stood."""
    python, numpy = random.getstate(), np.random.get_state()
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
    """No dropout inside, in training mode either: neither of layers nor of attention."""
    changed: list[tuple[Any, str, float]] = []
    for module in model.modules():
        names = ["p"] if isinstance(module, nn.Dropout) else ["attention_dropout", "attn_dropout"]
        changed += [(module, name, rate) for name in names if isinstance(rate := getattr(module, name, None), float)]
    for module, name, _ in changed:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, rate in changed:
            setattr(module, name, rate)
