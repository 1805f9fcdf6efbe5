"""reasoning-gym's own scorers as a reward, in a sandbox; and its tasks as rows.

    dataset = Dataset.from_list(gym_rows("countdown", size=200, seed=1))
    GRPOTrainer(..., reward_funcs=[library_reward("reasoning_gym", dataset="countdown")], train_dataset=dataset)

Some of these scorers evaluate the model's text as Python. So they run where code runs: one worker per core and task
imports reasoning-gym once, inside the sandbox, and forks for every answer. What it evaluates is held to literals and
formulas besides, since a scorer knows the answer and an expression could look it up.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from podium.errors import ConfigError, RewardError, did_you_mean
from podium.rewards.sandbox import BackendName, Extras, Limits, Result, Sandbox, SandboxFault, choose
from podium.rewards.text import tagged, text_of

Extract = Literal["answer", "raw"]
_SCORER = Path(__file__).with_name("gym_inside.py")


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """What reasoning-gym's `score_answer` of the named dataset says of the answer, from 0 to 1, asked in a sandbox.

    Read are the `metadata` column (JSON text or a mapping) and the `answer` column, as `gym_rows` makes them. The
    answer of a completion is inside its last `<answer>` tags (`extract: answer`), or the `raw` text. An answer that
    takes longer than `timeout` processor seconds, or breaks the scorer, gets 0. None where a row has no metadata and
    where the sandbox itself fails. Raises `ConfigError` without reasoning-gym or for a dataset it lacks, `RewardError`
    where no sandbox works.
    """

    __name__: ClassVar[str] = "reasoning_gym"  # in metrics and messages

    dataset: str
    extract: Extract = "answer"
    timeout: int = 2
    memory_megabytes: int = 2048
    workers: int | None = None
    sandbox: str = "auto"
    _backend: BackendName = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.extract not in ("answer", "raw"):
            raise ConfigError(f"extract is {self.extract!r}; it must be one of answer, raw.")
        for name in ("timeout", "memory_megabytes", "workers"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        _check_dataset(self.dataset)
        object.__setattr__(self, "_backend", choose(self.sandbox))

    def __call__(
        self, completions: Sequence[Any], metadata: Sequence[Any], answer: Sequence[Any] | None = None
    ) -> list[float | None]:
        golds = answer if answer is not None else [None] * len(completions)
        entries = [_entry(own, gold, index) for index, (own, gold) in enumerate(zip(metadata, golds, strict=True))]
        answers = [self._answer(text_of(completion)) for completion in completions]
        asked = [index for index, entry in enumerate(entries) if entry is not None and answers[index] is not None]
        scores: list[float | None] = [None if entry is None else 0.0 for entry in entries]
        tests = [{"answer": answers[index], "entry": entries[index]} for index in asked]
        for index, result in zip(asked, self._results(tests), strict=True):
            scores[index] = _score(result)
        return scores

    def _answer(self, text: str) -> str | None:
        return text.strip() if self.extract == "raw" else tagged(text, "answer")

    def _results(self, tests: Sequence[Mapping[str, Any]]) -> list[Result]:
        """Every worker takes each n-th answer."""
        if not tests:
            return []
        workers = _workers(self, min(self.workers or _cores(), len(tests)), os.getpid())
        with ThreadPoolExecutor(max_workers=len(workers)) as pool:
            parts = list(pool.map(lambda k: workers[k].ask(tests[k :: len(workers)]), range(len(workers))))
        return [parts[index % len(workers)][index // len(workers)] for index in range(len(tests))]


def gym_rows(dataset: str, *, size: int = 500, seed: int = 0, **settings: Any) -> list[dict[str, Any]]:
    """The tasks of a reasoning-gym dataset as rows: `prompt`, `answer` and `metadata` as JSON text.

    Settings are those of the dataset's own configuration. Raises `ConfigError` without reasoning-gym, for a dataset it
    lacks and for settings that do not fit.

    >>> row = gym_rows("chain_sum", size=1, seed=1)[0]
    >>> sorted(row), row["answer"].lstrip("-").isdigit()
    (['answer', 'metadata', 'prompt'], True)
    """
    _check_dataset(dataset)
    import reasoning_gym

    try:
        made = reasoning_gym.create_dataset(dataset, size=size, seed=seed, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning-gym cannot make `{dataset}` of {size} tasks with {settings}: {error}") from error
    return [
        {
            "prompt": task["question"],
            "answer": None if task["answer"] is None else str(task["answer"]),
            "metadata": json.dumps(task["metadata"], default=_jsonable),
        }
        for task in made
    ]


def _jsonable(value: Any) -> Any:
    """Numpy's numbers and arrays, sets and whatever else metadata have."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)


