"""The recipe of five rewards: what it composes is learnt, and its adaptive weight moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from podium.recipe import load


@pytest.mark.slow
@pytest.mark.learns
@pytest.mark.timeout(3600)
def test_five_rewards_of_which_one_adapts_all_together_rise(tmp_path: Path) -> None:
    """Measured on the means of single rewards: the sum itself grows with the weight that adapts."""
    trainer = load("composed", {"output_dir": str(tmp_path / "run")}).trainer()
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(history) == 30
    names = [reward.name for reward in trainer.run.scoring.rewards]
    assert len(names) == 5
    base_K = trainer.run.scoring.advantage.weights_K
    means_SK = np.array([[entry[f"rewards/{name}/mean"] for name in names] for entry in history])
    assert (means_SK @ base_K)[-10:].mean() > (means_SK @ base_K)[:5].mean() + 0.5
    correct = names.index("answer_correct")
    assert means_SK[-10:, correct].mean() > means_SK[:5, correct].mean()
    weights = [entry["reward_weights/answer_correct"] for entry in history]
    assert weights[0] == 2.0
    assert max(weights) > 2.0
    assert all(0.5 <= weight <= 8.0 for weight in weights)
