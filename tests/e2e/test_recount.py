"""Accuracy counted again from saved completions without Podium, and numbers that were changed afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import recount, recount_runs

NAMES = ("labels", "continuations")
ALONE = "import runpy, sys; sys.modules['podium'] = None; runpy.run_module('benchmarks.recount', run_name='__main__')"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a conversation with one completion a prompt, and one of plain prompts with two."""
    folder = tmp_path_factory.mktemp("recount")
    recount_runs.main(folder, NAMES)
    return folder


@pytest.mark.slow
def test_accuracy_counted_without_podium_is_the_products(made: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", ALONE, str(made)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in NAMES:
        shares = [
            recount.evaluation(made / "runs" / name / "evaluation" / f"{when}.parquet", recount.RIGHT[name])
            for when in ("before", "after")
        ]
        assert all(0 < each.accuracy < 1 for each in shares), "0 and 1 would hide mistakes in counting"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("before.json", ("accuracy", "value")),
        ("after.json", ("accuracy", "high")),
        ("after.json", ("num_completions",)),
        ("comparison.json", ("main", "num_better")),
        ("comparison.json", ("main", "p_value")),
    ],
)
def test_a_changed_number_is_noticed(
    made: Path, file: str, keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = made / "runs" / "labels" / "evaluation" / file
    saved = path.read_text()
    contents = json.loads(saved)
    inner = contents
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] -= 0.001
    try:
        path.write_text(json.dumps(contents))
        assert recount.main(made) == 1
    finally:
        path.write_text(saved)
    assert "46 of 47 numbers of 2 runs are equal." in capsys.readouterr().out


@pytest.mark.slow
def test_a_changed_completion_is_noticed(made: Path) -> None:
    path = made / "runs" / "labels" / "evaluation" / "after.parquet"
    saved = path.read_bytes()
    rows = pd.read_parquet(path)
    wrong = rows["completion"].str.strip().str.lower() != rows["column/answer"]
    rows.loc[rows.index[wrong][0], "completion"] = rows.loc[rows.index[wrong][0], "column/answer"]
    try:
        rows.to_parquet(path)
        assert recount.main(made) == 1
    finally:
        path.write_bytes(saved)
