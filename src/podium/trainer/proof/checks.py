"""The checks of models, sampler and steps, in three tables: before rollouts, before and after the first step.

Each has gone wrong, silently, in a trainer that people use. Adding one is adding a function, a row, and its page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from podium.models.precision import ROUNDED, norm_of
from podium.models.stored import outside
from podium.records import Sample
from podium.trainer.processes import optimized_by
from podium.trainer.proof.completions import end_tokens, own_language, rewards, sampled_tokens, turn_ends
from podium.trainer.proof.evidence import (
    EXACT,
    HALF,
    ROUNDINGS,
    difference,
    is_no_rounding,
    nudge_names,
    perturbed,
    sampler_tolerance,
    tolerance_of,
    weight_traces,
    with_rounding,
)
from podium.trainer.proof.plain import action_places, plain_logps
from podium.trainer.proof.records import After, Before, Check, Probe, Subject, Trace, Traces, named
from podium.trainer.proof.turns import first_tokens

TRAINED_TOKENS = 32
"""First tokens of a completion whose log-probabilities are compared."""
EXACT_GRADIENT = 1e-2
HALF_GRADIENT = 0.5
"""Largest difference of a gradient, relative to it: of every tensor in float32, of all together in half precision."""

RANDOM = 1e-2
"""Difference of two gradients of the same step, relative to them, above which training is random."""
LEAST_DOUBT = 1e-2
"""Below it, gradients of float32 log-probabilities are known to fewer digits than are compared."""
LEAST_SHIFT = 1e-5
"""Nats a token, below which a change of a log-probability is rounding."""
AGAINST = 1e-2
"""Cosine of a step with the gradient of its loss, above which the step climbs. No descent has a positive one; rounding
of weights in half precision may come near 0."""
KEPT_STEPS = 4
"""Steps whose gradients are kept; where as many pass before the weights move, momentum makes the direction unclear."""
DECOUPLED = ("AdamW", "SGD")
"""Optimizers whose weight decay can be taken out of their step."""

LARGE_CHANGE = 50.0
"""Times their own size: a fresh adapter's second matrix is tiny after its first step."""


# ---- before anything is sampled ----


def finite_weights(run: Subject) -> Check:
    """No weight is NaN or infinite."""
    tensors = dict(run.model.named_parameters())
    floats = {name: p.detach() for name, p in tensors.items() if p.is_floating_point()}
    bad = [_not_finite(name, p) for name, p in floats.items() if not math.isfinite(norm_of(p))]
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
    frozen = sorted(name for name in run.training.policy.trained if name in tensors and not tensors[name].requires_grad)
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
    apart = outside(run.model)
    expected = run.kind == "adapter" or run.training.args.frozen_parameters is not None
    by_caller = [] if expected else [name for name in off if name not in apart]
    untrained = {
        "frozen by the caller": by_caller,
        "frozen, outside the language model": sorted(apart),
        "learning rate 0": at_rest,
    }
    notes = [f"{why}: {named(names)}" for why, names in untrained.items() if names]
    sizes = f"{len(trained)} tensors, {sum(p.numel() for p in trained):,} numbers"
    none = not trained or all(id(p) not in optimized for p in trained)
    return Check(
        name="trained tensors",
        code="P002",
        passed=not none,
        suspect=bool(problems),
        note=bool(notes),
        measured=float(len(frozen) + len(left_out)),
        tolerance=0.0,
        detail="; ".join(problems or [sizes, *notes]),
        fix="If that is not on purpose: unfreeze them before training (parameter.requires_grad_(True)), and give the "
        "optimizer all of them.",
    )


# ---- before the first step ----


