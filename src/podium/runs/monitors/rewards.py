"""Do the rewards teach what is wanted? Groups without spread, rewards that say nothing, rewards that are hacked."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from podium.algorithm.advantages import FLAT
from podium.errors.texts import as_lines, counted
from podium.runs.monitors.detection import (
    HACKED,
    PLANTED,
    Evidence,
    correlation,
    detector,
    ends,
    mean,
    percent,
    slowed,
    some,
    trend,
    tried_by,
)
from podium.runs.monitors.history import MetricHistory, RoundView
from podium.runs.monitors.signs import (
    CONSTANT,
    LEAST_WORDS,
    SAME_TASK,
    Kind,
    Sign,
    commonest_text,
    copies,
    doubt_about,
    rows_of,
    signs_in_training,
    words_of,
)

ENOUGH = 200
"""Completions after which a reward that has never fired is no accident: 2 % would have shown in 98 runs of 100."""
MISSED = 0.05
"""Share of completions with the right answer in them, from which on it is no accident that all got 0."""
UNEARNED = 0.5
SOLVED = 0.75
"""Shares of flat groups: paid without their row's answer, from which on this is what is wrong; all right, from which on
their flatness is a success."""
MISSPELT = 0.1
"""Share of completions with one tag from which on it is meant, and not a word between angle brackets."""
FORMAT_WORDS = ("format", "tag", "xml", "boxed", "structure")
ANSWER_WORDS = ("correct", "accura", "match", "answer", "solution", "right")
WORDS = re.compile(r"[^\W\d_]{2,}")
LEAST_GROUPS = 8
LEAST_LENGTHS = 4
"""Groups, and different lengths in each, before length is held against a reward: in a group of equals, one odd
completion makes any correlation."""
LEAST_EQUALS = 8
"""Texts that occur more than once, before rewards are called unstable."""


# ---- is there anything to learn from? ----


@detector(
    "M101",
    80,
    "share of groups whose rewards are all equal, mean of the last 5 steps",
    "from 0.8 on, after 3 steps; a note where 0.75 of these groups are right, by at least 0.5 of their completions; "
    "another message where 0.5 of them are paid without it",
    severity="note or warning",
    why="An advantage compares completions of one prompt: where all are equal, nothing is learnt.",
)
def no_signal(history: MetricHistory) -> Evidence | None:
    """Groups of equal rewards: the message depends on what the flat groups have in common."""
    shares = history.numbers("frac_reward_zero_std", 5, least=3)
    flat = mean(shares)
    if not flat >= 0.8:
        return None
    counts = [(~np.isnan(reward_G)).sum() for view in history.rounds[-5:] for reward_G in view.reward_PG]
    alone = float(np.mean([count < 2 for count in counts])) if counts else 0.0
    if alone >= 0.5 * flat:
        return Evidence(
            f"In {percent(alone)} of groups fewer than two completions have a reward, over {len(shares)} steps.",
            why="An advantage compares completions of one prompt: with one reward or none, nothing is learnt.",
            fix="Return a number for every completion: None means that a function has nothing to say of it.",
        )
    unearned = _unearned(history)
    if unearned >= UNEARNED:
        return Evidence(
            f"In {percent(flat)} of groups all rewards are equal, over {len(shares)} steps: {percent(unearned)} of "
            "these are paid as the best are, without their row's answer.",
            why="What is paid for is not the answer, and all completions have it: nothing is left to learn.",
            fix="Read completions (`podium sample RECIPE -n 4`); let the reward compare with the row's answer. M152, "
            "M153 and M158 to M160 say what else may be paid for.",
        )
    wrong, right, known = _split(history)
    doubt = doubt_about(history) if right else ""
    known = known and not doubt
    names = ("all wrong", "all right") if known or not right else ("low", "high, as rewards go here")
    parts = [f"{percent(x)} {name}" for x, name in zip((wrong, right), names, strict=True) if x > 0]
    split = f" ({', '.join(parts)})" if parts else ""
    if doubt:
        split = f"{split}. {doubt}"
    fix, changes = _cure_of_flat_groups(history, doubt=bool(doubt), is_high=right > wrong, is_known=known)
    return Evidence(
        f"In {percent(flat)} of groups all rewards are equal{split}, over {len(shares)} steps.",
        fix=fix,
        changes=changes,
        severity="warning" if right < SOLVED or doubt else "note",
    )


def _cure_of_flat_groups(
    history: MetricHistory, *, doubt: bool, is_high: bool, is_known: bool
) -> tuple[str, dict[str, Any]]:
    """The fix, and its changes."""
    if doubt:
        return "first what M158, M159 or M160 says of it", {}
    replaced = "dynamic_sampling: true replaces such groups."
    if is_high:
        harder = "use harder prompts, or end runs here (`on_finding: {M101: stop}`) if the rest is not worth the time"
        read = "" if is_known else "first read completions: is it earned?; "
        return f"{harder}; {read}{replaced}", {"on_finding": {"M101": "stop"}}
    entropy = mean(history.series("entropy", last=5))
    changes = {**history.settings.more_examples(), **history.settings.tempered(entropy)}
    easier = "give partial credit in the reward, use easier prompts or a stronger model, or raise num_generations"
    return "; ".join(filter(None, (as_lines(changes), easier, replaced))), changes


def _unearned(history: MetricHistory) -> float:
    """Share of flat groups with a reward in the upper half of all so far, and without their row's answer."""
    low, high = history.extremes
    if not high - low > FLAT:
        return 0.0
    found = []
    for view in history.rounds[-5:]:
        right_PG = history.right_PG(view)
        answered_PG = view.contains_answer_PG if right_PG is None else right_PG
        top_P = view.reward_PG[view.is_flat_P].mean(axis=1) >= (low + high) / 2
        found += (top_P & (answered_PG[view.is_flat_P].mean(axis=1) < 0.5)).tolist()
    return float(np.mean(found)) if found else 0.0


