"""The checks of models, sampler and steps, in three tables: before rollouts, before and after the first step.

Each has gone wrong, silently, in a trainer that people use. Adding one is adding a function, a row, and its page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from podium.models.packing import select_completions
from podium.models.precision import ROUNDED
from podium.records import TrainingGroup
from podium.trainer.processes import optimized_by
from podium.trainer.proof.completions import end_tokens, own_language, rewards, sampled_tokens, turn_ends
from podium.trainer.proof.evidence import (
    EXACT,
    HALF,
    difference,
    full_precision,
    nudge_names,
    perturbed,
    sampler_tolerance,
    tolerance_of,
    weight_traces,
)
from podium.trainer.proof.plain import rows_of
from podium.trainer.proof.records import After, Before, Check, Sample, Subject, Traces, named
from podium.trainer.proof.turns import first_tokens
from podium.trainer.rollouts import policy_logps

TRAINED_TOKENS = 32
"""First tokens of a completion whose log-probabilities are compared."""
EXACT_GRADIENT, HALF_GRADIENT = 1e-2, 0.5
"""Largest difference of a gradient, relative to it: of every tensor in float32, of all together in half precision."""

LEAST_DOUBT = 1e-2
"""Below it, gradients of float32 log-probabilities are known to fewer digits than are compared."""
STEP_TOKENS = 16_384
"""Tokens of the completions, prompts included, that show the direction of a step."""
LEAST_SHIFT = 1e-5
"""Nats a token, below which a change of a log-probability is rounding."""
AGAINST = 0.2
"""Share of all changes, weighed by advantages, by which a step may go against them: other terms of the loss do."""

LARGE_CHANGE = 50.0
"""Times their own size: a fresh adapter's second matrix is tiny after its first step."""


# ---- before anything is sampled ----


def finite_weights(run: Subject) -> Check:
    """No weight is NaN or infinite."""
    tensors = dict(run.model.named_parameters())
    floats = {name: p.detach() for name, p in tensors.items() if p.is_floating_point()}
    norms = {name: torch.linalg.vector_norm(p, dtype=torch.float32) for name, p in floats.items()}
    bad = [_not_finite(name, tensors[name]) for name, norm in norms.items() if not math.isfinite(float(norm))]
    return Check(
        name="weights are finite",
        code="P001",
        passed=not bad,
        measured=float(len(bad)),
        tolerance=0.0,
        detail=named(bad) if bad else f"{len(tensors)} tensors",
        fix="Load the model again, from another copy.",
    )


def trained_tensors(run: Subject) -> Check:
    """Tensors that should train require a gradient and are in the optimizer."""
    tensors = dict(run.model.named_parameters())
    frozen = sorted(name for name in run.parts.should_train if name in tensors and not tensors[name].requires_grad)
    optimized = {id(p) for p in optimized_by(run.optimizer)}
    left_out = [name for name, p in tensors.items() if p.requires_grad and id(p) not in optimized]
    listed = {"frozen": frozen, "in no group of the optimizer": left_out}
    problems = [f"{what}: {named(names)}" for what, names in listed.items() if names]
    trained = [p for p in tensors.values() if p.requires_grad]
    groups = run.optimizer.param_groups
    rates = [group.get("initial_lr", group["lr"]) for group in groups]
    still = {id(p) for group, rate in zip(groups, rates, strict=True) if not rate for p in group["params"]}
    at_rest = [name for name, p in tensors.items() if p.requires_grad and id(p) in still] if any(rates) else []
    off = [name for name, p in tensors.items() if p.is_floating_point() and not p.requires_grad]
    by_caller = [] if run.kind == "adapter" else off
    note = f"; frozen by the caller: {named(by_caller)}" if by_caller else ""
    note += f"; learning rate 0: {named(at_rest)}" if at_rest else ""
    return Check(
        name="trained tensors",
        code="P002",
        passed=not problems,
        note=bool(note),
        measured=float(len(frozen) + len(left_out)),
        tolerance=0.0,
        detail="; ".join(problems) or f"{len(trained)} tensors, {sum(p.numel() for p in trained):,} numbers{note}",
        fix="Unfreeze them before training (parameter.requires_grad_(True)), and give the optimizer all of them.",
    )