def _check_dataset(name: str) -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("reasoning-gym is not installed. Type: pip install 'podium[tasks]'")
    if name not in _dataset_names():
        near = did_you_mean(name, _dataset_names())
        raise ConfigError(f"reasoning-gym has no dataset `{name}`.{near} It has {len(_dataset_names())}.")


@functools.cache
def _dataset_names() -> frozenset[str]:
    from reasoning_gym.factory import DATASETS

    return frozenset(DATASETS)


def _entry(metadata: Any, answer: Any, index: int) -> dict[str, Any] | None:
    """What `score_answer` takes besides the answer; None where there is nothing to score with."""
    if metadata is None:
        return None
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError as error:
            raise RewardError(f"the `metadata` of completion {index} are not JSON: {error}") from error
    if not isinstance(metadata, Mapping):
        raise RewardError(f"the `metadata` of completion {index} are {str(metadata)[:80]!r}; expected a mapping.")
    return {"question": "", "answer": answer, "metadata": dict(metadata)}


def _score(result: Result) -> float | None:
    """Between 0 and 1; a scorer that was broken by the answer gives 0, a broken sandbox None."""
    if result.outcome == "fault":
        return None
    try:
        score = float(result.value or "0")
    except ValueError:
        return 0.0
    return min(1.0, max(0.0, score)) if result.outcome == "ok" and math.isfinite(score) else 0.0


# --- workers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A sandbox with reasoning-gym in it, started when first asked and again after a fault."""

    start: Callable[[], Sandbox]
    sandbox: Sandbox | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, tests: Sequence[Mapping[str, Any]]) -> list[Result]:
        """One result per test; `FAULT` for each after two failures."""
        with self.lock:
            for _ in range(2):
                try:
                    if self.sandbox is None:
                        self.sandbox = self.start()
                    return self.sandbox.run("", tests)
                except SandboxFault as fault:
                    said = str(fault)
                    self.close()
            raise RewardError(f"reasoning-gym does not run in the sandbox: {said}")

    def close(self) -> None:
        """Kills it."""
        if self.sandbox is not None:
            self.sandbox.close()
        self.sandbox = None


_pool: dict[tuple[Any, ...], list[_Worker]] = {}


def _workers(reward: ReasoningGym, count: int, process_id: int) -> list[_Worker]:
    """The workers of these settings, `count` of them; a forked process has its own."""
    key = (reward.dataset, reward._backend, reward.timeout, reward.memory_megabytes, process_id)
    workers = _pool.setdefault(key, [])
    while len(workers) < count:
        workers.append(_Worker(start=functools.partial(_start, reward)))
    return workers[:count]


def _start(reward: ReasoningGym) -> Sandbox:
    limits = Limits(
        cpu_seconds=reward.timeout,
        wall_seconds=3.0 * reward.timeout,
        total_seconds=3600.0,
        memory_megabytes=reward.memory_megabytes,
        go_on=True,
    )
    scorer = (_SCORER.read_text(encoding="utf-8"), "make_scorer", (reward.dataset,))
    return Sandbox.start(reward._backend, limits, Extras(paths=_site_packages(), scorer=scorer))


@functools.cache
def _site_packages() -> tuple[str, ...]:
    """The folders that reasoning-gym and what it imports are in."""
    specs = [importlib.util.find_spec(name) for name in ("reasoning_gym", "sympy", "numpy")]
    return tuple(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin))


@atexit.register
def _close_all() -> None:
    for key, workers in _pool.items():
        if key[-1] == os.getpid():
            for worker in workers:
                worker.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
