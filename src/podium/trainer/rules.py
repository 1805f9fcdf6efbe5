"""Rules of settings, each written once: closed sets, ranges, contradictions, settings without effect.

`GRPOConfig` raises the first that is broken; the reader of recipes checks values by the same tables and adds the line;
`podium check` reports them all. The rows of the table are in `setting_rules`. `args` is a `GRPOConfig` everywhere.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, cast, get_args, get_origin

import yaml

from podium.algorithm.advantages import AGGREGATIONS, ESTIMATORS
from podium.algorithm.covariance import CONTROLS
from podium.algorithm.losses import CORRECTIONS, OBJECTIVES
from podium.engines.table import ENGINES
from podium.errors import ConfigError, Finding, overrule
from podium.errors.rule import Facts, Rule, error_of, findings
from podium.errors.texts import as_lines, listed, nearest, quoted
from podium.runs.findings import RETIRED, codes

logger = logging.getLogger(__name__)

CHOSEN_ENGINES = ("auto", *ENGINES)

CHOICES: Mapping[str, tuple[str, ...]] = {
    "loss_type": tuple(OBJECTIVES),
    "advantage_estimator": tuple(ESTIMATORS),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": tuple(AGGREGATIONS),
    "rollout_engine": CHOSEN_ENGINES,
    "overlong_prompts": ("error", "drop", "truncate"),
    "product_precision": ("auto", "float32", "bfloat16"),
    "vllm_mode": ("server", "colocate"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": tuple(CORRECTIONS),
    "tool_result_cut": ("left", "middle", "right"),
    "tool_order": ("fixed", "arrival"),
    "covariance_control": ("none", *CONTROLS),
}
"""Fields with a closed set of values; TRL finds a wrong one only after the first generation."""

RANGES: Mapping[str, tuple[float, float, str]] = {
    "temperature": (1e-6, 100.0, "at 0 all completions of a group are the same, so nothing can be learnt"),
    "teacher_coef_end": (0.0, math.inf, "a negative weight would move away from the teacher"),
    "teacher_coef": (1e-9, math.inf, "at 0 the teacher is not heard"),
    "observation_coef": (0.0, math.inf, "a negative one would teach the policy to be surprised"),
    "top_p": (1e-6, 1.0, "it is a share of probability"),
    "top_k": (0, math.inf, "0 switches it off"),
    "min_p": (0.0, 1.0, "it is a share of the likeliest token's probability"),
    "eval_samples": (1, math.inf, "to look at no held-out prompts there is eval_rows: 0"),
    "eval_temperature": (1e-6, 100.0, "0.001 draws the likeliest completion"),
    "eval_rows": (0, math.inf, "0 looks at no held-out prompts"),
    "repetition_penalty": (1e-6, math.inf, "1 switches it off"),
    "learning_rate": (0.0, 1000.0, "a negative rate climbs away from the reward, and no optimizer bears a higher one"),
    "weight_decay": (0.0, math.inf, "a negative one makes all weights grow"),
    "adam_beta1": (0.0, 1 - 1e-9, "it is a share of the past that stays"),
    "adam_beta2": (0.0, 1 - 1e-9, "it is a share of the past that stays"),
    "adam_epsilon": (0.0, math.inf, "it keeps a division from one by zero"),
    "max_grad_norm": (0.0, math.inf, "0 switches clipping off"),
    "warmup_steps": (0.0, math.inf, "0 switches warm-up off; below 1 it is a share of all steps"),
    "max_steps": (1, math.inf, "-1, or leaving it out, trains num_train_epochs"),
    "per_device_train_batch_size": (1, math.inf, "it counts completions"),
    "per_device_eval_batch_size": (1, math.inf, "it counts completions"),
    "gradient_accumulation_steps": (1, math.inf, "1 accumulates nothing"),
    "generation_batch_size": (1, math.inf, "it counts completions"),
    "steps_per_generation": (1, math.inf, "it is the number of micro-steps that a generation serves"),
    "save_steps": (1e-9, math.inf, "`save_strategy: no` saves nothing"),
    "eval_steps": (1e-9, math.inf, "`eval_strategy: no` evaluates nothing"),
    "logging_steps": (1e-9, math.inf, "`logging_strategy: no` logs nothing"),
    "ref_model_sync_steps": (1, math.inf, "it is a number of steps"),
    "seed": (0, 2**32 - 1, "random number generators take no other"),
    "data_seed": (0, 2**32 - 1, "random number generators take no other"),
    "record_megabytes": (0, math.inf, "`record: false` records nothing"),
    "ddp_timeout": (1, math.inf, "it is in seconds"),
    "beta": (0.0, math.inf, "a negative weight would reward drifting away"),
    "epsilon": (0.0, math.inf, "it is the distance of the lower clip bound from a ratio of 1"),
    "epsilon_high": (0.0, math.inf, "it is a distance from a ratio of 1 (for cispo the ratio itself)"),
    "delta": (1.0, math.inf, "it bounds ratios above 1"),
    "max_completion_length": (1, math.inf, "a completion has at least one token"),
    "max_prompt_length": (1, math.inf, "a prompt has at least one token"),
    "num_generations": (2, math.inf, "an advantage compares the completions of one prompt"),
    "num_iterations": (1, math.inf, "every rollout is trained on at least once"),
    "top_entropy_quantile": (0.0, 1.0, "it is a share of tokens"),
    "ref_model_mixup_alpha": (0.0, 1.0, "it is a share"),
    "covariance_share": (0.0, 1.0, "it is a share of tokens"),
    "max_resamples": (1, math.inf, "switch `dynamic_sampling` off instead"),
    "tokens_per_pack": (1, math.inf, "a pack has at least one token"),
    "reward_timeout": (0, math.inf, "it is in seconds; 0 switches it off"),
    "tool_timeout": (0, math.inf, "it is in seconds; 0 switches it off"),
    "agent_timeout": (0, math.inf, "it is in seconds; 0 switches it off"),
    "max_tool_result_tokens": (1, math.inf, "a result has at least one token; None switches it off"),
    "max_turns": (1, math.inf, "a completion has at least one turn"),
    "turn_discount": (0.0, 1.0, "at 1 later rewards count in full, at 0 a turn has the reward of its own step alone"),
    "max_call_corrections": (0, math.inf, "at 0 a call that cannot be parsed ends the completion"),
    "max_tool_calling_iterations": (0, math.inf, "at 0 calls are never run"),
    "reward_workers": (1, math.inf, "a function from a file runs in at least one process"),
    "async_rollouts": (0, math.inf, "it is how many rounds sampling may be ahead of training"),
    "vllm_server_timeout": (1e-3, math.inf, "it is in seconds"),
    "vllm_gpu_memory_utilization": (1e-6, 1.0, "it is a share of the GPU's memory"),
    "vllm_tensor_parallel_size": (1, math.inf, "it is a number of GPUs"),
}
"""Fields with limits: (lowest, highest, why)."""

SENSIBLE = {"max_steps": 100}
"""Values to type where the default is no example."""

UNLIMITED = {"max_steps": -1}
"""Values beyond the limits that mean that there is none."""


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}

_SAME_WORDS: Mapping[str, Mapping[str, str]] = {
    "optim": {"adam": "adamw_torch", "adamw": "adamw_torch"},
    "dtype": _DTYPES,
    "torch_dtype": _DTYPES,
}
"""Other words for a choice of a key; without weight decay, which is the default, Adam is AdamW."""


def members(annotation: Any) -> set[Any]:
    """The plain types in a union; of `list[float]` it is `list`."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return set().union(*map(members, get_args(annotation)))
    return {origin or annotation}