def rollout_logps(x: Before) -> Check:
    """The log-probabilities that came with the rollouts are those that training computes."""
    samples = () if x.run.training.step.filters_logps else shortened(x.trained)
    tolerance = sampler_tolerance(x.run, exact=False)
    allowed = with_rounding(x, tolerance)
    mine = x.run.training.step.logps(samples, x.run.model)
    theirs = [sample.sampled_logps_A for sample in samples]
    apart = [difference(a, b, tolerance) for a, b in zip(mine, theirs, strict=True)]
    flat = [np.concatenate(v) if v else np.zeros(0, np.float32) for v in (mine, theirs)]
    measured = difference(flat[0], flat[1], tolerance) if samples else 0.0
    worst = int(np.argmax(apart)) if apart else 0
    passed: bool | None = None
    if samples:
        passed = measured <= allowed or not is_no_rounding(x.run, samples, flat[0], measured)
        detail = f"{_nats(measured, tolerance)} over {len(flat[0])} tokens"
        if measured > allowed:
            detail = f"{detail}; most in {_worst(x, samples, worst, mine, theirs)}"
    elif x.trained:
        detail = "they are of what a filter (top_p, top_k, min_p, repetition_penalty) left of the distribution"
    else:
        detail = "no completion to train on in this step"
    return Check(
        name="rollout and training log-probabilities",
        code="P004",
        passed=passed,
        suspect=measured > allowed,
        measured=measured,
        tolerance=allowed,
        detail=detail,
        fix="The engine samples from another distribution than is trained: look at temperature, adapter and precision.",
    )


def sampler_synced(x: Before) -> Check:
    """The engine's log-probabilities are the model's, also after its weights (or adapter) were changed."""
    s = x.probe
    tolerance = sampler_tolerance(x.run, exact=True)
    measured = difference(s.sampled_N, s.plain_N, tolerance)
    allowed = with_rounding(x, tolerance)
    effect = difference(s.before_N, s.plain_N, tolerance)
    what = x.run.kind
    stale = difference(s.sampled_N, s.before_N, tolerance) <= allowed < measured
    at_1 = _temperature(x, s.sampled_N, tolerance)
    fact = stale or at_1 or not x.run.training.step.engine.casts_weights or not math.isfinite(measured)
    is_one = what == "adapter"
    if measured <= allowed:
        detail = f"{_nats(measured, tolerance)} after a change worth {effect:.2g} nats"
    elif stale:
        detail = (
            f"the {what} {'does' if is_one else 'do'} not reach the sampler: its log-probabilities are those from "
            f"before a change that moves them by {effect:.3g} nats"
        )
    else:
        detail = f"the sampler is off by {_nats(measured, tolerance)}{at_1}"
    return Check(
        name=f"the {what} {'reaches' if is_one else 'reach'} the sampler",
        code="P006" if stale else "P004",
        passed=not fact if measured > allowed else effect > 2 * allowed or None,
        suspect=measured > allowed,
        measured=measured,
        tolerance=allowed,
        detail=detail,
        fix="The engine must sample from the model that is trained, with its adapter switched on.",
    )


def packed_forward(x: Before) -> Check:
    """The packed, shared-prefix forward gives what a plain forward of every row gives."""
    s = x.probe
    tolerance = tolerance_of(x.run, exact=True)
    measured = difference(s.packed_N, s.plain_N, tolerance)
    allowed = with_rounding(x, tolerance)
    where = f"; first in {s.misplaced}" if s.misplaced else ""
    problem = f"off by {_nats(measured, tolerance)}{_temperature(x, s.packed_N, tolerance)}{where}"
    passed = measured <= allowed and not s.misplaced
    return Check(
        name="packed forward equals plain rows",
        code="P005",
        passed=passed,
        measured=measured,
        tolerance=allowed,
        detail=f"{_nats(measured, tolerance)} over {len(s.plain_N)} tokens" if passed else problem,
        fix="Report this model; until then set rollout_engine: transformers.",
        changes={"rollout_engine": "transformers"},
    )


def batch_invariance(x: Before) -> Check:
    """Packs and micro-steps change neither loss nor gradient, and both are those of the plain model."""
    s = x.probe
    problems = []
    measured = 0.0
    limit = 0.0
    for name, (traces, loss), exact in (("two micro-steps", s.two_steps, True), ("one micro-step", s.one_step, False)):
        tight = tolerance_of(x.run, exact=exact) == EXACT
        error, length, worst = gradient_error(traces, s.plain.traces, s.again.traces, each=tight)
        tolerance = EXACT_GRADIENT if tight else HALF_GRADIENT
        measured, limit = max((measured, limit), (error, tolerance), key=lambda pair: pair[0] / (pair[1] or 1))
        if not error <= tolerance:
            problems.append(f"{name}: the gradient is {length:.3g} times the plain one, {worst} differs most")
        if not abs(loss - s.plain.loss) <= tolerance * max(1.0, abs(s.plain.loss)):
            problems.append(f"{name}: the loss is {loss:.4g}, not {s.plain.loss:.4g}")
    certain = _certain(s) if s.doubt < LEAST_DOUBT else ""
    once = s.one_step.traces
    twice = s.repeated.traces
    if problems and gradient_error(twice, once, once, each=False)[0] > RANDOM:
        certain = "the same step gives another gradient every time: layers of this model draw random numbers"
    return Check(
        name="cutting the batch changes nothing",
        code="P007",
        passed=None if certain else not problems,
        measured=measured,
        tolerance=limit,
        detail=certain or "; ".join(problems) or f"gradients differ by {measured:.2g} of their length",
        fix="Something scales loss or gradient by packs or micro-steps: look at overridden methods and callbacks.",
    )


