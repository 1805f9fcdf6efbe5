"""The checks of the proof as rows of three tables: before rollouts, before the first step, and after it.

Each has gone wrong, silently, in a trainer that people use. Adding one is adding a function, a row, and its page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from podium.errors import Finding
from podium.models.precision import ROUNDED, norm_of
from podium.models.stored import outside
from podium.records import Sample
from podium.trainer.processes import optimized_by
from podium.trainer.proof.completions import (
    drawn_targets,
    end_tokens,
    later_turns,
    own_language,
    own_rendering,
    rewards,
    sampled_tokens,
    turn_ends,
)
from podium.trainer.proof.evidence import (
    EXACT,
    HALF,
    ROUNDINGS,
    After,
    Before,
    Reading,
    Subject,
    Trace,
    Traces,
    action_places,
    difference,
    first_tokens,
    is_no_rounding,
    named,
    named_by_kind,
    nudge_names,
    perturbed,
    plain_logps,
    problems_in,
    sampler_tolerance,
    tolerance_of,
    weight_traces,
    with_rounding,
)

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

NO_SIGNAL = "no completion has an advantage in this step"
NO_REFERENCE = "beta is 0: there is none"


# ---- before anything is sampled ----


def finite_weights(run: Subject) -> Reading:
    """No weight is NaN or infinite."""
    tensors = dict(run.model.named_parameters())
    floats = {name: p.detach() for name, p in tensors.items() if p.is_floating_point()}
    bad = [_not_finite(name, p) for name, p in floats.items() if not math.isfinite(norm_of(p))]
    return problems_in(bad, f"{len(tensors)} tensors")


def trained_tensors(run: Subject) -> Reading:
    """Tensors that should train require a gradient and are in the optimizer."""
    tensors = dict(run.model.named_parameters())
    trained = {name: p for name, p in tensors.items() if p.requires_grad}
    optimized = {id(p) for p in optimized_by(run.optimizer)}
    frozen = sorted(name for name in run.training.policy.trained if name in tensors and name not in trained)
    left_out = [name for name, p in trained.items() if id(p) not in optimized]
    problems = named_by_kind({"frozen": frozen, "in no group of the optimizer": left_out})
    apart = {} if run.training.args.train_image_encoder else outside(run.model)
    by_caller: list[str] = []
    if run.kind != "adapter" and run.training.args.frozen_parameters is None:
        off = [name for name, p in tensors.items() if p.is_floating_point() and not p.requires_grad]
        by_caller = [name for name in off if name not in apart]
    untrained = {
        "frozen by the caller": by_caller,
        "frozen, outside the language model": sorted(apart),
        "learning rate 0": _at_rest(run, trained),
    }
    notes = named_by_kind(untrained)
    sizes = f"{len(trained)} tensors, {sum(p.numel() for p in trained.values()):,} numbers"
    return Reading(
        "; ".join(problems or [sizes, *notes]),
        passed=any(id(p) in optimized for p in trained.values()),
        suspect=bool(problems),
        note=bool(notes),
        measured=float(len(frozen) + len(left_out)),
    )


def _at_rest(run: Subject, trained: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """Trained tensors whose learning rate is 0, where that of others is not."""
    rates = [(group, group.get("initial_lr", group["lr"])) for group in run.optimizer.param_groups]
    if not any(rate for _, rate in rates):
        return []
    still = {id(p) for group, rate in rates if not rate for p in group["params"]}
    return [name for name, p in trained.items() if id(p) in still]


# ---- before the first step ----


def rollout_logps(x: Before) -> Reading:
    """The log-probabilities that came with the rollouts are those that training computes."""
    tolerance = sampler_tolerance(x.run, exact=False)
    allowed = with_rounding(x, tolerance)
    if not x.trained or x.run.training.step.filters_logps:
        detail = "no completion to train on in this step"
        if x.trained:
            detail = "they are of what a filter (top_p, top_k, min_p, repetition_penalty) left of the distribution"
        return Reading(detail, passed=None, measured=0.0, tolerance=allowed)
    samples = shortened(x.trained)
    mine = x.run.training.step.logps(samples, x.run.model)
    theirs = [sample.sampled_logps_A for sample in samples]
    mine_N = np.concatenate(mine)
    measured = difference(mine_N, np.concatenate(theirs), tolerance)
    detail = f"{_nats(measured, tolerance)} over {len(mine_N)} tokens"
    if measured > allowed:
        apart = [difference(a, b, tolerance) for a, b in zip(mine, theirs, strict=True)]
        detail = f"{detail}; most in {_worst(x, samples, int(np.argmax(apart)), mine, theirs)}"
    return Reading(
        detail,
        passed=measured <= allowed or not is_no_rounding(x.run, samples, mine_N, measured),
        suspect=measured > allowed,
        measured=measured,
        tolerance=allowed,
    )


def sampler_synced(x: Before) -> Reading:
    """The engine's log-probabilities are the model's, also after its weights (or adapter) were changed."""
    probe = x.probe
    tolerance = sampler_tolerance(x.run, exact=True)
    allowed = with_rounding(x, tolerance)
    measured = difference(probe.sampled_N, probe.plain_N, tolerance)
    effect = difference(probe.before_N, probe.plain_N, tolerance)
    kind = x.run.kind
    is_one = kind == "adapter"
    name = f"the {kind} {'reaches' if is_one else 'reach'} the sampler"
    if measured <= allowed:
        detail = f"{_nats(measured, tolerance)} after a change worth {effect:.2g} nats"
        passed = effect > 2 * allowed or None
        return Reading(detail, name=name, passed=passed, measured=measured, tolerance=allowed)
    stale = difference(probe.sampled_N, probe.before_N, tolerance) <= allowed
    at_1 = _temperature(x, probe.sampled_N, tolerance)
    detail = f"the sampler is off by {_nats(measured, tolerance)}{at_1}"
    if stale:
        detail = (
            f"the {kind} {'does' if is_one else 'do'} not reach the sampler: its log-probabilities are those from "
            f"before a change that moves them by {effect:.3g} nats"
        )
    # An engine that casts weights may be off by its own rounding; these three it cannot be.
    is_fact = stale or bool(at_1) or not math.isfinite(measured) or not x.run.training.step.engine.casts_weights
    code = "P006" if stale else "P004"
    return Reading(detail, name=name, code=code, passed=not is_fact, suspect=True, measured=measured, tolerance=allowed)


def packed_forward(x: Before) -> Reading:
    """The packed, shared-prefix forward gives what a plain forward of every row gives."""
    probe = x.probe
    tolerance = tolerance_of(x.run, exact=True)
    allowed = with_rounding(x, tolerance)
    measured = difference(probe.packed_N, probe.plain_N, tolerance)
    passed = measured <= allowed and not probe.misplaced
    detail = f"{_nats(measured, tolerance)} over {len(probe.plain_N)} tokens"
    if not passed:
        first = f"; first in {probe.misplaced}" if probe.misplaced else ""
        detail = f"off by {_nats(measured, tolerance)}{_temperature(x, probe.packed_N, tolerance)}{first}"
    return Reading(detail, passed=passed, measured=measured, tolerance=allowed)


def batch_invariance(x: Before) -> Reading:
    """Packs and micro-steps change neither loss nor gradient, and both are those of the plain model."""
    probe = x.probe
    problems = []
    measured = 0.0
    limit = 0.0
    cuts = (("two micro-steps", probe.two_steps, True), ("one micro-step", probe.one_step, False))
    for name, (traces, loss), exact in cuts:
        by_tensor = tolerance_of(x.run, exact=exact) == EXACT
        tolerance = EXACT_GRADIENT if by_tensor else HALF_GRADIENT
        error, length, worst = gradient_error(traces, probe.plain.traces, probe.again.traces, by_tensor=by_tensor)
        measured, limit = max((measured, limit), (error, tolerance), key=lambda pair: pair[0] / (pair[1] or 1))
        if not error <= tolerance:
            problems.append(f"{name}: the gradient is {length:.3g} times the plain one, {worst} differs most")
        if not abs(loss - probe.plain.loss) <= tolerance * max(1.0, abs(probe.plain.loss)):
            problems.append(f"{name}: the loss is {loss:.4g}, not {probe.plain.loss:.4g}")
    unclear = _too_small(x)
    once = probe.one_step.traces
    if problems and gradient_error(probe.repeated.traces, once, once, by_tensor=False)[0] > RANDOM:
        unclear = "the same step gives another gradient every time: layers of this model draw random numbers"
    detail = unclear or "; ".join(problems) or f"gradients differ by {measured:.2g} of their length"
    return Reading(detail, passed=None if unclear else not problems, measured=measured, tolerance=limit)


def loss_direction(x: Before) -> Reading:
    """The loss raises the log-probability of tokens with a positive advantage, and lowers it of those with a negative.

    Exact for every loss on the policy that sampled: each surrogate is the advantage times a positive factor.
    """
    against = x.probe.against
    detail = f"{len(x.probe.plain_N)} tokens are moved the way of their advantage"
    if against:
        detail = f"{against} of {len(x.probe.plain_N)} tokens are moved against their advantage"
    return Reading(detail, passed=not against, measured=float(against))


def gradients(x: Before) -> Reading:
    """Every trained tensor that the plain model gives a gradient gets one in training, and all are finite."""
    mine, plain, again = (gradient.traces for gradient in (x.probe.one_step, x.probe.plain, x.probe.again))
    parameters = dict(x.run.model.named_parameters())
    bad = [name for name, t in mine.items() if not math.isfinite(t.norm)]
    # No token of the sample may have been sent to an expert.
    zero = [n for n, t in mine.items() if t.norm == 0 and "expert" not in n and parameters[n].numel()]
    scale = max((t.norm for t in plain.values()), default=0.0)
    lost = [n for n in zero if plain[n].norm > max(1e-6 * scale, ROUNDINGS * _apart(plain[n], again[n]))]
    problems = named_by_kind({"not finite": bad, "none, though the plain model gives them one": lost})
    if any(not math.isfinite(plain[name].norm) for name in bad):
        problems.append("nor is it in the plain model")
    certain = _too_small(x) if zero and not bad else ""
    detail = f"{len(mine)} tensors"
    if certain:
        detail = certain
    elif problems:
        detail = "; ".join(problems)
    elif zero:
        detail = (
            f"{len(zero)} of {len(mine)} tensors get none from these rows, in the plain model either: {named(zero)}"
        )
    return Reading(
        detail,
        passed=None if certain else not problems,
        suspect=bool(zero),
        measured=float(len(bad) + len(zero)),
        fix="Repair the layer named." if problems else "",
    )


def start_at_reference(x: Before) -> Reading:
    """Training starts at its reference, from which the KL divergence is measured."""
    samples = shortened(x.trained)
    tolerance = tolerance_of(x.run, exact=False)
    theirs = reference_logps(x.run, samples)
    if not theirs:
        return Reading(NO_REFERENCE, passed=None, measured=0.0, tolerance=tolerance)
    mine = x.run.training.step.logps(samples, x.run.model)
    measured = max(difference(a, b, tolerance) for a, b in zip(mine, theirs, strict=True))
    detail = f"{_nats(measured, tolerance)} between policy and reference"
    return Reading(detail, suspect=measured > tolerance, measured=measured, tolerance=tolerance)


# ---- after a step that moved ----


def weights_changed(x: After) -> Reading:
    """The optimizer step changed weights."""
    now = weight_traces(x.run.model)
    still = [n for n, t in now.items() if n in x.weights and np.array_equal(t.numbers, x.weights[n].numbers)]
    bad = [name for name, t in now.items() if not math.isfinite(t.norm)]
    count = len(now) - len(still)
    passed: bool | None = not bad
    detail = f"{count} of {len(now)} tensors changed"
    if bad:
        detail = f"not finite after the step: {named(bad)}"
    elif not count and x.gradients and not any(bool(g.any()) for g in x.gradients[-1].values()):
        detail = "the gradient is zero"
        passed = None
    elif not count and not x.signal:
        detail = NO_SIGNAL
        passed = None
    return Reading(detail, passed=passed, suspect=not count, measured=float(count))


def logps_changed(x: After) -> Reading:
    """New weights give new log-probabilities: none are computed with an old copy."""
    now = x.run.training.step.logps(x.samples, x.run.model)
    same = bool(now) and all(np.array_equal(a, b) for a, b in zip(now, x.logps, strict=True))  # none: no prompt
    shift = largest_shift(now, x.logps)
    passed: bool | None = None if same else True
    detail = "the step is too small to show; a larger change does" if same else f"by up to {shift:.2g} nats"
    if old := stale_copies(x.run):
        detail = f"old copies of {named(old)}"
        passed = False
    elif same and _stay_where_the_plain_model_moves(x, now):
        detail = "the same log-probabilities with other weights, also after a change that moves the plain model's"
        passed = False
    elif (same or not now) and not x.signal:
        detail = NO_SIGNAL
        passed = None
    return Reading(detail, passed=passed, measured=shift)


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


def step_direction(x: After) -> Reading:
    """The step goes down its loss: against the gradients that the backward gave, weight decay taken out.

    A step of any descent is minus a positive operator on them, or on a mean over steps where there is momentum.
    """
    optimizer = getattr(x.run.optimizer, "optimizer", x.run.optimizer)
    states = [s for s in optimizer.state.values() if isinstance(s, dict)]
    has_memory = any(isinstance(value, torch.Tensor) and value.numel() > 1 for s in states for value in s.values())
    cosines = [cosine for cosine in (_cosine(x, gradients) for gradients in x.gradients) if cosine]
    if not has_memory:  # the last gradient alone decides
        del cosines[:-1]
    if not cosines:
        return Reading("no gradient to compare with: an optimizer that steps in the backward leaves none", passed=None)
    decay_is_known = not x.decays or any(word in type(optimizer).__name__ for word in DECOUPLED)
    is_clear = decay_is_known and not (has_memory and len(x.gradients) >= KEPT_STEPS)
    against = min(cosines) > AGAINST
    passed = None
    if against or cosines[-1] < 0:
        passed = not (against and is_clear)
    detail = f"cosine {cosines[-1]:+.2g} with the gradient of the loss, of {len(x.tensors)} tensors"
    return Reading(detail, passed=passed, suspect=against, measured=cosines[-1])


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


def reference_kept(x: After) -> Reading:
    """The reference did not move with the policy."""
    theirs = reference_logps(x.run, x.samples)
    moved_by = largest_shift(theirs, x.reference)
    if not theirs:
        return Reading(NO_REFERENCE, passed=None, measured=moved_by)
    mine = x.run.training.step.logps(x.samples, x.run.model)
    shift = largest_shift(mine, x.logps)
    moved = moved_by >= 0.5 * shift
    passed: bool | None = None
    detail = f"it moved by {moved_by:.2g} nats, the policy by {shift:.2g}"
    if x.run.args.sync_ref_model:
        detail = "sync_ref_model moves it"
    elif shift > LEAST_SHIFT:
        is_policy = all(np.array_equal(a, b) for a, b in zip(theirs, mine, strict=False))
        is_fact = tolerance_of(x.run, exact=False) == EXACT or is_policy  # the same forward may give other last bits
        passed = not (moved and is_fact)
    return Reading(detail, passed=passed, suspect=moved, measured=moved_by)


# ---- the tables ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str
    code: str
    """Page of `podium explain`."""
    passed: bool | None
    """None: not checked, for the reason in `detail`."""
    detail: str
    """The finding, with the tensor or token where it is wrong."""
    measured: float | None = None
    tolerance: float | None = None
    """The largest `measured` that passes."""
    fix: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """The settings that `fix` changes, as in `Finding`."""
    note: bool = False
    """It passed, but `detail` is worth reading."""
    suspect: bool = False
    """It passed, but the run is probably in vain."""
    overruled: bool = False
    """It failed, and the user goes on against it."""

    @property
    def word(self) -> str:
        """The result in the table.

        >>> Check(name="rewards", code="P010", passed=True, detail="").word
        'ok'
        """
        if self.passed is None:
            return "not checked"
        if not self.passed:
            return "overruled" if self.overruled else "FAILED"
        if self.suspect:
            return "WARNING"
        return "note" if self.note else "ok"

    @property
    def is_quiet(self) -> bool:
        return self.word in ("ok", "not checked")

    @property
    def finding(self) -> Finding:
        """As an error, a warning or a note of the run."""
        severity: Any = {"FAILED": "error", "overruled": "error", "WARNING": "warning"}.get(self.word, "note")
        what = f"{self.name}: {self.detail}"
        made = Finding(code=self.code, severity=severity, what=what, fix=self.fix, step=0, changes=self.changes)
        return made.overruled() if self.overruled else made


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One check."""

    code: str
    name: str
    measure: Callable[[Any], Reading]
    """Compares, on the evidence of the row's table: a `Subject`, a `Before` or an `After`."""
    tolerance: float | None = None
    """The largest measure that passes; None: it depends on the run, or nothing is measured."""
    fix: str = ""
    """What to do where it fails."""
    changes: Mapping[str, Any] = field(default_factory=dict)

    def checked(self, evidence: Subject | Before | After) -> Check:
        """The result on this run."""
        reading = self.measure(evidence)
        return Check(
            name=reading.name or self.name,
            code=reading.code or self.code,
            passed=reading.passed,
            detail=reading.detail,
            measured=reading.measured,
            tolerance=self.tolerance if reading.tolerance is None else reading.tolerance,
            fix=reading.fix or self.fix,
            changes=reading.changes or self.changes,
            note=reading.note,
            suspect=reading.suspect,
        )


