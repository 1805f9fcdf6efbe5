"""Calls of functions in the user's files, inside a worker process (target `podium.isolation.workers.calls:answer`)."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from podium.isolation import user_files
from podium.isolation.workers import call_result, child, functions
from podium.isolation.workers.call_result import CallResult, raised, read_values

_OURS = frozenset(
    {__file__, call_result.__file__, child.__file__, asyncio.runners.__file__, asyncio.base_events.__file__}
)


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


@functools.cache
def load(path: str, attribute: str, args: bytes, shown: str) -> Callable[..., Any]:
    """The function, made once a process; `args` are pickled."""
    found = user_files.function_from_file(Path(path), attribute, shown, rule="a reward is a function")
    return functions.apply_args(found, pickle.loads(args), f"{shown}:{attribute}")


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """The name, place and parameters of a function, for the parent."""
    parameters = functions.parameters_of(function)
    return {
        "name": functions.function_name(function),
        "where": functions.location(function),
        "row_wise": bool(getattr(functions.unwrapped(function), "row_wise", False)),
        "parameters": parameters
        and [[each.name, each.kind.name, each.default is not inspect.Parameter.empty] for each in parameters],
    }


def call(function: Callable[..., Any], request: Mapping[str, Any], took: Callable[[int], None]) -> CallResult:
    """The function's values, with what it logged, or what it raised."""
    arguments = dict(request["arguments"])
    logged = Logged(request["num_completions"])
    arguments |= {name: getattr(logged, name) for name in request["services"]}
    seed(request["seed"])
    completions = arguments.get("completions", ())
    if completions:
        arguments["completions"] = Handed(completions, took)
    try:
        answer = function(**arguments)
        result = read_values(loop().run_until_complete(answer) if functions.is_async(function) else answer)
    # Nothing that a user's function raises ends this process: also `exit()`, and interrupts that the user did not send.
    except BaseException as error:  # noqa: BLE001
        result = CallResult(failures=(raised(error, _OURS, completions),))
    return replace(result, extras=tuple(logged.extras), metrics=tuple(logged.metrics))


class Logged:
    """Collects the arguments of `log_extra` and `log_metric`, as plain data."""

    def __init__(self, num_completions: int) -> None:
        self.num_completions = num_completions
        self.extras: list[tuple[str, list[Any]]] = []
        self.metrics: list[tuple[str, float]] = []

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extras.append((str(column), plain(checked_extra(column, values, self.num_completions))))

    def log_metric(self, name: str, value: Any) -> None:
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
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return value if value is None or type(value) in (str, bool, int, float) else str(value)


def seed(number: int) -> None:
    """The global generators of Python and, where the file imported them, numpy and torch."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        torch: Any = sys.modules["torch"]
        # Without a device torch keeps each seed for later, with a stack trace: a millisecond for every call.
        (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(number)


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """One event loop for the life of the process, so that sessions and pools opened in it stay usable."""
    return asyncio.new_event_loop()


def answer(request: Mapping[str, Any], took: Callable[[int], None]) -> Iterator[Any]:
    """The reply to one request: a description of the function and its source, or what came of calling it."""
    user_files.keep({path: text.encode("latin-1") for path, text in request.get("sources", {}).items()})
    function = load(*request["function"])
    sources = user_files.kept(Path(request["function"][0]).parent)  # before a call imports more
    if "arguments" in request:
        yield call(function, request, took)
    else:
        yield describe(function) | {"sources": {path: text.decode("latin-1") for path, text in sources.items()}}
