"""The success history against sums in plain Python, and the draw against the weights."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from podium import GRPOConfig
from podium.errors import ConfigError, overrule
from podium.trainer.history import (
    FORGOTTEN,
    HALF_LIFE,
    LEAST,
    PRIOR,
    SuccessHistory,
    balanced,
    weighted_draw,
)
from podium.trainer.rounds import Plan, PromptOrder, RoundKey

PLAN = Plan(prompts_per_round=4, num_generations=4, shares=1, iterations=1, accumulation=1, ranks=1, rank=0)
ROWS = [{"prompt": str(n), "answer": "no" if n % 4 else "yes"} for n in range(40)]


def after(*rounds: dict[int, list[float]], history: SuccessHistory | None = None) -> SuccessHistory:
    history = history or SuccessHistory(num_completions=4)
    for each in rounds:
        history = history.after(list(each), np.array([*each.values()], float))
    return history


def test_rates_are_those_of_the_equation() -> None:
    history = after({0: [1, 1, 0, 0], 1: [1, 1, 1, 1]}, {1: [0, 0, 0, 0], 2: [math.nan, 1, 0, 0]})
    fades = 0.5 ** (1 / HALF_LIFE)
    n = {0: 4 * fades**2, 1: (4 * fades + 4) * fades, 2: 3 * fades}
    s = {0: 2 * fades**2, 1: 4 * fades**2, 2: fades}
    mean = sum(s.values()) / sum(n.values())
    expected = [(s[r] + PRIOR * mean) / (n[r] + PRIOR) for r in range(3)] + [mean]
    np.testing.assert_allclose(history.rates(4), expected, rtol=1e-12)
    weights = [max(1 - p**4 - (1 - p) ** 4, LEAST) for p in expected]
    np.testing.assert_allclose(history.weights(4), weights, rtol=1e-12)


def test_sometimes_solved_rows_weigh_most_and_the_others_come_again() -> None:
    told = {0: [1, 1, 1, 1], 1: [0, 0, 0, 0], 2: [1, 0, 1, 0]}
    history = after(*[told] * 6)
    solved, hopeless, sometimes = history.weights(3)[:3]
    assert sometimes > 2 * solved
    assert sometimes > 2 * hopeless
    later = after(*[{3: [1, 0, 1, 0]}] * 100, history=history)
    assert later.weights(4)[0] > 0.9 * later.weights(4)[2], "evidence fades"
    forgotten = after(*[{3: [1, 0, 1, 0]}] * (HALF_LIFE * 10), history=history)
    assert set(forgotten.rows) == {3}
    assert all(each.completions > FORGOTTEN for each in forgotten.rows.values())


def test_nothing_known_is_even_odds() -> None:
    empty = SuccessHistory(num_completions=4)
    assert empty.weights(3).tolist() == [1 - 2 * 0.5**4] * 3
    assert empty.metrics(3) == {"rows/known": 0.0, "rows/solved": 0.0, "rows/hopeless": 0.0}
    unscored = after({0: [math.nan] * 4})
    assert unscored.rows == {}, "who is never judged is unknown"


def test_metrics_count_rows() -> None:
    history = after(*[{0: [1] * 4, 1: [0] * 4, 2: [1, 0, 0, 1]}] * 9)
    assert history.metrics(6) == {"rows/known": 0.5, "rows/solved": 1 / 3, "rows/hopeless": 1 / 3}


def test_a_checkpoint_has_every_bit() -> None:
    history = after({7: [1, 0, 0, 1], 11: [1, 1, 0, 1]}, {7: [1, 1, 1, 1]})
    saved = json.loads(json.dumps(history.to_json()))
    assert SuccessHistory(num_completions=4).restored(saved) == history


def order(**settings: Any) -> PromptOrder:
    return PromptOrder(ROWS, PLAN, **{"shuffle": True, "seed": 5, "max_steps": 9, **settings})


def drawn(found: PromptOrder, history: SuccessHistory | None, rounds: int = 400) -> list[int]:
    return [row for number in range(rounds) for row, _ in found.rows(RoundKey(0, number), range(4), history)]


def test_the_draw_is_a_function_of_the_place_and_the_history() -> None:
    history = after({0: [1, 1, 1, 1]}, {1: [1, 0, 0, 1]})
    key = RoundKey(2, 3)
    one = order().rows(key, range(4), history)
    assert one == order().rows(key, range(4), history)
    assert [one[2]] == order().rows(key, [2], history), "a rank asks for its own places"
    assert one != order(seed=6).rows(key, range(4), history)
    assert one != order().rows(RoundKey(2, 4), range(4), history)
    assert len({row for row, _ in one}) == 4, "no row twice in a round"


def test_rows_are_drawn_as_they_weigh() -> None:
    history = after(*[{0: [1] * 4, 1: [0] * 4}] * 8, {2: [1, 0, 1, 0]})
    counts = np.bincount(drawn(order(), history), minlength=40)
    assert counts.min() > 0, "every row may come"
    assert max(counts[0], counts[1]) < 0.5 * counts[2:].mean()


def test_labels_come_equally_often() -> None:
    counts = np.bincount(drawn(order(balance="answer"), None), minlength=40)
    yes = counts[::4].sum() / counts.sum()
    assert 0.42 < yes < 0.55, "10 of 40 rows"


def test_without_either_an_epoch_has_every_row_once() -> None:
    assert sorted(drawn(order(), None, rounds=10)) == list(range(40))


def test_a_weighted_draw_follows_the_weights() -> None:
    weights = np.array([1.0, 2.0, 4.0])
    rng = np.random.default_rng(0)
    first = np.bincount([int(weighted_draw(rng, weights, 1)[0]) for _ in range(7000)], minlength=3) / 7000
    np.testing.assert_allclose(first, weights / 7, atol=0.02)


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="balance_column: label") as raised:
        balanced(ROWS, "label")
    assert "`prompt`, `answer`" in raised.value.what
    assert not overrule("C064")


@pytest.mark.parametrize("setting", [{"success_history": True}, {"balance_column": "answer"}])
def test_an_order_that_is_kept_is_not_drawn_by_weight(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="keeps the rows in their order") as raised:
        GRPOConfig("out", shuffle_dataset=False, **setting)
    assert raised.value.code == "C064"