BEFORE_ROLLOUTS: tuple[Row, ...] = (
    Row(
        code="P001",
        name="weights are finite",
        measure=finite_weights,
        tolerance=0.0,
        fix="Load the model again, from another copy.",
    ),
    Row(
        code="P002",
        name="trained tensors",
        measure=trained_tensors,
        tolerance=0.0,
        fix="If that is not on purpose: unfreeze them before training (parameter.requires_grad_(True)), and give the "
        "optimizer all of them.",
    ),
    Row(
        code="P003",
        name="end tokens",
        measure=end_tokens,
        tolerance=0.0,
        fix="Make generation_config.eos_token_id and tokenizer.eos_token agree with the chat template.",
    ),
)
"""Checks of a `Subject`."""

BEFORE_STEP: tuple[Row, ...] = (
    Row(
        code="P014",
        name="text is the model's own",
        measure=own_language,
        fix="Use the tokenizer and the chat template that came with the model (leave out processing_class, or load it "
        "from the model's own folder).",
    ),
    Row(
        code="P010",
        name="rewards",
        measure=rewards,
        fix="Look at the completions with `podium sample`; a reward is one number or None for each of them.",
    ),
    Row(
        code="P009",
        name="trained tokens are the sampled ones",
        measure=sampled_tokens,
        tolerance=0.0,
        fix="Train on the ids that the engine sampled; never on text that is tokenized again.",
    ),
    Row(code="P003", name="completions end with the turn", measure=turn_ends, tolerance=0.0),
    Row(
        code="P004",
        name="rollout and training log-probabilities",
        measure=rollout_logps,
        fix="The engine samples from another distribution than is trained: look at temperature, adapter and precision.",
    ),
    Row(
        code="P004",
        name="the weights reach the sampler",
        measure=sampler_synced,
        fix="The engine must sample from the model that is trained, with its adapter switched on.",
    ),
    Row(
        code="P005",
        name="packed forward equals plain rows",
        measure=packed_forward,
        fix="Report this model; until then set rollout_engine: transformers.",
        changes={"rollout_engine": "transformers"},
    ),
    Row(
        code="P007",
        name="cutting the batch changes nothing",
        measure=batch_invariance,
        fix="Something scales loss or gradient by packs or micro-steps: look at overridden methods and callbacks.",
    ),
    Row(
        code="P015",
        name="the loss follows the advantages",
        measure=loss_direction,
        tolerance=0.0,
        fix="The loss has the wrong sign: look at what replaces or changes it.",
    ),
    Row(
        code="P008",
        name="every trained tensor gets a gradient",
        measure=gradients,
        tolerance=0.0,
        fix="Nothing, if text does not use these parts; else freeze them (parameter.requires_grad_(False)).",
    ),
    Row(
        code="P016",
        name="training starts at its reference",
        measure=start_at_reference,
        fix="The KL divergence is measured from another model than training starts from: load the adapter or weights "
        "that the reference should be as `model`.",
    ),
)
"""Checks of a `Before`."""

