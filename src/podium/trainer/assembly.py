"""From TRL's constructor arguments to the parts of a trainer, in the order in which mistakes are cheapest to find.

Arguments, rewards and data are checked before any weight is loaded; then come the model, its reference, the engine.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import set_seed

from podium.algorithm.advantages import AdvantageSettings, combine, has_spread
from podium.algorithm.losses import EntropyControl, LossSettings, skips_zero_advantage
from podium.data.check import checked_rows
from podium.data.prompts import PromptBuilder
from podium.data.survey import is_read_once
from podium.engines.base import OwnWeights, RolloutEngine
from podium.engines.copied import CopyEngine
from podium.engines.live.engine import LiveEngine
from podium.engines.transformers import TransformersEngine
from podium.engines.vllm import connect as vllm
from podium.errors import ConfigError, DataError
from podium.isolation.machine import fit_threads
from podium.models import loading
from podium.models.attention import tree_attention
from podium.models.blocks import lean_precision
from podium.models.devices import free_bytes, kind_of
from podium.models.forward import Path, TokenLogps, choose_path, token_logps
from podium.models.modes import evaluation_mode
from podium.models.packing import Pack
from podium.models.precision import ProductPrecision, measured_products, return_large_blocks, rounds_products
from podium.records import ScoredGroup
from podium.rewards.adaptive import AdaptiveWeights
from podium.rewards.classifier import check_reward_models
from podium.rewards.resolve import Reward, check_rewards, load_reward_models, resolve_rewards
from podium.runs.completions_log import CompletionsLog
from podium.trainer import preflight
from podium.trainer.config import GRPOConfig
from podium.trainer.processes import broadcast_from_main, divides_weights, prepare_to_load, whole_at_load, zero_stage
from podium.trainer.rounds import Plan, PromptOrder
from podium.trainer.settings import (
    advantage_settings,
    completions_log_settings,
    entropy_control,
    loss_settings,
    sampling_settings,
)

logger = logging.getLogger(__name__)

Precision = Callable[[], contextlib.AbstractContextManager[None]]

NOT_SUPPORTED = {
    "tools": "Tools are not supported: a completion here is one uninterrupted answer of the policy.",
    "environment_factory": "Environments are not supported. Score the completion with `reward_funcs` instead.",
    "rollout_func": "`rollout_func` is not supported: the rollout engine samples. See `rollout_engine` in GRPOConfig.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All that a trainer needs besides what `transformers.Trainer` brings."""

    args: GRPOConfig
    policy: nn.Module
    tokenizer: PreTrainedTokenizerBase
    reference: loading.Reference | None
    engine: RolloutEngine
    rewards: tuple[Reward, ...]
    builder: PromptBuilder
    order: PromptOrder
    plan: Plan
    loss: LossSettings
    advantage: AdvantageSettings
    adaptive: AdaptiveWeights
    """The weights at the start of the run."""
    entropy: EntropyControl
    end_ids: frozenset[int]
    path: Path
    tokens_per_pack: int
    router_coef: float
    """0: no load-balancing loss."""
    skips_zero_advantage: bool
    completions: CompletionsLog
    callbacks: tuple[TrainerCallback, ...]
    num_parameters: int
    should_train: frozenset[str]
    """Names of the parameters that this run trains."""
    train_dataset: Any
    eval_dataset: Any
    precision: Precision

    def attention(self, model: nn.Module | None = None) -> contextlib.AbstractContextManager[None]:
        """The context around forward and backward of `model` (the policy): tree attention, where the model can."""
        return (
            tree_attention(self.policy if model is None else model)
            if self.path == "shared"
            else contextlib.nullcontext()
        )

    def token_logps(self, model: nn.Module, packed: Pack, *, router: bool = False) -> TokenLogps:
        """Log-probabilities of a pack as this run computes them; inside `attention` and `precision`."""
        return token_logps(model, packed, temperature=self.args.temperature, path=self.path, router=router)

    def compute_in_full(self) -> None:
        """No rounded copies of weights: of sharded ones they would be whole."""
        if isinstance(self.precision, ProductPrecision):
            self.precision.enabled = False

    @property
    def other_sampler(self) -> bool:
        """Whether what samples computes otherwise than training does."""
        return self.args.use_vllm

    @property
    def filtered_logps(self) -> bool:
        """Whether log-probabilities of rollouts are those of what a filter such as `top_p` left."""
        settings = sampling_settings(self.args, self.end_ids, num_completions=1, round_number=0)
        return settings.filtered and getattr(self.engine, "processed_logps", False)

    def has_spread(self, scored: ScoredGroup, weights_K: np.ndarray | None = None) -> bool:
        """Whether the completions of a group differ in their weighted reward, by the first weights or these."""
        reward_G = combine(scored.rewards_GK, self.advantage.weights_K if weights_K is None else weights_K)
        return has_spread(reward_G)


