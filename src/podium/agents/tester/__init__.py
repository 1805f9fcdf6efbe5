"""Tests of a tool or an environment before training, without a model.

    findings = podium.agents.tester.audit(Guess, rows)
    report = podium.agents.tester.examine(Guess, rows, oracle=halves)     # with the table of what policies earn

`actors` plays episodes, `evidence` plays those that the rules compare, `rules` turns them into findings, `report` has
the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podium.agents.tester.report import EnvironmentReport, ExamineSettings, report_of
from podium.errors import Finding

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
