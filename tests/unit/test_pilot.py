"""A pilot without training: its grid, rungs, score, verdict and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from podium.cli import app
from podium.errors import ConfigError
from podium.pilot import FEWEST_STEPS, STEP_SHARE, best, rungs
from podium.pilot.files import JSON, page, patched, write, write_recipe
from podium.pilot.grid import around, numbered, product, read_grid
from podium.pilot.records import Entry, PilotResult
from podium.pilot.score import Signal, expected, promise, reached, score, squared_norms
from podium.recipe.document import parse

BASE = {"temperature": 1.0, "learning_rate": 3e-5, "max_completion_length": 16, "num_generations": 8}


def signal(before: float = 0.2, after: float = 0.6, **more: Any) -> Signal:
    """32 prompts, of which as many are right as these shares mean."""

    def shares(share: float) -> np.ndarray:
        return (np.arange(32) < round(32 * share)).astype(float)

    given = {"before_P": shares(before), "after_P": shares(after), "samples": 2, "steps": 6, "spread": 0.5}
    return Signal(**{**given, **more})


def result(*signals: Signal | None) -> PilotResult:
    candidates = product({"temperature": tuple(0.8 + 0.1 * i for i in range(len(signals)))})
    entries = [Entry(candidate=each, changes=dict(each.values)) for each in candidates]
    for entry, measured in zip(entries, signals, strict=True):
        if measured is not None:
            entry.measured(measured, 1, 30)
    return PilotResult(
        name="run.yaml", entries=tuple(entries), winner=entries[0], full_steps=30, accuracy="right", seconds=1.0,
        num_rows=(100, 32),
    )  # fmt: skip


# ---- grid ----


@pytest.mark.parametrize(
    ("texts", "word"),
    [
        (["top_p=0.9"], "a pilot varies"),
        (["temperatur=1"], "temperature"),
        (["temperature"], "no values"),
        (["temperature=1", "temperature=2"], "given twice"),
        (["temperature=hot"], "temperature=hot"),
        (["num_generations=1"], "num_generations"),
        (["examples=maybe"], "with or without"),
    ],
)
def test_a_wrong_grid_is_one_message(texts: Sequence[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        read_grid(texts)
    assert caught.value.fix


def test_too_large_a_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 64"):
        product({"temperature": tuple(range(1, 10)), "learning_rate": tuple(range(1, 10))})


def test_the_default_grid_varies_one_setting_at_a_time_and_keeps_completions_equal() -> None:
    grid = around(BASE, examples=["with", "without"], completions=64)
    assert len(grid) == 12
    for each in grid:
        assert sum(each.values[axis] != value for axis, value in BASE.items()) <= 1
        assert 64 % each.values["num_generations"] == 0
    assert all(each.values["num_generations"] == 8 for each in around(BASE, examples=["with"], completions=16))


def test_candidates_that_sample_alike_are_sampled_once() -> None:
    grid = product({"temperature": (0.8, 1.2), "learning_rate": (1e-5, 3e-5), "num_generations": (4, 8)})
    assert len(grid) == 8
    assert len({each.sampling for each in grid}) == 2


# ---- rungs ----


@pytest.mark.parametrize(("grid", "alive", "steps"), [(12, 12, 60), (12, 5, 30), (8, 8, 30), (64, 64, 200), (8, 1, 30)])
def test_rungs_halve_and_stay_within_their_share(grid: int, alive: int, steps: int) -> None:
    made = rungs(grid, alive, steps)
    assert sum(rung.candidates * rung.steps for rung in made) <= STEP_SHARE * grid * steps
    assert made[0].candidates <= alive
    assert all(rung.steps >= FEWEST_STEPS for rung in made)
    for one, following in pairwise(made):
        assert following.candidates == -(-one.candidates // 2)
        assert following.steps > one.steps


def test_no_rung_without_a_candidate_or_longer_than_the_run() -> None:
    assert rungs(8, 0, 30) == ()
    assert all(rung.steps <= 2 for rung in rungs(2, 2, 2))


def test_the_best_are_taken_in_order_and_unknown_scores_last() -> None:
    assert best({4: float("nan"), 1: 0.1, 2: 0.9, 3: 0.9}, 4) == [2, 3, 1, 4]


# ---- score ----


def test_the_score_prefers_accuracy_then_gain_then_spread_then_agreement() -> None:
    base = score(signal(), 30)
    assert score(signal(after=0.7), 30) > base
    assert score(signal(before=0.4), 30) < base  # a smaller gain
    assert score(signal(spread=0.9), 30) > base
    assert score(signal(agreement=0.8), 30) > base
    assert score(signal(reward=0.5), 30) > base
    assert score(signal(after=0.1), 30) < score(signal(before=0.1, after=0.2), 30)  # a collapse


def test_without_steps_or_gain_nothing_is_extrapolated() -> None:
    assert reached(0.3, 0.3, 5, 30) == reached(0.3, 0.3, 0, 30) == 0.3
    assert 0.6 < reached(0.2, 0.6, 6, 30) < 1.0
    assert promise(0.0, 0.5) > promise(0.0, 0.1)


def test_the_expected_range_is_wide_and_holds_the_accuracy_now() -> None:
    found = expected(signal(), 30)
    assert found.low < 0.6 < found.high <= 1
    assert found.high - found.low > 0.2
    assert expected(signal(steps=24), 30).high < found.high


def test_two_halves_that_agree_are_all_signal_and_independent_ones_none() -> None:
    draw = np.random.default_rng(0)
    g = draw.normal(size=1000)
    agreed, total = squared_norms(g, g)
    assert agreed == pytest.approx(total)
    pairs = [squared_norms(draw.normal(size=1000), draw.normal(size=1000)) for _ in range(50)]
    signal_part, whole = np.sum(pairs, axis=0)
    assert abs(signal_part / whole) < 0.05


# ---- verdict ----


def test_a_gain_that_is_shown_is_said_with_its_range() -> None:
    made = result(signal(), signal(after=0.5))
    assert made.outcome == "learns"
    assert made.expected is not None
    assert f"{made.expected.low:.2f} to {made.expected.high:.2f} after 30 steps" in made.sentences()[-1]


@pytest.mark.parametrize(
    ("given", "dropped", "outcome"),
    [
        (signal(after=0.2), "", "unclear"),  # no gain, but groups have spread
        (signal(after=0.25), "", "unclear"),  # within chance
        (signal(before=0.0, after=0.0, spread=0.05), "", "unclear"),  # the samples had spread
        (signal(before=0.0, after=0.0, spread=0.05), "noise", "nothing"),
        (signal(before=0.3, after=0.1, spread=0.05), "", "nothing"),  # worse than before
        (signal(before=0.0, after=0.12, spread=0.05), "noise", "unclear"),  # four of 32 rows
        (signal(before=1.0, after=1.0, spread=0.0), "", "solved"),
        (None, "", "nothing"),  # not even sampled
    ],
)
def test_no_value_is_promised_where_nothing_was_seen_to_be_learnt(
    given: Signal | None, dropped: str, outcome: str
) -> None:
    made = result(given)
    made.winner.dropped = dropped
    assert made.outcome == outcome
    assert made.expected is None
    assert not any("about" in each for each in made.sentences())


def test_solved_is_said_of_right_answers_and_of_how_many() -> None:
    made = result(signal(before=1.0, after=1.0, spread=0.0))
    assert "100% of answers on 32 rows" in made.sentences()[-1]
    rewarded = replace(made, accuracy=None)
    assert rewarded.outcome != "solved"
    assert not any("is right" in each or "little left" in each for each in rewarded.sentences())


# ---- files ----

RECIPE = "model: builtin:smollm2-135m-instruct  # small\ntemperature: 1.0  # as it was\nmax_steps: 30\n"


def test_the_patched_recipe_has_the_winners_settings_the_reason_and_the_old_comments() -> None:
    text = patched(result(signal(), signal(after=0.5)), RECIPE, {"seed": 3})
    assert parse(text, name="x").values == {
        "model": "builtin:smollm2-135m-instruct", "temperature": 0.8, "max_steps": 30, "seed": 3,
    }  # fmt: skip
    assert "# small" in text
    assert "# temperature: 1.0 -> 0.8" in text
    assert "# Chosen: temperature 0.8" in text


def test_examples_are_set_and_taken_out() -> None:
    made = result(signal())
    made.winner.changes = {"examples": [{"q": "1 + 1: #", "a": "2"}]}
    text = patched(made, RECIPE, {})
    assert parse(text, name="x").values["examples"] == [{"q": "1 + 1: #", "a": "2"}]
    made.winner.changes = {"examples": None}
    assert "examples" not in parse(patched(made, text, {}), name="x").values


def test_files_are_written_beside_the_recipe_and_hold_no_markup_of_names(tmp_path: Path) -> None:
    made = result(signal(), None)
    recipe = tmp_path / "run.yaml"
    recipe.write_text(RECIPE)
    assert write_recipe(made, str(recipe), {}, {}) == tmp_path / "run.pilot.yaml"
    assert recipe.read_text() == RECIPE
    write(made, tmp_path / "p")
    assert '"winner": 1' in (tmp_path / "p" / JSON).read_text()
    made.winner.dropped = "<script>alert(1)</script>"
    assert "<script" not in page(made)


def test_several_processes_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text(RECIPE)
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = CliRunner().invoke(app, ["pilot", str(recipe)])
    assert ended.exit_code == 2
    assert "A pilot is one process" in ended.output


def test_equal_settings_have_a_name_too() -> None:
    assert numbered([{"temperature": 1.0}])[0].name == "the only candidate"


def test_a_pilot_before_training_on_several_processes_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text(RECIPE)
    ended = CliRunner().invoke(app, ["train", str(recipe), "--pilot", "--processes", "2"])
    assert ended.exit_code == 2
    assert "a pilot is one process" in ended.output
