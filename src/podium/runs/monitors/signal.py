"""Is there anything to learn from? Groups without spread, rewards that say nothing, prompts that come again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np

from podium.runs.monitors.detection import Detection, Severity, correlation, ends, mean, percent, some, trend
from podium.runs.monitors.history import MetricHistory, RoundView

ENOUGH = 200
"""Completions after which a reward that has never fired is no accident: 2 % would have shown in 98 runs of 100."""


MISSED = 0.05
"""Share of completions with the right answer in them, from which on it is no accident that all got 0."""
SOLVED = 0.75
"""Share of flat groups that are all right from which on their flatness is a success."""


def no_signal(sight: MetricHistory) -> Detection | None:
    """M101: most groups have equal rewards."""
    shares = sight.series("frac_reward_zero_std", last=5)
    if len(shares) < 3 or not mean(shares) >= 0.8:
        return None
    wrong, right, known = _split(sight.rounds[-5:], *sight.extremes)
    cure = {
        "wrong": "give partial credit in the reward, use easier prompts or a stronger model, or raise num_generations",
        "right": "use harder prompts, or stop here (`on_finding: {M101: stop}`)"
        + ("; the model has learnt what these can teach" if known else "; first read completions: is it earned?"),
    }
    names = ("all wrong", "all right") if known else ("low", "high, as rewards go here")
    said = f" ({percent(wrong)} {names[0]}, {percent(right)} {names[1]})" if wrong + right > 0 else ""
    return Detection(
        severity="note" if right >= SOLVED else "error" if mean(shares) >= 0.999 else "warning",
        what=f"In {percent(mean(shares))} of groups all rewards are equal{said}, over {len(shares)} steps.",
        why="An advantage compares completions of one prompt: where all are equal, nothing is learnt.",
        fix=f"{cure['right' if right > wrong else 'wrong']}; dynamic_sampling: true replaces such groups.",
    )


def _split(rounds: Sequence[RoundView], low: float, high: float) -> tuple[float, float, bool]:
    """Shares of flat groups that are wrong and right, and whether that is known.

    Known is it where rows have an answer, which stands in completions or not; else it is the lower and the upper half
    of all rewards ever seen.
    """
    rewards = [x for view in rounds for x in np.nanmean(view.reward_PG[view.is_flat_P], axis=1)]
    if not rewards or not np.isfinite(low):
        return 0.0, 0.0, False
    answered = [x for view in rounds for x in view.contains_answer_PG[view.is_flat_P].mean(axis=1)]
    known = bool(np.isfinite(answered).all())
    if high - low < 1e-9:  # nothing to compare with: only zeros can be called wrong
        return float(high == 0), 0.0, known
    top = [x >= (low + high) / 2 for x in rewards]
    right = float(np.mean([above and (not known or x >= 0.5) for above, x in zip(top, answered, strict=True)]))
    return 1 - right, right, known


def _values(rounds: Sequence[RoundView], k: int) -> np.ndarray:
    every = np.concatenate([view.rewards_PGK[:, :, k].reshape(-1) for view in rounds])
    return every[np.isfinite(every)]


def constant_reward(sight: MetricHistory) -> Detection | None:
    """M102: a reward function has always returned the same number, and not zero."""
    if len(sight.rounds) < 3:
        return None
    names = sight.rounds[-1].names_K
    values = {name: _values(sight.rounds, k) for k, name in enumerate(names)}
    same = {name: x for name, x in values.items() if len(x) and np.ptp(x) < 1e-9 and abs(x[0]) > 1e-9}
    same = {name: x for name, x in same.items() if not _has_differed(sight, name, float(x[0]))}
    alone = len(same) == len(names)
    if not same or not (alone or min(map(len, same.values())) >= ENOUGH):
        return None
    said = some([f"{name} = {x[0]:.4g}" for name, x in same.items()])
    return Detection(
        severity="error" if alone else "warning",
        what=f"Constant reward: {said} for all of {len(next(iter(same.values())))} completions.",
        why="A reward that is the same whatever the model writes prefers nothing, so its advantages are all zero.",
        fix="Score a few different texts by hand: `podium sample RECIPE -n 4` shows each completion with each reward.",
    )


def _has_differed(sight: MetricHistory, name: str, value: float) -> bool:
    """Whether it gave anything else in an earlier step: then it has been learnt, which is no fault."""
    return bool(np.nanmax(np.abs(sight.series(f"rewards/{name}/mean") - value), initial=0.0) > 1e-6)


def silent_reward(sight: MetricHistory) -> Detection | None:
    """M103: a reward function has been zero throughout."""
    if len(sight.rounds) < 3:
        return None
    names = sight.rounds[-1].names_K
    values = {name: _values(sight.rounds, k) for k, name in enumerate(names)}
    silent = {name: x for name, x in values.items() if len(x) and not x.any() and not looks_misspelt(sight, name)}
    alone = len(silent) == len(names)
    if not silent or not (alone or min(map(len, silent.values())) >= ENOUGH):
        return None
    contains = np.concatenate([view.contains_answer_PG.reshape(-1) for view in sight.rounds])
    right = int(np.nansum(contains))
    missed = alone and right >= max(3, MISSED * len(contains))
    return Detection(
        severity="error" if alone else "warning",
        what=f"Never fired: {some(list(silent))} gave 0 to all of {len(next(iter(silent.values())))} completions"
        + (f", although {right} contain their row's answer." if missed else "."),
        why="The function does not accept right answers: white space, a form that it wants, another column."
        if missed
        else "Either the model cannot do it yet, or the function looks for something that completions never contain.",
        fix="`podium rewards test` tries right answers in several forms."
        if missed
        else "Compare a completion with what the function looks for (`podium sample RECIPE -n 4`); give partial "
        "credit, a worked example in the prompt, or easier prompts.",
    )


MISSPELT = 0.1
"""Share of completions with one tag from which on it is meant, and not a word between angle brackets."""

FORMAT_WORDS = ("format", "tag", "xml", "boxed", "structure")


def looks_misspelt(sight: MetricHistory, name: str) -> bool:
    """Whether a silent reward is about format, while some completions do have tags: one in ten, the same tag."""
    tags: Counter[str] = sum((view.tags for view in sight.rounds), Counter())
    most = max(tags.values(), default=0) / max(sum(len(view.texts) for view in sight.rounds), 1)
    return any(word in name.lower() for word in FORMAT_WORDS) and most >= MISSPELT


def reward_flat(sight: MetricHistory) -> Detection | None:
    """M104: no trend in the reward since the start."""
    reward = sight.series("reward")
    if len(reward) < 40 or mean(sight.series("frac_reward_zero_std", last=10)) > 0.8:
        return None
    z = trend(reward[-200:])
    first, last, count = ends(reward)
    if z > 1.645 or last - first > 0.5 * float(np.nanstd(reward[:20])):
        return None
    return Detection(
        severity="note" if len(reward) < 80 else "warning",
        what=f"The reward does not rise: {first:.3f} in the first {count} steps, {last:.3f} in the last {count} of "
        f"{len(reward)}; Mann-Kendall z = {z:.1f}, a rise would be over 1.6.",
        why="There is signal in the groups, but steps are too small or too noisy to follow it.",
        fix="Raise learning_rate threefold, or num_generations, or the prompts of a step.",
    )


def reward_falls(sight: MetricHistory) -> Detection | None:
    """M111: the reward goes down."""
    reward = sight.series("reward")
    if len(reward) < 8:
        return None
    z, (first, last, count) = trend(reward[-40:]), ends(reward)
    drop = first - last
    if z > -2.6 or drop < 2 * float(np.nanstd(np.diff(reward))) / np.sqrt(3):
        return None
    return Detection(
        severity="warning",
        what=f"The reward falls: {first:.3f} in the first {count} steps, {last:.3f} in the last {count} "
        f"(Mann-Kendall z = {z:.1f}).",
        why="Steps are so large that the policy is damaged, or the weight of a reward has the wrong sign.",
        fix="Lower learning_rate by ten; look at reward_weights.",
    )


def one_reward_carries(sight: MetricHistory) -> Detection | None:
    """M105: all differences within groups come from one of several rewards."""
    if len(sight.rounds) < 12 or len(sight.rounds[-1].names_K) < 2:
        return None
    names, parts_K = sight.rounds[-1].names_K, _parts(sight)
    live = [k for k, name in enumerate(names) if sight.settings.weights.get(name, 1.0)]
    variance_K = np.array([np.nanvar(part) for part in parts_K])
    total = variance_K.sum()
    if len(live) < 2 or total <= 0 or variance_K.max() < 0.98 * total:
        return None
    top = names[int(variance_K.argmax())]
    others = [name for k, name in enumerate(names) if name != top and k in live and not _is_won(sight, k)]
    if not others:
        return None
    return Detection(
        severity="note",
        what=f"{top} makes {percent(variance_K.max() / total)} of differences within groups; {some(others)}: none.",
        why="What hardly differs within groups is hardly learnt: the policy follows one reward alone.",
        fix=f"If {some(others)} should be learnt: partial credit, or multi_objective_aggregation: normalize_then_sum; "
        "a larger weight takes from the others.",
    )


def _is_won(sight: MetricHistory, k: int) -> bool:
    """Whether a reward hardly differs because nearly all completions have its highest value."""
    values = _values(sight.rounds, k)
    return bool(len(values) and values.max() > 0 and np.mean(_values(sight.rounds[-4:], k)) >= 0.9 * values.max())


def _parts(sight: MetricHistory) -> list[np.ndarray]:
    """For each reward, the weighted distances to the group's mean over all rounds in sight."""
    names = sight.rounds[-1].names_K
    return [
        sight.settings.weights.get(name, 1.0)
        * np.concatenate([view.within(view.rewards_PGK[:, :, k]) for view in sight.rounds])
        for k, name in enumerate(names)
    ]