def _split(history: MetricHistory) -> tuple[float, float, bool]:
    """Shares of flat groups that are wrong and right, and whether a reward that tells right from wrong says so.

    Without one the lower and the upper half of all rewards so far stand for wrong and right, and what does not contain
    its row's answer is wrong.
    """
    rounds = history.rounds[-5:]
    low, high = history.extremes
    rewards = [x for view in rounds for x in np.nanmean(view.reward_PG[view.is_flat_P], axis=1)]
    if not rewards or not np.isfinite(low):
        return 0.0, 0.0, False
    judged_PG = [history.right_PG(view) for view in rounds]
    shares = [
        x
        for view, right_PG in zip(rounds, judged_PG, strict=True)
        if right_PG is not None
        for x in np.nanmean(right_PG[view.is_flat_P], axis=1)
    ]
    if len(shares) == len(rewards) and np.isfinite(shares).all():
        right = float(np.mean(np.asarray(shares) >= 0.5))
        return 1 - right, right, True
    if high - low <= FLAT:  # nothing to compare with: only zeros can be called wrong
        return float(high == 0), 0.0, False
    answered = [x for view in rounds for x in view.contains_answer_PG[view.is_flat_P].mean(axis=1)]
    top = [x >= (low + high) / 2 for x in rewards]
    right = float(np.mean([above and not x < 0.5 for above, x in zip(top, answered, strict=True)]))
    return 1 - right, right, False


@detector(
    "M102",
    22,
    "values of a reward function, never 0",
    "all equal in 3 rounds, where it is the only function or all are so; beside others from 200 completions on",
    why="A reward that is the same whatever the model writes prefers nothing, so its advantages are all zero.",
    fix="Score a few different texts by hand: `podium sample RECIPE -n 4` shows each completion with each reward.",
)
def constant_reward(history: MetricHistory) -> Evidence | None:
    """One number for all completions; what gave another in an earlier step has been learnt, which is no fault."""
    same: dict[str, np.ndarray] = {}
    for k, name in enumerate(history.names_K):
        x = history.rewards(k)
        means = history.series(f"rewards/{name}/mean")
        if len(x) and np.ptp(x) <= FLAT < abs(x[0]) and not (np.abs(means - x[0]) > 1e-6).any():
            same[name] = x
    if not _is_enough(history, same):
        return None
    values = some([f"{name} = {x[0]:.4g}" for name, x in same.items()])
    return Evidence(f"Constant reward: {values} for all of {len(next(iter(same.values())))} completions.")


def _is_enough(history: MetricHistory, same: dict[str, np.ndarray]) -> bool:
    """Whether these rewards have given one value for so long that it is no accident."""
    if len(history.rounds) < 3 or not same:
        return False
    return len(same) == len(history.names_K) or min(map(len, same.values())) >= ENOUGH


