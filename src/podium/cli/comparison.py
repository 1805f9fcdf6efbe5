"""Held-out numbers and completions, before and after, side by side."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from podium.cli.terminal import last_user_turn, shown
from podium.evaluation import HeldOut


def show_comparison(console: Console, before: HeldOut, after: HeldOut, examples: int) -> None:
    """A table of numbers with 95 % intervals, and completions of the same prompts."""
    console.print()
    console.print(_numbers(before, after))
    console.print()
    console.print(_completions(before, after, examples))
    console.print()


def _numbers(before: HeldOut, after: HeldOut) -> Table:
    title = f"Held out: {after.num_prompts} prompts, {after.num_completions} completions (95 % intervals)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("", "before", "after"):
        table.add_column(column, no_wrap=True)
    if before.accuracy is not None and after.accuracy is not None:
        table.add_row("accuracy", str(before.accuracy), str(after.accuracy))
    table.add_row("reward", str(before.reward), str(after.reward))
    for name in after.means:
        table.add_row(f"  {name}", f"{before.means[name].value:.3f}", f"{after.means[name].value:.3f}")
    table.add_row("mean length, tokens", f"{before.mean_tokens:.1f}", f"{after.mean_tokens:.1f}")
    table.add_row("cut off at the limit", f"{before.truncated:.1%}", f"{after.truncated:.1%}")
    return table


def _completions(before: HeldOut, after: HeldOut, examples: int) -> Table:
    """The first completion of evenly spread prompts: chosen by place, not by how it turned out."""
    table = Table(title="Completions", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("prompt", "before", "after"):
        table.add_column(column, overflow="fold")
    for index in range(0, after.num_prompts, max(1, after.num_prompts // examples))[:examples]:
        prompt = after.groups[index].group.prompt
        texts = [evaluation.groups[index].group.completions[0].text for evaluation in (before, after)]
        table.add_row(shown(last_user_turn(prompt.content)), *(shown(text) for text in texts))
    return table
