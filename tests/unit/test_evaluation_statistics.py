"""The statistics of evaluations: how often they are wrong when nothing differs, and how often they see what does.

Simulated as real evaluations are: each prompt has its own chance of a right completion. In the quickstart's own
training rollouts right and wrong correlate within a prompt by 0.46 to 0.79, so 0.7 is taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta, chi2, permutation_test

from podium.errors import ConfigError, DataError
from podium.evaluation.comparison import PairedTest, compare, pair, regression_check
from podium.evaluation.measured import EvalScores
from podium.evaluation.statistics import (
    Difference,
    Interval,
    mcnemar_p_value,
    mean_interval,
    paired_difference,
    pass_at_k,
    share_interval,
    sign_flip_p_value,
)
from tests.evaluations import ALIKE, SETTINGS, paired_test, verdict

CORRELATION = 0.7
RUNS = 200
RESAMPLES = 999
NAMES = ("A", "B")


def chances(mean: float, uniform_P: np.ndarray, correlation: float = CORRELATION) -> np.ndarray:
    """Each prompt's chance of a right completion: beta-distributed, so that completions correlate by as much."""
    size = 1 / correlation - 1
    return beta.ppf(uniform_P, mean * size, (1 - mean) * size)


def shares(rng: np.random.Generator, chance_P: np.ndarray, k: int) -> np.ndarray:
    """Share of k completions that are right, by prompt."""
    return rng.binomial(k, chance_P) / k


def sentences(draw: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]) -> list[str]:
    """The verdicts of 200 comparisons."""
    rng = np.random.default_rng(7)
    return [verdict(paired_difference(*draw(rng), resamples=RESAMPLES)) for _ in range(RUNS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mean", "prompts", "k"), [(0.5, 300, 4), (0.65, 80, 4), (0.03, 80, 1), (0.5, 12, 8), (0.97, 300, 2)]
)
def test_two_copies_of_a_model_show_no_difference(mean: float, prompts: int, k: int) -> None:
    def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        chance_P = chances(mean, rng.random(prompts))
        return shares(rng, chance_P, k), shares(rng, chance_P, k)

    said = sentences(draw)
    assert sum(sentence.startswith("No difference shown") for sentence in said) >= 190


@pytest.mark.slow
def test_ten_points_are_found_with_300_prompts() -> None:
    """4 completions each; half of the prompts are as hard for B as for A, the others are drawn anew."""

    def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        uniform_P = rng.random(300)
        other_P = np.where(rng.random(300) < 0.5, uniform_P, rng.random(300))
        return shares(rng, chances(0.45, uniform_P), 4), shares(rng, chances(0.55, other_P), 4)

    said = sentences(draw)
    assert sum(sentence.startswith("Better") for sentence in said) >= 180
    assert not any(sentence.startswith("Worse") for sentence in said)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("mean", "prompts", "k"), [(0.5, 300, 4), (0.03, 80, 4), (0.02, 80, 1), (0.97, 80, 1)])
def test_share_intervals_hold_what_is_true(mean: float, prompts: int, k: int) -> None:
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        found = share_interval(shares(rng, chances(mean, rng.random(prompts), 0.5), k), k)
        held += found.low <= mean <= found.high
    assert held >= 0.92 * 400


@pytest.mark.cases(1)
@pytest.mark.parametrize("prompts", [12, 80])
def test_mean_intervals_hold_what_is_true_of_few_prompts_too(prompts: int) -> None:
    rng = np.random.default_rng(4)
    held = 0
    for _ in range(400):
        found = mean_interval(rng.gamma(4.0, size=prompts), resamples=RESAMPLES)
        held += found.low <= 4.0 <= found.high
    assert held >= 0.92 * 400
    assert held < 400


