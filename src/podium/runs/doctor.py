"""Diagnosis of a run: every detector over its whole record, ranked.

    for issue in examine("runs/quickstart").issues:
        print(issue.finding)

Reads the folder of a run, finished or not, and TRL's `trainer_state.json` as a history of steps. Of that only numbers
are read; a name that is in no table stays as it is.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podium.errors import DataError, Finding
from podium.errors.texts import counted, quoted
from podium.records import StepMetrics
from podium.runs.monitors import DETECTORS, Issue, MetricHistory, agreed, diagnose, ends, rank, run_settings, turns
from podium.runs.rounds import RecordedRounds
from podium.runs.run import METRICS, Outcome, Run, Stage

FEW_STEPS = 12
"""Steps below which detectors of trends have not begun to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """All issues of a run."""

    source: str
    history: tuple[StepMetrics, ...]
    issues: tuple[Issue, ...]
    """Most important first."""
    has_completions: bool
    """Whether completions were recorded; without them, detectors that read texts or groups saw nothing."""
    has_turns: bool = False
    """Whether completions with several turns were; without them, those of tools and turns saw nothing."""
    reward: tuple[float, ...] = ()
    """By step, under the initial weights."""
    accuracy: str | None = None
    """The reward function that tells right from wrong; None: there is none."""
    planned: int | None = None
    """Steps that the run was to take; None: unknown."""
    outcome: Outcome = "better or not known"
    verdict: str = ""
    """Of the comparison with the model before training; empty: there is none."""

    @property
    def head(self) -> str:
        """One line: number of steps, reward at both ends."""
        of = f" of {self.planned}" if self.planned and self.planned > len(self.history) else ""
        steps = f"{len(self.history)}{of} steps"
        if not self.reward:
            return steps
        first, last, count = ends(self.reward)
        many = counted(count, "step")
        return f"{steps}, reward {first:.3f} in the first {many}, {last:.3f} in the last {many}"

    @property
    def nothing(self) -> str:
        """The sentence for a run without issues: it claims no more than the detectors could see."""
        looked = [row for row in DETECTORS.values() if self.has_turns or row.find.__module__ != turns.__name__]
        none_found = f"{len(looked)} detectors found nothing"
        if not self.has_completions:
            none_found = "The detectors that read numbers alone found nothing"
        if self.reward and not any(self.reward):
            return f"{none_found}, but the reward was 0 in all of {len(self.reward)} steps: nothing has been learnt."
        if len(self.history) < FEW_STEPS:
            return (
                f"{none_found} in {len(self.history)} steps, which is too few for most of them: see `docs/health.md`."
            )
        if not self.has_completions:
            return f"{none_found}; those that read completions had none."
        if self.accuracy is None:
            unknown = "No reward tells right from wrong, so whether the model is better is not known: `accuracy: NAME`."
            return f"{none_found}. {unknown}"
        return f"{none_found} in {len(self.history)} steps and their recorded completions."


def _agreeing(issues: Sequence[Issue]) -> tuple[Issue, ...]:
    """Most important first, without changes that contradict those of an issue before."""
    ranked = sorted(issues, key=lambda issue: rank(issue.finding))
    found = agreed([issue.finding for issue in ranked])
    return tuple(replace(issue, finding=finding) for issue, finding in zip(ranked, found, strict=True))


def examine(path: str | Path) -> HealthReport:
    """Diagnose a run's folder, or TRL's `trainer_state.json`. Raises `DataError` where neither is there."""
    path = Path(path)
    log = _trainer_state(path)
    if log is not None:
        history = read_trainer_state(log)
        rewards = tuple(entry.values["reward"] for entry in history if "reward" in entry.values)
        issues = _agreeing(diagnose(history, {}))
        return HealthReport(source=str(log), history=history, issues=issues, has_completions=False, reward=rewards)
    run = Run.load(path)
    every = [part.run.rounds for part in run.parts] or [run.rounds]
    found = [issue for stage, rounds in zip(run.parts, every, strict=False) for issue in _of_stage(stage, rounds)]
    found = found if run.parts else _issues(run, every[0])
    if not run.history and not found:
        raise DataError(f"{path} has recorded no step yet. Look again when training has begun.", path=path)
    wanted = run.environment.get("settings", {}).get("max_steps")
    latest = run.parts[-1].run if run.parts else run  # the stages before it had other rewards
    seen = MetricHistory(steps=latest.history, settings=run_settings(latest.environment, latest.given))
    return HealthReport(
        source=str(path),
        history=run.history,
        issues=_agreeing(found),
        has_completions=any(map(len, every)),
        has_turns=any(rounds.has_turns for rounds in every),
        reward=tuple(seen.series("reward").tolist()),
        accuracy=seen.settings.accuracy,
        planned=wanted if isinstance(wanted, int) and wanted > 0 and not run.parts else None,
        outcome=run.outcome,
        verdict=run.verdict,
    )