@detector(
    "M103",
    32,
    "values of a reward function",
    "all 0 in 3 rounds, where it is the only function or all are so; beside others from 200 completions on; not a "
    "reward for format where 0.1 of completions have one tag (M146)",
)
def silent_reward(history: MetricHistory) -> Evidence | None:
    """Zeros alone: right answers are missed, or there are none."""
    values = {name: history.rewards(k) for k, name in enumerate(history.names_K)}
    silent = {name: x for name, x in values.items() if len(x) and not x.any() and not looks_misspelt(history, name)}
    if not _is_enough(history, silent):
        return None
    contains = history.pooled(lambda view: view.contains_answer_PG)
    right = int(np.nansum(contains))
    what = f"Never fired: {some(list(silent))} gave 0 to all of {len(next(iter(silent.values())))} completions"
    if len(silent) == len(values) and right >= max(3, MISSED * len(contains)):
        return Evidence(
            f"{what}, although {right} contain their row's answer.",
            why="The function does not accept right answers: white space, a form that it wants, another column.",
            fix=f"{tried_by(history.settings, silent)} A reward of the library reads the answer in one place: ask for "
            "it in `system`, or name the place with `extract` (docs/rewards.md).",
        )
    changes = history.settings.more_examples()
    more = f"worked examples in the prompt ({as_lines(changes)}), " if changes else ""
    return Evidence(
        f"{what}.",
        why="Either the model cannot do it yet, or the function looks for something that completions never contain.",
        fix=f"Compare a completion with what the function looks for (`podium sample RECIPE -n 4`); {more}partial "
        "credit, or easier prompts.",
        changes=changes,
    )


def looks_misspelt(history: MetricHistory, name: str) -> bool:
    """Whether a silent reward is about format, while some completions do have tags: one in ten, the same tag."""
    tags: Counter[str] = sum((view.tags for view in history.rounds), Counter())
    most = max(tags.values(), default=0) / max(sum(len(view.texts) for view in history.rounds), 1)
    return names_one_of(FORMAT_WORDS, name) and most >= MISSPELT


def names_one_of(words: Sequence[str], name: str) -> bool:
    """Whether a reward function's name contains one of these words."""
    return any(word in name.lower() for word in words)


@detector(
    "M104",
    90,
    "trend of the reward: Mann-Kendall's z",
    "up to 1.645 over the last 200 steps, and the change less than 0.5 deviations of the first 20 steps, after 40 "
    "steps; not where over 0.8 of groups are flat in the last 10; a note before step 80",
    severity="note or warning",
)
def reward_flat(history: MetricHistory) -> Evidence | None:
    """No trend in the reward since the start; a reward that falls is M111's."""
    reward = history.series("reward")
    flat = mean(history.series("frac_reward_zero_std", last=10))
    if len(reward) < 40 or flat > 0.8 or reward_falls(history) is not None:
        return None
    z = trend(reward[-200:])
    first, last, count = ends(reward)
    if abs(z) > 1.645 or abs(last - first) > 0.5 * float(np.nanstd(reward[:20])):
        return None
    signal = f"There is signal in {percent(1 - flat)} of groups, but steps are too small or too noisy to follow it."
    unknown = "Steps may be too small or too noisy; whether groups have any signal is not recorded."
    faster = history.settings.slower(1 / 3)
    changes = {**faster, **history.settings.larger_groups()}
    noise = (
        "More completions (num_generations) or more prompts a step make steps less noisy; whether the learning rate is "
        "too low or too high is not known here."
    )
    return Evidence(
        f"The reward does not rise: {first:.3f} in the first {count} steps, {last:.3f} in the last {count} of "
        f"{len(reward)}; Mann-Kendall z = {z:.1f}, a rise would be over 1.6.",
        why=unknown if np.isnan(flat) else signal,
        fix=f"Set {as_lines(changes)}; or more prompts a step." if faster else noise,
        changes=changes,
        severity="note" if len(reward) < 80 else "warning",
    )


@detector(
    "M105",
    92,
    "share of the variance within groups that comes from one reward of 2 or more",
    "from 0.98 on, after 12 rounds; rewards that reach 0.9 of their highest value in the last 4 are solved",
    severity="note",
    why="What hardly differs within groups is hardly learnt: the policy follows one reward alone.",
)
def one_reward_carries(history: MetricHistory) -> Evidence | None:
    """All differences within groups come from one of several rewards."""
    names = history.names_K
    if len(history.rounds) < 12 or len(names) < 2:
        return None
    live = [k for k, name in enumerate(names) if history.settings.weights.get(name, 1.0)]
    variance_K = np.array([np.nanvar(part) if np.isfinite(part).any() else 0.0 for part in _weighted(history)])
    total = variance_K.sum()
    top = int(variance_K.argmax())
    others = [names[k] for k in live if k != top and not _is_solved(history, k)]
    if len(live) < 2 or total <= 0 or variance_K[top] < 0.98 * total or not others:
        return None
    share = percent(variance_K[top] / total)
    return Evidence(
        f"{names[top]} makes {share} of differences within groups; {some(others)}: none.",
        fix=f"If {some(others)} should be learnt: partial credit, or multi_objective_aggregation: normalize_then_sum; "
        "a larger weight takes from the others.",
        changes={"multi_objective_aggregation": "normalize_then_sum"},
        severity="note",
    )


