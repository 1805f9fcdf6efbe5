"""Checks of what a loop is given, before anything is computed: settings of sampling."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from podium.errors import ArgumentError, ConfigError
from podium.errors.texts import nearest
from podium.records import SamplingSettings
from podium.trainer.rules import RANGES, wrong_value

SAMPLING = (
    *("num_completions", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "greedy"),
    *("end_ids", "seed", "round"),
)
"""Settings that a call of `sample` may have of its own."""

_WHOLE = ("num_completions", "max_tokens", "top_k", "seed", "round")
_LIMITS: Mapping[str, tuple[float, float, str]] = {
    **RANGES,
    "num_completions": (1, math.inf, "a prompt has at least one completion"),
    "max_tokens": RANGES["max_completion_length"],
    "seed": (0, 2**63 - 1, "random numbers are keyed by 64 bits"),
    "round": (0, 2**63 - 1, "rounds are counted from 0"),
}
_SAME = {
    "stop": "end_ids",
    "max_completion_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_generations": "num_completions",
}
"""Names in other places of what a call takes."""


def number(name: str, value: Any, run: Any) -> float:
    """A number within the limits of its setting; `run` is the value that the fix names.

    >>> number("top_k", 5, 0), number("temperature", 1, 0.7)
    (5, 1.0)
    """
    try:
        if isinstance(value, str):
            raise TypeError
        made = operator.index(value) if name in _WHOLE else float(value)
    except (TypeError, ValueError):
        raise wrong_kind(name, "a whole number" if name in _WHOLE else "a number", value) from None
    if error := wrong_value(name, made, limits=_LIMITS, default=lambda _: run):
        raise error
    return made


def wrong_kind(name: str, kind: str, value: Any) -> ConfigError:
    """The error of a setting whose value is something else than it must be."""
    return ConfigError("loop.wrong_kind", name=name, kind=kind, value=value)


def refuse_unknown(call: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise `ArgumentError` for the first setting that a call does not know."""
    for name in given:
        if name not in known:
            near = _SAME[name] if _SAME.get(name) in known else nearest(name, known)
            raise ArgumentError("loop.unknown_setting", call=call, name=name, known=known, near=near)


def sampling_settings(run: SamplingSettings, given: Mapping[str, Any]) -> SamplingSettings:
    """The run's settings of sampling with those of one call; a temperature of 0 is greedy.

    Raises:
        ConfigError: an unknown name, or a value beyond its limits.
    """
    refuse_unknown("sample", given, SAMPLING)
    if given.get("temperature") == 0:
        given = {**given, "temperature": 1.0, "greedy": True}
    made: dict[str, Any] = {}
    for name, value in given.items():
        if name == "greedy":
            made[name] = bool(value)
        elif name == "end_ids":
            made[name] = _token_ids(value)
        else:
            made[name] = number(name, value, getattr(run, name))
    return dataclasses.replace(run, **made)


def _token_ids(value: Any) -> frozenset[int]:
    try:
        return frozenset(map(operator.index, value))
    except TypeError:
        raise wrong_kind("end_ids", "a list of token ids", value) from None