def _issues(run: Run, rounds: RecordedRounds) -> list[Issue]:
    """The detectors' issues, and the findings that others recorded: checks before the run, the proof."""
    recorded = run.reported
    settings = run_settings(run.environment, run.given)
    found = diagnose(run.history, rounds, settings, visits=rounds.visits, recorded=recorded)
    others = [finding for finding in recorded if finding.code not in DETECTORS]
    for other in [*others, *failed_in_proof(run, {finding.code for finding in others})]:
        at = _whole(other.step) or 0
        found.append(
            Issue(finding=other, first_step=at, last_step=at, num_steps=1, num_looks=1, reported_as=other.severity)
        )
    return found


def failed_in_proof(run: Run, known: set[str]) -> list[Finding]:
    """Checks that stopped a run, as `proof.json` has them: with `record: false` there are no findings."""
    checks = run.proof.get("checks")
    checks = checks if isinstance(checks, list) else []
    failed = [x for x in checks if isinstance(x, dict) and x.get("result") == "FAILED"]
    return [
        Finding(
            code=str(x.get("code")), severity="error", what=f"{x.get('name')}: {x.get('detail')}", fix=str(x.get("fix"))
        )
        for x in failed
        if x.get("code") not in known
    ]


def _whole(step: float | None) -> int | None:
    """A step of a data frame, where None may have become NaN."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return None if step is None else int(step)
    return None


def _of_stage(stage: Stage, rounds: RecordedRounds) -> list[Issue]:
    """A GRPO stage is diagnosed by itself, as its rewards are others; steps are those of the whole run."""

    def moved(issue: Issue) -> Issue:
        step = _whole(issue.finding.step)
        what = f"stage {stage.name}: {issue.finding.what}"
        return replace(
            issue,
            finding=replace(issue.finding, what=what, step=None if step is None else step + stage.offset),
            first_step=issue.first_step + stage.offset,
            last_step=issue.last_step + stage.offset,
        )

    return [moved(issue) for issue in _issues(stage.run, rounds)] if stage.kind == "grpo" else []


def _trainer_state(path: Path) -> Path | None:
    """The log to read, where `path` is one or holds checkpoints of TRL; None for a folder of Podium."""
    if path.is_file():
        return path
    if (path / METRICS).exists() or not path.is_dir():
        return None
    states = [path / "trainer_state.json", *path.glob("checkpoint-*/trainer_state.json")]
    return max((state for state in states if state.is_file()), key=lambda state: state.stat().st_mtime, default=None)


SPELLINGS: Mapping[str, str] = {
    "completion_length": "completions/mean_length",
    "completions/mean_clipped": "completions/clipped_ratio",
    "clip_ratio": "clip_ratio/region_mean",
}
"""Names of TRL before 1.0 -> ours."""


def read_trainer_state(path: Path) -> tuple[StepMetrics, ...]:
    """The steps of TRL's `trainer_state.json`, oldest first; lines without a step are numbered.

    Raises:
        DataError: the file is no such record, or holds no step.
    """
    if path.suffix.lower() != ".json":
        raise DataError(f"{path} is no record of a run: give the run's folder, or TRL's trainer_state.json.", path=path)
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        logged = list(contents["log_history"] if isinstance(contents, dict) else contents)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as a log: {quoted(error)}", path=path, error=error) from error
    steps: dict[int, dict[str, float]] = {}
    for number, line in enumerate((line for line in logged if isinstance(line, dict)), start=1):
        values = _numbers(line)
        step = values.pop("step", float(number))
        values.pop("epoch", None)
        values.pop("total_flos", None)
        if values and "train_runtime" not in values and math.isfinite(step):
            steps.setdefault(int(step), {}).update(values)
    if not steps:
        raise DataError(f"{path} has no line with numbers of a training step (reward, loss, ...).", path=path)
    return tuple(StepMetrics(step=step, values=steps[step]) for step in sorted(steps))


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line, under our names. Null is NaN, as JSON has no other way to write it.

    >>> _numbers({"step": 3, "clip_ratio": 0.5, "kl": None, "name": "x"})
    {'step': 3.0, 'clip_ratio/region_mean': 0.5, 'kl': nan}
    """
    numbers: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, str, type(None))):
            continue
        try:
            number = math.nan if value is None else float(str(value))  # a number of 400 digits is infinite
        except ValueError:
            continue
        numbers[SPELLINGS.get(name, name)] = number
    return numbers
