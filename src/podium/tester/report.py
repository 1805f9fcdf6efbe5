"""The result of a test as records, for printing and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.errors import Finding
from podium.errors.texts import counted
from podium.tester.episodes import Play, ProgramPlay
from podium.tester.policies import ORACLE
from podium.tester.rules import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    """The rewards of a policy, one for each row that has any, and its turns."""

    policy: str
    rewards: tuple[float, ...]
    turns: float
    """Mean number over the rows."""


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
class EnvironmentReport(Report):
    """The result of a test of a tool or an environment."""

    kind: str = ""
    """`tool`, `environment` or `text`; empty where it could not be made."""
    num_rows: int = 0
    earned: tuple[Earned, ...] = ()
    measured: tuple[Measured, ...] = ()
    has_reward: bool = False

    @property
    def closing(self) -> str:
        """How much the findings rest on: what was played on how many rows, what it earned, and what is not known."""
        names = [earned.policy for earned in self.earned]
        if not names:
            return "Nothing was played to its end: nothing else is known."
        found = counted(len(self.findings), "finding")
        lines = [f"{found} in {len(names)} policies x {counted(self.num_rows, 'row')}: {', '.join(names)}."]
        lines += unknown(self.earned, has_reward=self.has_reward)
        return " ".join([*lines, "Other turns, files, clocks and longer episodes were not tried."])

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> EnvironmentReport:
        """The report that `dataclasses.asdict` made plain."""
        return cls(
            name=plain["name"],
            findings=tuple(Finding(**finding) for finding in plain["findings"]),
            kind=plain["kind"],
            num_rows=plain["num_rows"],
            earned=tuple(Earned(**{**earned, "rewards": tuple(earned["rewards"])}) for earned in plain["earned"]),
            measured=tuple(Measured(**measured) for measured in plain["measured"]),
            has_reward=plain["has_reward"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramReport(Report):
    """The result of a test of a program."""

    played: tuple[ProgramPlay, ...] = ()
    """The first episode of each policy."""
    closing: str = ""
    """Sentences on which episodes were played and compared, and what remains unknown."""


def earned_by(policy: str, plays: Sequence[Play]) -> Earned:
    """The rewards of a policy's episodes."""
    rewards = tuple(play.reward for play in plays if play.reward is not None)
    return Earned(policy=policy, rewards=rewards, turns=sum(len(play.events) for play in plays) / max(len(plays), 1))


def unknown(earned: Sequence[Earned], *, has_reward: bool) -> Iterator[str]:
    """Sentences on questions that the policies' rewards do not answer."""
    silent = next((row.rewards for row in earned if row.policy == "silence"), ())
    best = max((reward for row in earned for reward in row.rewards), default=0.0)
    if has_reward and best <= max([0.0, *silent]):
        more = " more than silence" if best > 0 else ""
        yield f"No policy has earned anything{more}: whether the game can be won is not known; give --oracle."
    elif has_reward and ORACLE not in [row.policy for row in earned]:
        yield "Without an oracle it is not known whether what is right is paid most: give --oracle."