def loss_direction(x: Before) -> Check:
    """The loss raises the log-probability of tokens with a positive advantage, and lowers it of those with a negative.

    Exact for every loss on the policy that sampled: each surrogate is the advantage times a positive factor.
    """
    s = x.probe
    return Check(
        name="the loss follows the advantages",
        code="P015",
        passed=not s.against,
        measured=float(s.against),
        tolerance=0.0,
        detail=f"{s.against} of {len(s.plain_N)} tokens are moved against their advantage"
        if s.against
        else f"{len(s.plain_N)} tokens are moved the way of their advantage",
        fix="The loss has the wrong sign: look at what replaces or changes it.",
    )


def gradients(x: Before) -> Check:
    """Every trained tensor that the plain model gives a gradient gets one in training, and all are finite."""
    mine, plain, again = (each.traces for each in (x.probe.one_step, x.probe.plain, x.probe.again))
    parameters = dict(x.run.model.named_parameters())
    bad = [name for name, t in mine.items() if not math.isfinite(t.norm)]
    # No token of the sample may have been sent to an expert.
    zero = [n for n, t in mine.items() if t.norm == 0 and "expert" not in n and parameters[n].numel()]
    scale = max((t.norm for t in plain.values()), default=0.0)
    lost = [n for n in zero if plain[n].norm > max(1e-6 * scale, ROUNDINGS * _apart(plain[n], again[n]))]
    facts = {"not finite": bad, "none, though the plain model gives them one": lost}
    problems = [f"{what}: {named(names)}" for what, names in facts.items() if names]
    if bad and any(not math.isfinite(plain[name].norm) for name in bad):
        problems.append("nor is it in the plain model")
    certain = _certain(x.probe) if zero and not bad and x.probe.doubt < LEAST_DOUBT else ""
    without = f"{len(zero)} of {len(mine)} tensors get none from text, in the plain model either: {named(zero)}"
    return Check(
        name="every trained tensor gets a gradient",
        code="P008",
        passed=None if certain else not problems,
        suspect=bool(zero),
        measured=float(len(bad) + len(zero)),
        tolerance=0.0,
        detail=certain or "; ".join(problems) or (without if zero else f"{len(mine)} tensors"),
        fix="Repair the layer named."
        if problems
        else "Nothing, if text does not use these parts; else freeze them (parameter.requires_grad_(False)).",
    )


def start_at_reference(x: Before) -> Check:
    """Training starts at its reference, from which the KL divergence is measured."""
    samples = shortened(x.trained)
    tolerance = tolerance_of(x.run, exact=False)
    theirs = reference_logps(x.run, samples)
    mine = x.run.training.step.logps(samples, x.run.model) if theirs else []
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
    zero = x.gradients and not any(bool(g.any()) for g in x.gradients[-1].values())
    nothing = ""
    detail = f"{count} of {len(now)} tensors changed"
    if bad:
        detail = f"not finite after the step: {named(bad)}"
    elif not count and zero:
        nothing = "the gradient is zero"
    elif not count and not x.signal:
        nothing = NO_SIGNAL
    return Check(
        name="the step moved the weights",
        code="P011",
        passed=None if nothing else not bad,
        suspect=not count,
        measured=float(count),
        detail=nothing or detail,
        fix="Where the rate stays so low, train in float32 weights (model_init_kwargs: {dtype: float32}) or raise it.",
        changes={"model_init_kwargs": {"dtype": "float32"}},
    )


NO_SIGNAL = "no completion has an advantage in this step"


