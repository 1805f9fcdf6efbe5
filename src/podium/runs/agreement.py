"""Findings about one run that ask for one value of each setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from podium.errors import Finding
from podium.errors.texts import as_line, as_lines
from podium.runs.monitors import rank


def agreed(findings: Sequence[Finding]) -> list[Finding]:
    """The findings in their order; where two want different values of a setting, only the graver one has its change.

    Among equals the cause decides, as `rank` has it. The fix of the other one names the finding that decides, in place
    of its own value.

    >>> low = Finding(code="C022", severity="warning", what="", fix="Set beta: 0.1; top_k: 2.",
    ...               changes={"beta": 0.1, "top_k": 2})
    >>> high = Finding(code="C023", severity="error", what="", fix="beta: 0.2", changes={"beta": 0.2})
    >>> [(each.fix, dict(each.changes)) for each in agreed([low, high])]
    [('Set beta: see C023; top_k: 2.', {'top_k': 2}), ('beta: 0.2', {'beta': 0.2})]
    """
    decided: dict[str, tuple[Any, str]] = {}
    made = list(findings)
    for place in sorted(range(len(made)), key=lambda place: rank(made[place])):
        finding = made[place]
        own = dict(flat(finding.changes))
        decisions = {key: decided.setdefault(key, (value, finding.code)) for key, value in own.items()}
        elsewhere = {
            key: code for key, (value, code) in decisions.items() if value != own[key] and code != finding.code
        }
        if elsewhere:
            left = {key: value for key, value in own.items() if key not in elsewhere}
            fix = finding.fix
            if all(as_line(key, own[key]) in fix for key in elsewhere):
                for key, code in elsewhere.items():
                    fix = fix.replace(as_line(key, own[key]), f"{key}: see {code}")
            else:
                others = [f"{key}: see {code}" for key, code in elsewhere.items()]
                fix = "; ".join([as_lines(left), *others] if left else others)
            made[place] = replace(finding, changes=left, fix=fix, facts={**finding.facts, "elsewhere": elsewhere})
    return made


def flat(changes: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Changed settings by dotted key."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
