"""Stretches time, for `python -m benchmarks.healthy --clock`: everything seems to take a factor longer than it does."""

import os
import time
from collections.abc import Callable

FACTOR = float(os.environ.get("PODIUM_BENCHMARK_CLOCK", "1"))


def stretched(clock: Callable[[], float]) -> Callable[[], float]:
    """The clock, running faster by the factor from now on."""
    start = clock()
    return lambda: start + FACTOR * (clock() - start)


for _name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
    setattr(time, _name, stretched(getattr(time, _name)))
