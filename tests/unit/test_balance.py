"""Rows that are drawn by weight: the weights of a column, and the draw against them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from podium import GRPOConfig
from podium.errors import ConfigError, overrule
from podium.trainer.rounds import Plan, PromptOrder, RoundKey, balanced, weighted_draw

PLAN = Plan(prompts_per_round=4, num_generations=4, shares=1, iterations=1, accumulation=1, ranks=1, rank=0)
ROWS = [{"prompt": str(n), "answer": "no" if n % 4 else "yes"} for n in range(40)]


def order(**settings: Any) -> PromptOrder:
    return PromptOrder(ROWS, PLAN, **{"shuffle": True, "seed": 5, "max_steps": 9, **settings})


def drawn(found: PromptOrder, rounds: int = 400) -> list[int]:
    return [row for number in range(rounds) for row, _ in found.rows(RoundKey(0, number), range(4))]


def test_the_draw_is_a_function_of_the_place() -> None:
    key = RoundKey(2, 3)
    one = order(balance="answer").rows(key, range(4))
    assert one == order(balance="answer").rows(key, range(4))
    assert [one[2]] == order(balance="answer").rows(key, [2]), "a rank asks for its own places"
    assert one != order(balance="answer", seed=6).rows(key, range(4))
    assert one != order(balance="answer").rows(RoundKey(2, 4), range(4))
    assert len({row for row, _ in one}) == 4, "no row twice in a round"


def test_labels_come_equally_often() -> None:
    counts = np.bincount(drawn(order(balance="answer")), minlength=40)
    yes = counts[::4].sum() / counts.sum()
    assert 0.42 < yes < 0.55, "10 of 40 rows"


def test_without_a_column_an_epoch_has_every_row_once() -> None:
    assert sorted(drawn(order(), rounds=10)) == list(range(40))


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


def test_an_order_that_is_kept_is_not_drawn_by_weight() -> None:
    with pytest.raises(ConfigError, match="keeps the rows in their order") as raised:
        GRPOConfig("out", shuffle_dataset=False, balance_column="answer")
    assert raised.value.code == "C064"