def rewards_cancel(sight: MetricHistory) -> Detection | None:
    """M106: two rewards pull in opposite directions, and little is left of either."""
    if len(sight.rounds) < 4 or len(sight.rounds[-1].names_K) < 2:
        return None
    names, parts = sight.rounds[-1].names_K, _parts(sight)
    for a in range(len(names)):
        for b in range(a):
            r = correlation(parts[a], parts[b])
            left = float(np.nanstd(parts[a] + parts[b])) / max(np.nanstd(parts[a]), np.nanstd(parts[b]), 1e-12)
            if r < -0.8 and left < 0.5:
                return Detection(
                    severity="warning",
                    what=f"{names[b]} and {names[a]} cancel: correlation {r:.2f} within groups; their sum has "
                    f"{percent(left)} of the spread of the larger.",
                    why="What one reward prefers the other punishes, so the sum prefers nothing.",
                    fix="Check the sign of one of them in reward_weights, or drop one.",
                )
    return None


ANSWER_WORDS = ("correct", "accura", "match", "answer", "solution", "right")


def flipped_reward(sight: MetricHistory) -> Detection | None:
    """M107: completions with the row's right answer get less than the others of their group."""
    if len(sight.rounds) < 3:
        return None
    contains = np.concatenate([view.within(view.contains_answer_PG) for view in sight.rounds])
    telling = np.isfinite(contains) & (np.abs(contains) > 1e-9)
    right, num_right = telling & (contains > 0), int((telling & (contains > 0)).sum())
    if num_right < 3:
        return None
    for name, reward, severity in _judges(sight):
        r = correlation(contains[telling], reward[telling])
        certain = num_right >= 6 and r < -0.2 and r * np.sqrt(telling.sum()) < -3.3
        if certain or (severity == "error" and r < -0.9):
            gap = float(np.nanmean(reward[right]) - np.nanmean(reward[telling & ~right]))
            return Detection(
                severity=severity,
                what=f"{name} punishes right answers: the {num_right} completions that contain their row's answer got "
                f"{gap:+.3f} against the others of their groups (correlation {r:.2f}).",
                why="A minus sign is wrong: in the function, in its weight, or in a distance taken for a score.",
                fix=f"Flip the sign of {name} (in the function or in reward_weights).",
            )
    return None


