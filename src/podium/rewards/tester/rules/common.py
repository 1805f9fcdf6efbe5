"""Text formatting shared by all rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from podium.records import Finding
from podium.rewards.tester.evidence import Evidence

Severity = Literal["error", "warning", "note"]

MOST = 0.5
"""Share of the rows from which on a finding is no accident."""


def show_form(evidence: Evidence) -> str:
    """The flags that show what a right answer looks like."""
    if len(evidence.asked) < 2:
        return "if answers are written in a form of your own, show it: --form 'Result => {}'"
    example = ", ".join(f"{{{column}}}" for column in evidence.asked)
    return f"show how a right answer is written, and in which form: --answer-column '{example}' --form 'Result => {{}}'"


def finding(evidence: Evidence, code: str, severity: Severity, what: str, why: str = "", fix: str = "") -> Finding:
    """A finding that begins with the function and where it is."""
    where = f" ({evidence.info.where})" if evidence.info.where else ""
    return Finding(code=code, severity=severity, what=f"`{evidence.info.name}`{where}: {what}", why=why, fix=fix)


def shown(value: float) -> str:
    """A score; NaN is what None became."""
    return "None" if math.isnan(value) else f"{value:.3g}"


def few(names: Sequence[str]) -> str:
    """The first of them."""
    return ", ".join(names[:6])
