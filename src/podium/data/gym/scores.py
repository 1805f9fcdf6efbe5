"""reasoning-gym's own scorers, in a sandbox.

Some of these scorers evaluate the model's text as Python. So they run where code runs: one worker per core and task
imports reasoning-gym once, inside the sandbox, and forks for every answer. What it evaluates is held to literals and
formulas besides, since a scorer holds the answer and an expression could look it up.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podium.errors import RewardError
from podium.isolation.machine import cores
from podium.isolation.sandbox import BackendName, Extras, Limits, Result, Sandbox, SandboxFault
from podium.isolation.workers.process import pool_of

_SCORER = Path(__file__).with_name("inside.py")


@dataclass(frozen=True, kw_only=True)
class GymScorer:
    """`score_answer` of the named dataset. Limits are those of the reward `reasoning_gym`."""

    dataset: str
    backend: BackendName
    timeout: int = 2
    memory_megabytes: int = 2048
    workers: int | None = None
    call_seconds: float = 45.0
    _pool: Any = field(init=False, repr=False, compare=False, default=None)

    def __call__(self, tests: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """A score from 0 to 1 for each `{"answer": text, "entry": of the task}`; None where the sandbox failed."""
        return [_score(result) for result in self._results(tests)]

    def _results(self, tests: Sequence[Mapping[str, Any]]) -> list[Result]:
        """Every worker takes each n-th answer."""
        if not tests:
            return []
        settings = (self.dataset, self.backend, self.timeout, self.memory_megabytes, self.call_seconds)
        pool = pool_of(settings, functools.partial(_Worker, start=functools.partial(_start, self)))
        object.__setattr__(self, "_pool", pool)  # held, so that its workers live as long as the reward
        workers = pool.take(min(self.workers or cores(), len(tests)))
        with ThreadPoolExecutor(max_workers=len(workers)) as threads:
            parts = list(threads.map(lambda k: workers[k].ask(tests[k :: len(workers)]), range(len(workers))))
        return [parts[index % len(workers)][index // len(workers)] for index in range(len(tests))]


def _score(result: Result) -> float | None:
    """Between 0 and 1; a scorer that was broken by the answer gives 0, a broken sandbox None."""
    if result.outcome in ("fault", "not_run"):
        return None
    try:
        score = float(result.value or "0")
    except ValueError:
        return 0.0
    return min(1.0, max(0.0, score)) if result.outcome == "ok" and math.isfinite(score) else 0.0


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A sandbox with reasoning-gym in it, started when first asked and again after a fault."""

    start: Callable[[], Sandbox]
    sandbox: Sandbox | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def alive(self) -> bool:
        return self.sandbox is not None

    def ask(self, tests: Sequence[Mapping[str, Any]]) -> list[Result]:
        """One result per test. Raises `RewardError` after two failures."""
        with self.lock:
            for _ in range(2):
                try:
                    if self.sandbox is None:
                        self.sandbox = self.start()
                    return self.sandbox.run("", tests)
                except SandboxFault as fault:
                    why = str(fault)
                    self.kill()
            raise RewardError("data.reasoning_gym_not", why=why)

    def kill(self) -> None:
        """End the process; the next call starts another."""
        if self.sandbox is not None:
            self.sandbox.close()
        self.sandbox = None


def _start(scorer: GymScorer) -> Sandbox:
    limits = Limits(
        cpu_seconds=scorer.timeout,
        wall_seconds=3.0 * scorer.timeout,
        total_seconds=scorer.call_seconds,
        memory_megabytes=scorer.memory_megabytes,
        go_on=True,
    )
    source = (_SCORER.read_text(encoding="utf-8"), "make_scorer", (scorer.dataset,))
    specs = [importlib.util.find_spec(name) for name in ("reasoning_gym", "sympy", "numpy")]
    paths = tuple(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin))
    return Sandbox.start(scorer.backend, limits, Extras(paths=paths, scorer=source))