def _is_solved(history: MetricHistory, k: int) -> bool:
    """Whether a reward hardly differs because nearly all completions have its highest value."""
    values = history.rewards(k)
    return bool(len(values) and values.max() > 0 and np.mean(history.rewards(k, last=4)) >= 0.9 * values.max())


def _weighted(history: MetricHistory) -> list[np.ndarray]:
    """For each reward, the weighted distances to the group's mean over all rounds."""
    weights = history.settings.weights
    return [weights.get(name, 1.0) * history.rewards_within(k) for k, name in enumerate(history.names_K)]


@detector(
    "M107",
    7,
    "correlation within groups of a reward with holding the right answer",
    "below -0.2, and times the root of their number below -3.3, for 6 right completions; below -0.9 for 3, where the "
    "reward is named after answers; after 3 rounds",
    why="A minus sign is wrong: in the function, in its weight, or in a distance taken for a score.",
)
def flipped_reward(history: MetricHistory) -> Evidence | None:
    """Completions with the row's right answer get less than the others of their group."""
    if len(history.rounds) < 3:
        return None
    contains = history.pooled(lambda view: view.within(view.contains_answer_PG))
    telling = np.isfinite(contains) & (np.abs(contains) > FLAT)
    right = telling & (contains > 0)
    num_right = int(right.sum())
    if num_right < 3 or pays_for_length(history) is not None:  # right answers are short, and length is what is paid
        return None
    for name, reward, is_named in _about_answers(history):
        r = correlation(contains[telling], reward[telling])
        certain = num_right >= 6 and r < -0.2 and r * np.sqrt(telling.sum()) < -3.3
        if certain or (is_named and r < -0.9):
            gap = float(np.nanmean(reward[right]) - np.nanmean(reward[telling & ~right]))
            return Evidence(
                f"{name} punishes right answers: the {num_right} completions that contain their row's answer got "
                f"{gap:+.3f} against the others of their groups (correlation {r:.2f}).",
                fix=f"Flip the sign of {name} (in the function or in reward_weights).",
            )
    return None


def _about_answers(history: MetricHistory) -> list[tuple[str, np.ndarray, bool]]:
    """Rewards that are about answers by their names, and last the total, which may have reasons of its own."""
    found = [
        (name, part, True)
        for name, part in zip(history.names_K, _weighted(history), strict=True)
        if names_one_of(ANSWER_WORDS, name) and not names_one_of(FORMAT_WORDS, name)
    ]
    return [*found, ("The total reward", history.pooled(lambda view: view.within(view.reward_PG)), False)]


@detector(
    "M108",
    60,
    "share of one prompt in all advantages of a round of 4 prompts or more",
    "from 0.75 on in each of 5 rounds",
    why="The step follows a single prompt, which is as noisy as a batch of one.",
    fix="More prompts a step (per_device_train_batch_size), dynamic_sampling: true, or scale_rewards: group.",
)
def one_prompt_dominates(history: MetricHistory) -> Evidence | None:
    """Nearly all of the update comes from one prompt, step after step."""
    shares = []
    for view in history.rounds[-5:]:
        size_P = np.abs(view.advantages_PG).sum(axis=1)
        if len(size_P) >= 4 and size_P.sum() > 0:
            shares.append(float(size_P.max() / size_P.sum()))
    if len(shares) < 5 or min(shares) < 0.75:
        return None
    return Evidence(
        f"One prompt made {percent(min(shares))} or more of all advantages in {len(shares)} steps in a row.",
        changes={"dynamic_sampling": True},
    )


