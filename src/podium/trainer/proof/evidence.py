"""What is measured for the proof: on the user's model and prompts, in few tokens, with weights put back bit by bit.

The sampler, the packed forward and the training step are run at slightly changed weights ("perturbed"), so that a copy
that does not follow the weights shows, and so that a fresh adapter, whose effect is nothing, has one.

Shape letters: N completion tokens of the sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from podium.algorithm.losses import policy_loss
from podium.models.forward import TokenLogps, unwrap
from podium.models.modes import evaluation_mode
from podium.models.packing import Pack, keep, pack
from podium.models.precision import ProductPrecision
from podium.records import Prompt, SamplingSettings, ScoredGroup, TrainingGroup
from podium.trainer.proof.plain import Row, base_model, plain_backward, plain_logps, reference_forward, rows_of
from podium.trainer.rounds import MicroBatch, Share, loss_inputs, micro_batches
from podium.trainer.settings import sampling_settings
from podium.trainer.snapshot import clear_gradients

if TYPE_CHECKING:
    from podium.trainer.trainer import GRPOTrainer

PROMPTS, COMPLETIONS = 2, 2
PROMPT_TOKENS = 16
"""Last tokens of a prompt that the sample starts from."""
COMPLETION_TOKENS = 4
SAMPLE_ROUND = -2
"""Round number of the sample: no round of training has its random numbers."""
NUDGED_TENSORS = 12
"""Of a fully trained model: the last tensors before its head."""
NUDGE = 0.02
"""Share of their size by which weights are moved at first."""
HEAD_TOKENS = 64
"""Likeliest next tokens whose rows of the head are moved, besides those of the prompt's tokens."""
KEPT = 512
"""Numbers kept of every gradient and weight, evenly spread."""

EXACT, HALF = 5e-3, 0.2
"""Nats: the largest difference in float32; the mean difference where products or weights are in half precision."""

EFFECT: Mapping[float, float] = {EXACT: 0.2, HALF: 1.0}
"""Nats by which moved weights should move log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A large tensor in few numbers."""

    norm: float
    numbers: np.ndarray
    """At most `KEPT` of its values, float64."""


Traces = Mapping[str, Trace]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What sampler, packed forward, training step and plain model say of the same few completions."""

    groups: tuple[TrainingGroup, ...]
    sampled_N: np.ndarray
    """Log-probabilities as the engine gave them, at perturbed weights."""
    packed_N: np.ndarray
    """As the packed forward computes them, in the weights' own precision."""
    plain_N: np.ndarray
    """As the plain model does."""
    plain_at_1_N: np.ndarray | None
    """The same at temperature 1, where something disagrees at the run's temperature."""
    before_N: np.ndarray
    """As the plain model does at the weights as they are."""
    misplaced: str
    """A token that stands at a wrong position of the packed forward; empty: none."""
    whole: Traces
    """Gradients of one micro-step of one pack, in the precision of the run."""
    cut: Traces
    """Gradients of two micro-steps that cut a group in two, in the weights' own precision."""
    plain: Traces
    """Gradients of the loss by the plain model."""
    cut_loss: float
    whole_loss: float
    plain_loss: float

    @property
    def doubt(self) -> float:
        """1 less the probability of the least certain token, to which gradients are proportional."""
        return float(-np.expm1(self.plain_N.min())) if self.plain_N.size else 0.0


# ---- the sample ----


