"""`podium train RECIPE --processes N` as a user runs it: what is printed, how it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from podium import Run
from podium.cli import app
from podium.cli.launch import CONFIGS, config_file, killed_in, killed_words
from podium.cli.train import UNFINISHED
from podium.runs import checkpoint
from podium.testing import save_tiny_model

RECIPE: dict[str, Any] = {
    "model": "model",
    "dataset": "rows.jsonl",
    "rewards": ["rewards.py:length"],
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 8,
    "max_steps": 2,
    "learning_rate": 1e-4,
    "output_dir": "out",
    "save_strategy": "no",
    "eval_samples": 2,
}

REWARDS = """
def length(completions, **_):
    return [len(text) / 10 for text in completions]

def breaks(completions, **_):
    raise ValueError("not today")
"""

HOLDS = """
def holds(completions, prompts, **_):
    if "xx" in prompts and "xxx" in prompts:
        raise ValueError("not this row")
    return [len(text) / 10 for text in completions]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe, its model, rows and rewards; the current folder."""
    save_tiny_model(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "x" * (i + 1)}) + "\n" for i in range(24)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def podium(*words: str) -> list[str]:
    return [sys.executable, "-m", "podium", "train", "run.yaml", *words]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--processes 0", "--processes is 0; say how many"),
        ("--accelerate fsdp2", "--processes is not set; say how many"),
        (
            "--processes 2 --accelerate fsdp",
            "ddp, fsdp2, hsdp, zero1, zero2, zero3.\n  fix: Did you mean `fsdp2`?",
        ),
        pytest.param(
            "--processes 2 --accelerate zero2",
            "by DeepSpeed, which is not installed.\n  fix: pip install deepspeed; or --accelerate fsdp2",
            marks=[
                pytest.mark.defect("E2", "the package is missing"),
                pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="it is installed"),
            ],
        ),
    ],
)
def test_mistakes_are_one_message(line: str, said: str) -> None:
    result = CliRunner().invoke(app, ["train", "run.yaml", *line.split()])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.output


def test_several_processes_do_not_start_several_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    result = CliRunner().invoke(app, ["train", "run.yaml", "--processes", "2"])
    assert result.exit_code == 2
    assert "one of several already" in result.stderr


def test_the_configs_are_accelerates() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    kinds = {path.stem: load_config_from_file(str(path)).distributed_type for path in CONFIGS.glob("*.yaml")}
    assert {name: str(kind).split(".")[-1] for name, kind in kinds.items()} == {
        "ddp": "MULTI_GPU",
        "fsdp2": "FSDP",
        "hsdp": "FSDP",
        "zero1": "DEEPSPEED",
        "zero2": "DEEPSPEED",
        "zero3": "DEEPSPEED",
    }
    assert config_file(str(CONFIGS / "ddp.yaml")) == config_file("ddp")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_says_once_what_it_does(folder: Path) -> None:
    done = subprocess.run(
        podium("--processes", "2", "--accelerate", "fsdp2"), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("24 prompts, rewards length") == 1
    assert done.stdout.count("Model saved in out") == 1
    assert (folder / "out" / "model.safetensors").is_file()
    assert len((folder / "out" / "metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("division", "stages"),
    [("ddp", [{"name": "warm", "type": "sft", "max_length": 32}, {"name": "on"}]), ("fsdp2", None)],
    ids=["ddp-stages", "fsdp2"],
)
def test_a_run_with_checkpoints_ends_and_resumes(division: str, stages: Any, folder: Path) -> None:
    """Trained, measured before and after, saved; the last step taken again is bit-equal."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = {"eval_dataset": "rows.jsonl", "eval_rows": 2}
    changed = {"save_strategy": "steps", "save_steps": 1, **held_out, **({"stages": stages} if stages else {})}
    (folder / "run.yaml").write_text(yaml.safe_dump({**RECIPE, **changed}))
    words = podium("--processes", "2", "--accelerate", division)
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("Model saved in out") == 1
    assert Run.load("out").evaluations.keys() >= {"before", "after"}
    assert Path("out/report.html").is_file()
    final = load_file("out/model.safetensors")

    if stages:
        record = json.loads(Path("out/stages.json").read_text())
        assert [stage["steps"] for stage in record["stages"]] == [2, 2]
        for key in ("steps", "ended_by", "checkpoint"):
            del record["stages"][1][key]
        Path("out/stages.json").write_text(json.dumps(record))
    shutil.rmtree("out/02-on/checkpoint-2" if stages else "out/checkpoint-2")
    words += ["--resume_from_checkpoint", "true", "--no-eval"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    again = load_file("out/model.safetensors")
    assert again.keys() == final.keys()
    assert all(torch.equal(again[name], final[name]) for name in final)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_mistake_inside_is_one_message_too(folder: Path) -> None:
    done = subprocess.run(
        podium("--processes", "2", "--rewards", "rewards.py:breaks"),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("not today") == 1
    assert "rewards.py:5" in done.stderr, "the line of the user's file"
    assert "Traceback" not in done.stderr


def started(folder: Path, *words: str) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A run that does not end by itself, with its launcher and two processes, after its first step."""
    run = subprocess.Popen(
        podium("--processes", "2", "--no-eval", "--max_steps", "100000", *words),
        stdout=subprocess.DEVNULL,
        stderr=(folder / "said.txt").open("w"),  # a pipe would be full after some hundred steps
    )
    metrics = folder / "out" / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_text()):
        assert run.poll() is None, (folder / "said.txt").read_text()
        time.sleep(0.2)
    family = psutil.Process(run.pid).children(recursive=True)
    assert len(family) >= 3
    return run, family


def temporary(family: list[psutil.Process]) -> Path:
    """The folder that a run's processes write to."""
    return next(Path(p.environ()["PODIUM_PROCESS_OUTPUT"]) for p in family)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_mistake_in_another_process_is_its_message(folder: Path) -> None:
    with (folder / "rewards.py").open("a") as file:
        file.write(HOLDS)
    words = ("--rewards", "rewards.py:holds", "--shuffle_dataset", "false", "--max_steps", "4")
    done = subprocess.run(
        podium("--processes", "2", "--no-eval", *words), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "error: In process 1: reward function `holds`" in done.stderr
    assert "not this row" in done.stderr
    assert "closed by peer" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.defect("E14", "interrupted once")
def test_a_second_interrupt_ends_all_at_once(folder: Path, now: Callable[[str], None]) -> None:
    run, family = started(folder)
    os.kill(run.pid, signal.SIGINT)
    while "was passed on" not in (folder / "said.txt").read_text():  # two that come at once are one
        time.sleep(0.001)
    said = said_at_the_end(run, family, signal.SIGINT, folder)
    now(said)
    assert run.returncode == 130, said
    assert said.count("interrupted") == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGINT,
        pytest.param(signal.SIGHUP, marks=pytest.mark.defect("E10", "SIGHUP: a closed terminal")),
    ],
    ids=str,
)
def test_a_signal_ends_all_with_a_checkpoint(number: signal.Signals, folder: Path, now: Callable[[str], None]) -> None:
    run, family = started(folder)
    said = said_at_the_end(run, family, number, folder)
    now(said)
    assert run.returncode == UNFINISHED, said
    assert f"{number.name} was passed on to the processes of the run." in said
    assert f"{number.name}: a checkpoint is saved, then the run ends." in said
    [saved] = (folder / "out").glob("checkpoint-*")
    assert checkpoint.damage(saved) is None
    assert f"To go on from out/{saved.name}" in said
    assert not (folder / "out" / ".running").exists()


def said_at_the_end(
    run: subprocess.Popen[bytes], family: list[psutil.Process], number: signal.Signals, folder: Path
) -> str:
    """What a run says after a signal to the process that was started; none of its processes or files is left."""
    left = temporary(family)
    os.kill(run.pid, number)
    began = time.monotonic()
    run.wait(timeout=120)
    said = (folder / "said.txt").read_text()
    assert time.monotonic() - began < 60
    assert "Traceback" not in said
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert not left.exists()
    return said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("podium", marks=pytest.mark.defect("E10", "SIGKILL of podium train --processes 2")),
        pytest.param("launcher", marks=pytest.mark.defect("N", "SIGKILL of the launcher")),
    ],
)
def test_no_process_is_left_behind(victim: str, folder: Path, now: Callable[[str], None]) -> None:
    run, family = started(folder)
    left = temporary(family)
    (run if victim == "podium" else psutil.Process(run.pid).children()[0]).kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    now(f"{len(alive)} processes are left")
    assert not alive
    assert run.wait(timeout=60) == (-9 if victim == "podium" else 137)
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "rank",
    [pytest.param(rank, marks=pytest.mark.defect("E6", f"kill -9 of process {rank}")) for rank in (0, 1)],
)
def test_a_killed_process_is_named(rank: int, folder: Path, now: Callable[[str], None]) -> None:
    run, family = started(folder, "--save_strategy", "steps", "--save_steps", "1")
    left = temporary(family)
    while not list((folder / "out").glob("checkpoint-*/manifest.json")):
        time.sleep(0.2)
    next(p for p in family if p.environ().get("RANK") == str(rank)).kill()
    run.wait(timeout=120)
    said = (folder / "said.txt").read_text()
    now(said)
    assert run.returncode == 137, said
    assert f"Process {rank} was ended by SIGKILL, and the run with it." in said
    assert "To go on from out/checkpoint-" in said
    assert "--resume_from_checkpoint true" in said
    assert "Traceback" not in said
    assert "a checkpoint is saved" not in said, "the launcher sends the others SIGTERM"
    assert (folder / "out" / "processes" / "launcher.txt").is_file()
    assert not psutil.wait_procs(family, timeout=30)[1]
    assert not left.exists()


