"""The health of a run: detectors over its numbers and its groups. `DETECTORS` is the table of them all.

Each finding is reported once, until it gets worse or comes back: during a run by `Monitor.step`, which looks at every
step, afterwards over the record by `diagnose`, which looks at some steps of a long run (`looks`).
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podium.errors import SEVERITIES, Finding, Severity
from podium.errors.texts import as_line, as_lines
from podium.records import StepMetrics
from podium.runs.monitors import labels, policy, rewards, turns
from podium.runs.monitors.detection import Detector, ends
from podium.runs.monitors.history import (
    Activity,
    MetricHistory,
    RoundView,
    RunSettings,
    Visit,
    activity,
    round_view,
    run_settings,
)

__all__ = [
    "DETECTORS",
    "Issue",
    "MetricHistory",
    "Monitor",
    "RunSettings",
    "agreed",
    "diagnose",
    "ends",
    "flat",
    "rank",
    "run_settings",
]

ROUNDS = 16
"""Generation rounds that are kept completion by completion."""

VISITS = 20_000
"""Prompts whose rewards are remembered."""

FORGET_AFTER = 10
"""Looks without a finding after which the next one is reported as new."""

EVERY = 128
"""Steps up to which a detector looks at every one of a recorded run."""

SPREAD = 32
SPREAD_NUMBERS = 320
"""Looks at longer runs: with completions, whose rounds have to be read, and at numbers alone. Half of them are evenly
spread, half of them ever further apart, as most faults begin early."""

PEAKS = ("kl", "entropy", "grad_norm", "clip_ratio/region_mean", "completions/clipped_ratio", "health/update_ratio")
"""Metrics whose highest step is looked at, as a detector may have nothing to say of it later."""

_ROWS = [row for part in (rewards, policy, labels, turns) for row in vars(part).values() if isinstance(row, Detector)]

DETECTORS: Mapping[str, Detector] = {row.code: row for row in sorted(_ROWS, key=lambda row: row.code)}
"""Every detector by its code; `podium explain CODE` shows the page of each."""

OF_SIGNAL = frozenset({"M101", "M102", "M103", "M104", "M110", "M121"})
"""Detectors of rewards that teach nothing, which is no fault where a teacher gives every token an advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One detector's findings over a run."""

    finding: Finding
    """The latest one of the worst severity."""
    first_step: int
    last_step: int
    num_steps: int
    """Steps in which it was detected."""
    num_looks: int
    """Steps, from the first to the last of these, at which its detector looked."""
    reported_as: Severity
    """The severity it was last reported with."""


