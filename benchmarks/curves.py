"""Does bfloat16 learn as float32 does? The quickstart in both precisions on three seeds: `make bench-curves`.

Each run is `podium train quickstart` in a process of its own; compared are the mean reward by windows of steps and the
held-out accuracy at the end. Same seed, same prompts, same random numbers; only the rounding of products differs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bench import hardware, save
from podium.runs.run import Run

PRECISIONS = ("bfloat16", "float32")
WINDOW = 9


def train(folder: Path, *, seed: int, precision: str, steps: int) -> dict[str, Any]:
    """The reward of every step, and the held-out accuracy afterwards; on one thread."""
    command = [sys.executable, "-m", "podium", "train", "quickstart", "--seed", str(seed), "--max_steps", str(steps)]
    command += ["--product_precision", precision, "--output_dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    run = Run.load(folder)
    after = run.evaluations["after"]
    return {"seed": seed, "precision": precision, "reward": run.metrics["reward"].tolist(), "after": after}


def windows(rewards: list[float]) -> list[float]:
    """Mean reward of each `WINDOW` steps."""
    return [statistics.mean(rewards[i : i + WINDOW]) for i in range(0, len(rewards) - WINDOW + 1, WINDOW)]


def table(runs: list[dict[str, Any]], steps: int) -> Table:
    """A row for each run, and the mean difference between the precisions."""
    out = Table(title=f"quickstart, {steps} steps: mean reward by {WINDOW} steps, held-out accuracy after")
    starts = range(1, steps - WINDOW + 2, WINDOW)
    for column in ("seed", "products", *(f"{s}-{s + WINDOW - 1}" for s in starts), "held out"):
        out.add_column(column, justify="right")
    rows = {(run["seed"], run["precision"]): [*windows(run["reward"]), accuracy(run)] for run in runs}
    for (seed, precision), values in rows.items():
        out.add_row(str(seed), precision, *(f"{value:.2f}" for value in values))
    seeds = sorted({run["seed"] for run in runs})
    pairs = [
        [a - b for a, b in zip(rows[seed, "bfloat16"], rows[seed, "float32"], strict=True)]
        for seed in seeds
        if (seed, "float32") in rows and (seed, "bfloat16") in rows
    ]
    if pairs:
        out.add_row("mean", "difference", *(f"{statistics.mean(column):+.2f}" for column in zip(*pairs, strict=True)))
    return out


def accuracy(run: dict[str, Any]) -> float:
    """Held out, after training."""
    return float(run["after"]["accuracy"]["value"])


def main() -> None:
    """Every seed in both precisions, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, a thread each")
    options = parser.parse_args()

    def one(pair: tuple[int, str]) -> dict[str, Any]:
        seed, precision = pair
        found = train(Path(folder) / f"{precision}-{seed}", seed=seed, precision=precision, steps=options.steps)
        print(f"seed {seed}, {precision}: {[round(x, 2) for x in windows(found['reward'])]}", flush=True)
        return found

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(one, itertools.product(options.seeds, reversed(PRECISIONS))))  # the slow ones first
    console = Console(width=120)
    console.print(table(runs, options.steps))
    path = save("curves", {"steps": options.steps, "runs": runs})
    console.print(f"{hardware()}; written to {path.relative_to(Path.cwd())}", highlight=False)


if __name__ == "__main__":
    main()
