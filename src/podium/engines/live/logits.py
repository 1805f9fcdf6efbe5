"""Logits of a model while it samples: a forward over a flat sequence of tokens, and its output embedding in float32."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from podium.models.attention import Attends, without_autocast
from podium.models.precision import product_weight, wide_product


def logits_of(
    model: nn.Module, ids_T: Tensor, positions_1T: Tensor, attends: Attends, keep: Tensor | Literal[0] = 0
) -> Tensor:
    """Logits [len(keep), V], in the precision of their product; 0: of all tokens."""
    given = {"input_ids": ids_T[None], "position_ids": positions_1T, "attention_mask": None, "podium": attends}
    return model(**given, use_cache=False, logits_to_keep=keep).logits[0]


class WideHead:
    """The output embedding with float32 logits, as training computes them, for as long as its weight stays the same."""

    def __init__(self) -> None:
        self._factor_VD: Tensor | None = None

    def __call__(self, head: nn.Module, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        if self._factor_VD is None:
            self._factor_VD = product_weight(head, hidden)
        with without_autocast(hidden.device.type):
            flat = hidden.flatten(0, -2).to(self._factor_VD.dtype)
            logits = wide_product(flat, self._factor_VD.T).unflatten(0, hidden.shape[:-1])
            bias = getattr(head, "bias", None)
            return logits if bias is None else logits + bias
