"""Runs that draw rows by the values of a column, on a tiny model: resumed runs, and what cannot be."""

from __future__ import annotations

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


def graded(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


def trainer(folder: Path, **settings: Any) -> GRPOTrainer:
    settings = {
        "max_steps": 4,
        "save_strategy": "no",
        "prove_first_batch": False,
        "balance_column": "label",
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
    return GRPOTrainer(tiny_model(), graded, args, ROWS, processing_class=tiny_tokenizer())


@pytest.mark.cases(1)
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_resumed_run_is_the_same(ahead: int, tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "steps_per_generation": 2,
        "async_rollouts": ahead,
        "per_device_train_batch_size": 8,
    }
    whole = trainer(tmp_path / "a", **how)
    whole.train()
    for step in (1, 2):  # in the middle of a round, and at its end
        again = trainer(tmp_path / f"b{step}", **how)
        again.train(resume_from_checkpoint=str(tmp_path / f"a/checkpoint-{step}"))
        for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_column_that_is_not_there_is_named_by_trainer_and_check(tmp_path: Path) -> None:
    args = GRPOConfig(
        str(tmp_path), balance_column="kind", max_completion_length=8, per_device_train_batch_size=4, num_generations=4
    )
    with pytest.raises(ConfigError, match="balance_column: kind"):
        GRPOTrainer(tiny_model(), graded, args, ROWS, processing_class=tiny_tokenizer())
    model = save_tiny_model(tmp_path / "model")
    [found] = [each for each in podium.check(model, graded, args, ROWS) if each.code == "C064"]
    assert "`prompt`, `label`" in found.what


def test_a_stream_is_refused(tmp_path: Path) -> None:
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    args = GRPOConfig(
        str(tmp_path),
        balance_column="label",
        per_device_train_batch_size=4,
        num_generations=4,
        max_steps=2,
        max_completion_length=8,
    )
    with pytest.raises(ConfigError, match="which a stream does not offer") as raised:
        GRPOTrainer(tiny_model(), graded, args, stream, processing_class=tiny_tokenizer())
    assert raised.value.code == "C064"
