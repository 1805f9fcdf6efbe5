"""reasoning-gym's tasks as rows: `reasoning-gym:chain_sum?size=1000&seed=3&difficulty=2`.

What stands behind the question mark are arguments of the task's own generator, besides `size` and `seed`. `difficulty`
is a level of the task's curriculum where the generator has no argument of that name. `GymScorer` has its scores.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from podium.data.gym.scores import GymScorer as GymScorer
from podium.data.query import parse_query
from podium.errors import ConfigError, DataError
from podium.errors.texts import nearest

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
            "D057.reasoning_gym_cannot", fix=_EXAMPLE, dataset=dataset, size=size, settings=settings, message=message
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
        raise ConfigError("D057.reasoning_gym_not")
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ConfigError(
            "D057.reasoning_gym_no",
            near=nearest(name, DATASETS),
            example=_EXAMPLE,
            name=name,
            datasets_count=len(DATASETS),
        )


def _check_argument(dataset: str, name: str, value: Any, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise DataError(
            "D057.no_argument",
            dataset=dataset,
            name=name,
            known=[*known, "difficulty"],
            near=nearest(name, known),
            example=_EXAMPLE,
        )
    kind = type(known[name])
    fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if kind in (bool, int) and not fits:
        what = f"reasoning-gym's `{dataset}` takes {kind.__name__} as `{name}`, not `{value}`. "
        what += f"It is {known[name]} by default."
        raise DataError(what, code="D057", fix=f"{name}={known[name]}")


def _level(dataset: str, level: Any) -> dict[str, Any]:
    """The generator's arguments at a level of its curriculum, from 0 on; the last one where it has fewer."""
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(dataset):
        raise DataError("D057.reasoning_gym_no_levels", fix=_EXAMPLE, dataset=dataset)
    if type(level) is not int or level < 0:
        raise DataError("D057.difficulty_level_more", level=level)
    curriculum = create_curriculum(dataset)
    curriculum.set_global_level(level)
    made = dataclasses.asdict(curriculum.generate_configuration())
    return {name: value for name, value in made.items() if name not in ("size", "seed")}