# ---- by hand ----


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    """Against counting all subsets."""
    from itertools import combinations

    for n in (1, 4, 6):
        for right in range(n + 1):
            row = np.array([1.0] * right + [0.0] * (n - right))
            for k in range(1, n + 1):
                subsets = list(combinations(row, k))
                expected = sum(max(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(row[None], k)[0] == pytest.approx(expected, abs=1e-12)


def test_sign_flips_are_counted_exactly_where_there_are_few() -> None:
    moved = np.array([0.5, 0.25, 0.75, -0.25])
    signs = np.array(np.meshgrid(*[[-1, 1]] * 4)).reshape(4, -1).T
    expected = np.mean(np.abs(signs @ moved) >= abs(moved.sum()) - 1e-12)
    assert sign_flip_p_value(moved) == pytest.approx(expected)
    assert sign_flip_p_value(np.append(moved, [0.0] * 50)) == pytest.approx(expected)


def test_with_one_completion_the_test_is_mcnemar_s() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.random(60) < 0.4).astype(float), (rng.random(60) < 0.6).astype(float)
    assert sign_flip_p_value(b - a) == mcnemar_p_value(a, b)
    assert mcnemar_p_value(a, b) == pytest.approx(
        permutation_test((b - a,), np.mean, permutation_type="samples", n_resamples=20_000, rng=1).pvalue, abs=0.02
    )
    discordant = (int((b > a).sum()), int((a > b).sum()))
    with_correction = chi2.sf((abs(discordant[0] - discordant[1]) - 1) ** 2 / sum(discordant), 1)
    assert mcnemar_p_value(a, b) == pytest.approx(with_correction, abs=0.02)


def test_what_is_not_known_is_left_out() -> None:
    found = paired_difference(np.array([0.0, math.nan, 1.0]), np.array([1.0, 1.0, math.nan]))
    assert (found.num_prompts, found.a, found.b) == (1, 0.0, 1.0)
    assert mcnemar_p_value(np.array([math.nan, 0.0]), np.array([1.0, 1.0])) == 1.0
    assert math.isnan(share_interval(np.array([math.nan]), 1).value)


# ---- what is said ----


def difference(value: float, low: float, high: float, p_value: float, num_prompts: int = 80) -> Difference:
    return Difference(
        a=0.5,
        b=0.5 + value,
        change=Interval(value=value, low=low, high=high),
        p_value=p_value,
        num_prompts=num_prompts,
        num_better=9,
        num_worse=3,
    )


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            difference(0.25, 0.1, 0.4, 0.0002),
            "Better: accuracy rose from 0.500 (A) to 0.750 (B), by +0.250 [+0.100, +0.400], on 80 prompts "
            "(correct; sign-flip test, p < 0.001).",
        ),
        (difference(-0.25, -0.4, -0.1, 0.01), "Worse: accuracy fell from 0.500 (A) to 0.250 (B), by -0.250"),
        pytest.param(
            difference(0.066, 0.007, 0.132, 0.063),
            "No difference shown: accuracy 0.500 (A) and 0.566 (B), difference +0.066 [+0.007, +0.132], on 80 prompts "
            "(correct; sign-flip test, p = 0.063). The interval leaves 0 out; the test, which decides, finds as much "
            "by chance in 6 % of cases.",
            marks=pytest.mark.defect("H10", "an interval without 0 beside a test that shows nothing"),
        ),
        (difference(0.05, -0.02, 0.12, 0.2), "No difference shown: accuracy 0.500 (A) and 0.550 (B), difference"),
        (difference(0.5, math.nan, math.nan, 0.06, 5), "5 prompts are too few to show one."),
    ],
)
def test_verdicts(found: Difference, sentence: str) -> None:
    assert sentence in verdict(found)


def test_no_regression_shown_is_not_no_regression() -> None:
    def said(*numbers: float, **given: Any) -> str:
        return regression_check(paired_test(difference(*numbers), **given), "x")

    assert said(-0.02, -0.07, 0.03, 0.4).endswith("a loss of up to 0.070 is not ruled out.")
    assert said(-0.1, -0.2, -0.05, 0.001).startswith("Regression on x: ")
    assert said(0.1, 0.05, 0.2, 0.001) == "No regression shown on x: accuracy 0.500 and 0.600."
    assert said(0.1, 0.05, 0.2, 0.001, differing=("other rows",)).startswith("Not known whether B lost on x: ")


LOST, HELD, WON = difference(-0.4, -0.5, -0.3, 0.001), difference(0.0, -0.1, 0.1, 0.9), difference(0.3, 0.2, 0.4, 0.001)


