"""Rules: rows of a table, each with the findings that it may give, what it is about, and what it reads.

A rule is a pure function of evidence: it plays, calls and loads nothing. The rows are in `reward_rules` and
`episode_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from podium.errors import Finding, gravest_first

Subject = Literal["reward", "library reward", "environment", "program"]
"""Kind of what is tested. Rewards of the library have few rules, as their scores are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule, with the subjects that it applies to and the evidence that it reads."""

    codes: str
    """Codes of the findings that it may give, with spaces between them."""
    of: tuple[Subject, ...]
    find: Callable[[Any], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    """Attributes of the evidence that it rests on: it is skipped where one of them is None, empty or false."""
    unless: tuple[str, ...] = ()
    """Codes of findings that explain its own: it is skipped where a rule before it gave one of them."""
    question: str = ""
    """Rules with the same text here answer one question: once one of them finds something, the others are skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of the test of one reward, tool, environment or program."""

    name: str
    findings: tuple[Finding, ...] = ()


def evaluate(rules: Iterable[Rule], subject: Subject, evidence: Any) -> list[Finding]:
    """The findings of the rules for a subject: errors first, those of one severity in the order of the rows."""
    found: list[Finding] = []
    answered: set[str] = set()
    for rule in rules:
        is_asked = subject in rule.of and rule.question not in answered
        if not is_asked or any(finding.code in rule.unless for finding in found):
            continue
        if all(getattr(evidence, name) for name in rule.needs) and (more := list(rule.find(evidence))):
            found += more
            answered |= {rule.question} - {""}
    return gravest_first(found)
