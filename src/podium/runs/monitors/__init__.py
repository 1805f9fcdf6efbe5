"""The health of a run: detectors over its numbers and its groups. `DETECTORS` lists them all.

Each finding is reported once, until it gets worse or comes back: during a run by `Monitor.step`, which looks at every
step, afterwards over the record by `diagnose`, which looks at some steps of a long run (`looks`).
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from podium.errors import SEVERITIES, Finding, Severity
from podium.records import StepMetrics
from podium.runs.monitors import agents, collapse, drift, hacking, labels, machine, signal, texts
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
from podium.runs.monitors.looks import looks

__all__ = [
    "DETECTORS",
    "Issue",
    "MetricHistory",
    "Monitor",
    "RunSettings",
    "agents",
    "diagnose",
    "ends",
    "rank",
    "run_settings",
]


ROUNDS = 16
"""Generation rounds that are kept completion by completion."""

VISITS = 20_000
"""Prompts whose rewards are remembered."""

FORGET_AFTER = 10
"""Looks without a finding after which the next one is reported as new."""


class DetectorRow(NamedTuple):
    """One row of `DETECTORS`."""

    detect: Detector
    rank: int
    """Among findings of one severity the lowest rank comes first: causes before their consequences."""


DETECTORS: Mapping[str, DetectorRow] = {
    "M101": DetectorRow(signal.no_signal, 80),
    "M102": DetectorRow(signal.constant_reward, 22),
    "M103": DetectorRow(signal.silent_reward, 32),
    "M104": DetectorRow(signal.reward_flat, 90),
    "M105": DetectorRow(signal.one_reward_carries, 92),
    "M106": DetectorRow(signal.rewards_cancel, 26),
    "M107": DetectorRow(signal.flipped_reward, 7),
    "M108": DetectorRow(signal.one_prompt_dominates, 60),
    "M109": DetectorRow(signal.repeated_prompt, 6),
    "M110": DetectorRow(signal.stuck_prompts, 94),
    "M111": DetectorRow(signal.reward_falls, 50),
    "M112": DetectorRow(hacking.not_credited, 31),
    "M121": DetectorRow(collapse.spread_vanishes, 70),
    "M122": DetectorRow(collapse.duplicates, 30),
    "M123": DetectorRow(collapse.too_cold, 4),
    "M124": DetectorRow(collapse.entropy_collapse, 40),
    "M125": DetectorRow(collapse.repetition, 42),
    "M126": DetectorRow(collapse.entropy_explodes, 16),
    "M131": DetectorRow(drift.non_finite, 0),
    "M132": DetectorRow(drift.kl_explodes, 10),
    "M133": DetectorRow(drift.clips_much, 46),
    "M134": DetectorRow(drift.gradient_spikes, 72),
    "M135": DetectorRow(drift.sampler_disagrees, 5),
    "M136": DetectorRow(drift.steps_too_large, 12),
    "M137": DetectorRow(drift.steps_too_small, 14),
    "M138": DetectorRow(drift.weights_frozen, 2),
    "M139": DetectorRow(drift.adapter_rate_low, 62),
    "M141": DetectorRow(texts.truncated, 24),
    "M142": DetectorRow(texts.length_grows, 44),
    "M143": DetectorRow(texts.length_collapses, 48),
    "M144": DetectorRow(texts.empty, 28),
    "M145": DetectorRow(texts.wrong_language, 52),
    "M146": DetectorRow(texts.format_ignored, 18),
    "M147": DetectorRow(texts.beyond_the_end, 54),
    "M151": DetectorRow(hacking.held_out_falls, 34),
    "M152": DetectorRow(hacking.pays_for_length, 20),
    "M153": DetectorRow(hacking.pays_for_a_phrase, 36),
    "M154": DetectorRow(hacking.held_back_falls, 38),
    "M155": DetectorRow(labels.answers_elsewhere, 8),
    "M156": DetectorRow(labels.suspicious_labels, 9),
    "M157": DetectorRow(hacking.differs_on_the_same, 3),
    "M158": DetectorRow(hacking.pays_for_the_prompt, 13),
    "M159": DetectorRow(hacking.one_for_all, 21),
    "M160": DetectorRow(hacking.form_alone, 19),
    "M161": DetectorRow(machine.memory_creeps, 56),
    "M162": DetectorRow(machine.speed_falls, 96),
    "M163": DetectorRow(machine.slow_reward, 58),
    "M171": DetectorRow(agents.no_calls, 25),
    "M172": DetectorRow(agents.only_calls, 23),
    "M173": DetectorRow(agents.unknown_names, 11),
    "M174": DetectorRow(agents.same_call, 17),
    "M175": DetectorRow(agents.void_turns, 15),
    "M176": DetectorRow(agents.inaction_pays, 1),
    "M177": DetectorRow(agents.slow_tools, 57),
    "M178": DetectorRow(agents.results_cut, 35),
    "M179": DetectorRow(agents.right_without_tools, 37),
    "M180": DetectorRow(agents.prompts_differ, 27),
    "M181": DetectorRow(agents.failures_stay, 33),
    "M182": DetectorRow(agents.ended_by_limits, 29),
}
"""Every detector by its code; `podium explain CODE` shows the page of each."""

OF_SIGNAL = frozenset({"M101", "M102", "M103", "M104", "M106", "M110", "M121"})
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
    said: Severity
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
        found = [DETECTORS[code].detect(history) for code in codes]
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
                finding=finding, first_step=step, last_step=step, num_steps=1, num_looks=1, said=finding.severity
            )
            return finding
        looked = self._looked[code]
        since = sum(each > before.last_step for each in looked[-FORGET_AFTER - 1 :])
        is_new = since >= FORGET_AFTER or level < SEVERITIES.index(before.said)
        self.issues[code] = Issue(
            finding=finding if level <= SEVERITIES.index(before.finding.severity) else before.finding,
            first_step=before.first_step,
            last_step=step,
            num_steps=before.num_steps + 1,
            num_looks=1 + len(looked) - bisect_left(looked, before.first_step),
            said=finding.severity if is_new else before.said,
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
