"""The test of a run's rewards before it is trained: without a model, in seconds, and once for the same files and rows.

    test = pretest(rewards, weights, rows)
    test.findings, test.table

Functions of the user get the whole test of `podium rewards test` on fewer seconds; rewards of the library are tried
with right and wrong answers alone. All are called in a forked process, so that functions with a memory are as before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import podium
from podium.errors import PodiumError
from podium.isolation.forked import Ended, Send, forked
from podium.isolation.workers.functions import unwrapped
from podium.models.builtin import cache_root
from podium.records import SEVERITIES, Finding
from podium.rewards.from_file import FileReward
from podium.rewards.model import RewardModel
from podium.rewards.resolve import ENVIRONMENTS, Reward
from podium.rewards.tester import ExamineSettings, examine_resolved
from podium.rewards.tester.callers import LocalCaller
from podium.rewards.tester.report import RewardReport
from podium.rewards.tester.truth import Subject, TruthLine, TruthTable, score_truths

NUM_ROWS = 8

SETTINGS = ExamineSettings(num_rows=NUM_ROWS, limit_seconds=5.0, budget_seconds=1.5, most_seconds=0.005)

SECONDS = 15.0
"""Wall-clock time for each reward, after which the process that calls them is killed."""

UNSURE = frozenset({"W101", "W120"})
"""Codes that rest on no text having scored: an error where the test was asked for, a warning where it was not."""

MOST_FILES = 200
"""Python files beside a reward's file beyond which nothing is cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTest:
    """The result for all rewards of a run."""

    findings: tuple[Finding, ...] = ()
    """Errors first."""
    table: TruthTable | None = None
    """None: no right answers are known, or no reward was called."""
    seconds: tuple[float, ...] = ()
    """Time for one completion, by reward; 0: not called."""


def pretest(rewards: Sequence[Reward], weights: Sequence[float], rows: Sequence[Mapping[str, Any]]) -> RewardTest:
    """Test all rewards on rows with a `prompt`, or read the result of the same test from the cache."""
    if not rewards or not rows:
        return RewardTest()
    key = _digest(rewards, weights, rows)
    known = _cached(key)
    if known is not None:
        return known
    test = _tested(rewards, weights, rows)
    _keep(key, test)
    return test


def is_own(reward: Reward) -> bool:
    """Whether the function, or one inside it, is neither the library's nor TRL's."""
    function = unwrapped(reward.function)
    if any(is_own(part) for part in getattr(function, "parts", ()) if isinstance(part, Reward)):
        return True
    module = str(getattr(function, "__module__", ""))
    return isinstance(function, FileReward) or not module.startswith(("podium.", "trl."))


def _tested(rewards: Sequence[Reward], weights: Sequence[float], rows: Sequence[Mapping[str, Any]]) -> RewardTest:
    reports: list[RewardReport] = []
    table: TruthTable | None = None
    of_sum: Sequence[Finding] = ()
    work = functools.partial(_work, rewards, weights, rows)
    try:
        for message in forked(work, seconds=SECONDS * len(rewards)):
            if isinstance(message, RewardReport):
                reports.append(message)
            else:
                table, of_sum = message
    except Ended as error:  # the table alone counts as the last reward's
        reports += [_untested(each, str(error)) for each in rewards[min(len(reports), len(rewards) - 1) :]]
    found = [
        _unasked(finding, own=is_own(reward), kind=report.kind)
        for reward, report in zip(rewards, reports, strict=False)
        for finding in report.findings
    ]
    if not any(finding.severity == "error" for finding in found):  # those explain a sum
        found += of_sum
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    seconds = tuple(report.seconds_per_completion for report in reports[: len(rewards)])
    return RewardTest(findings=tuple(found), table=table, seconds=seconds)


def _work(rewards: Sequence[Reward], weights: Sequence[float], rows: Sequence[Mapping[str, Any]], send: Send) -> None:
    """In the forked process: a report on each reward, then the table with the findings about the sum."""
    subjects = []
    for reward, weight in zip(rewards, weights, strict=True):
        report = _report(reward, weight, rows)
        send(report)
        is_called = bool(report.kind) and report.seconds_per_completion <= SETTINGS.most_seconds
        caller = LocalCaller(reward, SETTINGS.limit_seconds) if is_called else None
        subjects.append(Subject(caller=caller, name=reward.name, weight=weight, report=report))
    send(score_truths(subjects, rows, NUM_ROWS, SETTINGS.budget_seconds))


