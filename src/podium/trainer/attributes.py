"""TRL's public attributes of a trainer: what scripts, callbacks and subclasses read, by the same names.

Each is computed when it is read, so none can be out of date. None can be set. A list, dict, tensor or generation config
that is read is the reader's own: a change of it changes nothing in training, which is fixed when the trainer is made.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import GenerationConfig, Trainer

from podium.agents.environments import EnvironmentPools
from podium.agents.setup import Agents
from podium.algorithm.losses import LossInputs, close_to_sampler, keep_high_entropy
from podium.errors import ConfigError, Finding, way_on
from podium.errors.texts import with_fix
from podium.isolation.threads import background_loop
from podium.rewards.model import RewardModel
from podium.trainer.rules import ignored_codes

Read = Callable[[Any], Any]
Class = TypeVar("Class", bound=type)

# fmt: off
OF_ARGS = (
    "max_completion_length", "top_p", "top_k", "min_p", "repetition_penalty",
    "use_transformers_continuous_batching", "pad_to_multiple_of", "use_vllm", "vllm_mode",
    "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "mask_truncated_completions", "top_entropy_quantile", "use_adaptive_entropy", "shuffle_dataset",
    "log_completions", "log_multimodal", "log_unique_prompts", "num_completions_to_print",
)
# fmt: on
"""Attributes that are a field of `args` of the same name."""

OF_LOSS = ("beta", "loss_type", "epsilon_low", "epsilon_high", "off_policy_mask_threshold")
"""Attributes that are a field of the loss settings of the same name."""


def _generation(trainer: Any) -> dict[str, Any]:
    """TRL's `generation_kwargs`: the arguments of `generate` that sample as the trainer does."""
    args = trainer.args
    tokenizer = trainer.run.policy.tokenizer
    named = ("top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")
    return {
        "max_new_tokens": args.max_completion_length,
        "do_sample": True,
        "temperature": trainer.temperature,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": trainer.eos_token_ids,
        **{name: getattr(args, name) for name in named},
        **(args.generation_kwargs or {}),
    }


def _environment_tools(agents: Agents) -> dict[str | None, list[Any]]:
    """TRL's `_env_tools`: the functions that completions may call, by the name of their environment."""
    if agents.pools is None:
        return {}
    functions = [tool.function for tool in agents.tools]
    return {name: [*functions, *agents.pools.methods(name)] for name in agents.pools.factories}


def _pools(trainer: Any, name: str) -> EnvironmentPools:
    """Raises `AttributeError` without environments, as in TRL."""
    pools = trainer.run.agents.pools
    if pools is None:
        raise AttributeError(f"Without `environment_factory` a GRPOTrainer has no `{name}`.", name=name)
    return pools


def _tools(agents: Agents) -> list[Any]:
    """TRL's `tools`: those of all environments, without repetitions."""
    named = _environment_tools(agents) or {None: [tool.function for tool in agents.tools]}
    return [*dict.fromkeys(function for functions in named.values() for function in functions)]


ATTRIBUTES: Mapping[str, Read] = {
    **{name: attrgetter(f"args.{name}") for name in OF_ARGS},
    "temperature": attrgetter("run.policy.forward.temperature"),
    "num_generations": attrgetter("run.plan.num_generations"),
    "num_iterations": attrgetter("run.plan.iterations"),
    "reward_funcs": lambda trainer: [  # as they were given; a reward model is its module
        r.function.model if isinstance(r.function, RewardModel) else r.function for r in trainer.run.scoring.rewards
    ],
    "reward_func_names": lambda trainer: [reward.name for reward in trainer.run.scoring.rewards],
    "reward_processing_classes": lambda trainer: [
        r.function.tokenizer if isinstance(r.function, RewardModel) else None for r in trainer.run.scoring.rewards
    ],
    "reward_weights": lambda trainer: torch.tensor(trainer.weights.weights_K, dtype=torch.float32),
    "ref_model": lambda trainer: getattr(trainer.run.objective.reference, "copy", None),
    **{name: attrgetter(f"run.objective.loss.{name}") for name in OF_LOSS},
    "importance_sampling_level": attrgetter("run.objective.loss.level"),
    "scale_rewards": attrgetter("run.scoring.advantage.scale_rewards"),
    "multi_objective_aggregation": attrgetter("run.scoring.advantage.aggregation"),
    "entropy_coef": lambda trainer: (
        trainer.entropy.coef if trainer.args.use_adaptive_entropy else trainer.args.entropy_coef
    ),
    "router_aux_loss_coef": attrgetter("run.objective.router_coef"),
    "aux_loss_enabled": lambda trainer: bool(trainer.run.objective.router_coef),
    "eos_token_ids": lambda trainer: sorted(trainer.run.policy.end_ids),
    "num_generations_eval": lambda trainer: trainer.args.num_generations_eval or trainer.num_generations,
    "chat_template_kwargs": lambda trainer: trainer.args.chat_template_kwargs or {},
    "chat_template": attrgetter("run.agents.chat.chat_template"),
    "tools": lambda trainer: _tools(trainer.run.agents),
    "environments": attrgetter("run.agents.environments"),
    "environment_factories": lambda trainer: getattr(trainer.run.agents.pools, "factories", None),
    "_environment_pool": lambda trainer: _pools(trainer, "_environment_pool").training,
    "_env_tools": lambda trainer: _pools(trainer, "_env_tools") and _environment_tools(trainer.run.agents),
    "rollout_func": attrgetter("run.agents.rollout_func"),
    "max_tool_calling_iterations": lambda trainer: (
        sys.maxsize if trainer.args.max_tool_calling_iterations is None else trainer.args.max_tool_calling_iterations
    ),
    "generation_kwargs": _generation,
    "generation_config": lambda trainer: GenerationConfig(**_generation(trainer), disable_compile=True),
    "async_loop": lambda trainer: background_loop(os.getpid())[0],
    "async_loop_thread": lambda trainer: background_loop(os.getpid())[1],
}
"""Name -> how it is read."""

