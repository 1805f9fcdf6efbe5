"""Checks of what a loop is given, before anything is computed."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from podium.algorithm.losses import OBJECTIVES, LossSettings
from podium.errors import ArgumentError, ConfigError, DataError
from podium.errors.texts import counted, named_list, nearest
from podium.models.loading import context_length
from podium.records import Prompt, Sample, SamplingSettings
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
    "eps": RANGES["adam_epsilon"],
    "betas": RANGES["adam_beta1"],
    "divide_by": (1e-9, math.inf, "a loss cannot be divided by it"),
}
_SAME = {
    "stop": "end_ids",
    "max_completion_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_generations": "num_completions",
    "lr": "learning_rate",
    "wd": "weight_decay",
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
    if math.isinf(made) and name != "max_grad_norm":
        raise wrong_kind(name, "a finite number", value)
    if error := wrong_value(name, made, limits=_LIMITS, default=lambda _: run):
        raise error
    return made


def wrong_kind(name: str, kind: str, value: Any) -> ConfigError:
    """The error of a setting whose value is something else than it must be."""
    return ConfigError(f"`{name}` must be {kind}; got {value!r}.", name=name, kind=kind, value=value)


def refuse_unknown(call: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise `ArgumentError` for the first setting that a call does not know."""
    for name in given:
        if name not in known:
            near = _SAME[name] if _SAME.get(name) in known else nearest(name, known)
            raise ArgumentError(
                f"{call} has no setting `{name}`; there are {named_list(known)}.",
                fix=f"Did you mean `{near}`?" if near else "",
                call=call,
                name=name,
                known=known,
                near=near,
            )


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


