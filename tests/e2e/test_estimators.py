"""Short runs with each estimator of advantages and each loss that TRL's trainer does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podium import GRPOConfig, GRPOTrainer
from podium.algorithm.advantages import ESTIMATORS, advantages
from podium.testing import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{n}+1="} for n in range(8)]


def spread(completions: list[str], **_: Any) -> list[float]:
    """From 0 to 1, different for most texts."""
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


def trained(folder: Path, **settings: Any) -> GRPOTrainer:
    """Two proved steps."""
    settings = {"max_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "per_device_train_batch_size": 8, **settings}
    args = GRPOConfig(
        str(folder), num_generations=4, max_completion_length=8, report_to="none", use_cpu=True, **settings
    )
    trainer = GRPOTrainer(tiny_model(), spread, args, ROWS, processing_class=tiny_tokenizer())
    trainer.train()
    return trainer


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_run_takes_the_advantages_of_its_estimator(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def watched(rewards_PGK: np.ndarray, settings: Any, lengths_PG: np.ndarray | None = None) -> Any:
        seen.append((settings.estimator, lengths_PG))
        return advantages(rewards_PGK, settings, lengths_PG)

    monkeypatch.setattr("podium.trainer.rollouts.advantages", watched)
    trainer = trained(tmp_path, advantage_estimator=name, max_steps=1)
    assert {each for each, _ in seen} == {name}
    assert all(lengths.shape == (2, 4) and (lengths >= 1).all() for _, lengths in seen)
    assert trainer.state.global_step == 1
    assert all(row["grad_norm"] > 0 for row in trainer.state.log_history if "grad_norm" in row)


@pytest.mark.cases(1)
@pytest.mark.parametrize("loss_type", ["gmpo", "dppo"])
def test_a_run_with_two_steps_a_round(loss_type: str, tmp_path: Path) -> None:
    trainer = trained(tmp_path, loss_type=loss_type, steps_per_generation=2, epsilon=1e-4, epsilon_high=1e-4)
    steps = [row for row in trainer.state.log_history if "clip_ratio/region_mean" in row]
    assert steps[0]["clip_ratio/region_mean"] == 0
    assert steps[1]["clip_ratio/region_mean"] > 0, "the second step is taken away from the policy that sampled"
