"""Adaptive weights against numbers worked out by hand, and through a run that is stopped and resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podium.errors import ConfigError
from podium.rewards.adaptive import (
    AdaptiveSettings,
    AdaptiveState,
    AdaptiveWeights,
    adapted,
    adaptive_settings,
)

NOW = AdaptiveSettings(window=1)


def after(*rounds: list[float], settings: AdaptiveSettings = NOW, state: AdaptiveState | None = None) -> AdaptiveState:
    state = state or AdaptiveState()
    for rewards in rounds:
        state = adapted(state, settings, np.array(rewards))
    return state


@pytest.mark.parametrize(
    ("rewards", "rate", "factor"),
    [
        ([0, 0, 0, 1], 0.25, 1.1),  # under 0.3
        ([0, 0, 0, 0, 0, 0, 0, 1, 1, 1], 0.3, 1.0),  # at a bound nothing moves
        ([0, 1], 0.5, 1.0),
        ([0, 1, 1, 1, 1], 0.8, 1.0),
        ([1, 1, 1, 1, 1, 0], 5 / 6, 0.9),  # over 0.8
        ([0.5, 1.0], 0.5, 1.0),  # half of the maximum is not over it
        ([0.51, 1.0], 1.0, 0.9),
        ([math.nan, math.nan, 0, 0, 0, 2], 0.25, 1.1),  # no opinion counts neither way
        pytest.param([0, 0, 0, 0], 0.0, 1.1, marks=pytest.mark.defect("F2", "a reward that was never earned")),
        ([0, 0, 0, 0, -1], 0.8, 1.0),  # a penalty: what costs nothing is a success
        ([0, 0, 0, 0, 0, -1], 5 / 6, 0.9),
        ([-1, -1, -1, 0], 0.25, 1.1),
    ],
)
def test_one_round(rewards: list[float], rate: float, factor: float) -> None:
    state = after(rewards)
    assert state.rate == pytest.approx(rate)
    assert state.factor == pytest.approx(factor)


@pytest.mark.defect("F2", "rewards below 0 everywhere")
def test_rewards_below_0_everywhere_move_nothing(now: Callable[[str], None]) -> None:
    state = after([-3, -1, -2], [-5, -4], settings=NOW)
    assert state.factor == 1.0
    assert math.isnan(state.rate)
    known = AdaptiveSettings(window=1, threshold=-1.5)
    assert after([-3, -1, -1, -1], settings=known).rate == 0.75
    now("the weight stays; `threshold` says what a success is")


@pytest.mark.defect("N", "never earned for 20 rounds, then earned: the weight rises to its bound and comes down")
def test_never_earned_then_earned(now: Callable[[str], None]) -> None:
    state = after(*[[0, 0, 0, 0]] * 20)
    assert state.factor == 4.0
    state = after(*[[1, 1, 1, 1]] * 14, state=state)
    assert state.factor < 1.0
    now("4.0, then under 1")


def test_a_round_without_an_opinion_changes_nothing() -> None:
    state = after([0, 0, 0, 1])
    assert after([math.nan] * 4, state=state) == state
    assert math.isnan(after([math.nan]).rate)


def test_bounds_hold_for_ever() -> None:
    assert after(*[[0.0, 0, 0, 0, 1]] * 50).factor == 4.0
    assert after(*[[1.0]] * 50).factor == 0.25
    assert after(*[[1.0]] * 3, settings=AdaptiveSettings(window=1, lower_by=0.5, least=0.3)).factor == 0.3


def test_the_window_is_a_mean_of_rounds() -> None:
    """Rates 0, 0, 1, 1 of a window of two: means 0, 0, 0.5, 1: twice up, once down."""
    settings = AdaptiveSettings(window=2, threshold=0.5, raise_by=2, lower_by=0.5)
    factors = [after(*[[0.0], [0.0], [1.0], [1.0]][:n], settings=settings).factor for n in range(5)]
    assert factors == [1, 2, 4, 4, 2]


def test_the_maximum_is_the_largest_seen_unless_it_is_given() -> None:
    state = after([0, 2])
    assert (state.maximum, state.rate) == (2, 0.5)
    assert after([0.9, 0.9], state=state).rate == 0, "0.9 is under half of the 2 seen before"
    assert after([0.9, 0.9], settings=AdaptiveSettings(window=1, maximum=1.0), state=state).rate == 1
    assert after([0.2, 0.9], settings=AdaptiveSettings(window=1, threshold=0.1)).rate == 1


def test_weights_of_all_functions() -> None:
    weights = AdaptiveWeights.of(["a", "b", "c"], np.array([1.0, 2.0, -1.0]), {"b": {"window": 1}, "c": False})
    assert weights.weights_K.tolist() == [1, 2, -1]
    moved = weights.after(np.array([[0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1.0]]))
    assert moved.weights_K.tolist() == [1, 2 * 1.1, -1]
    assert weights.weights_K.tolist() == [1, 2, -1], "the state before is untouched"
    assert moved.metrics(after=moved) == {"reward_weights/b": 2.2, "rewards/b/success_rate": 0.25}
    assert weights.metrics(after=moved) == {"reward_weights/b": 2, "rewards/b/success_rate": 0.25}
    assert weights.metrics(after=weights) == {"reward_weights/b": 2}


def test_json_keeps_every_bit() -> None:
    weights = AdaptiveWeights.of(["a", "b"], np.array([1.0, 2.0]), {"a": True, "b": True})
    moved = weights.after(np.array([[1 / 3, math.nan], [0.1, math.nan], [0.2, math.nan], [0.7, math.nan]]))
    again = weights.restored(json.loads(json.dumps(moved.to_json())))
    assert again.states == moved.states
    assert weights.restored({}).states == weights.states


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"lo": 0.1}, r"unknown setting `lo`(.|\n)*fix: Did you mean `low`"),
        ({"low": "x"}, "`low` must be a number"),
        ({"window": 1.5}, "`window` must be a whole number"),
        ({"low": 0.9}, "0 <= low <= high <= 1"),
        ({"lower_by": 0}, "0 < lower_by <= 1"),
        ({"least": 2}, "0 < least <= 1 <= most"),
        ("yes", "neither true nor a mapping"),
    ],
)
def test_settings_that_cannot_work(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        adaptive_settings(value)
    with pytest.raises(ConfigError, match="adaptive_rewards: `a`: "):
        AdaptiveWeights.of(["a"], np.ones(1), {"a": value})


def test_a_name_that_no_reward_has() -> None:
    said = r"names no reward here \(correct\): `corect`.\n  fix: Did you mean `correct`"
    with pytest.raises(ConfigError, match=said):
        AdaptiveWeights.of(["correct"], np.ones(1), {"corect": True})


# ---- in a run ----


def easy(completions: list[str], **_: Any) -> list[float]:
    return [1.0 + len(text) / 100 for text in completions]


def hard(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) > 10**6) + (text[:1] == "a") for text in completions]


ADAPTIVE = {"easy": {"lower_by": 0.5, "least": 0.1}, "hard": {"threshold": 0.5, "window": 2}}


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_weights_move_are_logged_and_enter_the_reward(make_trainer: Callable) -> None:
    trainer = make_trainer([easy, hard], reward_weights=[1.0, 2.0], adaptive_rewards=ADAPTIVE, max_steps=4)
    trainer.train()
    assert logged(trainer, "reward_weights/easy") == [1.0, 0.5, 0.25, 0.125]
    assert logged(trainer, "reward_weights/hard") == pytest.approx([2.0, 2.2, 2.42, 2.662])
    assert logged(trainer, "rewards/easy/success_rate") == [1.0] * 4
    parts = zip(*(logged(trainer, f"rewards/{name}/mean") for name in ("easy", "hard")), strict=True)
    weights = zip(*(logged(trainer, f"reward_weights/{name}") for name in ("easy", "hard")), strict=True)
    sums = [sum(w * r for w, r in zip(ws, rs, strict=True)) for ws, rs in zip(weights, parts, strict=True)]
    assert logged(trainer, "reward") == pytest.approx(sums)
    assert logged(trainer, "time/reward/easy_seconds")


def test_an_evaluation_moves_nothing(make_trainer: Callable) -> None:
    trainer = make_trainer([easy, hard], adaptive_rewards=ADAPTIVE, eval_rows=[{"prompt": "1+1=", "answer": "2"}])
    trainer.evaluate()
    assert trainer.weights is trainer.run.scoring.adaptive


def test_a_resumed_run_goes_on_with_the_same_weights(make_trainer: Callable, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"adaptive_rewards": ADAPTIVE, "save_strategy": "steps", "save_steps": 1}
    whole = make_trainer([easy, hard], **settings, max_steps=4)
    whole.train()
    again = make_trainer([easy, hard], **settings, max_steps=4)
    checkpoint = next(Path(whole.args.output_dir).glob("checkpoint-2"))
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.weights.states == whole.weights.states
    assert logged(again, "reward_weights/easy") == logged(whole, "reward_weights/easy")
    assert logged(again, "reward") == logged(whole, "reward")
    saved = json.loads((checkpoint / "podium_state.json").read_text())["reward_weights"]
    assert saved["easy"]["factor"] == 0.25


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_a_resumed_run_never_asks_twice(step: int, make_trainer: Callable) -> None:
    """Two rounds of 4 shares, trained on twice, two shares a step: a round serves four steps."""
    asked: list[int] = []

    def counting(completions: list[str], **_: Any) -> list[float]:
        asked.append(len(completions))
        return [float(len(asked) + len(text)) for text in completions]  # another answer every time

    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    first = make_trainer(counting, **settings, max_steps=8)
    first.train()
    assert asked == [16, 16]
    asked[:] = [16] * (1 if step < 5 else 2)  # as many as the run had asked for at that step
    again = make_trainer(counting, **settings, max_steps=8)
    again.train(resume_from_checkpoint=str(Path(first.args.output_dir) / f"checkpoint-{step}"))
    assert asked == [16, 16]
    assert logged(again, "rewards/counting/mean") == logged(first, "rewards/counting/mean")
    assert logged(again, "loss") == logged(first, "loss")
