"""reasoning-gym's tasks as rows: `reasoning-gym:chain_sum?size=1000&seed=3&difficulty=2`.

What stands behind the question mark are arguments of the task's own generator, besides `size` and `seed`. `difficulty`
is a level of the task's curriculum where the generator has no argument of that name.

`GymScorer` is reasoning-gym's own scorers, in a sandbox, since some of them evaluate the model's text as Python. One
worker per core and task imports reasoning-gym once, inside the sandbox, and forks for every answer. What it evaluates
is held to literals and formulas besides, since a scorer holds the answer and an expression could look it up.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podium.data.query import parse_query
from podium.errors import ConfigError, DataError, RewardError
from podium.errors.texts import listed, nearest
from podium.isolation.machine import cores
from podium.isolation.sandbox import BackendName, Extras, Limits, Result, Sandbox, SandboxFault
from podium.isolation.workers.process import pool_of

PREFIX = "reasoning-gym:"
_EXAMPLE = "dataset: reasoning-gym:chain_sum?size=1000&seed=1"


def parse_name(name: str) -> tuple[str, dict[str, Any]]:
    """The task of a dataset's name, and the arguments of its generator.

    >>> parse_name("reasoning-gym:chain_sum?size=10&min_terms=3")
    ('chain_sum', {'size': 10, 'min_terms': 3})
    """
    return parse_query(name.removeprefix(PREFIX))


def gym_rows(dataset: str, *, size: int = 500, seed: int = 0, **settings: Any) -> list[dict[str, Any]]:
    """The tasks of a reasoning-gym dataset as rows: `prompt`, `answer` and `metadata` as JSON text.

    Many generators repeat themselves. A prompt is kept once, so that there are `size` rows at most. Settings are those
    of the dataset's own configuration, or `difficulty`. Raises `ConfigError` without reasoning-gym or for a dataset it
    lacks, `DataError` for settings that do not fit.

    >>> row = gym_rows("chain_sum", size=1, seed=1)[0]
    >>> sorted(row), row["answer"].lstrip("-").isdigit()
    (['answer', 'metadata', 'prompt'], True)
    """
    check_task(dataset)
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    known = {field.name: field.default for field in dataclasses.fields(DATASETS[dataset][1])}
    given = {"size": size, "seed": seed, **settings}
    if "difficulty" in given and "difficulty" not in known:
        given = {**_level(dataset, given.pop("difficulty")), **given}
    for name, value in given.items():
        _check_argument(dataset, name, value, known)
    try:
        made = reasoning_gym.create_dataset(dataset, **given)
        return list({row["prompt"]: row for row in map(_row, made)}.values())
    except Exception as error:  # a generator of another library can raise anything
        message = str(error) or type(error).__name__
        raise DataError(
            f"reasoning-gym cannot make `{dataset}` of {size} tasks with {settings}: {message}",
            code="D057",
            fix=_EXAMPLE,
            settings=tuple(settings),
            dataset=dataset,
            size=size,
            message=message,
        ) from error


def _row(task: Mapping[str, Any]) -> dict[str, Any]:
    answer = None if task["answer"] is None else str(task["answer"])
    return {"prompt": task["question"], "answer": answer, "metadata": json.dumps(task["metadata"], default=_jsonable)}


def _jsonable(value: Any) -> Any:
    """Numpy's numbers and arrays, sets and whatever else metadata have."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)


def check_task(name: str) -> None:
    """Raises `ConfigError` (D057) without reasoning-gym and for a dataset it lacks."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("reasoning-gym is not installed.", code="D057", fix="Type: pip install 'podium[tasks]'")
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = nearest(name, DATASETS)
        raise ConfigError(
            f"reasoning-gym has no dataset `{name}`. It has {len(DATASETS)}.",
            code="D057",
            fix=f"Did you mean `{near}`?" if near else _EXAMPLE,
            near=near,
            example=_EXAMPLE,
            name=name,
            datasets_count=len(DATASETS),
        )


def _check_argument(dataset: str, name: str, value: Any, known: Mapping[str, Any]) -> None:
    if name not in known:
        takes = [*known, "difficulty"]
        near = nearest(name, known)
        raise DataError(
            f"reasoning-gym's `{dataset}` has no argument `{name}`. It takes {listed(takes)}.",
            code="D057",
            fix=f"Did you mean `{near}`?" if near else _EXAMPLE,
            dataset=dataset,
            name=name,
            known=takes,
            near=near,
            example=_EXAMPLE,
        )
    kind = type(known[name])
    fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if kind in (bool, int) and not fits:
        what = (
            f"reasoning-gym's `{dataset}` takes {kind.__name__} as `{name}`, not `{value}`. "
            f"It is {known[name]} by default."
        )
        raise DataError(what, code="D057", fix=f"{name}={known[name]}")


def _level(dataset: str, level: Any) -> dict[str, Any]:
    """The generator's arguments at a level of its curriculum, from 0 on; the last one where it has fewer."""
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(dataset):
        raise DataError(
            f"reasoning-gym's `{dataset}` has no levels of difficulty.",
            code="D057",
            fix=_EXAMPLE,
            settings=("difficulty",),
            dataset=dataset,
        )
    if type(level) is not int or level < 0:
        raise DataError(
            f"`difficulty` is a level, 0 or more; it is `{level}`.",
            code="D057",
            fix="difficulty=0",
            settings=("difficulty",),
            level=level,
        )
    curriculum = create_curriculum(dataset)
    curriculum.set_global_level(level)
    made = dataclasses.asdict(curriculum.generate_configuration())
    return {name: value for name, value in made.items() if name not in ("size", "seed")}


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
            raise RewardError(f"reasoning-gym does not run in the sandbox: {why}", why=why)

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
