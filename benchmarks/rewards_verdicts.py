"""The verdicts of the test of rewards on sixty legitimate functions, many times each, while the machine is busy.

    python -m benchmarks.rewards_verdicts --repetitions 10

Every repetition is made with as many busy processes as given, and with calls that wait at random. All verdicts of a
function must be equal, and none an error. The exit code is 1 where one is not.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.legitimate_rewards import REWARDS, LegitimateReward
from podium.rewards import resolve_rewards
from podium.tester.pretest import pretest

Verdict = tuple[tuple[str, str], ...]
"""Code and severity of each finding."""

LONGEST_WAIT = 0.02
"""Seconds that a call waits at most."""


def waiting(reward: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """The function with a wait of random length before each call."""
    chance = random.Random(seed)
    if inspect.iscoroutinefunction(reward):
        return reward

    @functools.wraps(reward)
    def waits(*args: Any, **kwargs: Any) -> Any:
        time.sleep(chance.uniform(0.0, LONGEST_WAIT))
        return reward(*args, **kwargs)

    return waits


def verdict(each: LegitimateReward, seed: int) -> Verdict:
    """The findings of the test that every training begins with."""
    found = pretest(resolve_rewards([waiting(each.make(), seed)]), [1.0], each.rows()).findings
    return tuple(sorted((finding.code, finding.severity) for finding in found))


def _busy() -> None:
    while True:
        sum(range(10_000))


@contextmanager
def loaded(num_processes: int) -> Iterator[None]:
    """Processes that compute without end, beside the block."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_busy, daemon=True) for _ in range(num_processes)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def main() -> int:
    """Print a line for each function whose verdicts differ or have an error, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--busy", type=int, default=4, help="busy processes")
    given = parser.parse_args()
    differ = errors = warned = 0
    with loaded(given.busy):
        for name, each in REWARDS.items():
            verdicts = {verdict(each, seed) for seed in range(given.repetitions)}
            wrong = any(severity == "error" for each_verdict in verdicts for _, severity in each_verdict)
            differ += len(verdicts) > 1
            errors += wrong
            warned += any(severity == "warning" for each_verdict in verdicts for _, severity in each_verdict)
            if len(verdicts) > 1 or wrong:
                print(f"{name}: {sorted(verdicts)}", flush=True)
    print(f"{len(REWARDS)} functions, {given.repetitions} repetitions each, {given.busy} busy processes")
    print(f"with different verdicts: {differ}; with an error: {errors}; with a warning: {warned}")
    return int(bool(differ or errors))


if __name__ == "__main__":
    sys.exit(main())
