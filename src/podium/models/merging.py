"""Merging an adapter into its base, with the proof that nothing was lost.

    expected = expect(model, tokenizer, texts)       what the model with its adapter says
    merged = merge(model)                            a plain transformers model; the one given is used up
    proof = prove(merged, expected, torch.float32)   ProofError unless it says the same

A merge may quietly change a model: a base in 4 bits is rounded again, bfloat16 drops what the adapter changed, an
adapter may belong to another base, a saved file may lack a tensor. So the log-probabilities of both are compared on
some texts before anything is given back. What is expected is a few numbers a position, so that the two models need
not be in memory together.
"""

from __future__ import annotations

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
"""What both models read, besides prompts of the run."""

LONGEST = 512
"""Tokens that are read of a text."""

LIKELY = 10
"""Next tokens compared at a position: the likeliest ones of the model with its adapter."""

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Nats: the largest mean difference of next-token log-probabilities that rounding weights to this type may make.

At the worst of 602 positions SmolLM2-135M, whose weights were not made for it, differs by 0.17 in bfloat16. A fault of
the merge itself is found in float32, before weights are rounded.
"""

LEAST_KEPT = 0.5
"""A merge must be at least this much closer to the adapter than to the base, or it has not been merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a model says of one text. K is `LIKELY`."""

    ids_1T: Tensor
    likely_TK: Tensor
    """The likeliest next tokens after every position."""
    logps_TK: Tensor
    """Their log-probabilities, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the model to be shipped must say."""

    readings: tuple[Reading, ...]
    effect: float | None
    """Nats: what the adapter changes, which the merge has to carry over; None: the model has no adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeProof:
    """How the merged model answers, against the model with its adapter."""

    difference: float
    """Nats: the largest difference of the log-probabilities of likely next tokens, over all positions of all texts."""
    tolerance: float
    effect: float | None
    """The same between the model with its adapter and without: what the merge has to carry over; None: no adapter."""
    num_positions: int

    @property
    def passed(self) -> bool:
        """Whether the merged model is the trained one: close to it, and closer than to the base."""
        return self.difference <= self.tolerance and self.carried

    @property
    def carried(self) -> bool:
        """Whether what the adapter changed is still there."""
        return not self.effect or self.difference <= LEAST_KEPT * self.effect

    def __str__(self) -> str:
        apart = (
            f"saved and trained model differ by at most {self.difference:.2g} nats ({self.tolerance:g} allowed) over "
            f"{self.num_positions} positions"
        )
        return apart if self.effect is None else f"{apart}; the adapter itself changes {self.effect:.2g}"


@torch.no_grad()
def expect(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = TEXTS
) -> Expected:
    """What a model says of some texts, with its adapter if it has one; and how much of that is the adapter's doing."""
    model.eval()
    readings = tuple(_read(model, _ids(tokenizer, text)) for text in texts)
    effect = None
    if isinstance(model, PeftModel):
        with model.disable_adapter():
            effect = max(_apart(model, reading) for reading in readings)
    return Expected(readings=readings, effect=effect)


def merge(model: PeftModel) -> PreTrainedModel:
    """A plain transformers model with the adapter in its weights. The model given is used up.

    Raises:
        ModelError: there is no adapter, or the base is quantized.
    """
    if not isinstance(model, PeftModel):
        raise ModelError(f"There is nothing to merge: a {type(model).__name__} has no adapter.")
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        raise ModelError(
            "The base is quantized, and a merge into rounded weights loses the adapter.",
            fix="Load the base with dtype=float32, the adapter on it, and merge that.",
        )
    return model.merge_and_unload()


@torch.no_grad()
def prove(merged: PreTrainedModel, expected: Expected, stored: torch.dtype) -> MergeProof:
    """Compare what a model says with what is expected of it.

    Args:
        merged: the model to be shipped; it computes in the type it is in.
        expected: from the model with its adapter.
        stored: the type its weights have been rounded to, which says how far apart the two may be.

    Raises:
        ProofError: the merged model answers differently (P013).
    """
    merged.eval()
    proof = MergeProof(
        difference=max(_apart(merged, reading) for reading in expected.readings),
        tolerance=TOLERANCES[stored],
        effect=expected.effect,
        num_positions=sum(reading.ids_1T.shape[1] for reading in expected.readings),
    )
    if not proof.passed:
        raise ProofError(
            f"The {'copy' if proof.effect is None else 'merge'} is refused: {proof}.",
            code="P013",
            fix="Does the adapter belong to this base? See `podium explain P013`."
            if stored == torch.float32
            else "Rounding has lost what was trained: keep the weights in float32 (`--dtype float32`).",
        )
    return proof


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """[1, T]. A rendered prompt may begin with the tokenizer's first token already."""
    begun = tokenizer.bos_token is not None and text.startswith(str(tokenizer.bos_token))
    encoded = tokenizer(text, add_special_tokens=not begun, truncation=True, max_length=LONGEST)
    return torch.tensor([encoded["input_ids"]])


def _read(model: Any, ids_1T: Tensor) -> Reading:
    logps_TV = _logps(model, ids_1T)
    logps_TK, likely_TK = logps_TV.topk(min(LIKELY, logps_TV.shape[-1]), -1)
    return Reading(ids_1T=ids_1T, likely_TK=likely_TK, logps_TK=logps_TK)


def _logps(model: Any, ids_1T: Tensor) -> Tensor:
    device = next(model.parameters()).device
    return model(input_ids=ids_1T.to(device), use_cache=False).logits[0].float().log_softmax(-1)


def _apart(model: Any, reading: Reading) -> float:
    """The mean over the likely tokens, at the worst position; a NaN is infinite."""
    logps_TK = _logps(model, reading.ids_1T).gather(-1, reading.likely_TK)
    apart = (logps_TK - reading.logps_TK).abs().mean(-1).max()
    return float(apart.nan_to_num(nan=float("inf")))
