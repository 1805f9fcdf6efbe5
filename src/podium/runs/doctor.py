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
from podium.records import Finding, StepMetrics
from podium.runs.foreign import read_log
from podium.runs.monitors import DETECTORS, Condition, MetricHistory, diagnose, ends, rank, settings_of
from podium.runs.run import Part, Run

FEW_STEPS = 12
"""Steps below which detectors of trends have not begun to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A diagnosis."""

    source: str
    history: tuple[StepMetrics, ...]
    conditions: tuple[Condition, ...]
    """Most important first."""
    has_completions: bool
    """Whether completions were recorded; without them, detectors that read texts or groups saw nothing."""
    reward: tuple[float, ...] = ()
    """By step, with the weights as they were given."""
    planned: int | None = None
    """Steps that the run was to take; None: not known."""

    @property
    def head(self) -> str:
        """What was looked at."""
        of = f" of {self.planned}" if self.planned and self.planned > len(self.history) else ""
        steps = f"{len(self.history)}{of} steps"
        if not self.reward:
            return steps
        first, last, count = ends(self.reward)
        many = f"{count} step{'s' * (count > 1)}"
        return f"{steps}, reward {first:.3f} in the first {many}, {last:.3f} in the last {many}"

    @property
    def nothing(self) -> str:
        """What may be said where no detector found anything: no more than could be seen."""
        said = f"{len(DETECTORS)} detectors found nothing"
        if self.reward and not any(self.reward):
            return f"{said}, but the reward was 0 in all of {len(self.reward)} steps: nothing has been learnt."
        if len(self.history) < FEW_STEPS:
            return f"{said} in {len(self.history)} steps, which is too few for most of them: see `docs/health.md`."
        if not self.has_completions:
            return f"{said} in the numbers; those that read completions had none."
        return f"Nothing is the matter that {len(DETECTORS)} detectors know."


def examine(path: str | Path) -> Report:
    """Look at a run's folder, or at another trainer's log. Raises `DataError` where neither is there."""
    path = Path(path)
    log = _foreign(path)
    if log is not None:
        history = read_log(log)
        found = diagnose(history, {})
        rewards = tuple(each.values["reward"] for each in history if "reward" in each.values)
        return Report(source=str(log), history=history, conditions=tuple(found), has_completions=False, reward=rewards)
    run = Run.load(path)
    if not run.history and run.findings.empty:
        raise DataError(f"{path} has recorded no step yet. Look again when training has begun.")
    conditions = [found for part in run.parts for found in _of_stage(part)] if run.parts else _conditions(run)
    return Report(
        source=str(path),
        history=run.history,
        conditions=tuple(sorted(conditions, key=lambda condition: rank(condition.finding))),
        has_completions=not run.rollouts.empty,
        reward=_rewards(run.parts[-1].run if run.parts else run),
        planned=_planned(run),
    )


def _rewards(run: Run) -> tuple[float, ...]:
    """By step; of a run in stages, of the latest, as the others had other rewards."""
    sight = MetricHistory(history=run.history, settings=settings_of(run.environment))
    return tuple(sight.series("reward").tolist()) if run.history else ()


def _planned(run: Run) -> int | None:
    wanted = run.environment.get("settings", {}).get("max_steps")
    return wanted if isinstance(wanted, int) and wanted > 0 and not run.parts else None


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
