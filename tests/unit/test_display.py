"""HTML that runs, findings and progress display in a notebook, and that model text stays text there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podium import Run
from podium.errors import Finding
from podium.records import StepMetrics
from podium.runs.recording import RunFolder
from podium.trainer import health

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202e{{ 7 * 7 }}"


def check_is_text(html: str) -> None:
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;" in html
    assert "{{ 7 * 7 }}" in html
    assert not set("\x1b\u202e") & set(html)


def test_a_finding_displays_itself() -> None:
    finding = Finding(code="M141", severity="warning", what=HOSTILE, why="because", fix=HOSTILE)
    html = finding._repr_html_()
    check_is_text(html)
    assert html.startswith("<b>warning[M141] &lt;script")
    assert "why: because" in html


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = RunFolder(tmp_path)
    writer.begin(resumed_step=None)
    for step in (1, 2, 3):
        writer.add_metrics(StepMetrics(step=step, values={"reward": step / 4}))
    writer.add_finding(Finding(code="M101", severity="note", what="equal", fix="", step=2))
    writer.add_finding(Finding(code="M156", severity="error", what=HOSTILE, fix="hf_abcdefghijklmnopqrstuvwx", step=3))
    rows: dict[str, list[Any]] = {
        "images": [(), ()],
        "step": [3, 3],
        "prompt_id": [0, 0],
        "completion_index": [0, 1],
        "completion": [HOSTILE, "12"],
        "reward": [0.0, 1.0],
    }
    writer.add_rollouts([rows])
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation/comparison.json").write_text(json.dumps({"verdict": "Better: accuracy rose"}))
    return tmp_path


def test_a_run_displays_itself(folder: Path) -> None:
    html = Run.load(folder)._repr_html_()
    check_is_text(html)
    assert "hf_abc" not in html
    assert html.index("error[M156]") < html.index("note[M101]"), "the gravest first"
    assert '<polyline points="0.0,100.0 240.0,50.0 480.0,0.0"' in html
    for text in (", 3 steps", "Better: accuracy rose", "<td>best</td><td>1.00</td>", "<td>worst</td><td>0.00</td>"):
        assert text in html


def test_a_run_without_anything_displays_itself(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert ", 0 steps" in Run.load(tmp_path)._repr_html_()


def test_the_line_and_curve_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def display(html: str, display_id: bool) -> Any:
        shown.append(html)
        return SimpleNamespace(update=shown.append)

    module = SimpleNamespace(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=module))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    line: Any = health.NotebookProgress()
    state = SimpleNamespace(max_steps=3, is_world_process_zero=True, num_input_tokens_seen=0, global_step=0)
    line.on_train_begin(SimpleNamespace(), state, None)
    assert "checking the first batch" in shown[-1]
    for step in (1, 2):
        state.global_step = step
        line.on_step_end(None, state, None)
        line.on_log(None, state, None, {"reward": step / 2, "loss": 0.1})
    assert "step 2/3  reward 1.000" in shown[-1]
    assert "<polyline " in shown[-1]
    assert "loss" not in shown[-1]


@pytest.mark.defect("F12", "step lines at 80 columns")
def test_a_step_line_keeps_whole_parts(now: Callable[[str], None]) -> None:
    line = "step 3/5  reward 1.250  right 25 %  length 31 tokens  0:04 left  and more than fits into 80 columns"
    assert health.fitting(line, 200) == line
    assert health.fitting(line, 80) == line.partition("  and")[0]
    assert health.fitting(line, 40) == "step 3/5  reward 1.250  right 25 %"
    now(health.fitting(line, 80))
