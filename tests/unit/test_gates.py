"""Gates: what they are written like, and when they are met."""

from __future__ import annotations

import math

import numpy as np
import pytest

from podium.errors import ConfigError
from podium.recipe.gates import absent, is_flat, parse_gate, unknown_metric

NAN = math.nan


@pytest.mark.parametrize(
    ("text", "metric", "sign", "bound", "steps"),
    [
        ("rewards/format/mean >= 0.9 for 3 steps", "rewards/format/mean", ">=", 0.9, 3),
        ("reward>1", "reward", ">", 1.0, 1),
        ("kl < .05 for 1 step", "kl", "<", 0.05, 1),
        ("entropy <= -1e-2", "entropy", "<=", -0.01, 1),
        ("eval_reward >= 2 for 2 evaluations", "eval_reward", ">=", 2.0, 2),
        ("rewards/x/mean flat for 20 steps", "rewards/x/mean", None, 0.0, 20),
    ],
)
def test_what_is_written_is_read(text: str, metric: str, sign: str | None, bound: float, steps: int) -> None:
    gate = parse_gate(text)
    assert (gate.metric, gate.sign, gate.bound, gate.steps) == (metric, sign, bound, steps)


@pytest.mark.parametrize(
    "text",
    ["", "reward", "reward is good", "reward >= much", "reward = 1", "reward >= 1 for a while", "reward flat", ">= 1"],
)
def test_what_is_no_gate_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="flat for 20 steps"):
        parse_gate(text)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 5 steps"):
        parse_gate("reward flat for 4 steps")
    with pytest.raises(ConfigError, match=r"at least 1 step\n"):
        parse_gate("reward > 1 for 0 steps")


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ([0.9, 0.9, 0.9], True),
        ([0.1, 0.95, 0.9, 1.0], True),
        ([0.9, 0.9], False),
        ([1.0, 1.0, 0.89], False),
        ([1.0, 0.89, 1.0], False),
        ([1.0, NAN, 1.0, 1.0], False),
        ([], False),
    ],
)
def test_a_bound_must_hold_in_a_row(values: list[float], met: bool) -> None:
    assert parse_gate("m >= 0.9 for 3 steps").is_met(values) is met


def test_every_sign_compares() -> None:
    assert [sign for sign in (">=", "<=", ">", "<") if parse_gate(f"m {sign} 1").is_met([1.0])] == [">=", "<="]
    assert parse_gate("m < 1").is_met([0.5])
    assert parse_gate("m > 1").is_met([1.5])


def test_a_plateau_is_told_from_a_rise() -> None:
    noise = np.random.default_rng(0).normal(0, 0.02, 60)
    rising, level = np.linspace(0, 1, 60) + noise, 0.5 + noise
    gate = parse_gate("m flat for 20 steps")
    assert not any(gate.is_met(rising[:end].tolist()) for end in range(1, 61)), "a rise of 0.34 within 20 steps"
    assert any(gate.is_met(level[:end].tolist()) for end in range(20, 61))
    assert not gate.is_met(level[:19].tolist()), "not before so many steps are there"
    assert is_flat([0.3] * 20)
    assert not is_flat([0.3] * 19 + [NAN])
    assert not is_flat(list(np.linspace(0, 1e-6, 20) * 1e6)), "no scatter at all: any rise counts"


def test_a_metric_of_a_reward_that_is_not_there_is_known_at_once() -> None:
    assert unknown_metric(parse_gate("rewards/format/mean > 1"), ["format"]) is None
    assert unknown_metric(parse_gate("eval_rewards/format/mean > 1"), ["format"]) is None
    assert unknown_metric(parse_gate("my/own/metric > 1"), ["format"]) is None, "a reward function may log it"
    what, fix = unknown_metric(parse_gate("rewards/fromat/mean > 1"), ["format"]) or ("", "")
    assert "`rewards/fromat/mean`" in what
    assert fix == "Did you mean `rewards/format/mean`?"
    assert unknown_metric(parse_gate("rewards/format/median > 1"), ["format"])


def test_a_metric_that_is_not_logged_is_said_with_those_that_are() -> None:
    said = absent(parse_gate("rewrd > 1"), {"reward": 1.0, "loss": 2.0})
    assert "`until: rewrd > 1` waits for `rewrd`, which is not logged. Did you mean `reward`?" in said