def enumerated(annotation: Any) -> tuple[str, ...]:
    """The values of the enumerations in an annotation that takes one of them; empty where there are none."""
    enums = [member for member in members(annotation) if isinstance(member, type) and issubclass(member, Enum)]
    return () if list in members(annotation) else tuple(str(member.value) for enum in enums for member in enum)


def choice_rule(name: str, choices: Collection[Any], default: Callable[[str], Any], *, of_text: bool = False) -> Rule:
    """The rule of a setting with a closed set of values; `default` gives the value to type.

    `of_text`: what is no text is judged by its type elsewhere.
    """

    def wrong(settings: Any) -> dict[str, Any] | None:
        value = settings[name]
        if value in choices or (of_text and not isinstance(value, str)):
            return None
        if same := _SAME_WORDS.get(name, {}).get(str(value).casefold()):
            return {"name": name, "value": value, "same": same}
        return {"name": name, "choices": choices, "value": value, "near": nearest(str(value), choices)}

    def says(settings: Any, *, value: Any, same: str = "", **_: Any) -> str:
        if same:
            return f"`{name}` has no `{value}`; it is called `{same}` here."
        return f"`{name}` must be one of {listed(choices)}; got `{value}`."

    def cure(settings: Any, *, same: str = "", near: str = "", **_: Any) -> tuple[str, dict[str, Any]]:
        changes = {name: same or near or default(name)}
        return f"Did you mean `{near}`?" if near else as_lines(changes), changes

    return Rule(code="C004", when=wrong, says=says, cure=cure, about=(name,))