# ---- before the first step ----


def rollout_logps(x: Before) -> Check:
    """The log-probabilities that came with the rollouts are those that training computes."""
    groups = () if x.run.parts.filtered_logps else shortened(x.trained)
    tolerance = sampler_tolerance(x.run, exact=False)
    mine = policy_logps(x.run.model, groups, x.run.now)
    theirs = [values for group in groups for values in group.sampled_logps]
    apart = [difference(a, b, tolerance) for a, b in zip(mine, theirs, strict=True)]
    flat = [np.concatenate(v) if v else np.zeros(0, np.float32) for v in (mine, theirs)]
    measured = difference(flat[0], flat[1], tolerance) if groups else 0.0
    worst = int(np.argmax(apart)) if apart else 0
    return Check(
        name="rollout and training log-probabilities",
        code="P004",
        passed=None if not groups else measured <= tolerance,
        measured=measured,
        tolerance=tolerance,
        detail=f"{_nats(measured, tolerance)} over {len(flat[0])} tokens"
        + ("" if measured <= tolerance else f"; most in {_worst(x, groups, worst, mine, theirs)}")
        if groups
        else "they are of what a filter (top_p, top_k, min_p, repetition_penalty) left of the distribution"
        if x.trained
        else "no group to train on in this step",
        fix="The engine samples from another distribution than is trained: look at temperature, adapter and precision.",
    )


def sampler_synced(x: Before) -> Check:
    """The engine's log-probabilities are the model's, also after its weights (or adapter) were changed."""
    s, tolerance = x.sample, sampler_tolerance(x.run, exact=True)
    measured = difference(s.sampled_N, s.plain_N, tolerance)
    effect = difference(s.before_N, s.plain_N, tolerance)
    what = x.run.kind
    stale = difference(s.sampled_N, s.before_N, tolerance) <= tolerance < measured
    reason = (
        f"the {what} do{'es' if what == 'adapter' else ''} not reach the sampler: its log-probabilities are those from "
        f"before a change that moves them by {effect:.3g} nats"
        if stale
        else f"the sampler is off by {_nats(measured, tolerance)}{_temperature(x, s.sampled_N, tolerance)}"
    )
    return Check(
        name=f"the {what} reach{'es' if what == 'adapter' else ''} the sampler",
        code="P006" if stale else "P004",
        passed=measured <= tolerance and (effect > 2 * tolerance or None),
        measured=measured,
        tolerance=tolerance,
        detail=f"{_nats(measured, tolerance)} after a change worth {effect:.2g} nats"
        if measured <= tolerance
        else reason,
        fix="The engine must sample from the model that is trained, with its adapter switched on.",
    )


def packed_forward(x: Before) -> Check:
    """The packed, shared-prefix forward gives what a plain forward of every row gives."""
    s, tolerance = x.sample, tolerance_of(x.run, exact=True)
    measured = difference(s.packed_N, s.plain_N, tolerance)
    where = f"; first in {s.misplaced}" if s.misplaced else ""
    problem = f"off by {_nats(measured, tolerance)}{_temperature(x, s.packed_N, tolerance)}{where}"
    passed = measured <= tolerance and not s.misplaced
    return Check(
        name="packed forward equals plain rows",
        code="P005",
        passed=passed,
        measured=measured,
        tolerance=tolerance,
        detail=f"{_nats(measured, tolerance)} over {len(s.plain_N)} tokens" if passed else problem,
        fix="Report this model; until then set rollout_engine: transformers.",
        changes={"rollout_engine": "transformers"},
    )


