"""The recipe with a code reward: the built-in model, a real sandbox, rising reward."""

from __future__ import annotations

import subprocess
import sys
from statistics import mean

import pytest

from podium.isolation.sandbox import choose
from podium.models.builtin import resolve_model
from podium.runs.run import Run


@pytest.mark.slow
@pytest.mark.learns
def test_mean_reward_rises(tmp_path):
    """Minutes on two cores. The last steps against the first: noise of a step of 64 completions is near 0.03."""
    resolve_model("builtin:smollm2-135m-instruct")
    assert choose("auto") in ("bubblewrap", "landlock")
    command = [sys.executable, "-m", "podium", "train", "code", "--output_dir", str(tmp_path / "run")]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=3000)
    rewards = Run.load(tmp_path / "run").metrics["reward"].dropna().tolist()
    assert mean(rewards[-4:]) > mean(rewards[:2]) + 0.1