def range_rule(name: str, limits: tuple[float, float, str], default: Callable[[str], Any]) -> Rule:
    """The rule of a number between a lowest and a highest value; `default` gives the value to type."""
    low, high, why = limits
    if high != math.inf:
        bounds = f"between {low:g} and {high:g}"
    elif low == 1e-9:
        bounds = "above 0"
    else:
        bounds = f"at least {low:g}"

    def wrong(settings: Any) -> dict[str, Any] | None:
        value = settings[name]
        if not isinstance(value, int | float) or value == UNLIMITED.get(name) or low <= value <= high:
            return None
        return {"name": name, "value": value, "bounds": bounds, "why": why}

    def cure(settings: Any, *, value: float, **_: Any) -> dict[str, Any]:
        is_above = value > high and math.isfinite(high) and isinstance(value, int)
        return {name: high if is_above else default(name)}

    return Rule(
        code="C011" if name.startswith("num_generations") else "C016",
        when=wrong,
        says=lambda settings, *, value, **_: f"`{name}` is {value:g}; it must be {bounds}: {why}.",
        cure=cure,
        about=(name,),
    )


def wrong_value(
    name: str,
    value: Any,
    *,
    choices: Collection[Any] = (),
    limits: Mapping[str, tuple[float, float, str]] = RANGES,
    default: Callable[[str], Any],
) -> ConfigError | None:
    """The error of a value that is none of `choices`, or a number beyond its limits; `default` gives the value to type.

    >>> print(wrong_value("num_iterations", 0, default=lambda name: 1))
    `num_iterations` is 0; it must be at least 1: every rollout is trained on at least once.
      fix: num_iterations: 1
    """
    rules = []
    if choices:
        rules.append(choice_rule(name, choices, default))
    if name in limits:
        rules.append(range_rule(name, limits[name], default))
    found = next(findings(rules, Facts(settings={name: value})), None)
    return None if found is None else cast(ConfigError, error_of(found))


REFUSED: Mapping[str, tuple[Any, str]] = {
    "vllm_structured_outputs_regex": (
        None,
        "training would compute with probabilities that know nothing of the constraint",
    ),
    "ds3_gather_for_generation": (True, "sampling from sharded weights without gathering them is not supported"),
}
"""TRL fields that Podium does not honour: (idle value, why)."""

WITHOUT_EFFECT: Mapping[str, tuple[Any, str]] = {
    "pad_to_multiple_of": ("auto", "nothing is padded"),
    "use_liger_kernel": (
        False,
        "its kernels make the same numbers faster; Podium drives the forward itself and computes the head in chunks",
    ),
    "torch_compile": (False, "nothing is compiled: the head is replaced for every forward"),
    "torch_compile_backend": (None, "nothing is compiled"),
    "torch_compile_mode": (None, "nothing is compiled"),
    "transformers_continuous_batching_config": (None, "the live engine schedules by itself"),
    "use_transformers_continuous_batching": (False, "the live engine lets rows enter and leave as they end, too"),
    "use_transformers_paged": (False, "the live engine lets rows enter and leave as they end, too"),
}
"""TRL fields that change nothing here and nothing in the result: (idle value, why). A note is logged."""

# fmt: off
VLLM_ALONE: Mapping[str, tuple[str, ...]] = {
    "server": (
        "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
        "vllm_weights_folder",
    ),
    "colocate": (
        "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_model_impl",
        "vllm_tensor_parallel_size",
    ),
}
# fmt: on
"""Fields that only one `vllm_mode` reads."""


