"""How far an optimizer step moves the weights: measured on a fixed sample of them, as all would take too long."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from podium.trainer.processes import local

TENSORS = 24
VALUES = 2048
"""At most so many trained tensors, spread over the model, and so many numbers of each."""


class WeightProbe:
    """`before()` and `after()` an optimizer step.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> probe = WeightProbe(layer)
    >>> probe.before()
    >>> layer.weight.data *= 1.01
    >>> {name: round(value, 4) for name, value in probe.after().items()}
    {'health/update_ratio': 0.01, 'health/moved_share': 1.0}
    """

    def __init__(self, model: nn.Module) -> None:
        trained = [p for p in model.parameters() if p.requires_grad and local(p).numel()]
        every = max(1, len(trained) // TENSORS)
        # An odd stride, or every sample of a LoRA model would be of its A matrices, and none of B.
        self._parameters = trained[:: every + (every % 2 == 0)]
        self._values: Tensor | None = None

    def before(self) -> None:
        """Keep the sample."""
        self._values = self._sample()

    def after(self) -> dict[str, float]:
        """RMS of the change over RMS of the weights, and the share of weights that changed at all."""
        if self._values is None or not self._values.numel():
            return {}
        now, then = self._sample(), self._values
        self._values = None
        change = (now - then).square().mean().sqrt() / then.square().mean().sqrt().clamp_min(1e-12)
        ratio, share = torch.stack([change, (now != then).float().mean()]).tolist()
        return {"health/update_ratio": ratio, "health/moved_share": share}

    def _sample(self) -> Tensor:
        mine = [local(p).detach().flatten() for p in self._parameters]
        parts = [x[:: max(1, len(x) // VALUES)][:VALUES].float() for x in mine]
        return torch.cat(parts).clone() if parts else torch.zeros(0)
