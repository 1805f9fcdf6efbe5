"""Runs that draw rows by their success, on a tiny model: what is counted, resumed runs, and what cannot be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import podium
from podium import GRPOConfig, GRPOTrainer
from podium.errors import ConfigError
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{n}+1=", "label": "odd" if n % 4 else "even"} for n in range(24)]


def correct(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """Rows from 12 up are always right, those under 6 never, the others sometimes."""
    found = []
    for text, prompt in zip(completions, prompts, strict=True):
        n = int(prompt.partition("+")[0])
        found.append(float(n >= 12 or (n >= 6 and sum(map(ord, text)) % 2)))
    return found


def graded(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


def trainer(folder: Path, **settings: Any) -> GRPOTrainer:
    settings = {
        "max_steps": 6,
        "save_strategy": "no",
        "success_history": True,
        "per_device_train_batch_size": 16,
        **settings,
    }
    args = GRPOConfig(
        str(folder),
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        product_precision="float32",
        **settings,
    )
    return GRPOTrainer(tiny_model(), [graded, correct], args, ROWS, processing_class=tiny_tokenizer())


@pytest.mark.slow
def test_what_is_sometimes_right_is_drawn_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, rows = trainer(tmp_path, max_steps=40), Counter[int]()
    original = run.rollouts.draw

    def watched(*given: Any) -> Any:
        found = original(*given)
        rows.update(group.group.prompt.row for group in found[0].scored)
        return found

    monkeypatch.setattr(run.rollouts, "draw", watched)
    run.train()
    sometimes, never, always = (
        sum(rows[n] for n in span) / len(span) for span in (range(6, 12), range(6), range(12, 24))
    )
    assert sometimes > 1.5 * max(never, always)
    assert min(never, always) > 0
    logged = [row for row in run.state.log_history if "rows/known" in row]
    assert len(logged) == 40
    assert logged[-1]["rows/known"] > 0.9
    assert logged[-1]["rows/solved"] > 0.3
    assert logged[-1]["rows/hopeless"] > 0.1


@pytest.mark.cases(1)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resumed_run_is_the_same(ahead: int, tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "steps_per_generation": 2,
        "async_rollouts": ahead,
        "per_device_train_batch_size": 8,
        "balance_column": "label",
    }
    whole = trainer(tmp_path / "a", **how)
    whole.train()
    assert whole.history is not None
    assert whole.history.rounds >= 3
    for step in (1, 2, 4):  # in the middle of a round, and at the end of two
        again = trainer(tmp_path / f"b{step}", **how)
        again.train(resume_from_checkpoint=str(tmp_path / f"a/checkpoint-{step}"))
        assert again.history == whole.history
        for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_a_reward_must_tell_right_from_wrong(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), success_history=True, per_device_train_batch_size=4, num_generations=4)
    with pytest.raises(ConfigError, match="none of the rewards tells right from wrong: `graded`") as raised:
        GRPOTrainer(tiny_model(), graded, args, ROWS, processing_class=tiny_tokenizer())
    assert raised.value.code == "C064"
    model = save_tiny_model(tmp_path / "model")
    assert "C064" in {each.code for each in podium.check(model, graded, args, ROWS)}
    assert "C064" not in {each.code for each in podium.check(model, correct, args, ROWS)}


def test_a_column_that_is_not_there_is_named_by_trainer_and_check(tmp_path: Path) -> None:
    args = GRPOConfig(
        str(tmp_path), balance_column="kind", max_completion_length=8, per_device_train_batch_size=4, num_generations=4
    )
    with pytest.raises(ConfigError, match="balance_column: kind"):
        GRPOTrainer(tiny_model(), correct, args, ROWS, processing_class=tiny_tokenizer())
    model = save_tiny_model(tmp_path / "model")
    [found] = [each for each in podium.check(model, correct, args, ROWS) if each.code == "C064"]
    assert "`prompt`, `label`" in found.what


def test_a_stream_is_refused(tmp_path: Path) -> None:
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    args = GRPOConfig(
        str(tmp_path),
        success_history=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_steps=2,
        max_completion_length=8,
    )
    with pytest.raises(ConfigError, match="which a stream does not offer") as raised:
        GRPOTrainer(tiny_model(), correct, args, stream, processing_class=tiny_tokenizer())
    assert raised.value.code == "C064"
