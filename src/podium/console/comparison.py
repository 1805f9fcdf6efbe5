"""Evaluations, alone and side by side, as tables. Text that a model wrote is data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table

from podium.console.terminal import console, plain_text, print_wrapped, table
from podium.evaluation import Comparison, EvalSummary
from podium.evaluation.comparison import ChangedPrompt, p_text, signed
from podium.evaluation.saved import Saved
from podium.evaluation.statistics import Interval
from podium.records import ScoredGroup, last_user_turn
from podium.runs.conversations import whole_text

EXAMPLES = 3
"""Held-out prompts whose completions are printed before and after."""

# ---- one evaluation ----


def evaluation_table(summary: EvalSummary) -> Table:
    """The numbers of one evaluation."""
    rows = ((name, *str(interval).partition(" ")[::2]) for name, interval in named_numbers(summary))
    return table({"": "left", " ": "right", "95 % interval": "whole"}, rows)


def named_numbers(summary: EvalSummary, *, every_k: bool = True) -> Iterator[tuple[str, Interval]]:
    """The numbers by name, in the order of the table; of all pass@k but pass@1 only the last, unless `every_k`."""
    if summary.accuracy is not None:
        yield "accuracy (pass@1)", summary.accuracy
    for k, interval in summary.pass_at.items():
        if k > 1 and (every_k or k == max(summary.pass_at)):
            yield f"pass@{k}", interval
    yield from ((f"format kept ({name})", interval) for name, interval in summary.format.items())
    yield "reward", summary.reward
    yield from ((f"  {name}", interval) for name, interval in summary.means.items())
    yield "length, tokens", summary.mean_tokens
    yield "cut off at the limit", summary.truncated


# ---- a run, before and after ----


def show_comparison(summaries: Sequence[EvalSummary], groups: Sequence[Sequence[ScoredGroup]], verdict: str) -> None:
    """Numbers of before and after with 95 % intervals, completions of the same prompts, and the verdict."""
    after = summaries[1]
    title = f"Held out: {after.num_prompts} prompts, {after.num_completions} completions (95 % intervals)"
    pairs = zip(*(named_numbers(each, every_k=False) for each in summaries), strict=True)
    rows = ((name, str(a), str(b)) for (name, a), (_, b) in pairs)
    console.print()
    console.print(table({"": "left", "before": "whole", "after": "whole"}, rows, title=title))
    console.print(_completions(*groups))
    print_wrapped(console, plain_text(verdict))
    console.print()


def _completions(before: Sequence[ScoredGroup], after: Sequence[ScoredGroup]) -> Table:
    """The first completion of evenly spread prompts: chosen by place, not by how it turned out."""
    rows = [
        (last_user_turn(of_b.group.prompt.content), *(whole_text(each.group.completions[0]) for each in (of_a, of_b)))
        for of_a, of_b in list(zip(before, after, strict=True))[:: max(1, len(after) // EXAMPLES)][:EXAMPLES]
    ]
    return table(dict.fromkeys(("prompt", "before", "after"), "left"), rows, title="Completions")


# ---- any two models ----


def differences(comparison: Comparison, data: str) -> Group:
    """Every number of A and B with the paired difference."""
    title = f"{data}: {comparison.main.num_prompts} prompts, B less A (95 % intervals)"
    models = {f"{letter}: {name}": "right" for letter, name in zip("AB", comparison.names, strict=True)}
    rows = [(name, f"{each.a:.3f}", f"{each.b:.3f}", signed(each)) for name, each in comparison.numbers.items()]
    return Group(plain_text(title), table({"": "left", **models, "difference": "whole"}, rows))


def counts(comparison: Comparison) -> str:
    """On how many prompts the two differ, in a line."""
    main = comparison.main
    same = main.num_prompts - main.num_better - main.num_worse
    moved = f"{comparison.metric}: better on {main.num_better} prompts, worse on {main.num_worse}, equal on {same}"
    if comparison.mcnemar_p_value is None:
        return moved
    return f"{moved}; McNemar's exact test of first completions: {p_text(comparison.mcnemar_p_value)}"


def categories(comparison: Comparison) -> Group:
    """Differences by the values of a column."""
    title = f"{comparison.metric} by `{comparison.by}` (intervals hold together at 95 %)"
    rows = [
        (value, str(each.num_prompts), f"{each.a:.3f}", f"{each.b:.3f}", signed(each))
        for value, each in comparison.categories.items()
    ]
    columns = {"": "left", "prompts": "right", "A": "right", "B": "right", "difference": "whole"}
    return Group(plain_text(title), table(columns, rows))


def changed_prompts(a: Saved, b: Saved, word: str, found: Sequence[ChangedPrompt], num: int) -> Table:
    """The prompts that changed most, with the completion of each model that differs most."""
    chosen = found[:num]
    some = f"{num} of the {len(found)} prompts" if len(found) > num else "prompts"
    texts = zip(
        a.texts([(each.place_a, each.completion) for each in chosen]),
        b.texts([(each.place_b, each.completion) for each in chosen]),
        strict=True,
    )
    rows = [(question, of_a, of_b) for (_, of_a), (question, of_b) in texts]
    return table({f"{some} that got {word}": "left", "A": "left", "B": "left"}, rows)
