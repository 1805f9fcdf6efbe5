"""reasoning-gym's own scorers as a reward, in a sandbox.

    dataset = podium.data.load("reasoning-gym:countdown?size=200&seed=1").train
    GRPOTrainer(..., reward_funcs=[library_reward("reasoning_gym", dataset="countdown")], train_dataset=dataset)

Some of these scorers evaluate the model's text as Python. So they run where code runs: one worker per core and task
imports reasoning-gym once, inside the sandbox, and forks for every answer. What it evaluates is held to literals and
formulas besides, since a scorer holds the answer and an expression could look it up.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from podium.data.extract import tagged
from podium.data.gym import check_task
from podium.errors import RewardError
from podium.isolation.machine import cores
from podium.isolation.sandbox import BackendName, Extras, Limits, Result, Sandbox, SandboxFault, check_settings, choose
from podium.isolation.workers.process import pool_of
from podium.rewards.text import text_of

Extract = Literal["answer", "raw"]
logger = logging.getLogger(__name__)

GENEROUS: Mapping[str, str] = {
    "arc_agi": "every board, 0.05",
    "rearc": "every board, 0.05",
    "coin_flip": "answers that begin as the right one does, as `0` does",
    "game_of_life_halting": "every text that is not empty, where the right answer is True",
    "knights_knaves": "answers that name everybody and are right about some",
}
"""Tasks whose scorers pay for texts without the right answer."""

_SCORER = Path(__file__).with_name("gym_inside.py")


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """reasoning-gym's `score_answer` of the named dataset, run in a sandbox: a score of the answer from 0 to 1.

    Read are the `metadata` column (JSON text or a mapping) and the `answer` column, as `gym_rows` makes them. The
    answer of a completion is inside its last `<answer>` tags (`extract: answer`), or the `raw` text. An answer that
    takes longer than `timeout` processor seconds, or breaks the scorer, gets 0. None where a row has no metadata or
    those of another dataset, where the sandbox itself fails, and where `call_seconds` are over. Raises `ConfigError`
    without reasoning-gym or for a dataset it lacks, `RewardError` where no sandbox works.
    """

    __name__: ClassVar[str] = "reasoning_gym"  # in metrics and messages

    dataset: str
    extract: Extract = "answer"
    timeout: int = 2
    memory_megabytes: int = 2048
    workers: int | None = None
    sandbox: str = "auto"
    call_seconds: float = 45.0
    _backend: BackendName = field(init=False, repr=False)
    _pool: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        check_settings(self, get_args(Extract))
        check_task(self.dataset)
        if self.dataset in GENEROUS:
            logger.warning("reasoning-gym's scorer of `%s` gives credit to %s.", self.dataset, GENEROUS[self.dataset])
        object.__setattr__(self, "_backend", choose(self.sandbox))

    def __call__(
        self, completions: Sequence[Any], metadata: Sequence[Any], answer: Sequence[Any] | None = None
    ) -> list[float | None]:
        golds = [None] * len(completions) if answer is None else answer
        entries = [self._entry(own, gold, index) for index, (own, gold) in enumerate(zip(metadata, golds, strict=True))]
        texts = [text_of(completion) for completion in completions]
        answers = [text.strip() if self.extract == "raw" else tagged(text, "answer") for text in texts]
        asked = [index for index, entry in enumerate(entries) if entry is not None and answers[index] is not None]
        scores: list[float | None] = [None if entry is None else 0.0 for entry in entries]
        tests = [{"answer": answers[index], "entry": entries[index]} for index in asked]
        for index, result in zip(asked, self._results(tests), strict=True):
            scores[index] = _score(result)
        return scores

    def _entry(self, metadata: Any, answer: Any, index: int) -> dict[str, Any] | None:
        """The entry for `score_answer`; None where there is nothing to score with."""
        if metadata is None:
            return None
        if isinstance(metadata, str):
            try:
                metadata = json.loads(metadata)
            except ValueError as error:
                raise RewardError(f"the `metadata` of completion {index} are not JSON: {error}") from error
        if not isinstance(metadata, Mapping):
            raise RewardError(f"the `metadata` of completion {index} are {str(metadata)[:80]!r}; expected a mapping.")
        if metadata.get("source_dataset", self.dataset) != self.dataset:
            return None
        return {"question": "", "answer": answer, "metadata": dict(metadata)}

    def _results(self, tests: Sequence[Mapping[str, Any]]) -> list[Result]:
        """Every worker takes each n-th answer."""
        if not tests:
            return []
        settings = (self.dataset, self._backend, self.timeout, self.memory_megabytes, self.call_seconds)
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
            raise RewardError(f"reasoning-gym does not run in the sandbox: {why}")

    def kill(self) -> None:
        """End the process; the next call starts another."""
        if self.sandbox is not None:
            self.sandbox.close()
        self.sandbox = None


def _start(reward: ReasoningGym) -> Sandbox:
    limits = Limits(
        cpu_seconds=reward.timeout,
        wall_seconds=3.0 * reward.timeout,
        total_seconds=reward.call_seconds,
        memory_megabytes=reward.memory_megabytes,
        go_on=True,
    )
    scorer = (_SCORER.read_text(encoding="utf-8"), "make_scorer", (reward.dataset,))
    specs = [importlib.util.find_spec(name) for name in ("reasoning_gym", "sympy", "numpy")]
    paths = tuple(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin))
    return Sandbox.start(reward._backend, limits, Extras(paths=paths, scorer=scorer))