def assemble(
    model: Any,
    reward_funcs: Any,
    args: GRPOConfig | None,
    train_dataset: Any,
    eval_dataset: Any,
    *,
    tokenizer: Any,
    reward_tokenizers: Any,
    quantization_config: Any,
    peft_config: Any,
    not_supported: Mapping[str, Any],
) -> Parts:
    """Check everything, then load. Raises what `GRPOTrainer` says it raises."""
    args = args if args is not None else GRPOConfig(f"{loading.model_name(model)}-GRPO")
    _refuse(not_supported)
    fit_threads()
    settings = load_settings(args, quantization_config, peft_config)
    adapter = peft_config is not None or isinstance(model, PeftModel)
    wrong = preflight.refusals(args, adapter=adapter, evaluation=eval_dataset is not None)
    for error in (*wrong, *preflight.missing_packages(args)):
        raise error
    rewards = reward_records(reward_funcs, reward_tokenizers, args)
    advantage = advantage_settings(args, len(rewards))
    _say_idle_workers(args, rewards)
    adaptive = AdaptiveWeights.of([reward.name for reward in rewards], advantage.weights_K, args.adaptive_rewards)
    plan = plan_of(args)
    config = _checked_config(args, model, settings)
    tokenizer = loading.load_tokenizer(model, tokenizer, settings)
    served = vllm.prepare(args, model, config)
    builder = prompt_builder(args, tokenizer, config, room=None if served is None else served.longest)
    train_dataset, eval_dataset = _checked_data(args, train_dataset, eval_dataset, builder, rewards, plan)
    preflight.set_for_streams(args, train_dataset, eval_dataset)
    examples = [] if is_read_once(train_dataset) else [row["prompt"] for row in islice(train_dataset, 4)]
    check_reward_models(rewards, examples, args.max_completion_length)
    order = PromptOrder(
        train_dataset,
        plan,
        shuffle=args.shuffle_dataset,
        seed=args.seed if args.data_seed is None else args.data_seed,
        max_steps=args.max_steps,
    )

    prepare_to_load(args, adapter=adapter)
    policy = _loaded(model, args, settings, tokenizer)
    load_reward_models(rewards)
    with whole_at_load(policy, args):
        path, why_not = broadcast_from_main(choose_path(policy))
    if why_not:
        logger.warning("Shared prefixes are off for this model: %s. Prompts are computed once per completion.", why_not)
    precision = _precision(args, policy)
    tokens_per_pack = args.tokens_per_pack or _tokens_per_pack(config, args, precision, policy)
    _decide_checkpointing(args, tokens_per_pack, path)
    router_coef = _router_coef(args, policy)
    loss = loss_settings(args)
    reference = loading.Reference(policy) if args.beta else None
    engine: RolloutEngine
    if served is None:
        engine = _ahead(args, _engine(args, policy, tokenizer, path, tokens_per_pack, precision), policy, precision)
    else:
        engine = vllm.engine_of(served, args, tokenizer, broadcast_from_main)
    return Parts(
        args=args,
        policy=policy,
        tokenizer=tokenizer,
        reference=reference,
        engine=engine,
        rewards=rewards,
        builder=builder,
        order=order,
        plan=plan,
        loss=loss,
        advantage=advantage,
        adaptive=adaptive,
        entropy=entropy_control(args),
        end_ids=loading.end_ids(policy, tokenizer),
        path=path,
        tokens_per_pack=tokens_per_pack,
        router_coef=router_coef,
        skips_zero_advantage=skips_zero_advantage(
            loss,
            entropy_coef_possible=bool(args.entropy_coef) or args.use_adaptive_entropy,
            top_entropy_quantile=args.top_entropy_quantile,
            moe=bool(router_coef),
        ),
        completions=CompletionsLog(completions_log_settings(args)),
        callbacks=_callbacks(args, reference),
        num_parameters=sum(getattr(p, "ds_numel", p.numel()) for p in policy.parameters()),
        should_train=loading.should_train(policy, by_name=isinstance(model, str)),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        precision=precision,
    )


# ---- before weights ----


