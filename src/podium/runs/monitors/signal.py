"""Is there anything to learn from? Groups without spread, rewards that say nothing, prompts that come again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from podium.algorithm.advantages import FLAT
from podium.errors import Finding
from podium.errors.texts import as_lines, counted
from podium.runs.monitors.detection import correlation, ends, mean, percent, slowed, some, trend, tried_by
from podium.runs.monitors.hacking import pays_for_length
from podium.runs.monitors.history import MetricHistory
from podium.runs.monitors.signs import doubt_about

ENOUGH = 200
"""Completions after which a reward that has never fired is no accident: 2 % would have shown in 98 runs of 100."""
MISSED = 0.05
"""Share of completions with the right answer in them, from which on it is no accident that all got 0."""
UNEARNED = 0.5
"""Share of flat groups that are paid without their row's answer from which on this is what is wrong."""
SOLVED = 0.75
"""Share of flat groups that are all right from which on their flatness is a success."""
MISSPELT = 0.1
"""Share of completions with one tag from which on it is meant, and not a word between angle brackets."""
FORMAT_WORDS = ("format", "tag", "xml", "boxed", "structure")
ANSWER_WORDS = ("correct", "accura", "match", "answer", "solution", "right")


def no_signal(history: MetricHistory) -> Finding | None:
    """M101: most groups have equal rewards."""
    shares = history.series("frac_reward_zero_std", last=5)
    if len(shares) < 3 or not mean(shares) >= 0.8:
        return None
    counts = [(~np.isnan(reward_G)).sum() for view in history.rounds[-5:] for reward_G in view.reward_PG]
    alone = float(np.mean([count < 2 for count in counts])) if counts else 0.0
    if alone >= 0.5 * mean(shares):
        return Finding(
            code="M101",
            severity="warning",
            what=f"In {percent(alone)} of groups fewer than two completions have a reward, over {len(shares)} steps.",
            why="An advantage compares completions of one prompt: with one reward or none, nothing is learnt.",
            fix="Return a number for every completion: None means that a function has nothing to say of it.",
        )
    wrong, right, known = _split(history)
    unearned = _unearned(history)
    if unearned >= UNEARNED:
        return Finding(
            code="M101",
            severity="warning",
            what=f"In {percent(mean(shares))} of groups all rewards are equal, over {len(shares)} steps: "
            f"{percent(unearned)} of these are paid as the best are, without their row's answer.",
            why="What is paid for is not the answer, and all completions have it: nothing is left to learn.",
            fix="Read completions (`podium sample RECIPE -n 4`); let the reward compare with the row's answer. M152, "
            "M153 and M158 to M160 say what else may be paid for.",
        )
    doubt = doubt_about(history) if right else ""
    known = known and not doubt
    changes: dict[str, Any] = {}
    replaced = "dynamic_sampling: true replaces such groups."
    if doubt:
        fix = "first what M158, M159 or M160 says of it"
    elif right > wrong:
        changes = {"on_finding": {"M101": "stop"}}
        harder = "use harder prompts, or end runs here (`on_finding: {M101: stop}`) if the rest is not worth the time"
        fix = f"{harder}; {replaced}" if known else f"{harder}; first read completions: is it earned?; {replaced}"
    else:
        entropy = mean(history.series("entropy", last=5))
        changes = {**history.settings.more_examples(), **history.settings.tempered(entropy)}
        easier = "give partial credit in the reward, use easier prompts or a stronger model, or raise num_generations"
        fix = f"{as_lines(changes)}; {easier}; {replaced}" if changes else f"{easier}; {replaced}"
    names = ("all wrong", "all right") if known or not right else ("low", "high, as rewards go here")
    shares_by_name = [f"{percent(x)} {name}" for x, name in zip((wrong, right), names, strict=True) if x > 0]
    said = f" ({', '.join(shares_by_name)})" if shares_by_name else ""
    if doubt:
        said = f"{said}. {doubt}"
    return Finding(
        code="M101",
        severity="warning" if right < SOLVED or doubt else "note",
        what=f"In {percent(mean(shares))} of groups all rewards are equal{said}, over {len(shares)} steps.",
        why="An advantage compares completions of one prompt: where all are equal, nothing is learnt.",
        fix=fix,
        changes=changes,
    )


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
        for view, right in zip(rounds, judged_PG, strict=True)
        if right is not None
        for x in np.nanmean(right[view.is_flat_P], axis=1)
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


