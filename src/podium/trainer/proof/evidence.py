"""Measurements for the proof, on the user's model and prompts, in few tokens; weights are put back bit by bit.

The plain model is the measure of all else: one sample, one forward, its own logits, eager attention. No shared prefix,
no packing, no chunked head, no rounded products, no cache. The sampler, the packed forward and the training step are
run at slightly changed weights (`perturbed`), so that a copy that does not follow the weights shows, and so that a
fresh adapter, whose effect is nothing, has one.

Shape letters: T tokens of a sample, A those that were drawn, N those of all samples, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerState

from podium.algorithm.losses import LossInputs, LossSettings, policy_loss
from podium.models.attention import attention_implementation
from podium.models.candidates import ids_of
from podium.models.forward import TokenLogps, base_model, unwrap
from podium.models.images import described, rotary_positions
from podium.models.modes import evaluation_mode, replaced
from podium.models.packing import Pack, pack, unscored
from podium.models.precision import ProductPrecision, norm_of
from podium.records import Completion, Prompt, Sample, SamplingSettings, ScoredGroup
from podium.trainer.config import GRPOConfig
from podium.trainer.rounds import MicroBatch, micro_batches
from podium.trainer.run import TrainingRun
from podium.trainer.samples import samples_of
from podium.trainer.settings import has_other_sampler
from podium.trainer.step import Objective, Step

PROMPTS = 2
COMPLETIONS = 2
PROMPT_TOKENS = 16
"""Last tokens of a prompt that the sample starts from."""
COMPLETION_TOKENS = 4
GIVEN_TOKEN = 2
"""Token of a sampled completion that counts as given, in a run whose completions have several turns."""
SAMPLE_ROUND = -2
"""Round number of the sample: no round of training has its random numbers."""
NUDGED_TENSORS = 12
"""Last tensors before the head that are moved in a fully trained model."""
NUDGE = 0.02
"""Share of their size by which weights are moved at first."""
HEAD_TOKENS = 64
"""Likeliest next tokens whose rows of the head are moved, besides those of the prompt's tokens."""
KEPT = 512
"""Numbers kept of every gradient and weight, evenly spread."""
NUM_WHOLE = 24
WHOLE = 1 << 24
"""Tensors, and numbers in them, that are compared whole before and after a step."""
ONE_PACK = 1 << 30
"""Tokens per pack that no sample reaches."""

EXACT = 5e-3
HALF = 0.2
"""Nats: the largest difference in float32; the mean difference where products or weights are in half precision."""

ROUNDINGS = 10.0
"""Times the difference that rounding of the inputs makes, below which another difference may be rounding, too."""

EFFECT: Mapping[float, float] = {EXACT: 0.2, HALF: 1.0}
"""Nats by which moved weights should move log-probabilities."""


# ---- records ----

NAMED = 3
"""Tensors that a message names; it counts the others."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a check has found."""

    detail: str
    """The finding, with the tensor or token where it is wrong."""
    _: KW_ONLY
    passed: bool | None = True
    """None: not checked, for the reason in `detail`."""
    measured: float | None = None
    tolerance: float | None = None
    """The largest `measured` that passes; None: that of the check's row."""
    note: bool = False
    """It passed, but `detail` is worth reading."""
    suspect: bool = False
    """It passed, but the run is probably in vain."""
    name: str = ""
    code: str = ""
    fix: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """These four in place of those of the check's row, unless they are empty."""


def problems_in(problems: Iterable[str], otherwise: str, *, checked: bool = True) -> Reading:
    """The reading of a check that passes where none of its problems has words; `otherwise`: its detail then."""
    found = [problem for problem in problems if problem]
    passed = not found if checked else None
    return Reading(named(found) if found else otherwise, passed=passed, measured=float(len(found)))


