"""Is it better to learn the format first? Two stages against one of as many completions, on three seeds.

    python -m benchmarks.stages
    python -m benchmarks.stages --seeds 1 --steps 2 --eval_rows 4    # to see that it works

Flags that are not its own go to `podium train`.

`format_then_correctness` runs first; `quickstart`, which has the rewards of its second stage and the same settings,
then takes as many optimizer steps as both stages took together, and so as many completions. Compared is the held-out
accuracy at the end, by the same rewards on the same prompts. Each run is a `podium train` in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bench import hardware, save
from podium.runs.run import Run

STAGED, ALONE = "format_then_correctness", "quickstart"


def train(
    recipe: str, folder: Path, *, seed: int, steps: int | None, threads: int, flags: Sequence[str] = ()
) -> dict[str, Any]:
    """What a run used, and its held-out accuracy before and after; `steps` is of each stage, None: the recipe's."""
    command = [sys.executable, "-m", "podium", "train", recipe, "--seed", str(seed), "--output_dir", str(folder)]
    command += [*([] if steps is None else ["--max_steps", str(steps)]), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    run = Run.load(folder)
    return {
        "recipe": recipe,
        "seed": seed,
        "steps": len(run.history),
        "stages": {part.name: part.last_step - part.offset for part in run.parts},
        "completions": len(run.rollouts),
        "before": run.evaluations["before"]["accuracy"],
        "after": run.evaluations["after"]["accuracy"],
        "format_after": run.evaluations["after"]["means"]["answer_format"],
        "training_seconds": float(run.metrics["step_time"].sum()),
        "seconds": seconds,
    }


def table(runs: list[dict[str, Any]]) -> Table:
    """A row for each run, and the difference of the accuracies, pair by pair."""
    out = Table(title="Two stages against one: held-out accuracy with 95 % intervals")
    for column in ("seed", "run", "steps", "completions", "before", "after"):
        out.add_column(column, justify="right")
    for run in runs:
        stages = " + ".join(f"{steps} {name}" for name, steps in run["stages"].items())
        taken = f"{run['steps']}" + (f" ({stages})" if stages else "")
        row = (run["recipe"], taken, f"{run['completions']:,}", shown(run["before"]), shown(run["after"]))
        out.add_row(str(run["seed"]), *row)
    differences = [after - before for before, after in pairs(runs)]
    if differences:
        listed = ", ".join(f"{difference:+.3f}" for difference in differences)
        out.add_row("", "two stages better by", "", "", listed, f"mean {statistics.mean(differences):+.3f}")
    return out


def shown(interval: dict[str, float]) -> str:
    """`0.512 [0.461, 0.563]`."""
    return f"{interval['value']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def pairs(runs: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """By seed: the accuracy with one stage and with two."""
    values = {(run["seed"], run["recipe"]): float(run["after"]["value"]) for run in runs}
    return [(values[seed, ALONE], values[seed, STAGED]) for seed in sorted({seed for seed, _ in values})]


def main() -> None:
    """Two stages, then one, seed by seed; print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=None, help="most steps of each stage; the recipe's unless given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="stages", help="beginning of the name of the JSON")
    options, flags = parser.parse_known_args()
    common = {"threads": options.threads, "flags": flags}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            here = Path(folder) / str(seed)
            staged = train(STAGED, here / STAGED, seed=seed, steps=options.steps, **common)
            alone = train(ALONE, here / ALONE, seed=seed, steps=staged["steps"], **common)
            runs += [staged, alone]
            print(f"seed {seed}: {shown(staged['after'])} in stages, {shown(alone['after'])} in one", flush=True)
    console = Console(width=140)
    console.print(table(runs))
    path = save(options.name, {"flags": flags, "runs": runs})
    console.print(f"{hardware()}; written to {path}", highlight=False)


if __name__ == "__main__":
    main()
