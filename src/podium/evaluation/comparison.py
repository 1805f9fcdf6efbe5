"""Two models on the same prompts: what differs, and whether that can be chance.

    comparison = compare(scores_a, scores_b, names=("before", "after"), settings=(settings_a, settings_b))
    comparison.verdict  # "Better: accuracy rose from 0.016 (before) to ..."

One test says what is better: the sign-flip test of the mean difference over prompts, of accuracy where a reward
function tells right from wrong, else of the reward. A rise is called "Better" only if it is of accuracy, the
completions show no sign of a hacked reward, no baseline scores as much, and the reward did not fall: a model whose
reward fell, by the same test, is worse whatever its accuracy. Chance alone gives "Better" or "Worse" in at most 7.5 %
of comparisons. Everything else (McNemar's test, other numbers, categories, single prompts) shows where a difference
comes from and never turns the verdict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from podium.errors import ConfigError, DataError
from podium.errors.texts import counted, nearest
from podium.evaluation.held_out import numbers
from podium.evaluation.measured import EvalScores
from podium.evaluation.saved import EvalSettings
from podium.evaluation.statistics import (
    FEWEST,
    LEVEL,
    Difference,
    mcnemar_p_value,
    mean_of_prompt,
    paired_difference,
    pass_at_k,
)
from podium.runs.monitors.signs import DOUBTS, Sign

CATEGORY = "category"
"""The column with the category of a prompt, unless another is named."""

HACKED = " The reward may be hacked, so read completions."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedPrompt:
    """A prompt on which the two differ."""

    place_a: int
    """Number of the prompt in A's evaluation."""
    place_b: int
    completion: int
    """The completion that differs most: the same random numbers in both."""
    change: float
    """B less A, mean over the completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """The test that a verdict reports: which models, by which reward, on how much, under which settings.

    The verdict is made of nothing else.
    """

    names: tuple[str, str]
    metric: Literal["accuracy", "reward"]
    reward: str
    """The reward function that tells right from wrong; without one all of them, as they are weighted."""
    main: Difference
    paid: Difference
    """Test of the reward: the weighted sum of all functions."""
    num_completions: tuple[int, int]
    """Of each prompt, by each model."""
    settings: tuple[str, str]
    """Digests of the settings of both evaluations."""
    differing: tuple[str, ...]
    """What was not the same besides the models: then neither is judged."""
    doubts: tuple[str, ...]
    """Sentences that keep a rise from being called better."""
    strict: tuple[str, ...]
    """Sentences that say that the second model may be better than its numbers."""
    baseline: str
    """A sentence where a baseline scores as much as the second model; else empty."""

    @property
    def rose(self) -> bool:
        return self.main.shown and self.main.change.value > 0

    @property
    def fallen(self) -> dict[str, Difference]:
        """What fell, by name: the reward, the accuracy."""
        tested = {"reward": self.paid, self.metric: self.main}
        return {name: test for name, test in tested.items() if test.shown and test.change.value < 0}

    @property
    def is_better(self) -> bool:
        """Whether there is a rise, and nothing that speaks against it."""
        return self.rose and not (self.fallen or self.differing or self.doubts or self.baseline)

    @property
    def verdict(self) -> str:
        """One sentence, which may be that no difference was shown, and reasons to doubt it."""
        more = list(self.doubts)
        if self.baseline and not self.doubts:
            more.append(self.baseline)
        if self.rose and self.metric == "reward":
            more.append(
                "No reward tells right from wrong, so whether the answers are better is not known: `accuracy: NAME`."
            )
        numbers = self._numbers(self.metric, self.main, self.reward)
        if self.metric not in self.fallen and "reward" in self.fallen:
            of_reward = self._numbers("reward", self.paid, "the weighted sum")
            numbers = f"{of_reward} {numbers[0].upper()}{numbers[1:]}"
        return " ".join([f"{self._head()}: {numbers}", *more, *self.strict])

    def _head(self) -> str:
        if self.differing:
            return f"Not the models alone were compared ({'; '.join(self.differing)})"
        if self.fallen:
            return "Worse"
        if not self.rose:
            return "No difference shown"
        if self.doubts:
            return "Doubtful"
        if self.baseline:
            return "No better than a baseline"
        return "Reward rose" if self.metric == "reward" else "Better"

    def _numbers(self, metric: str, found: Difference, reward: str) -> str:
        """The sentence about one test; `reward`: what it is a mean of."""
        a = f"{found.a:.3f} ({self.names[0]})"
        b = f"{found.b:.3f} ({self.names[1]})"
        where = f"on {counted(found.num_prompts, 'prompt')}"
        test = f"{where} ({reward}; sign-flip test, {p_text(found.p_value)})"
        if found.shown:
            verb = "rose" if found.change.value > 0 else "fell"
            return f"{metric} {verb} from {a} to {b}, by {signed(found)}, {test}."
        if found.num_better == found.num_worse == 0:
            return f"{metric} {found.b:.3f} for both, the same {where} ({reward})."
        if found.num_prompts < FEWEST:
            few = f"{found.num_prompts} prompts are too few to show one"
            return f"{metric} {a} and {b} ({reward}); {few}."
        beside = found.change.low > 0 or found.change.high < 0
        often = f"{100 * found.p_value:.0f} % of cases"
        why = f" The interval leaves 0 out; the test, which decides, finds as much by chance in {often}."
        return f"{metric} {a} and {b}, difference {signed(found)}, {test}.{why * beside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(PairedTest):
    """B against A: the test that decides, and where the difference comes from."""

    mcnemar_p_value: float | None
    """Test of the first completion of every prompt; None: no reward function tells right from wrong."""
    numbers: Mapping[str, Difference]
    by: str | None
    """The column whose values are the categories."""
    categories: Mapping[str, Difference]
    """By its value; the intervals hold together at 95 %."""
    better: tuple[ChangedPrompt, ...]
    """Prompts on which B did better, those that moved most first."""
    worse: tuple[ChangedPrompt, ...]
    num_unpaired: tuple[int, int]
    """Prompts that only A, or only B, has answered, which are left out."""

    def to_json(self) -> dict[str, Any]:
        """For the file of a comparison."""
        return {**numbers(self), "verdict": self.verdict, "is_better": self.is_better}


def compare(
    a: EvalScores,
    b: EvalScores,
    *,
    names: tuple[str, str],
    settings: tuple[EvalSettings, EvalSettings],
    by: str | None = None,
) -> Comparison:
    """B against A on the prompts that both have answered.

    `by` is a column of the dataset, for differences by its values; None: `category`, where there is one. Where
    `settings` differ in more than the model, the verdict says in what, and judges neither. Raises `ConfigError` for
    evaluations by other reward functions and for no such column, `DataError` for no common prompt.
    """
    _check_same_rewards(a, b)
    differing = tuple(settings[0].differing(settings[1]))
    places_a, places_b = pair(a.keys_P, b.keys_P)
    if not places_a:
        why = f" ({'; '.join(differing)})" if differing else ""
        raise DataError(
            f"{names[0]} and {names[1]} have no prompt in common{why}: evaluate both on the same data.",
            first_names=names[0],
            second_names=names[1],
            why=why,
        )
    unpaired = (a.num_prompts - len(places_a), b.num_prompts - len(places_b))
    a = a.select(places_a)
    b = b.select(places_b)
    by = _column(b, by)
    k = min(a.num_samples, b.num_samples)
    of_a = _numbers(a, k)
    of_b = _numbers(b, k)
    doubts, strict, baseline = _reasons(b)
    paid = paired_difference(mean_of_prompt(a.reward_PG), mean_of_prompt(b.reward_PG))
    moved = paid.change.value if paid.shown else 0.0
    shown = [
        f"{sign.what} ({names[1]}).{HACKED if moved > 0 or (sign.is_paid and not moved) else ''}" for sign in doubts[:1]
    ]
    return Comparison(
        names=names,
        metric=a.metric,
        reward=a.accuracy or " + ".join(a.names_K),
        main=paired_difference(a.main_P, b.main_P),
        paid=paid,
        num_completions=(a.num_samples, b.num_samples),
        settings=(settings[0].digest, settings[1].digest),
        differing=differing,
        doubts=(*shown, *_undigested(names, settings)),
        strict=tuple(f"Accuracy may be higher: {sign}." for sign in strict),
        baseline=baseline,
        mcnemar_p_value=None if a.accuracy is None else mcnemar_p_value(a.main_PG[:, 0], b.main_PG[:, 0]),
        numbers={name: paired_difference(of_a[name], of_b[name]) for name in of_a},
        by=by,
        categories={} if by is None else _categories(a, b, b.labels[by]),
        better=_moved(a, b, places_a, places_b, sign=1),
        worse=_moved(a, b, places_a, places_b, sign=-1),
        num_unpaired=unpaired,
    )


def _undigested(names: tuple[str, str], settings: tuple[EvalSettings, EvalSettings]) -> Iterator[str]:
    """A sentence where an evaluation is of a version that saved no digests."""
    old = [name for name, saved in zip(names, settings, strict=True) if not saved.rows]
    if old:
        yield (
            f"Without digests of rows and prompts ({', '.join(old)}: saved by an earlier version), whether both are of "
            "the same rows is known of short columns alone."
        )


def pair(a_P: Sequence[str], b_P: Sequence[str]) -> tuple[list[int], list[int]]:
    """Places of the same prompts in two lists of keys, in B's order; the second of two equal ones goes with the second.

    >>> pair(["x", "y", "x"], ["x", "z", "x", "y"])
    ([0, 2, 1], [0, 2, 3])
    """
    left: dict[str, list[int]] = defaultdict(list)
    for place, key in reversed(list(enumerate(a_P))):
        left[key].append(place)
    pairs = [(left[key].pop(), place) for place, key in enumerate(b_P) if left.get(key)]
    return [i for i, _ in pairs], [j for _, j in pairs]


def standing(scores: EvalScores) -> list[str]:
    """Sentences about one model: signs in its completions, and a baseline that it is not above."""
    doubts, strict, beside = _reasons(scores)
    return [
        *(f"{sign.what}.{' The reward may be hacked.' if sign.is_paid else ''}" for sign in doubts),
        *(f"{sentence}." for sentence in strict),
        *([beside] if beside else []),
    ]


def _reasons(b: EvalScores) -> tuple[list[Sign], list[str], str]:
    """Signs of a hacked reward, signs of one that is too strict, and a baseline that is not beaten."""
    doubts = [sign for sign in b.signs if sign.kind in DOUBTS]
    strict = [sign.what for sign in b.signs if sign.kind not in DOUBTS]
    return doubts, strict, _baseline(b)


def _baseline(b: EvalScores) -> str:
    """A sentence, where the strongest baseline scores as much as the model, or where that cannot be told."""
    strongest = b.baselines.strongest(b.keys_P, b.main_P)
    if strongest is None:
        return ""
    baseline, above = strongest
    if above.shown and above.change.value > 0:
        return ""
    text = f" {baseline.text[:60]!r}" if baseline.text else ""
    alike = "" if above.shown else "; no difference is shown between the two"
    return (
        f"Without a model, the {baseline.name}{text} on every prompt has {b.metric} {above.a:.3f}, the model "
        f"{above.b:.3f}{alike} ({p_text(above.p_value)})."
    )


def regression_check(test: PairedTest, data: str) -> str:
    """One sentence about a second set: whether B lost there, and how much it may have lost unseen."""
    found = test.main
    metric = test.metric
    if test.differing:
        return f"Not known whether B lost on {data}: not the models alone were compared ({'; '.join(test.differing)})."
    for name, lost in test.fallen.items():
        return f"Regression on {data}: {name} fell from {lost.a:.3f} to {lost.b:.3f} ({p_text(lost.p_value)})."
    numbers = f"{metric} {found.a:.3f} and {found.b:.3f}"
    if found.num_prompts < FEWEST:
        return f"Not known whether B lost on {data}: {numbers}; {found.num_prompts} prompts are too few to show it."
    low = found.change.low
    unseen = f"; a loss of up to {-low:.3f} is not ruled out" if low < 0 else ""
    return f"No regression shown on {data}: {numbers}{unseen}."


def signed(found: Difference) -> str:
    """`+0.100 [-0.020, +0.210]`."""
    ends = f" [{found.change.low:+.3f}, {found.change.high:+.3f}]" if found.change.low == found.change.low else ""
    return f"{found.change.value:+.3f}{ends}"


def p_text(p_value: float) -> str:
    """
    >>> p_text(0.00002), p_text(0.043)
    ('p < 0.001', 'p = 0.043')
    """
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


def _check_same_rewards(a: EvalScores, b: EvalScores) -> None:
    """By the same functions, weighted alike, or their numbers mean different things."""
    for what, of_a, of_b in (
        ("reward functions", a.names_K, b.names_K),
        ("reward weights", a.weights_K.tolist(), b.weights_K.tolist()),
        ("the reward that says right or wrong", [a.accuracy], [b.accuracy]),
    ):
        if of_a != of_b:
            both = " and ".join(", ".join(map(str, values)) for values in (of_a, of_b))
            raise ConfigError(
                f"These evaluations cannot be compared: {what} {both}. Evaluate both with the same --recipe.",
                what=what,
                both=both,
            )


def _column(scores: EvalScores, by: str | None) -> str | None:
    if by is None:
        return CATEGORY if CATEGORY in scores.labels else None
    if by not in scores.labels:
        there = ", ".join(scores.labels) or "none"
        near = nearest(by, scores.labels)
        raise ConfigError(
            f"--by {by}: no such column. There are: {there}.",
            fix=f"Did you mean `{near}`?" if near else "",
            by=by,
            there=there,
            near=near,
        )
    return by


def _numbers(scores: EvalScores, k: int) -> dict[str, np.ndarray]:
    """By prompt, under the names of the table."""
    found: dict[str, np.ndarray] = {}
    if scores.right_PG is not None:
        found["accuracy"] = mean_of_prompt(scores.right_PG)
        if k > 1:
            found[f"pass@{k}"] = pass_at_k(scores.right_PG, k)
    return {
        **found,
        "reward": mean_of_prompt(scores.reward_PG),
        **{f"  {name}": mean_of_prompt(scores.by_name(name)) for name in scores.names_K},
        "length, tokens": scores.tokens_PG.mean(axis=1),
        "cut off at the limit": scores.truncated_PG.mean(axis=1),
    }


def _categories(a: EvalScores, b: EvalScores, labels: Sequence[str | None]) -> dict[str, Difference]:
    """By value; each interval at 1 - 5 % / number of values (Bonferroni), so that all hold together at 95 %."""
    values = sorted({label for label in labels if label is not None})
    level = 1 - (1 - LEVEL) / max(len(values), 1)
    places = {value: [i for i, label in enumerate(labels) if label == value] for value in values}
    return {value: paired_difference(a.main_P[i], b.main_P[i], level=level) for value, i in places.items()}


def _moved(
    a: EvalScores, b: EvalScores, places_a: Sequence[int], places_b: Sequence[int], *, sign: int
) -> tuple[ChangedPrompt, ...]:
    """Prompts that moved up (sign 1) or down (-1), most first; among equals those whose reward moved more."""
    change_P = b.main_P - a.main_P
    gained_P = np.nan_to_num(sign * change_P)
    reward_P = np.nan_to_num(sign * (mean_of_prompt(b.reward_PG) - mean_of_prompt(a.reward_PG)))
    both = min(a.num_samples, b.num_samples)
    by_completion_PG = np.nan_to_num(sign * (b.main_PG[:, :both] - a.main_PG[:, :both]))
    order = sorted(np.flatnonzero(gained_P > 0).tolist(), key=lambda i: (-gained_P[i], -reward_P[i], i))
    return tuple(
        ChangedPrompt(place_a=places_a[i], place_b=places_b[i], completion=most, change=float(change_P[i]))
        for i, most in zip(order, by_completion_PG[order].argmax(axis=1).tolist(), strict=True)
    )