class Monitor:
    """Keeps the history that detectors see, and what they have found."""

    def __init__(self, settings: RunSettings | None = None, *, ignored: frozenset[str] = frozenset()) -> None:
        self.settings = settings or RunSettings()
        left_out = ignored | (OF_SIGNAL if self.settings.present.get("teacher_model") else frozenset())
        self.codes = [code for code in DETECTORS if code not in left_out]
        self.issues: dict[str, Issue] = {}
        self._steps: list[StepMetrics] = []
        self._columns: dict[str, array[float]] = {}
        self._looked: dict[str, array[int]] = {code: array("q") for code in self.codes}
        self._rounds: deque[RoundView] = deque(maxlen=ROUNDS)
        self._first: RoundView | None = None
        self._visits: dict[str, list[float]] = {}
        self._extremes = (math.nan, math.nan)
        self._activity: list[Activity] = []

    def step(self, metrics: StepMetrics, rounds: Iterable[Mapping[str, Sequence[Any]]] = ()) -> list[Finding]:
        """The new findings after a step; `rounds` are the tables of the generation rounds drawn for it."""
        self._add_step(metrics)
        for view in map(round_view, rounds):
            self._add_round(view)
            self._add_visits(view.visits)
        return self._look(self.codes)

    def reread(
        self,
        history: Sequence[StepMetrics],
        rounds: Mapping[int, Sequence[Mapping[str, Sequence[Any]]]],
        visits: Mapping[int, Sequence[Visit]] | None = None,
        recorded: Sequence[Finding] = (),
    ) -> None:
        """Take in the record of a run, as `diagnose` has it."""
        looked_at = looks(history, rounds, recorded, self.codes, tail=FORGET_AFTER + 2)
        drawn = [place for place, metrics in enumerate(history) if metrics.step in rounds]
        needed = _needed(drawn, looked_at) if visits is not None else {*drawn}
        for place, metrics in enumerate(history):
            self._add_step(metrics)
            for view in map(round_view, rounds[metrics.step] if place in needed else ()):
                self._add_round(view)
                if visits is None:
                    self._add_visits(view.visits)
            if visits is not None:
                self._add_visits(visits.get(metrics.step, ()))
            if place in looked_at:
                self._look(looked_at[place])

    def add_evaluation(self, values: Mapping[str, float]) -> None:
        """Add numbers of an evaluation to the latest step."""
        if self._steps:
            last = self._steps.pop()
            for name in last.values:
                self._columns[name].pop()
            self._add_step(dataclasses.replace(last, values={**last.values, **values}))

    def _add_step(self, metrics: StepMetrics) -> None:
        self._steps.append(metrics)
        for name, value in metrics.values.items():
            self._columns.setdefault(name, array("d")).append(value)

    def _add_round(self, view: RoundView) -> None:
        self._rounds.append(view)
        self._first = self._first or view
        done = activity(view)
        if done is not None:
            self._activity.append(done)

    def _add_visits(self, visits: Iterable[Visit]) -> None:
        for question, low, high in visits:
            self._extremes = float(np.fmin(self._extremes[0], low)), float(np.fmax(self._extremes[1], high))
            if question in self._visits or len(self._visits) < VISITS:
                self._visits.setdefault(question, []).extend((low, high))

    def _look(self, codes: Collection[str]) -> list[Finding]:
        """The new findings of these detectors after the latest step."""
        step = self._steps[-1].step
        history = MetricHistory(
            steps=self._steps,
            columns=self._columns,
            rounds=tuple(self._rounds),
            first=self._first,
            visits=self._visits,
            extremes=self._extremes,
            settings=self.settings,
            activity=self._activity,
        )
        found = [DETECTORS[code](history) for code in codes]
        new = [self._keep(finding, step) for finding in found if finding is not None]
        for code in codes:
            self._looked[code].append(step)
        return sorted((finding for finding in new if finding is not None), key=rank)

    def _keep(self, found: Finding, step: int) -> Finding | None:
        """Update the issue of this code; the finding with its step, if it is to be reported."""
        code = found.code
        before = self.issues.get(code)
        new = {key: value for key, value in found.changes.items() if not self.settings.has(key, value)}
        finding = dataclasses.replace(found, step=step, changes=new)
        level = SEVERITIES.index(finding.severity)
        if before is None:
            self.issues[code] = Issue(
                finding=finding, first_step=step, last_step=step, num_steps=1, num_looks=1, reported_as=finding.severity
            )
            return finding
        looked = self._looked[code]
        since = sum(at > before.last_step for at in looked[-FORGET_AFTER - 1 :])
        is_new = since >= FORGET_AFTER or level < SEVERITIES.index(before.reported_as)
        self.issues[code] = Issue(
            finding=finding if level <= SEVERITIES.index(before.finding.severity) else before.finding,
            first_step=before.first_step,
            last_step=step,
            num_steps=before.num_steps + 1,
            num_looks=1 + len(looked) - bisect_left(looked, before.first_step),
            reported_as=finding.severity if is_new else before.reported_as,
        )
        return finding if is_new else None


def _needed(drawn: Sequence[int], looked_at: Collection[int]) -> set[int]:
    """The places of the rounds that a look at these places reads: the first of all, and the latest before each."""
    needed = {*drawn[:ROUNDS]}
    for place in looked_at:
        end = bisect_right(drawn, place)
        needed.update(drawn[max(0, end - ROUNDS) : end])
    return needed


def rank(finding: Finding) -> tuple[int, float]:
    """Sort key: the gravest first, of those the cause before its consequences, the proof's findings before all."""
    severity = SEVERITIES.index(finding.severity)
    if row := DETECTORS.get(finding.code):
        return severity, row.rank
    return severity, -1 if finding.code.startswith("P") else math.inf