@detector(
    "M109",
    6,
    "share of different prompts among the drawn rows",
    "up to 0.5 of 8 rows or more, in the last 2 to 8 rounds; nothing where a program or an environment plays",
    why="The dataset holds the same prompt many times, or its prompt column does not vary.",
    fix="Look at the prompt column (`podium sample RECIPE`); remove duplicate rows.",
)
def repeated_prompt(history: MetricHistory) -> Evidence | None:
    """Different rows ask the same; not those of a program, an environment or `rollout_func`, which see more."""
    rounds = [view for view in history.rounds[-8:] if len(view.prompts_P) > 1]
    settings = history.settings
    if settings.agent or settings.environment or settings.rollout_func or any(view.is_played for view in rounds):
        return None
    drawn = [set(zip(view.rows_P, view.prompts_P, strict=True)) for view in rounds]
    rows = sum(len(pairs) for pairs in drawn)
    texts = sum(len({text for _, text in pairs}) for pairs in drawn)
    if len(rounds) < 2 or rows < 8 or texts > 0.5 * rows:
        return None
    different = {text for pairs in drawn for _, text in pairs}
    return Evidence(
        f"Prompts repeat: {rows} rows drawn in {len(rounds)} steps have only "
        f"{counted(len(different), 'different prompt')}."
    )


@detector(
    "M110",
    94,
    "share of prompts that always get the lowest reward, or always the highest",
    "from 0.25 of 8 prompts on that have 6 recorded extremes, two a visit",
    severity="note",
    why="Their groups have no spread, so the tokens spent on them teach nothing.",
    fix="Leave them out of the dataset, or set dynamic_sampling: true.",
)
def stuck_prompts(history: MetricHistory) -> Evidence | None:
    """Prompts that are always solved or never."""
    seen = {question: x for question, x in history.visits.items() if len(x) >= 6}
    low, high = history.extremes
    if len(seen) < 8 or high - low <= FLAT:
        return None
    never = [question for question, x in seen.items() if max(x) <= low + FLAT]
    always = [question for question, x in seen.items() if min(x) >= high - FLAT]
    if len(never) + len(always) < 0.25 * len(seen):
        return None
    examples = some([repr(question[-60:]) for question in [*never, *always]], 3)
    return Evidence(
        f"Of {len(seen)} prompts seen three times or more, {len(never)} never got more than the lowest reward and "
        f"{len(always)} always the highest, such as {examples}.",
        changes={"dynamic_sampling": True},
        severity="note",
    )


@detector(
    "M111",
    50,
    "trend of the reward: Mann-Kendall's z",
    "down to -2.6 over the last 40 steps, and a fall of 2 deviations of the step's change over the root of 3, after 8 "
    "steps",
    why="Steps are so large that the policy is damaged, or the weight of a reward has the wrong sign.",
)
def reward_falls(history: MetricHistory) -> Evidence | None:
    """The reward goes down."""
    reward = history.series("reward")
    if len(reward) < 8:
        return None
    z = trend(reward[-40:])
    first, last, count = ends(reward)
    if z > -2.6 or first - last < 2 * float(np.nanstd(np.diff(reward))) / np.sqrt(3):
        return None
    changes = history.settings.slower(10)
    return Evidence(
        f"The reward falls: {first:.3f} in the first {count} steps, {last:.3f} in the last {count} "
        f"(Mann-Kendall z = {z:.1f}).",
        fix=f"{slowed(changes, 10)}; look at reward_weights.",
        changes=changes,
    )


# ---- is the reward hacked? ----


@detector(
    "M151",
    34,
    "rewards on training and held-out prompts: means of 5 steps and of 2 evaluations, first and last",
    "the first rises with z 2.5 over 20 steps or more; the second falls, by 0.1 of that rise or with z down to -1.5, "
    "over 4 evaluations",
    why="The policy learns the training prompts, or a weakness of the reward, instead of the task.",
)
def held_out_falls(history: MetricHistory) -> Evidence | None:
    """Reward on training prompts rises, on held-out prompts it does not."""
    held_out = history.series("eval_reward")
    reward = history.series("reward")
    if len(held_out) < 4 or len(reward) < 20:
        return None
    gained = mean(reward[-5:]) - mean(reward[:5])
    lost = mean(held_out[:2]) - mean(held_out[-2:])
    if not (gained > 0 and lost > 0) or (lost < 0.1 * gained and trend(held_out) > -1.5) or trend(reward) < 2.5:
        return None
    changes = history.settings.best_kept
    return Evidence(
        f"The training reward rose by {gained:.3f}, the held-out reward fell by {lost:.3f} over {len(held_out)} "
        "evaluations.",
        fix=f"Stop at the best evaluation ({as_lines(changes) or 'load_best_model_at_end: true'}); use more prompts; "
        "read the completions.",
        changes=changes,
    )