def constant_reward(history: MetricHistory) -> Finding | None:
    """M102: a reward function has always returned the same number, and not zero."""
    same: dict[str, np.ndarray] = {}
    for k, name in enumerate(history.names_K):
        x = history.rewards(k)
        means = history.series(f"rewards/{name}/mean")
        # Whatever gave another number in an earlier step has been learnt, which is no fault.
        if len(x) and np.ptp(x) <= FLAT < abs(x[0]) and not (np.abs(means - x[0]) > 1e-6).any():
            same[name] = x
    alone = len(same) == len(history.names_K)
    if len(history.rounds) < 3 or not same or not (alone or min(map(len, same.values())) >= ENOUGH):
        return None
    said = some([f"{name} = {x[0]:.4g}" for name, x in same.items()])
    return Finding(
        code="M102",
        severity="warning",
        what=f"Constant reward: {said} for all of {len(next(iter(same.values())))} completions.",
        why="A reward that is the same whatever the model writes prefers nothing, so its advantages are all zero.",
        fix="Score a few different texts by hand: `podium sample RECIPE -n 4` shows each completion with each reward.",
    )


def silent_reward(history: MetricHistory) -> Finding | None:
    """M103: a reward function has been zero throughout."""
    values = {name: history.rewards(k) for k, name in enumerate(history.names_K)}
    silent = {name: x for name, x in values.items() if len(x) and not x.any() and not looks_misspelt(history, name)}
    alone = len(silent) == len(values)
    if len(history.rounds) < 3 or not silent or not (alone or min(map(len, silent.values())) >= ENOUGH):
        return None
    contains = history.pooled(lambda view: view.contains_answer_PG)
    right = int(np.nansum(contains))
    missed = alone and right >= max(3, MISSED * len(contains))
    changes = {} if missed else history.settings.more_examples()
    more = f"worked examples in the prompt ({as_lines(changes)}), " if changes else ""
    return Finding(
        code="M103",
        severity="warning",
        what=f"Never fired: {some(list(silent))} gave 0 to all of {len(next(iter(silent.values())))} completions"
        + (f", although {right} contain their row's answer." if missed else "."),
        why="The function does not accept right answers: white space, a form that it wants, another column."
        if missed
        else "Either the model cannot do it yet, or the function looks for something that completions never contain.",
        fix=f"{tried_by(history.settings, silent)} A reward of the library reads the answer in one place: ask for it "
        "in `system`, or name the place with `extract` (docs/rewards.md)."
        if missed
        else f"Compare a completion with what the function looks for (`podium sample RECIPE -n 4`); {more}partial "
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


def reward_flat(history: MetricHistory) -> Finding | None:
    """M104: no trend in the reward since the start; a reward that falls is M111's."""
    reward = history.series("reward")
    flat = mean(history.series("frac_reward_zero_std", last=10))
    if len(reward) < 40 or flat > 0.8 or reward_falls(history) is not None:
        return None
    z = trend(reward[-200:])
    first, last, count = ends(reward)
    if abs(z) > 1.645 or abs(last - first) > 0.5 * float(np.nanstd(reward[:20])):
        return None
    faster = history.settings.slower(1 / 3)
    changes = {**faster, **history.settings.larger_groups()}
    return Finding(
        code="M104",
        severity="note" if len(reward) < 80 else "warning",
        what=f"The reward does not rise: {first:.3f} in the first {count} steps, {last:.3f} in the last {count} of "
        f"{len(reward)}; Mann-Kendall z = {z:.1f}, a rise would be over 1.6.",
        why="Steps may be too small or too noisy; whether groups have any signal is not recorded."
        if np.isnan(flat)
        else f"There is signal in {percent(1 - flat)} of groups, but steps are too small or too noisy to follow it.",
        fix=f"Set {as_lines(changes)}; or more prompts a step."
        if faster
        else "More completions (num_generations) or more prompts a step make steps less noisy; whether the learning "
        "rate is too low or too high is not known here.",
        changes=changes,
    )


def reward_falls(history: MetricHistory) -> Finding | None:
    """M111: the reward goes down."""
    reward = history.series("reward")
    if len(reward) < 8:
        return None
    z = trend(reward[-40:])
    first, last, count = ends(reward)
    drop = first - last
    changes = history.settings.slower(10)
    if z > -2.6 or drop < 2 * float(np.nanstd(np.diff(reward))) / np.sqrt(3):
        return None
    return Finding(
        code="M111",
        severity="warning",
        what=f"The reward falls: {first:.3f} in the first {count} steps, {last:.3f} in the last {count} "
        f"(Mann-Kendall z = {z:.1f}).",
        why="Steps are so large that the policy is damaged, or the weight of a reward has the wrong sign.",
        fix=f"{slowed(changes, 10)}; look at reward_weights.",
        changes=changes,
    )


def one_reward_carries(history: MetricHistory) -> Finding | None:
    """M105: all differences within groups come from one of several rewards."""
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
    return Finding(
        code="M105",
        severity="note",
        what=f"{names[top]} makes {percent(variance_K[top] / total)} of differences within groups; {some(others)}: "
        "none.",
        why="What hardly differs within groups is hardly learnt: the policy follows one reward alone.",
        fix=f"If {some(others)} should be learnt: partial credit, or multi_objective_aggregation: normalize_then_sum; "
        "a larger weight takes from the others.",
        changes={"multi_objective_aggregation": "normalize_then_sum"},
    )


def _is_solved(history: MetricHistory, k: int) -> bool:
    """Whether a reward hardly differs because nearly all completions have its highest value."""
    values = history.rewards(k)
    return bool(len(values) and values.max() > 0 and np.mean(history.rewards(k, last=4)) >= 0.9 * values.max())


def _weighted(history: MetricHistory) -> list[np.ndarray]:
    """For each reward, the weighted distances to the group's mean over all rounds."""
    weights = history.settings.weights
    return [weights.get(name, 1.0) * history.rewards_within(k) for k, name in enumerate(history.names_K)]


def rewards_cancel(history: MetricHistory) -> Finding | None:
    """M106: two rewards pull in opposite directions, and little is left of either."""
    if len(history.rounds) < 4:
        return None
    for (first, x), (second, y) in combinations(zip(history.names_K, _weighted(history), strict=True), 2):
        known = np.isfinite(x + y)
        if not known.any():
            continue
        r = correlation(x[known], y[known])
        left = float(np.std((x + y)[known])) / max(np.std(x[known]), np.std(y[known]), 1e-12)
        if r < -0.8 and left < 0.5:
            return Finding(
                code="M106",
                severity="warning",
                what=f"{first} and {second} cancel: correlation {r:.2f} within groups; their sum has {percent(left)} "
                "of the spread of the larger.",
                why="What one reward prefers the other punishes, so the sum prefers nothing.",
                fix="Check the sign of one of them in reward_weights, or drop one.",
            )
    return None


def flipped_reward(history: MetricHistory) -> Finding | None:
    """M107: completions with the row's right answer get less than the others of their group."""
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
            return Finding(
                code="M107",
                severity="warning",
                what=f"{name} punishes right answers: the {num_right} completions that contain their row's answer got "
                f"{gap:+.3f} against the others of their groups (correlation {r:.2f}).",
                why="A minus sign is wrong: in the function, in its weight, or in a distance taken for a score.",
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


def one_prompt_dominates(history: MetricHistory) -> Finding | None:
    """M108: nearly all of the update comes from one prompt, step after step."""
    shares = []
    for view in history.rounds[-5:]:
        size_P = np.abs(view.advantages_PG).sum(axis=1)
        if len(size_P) >= 4 and size_P.sum() > 0:
            shares.append(float(size_P.max() / size_P.sum()))
    if len(shares) < 5 or min(shares) < 0.75:
        return None
    return Finding(
        code="M108",
        severity="warning",
        what=f"One prompt made {percent(min(shares))} or more of all advantages in {len(shares)} steps in a row.",
        why="The step follows a single prompt, which is as noisy as a batch of one.",
        fix="More prompts a step (per_device_train_batch_size), dynamic_sampling: true, or scale_rewards: group.",
        changes={"dynamic_sampling": True},
    )


def repeated_prompt(history: MetricHistory) -> Finding | None:
    """M109: different rows of the dataset ask the same; not those of a program, an environment or `rollout_func`, which
    see more."""
    rounds = [view for view in history.rounds[-8:] if len(view.prompts_P) > 1]
    settings = history.settings
    if settings.agent or settings.environment or settings.rollout_func or any(view.is_played for view in rounds):
        return None
    drawn = [set(zip(view.rows_P, view.prompts_P, strict=True)) for view in rounds]
    rows = sum(len(pairs) for pairs in drawn)
    texts = sum(len({text for _, text in pairs}) for pairs in drawn)
    if len(rounds) < 2 or rows < 8 or texts > 0.5 * rows:
        return None
    every = {text for pairs in drawn for _, text in pairs}
    return Finding(
        code="M109",
        severity="warning",
        what=f"Prompts repeat: {rows} rows drawn in {len(rounds)} steps have only "
        f"{counted(len(every), 'different prompt')}.",
        why="The dataset holds the same prompt many times, or its prompt column does not vary.",
        fix="Look at the prompt column (`podium sample RECIPE`); remove duplicate rows.",
    )


def stuck_prompts(history: MetricHistory) -> Finding | None:
    """M110: prompts that are always solved or never."""
    seen = {question: x for question, x in history.visits.items() if len(x) >= 6}
    low, high = history.extremes
    if len(seen) < 8 or high - low <= FLAT:
        return None
    never = [question for question, x in seen.items() if max(x) <= low + FLAT]
    always = [question for question, x in seen.items() if min(x) >= high - FLAT]
    if len(never) + len(always) < 0.25 * len(seen):
        return None
    listed = some([repr(question[-60:]) for question in [*never, *always]], 3)
    return Finding(
        code="M110",
        severity="note",
        what=f"Of {len(seen)} prompts seen three times or more, {len(never)} never got more than the lowest reward and "
        f"{len(always)} always the highest, such as {listed}.",
        why="Their groups have no spread, so the tokens spent on them teach nothing.",
        fix="Leave them out of the dataset, or set dynamic_sampling: true.",
        changes={"dynamic_sampling": True},
    )
