"""Episodes that the rules compare: every policy on every row, the same again, after another episode, side by side."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.agents.tester.actors import Play, Policy, Subject, finished, playing
from podium.agents.tester.policies import COLUMN
from podium.errors import Finding


@dataclass(slots=True, kw_only=True)
class Evidence:
    """Episodes of one subject."""

    subject: Subject
    rows: Sequence[Mapping[str, Any]]
    turns: int
    failures: list[Finding] = field(default_factory=list)
    plays: dict[str, list[Play]] = field(default_factory=dict)
    """By policy, one for each row, each with an environment of its own."""
    again: list[tuple[Play, Play]] = field(default_factory=list)
    """Plays of the noise, of columns and of the oracle, each with the same once more in a new environment."""
    shared: tuple[Play, Play, str] | None = None
    """Two plays that differ, until variables outside the instances, which are named, are set back."""
    after: list[Play] = field(default_factory=list)
    """The noise in an environment that has played before."""
    beside: list[Play] = field(default_factory=list)
    """The noise while another environment plays another row, turn by turn."""

    repeated: list[tuple[float, ...]] = field(default_factory=list)
    """Rewards of repetitions after 2, 4 and all turns."""

    def every(self) -> Iterator[Play]:
        """All episodes."""
        for plays in (*self.plays.values(), [second for _, second in self.again], self.after, self.beside):
            yield from plays


MORE_EPISODES = 10
"""Episodes of a row beside one of each policy, about."""

LARGEST = 10_000
"""Characters of a variable that is looked at, at most."""


def gather(evidence: Evidence, policies: Mapping[str, Policy], budget: float) -> None:
    """Play everything; after a call that hung, nothing more. Slow ones get fewer rows, for about `budget` seconds."""
    noise = policies["noise"]
    variables = _variables(evidence.subject)
    start = time.perf_counter()
    evidence.plays["noise"] = [_played(evidence, 0, noise)]
    if _hung(evidence):
        return
    affordable = int(budget / (len(policies) + MORE_EPISODES) / max(time.perf_counter() - start, 1e-6))
    evidence.rows = evidence.rows[: max(1, affordable)]
    evidence.plays.clear()
    for name, policy in policies.items():
        for index in range(len(evidence.rows)):
            evidence.plays.setdefault(name, []).append(_played(evidence, index, policy))
            if _hung(evidence):
                return
    for index in range(len(evidence.rows)):
        _compare(evidence, index, policies, variables)
        if _hung(evidence):
            return
    if evidence.subject.has_reward:
        evidence.repeated += _repeated(evidence, policies["repetition"])


def _compare(evidence: Evidence, index: int, policies: Mapping[str, Policy], variables: Variables) -> None:
    """Play a row once more: in a new environment, in one that has played before, and beside another one."""
    noise = policies["noise"]
    for name in (each for each in policies if each in ("noise", "oracle") or each.startswith(COLUMN)):
        first = evidence.plays[name][index]
        second = _played(evidence, index, policies[name])
        evidence.again.append((first, second))
        if first.outcome != second.outcome and evidence.shared is None:
            evidence.shared = _shared(evidence, index, policies[name], variables)
    if evidence.subject.make is not None:
        alone = evidence.plays["noise"][index]
        evidence.after.append(_repeatable(alone, lambda: _played_after(evidence, index, policies)))
        evidence.beside.append(_repeatable(alone, lambda: _played_beside(evidence, index, noise)))


def _repeatable(alone: Play, play: Callable[[], Play]) -> Play:
    """An episode; where it differs from the one played alone, only if it does so twice in the same way."""
    played = play()
    return played if played.outcome in (alone.outcome, play().outcome) else alone


Variables = dict[tuple[Any, str], Any]
"""Copies of plain values by their class or module, and name."""


def _variables(subject: Subject) -> Variables:
    """The plain data on the classes of an environment and in their modules, which all instances share."""
    kinds = [] if subject.made is None else subject.made.__mro__
    kinds = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("builtins", "abc", "podium")]
    modules = [sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules]
    found: Variables = {}
    every = [(owner, *item) for owner in dict.fromkeys([*kinds, *modules]) for item in vars(owner).items()]
    every = [(owner, name, value) for owner, name, value in every if not name.startswith("__")]
    functions = [value for owner, _, value in every if owner in kinds and inspect.isfunction(value)]
    for owner, name, value in every + [(each, "__defaults__", each.__defaults__) for each in functions]:
        is_plain = isinstance(value, (int, float, str, list, dict, set)) or (name == "__defaults__" and value)
        if is_plain and len(str(value)) < LARGEST:
            with contextlib.suppress(Exception):  # what cannot be copied is not looked at
                found[owner, name] = copy.deepcopy(value)
    return found


def _shared(evidence: Evidence, index: int, policy: Policy, before: Variables) -> tuple[Play, Play, str] | None:
    """Shows that variables, and not chance, decide: an episode now, and twice the same other one with them set back."""
    plays = [_played(evidence, index, policy)]
    changed = dict[str, None]()
    new = {place: value for place, value in _variables(evidence.subject).items() if place not in before}
    for _ in range(2):
        for (owner, name), value in (before | new).items():
            is_new = (owner, name) in new
            if is_new or getattr(owner, name, None) != value:
                changed[f"{owner.__name__}.{name}"] = None
                delattr(owner, name) if is_new else setattr(owner, name, copy.deepcopy(value))
        plays.append(_played(evidence, index, policy))
        for (owner, name), value in new.items():
            setattr(owner, name, getattr(owner, name, value))
    now, first, second = plays
    demonstrated = changed and first.outcome == second.outcome != now.outcome and first.failure is None
    return (first, now, ", ".join(changed)) if demonstrated else None


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
    environment = evidence.subject.make()
    other = (index + 1) % len(evidence.rows)
    _played(evidence, other, policies["noise"], environment)
    _played(evidence, index, policies.get("oracle", policies["repetition"]), environment)
    return _played(evidence, index, policies["noise"], environment)


def _played_beside(evidence: Evidence, index: int, policy: Policy) -> Play:
    """An episode, turn by turn with one of another environment that plays another row."""
    subject = evidence.subject
    rows = evidence.rows
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
