"""Between the command line and the first token, a recipe is parsed once and a row is visited at most twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from typer.testing import CliRunner

from podium.cli import app
from podium.data import PromptBuilder, prompts, survey
from podium.data.columns import Columns
from podium.engines.live.engine import LiveEngine
from podium.recipe import document, stages
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
    for module, function in ((document, document.parse), (stages, stages.survey_recipe)):
        monkeypatch.setattr(module, function.__name__, counted(function, calls))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "run.yaml", "--no-eval"])
    assert result.exit_code == 0, result.output
    assert calls == ["parse", "survey_recipe"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("keys", ["", "overlong_prompts: drop\nmax_prompt_length: 12\n"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_row_is_visited_at_most_twice(kind: str, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage that looks at a row counts: reading, transforming, checking, rendering and tokenizing it.

    A row that was checked before training is not checked again when it is drawn.
    """
    save_tiny_model(tmp_path / "model")
    rows = Dataset.from_list([{"question": f"{n}+1=" * (1 + 5 * (n == 3)), "gold": str(n + 1)} for n in range(20)])
    getattr(rows, {"jsonl": "to_json"}.get(kind, f"to_{kind}"))(tmp_path / f"rows.{kind}")
    shaped = 'prompt: "{question}"\nanswer: "{gold}"\nheld_out: 0.2\n'
    (tmp_path / "run.yaml").write_text(RECIPE.replace("rows.jsonl", f"rows.{kind}") + shaped + keys)
    visits: dict[str, Counter[str]] = {
        name: Counter() for name in ("transformed", "checked", "rendered", "tokenized", "drawn")
    }
    transform, check, build = Columns.__call__, survey.check_row, PromptBuilder.__call__
    rendered, tokenized = survey.RowSurvey._rendered, PromptBuilder.tokenized

    def transforming(self: Columns, row: dict[str, Any]) -> Any:
        visits["transformed"][row["question"]] += 1
        return transform(self, row)

    def checking(row: dict[str, Any], *given: Any, **named: Any) -> Any:
        visits["checked"][row["prompt"]] += 1
        return check(row, *given, **named)

    def rendering(self: survey.RowSurvey, index: int, prompt: str) -> Any:
        visits["rendered"][prompt] += 1
        return rendered(self, index, prompt)

    def tokenizing(self: PromptBuilder, texts: list[tuple[str, bool]]) -> Any:
        visits["tokenized"].update(text for text, _ in texts)
        return tokenized(self, texts)

    def building(self: PromptBuilder, row: dict[str, Any], **named: Any) -> Any:
        visits["drawn"][row["prompt"]] += 1
        return build(self, row, **named)

    class FirstToken(Exception):
        pass

    def generate(*given: Any, **named: Any) -> Any:
        raise FirstToken

    monkeypatch.setattr(Columns, "__call__", transforming)
    monkeypatch.setattr(survey, "MEASURED_ROWS", 5)  # others are kept, to measure the largest of them
    for module in (survey, prompts):
        monkeypatch.setattr(module, "check_row", checking)
    monkeypatch.setattr(survey.RowSurvey, "_rendered", rendering)
    monkeypatch.setattr(PromptBuilder, "tokenized", tokenizing)
    monkeypatch.setattr(PromptBuilder, "__call__", building)
    monkeypatch.setattr(LiveEngine, "generate", generate)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "run.yaml", "--no-eval"])
    assert isinstance(result.exception, FirstToken), result.output
    for name in ("transformed", "checked", "rendered"):
        assert set(visits[name].values()) == {1}, name
        assert len(visits[name]) == 20, name
    assert max(visits["tokenized"].values()) == 1
    assert max(visits["drawn"].values()) == 1  # with the survey, the second visit
    if keys:
        assert not [question for question in visits["drawn"] if len(question) > 12]