OF_TURNS: tuple[Row, ...] = (
    Row(
        code="P017",
        name="targets are the drawn tokens",
        measure=drawn_targets,
        tolerance=0.0,
        fix="An action mask is shifted or incomplete: look at what makes Sample.actions from the turns.",
    ),
    Row(
        code="P018",
        name="later turns from the kept cache",
        measure=later_turns,
        fix="What the engine kept between turns is not what training computes. Set rollout_engine: transformers, which "
        "computes every turn again, and report this model.",
        changes={"rollout_engine": "transformers"},
    ),
    Row(
        code="P019",
        name="streams are the template's rendering",
        measure=own_rendering,
        fix="Nothing, as a rule: the tokens that were drawn are trained on, not those of a rendering. A model that is "
        "served sees the rendering in later turns.",
    ),
)
"""Further checks of a `Before`, where completions have several turns."""

AFTER_STEP: tuple[Row, ...] = (
    Row(
        code="P011",
        name="the step moved the weights",
        measure=weights_changed,
        fix="Where the rate stays so low, train in float32 weights (model_init_kwargs: {dtype: float32}) or raise it.",
        changes={"model_init_kwargs": {"dtype": "float32"}},
    ),
    Row(
        code="P012",
        name="the weights moved the log-probabilities",
        measure=logps_changed,
        fix="Something keeps a copy of the weights: look at hooks, caches and compiled modules.",
    ),
    Row(
        code="P015",
        name="the step goes down its loss",
        measure=step_direction,
        tolerance=AGAINST,
        fix="The step makes good completions less likely: look at the optimizer (maximize), its learning rate, and at "
        "callbacks that change gradients.",
    ),
    Row(
        code="P016",
        name="the reference stays where it is",
        measure=reference_kept,
        fix="The reference shares weights with the policy, so that KL is 0 whatever is learnt: give it a copy.",
    ),
)
"""Checks of an `After`."""


