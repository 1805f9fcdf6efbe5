"""TRL's one big config -> a small frozen record for each room that computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from podium.agents.outcome import Side
from podium.agents.tools import CallLimits
from podium.algorithm.advantages import AdvantageSettings
from podium.algorithm.losses import CORRECTIONS, EntropyControl, LossSettings
from podium.engines.table import VllmSettings
from podium.errors import ConfigError
from podium.records import SamplingSettings
from podium.rewards.score import CallSettings
from podium.runs.checkpoint import checkpoints
from podium.runs.completions_log import CompletionsLogSettings
from podium.trainer.config import GRPOConfig
from podium.trainer.rules import ARGUMENTS, on_error, upper_clip

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sampling_settings(
    args: GRPOConfig,
    end_ids: frozenset[int],
    *,
    num_completions: int,
    round_number: int,
    greedy: bool = False,
    temperature: float | None = None,
) -> SamplingSettings:
    """Settings of sampling for one generation round. `temperature` is the training's unless given."""
    extra = {name: value for name, value in (args.generation_kwargs or {}).items() if name not in ARGUMENTS}
    if "eos_token_id" in extra:
        ids = extra.pop("eos_token_id")
        end_ids = frozenset([ids] if isinstance(ids, int) else ids)
    extra.pop("do_sample", None)
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
        in_order_of_answers=args.tool_order == "arrival",
        extra=extra,
        replay=args.sampling_replay,
    )


def half_dtype(args: GRPOConfig) -> torch.dtype | None:
    """The type in which autocast computes; None: there is none."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else None


def vllm_settings(args: GRPOConfig) -> VllmSettings:
    """Settings of vLLM for this run."""
    on_cpu = args.device.type == "cpu"
    if on_cpu:
        dtype = "float32" if args.product_precision == "float32" else "bfloat16"
    elif args.fp16:
        dtype = "float16"
    else:
        dtype = "bfloat16" if args.bf16 else "auto"
    return VllmSettings(
        mode=args.vllm_mode,
        max_prompt_length=args.max_prompt_length,
        max_completion_length=args.max_completion_length,
        max_model_length=args.vllm_max_model_length,
        device=args.device,
        process_index=args.process_index,
        local_process_index=args.local_process_index,
        world_size=args.world_size,
        output_dir=Path(args.output_dir),
        newest_checkpoint=lambda: next(iter(checkpoints(Path(args.output_dir))), None),
        trust_remote_code=args.trust_remote_code,
        server_base_url=args.vllm_server_base_url,
        server_host=args.vllm_server_host,
        server_port=args.vllm_server_port,
        server_timeout=args.vllm_server_timeout,
        group_port=args.vllm_group_port,
        weights_folder=args.vllm_weights_folder,
        async_rollouts=args.async_rollouts,
        importance_sampling_correction=args.vllm_importance_sampling_correction,
        replays=args.sampling_replay and (args.top_p < 1 or bool(args.top_k) or bool(args.min_p)),
        top_k=args.top_k or 0,
        dtype=dtype,
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        max_sequences=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
        enable_sleep_mode=args.vllm_enable_sleep_mode,
        model_impl=args.vllm_model_impl,
    )


def has_other_sampler(args: GRPOConfig) -> bool:
    """Whether completions come from other weights, or from an engine that computes otherwise, than training has."""
    return args.use_vllm or args.async_rollouts > 0


def loss_settings(args: GRPOConfig) -> LossSettings:
    """The loss's own knobs.

    TRL masks whole completions by default, for samplers that differ by rounding; of older weights that would leave
    little, so tokens are weighed (decoupled PPO, AReaL, arXiv:2505.24298) unless a mode is asked for.
    """
    correction = None
    if has_other_sampler(args) and args.vllm_importance_sampling_correction:
        is_asked = "vllm_importance_sampling_mode" in (args._given or {})
        mode = "token_truncate" if args.async_rollouts and not is_asked else args.vllm_importance_sampling_mode
        correction = dataclasses.replace(
            CORRECTIONS[mode],
            low=args.vllm_importance_sampling_clip_min,
            high=args.vllm_importance_sampling_clip_max,
        )
    return LossSettings(
        loss_type=args.loss_type,
        level=args.importance_sampling_level,
        epsilon_low=args.epsilon,
        epsilon_high=upper_clip(args),
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
        correction=correction,
        observation_coef=args.observation_coef,
    )


def advantage_settings(args: GRPOConfig, num_rewards: int, num_own: int = 0) -> AdvantageSettings:
    """Settings of advantages. Raises `ConfigError` unless there are as many weights as reward functions.

    `num_own`: rewards of environments, which come after those and weigh 1.
    """
    weights = args.reward_weights if args.reward_weights is not None else [1.0] * num_rewards
    if len(weights) != num_rewards:
        raise ConfigError(
            f"reward_weights has {len(weights)} values for {num_rewards} reward functions; the numbers must match.",
            code="W015",
            fix="Give one weight per function, in the order of reward_funcs.",
            settings=("reward_weights",),
            weights_count=len(weights),
            num_rewards=num_rewards,
        )
    weights_K = np.asarray([*weights, *[1.0] * num_own], np.float64)
    aggregation = args.multi_objective_aggregation
    if args.turn_discount is not None and aggregation != "sum_then_normalize":
        raise ConfigError(
            f"turn_discount cannot be used with multi_objective_aggregation={aggregation!r}: step rewards are one part "
            "of a sum.",
            fix='set multi_objective_aggregation="sum_then_normalize"',
        )
    return AdvantageSettings(
        weights_K=weights_K,
        estimator=args.advantage_estimator,
        aggregation=aggregation,
        scale_rewards=args.scale_rewards,
        turn_discount=args.turn_discount,
    )


def call_settings(args: GRPOConfig) -> CallSettings:
    """Limits and error handling of calls of reward functions."""
    return CallSettings(
        limit=args.reward_timeout or None,
        on_error=on_error(args.on_reward_error),
        num_workers=args.reward_workers,
    )


def call_limits(args: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> CallLimits:
    """Limits of calls of tools."""
    return CallLimits(
        timeout=args.tool_timeout or None,
        max_result_tokens=args.max_tool_result_tokens,
        cut=cast(Side, args.tool_result_cut),
        count=lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]),
    )


def entropy_control(args: GRPOConfig) -> EntropyControl:
    """The adaptive entropy coefficient at the start of a run."""
    return EntropyControl(
        coef=args.entropy_coef,
        target=args.entropy_target,
        step=args.entropy_coef_delta,
        coef_min=args.entropy_coef_min,
        coef_max=args.entropy_coef_max,
    )


def completions_log_settings(args: GRPOConfig) -> CompletionsLogSettings:
    """Destination of tables of completions."""
    return CompletionsLogSettings(
        output_dir=Path(str(args.output_dir)),
        num_to_print=args.num_completions_to_print,
        unique_prompts=args.log_unique_prompts,
        report_to=tuple(args.report_to or ()),
        hub_repo=args.log_completions_hub_repo,
        hub_token=args.hub_token,
        hub_private=args.hub_private_repo,
    )