def batch_invariance(x: Before) -> Check:
    """Packs and micro-steps change neither loss nor gradient, and both are those of the plain model."""
    s = x.sample
    problems, measured, limit = [], 0.0, 0.0
    for name, (traces, loss), exact in (("two micro-steps", s.two_steps, True), ("one micro-step", s.one_step, False)):
        tight = tolerance_of(x.run, exact=exact) == EXACT
        error, length, worst = gradient_error(traces, s.plain.traces, each=tight)
        tolerance = EXACT_GRADIENT if tight else HALF_GRADIENT
        measured, limit = max((measured, limit), (error, tolerance), key=lambda pair: pair[0] / (pair[1] or 1))
        if not error <= tolerance:
            problems.append(f"{name}: the gradient is {length:.3g} times the plain one, {worst} differs most")
        if not abs(loss - s.plain.loss) <= tolerance * max(1.0, abs(s.plain.loss)):
            problems.append(f"{name}: the loss is {loss:.4g}, not {s.plain.loss:.4g}")
    certain = _certain(s) if s.doubt < LEAST_DOUBT else ""
    return Check(
        name="cutting the batch changes nothing",
        code="P007",
        passed=None if certain else not problems,
        measured=measured,
        tolerance=limit,
        detail=certain or "; ".join(problems) or f"gradients differ by {measured:.2g} of their length",
        fix="Something scales loss or gradient by packs or micro-steps: look at overridden methods and callbacks.",
    )


def gradients(x: Before) -> Check:
    """Every trained tensor gets a gradient, finite and not zero."""
    traces = x.sample.one_step.traces
    bad = [name for name, t in traces.items() if not math.isfinite(t.norm)]
    parameters = dict(x.run.model.named_parameters())
    # No token of the sample may have been sent to an expert.
    zero = [n for n, t in traces.items() if t.norm == 0 and "expert" not in n and parameters[n].numel()]
    problems = [f"{what}: {named(names)}" for what, names in {"not finite": bad, "none": zero}.items() if names]
    certain = _certain(x.sample) if zero and not bad and x.sample.doubt < LEAST_DOUBT else ""
    return Check(
        name="every trained tensor gets a gradient",
        code="P008",
        passed=None if certain else not problems,
        measured=float(len(bad) + len(zero)),
        tolerance=0.0,
        detail=certain or "; ".join(problems) or f"{len(traces)} tensors",
        fix="Freeze what is not part of the forward (parameter.requires_grad_(False)), or repair the layer named.",
    )


def start_at_reference(x: Before) -> Check:
    """Training starts at its reference, from which the KL divergence is measured."""
    groups, tolerance = shortened(x.trained), tolerance_of(x.run, exact=False)
    theirs = reference_logps(x.run, groups)
    mine = policy_logps(x.run.model, groups, x.run.now) if theirs else []
    measured = max((difference(a, b, tolerance) for a, b in zip(mine, theirs, strict=True)), default=0.0)
    return Check(
        name="training starts at its reference",
        code="P016",
        passed=None if not theirs else True,
        suspect=measured > tolerance,
        measured=measured,
        tolerance=tolerance,
        detail=_nats(measured, tolerance) + " between policy and reference" if theirs else "beta is 0: there is none",
        fix="The KL divergence is measured from another model than training starts from: load the adapter or weights "
        "that the reference should be as `model`.",
    )


# ---- after a step that moved ----


def weights_changed(x: After) -> Check:
    """The optimizer step changed weights."""
    now = weight_traces(x.run.model)
    still = [n for n, t in now.items() if n in x.weights and np.array_equal(t.numbers, x.weights[n].numbers)]
    bad = [name for name, t in now.items() if not math.isfinite(t.norm)]
    count = len(now) - len(still)
    nothing = "" if count or bad else _without_advantages(x)
    detail = f"{count} of {len(now)} tensors changed"
    return Check(
        name="the step moved the weights",
        code="P011",
        passed=None if nothing else count > 0 and not bad,
        measured=float(count),
        detail=f"not finite after the step: {named(bad)}" if bad else nothing or detail,
        fix="Train in float32 weights (model_init_kwargs: {dtype: float32}), or raise the learning rate.",
        changes={"model_init_kwargs": {"dtype": "float32"}},
    )


def logps_changed(x: After) -> Check:
    """New weights give new log-probabilities: none are computed with an old copy."""
    now = policy_logps(x.run.model, x.groups, x.run.now)
    same = bool(now) and all(np.array_equal(a, b) for a, b in zip(now, x.logps, strict=True))  # none: no prompt
    old = stale_copies(x.run)
    shift = largest_shift(now, x.logps)
    too_small = same and not old and tolerance_of(x.run, exact=False) == HALF and _follows_a_larger_change(x, now)
    nothing = "" if old or (now and not same) else _without_advantages(x)
    problem = f"old copies of {named(old)}" if old else "the same log-probabilities with other weights" if same else ""
    return Check(
        name="the weights moved the log-probabilities",
        code="P012",
        passed=None if too_small or nothing else not problem,
        measured=shift,
        detail=nothing or "the step is too small for half precision; a larger change moves them"
        if too_small
        else problem or f"by up to {shift:.2g} nats",
        fix="Something keeps a copy of the weights: look at hooks, caches and compiled modules.",
    )