_SAMPLING = "completions come from `rollout_func`, or from tools and environments"
_REWARDS = "rewards are functions, `reward_funcs`; advantages are those of `advantage_estimator` and `scale_rewards`"
_LOSS = "the loss is that of `loss_type`, `importance_sampling_level`, `beta` and others; `podium.Loop` takes one's own"
_LOGGED = "reward functions log by their arguments `log_metric` and `log_extra`, others by `trainer.log`"

_BATCHES = "what is trained on is made before a step, by `get_batch_samples`"
_PRECISION = "it is that of `bf16`, `fp16` and `product_precision`"

OF_TRANSFORMERS: Mapping[str, str] = {
    "_prepare_input": _BATCHES,
    "_prepare_context_parallel_inputs": "sequences are not divided over processes",
    "_get_num_items_in_batch": "a loss is divided by the counts that `loss_type` says",
    "compute_loss_context_manager": _PRECISION,
    "autocast_smart_context_manager": _PRECISION,
    "_get_dataloader": "rows are `train_dataset`, and those that `get_eval_dataloader` yields",
    "_get_eval_sampler": "an evaluation takes the rows that `get_eval_dataloader` yields",
    "_remove_unused_columns": "the columns are those of `remove_unused_columns`",
}
"""Those of `HOOKS` that `transformers.Trainer` has, which may be called here."""

HOOKS: Mapping[str, str] = {
    "_generate_and_score_completions": f"{_SAMPLING}; {_REWARDS}",
    **dict.fromkeys(("_generate", "_generate_single_turn", "_tokenize_prompts", "_tool_call_loop"), _SAMPLING),
    "_calculate_rewards": _REWARDS,
    **dict.fromkeys(("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies"), _LOSS),
    "_prepare_inputs": _BATCHES,
    "_get_train_sampler": "rows come in their own order with `shuffle_dataset=False`; `balance_column` draws others",
    "prediction_step": "an evaluation samples and scores as training does, in `evaluation_loop`",
    "get_high_entropy_mask": "the tokens are those of `top_entropy_quantile`",
    "get_off_policy_mask": "the completions are those of `off_policy_mask_threshold`",
    **dict.fromkeys(("_log_metric", "_log_completion_extra"), _LOGGED),
    **OF_TRANSFORMERS,
}
"""Methods of TRL's trainer that training here does not call, and what there is in place of an own one."""


