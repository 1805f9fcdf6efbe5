"""Recipes with the settings of published runs, in all that needs neither their weights nor a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from podium.cli import app
from podium.errors.rule import Facts, findings
from podium.recipe import load, shipped_recipes
from podium.testing import save_tiny_model
from podium.trainer.machine import Machine
from podium.trainer.setting_rules import OFF_POLICY

GSM8K = ("gsm8k-verl", "gsm8k-skyrl", "gsm8k-areal")
PAGE = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"


@pytest.mark.parametrize("name", [*GSM8K, "countdown-tinyzero"])
def test_one_gpu_is_enough(name: str) -> None:
    args = load(name).arguments()
    assert not list(findings(OFF_POLICY, Facts(settings=args, machine=Machine(device=torch.device("cuda:0")))))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """Rows in the form of openai/gsm8k."""
    file = tmp_path / "gsm8k.jsonl"
    made = [
        {
            "question": f"Ann has {n} pens and buys 3. How many now?",
            "answer": f"{n} + 3 = <<{n}+3={n + 3}>>\n#### {n + 3}",
        }
        for n in range(24)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(file)


@pytest.mark.parametrize("name", GSM8K)
def test_strict_and_lenient_scorers_stand_side_by_side(name: str, rows: str) -> None:
    recipe = load(name, {"dataset": rows, "dataset_config": None})
    strict, lenient = (spec.function for spec in recipe.rewards)
    assert [spec.weight for spec in recipe.rewards] == [None, 0]
    assert recipe.accuracy == "numeric_match"
    marked = "\\boxed{1,003}" if name == "gsm8k-areal" else "#### 1,003"
    texts = [f"1000 + 3 = 1003.\n{marked}", "The answer is 1003.", "The answer is 1004.", ""]
    turns = [[{"role": "assistant", "content": text}] for text in texts]
    assert strict(turns, answer=["1003"] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert lenient(turns, answer=["1003"] * 4) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", GSM8K)
def test_prompts_and_answers_are_those_of_the_published_run(name: str, rows: str) -> None:
    row = load(name, {"dataset": rows, "dataset_config": None}).load_rows()[0][0]
    asks = "within \\boxed{}." if name == "gsm8k-areal" else 'output the final answer after "####".'
    assert str(row["prompt"]).count("Ann has") == 1
    assert asks in str(row["prompt"]).replace("\\\\", "\\")
    assert int(row["answer"]) >= 3


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", GSM8K)
def test_a_step_on_a_tiny_model_of_the_architecture(
    name: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All settings but the sizes: batch, lengths and steps."""
    monkeypatch.chdir(tmp_path)
    model = save_tiny_model(tmp_path / "qwen2", "qwen2")
    group = yaml.safe_load(shipped_recipes()[name].read_text())["num_generations"]
    given = {
        "model": model,
        "dataset": rows,
        "dataset_config": "null",
        "per_device_train_batch_size": 2 * group,
        "max_completion_length": 8,
        "max_steps": 1,
        "eval_rows": 0,
        "save_strategy": "no",
        "output_dir": str(tmp_path / "out"),
    }
    flags = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    result = CliRunner().invoke(app, ["train", name, *flags])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "config.json").exists() or (tmp_path / "out" / "adapter_config.json").exists()


def test_the_page_has_a_place_for_each() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in (*GSM8K, "countdown-tinyzero"):
        assert f"| `{name}` |" in page