def step_settings(group: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a group of parameters as one step has them. Raises as `sampling_settings` does."""
    own = [name for name in group if name not in ("params", "lr", "initial_lr")]
    refuse_unknown("optim_step", given, ("learning_rate", "max_grad_norm", *own))
    made = dict(given)
    for name in ("eps", "weight_decay"):
        if name in given and isinstance(group[name], int | float):
            made[name] = number(name, given[name], group[name])
    if "betas" in given:
        betas = given["betas"]
        before = group["betas"]
        if not isinstance(betas, Sequence) or len(betas) != len(before):
            raise wrong_kind("betas", f"{len(before)} numbers", betas)
        made["betas"] = tuple(number("betas", beta, before) for beta in betas)
    return made


def _token_ids(value: Any) -> frozenset[int]:
    try:
        return frozenset(map(operator.index, value))
    except TypeError:
        raise wrong_kind("end_ids", "a list of token ids", value) from None


_NEEDED = {
    "beta": "log-probabilities of a reference policy",
    "correction": "log-probabilities of another sampler",
    "observation_coef": "tokens that were given, not drawn",
}
"""Settings of a loss that work on more than a loop's samples have."""


def check_loss(loss: LossSettings) -> None:
    """Raise `ConfigError` for a loss that there is not, or that a loop cannot compute."""
    if error := wrong_value("loss_type", loss.loss_type, choices=tuple(OBJECTIVES), default=lambda _: "dapo"):
        raise error
    for name, what in _NEEDED.items():
        if getattr(loss, name):
            raise ConfigError(
                f"`{name}` of a LossSettings needs {what}, which a loop's samples do not have.",
                fix="leave it out; a penalty for each token can be part of its weights",
                name=name,
                what=what,
            )


# ---- data ----


def as_array(values: Any) -> np.ndarray:
    """Numbers as an array, whatever device holds them. Raises `TypeError` or `ValueError` for anything else."""
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    return np.asarray(values.float() if values.is_floating_point() else values)  # numpy has no bfloat16


def datum(prompt_ids: Any, token_ids: Any, weights: Any, logps: Any = None) -> Sample:
    """A sample whose tokens behind the prompt all have a weight.

    What a loss has once for a sequence, such as the sign in an off-policy mask, follows the mean of the weights.

    Args:
        prompt_ids: tokens before those that are trained on.
        token_ids: the tokens behind them.
        weights: advantages, or the weights of cross-entropy: one for all tokens, or one for each. 0 leaves a token out.
        logps: log-probabilities of the sampler, for ratios; None: the weights are those that sampled, and ratios are 1.

    Raises:
        DataError: what is no list of token ids, or numbers that are not finite or not one for each token.
    """
    prompt_ids = _ids("prompt_ids", prompt_ids)
    token_ids = _ids("token_ids", token_ids)
    length = len(token_ids)
    weights_L = np.broadcast_to(_numbers("weights", weights, ((), (length,))), (length,)).copy()
    unknown_L = np.full(length, np.nan, np.float32)
    logps_L = unknown_L if logps is None else _numbers("logps", logps, ((length,),), finite=False)
    return Sample(
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        actions=np.ones(length, bool),
        advantage=float(weights_L.mean()) if length else 0.0,
        advantages_A=weights_L,
        sampled_logps_A=logps_L,
        old_logps_A=None if logps is None else logps_L,
    )


def checked(given: Any, config: Any, *, old: bool) -> list[Sample]:
    """The samples as a list. `old`: with the sampler's log-probabilities, for ratios; else without.

    Raises:
        DataError: anything but samples, such as the groups that `sample` gave; one that the model cannot take; with
            `old`, log-probabilities that are not known.
    """
    samples = list(given) if isinstance(given, Iterable) else [given]
    for place, sample in enumerate(samples):
        where = f"datum {place}"
        if not isinstance(sample, Sample):
            raise DataError(
                f"an object of type {type(sample).__name__} is no Sample.",
                where=where,
                fix="loop.data(groups, advantages) makes samples of the groups that sample gave; "
                "loop.datum(prompt_ids=..., token_ids=..., weights=...) one of tokens",
                kind=type(sample).__name__,
            )
        check_prompt(sample.prompt_ids, where, config)
        _check_ids("token_ids", sample.token_ids, where, config)
        total = len(sample.prompt_ids) + len(sample.token_ids)
        context = context_length(config)
        if context is not None and total > context:
            raise DataError(
                f"prompt_ids and token_ids have {counted(total, 'token')} together, and the model has "
                f"{counted(context, 'position')}.",
                where=where,
                fix="shorten them",
                length=total,
                context=context,
            )
        if old and sample.old_logps_A is not None and not np.isfinite(sample.old_logps_A).all():
            raise _unknown_logps(sample.old_logps_A, where)
    return samples if old else [dataclasses.replace(sample, old_logps_A=None) for sample in samples]


def _unknown_logps(logps_A: np.ndarray, where: str) -> DataError:
    if np.isnan(logps_A).all():
        return DataError(
            "its log-probabilities are not known at the run's temperature: it was sampled at another.",
            where=where,
            fix="sample at the run's temperature, or train on it by cross_entropy",
        )
    return DataError("`logps` must be finite numbers.", where=where, name="logps")


def check_prompt(ids: Sequence[int], where: str, config: Any) -> None:
    """Raise `DataError` for a prompt without tokens, or with some that the model does not have."""
    if len(ids) == 0:
        raise DataError(
            "prompt_ids is empty, and nothing would predict the first token.",
            where=where,
            fix="begin with a token that is not trained, such as the tokenizer's bos_token_id",
        )
    _check_ids("prompt_ids", ids, where, config)


def check_room(prompts: Iterable[Prompt], max_tokens: int, config: Any) -> None:
    """Raise `DataError` for the first prompt behind which the model has fewer positions than `max_tokens`."""
    context = context_length(config)
    for place, prompt in enumerate(prompts):
        length = len(prompt.token_ids)
        if context is not None and length + max_tokens > context:
            raise DataError(
                f"Prompt {place} has {counted(length, 'token')}, and with max_tokens={max_tokens} the "
                f"completion would go beyond the model's {counted(context, 'position')}.",
                fix="a smaller max_tokens, or a shorter prompt",
                place=place,
                length=length,
                max_tokens=max_tokens,
                context=context,
            )


def _check_ids(name: str, ids: Sequence[int], where: str, config: Any) -> None:
    size = config.get_text_config().vocab_size
    if len(ids) and not 0 <= min(ids) <= max(ids) < size:
        raise DataError(
            f"`{name}` must be a list of whole numbers from 0 to below {size}, the size of the model's vocabulary.",
            where=where,
            name=name,
            size=size,
        )


def _ids(name: str, values: Any) -> tuple[int, ...]:
    try:
        array = as_array(values)
    except (TypeError, ValueError):
        array = np.empty((0, 0), object)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise DataError(f"`{name}` must be a list of whole numbers.", name=name)
    return tuple(array.tolist())


def _numbers(name: str, values: Any, shapes: Sequence[tuple[int, ...]], *, finite: bool = True) -> np.ndarray:
    """Numbers as float32, of one of the shapes."""
    try:
        with np.errstate(over="ignore"):
            array: np.ndarray = as_array(values).astype(np.float32)
    except (TypeError, ValueError):
        raise DataError(f"`{name}` must be finite numbers.", name=name) from None
    if array.shape not in shapes:
        length = shapes[-1][0]
        shape = str(array.shape) if array.ndim > 1 else None
        has = f"the shape {shape}" if shape else counted(array.size, "number")
        raise DataError(
            f"`{name}` has {has} for {counted(length, 'token')}.",
            fix=f"one number for each token, without a second dimension: not {shape}"
            if shape
            else "one number for each token",
            name=name,
            given=array.size,
            length=length,
            shape=shape,
        )
    if finite and not np.isfinite(array).all():
        raise DataError(f"`{name}` must be finite numbers.", name=name)
    return array
