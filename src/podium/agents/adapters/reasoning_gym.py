"""reasoning-gym's tasks as rows, its scorers as a reward, and its tasks with several attempts as an environment.

    dataset = podium.data.load("reasoning-gym:countdown?size=200&seed=1&difficulty=2").train
    reward = library_reward("reasoning_gym", dataset="countdown")
    factory = resolve_environment("reasoning_gym:countdown?attempts=3")

Loaded by name from the tables of datasets, rewards and environments.

What stands behind the question mark are arguments of the task's own generator, besides `size` and `seed`. `difficulty`
is a level of the task's curriculum where the generator has no argument of that name.

`GymScorer` runs reasoning-gym's own scorers in a sandbox, since some of them evaluate the model's text as Python. One
worker per core and task imports reasoning-gym once, inside the sandbox, and forks for every answer. What it evaluates
is held to literals and formulas besides, since a scorer holds the answer and an expression could look it up.
"""

from __future__ import annotations

import dataclasses
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

from podium.agents.plain_text import TextEnvironment
from podium.data.extract import tagged, text_of
from podium.errors import AgentError, ConfigError, DataError, RewardError
from podium.errors.texts import as_line, listed, nearest, quoted
from podium.isolation.machine import cores
from podium.isolation.sandbox import (
    BackendName,
    Extras,
    Limits,
    Result,
    Sandbox,
    SandboxFault,
    check_settings,
    choose,
)
from podium.isolation.workers import pool_of

logger = logging.getLogger(__name__)

_EXAMPLE = "dataset: reasoning-gym:chain_sum?size=1000&seed=1"

# --- rows ------------------------------------------------------------------------------------------------------------


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


# --- scores ----------------------------------------------------------------------------------------------------------

_SCORER = Path(__file__).with_name("reasoning_gym_scorer.py")


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


# --- the reward ------------------------------------------------------------------------------------------------------

Extract = Literal["answer", "raw"]

GENEROUS: Mapping[str, str] = {
    "arc_agi": "every board, 0.05",
    "rearc": "every board, 0.05",
    "coin_flip": "answers that begin as the right one does, as `0` does",
    "game_of_life_halting": "every text that is not empty, where the right answer is True",
    "knights_knaves": "answers that name everybody and are right about some",
}
"""Tasks whose scorers pay for texts without the right answer."""


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
    _scorer: GymScorer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_settings(self, get_args(Extract))
        check_task(self.dataset)
        if self.dataset in GENEROUS:
            logger.warning("reasoning-gym's scorer of `%s` gives credit to %s.", self.dataset, GENEROUS[self.dataset])
        scorer = GymScorer(
            dataset=self.dataset,
            backend=choose(self.sandbox),
            timeout=self.timeout,
            memory_megabytes=self.memory_megabytes,
            workers=self.workers,
            call_seconds=self.call_seconds,
        )
        object.__setattr__(self, "_scorer", scorer)

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
        for index, score in zip(asked, self._scorer(tests), strict=True):
            scores[index] = score
        return scores

    def _entry(self, metadata: Any, answer: Any, index: int) -> dict[str, Any] | None:
        """The entry for `score_answer`; None where there is nothing to score with."""
        if metadata is None:
            return None
        if isinstance(metadata, str):
            try:
                metadata = json.loads(metadata)
            except ValueError as error:
                raise RewardError(
                    f"the `metadata` of completion {index} are not JSON: {quoted(error)}", index=index, error=error
                ) from error
        if not isinstance(metadata, Mapping):
            start = str(metadata)[:80]
            raise RewardError(
                f"the `metadata` of completion {index} are {start!r}; expected a mapping.",
                index=index,
                metadata=start,
            )
        if metadata.get("source_dataset", self.dataset) != self.dataset:
            return None
        return {"question": "", "answer": answer, "metadata": dict(metadata)}


# --- the environment -------------------------------------------------------------------------------------------------

_TAGS = "Write your answer in <answer> tags."


class ReasoningGymAttempts(TextEnvironment):
    """A task that may be answered until it is right. The last answer's score is paid, times `discount` per retry."""

    def __init__(
        self, scorer: GymScorer, attempts: int, discount: float, extract: str, settings: dict[str, Any]
    ) -> None:
        self._scorer = scorer
        self._attempts = attempts
        self._discount = discount
        self._settings = settings
        self._hint = f" {_TAGS}" if extract == "answer" else ""

    def reset(self, metadata: Any = None, answer: Any = None, seed: int = 0, **row: Any) -> str | None:
        """The question, where the row has none."""
        self._used = 0
        if metadata is not None:
            known = json.loads(metadata) if isinstance(metadata, str) else dict(metadata)
            self._entry = {"question": "", "answer": answer, "metadata": known}
            return None
        [task] = gym_rows(self._scorer.dataset, **{"seed": seed, **self._settings, "size": 1})
        self._entry = {"question": "", "answer": task["answer"], "metadata": json.loads(task["metadata"])}
        return f"{task['prompt']}{self._hint}"

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        """An attempt. Its feedback names how many are left, and whether the answer was partly right."""
        answer = tagged(text, "answer") if self._hint else text.strip()
        [score] = [0.0] if answer is None else self._scorer([{"answer": answer, "entry": self._entry}])
        if score is None:
            raise AgentError(
                f"reasoning-gym's scorer of `{self._scorer.dataset}` gave no score.", dataset=self._scorer.dataset
            )
        self._used += 1
        left = self._attempts - self._used
        if score >= 1 or not left:
            return None, score * self._discount ** (self._used - 1), True, {"attempts": self._used}
        verdict = "That is partly right." if score > 0 else "That is not right."
        attempts = "1 more attempt" if left == 1 else f"{left} more attempts"
        return f"{verdict} You have {attempts}.{self._hint}", 0.0, False, {"score": score}


def factory(
    name: str, folder: Path, /, *, attempts: int = 3, discount: float = 1.0, extract: str = "answer", **settings: Any
) -> Callable[[], ReasoningGymAttempts]:
    """Makes environments for a dataset; further arguments are its generator's, or `difficulty`."""
    try:
        gym_rows(name, **{**settings, "size": 1})
    except (ConfigError, DataError) as error:  # whose example is a line for `dataset`
        fix = error.fix if error.facts.get("near") else "environment: reasoning_gym:chain_sum?attempts=3"
        raise ConfigError(error.what, code=error.code, fix=fix) from error
    if type(attempts) is not int or attempts < 1:
        raise ConfigError(f"`attempts` is {attempts}; it must be 1 or more.", fix="attempts: 3", attempts=attempts)
    if extract not in ("answer", "raw"):
        raise ConfigError(
            f"`extract` is {extract}; it is answer or raw.", fix=as_line("extract", "answer"), extract=extract
        )
    scorer = GymScorer(dataset=name, backend=choose("auto"))
    return functools.partial(ReasoningGymAttempts, scorer, attempts, float(discount), extract, settings)