def get_high_entropy_mask(trainer: Any, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """TRL's method: bool [B, T], the tokens under `mask` whose entropy is in the quantile `threshold` or above."""
    kept = mask.bool()
    gathered = torch.tensor(gather_object(entropies[kept].tolist()), device=entropies.device)
    return kept & keep_high_entropy(entropies, 1 - threshold, gathered)


def get_off_policy_mask(
    advantages: Tensor,
    per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    mask: Tensor,
    off_policy_threshold: float,
) -> Tensor:
    """TRL's static method: [B, 1], 0 for rollouts that `close_to_sampler` drops."""
    kept = mask.bool()
    inputs = LossInputs(
        logps_N=per_token_logps[kept],
        entropy_N=per_token_logps[kept],
        advantages_R=advantages.reshape(len(mask)),
        rollout_N=kept.nonzero()[:, 0],
        num_rollouts=len(mask),
        num_tokens=float(kept.sum()),
        sampled_logps_N=sampling_per_token_logps[kept],
    )
    return close_to_sampler(inputs, off_policy_threshold)[:, None].to(mask.dtype)


METHODS: Mapping[str, Any] = {
    "get_high_entropy_mask": get_high_entropy_mask,
    "get_off_policy_mask": staticmethod(get_off_policy_mask),
    **{name: inspect.getattr_static(Trainer, name) for name in OF_TRANSFORMERS},
}
"""Methods that subclasses of TRL's trainer call; training computes the same over packs."""


NOT_HERE: Mapping[str, str] = {
    **{name: f"training does not call it; {how}" for name, how in HOOKS.items() if name not in METHODS},
    **dict.fromkeys(("_metrics", "_logs"), _LOGGED),
    "async_loop_ready_event": "`async_loop` runs when it is read",
    "continuous_batching_config": "the live engine schedules by itself",
    "vllm_generation": "the engine is `trainer.step.engine`, with other methods",
    "commit_scheduler": "completions are uploaded when they are logged, not by a schedule",
}
"""Attributes that mean nothing here, and the reason, with which reading one raises `AttributeError`."""


def with_attributes(trainer: Class) -> Class:
    """The class with TRL's attributes as properties, and its methods. A class decorator."""
    for name, value in _SET.items():
        setattr(trainer, name, value)
    return trainer


def refuse_overrides(trainer: Any, args: Any) -> list[Finding]:
    """Raise `ConfigError` (C068) where a method of TRL's trainer that training does not call is overridden or replaced.

    Return warnings in its place where `on_finding` overrules it.
    """
    found = [
        Finding(
            code="C068",
            severity="error",
            what=f"{type(trainer).__name__} overrides TRL's `{name}`, which training does not call here: its code "
            "would have no effect.",
            fix=f"{instead}",
            facts={"kind": type(trainer).__name__, "name": name, "instead": instead},
        )
        for name, instead in HOOKS.items()
        if inspect.getattr_static(trainer, name) is not _SET[name]
    ]
    if found and found[0].code not in ignored_codes(args):
        *others, last = found
        lines = [*(with_fix(finding.what, finding.fix) for finding in others), last.what]
        raise ConfigError("\n".join(lines), fix=way_on(last), code=last.code, findings=found)
    return [finding.overruled() for finding in found]


def refuse_another_model(trainer: Any) -> None:
    """Raise `ConfigError` where `trainer.model` was set to another than the one that the trainer was made with."""
    if trainer.processes.division == "fsdp2":  # it may replace the object by itself
        return
    if trainer.accelerator.unwrap_model(trainer.model) is not trainer.run.policy.model:
        raise ConfigError(
            "trainer.model was set to another model than the trainer was made with: it would be trained, "
            "and the first one would sample.",
            fix="GRPOTrainer(model=...) with the other model, or "
            "trainer.model.load_state_dict(other.state_dict()) for its weights",
        )


def _property(name: str) -> property:
    def read(trainer: Any) -> Any:
        if name in NOT_HERE:
            raise AttributeError(f"Podium's GRPOTrainer has no `{name}`, which TRL's has: {NOT_HERE[name]}.", name=name)
        return ATTRIBUTES[name](trainer)

    def refuse(trainer: Any, value: Any) -> NoReturn:
        reason = "training has read it when the trainer was made. Give it to GRPOConfig or GRPOTrainer."
        raise AttributeError(f"`{name}` cannot be set: {NOT_HERE.get(name, reason)}", name=name)

    return property(read, refuse)


def _set_collator(_: Any, value: Any) -> None:
    """Accept transformers' own assignment. Raises `AttributeError` for a collator that nothing would call."""
    if value is not list:
        raise AttributeError(
            "`data_collator` cannot be set: training does not call it. Change rows in `train_dataset`, and those of an "
            "evaluation in the `collate_fn` of `get_eval_dataloader`.",
            name="data_collator",
        )


_SET: Mapping[str, Any] = {
    **METHODS,
    **{name: _property(name) for name in (*ATTRIBUTES, *NOT_HERE)},
    "data_collator": property(lambda _: list, _set_collator),
}
"""Methods and properties that `with_attributes` sets on a class, by name."""
