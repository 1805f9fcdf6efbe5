"""Compare two commits on this machine: features, weights after some steps, start of the program, seconds a step.

    python -m benchmarks.commits 008a8bf                 against the last commit
    python -m benchmarks.commits 008a8bf --rounds 0      without the timings
    python -m benchmarks.commits 008a8bf --workloads W1 W2 W3 W4 W5 --rounds 1 --steps 3
    python -m benchmarks.commits 008a8bf --only-weights      twenty steps in each way that a step can go

Each commit is checked out into a folder of its own and runs with the packages of this environment; workloads run in
float32. A restructuring must leave the list of features and the weights as they were, and cost no time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from difflib import unified_diff
from pathlib import Path
from typing import NamedTuple

from benchmarks.bench import processor
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]


def git(*words: str) -> str:
    """Output of a git command in this repository."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def python(checkout: Path, *words: str, **environment: str) -> str:
    """Output of Python with the packages of this environment and `podium` of the checkout."""
    surroundings = {**os.environ, "PYTHONPATH": f"{checkout}/src:{checkout}", "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run([sys.executable, *words], cwd=checkout, env=surroundings, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{checkout.name}: python {' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def weights_after_three_steps(checkout: Path) -> str:
    """SHA-256 of the quickstart's weights after three steps."""
    out = checkout / "runs" / "three"
    python(checkout, "-m", "podium", "train", "quickstart", f"--output_dir={out}", "--max_steps=3", "--no-eval")
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def seconds_to_start(checkout: Path, *words: str, repeats: int = 5) -> float:
    """Median wall-clock seconds of a command, the first one left out."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        python(checkout, *words)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def weights_of_runs(checkout: Path, *names: str, processes: int = 1) -> dict[str, str]:
    """SHA-256 of the weights of the runs of `benchmarks.weights`: `podium` of the checkout, the runs of this one."""
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", str(processes)) if processes > 1 else ()
    path = f"{checkout}/src:{ROOT}"
    words = (*launcher, "-m", "benchmarks.weights", *names)
    found: dict[str, str] = json.loads(python(ROOT, *words, OMP_NUM_THREADS="1", PYTHONPATH=path).splitlines()[-1])
    return found


def compare_runs(before: Path, after: Path) -> None:
    """Print whether the weights of each run are the same, on one process and on two."""
    for names, processes in ((), 1), (("plain", "reference"), 2):
        pair = [weights_of_runs(checkout, *names, processes=processes) for checkout in (before, after)]
        for name, first in pair[0].items():
            same = "bit-equal" if first == pair[1][name] else "DIFFERENT"
            print(f"{name} on {processes}: {same} {first[:12]} {pair[1][name][:12]}", flush=True)


class Measured(NamedTuple):
    """One run of a workload of `benchmarks.bench`."""

    seconds: float
    """Median of an optimizer step."""
    weights: str
    """SHA-256 of the trained parameters after the last step."""


def measured(checkout: Path, workload: str, steps: int) -> Measured:
    """A run of a workload: `podium` of the checkout, the worker of this one, so that both are measured alike."""
    words = ("benchmarks.worker", "podium", workload, "--precision", "float32", "--steps", str(steps))
    path = f"{checkout}/src:{ROOT}"
    lines = python(ROOT, "-m", *words, TOKENIZERS_PARALLELISM="false", PYTHONPATH=path).splitlines()
    output = json.loads(lines[-1])
    return Measured(float(output["seconds"]["step"]), str(output["weights"]))


def main() -> None:
    """Print what differs, and the timings of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", default="HEAD")
    parser.add_argument("--rounds", type=int, default=3, help="alternating measurements of each workload")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["W1", "W4"])
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps, of which the median counts")
    parser.add_argument("--only-weights", action="store_true", help="of the runs of benchmarks.weights")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkouts = [Path(folder) / name for name in ("before", "after")]
        for checkout, commit in zip(checkouts, (asked.before, asked.after), strict=True):
            git("worktree", "add", "--detach", str(checkout), commit)
        try:
            compare_runs(*checkouts)
            if asked.only_weights:
                return
            compare(*checkouts)
            for workload in asked.workloads if asked.rounds else ():
                compare_seconds(workload, *checkouts, rounds=asked.rounds, steps=asked.steps)
        finally:
            for checkout in checkouts:
                git("worktree", "remove", "--force", str(checkout))


def compare(before: Path, after: Path) -> None:
    """Print each comparison as it is made."""
    print(f"{processor()}; {git('-C', str(before), 'rev-parse', '--short', 'HEAD')} (before) and "
          f"{git('-C', str(after), 'rev-parse', '--short', 'HEAD')} (after)")  # fmt: skip
    lists = [python(checkout, "-m", "tests.features").splitlines() for checkout in (before, after)]
    changes = [line for line in unified_diff(*lists, "before", "after", n=0, lineterm="") if line[:2] != "@@"]
    print(f"features: {len(lists[0])} before, {len(lists[1])} after", *changes, sep="\n")
    digests = [weights_after_three_steps(checkout) for checkout in (before, after)]
    print(f"weights after three steps: {'bit-equal' if digests[0] == digests[1] else 'DIFFERENT'}", *digests, sep="\n")
    for words in (("-c", "import podium"), ("-m", "podium", "--help")):
        seconds = [seconds_to_start(checkout, *words) for checkout in (before, after)]
        print(f"python {' '.join(words)}: {seconds[0]:.2f} s before, {seconds[1]:.2f} s after")


def compare_seconds(workload: str, before: Path, after: Path, *, rounds: int, steps: int) -> None:
    """Print the seconds of a step of both, measured in turn."""
    pairs = [[measured(checkout, workload, steps) for checkout in (before, after)] for _ in range(rounds)]
    first, second = (statistics.median(run.seconds for run in runs) for runs in zip(*pairs, strict=True))
    ratios = sorted(after.seconds / before.seconds for before, after in pairs)
    digests = {run.weights for pair in pairs for run in pair}
    print(f"{workload}: weights {'bit-equal' if len(digests) == 1 else 'DIFFERENT'}", *sorted(digests))
    print(f"{workload}: {first:.2f} s a step before, {second:.2f} s after; median of {rounds} ratios "
          f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
