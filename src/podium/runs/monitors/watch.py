"""Runs every detector at every step, remembers what is the matter since when, says each thing once until it changes.

The same while a run goes on (`Watch.step`) and afterwards over what it recorded (`diagnose`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podium.records import Finding, StepMetrics
from podium.runs.monitors.detection import Detection, Severity
from podium.runs.monitors.history import MetricHistory, RoundView, RunSettings, round_view
from podium.runs.monitors.table import DETECTORS

ROUNDS = 16
"""Generation rounds that detectors see completion by completion."""

VISITS = 20_000
"""Prompts whose rewards are remembered."""

FORGET_AFTER = 10
"""Steps without a symptom after which it is news again."""

ORDER: Mapping[str, int] = {"error": 0, "warning": 1, "note": 2}
WORSE: Mapping[Severity, Severity] = {"note": "warning", "warning": "error", "error": "error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One thing that is or was the matter."""

    finding: Finding
    """As last seen at its worst."""
    first_step: int
    last_step: int
    num_steps: int
    """With the symptom."""
    in_a_row: int
    said: Severity
    """The severity it was last said with."""


class Watch:
    """The memory of the monitors."""

    def __init__(self, settings: RunSettings | None = None, *, ignored: frozenset[str] = frozenset()) -> None:
        self.settings = settings or RunSettings()
        self.ignored = ignored
        self.conditions: dict[str, Condition] = {}
        self._history: list[StepMetrics] = []
        self._rounds: deque[RoundView] = deque(maxlen=ROUNDS)
        self._visits: dict[str, list[float]] = {}
        self._extremes = (math.nan, math.nan)

    def step(self, metrics: StepMetrics, rounds: Iterable[Mapping[str, Sequence[Any]]] = ()) -> list[Finding]:
        """What is new after a step; `rounds` are the tables of the generation rounds drawn for it."""
        self._history.append(metrics)
        for columns in rounds:
            self._add_round(round_view(columns))
        sight = MetricHistory(
            history=self._history,
            rounds=tuple(self._rounds),
            visits=self._visits,
            extremes=self._extremes,
            settings=self.settings,
        )
        looked = ((code, rule.look(sight)) for code, rule in DETECTORS.items() if code not in self.ignored)
        said = [self._note(code, symptom, metrics.step) for code, symptom in looked if symptom is not None]
        return sorted((finding for finding in said if finding is not None), key=rank)

    def also(self, values: Mapping[str, float]) -> None:
        """More numbers about the step that has just been looked at: an evaluation."""
        if self._history:
            last = self._history[-1]
            self._history[-1] = dataclasses.replace(last, values={**last.values, **values})

    def _add_round(self, view: RoundView) -> None:
        self._rounds.append(view)
        for prompt, reward_G in zip(view.questions_P, view.reward_PG, strict=True):
            known = reward_G[~np.isnan(reward_G)]
            if len(known):
                low, high = self._extremes
                self._extremes = float(np.fmin(low, known.min())), float(np.fmax(high, known.max()))
            if len(known) and (prompt in self._visits or len(self._visits) < VISITS):
                self._visits.setdefault(prompt, []).extend((float(known.min()), float(known.max())))

    def _note(self, code: str, symptom: Detection, step: int) -> Finding | None:
        """Keep it; the finding, if it is to be said."""
        before = self.conditions.get(code)
        steps = 0 if before is None else self._steps_since(before.last_step)
        in_a_row = before.in_a_row + 1 if before is not None and steps <= 1 else 1
        finding = _finding(code, symptom, _grown(code, symptom.severity, in_a_row), step)
        is_news = before is None or steps > FORGET_AFTER or ORDER[finding.severity] < ORDER[before.said]
        worst = (
            finding if before is None or ORDER[finding.severity] <= ORDER[before.finding.severity] else before.finding
        )
        self.conditions[code] = Condition(
            finding=worst,
            first_step=step if before is None else before.first_step,
            last_step=step,
            num_steps=1 if before is None else before.num_steps + 1,
            in_a_row=in_a_row,
            said=finding.severity if is_news or before is None else before.said,
        )
        return finding if is_news else None

    def _steps_since(self, step: int) -> int:
        """Recorded steps after `step`; 1: it was the one before this."""
        return sum(1 for each in self._history[-FORGET_AFTER - 2 :] if each.step > step)


def _grown(code: str, severity: Severity, in_a_row: int) -> Severity:
    """Severity grows with persistence."""
    after = DETECTORS[code].grows_after
    return WORSE[severity] if after is not None and in_a_row >= after else severity


def _finding(code: str, symptom: Detection, severity: Severity, step: int) -> Finding:
    return Finding(code=code, severity=severity, what=symptom.what, why=symptom.why, fix=symptom.fix, step=step)


def rank(finding: Finding) -> tuple[int, float]:
    """What comes first: the worst, and of those the cause before what follows from it; the proof before all."""
    rule = DETECTORS.get(finding.code)
    return ORDER[finding.severity], rule.rank if rule else -1 if finding.code.startswith("P") else math.inf


def diagnose(
    history: Sequence[StepMetrics],
    rounds: Mapping[int, Sequence[Mapping[str, Sequence[Any]]]],
    settings: RunSettings | None = None,
) -> list[Condition]:
    """Everything that was the matter in a run, most important first.

    Args:
        history: its steps, oldest first.
        rounds: by the step they were drawn for, tables of completions with the columns of the run folder.
        settings: of the run.
    """
    watch = Watch(settings)
    for metrics in history:
        watch.step(metrics, rounds.get(metrics.step, ()))
    return sorted(watch.conditions.values(), key=lambda condition: rank(condition.finding))
