"""Between the command line and the first token, a recipe is parsed once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from podium.cli import app
from podium.recipe import document
from podium.recipe.stages import plan
from podium.testing import save_tiny_model

RECIPE = """
model: ./model
dataset: rows.jsonl
rewards: [exact_match]
per_device_train_batch_size: 4
num_generations: 2
max_completion_length: 4
max_steps: 1
report_to: none
prove_first_batch: false
"""


def counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        calls.append(function.__name__)
        return function(*given, **named)

    return call


def test_a_recipe_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(RECIPE)
    calls: list[str] = []
    for module, function in ((document, document.parse), (plan, plan.survey_recipe)):
        monkeypatch.setattr(module, function.__name__, counted(function, calls))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "run.yaml", "--no-eval"])
    assert result.exit_code == 0, result.output
    assert calls == ["parse", "survey_recipe"]