def _judges(sight: MetricHistory) -> list[tuple[str, np.ndarray, Severity]]:
    """Rewards that are about answers by their names, and last the total, which may have reasons of its own."""
    names, parts = sight.rounds[-1].names_K, _parts(sight)
    about_answers = [
        (name, part, "error")
        for name, part in zip(names, parts, strict=True)
        if any(word in name.lower() for word in ANSWER_WORDS) and not any(word in name.lower() for word in FORMAT_WORDS)
    ]
    total = np.concatenate([view.within(view.reward_PG) for view in sight.rounds])
    return cast("list[tuple[str, np.ndarray, Severity]]", [*about_answers, ("The total reward", total, "warning")])


def one_prompt_dominates(sight: MetricHistory) -> Detection | None:
    """M108: nearly all of the update comes from one prompt, step after step."""
    shares = []
    for view in sight.rounds[-5:]:
        size_P = np.abs(view.advantages_PG).sum(axis=1)
        if len(size_P) >= 4 and size_P.sum() > 0:
            shares.append(float(size_P.max() / size_P.sum()))
    if len(shares) < 5 or min(shares) < 0.75:
        return None
    return Detection(
        severity="warning",
        what=f"One prompt made {percent(min(shares))} or more of all advantages in {len(shares)} steps in a row.",
        why="The step follows a single prompt, which is as noisy as a batch of one.",
        fix="More prompts a step (per_device_train_batch_size), dynamic_sampling: true, or scale_rewards: group.",
    )


