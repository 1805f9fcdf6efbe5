"""Formulas compared by math-verify in processes that can be killed.

    verdicts = compare([Formula(gold=r"\\frac{1}{3}", text=r"\\boxed{1/3}")], timeout_seconds=5)

Computer algebra on a model's text may run for ever, in C code that no alarm in Python ends, and an alarm works in the
main thread only. So every formula is given to a worker process; one that is not done in time is killed, a new one takes
its place, and the rest goes on. Processes stay for the next round. Knows processes and clocks, nothing of rewards.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podium.errors import ConfigError, RewardError
from podium.isolation.machine import cores

MAX_WORKERS = 4
START_SECONDS = 60.0
"""A worker imports sympy before its first formula."""
PATIENCE_SECONDS = 20.0
"""Once formulas of one call have run into the limit for so long together, the limit falls to a fifth."""

_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")
"""What a worker is told of the environment: no tokens, no keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """One comparison."""

    gold: str
    """The right answer."""
    text: str
    r"""Where the answer stands, as LaTeX between dollars or in `\boxed{}`."""
    repairs: bool = False
    r"""Whether `\frac12` and `\sqrt2` are read as LaTeX reads them; TRL's rewards do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a comparison."""

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
    distinct = list(dict.fromkeys(formulas))
    verdicts = dict(zip(distinct, _pool(os.getpid()).run(distinct, timeout_seconds), strict=True)) if distinct else {}
    return [verdicts[formula] for formula in formulas]


@functools.cache
def _pool(process_id: int) -> _Pool:
    """One for each process: a forked child must not read what its parent's workers say."""
    pool = _Pool(num_workers=min(MAX_WORKERS, cores()), process_id=process_id)
    atexit.register(pool.close)
    return pool


class _Worker:
    """One process with the formula it has in hand."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("math_worker.py")
        # By path, and with the folder of the script kept off the path: its neighbours have names of other modules.
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # an interrupt at the keyboard is for the run, not for them
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.deadline = time.monotonic() + START_SECONDS
        self.task: int | None = None
        self.gold: str | None = None
        """As the worker read it; None where it is still at it."""
        self.ready = False
        self._unread = b""

    def give(self, task: int, formula: Formula, timeout_seconds: float) -> None:
        self.task, self.gold, self.ready = task, None, False
        self.deadline = time.monotonic() + timeout_seconds
        message = {**dataclasses.asdict(formula), "timeout_seconds": timeout_seconds}
        self.stdin.write(json.dumps(message).encode() + b"\n")
        self.stdin.flush()

    def replies(self) -> list[dict[str, Any]] | None:
        """The messages that have come; None where the process has ended. Called only where there is something."""
        chunk = os.read(self.stdout.fileno(), 1 << 16)
        if not chunk:
            return None
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.stdout.close()
        with contextlib.suppress(OSError):  # it was gone with something still to be read
            self.stdin.close()


@dataclass(slots=True, kw_only=True)
class _Round:
    """The formulas of one call, and what has become of them."""

    formulas: Sequence[Formula]
    timeout_seconds: float
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    lost_seconds: float = 0.0
    bad_golds: set[str] = field(default_factory=set)

    def limit(self) -> float:
        return self.timeout_seconds if self.lost_seconds < PATIENCE_SECONDS else self.timeout_seconds / 5

    def next_task(self) -> int | None:
        """The next formula whose gold is not known to be unreadable: that one is not tried again and again."""
        while self.waiting:
            task = self.waiting.popleft()
            if self.formulas[task].gold not in self.bad_golds:
                return task
            self.verdicts[task] = Verdict(correct=None, timed_out=True)
        return None

    def lost(self, worker: _Worker) -> None:
        """A worker died, or had to be killed: whose fault it was is seen from how far it had come."""
        assert worker.task is not None
        at_answer = worker.gold is not None
        self.verdicts[worker.task] = Verdict(
            correct=False if at_answer else None, gold=worker.gold or "", timed_out=True
        )
        if not at_answer:
            self.bad_golds.add(self.formulas[worker.task].gold)

    def heard(self, worker: _Worker, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            worker.ready = True
        elif "correct" in message:
            assert worker.task is not None
            self._decide(worker, Verdict(correct=message["correct"], gold=worker.gold or "", answer=message["answer"]))
        elif message["gold"]:
            worker.gold, worker.deadline = message["gold"], time.monotonic() + self.limit()
        else:
            self._decide(worker, Verdict(correct=None))

    def _decide(self, worker: _Worker, verdict: Verdict) -> None:
        assert worker.task is not None
        self.verdicts[worker.task] = verdict
        worker.task, worker.ready = None, True


class _Pool:
    """Workers, started when they are first needed."""

    def __init__(self, *, num_workers: int, process_id: int) -> None:
        self.num_workers = num_workers
        self.process_id = process_id
        self.workers: list[_Worker] = []
        self._lock = threading.Lock()

    def run(self, formulas: Sequence[Formula], timeout_seconds: float) -> list[Verdict]:
        with self._lock:
            work = _Round(formulas=formulas, timeout_seconds=timeout_seconds, waiting=deque(range(len(formulas))))
            try:
                while len(work.verdicts) < len(formulas):
                    self._hire(work)
                    self._hand_out(work)
                    self._listen(work)
            except BaseException:  # interrupted: what they have in hand is nobody's any more
                self.close()
                raise
            return [work.verdicts[index] for index in range(len(formulas))]

    def close(self) -> None:
        if os.getpid() == self.process_id:
            while self.workers:
                self.workers.pop().kill()

    def _hire(self, work: _Round) -> None:
        busy = sum(worker.task is not None for worker in self.workers)
        wanted = min(self.num_workers, busy + len(work.waiting))
        while len(self.workers) < wanted:
            self.workers.append(_Worker())

    def _hand_out(self, work: _Round) -> None:
        for worker in [each for each in self.workers if each.ready]:
            task = work.next_task()
            if task is None:
                return
            try:
                worker.give(task, work.formulas[task], work.limit())
            except OSError:  # it died while it had nothing to do
                worker.task = None
                work.waiting.appendleft(task)
                self._dismiss(worker)

    def _listen(self, work: _Round) -> None:
        """Waits for the next word of any worker, and ends those whose time is over."""
        watched = [worker for worker in self.workers if not worker.ready]
        if not watched:
            return
        with selectors.DefaultSelector() as selector:
            for worker in watched:
                selector.register(worker.stdout, selectors.EVENT_READ, worker)
            first = min(worker.deadline for worker in watched)
            for key, _ in selector.select(max(0.0, first - time.monotonic())):
                self._hear(key.data, work)
        for worker in [each for each in watched if each in self.workers]:
            if not worker.ready and time.monotonic() > worker.deadline:
                work.lost_seconds += work.limit()
                self._end(worker, work)

    def _hear(self, worker: _Worker, work: _Round) -> None:
        messages = worker.replies()
        if messages is None:
            self._end(worker, work)
        for message in messages or ():
            work.heard(worker, message)

    def _end(self, worker: _Worker, work: _Round) -> None:
        self._dismiss(worker)
        if worker.task is None:
            raise RewardError("the process that compares formulas does not start: try `python -c 'import math_verify'`")
        work.lost(worker)

    def _dismiss(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        worker.kill()