@pytest.mark.parametrize("accuracy", [HELD, WON, LOST])
def test_a_model_whose_reward_fell_is_worse_whatever_its_accuracy(accuracy: Difference) -> None:
    test = paired_test(accuracy, paid=LOST)
    assert test.verdict.startswith("Worse: ")
    assert not test.is_better
    assert "Better" not in test.verdict
    assert "fell from 0.500 (A) to 0.100 (B)" in test.verdict
    assert regression_check(test, "x").startswith("Regression on x: reward fell from 0.500 to 0.100")


def test_a_reward_that_rose_alone_is_no_better_model() -> None:
    assert paired_test(HELD, paid=WON).verdict.startswith("No difference shown: accuracy")
    assert paired_test(LOST, paid=WON).verdict.startswith("Worse: accuracy fell")
    assert paired_test(WON, paid=HELD).verdict.startswith("Better: accuracy rose")


# ---- whole comparisons ----


def measured(right_PG: np.ndarray, keys: list[str] | None = None, labels: list[str] | None = None) -> EvalScores:
    count = len(right_PG)
    return EvalScores(
        names_K=("correct",),
        weights_K=np.ones(1),
        accuracy="correct",
        keys_P=tuple(keys or map(str, range(count))),
        rewards_PGK=np.asarray(right_PG, float)[:, :, None],
        tokens_PG=np.full(np.shape(right_PG), 5),
        truncated_PG=np.zeros(np.shape(right_PG), bool),
        labels={} if labels is None else {"category": labels},
    )


def test_an_evaluation_against_itself() -> None:
    right = np.random.default_rng(0).integers(0, 2, (40, 4))
    found = compare(measured(right), measured(right), names=NAMES, settings=ALIKE)
    assert found.verdict.startswith("No difference shown: ")
    assert found.verdict.endswith("for both, the same on 40 prompts (correct).")
    assert (found.main.change.value, found.better, found.worse) == (0.0, (), ())


def test_prompts_are_paired_by_what_they_ask_not_by_their_place() -> None:
    a = measured(np.array([[1], [0], [1]]), ["x", "y", "z"])
    b = measured(np.array([[1], [1], [0], [1]]), ["w", "z", "y", "x"])
    found = compare(a, b, names=NAMES, settings=ALIKE)
    assert found.main.change.value == 0.0
    assert found.num_unpaired == (0, 1)
    assert pair(a.keys_P, b.keys_P) == ([2, 1, 0], [1, 2, 3])


def test_what_moved_is_named_with_the_completion_that_shows_it() -> None:
    a = measured(np.array([[0, 0], [1, 0], [1, 1], [0, 0]]))
    b = measured(np.array([[0, 1], [1, 1], [0, 1], [1, 1]]))
    found = compare(a, b, names=NAMES, settings=ALIKE)
    assert [(x.place_a, x.completion, x.change) for x in found.better] == [(3, 0, 1.0), (0, 1, 0.5), (1, 1, 0.5)]
    assert [(x.place_b, x.completion, x.change) for x in found.worse] == [(2, 0, -0.5)]


def test_intervals_of_categories_hold_together() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 2, (80, 4)), rng.integers(0, 2, (80, 4))
    one = compare(measured(a, labels=["x"] * 80), measured(b, labels=["x"] * 80), names=NAMES, settings=ALIKE)
    labels = ["x"] * 40 + [f"other {i % 4}" for i in range(40)]
    several = compare(measured(a, labels=labels), measured(b, labels=labels), names=NAMES, settings=ALIKE)
    assert one.categories["x"].change == one.main.change
    assert list(several.categories) == ["other 0", "other 1", "other 2", "other 3", "x"]
    alone = paired_difference(a[:40].mean(1), b[:40].mean(1)).change
    wide = several.categories["x"].change
    assert wide.low < alone.low
    assert alone.high < wide.high


def test_other_rewards_are_not_compared() -> None:
    one = measured(np.ones((8, 2)))
    other = replace(one, weights_K=np.array([2.0]))
    with pytest.raises(ConfigError, match=r"reward weights 1\.0 and 2\.0"):
        compare(one, other, names=NAMES, settings=ALIKE)
    with pytest.raises(ConfigError, match=r"--by difficulty: no such column.* There are: none"):
        compare(one, one, names=NAMES, settings=ALIKE, by="difficulty")


