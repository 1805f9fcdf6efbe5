"""`podium pilot` on a tiny model, from recipe to recipe; on the built-in model, slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from podium.cli import app
from podium.recipe.document import parse
from podium.testing import save_tiny_model

REWARDS = """
def digits(completions, **kwargs):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

def nothing(completions, **kwargs):
    return [0.0 for text in completions]
"""


def recipe(folder: Path, reward: str = "digits", **more: Any) -> Path:
    save_tiny_model(folder / "model")
    rows = "".join(f"{a} + {b} =,{a + b}\n" for a in range(1, 9) for b in range(1, 6))
    (folder / "data.csv").write_text(f"prompt,answer\n{rows}")
    (folder / "rewards.py").write_text(REWARDS)
    settings = {
        "model": str(folder / "model"), "dataset": str(folder / "data.csv"), "rewards": [f"rewards.py:{reward}"],
        "held_out": 0.2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6,
        "learning_rate": 1e-3, "max_steps": 10, "seed": 1, "output_dir": str(folder / "run"), **more,
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}  # of {key}\n" for key, value in settings.items()))
    return path


def piloted(path: Path, *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    ended = CliRunner().invoke(app, ["pilot", str(path), *words], catch_exceptions=False)
    assert ended.exit_code == code, ended.output
    page = path.parent / "run-pilot"
    assert "<svg" in (page / "pilot.html").read_text()
    return json.loads((page / "pilot.json").read_text()), ended.output


@pytest.mark.slow
def test_a_pilot_writes_a_recipe_with_its_choice_and_does_it_again_alike(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    grid = ["--grid", "learning_rate=0.001,0.002"]
    found, printed = piloted(path, *grid)
    assert len(found["candidates"]) == 2
    assert {each["rung"] for each in found["candidates"]} == {1}
    patched = (tmp_path / "run.pilot.yaml").read_text()
    chosen = next(each for each in found["candidates"] if each["number"] == found["winner"])
    assert parse(patched, name="x").values["learning_rate"] == chosen["values"]["learning_rate"]
    assert "# of learning_rate" in patched
    assert f"next: podium train {tmp_path / 'run.pilot.yaml'}" in printed.replace("\n", "")
    again, _ = piloted(path, *grid)
    timed = ("seconds", "candidates")
    assert {k: v for k, v in again.items() if k not in timed} == {k: v for k, v in found.items() if k not in timed}
    assert [each["score"] for each in again["candidates"]] == [each["score"] for each in found["candidates"]]


def test_where_all_rewards_are_equal_nothing_is_trained_and_no_recipe_written(tmp_path: Path) -> None:
    found, printed = piloted(recipe(tmp_path, "nothing"), "--grid", "learning_rate=0.001,0.002", code=1)
    assert found["outcome"] == "nothing"
    assert found["expected"] is None
    assert all(each["steps"] == 0 for each in found["candidates"])
    assert "R001" in printed or "R004" in printed
    assert not (tmp_path / "run.pilot.yaml").exists()


@pytest.mark.slow
def test_a_spent_budget_is_said_and_the_choice_is_by_samples(tmp_path: Path) -> None:
    found, _ = piloted(recipe(tmp_path, max_steps=100_000), "--grid", "learning_rate=0.001,0.002", "--budget", "1")
    assert "the budget of 1 s" in found["stopped"]


@pytest.mark.slow
def test_the_default_grid_on_the_built_in_model(tmp_path: Path) -> None:
    path = recipe(tmp_path, model="builtin:smollm2-135m-instruct", system="Answer with a number.",
                  rewards=["exact_match"], accuracy="exact_match", learning_rate=3e-5, max_steps=4)  # fmt: skip
    found, _ = piloted(path)
    assert {each["values"]["examples"] for each in found["candidates"]} == {"with", "without"}
    assert found["accuracy"] == "exact_match"


@pytest.mark.slow
def test_training_after_a_pilot_drops_candidates_that_a_reward_function_refuses(tmp_path: Path) -> None:
    path = recipe(tmp_path, max_steps=4)
    words = ["train", str(path), "--pilot", "--no-eval"]
    ended = CliRunner().invoke(app, words, catch_exceptions=False)  # examples would make conversations
    assert ended.exit_code == 0, ended.output
    found = json.loads((tmp_path / "run-pilot" / "pilot.json").read_text())
    refused = [each for each in found["candidates"] if each["dropped"] == "cannot be sampled"]
    assert refused
    assert all(each["values"]["examples"] == "with" for each in refused)
    assert (tmp_path / "run" / "model.safetensors").is_file()
