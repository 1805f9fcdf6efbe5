"""Movement of the weights: divergence, ratios, gradients, steps that are too large or do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from podium.errors import Finding
from podium.errors.texts import as_lines
from podium.runs.monitors.detection import mean, percent, slowed, trend
from podium.runs.monitors.history import MetricHistory, usual_rate

TOO_FAR = {False: 0.006, True: 0.08}
"""By whether an adapter is trained: change of the weights in one step, relative to their size, that is much."""

TOO_LITTLE = {False: 5e-7, True: 5e-6}
"""By the same: change below which a run of ordinary length goes nowhere."""


def non_finite(history: MetricHistory) -> Finding | None:
    """M131: a loss, a gradient or a weight is not a number."""
    now = history.steps[-1].values
    names = ("loss", "grad_norm", "health/update_ratio", "health/logp_gap_mean")
    bad = [name for name in names if not np.isfinite(now.get(name, 0.0))]
    # A mean over the trained tokens is NaN where all groups were flat, so that there were none.
    if np.isinf(now.get("kl", 0.0)) or (np.isnan(now.get("kl", 0.0)) and np.isfinite(now.get("entropy", np.nan))):
        bad.append("kl")
    if not bad:
        return None
    again = sum(not np.isfinite(each.values.get(bad[0], 0.0)) for each in history.steps[-3:])
    ruined = "health/update_ratio" in bad
    return Finding(
        code="M131",
        severity="error" if ruined or again > 1 else "warning",
        what=f"{', '.join(bad)} not finite in step {history.step}" + (", and weights with it." if ruined else "."),
        why="A weight, an input of the loss or a product (in float16) is infinite or NaN, and so is all that follows.",
        fix="Look for the first such number: the finding of a step that was left out names it. If it is a weight, go "
        "back to a checkpoint from before; use bf16 instead of fp16.",
    )


def kl_explodes(history: MetricHistory) -> Finding | None:
    """M132: the policy runs away from the reference."""
    kl = history.series("kl")
    if len(kl) < 3:
        return None
    now = float(np.nanmedian(kl[-3:])) if np.isfinite(kl[-3:]).any() else np.nan  # single steps spike in healthy runs
    rising = len(kl) >= 6 and now > 0.2 and now > 4 * mean(kl[-6:-3]) and trend(kl[-8:]) > 2
    if not (now > 0.5 or rising):
        return None
    changes = {**history.settings.slower(10), "max_grad_norm": 0.2}
    return Finding(
        code="M132",
        severity="warning",
        what=f"KL divergence from the reference is {now:.2f} nats a token; at first it was {mean(kl[:2]):.3f}.",
        why="Steps are too large for beta to hold the policy back; beyond 0.5 it no longer writes as it was taught.",
        fix=f"{slowed(changes, 10)}; or raise beta (now {history.settings.beta or 0:g}).",
        changes=changes,
    )


def clips_much(history: MetricHistory) -> Finding | None:
    """M133: a large share of ratios is clipped."""
    share = history.series("clip_ratio/region_mean", last=3)
    if len(share) < 3 or not mean(share) > 0.3:
        return None
    changes = history.settings.slower(3)
    return Finding(
        code="M133",
        severity="warning",
        what=f"{percent(mean(share))} of token ratios are clipped, over {len(share)} steps.",
        why="The policy moves far while one round is trained on, and clipped tokens carry no gradient.",
        fix=f"{slowed(changes, 3)}; or lower num_iterations or steps_per_generation.",
        changes=changes,
    )


def gradient_spikes(history: MetricHistory) -> Finding | None:
    """M134: gradients now and then are many times the usual."""
    norms = history.series("grad_norm")
    norms = norms[np.isfinite(norms) & (norms > 0)]
    if len(norms) < 12:
        return None
    usual = float(np.median(norms[:-1]))
    recent = norms[-20:]
    spikes = int((recent > 10 * usual).sum())
    if norms[-1] <= 10 * usual and spikes < 3:
        return None
    changes = {"max_grad_norm": max(round(2 * usual, 2), 0.01)}
    return Finding(
        code="M134",
        severity="warning" if spikes >= 3 else "note",
        what=f"Gradient norm {recent.max():.3g} against a median of {usual:.3g}; {spikes} of the last {len(recent)} "
        "steps over ten times it.",
        why="Single rollouts with very unlikely tokens, or few groups with signal, make steps of random size.",
        fix=f"Set {as_lines(changes)}; more prompts a step.",
        changes=changes,
    )


APART = 0.1
"""Nats by which log-probabilities of sampling and training may differ on average."""
OF_THESE_IDS = (
    "Return from rollout_func the logprobs of just these completion_ids after just these prompt_ids, at the run's "
    "temperature, before any filter; or None."
)


def sampler_disagrees(history: MetricHistory) -> Finding | None:
    """M135: sampling and training compute different log-probabilities for the same weights."""
    own = history.series("health/logp_gap_mean", last=3)
    gap = own if len(own) else history.series("sampling/sampling_logp_difference/mean", last=3)
    if len(gap) < 2 or not mean(gap) > APART:
        return None
    served = len(history.series("sampling/sampling_logp_difference/mean", last=3)) > 0
    what = f"Log-probabilities of sampled tokens differ by {mean(gap):.2f} nats between sampling and training."
    if history.settings.dropout and not served and not history.settings.rollout_func:
        changes: dict[str, Any] = {"disable_dropout": True}
        return Finding(
            code="M135",
            severity="warning",
            what=what,
            why=f"Dropout, of up to {history.settings.dropout:.2g}, is on in training and off in sampling: "
            "gradients are those of another model than the one that sampled.",
            fix=f"Set {as_lines(changes)}.",
            changes=changes,
        )
    if history.settings.rollout_func:
        changes = {}
        fix = OF_THESE_IDS
    else:
        changes = {"use_vllm": False} if served else {"rollout_engine": "live"}
        fix = (
            f"Set {as_lines(changes)}, so that the trained weights sample; or keep one precision for both, and refresh "
            "a served model in each step."
        )
    return Finding(
        code="M135",
        severity="warning",
        what=what,
        why="The sampler has other weights, precision or template than the trainer, so gradients are biased.",
        fix=fix,
        changes=changes,
    )


def _rate(rate: float) -> dict[str, Any]:
    """A learning rate of one digit, as changes; empty for one that is no number."""
    return {"learning_rate": float(f"{rate:.0e}")} if np.isfinite(rate) and rate > 0 else {}


def steps_too_large(history: MetricHistory) -> Finding | None:
    """M136: a step changes the weights by a large share of themselves."""
    moved = history.series("health/update_ratio", last=50)
    rates = history.series("learning_rate", last=50)
    much = TOO_FAR[history.settings.adapter]
    if len(moved) < 2 or not np.isfinite(moved).any() or np.nanmax(moved) < much:
        return None
    size = float(np.nanmax(moved))
    rate = float(np.nanmax(rates)) if np.isfinite(rates).any() else np.nan
    flat = history.series("frac_reward_zero_std")
    ruined = mean(flat[-3:]) > 0.95 and flat[0] < 0.9
    changes = _rate(rate * much / size / 10)
    return Finding(
        code="M136",
        severity="warning",
        what=f"One step changed the weights by {100 * size:.1f} % of their size, at learning rate {rate:.1e}"
        + ("; since then all groups have equal rewards." if ruined else f"; {100 * much:.1f} % is much."),
        why="Such steps overwrite what the model knows faster than rewards can tell what to keep.",
        fix=f"Set {as_lines(changes) or 'a lower learning_rate'}.",
        changes=changes,
    )


def steps_too_small(history: MetricHistory) -> Finding | None:
    """M137: steps change the weights by next to nothing."""
    little = TOO_LITTLE[history.settings.adapter]
    rate = float(np.fmax.reduce(history.series("learning_rate"), initial=0.0))
    moved: list[float] = []
    for row in (each.values for each in reversed(history.steps)):
        if row.get("grad_norm", 1.0) > 0 and row.get("learning_rate", np.nan) >= 0.5 * rate:
            moved += [row["health/update_ratio"]] if "health/update_ratio" in row else []
        if len(moved) == 20:
            break
    if len(moved) < 4 or rate <= 0 or not 0 < np.median(moved) < little:
        return None
    size = float(np.median(moved))
    changes = _rate(rate * 100 * little / size)
    share = mean(history.series("health/moved_share", last=10))
    lost = share < 0.5
    return Finding(
        code="M137",
        severity="warning",
        what=f"Each step changes the weights by {size:.1e} of their size, at learning rate {rate:.1e}"
        + (f"; only {percent(share)} of weights change at all." if lost else "."),
        why="The weights' precision swallows such updates."
        if lost
        else "At this pace a thousand steps change the weights by less than a thousandth part: the run goes nowhere.",
        fix=f"Set {as_lines(changes)}" + ("; keep trained weights in float32." if lost else "."),
        changes=changes,
    )


def weights_frozen(history: MetricHistory) -> Finding | None:
    """M138: there are gradients, but no weight moves."""
    rows = [each.values for each in history.steps[-8:]]
    rows = [row for row in rows if row.get("learning_rate", 0) > 0 and "health/moved_share" in row]
    signal = [row for row in rows if row.get("frac_reward_zero_std", 0.0) < 1 and not _all_masked(row, history)]
    if len(signal) < 3 or any(row["health/moved_share"] > 0 for row in signal):
        return None
    norm = mean(np.array([row.get("grad_norm", np.nan) for row in signal]))
    name = "adapter" if history.settings.adapter else "weights"
    what = f"The {name} did not move in {len(signal)} steps with signal in their groups (gradient norm {norm:.3g})."
    fix = "Let the trainer make the optimizer (leave out `optimizers`); check requires_grad."
    if not norm > 0:  # nothing had to move
        why = "No gradient arrives: parameters or activations are cut off."
        return Finding(code="M138", severity="warning", what=what, why=why, fix=fix)
    if history.settings.rounds:
        changes = {"model_init_kwargs": {"dtype": "float32"}}
        return Finding(
            code="M138",
            severity="warning",
            what=what,
            why="In half precision a change that is small beside its weight is rounded away. Or the optimizer holds "
            "other parameters than the model trains.",
            fix=f"Set {as_lines(changes)}, or a higher learning_rate; if nothing moves then, leave out `optimizers`.",
            changes=changes,
        )
    return Finding(
        code="M138",
        severity="error",
        what=what,
        why="The optimizer holds other parameters than the model trains (it was made before the adapter was added), or "
        "gradients are stopped on their way.",
        fix=fix,
    )


def _all_masked(row: Mapping[str, float], history: MetricHistory) -> bool:
    """Whether a step had no gradient as all its completions were cut off, and `mask_truncated_completions` is on."""
    masks = history.settings.present.get("mask_truncated_completions", True)  # unknown: it may be
    return bool(masks) and row.get("completions/clipped_ratio") == 1 and row.get("grad_norm") == 0


def adapter_rate_low(history: MetricHistory) -> Finding | None:
    """M139: a learning rate for full fine-tuning, with an adapter."""
    rate = history.settings.learning_rate
    if not history.settings.adapter or rate is None or not 0 < rate < 8e-6 or len(history.steps) < 3:
        return None
    changes = _rate(usual_rate(history.settings.num_parameters, adapter=True))
    return Finding(
        code="M139",
        severity="warning",
        what=f"learning_rate is {rate:.1e} with a LoRA adapter.",
        why="Adapters need about ten times the rate of full fine-tuning: few weights do the work.",
        fix=f"Set {as_lines(changes)}.",
        changes=changes,
    )
