"""Several rewards as one: weighted, gated, clipped, normalised, scheduled.

    gated(reward="numeric_match", gate="answer_format")

    - name: gated
      args: {reward: {name: numeric_match, args: {tolerance: 0.01}}, gate: answer_format}

How the values of the parts are joined is a function [K, R] -> [R] of this file that takes the values, the arguments of
the call, a function that logs a metric of the combination, and its settings; a function and not a closure, so that it
can be sent to other processes with its settings filled in.

A part is a function, the name of a library reward, or a mapping with `name` (or `function`) and `args`. What comes out
is a reward function that asks for exactly the columns that its parts ask for; it is `async` where one of them is.
The mean of every part is logged as `rewards/COMBINATION/PART/mean`.

Shape letters: R completions of the round, K parts. NaN is "no opinion".
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from podium.algorithm.advantages import combine
from podium.data.extract import text_of
from podium.errors import ConfigError, RewardError
from podium.errors.texts import as_line, did_you_mean, listed, nearest
from podium.isolation.reward_results import read_values
from podium.rewards.resolve import Reward, library_reward, resolve_rewards
from podium.rewards.score import Batch, error_of, fitted
from podium.rewards.style import group_of_each

Part = Callable[..., Any] | str | Mapping[str, Any]
"""A reward as a part of another one."""

PARTS: Mapping[str, tuple[str, ...]] = {
    "clipped": ("reward",),
    "gated": ("reward", "gate"),
    "normalised": ("reward",),
    "scheduled": ("reward",),
    "weighted": ("rewards",),
}
"""The settings of each combination that are rewards."""


class PartFailed(RuntimeError):
    """A part of a combination failed: for the boundary, an error like any other that a function raises."""


class Combined:
    """A reward function made of others. Made by the functions of this file."""

    def __init__(self, name: str, parts: Sequence[Reward], join: Join, asks: Sequence[str] = ()) -> None:
        self.__name__ = name
        self.parts = tuple(parts)
        self.join = join
        self.__signature__ = _signature(self.parts, asks)

    def __call__(self, **arguments: Any) -> list[float | None]:
        return self._joined([_answer(part, arguments) for part in self.parts], arguments)

    def _joined(self, answers: Sequence[Any], arguments: Mapping[str, Any]) -> list[float | None]:
        batch = _batch(arguments)
        results_K = [fitted(read_values(answer), len(batch)) for answer in answers]
        for result, part in zip(results_K, self.parts, strict=True):
            if result.failures:
                raise PartFailed(str(error_of(result, part, batch)))
        values_KR = np.array([result.values for result in results_K], dtype=np.float64)

        def log(name: str, value: float) -> None:
            if (log_metric := arguments.get("log_metric")) is not None:
                log_metric(f"rewards/{self.__name__}/{name}", value)

        for part, values_R in zip(self.parts, values_KR, strict=True):
            if not np.isnan(values_R).all():
                log(f"{part.name}/mean", float(np.nanmean(values_R)))
        joined_R = self.join(values_KR, arguments, log)
        return [None if math.isnan(value) else value for value in joined_R.tolist()]


class CombinedAsync(Combined):
    """The same where a part is `async`: those are awaited together."""

    async def __call__(self, **arguments: Any) -> list[float | None]:  # type: ignore[override]
        waiting = {k: _answer(part, arguments) for k, part in enumerate(self.parts) if part.is_async}
        awaited = dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
        answers = [awaited[k] if k in awaited else _answer(part, arguments) for k, part in enumerate(self.parts)]
        return self._joined(answers, arguments)


# --- the combinations ------------------------------------------------------------------------------------------------


def weighted(rewards: Sequence[Part], weights: Sequence[float] | None = None) -> Combined:
    """The weighted sum of several rewards. A part without an opinion is left out; None where none has one.

    In a recipe the weights may stand in the entries: `rewards: [{name: exact_match, weight: 2}, answer_format]`.

    >>> right_and_tagged = weighted(["answer_correct", "answer_format"], weights=[2, 0.5])
    >>> right_and_tagged(completions=["<answer>7</answer>", "<answer>8</answer>"], answer=["7", "7"])
    [2.5, 0.5]
    """
    if isinstance(rewards, (str, Mapping)) or not isinstance(rewards, Sequence) or not rewards:
        raise ConfigError(f"`weighted` needs a list of rewards; it is {rewards!r:.80}.", rewards=rewards)
    own = [part.get("weight", 1.0) if isinstance(part, Mapping) else 1.0 for part in rewards]
    factors = own if weights is None else list(weights)
    if len(factors) != len(rewards) or not all(map(_is_number, factors)):
        raise ConfigError(
            f"`weighted` needs one number as weight of each of its {len(rewards)} rewards: {factors}.",
            rewards_count=len(rewards),
            factors=factors,
        )
    return _combined("weighted", list(rewards), partial(weighted_sum, weights_K=tuple(map(float, factors))))


def gated(reward: Part, gate: Part, above: float = 0.0, otherwise: float = 0.0) -> Combined:
    """`reward` where `gate` gives more than `above`, else `otherwise`. None where one of the two has no opinion.

    For a reward that is worth nothing without another one: no credit for a right answer in the wrong form, say.

    >>> right_if_tagged = gated("numeric_match", gate="answer_format", above=0.5)
    >>> right_if_tagged(completions=["<answer>7</answer>", "7"], answer=["7", "7"])
    [1.0, 0.0]
    """
    _check_numbers(above=above, otherwise=otherwise)
    return _combined("gated", [reward, gate], partial(gate_values, above=above, otherwise=otherwise))


def clipped(reward: Part, low: float | None = None, high: float | None = None) -> Combined:
    """A reward held between `low` and `high`; either may be left out.

    >>> at_most_half = clipped("answer_format", high=0.5)
    >>> at_most_half(completions=["<answer>7</answer>", "<answer>7", "7"])
    [0.5, 0.25, 0.0]
    """
    bounds = {name: value for name, value in (("low", low), ("high", high)) if value is not None}
    _check_numbers(**bounds)
    if not bounds or list(bounds.values()) != sorted(bounds.values()):
        raise ConfigError(
            f"`clipped` needs `low` or `high`, and `low` not above `high`; they are {low} and {high}.",
            low=low,
            high=high,
        )
    return _combined("clipped", [reward], partial(clip, low=low, high=high))


def normalised(
    reward: Part, within: Literal["group", "round"] = "group", scale: Literal["std", "range", "none"] = "std"
) -> Combined:
    """A reward less its mean, divided by its deviation (`scale: range`: by its range; `none`: by nothing).

    Mean and scale are those of the completions of the same prompt, or with `within: round` of all completions that are
    scored together. Where all are equal the result is 0. Makes rewards of different scales comparable in a sum.

    >>> in_its_group = normalised("answer_format")
    >>> in_its_group(completions=["<answer>7</answer>", "7", "8", "8"], prompts=["a", "a", "b", "b"])
    [1.0, -1.0, 0.0, 0.0]
    """
    _one_of("within", within, ("group", "round"))
    _one_of("scale", scale, tuple(SCALES))
    join = partial(normalise, within=within, scale=scale)
    return _combined("normalised", [reward], join, asks=("prompts",))


def scheduled(
    reward: Part,
    schedule: Literal["linear", "cosine", "steps"] = "linear",
    start: float = 0.0,
    end: float = 1.0,
    begin: int = 0,
    steps: int | None = None,
    at: Mapping[int, float] | None = None,
) -> Combined:
    """A reward times a weight that changes with the training step (`trainer_state.global_step`).

    `linear` and `cosine` go from `start` at step `begin` to `end` in `steps` steps (by default up to the last step of
    the run). `steps` takes the weight that `at` gives for the last step reached, `start` before the first of them. The
    weight is logged as `rewards/COMBINATION/weight`.

    >>> from types import SimpleNamespace
    >>> fading = scheduled("answer_format", start=1.0, end=0.0, steps=100)
    >>> fading(completions=["<answer>7</answer>"], trainer_state=SimpleNamespace(global_step=25))
    [0.75]
    >>> later = scheduled("answer_format", schedule="steps", at={50: 1.0})
    >>> later(completions=["<answer>7</answer>"], trainer_state=SimpleNamespace(global_step=49))
    [0.0]
    """
    _one_of("schedule", schedule, ("linear", "cosine", "steps"))
    if (schedule == "steps") != bool(at):
        raise ConfigError("`scheduled` takes `at`, as in `at: {0: 0.1, 100: 1}`, with `schedule: steps` and only then.")
    if steps is not None and steps < 1:
        raise ConfigError(f"`steps` must be 1 or more; it is {steps}.", steps=steps)
    _check_numbers(start=start, end=end, **{f"at {step}": weight for step, weight in (at or {}).items()})
    table = tuple(sorted((int(step), float(weight)) for step, weight in (at or {}).items()))
    join = partial(times_weight, schedule=schedule, start=start, end=end, begin=begin, steps=steps, at=table)
    return _combined("scheduled", [reward], join, asks=("trainer_state",))


# --- parts -----------------------------------------------------------------------------------------------------------


def _combined(kind: str, parts: Sequence[Part], join: Join, asks: Sequence[str] = ()) -> Combined:
    rewards = resolve_rewards([_function(part, kind) for part in parts])
    name = kind if len(rewards) > 1 and kind == "weighted" else f"{kind}_{rewards[0].name}"
    return (CombinedAsync if any(reward.is_async for reward in rewards) else Combined)(name, rewards, join, asks)


_PART_KEYS = ("name", "function", "args", "weight")


def _function(part: Part, kind: str) -> Any:
    """A part in a form that `resolve_rewards` takes. Raises `ConfigError`."""
    if isinstance(part, str):
        return part if "/" in part else library_reward(part)
    if callable(part):
        return part
    if not isinstance(part, Mapping):
        raise ConfigError(
            f"a part of `{kind}` is a reward: a function, a name, or a mapping with `name` and `args`.", kind=kind
        )
    for key in part:
        if key not in _PART_KEYS:
            raise ConfigError(
                f"unknown key `{key}` of a part of `{kind}`.",
                fix=did_you_mean(str(key), _PART_KEYS) or as_line(key, None),
                settings=(key,),
                setting=key,
                kind=kind,
            )
    if "weight" in part and kind != "weighted":
        raise ConfigError(
            f"`weight` has no meaning in a part of `{kind}`; only the parts of `weighted` have one.", kind=kind
        )
    if callable(part.get("function")) or "/" in str(part.get("function")):
        return part["function"]
    args = part.get("args") or {}
    if not isinstance(part.get("name"), str) or not isinstance(args, Mapping):
        raise ConfigError(
            f"a part of `{kind}` needs a `name` from the library, or a function; `args` is a mapping.", kind=kind
        )
    return library_reward(part["name"], **args)


def _signature(parts: Sequence[Reward], asks: Sequence[str]) -> inspect.Signature:
    """The arguments of all parts, and those of the combination itself; it needs all that one of them needs."""
    needs = dict.fromkeys(name for part in parts for name in part.needs)
    wants = dict.fromkeys(name for part in parts for name in sorted(part.wants or ()))
    optional = dict.fromkeys(["completions", *asks, "log_metric", *wants])
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword) for name in needs]
    parameters += [inspect.Parameter(name, keyword, default=None) for name in optional if name not in needs]
    if any(part.wants is None for part in parts):
        parameters.append(inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _answer(part: Reward, arguments: Mapping[str, Any]) -> Any:
    wanted = {name: value for name, value in arguments.items() if part.wants is None or name in part.wants}
    try:
        return part.function(**wanted)
    except RewardError as error:  # of a function in a file; what it becomes is for the boundary to say
        raise PartFailed(str(error)) from error


def _batch(arguments: Mapping[str, Any]) -> Batch:
    """The completions of a call, for messages."""
    num = max((len(value) for value in arguments.values() if isinstance(value, (list, tuple))), default=0)
    completions = arguments.get("completions") or [""] * num
    return Batch(
        prompts=arguments.get("prompts") or [""] * num,
        completions=completions,
        completion_ids=arguments.get("completion_ids") or [[]] * num,
        columns={},
        texts=[text_of(completion) for completion in completions],
        rows=[-1] * num,
        places=[f"{index + 1} of {num}" for index in range(num)],
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_numbers(**settings: Any) -> None:
    for name, value in settings.items():
        if not _is_number(value):
            raise ConfigError(
                f"`{name}` must be a finite number; it is {value!r}.", settings=(name,), name=name, value=value
            )


def _one_of(setting: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        near = nearest(str(value), choices)
        raise ConfigError(
            f"`{setting}` is one of {listed(choices)}; it is `{value}`.",
            fix=f"Did you mean `{near}`?" if near else "",
            settings=(setting,),
            setting=setting,
            choices=choices,
            value=value,
            near=near,
        )


Log = Callable[[str, float], None]
Join = Callable[[np.ndarray, Mapping[str, Any], Log], np.ndarray]


def weighted_sum(values_KR: np.ndarray, _: Mapping[str, Any], __: Log, *, weights_K: tuple[float, ...]) -> np.ndarray:
    """The weighted sum of what has an opinion."""
    return combine(values_KR.T, np.array(weights_K))


def gate_values(values_KR: np.ndarray, _: Mapping[str, Any], __: Log, *, above: float, otherwise: float) -> np.ndarray:
    """The first part where the second is above a threshold."""
    reward_R, gate_R = values_KR
    unknown_R = np.isnan(values_KR).any(axis=0)
    return np.where(unknown_R, np.nan, np.where(gate_R > above, reward_R, otherwise))


def clip(values_KR: np.ndarray, _: Mapping[str, Any], __: Log, *, low: float | None, high: float | None) -> np.ndarray:
    """Held between two bounds."""
    return np.asarray(np.clip(values_KR[0], low, high))


SCALES: Mapping[str, Callable[[np.ndarray], float]] = {
    "std": lambda known: float(known.std()),
    "range": lambda known: float(np.ptp(known)),
    "none": lambda known: 1.0,
}
_FLAT = 1e-12
"""Deviation, relative to the largest value, under which values count as equal: that of rounding."""


def normalise(values_KR: np.ndarray, arguments: Mapping[str, Any], _: Log, *, within: str, scale: str) -> np.ndarray:
    """Less the mean, over the scale, of the group or of the round."""
    (values_R,) = values_KR
    group_R = np.zeros(len(values_R), dtype=np.int64)
    if within == "group":
        prompts = arguments.get("prompts")
        if prompts is None:
            raise ConfigError("`normalised` within the group must be called with `prompts`.")
        group_R = np.array(group_of_each(prompts))
    result_R = np.full(len(values_R), np.nan)
    for group in np.unique(group_R):
        member_R = (group_R == group) & ~np.isnan(values_R)
        known = values_R[member_R]
        if known.size:
            centred = known - known.mean()
            is_flat = np.abs(centred).max() <= _FLAT * np.abs(known).max()
            result_R[member_R] = 0.0 if is_flat else centred / SCALES[scale](known)
    return result_R


def times_weight(values_KR: np.ndarray, arguments: Mapping[str, Any], log: Log, **schedule: Any) -> np.ndarray:
    """Times a weight that depends on the training step; it is logged."""
    weight = weight_at(arguments.get("trainer_state"), **schedule)
    log("weight", weight)
    return np.asarray(values_KR[0] * weight)


def weight_at(
    state: Any,
    *,
    schedule: str,
    start: float,
    end: float,
    begin: int,
    steps: int | None,
    at: tuple[tuple[int, float], ...],
) -> float:
    """At the step of `state`, transformers' `TrainerState`; at the first step where there is none."""
    step = 0 if state is None else int(state.global_step)
    if schedule == "steps":
        return next((weight for first, weight in reversed(at) if step >= first), start)
    if steps is None:
        steps = max(1, (0 if state is None else int(state.max_steps)) - begin)
    progress = min(1.0, max(0.0, (step - begin) / steps))
    if schedule == "cosine":
        progress = 0.5 * (1.0 - math.cos(math.pi * progress))
    return start + (end - start) * progress
