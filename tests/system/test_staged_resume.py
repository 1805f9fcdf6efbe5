"""A run in stages that is killed, also at its borders, and resumed ends as one that nobody killed, bit for bit.

Runs are those of `STAGES` in `killable.py`; the server and the comparison are those of `test_resume`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from podium import Run
from podium.runs import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from test_resume import Server, assert_same, server, undisturbed

__all__ = ["server", "undisturbed"]

RUNS = ("stages", "moving stages", "adapter stages")
MOST = ("stages", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adapter stages", "moving stages")))
STEPS = {"stages": (3, 2, 2, 3), "moving stages": (3, 2, 2), "adapter stages": (3, 2, 3)}
"""Optimizer steps of each stage; the second of `stages` ends at its gate, of five that it might take."""


def resume(server: Server, name: str, folder: Path, expected: Any) -> None:
    server.start(name, folder, resume=can_resume(folder))
    server.finish()
    assert_same(folder, expected)


def can_resume(folder: Path) -> bool:
    """Before the first checkpoint there is nothing to resume from, and a run begins anew."""
    return any(checkpoint.checkpoints(stage) for stage in folder.glob("0*-*"))


def borders(folder: Path) -> Iterator[Path]:
    for entry in json.loads((folder / "stages.json").read_text())["stages"][:-1]:
        yield folder / entry["folder"] / entry["checkpoint"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_the_runs_go_through_all_stages(name: str, undisturbed: Any) -> None:
    """The comparisons below would say nothing of runs in which nothing happens."""
    expected = undisturbed(name)
    parts = Run.load(expected.folder).parts
    lengths = [part.last_step - part.offset for part in parts]
    assert tuple(lengths) == STEPS[name]
    assert [line["step"] for line in expected.history] == list(range(1, sum(lengths) + 1))
    weights = [load_file(next(border.glob("*.safetensors"))) for border in borders(expected.folder)]
    for before, after in itertools.pairwise(weights):
        assert any(not torch.equal(before[key], after[key]) for key in before)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4))])
@pytest.mark.parametrize("name", MOST)
def test_killed_as_a_stage_begins(name: str, stage: int, server: Server, undisturbed: Any, tmp_path: Path) -> None:
    """Right behind a border, before a step of the next stage is done."""
    expected = undisturbed(name)
    if stage > len(STEPS[name]):
        pytest.skip("the run has fewer stages")
    server.start(name, tmp_path)
    server.until("begun", least=stage)
    os.kill(server.pid, signal.SIGKILL)
    assert server.killed()
    resume(server, name, tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RUNS)
def test_killed_at_an_operation_on_checkpoints(
    name: str, seed: int, server: Server, undisturbed: Any, tmp_path: Path
) -> None:
    """Anywhere: while one is written, when it is there and not yet noted, when the next stage reads it. Twice."""
    expected = undisturbed(name)
    moment = random.Random(f"{name} {seed}")
    for _ in range(2):
        server.start(name, tmp_path, resume=can_resume(tmp_path), die_at=moment.randrange(1, expected.operations))
        if not server.killed():
            break
    resume(server, name, tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", RUNS)
def test_killed_after_a_step(name: str, seed: int, server: Server, undisturbed: Any, tmp_path: Path) -> None:
    expected = undisturbed(name)
    server.start(name, tmp_path)
    server.until("step", least=random.Random(f"{name} {seed}").randrange(1, sum(STEPS[name])))
    os.kill(server.pid, signal.SIGKILL)
    assert server.killed()
    resume(server, name, tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_damaged_border_costs_its_stage_and_not_the_run(
    name: str, server: Server, undisturbed: Any, tmp_path: Path
) -> None:
    expected = undisturbed(name)
    server.start(name, tmp_path)
    server.until("begun", least=3)
    os.kill(server.pid, signal.SIGKILL)
    assert server.killed()
    damaged = tmp_path / "02-gate/checkpoint-2" if name == "stages" else tmp_path / "02-b/checkpoint-2"
    with (damaged / "optimizer.pt").open("ab") as file:
        file.write(b"more")
    resume(server, name, tmp_path, expected)
    assert "The checkpoint at the end of stage" in server.said()


@pytest.mark.slow
def test_resumed_from_a_checkpoint_that_is_named(server: Server, undisturbed: Any, tmp_path: Path) -> None:
    """One inside an earlier stage: what came after it is set aside and done again."""
    expected = undisturbed("stages")
    server.start("stages", tmp_path)
    server.until("begun", least=4)
    os.kill(server.pid, signal.SIGKILL)
    assert server.killed()
    server.start("stages", tmp_path, resume=str(tmp_path / "01-warm" / "checkpoint-2"))
    server.finish()
    assert_same(tmp_path, expected)
    assert sorted(path.name for path in (tmp_path / "earlier-1").iterdir()) == [
        "02-gate",
        "03-far",
        "04-near",
        "checkpoint-3",
    ]


@pytest.mark.slow
def test_what_is_saved_can_be_loaded(undisturbed: Any) -> None:
    """The borders and the end, by those who know nothing of Podium."""
    folder = undisturbed("stages").folder
    final = load_file(folder / "final.safetensors")
    own = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(own[key], final[key]) for key in own)
    for border in borders(folder):
        assert checkpoint.damage(border) is None
        AutoModelForCausalLM.from_pretrained(border)
    folder = undisturbed("adapter stages").folder
    base = AutoModelForCausalLM.from_pretrained(folder / "start")
    for place in (*borders(folder), folder):
        assert PeftModel.from_pretrained(base, place).peft_config
        base = AutoModelForCausalLM.from_pretrained(folder / "start")
