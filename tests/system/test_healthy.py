"""The benchmark of sound runs: what it draws, and that it would see a run that is stopped."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.families import FAMILIES
from benchmarks.healthy import CHOICES, RUNS, Outcome, execute, plans, summary, table
from benchmarks.legitimate_rewards import REWARDS


def test_every_value_occurs_and_runs_differ() -> None:
    runs = plans()
    assert len(runs) == RUNS >= 400
    assert runs == plans()
    for name, values in (("family", FAMILIES), ("reward", REWARDS)):
        assert set(Counter(getattr(run, name) for run in runs)) == set(values)
    assert len({str(sorted(run.settings.items(), key=str)) for run in runs}) == RUNS
    for name in ("learning_rate", "optim", "max_completion_length"):
        assert {run.settings[name] for run in runs} == set(CHOICES[name])


@pytest.mark.slow
def test_a_sound_run_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    FAMILIES["gemma3"](tmp_path / "model")
    run = replace(plans()[1], family="gemma3")
    outcome = execute(run, tmp_path / "model", tmp_path / "run")
    assert not outcome.stopped
    assert outcome.steps == run.settings["max_steps"]
    assert "error" not in [severity for _, severity, *_ in outcome.said]


def test_a_run_that_is_stopped_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    FAMILIES["llama"](tmp_path / "model")
    broken = replace(plans()[1], settings={**plans()[1].settings, "num_generations": 5})
    outcome = execute(broken, tmp_path / "model", tmp_path / "run")
    assert "ConfigError" in outcome.stopped
    assert "1 stopped" in summary([outcome], 1)


def test_a_warning_without_a_judgement_shows_in_the_table() -> None:
    said = Outcome(number=0, said=(("run", "warning", "X999", "what"), ("run", "note", "X998", "note")))
    assert "| X999 | 1 | what | not read yet |" in table([said])
    assert "X998" not in table([said])
