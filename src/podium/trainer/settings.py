"""TRL's one big config -> a small frozen record for each room that computes."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from podium.algorithm.advantages import AdvantageSettings
from podium.algorithm.losses import CORRECTIONS, Correction, EntropyControl, LossSettings
from podium.errors import ConfigError, did_you_mean
from podium.records import SamplingSettings
from podium.rewards.score import CallSettings

if TYPE_CHECKING:
    from podium.trainer.config import GRPOConfig

logger = logging.getLogger(__name__)


def sampling_settings(
    args: GRPOConfig,
    end_ids: frozenset[int],
    *,
    num_completions: int,
    round_number: int,
    greedy: bool = False,
    temperature: float | None = None,
) -> SamplingSettings:
    """How one generation round is sampled.

    `temperature` is the training's unless given.
    """
    extra = {name: value for name, value in (args.generation_kwargs or {}).items() if name not in ARGUMENTS}
    if "eos_token_id" in extra:
        ids = extra.pop("eos_token_id")
        end_ids = frozenset([ids] if isinstance(ids, int) else ids)
    greedy = extra.pop("do_sample", True) is False or greedy
    if args.cache_implementation is not None:
        extra["cache_implementation"] = args.cache_implementation
    return SamplingSettings(
        num_completions=num_completions,
        max_tokens=args.max_completion_length,
        temperature=args.temperature if temperature is None else temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        greedy=greedy,
        end_ids=end_ids,
        seed=args.seed if args.data_seed is None else args.data_seed,
        round=round_number,
        extra=extra,
    )


ARGUMENTS: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length"),
}
"""Names in `generation_kwargs` -> the arguments that say the same."""

REFUSED = {
    **dict.fromkeys(("num_return_sequences", "n"), "num_generations says how many completions a prompt gets"),
    **dict.fromkeys(("return_dict_in_generate", "logprobs", "seed"), "sampling sets it"),
}
"""Names in `generation_kwargs` that would break groups, with the reason."""


def take_generation_kwargs(args: GRPOConfig) -> None:
    """Make what `generation_kwargs` overrides, as in TRL, the value of the argument.

    Sampling, training, the reference and the proof read the argument, so they cannot differ: TRL 1.16 samples at
    the one temperature and trains at the other.
    """
    for name in REFUSED.keys() & (args.generation_kwargs or {}):
        what = f"generation_kwargs has {name}: {REFUSED[name]}."
        raise ConfigError(what, code="C030", fix=f"take `{name}` out of generation_kwargs")
    for name, argument in ARGUMENTS.items():
        value, before = (args.generation_kwargs or {}).get(name), getattr(args, argument)
        if value is None:
            continue
        whole = isinstance(getattr(type(args), argument), int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            kind = "whole number" if whole else "number"
            raise ConfigError(f"generation_kwargs: {name} is {value!r}; it must be a {kind}.", code="C030")
        if before not in (value, getattr(type(args), argument)):
            logger.warning("generation_kwargs: %s %r counts, and not %s: %r.", name, value, argument, before)
        setattr(args, argument, value)


def loss_settings(args: GRPOConfig) -> LossSettings:
    """The loss's own knobs."""
    return LossSettings(
        loss_type=args.loss_type,
        level=args.importance_sampling_level,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        delta=args.delta,
        beta=args.beta,
        use_bias_correction_kl=args.use_bias_correction_kl,
        sapo_temperature_pos=args.sapo_temperature_pos,
        sapo_temperature_neg=args.sapo_temperature_neg,
        vespo_k_pos=args.vespo_k_pos,
        vespo_lambda_pos=args.vespo_lambda_pos,
        vespo_k_neg=args.vespo_k_neg,
        vespo_lambda_neg=args.vespo_lambda_neg,
        max_completion_length=args.max_completion_length,
        off_policy_mask_threshold=args.off_policy_mask_threshold,
        correction=_correction(args),
    )


