"""Two processes end with the weights and the log of one. Runs are those of `ranks.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from podium import checkpoint

SCRIPT = Path(__file__).with_name("ranks.py")
RUNS = (
    "full",
    "lora",
    "adapter",
    "uneven",
    "adam",
    "one_prompt",
    "no_signal_on_one",
    "no_signal_at_all",
    "batch_scale",
    "reuse",
    "packs",
    "checkpointed",
    "entropy",
    "masked",
    "resampled",
    "stream",
    "evaluated",
)


def launched(folder: Path, num_processes: int) -> Path:
    """All runs of the script on so many processes."""
    launcher = [
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        f"--num_processes={num_processes}",
        "--main_process_port=0",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_CONFIG_FILE": str(folder / "none.yaml"),
    }
    command = [sys.executable, *(launcher if num_processes > 1 else []), str(SCRIPT), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched(tmp_path_factory.mktemp("two"), 2)


def logs(folder: Path, name: str) -> list[dict[str, Any]]:
    """What depends on the data alone."""
    history = json.loads((folder / f"{name}.json").read_text())
    times = ("time", "runtime", "per_second", "resident", "finding/", "logp_gap", "flos")
    return [{k: v for k, v in entry.items() if not any(part in k for part in times)} for entry in history]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_give_the_weights_of_one(name: str, one: Path, two: Path) -> None:
    alone, together = load_file(one / f"{name}.safetensors"), load_file(two / f"{name}.safetensors")
    assert alone.keys() == together.keys()
    largest = max(float(value.abs().max()) for value in alone.values())
    tolerance = 1e-5 if name == "adam" else 1e-6
    for key, value in alone.items():
        assert float((value - together[key]).abs().max()) < tolerance * largest, key


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_log_what_one_logs(name: str, one: Path, two: Path) -> None:
    for alone, together in zip(logs(one, name), logs(two, name), strict=True):
        assert alone.keys() == together.keys()
        for key, value in alone.items():
            same = together[key] is None if value is None else together[key] == pytest.approx(value, rel=2e-4, abs=2e-5)
            assert same, (alone["step"], key, value, together[key])


def test_the_runs_learn_and_differ(one: Path) -> None:
    """Runs that do nothing would agree, too."""
    weights = {name: load_file(one / f"{name}.safetensors") for name in RUNS}
    assert not torch.equal(
        weights["full"]["model.embed_tokens.weight"], weights["batch_scale"]["model.embed_tokens.weight"]
    )
    signal = [entry["frac_reward_zero_std"] for entry in logs(one, "no_signal_on_one") if "reward" in entry]
    assert all(share >= 0.5 for share in signal)
    assert any(entry.get("grad_norm") for entry in logs(one, "no_signal_on_one"))
    assert all(entry.get("grad_norm", 0) == 0 for entry in logs(one, "no_signal_at_all"))
    assert any(entry.get("completions/min_length", 99) < 12 for entry in logs(one, "full"))


def test_checkpoints_hold_every_process(two: Path) -> None:
    for folder in checkpoint.checkpoints(two / "saved"):
        assert checkpoint.damage(folder) is None
        names = {path.name for path in folder.iterdir()}
        assert {"round-0.npz", "round-1.npz", "rng_state_0.pth", "rng_state_1.pth"} <= names
    assert not list((two / "saved").glob(".tmp-*"))


@pytest.mark.parametrize("folder", ["one", "two"])
def test_a_resumed_run_is_bit_equal(folder: str, request: pytest.FixtureRequest) -> None:
    """From the middle of a round."""
    path = request.getfixturevalue(folder)
    saved, resumed = load_file(path / "saved.safetensors"), load_file(path / "resumed.safetensors")
    assert saved.keys() == resumed.keys()
    assert all(torch.equal(saved[name], resumed[name]) for name in saved)


def test_samples_do_not_depend_on_the_number_of_processes(one: Path, two: Path) -> None:
    assert (one / "sampled.json").read_text() == (two / "sampled.json").read_text()