@detector(
    "M152",
    20,
    "correlation of the reward with the length within groups, median",
    "from 0.9 on, either way, over 8 groups with 4 different lengths each in the last 3 to 8 rounds",
    fix="Score the content; if length matters, cap it: give nothing beyond what a good answer needs.",
)
def pays_for_length(history: MetricHistory) -> Evidence | None:
    """Within groups, reward is length."""
    rounds = history.rounds[-8:]
    if len(rounds) < 3:
        return None
    characters = [np.array([[len(text) for text in texts_G] for texts_G in view.texts_PG], float) for view in rounds]
    along = {
        "characters": _group_correlations(characters, rounds),
        "tokens": _group_correlations([view.tokens_PG for view in rounds], rounds),
    }
    median = {unit: float(np.median(found)) for unit, found in along.items() if len(found) >= LEAST_GROUPS}
    unit = max(median, key=lambda unit: abs(median[unit]), default="")
    if abs(median.get(unit, 0.0)) < 0.9:
        return None
    r = median[unit]
    return Evidence(
        f"Reward is length: in the median of {len(along[unit])} groups it correlates {r:.2f} with the number of "
        f"{unit}, over {len(rounds)} rounds.",
        why=f"{'Longer' if r > 0 else 'Shorter'} completions are paid whatever they say, so that is what is learnt.",
    )


def _group_correlations(x: Sequence[np.ndarray], rounds: Sequence[RoundView]) -> list[float]:
    """Correlation of the reward and of `x`, an array [P, G] a round, in every group that has a spread of both."""
    return [
        correlation(x_G, reward_G)
        for x_PG, view in zip(x, rounds, strict=True)
        for x_G, reward_G, flat in zip(x_PG, view.comparable_PG, view.is_flat_P, strict=True)
        if not flat and len(np.unique(x_G[np.isfinite(reward_G)])) >= LEAST_LENGTHS
    ]


@detector(
    "M153",
    36,
    "correlation of the reward within groups with a phrase that no prompt has",
    "over 0.8, for a phrase in 0.1 to 0.9 of completions of the last 4 to 8 rounds",
    why="The policy has found words that a reward function or model likes, whatever else is written.",
    fix="Read completions with and without it; make the reward ignore it, or check the answer instead.",
)
def pays_for_a_phrase(history: MetricHistory) -> Evidence | None:
    """Within groups, the reward is whether the completion contains a phrase."""
    rounds = history.rounds[-8:]
    if len(rounds) < 4:
        return None
    reward = history.pooled(lambda view: view.within(view.comparable_PG), last=8)
    known = {word for view in rounds for prompt in view.prompts_P for word in _words(prompt)}
    pairs = [[[_pairs(text) for text in texts_G] for texts_G in view.texts_PG] for view in rounds]
    counts = Counter(phrase for pairs_PG in pairs for pairs_G in pairs_PG for of_text in pairs_G for phrase in of_text)
    total = sum(len(view.texts) for view in rounds)
    for phrase, count in counts.most_common(10):
        if not 0.1 < count / total < 0.9 or set(phrase.split()) <= known:
            continue
        has = [np.array([[phrase in of_text for of_text in x_G] for x_G in x_PG], float) for x_PG in pairs]
        r = correlation(np.concatenate([view.within(x) for view, x in zip(rounds, has, strict=True)]), reward)
        if r > 0.8:
            return Evidence(
                f"Reward is a phrase: '{phrase}', in {percent(count / total)} of completions and in no prompt, "
                f"correlates {r:.2f} with the reward within groups."
            )
    return None


def _words(text: str) -> list[str]:
    return [word.lower() for word in WORDS.findall(text)]


def _pairs(text: str) -> set[str]:
    return {f"{a} {b}" for a, b in pairwise(_words(text))}


