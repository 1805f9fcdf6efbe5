"""One line in a job script is enough: `podium train run.yaml --resume auto --grace 60`.

It is ended by signals at random moments and started again until it ends by itself, with the weights of a run that
nobody ended.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from podium.cli.train import UNFINISHED
from podium.runs import checkpoint
from podium.testing import save_tiny_model

RECIPE = {
    "model": "model",
    "dataset": "rows.jsonl",
    "rewards": "rewards.py:digits",
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 8,
    "max_steps": 400,
    "learning_rate": 1e-3,
    "save_strategy": "steps",
    "save_steps": 50,
    "save_total_limit": 2,
    "use_cpu": True,
    "report_to": "none",
}
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
ENDED = {UNFINISHED, 130, *(128 + number for number in SIGNALS), *(-number for number in SIGNALS)}
"""Exit codes of a run that a signal has ended: with a checkpoint, or before there was one to write."""


def started(output: str, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "podium", "train", "run.yaml", "--no-eval", "--output_dir", output, *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=Path(f"{output}.txt").open("ab"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{a}+{b}="}}\n' for a in range(8) for b in range(8)))
    (tmp_path / "rewards.py").write_text(
        "def digits(completions, **kwargs):\n"
        "    return [sum(c.isdigit() for c in text) + len(text) / 10 for text in completions]\n"
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_twenty_signals_change_no_weight(folder: Path) -> None:
    assert started("calm", "--resume", "auto").wait(timeout=600) == 0, Path("calm.txt").read_text()[-3000:]
    draws = random.Random(20)
    steps: list[int] = []
    sent = 0
    while True:
        run = started("disturbed", "--resume", "auto", "--grace", "60")
        if sent < 20:
            number = SIGNALS[sent % len(SIGNALS)]
            _wait_for_a_step(run, more_than=max(steps, default=0) + draws.randrange(8))
            time.sleep(draws.uniform(0.0, 0.1))
            if run.poll() is None:
                os.kill(run.pid, number)
                sent += 1
        code = run.wait(timeout=600)
        said = Path("disturbed.txt").read_text()
        assert "Traceback" not in said, said[-3000:]
        if code == 0:
            break
        assert code in ENDED, f"{code}: {said[-3000:]}"
        steps += [checkpoint.step_of(path) for path in checkpoint.checkpoints(Path("disturbed"))[:1]]
        assert not list(Path("disturbed").glob(f"{checkpoint.STAGING}*"))
    assert sent == 20
    assert len(set(steps)) > 5, "ended at different steps"
    calm, disturbed = (load_file(f"{run}/model.safetensors") for run in ("calm", "disturbed"))
    assert all(torch.equal(disturbed[name], value) for name, value in calm.items())


def _wait_for_a_step(run: subprocess.Popen[bytes], *, more_than: int) -> None:
    """Until a run has written a step after the one that it went on from, or has ended."""
    metrics = Path("disturbed/metrics.jsonl")
    while run.poll() is None:
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        if len(lines) > more_than + 1:
            return
        time.sleep(0.05)
