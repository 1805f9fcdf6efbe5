"""Tests of a tool or an environment before training, without a model.

    findings = podium.agents.tester.audit(Guess, rows)
    report = podium.agents.tester.examine(Guess, rows, oracle=halves)     # with the table of what policies earn

`actors` plays episodes, `evidence` plays those that the rules compare, `rules` turns them into findings, `report` has
the result. `examine_source` tests what a name stands for, in a process of its own: what hangs or ends it is a finding.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.agents.resolve import resolve_tools
from podium.agents.table import ADAPTERS, LIBRARY, PREFIX, from_file, resolve_environment
from podium.agents.tester.report import Earned, EnvironmentReport, ExamineSettings, Measured, report_of
from podium.data.query import parse_query
from podium.errors import ConfigError, Finding, Severity
from podium.isolation.workers import Unanswered, Worker

__all__ = ["EnvironmentReport", "ExamineSettings", "audit", "examine"]


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
    return report_of(target, rows, oracle, settings or ExamineSettings())


TEST_SECONDS = 600.0
"""Limit of a whole test: for code that holds the interpreter, which no limit of a call can end."""


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
    lists = {"earned": Earned, "measured": Measured, "findings": Finding}
    made = {name: tuple(kind(**each) for each in reply[name]) for name, kind in lists.items()}
    made["earned"] = tuple(dataclasses.replace(each, rewards=tuple(each.rewards)) for each in made["earned"])
    return EnvironmentReport(**{**reply, **made})


def answer(request: Mapping[str, Any], _: Callable[[int], None]) -> Iterator[Mapping[str, Any]]:
    """In the worker: the report as plain data."""
    target = target_of(request["target"], request["folder"])
    oracle = from_file(request["oracle"], request["folder"]) if request["oracle"] else None
    yield dataclasses.asdict(report_of(target, request["rows"], oracle, request["settings"]))


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
