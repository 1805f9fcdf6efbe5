"""Advantages by hand; against TRL's code they are compared in tests/parity."""

from __future__ import annotations

import math

import numpy as np
import pytest

from podium.algorithm.advantages import (
    AGGREGATIONS,
    ESTIMATORS,
    Advantages,
    AdvantageSettings,
    advantages,
    combine,
    turn_advantages,
)
from podium.errors import ConfigError

NAN = math.nan
SCALES = ("group", "batch", "none")


def has_signal_P(found: Advantages) -> np.ndarray:
    """Groups from which something can be learnt."""
    return (found.advantages_PG != 0).any(axis=1)


def of(rewards, *, weights=(1.0,), scale="group", aggregation="sum_then_normalize") -> Advantages:
    """Advantages of rewards given as [P, G] (one function) or [P, G, K]."""
    array = np.array(rewards, dtype=float)
    settings = AdvantageSettings(weights_K=np.array(weights), scale_rewards=scale, aggregation=aggregation)
    return advantages(array if array.ndim == 3 else array[:, :, None], settings)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("none", [[-1, 1], [0.5, -0.5]]),
        ("group", [[-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)], [0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)]]),
        # of 0, 2, 4, 3: mean 2.25, squares 5.0625 + 0.0625 + 3.0625 + 0.5625, over 3
        ("batch", [[x / ((8.75 / 3) ** 0.5 + 1e-4) for x in row] for row in ([-1, 1], [0.5, -0.5])]),
    ],
)
def test_scalings_by_hand(scale: str, expected: list) -> None:
    np.testing.assert_allclose(of([[0, 2], [4, 3]], scale=scale).advantages_PG, expected, rtol=1e-12)


def test_weights_and_missing_rewards() -> None:
    """The second function has nothing to say of the second completion, neither of the third."""
    got = of([[[1, 4], [2, NAN], [NAN, NAN], [3, 0]]], weights=(2.0, 0.5), scale="none")
    np.testing.assert_array_equal(got.reward_PG, [[4, 4, NAN, 6]])
    np.testing.assert_allclose(got.advantages_PG, [[-2 / 3, -2 / 3, 0, 4 / 3]])
    np.testing.assert_allclose(got.std_PG, [[(4 / 3) ** 0.5] * 4])


def test_normalize_then_sum_lets_no_function_drown_another() -> None:
    """A function a hundred times as large weighs no more: here both say the opposite, and cancel exactly."""
    got = of([[[0, 100], [1, 0]], [[0, 0], [1, 100]]], weights=(1.0, 1.0), aggregation="normalize_then_sum")
    np.testing.assert_allclose(got.advantages_PG[0], 0, atol=1e-4)
    assert got.advantages_PG[1, 1] == pytest.approx(-got.advantages_PG[1, 0])
    assert got.advantages_PG[1, 1] > 1


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_give_exactly_nothing(scale: str, aggregation: str) -> None:
    """Not 1e-13: what is exactly 0 can be left out. (The mean of three times 0.1 is not 0.1 in floating point.)"""
    learnable = [[0, 1], [1, 0], [0.3, 0.3], [0.3, 0.3]]
    got = of(
        [[[0.1, 0.7]] * 4, learnable, [[NAN, 0.1], [NAN, NAN], [NAN, 0.1], [NAN, 0.1]]],
        weights=(1.0, 0.7),
        scale=scale,
        aggregation=aggregation,
    )
    assert (got.advantages_PG[[0, 2]] == 0).all()
    assert has_signal_P(got).tolist() == [False, True, False]


@pytest.mark.parametrize("weight", [1.0, 1000.0, 0.001])
def test_equal_sums_of_unequal_rewards_are_equal(weight: float) -> None:
    """0.1 + 0.2 and 0.3 + 0.0 are the same reward, whatever their last bit says."""
    got = of([[[0.1, 0.2], [0.3, 0.0]]], weights=(weight, weight))
    assert 0.1 + 0.2 != 0.3
    assert (got.advantages_PG == 0).all()
    assert got.std_PG.tolist() == [[0.0, 0.0]]