def take_sample(trainer: GRPOTrainer, prompts: Sequence[Prompt]) -> Sample:
    """Everything about a few completions; inside `preserve_training_state`."""
    model, parts = unwrap(trainer.model), trainer.parts
    temperature = settings_of(trainer).temperature
    names, head = nudge_names(model, parts.should_train), head_rows(model, parts.should_train, prompts)
    sizes = [nudge_size(trainer, names, prompts[0]), nudge_size(trainer, tuple(head), prompts[0], head)]
    with perturbed(model, names, sizes[0]), perturbed(model, tuple(head), sizes[1], head):
        with exactly(trainer):
            groups = engine_sample(trainer, prompts)
            [packed] = pack(groups, tokens_per_pack=1 << 30, device=trainer.args.device)
            forwards, packed_N = packed_logps(trainer, packed)
        rows = rows_of(groups)
        plain = plain_logps(model, rows, temperature)
        at_1 = _at_temperature_1(trainer, groups, packed_N, plain)
        [batch] = sample_batches([groups])
        whole, whole_loss = trained(trainer, [batch], tokens_per_pack=1 << 30)
        with exactly(trainer):
            cut, cut_loss = trained(trainer, sample_batches(halves(groups)), tokens_per_pack=1)
        gradients, plain_loss = plainly_trained(trainer, packed, batch, rows, plain)
    return Sample(
        groups=tuple(groups),
        sampled_N=sampled_logps(groups),
        packed_N=packed_N,
        plain_N=numpy(plain.logps_N),
        plain_at_1_N=at_1,
        before_N=numpy(plain_logps(model, rows, temperature).logps_N),
        misplaced=misplaced(forwards, packed, groups),
        whole=whole,
        cut=cut,
        plain=gradients,
        cut_loss=cut_loss,
        whole_loss=whole_loss,
        plain_loss=plain_loss,
    )


def _at_temperature_1(
    trainer: GRPOTrainer, groups: Sequence[TrainingGroup], packed_N: np.ndarray, plain: TokenLogps
) -> np.ndarray | None:
    tolerance, plain_N = tolerance_of(trainer, exact=True), numpy(plain.logps_N)
    agree = all(difference(x, plain_N, tolerance) <= tolerance for x in (packed_N, sampled_logps(groups)))
    return None if agree else numpy(plain_logps(unwrap(trainer.model), rows_of(groups), 1.0).logps_N)


def sampled_logps(groups: Sequence[TrainingGroup]) -> np.ndarray:
    """As the engine gave them [N]."""
    return np.concatenate([x for group in groups for x in group.sampled_logps])


def settings_of(trainer: GRPOTrainer) -> SamplingSettings:
    """As the run samples, few and short, from a stream of random numbers of their own."""
    settings = sampling_settings(
        trainer.args, trainer.parts.end_ids, num_completions=COMPLETIONS, round_number=SAMPLE_ROUND
    )
    tokens = min(settings.max_tokens, COMPLETION_TOKENS)
    settings = dataclasses.replace(settings, max_tokens=tokens, end_ids=frozenset(), greedy=False)
    if trainer.parts.filtered_logps:  # log-probabilities that a filter has changed say nothing of the model
        settings = dataclasses.replace(settings, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    return settings


def telling_prompts(scored: Sequence[ScoredGroup]) -> list[Prompt]:
    """The last tokens in front of the least likely one that was sampled, of the groups with the least likely ones.

    Many completions begin with tokens that are all but certain, and certainty has no gradient to compare.
    """
    least = []
    for group in (each.group for each in scored):
        logp, c, at = min(
            (float(x), c, t) for c, each in enumerate(group.completions) for t, x in enumerate(each.logps)
        )
        least.append((logp, group.prompt, group.completions[c].token_ids[:at]))
    chosen = sorted(least, key=lambda each: each[0])[:PROMPTS]
    return [
        dataclasses.replace(prompt, id=i, token_ids=(prompt.token_ids + ids)[-PROMPT_TOKENS:])
        for i, (_, prompt, ids) in enumerate(chosen)
    ]


def engine_sample(trainer: GRPOTrainer, prompts: Sequence[Prompt]) -> list[TrainingGroup]:
    """A few completions from the run's engine, with advantages that differ."""
    groups = trainer.rollouts.generate(prompts, settings_of(trainer))
    found = []
    for group in groups:
        logps = tuple(np.array(completion.logps, np.float32) for completion in group.completions)
        found.append(
            TrainingGroup(
                prompt_ids=group.prompt.token_ids,
                completion_ids=tuple(completion.token_ids for completion in group.completions),
                advantages_G=np.array([1.0, -0.5], np.float32),
                sampled_logps=logps,
                ref_logps=tuple(x - np.float32(0.1) for x in logps) if trainer.args.beta else None,
            )
        )
    return found


@torch.no_grad()
def packed_logps(trainer: GRPOTrainer, packed: Pack) -> tuple[list[dict[str, Any]], np.ndarray]:
    """What the packed forward gave to the model, and the log-probabilities [N] it computed."""
    seen: list[dict[str, Any]] = []
    model = unwrap(trainer.model)
    hook = base_model(model).register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(dict(kwargs)), with_kwargs=True
    )
    try:
        model.eval()
        with trainer.parts.attention(), trainer.parts.precision():
            out = trainer.parts.token_logps(model, packed)
    finally:
        hook.remove()
    return seen, numpy(out.logps_N)


