"""`podium check` as it is typed, on the built-in model: `--json`, and beside a trainer that lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import podium
from podium.testing import save_tiny_model

RECIPE = """\
model: builtin:smollm2-135m-instruct
dataset: builtin:additions
rewards: [answer_format, answer_correct]
per_device_train_batch_size: 8
num_generations: 4
max_completion_length: 8
max_steps: 1
learning_rate: 1e-5
use_cpu: true
"""


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "podium", "check", "run.yaml", *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_as_json(tmp_path: Path) -> None:
    done = run(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert {"C029", "D040"} <= {each["code"] for each in made["findings"]}
    fields = {"code", "severity", "what", "why", "fix", "step", "changes", "settings", "facts", "where"}
    assert all(set(each) == fields for each in made["findings"])


@pytest.mark.slow
def test_a_mistake_as_json(tmp_path: Path) -> None:
    done = run(tmp_path, "--json", "--temperature", "0")
    assert done.returncode == 1
    [error] = [each for each in json.loads(done.stdout)["findings"] if each["severity"] == "error"]
    assert (error["code"], error["fix"]) == ("C016", "--temperature 1.0")
    assert error["what"].startswith("--temperature: ")


@pytest.mark.slow
def test_the_processes_of_train(tmp_path: Path) -> None:
    done = run(tmp_path, "--processes", "2", "--accelerate", "fsdp2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "at the peak on each of 2 processes" in done.stdout
    assert done.stdout.endswith("next: podium train run.yaml --processes 2 --accelerate fsdp2\n")
    for flags, says in (
        (["--processes", "0"], "--processes is 0"),
        (["--accelerate", "fsdp2"], "--processes is not set"),
        (["--processes", "2", "--accelerate", "nothing"], "--accelerate nothing: there is no such file"),
        (["--processes", "2", "--accelerate", "damaged.yaml"], "no config file of accelerate's"),
    ):
        (tmp_path / "damaged.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: new}\n")
        refused = run(tmp_path, *flags)
        assert refused.returncode == 2
        assert says in refused.stderr


@pytest.mark.slow
def test_a_plan(tmp_path: Path) -> None:
    """Of GPUs that are not here, with the settings that they bring: bfloat16 by autocast, sixteen processes."""
    done = run(tmp_path, "--devices", "16", "--gpu", "l4", "--use_cpu", "false", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(done.stdout)
    assert not {"C028", "C029"} & {each["code"] for each in made["findings"]}, "of this machine's memory"
    plan = made["plan"]
    assert (plan["basis"], plan["devices"], plan["machines"]) == ("calculated, not measured", 16, 2)
    assert plan["gpu"] == {"name": "l4", "num_bytes": 24 * 10**9, "bfloat16": True}
    assert [each["layout"] for each in plan["layouts"]] == ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
    assert plan["layouts"][plan["chosen"]]["parts"]["weights"] == 4 * 134_515_008
    assert plan["command"].startswith("podium train run.yaml --use_cpu false --processes 8 --nodes 2 --node-rank R ")
    refused = run(tmp_path, "--gpu", "l4")
    assert "no plan: use_cpu is true, so the run takes no GPU" in refused.stdout


@pytest.mark.slow
def test_a_server_that_training_would_wait_for_in_vain(tmp_path: Path) -> None:
    served = ["--use_vllm", "--vllm_mode", "server", "--vllm_server_port", "9"]
    done = run(tmp_path, *served)
    assert done.returncode == 1
    assert "error[C034] --use_vllm: use_vllm: No vLLM server answers" in done.stdout
    assert "or go on against it: on_finding: {C034: ignore}" in " ".join(done.stdout.split())
    assert run(tmp_path, *served, "--on_finding", "{C034: ignore}").returncode == 0


@pytest.mark.slow
def test_a_living_trainer_is_not_disturbed(make_trainer: Callable[..., Any], tmp_path: Path, capsys: Any) -> None:
    """accelerate's state, environment and random numbers are the process's; a check borrows them."""
    checked, alone = make_trainer(), make_trainer()
    model = save_tiny_model(tmp_path / "model")
    environment, numbers = dict(os.environ), torch.get_rng_state()
    drawn = np.random.get_state()[1].copy()
    found = podium.check(model, lambda completions, **_: [0.0] * len(completions), None, [{"prompt": "1+1="}] * 64)
    (tmp_path / "run.yaml").write_text(RECIPE + "env: {PODIUM_TEST_VARIABLE: 1}\n")
    found += podium.check(tmp_path / "run.yaml")
    assert [each.code for each in found if each.severity == "error"] == ["D015"], "the first has no room for prompts"
    assert dict(os.environ) == environment
    assert torch.equal(torch.get_rng_state(), numbers)
    assert np.array_equal(np.random.get_state()[1], drawn)
    assert checked.accelerator.num_processes == 1
    checked.train()
    alone.train()
    assert checked.state.global_step == 2
    for one, other in zip(checked.model.parameters(), alone.model.parameters(), strict=True):
        assert one.equal(other)