def logps_changed(x: After) -> Check:
    """New weights give new log-probabilities: none are computed with an old copy."""
    now = x.run.training.step.logps(x.samples, x.run.model)
    same = bool(now) and all(np.array_equal(a, b) for a, b in zip(now, x.logps, strict=True))  # none: no prompt
    old = stale_copies(x.run)
    kept = same and not old and _stay_where_the_plain_model_moves(x, now)
    nothing = "" if old or (now and not same) or x.signal else NO_SIGNAL
    problem = f"old copies of {named(old)}" if old else ""
    if kept:
        problem = "the same log-probabilities with other weights, also after a change that moves the plain model's"
    shift = largest_shift(now, x.logps)
    detail = "the step is too small to show; a larger change does" if same else f"by up to {shift:.2g} nats"
    passed = None if same or nothing else True
    return Check(
        name="the weights moved the log-probabilities",
        code="P012",
        passed=False if problem else passed,
        measured=shift,
        detail=problem or nothing or detail,
        fix="Something keeps a copy of the weights: look at hooks, caches and compiled modules.",
    )


def _stay_where_the_plain_model_moves(x: After, now: Sequence[np.ndarray]) -> bool:
    """Whether log-probabilities stay the same, to the bit, with weights moved so far that the plain model's change."""
    model = x.run.model
    temperature = x.run.training.policy.forward.temperature
    before = plain_logps(model, x.samples, temperature).logps_N
    with perturbed(model, nudge_names(model, x.run.training.policy.trained), LARGE_CHANGE):
        moved = x.run.training.step.logps(x.samples, model)
        plain = plain_logps(model, x.samples, temperature).logps_N
    stay = all(np.array_equal(a, b) for a, b in zip(moved, now, strict=True))
    return stay and bool(((plain - before).abs() > HALF).any())


def step_direction(x: After) -> Check:
    """The step goes down its loss: against the gradients that the backward gave, weight decay taken out.

    A step of any descent is minus a positive operator on them, or on a mean over steps where there is momentum.
    """
    cosines = [c for c in (_cosine(x, gradients) for gradients in x.gradients) if c]
    optimizer = getattr(x.run.optimizer, "optimizer", x.run.optimizer)
    states = [s for s in optimizer.state.values() if isinstance(s, dict)]
    memory = any(isinstance(value, torch.Tensor) and value.numel() > 1 for s in states for value in s.values())
    told = cosines if memory else cosines[-1:]
    known = not x.decays or any(word in type(optimizer).__name__ for word in DECOUPLED)
    known = known and not (memory and len(x.gradients) >= KEPT_STEPS)
    against = bool(told) and min(told) > AGAINST
    down = bool(told) and told[-1] < 0
    return Check(
        name="the step goes down its loss",
        code="P015",
        passed=not (against and known) if against or down else None,
        suspect=against,
        measured=told[-1] if told else None,
        tolerance=AGAINST,
        detail=f"cosine {told[-1]:+.2g} with the gradient of the loss, of {len(x.tensors)} tensors"
        if told
        else "no gradient to compare with: an optimizer that steps in the backward leaves none",
        fix="The step makes good completions less likely: look at the optimizer (maximize), its learning rate, and at "
        "callbacks that change gradients.",
    )


@torch.no_grad()
def _cosine(x: After, gradients: Mapping[str, torch.Tensor]) -> float:
    """Of the change of the weights, without their decay, with gradients; 0: one of them is nothing."""
    now = dict(x.run.model.named_parameters())
    sums = torch.zeros(3, dtype=torch.float64)
    for name, gradient in gradients.items():
        step = now[name].double() - x.tensors[name].double() * (1 - x.decays.get(name, 0.0))
        g = gradient.double()
        sums += torch.stack([(g * step).sum(), g.square().sum(), step.square().sum()]).cpu()
    product, *squares = sums.tolist()
    length = math.sqrt(math.prod(squares))
    return product / length if length and math.isfinite(product) else 0.0