def misplaced(forwards: Sequence[Mapping[str, Any]], packed: Pack, groups: Sequence[TrainingGroup]) -> str:
    """The first token that a forward saw at another position, or as another token, than a plain row has it."""
    inputs = forwards[0]
    ids, positions = (inputs[name].cpu() for name in ("input_ids", "position_ids"))
    for r, (row, span) in enumerate(zip(rows_of(groups), packed.spans_R, strict=True)):
        expected = row.prompt_ids + row.completion_ids[:-1]
        if inputs.get("attention_mask") is None:
            mine, places = ids[0, span.tokens].tolist(), positions[0, span.tokens].tolist()
        else:
            mine, places = ids[r, : len(expected)].tolist(), positions[r, : len(expected)].tolist()
        for t, (token, place) in enumerate(zip(mine, places, strict=True)):
            if token != expected[t]:
                return f"token {t} of completion {r} is {token}, not {expected[t]}"
            if place != t:
                return f"token {t} of completion {r} stands at position {place}"
    return ""


# ---- gradients ----


def halves(groups: Sequence[TrainingGroup]) -> list[list[TrainingGroup]]:
    """Two micro-steps that share the first group."""
    first, *others = groups
    middle = len(first.completion_ids) // 2
    return [[keep(first, range(middle))], [keep(first, range(middle, len(first.completion_ids))), *others]]


def sample_batches(micro_steps: Sequence[Sequence[TrainingGroup]]) -> list[MicroBatch]:
    """The sample as one optimizer step, counted as the trainer counts."""
    shares = [
        Share(
            groups=tuple(groups),
            num_rollouts=sum(len(group.completion_ids) for group in groups),
            num_tokens=(tokens := sum(len(ids) for group in groups for ids in group.completion_ids)),
            local_tokens=tokens,
        )
        for groups in micro_steps
    ]
    return micro_batches(shares, per_micro_batch=False, ranks=1)


def trained(trainer: GRPOTrainer, batches: Sequence[MicroBatch], *, tokens_per_pack: int) -> tuple[Traces, float]:
    """Gradients and loss of the trainer's own training step; terms that depend on the cut by design are left out."""
    parts, quantile, entropy = trainer.parts, trainer.args.top_entropy_quantile, trainer.entropy
    trainer.parts = dataclasses.replace(parts, tokens_per_pack=tokens_per_pack, router_coef=0.0)
    trainer.args.top_entropy_quantile = 1.0
    clear_gradients(trainer.model)
    try:
        traces, loss = _gradients(trainer, batches)
        while loss_scale(trainer) > 1 and not all(math.isfinite(trace.norm) for trace in traces.values()):
            # The scale of float16 starts high, and comes down by the steps that overflow.
            trainer.accelerator.scaler.update(loss_scale(trainer) / 16)
            clear_gradients(trainer.model)
            traces, loss = _gradients(trainer, batches)
        return traces, loss
    finally:
        trainer.parts, trainer.args.top_entropy_quantile, trainer.entropy = parts, quantile, entropy
        clear_gradients(trainer.model)


def _gradients(trainer: GRPOTrainer, batches: Sequence[MicroBatch]) -> tuple[Traces, float]:
    loss = sum(float(trainer.training_step(trainer.model, batch)) for batch in batches)
    scale = trainer.accelerator.num_processes * loss_scale(trainer)
    return gradient_traces(trainer.model, scale), loss / trainer.accelerator.num_processes


