"""What is the matter with a run: every detector over all it recorded, ranked.

    for condition in examine("runs/quickstart").conditions:
        print(condition.finding)

Reads the folder of a run, finished or not, and the logs of other trainers: TRL's `trainer_state.json`, CSV, JSON Lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podium.errors import DataError
from podium.foreign import read_log
from podium.monitors import DETECTORS, Condition, diagnose, rank, settings_of
from podium.records import Finding, StepMetrics
from podium.run import Part, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A diagnosis."""

    source: str
    history: tuple[StepMetrics, ...]
    conditions: tuple[Condition, ...]
    """Most important first."""
    has_completions: bool
    """Whether completions were recorded; without them, detectors that read texts or groups saw nothing."""


def examine(path: str | Path) -> Report:
    """Look at a run's folder, or at another trainer's log. Raises `DataError` where neither is there."""
    path = Path(path)
    log = _foreign(path)
    if log is not None:
        history = read_log(log)
        found = diagnose(history, {})
        return Report(source=str(log), history=history, conditions=tuple(found), has_completions=False)
    run = Run.load(path)
    if not run.history and run.findings.empty:
        raise DataError(f"{path} has recorded no step yet. Look again when training has begun.")
    conditions = [found for part in run.parts for found in _of_stage(part)] if run.parts else _conditions(run)
    return Report(
        source=str(path),
        history=run.history,
        conditions=tuple(sorted(conditions, key=lambda condition: rank(condition.finding))),
        has_completions=not run.rollouts.empty,
    )


def _conditions(run: Run) -> list[Condition]:
    return [*diagnose(run.history, rounds_of(run), settings_of(run.environment)), *_others(run)]


def _of_stage(part: Part) -> list[Condition]:
    """A stage is looked at by itself, as its rewards are others; steps are those of the whole run."""
    return [_moved(condition, part) for condition in (_conditions(part.run) if part.kind == "grpo" else ())]


def _moved(condition: Condition, part: Part) -> Condition:
    finding, offset = condition.finding, part.offset
    step = None if finding.step is None or finding.step != finding.step else int(finding.step) + offset
    return replace(
        condition,
        finding=replace(finding, what=f"stage {part.name}: {finding.what}", step=step),
        first_step=condition.first_step + offset,
        last_step=condition.last_step + offset,
    )


def rounds_of(run: Run) -> dict[int, list[Mapping[str, Sequence[Any]]]]:
    """By step, the tables of the generation rounds drawn for it."""
    import pandas as pd

    rounds: dict[int, list[Mapping[str, Sequence[Any]]]] = {}
    for step, frame in run.rollouts.groupby("step"):
        table = frame.astype(object).where(pd.notna(frame), None)
        rounds.setdefault(int(str(step)), []).append({name: table[name].tolist() for name in table.columns})
    return rounds


def _others(run: Run) -> list[Condition]:
    """What checks before the run, or anything but the detectors, wrote down."""
    said = [Finding(**row) for row in run.findings.to_dict("records") if row["code"] not in DETECTORS]
    steps = [0 if finding.step is None or finding.step != finding.step else int(finding.step) for finding in said]
    return [
        Condition(finding=f, first_step=step, last_step=step, num_steps=1, in_a_row=1, said=f.severity)
        for f, step in zip(said, steps, strict=True)
    ]


def _foreign(path: Path) -> Path | None:
    """The log to read, where `path` is one or holds checkpoints of another trainer; None for a folder of Podium."""
    if path.is_file():
        return path
    if (path / "metrics.jsonl").exists() or not path.is_dir():
        return None
    states = [path / "trainer_state.json", *path.glob("checkpoint-*/trainer_state.json")]
    return max((state for state in states if state.is_file()), key=lambda state: state.stat().st_mtime, default=None)