def repeated_prompt(sight: MetricHistory) -> Detection | None:
    """M109: different rows of the dataset ask the same."""
    rounds = [view for view in sight.rounds[-8:] if len(view.prompts_P) > 1]
    drawn = [set(zip(view.rows_P, view.prompts_P, strict=True)) for view in rounds]
    rows = sum(len(pairs) for pairs in drawn)
    texts = sum(len({text for _, text in pairs}) for pairs in drawn)
    if len(rounds) < 2 or rows < 8 or texts > 0.5 * rows:
        return None
    every = {text for pairs in drawn for _, text in pairs}
    return Detection(
        severity="error" if len(every) == 1 else "warning",
        what=f"Prompts repeat: {rows} rows drawn in {len(rounds)} steps have only {len(every)} different "
        f"prompt{'s' * (len(every) > 1)}.",
        why="The dataset holds the same prompt many times, or its prompt column does not vary.",
        fix="Look at the prompt column (`podium sample RECIPE`); remove duplicate rows.",
    )


def stuck_prompts(sight: MetricHistory) -> Detection | None:
    """M110: prompts that are always solved or never."""
    seen = {question: x for question, x in sight.visits.items() if len(x) >= 6}
    if len(seen) < 8:
        return None
    low, high = sight.extremes
    if high - low < 1e-9:
        return None
    never = [question for question, x in seen.items() if max(x) <= low + 1e-9]
    always = [question for question, x in seen.items() if min(x) >= high - 1e-9]
    if len(never) + len(always) < 0.25 * len(seen):
        return None
    listed = some([repr(question[-60:]) for question in [*never, *always]], 3)
    return Detection(
        severity="note",
        what=f"Of {len(seen)} prompts seen three times or more, {len(never)} never got more than the lowest reward and "
        f"{len(always)} always the highest, such as {listed}.",
        why="Their groups have no spread, so the tokens spent on them teach nothing.",
        fix="Leave them out of the dataset, or set dynamic_sampling: true.",
    )
