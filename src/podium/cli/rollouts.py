"""The tables of `podium check --rollouts`: sampled groups in numbers, memory and time of a whole run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from podium.checks.rollouts import diagnose, measured_rates, sample
from podium.cli.ending import peak_bytes
from podium.cli.sample import opened
from podium.cli.watch import BARS
from podium.console.terminal import table
from podium.planning.estimates.duration import TimeEstimate, estimate_time, measure
from podium.records import ScoredGroup

if TYPE_CHECKING:
    from podium.checks.verdict import Diagnosis
    from podium.recipe import Recipe
    from podium.trainer.trainer import GRPOTrainer


def sample_groups(recipe: Recipe, num_prompts: int, save: str = "") -> tuple[Diagnosis, list[tuple[str, str]]]:
    """Load the model, sample, score; and the lines about memory and time. Pass rates are written into `save`."""
    with opened(recipe) as (recipe, trainer, rows, held_out):
        sampled = sample(trainer, rows, num_prompts)
        if save:
            _write_rates(Path(save), sampled.groups, recipe.accuracy)
        diagnosis = diagnose(sampled, trainer.args, recipe.accuracy)
        took = estimated(recipe, trainer, rows, held_out)
        peak = torch.cuda.max_memory_allocated() if trainer.args.device.type == "cuda" else peak_bytes()
        return diagnosis, [*took.rows(), ("peak memory so far", f"{peak / 1e9:.1f} GB")]


def estimated(recipe: Recipe, trainer: GRPOTrainer, rows: Any, held_out: Any) -> TimeEstimate:
    """The time of a run, with its evaluations."""
    looked_at = 0 if held_out is None else sum(1 for _ in islice(held_out, recipe.eval_rows))
    return estimate_time(
        trainer.args,
        measure(trainer),
        num_rows=len(rows) if hasattr(rows, "__len__") else None,
        evaluation_completions=2 * looked_at * recipe.eval_samples,
    )


def _write_rates(file: Path, groups: Sequence[ScoredGroup], accuracy: str | None) -> None:
    """Write a temporary file and rename it, so that a stopped measurement keeps the older file."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in measured_rates(groups, accuracy)]
    beside = file.with_name(f".{file.name}.tmp")
    beside.write_text("".join(lines).encode("utf-8", "replace").decode("utf-8"), encoding="utf-8")
    beside.replace(file)


def tables(seen: Diagnosis, run: Sequence[tuple[str, str]]) -> list[Table]:
    """A table of the rewards, one a row, and one of everything else."""
    # Narrow enough for a terminal of 80 columns and a name of 20 letters.
    columns = dict.fromkeys(
        ("reward", "mean", "std", "from", "to", "histogram", "none", "~ length", "sec"), "right whole"
    )
    rewards = table(
        {**columns, "reward": "left whole", "histogram": "left whole"},
        [
            (
                each.name,
                *map(_number, (each.mean, each.std, each.low, each.high)),
                bars(each.histogram),
                f"{each.none_share:.0%}",
                _number(each.length_correlation, "+.2f"),
                f"{each.seconds:.2f}",
            )
            for each in seen.rewards
        ],
        title="Rewards",
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    rows = [
        ("groups with spread", f"{seen.spread_share:.0%} (DAPO's filter would drop {1 - seen.spread_share:.0%})"),
        ("pass rate by prompt", _pass_rates(seen.pass_rates)),
        ("tokens of a completion", "{} / {} / {} (5 % / 50 % / 95 %)".format(*seen.tokens)),
        ("cut off, empty, repeated", f"{seen.truncated_share:.0%}, {seen.empty_share:.0%}, {seen.duplicate_share:.0%}"),
        ("entropy", f"{seen.entropy:.2f} nats a token"),
        *((f"correlation {pair}", _number(value, "+.2f")) for pair, value in seen.correlations.items()),
        ("sampling", f"{seen.tokens_per_second:,.0f} tokens a second"),
        *run,
    ]
    return [rewards, table((("", "left"), ("", "left")), rows, title="Groups", show_header=False)]


def bars(counts: Sequence[int]) -> str:
    """
    >>> bars([0, 1, 8])
    ' ▁█'
    """
    most = max(counts, default=0)
    return "".join(" " if not count else BARS[max(0, -(-count * 8 // most) - 1)] for count in counts)


def _pass_rates(rates: Sequence[float]) -> str:
    if not rates:
        return "not known: no reward says right or wrong (accuracy: NAME)"
    none, every = (sum(rate == value for rate in rates) / len(rates) for value in (0, 1))
    return f"{sum(rates) / len(rates):.0%} on average; none right {none:.0%}, all right {every:.0%}"


def _number(value: float, form: str = ".2f") -> str:
    return "-" if value != value else format(value, form)