def test_what_the_launcher_says_of_a_signal() -> None:
    report = """Failures:
[1]:
  time      : 2026-11-22_12:00:00
  host      : here
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 11)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 12)
"""
    assert killed_in(report) == ("Process 3", 9)
    assert killed_in(report.replace("-", "")) is None
    assert killed_words("Process 1", 11).startswith("error: Process 1 was ended by SIGSEGV")
    assert "signal 99" in killed_words("Process 1", 99)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param("zero1", (), marks=pytest.mark.defect("E2", "ZeRO-1")),
        pytest.param("zero2", (), marks=pytest.mark.defect("E2", "ZeRO-2")),
        pytest.param("zero3", (), marks=pytest.mark.defect("E2", "ZeRO-3")),
        pytest.param("zero3", ("--lora", "{r: 4}"), marks=pytest.mark.defect("E2", "ZeRO-3 with LoRA")),
    ],
)
def test_deepspeed_trains_at_its_defaults(kind: str, words: tuple[str, ...], folder: Path) -> None:
    common = ("--no-eval", "--max_steps", "3", "--product_precision", "float32", *words)
    two = ("--processes", "2", "--accelerate", kind, "--output_dir", "two")
    one = ("--per_device_train_batch_size", "16", "--output_dir", "one")
    rows = []
    for line in (two, one):
        done = subprocess.run(podium(*common, *line), capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        metrics = (folder / line[-1] / "metrics.jsonl").read_text().splitlines()
        rows.append([json.loads(each)["values"] for each in metrics][:3])
    for many, alone in zip(*rows, strict=True):
        assert many["loss"] == pytest.approx(alone["loss"], abs=1e-4)
        assert many["health/update_ratio"] > 0