def _report(reward: Reward, weight: float, rows: Sequence[Mapping[str, Any]]) -> RewardReport:
    if isinstance(reward.function, RewardModel):
        return _untested(reward, "a reward model's scores are a matter of degree", severity="note")
    if ENVIRONMENTS in reward.needs:
        return RewardReport(name=reward.name, where=reward.where)
    if reward.is_async:
        return _untested(reward, "it is `async`, and may call a service")
    try:
        return examine_resolved(reward, rows, weight, replace(SETTINGS, is_thorough=is_own(reward)))
    except PodiumError as error:
        return _untested(reward, error.what)


def _untested(reward: Reward, why: str, severity: Any = "warning") -> RewardReport:
    what = f"{reward} was not tested on right and wrong answers here: {why}"
    fix = "podium rewards test, which takes more time, for this reward"
    return RewardReport(
        name=reward.name, where=reward.where, findings=(Finding(code="W122", severity=severity, what=what, fix=fix),)
    )


def _unasked(finding: Finding, *, own: bool, kind: str) -> Finding:
    """The finding with the severity that it has in a test that was not asked for.

    The library's rewards have tests, and a form that no text of the test has may be the model's to find.
    """
    if (finding.code == "W122" and not own) or (
        kind == "style" and finding.code == "W008" and finding.severity == "warning"
    ):
        return replace(finding, severity="note")
    return replace(finding, severity="warning") if finding.code in UNSURE else finding


# ---- kept ----


def _digest(rewards: Sequence[Reward], weights: Sequence[float], rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Digest of all that the result depends on; None where a function is not from a file or the library."""
    functions = [_identity(reward) for reward in rewards]
    if None in functions:
        return None
    made = hashlib.sha256(f"{podium.__version__} {_own_digest()}".encode())
    try:
        for part in (functions, list(map(float, weights)), list(rows)):
            made.update(json.dumps(part, sort_keys=True, default=repr).encode())
    except (TypeError, ValueError):
        return None
    return made.hexdigest()


@functools.cache
def _own_digest() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _identity(reward: Reward) -> list[Any] | None:
    """Name and contents of a reward: the Python files around its own, which it may import, and its settings."""
    function = reward.function
    if isinstance(unwrapped(function), FileReward):
        file: Any = unwrapped(function)
        paths = sorted(file.path.parent.glob("*.py"))
        if len(paths) > MOST_FILES:
            return None
        texts = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
        variables = {name: hashlib.sha256(os.environ.get(name, "").encode()).hexdigest() for name in file.env}
        return [reward.name, str(file.path), file.attribute, file.settings.hex(), texts, variables]
    if is_own(reward) or reward.is_async:
        return None
    try:
        return [reward.name, hashlib.sha256(pickle.dumps(function)).hexdigest()]
    except Exception:  # noqa: BLE001  any class may refuse in its own way
        return None


def _path(key: str) -> Path:
    return cache_root() / "reward-tests" / f"{key}.json"


def _cached(key: str | None) -> RewardTest | None:
    if key is None:
        return None
    try:
        return _read(json.loads(_path(key).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _read(kept: Mapping[str, Any]) -> RewardTest:
    table = kept["table"]
    if table is not None:
        lines = tuple(
            TruthLine(
                text=line["text"],
                kind=line["kind"],
                means=tuple(math.nan if value is None else value for value in line["means"]),
                marks=tuple(line["marks"]),
            )
            for line in table["lines"]
        )
        examples = tuple((shown, better) for shown, better in table["examples"])
        table = TruthTable(**{**table, "columns": tuple(table["columns"]), "lines": lines, "examples": examples})
    return RewardTest(
        findings=tuple(Finding(**each) for each in kept["findings"]), table=table, seconds=tuple(kept["seconds"])
    )


def as_plain(test: RewardTest) -> dict[str, Any]:
    """For JSON: `findings`, `table` and `seconds`; NaN is null."""
    plain = dataclasses.asdict(test)
    for line in (plain["table"] or {"lines": ()})["lines"]:
        line["means"] = [None if math.isnan(value) else value for value in line["means"]]
    return plain


def _keep(key: str | None, test: RewardTest) -> None:
    """Write the result for the next time, unless time ran out: then another try may tell more."""
    if key is None or any(finding.code in ("W122", "W009", "W016") for finding in test.findings):
        return
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(as_plain(test)), encoding="utf-8")
        temporary.replace(path)
