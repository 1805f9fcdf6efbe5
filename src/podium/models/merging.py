"""Merging an adapter into its base, with the proof that nothing was lost.

    merged = merge_adapter(model, tokenizer)         a plain transformers model, or ProofError

A merge may quietly change a model: a base in 4 bits is rounded again, bfloat16 drops what the adapter changed, an
adapter may belong to another base. So the logits of both are compared on some texts before anything is given back.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from podium.errors import ModelError, ProofError

TEXTS = (
    "What is 17 plus 25? Think step by step, then give the answer.",
    "def add(a, b):\n    return",
    "The capital of France is",
)
"""What both models read, unless the caller gives prompts of the run."""

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Nats: the largest mean difference of next-token log-probabilities that a merge in this type may have."""

LEAST_KEPT = 0.5
"""A merge must be at least this much closer to the adapter than to the base, or it has not been merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeProof:
    """How the merged model answers, against the model with its adapter."""

    difference: float
    """Nats: the largest difference of the log-probabilities of likely next tokens, over all positions of all texts."""
    tolerance: float
    effect: float
    """The same between the model with its adapter and without: what the merge has to carry over."""
    num_positions: int

    @property
    def passed(self) -> bool:
        """Whether the merged model is the trained one: close to it, and closer than to the base."""
        carried = self.difference <= LEAST_KEPT * self.effect or self.effect == 0
        return self.difference <= self.tolerance and carried

    def __str__(self) -> str:
        return (
            f"merged and adapter differ by at most {self.difference:.2g} nats ({self.tolerance:g} allowed) over "
            f"{self.num_positions} positions; the adapter itself changes {self.effect:.2g}"
        )


def merge_adapter(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = TEXTS
) -> tuple[PreTrainedModel, MergeProof]:
    """The model with its adapter merged in, and the proof that it answers alike. The model given is left as it is.

    Args:
        model: a base with one active adapter.
        tokenizer: turns `texts` into what both read.
        texts: prompts of the run, or any texts.

    Raises:
        ModelError: there is no adapter, or the base is quantized.
        ProofError: the merged model answers differently (P013); it is not given back.
    """
    if not isinstance(model, PeftModel):
        raise ModelError(f"There is nothing to merge: a {type(model).__name__} has no adapter.")
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        raise ModelError(
            "The base is quantized, and a merge into rounded weights loses the adapter. Load the base with "
            "dtype=float32, the adapter on it, and merge that."
        )
    merged = copy.deepcopy(model).merge_and_unload()
    proof = prove_merge(model, merged, tokenizer, texts)
    if not proof.passed:
        raise ProofError(
            f"The merge is refused: {proof}.",
            code="P013",
            fix="Load the base in float32 and merge into that; see `podium explain P013`.",
        )
    return merged, proof


@torch.no_grad()
def prove_merge(
    model: PeftModel, merged: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = TEXTS
) -> MergeProof:
    """Compare the merged model's log-probabilities with those of the model with its adapter, and without."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    merged.eval()
    differences, effects, positions = [0.0], [0.0], 0
    try:
        for text in texts:
            ids = torch.tensor([tokenizer(text)["input_ids"]], device=next(model.parameters()).device)
            adapted = _logps(model, ids)
            with model.disable_adapter():
                base = _logps(model, ids)
            differences.append(_apart(_logps(merged, ids), adapted))
            effects.append(_apart(base, adapted))
            positions += ids.shape[1]
    finally:
        for module in training:
            module.training = True
    tolerance = TOLERANCES.get(next(merged.parameters()).dtype, TOLERANCES[torch.bfloat16])
    return MergeProof(difference=max(differences), tolerance=tolerance, effect=max(effects), num_positions=positions)


def _logps(model: Any, ids_1T: Tensor) -> Tensor:
    return model(input_ids=ids_1T, use_cache=False).logits[0].float().log_softmax(-1)


def _apart(one_TV: Tensor, other_TV: Tensor) -> float:
    """The mean over the ten likeliest tokens of the second, at the worst position; a NaN is infinite."""
    likely = other_TV.topk(min(10, other_TV.shape[-1]), -1).indices
    apart = (one_TV.gather(-1, likely) - other_TV.gather(-1, likely)).abs().mean(-1).max()
    return float(apart.nan_to_num(nan=float("inf")))