def reward_records(reward_funcs: Any, tokenizers: Any, args: GRPOConfig | None) -> tuple[Reward, ...]:
    """`reward_funcs` resolved; reward models on the CPU where there are no settings."""
    if args is None:
        return resolve_rewards(reward_funcs, tokenizers, device="cpu")
    return resolve_rewards(
        reward_funcs,
        tokenizers,
        args.model_init_kwargs,
        trust_remote_code=args.trust_remote_code,
        chat_template_kwargs=args.chat_template_kwargs,
        device=args.device,
    )


def _refuse(not_supported: Mapping[str, Any]) -> None:
    for name, value in not_supported.items():
        if value:
            raise ConfigError(NOT_SUPPORTED[name])


def _say_idle_workers(args: GRPOConfig, rewards: tuple[Reward, ...]) -> None:
    if args.reward_workers > 1 and not any(getattr(reward.function, "row_wise", False) for reward in rewards):
        logger.warning(
            "reward_workers=%d does nothing: no reward here is a function in a file that says `row_wise`.",
            args.reward_workers,
        )


def load_settings(args: GRPOConfig, quantization_config: Any, peft_config: Any) -> loading.LoadSettings:
    """The loader's record."""
    return loading.LoadSettings(
        init_kwargs=dict(args.model_init_kwargs or {}),
        trust_remote_code=args.trust_remote_code,
        quantization_config=quantization_config,
        peft_config=peft_config,
        needs_reference=bool(args.beta),
        gradient_checkpointing=bool(args.gradient_checkpointing),
        disable_dropout=args.disable_dropout,
        cast_head_to_fp32=args.cast_lm_head_to_fp32,
        frozen_dtype=half_dtype(args) or torch.float32,
        device=args.device if args.device.type == "cuda" and not divides_weights(args) else None,
    )


def _checked_config(args: GRPOConfig, model: Any, settings: loading.LoadSettings) -> PretrainedConfig:
    config = loading.load_config(model, settings)
    if error := preflight.no_router(args, config):
        raise error
    if isinstance(model, str):
        loading.check_quantization(config, settings, args.device)
    return config


def plan_of(args: GRPOConfig) -> Plan:
    """TRL's batch arithmetic."""
    return Plan(
        prompts_per_round=args.generation_batch_size // args.num_generations,
        num_generations=args.num_generations,
        shares=args.steps_per_generation,
        iterations=args.num_iterations,
        accumulation=args.gradient_accumulation_steps,
        ranks=args.world_size,
        rank=args.process_index,
    )


def prompt_builder(
    args: GRPOConfig, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, *, room: int | None = None
) -> PromptBuilder:
    """Rows -> prompts. `room`: tokens that the sampler takes, where that may be less than the model's context."""
    context = loading.context_length(config)
    return PromptBuilder(
        tokenizer=tokenizer,
        chat_template_kwargs=args.chat_template_kwargs or {},
        max_prompt_length=args.max_prompt_length,
        overlong=args.overlong_prompts,
        context_length=min((n for n in (context, room) if n is not None), default=None),
        max_completion_length=args.max_completion_length,
    )


def _checked_data(
    args: GRPOConfig, train: Any, evaluation: Any, builder: PromptBuilder, rewards: tuple[Reward, ...], plan: Plan
) -> tuple[Any, Any]:
    """The datasets, checked; without overlong rows where those are to be dropped."""
    if train is None:
        raise DataError(
            "`train_dataset` is required.",
            fix="Pass rows with a `prompt`, as a datasets.Dataset or a list of dicts.",
        )
    sets = (
        {"eval_dataset": evaluation}
        if not isinstance(evaluation, Mapping)
        else {f"eval_dataset[{k!r}]": v for k, v in evaluation.items()}
    )
    given = {name: dataset for name, dataset in {"train_dataset": train, **sets}.items() if dataset is not None}
    checked = {}
    for name, dataset in given.items():
        needed = plan.prompts_per_round if dataset is train else None
        checked[name] = checked_rows(dataset, name, num_needed=needed, builder=builder)
        dataset = checked[name].rows
        columns = getattr(dataset, "column_names", None) or (list(dataset[0]) if hasattr(dataset, "__len__") else None)
        if columns is not None:
            check_rewards(rewards, ["prompt"] if args.remove_unused_columns else columns)
    rows = {name: each.without_too_long(builder) for name, each in checked.items()}
    if args.remove_unused_columns:
        rows = {name: _prompts_only(each) for name, each in rows.items()}
    if isinstance(evaluation, Mapping):
        return rows["train_dataset"], {key: rows.get(f"eval_dataset[{key!r}]") for key in evaluation}
    return rows["train_dataset"], rows.get("eval_dataset")


