"""Seconds that commands take which train nothing: `python -m benchmarks.startup`.

Processor seconds (with those of child processes) and seconds of the wall, medians of several runs after one that fills
caches; and the heavy libraries that the command's own process imports. Then `podium check quickstart` beside the bare
imports of the libraries that a check asks, in turns, for processor seconds depend on what else the machine does. Then,
of every verb, seconds until its first line.

`--floor` prints the second table alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

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
CHECK = "podium check quickstart"
LIBRARIES = (
    "import torch",
    "from transformers import PreTrainedTokenizerFast",
    "from transformers import AutoTokenizer",
    "from transformers import TrainingArguments",
    "from trl import GRPOConfig",
)
"""What a check cannot do without: each line imports about all of the line before. TRL's configuration class refuses
settings, and is one of transformers; the tokenizer measures prompts."""
COMPILED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""The environment of a measured process: Podium's modules are compiled on the first run, as those of an installation
are."""
_CODE = f"""
import atexit, sys
atexit.register(lambda: print(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr))
from podium.cli import main
main()
"""


class Measured(NamedTuple):
    """One run of a process."""

    processor_seconds: float
    wall_seconds: float
    imported: str
    """The heavy libraries, of a command."""


def measure(code: str, *words: str) -> Measured:
    """One run of Python code with command-line words."""
    before = os.times()
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        env=COMPILED,
    )
    wall = time.perf_counter() - start
    after = os.times()
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    return Measured(user + system, wall, "".join(done.stderr.splitlines()[-1:]))


def print_commands(runs: int) -> None:
    """Print seconds and imports of commands that train nothing."""
    print("| command | processor s | wall s | imports |\n|---|---|---|---|")
    for words in COMMANDS:
        _, *measured = [measure(_CODE, *words) for _ in range(runs + 1)]
        processor = statistics.median(each.processor_seconds for each in measured)
        wall = statistics.median(each.wall_seconds for each in measured)
        imported = measured[0].imported or "none"
        print(f"| `podium {' '.join(words)}` | {processor:.2f} | {wall:.2f} | {imported} |", flush=True)


def print_floor(runs: int) -> None:
    """Print processor seconds of a check and of the bare imports of its libraries, measured in turns."""
    seconds: dict[str, list[float]] = {}
    for _ in range(runs + 1):
        seconds.setdefault(CHECK, []).append(measure(_CODE, "check", "quickstart").processor_seconds)
        for line in LIBRARIES:
            seconds.setdefault(line, []).append(measure(line).processor_seconds)
    print("| program | processor s, median | least |\n|---|---|---|")
    for name, (_, *spent) in seconds.items():
        print(f"| `{name}` | {statistics.median(spent):.2f} | {min(spent):.2f} |", flush=True)


def print_first_lines(runs: int) -> None:
    """Print seconds until the first line of every verb."""
    print("| verb | first line after s | first line |\n|---|---|---|")
    for words in FIRST_LINES:
        found = [first_line(words) for _ in range(runs + 1)][1:]
        seconds = statistics.median(each for each, _ in found)
        print(f"| `podium {' '.join(words)}` | {seconds:.2f} | {found[0][1]} |", flush=True)


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
        env=COMPILED,
    ) as run:
        assert run.stdout is not None
        line = run.stdout.readline()
        seconds = time.perf_counter() - start
        os.killpg(run.pid, signal.SIGKILL)
    return seconds, line.strip()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--floor", action="store_true", help="a check beside the imports of its libraries, alone")
    asked = parser.parse_args()
    if asked.floor:
        print_floor(asked.runs)
        return
    print_commands(asked.runs)
    print()
    print_floor(asked.runs)
    print()
    print_first_lines(asked.runs)


if __name__ == "__main__":
    main()