# ---- shared by checks ----


def reference_logps(run: Subject, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Under the reference; empty without one."""
    if run.training.objective.reference is None:
        return []
    with run.training.objective.reference.model(run.model) as model:
        return run.training.step.logps(samples, model)


def largest_shift(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """The largest change of a log-probability."""
    return max((float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True)), default=0.0)


def gradient_error(traces: Traces, plain: Traces, again: Traces, *, by_tensor: bool) -> tuple[float, float, str]:
    """Distance of gradients from the plain ones, their relative length, and the tensor that differs most.

    `by_tensor`: the largest error of a tensor, relative to it; else that of all together. What rounding may do is left
    out: `again` are the plain ones with inputs that it has moved.
    """
    apart = {n: max(0.0, _apart(traces[n], t) - ROUNDINGS * _apart(t, again[n])) for n, t in plain.items()}
    sizes = {name: float(np.linalg.norm(t.numbers)) for name, t in plain.items()}
    scale = max(sizes.values(), default=0.0)
    errors = {name: error / max(sizes[name], 1e-3 * scale, 1e-30) for name, error in apart.items()}
    norms = [math.sqrt(sum(t.norm**2 for t in x.values())) for x in (traces, plain)]
    together = math.sqrt(sum(x**2 for x in apart.values())) / max(math.sqrt(sum(x**2 for x in sizes.values())), 1e-30)
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    error = errors[worst] if by_tensor else together
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


def _too_small(x: Before) -> str:
    """Say that gradients are of the size of rounding, and why; empty: they are larger.

    They are where every token is all but certain, and where a change of all trained weights by their own size would
    move the loss by less than log-probabilities are rounded: behind a cap of logits that is reached, for example.
    """
    probe = x.probe
    if probe.doubt < LEAST_DOUBT:
        return f"no token of the sample is uncertain (at most {probe.doubt:.1g}): gradients are of the size of rounding"
    parameters = dict(x.run.model.named_parameters())
    traces = probe.plain.traces
    reach = sum(trace.norm * float(parameters[name].detach().norm()) for name, trace in traces.items())
    kind = torch.float32 if tolerance_of(x.run, exact=True) == EXACT else torch.bfloat16
    rounding = torch.finfo(kind).eps * float(np.abs(probe.plain_N).mean()) if probe.plain_N.size else 0.0
    if reach < rounding:
        return f"the plain model's gradients are of the size of rounding: weights move the loss by {reach:.1g} at most"
    return ""


def _not_finite(name: str, p: torch.Tensor) -> str:
    """`q_proj.weight (128 numbers, rows 8 to 15)`."""
    bad = ~p.detach().isfinite()
    rows = bad.reshape(len(p), -1).any(-1).nonzero()[:, 0].tolist() if p.dim() else [0]
    return f"{name} ({int(bad.sum())} numbers, rows {rows[0]} to {rows[-1]})" if rows else name


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
