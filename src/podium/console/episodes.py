"""Episodes on the terminal: what a policy drew, what it was given, and where a program's conversations part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.text import Text

from podium.errors.texts import clean
from podium.runs.conversations import Passage


def episode_lines(passages: Iterable[Passage]) -> Iterator[Text]:
    """Lines to print: drawn text at the margin, given text further in behind a bar, branches further in still."""
    for drawn, head, text, depth, begins in passages:
        bar, style = ("  > ", "") if drawn else ("      | ", "dim")
        margin = "    " * depth
        before = "  " if begins else bar[:-2]
        yield Text(f"{margin}{before}{clean(head)}", style="bold" if begins else "dim")
        for line in clean(text).splitlines():
            yield Text(f"{margin}{bar}{line}", style=style)


def failure_lines(problem: str, log: str) -> Iterator[Text]:
    """Lines that say how a program has failed, with the end of its output; none where it has not."""
    if problem:
        yield Text(f"  The program {clean(problem)}", style="bold")
        yield from (Text(f"      | {line}", style="dim") for line in clean(log).splitlines())
