"""Evaluations, alone and side by side, as tables. Text that a model wrote is data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table

from podium.console.terminal import console, plain_text, print_wrapped, table
from podium.evaluation import Comparison, EvalSummary
from podium.evaluation.comparison import ChangedPrompt, p_text, signed
from podium.evaluation.held_out import HeldOut
from podium.evaluation.saved import Saved
from podium.evaluation.statistics import Difference, Interval

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


def show_comparison(before: HeldOut, after: HeldOut, verdict: str) -> None:
    """Numbers of before and after with 95 % intervals, completions of the same prompts, and the verdict."""
    summary = after.summary
    title = f"Held out: {summary.num_prompts} prompts, {summary.num_completions} completions (95 % intervals)"
    pairs = zip(named_numbers(before.summary, every_k=False), named_numbers(summary, every_k=False), strict=True)
    rows = ((name, str(a), str(b)) for (name, a), (_, b) in pairs)
    # the first completion of evenly spread prompts: chosen by place, not by how it turned out
    places = range(0, summary.num_prompts, max(1, summary.num_prompts // EXAMPLES))[:EXAMPLES]
    texts = _side_by_side(before.saved, after.saved, [(place, 0) for place in places], [(place, 0) for place in places])
    console.print()
    console.print(table({"": "left", "before": "whole", "after": "whole"}, rows, title=title))
    console.print(table({"prompt": "left", "before": "left", "after": "left"}, texts, title="Completions"))
    print_wrapped(console, plain_text(verdict))
    console.print()


def _side_by_side(
    a: Saved, b: Saved, of_a: Sequence[tuple[int, int]], of_b: Sequence[tuple[int, int]]
) -> list[tuple[str, str, str]]:
    """Question and the completion of each; completions by the number of the prompt and their own."""
    pairs = zip(a.texts(of_a), b.texts(of_b), strict=True)
    return [(question, text_a, text_b) for (_, text_a), (question, text_b) in pairs]


# ---- any two models ----


def differences(comparison: Comparison, data: str) -> Group:
    """Every number of A and B with the paired difference."""
    title = f"{data}: {comparison.main.num_prompts} prompts, B less A (95 % intervals)"
    models = {f"{letter}: {name}": "right" for letter, name in zip("AB", comparison.names, strict=True)}
    rows = [(name, *_cells(difference)) for name, difference in comparison.numbers.items()]
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
    rows = [(value, str(found.num_prompts), *_cells(found)) for value, found in comparison.categories.items()]
    columns = {"": "left", "prompts": "right", "A": "right", "B": "right", "difference": "whole"}
    return Group(plain_text(title), table(columns, rows))


def _cells(difference: Difference) -> tuple[str, str, str]:
    return f"{difference.a:.3f}", f"{difference.b:.3f}", signed(difference)


def changed_prompts(a: Saved, b: Saved, word: str, changed: Sequence[ChangedPrompt], num: int) -> Table:
    """The prompts that changed most, with the completion of each model that differs most."""
    shown = changed[:num]
    some = f"{num} of the {len(changed)} prompts" if len(changed) > num else "prompts"
    of_a = [(prompt.place_a, prompt.completion) for prompt in shown]
    of_b = [(prompt.place_b, prompt.completion) for prompt in shown]
    return table({f"{some} that got {word}": "left", "A": "left", "B": "left"}, _side_by_side(a, b, of_a, of_b))