@detector(
    "M157",
    3,
    "share of equal texts of a group that got different rewards",
    "from 0.2 of 8 on",
    set_on=PLANTED,
    why="What is drawn by chance, or depends on the order of a batch, teaches nothing about the text.",
)
def differs_on_the_same(history: MetricHistory) -> Evidence | None:
    """Completions of a prompt that are the same, in text, tokens and replies, got different rewards."""
    for k, name in enumerate(history.names_K if history.has_new_round else ()):
        spread = [x for view in history.rounds for x in _spread_of_equals(view, k)]
        differ = [x for x in spread if x > 1e-6]
        if len(spread) < LEAST_EQUALS or len(differ) < 0.2 * len(spread):
            continue
        size = float(np.ptp(history.rewards(k)))
        return Evidence(
            f"{name} does not repeat: {len(differ)} of {len(spread)} texts that stand twice or more in a group got "
            f"different rewards, {np.mean(differ):.2g} apart on average (all its rewards span {size:.2g}).",
            fix=f"Score one completion twice by hand; take random numbers, times and shared state out of {name}. Of a "
            "judge that samples, take the mean of several verdicts, or temperature 0.",
        )
    return None


def _spread_of_equals(view: RoundView, k: int) -> list[float]:
    """Highest less lowest reward of every completion, and of the replies to it, that a group has more than once.

    In a group of several prompts the completions answer different ones, and none repeats another.
    """
    found = []
    per_group = (view.texts_PG, view.tokens_PG, view.digests_PG, view.turns_PG, view.rewards_PGK[:, :, k])
    for p, (texts_G, tokens_G, digests_G, turns_G, rewards_G) in enumerate(zip(*per_group, strict=True)):
        same: defaultdict[tuple[str, float, int | None, str], list[float]] = defaultdict(list)
        if view.prompts_differ_P[p]:
            continue
        for text, tokens, digest, turns, reward in zip(texts_G, tokens_G, digests_G, turns_G, rewards_G, strict=True):
            if np.isfinite(reward):
                replies = str([(turn.message, turn.replies, [call.content for call in turn.calls]) for turn in turns])
                same[text, float(tokens), digest, replies].append(float(reward))
        found += [max(values) - min(values) for values in same.values() if len(values) > 1]
    return found


@detector(
    "M158",
    13,
    "correlation within groups of the reward with the share of the prompt's words in the completion, median; share of "
    "best completions that copy",
    "from 0.8 on, over 8 groups with 4 different values each; or from 0.5 of 8 on, a copy having 0.95 of the prompt's "
    "words, 4 or more, and up to 4 times as many; not where the row's answer has 0.5 of them; in the last 3 to 8 "
    "rounds",
    set_on=PLANTED,
    why="Copying the question is the easiest way to such a reward, so that is what is learnt.",
    fix="Take the prompt's own words out before the completion is scored; pay for what the prompt does not hold.",
)
def pays_for_the_prompt(history: MetricHistory) -> Evidence | None:
    """Within groups, the reward is the share of the prompt that a completion repeats; or the best copy it."""
    rounds = history.rounds[-8:]
    if len(rounds) < 3:
        return None
    copied = [_copied(view) for view in rounds]
    along = _group_correlations(copied, rounds)
    r = float(np.median(along)) if len(along) >= LEAST_GROUPS else 0.0
    _, top = history.extremes
    best = [copy for view in rounds[-3:] for copy in _copies_with(view, top - FLAT)]
    whole = float(np.mean(best)) if len(best) >= LEAST_GROUPS else 0.0
    if r < 0.8 and whole < 0.5:
        return None
    texts = [text for view in rounds for text in view.texts]
    example = max(zip(np.concatenate([x.reshape(-1) for x in copied]), texts, strict=True), key=lambda pair: pair[0])[1]
    correlates = (
        f"in the median of {len(along)} groups it correlates {r:.2f} with the share of the prompt's words that stand "
        "in the completion"
    )
    copies_it = f"{percent(whole)} of the completions with the highest reward copy it"
    return Evidence(f"Reward is the prompt: {correlates if r >= 0.8 else copies_it}, as in {example[:80]!r}.")


def _copied(view: RoundView) -> np.ndarray:
    """Share of the words of the question that the completion contains [P, G].

    NaN for questions too short, and for rows whose own answer has half of the words: the task is to copy or rewrite.
    """

    def share(words: set[str], text: str) -> float:
        return len(words & set(text.casefold().split())) / len(words) if words else math.nan

    words_P = [set(question.casefold().split()) for question in view.questions_P]
    for words, answer in zip(words_P, view.answers_P, strict=True):
        if len(words) < LEAST_WORDS or len(words & set((answer or "").casefold().split())) >= SAME_TASK * len(words):
            words.clear()
    return np.array([[share(words, t) for t in texts_G] for words, texts_G in zip(words_P, view.texts_PG, strict=True)])


