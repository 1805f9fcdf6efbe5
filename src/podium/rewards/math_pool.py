"""Formulas compared by math-verify in processes that can be killed.

    verdicts = compare([Formula(gold=r"\\frac{1}{3}", text=r"\\boxed{1/3}")], timeout_seconds=5)

Computer algebra on a model's text may run for ever, in C code that no alarm in Python ends, and an alarm works in the
main thread only. So every formula is given to a worker process; one that is not done in time is killed, a new one takes
its place, and the rest goes on. Processes stay for the next round.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from podium.errors import ConfigError, RewardError
from podium.isolation.machine import cores
from podium.isolation.workers.process import Lost, Pool, Worker, pool_of

MAX_WORKERS = 4
START_SECONDS = 60.0
"""A worker imports sympy before its first formula."""
SLOW_SECONDS = 20.0
"""Once formulas of one call have run into the limit for so long together, the limit falls to a fifth."""

_MAKE = functools.partial(Worker, target=f"{Path(__file__).with_name('math_worker.py')}:answer", output="dropped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """One comparison."""

    gold: str
    """The right answer."""
    text: str
    r"""The text with the answer, as LaTeX between dollars or in `\boxed{}`."""
    repairs: bool = False
    r"""Whether `\frac12` and `\sqrt2` are read as LaTeX reads them; TRL's rewards do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a comparison."""

    correct: bool | None
    """None: the gold could not be read, or not in time."""
    gold: str = ""
    answer: str = ""
    """As they were understood, for a table; empty where they were not."""
    timed_out: bool = False


def compare(formulas: Sequence[Formula], *, timeout_seconds: float = 5.0) -> list[Verdict]:
    """One verdict for each formula, in their order. An answer that takes longer, or takes all memory, is not correct.

    Raises `ConfigError` where math-verify is not installed, `RewardError` where no worker can be started.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("comparing formulas needs math-verify: pip install 'podium[math]'")
    work = _Comparisons(timeout_seconds=timeout_seconds, waiting=deque(dict.fromkeys(formulas)))
    pool = _pool(os.getpid())
    with pool.lock:
        work.share_out(pool.take(min(MAX_WORKERS, cores(), len(work.waiting))))
    return [work.verdicts[formula] for formula in formulas]


@functools.cache
def _pool(process_id: int) -> Pool[Worker]:
    """Held for good; a forked child has its own."""
    return pool_of(("formulas",), _MAKE)


@dataclass(slots=True, kw_only=True)
class _Comparisons:
    """The distinct formulas of one call, and their verdicts so far."""

    timeout_seconds: float
    waiting: deque[Formula]
    verdicts: dict[Formula, Verdict] = field(default_factory=dict)
    lost_seconds: float = 0.0
    bad_golds: set[str] = field(default_factory=set)
    """Golds that ended a worker: they are not tried again."""

    def share_out(self, workers: Sequence[Worker]) -> None:
        """Every worker takes the next formula that waits, until none does. An interrupt ends the workers."""
        for worker in workers:  # here, since a worker may end with the thread that starts it
            worker.start()
        with ThreadPoolExecutor(max(1, len(workers))) as threads:
            try:
                list(threads.map(self._work, workers))
            except BaseException:
                self.waiting.clear()
                for worker in workers:
                    worker.end()
                raise

    def _work(self, worker: Worker) -> None:
        is_ready = False
        while self.waiting:
            if not (is_ready and worker.alive) and isinstance(worker.ask(None, START_SECONDS), Lost):
                fix = "try `python -c 'import math_verify'`"
                raise RewardError(f"the process that compares formulas does not start: {fix}")
            is_ready = True
            try:
                formula = self.waiting.popleft()
            except IndexError:  # another thread was faster
                return
            is_bad = formula.gold in self.bad_golds
            self.verdicts[formula] = Verdict(correct=None, timed_out=True) if is_bad else self._compare(worker, formula)

    def _compare(self, worker: Worker, formula: Formula) -> Verdict:
        """The worker first replies how it read the gold, then how the answer compares; each has its time."""
        limit = self.timeout_seconds if self.lost_seconds < SLOW_SECONDS else self.timeout_seconds / 5
        request = {**dataclasses.asdict(formula), "timeout_seconds": limit}
        gold = worker.ask(request, limit)
        if isinstance(gold, Lost):
            self.lost_seconds += limit * gold.is_overrun
            self.bad_golds.add(formula.gold)
            return Verdict(correct=None, timed_out=True)
        if not gold["gold"]:
            return Verdict(correct=None)
        answer = worker.reply(time.monotonic() + limit)
        if isinstance(answer, Lost):
            self.lost_seconds += limit * answer.is_overrun
            return Verdict(correct=False, gold=gold["gold"], timed_out=True)
        return Verdict(correct=answer["correct"], gold=gold["gold"], answer=answer["answer"])
