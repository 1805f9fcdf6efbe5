"""Reward functions: made of what a user names, and called in a worker (target `podium.isolation.reward_calls:answer`).

verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` is one, too. It is called once for each
completion, with the row's columns `data_source`, `ground_truth` (or the `ground_truth` in `reward_model`, as verl's own
data has it) and `extra_info`. It returns a number, or a mapping with `score`, whose other entries are shown in the
table of completions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from podium.errors import ConfigError, RewardError
from podium.errors.texts import did_you_mean, quoted
from podium.isolation import child, functions, reward_results
from podium.isolation.functions import Call, FileFunction, Took, answering, awaited, is_async, parameters_of
from podium.isolation.reward_results import CallResult, raised, read_values
from podium.isolation.user_files import function_from_file, keep, kept

GIVEN_TO_ALL = ("prompts", "completions", "completion_ids")

# --- in a worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall(Call):
    """A call of a reward function in a file, or without arguments its description."""

    args: bytes
    """Given to the function, or to what makes it; pickled."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Text of the file and of modules below its folder, by path, to be imported in place of what the files hold now."""
    num_completions: int = 0
    services: tuple[str, ...] = ()
    """Functions that log, of those that it asks for."""


def answer(request: RewardCall, took: Took) -> Iterator[Any]:
    """The reply to one request: a description of the function and its source, or what came of calling it."""
    keep({path: text.encode("latin-1") for path, text in request.sources.items()})
    yield from _answer(request, took)


def _described(_: Callable[..., Any], request: RewardCall) -> dict[str, Any]:
    """The name, place and parameters of a function, and the text of its file, before a call imports more."""
    function = made_in_file(request.function, request.args)
    sources = kept(Path(request.function.path).parent)
    parameters = parameters_of(function)
    return {
        "name": functions.function_name(function),
        "where": functions.location(function),
        "row_wise": bool(getattr(functions.unwrapped(function), "row_wise", False)),
        "parameters": parameters
        and [[one.name, one.kind.name, one.default is not inspect.Parameter.empty] for one in parameters],
        "sources": {path: text.decode("latin-1") for path, text in sources.items()},
    }


_OURS = frozenset(
    {__file__, functions.__file__, reward_results.__file__, child.__file__}
    | {asyncio.runners.__file__, asyncio.base_events.__file__}
)


def _result(_: Callable[..., Any], request: RewardCall, took: Took) -> CallResult:
    """The function's values, with what it logged, or what it raised."""
    function = made_in_file(request.function, request.args)
    arguments = dict(request.arguments)
    logged = Logged(request.num_completions)
    arguments |= {name: getattr(logged, name) for name in request.services}
    completions = arguments.get("completions", ())
    if completions:
        arguments["completions"] = Handed(completions, took)
    try:
        answer = function(**arguments)
        result = read_values(awaited(answer) if is_async(function) else answer)
    # Nothing that a user's function raises ends this process: also `exit()`, and interrupts that the user did not send.
    except BaseException as error:  # noqa: BLE001
        result = CallResult(failures=(raised(error, _OURS, completions),))
    return replace(result, extras=tuple(logged.extras), metrics=tuple(logged.metrics))


_RULE = "a reward is a function"
_answer = answering(_RULE, _described, _result)


@functools.cache
def made_in_file(source: FileFunction, args: bytes) -> Callable[..., Any]:
    """The reward function itself, made once a process. Raises `ConfigError`."""
    found = function_from_file(Path(source.path), source.name, source.shown, rule=_RULE)
    return apply_args(found, pickle.loads(args), f"{source.shown}:{source.name}")


class Handed(list[Any]):
    """The completions as a list that notes which of them was taken last."""

    def __init__(self, values: Sequence[Any], took: Callable[[int], None]) -> None:
        super().__init__(values)
        self._took = took

    def __iter__(self) -> Iterator[Any]:
        for index, value in enumerate(super().__iter__()):
            self._took(index)
            yield value
        self._took(child.NOTHING_TAKEN)

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if isinstance(key, int):
            self._took(key % len(self))
        return value

    def __reduce__(self) -> Any:  # copies, pickled or not, are plain lists
        return list, (list(self),)


class Logged:
    """Collects the arguments of `log_extra` and `log_metric`, as plain data."""

    def __init__(self, num_completions: int) -> None:
        self.num_completions = num_completions
        self.extras: list[tuple[str, list[Any]]] = []
        self.metrics: list[tuple[str, float]] = []

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """A column of the table of completions."""
        self.extras.append((str(column), plain(checked_extra(column, values, self.num_completions))))

    def log_metric(self, name: str, value: Any) -> None:
        """A number of the run."""
        self.metrics.append((str(name), float(value)))


def checked_extra(column: str, values: Sequence[Any], num_completions: int) -> list[Any]:
    """The values of a column that a reward adds; `ValueError` where it is not one for each completion."""
    values = list(values)
    if len(values) != num_completions:
        got = f"log_extra({column!r}, ...) got {len(values)} values for {num_completions} completions"
        raise ValueError(f"{got}; give one for each")
    return values


def plain(value: Any) -> Any:
    """Text, numbers, lists and dicts as they are; other things as text."""
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    return value if value is None or type(value) in (str, bool, int, float) else str(value)


# --- made of what a user names ---------------------------------------------------------------------------------------


