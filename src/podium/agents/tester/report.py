"""The result of a test as records: what policies earn, time and size of calls, findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.agents.tester.actors import scripted, subject_of
from podium.agents.tester.evidence import Evidence, gather
from podium.agents.tester.policies import again, policies_of
from podium.agents.tester.rules import ORACLE, evaluate_rules
from podium.data.selection import sampled_rows
from podium.errors import Finding, gravest_first
from podium.errors.texts import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamineSettings:
    """Limits of a test."""

    num_rows: int = 6
    """Rows drawn from those given."""
    turns: int = 8
    """Turns of an episode, at most."""
    limit: float = 10.0
    """Seconds of a call."""
    budget: float = 60.0
    """Seconds of the whole test, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    """The rewards of a policy: least, mean and greatest over the rows, and its turns."""

    policy: str
    rewards: tuple[float, ...]
    turns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Time and size of calls of one tool, or of steps."""

    name: str
    calls: int
    seconds: float
    """Median duration of a call."""
    slowest: float
    characters: int
    """Length of the longest result."""
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReport:
    """The result of a test."""

    name: str
    kind: str = ""
    """`tool`, `environment` or `text`; empty where it could not be made."""
    num_rows: int = 0
    earned: tuple[Earned, ...] = ()
    measured: tuple[Measured, ...] = ()
    findings: tuple[Finding, ...] = ()
    has_reward: bool = False

    @property
    def closing(self) -> str:
        """How much the findings rest on: what was played on how many rows, what it earned, and what is not known."""
        names = [each.policy for each in self.earned]
        if not names:
            return "Nothing was played to its end: nothing else is known."
        found = counted(len(self.findings), "finding")
        lines = [f"{found} in {len(names)} policies x {counted(self.num_rows, 'row')}: {', '.join(names)}."]
        lines += unknown(self.earned, has_reward=self.has_reward)
        return " ".join([*lines, "Other turns, files, clocks and longer episodes were not tried."])


def unknown(earned: Sequence[Earned], *, has_reward: bool) -> Iterator[str]:
    """Sentences on questions that the policies' rewards do not answer."""
    silent = next((each.rewards for each in earned if each.policy == "silence"), ())
    best = max((reward for each in earned for reward in each.rewards), default=0.0)
    if has_reward and best <= max([0.0, *silent]):
        more = " more than silence" if best > 0 else ""
        yield f"No policy has earned anything{more}: whether the game can be won is not known; give --oracle."
    elif has_reward and ORACLE not in [each.policy for each in earned]:
        yield "Without an oracle it is not known whether what is right is paid most: give --oracle."


def report_of(
    target: Any, rows: Sequence[Mapping[str, Any]], oracle: Callable[..., Any] | None, settings: ExamineSettings
) -> EnvironmentReport:
    """See `podium.agents.tester.examine`."""
    subject, failures = subject_of(target, limit=settings.limit)
    chosen = [dict(row) for _, row in sampled_rows(rows, settings.num_rows)] or [{}]
    evidence = Evidence(subject=subject, rows=chosen, turns=settings.turns, failures=failures)
    if not any(failure.code in ("E001", "E005") for failure in failures):
        policies = policies_of(chosen, subject.actions)
        if oracle is not None:
            solves = scripted(oracle, settings.limit)
            policies |= {ORACLE: solves, f"{ORACLE} repeated": again(solves)}
        gather(evidence, policies, settings.budget)
    return EnvironmentReport(
        name=subject.name,
        kind=subject.kind,
        num_rows=len(evidence.rows),
        has_reward=subject.has_reward,
        earned=tuple(_earned(evidence)),
        measured=tuple(_measured(evidence)),
        findings=tuple(gravest_first(evaluate_rules(evidence))),
    )


def _earned(evidence: Evidence) -> Iterator[Earned]:
    for name, plays in evidence.plays.items():
        rewards = tuple(play.reward for play in plays if play.reward is not None)
        yield Earned(policy=name, rewards=rewards, turns=sum(len(play.events) for play in plays) / max(len(plays), 1))


def _measured(evidence: Evidence) -> Iterator[Measured]:
    steps = evidence.subject.kind == "text"  # else a turn without a call is nothing that took time
    events = [event for play in evidence.every() for event in play.events if event.tool or steps]
    for name in dict.fromkeys(event.tool for event in events):
        mine = [event for event in events if event.tool == name]
        seconds = sorted(event.seconds for event in mine)
        yield Measured(
            name=name or "step",
            calls=len(mine),
            seconds=seconds[len(seconds) // 2],
            slowest=seconds[-1],
            characters=max(len(event.content) for event in mine),
            failed=sum(bool(event.problem) for event in mine),
        )
