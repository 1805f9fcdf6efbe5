"""Two harder tasks, all weights and LoRA: held-out accuracy before and after, and the time it took: `make results`.

    python -m benchmarks.tasks
    python -m benchmarks.tasks --recipes chain-sum --steps 2 --eval_rows 4    # to see that it works

Flags that are not its own go to `podium train`. Each run is one of its own process.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bench import hardware, save
from benchmarks.stages import shown, train

RECIPES = ("two-digit", "chain-sum")
TRAINED: dict[str, tuple[str, ...]] = {
    "all weights": (),
    "LoRA r=16": (
        *("--use_peft", "true", "--lora_r", "16"),
        *("--lora_target_modules", "all-linear", "--learning_rate", "3e-4"),
    ),
}


def table(runs: list[dict[str, Any]]) -> Table:
    """A row for each run."""
    out = Table(title="Held-out accuracy with 95 % intervals")
    for column in ("task", "trained", "seed", "steps", "before", "after", "training", "whole command"):
        out.add_column(column, justify="right")
    for run in runs:
        minutes = (clock(run["training_seconds"]), clock(run["seconds"]))
        row = (run["recipe"], run["trained"], str(run["seed"]), str(run["steps"]), shown(run["before"]))
        out.add_row(*row, shown(run["after"]), *minutes)
    return out


def clock(seconds: float) -> str:
    """
    >>> clock(184.6)
    '3:05'
    """
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def main() -> None:
    """Task by task, all weights first; print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--trained", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--steps", type=int, default=None, help="the recipe's unless given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="tasks", help="beginning of the name of the JSON")
    options, flags = parser.parse_known_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in options.recipes:
            for seed in options.seeds:
                for trained in options.trained:
                    here = Path(folder) / recipe / str(seed) / trained.split()[0]
                    common = {"seed": seed, "steps": options.steps, "threads": options.threads}
                    run = train(recipe, here, flags=[*TRAINED[trained], *flags], **common)
                    runs.append({"trained": trained, **run})
                    print(
                        f"{recipe}, {trained}, seed {seed}: {shown(run['before'])} -> {shown(run['after'])}", flush=True
                    )
    console = Console(width=140)
    console.print(table(runs))
    path = save(options.name, {"flags": flags, "threads": options.threads, "runs": runs})
    console.print(f"{hardware()}; written to {path}", highlight=False)


if __name__ == "__main__":
    main()