def _correction(args: GRPOConfig) -> Correction | None:
    """How the loss corrects for completions of another engine's computing; None: it does not."""
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return None
    return dataclasses.replace(
        CORRECTIONS[args.vllm_importance_sampling_mode],
        low=args.vllm_importance_sampling_clip_min,
        high=args.vllm_importance_sampling_clip_max,
    )


def advantage_settings(args: GRPOConfig, num_rewards: int) -> AdvantageSettings:
    """How rewards become advantages. Raises `ConfigError` unless there are as many weights as reward functions."""
    weights = args.reward_weights if args.reward_weights is not None else [1.0] * num_rewards
    if len(weights) != num_rewards:
        raise ConfigError(
            f"reward_weights has {len(weights)} values for {num_rewards} reward functions; the numbers must match.",
            code="W015",
            fix="Give one weight per function, in the order of reward_funcs.",
        )
    return AdvantageSettings(
        weights_K=np.asarray(weights, np.float64),
        scale_rewards=args.scale_rewards,
        aggregation=args.multi_objective_aggregation,
    )


def call_settings(args: GRPOConfig) -> CallSettings:
    """How reward functions are called."""
    return CallSettings(
        limit=args.reward_timeout or None,
        on_error=_on_error(args.on_reward_error),
        num_workers=args.reward_workers,
    )


def _on_error(value: Any) -> Literal["raise", "none"] | float:
    """As a word or a number; YAML's `null` and Python's None mean `none`."""
    text = "none" if value is None else str(value).strip().lower()
    if text in ("raise", "none"):
        return cast(Literal["raise", "none"], text)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        what = f"on_reward_error is {value!r}; it must be `raise`, `none` or a finite number."
        raise ConfigError(what, fix=did_you_mean(text, ("raise", "none")))
    return number


def entropy_control(args: GRPOConfig) -> EntropyControl:
    """The adaptive entropy coefficient at the start of a run."""
    return EntropyControl(
        coef=args.entropy_coef,
        target=args.entropy_target,
        step=args.entropy_coef_delta,
        coef_min=args.entropy_coef_min,
        coef_max=args.entropy_coef_max,
    )


UNLIKE_PAPER: tuple[tuple[Callable[[GRPOConfig], bool], str, str, tuple[str, str]], ...] = (
    (
        lambda args: args.loss_type == "luspo" and args.importance_sampling_level != "sequence",
        "loss_type luspo with importance_sampling_level {args.importance_sampling_level}",
        "LUSPO is defined by ratios of whole completions",
        ("importance_sampling_level", "sequence"),
    ),
    (
        lambda args: args.loss_type == "vespo" and args.importance_sampling_level != "token",
        "loss_type vespo with importance_sampling_level {args.importance_sampling_level}",
        "VESPO weighs whole completions by itself",
        ("importance_sampling_level", "token"),
    ),
    (
        lambda args: (
            args.importance_sampling_level == "sequence" and args.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo")
        ),
        "importance_sampling_level sequence with loss_type {args.loss_type}",
        "the loss sums over tokens, so every completion weighs as much as it is long; GSPO takes their mean",
        ("loss_type", "grpo"),
    ),
    (
        lambda args: args.loss_type == "dr_grpo" and args.scale_rewards == "group",
        "loss_type dr_grpo with scale_rewards {args.scale_rewards}",
        "Dr. GRPO removes the division by the group's deviation; with it the bias towards easy prompts is back",
        ("scale_rewards", "none"),
    ),
)
"""(when, what, why, the setting that cures it): what works and is not what the paper of that name does."""


def warn_unlike_paper(args: GRPOConfig) -> None:
    """Log what `podium check` finds as C025, which is why the command line does not show it again."""
    for applies, what, why, (name, value) in UNLIKE_PAPER:
        if applies(args):
            logger.warning("%s: %s. Set %s=%r.", what.format(args=args), why, name, value, extra={"code": "C025"})