def _prompts_only(dataset: Any) -> Any:
    """What `remove_unused_columns` leaves."""
    if hasattr(dataset, "select_columns"):
        return dataset.select_columns(["prompt"])
    return [{"prompt": row["prompt"]} for row in dataset]


# ---- after weights ----


def _loaded(
    model: Any, args: GRPOConfig, settings: loading.LoadSettings, tokenizer: PreTrainedTokenizerBase
) -> nn.Module:
    """The policy, on the device that trains where it is whole: there it is tried, and evaluated before training."""
    set_seed(args.seed)  # a new adapter is random
    policy = loading.load_policy(model, settings)
    loading.align_pad_token(policy, tokenizer)
    if not divides_weights(args) and not getattr(policy, "hf_device_map", None):
        policy.to(args.device)
    return policy


def _callbacks(args: GRPOConfig, reference: loading.Reference | None) -> tuple[TrainerCallback, ...]:
    if reference is None or not args.sync_ref_model:
        return ()
    return (loading.FollowPolicy(reference, alpha=args.ref_model_mixup_alpha, every=args.ref_model_sync_steps),)


def _precision(args: GRPOConfig, policy: nn.Module) -> Precision:
    """A context in which sampling, scoring and training compute alike."""
    if not kind_of(args.device).autocast:
        if zero_stage(args) == 3:  # whose weights are there only while their own layer is called
            return contextlib.nullcontext
        enabled = broadcast_from_main(rounds_products(args.product_precision))
        if args.product_precision == "auto":
            _say_precision(args, enabled=enabled)
        with evaluation_mode(policy):
            return lean_precision(policy, enabled=enabled)
    dtype = half_dtype(args)
    return contextlib.nullcontext if dtype is None else lambda: torch.autocast(args.device.type, dtype=dtype)


