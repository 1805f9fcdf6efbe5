"""Does the policy still try different things? Spread, duplicates, entropy, repetition."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from podium.algorithm.advantages import FLAT
from podium.errors import Finding
from podium.errors.texts import as_line, as_lines
from podium.runs.monitors.detection import mean, percent, slowed
from podium.runs.monitors.history import COLD, LOW_ENTROPY, MetricHistory, RoundView, duplicate_share
from podium.runs.monitors.signs import MOST_LABELS, doubt_about, plain

_TAG = re.compile(r"</?[A-Za-z][\w-]*>")
MOSTLY = 0.67
"""Share of the range of rewards from which on a policy that is sure is so for a good reason."""
SHORT = 4
"""Tokens, the last one included, up to which equal completions are no evidence of how they were sampled."""


def spread_vanishes(history: MetricHistory) -> Finding | None:
    """M121: the deviation of rewards goes to zero."""
    early, late = history.change("reward_std", 5, least=12)
    if not (early > FLAT and late <= 0.1 * early):
        return None
    reward_early, reward_late = history.change("reward", 5)
    low, high = history.extremes
    high_now = reward_late > reward_early and not reward_late < high - 0.2 * (high - low)
    right = [history.right_PG(view) for view in history.rounds[-5:]]
    known = [float(np.nanmean(x)) for x in right if x is not None and np.isfinite(x).any()]
    judged = len(known) == len(right) > 0
    doubt = doubt_about(history) if high_now else ""
    solved = high_now and judged and float(np.mean(known)) >= 0.5 and not doubt
    unknown = high_now and not judged and not doubt
    changes: dict[str, Any] = {}
    fix = "Read completions (`podium sample RECIPE`); then use harder prompts, or mend the reward."
    if solved:
        why = (
            f"By the reward that tells right from wrong, {percent(float(np.mean(known)))} of completions of the last "
            f"{len(known)} rounds are right."
        )
        fix = "Use harder prompts."
    elif unknown:
        why = (
            "The highest reward is reached: the prompts are solved, or the reward has been outwitted; no reward tells "
            "right from wrong."
        )
    elif doubt:
        why = f"The reward may be hacked. {doubt}."
    else:
        why = "Completions have become alike before they became good."
        changes = {**history.settings.slower(3), **_sampling_cure(history)}
        fix = f"Set {as_lines(changes)}." if changes else "Lower learning_rate; raise temperature or epsilon_high."
    return Finding(
        code="M121",
        severity="note" if solved or unknown else "warning",
        what=f"reward_std fell from {early:.3f} to {late:.3f}, while the reward went from {reward_early:.3f} to "
        f"{reward_late:.3f}.",
        why=why,
        fix=fix,
        changes=changes,
    )


def _sampling_cure(history: MetricHistory) -> dict[str, Any]:
    return history.settings.tempered(mean(history.series("entropy", last=3)))


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
    return bool(np.mean([plain(_TAG.sub(" ", text)) in labels for text in texts_G]) >= 0.5)


def _few_answers(history: MetricHistory) -> frozenset[str]:
    """The answers of all rows of the latest rounds, where they are few and some rows share one; else nothing."""
    answers = [plain(answer) for view in history.rounds for answer in view.answers_P if answer]
    return frozenset(answers) if 0 < len(set(answers)) <= min(MOST_LABELS, len(answers) / 2) else frozenset()


def duplicates(history: MetricHistory) -> Finding | None:
    """M122: the completions of a group say the same."""
    _, top = history.extremes
    labels = _few_answers(history)
    shares = [duplicates_of(view, top, labels) for view in history.rounds[-3:]]
    if len(shares) < 3 or min(shares) < 0.85:
        return None
    reward_early, reward_late = history.change("reward", 3)
    better = reward_late > reward_early + 1e-6
    share = float(np.mean(shares))
    entropy = mean(history.series("entropy", last=3))
    narrowed = history.settings.narrowed
    sampled = entropy > LOW_ENTROPY  # a policy that is unsure, and yet always says the same
    changes: dict[str, Any] = dict.fromkeys(narrowed)
    if not narrowed:
        changes = _sampling_cure(history) if sampled else {**_sampling_cure(history), **history.settings.slower(3)}
    if narrowed:
        lines = ", ".join(as_line(*each) for each in narrowed.items())
        fix = f"Remove {lines} from the settings and generation_kwargs."
    elif changes:
        fix = f"Set {as_lines(changes)}."
    elif sampled:
        fix = "Read completions (`podium sample RECIPE`): more different prompts, or longer answers."
    else:
        fix = "Raise temperature, lower learning_rate, or go back to an earlier checkpoint."
    return Finding(
        code="M122",
        severity="note" if better else "warning",
        what=f"{percent(share)} of completions repeat another of their group, over {len(shares)} rounds"
        + (f", although the policy is unsure (entropy {entropy:.2f} nats a token)." if sampled else "."),
        why="Completions are not sampled but chosen: the likeliest token, or one random number for all."
        if sampled
        else "The policy has become so sure that sampling finds one text only.",
        fix=fix,
        changes=changes,
    )


def too_cold(history: MetricHistory) -> Finding | None:
    """M123: the temperature is too low to sample different completions."""
    temperature = history.settings.temperature
    if temperature is None or temperature > COLD or len(history.rounds) < 2:
        return None
    same = float(np.mean([duplicate_share(view.texts_PG) for view in history.rounds[-3:]]))
    flat = mean(history.series("frac_reward_zero_std", last=3))
    if same < 0.4 and not flat > 0.5:
        return None
    return Finding(
        code="M123",
        severity="warning",
        what=f"At temperature {temperature:g}, {percent(same)} of completions repeat another of their group, and "
        f"{percent(flat)} of groups have equal rewards.",
        why="Below about 0.3 nearly always the likeliest token is drawn, so there is nothing to compare.",
        fix="Set temperature: 1.0. For sharper answers after training, lower it when generating, not when training.",
        changes={"temperature": 1.0},
    )


def entropy_collapse(history: MetricHistory) -> Finding | None:
    """M124: the policy has almost stopped exploring, and what it has settled for is not the best there is."""
    early, late = history.change("entropy", 3, least=8)
    if not (late < 0.1 * early and late < 0.15):
        return None
    reward_early, reward_late = history.change("reward", 3)
    low, high = history.extremes
    if reward_late > reward_early and reward_late - low > MOSTLY * (high - low):
        return None  # sure, and mostly right
    settings = history.settings
    changes = {**settings.slower(3), **({"epsilon_high": 0.28} if settings.clips else settings.tempered(late))}
    return Finding(
        code="M124",
        severity="warning" if reward_late <= reward_early else "note",
        what=f"Entropy fell from {early:.2f} to {late:.3f} nats a token, while the reward went from {reward_early:.3f} "
        f"to {reward_late:.3f}.",
        why="A policy that is sure writes the same again and again: equal rewards, no advantage, no learning.",
        fix=f"{slowed(changes, 3)}; next entropy_coef: 0.001.",
        changes=changes,
    )


def entropy_explodes(history: MetricHistory) -> Finding | None:
    """M126: the policy dissolves into noise."""
    early, late = history.change("entropy", 2, least=4)
    if not late > 1.5 * early + 1.5:
        return None
    changes = {**history.settings.slower(10), "max_grad_norm": 0.2, **history.settings.tempered(late)}
    return Finding(
        code="M126",
        severity="warning",
        what=f"Entropy rose from {early:.2f} to {late:.2f} nats a token (as of {np.exp(late):,.0f} equal tokens).",
        why="Steps are too large: the model forgets how to write.",
        fix=f"{slowed(changes, 10)}; next beta: 0.04.",
        changes=changes,
    )


def repetition(history: MetricHistory) -> Finding | None:
    """M125: completions go round in circles."""
    rounds = history.rounds
    if len(rounds) < 3:
        return None
    late, early = (float(np.mean([view.repetition for view in part])) for part in (rounds[-3:], rounds[:3]))
    if late < 0.4:
        return None
    changes = history.settings.slower(3)
    return Finding(
        code="M125",
        severity="warning",
        what=f"{percent(late)} of four-word sequences repeat in their completion ({percent(early)} at first).",
        why="The policy loops: long texts are rewarded, or it has been damaged by large steps.",
        fix=f"{slowed(changes, 3)}; add a repetition penalty reward.",
        changes=changes,
    )