def reference_kept(x: After) -> Check:
    """The reference did not move with the policy."""
    theirs = reference_logps(x.run, x.samples)
    moved_by = largest_shift(theirs, x.reference)
    mine = x.run.training.step.logps(x.samples, x.run.model) if theirs else x.logps
    shift = largest_shift(mine, x.logps)
    follows = x.run.args.sync_ref_model
    moved = moved_by >= 0.5 * shift
    is_policy = all(np.array_equal(a, b) for a, b in zip(theirs, mine, strict=False))
    fact = tolerance_of(x.run, exact=False) == EXACT or is_policy  # else the same forward may give other last bits
    detail = f"it moved by {moved_by:.2g} nats, the policy by {shift:.2g}"
    if not theirs:
        detail = "beta is 0: there is none"
    elif follows:
        detail = "sync_ref_model moves it"
    return Check(
        name="the reference stays where it is",
        code="P016",
        passed=None if not theirs or follows or shift <= LEAST_SHIFT else not (moved and fact),
        suspect=moved,
        measured=moved_by,
        detail=detail,
        fix="The reference shares weights with the policy, so that KL is 0 whatever is learnt: give it a copy.",
    )


def reference_logps(run: Subject, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Under the reference; empty without one."""
    if run.training.objective.reference is None:
        return []
    with run.training.objective.reference.model(run.model) as model:
        return run.training.step.logps(samples, model)


def largest_shift(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """The largest change of a log-probability."""
    return max((float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True)), default=0.0)


def _certain(probe: Probe) -> str:
    return f"no token of the sample is uncertain (at most {probe.doubt:.1g}): gradients are of the size of rounding"


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
    loss_direction,
    gradients,
    start_at_reference,
)
AFTER_STEP: tuple[Callable[[After], Check], ...] = (weights_changed, logps_changed, step_direction, reference_kept)


# ---- shared by checks ----


def gradient_error(traces: Traces, plain: Traces, again: Traces, *, each: bool) -> tuple[float, float, str]:
    """Distance of gradients from the plain ones, their relative length, and the tensor that differs most.

    `each`: the largest error of a tensor, relative to it; else that of all together. What rounding may do is left out:
    `again` are the plain ones with inputs that it has moved.
    """
    apart = {n: max(0.0, _apart(traces[n], t) - ROUNDINGS * _apart(t, again[n])) for n, t in plain.items()}
    sizes = {name: float(np.linalg.norm(t.numbers)) for name, t in plain.items()}
    scale = max(sizes.values(), default=0.0)
    errors = {name: error / max(sizes[name], 1e-3 * scale, 1e-30) for name, error in apart.items()}
    norms = [math.sqrt(sum(t.norm**2 for t in x.values())) for x in (traces, plain)]
    together = math.sqrt(sum(x**2 for x in apart.values())) / max(math.sqrt(sum(x**2 for x in sizes.values())), 1e-30)
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    error = errors[worst] if each else together
    return (error if math.isfinite(error) else math.inf), norms[0] / max(norms[1], 1e-30), worst


def _apart(one: Trace, other: Trace) -> float:
    """Length of the difference; infinite where a number is not finite."""
    length = float(np.linalg.norm(one.numbers - other.numbers))
    return length if math.isfinite(length) else math.inf


def shortened(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Two samples of each of two prompts, their first tokens; only what log-probabilities need."""
    runs = [[*run] for _, run in itertools.groupby(samples, key=lambda sample: sample.rollout[0])]
    shortest = sorted(runs, key=lambda run: len(run[0].prompt_ids))[:2]
    return tuple(first_tokens(sample, TRAINED_TOKENS) for run in shortest for sample in run[:2])


def stale_copies(run: Subject) -> list[str]:
    """Layers whose rounded copy is not the rounded weight."""
    with run.training.policy.forward.precision():
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
    at_1 = x.probe.plain_at_1_N
    asked = x.run.training.policy.forward.temperature
    if at_1 is None or asked == 1 or not difference(logps_N, at_1, tolerance) <= tolerance:
        return ""
    return f": these are log-probabilities at temperature 1, not {asked:g}"


def _worst(
    x: Before, samples: Sequence[Sample], which: int, mine: Sequence[np.ndarray], theirs: Sequence[np.ndarray]
) -> str:
    """The token that differs most."""
    sample = samples[which]
    if mine[which].shape != theirs[which].shape:
        return f"completion {which}: {len(theirs[which])} log-probabilities for {len(mine[which])} drawn tokens"
    apart = np.abs(mine[which] - theirs[which])
    worst = int(np.argmax(np.where(np.isnan(apart), np.inf, apart)))
    at = int(action_places(sample)[worst])
    values = f"{theirs[which][worst]:.3f} sampled, {mine[which][worst]:.3f} in training"
    return f"token {at} of completion {which}, {x.run.shown(sample.token_ids[at])}: {values}"
