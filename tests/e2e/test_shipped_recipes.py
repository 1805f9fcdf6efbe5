"""The recipes that come with Podium, and what `podium init` writes, are really trained: a step of each stage."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from podium import Run
from podium.cli.start.tasks import TASKS
from podium.models.builtin import BUILTIN, resolve_model
from podium.recipe import shipped_recipes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SHORT = {
    "max_steps": 1,
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "eval_rows": 2,
    "eval_samples": 2,
    "output_dir": "out",
}


@pytest.fixture(scope="module", autouse=True)
def _built_in_model() -> None:
    resolve_model(BUILTIN)


def values(name: str) -> dict[str, Any]:
    return yaml.safe_load(shipped_recipes()[name].read_text())


RECIPES = {name: values(name) for name in shipped_recipes()}
HERE = [name for name, recipe in RECIPES.items() if recipe["model"] == BUILTIN]
ROWS_HERE = [name for name in RECIPES if "reasoning-gym:" in str(RECIPES[name]["dataset"]) and name not in HERE]


def shortened(recipe: dict[str, Any]) -> dict[str, Any]:
    """Of a recipe with stages each is shortened: what is written in a stage holds for it."""
    stages = [{**stage, "max_steps": 1} for stage in recipe.get("stages", [])]
    run = {**recipe, **SHORT}
    return {**{key: run[key] for key in run if key != "max_steps"}, "stages": stages} if stages else run


def train(folder: Path, recipe: dict[str, Any]) -> Run:
    """A run of the command line, which ends well and looks at held-out prompts before and after."""
    if "reasoning-gym:" in str(recipe["dataset"]):
        pytest.importorskip("reasoning_gym")
    (folder / "short.yaml").write_text(yaml.safe_dump(shortened(recipe), sort_keys=False))
    done = subprocess.run(
        [sys.executable, "-m", "podium", "train", "short.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1500,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    run = Run.load(folder / "out")
    assert run.evaluations.keys() >= {"before", "after"}
    assert [each.step for each in run.history] == [*range(1, 1 + len(recipe.get("stages", "a")))]
    assert all(each.values["num_tokens"] > 0 for each in run.history)
    for weights in folder.glob("out/**/*.safetensors"):  # half a gigabyte each, which pytest would keep
        weights.unlink()
    return run


@pytest.mark.learns
@pytest.mark.parametrize("name", HERE)
def test_a_recipe_for_the_built_in_model_trains(name: str, tmp_path: Path) -> None:
    run = train(tmp_path, RECIPES[name])
    for step, part in zip(run.history, RECIPES[name].get("stages", [RECIPES[name]]), strict=True):
        means = {key: value for key, value in step.values.items() if re.fullmatch("rewards/[^/]+/mean", key)}
        assert len(means) == len(part.get("rewards", [])) + ("environment" in part)  # which pays, too
        assert all(map(math.isfinite, means.values())), means


@pytest.mark.parametrize("name", ROWS_HERE)
def test_rows_of_reasoning_gym_train_a_smaller_model(name: str, tmp_path: Path) -> None:
    run = train(tmp_path, {**RECIPES[name], "model": BUILTIN, "max_completion_length": 24})
    assert "rewards/reasoning_gym/mean" in run.history[0].values


@pytest.mark.learns
@pytest.mark.parametrize("task", TASKS)
def test_what_init_writes_trains(task: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "podium", "init", "mine", "--task", task, "--machine", "cpu", "--yes"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    recipe = yaml.safe_load((tmp_path / "mine" / "run.yaml").read_text())
    run = train(tmp_path / "mine", recipe)
    accuracy = TASKS[task].recipe["accuracy"]
    assert f"rewards/{accuracy}/mean" in run.history[0].values


def test_the_recipe_for_a_table_takes_one(tmp_path: Path) -> None:
    """The example of the recipe shows the form, so that some of the first answers are right and others are not."""
    rows = "".join(f"What is {n} + 1?,{n + 1}\n" for n in range(40))
    (tmp_path / "mine.csv").write_text("question,expert_answer\n" + rows)
    run = train(tmp_path, {**RECIPES["csv"], "dataset": "mine.csv"})
    assert run.history[0].values["frac_reward_zero_std"] < 1