def _without_advantages(x: After) -> str:
    """The reason why a step need not move anything; empty where it has to."""
    return "" if any(group.advantages_G.any() for group in x.trained) else "no completion has an advantage in this step"


def step_direction(x: After) -> Check:
    """The step made completions with an advantage likelier, and the others less likely."""
    with full_precision(x.run) as exact:
        now = policy_logps(x.run.model, x.trained, exact.now)
    advantages = [a for group in x.trained for a in group.advantages_G.tolist()]
    lengths = [max(len(logps), 1) for logps in now]
    gains = [a * float((new - old).sum()) for a, new, old in zip(advantages, now, x.trained_logps, strict=True)]
    total, shift = sum(map(abs, gains)), sum(abs(a) * n for a, n in zip(advantages, lengths, strict=True))
    small = total <= LEAST_SHIFT * shift or tolerance_of(x.run, exact=True) == HALF
    share = sum(gains) / total if total else 0.0
    return Check(
        name="the step follows the advantages",
        code="P015",
        passed=None if small else share > -AGAINST,
        measured=share,
        tolerance=-AGAINST,
        detail="the step is too small, or the weights too coarse, to tell"
        if small
        else f"advantages x changes of log-probability sum to {share:+.2f} of their absolute sum",
        fix="The step makes good completions less likely: look at the optimizer (maximize), at a custom loss and at "
        "callbacks that change gradients.",
    )


def reference_kept(x: After) -> Check:
    """The reference did not move with the policy."""
    theirs = reference_logps(x.run, x.groups)
    moved_by = largest_shift(theirs, x.reference)
    shift = largest_shift(policy_logps(x.run.model, x.groups, x.run.now), x.logps) if theirs else 0.0
    follows = x.run.args.sync_ref_model
    return Check(
        name="the reference stays where it is",
        code="P016",
        passed=None if not theirs or follows or shift <= LEAST_SHIFT else moved_by < 0.5 * shift,
        measured=moved_by,
        detail="beta is 0: there is none"
        if not theirs
        else "sync_ref_model moves it"
        if follows
        else f"it moved by {moved_by:.2g} nats, the policy by {shift:.2g}",
        fix="The reference shares weights with the policy, so that KL is 0 whatever is learnt: give it a copy.",
    )


def reference_logps(run: Subject, groups: Sequence[TrainingGroup]) -> list[np.ndarray]:
    """Under the reference; empty without one."""
    if run.parts.reference is None:
        return []
    with run.parts.reference.model(run.model) as model:
        return policy_logps(model, groups, run.now)


def largest_shift(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """The largest change of a log-probability."""
    return max((float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True)), default=0.0)


def _certain(sample: Sample) -> str:
    return f"no token of the sample is uncertain (at most {sample.doubt:.1g}): gradients are of the size of rounding"


def _follows_a_larger_change(x: After, now: Sequence[np.ndarray]) -> bool:
    """Whether log-probabilities move with weights that are moved further than the step did."""
    model = x.run.model
    with perturbed(model, nudge_names(model, x.run.parts.should_train), LARGE_CHANGE):
        moved = policy_logps(model, x.groups, x.run.now)
    return not all(np.array_equal(a, b) for a, b in zip(moved, now, strict=True))


BEFORE_ROLLOUTS: tuple[Callable[[Subject], Check], ...] = (finite_weights, trained_tensors, end_tokens)
BEFORE_STEP: tuple[Callable[[Before], Check], ...] = (
    own_language,
    rewards,
    sampled_tokens,
    turn_ends,
    rollout_logps,
    sampler_synced,
    packed_forward,
    batch_invariance,
    gradients,
    start_at_reference,
)
AFTER_STEP: tuple[Callable[[After], Check], ...] = (weights_changed, logps_changed, step_direction, reference_kept)


