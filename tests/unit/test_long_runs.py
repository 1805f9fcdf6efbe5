"""A long run is read again in bounded work: some looks of each detector, some rounds, and what the monitor reported."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podium.errors import Finding
from podium.records import StepMetrics
from podium.runs import monitors, rounds
from podium.runs.doctor import examine
from podium.runs.monitors import DETECTORS, EVERY, SPREAD, SPREAD_NUMBERS, Monitor, RunSettings, diagnose
from podium.runs.monitors.detection import trend
from podium.runs.run import Run
from tests.unit.test_monitors import healthy, table

STEPS = 10_000
BROKEN, SPIKE = 4_321, 7_777
MOST_LOOKS = SPREAD + 24
"""The last steps, peaks and reports come on top of the looks that are spread."""


def values(step: int) -> dict[str, float]:
    """A healthy run, but for one loss that is not a number."""
    return {**healthy(step), "reward": 0.6 * step / STEPS, **({"loss": math.nan} if step == BROKEN else {})}


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10,000 steps in whose rounds a reward is constant, and a report of a spike that is long gone."""
    folder = tmp_path_factory.mktemp("runs") / "long"
    (folder / "rollouts").mkdir(parents=True)
    lines = ({"step": s, "time": s, "values": values(s)} for s in range(1, STEPS + 1))
    text = "".join(json.dumps(line) + "\n" for line in lines).replace("NaN", "null")
    # A step that only a look at this step sees.
    spiked = {**values(SPIKE), "grad_norm": 40.0}
    old, new = (json.dumps({"step": SPIKE, "time": SPIKE, "values": each}) for each in (values(SPIKE), spiked))
    (folder / "metrics.jsonl").write_text(text.replace(old, new))
    told = Finding(code="M134", severity="note", what="Gradient norm 40", step=SPIKE)
    (folder / "findings.jsonl").write_text(json.dumps(asdict(told)) + "\n")
    columns = table(1, reward=lambda p, g, t: 0.5, prompts=2, completions=4)
    made = {name: pa.array(column * 100) for name, column in columns.items()}
    for first in range(1, STEPS + 1, 100):
        steps = np.repeat(np.arange(first, first + 100), len(columns["step"]))
        pq.write_table(
            pa.table({**made, "step": pa.array(steps, pa.int32())}), folder / "rollouts" / f"{first:07}-0.parquet"
        )
    return folder


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls of detectors and rounds that are read."""
    calls: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            calls[name] += 1
            return call(*args)

        return counted

    rows = {code: replace(row, find=counting(code, row.find)) for code, row in DETECTORS.items()}
    monkeypatch.setattr(monitors, "DETECTORS", rows)
    monkeypatch.setattr(monitors, "round_view", counting("rounds", monitors.round_view))
    monkeypatch.setattr(rounds.pq, "read_table", counting("files", rounds.pq.read_table))
    return calls


def test_ten_thousand_steps_are_read_with_few_looks(long_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    report = examine(long_run)
    found = {issue.finding.code: issue for issue in report.issues}
    assert set(found) == {"M102", "M131", "M134"}
    assert (found["M131"].first_step, found["M134"].first_step) == (BROKEN, SPIKE)
    assert found["M102"].last_step == STEPS
    assert report.has_completions
    assert calls["rounds"] <= 16 * MOST_LOOKS
    assert calls["files"] <= 2 * MOST_LOOKS
    assert max(calls[code] for code in DETECTORS) <= MOST_LOOKS


def test_a_round_is_read_as_it_was_written(long_run: Path) -> None:
    run = Run.load(long_run)
    read = run.rounds
    assert (len(read), read.has_turns) == (STEPS, False)
    for step in (1, 5_000, STEPS):
        rows = run.rollouts[run.rollouts["step"] == step]
        [columns] = read[step]
        assert columns["completion"] == rows["completion"].tolist()
        assert columns["contains_answer"] == [None] * len(rows)
        assert [visit.low for visit in read.visits[step]] == rows.groupby("prompt_id")["reward"].min().tolist()


def bad_spells(step: int) -> dict[str, float]:
    """Numbers with a fault now and then, each for a few steps."""
    faults: dict[int, dict[str, float]] = {
        1: {"kl": 2.0},
        11: {"completions/clipped_ratio": 0.9},
        14: {"clip_ratio/region_mean": 0.6},
        17: {"grad_norm": 60.0},
        19: {"loss": math.inf},
    }
    return {**healthy(step), "reward": 0.4, **(faults.get(step // 40, {}) if step % 40 < 4 else {})}


@pytest.mark.cases(1)
@pytest.mark.parametrize("steps", [EVERY - 28, 1_000])
def test_the_record_tells_what_the_monitor_reported(steps: int) -> None:
    """The same findings, severities and first steps, whether a run is short or long."""
    history = [StepMetrics(step=s, values=bad_spells(s)) for s in range(1, steps + 1)]
    live = Monitor(RunSettings(learning_rate=1e-5))
    told = [finding for metrics in history for finding in live.step(metrics)]
    again = diagnose(history, {}, RunSettings(learning_rate=1e-5), recorded=told)

    def facts(issues: Any) -> dict[str, tuple[str, int]]:
        return {issue.finding.code: (issue.finding.severity, issue.first_step) for issue in issues}

    assert facts(again) == facts(live.issues.values())
    assert len(facts(again)) >= (2 if steps < EVERY else 5)


def test_a_resumed_run_reports_nothing_twice() -> None:
    history = [StepMetrics(step=s, values={**healthy(s), "frac_reward_zero_std": 0.9}) for s in range(1, 601)]
    live, resumed = Monitor(), Monitor()
    told = [finding for metrics in history for finding in live.step(metrics)]
    resumed.reread(history, {}, recorded=told)
    assert resumed.issues.keys() == live.issues.keys() == {"M101"}
    assert resumed.step(StepMetrics(step=601, values={**healthy(601), "frac_reward_zero_std": 0.9})) == []


def test_numbers_alone_are_looked_at_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    diagnose([StepMetrics(step=s, values=values(s)) for s in range(1, STEPS + 1)], {})
    assert SPREAD_NUMBERS // 2 < max(calls.values()) <= SPREAD_NUMBERS + 24


def test_a_trend_takes_no_square_of_memory() -> None:
    import tracemalloc

    x = np.random.default_rng(0).integers(0, 50, STEPS).astype(float)
    tracemalloc.start()
    z = trend(x)
    assert tracemalloc.get_traced_memory()[1] < 4e6
    tracemalloc.stop()
    small = x[:300]
    signs = np.sign(small[None, :] - small[:, None])[np.triu_indices(300, 1)].sum()
    assert np.sign(trend(small)) == np.sign(signs)
    assert abs(z) < 3