def _copies_with(view: RoundView, least: float) -> list[bool]:
    """Whether each completion with this reward or more copies its question without adding the answer."""
    cells = zip(view.questions_P, view.answers_P, view.texts_PG, view.reward_PG, strict=True)
    return [
        copies(frozenset(words_of(question)), text, answer)
        for question, answer, texts_G, reward_G in cells
        for text, reward in zip(texts_G, reward_G, strict=True)
        if reward >= least
    ]


# ---- signs in credited completions ----


@detector(
    "M112",
    31,
    "share without credit of completions that state their row's answer; credit is a reward of 0.5 or more",
    "from 0.9 on, where they are 8, and 0.05 of all, over 3 rounds",
    set_on=HACKED,
    why="The reward refuses right answers for white space, case, a full stop, or a form that they are not in.",
)
def not_credited(history: MetricHistory) -> Evidence | None:
    """Completions whose final answer is the row's get no credit from the reward that tells right from wrong."""
    sign = _sign(history, ("uncredited",))
    fix = (
        "Compare after strip() and casefold(), or take the answer out of the text first; if a form is required, ask "
        "for it in `system`, put a worked example in front of the prompt, or name the form with `extract`. "
        f"{tried_by(history.settings, history.names_K)}"
    )
    return None if sign is None else Evidence(_in_words(history, sign), fix=fix)


@detector(
    "M159",
    21,
    "share of credited completions, of 8 or more, that are one text, list the answers, or are few: over 3 rounds, 8 "
    "prompts",
    "0.9 one text, and 0.25 above the commonest answer; 0.5 that name all of 2 to 12 answers and little else (over 3 "
    "letters: in a run), or 8 of more with 0.8 of their parts; 0.2 as many texts as there are answers, from 10 answers "
    "on; a question has 4 special words",
    set_on=HACKED,
)
def one_for_all(history: MetricHistory) -> Evidence | None:
    """One text or few texts for all prompts, or a text that names every answer there is."""
    sign = _sign(history, ("listed", "constant", "few"))
    if sign is None:
        return None
    what = _in_words(history, sign)
    settings = history.settings
    first = history.first
    if sign.kind == "constant" and first is not None and commonest_text(first.texts)[1] >= CONSTANT:
        changes = settings.more_examples()
        shown = f"worked examples with different answers ({as_lines(changes)})" if changes else "other worked examples"
        fix = f"Put {shown} in front of the prompt, or take a model that is right at times."
        why = "The first round was so already, before any training: no reward has led to it."
        return Evidence(what, why=why, fix=fix, changes=changes)
    changes = {} if sign.kind == "listed" else settings.slower(3)
    slower = "" if sign.kind == "listed" else f"{slowed(changes, 3)}. "
    back = "o back to a checkpoint from before (`podium doctor` says since when)."
    if sign.is_answer:
        why = "It is right for some rows, so the reward may be as it should be: the policy answers without reading."
        return Evidence(what, why=why, fix=f"{slower}G{back}", changes=changes)
    why = "The policy has found one answer that is paid whatever is asked."
    fix = f"{slower}Make the reward depend on the prompt and accept one answer only; g{back}"
    return Evidence(what, why=why, fix=fix, changes=changes)


@detector(
    "M160",
    19,
    "share of credited completions, of 8 or more, that are a form without content, or 6 words or more of which at most "
    "0.25 differ",
    "from 0.5 on over 3 rounds",
    set_on=HACKED,
    why="The reward counts the form, or how often a word occurs, and does not compare what is said.",
    fix="Give the form credit only where the answer in it is compared with the row's as a whole; `podium rewards test` "
    "tries empty forms and repeated answers.",
)
def form_alone(history: MetricHistory) -> Evidence | None:
    """Credited completions are a form without content, or a few words again and again."""
    sign = _sign(history, ("empty", "repeated"))
    return None if sign is None else Evidence(_in_words(history, sign))


def _sign(history: MetricHistory, kinds: Sequence[Kind]) -> Sign | None:
    """The first sign of these kinds over three rounds, in a step with a round of its own."""
    found = signs_in_training(history) if history.has_new_round else []
    return next((sign for sign in found if sign.kind in kinds), None)


def _in_words(history: MetricHistory, sign: Sign) -> str:
    """A sign with the rows that show it, and the reward."""
    rows = [str(row) for row in rows_of(history, sign)]
    noun = "row" if len(rows) == 1 else "rows"
    where = f" ({noun} {', '.join(rows)})" if rows else ""
    reward = mean(history.series("reward", last=3))
    return f"{sign.what}{where}, over 3 rounds; the reward is {reward:.3f}."