def agreed(findings: Sequence[Finding]) -> list[Finding]:
    """The findings in their order; where two want different values of a setting, only the graver one has its change.

    Among equals the cause decides, as `rank` has it. The fix of the other one names the finding that decides, in place
    of its own value.

    >>> low = Finding(code="C022", severity="warning", what="", fix="Set beta: 0.1; top_k: 2.",
    ...               changes={"beta": 0.1, "top_k": 2})
    >>> high = Finding(code="C023", severity="error", what="", fix="beta: 0.2", changes={"beta": 0.2})
    >>> [(finding.fix, dict(finding.changes)) for finding in agreed([low, high])]
    [('Set beta: see C023; top_k: 2.', {'top_k': 2}), ('beta: 0.2', {'beta': 0.2})]
    """
    decided: dict[str, tuple[Any, str]] = {}
    made = list(findings)
    for place in sorted(range(len(made)), key=lambda place: rank(made[place])):
        finding = made[place]
        own = dict(flat(finding.changes))
        decisions = {key: decided.setdefault(key, (value, finding.code)) for key, value in own.items()}
        elsewhere = {
            key: code for key, (value, code) in decisions.items() if value != own[key] and code != finding.code
        }
        if elsewhere:
            left = {key: value for key, value in own.items() if key not in elsewhere}
            fix = finding.fix
            if all(as_line(key, own[key]) in fix for key in elsewhere):
                for key, code in elsewhere.items():
                    fix = fix.replace(as_line(key, own[key]), f"{key}: see {code}")
            else:
                others = [f"{key}: see {code}" for key, code in elsewhere.items()]
                fix = "; ".join([as_lines(left), *others] if left else others)
            made[place] = dataclasses.replace(
                finding, changes=left, fix=fix, facts={**finding.facts, "elsewhere": elsewhere}
            )
    return made


def flat(changes: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Changed settings by dotted key."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def diagnose(
    history: Sequence[StepMetrics],
    rounds: Mapping[int, Sequence[Mapping[str, Sequence[Any]]]],
    settings: RunSettings | None = None,
    *,
    visits: Mapping[int, Sequence[Visit]] | None = None,
    recorded: Sequence[Finding] = (),
) -> list[Issue]:
    """Every issue of a run, most important first.

    Args:
        history: its steps, oldest first.
        rounds: by the step they were drawn for, tables of completions with the columns of the run folder.
        settings: of the run.
        visits: by step, the groups of its rounds, so that not every round has to be read; None: every one is.
        recorded: findings that were reported during the run.
    """
    monitor = Monitor(settings)
    monitor.reread(history, rounds, visits, recorded)
    return sorted(monitor.issues.values(), key=lambda issue: rank(issue.finding))


def looks(
    history: Sequence[StepMetrics],
    with_rounds: Collection[int],
    recorded: Sequence[Finding],
    codes: Collection[str],
    *,
    tail: int,
) -> dict[int, Collection[str]]:
    """The detectors that look at a step of a recorded run, by its place in the history.

    A detector reads the numbers of all steps and the rounds of the last ones, so one look tells of many steps. What the
    monitor reported during the run was found by a look at every step; the steps of its reports are looked at again.

    Args:
        history: all steps.
        with_rounds: steps whose completions are recorded.
        recorded: findings that the monitor reported during the run.
        codes: of all detectors.
        tail: how many of the last steps are looked at, each.
    """
    count = len(history)
    if count <= EVERY:
        return dict.fromkeys(range(count), codes)
    drawn = [place for place, metrics in enumerate(history) if metrics.step in with_rounds]
    places = {drawn[i] for i in _spread(len(drawn), SPREAD)} if drawn else _spread(count, SPREAD_NUMBERS)
    places |= {*range(count - tail, count), *_peaks(history)}
    found: dict[int, Collection[str]] = dict.fromkeys(places, codes)
    of_step = {metrics.step: place for place, metrics in enumerate(history)}
    for finding in _ends_of_reports(recorded):
        if finding.code in codes and finding.step in of_step:
            place = of_step[finding.step]
            found[place] = {*found.get(place, ()), finding.code}
    if "M131" in codes:  # reads one step
        for place, metrics in enumerate(history):
            if not all(map(np.isfinite, metrics.values.values())):
                found[place] = {*found.get(place, ()), "M131"}
    return found


def _spread(count: int, number: int) -> set[int]:
    """Places among `count`: half of them evenly spread, half of them ever further apart."""
    even = np.linspace(0, count - 1, number // 2, dtype=int).tolist()
    apart = np.geomspace(1, count, number // 2, dtype=int).tolist()
    return {*even, *apart} - {count}


def _peaks(history: Sequence[StepMetrics]) -> set[int]:
    """The places where one of `PEAKS` is highest."""
    found = set()
    for name in PEAKS:
        values = np.array([metrics.values.get(name, np.nan) for metrics in history])
        if np.isfinite(values).any():
            found.add(int(np.nanargmax(np.where(np.isfinite(values), values, np.nan))))
    return found


def _ends_of_reports(recorded: Sequence[Finding]) -> list[Finding]:
    """Of each code the first finding of each severity, and the last."""
    first: dict[tuple[str, str], Finding] = {}
    last: dict[str, Finding] = {}
    for finding in recorded:
        first.setdefault((finding.code, finding.severity), finding)
        last[finding.code] = finding
    return [*first.values(), *last.values()]
