"""A part of `make health`: real runs of the built-in model, a healthy one and failures, as the doctor sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.health import RESULTS, RUNS, run, table, verdict

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["healthy-11", "NaN gradient", "reward with flipped sign", "adapter frozen"])
def test_the_doctor_is_right(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)
    found = verdict(name, tmp_path)
    assert found["right"], found
    assert found["overhead"] < 0.03


def test_the_kept_results_are_those_of_the_documentation() -> None:
    results = json.loads(RESULTS.read_text())
    assert [each["run"] for each in results] == list(RUNS)
    assert [each["run"] for each in results if not each["right"]] == []
    assert table(results) in (DOCS / "health.md").read_text()
