"""The choice of `podium pilot` against every candidate of its grid trained in full, on tasks that no recipe contains.

    python -m benchmarks.pilot                       six tasks: `make bench-pilot`
    python -m benchmarks.pilot dates --steps 6 --grid temperature=0.8,1.2 --grid examples=with
    python -m benchmarks.pilot --replay FOLDER       the table alone, from an earlier run's folder

Times are of processor time on one thread, loading included. Held-out accuracy is measured by `podium eval` afterwards,
and its time is not counted: the pilot never sees held-out rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.bench import save
from benchmarks.own_tasks import TASKS, called, table
from podium.recipe.changes import apply_changes

SIX = ("labels", "spelling", "dates", "choices", "rewriting", "worded-sums")
GRID = ("examples=with,without", "temperature=0.8,1.2", "learning_rate=1e-5,5e-5")
MARGIN, SHARE = 0.05, 0.2
"""Accuracy that the choice may lack, and time that it may take, as a share of that of the whole grid."""

RECIPE = """\
model: builtin:smollm2-135m-instruct
dataset: {table}
prompt: "{{{question}}}"
answer: "{{{answer}}}"
system: {sentence}
held_out: 0.3
rewards: [{{name: exact_match, args: {{ignore_case: true}}}}]
accuracy: exact_match
eval_samples: 4
eval_temperature: 1.0
per_device_train_batch_size: 64
num_generations: 8
max_completion_length: 24
temperature: 1.0
learning_rate: 3e-5
lr_scheduler_type: linear
adam_beta2: 0.99
max_grad_norm: 1.0
max_steps: {steps}
seed: {seed}
logging_steps: 1
save_strategy: "no"
report_to: none
output_dir: runs/{name}
"""


def begin(name: str, folder: Path, *, steps: int, seed: int) -> Path:
    """Table and recipe of a task."""
    task, path = TASKS[name], table(name, folder)
    question, answer = task.columns
    recipe = folder / f"{name}.yaml"
    recipe.write_text(
        RECIPE.format(
            table=path, question=question, answer=answer, sentence=json.dumps(task.sentence), steps=steps, seed=seed,
            name=name,
        )
    )  # fmt: skip
    return recipe


def piloted(recipe: Path, folder: Path, grid: Sequence[str], seconds: float) -> dict[str, Any]:
    """`pilot.json`, with the processor time of the whole command."""
    out = folder / f"{recipe.stem}-pilot"
    flags = [word for axis in grid for word in ("--grid", axis)]
    command = [sys.executable, "-m", "podium", "pilot", str(recipe), *flags, "--budget", str(seconds), "-o", str(out)]
    # exit code 1, where no candidate learns, is a result too
    begun = [sys.executable, "-c", _ANY_CODE, *command]
    spent = called(begun, folder)
    return {**json.loads((out / "pilot.json").read_text()), "recipe": recipe.name, "processor_seconds": spent}


_ANY_CODE = "import subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode; sys.exit(code if code > 1 else 0)"


def trained(recipe: Path, folder: Path, candidate: Mapping[str, Any]) -> dict[str, Any]:
    """One candidate in full: held-out accuracy and processor time."""
    run = folder / f"{recipe.stem}-{candidate['number']}"
    kept = run / "full.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text()))
    own = folder / f"{recipe.stem}-{candidate['number']}.yaml"
    own.write_text(apply_changes(recipe.read_text(), candidate["changes"]))
    podium = [sys.executable, "-m", "podium"]
    spent = called([*podium, "train", str(own), "--no-eval", "--output_dir", str(run)], folder)
    shown = subprocess.run(
        [*podium, "eval", str(run), "--json"],
        capture_output=True, text=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if shown.returncode:
        raise SystemExit(f"podium eval {run} failed:\n{shown.stderr[-2000:]}")
    (run / "model.safetensors").unlink()  # half a gigabyte
    found = {"values": candidate["values"], "processor_seconds": spent, "accuracy": accuracy(json.loads(shown.stdout))}
    kept.write_text(json.dumps({"number": candidate["number"], **found}))
    return {"number": candidate["number"], **found}


def accuracy(printed: Mapping[str, Any]) -> float:
    """The accuracy in the JSON of `podium eval`."""
    return float(printed["accuracy"]["value"])


def summary(name: str, pilot: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of the table."""
    by_number = {run["number"]: run for run in runs}
    chosen, best = by_number[pilot["winner"]], max(runs, key=lambda run: run["accuracy"])
    share = pilot["processor_seconds"] / sum(run["processor_seconds"] for run in runs)
    return {
        "task": name,
        "outcome": pilot["outcome"],
        "chosen": chosen["accuracy"],
        "best": best["accuracy"],
        "median": sorted(run["accuracy"] for run in runs)[len(runs) // 2],
        "expected": pilot["expected"],
        "share": share,
        "candidates": len(runs),
        "good": best["accuracy"] - chosen["accuracy"] <= MARGIN and share <= SHARE,
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of benchmarks/RESULTS.md."""
    lines = [
        "| task | chosen | best of the grid | median | expected | share of the time |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        low_high = "-" if row["expected"] is None else "{:.2f} to {:.2f}".format(*row["expected"])
        shown = (row["task"], *(f"{row[key]:.2f}" for key in ("chosen", "best", "median")), low_high)
        lines.append(f"| {' | '.join(shown)} | {row['share']:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Pilot and full grid of every task, the table, a JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--grid", action="append", help="as of podium pilot; default: " + " ".join(GRID))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, a thread each")
    parser.add_argument("--budget", type=float, default=3600, help="seconds of the pilot: by default it binds nowhere")
    parser.add_argument("--folder", "--replay", type=Path, help="where runs are kept, and taken from if they are there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = (options.folder or Path(made)).resolve()
        folder.mkdir(parents=True, exist_ok=True)

        def pilot_of(name: str) -> dict[str, Any]:
            kept = folder / f"{name}-pilot.json"
            if not kept.is_file():
                recipe = begin(name, folder, steps=options.steps, seed=options.seed)
                kept.write_text(json.dumps(piloted(recipe, folder, options.grid or GRID, options.budget)))
            return dict(json.loads(kept.read_text()))

        def run_of(pair: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
            found = trained(folder / f"{pair[0]}.yaml", folder, pair[1])
            print(
                pair[0], found["values"], f"{found['accuracy']:.3f}", f"{found['processor_seconds']:.0f} s", flush=True
            )
            return {**found, "task": pair[0]}

        names = options.tasks or list(SIX)
        with ThreadPoolExecutor(options.jobs) as pool:
            pilots = dict(zip(names, pool.map(pilot_of, names), strict=True))
            pairs = [(name, each) for name in names for each in pilots[name]["candidates"]]
            runs = list(pool.map(run_of, pairs))
    rows = [summary(name, pilots[name], [run for run in runs if run["task"] == name]) for name in names]
    print(markdown(rows))
    good = sum(row["good"] for row in rows)
    print(f"{good} of {len(rows)} tasks: within {MARGIN} of the best of the grid, in at most {SHARE:.0%} of its time")
    print(save("pilot", {"tasks": rows, "pilots": pilots, "runs": runs}))


if __name__ == "__main__":
    main()