# ---- contradictions ----


FILTERS: Mapping[str, float] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings that leave less than the whole distribution to draw from, and the value that switches each off."""


def filters_of(args: Any) -> list[str]:
    """The filters that are on."""
    return [name for name, off in FILTERS.items() if (getattr(args, name) or 0.0) != off]


def upper_clip(args: Any) -> float:
    """`epsilon_high`, which is `epsilon` unless it is set."""
    return args.epsilon if args.epsilon_high is None else args.epsilon_high


def warn_experimental(**given: Any) -> None:
    """TRL's warning about arguments that it calls experimental; its scripts silence it by the same variable."""
    for name, value in given.items():
        if value is not None and os.environ.get("TRL_EXPERIMENTAL_SILENCE", "0") != "1":
            what = f"You are using '{name}', which is an experimental feature. This API may change or be removed at "
            what += "any time without prior notice. Silence this warning by setting environment variable "
            warnings.warn(what + "TRL_EXPERIMENTAL_SILENCE=1.", UserWarning, stacklevel=3)


# ---- settings that are read once ----

# fmt: off
READ_ONCE = (
    "temperature", "num_generations", "generation_kwargs", "num_iterations", "steps_per_generation",
    "generation_batch_size", "per_device_train_batch_size", "shuffle_dataset", "balance_column",
    "max_prompt_length", "overlong_prompts", "chat_template_kwargs", "rollout_engine",
    "train_image_encoder",
    "rollout_device", "frozen_parameters", "product_precision", "tokens_per_pack", "beta", "loss_type",
    "importance_sampling_level", "epsilon", "epsilon_high", "delta", "sapo_temperature_neg", "sapo_temperature_pos",
    "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "use_bias_correction_kl",
    "off_policy_mask_threshold", "observation_coef", "router_aux_loss_coef", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "teacher_model", "entropy_coef_min",
    "entropy_coef_max", "entropy_coef_delta", "entropy_target", "advantage_estimator", "scale_rewards",
    "reward_weights", "multi_objective_aggregation", "turn_discount", "adaptive_rewards", "accuracy",
    "max_tool_calling_iterations", "max_turns", "max_call_corrections", "tool_timeout", "max_tool_result_tokens",
    "tool_result_cut", "agent_timeout", "num_completions_to_print", "log_unique_prompts",
)
"""Settings that are read when a trainer is made; a later change has no effect."""

OF_THE_OPTIMIZER = (
    "learning_rate", "weight_decay", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim",
    "adam_beta1", "adam_beta2", "adam_epsilon",
)
"""Settings that are read when training begins."""
# fmt: on


def fixed_settings(args: Any, names: Iterable[str] = READ_ONCE) -> dict[str, Any]:
    """Copies of values of settings; of `generation_kwargs` those that are made arguments."""
    values = {name: getattr(args, name) for name in names}
    if "generation_kwargs" in values:
        given = values["generation_kwargs"] or {}
        values["generation_kwargs"] = {name: given[name] for name in given if name in ARGUMENTS}
    return copy.deepcopy(values)


# ---- values with a form of their own ----

ARGUMENTS: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length"),
}
"""Names in `generation_kwargs` -> the arguments that say the same."""

NOT_IN_GENERATION: Mapping[str, str] = {
    **dict.fromkeys(("num_return_sequences", "n"), "num_generations says how many completions a prompt gets"),
    **dict.fromkeys(("return_dict_in_generate", "logprobs", "seed"), "sampling sets it"),
    **dict.fromkeys(("stop_token_ids", "ignore_eos"), "eos_token_id, a list, says which tokens end a completion"),
}
"""Names in `generation_kwargs` that would break groups, with the reason."""