def test_small_differences_are_not_dust() -> None:
    got = of([[1e-6, 2e-6]], scale="none")
    np.testing.assert_allclose(got.advantages_PG, [[-5e-7, 5e-7]])
    got = of([[1000.0, 1000.0 + 1e-6]], scale="none")
    np.testing.assert_allclose(got.advantages_PG, [[-5e-7, 5e-7]], rtol=1e-6)
    assert has_signal_P(of([[1e-13, 3e-13]], scale="none")).all()
    next_to_a_large_one = of([[[9.0, 1e-13], [9.0, 3e-13]]], weights=(1.0, 1.0), aggregation="normalize_then_sum")
    assert has_signal_P(next_to_a_large_one).all(), "each function has its own scale"


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_one_scored_completion_teaches_nothing(scale: str, aggregation: str) -> None:
    """Alone in its group; or the only one that a function spoke of."""
    assert of([[3.0], [5.0]], scale=scale, aggregation=aggregation).advantages_PG.tolist() == [[0.0], [0.0]]
    assert of([[3.0, NAN, NAN]], scale=scale, aggregation=aggregation).advantages_PG.tolist() == [[0.0, 0.0, 0.0]]
    nothing = of([[NAN, NAN]], scale=scale, aggregation=aggregation)
    assert nothing.advantages_PG.tolist() == [[0.0, 0.0]]
    assert np.isnan(nothing.reward_PG).all()


def test_groups_are_independent_but_for_the_batch() -> None:
    """Adding a group changes no other group's advantages unless the batch scales them."""
    alone, together = [[0, 1, 5]], [[0, 1, 5], [9, 0, 0]]
    for scale, same in (("group", True), ("none", True), ("batch", False)):
        a, b = of(alone, scale=scale).advantages_PG[0], of(together, scale=scale).advantages_PG[0]
        assert np.array_equal(a, b) == same


def test_share_without_spread_is_of_completions() -> None:
    """One scored completion has nothing to be compared with; a batch's deviation gives equal rewards no advantage."""
    got = of([[1, 1], [0, 1], [NAN, 1], [NAN, NAN]])
    assert got.zero_std_PG.tolist() == [[True, True], [False, False], [True, True], [True, True]]
    for scale in SCALES:
        assert of([[NAN, NAN, 3.0], [NAN, 7.0, NAN]], scale=scale).zero_std_PG.all()
        assert of([[1, 1], [0, 0]], scale=scale).zero_std_PG.all()


def test_combine_keeps_leading_axes() -> None:
    rewards = np.array([[[1.0, 2.0], [NAN, 2.0]], [[1.0, NAN], [NAN, NAN]]])
    np.testing.assert_array_equal(combine(rewards, np.array([1.0, 10.0])), [[21.0, 20.0], [1.0, NAN]])


def test_infinite_rewards_are_a_contradiction() -> None:
    with pytest.raises(AssertionError, match="finite"):
        of([[math.inf, 0]])


def of_completion(steps, *, discount=1.0, scale="none") -> np.ndarray:
    """Advantages of turns, where the sum of the step rewards is the only reward."""
    steps = np.array(steps, float)
    settings = AdvantageSettings(weights_K=np.ones(1), scale_rewards=scale, turn_discount=discount)
    whole = advantages(steps.sum(axis=1)[None, :, None], settings)
    return turn_advantages(steps, whole.advantages_PG[0], whole.std_PG[0], settings)


def test_advantages_of_turns_by_hand() -> None:
    # totals 3 and 1; before turn 1 there was 1 in the one and 1 in the other, before turn 2 there was 3 and 1
    np.testing.assert_allclose(of_completion([[1, 2, 0], [1, 0, 0]]), [[1, 1, 0], [-1, -1, 0]], atol=1e-12)
    # returns with a half: 1 + 2/2 = 2, 2, 0 and 1, 0, 0
    np.testing.assert_allclose(
        of_completion([[1, 2, 0], [1, 0, 0]], discount=0.5), [[0.5, 1, 0], [-0.5, -1, 0]], atol=1e-12
    )
    np.testing.assert_allclose(of_completion([[1, 2, 0], [1, 0, 0]], discount=0.0), [[0, 1, 0], [0, -1, 0]], atol=1e-12)
    scaled = of_completion([[1, 2, 0], [1, 0, 0]], scale="group")
    np.testing.assert_allclose(scaled, np.array([[1, 1, 0], [-1, -1, 0]]) / (2**0.5 + 1e-4), atol=1e-12)


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
def test_a_turn_more_without_reward_changes_no_advantage(discount: float) -> None:
    steps = np.random.default_rng(0).integers(0, 3, (6, 4)).astype(float)
    longer = np.concatenate([steps, np.zeros((6, 3))], axis=1)
    np.testing.assert_allclose(of_completion(longer, discount=discount)[:, :4], of_completion(steps, discount=discount))


