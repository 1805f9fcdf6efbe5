"""verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` as a reward function.

It is called once for each completion, with the row's columns `data_source`, `ground_truth` (or the `ground_truth` in
`reward_model`, as verl's own data has it) and `extra_info`. It returns a number, or a mapping with `score`, whose other
entries are shown in the table of completions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podium.errors import RewardError

_SIGNATURE = ("data_source", "solution_str", "ground_truth")
_FILLED = (*_SIGNATURE, "extra_info")
VERL_GOLD = ("ground_truth", "reward_model")  # columns of which the dataset must have one


def is_compute_score(function: Any) -> bool:
    """Whether it takes what verl calls a reward function with.

    >>> is_compute_score(lambda data_source, solution_str, ground_truth, extra_info=None: 1.0)
    True
    >>> is_compute_score(lambda completions, ground_truth: [1.0])
    False
    """
    parameters = parameters_by_name(function)
    return all(name in parameters for name in _SIGNATURE) and "completions" not in parameters


def parameters_by_name(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a call, of a class those of its `__init__`; none where Python cannot tell (written in C)."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


class ComputeScore:
    """A reward function that calls a `compute_score` for one completion after the other.

    >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ...     return {"score": float(solution_str == ground_truth), "length": len(solution_str)}
    >>> ComputeScore(compute_score)(completions=["7", "17"], data_source=["sums"] * 2, ground_truth=["7", "7"])
    [1.0, 0.0]
    """

    row_wise = True  # each completion by itself, so that `reward_workers` may share them out

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        inner = function.func if isinstance(function, functools.partial) else function
        self.__name__ = str(getattr(inner, "__name__", type(inner).__name__))
        self.__wrapped__ = inner  # messages show where it stands
        catch_all = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        preset = function.keywords if isinstance(function, functools.partial) else {}
        parameters = inspect.signature(function).parameters
        self.parameters = {k: each for k, each in parameters.items() if each.kind not in catch_all and k not in preset}
        """The parameters that can be filled by name and are not filled yet."""
        self.__signature__ = _signature(self.parameters)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[Any]:
        """The function's score of each completion; the boundary checks it."""
        calls = self._calls(completions, columns)
        return _scores([self.function(**call) for call in calls], columns.get("log_extra"))

    def _calls(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        num = len(completions)
        given = {name: columns[name] for name in self.parameters if columns.get(name) is not None}
        texts = (each if isinstance(each, str) else str(each[-1].get("content") or "") for each in completions)
        given["solution_str"] = list(texts)
        given["ground_truth"] = _ground_truth(columns)
        given.setdefault("data_source", [None] * num)
        if "extra_info" in self.parameters:
            given["extra_info"] = [each or {} for each in columns.get("extra_info") or [None] * num]
        return [{name: values[index] for name, values in given.items()} for index in range(num)]


class ComputeScoreAsync(ComputeScore):
    """The same for an `async def compute_score`: the calls for all completions run together."""

    async def __call__(self, completions: Sequence[Any], **columns: Any) -> list[Any]:  # type: ignore[override]
        """The function's score of each completion."""
        answers = await asyncio.gather(*(self.function(**call) for call in self._calls(completions, columns)))
        return _scores(answers, columns.get("log_extra"))


def as_reward(function: Any) -> Any:
    """The reward function of a `compute_score`; everything else as it is."""
    if isinstance(function, ComputeScore) or not is_compute_score(function):
        return function
    inner = function.func if isinstance(function, functools.partial) else function
    return (ComputeScoreAsync if inspect.iscoroutinefunction(inner) else ComputeScore)(function)


def asks_for_gold(wants: frozenset[str] | None) -> bool:
    """Whether these are the columns that a `compute_score`, here or in a worker, asks for."""
    return wants is not None and {"data_source", *VERL_GOLD} <= wants


def _signature(parameters: Mapping[str, inspect.Parameter]) -> inspect.Signature:
    """The columns to ask for. None of those that verl fills is needed by itself: the gold may stand in either place."""
    empty = inspect.Parameter.empty
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [each for name, each in parameters.items() if name not in _FILLED]
    needed = ["completions", *(each.name for each in own if each.default is empty)]
    optional = ["data_source", "ground_truth", "reward_model", "extra_info", "log_extra"]
    optional += [each.name for each in own if each.default is not empty]
    return inspect.Signature(
        [inspect.Parameter(name, keyword) for name in needed]
        + [inspect.Parameter(name, keyword, default=None) for name in optional]
    )


def _ground_truth(columns: Mapping[str, Any]) -> Sequence[Any]:
    if columns.get("ground_truth") is not None:
        return columns["ground_truth"]
    if columns.get("reward_model") is not None:
        return [each.get("ground_truth") if isinstance(each, Mapping) else None for each in columns["reward_model"]]
    raise RewardError(
        "a `compute_score` needs the column `ground_truth`, or `reward_model` with a `ground_truth` in it", code="W002"
    )


def _scores(answers: Sequence[Any], log_extra: Callable[[str, list[Any]], None] | None) -> list[Any]:
    """The numbers; what else the function returned goes into the table of completions."""
    mappings = [each if isinstance(each, Mapping) else {} for each in answers]
    names = dict.fromkeys(name for each in mappings for name in each if name != "score")
    for name in names if log_extra is not None else ():
        log_extra(name, [each.get(name) for each in mappings])  # type: ignore[misc]
    for each in answers:
        if isinstance(each, Mapping) and "score" not in each:
            keys = ", ".join(map(str, each)) or "nothing"
            raise RewardError(
                f"a `compute_score` returned a mapping without `score`; it has {keys}", code="W004", keys=keys
            )
    return [each["score"] if isinstance(each, Mapping) else each for each in answers]