# ---- shared by checks ----


def gradient_error(traces: Traces, plain: Traces, *, each: bool) -> tuple[float, float, str]:
    """Distance of gradients from the plain ones, their relative length, and the tensor that differs most.

    `each`: the largest error of a tensor, relative to it; else that of all together.
    """
    scale = max((float(np.linalg.norm(t.numbers)) for t in plain.values()), default=0.0)
    errors = {
        name: float(np.linalg.norm(traces[name].numbers - t.numbers))
        / max(float(np.linalg.norm(t.numbers)), 1e-3 * scale, 1e-30)
        for name, t in plain.items()
    }
    mine, theirs = (np.concatenate([t.numbers for t in x.values()]) for x in (traces, plain))
    norms = [math.sqrt(sum(t.norm**2 for t in x.values())) for x in (traces, plain)]
    together = float(np.linalg.norm(mine - theirs)) / max(float(np.linalg.norm(theirs)), 1e-30)
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    error = errors[worst] if each else together
    return (error if math.isfinite(error) else math.inf), norms[0] / max(norms[1], 1e-30), worst


def shortened(groups: Sequence[TrainingGroup]) -> tuple[TrainingGroup, ...]:
    """Two completions of two groups, their first tokens; only what log-probabilities need."""
    chosen = sorted(groups, key=lambda group: len(group.prompt_ids))[:2]
    return tuple(
        first_tokens(group, TRAINED_TOKENS)
        for group in (select_completions(group, range(min(2, len(group.completion_ids)))) for group in chosen)
    )


def enough(groups: Sequence[TrainingGroup]) -> tuple[TrainingGroup, ...]:
    """As many groups, the first at least, as hold `STEP_TOKENS` tokens."""
    tokens = np.cumsum([sum(len(group.prompt_ids) + len(ids) for ids in group.completion_ids) for group in groups])
    return tuple(groups[: max(1, int((tokens <= STEP_TOKENS).sum()))])


def stale_copies(run: Subject) -> list[str]:
    """Layers whose rounded copy is not the rounded weight."""
    with run.parts.forward.precision():
        return [
            name
            for name, module in run.model.named_modules()
            if ROUNDED in module.__dict__
            and not torch.equal(module.__dict__[ROUNDED].rounded(), module.weight.detach().to(torch.bfloat16))
        ]


def _not_finite(name: str, p: torch.Tensor) -> str:
    """`q_proj.weight (128 numbers, rows 8 to 15)`."""
    where = ~p.detach().isfinite()
    rows = where.reshape(len(p), -1).any(-1).nonzero()[:, 0].tolist() if p.dim() else [0]
    return f"{name} ({int(where.sum())} numbers, rows {rows[0]} to {rows[-1]})" if rows else name


def _nats(measured: float, tolerance: float) -> str:
    which = "at most" if tolerance == EXACT else "on average"
    return f"{measured:.2g} nats {which} ({tolerance:g} allowed)"


def _temperature(x: Before, logps_N: np.ndarray, tolerance: float) -> str:
    """A hint that the temperature is missing; empty where it is not."""
    at_1, asked = x.sample.plain_at_1_N, x.run.args.temperature
    if at_1 is None or asked == 1 or not difference(logps_N, at_1, tolerance) <= tolerance:
        return ""
    return f": these are log-probabilities at temperature 1, not {asked:g}"


def _worst(
    x: Before, groups: Sequence[TrainingGroup], which: int, mine: Sequence[np.ndarray], theirs: Sequence[np.ndarray]
) -> str:
    """The token that differs most."""
    row = rows_of(groups)[which]
    if mine[which].shape != theirs[which].shape:
        return f"completion {which}: {len(theirs[which])} log-probabilities for {len(mine[which])} drawn tokens"
    apart = np.abs(mine[which] - theirs[which])
    worst = int(np.argmax(np.where(np.isnan(apart), np.inf, apart)))
    at = int(row.places[worst])
    values = f"{theirs[which][worst]:.3f} sampled, {mine[which][worst]:.3f} in training"
    return f"token {at} of completion {which}, {x.run.shown(row.completion_ids[at])}: {values}"
