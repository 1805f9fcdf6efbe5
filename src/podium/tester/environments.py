"""Tests of a tool or an environment before training: episodes of policies that know no task, compared with one another.

    findings = podium.agents.tester.audit(Guess, rows)
    report = podium.agents.tester.examine(Guess, rows, oracle=halves)     # with the table of what policies earn

`episodes` plays one, `policies` has those who play, `episode_rules` turns what was seen into findings. `examine_source`
tests what a name stands for, in a process of its own: what hangs or ends it is a finding.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podium.agents.resolve import resolve_tools
from podium.agents.table import ADAPTERS, LIBRARY, PREFIX, from_file, resolve_environment
from podium.data.query import parse_query
from podium.data.selection import sampled_rows
from podium.errors import ConfigError, Finding, Severity
from podium.isolation.workers import Unanswered, Worker
from podium.tester.episode_rules import RULES
from podium.tester.episodes import Evidence, Play, Policy, Subject, finished, playing, subject_of
from podium.tester.policies import COLUMN, ORACLE, again, policies_of, scripted
from podium.tester.report import EnvironmentReport, Measured, earned_by
from podium.tester.rules import evaluate

MORE_EPISODES = 10
"""Episodes of a row beside one of each policy, about."""
LARGEST = 10_000
"""Characters of a variable that is looked at, at most."""
TEST_SECONDS = 600.0
"""Limit of a whole test: for code that holds the interpreter, which no limit of a call can end."""


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


def audit(target: Any, rows: Sequence[Mapping[str, Any]] = ({},), **settings: Any) -> list[Finding]:
    """The findings of `examine`. `settings`: `oracle`, and the fields of `ExamineSettings`.

    >>> def double(x: int) -> int:
    ...     return 2 * x
    >>> [finding.code for finding in audit(double)]
    ['E002']
    """
    oracle = settings.pop("oracle", None)
    return list(examine(target, rows, oracle=oracle, settings=ExamineSettings(**settings)).findings)


def examine(
    target: Any,
    rows: Sequence[Mapping[str, Any]] = ({},),
    *,
    oracle: Callable[..., Any] | None = None,
    settings: ExamineSettings | None = None,
) -> EnvironmentReport:
    """Play episodes with a tool or an environment, compare them, and report.

    Args:
        target: a function that is a tool, an environment class or a factory of environments, a `TextEnvironment`
            included; or a `Tool`, as `resolve_tools` makes them.
        rows: of the dataset; `reset` gets their columns.
        oracle: `oracle(row, messages)`, the next turn of a policy that solves the task: a text, `(tool, arguments)` or
            None at the end.
        settings: limits of the test.
    """
    settings = settings or ExamineSettings()
    subject, failures = subject_of(target, limit=settings.limit)
    chosen = [dict(row) for _, row in sampled_rows(rows, settings.num_rows)] or [{}]
    evidence = Evidence(subject=subject, rows=chosen, turns=settings.turns, failures=tuple(failures))
    if not any(failure.code in ("E001", "E005") for failure in failures):
        policies = policies_of(chosen, subject.actions)
        if oracle is not None:
            solves = scripted(oracle, settings.limit)
            policies |= {ORACLE: solves, f"{ORACLE} repeated": again(solves)}
        evidence = gather(evidence, policies, settings.budget)
    return EnvironmentReport(
        name=subject.name,
        kind=subject.kind,
        num_rows=len(evidence.rows),
        has_reward=subject.has_reward,
        earned=tuple(earned_by(name, plays) for name, plays in evidence.plays.items()),
        measured=tuple(_measured(evidence)),
        findings=tuple(evaluate(RULES, "environment", evidence)),
    )


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


# ---- what a name stands for, in a process of its own ----


def examine_source(
    target: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    oracle: str = "",
    folder: Path | None = None,
    settings: ExamineSettings,
) -> EnvironmentReport:
    """As `examine`, for names as in a recipe.

    Args:
        target: `tools.py:multiply`, `builtin:calculator`, `game.py:Guess`, `gymnasium:FrozenLake-v1`.
        rows: plain data.
        oracle: `file.py:function`; empty: there is none.
        folder: where files are looked for first; None: the working directory.
        settings: of the test.
    """
    worker = Worker(target=f"{__name__}:answer", variables=None, output="kept")
    request = {"target": target, "rows": list(rows), "oracle": oracle, "folder": folder or Path(), "settings": settings}
    try:
        reply = worker.ask(request, TEST_SECONDS)
    finally:
        worker.kill()
    if isinstance(reply, Unanswered) and not reply.has_ended:
        raise ConfigError(reply.how, fix=reply.fix)
    if isinstance(reply, Unanswered):
        code = "E005" if reply.cause == "limit" else "E003"
        what = "\n  ".join([f"`{target}` {reply.how}", *reply.trace[-2:], *reply.output[-4:]])
        fix = "end nothing but the call: no os._exit, no signal" if code == "E003" else "bound what it waits for"
        severity: Severity = "error" if code == "E003" else "warning"  # a slow machine is no mistake
        return EnvironmentReport(name=target, findings=(Finding(code=code, severity=severity, what=what, fix=fix),))
    return EnvironmentReport.from_plain(reply)


def answer(request: Mapping[str, Any], _: Callable[[int], None]) -> Iterator[Mapping[str, Any]]:
    """In the worker: the report as plain data."""
    target = target_of(request["target"], request["folder"])
    oracle = from_file(request["oracle"], request["folder"]) if request["oracle"] else None
    yield dataclasses.asdict(examine(target, request["rows"], oracle=oracle, settings=request["settings"]))


def target_of(spec: str, folder: Path) -> Any:
    """The tool or the environment of a name. In a file, a function with parameters is a tool.

    Raises `ConfigError` for a name that is neither, a file or function that is not there, and arguments it has not.
    """
    name, arguments = parse_query(spec)
    library, _, rest = name.partition(":")
    if library.replace("-", "_") in ADAPTERS and not (name.startswith(PREFIX) and rest in LIBRARY):
        return resolve_environment(spec, folder)
    if ".py:" in name or name.endswith(".py"):
        found = from_file(name if ".py:" in name else f"{name}:", folder)
        is_tool = not inspect.isclass(found) and bool(inspect.signature(found).parameters)
        return found if is_tool or not arguments else resolve_environment(spec, folder)
    [tool] = resolve_tools([spec], folder)
    return tool


# ---- the episodes ----


def gather(evidence: Evidence, policies: Mapping[str, Policy], budget: float) -> Evidence:
    """Play everything; after a call that hung, nothing more. Slow ones get fewer rows, for about `budget` seconds."""
    variables = _variables(evidence.subject)
    start = time.perf_counter()
    first = _played(evidence, 0, policies["noise"])
    if first.is_hung:
        return replace(evidence, plays={"noise": (first,)})
    affordable = int(budget / (len(policies) + MORE_EPISODES) / max(time.perf_counter() - start, 1e-6))
    evidence = replace(evidence, rows=evidence.rows[: max(1, affordable)])
    evidence = replace(evidence, plays=_plays(evidence, policies))
    if not evidence.is_hung:
        evidence = _compared(evidence, policies, variables)
    if not evidence.is_hung and evidence.subject.has_reward:
        evidence = replace(evidence, repeated=tuple(_repeated(evidence, policies["repetition"])))
    return evidence


def _plays(evidence: Evidence, policies: Mapping[str, Policy]) -> dict[str, list[Play]]:
    """Every policy on every row, up to an episode that hangs."""
    plays: dict[str, list[Play]] = {}
    for name, policy in policies.items():
        for index in range(len(evidence.rows)):
            plays.setdefault(name, []).append(_played(evidence, index, policy))
            if plays[name][-1].is_hung:
                return plays
    return plays


def _compared(evidence: Evidence, policies: Mapping[str, Policy], variables: Variables) -> Evidence:
    """Play rows once more: in a new environment, in one that has played before, and beside another one."""
    compared = [name for name in policies if name in ("noise", ORACLE) or name.startswith(COLUMN)]
    for index in range(len(evidence.rows)):
        for name in compared:
            first = evidence.plays[name][index]
            second = _played(evidence, index, policies[name])
            evidence = replace(evidence, again=(*evidence.again, (first, second)))
            if first.outcome != second.outcome and evidence.shared is None:
                evidence = replace(evidence, shared=_shared(evidence, index, policies[name], variables))
        if evidence.subject.make is not None:
            alone = evidence.plays["noise"][index]
            after = _repeatable(alone, functools.partial(_played_after, evidence, index, policies))
            beside = _repeatable(alone, functools.partial(_played_beside, evidence, index, policies["noise"]))
            evidence = replace(evidence, after=(*evidence.after, after), beside=(*evidence.beside, beside))
        if evidence.is_hung:
            break
    return evidence


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
    for owner, name, value in every + [(function, "__defaults__", function.__defaults__) for function in functions]:
        is_plain = isinstance(value, (int, float, str, list, dict, set)) or (name == "__defaults__" and value)
        if is_plain and len(str(value)) < LARGEST:
            with contextlib.suppress(Exception):  # what cannot be copied is not looked at
                found[owner, name] = copy.deepcopy(value)
    return found


def _shared(evidence: Evidence, index: int, policy: Policy, before: Variables) -> tuple[Play, Play, str] | None:
    """Shows that variables, and not chance, decide: an episode now, and twice the same other one with them set back."""
    plays = [_played(evidence, index, policy)]
    changed: dict[str, None] = {}
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
