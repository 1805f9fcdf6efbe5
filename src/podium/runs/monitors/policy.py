"""What becomes of the policy: does it still try different things, do its weights move, what form have its texts, and
what does the machine do meanwhile?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podium.algorithm.advantages import FLAT
from podium.errors.texts import as_line, as_lines
from podium.runs.monitors.detection import Evidence, correlation, detector, mean, percent, slope, slowed, some, trend
from podium.runs.monitors.history import COLD, LOW_ENTROPY, MetricHistory, RoundView, duplicate_share, usual_rate
from podium.runs.monitors.rewards import FORMAT_WORDS, looks_misspelt, names_one_of, pays_for_length
from podium.runs.monitors.signs import MOST_LABELS, doubt_about, plain

TAG = re.compile(r"</?[A-Za-z][\w-]*>")
MOSTLY = 0.67
"""Share of the range of rewards from which on a policy that is sure is so for a good reason."""
SHORT = 4
"""Tokens, the last one included, up to which equal completions are no evidence of how they were sampled."""
TOO_FAR = {False: 0.006, True: 0.08}
TOO_LITTLE = {False: 5e-7, True: 5e-6}
"""By whether an adapter is trained: change of the weights in one step, relative to their size, that is much; change
below which a run of ordinary length goes nowhere."""
APART = 0.1
"""Nats by which log-probabilities of sampling and training may differ on average."""
OF_THESE_IDS = (
    "Return from rollout_func the logprobs of just these completion_ids after just these prompt_ids, at the run's "
    "temperature, before any filter; or None."
)
NO_LENGTH_BIAS = {"loss_type": "dr_grpo", "scale_rewards": "none"}
"""Dr. GRPO: a loss that does not weigh tokens by the length of their completion."""
WARM_UP = 4
"""Steps in which buffers and caches still grow."""


# ---- does it still try different things? ----


@detector(
    "M121",
    70,
    "deviation of rewards, mean of the last 5 steps",
    "down to 0.1 of the first 5, after 12 steps; a note where the reward rose to within 0.2 of its range from the "
    "highest and 0.5 of completions are right, or none tells right from wrong",
    severity="note or warning",
    fix="Read completions (`podium sample RECIPE`); then use harder prompts, or mend the reward.",
)
def spread_vanishes(history: MetricHistory) -> Evidence | None:
    """The deviation of rewards goes to zero: solved, hacked, or alike before it was good."""
    early, late = history.change("reward_std", 5, least=12)
    if not (early > FLAT and late <= 0.1 * early):
        return None
    before, now = history.change("reward", 5)
    low, high = history.extremes
    what = f"reward_std fell from {early:.3f} to {late:.3f}, while the reward went from {before:.3f} to {now:.3f}."
    rose = now > before and not now < high - 0.2 * (high - low)
    doubt = doubt_about(history) if rose else ""
    if doubt:
        return Evidence(what, why=f"The reward may be hacked. {doubt}.")
    right = [history.right_PG(view) for view in history.rounds[-5:]]
    known = [float(np.nanmean(x)) for x in right if x is not None and np.isfinite(x).any()]
    if rose and (not known or len(known) < len(right)):
        why = (
            "The highest reward is reached: the prompts are solved, or the reward has been outwitted; no reward tells "
            "right from wrong."
        )
        return Evidence(what, why=why, severity="note")
    if rose and float(np.mean(known)) >= 0.5:
        why = (
            f"By the reward that tells right from wrong, {percent(float(np.mean(known)))} of completions of the last "
            f"{len(known)} rounds are right."
        )
        return Evidence(what, why=why, fix="Use harder prompts.", severity="note")
    changes = {**history.settings.slower(3), **_tempered(history)}
    fix = f"Set {as_lines(changes)}." if changes else "Lower learning_rate; raise temperature or epsilon_high."
    return Evidence(what, why="Completions have become alike before they became good.", fix=fix, changes=changes)


def _tempered(history: MetricHistory) -> dict[str, Any]:
    """The temperature for a policy as sure as in the last steps, as changes."""
    return history.settings.tempered(mean(history.series("entropy", last=3)))


@detector(
    "M122",
    30,
    "share of completions that repeat another of their group",
    "from 0.85 on in each of 3 rounds; groups of up to 4 tokens are left out, and those of which 0.5 are one of up to "
    "12 answers that 2 rows share; a group whose different texts have different rewards has none; a note where the "
    "reward rises",
    severity="note or warning",
)
def duplicates(history: MetricHistory) -> Evidence | None:
    """The completions of a group say the same: of a sure policy, or of a narrowed sampler."""
    _, top = history.extremes
    labels = _few_answers(history)
    shares = history.shares(lambda view: duplicates_of(view, top, labels), 3)
    if min(shares, default=0.0) < 0.85:
        return None
    settings = history.settings
    entropy = mean(history.series("entropy", last=3))
    is_unsure = entropy > LOW_ENTROPY
    changes: dict[str, Any] = {**_tempered(history), **({} if is_unsure else settings.slower(3))}
    if settings.narrowed:
        changes = dict.fromkeys(settings.narrowed)
        lines = ", ".join(as_line(name, value) for name, value in settings.narrowed.items())
        fix = f"Remove {lines} from the settings and generation_kwargs."
    elif changes:
        fix = f"Set {as_lines(changes)}."
    elif is_unsure:
        fix = "Read completions (`podium sample RECIPE`): more different prompts, or longer answers."
    else:
        fix = "Raise temperature, lower learning_rate, or go back to an earlier checkpoint."
    before, now = history.change("reward", 3)
    what = f"{percent(float(np.mean(shares)))} of completions repeat another of their group, over {len(shares)} rounds"
    although = f", although the policy is unsure (entropy {entropy:.2f} nats a token)"
    chosen = "Completions are not sampled but chosen: the likeliest token, or one random number for all."
    return Evidence(
        f"{what}{although}." if is_unsure else f"{what}.",
        why=chosen if is_unsure else "The policy has become so sure that sampling finds one text only.",
        fix=fix,
        changes=changes,
        severity="note" if now > before + 1e-6 else "warning",
    )


def duplicates_of(view: RoundView, top: float, labels: frozenset[str] = frozenset()) -> float:
    """Share of duplicates, without groups that are all at the highest reward and answers of a word or two. Those whose
    different texts have different rewards have none: there sampling has found what there is to compare.

    `labels`: the answers there are, where they are few; completions that are one of them, with tags or without, are
    alike by nature.
    """
    shares = []
    for flat, reward_G, tokens_G, texts_G in zip(
        view.is_flat_P, view.reward_PG, view.tokens_PG, view.texts_PG, strict=True
    ):
        high = np.nanmax(reward_G) if np.isfinite(reward_G).any() else -np.inf
        if (flat and high >= top and high > 0) or tokens_G.mean() <= SHORT or (labels and _are_labels(texts_G, labels)):
            continue
        shares.append(duplicate_share([texts_G]) if flat or len(set(texts_G)) == 1 else 0.0)
    return float(np.mean(shares)) if shares else 0.0


def _are_labels(texts_G: Sequence[str], labels: frozenset[str]) -> bool:
    return bool(np.mean([plain(TAG.sub(" ", text)) in labels for text in texts_G]) >= 0.5)


def _few_answers(history: MetricHistory) -> frozenset[str]:
    """The answers of all rows of the latest rounds, where they are few and some rows share one; else nothing."""
    answers = [plain(answer) for view in history.rounds for answer in view.answers_P if answer]
    return frozenset(answers) if 0 < len(set(answers)) <= min(MOST_LABELS, len(answers) / 2) else frozenset()


@detector(
    "M123",
    4,
    "temperature",
    "up to 0.3, where 0.4 of completions repeat another in the last 3 rounds or over 0.5 of groups are flat; after 2 "
    "rounds",
    why="Below about 0.3 nearly always the likeliest token is drawn, so there is nothing to compare.",
    fix="Set temperature: 1.0. For sharper answers after training, lower it when generating, not when training.",
)
def too_cold(history: MetricHistory) -> Evidence | None:
    """The temperature is too low to sample different completions."""
    temperature = history.settings.temperature
    if temperature is None or temperature > COLD or len(history.rounds) < 2:
        return None
    same = float(np.mean([duplicate_share(view.texts_PG) for view in history.rounds[-3:]]))
    flat = mean(history.series("frac_reward_zero_std", last=3))
    if same < 0.4 and not flat > 0.5:
        return None
    return Evidence(
        f"At temperature {temperature:g}, {percent(same)} of completions repeat another of their group, and "
        f"{percent(flat)} of groups have equal rewards.",
        changes={"temperature": 1.0},
    )


@detector(
    "M124",
    40,
    "entropy in nats a token, mean of the last 3 steps",
    "below 0.15 and below 0.1 of the first 3, after 8 steps; a note where the reward rises, nothing where it has risen "
    "above 0.67 of its range",
    severity="note or warning",
    why="A policy that is sure writes the same again and again: equal rewards, no advantage, no learning.",
)
def entropy_collapse(history: MetricHistory) -> Evidence | None:
    """The policy has almost stopped exploring, and what it has settled for is not the best there is."""
    early, late = history.change("entropy", 3, least=8)
    if not (late < 0.1 * early and late < 0.15):
        return None
    before, now = history.change("reward", 3)
    low, high = history.extremes
    if now > before and now - low > MOSTLY * (high - low):
        return None  # sure, and mostly right
    settings = history.settings
    changes = {**settings.slower(3), **({"epsilon_high": 0.28} if settings.clips else settings.tempered(late))}
    return Evidence(
        f"Entropy fell from {early:.2f} to {late:.3f} nats a token, while the reward went from {before:.3f} to "
        f"{now:.3f}.",
        fix=f"{slowed(changes, 3)}; next entropy_coef: 0.001.",
        changes=changes,
        severity="warning" if now <= before else "note",
    )


@detector(
    "M125",
    42,
    "share of four-word sequences that their completion repeats, mean of the last 3 rounds",
    "from 0.4 on",
    why="The policy loops: long texts are rewarded, or it has been damaged by large steps.",
)
def repetition(history: MetricHistory) -> Evidence | None:
    """Completions go round in circles."""
    late = history.shares(lambda view: view.repetition, 3)
    if not len(late) or np.mean(late) < 0.4:
        return None
    early = float(np.mean([view.repetition for view in history.rounds[:3]]))
    changes = history.settings.slower(3)
    return Evidence(
        f"{percent(float(np.mean(late)))} of four-word sequences repeat in their completion ({percent(early)} at "
        "first).",
        fix=f"{slowed(changes, 3)}; add a repetition penalty reward.",
        changes=changes,
    )


@detector(
    "M126",
    16,
    "entropy in nats a token, mean of the last 2 steps",
    "over 1.5 times that of the first 2, and 1.5 more, after 4 steps",
    why="Steps are too large: the model forgets how to write.",
)
def entropy_explodes(history: MetricHistory) -> Evidence | None:
    """The policy dissolves into noise."""
    early, late = history.change("entropy", 2, least=4)
    if not late > 1.5 * early + 1.5:
        return None
    changes = {**history.settings.slower(10), "max_grad_norm": 0.2, **history.settings.tempered(late)}
    return Evidence(
        f"Entropy rose from {early:.2f} to {late:.2f} nats a token (as of {np.exp(late):,.0f} equal tokens).",
        fix=f"{slowed(changes, 10)}; next beta: 0.04.",
        changes=changes,
    )


# ---- do its weights move as they should? ----


@detector(
    "M131",
    0,
    "loss, gradient, KL and weights that are not finite",
    "any; an error where it is a weight, or twice in the last 3 steps",
    severity="error or warning",
    why="A weight, an input of the loss or a product (in float16) is infinite or NaN, and so is all that follows.",
    fix="Look for the first such number: the finding of a step that was left out names it. If it is a weight, go back "
    "to a checkpoint from before; use bf16 instead of fp16.",
)
def non_finite(history: MetricHistory) -> Evidence | None:
    """A loss, a gradient or a weight is not a number."""
    now = history.steps[-1].values
    names = ("loss", "grad_norm", "health/update_ratio", "health/logp_gap_mean")
    bad = [name for name in names if not np.isfinite(now.get(name, 0.0))]
    # A mean over the trained tokens is NaN where all groups were flat, so that there were none.
    if np.isinf(now.get("kl", 0.0)) or (np.isnan(now.get("kl", 0.0)) and np.isfinite(now.get("entropy", np.nan))):
        bad.append("kl")
    if not bad:
        return None
    again = sum(not np.isfinite(step.values.get(bad[0], 0.0)) for step in history.steps[-3:])
    ruined = "health/update_ratio" in bad
    end = ", and weights with it." if ruined else "."
    return Evidence(
        f"{', '.join(bad)} not finite in step {history.step}{end}",
        severity="error" if ruined or again > 1 else "warning",
    )


@detector(
    "M132",
    10,
    "KL divergence from the reference in nats a token, median of the last 3 steps",
    "over 0.5; or over 0.2, 4 times the 3 before them and with z over 2 in the last 8, after 6 steps",
    why="Steps are too large for beta to hold the policy back; beyond 0.5 it no longer writes as it was taught.",
)
def kl_explodes(history: MetricHistory) -> Evidence | None:
    """The policy runs away from the reference."""
    kl = history.series("kl")
    if len(kl) < 3:
        return None
    now = float(np.nanmedian(kl[-3:])) if np.isfinite(kl[-3:]).any() else np.nan  # single steps spike in healthy runs
    rising = len(kl) >= 6 and now > 0.2 and now > 4 * mean(kl[-6:-3]) and trend(kl[-8:]) > 2
    if not (now > 0.5 or rising):
        return None
    changes = {**history.settings.slower(10), "max_grad_norm": 0.2}
    return Evidence(
        f"KL divergence from the reference is {now:.2f} nats a token; at first it was {mean(kl[:2]):.3f}.",
        fix=f"{slowed(changes, 10)}; or raise beta (now {history.settings.beta or 0:g}).",
        changes=changes,
    )


@detector(
    "M133",
    46,
    "share of clipped token ratios, mean of 3 steps",
    "over 0.3",
    why="The policy moves far while one round is trained on, and clipped tokens carry no gradient.",
)
def clips_much(history: MetricHistory) -> Evidence | None:
    """A large share of ratios is clipped."""
    share = mean(history.numbers("clip_ratio/region_mean", 3))
    if not share > 0.3:
        return None
    changes = history.settings.slower(3)
    return Evidence(
        f"{percent(share)} of token ratios are clipped, over 3 steps.",
        fix=f"{slowed(changes, 3)}; or lower num_iterations or steps_per_generation.",
        changes=changes,
    )


@detector(
    "M134",
    72,
    "gradient norm",
    "over 10 times the median, after 12 steps; a warning where it is so in 3 of the last 20",
    severity="note or warning",
    why="Single rollouts with very unlikely tokens, or few groups with signal, make steps of random size.",
)
def gradient_spikes(history: MetricHistory) -> Evidence | None:
    """Gradients now and then are many times the usual."""
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
    return Evidence(
        f"Gradient norm {recent.max():.3g} against a median of {usual:.3g}; {spikes} of the last {len(recent)} steps "
        "over ten times it.",
        fix=f"Set {as_lines(changes)}; more prompts a step.",
        changes=changes,
        severity="warning" if spikes >= 3 else "note",
    )


@detector(
    "M135",
    5,
    "difference in nats of log-probabilities in sampling and in training, mean of 2 or 3 steps",
    "over 0.1",
    why="The sampler has other weights, precision or template than the trainer, so gradients are biased.",
)
def sampler_disagrees(history: MetricHistory) -> Evidence | None:
    """Sampling and training compute different log-probabilities for the same weights."""
    served = history.series("sampling/sampling_logp_difference/mean", last=3)
    own = history.series("health/logp_gap_mean", last=3)
    gap = own if len(own) else served
    if len(gap) < 2 or not mean(gap) > APART:
        return None
    settings = history.settings
    what = f"Log-probabilities of sampled tokens differ by {mean(gap):.2f} nats between sampling and training."
    if settings.rollout_func:
        return Evidence(what, fix=OF_THESE_IDS)
    if settings.dropout and not len(served):
        why = (
            f"Dropout, of up to {settings.dropout:.2g}, is on in training and off in sampling: gradients are those of "
            "another model than the one that sampled."
        )
        return Evidence(what, why=why, fix="Set disable_dropout: true.", changes={"disable_dropout": True})
    changes: dict[str, Any] = {"use_vllm": False} if len(served) else {"rollout_engine": "live"}
    fix = (
        f"Set {as_lines(changes)}, so that the trained weights sample; or keep one precision for both, and refresh a "
        "served model in each step."
    )
    return Evidence(what, fix=fix, changes=changes)


def _rate(rate: float) -> dict[str, Any]:
    """A learning rate of one digit, as changes; empty for one that is no number."""
    return {"learning_rate": float(f"{rate:.0e}")} if np.isfinite(rate) and rate > 0 else {}


@detector(
    "M136",
    12,
    "change of the weights in one of the last 50 steps, relative to their size, after 2 steps",
    "from 0.006 on; adapters: from 0.08 on",
    why="Such steps overwrite what the model knows faster than rewards can tell what to keep.",
)
def steps_too_large(history: MetricHistory) -> Evidence | None:
    """A step changes the weights by a large share of themselves."""
    moved = history.series("health/update_ratio", last=50)
    rates = history.series("learning_rate", last=50)
    much = TOO_FAR[history.settings.adapter]
    if len(moved) < 2 or not np.isfinite(moved).any() or np.nanmax(moved) < much:
        return None
    size = float(np.nanmax(moved))
    rate = float(np.nanmax(rates)) if np.isfinite(rates).any() else np.nan
    flat = history.series("frac_reward_zero_std")
    ruined = mean(flat[-3:]) > 0.95 and flat[0] < 0.9
    end = "since then all groups have equal rewards" if ruined else f"{100 * much:.1f} % is much"
    changes = _rate(rate * much / size / 10)
    return Evidence(
        f"One step changed the weights by {100 * size:.1f} % of their size, at learning rate {rate:.1e}; {end}.",
        fix=f"Set {as_lines(changes) or 'a lower learning_rate'}.",
        changes=changes,
    )


@detector(
    "M137",
    14,
    "the same, median of the last 20 steps with 0.5 of the highest learning rate or more",
    "below 5e-7; adapters: below 5e-6; after 4 such steps",
)
def steps_too_small(history: MetricHistory) -> Evidence | None:
    """Steps change the weights by next to nothing."""
    little = TOO_LITTLE[history.settings.adapter]
    rate = float(np.fmax.reduce(history.series("learning_rate"), initial=0.0))
    moved: list[float] = []
    for row in (step.values for step in reversed(history.steps)):
        if row.get("grad_norm", 1.0) > 0 and row.get("learning_rate", np.nan) >= 0.5 * rate:
            moved += [row["health/update_ratio"]] if "health/update_ratio" in row else []
        if len(moved) == 20:
            break
    if len(moved) < 4 or rate <= 0 or not 0 < np.median(moved) < little:
        return None
    size = float(np.median(moved))
    what = f"Each step changes the weights by {size:.1e} of their size, at learning rate {rate:.1e}"
    changes = _rate(rate * 100 * little / size)
    share = mean(history.series("health/moved_share", last=10))
    if share < 0.5:
        return Evidence(
            f"{what}; only {percent(share)} of weights change at all.",
            why="The weights' precision swallows such updates.",
            fix=f"Set {as_lines(changes)}; keep trained weights in float32.",
            changes=changes,
        )
    why = "At this pace a thousand steps change the weights by less than a thousandth part: the run goes nowhere."
    return Evidence(f"{what}.", why=why, fix=f"Set {as_lines(changes)}.", changes=changes)


@detector(
    "M138",
    2,
    "weights that a step changes",
    "none in 3 of the last 8 steps that had signal; an error where there was a gradient, in weights that are not in "
    "half precision",
    severity="error or warning",
    fix="Let the trainer make the optimizer (leave out `optimizers`); check requires_grad.",
)
def weights_frozen(history: MetricHistory) -> Evidence | None:
    """There are gradients, but no weight moves."""
    rows = [step.values for step in history.steps[-8:]]
    rows = [row for row in rows if row.get("learning_rate", 0) > 0 and "health/moved_share" in row]
    signal = [row for row in rows if row.get("frac_reward_zero_std", 0.0) < 1 and not _all_masked(row, history)]
    if len(signal) < 3 or any(row["health/moved_share"] > 0 for row in signal):
        return None
    norm = mean(np.array([row.get("grad_norm", np.nan) for row in signal]))
    name = "adapter" if history.settings.adapter else "weights"
    what = f"The {name} did not move in {len(signal)} steps with signal in their groups (gradient norm {norm:.3g})."
    if not norm > 0:  # nothing had to move
        return Evidence(what, why="No gradient arrives: parameters or activations are cut off.")
    if history.settings.rounds:
        changes = {"model_init_kwargs": {"dtype": "float32"}}
        return Evidence(
            what,
            why="In half precision a change that is small beside its weight is rounded away. Or the optimizer holds "
            "other parameters than the model trains.",
            fix=f"Set {as_lines(changes)}, or a higher learning_rate; if nothing moves then, leave out `optimizers`.",
            changes=changes,
        )
    why = (
        "The optimizer holds other parameters than the model trains (it was made before the adapter was added), or "
        "gradients are stopped on their way."
    )
    return Evidence(what, why=why, severity="error")


def _all_masked(row: Mapping[str, float], history: MetricHistory) -> bool:
    """Whether a step had no gradient as all its completions were cut off, and `mask_truncated_completions` is on."""
    masks = history.settings.present.get("mask_truncated_completions", True)  # unknown: it may be
    return bool(masks) and row.get("completions/clipped_ratio") == 1 and row.get("grad_norm") == 0


@detector(
    "M139",
    62,
    "learning rate of an adapter",
    "below 8e-6, after 3 steps",
    why="Adapters need about ten times the rate of full fine-tuning: few weights do the work.",
)
def adapter_rate_low(history: MetricHistory) -> Evidence | None:
    """A learning rate for full fine-tuning, with an adapter."""
    rate = history.settings.learning_rate
    if not history.settings.adapter or rate is None or not 0 < rate < 8e-6 or len(history.steps) < 3:
        return None
    changes = _rate(usual_rate(history.settings.num_parameters, adapter=True))
    return Evidence(
        f"learning_rate is {rate:.1e} with a LoRA adapter.", fix=f"Set {as_lines(changes)}.", changes=changes
    )


# ---- what form have its texts? ----


@detector(
    "M141",
    24,
    "share of completions that are cut off",
    "over 0.6 in each of 3 steps; no larger limit where they get 0.5 of the range of rewards or more",
    fix="First what M158, M159 or M160 says of it: more tokens would be filled in the same way.",
)
def truncated(history: MetricHistory) -> Evidence | None:
    """Completions are cut off at the limit, which is raised unless more room would be filled in the same way."""
    shares = history.numbers("completions/clipped_ratio", 3)
    if not min(shares, default=0.0) > 0.6:
        return None
    limit = history.settings.max_completion_length
    where = f"max_completion_length: {limit}" if limit else "the limit"
    what = f"{percent(mean(shares))} of completions are cut off at {where}, over 3 steps"
    if pays_for_length(history) is not None or length_grows(history) is not None:
        fix = "First what M152 or M142 says of it: more tokens would be filled in the same way."
        return Evidence(f"{what}.", why="Length is paid, so completions run on to the limit.", fix=fix)
    if _cut_off_is_paid(history):
        fix = "Give less to a completion without its end: with more room it would run on, too."
        return Evidence(f"{what}, and paid as the best are.", why="Nothing rewards an end.", fix=fix)
    doubt = doubt_about(history)
    if doubt:
        return Evidence(f"{what}. {doubt}.", why="Running on is paid.")
    if entropy_explodes(history) is not None:
        fix = "Set what M126 names: a policy of noise does not end its text, however long it may be."
        return Evidence(f"{what}.", why="The policy dissolves into noise.", fix=fix)
    why = "A completion without its end rarely gets a reward, so the policy is told that nothing it writes is good."
    if limit is not None and limit <= 8:
        why = f"{why} So few tokens hold no answer."
    changes = {"max_completion_length": 4 * limit if limit else 1024}
    fix = f"Set {as_lines(changes)}; see mask_truncated_completions."
    return Evidence(f"{what}.", why=why, fix=fix, changes=changes)


def _cut_off_is_paid(history: MetricHistory) -> bool:
    """Whether completions that are cut off have a reward in the upper half of all so far."""
    low, high = history.extremes
    cut = [view.reward_PG[view.truncated_PG] for view in history.rounds[-3:]]
    return high - low > FLAT and mean(np.concatenate(cut or [np.zeros(0)])) >= low + 0.5 * (high - low)


@detector(
    "M142",
    44,
    "length in tokens, mean of the last 3 steps, and its correlation with the reward within groups of 6 rounds",
    "1.5 times that of the first 3 and 16 tokens more, the correlation from 0.5 on, after 10 steps",
    why="Where longer means better paid, the policy learns to write more, not better.",
    fix="Take length out of the reward, add a length penalty beyond what answers need, or set "
    f"{as_lines(NO_LENGTH_BIAS)}.",
)
def length_grows(history: MetricHistory) -> Evidence | None:
    """Completions become longer and longer, and longer ones are paid more."""
    if history.rounds:
        length = history.pooled(lambda view: view.within(view.tokens_PG), last=6)
        reward = history.pooled(lambda view: view.within(view.reward_PG), last=6)
    else:
        length = history.series("completions/mean_length")
        reward = history.series("reward")
    count = min(len(length), len(reward))
    pays = correlation(length[len(length) - count :], reward[len(reward) - count :])
    early, late = history.change("completions/mean_length", 3, least=10)
    if not (late >= 1.5 * early and late >= early + 16 and pays >= 0.5):
        return None
    return Evidence(
        f"Completions grew from {early:.0f} to {late:.0f} tokens, and length is paid: correlation {pays:.2f} with the "
        "reward.",
        changes=NO_LENGTH_BIAS,
    )


@detector(
    "M144",
    28,
    "share of empty completions",
    "from 0.2 on in each of 3 rounds",
    why="The model ends at once: the chat template already closes the turn, or saying nothing is paid best.",
    fix="Look at a prompt's end (`podium sample RECIPE`); give empty completions less than wrong ones.",
)
def empty(history: MetricHistory) -> Evidence | None:
    """Completions without text."""
    shares = history.shares(lambda view: float(np.mean([not text.strip() for text in view.texts])), 3)
    if min(shares, default=0.0) < 0.2:
        return None
    return Evidence(f"{percent(float(np.mean(shares)))} of completions are empty, over {len(shares)} rounds.")


@detector(
    "M146",
    18,
    "values of a reward for format",
    "all 0 for 64 completions or more, after 4 rounds",
)
def format_ignored(history: MetricHistory) -> Evidence | None:
    """A reward for the format is silent; completions have another one, or none."""
    for k, name in enumerate(history.names_K if len(history.rounds) >= 4 else ()):
        values = history.rewards(k)
        if names_one_of(FORMAT_WORDS, name) and len(values) >= 64 and np.abs(values).max() <= FLAT:
            return _no_format(history, name, len(values))
    return None


def _no_format(history: MetricHistory, name: str, count: int) -> Evidence:
    """The evidence about a silent reward, by the tags that completions have instead."""
    total = sum(len(view.texts) for view in history.rounds)
    counts: Counter[str] = sum((view.tags for view in history.rounds), Counter())
    seen = some([f"{tag} in {percent(number / total)}" for tag, number in counts.most_common(3)])
    if looks_misspelt(history, name):
        return Evidence(
            f"{name} gave 0 to all of {count} completions, although they do have tags: {seen}.",
            why="The tag in the reward's pattern is spelt otherwise than in the prompt.",
            fix=f"Compare the pattern in {name} with the tags above, letter by letter.",
        )
    changes = history.settings.more_examples()
    more = f", with worked examples ({as_lines(changes)})" if changes else ""
    few = f": {seen}" if seen else ""
    return Evidence(
        f"{name} gave 0 to all of {count} completions; few have any tag{few}.",
        why="The model does not know the format, so it never gets the reward that would teach it.",
        fix=f"Show the format in the system prompt{more}; partial credit for each tag.",
        changes=changes,
    )


# ---- what does the machine do? ----


@detector(
    "M161",
    56,
    "memory of the process or the device, after 4 steps, in the last 8 to 40",
    "rises with z over 2.6, by over 4 standard errors of its slope, by over 0.06 of itself and by over 4e6 bytes a "
    "step",
    why="Something keeps what each step makes: a reward function or callback that appends to a list, tensors that are "
    "stored with their graph.",
    fix="Look for lists that grow in rewards and callbacks; store numbers (`float(x)`), not tensors.",
)
def memory_creeps(history: MetricHistory) -> Evidence | None:
    """Memory grows with every step."""
    for name, where in (("health/resident_bytes", "the process"), ("health/device_bytes", "the device")):
        used = history.series(name)[WARM_UP:][-40:]
        if len(used) < 8:
            continue
        per_step, certainty = slope(used)
        grown = per_step * (len(used) - 1)
        # Allocators give back and take again by hundreds of megabytes, so the rise has to be large and sure.
        if trend(used) > 2.6 and certainty > 4 and grown > 0.06 * used[0] and per_step > 4e6:
            return Evidence(
                f"Memory of {where} grows by {per_step / 1e6:.0f} MB a step: by {grown / 1e9:.2f} to "
                f"{used[-1] / 1e9:.2f} GB in {len(used)} steps."
            )
    return None


@detector(
    "M163",
    58,
    "share of the step in reward functions, median of the last 5 steps with 3 known",
    "over 0.4, and 0.2 s a round",
    why="They call something slow (a model, a sandbox, the network, `sleep`) one completion after the other.",
    fix="Write the function with `async def`, score all completions in one call, or cache answers that repeat.",
)
def slow_reward(history: MetricHistory) -> Evidence | None:
    """Most of a step is spent in reward functions."""
    rows = [step.values for step in history.steps[-5:]]
    timed = [row for row in rows if "time/reward_seconds" in row and row.get("step_time", 0) > 0]
    seconds = mean(history.series("time/reward_seconds", last=5))
    if len(timed) < 3 or seconds < 0.2:
        return None
    share = float(np.median([row["time/reward_seconds"] / row["step_time"] for row in timed]))
    if not share > 0.4:
        return None
    by_name = {name: x for name, x in rows[-1].items() if name.startswith("time/reward/")}
    most = ""
    if by_name:
        slowest = max(by_name, key=lambda name: by_name[name])
        name = slowest.removeprefix("time/reward/").removesuffix("_seconds")
        most = f", most of it {name} ({by_name[slowest]:.1f} s)"
    return Evidence(f"Reward functions take {percent(share)} of a step: {seconds:.1f} s each round{most}.")