def test_a_rise_under_other_settings_is_called_neither_better_nor_worse() -> None:
    low, high = np.zeros(40), np.ones(40)
    for a, b in ((low, high), (high, low), (low, low)):
        said = verdict(paired_difference(a, b), differing=("`max_tokens` 3 and 60",))
        assert said.startswith("Not the models alone were compared (`max_tokens` 3 and 60): accuracy ")
        assert not re.search("better|worse|no difference", said, re.IGNORECASE)
    assert verdict(paired_difference(low, high)).startswith("Better: ")


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"rows": "x", "prompts": "x", "chat_template": "x"}, "other rows"),
        ({"prompts": "x", "chat_template": "x"}, "other prompts of these rows"),
        ({"chat_template": "x"}, "another chat template, tools or prompt length"),
        ({"top_p": 0.5}, "`top_p` 1.0 and 0.5"),
        ({"code": ("x",)}, "other code of `correct`"),
        ({"rows": "x", "greedy": True, "code": ("x",)}, "other rows; `greedy` False and True; other code of `correct`"),
    ],
)
def test_what_differs_is_said_first_and_nothing_is_better(changes: dict[str, Any], first: str) -> None:
    a, b = measured(np.zeros((40, 4))), measured(np.ones((40, 4)))
    found = compare(a, b, names=NAMES, settings=(SETTINGS, replace(SETTINGS, **changes)))
    assert found.verdict.startswith(f"Not the models alone were compared ({first}): ")
    assert not found.is_better
    assert len(set(found.settings)) == 2
    assert compare(a, b, names=NAMES, settings=ALIKE).is_better
    apart = replace(b, keys_P=tuple(f"other {i}" for i in range(40)))
    with pytest.raises(DataError, match="no prompt in common.*other rows" if "rows" in changes else "no prompt in"):
        compare(a, apart, names=NAMES, settings=(SETTINGS, replace(SETTINGS, **changes)))


def test_a_model_with_another_vocabulary_has_a_chat_template_of_its_own() -> None:
    assert SETTINGS.differing(replace(SETTINGS, chat_template="x", vocabulary="x")) == []
    assert SETTINGS.differing(replace(SETTINGS, prompts="x", chat_template="x", vocabulary="x")) != []


def test_without_digests_a_rise_is_doubtful() -> None:
    """Evaluations of earlier versions have none."""
    old = replace(SETTINGS, rows="", prompts="", chat_template="", vocabulary="", code=())
    a, b = measured(np.zeros((40, 4))), measured(np.ones((40, 4)))
    for settings, names in (((old, SETTINGS), "A"), ((SETTINGS, old), "B"), ((old, old), "A, B")):
        found = compare(a, b, names=NAMES, settings=settings)
        assert found.verdict.startswith("Doubtful: accuracy rose")
        assert f"Without digests of rows and prompts ({names}: " in found.verdict
        assert not found.is_better


def test_a_verdict_has_its_grounds() -> None:
    """It names the reward, how many prompts, and p; and none is made without the record."""
    found = compare(measured(np.zeros((40, 4))), measured(np.ones((40, 4))), names=NAMES, settings=ALIKE)
    assert "on 40 prompts (correct; sign-flip test, p < 0.001)." in found.verdict
    kept = found.to_json()
    assert (kept["reward"], kept["main"]["num_prompts"], kept["num_completions"]) == ("correct", 40, [4, 4])
    assert (kept["settings"], kept["verdict"]) == ([SETTINGS.digest] * 2, found.verdict)
    every = {field.name: getattr(found, field.name) for field in fields(PairedTest)}
    assert PairedTest(**every).verdict == found.verdict
    for name in every:
        with pytest.raises(TypeError, match=name):
            PairedTest(**{key: value for key, value in every.items() if key != name})
    unnamed = replace(measured(np.zeros((40, 4))), accuracy=None)
    risen = compare(unnamed, replace(unnamed, rewards_PGK=np.ones((40, 4, 1))), names=NAMES, settings=ALIKE)
    assert risen.verdict.startswith("Reward rose: ")
