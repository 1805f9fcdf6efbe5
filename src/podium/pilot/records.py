"""Records of a pilot: its settings, measurements of each candidate, and the result with its sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from podium.checks.verdict import HOPELESS_SHARE, NOISE, Diagnosis
from podium.errors import Finding
from podium.evaluation.statistics import Interval
from podium.pilot.grid import Axes, Candidate
from podium.pilot.score import SOLVED, SOME, Signal, expected, score

BUDGET = 300.0
"""Seconds."""
ROWS = 512
"""Most rows that a pilot trains and measures on."""

Outcome = Literal["learns", "solved", "unclear", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotSettings:
    """Bounds of a pilot."""

    grid: Axes | None = None
    """None: the default grid."""
    rows: int = ROWS
    seeds: int = 1
    budget: float = BUDGET
    """Seconds after loading, on a CPU of processor time for each thread; near its end fewer steps are trained."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """A candidate with all that has been measured of it so far."""

    candidate: Candidate
    changes: Mapping[str, Any]
    """Its settings as keys and values of a recipe; None takes a key out."""
    diagnosis: Diagnosis | None = None
    promise: float = math.nan
    dropped: str = ""
    """Reason not to train it, in words; empty: none."""
    rung: int = 0
    """The last rung that it was trained on; 0: only sampled."""
    signal: Signal | None = None
    score: float = math.nan
    seconds: float = 0.0

    def measured(self, signal: Signal, rung: int, full_steps: int) -> None:
        """Keep the result of a rung."""
        self.signal, self.rung, self.score = signal, rung, score(signal, full_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotResult:
    """The result of a pilot."""

    name: str
    entries: tuple[Entry, ...]
    winner: Entry
    full_steps: int
    accuracy: str | None
    """The reward that tells right from wrong; None: numbers are of the rewards alone."""
    seconds: float
    stopped: str = ""
    """Reason for an early end, in words; empty: all rungs were finished."""
    seed: int = 0
    seeds: int = 1
    num_rows: tuple[int, int] = (0, 0)
    """Rows that were trained on, and rows that accuracy was measured on."""

    @property
    def noun(self) -> str:
        return "accuracy" if self.accuracy else "reward (0: lowest seen, 1: highest)"

    @property
    def outcome(self) -> Outcome:
        """Whether the winner learns; `unclear`: there is signal, before or in training, and a gain within chance."""
        signal = self.winner.signal
        if signal is not None and signal.before >= SOLVED and self.accuracy:
            return "solved"
        if signal is not None and signal.learnt:
            return "learns"
        seen = self.winner.diagnosis
        if signal is None:
            return "nothing" if seen is None or self.winner.dropped else "unclear"
        gain = signal.after - signal.before
        began_well = not self.winner.dropped and gain >= -SOME
        may = signal.spread > 1 - HOPELESS_SHARE or gain > SOME or began_well
        return "unclear" if may else "nothing"

    @property
    def expected(self) -> Interval | None:
        """Held-out accuracy that a full run may reach; None where nothing was seen to be learnt."""
        signal = self.winner.signal
        return expected(signal, self.full_steps) if signal is not None and self.outcome == "learns" else None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings about the winner's completions before training."""
        return () if self.winner.diagnosis is None else self.winner.diagnosis.findings

    def sentences(self) -> list[str]:
        """The choice, its reason, and the accuracy expected of it."""
        signal, name = self.winner.signal, self.winner.candidate.name
        said = [f"Stopped early: {self.stopped}."] if self.stopped else []
        if signal is None or not signal.steps:
            if self.outcome == "nothing":
                return [*said, f"No candidate can learn, so none was trained. {hopeless_words(self.winner)}"]
            return [*said, f"Chosen by samples alone: {name}. {hopeless_words(self.winner)}"]
        moved = f"{self.noun} {signal.before:.2f} -> {signal.after:.2f} in {signal.steps} steps"
        others = [e for e in self.entries if e is not self.winner and e.rung == self.winner.rung and e.signal]
        if self.outcome == "nothing":
            return [*said, f"No candidate learns: the best, {name}, {moved}. {hopeless_words(self.winner)}"]
        chosen = f"Chosen: {name}: {moved}, {signal.spread:.0%} of its groups have spread"
        if others:
            chosen += f" (score {self.winner.score:.2f}; the next has {max(each.score for each in others):.2f})"
        said.append(f"{chosen}.")
        if self.outcome == "solved":
            rows = f"{signal.before:.0%} of answers on {len(signal.before_P)} rows"
            said.append(f"It is right in {rows} before any training: there is little left to learn.")
        elif self.expected is None:
            said.append("That gain is within chance: too little signal to say what a full run reaches.")
        else:
            low, high = self.expected.low, self.expected.high
            said.append(
                f"Held-out {self.noun} about {low:.2f} to {high:.2f} after {self.full_steps} steps, extrapolated from "
                f"{signal.steps} steps on {len(signal.after_P)} rows."
            )
        return said

    def as_dict(self) -> dict[str, Any]:
        """The contents of `pilot.json`."""
        expects = self.expected
        return {
            "recipe": self.name,
            "outcome": self.outcome,
            "winner": self.winner.candidate.number,
            "changes": dict(self.winner.changes),
            "expected": None if expects is None else [expects.low, expects.high],
            "accuracy": self.accuracy,
            "full_steps": self.full_steps,
            "seconds": self.seconds,
            "stopped": self.stopped,
            "seed": self.seed,
            "seeds": self.seeds,
            "rows": {"trained": self.num_rows[0], "measured": self.num_rows[1]},
            "sentences": self.sentences(),
            "candidates": [_entry(each) for each in self.entries],
        }


def _entry(entry: Entry) -> dict[str, Any]:
    signal, seen = entry.signal, entry.diagnosis
    return {
        "number": entry.candidate.number,
        "values": dict(entry.candidate.values),
        "changes": dict(entry.changes),
        "rung": entry.rung,
        "steps": signal.steps if signal else 0,
        "before": signal.before if signal else None,
        "after": signal.after if signal else None,
        "spread": seen.spread_share if seen else None,
        "spread_trained": signal.spread if signal else None,
        "gradient_agreement": signal.agreement if signal else None,
        "entropy": seen.entropy if seen else None,
        "truncated": seen.truncated_share if seen else None,
        "promise": entry.promise,
        "score": entry.score,
        "dropped": entry.dropped,
        "seconds": entry.seconds,
    }


def hopeless(seen: Diagnosis, share_right: float) -> str:
    """Reason not to train on completions like these, in words; empty: none."""
    if seen.entropy > NOISE:
        return f"noise ({seen.entropy:.1f} nats a token)"
    if 1 - seen.spread_share > HOPELESS_SHARE and share_right < SOLVED:
        return f"{seen.spread_share:.0%} of the groups have spread"
    return ""


def hopeless_words(entry: Entry) -> str:
    """The completions before training, described in a sentence."""
    seen = entry.diagnosis
    if seen is None:
        return ""
    reason = entry.dropped or f"{seen.spread_share:.0%} of the groups have spread"
    return f"Before training: {reason}, {seen.truncated_share:.0%} of the completions are cut off."
