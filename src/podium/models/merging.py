"""Merging an adapter into its base, with the proof that nothing was lost.

    expected = expect(model, tokenizer, texts)       what the model with its adapter says
    merged = merge(model)                            a plain transformers model; the one given is used up
    proof = prove(merged, expected, torch.float32)   ProofError unless it says the same

A merge may quietly change a model: a base in 4 bits is rounded again, bfloat16 drops what the adapter changed, a saved
file may lack a tensor. So the log-probabilities of both are compared on some texts before anything is given back. What
is expected is a few numbers a position, so that the two models need not be in memory together. Neither comparison can
tell whether the base is the one that was trained on: `podium.models.adapters` can, where training recorded it.
`check_base` adds how far completions that a run recorded are from it, which proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from podium.errors import ModelError, ProofError
from podium.models.adapters import Origin
from podium.models.forward import is_quantized
from podium.models.images import described
from podium.models.loading import end_ids
from podium.records import GivenImages

TEXTS = (
    "What is 17 plus 25? Think step by step, then give the answer.",
    "def add(a, b):\n    return",
    "The capital of France is",
)
"""Texts that both models read, besides prompts of the run."""

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
class Predictions:
    """A model's likeliest next tokens for one text, or one prompt with images. K is `LIKELY`."""

    ids_1T: Tensor
    likely_TK: Tensor
    """The likeliest next tokens after every position."""
    logps_TK: Tensor
    """Their log-probabilities, nats."""
    images: tuple[GivenImages, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Predictions that the model to be shipped must make."""

    readings: tuple[Predictions, ...]
    effect: float | None
    """Nats: what the adapter changes, which the merge has to carry over; None: the model has no adapter."""


SAME_BASE = 0.1
"""Nats a token: how far the mean log-probability of a completion may be from the recorded one, on average. Sampling in
bfloat16 moves a token's by about 0.02; another base of the same family by more than this."""

QUANTIZED_BASE = 1.0
"""The same where training loaded the base in 4 or 8 bits, which the merge does not: measured 0.29 for a small model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A completion as a run recorded it."""

    prompt: str
    completion: str
    num_prompt_tokens: int
    num_tokens: int
    mean_logp: float
    """Nats a token, the end token included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseProof:
    """Comparison of a model with the log-probabilities that a run has recorded."""

    difference: float
    """Nats a token: of a completion's mean log-probability from the recorded one, the mean of all completions."""
    tolerance: float
    num_completions: int
    quantized: bool
    """Training loaded the base in 4 or 8 bits."""

    @property
    def passed(self) -> bool:
        """Whether the difference is as small as sampling usually makes it."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        rounded = "; training saw its weights rounded to 4 or 8 bits, so this is close to the trained model, not equal"
        return (
            f"on this base {self.num_completions} recorded completions are {self.difference:.2g} nats a token from "
            f"what the run recorded ({self.tolerance:g} is usual){rounded if self.quantized else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeProof:
    """Comparison of the merged model with the model and its adapter."""

    difference: float
    """Nats: the largest difference of the log-probabilities of likely next tokens, over all positions of all texts."""
    tolerance: float
    effect: float | None
    """The same between the model with its adapter and without: what the merge has to carry over; None: no adapter."""
    num_positions: int
    base: BaseProof | None = None
    """None: no adapter, or nothing recorded to compare its base with."""
    origin: Origin = field(default_factory=Origin)
    """Of an adapter: whether it and its base are those that training recorded."""

    @property
    def passed(self) -> bool:
        """Whether the merged model is the given one: close to it, and closer than to the base."""
        carried = not self.effect or self.difference <= LEAST_KEPT * self.effect
        return self.difference <= self.tolerance and carried

    @property
    def apart(self) -> str:
        """The models that were compared, and their difference."""
        trained = "original" if self.effect is None else self.origin
        change = "" if self.effect is None else f"; the adapter itself changes {self.effect:.2g} nats"
        return (
            f"saved model and {trained} differ by at most {self.difference:.2g} nats ({self.tolerance:g} allowed) over "
            f"{self.num_positions} positions{change}"
        )

    def __str__(self) -> str:
        if self.effect is None:
            return self.apart
        return "; ".join(str(part) for part in (self.apart, self.origin.grounds, self.base) if part)


@torch.no_grad()
def expect(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] = TEXTS,
    pictured: Sequence[tuple[Sequence[int], GivenImages]] = (),
) -> Expected:
    """A model's predictions for some texts, with its adapter if it has one; and the effect of the adapter on them.

    `pictured`: prompts with images, of which an adapter on the encoder alone changes the predictions.
    """
    model.eval()
    readings = tuple(_read(model, _tokens(tokenizer, text)) for text in texts)
    readings += tuple(_read(model, token_ids, (images,)) for token_ids, images in pictured)
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
        raise ModelError(
            f"There is nothing to merge: a {type(model).__name__} has no adapter.", kind=type(model).__name__
        )
    if is_quantized(model):
        raise ModelError(
            "The base is quantized, and a merge into rounded weights loses the adapter.",
            fix="Load the base with dtype=float32, the adapter on it, and merge that.",
        )
    _untie(model.get_base_model())
    return model.merge_and_unload()


def _untie(base: PreTrainedModel) -> None:
    """Give the head a weight of its own where it shares the input embedding's and the adapter changes one of the two.

    Merged into the weight that they share, what the adapter adds to one would change the other as well.
    """
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    embedding, head = (end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends)
    if head is None or head.weight is not embedding.weight or not any(isinstance(x, BaseTunerLayer) for x in ends):
        return
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in (base.config, base.config.get_text_config()):
        config.tie_word_embeddings = False


@torch.no_grad()
def check_base(
    model: Any, tokenizer: PreTrainedTokenizerBase, sampled: Sequence[Sampled], *, temperature: float, quantized: bool
) -> BaseProof | None:
    """Compare what a model makes of completions with what the model they were sampled from did.

    Completions whose text does not become as many tokens as were sampled are left out.

    Returns:
        None: no completion is left.
    """
    ends = sorted(end_ids(model, tokenizer))
    size = model.get_input_embeddings().weight.shape[0]
    differences = []
    for recorded in sampled:
        prompts = [tokenizer(recorded.prompt, add_special_tokens=special)["input_ids"] for special in (False, True)]
        prompt = next((ids for ids in prompts if len(ids) == recorded.num_prompt_tokens), None)
        completion = tokenizer(recorded.completion, add_special_tokens=False)["input_ids"]
        has_end = len(completion) == recorded.num_tokens - 1
        if not prompt or len(completion) + has_end != recorded.num_tokens:
            continue
        ids_1T = torch.tensor([[*prompt, *completion]])
        if int(ids_1T.max()) >= size:
            differences.append(float("inf"))
            continue
        logps_TV = _logps(model, ids_1T, temperature)[len(prompt) - 1 :]
        logps = [float(logps_TV[i, token]) for i, token in enumerate(completion)]
        logps += [float(logps_TV[-1, ends].max())] if has_end else []
        differences.append(abs(sum(logps) / len(logps) - recorded.mean_logp))
    if not differences:
        return None
    return BaseProof(
        difference=sum(differences) / len(differences),
        tolerance=QUANTIZED_BASE if quantized else SAME_BASE,
        num_completions=len(differences),
        quantized=quantized,
    )


@torch.no_grad()
def prove(
    merged: PreTrainedModel,
    expected: Expected,
    stored: torch.dtype,
    base: BaseProof | None = None,
    origin: Origin | None = None,
) -> MergeProof:
    """Compare what a model says with what is expected of it.

    Args:
        merged: the model to be shipped; it computes in the type it is in.
        expected: from the model with its adapter.
        stored: the type its weights have been rounded to, which says how far apart the two may be.
        base: from `check_base`.
        origin: from `adapters.put_on`.

    Raises:
        ProofError: the merged model answers differently (P013).
    """
    merged.eval()
    proof = MergeProof(
        difference=max(_apart(merged, reading) for reading in expected.readings),
        tolerance=TOLERANCES[stored],
        effect=expected.effect,
        num_positions=sum(reading.ids_1T.shape[1] for reading in expected.readings),
        base=base,
        origin=origin or Origin(),
    )
    if not proof.passed:
        raise ProofError(
            f"The {'copy' if proof.effect is None else 'merge'} is refused: {proof.apart}.",
            code="P013",
            fix="See `podium explain P013`."
            if stored == torch.float32
            else "Rounding has lost what was trained: keep the weights in float32 (`--dtype float32`).",
        )
    return proof


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # A rendered prompt may begin with the tokenizer's first token already.
    begun = tokenizer.bos_token is not None and text.startswith(str(tokenizer.bos_token))
    encoded = tokenizer(text, add_special_tokens=not begun, truncation=True, max_length=LONGEST)
    return list(encoded["input_ids"])


def _read(model: Any, token_ids: Sequence[int], images: tuple[GivenImages, ...] = ()) -> Predictions:
    ids_1T = torch.tensor([token_ids])
    logps_TV = _logps(model, ids_1T, images=images)
    logps_TK, likely_TK = logps_TV.topk(min(LIKELY, logps_TV.shape[-1]), -1)
    return Predictions(ids_1T=ids_1T, images=images, likely_TK=likely_TK, logps_TK=logps_TK)


def _logps(model: Any, ids_1T: Tensor, temperature: float = 1.0, images: tuple[GivenImages, ...] = ()) -> Tensor:
    device = next(model.parameters()).device
    given = described(model, images, ids_1T.shape[1])
    output = model(input_ids=ids_1T.to(device), use_cache=False, **given)
    return (output.logits[0].float() / temperature).log_softmax(-1)


def _apart(model: Any, reading: Predictions) -> float:
    """The mean over the likely tokens, at the worst position; a NaN is infinite."""
    logps_TK = _logps(model, reading.ids_1T, images=reading.images).gather(-1, reading.likely_TK)
    return float((logps_TK - reading.logps_TK).abs().mean(-1).max().nan_to_num(nan=float("inf")))
