"""The recipes with several turns on three seeds: `make bench-agent-recipes`; those of programs: `make bench-programs`.

    python -m benchmarks.agent_recipes                            # guess, guess-15, calculator, lookup; seeds 1 to 3
    python -m benchmarks.agent_recipes guess --seeds 1
    python -m benchmarks.agent_recipes --programs                 # the examples with `agent:`, and one agent both ways
    python -m benchmarks.agent_recipes --folder DIR --threads 1 --jobs 2   # two at a time: weights, but no fair times

Each run is `podium train RECIPE` in a process of its own; what is in the folder is not repeated. "calculator, program"
is the recipe `calculator` whose tool is offered and run by a program behind the endpoint. The table has held-out
accuracy before and after with 95 % intervals, and the seconds of the whole command; the pictures
(`docs/images/agents.svg`, `programs.svg`) the accuracy of every step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from benchmarks.bench import hardware, save
from benchmarks.charts import COLOURS, Line, line_chart
from podium.recipe.document import open_document
from podium.runs.run import Run

GOALS: Mapping[str, tuple[float, float]] = {
    "guess": (0.43, 0.80),
    "guess-15": (0.27, 0.60),
    "calculator": (0.05, 0.80),
    "lookup": (0.05, 0.80),
}
"""Accuracy that can be had without feedback or tools, and the accuracy to reach."""
PROGRAMS: Mapping[str, tuple[float, float]] = {
    "agent_sdk": (0.5, 0.65),
    "agent_smol": (0.56, 0.80),
    "agent_planner": (0.13, 0.80),
    "agent_code": (0.50, 0.70),
    "calculator, program": (0.05, 0.80),
}
"""The same of the recipes under `examples/`, whose agents are programs."""
ROOT = Path(__file__).parents[1]
PICTURES = {"agent-recipes": "agents.svg", "programs": "programs.svg"}
WINDOW = 5
"""Steps over which the accuracy in the picture is averaged."""


def path_of(recipe: str, folder: Path) -> str:
    """What `podium train` is given: a name, a file among the examples, or the calculator as a program."""
    if recipe in GOALS:
        return recipe
    if recipe != "calculator, program":
        return str(ROOT / "examples" / f"{recipe}.yaml")
    own = {"agent": f"{ROOT / 'benchmarks' / 'programs' / 'calculator.py'}:run", "chat": True, "max_turns": 2}
    given = open_document("calculator").values
    rest = {name: value for name, value in given.items() if name not in ("tools", "max_tool_calling_iterations")}
    path = folder / "calculator-program.yaml"
    path.write_text(yaml.safe_dump({**rest, **own}, sort_keys=False))
    return str(path)


def train(recipe: str, seed: int, folder: Path, threads: int) -> dict[str, Any]:
    """One run; a run that is in the folder is not repeated."""
    slug = recipe.replace(", ", "-")
    run, kept = folder / f"{slug}-{seed}", folder / f"{slug}-{seed}.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text()))
    given = path_of(recipe, folder)
    command = [sys.executable, "-m", "podium", "train", given, "--seed", str(seed), "--output_dir", str(run)]
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    loaded = Run.load(run)
    found = {
        "recipe": recipe,
        "seed": seed,
        "seconds": round(seconds),
        "steps": len(loaded.history),
        **{moment: loaded.evaluations[moment]["accuracy"] for moment in ("before", "after")},
        "completions": loaded.evaluations["after"]["num_completions"],
        "curve": [round(each.values["accuracy"], 3) for each in loaded.history if "accuracy" in each.values],
        "findings": sorted(set(loaded.findings["code"])),
    }
    (run / "model.safetensors").unlink(missing_ok=True)  # half a gigabyte
    kept.write_text(json.dumps(found))
    return found


def markdown(runs: Sequence[Mapping[str, Any]]) -> str:
    """The table of benchmarks/RESULTS.md."""
    lines = ["| recipe | seed | before | after | completions | steps | seconds |", "|---|---|---|---|---|---|---|"]
    for run in runs:
        before, after = ("{value:.2f} [{low:.2f}, {high:.2f}]".format(**run[moment]) for moment in ("before", "after"))
        shown = (run["recipe"], run["seed"], before, after, run["completions"], run["steps"], run["seconds"])
        lines.append(f"| {' | '.join(map(str, shown))} |")
    return "\n".join(lines)


def reached(recipe: str, runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every seed reaches the goal of its recipe."""
    goal = {**GOALS, **PROGRAMS}[recipe][1]
    return all(run["after"]["value"] >= goal for run in runs if run["recipe"] == recipe)


def picture(runs: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy against steps as SVG: a line for each run, a colour for each recipe."""
    recipes = list(dict.fromkeys(run["recipe"] for run in runs))
    lines = []
    for run in runs:
        curve, colour = run["curve"], COLOURS[recipes.index(run["recipe"]) % len(COLOURS)]
        parts = [curve[max(0, i - WINDOW + 1) : i + 1] for i in range(len(curve))]
        means = [(i, sum(part) / len(part)) for i, part in enumerate(parts, 1)]
        lines.append(Line(name=run["recipe"], colour=colour, points=means))
    steps = range(0, max(len(run["curve"]) for run in runs) + 10, 10)
    return line_chart(
        lines, x_ticks=steps, y_ticks=(0, 0.25, 0.5, 0.75, 1), x_title="optimizer step", y_format="{:.2f}"
    )


def main() -> None:
    """Every recipe with every seed, the table, the picture, a JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=", ".join(GOALS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each run")
    parser.add_argument("--folder", type=Path, help="where runs are kept, and not repeated; else a temporary one")
    parser.add_argument("--programs", action="store_true", help=f"instead of these {', '.join(PROGRAMS)}")
    options = parser.parse_args()
    goals, name = (PROGRAMS, "programs") if options.programs else (GOALS, "agent-recipes")
    recipes = options.recipes or list(goals)
    with tempfile.TemporaryDirectory() as made:
        folder = (options.folder or Path(made)).resolve()
        folder.mkdir(parents=True, exist_ok=True)

        def one(pair: tuple[str, int]) -> dict[str, Any]:
            found = train(*pair, folder, options.threads)
            before, after = found["before"]["value"], found["after"]["value"]
            print(*pair, f"{before:.3f} -> {after:.3f}, {found['seconds']} s", flush=True)
            return found

        with ThreadPoolExecutor(options.jobs) as pool:
            runs = list(pool.map(one, itertools.product(recipes, options.seeds)))
    print(markdown(runs))
    for recipe in recipes:
        print(f"{recipe}: {'reached' if reached(recipe, runs) else 'did not reach'} {goals[recipe][1]:.2f}")
    print(hardware(), save(name, {"runs": runs}))
    if set(recipes) == set(goals):
        (ROOT / "docs" / "images" / PICTURES[name]).write_text(picture(runs))


if __name__ == "__main__":
    main()
