"""Seconds that commands take which train nothing: `python -m benchmarks.startup`.

Processor seconds (with those of child processes) and seconds of the wall, medians of several runs after one that fills
caches; and the heavy libraries that the command's own process imports. Then, of every verb,
seconds until its first line.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time

COMMANDS = (
    ("--help",),
    ("recipes",),
    ("explain", "C010"),
    ("explain", "learning_rate"),
    ("rewards", "test", "quickstart"),
    ("check", "quickstart"),
)
FIRST_LINES = (
    *(("check", "quickstart"), ("train", "quickstart"), ("sample", "quickstart")),
    *(("eval", "MODEL", "--recipe", "quickstart"), ("compare", "MODEL", "MODEL", "--recipe", "quickstart")),
    *(("chat", "MODEL"), ("serve", "MODEL"), ("tinker", "MODEL"), ("push", "MODEL", "--repo", "a/b", "--dry-run")),
    *(("init", "examples/questions.csv", "--to", "FOLDER", "--yes"), ("cure", "quickstart", "--dry-run")),
    *(("doctor", "FOLDER"), ("report", "FOLDER"), ("watch", "FOLDER"), ("merge", "FOLDER", "--out", "merged")),
    *(("rewards", "test", "quickstart"), ("environments", "test", "quickstart"), ("agents", "test", "quickstart")),
    *(("recipes",), ("explain", "C010"), ("rewards", "list")),
)
"""Every verb; MODEL is the built-in one, FOLDER a name that is free."""
HEAVY = ("torch", "trl", "transformers", "peft", "scipy", "sympy", "datasets")
_CODE = f"""
import atexit, sys
atexit.register(lambda: print(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr))
from podium.cli import main
main()
"""


def measure(words: tuple[str, ...]) -> tuple[float, float, str]:
    """Processor and wall seconds of one run, and what it imported."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True
    )
    wall, after = time.perf_counter() - start, os.times()
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    return spent, wall, done.stderr.splitlines()[-1]


def first_line(words: tuple[str, ...]) -> tuple[float, str]:
    """Seconds until the first line of a verb, which is ended then, and the line."""
    named = {"MODEL": "builtin:smollm2-135m-instruct", "FOLDER": "a-folder-that-is-not-there"}
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "podium", *(named.get(word, word) for word in words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        line = run.stdout.readline()
        seconds = time.perf_counter() - start
        os.killpg(run.pid, signal.SIGKILL)
    return seconds, line.strip()


def main() -> None:
    """Print a table of all commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    print("| command | processor s | wall s | imports |\n|---|---|---|---|")
    for words in COMMANDS:
        _, *measured = [measure(words) for _ in range(runs + 1)]
        spent, wall = (statistics.median(each[index] for each in measured) for index in (0, 1))
        print(f"| `podium {' '.join(words)}` | {spent:.2f} | {wall:.2f} | {measured[0][2] or 'none'} |", flush=True)
    print("\n| verb | first line after s | first line |\n|---|---|---|")
    for words in FIRST_LINES:
        found = [first_line(words) for _ in range(runs + 1)][1:]
        seconds = statistics.median(each for each, _ in found)
        print(f"| `podium {' '.join(words)}` | {seconds:.2f} | {found[0][1]} |", flush=True)


if __name__ == "__main__":
    main()
