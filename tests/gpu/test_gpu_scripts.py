"""The scripts of `benchmarks/gpu`, rehearsed on a CPU with tiny shapes and the GPU's branches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import harness
from benchmarks.gpu.tables import TITLES

ROOT = Path(__file__).parents[2]

CASES = {"matrix": 39, "decode": 3, "step": 2, "train_pack": 8, "memory": 2, "two_ranks": 4}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_case_runs_on_a_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "benchmarks/gpu/run.sh", "--device", "cpu", "--tiny", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    for name, count in CASES.items():
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert [line for line in lines if not line["ok"]] == []
        assert len(lines) == count
        assert all(line["script"] == name and line["seconds"] > 0 and line["device"] == "cpu" for line in lines)
    assert done.returncode == 0, done.stdout + done.stderr
    tables = (tmp_path / "tables.md").read_text()
    assert all(title in tables for title in TITLES.values())
    assert "Not right" not in tables


def crashing(case: str) -> dict[str, float]:
    """One case fails, one ends the process."""
    if case == "fails":
        raise ValueError("a reason")
    if case == "crashes":
        os._exit(3)
    return {"figure": 1.5}


def test_a_failing_case_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process stands in for the group's: it cannot import this script by its name."""
    script = harness.Script(
        name="probe",
        groups=lambda options: {"one": ["works", "fails", "crashes", "lost"], "two": ["works"]},
        prepare=lambda group, options: crashing,
        limit=60,
    )
    options = harness.Options(device="cpu", tiny=True, out=tmp_path, deadline=float("inf"))

    def in_a_fork(command: list[str], *, limit: float) -> str:
        child = os.fork()
        if child == 0:
            harness.run_group(script, command[command.index("--only") + 1], options)
            os._exit(0)
        return f"exit code {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"

    monkeypatch.setattr(harness, "run_process", in_a_fork)
    assert not harness.supervise(script, "one", options)
    assert harness.supervise(script, "two", options)
    found = {(x["group"], x["case"]): (x["ok"], x.get("error")) for x in harness.lines(script, options)}
    assert found == {
        ("one", "works"): (True, None),
        ("one", "fails"): (False, "ValueError: a reason"),
        ("one", "crashes"): (False, "exit code 3"),
        ("one", "lost"): (False, "exit code 3"),
        ("two", "works"): (True, None),
    }


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    script = harness.Script(
        name="probe", groups=lambda options: {"one": ["works"]}, prepare=lambda *_: crashing, limit=1
    )
    options = harness.Options(device="cpu", tiny=True, out=tmp_path, deadline=0.0)
    assert not harness.supervise(script, "one", options)
    [line] = harness.lines(script, options)
    assert line["ok"] is None
    assert line["error"] == "not begun: no time was left"


def test_a_hanging_process_is_ended_with_what_it_started() -> None:
    assert harness.run_process(["bash", "-c", "echo a reason >&2; sleep 60"], limit=1).startswith(
        "stopped after 1 s: a reason"
    )