def half_dtype(args: GRPOConfig) -> torch.dtype | None:
    """The type in which autocast computes; None: there is none."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def _say_precision(args: GRPOConfig, *, enabled: bool) -> None:
    """One line: what was measured and what follows; a warning where `bf16: true` asked for something else."""
    if args.bf16_asked and not enabled:
        logger.warning(
            "bf16: true, but bfloat16 does not pay on this processor: %s. Matrix products stay in float32. "
            "To round them all the same, set product_precision: bfloat16.",
            measured_products(),
        )
    else:
        logger.info("Matrix products in %s: %s.", "bfloat16" if enabled else "float32", measured_products())


def _tokens_per_pack(config: PretrainedConfig, args: GRPOConfig, precision: Precision, policy: nn.Module) -> int:
    rounded = precision.enabled if isinstance(precision, ProductPrecision) else None
    free = free_bytes(args.device)
    budget = None if free is None else int(USED_SHARE * (free - bytes_to_come(policy, args)))
    return default_tokens_per_pack(config, args, rounded=rounded, budget=budget)


USED_SHARE = 0.7
"""Share of the memory left beside weights and states that a pack's activations may take. The rest is for logits,
attention masks, the key/value cache and fragmentation."""


def bytes_to_come(policy: nn.Module, args: GRPOConfig) -> int:
    """Bytes that training adds to the loaded weights: gradients, Adam's states, autocast's casts, a reference."""
    parameters = list(policy.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in parameters)
    casts = 2 * trained if half_dtype(args) is not None else 0
    return 12 * trained + casts + (weights if args.beta and not isinstance(policy, PeftModel) else 0)


def default_tokens_per_pack(
    config: PretrainedConfig, args: GRPOConfig, *, rounded: bool | None, budget: int | None = None
) -> int:
    """Tokens whose activations take what one pack may.

    Args:
        config: of the model.
        args: the run's.
        rounded: as in `activation_bytes_per_token`.
        budget: bytes for a pack's activations; None: what the kind of device usually has.
    """
    a_token = config.get_text_config().num_hidden_layers * activation_bytes_per_token(config, args, rounded=rounded)
    if budget is None:
        return max(128, kind_of(args.device).activation_bytes // a_token)
    return max(128, round_down(max(budget, 0) // a_token))


def round_down(count: int) -> int:
    """To two binary digits, so that a little more or less of free memory cuts a step up alike.

    >>> [round_down(n) for n in (8885, 1000, 127, 3)]
    [8192, 768, 96, 3]
    """
    unit = 1 << max(0, count.bit_length() - 2)
    return count // unit * unit


def activation_bytes_per_token(
    config: PretrainedConfig, args: GRPOConfig, *, rounded: bool | None, half_weights: bool = False
) -> int:
    """What a token keeps in one layer for the backward: vectors of the width and of the inner width, in bytes.

    `rounded`: whether `ProductPrecision` rounds products to bfloat16; None where it is not used. `half_weights`:
    whether what passes from layer to layer is in half precision, as the weights under an adapter are.
    """
    text = config.get_text_config()
    width = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * width
    if rounded is None:
        attention = text.num_attention_heads * (getattr(text, "head_dim", None) or width // text.num_attention_heads)
        if half_dtype(args) is None:
            return 24 * width + 20 * attention + 16 * inner
        # Autocast: in each of two norms the input in float32, before and after it is divided by its size, and a rounded
        # copy of the output for each of five products; half-precision inputs are wide once, as the norm's own copy.
        # In attention rounded queries, keys and values for every head, and outputs before and after they are put in
        # order.
        return (18 if half_weights else 26) * width + 10 * attention + 8 * inner
    # counted on Llama's layers; see models.lean for what they keep
    return 25 * width + 4 * inner if rounded else 31 * width + 12 * inner


def _decide_checkpointing(args: GRPOConfig, tokens_per_pack: int, path: Path) -> None:
    """Unless the user decided: recompute activations only where a single rollout may not fit into a pack."""
    if args.gradient_checkpointing is None:
        longest = args.max_completion_length + (args.max_prompt_length or 0)
        args.gradient_checkpointing = path == "padded" or longest > 4 * tokens_per_pack
        if hasattr(args, "activation_checkpointing"):  # what transformers 5.23 reads
            args.activation_checkpointing = args.gradient_checkpointing
    if args.gradient_checkpointing and kind_of(args.device).host_memory:
        return_large_blocks()


def _router_coef(args: GRPOConfig, policy: nn.Module) -> float:
    has_router = loading.is_mixture_of_experts(policy)
    if error := preflight.no_router(args, policy.config, known=has_router):
        raise error
    if not has_router:
        return 0.0
    if args.router_aux_loss_coef is not None:
        return args.router_aux_loss_coef
    return getattr(policy.config.get_text_config(), "router_aux_loss_coef", 0.0) or 0.0


def _engine(
    args: GRPOConfig,
    policy: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    tokens_per_pack: int,
    precision: Precision,
) -> RolloutEngine:
    reasons = []
    if path != "shared":
        reasons.append("this model cannot attend over shared prefixes")
    reasons += preflight.only_generate(args)
    if args.rollout_engine == "live" and reasons:
        raise ConfigError(
            f'rollout_engine="live" is not possible here: {"; ".join(reasons)}. Use rollout_engine="auto".'
        )
    if args.rollout_engine == "transformers" or reasons:
        if args.rollout_engine == "auto":
            logger.warning("Sampling with transformers' generate, which is slower: %s.", "; ".join(reasons))
        return TransformersEngine(policy, tokenizer, path=path, tokens_per_pack=tokens_per_pack, precision=precision)
    sampling = precision.sampling if isinstance(precision, ProductPrecision) else precision
    return LiveEngine(policy, tokenizer, precision=sampling)


def _ahead(args: GRPOConfig, engine: RolloutEngine, policy: nn.Module, precision: Precision) -> RolloutEngine:
    """The engine, with weights of its own where it samples while the policy trains."""
    if not args.async_rollouts or isinstance(engine, OwnWeights):
        return engine
    if not isinstance(engine, LiveEngine):
        raise ConfigError(
            "async_rollouts needs the live engine or vLLM, and this model is sampled with transformers' generate.",
            code="C033",
            fix="Leave async_rollouts out.",
        )
    device = args.device if args.rollout_device is None else torch.device(args.rollout_device)
    return CopyEngine(policy, engine.tokenizer, device=device, precision=precision)


def engine_for(
    args: GRPOConfig, config: PretrainedConfig, policy: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> RolloutEngine:
    """The engine with which a run of these arguments samples, for a policy that is not trained."""
    path, _ = choose_path(policy)
    precision = _precision(args, policy)
    tokens_per_pack = args.tokens_per_pack or _tokens_per_pack(config, args, precision, policy)
    return _engine(args, policy, tokenizer, path, tokens_per_pack, precision)