def loss_scale(trainer: GRPOTrainer) -> float:
    """What float16 training multiplies the loss by."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


def plainly_trained(
    trainer: GRPOTrainer, packed: Pack, batch: MicroBatch, rows: Sequence[Any], plain: TokenLogps
) -> tuple[Traces, float]:
    """The same by the plain model and torch's own backward."""
    model = unwrap(trainer.model)
    clear_gradients(model)

    def loss_of(out: TokenLogps) -> Tensor:
        inputs = loss_inputs(packed, out, batch, None, None, other_sampler=trainer.parts.other_sampler)
        return policy_loss(inputs, trainer.parts.loss, trainer._entropy_coef).loss

    loss = plain_backward(model, rows, settings_of(trainer).temperature, plain, loss_of)
    traces = gradient_traces(model, 1.0)
    clear_gradients(model)
    return traces, loss


def gradient_traces(model: nn.Module, scale: float) -> Traces:
    """Of every trained tensor; no gradient counts as zeros."""
    return {
        name: trace(torch.zeros_like(p) if p.grad is None else p.grad, scale)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def trace(x: Tensor, scale: float = 1.0) -> Trace:
    """
    >>> trace(torch.tensor([3.0, 4.0])).norm
    5.0
    """
    flat = x.detach().reshape(-1)
    numbers = flat[:: max(1, -(-len(flat) // KEPT))].float().cpu().numpy().astype(np.float64)
    return Trace(norm=float(torch.linalg.vector_norm(flat, dtype=torch.float32)) / scale, numbers=numbers / scale)


# ---- weights ----


def weight_traces(model: nn.Module) -> Traces:
    """Of every trained tensor."""
    return {name: trace(p) for name, p in model.named_parameters() if p.requires_grad}


def nudge_names(model: nn.Module, trained: frozenset[str]) -> list[str]:
    """Tensors that are changed for a moment: those of an adapter, or the last ones of a model."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and name in trained}
    adapter = [name for name in parameters if "lora_" in name]
    ends = {id(layer.weight) for layer in (_embedding(model, which) for which in ("input", "output")) if layer}
    others = [name for name, p in parameters.items() if id(p) not in ends]
    return adapter or others[-NUDGED_TENSORS:]


def _embedding(model: Any, which: str) -> Any:
    return getattr(base_model(model), f"get_{which}_embeddings")()


@torch.no_grad()
def head_rows(model: nn.Module, trained: frozenset[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
    """Rows of the head, where it is trained, that decide about the next tokens of the prompts."""
    head = getattr(_embedding(model, "output"), "weight", None)
    name = next((n for n, p in model.named_parameters() if p is head and p.requires_grad and n in trained), None)
    if name is None:
        return {}
    device, rows = next(model.parameters()).device, [i for prompt in prompts for i in prompt.token_ids]
    with reference_forward(model):
        for prompt in prompts:
            logits_V = model(input_ids=torch.tensor([prompt.token_ids], device=device), use_cache=False).logits[0, -1]
            rows += logits_V.topk(min(HEAD_TOKENS, len(logits_V))).indices.tolist()
    return {name: torch.tensor(sorted(set(rows)), device=device)}


def nudge_size(
    trainer: GRPOTrainer, names: Sequence[str], prompt: Prompt, rows: Mapping[str, Tensor] = MappingProxyType({})
) -> float:
    """How far to move weights so that log-probabilities move by well more than the tolerance: from one trial.

    Not further: a model that is thrown off answers with certainty, and certainty has no gradient.
    """
    model = unwrap(trainer.model)
    row = Row(prompt_ids=prompt.token_ids[:1], completion_ids=prompt.token_ids[1:] or prompt.token_ids)
    before = plain_logps(model, [row], 1.0).logps_N
    with perturbed(model, names, NUDGE, rows):
        effect = float((plain_logps(model, [row], 1.0).logps_N - before).abs().mean())
    wanted = EFFECT[sampler_tolerance(trainer, exact=True)]
    return NUDGE * min(max(wanted / max(effect, 1e-6), 1e-3), 10.0)


@contextlib.contextmanager
def perturbed(
    model: nn.Module, names: Sequence[str], size: float, rows: Mapping[str, Tensor] = MappingProxyType({})
) -> Iterator[None]:
    """Inside, these tensors, or `rows` of them, are moved by a share of their size (zeros: of 1); then put back."""
    parameters = dict(model.named_parameters())
    places: dict[str, Any] = {name: rows.get(name, ...) for name in names}
    before = {name: parameters[name].detach()[place].clone() for name, place in places.items()}
    try:
        with torch.no_grad():
            for name, place in places.items():
                parameters[name][place] = before[name] + _wave(before[name], size)
        yield
    finally:
        with torch.no_grad():
            for name, place in places.items():
                parameters[name][place] = before[name]


def _wave(x: Tensor, size: float) -> Tensor:
    """Numbers like noise, the same every time."""
    own = float(x.float().square().mean().sqrt()) or 1.0
    steps = torch.arange(x.numel(), device=x.device, dtype=torch.float64)
    return (steps.mul_(2.399963).add_(1.0).sin_() * (size * own)).view_as(x).to(x.dtype)


@contextlib.contextmanager
def exactly(trainer: GRPOTrainer) -> Iterator[None]:
    """Inside, sampling and training compute in the weights' own precision: no rounded products, no autocast."""
    parts, engine = trainer.parts, trainer.parts.engine
    if isinstance(parts.precision, ProductPrecision):
        enabled, parts.precision.enabled = parts.precision.enabled, False
        try:
            yield
        finally:
            parts.precision.enabled = enabled
        return
    precision = getattr(engine, "precision", None)
    trainer.parts = dataclasses.replace(parts, precision=contextlib.nullcontext)
    engine.precision = contextlib.nullcontext  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trainer.parts = parts
        engine.precision = precision  # type: ignore[attr-defined]


# ---- numbers ----


def numpy(x: Tensor) -> np.ndarray:
    """float32 on the host."""
    return x.detach().float().cpu().numpy()


def tolerance_of(trainer: GRPOTrainer, *, exact: bool) -> float:
    """Nats by which two ways to compute a log-probability may differ; `exact`: inside `exactly`."""
    kinds = {p.dtype for p in trainer.model.parameters()}
    half_weights = bool(
        kinds - {torch.float32, torch.uint8}
    )  # bytes are weights in 4 bits: rounded, but computed exactly
    precision = trainer.parts.precision
    rounds = precision.rounds if isinstance(precision, ProductPrecision) else trainer.args.bf16 or trainer.args.fp16
    return HALF if half_weights or (rounds and not exact) else EXACT


def sampler_tolerance(trainer: GRPOTrainer, *, exact: bool) -> float:
    """The same between sampling and training: an engine of another kind may round where training does not."""
    return HALF if getattr(trainer.parts.engine, "rounds_weights", False) else tolerance_of(trainer, exact=exact)


def difference(one_N: np.ndarray, other_N: np.ndarray, tolerance: float) -> float:
    """The largest difference, or the mean one where the tolerance is that of half precision; NaN is infinite."""
    if one_N.shape != other_N.shape:
        return math.inf
    apart = np.abs(one_N - other_N)
    value = float(apart.max(initial=0.0) if tolerance == EXACT else apart.mean() if apart.size else 0.0)
    return math.inf if math.isnan(value) else value


@torch.no_grad()
def training_logps(
    trainer: GRPOTrainer, groups: Sequence[TrainingGroup], model: nn.Module | None = None
) -> list[np.ndarray]:
    """Of every rollout, as the run trains on them, or as another model would."""
    model = unwrap(trainer.model) if model is None else model
    found: list[np.ndarray] = []
    with evaluation_mode(model), trainer.parts.attention(model), trainer.parts.precision():
        for packed in pack(groups, tokens_per_pack=trainer.parts.tokens_per_pack, device=trainer.args.device):
            found += packed.split(trainer.parts.token_logps(model, packed).logps_N)
    return found
