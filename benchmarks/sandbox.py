"""How long a sandbox takes: start, one test, ten, fifty, and 64 programs at once. `python -m benchmarks.sandbox`"""

from __future__ import annotations

import functools
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from podium.isolation.sandbox import BackendName, choose, passed, probe, run_program
from podium.rewards import CodeTests

PROGRAM = "n = int(input())\nprint(sum(i * i for i in range(n)))"
ROUNDS = 15
BACKENDS: tuple[BackendName, ...] = ("bubblewrap", "landlock", "none")


def median_ms(function: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Of `rounds` calls after one that is not counted."""
    function()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


def tests(count: int) -> list[dict[str, str]]:
    """Tests that `PROGRAM` passes."""
    return [{"stdin": f"{n}\n", "stdout": f"{sum(i * i for i in range(n))}\n"} for n in range(count)]


def processor() -> str:
    """Its name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def measure(backend: BackendName) -> None:
    """One line per number of tests, and one for a batch of programs."""
    for count in (1, 10, 50):
        some = tests(count)
        assert all(map(passed, some, run_program(PROGRAM, some, backend=backend)))
        taken = median_ms(functools.partial(run_program, PROGRAM, some, backend=backend))
        print(f"{backend:<11} {count:>3} tests in one sandbox {taken:8.1f} ms")
    reward = CodeTests(extract="raw", sandbox=backend)
    taken = median_ms(functools.partial(reward, [PROGRAM] * 64, tests=[tests(5)] * 64), rounds=3)
    print(f"{backend:<11} 64 programs of 5 tests {taken:8.1f} ms")


def main() -> None:
    """Every back end that works here."""
    print(f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}")
    print(f"load {os.getloadavg()[0]:.1f}; auto is {choose()}; medians of {ROUNDS}")
    for backend in BACKENDS:
        if backend != "none" and (complaint := probe(backend)):
            print(f"{backend}: not here: {complaint}")
        else:
            measure(backend)


if __name__ == "__main__":
    main()
