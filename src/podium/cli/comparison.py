"""Two evaluations of the same prompts as tables. Text that a model wrote is data."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group
from rich.table import Table

from podium.cli.eval import rows
from podium.cli.terminal import last_user_turn, shown
from podium.evaluation import Comparison, HeldOut
from podium.evaluation.comparison import Moved, p_text, signed
from podium.evaluation.saved import Saved
from podium.records import ScoredGroup

Groups = Sequence[ScoredGroup]


# ---- of a run, before and after ----


def show_comparison(
    console: Console, looks: Sequence[HeldOut], groups: Sequence[Groups], verdict: str, num: int
) -> None:
    """Numbers of before and after with 95 % intervals, completions of the same prompts, and the verdict."""
    console.print()
    console.print(_numbers(*looks))
    console.print()
    console.print(_completions(groups[0], groups[1], num))
    console.print()
    console.print(shown(verdict), soft_wrap=True)
    console.print()


def _numbers(before: HeldOut, after: HeldOut) -> Table:
    title = f"Held out: {after.num_prompts} prompts, {after.num_completions} completions (95 % intervals)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("", "before", "after"):
        table.add_column(column, no_wrap=True)
    for (name, a), (_, b) in zip(rows(before, every_k=False), rows(after, every_k=False), strict=True):
        table.add_row(name, str(a), str(b))
    return table


def _completions(before: Groups, after: Groups, num: int) -> Table:
    """The first completion of evenly spread prompts: chosen by place, not by how it turned out."""
    table = Table(title="Completions", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("prompt", "before", "after"):
        table.add_column(column, overflow="fold")
    for index in range(0, len(after), max(1, len(after) // num))[:num]:
        texts = [groups[index].group.completions[0].text for groups in (before, after)]
        table.add_row(shown(last_user_turn(after[index].group.prompt.content)), *(shown(text) for text in texts))
    return table


# ---- of any two models ----


def differences(comparison: Comparison, data: str) -> Group:
    """Every number of A and B with the paired difference."""
    title = f"{data}: {comparison.main.num_prompts} prompts, B less A (95 % intervals)"
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for letter, name in zip("AB", comparison.names, strict=True):
        table.add_column(shown(f"{letter}: {name}"), justify="right", overflow="fold")
    table.add_column("difference", no_wrap=True)
    for name, each in comparison.numbers.items():
        table.add_row(name, f"{each.a:.3f}", f"{each.b:.3f}", signed(each))
    return Group(shown(title), table)


def counts(comparison: Comparison) -> str:
    """Where the two differ, in a line."""
    main = comparison.main
    same = main.num_prompts - main.num_better - main.num_worse
    moved = f"{comparison.metric}: better on {main.num_better} prompts, worse on {main.num_worse}, equal on {same}"
    if comparison.mcnemar_p_value is None:
        return moved
    return f"{moved}; McNemar's exact test of first completions: {p_text(comparison.mcnemar_p_value)}"


def categories(comparison: Comparison) -> Group:
    """Differences by the values of a column."""
    title = f"{comparison.metric} by `{comparison.by}` (intervals hold together at 95 %)"
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "prompts", "A", "B", "difference"):
        table.add_column(column, justify="left" if column in ("", "difference") else "right")
    for value, each in comparison.categories.items():
        table.add_row(shown(value), str(each.num_prompts), f"{each.a:.3f}", f"{each.b:.3f}", signed(each))
    return Group(shown(title), table)


def moved(a: Saved, b: Saved, word: str, found: Sequence[Moved], num: int) -> Table:
    """The prompts that moved most, with the completion of each model that differs most."""
    chosen = found[:num]
    some = f"{num} of the {len(found)} prompts" if len(found) > num else "prompts"
    table = Table(box=box.SIMPLE_HEAD)
    for column in (f"{some} that got {word}", "A", "B"):
        table.add_column(column, overflow="fold")
    texts = zip(a.texts([x.place_a for x in chosen]), b.texts([x.place_b for x in chosen]), strict=True)
    for each, (of_a, of_b) in zip(chosen, texts, strict=True):
        answers = (of_a.completions[each.completion], of_b.completions[each.completion])
        table.add_row(shown(of_b.question), *(shown(text) for text in answers))
    return table
