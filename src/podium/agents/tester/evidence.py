"""Episodes that the rules compare: every policy on every row, the same again, after another episode, side by side."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.agents.tester.actors import Failure, Play, Policy, Subject, finished, playing


@dataclass(slots=True, kw_only=True)
class Evidence:
    """Episodes of one subject."""

    subject: Subject
    rows: Sequence[Mapping[str, Any]]
    turns: int
    failures: list[Failure] = field(default_factory=list)
    plays: dict[str, list[Play]] = field(default_factory=dict)
    """By policy, one for each row, each with an environment of its own."""
    again: list[Play] = field(default_factory=list)
    """The noise once more."""
    after: list[Play] = field(default_factory=list)
    """The noise in an environment that has played before."""
    beside: list[Play] = field(default_factory=list)
    """The noise while another environment plays another row, turn by turn."""

    repeated: list[tuple[float, ...]] = field(default_factory=list)
    """Rewards of repetitions after 2, 4 and all turns."""

    def every(self) -> Iterator[Play]:
        """All episodes."""
        for plays in (*self.plays.values(), self.again, self.after, self.beside):
            yield from plays


EPISODES = 12
"""Episodes of a row, about."""


def gather(evidence: Evidence, policies: Mapping[str, Policy], budget: float) -> None:
    """Play everything; after a call that hung, nothing more. Slow ones get fewer rows, for about `budget` seconds."""
    noise, start = policies["noise"], time.perf_counter()
    evidence.plays["noise"] = [_played(evidence, 0, noise)]
    if _hung(evidence):
        return
    affordable = int(budget / EPISODES / max(time.perf_counter() - start, 1e-6))
    evidence.rows = evidence.rows[: max(1, affordable)]
    evidence.plays.clear()
    for name, policy in policies.items():
        for index in range(len(evidence.rows)):
            evidence.plays.setdefault(name, []).append(_played(evidence, index, policy))
            if _hung(evidence):
                return
    for index in range(len(evidence.rows)):
        evidence.again.append(_played(evidence, index, noise))
        if evidence.subject.make is not None:
            evidence.after.append(_played_after(evidence, index, policies))
            evidence.beside.append(_played_beside(evidence, index, noise))
        if _hung(evidence):
            return
    if evidence.subject.has_reward:
        evidence.repeated += _repeated(evidence, policies["repetition"])


def _repeated(evidence: Evidence, policy: Policy) -> Iterator[tuple[float, ...]]:
    """Rewards of the repetition after 2, 4 and all turns, of each tool or row."""
    for index in range(max(len(evidence.rows), len(evidence.subject.tools))):
        plays = [_played(evidence, index, policy, turns=turns) for turns in (2, 4, evidence.turns)]
        yield tuple(play.reward or 0.0 for play in plays)


def _hung(evidence: Evidence) -> bool:
    return any(play.failure is not None and play.failure.code == "E005" for play in evidence.every())


def _played(
    evidence: Evidence, index: int, policy: Policy, environment: Any = None, *, turns: int | None = None
) -> Play:
    subject = evidence.subject
    if environment is None and subject.make is not None:
        environment = subject.make()
    row = evidence.rows[index % len(evidence.rows)]
    return finished(playing(subject, environment, row, policy, turns=turns or evidence.turns, index=index))


def _played_after(evidence: Evidence, index: int, policies: Mapping[str, Policy]) -> Play:
    """An episode in an environment that has played another row before, and this one by another policy."""
    assert evidence.subject.make is not None
    environment, other = evidence.subject.make(), (index + 1) % len(evidence.rows)
    _played(evidence, other, policies["noise"], environment)
    _played(evidence, index, policies.get("oracle", policies["repetition"]), environment)
    return _played(evidence, index, policies["noise"], environment)


def _played_beside(evidence: Evidence, index: int, policy: Policy) -> Play:
    """An episode, turn by turn with one of another environment that plays another row."""
    subject, rows = evidence.subject, evidence.rows
    assert subject.make is not None
    other, mine = (
        playing(subject, subject.make(), rows[i], policy, turns=evidence.turns, index=i)
        for i in ((index + 1) % len(rows), index)
    )
    return _alternating(mine, other)


def _alternating(mine: Generator[None, None, Play], other: Generator[None, None, Play]) -> Play:
    """The first episode, with a turn of the other after each of its own."""
    while True:
        try:
            next(mine)
        except StopIteration as end:
            return end.value
        next(other, None)