def named(names: Iterable[str]) -> str:
    """The first names, and the number of further ones."""
    names = list(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def named_by_kind(listed: Mapping[str, Sequence[str]]) -> list[str]:
    """`frozen: a, b`: the names of each kind that has any."""
    return [f"{kind}: {named(names)}" for kind, names in listed.items() if names]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The run under proof, at one moment."""

    training: TrainingRun
    state: TrainerState
    optimizer: Any
    try_step: Callable[[MicroBatch, Step, Objective], Tensor]
    """The trainer's own forward and backward of a micro-batch, with other settings; gives its loss."""
    entropy_coef: float
    wait: Callable[[], Any]
    """Returns when no round is being sampled."""

    @property
    def model(self) -> nn.Module:
        """The policy, without wrappers."""
        return unwrap(self.training.step.model)

    @property
    def args(self) -> GRPOConfig:
        return self.training.args

    @property
    def kind(self) -> str:
        """The part of the model that is trained."""
        return "adapter" if hasattr(self.model, "peft_config") else "weights"

    def shown(self, token: int | None) -> str:
        """A token and its id: `<|im_end|> (2)`."""
        return f"{self.training.policy.tokenizer.convert_ids_to_tokens(token)} ({token})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A large tensor in few numbers."""

    norm: float
    numbers: np.ndarray
    """At most `KEPT` of its values, float64."""


Traces = Mapping[str, Trace]


class Gradients(NamedTuple):
    """Gradients of every trained tensor, and the loss."""

    traces: Traces
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A few completions, computed by the sampler, the packed forward, the training step and the plain model."""

    samples: tuple[Sample, ...]
    sampled_N: np.ndarray
    """Log-probabilities from the engine, at perturbed weights."""
    packed_N: np.ndarray
    """From the packed forward, in the weights' own precision."""
    plain_N: np.ndarray
    """From the plain model."""
    plain_at_1_N: np.ndarray | None
    """From the plain model at temperature 1, where something disagrees at the run's temperature."""
    before_N: np.ndarray
    """From the plain model at the weights as they are."""
    misplaced: str
    """A token that stands at a wrong position of the packed forward; empty: none."""
    one_step: Gradients
    """From one micro-step of one pack, in the precision of the run."""
    repeated: Gradients
    """From the same once more: where it differs, training is random."""
    two_steps: Gradients
    """From two micro-steps that cut a group in two, in the weights' own precision."""
    plain: Gradients
    """From the plain model."""
    again: Gradients
    """The same with inputs that rounding has moved: what differs more is no rounding."""
    again_N: np.ndarray
    """Log-probabilities of the same."""
    against: int
    """Tokens that the loss makes likelier although their advantage is negative, or less likely where it is positive."""

    @property
    def doubt(self) -> float:
        """1 less the probability of the least certain token, to which gradients are proportional."""
        return float(-np.expm1(self.plain_N.min())) if self.plain_N.size else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """Input of the checks before the first optimizer step."""

    run: Subject
    trained: tuple[Sample, ...]
    """All samples of the step that will be trained on."""
    scored: tuple[ScoredGroup, ...]
    """As they were sampled and scored."""
    probe: Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """Input of the checks after a step: the state before it."""

    run: Subject
    weights: Traces
    samples: tuple[Sample, ...]
    logps: list[np.ndarray]
    """Log-probabilities of `samples`, as the run trains on them."""
    reference: list[np.ndarray]
    """The same under the reference; empty without one."""
    signal: bool
    """Whether a completion has an advantage in this step."""
    tensors: Mapping[str, Tensor]
    """A few weights, whole tensors, as they were."""
    decays: Mapping[str, float]
    """Learning rate x weight decay of the tensors that have any."""
    gradients: Sequence[Mapping[str, Tensor]]
    """Gradients of those tensors, as the backward left them: of the steps so far, the latest last."""


# ---- the plain model ----


def action_places(sample: Sample) -> np.ndarray:
    """Indices of the drawn tokens among those behind the prompt [A]."""
    return np.flatnonzero(sample.actions)


def turns_of(sample: Sample) -> np.ndarray:
    """The turn of each drawn token [A], from 0: turns are apart by given tokens."""
    places_A = action_places(sample)
    return np.cumsum(np.diff(places_A, prepend=places_A[:1]) > 1)


def first_tokens(sample: Sample, count: int) -> Sample:
    """The first tokens behind the prompt, and no part of an image; only what log-probabilities need."""
    start = len(sample.prompt_ids)
    ends = [(start + count) - x.start for x in sample.images]
    images = tuple(x for x, end in zip(sample.images, ends, strict=True) if end > x.placeholders[-1])
    if len(images) < len(sample.images):
        count = min(count, max(0, sample.images[len(images)].start - start))
    actions = sample.actions[:count]
    num_drawn = int(actions.sum())
    return dataclasses.replace(
        sample,
        token_ids=sample.token_ids[:count],
        actions=actions,
        advantages_A=sample.advantages_A[:num_drawn],
        sampled_logps_A=sample.sampled_logps_A[:num_drawn],
        candidates=None if sample.candidates is None else sample.candidates[:num_drawn],
        images=images,
        old_logps_A=None,
        ref_logps_A=None,
        penalties_A=None,
    )


@contextlib.contextmanager
def reference_forward(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and eager attention, the one that applies everything, soft-capping included."""
    base = base_model(model)
    eager = getattr(base, "_supports_attention_backend", False)
    with evaluation_mode(model), attention_implementation(base, "eager") if eager else contextlib.nullcontext():
        yield


def sample_logps(model: nn.Module, sample: Sample, temperature: float) -> TokenLogps:
    """Log-probability and entropy [A] of a sample's drawn tokens."""
    device = next(model.parameters()).device
    ids = torch.tensor([sample.prompt_ids + sample.token_ids], device=device)
    logits_TV = model(input_ids=ids, **described(model, sample.images, ids.shape[1]), use_cache=False).logits[0].float()
    places_A = torch.from_numpy(action_places(sample)).to(device) + len(sample.prompt_ids)
    logp_AV = (logits_TV[places_A - 1] / temperature).log_softmax(-1)
    targets = ids[0, places_A, None]
    logp_A = logp_AV.gather(1, targets)[:, 0]
    if sample.candidates is not None:
        left = zip(logp_AV, map(ids_of, sample.candidates), strict=True)
        logp_A = logp_A - torch.stack([logp_V[ids if len(ids) else slice(None)].logsumexp(0) for logp_V, ids in left])
    p_AV = logp_AV.exp()
    return TokenLogps(logps_N=logp_A, entropy_N=-torch.where(p_AV > 0, p_AV * logp_AV, 0.0).sum(-1))


@torch.no_grad()
def plain_logps(model: nn.Module, samples: Sequence[Sample], temperature: float) -> TokenLogps:
    """Log-probabilities and entropies of all samples, without gradients."""
    with reference_forward(model):
        outputs = [sample_logps(model, sample, temperature) for sample in samples]
    return TokenLogps(**{name: torch.cat([getattr(out, name) for out in outputs]) for name in ("logps_N", "entropy_N")})


def plain_backward(
    model: nn.Module,
    samples: Sequence[Sample],
    temperature: float,
    values: TokenLogps,
    loss_of: Callable[[TokenLogps], Tensor],
) -> float:
    """Add the gradients of `loss_of`, a sample at a time; gives the loss. `values` are `plain_logps`."""
    leaves = [x.clone().requires_grad_() for x in (values.logps_N, values.entropy_N)]
    loss = loss_of(TokenLogps(logps_N=leaves[0], entropy_N=leaves[1]))
    loss.backward()
    lengths = [int(sample.actions.sum()) for sample in samples]
    upstream = [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]
    with reference_forward(model):
        for sample, of_logps, of_entropy in zip(samples, *(x.split(lengths) for x in upstream), strict=True):
            out = sample_logps(model, sample, temperature)
            ((out.logps_N * of_logps).sum() + (out.entropy_N * of_entropy).sum()).backward()
    return float(loss.detach())


def first_not_finite(model: nn.Module, forward: Callable[[], object]) -> str:
    """The name of the first layer whose output has a NaN or an infinity while `forward` runs; empty: none."""
    found: list[str] = []
    names = {module: name for name, module in model.named_modules() if name}

    def look(module: nn.Module, _args: object, output: object) -> None:
        outputs = output if isinstance(output, (tuple, list)) else [output]
        tensors = [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]
        if not found and any(not bool(x.isfinite().all()) for x in tensors):
            found.append(names[module])

    handles = [module.register_forward_hook(look) for module in names]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""


# ---- the probe ----


def take_probe(run: Subject, prompts: Sequence[Prompt], *, has_turns: bool = False) -> Probe:
    """Everything about a few completions; inside `preserve_training_state`.

    `has_turns`: whether one token of each counts as given, as tokens between turns are.
    """
    model = run.model
    settings = sample_settings(run)
    should_train = run.training.policy.trained
    common = gather_object([tuple(prompts)])[0]  # all processes move the weights alike: a server has those of the first
    names = nudge_names(model, should_train)
    head = head_rows(model, should_train, common)
    sizes = [nudge_size(run, names, common[0]), nudge_size(run, tuple(head), common[0], head)]
    with perturbed(model, names, sizes[0]), perturbed(model, tuple(head), sizes[1], head):
        with full_precision(run) as exact:
            samples = engine_sample(exact, prompts, settings)
            samples = [with_given_token(sample) for sample in samples] if has_turns else samples
            [packed] = pack(samples, tokens_per_pack=ONE_PACK, device=run.args.device)
            forwards, packed_N = packed_logps(exact, packed)
        sampled_N = np.concatenate([sample.sampled_logps_A for sample in samples])
        plain = plain_logps(model, samples, settings.temperature)
        plain_N = numpy(plain.logps_N)
        tolerance = tolerance_of(run, exact=True)
        agree = all(difference(x, plain_N, tolerance) <= tolerance for x in (packed_N, sampled_N))
        at_1 = None if agree else numpy(plain_logps(model, samples, 1.0).logps_N)
        [batch] = probe_batches([samples])
        one_step, repeated = (train_on(run, [batch], tokens_per_pack=ONE_PACK) for _ in range(2))
        with full_precision(run) as exact:
            half = COMPLETIONS // 2  # which cuts the first group
            two_steps = train_on(exact, probe_batches([samples[:half], samples[half:]]), tokens_per_pack=1)
        plain_step = plainly_train_on(run, samples, plain)
        with moved_by_rounding(model):
            again = plain_logps(model, samples, settings.temperature)
            again_step = plainly_train_on(run, samples, again)
    return Probe(
        samples=tuple(samples),
        sampled_N=sampled_N,
        packed_N=packed_N,
        plain_N=plain_N,
        plain_at_1_N=at_1,
        before_N=numpy(plain_logps(model, samples, settings.temperature).logps_N),
        misplaced=misplaced(forwards, packed, samples, run.model),
        one_step=one_step,
        repeated=repeated,
        two_steps=two_steps,
        plain=plain_step,
        again=again_step,
        again_N=numpy(again.logps_N),
        against=against_advantages(plain_inputs(run, samples, plain), run.training.objective.loss),
    )


def sample_settings(run: Subject) -> SamplingSettings:
    """As the run samples, few and short, from a stream of random numbers of their own."""
    settings = run.training.step.sampling(COMPLETIONS, SAMPLE_ROUND)
    tokens = min(settings.max_tokens, COMPLETION_TOKENS)
    settings = dataclasses.replace(settings, max_tokens=tokens, end_ids=frozenset(), greedy=False)
    if run.training.step.filters_logps:  # log-probabilities that a filter has changed say nothing of the model
        settings = dataclasses.replace(settings, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    return settings


def telling_prompts(scored: Sequence[ScoredGroup]) -> list[Prompt]:
    """The last tokens in front of the least likely one that was sampled, of the groups with the least likely ones.

    Many completions begin with tokens that are all but certain, and certainty has no gradient to compare.
    """
    least = []
    for group in (entry.group for entry in scored):
        logps = [
            (float(x), c, t)
            for c, completion in enumerate(group.completions)
            for t, x in zip(drawn_places(completion), completion.logps, strict=True)
        ]
        if not logps:  # programs that asked for nothing
            continue
        logp, c, at = min(logps)
        completion = group.completions[c]
        prompt = completion.prompt or group.prompt
        token_ids = prompt.token_ids + completion.token_ids[:at]
        images = prompt.images + tuple(x for x in completion.images if x.start < len(token_ids))
        if not images:
            token_ids = token_ids[-PROMPT_TOKENS:]
        least.append((logp, dataclasses.replace(prompt, token_ids=token_ids, images=images)))
    least.sort(key=operator.itemgetter(0))
    return [dataclasses.replace(prompt, id=i) for i, (_, prompt) in enumerate(least[:PROMPTS])]


def drawn_places(completion: Completion) -> list[int]:
    """Indices of the tokens that the policy drew, by the turns that the engine recorded."""
    if not completion.turns:
        return [*range(len(completion.token_ids))]
    return [t for turn in completion.turns for t in range(turn.start, turn.stop)]


def with_given_token(sample: Sample) -> Sample:
    """The sample as if its token `GIVEN_TOKEN` had not been drawn; a shorter one stays."""
    drawn = np.arange(len(sample.token_ids)) != GIVEN_TOKEN
    return dataclasses.replace(
        sample,
        actions=drawn,
        advantages_A=sample.advantages_A[drawn],
        sampled_logps_A=sample.sampled_logps_A[drawn],
        candidates=sample.candidates and tuple(itertools.compress(sample.candidates, drawn)),
        ref_logps_A=None if sample.ref_logps_A is None else sample.ref_logps_A[drawn],
    )


def engine_sample(run: Subject, prompts: Sequence[Prompt], settings: SamplingSettings) -> list[Sample]:
    """A few completions from the run's engine, with advantages that differ and a reference that differs."""
    sampled = run.training.step.sample(prompts, settings, taken=run.state.global_step)
    scored = [ScoredGroup(group=group, names_K=(), rewards_GK=np.zeros((COMPLETIONS, 0))) for group in sampled]
    samples = [sample for group in scored for sample in samples_of(group, np.array([1.0, -0.5]))]
    if run.training.objective.reference is None:
        return samples
    return [dataclasses.replace(sample, ref_logps_A=sample.sampled_logps_A - np.float32(0.1)) for sample in samples]


@torch.no_grad()
def packed_logps(run: Subject, packed: Pack) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Inputs that the packed forward gave to the model, and the log-probabilities [N] it computed."""
    seen: list[dict[str, Any]] = []
    base = base_model(run.model)
    forward = base.forward

    @functools.wraps(forward)
    def seeing(*args: Any, **inputs: Any) -> Any:
        seen.append(inputs)
        return forward(*args, **inputs)

    # Not a hook: an AdaLoRA calls the base's `forward` past its hooks.
    policy = run.training.policy
    with replaced([(base, "forward", seeing)]), evaluation_mode(run.model), policy.forward.context(policy.model):
        out = policy.forward.token_logps(run.model, packed)
    return seen, numpy(out.logps_N)


def misplaced(forwards: Sequence[Mapping[str, Any]], packed: Pack, samples: Sequence[Sample], model: nn.Module) -> str:
    """The first token that a forward saw at another position, or as another token, than the sample has it."""
    inputs = forwards[0]
    ids, positions = (inputs[name].cpu() for name in ("input_ids", "position_ids"))
    for r, (sample, span) in enumerate(zip(samples, packed.spans_R, strict=True)):
        expected = (sample.prompt_ids + sample.token_ids)[: len(span.tokens)]
        where = (0, span.tokens) if inputs.get("attention_mask") is None else (r, slice(len(expected)))
        counted = np.arange(len(expected))
        places: list[Any] = counted.tolist()
        seen = positions[where].tolist() if positions.dim() == 2 else positions[:, *where].T.tolist()
        if positions.dim() == 3:
            rotary_CT = rotary_positions(model, np.array(expected), [counted], [sample.images])
            assert rotary_CT is not None
            places = rotary_CT.expand(len(positions), -1).T.tolist()
        for t, (token, place) in enumerate(zip(ids[where].tolist(), seen, strict=True)):
            if token != expected[t]:
                return f"token {t} of completion {r} is {token}, not {expected[t]}"
            if place != places[t]:
                return f"token {t} of completion {r} stands at position {place}"
    return ""


# ---- gradients ----


def probe_batches(micro_steps: Sequence[Sequence[Sample]]) -> list[MicroBatch]:
    """The probe as one optimizer step, counted as the trainer counts."""
    shares = []
    for samples in micro_steps:
        tokens = sum(len(sample.sampled_logps_A) for sample in samples)
        shares.append(
            MicroBatch(samples=tuple(samples), num_rollouts=len(samples), num_tokens=tokens, local_tokens=tokens)
        )
    return micro_batches(shares, per_micro_batch=False, ranks=1)


def train_on(run: Subject, batches: Sequence[MicroBatch], *, tokens_per_pack: int) -> Gradients:
    """Gradients and loss of the trainer's own training step; terms that depend on the cut by design are left out."""
    model = run.training.step.model
    accelerator = run.training.step.processes.accelerator
    step = run.training.step.tried(tokens_per_pack=tokens_per_pack)
    objective = run.training.objective
    loss_settings = dataclasses.replace(objective.loss, observation_coef=0.0)
    objective = dataclasses.replace(objective, router_coef=0.0, loss=loss_settings)
    scaler = getattr(accelerator, "scaler", None)
    while True:
        model.zero_grad()
        loss = sum(float(run.try_step(batch, step, objective)) for batch in batches)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        traces = gradient_traces(model, accelerator.num_processes * scale)
        if scaler is None or scale <= 1 or all(math.isfinite(trace.norm) for trace in traces.values()):
            model.zero_grad()
            return Gradients(traces, loss / accelerator.num_processes)
        scaler.update(scale / 16)  # the scale of float16 starts high, and comes down by the steps that overflow


def plainly_train_on(run: Subject, samples: Sequence[Sample], plain: TokenLogps) -> Gradients:
    """The same by the plain model and torch's own backward."""
    model = run.model
    model.zero_grad()

    def loss_of(out: TokenLogps) -> Tensor:
        return policy_loss(plain_inputs(run, samples, out), run.training.objective.loss, run.entropy_coef).loss

    loss = plain_backward(model, samples, sample_settings(run).temperature, plain, loss_of)
    traces = gradient_traces(model, 1.0)
    model.zero_grad()
    return Gradients(traces, loss)


def plain_inputs(run: Subject, samples: Sequence[Sample], out: TokenLogps) -> LossInputs:
    """Inputs of the loss made of samples alone, not of the packs or by the function that training takes them from."""
    device = out.logps_N.device
    counts = [int(sample.actions.sum()) for sample in samples]

    def joined(arrays: Iterable[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate([*arrays])).to(device)

    refs = [sample.ref_logps_A for sample in samples if sample.ref_logps_A is not None]
    return LossInputs(
        logps_N=out.logps_N,
        entropy_N=out.entropy_N,
        advantages_R=joined([np.array([sample.advantage for sample in samples], np.float32)]),
        rollout_N=joined([np.repeat(np.arange(len(counts)), counts)]),
        num_rollouts=len(counts),
        num_tokens=sum(counts),
        ref_logps_N=joined(refs) if refs else None,
        sampled_logps_N=joined(sample.sampled_logps_A for sample in samples) if has_other_sampler(run.args) else None,
        num_entropy_tokens=sum(counts),
    )


def against_advantages(inputs: LossInputs, settings: LossSettings) -> int:
    """Tokens whose log-probability the policy term of the loss moves against their advantage."""
    logps_N = inputs.logps_N.detach().requires_grad_()
    policy_loss(dataclasses.replace(inputs, logps_N=logps_N), dataclasses.replace(settings, beta=0.0)).loss.backward()
    return 0 if logps_N.grad is None else int((logps_N.grad * inputs.advantages_N > 0).sum())


@contextlib.contextmanager
def moved_by_rounding(model: nn.Module) -> Iterator[None]:
    """Inside, the embeddings of tokens are off by a few roundings of their own type."""

    def moved(_module: nn.Module, _args: Any, x: Tensor) -> Tensor:
        return x + (_waved(x.detach(), torch.finfo(x.dtype).eps * (8 if x.dtype == torch.float32 else 1)) - x.detach())

    handle = _embedding(model, "input").register_forward_hook(moved)
    try:
        yield
    finally:
        handle.remove()


def gradient_traces(model: nn.Module, scale: float) -> Traces:
    """Gradients of every trained tensor; none counts as zeros."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: trace(torch.zeros_like(p) if p.grad is None else p.grad, scale) for name, p in trained.items()}


def whole_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained tensors spread over the model, of `WHOLE` numbers together; the smallest, if all are larger."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
    every = max(1, len(trained) // NUM_WHOLE)
    spread = trained[:: every + (every % 2 == 0)]  # an odd stride: adapters have their matrices in pairs
    sizes = np.cumsum(sorted(p.numel() for _, p in spread))
    return dict(sorted(spread, key=lambda tensor: tensor[1].numel())[: max(1, sum(sizes <= WHOLE))])


def weight_traces(model: nn.Module) -> Traces:
    """Weights of every trained tensor."""
    return {name: trace(p) for name, p in model.named_parameters() if p.requires_grad}


def trace(x: Tensor, scale: float = 1.0) -> Trace:
    """A tensor, divided by `scale`, in few numbers.

    >>> trace(torch.tensor([3.0, 4.0])).norm
    5.0
    """
    flat = x.detach().reshape(-1)
    numbers = flat[:: max(1, -(-len(flat) // KEPT))].float().cpu().numpy().astype(np.float64)
    return Trace(norm=norm_of(flat) / scale, numbers=numbers / scale)


# ---- weights ----


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
    device = next(model.parameters()).device
    rows = [i for prompt in prompts for i in prompt.token_ids]
    with reference_forward(model):
        for prompt in prompts:
            ids = torch.tensor([prompt.token_ids], device=device)
            logits_V = model(input_ids=ids, **described(model, prompt.images, ids.shape[1])).logits[0, -1]
            rows += logits_V.topk(min(HEAD_TOKENS, len(logits_V))).indices.tolist()
    return {name: torch.tensor(sorted(set(rows)), device=device)}


def nudge_size(
    run: Subject, names: Sequence[str], prompt: Prompt, rows: Mapping[str, Tensor] = MappingProxyType({})
) -> float:
    """The share by which weights must move for log-probabilities to exceed the tolerance well: from one trial.

    Not further: a model that is thrown off answers with certainty, and certainty has no gradient.
    """
    sample = unscored(prompt.token_ids[:1], prompt.token_ids[1:] or prompt.token_ids, prompt.images)
    before = plain_logps(run.model, [sample], 1.0).logps_N
    with perturbed(run.model, names, NUDGE, rows):
        effect = float((plain_logps(run.model, [sample], 1.0).logps_N - before).abs().mean())
    wanted = EFFECT[sampler_tolerance(run, exact=True)]
    return NUDGE * min(max(wanted / max(effect, 1e-6), 1e-3), 10.0)


@contextlib.contextmanager
def perturbed(
    model: nn.Module, names: Sequence[str], size: float, rows: Mapping[str, Tensor] = MappingProxyType({})
) -> Iterator[None]:
    """Inside, every number of these tensors, or of `rows` of them, is moved by a share of itself; then put back."""
    parameters = dict(model.named_parameters())
    places: dict[str, Any] = {name: rows.get(name, ...) for name in names}
    before = {name: parameters[name].detach()[place].clone() for name, place in places.items()}
    try:
        with torch.no_grad():
            for name, place in places.items():
                parameters[name][place] = _waved(before[name], size)
        yield
    finally:
        with torch.no_grad():
            for name, place in places.items():
                parameters[name][place] = before[name]


def _waved(x: Tensor, size: float) -> Tensor:
    """Every number moved by a share of itself that is like noise, and the same every time; all zeros: of 1.

    Not by a share of the tensor's size, which a bias of -1e20 that forbids its token would set for all others.
    """
    steps = torch.arange(x.numel(), device=x.device, dtype=torch.float64)
    shares = steps.mul_(2.399963).add_(1.0).sin_().mul_(size).view_as(x)
    limits = torch.finfo(x.dtype)
    moved = torch.addcmul(x.double(), x.double(), shares) if x.any() else shares
    return moved.clamp_(limits.min, limits.max).to(x.dtype)


@contextlib.contextmanager
def full_precision(run: Subject) -> Iterator[Subject]:
    """The run in its weights' own precision, in sampling and training: no rounded products, no autocast."""
    precision = run.training.policy.forward.precision
    engine = run.training.step.engine
    if isinstance(precision, ProductPrecision):
        enabled = precision.enabled
        precision.enabled = False
        try:
            yield run
        finally:
            precision.enabled = enabled
        return
    sampling = engine.precision
    engine.precision = contextlib.nullcontext
    exact = dataclasses.replace(run.training.policy.forward, precision=contextlib.nullcontext)
    step = run.training.step.tried(forward=exact)
    try:
        yield dataclasses.replace(run, training=dataclasses.replace(run.training, step=step))
    finally:
        engine.precision = sampling


# ---- numbers ----


def numpy(x: Tensor) -> np.ndarray:
    """float32 on the host."""
    return x.detach().float().cpu().numpy()


def tolerance_of(run: Subject, *, exact: bool) -> float:
    """Nats by which two ways to compute a log-probability may differ; `exact`: inside `full_precision`."""
    kinds = {p.dtype for p in run.model.parameters()}
    half_weights = bool(kinds - {torch.float32, torch.uint8})  # bytes are weights in 4 bits: rounded, computed exactly
    precision = run.training.policy.forward.precision
    rounds = precision.rounds if isinstance(precision, ProductPrecision) else run.args.bf16 or run.args.fp16
    return HALF if half_weights or (rounds and not exact) else EXACT


def sampler_tolerance(run: Subject, *, exact: bool) -> float:
    """The same between sampling and training: an engine of another kind may round where training does not."""
    return HALF if run.training.step.engine.casts_weights else tolerance_of(run, exact=exact)


def difference(one_N: np.ndarray, other_N: np.ndarray, tolerance: float) -> float:
    """The largest difference, or the mean one where the tolerance is that of half precision; NaN is infinite."""
    if one_N.shape != other_N.shape:
        return math.inf
    apart = np.abs(one_N - other_N)
    if not apart.size:
        return 0.0
    value = float(apart.max() if tolerance == EXACT else apart.mean())
    return math.inf if math.isnan(value) else value


def is_no_rounding(run: Subject, samples: Sequence[Sample], mine_N: np.ndarray, measured: float) -> bool:
    """Whether `measured`, above its tolerance, cannot be rounding: `mine_N` are training's log-probabilities.

    In half precision, where it is ten times what that precision changes in training itself, for the same tokens.
    """
    if sampler_tolerance(run, exact=False) == EXACT or not math.isfinite(measured):
        return True
    if sampler_tolerance(run, exact=True) == HALF:
        return False
    with full_precision(run) as exact:
        exact_N = np.concatenate(exact.training.step.logps(samples, run.model))
    return measured > ROUNDINGS * difference(mine_N, exact_N, HALF)


def with_rounding(x: Before, tolerance: float) -> float:
    """A tolerance of log-probabilities, or what rounding of the inputs may do to this model, where that is more."""
    rounding = ROUNDINGS * difference(x.probe.again_N, x.probe.plain_N, tolerance)
    return max(tolerance, rounding) if math.isfinite(rounding) else tolerance