def test_turns_without_step_rewards_and_flat_groups() -> None:
    settings = AdvantageSettings(weights_K=np.ones(1), turn_discount=0.9)
    found = turn_advantages(np.zeros((2, 3)), np.array([1.0, -1.0]), np.ones(2), settings)
    np.testing.assert_array_equal(found, [[1, 1, 1], [-1, -1, -1]])
    assert not of_completion([[1, 0], [0, 1]], scale="group").any()  # equal totals: nothing is divided by 0
    np.testing.assert_allclose(of_completion([[1, 0], [0, 1]]), [[0, -0.5], [0, 0.5]])


def test_a_completion_without_a_reward_has_no_part_in_the_turns_of_others() -> None:
    steps, settings = [[1.0, 2], [1, 0]], AdvantageSettings(weights_K=np.ones(1), turn_discount=0.5)
    own, std = np.array([1.0, -1.0, 0.0]), np.ones(3)
    found = turn_advantages(np.array([*steps, [np.nan] * 2]), own, std, settings)
    np.testing.assert_allclose(found[:2], turn_advantages(np.array(steps), own[:2], std[:2], settings))
    assert not found[2].any()
    assert not turn_advantages(np.full((3, 2), np.nan), np.zeros(3), std, settings).any()


# ---- estimators, against the papers' sums in plain Python ----

TOKENS = [[3, 1, 4, 2], [5, 5, 1, 2]]


def estimated(name: str, rewards: list, tokens: list = TOKENS) -> np.ndarray:
    settings = AdvantageSettings(weights_K=np.ones(1), estimator=name)
    return advantages(np.array(rewards, float)[:, :, None], settings, np.array(tokens)).advantages_PG


def of_group(name: str, rewards: list[float], tokens: list[int], everyone: list[list[float]]) -> list[float]:
    """The estimators once more, of one group without a missing reward."""
    mean, count = sum(rewards) / len(rewards), len(rewards)
    flat = [r for group in everyone for r in group]
    if name == "rloo":
        return [r - (sum(rewards) - r) / (count - 1) for r in rewards]
    if name == "reinforce_plus_plus":
        return [(r - np.mean(flat)) / (np.std(flat, ddof=1) + 1e-4) for r in rewards]
    if name == "reinforce_plus_plus_baseline":
        apart = [r - sum(group) / len(group) for group in everyone for r in group]
        return [(r - mean) / (np.std(apart, ddof=1) + 1e-4) for r in rewards]
    if name == "maxrl":
        return [(r - mean) / (mean + 1e-6) for r in rewards]
    if name == "opo":
        return [r - sum(t * x for t, x in zip(tokens, rewards, strict=True)) / sum(tokens) for r in rewards]
    assert name == "raft", f"the numbers of {name} are not worked out here"
    return [float(r == max(rewards)) for r in rewards]


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "grpo"])
def test_estimators_are_the_papers(name: str) -> None:
    rewards = [[1.0, 0.0, 0.0, 0.5], [2.0, 1.0, 0.0, 0.0]]
    expected = [of_group(name, *each, rewards) for each in zip(rewards, TOKENS, strict=True)]
    np.testing.assert_allclose(estimated(name, rewards), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_flat_group_is_nothing_and_a_missing_reward_is_left_out(name: str) -> None:
    found = estimated(name, [[0.1 + 0.2, 0.3, 0.3, 0.3], [1.0, NAN, 0.0, 1.0]])
    if name == "reinforce_plus_plus":  # it compares with the round
        np.testing.assert_allclose(found[0], found[0][0])
    else:
        assert (found[0] == 0).all()
    assert found[1, 1] == 0
    assert found[1, 0] == found[1, 3] > found[1, 2]
    alone = estimated(name, [[0.3, 0.3, 0.3], [1.0, 0.0, 1.0]], [[3, 4, 2], [5, 1, 2]])
    if not name.startswith("reinforce"):  # whose deviation is that of the whole round
        np.testing.assert_allclose(found[1, [0, 2, 3]], alone[1], rtol=1e-9)


def test_maxrl_refuses_a_mean_below_zero() -> None:
    with pytest.raises(ConfigError, match=r"a group, and one has -0\.25") as raised:
        estimated("maxrl", [[0.0, -1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert "rloo" in raised.value.fix
    flat = [[-1.0] * 4, [1.0, 0.0, 0.0, 0.0]]
    assert (estimated("maxrl", flat)[0] == 0).all(), "nothing is divided where nothing differs"