def apply_args(found: Callable[..., Any], args: Mapping[str, Any], name: str) -> Callable[..., Any]:
    """A reward function with `args` filled in, or made with them. Raises `ConfigError` for unknown and missing ones."""
    parameters = _parameters(found)
    takes_any = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [arg for arg in args if arg not in parameters and not takes_any]
    if unknown:
        takes = ", ".join(p for p in parameters if p not in GIVEN_TO_ALL)
        what = f"reward `{name}` takes no argument `{unknown[0]}`. It takes: {takes or 'none'}"
        raise ConfigError(what, fix=did_you_mean(unknown[0], parameters) or f"take `{unknown[0]}` out")
    if not _makes_rewards(found, parameters):
        return as_reward(functools.partial(found, **args) if args else found)
    needed = [name for name, one in parameters.items() if one.default is one.empty and name not in args]
    if needed and not args and inspect.isfunction(found):
        what = (
            f"reward `{name}` asks for {', '.join(needed)}, and for none of {', '.join(GIVEN_TO_ALL)}, one of which "
            "every reward takes."
        )
        fix = (
            f"write `def {found.__name__}(completions, **kwargs):`, with columns of the rows by their names; or "
            "give it what it needs under `args`, if it makes a reward function"
        )
        raise ConfigError(what, code="W001", fix=fix)
    try:
        made = found(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward `{name}` cannot be made with these `args`: {quoted(error)}",
            fix=f"args that `{name}` takes: {', '.join(parameters) or 'none'}",
            name=name,
            error=error,
        ) from error
    if not callable(made):
        gave = type(made).__name__
        raise ConfigError(
            f"reward `{name}` takes no `completions`, so it was called to make a reward, and gave {gave}.",
            code="W001",
            fix=f"def {found.__name__}(completions, **kwargs), with one number for each of the completions",
            name=name,
            gave=gave,
            found=found.__name__,
        )
    return made


def _makes_rewards(found: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> bool:
    """A class, or a function that asks for nothing that every reward is given (verl's `compute_score` is a reward)."""
    if inspect.isclass(found):
        return True
    if is_compute_score(found):
        return False
    asks_for_any = not parameters.keys().isdisjoint(GIVEN_TO_ALL)
    catches_all = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())
    return inspect.isfunction(found) and not (asks_for_any or catches_all or inspect.iscoroutinefunction(found))


# --- verl's compute_score --------------------------------------------------------------------------------------------

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
    parameters = _parameters(function)
    return all(name in parameters for name in _SIGNATURE) and "completions" not in parameters


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
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
        self.parameters = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.kind not in catch_all and name not in preset
        }
        """The parameters that can be filled by name and are not filled yet."""
        self.__signature__ = _signature(self.parameters)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[Any]:
        """The function's score of each completion; the boundary checks it."""
        calls = self._calls(completions, columns)
        return _scores([self.function(**call) for call in calls], columns.get("log_extra"))

    def _calls(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        num = len(completions)
        filled = {name: columns[name] for name in self.parameters if columns.get(name) is not None}
        filled["solution_str"] = [
            completion if isinstance(completion, str) else str(completion[-1].get("content") or "")
            for completion in completions
        ]
        filled["ground_truth"] = _ground_truth(columns)
        filled.setdefault("data_source", [None] * num)
        if "extra_info" in self.parameters:
            filled["extra_info"] = [extra or {} for extra in columns.get("extra_info") or [None] * num]
        return [{name: values[index] for name, values in filled.items()} for index in range(num)]


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
    own = {name: parameter for name, parameter in parameters.items() if name not in _FILLED}
    needed = ["completions", *(name for name, parameter in own.items() if parameter.default is empty)]
    optional = ["data_source", "ground_truth", "reward_model", "extra_info", "log_extra"]
    optional += [name for name, parameter in own.items() if parameter.default is not empty]
    return inspect.Signature(
        [inspect.Parameter(name, keyword) for name in needed]
        + [inspect.Parameter(name, keyword, default=None) for name in optional]
    )


def _ground_truth(columns: Mapping[str, Any]) -> Sequence[Any]:
    if columns.get("ground_truth") is not None:
        return columns["ground_truth"]
    if columns.get("reward_model") is not None:
        return [gold.get("ground_truth") if isinstance(gold, Mapping) else None for gold in columns["reward_model"]]
    raise RewardError(
        "a `compute_score` needs the column `ground_truth`, or `reward_model` with a `ground_truth` in it", code="W002"
    )


def _scores(answers: Sequence[Any], log_extra: Callable[[str, list[Any]], None] | None) -> list[Any]:
    """The numbers; what else the function returned goes into the table of completions."""
    mappings = [answer if isinstance(answer, Mapping) else {} for answer in answers]
    names = dict.fromkeys(name for mapping in mappings for name in mapping if name != "score")
    for name in names if log_extra is not None else ():
        log_extra(name, [mapping.get(name) for mapping in mappings])  # type: ignore[misc]
    for answer in answers:
        if isinstance(answer, Mapping) and "score" not in answer:
            keys = ", ".join(map(str, answer)) or "nothing"
            raise RewardError(
                f"a `compute_score` returned a mapping without `score`; it has {keys}", code="W004", keys=keys
            )
    return [answer["score"] if isinstance(answer, Mapping) else answer for answer in answers]
