"""Where the numbers of a step stop being finite: weights, outputs of modules, log-probabilities, loss, gradients.

A step whose gradient is not finite is computed once more under an `Examination`, which names the first tensor that is
not, and the token it belongs to. Only then; a healthy step pays nothing.

Shape letters: T positions in a pack, P of them that predict, N trained tokens, R rollouts.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from podium.algorithm.losses import LossInputs
from podium.models.packing import Pack
from podium.models.precision import norm_of
from podium.trainer.parts import local

OF_THE_LOSS = ("advantages_R", "token_advantages_N", "ref_logps_N", "old_logps_N", "logps_N", "entropy_N")
"""Inputs of the loss that must be finite. The sampler's own log-probabilities are not among them: they may be NaN."""


def first_bad(x: Tensor) -> int | None:
    """The index in the flattened tensor of its first number that is not finite; None: all are.

    >>> first_bad(torch.tensor([[1.0, 2.0], [float("nan"), float("inf")]])), first_bad(torch.ones(2))
    (2, None)
    """
    bad = ~local(x.detach()).isfinite().flatten()
    return int(bad.int().argmax()) if bool(bad.any()) else None


def overflow(named: Iterable[tuple[str, nn.Parameter]]) -> str | None:
    """The tensor with the largest gradient, where all gradients are finite and their norm is beyond float32."""
    norms = {name: norm_of(p.grad) for name, p in named if p.grad is not None}
    whole = math.hypot(*norms.values())
    if not math.isfinite(whole) or whole**2 <= torch.finfo(torch.float32).max:
        return None
    name = max(norms, key=norms.__getitem__)
    return f"its norm, {whole:.3g}, whose square is beyond float32: all its numbers are finite, and largest in `{name}`"


def _first_row(named: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """The first tensor that is not finite, and its row where it has rows; None: all are."""
    bad = ((name, x, at) for name, x in named if x is not None and (at := first_bad(x)) is not None)
    return next((f"`{name}`" + (f", row {at // x.shape[-1]}" if x.dim() == 2 else "") for name, x, at in bad), None)


class Examination:
    """Watches packs on their way through model, loss and backward; `found` says what was not finite first.

    Looked at are weights, what the packs hold, every module's output, log-probabilities, loss, and in the backward the
    gradients of all these.
    """

    def __init__(self, model: nn.Module, decode: Callable[[list[int]], str]) -> None:
        """`model` without wrappers; `decode` makes text of token ids."""
        self.model = model
        self.decode = decode
        weight = _first_row(model.named_parameters())
        self.found = weight and f"the weight {weight}"
        self._pack: Pack | None = None
        self._earlier = 0
        """Rollouts of the packs before this one."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the outputs of modules and their gradients are looked at."""
        named = [(name, module) for name, module in self.model.named_modules() if name]
        handles = [module.register_forward_hook(functools.partial(self._output, name)) for name, module in named]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def before_forward(self, packed: Pack) -> None:
        """Watch the forward of a pack."""
        self._pack = packed

    def after_backward(self, packed: Pack) -> None:
        """Look at the gradients of the weights."""
        gradients = [(name, weight.grad) for name, weight in self.model.named_parameters()]
        weight = None if self.found else _first_row(reversed(gradients))  # those next to the loss first
        self.found = self.found or (weight and f"the gradient of the weight {weight}")
        self._pack = None
        self._earlier += packed.num_rollouts

    def before_backward(self, x: LossInputs, loss: Tensor) -> None:
        """Look at the loss and its inputs, and watch its gradients."""
        for name in OF_THE_LOSS:
            self._look(f"`{name[:-2]}` of the loss", getattr(x, name))
        self._look("the loss", loss)
        if x.logps_N.requires_grad:
            x.logps_N.register_hook(functools.partial(self._look, "the gradient of `logps` of the loss"))

    def _output(self, name: str, _module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        output = output[0] if isinstance(output, tuple) and output else output
        if self._pack is None or not isinstance(output, Tensor) or not output.is_floating_point():
            return
        for x in inputs:  # what came to be between two modules
            self._look(f"the input of `{name}`", x if isinstance(x, Tensor) and x.is_floating_point() else None)
        self._look(f"the output of `{name}`", output)
        if output.requires_grad:
            output.register_hook(functools.partial(self._look, f"the gradient of the output of `{name}`"))

    def _look(self, words: str, x: Tensor | None) -> None:
        at = None if self.found is not None or x is None else first_bad(x)
        if x is not None and at is not None and self._pack is not None:
            self.found = words + self._token(self._pack, x.shape, at)

    def _token(self, packed: Pack, shape: torch.Size, at: int) -> str:
        """The token of number `at` of a tensor, where its shape tells: [N], [R], [T or P, D], [R, length, D]."""
        if shape == (packed.num_tokens,):
            r = int(packed.rollout_N[at])
            nth = at - int((packed.rollout_N < r).sum())
            return self._named(packed, r, int(packed.spans_R[r].predicting[nth]) + 1, int(packed.target_N[at]))
        if shape == (packed.num_rollouts,):
            return f", completion {self._earlier + at + 1} of the step"
        if len(shape) not in (2, 3):
            return ""
        r, place = divmod(at // shape[-1], shape[-2])
        if len(shape) == 3 and shape[0] == packed.num_rollouts > 1:  # padded rows
            tokens = packed.spans_R[r].tokens
            return self._named(packed, r, place, int(packed.input_ids_T[tokens[place]])) if place < len(tokens) else ""
        whole = shape[-2] == len(packed.input_ids_T)
        if not whole and shape[-2] != len(packed.predict_P):
            return ""
        t = place if whole else int(packed.predict_P[place])
        r = next(r for r, span in enumerate(packed.spans_R) if t in span.tokens)
        return self._named(packed, r, packed.spans_R[r].tokens.tolist().index(t), int(packed.input_ids_T[t]))

    def _named(self, packed: Pack, r: int, place: int, token: int) -> str:
        """Token `place` of rollout r, counted from 1 within its prompt or its completion."""
        length = packed.spans_R[r].prompt_length
        part, nth = ("prompt of completion", place) if place < length else ("completion", place - length)
        return f", token {nth + 1} ({self.decode([token])!r}) of {part} {self._earlier + r + 1} of the step"


WEIGHTS_ALONE = "All weights are finite; nothing else was looked at, as they are divided over processes."
NOT_AGAIN = "Computed once more it was finite: something in it does not repeat."


def where(found: Sequence[str | None], otherwise: str = NOT_AGAIN) -> str:
    """A sentence of what the processes have found."""
    first = next((place for place in found if place is not None), None)
    return f"It began with {first}." if first else otherwise