RESHAPES: Mapping[str, float | None] = {
    **dict.fromkeys(("typical_p", "top_h", "encoder_repetition_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "presence_penalty", "frequency_penalty"), 0.0),
    **dict.fromkeys(("min_length", "min_new_tokens", "min_tokens", "token_healing"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "exponential_decay_length_penalty", "watermarking_config")),
    **dict.fromkeys(("bad_words", "logit_bias", "allowed_token_ids", "structured_outputs", "logits_processors")),
}
"""Names in `generation_kwargs` that change the distribution that is drawn from, and what switches each off."""


def reshaping(args: Any) -> dict[str, Any]:
    """What makes completions draws from another distribution than the policy's; a filter only leaves some of it out."""
    given = {**(args.generation_kwargs or {}), "repetition_penalty": args.repetition_penalty}
    off = {**RESHAPES, "repetition_penalty": 1.0}
    return {name: value for name, value in given.items() if name in off and value not in (None, off[name], [], {})}


def taken_generation_kwargs(settings: Mapping[str, Any], defaults: Callable[[str], Any]) -> dict[str, Any]:
    """What `generation_kwargs` overrides, as in TRL, as values of the arguments.

    Sampling, training, the reference and the proof read the argument, so they cannot differ: TRL 1.16 samples at
    the one temperature and trains at the other.
    """
    given = settings["generation_kwargs"] or {}
    if not isinstance(given, Mapping):
        return {}
    taken = {argument: given[name] for name, argument in ARGUMENTS.items() if given.get(name) is not None}
    for name, argument in ARGUMENTS.items():
        if given.get(name) is not None and settings[argument] not in (given[name], defaults(argument)):
            logger.warning(
                "generation_kwargs: %s %r counts, and not %s: %r.", name, given[name], argument, settings[argument]
            )
    return taken


def generation_problem(settings: Any) -> ConfigError | None:
    """The first error in `generation_kwargs`: what breaks groups, does not sample, is not read, or is no number."""
    given = settings.generation_kwargs or {}
    if not isinstance(given, Mapping):
        return None  # transformers says so
    for name in given:
        if name in NOT_IN_GENERATION:
            return ConfigError(
                f"generation_kwargs has {name}: {NOT_IN_GENERATION[name]}.",
                code="C030",
                fix=f"take `{name}` out of generation_kwargs",
                settings=("generation_kwargs", name),
                name=name,
                not_in_generation=NOT_IN_GENERATION[name],
            )
    return _no_sampling(given, use_vllm=settings.use_vllm) or _no_number(given)


def _no_number(given: Mapping[str, Any]) -> ConfigError | None:
    """The error of the value of an argument in `generation_kwargs` that is of another type."""
    for name, argument in ARGUMENTS.items():
        value = given.get(name)
        is_whole = argument in ("top_k", "max_completion_length")
        kind = "whole number" if is_whole else "number"
        if value is not None and (isinstance(value, bool) or not isinstance(value, int if is_whole else int | float)):
            return ConfigError(
                f"generation_kwargs: {name} is {value!r}; it must be a {kind}.",
                code="C030",
                settings=("generation_kwargs", name),
                name=name,
                value=value,
                kind=kind,
            )
    return None


def _no_sampling(given: Mapping[str, Any], *, use_vllm: bool) -> ConfigError | None:
    """The error of `generation_kwargs` that would search in place of sampling, or that nothing would read."""
    from transformers import GenerationConfig

    if given.get("do_sample") not in (None, True):
        return ConfigError(
            f"generation_kwargs has do_sample: {given['do_sample']!r}: all completions of a group are the "
            "same, so nothing can be learnt.",
            code="C030",
            fix="take `do_sample` out of generation_kwargs",
            settings=("generation_kwargs", "do_sample"),
            value=given["do_sample"],
        )
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    own = {name: value for name, value in given.items() if name in names and name not in ARGUMENTS}
    try:
        mode = GenerationConfig(**{**own, "do_sample": True}).get_generation_mode()
    except (TypeError, ValueError) as error:
        return ConfigError(
            f"generation_kwargs {own} is refused by `generate`: {quoted(error)}",
            code="C030",
            fix="correct it, or take it out of generation_kwargs",
            settings=("generation_kwargs",),
            given=own,
            error=error,
        )
    if mode != "sample":
        shown_mode = mode.replace("_", " ")
        return ConfigError(
            f"generation_kwargs {own} asks for {shown_mode}, which draws no samples of the policy.",
            code="C030",
            fix="take it out: completions are compared with each other as samples",
            settings=("generation_kwargs",),
            given=own,
            mode=shown_mode,
        )
    unread = {"stop_strings", *RESHAPES} & names if use_vllm else {*given} - names - {*ARGUMENTS}
    for name in unread & {*given}:
        near = _OTHERS_STOP.get(name) or nearest(name, names)
        engine = "vLLM" if use_vllm else "transformers' `generate`"
        return ConfigError(
            f"generation_kwargs has {name}, which {engine} does not read.",
            code="C030",
            fix=f"Did you mean `{near}`?" if near else f"take `{name}` out of generation_kwargs",
            settings=("generation_kwargs", name),
            name=name,
            engine=engine,
            near=near,
        )
    return None


_OTHERS_STOP = {"stop": "stop_strings", "stop_strings": "stop"}
"""Texts that end a completion: vLLM's name for them, and transformers'."""


def on_error(value: Any) -> Literal["raise", "none"] | float:
    """`on_reward_error` as a word or a number; YAML's `null` and Python's None mean `none`."""
    text = "none" if value is None else str(value).strip().lower()
    if text in ("raise", "none"):
        return cast(Literal["raise", "none"], text)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        near = nearest(text, ("raise", "none"))
        raise ConfigError(
            f"on_reward_error is {value!r}; it must be `raise`, `none` or a finite number.",
            fix=f"Did you mean `{near}`?" if near else "",
            settings=("on_reward_error",),
            value=value,
            near=near,
        )
    return number


ACTIONS = ("stop", "rollback", "ignore")


def actions(given: Any) -> dict[str, str]:
    """`on_finding` as a mapping from codes to actions, checked (`ConfigError`); text is YAML, as from the shell.

    >>> actions("{m132: stop}")
    {'M132': 'stop'}
    """
    try:
        asked = yaml.safe_load(given) if isinstance(given, str) else given or {}
        wishes = {str(code).upper(): str(wish) for code, wish in asked.items()}
    except (AttributeError, yaml.YAMLError):
        raise ConfigError(
            f"on_finding is {given!r}; it must be like {{M132: stop, M161: ignore}}.",
            settings=("on_finding",),
            given=given,
        ) from None
    for code, wish in wishes.items():
        if code not in {*codes(), *RETIRED}:
            near = nearest(code, codes())
            raise ConfigError(
                f"on_finding names {code}, which is no finding.",
                fix=f"Did you mean `{near}`?" if near else "",
                settings=("on_finding",),
                rule=code,
                near=near,
            )
        if wish not in ACTIONS:
            raise ConfigError(
                f"on_finding for {code} is {wish!r}; it must be one of {listed(ACTIONS)}.",
                settings=("on_finding",),
                rule=code,
                wish=wish,
                actions=ACTIONS,
            )
    return wishes


def warn_of_no_overrule(wishes: Mapping[str, str]) -> None:
    """Warn of findings that `on_finding` is to ignore and that cannot be overruled."""
    for code, wish in wishes.items():
        if wish == "ignore" and not overrule(code):
            logger.warning("on_finding cannot overrule an error of %s: nothing could run with it.", code)


def ignored_codes(args: Any) -> frozenset[str]:
    """Codes that `on_finding` tells to ignore."""
    return frozenset(code for code, wish in (getattr(args, "on_finding", None) or {}).items() if wish == "ignore")


def heeded(found: Iterable[Finding], ignored: Collection[str]) -> Iterator[Finding]:
    """Findings without the ignored ones. An error among those is overruled, and stays as a warning, or cannot be."""
    for finding in found:
        if finding.code not in ignored or (finding.severity == "error" and not overrule(finding.code)):
            yield finding
        elif finding.severity == "error":
            yield finding.overruled()


def unknown_accuracy(wanted: str | None, names: Sequence[str]) -> ConfigError | None:
    """The error of an `accuracy` that is none of the reward functions' names."""
    if not wanted or not names or wanted in names:
        return None
    near = nearest(wanted, names)
    changes = {"accuracy": near or names[0]}
    return ConfigError(
        f"`accuracy` names no reward here ({listed(names)}): `{wanted}`.",
        code="C030",
        fix=f"Did you mean `{near}`?" if near else f"{as_lines(changes)}",
        changes=changes,
        settings=("accuracy",),
        near=near,
        names=names,
        wanted=wanted,
    )
