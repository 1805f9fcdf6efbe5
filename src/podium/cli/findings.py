"""Findings on the terminal, for every verb that prints them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from podium.records import Finding

STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def print_findings(console: Console, found: Sequence[Finding]) -> None:
    """Each finding on a few lines; why and fix of several equal ones below the last of them."""
    from rich.text import Text

    from podium.cli.terminal import print_wrapped
    from podium.records import clean

    for finding, following in zip_longest(found, found[1:]):
        head = Text(f"{finding.severity}[{finding.code}] ", style=STYLES[finding.severity])
        print_wrapped(console, head + Text(clean(finding.what)))
        if following is not None and (following.code, following.fix) == (finding.code, finding.fix):
            continue
        for word, text in (("why", finding.why), ("fix", finding.fix)):
            if text:
                print_wrapped(console, Text(f"  {word}: ", style="dim") + Text(clean(text)))


def counted(found: Sequence[Finding]) -> str:
    """`1 error, 2 warnings`, or `nothing found`."""
    counts = {severity: sum(finding.severity == severity for finding in found) for severity in STYLES}
    listed = (f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts.items() if count)
    return ", ".join(listed) or "nothing found"


def has_errors(found: Sequence[Finding]) -> bool:
    """Whether a run with these findings cannot start."""
    return any(finding.severity == "error" for finding in found)
