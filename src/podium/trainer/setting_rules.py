"""The table of rules of settings: alone, with the machine, and in a run as a whole, with its model, rows and folder.

`GRPOConfig` raises the errors of those that need settings and machine alone, before anything is built; the trainer
raises those of a run as a whole before it loads weights; `podium check` makes findings of all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import math
import os
import re
import reprlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import trl
from transformers import PretrainedConfig
from transformers.integrations import integration_utils

from podium.algorithm.losses import CORRECTIONS
from podium.engines.table import ENGINES, NOT_INSTALLED
from podium.errors import ConfigError, impossible_name
from podium.errors.rule import Facts, Rule, Settings, findings, raised
from podium.errors.texts import as_lines, listed, nearest
from podium.trainer.machine import Machine
from podium.trainer.rules import ARGUMENTS, REFUSED, VLLM_ALONE, filters_of, generation_problem, on_error, upper_clip

logger = logging.getLogger(__name__)

# ---- batches ----


def _batch(settings: Settings, machine: Machine) -> tuple[int, int] | None:
    """Completions of a generation round, and its micro-steps, as TRL derives them; None: they cannot be counted."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    sizes = [settings[name] for name in names]
    sizes += [size for size in (settings.generation_batch_size, settings.steps_per_generation) if size is not None]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    whole = settings.per_device_train_batch_size * machine.processes
    if settings.generation_batch_size is None:
        steps = settings.steps_per_generation or settings.gradient_accumulation_steps
        return whole * steps, steps
    return settings.generation_batch_size, max(settings.generation_batch_size // whole, 1)


def _cut_round(settings: Settings, machine: Machine) -> dict[str, Any] | None:
    """A generation batch that is no multiple of what all processes take at once."""
    batch = _batch(settings, machine)
    if batch is None or settings.generation_batch_size is None or settings.steps_per_generation is not None:
        return None
    unit = settings.per_device_train_batch_size * machine.processes
    return {"sizes": (batch[0], unit)} if batch[0] % unit else None


def _cut_group(settings: Settings, machine: Machine) -> dict[str, Any] | None:
    """A generation batch that is no multiple of a group."""
    batch = _batch(settings, machine)
    if batch is None or settings.num_generations < 2 or _cut_round(settings, machine):
        return None
    return {"sizes": (batch[0], settings.num_generations)} if batch[0] % settings.num_generations else None


def _cut_evaluation(settings: Settings, machine: Machine) -> bool:
    """An evaluation batch that is no multiple of a group."""
    strategy = getattr(settings.eval_strategy, "value", settings.eval_strategy)
    group = settings.num_generations_eval or settings.num_generations
    sizes = (settings.per_device_eval_batch_size, group)
    if strategy == "no" or not all(isinstance(size, int) and size > 0 for size in sizes):
        return False
    return settings.per_device_eval_batch_size * machine.processes % group != 0


def _whole_groups(settings: Settings, machine: Machine, *, sizes: tuple[int, int]) -> tuple[str, dict[str, int]]:
    """The next batch size that holds whole groups, where a batch, the first size, is no multiple of the second."""
    batch, unit = sizes
    unit = math.lcm(unit, settings.num_generations)
    key = "generation_batch_size" if settings.generation_batch_size else "per_device_train_batch_size"
    now = settings[key]
    size = next(candidate for candidate in range(now + 1, now + unit + 1) if candidate * (batch // now) % unit == 0)
    fixes = [as_lines({key: size})]
    group = settings.num_generations
    if group >= 2 and batch % group:
        below = batch // group * group
        above = below + group
        wholes = " or ".join(str(size) for size in (below, above) if size)
        divisors = [str(divisor) for divisor in range(2, min(batch, 2 * group) + 1) if batch % divisor == 0]
        others = f", or num_generations {' or '.join(divisors)}" if divisors else ""
        fixes.append(
            "A group must not be cut in two. per_device_train_batch_size counts completions: make the generation "
            f"batch {wholes}{others}."
        )
    return "; ".join(fixes), {key: size}


BATCHES: tuple[Rule, ...] = (
    Rule(
        code="C010",
        needs=("settings", "machine"),
        when=_cut_round,
        says=lambda settings, machine, sizes: (
            f"generation_batch_size ({sizes[0]}) must be divisible by the global batch size ({sizes[1]})."
        ),
        cure=_whole_groups,
        about=("generation_batch_size",),
    ),
    Rule(
        code="C012",
        needs=("settings", "machine"),
        when=_cut_evaluation,
        says=lambda settings, machine: (
            f"The global eval batch size ({settings.per_device_eval_batch_size} * {machine.processes}) must be "
            "divisible by the number of generations used for evaluation "
            f"({settings.num_generations_eval or settings.num_generations})."
        ),
        cure=lambda settings, machine: {"per_device_eval_batch_size": _whole_evaluation(settings)},
        about=("per_device_eval_batch_size",),
    ),
    Rule(
        code="C010",
        needs=("settings", "machine"),
        when=_cut_group,
        says=lambda settings, machine, sizes: (
            f"generation_batch_size ({sizes[0]}) must be divisible by num_generations ({sizes[1]})."
        ),
        cure=_whole_groups,
        about=("generation_batch_size", "num_generations"),
    ),
)
"""Batches that cannot be cut into groups, in TRL's words."""


def _whole_evaluation(settings: Settings) -> int:
    """The next evaluation batch of whole groups."""
    group = settings.num_generations_eval or settings.num_generations
    return int(math.ceil(settings.per_device_eval_batch_size / group) * group)


# ---- one setting ----


def refused_by(read: Callable[[Any], Any], name: str) -> Rule:
    """The rule of a value with a form of its own: the error of the function that reads it."""

    return Rule(code="C030", when=lambda settings: raised(read, settings[name]), about=(name,))


def _not_honoured(name: str, idle: Any, reason: str) -> Rule:
    """The rule of an option of TRL that Podium does not honour."""
    return Rule(
        code="C014" if "vllm" in name else "C018",
        when=lambda settings: settings[name] != idle and {"name": name, "value": settings[name], "reason": reason},
        says=lambda settings, *, value, **_: (
            f"{name}={value!r} is an option of TRL that Podium does not honour: {reason}."
        ),
        cure=f"take `{name}` out",
        about=(name,),
    )


def vllm_rule(name: str, default: Any) -> Rule:
    """The rule of a setting of vLLM where it does not sample, or of its other mode."""

    def wrong(settings: Settings) -> dict[str, Any] | None:
        if settings[name] == default:
            return None
        if settings.async_rollouts and name.startswith("vllm_importance_sampling"):  # it weighs older completions
            return None
        what = "belongs to vLLM, which does not sample here"
        if settings.use_vllm:
            unused = VLLM_ALONE["colocate" if settings.vllm_mode == "server" else "server"]
            if name not in unused:
                return None
            what = f"does nothing with vllm_mode={settings.vllm_mode!r}"
        return {"name": name, "value": settings[name], "what": what}

    def cure(settings: Settings, **_: Any) -> str:
        if settings.use_vllm:
            return "Leave it out; a server has options of its own (`vllm serve --help`)."
        return "Set use_vllm: true, or leave it out."

    return Rule(
        code="C014",
        when=wrong,
        says=lambda settings, *, value, what, **_: f"{name}={value!r} {what}.",
        cure=cure,
        about=(name,),
    )


LENGTHS: tuple[Rule, ...] = (
    Rule(
        code="C016",
        when=lambda settings: settings.max_completion_length is None,
        says=lambda settings: (
            "max_completion_length is None; it must be a number: completions that never end would not."
        ),
        cure=lambda settings: {"max_completion_length": trl.GRPOConfig.max_completion_length},
        about=("max_completion_length",),
    ),
    Rule(
        code="C016",
        when=lambda settings: (
            settings.max_steps < 0
            and not settings.num_train_epochs > 0
            and {"num_train_epochs": settings.num_train_epochs}
        ),
        says=lambda settings, **_: (
            f"num_train_epochs is {settings.num_train_epochs:g} and max_steps is not set: there is nothing to train."
        ),
        cure={"max_steps": 100},
        about=("num_train_epochs", "max_steps"),
    ),
)
"""Limits that depend on more than the number."""


# ---- several settings ----


def _steps_per_generation(settings: Settings, machine: Machine) -> int:
    """Micro-steps that go once through a round."""
    batch = _batch(settings, machine)
    return settings.steps_per_generation or (batch[1] if batch else settings.gradient_accumulation_steps)


def _is_kl_on_policy(settings: Settings, machine: Machine) -> bool:
    """Whether each round is trained on in one optimizer step."""
    if settings.covariance_control != "kl":
        return False
    micro_steps = _steps_per_generation(settings, machine) * settings.num_iterations
    return bool(settings.gradient_accumulation_steps % micro_steps == 0)


def _has_second_device(settings: Settings, machine: Machine) -> bool:
    """Whether the copy to sample from has a place: a GPU that does not train, in a run of one process; or the CPU."""
    try:
        device = torch.device(settings.rollout_device or "cpu")
    except RuntimeError:
        return False
    if "cpu" in (device.type, machine.device.type):
        return device.type == machine.device.type
    return machine.processes == 1 and device.index not in (None, machine.device.index)


def _teacher_without_model(settings: Settings) -> str:
    end = "" if settings.teacher_coef_end is None else f", teacher_coef_end {settings.teacher_coef_end:g}"
    return f"teacher_coef {settings.teacher_coef:g}{end} without teacher_model: there is no teacher to compare with."


CONTRADICTIONS: tuple[Rule, ...] = (
    Rule(
        code="C018",
        when=lambda settings: (
            settings.use_liger_kernel and (settings.liger_kernel_config or {}).get("fused_linear_cross_entropy")
        ),
        says=lambda settings: (
            "liger_kernel_config asks for fused_linear_cross_entropy, which drops the log-probabilities of "
            "tokens that the loss is made of."
        ),
        cure="take `liger_kernel_config` out",
        about=("liger_kernel_config",),
    ),
    Rule(
        code="C014",
        when=lambda settings: settings.use_vllm and settings.rollout_engine not in ("auto", "vllm"),
        says=lambda settings: f"use_vllm=True and rollout_engine={settings.rollout_engine!r} name two engines.",
        cure="Leave one of them out.",
        about=("use_vllm", "rollout_engine"),
    ),
    Rule(
        code="C014",
        when=lambda settings: (
            settings.use_vllm
            and settings.vllm_importance_sampling_correction
            and settings.loss_type == "vespo"
            and CORRECTIONS[settings.vllm_importance_sampling_mode].per_rollout
        ),
        says=lambda settings: (
            "loss_type vespo weighs whole rollouts by itself; vllm_importance_sampling_mode is "
            f"{settings.vllm_importance_sampling_mode}."
        ),
        cure="Set vllm_importance_sampling_mode: token_truncate.",
        about=("loss_type", "vllm_importance_sampling_mode"),
    ),
    Rule(
        code="C014",
        when=lambda settings: settings.use_vllm and settings.cache_implementation is not None,
        says=lambda settings: "cache_implementation is `generate`'s, and vLLM samples.",
        cure="Leave one of them out.",
        about=("cache_implementation",),
    ),
    Rule(
        code="C030",
        when=lambda settings: settings.sync_ref_model and not settings.beta,
        says=lambda settings: "sync_ref_model=True has no reference model to move, because beta is 0.",
        cure="Set beta, or leave sync_ref_model out.",
        about=("sync_ref_model",),
    ),
    Rule(
        code="C062",
        when=lambda settings: (
            settings.advantage_estimator != "grpo" and settings.multi_objective_aggregation != "sum_then_normalize"
        ),
        says=lambda settings: (
            f"advantage_estimator {settings.advantage_estimator} starts from the weighted sum of the rewards, "
            f"and multi_objective_aggregation {settings.multi_objective_aggregation} from each reward by "
            "itself."
        ),
        cure="Leave one of them out.",
        about=("advantage_estimator", "multi_objective_aggregation"),
    ),
    Rule(
        code="C062",
        when=lambda settings: settings.advantage_estimator != "grpo" and settings.turn_discount is not None,
        says=lambda settings: (
            f"advantage_estimator {settings.advantage_estimator} gives a whole completion one advantage, and "
            "turn_discount each turn its own."
        ),
        cure="Leave one of them out.",
        about=("advantage_estimator", "turn_discount"),
    ),
    Rule(
        code="C063",
        when=lambda settings: (
            settings.teacher_model is None and (settings.teacher_coef != 1.0 or settings.teacher_coef_end is not None)
        ),
        says=_teacher_without_model,
        cure="Name one, or leave the weight out.",
        about=("teacher_coef", "teacher_coef_end", "teacher_model"),
    ),
    Rule(
        code="C063",
        when=lambda settings: (
            str(settings.teacher_model).startswith(("http://", "https://")) and settings.temperature != 1
        ),
        says=lambda settings: (
            f"temperature: {settings.temperature:g} with teacher_model {settings.teacher_model}: a vLLM "
            "server gives log-probabilities at temperature 1 alone, so the two could not be compared."
        ),
        cure="temperature: 1.0",
        about=("temperature", "teacher_model"),
    ),
    Rule(
        code="C062",
        needs=("settings", "machine"),
        when=_is_kl_on_policy,
        says=lambda settings, machine: (
            "covariance_control: kl holds tokens near the policy that sampled them, and here every round is "
            "trained on in one step, before the policy has moved: it changes nothing."
        ),
        cure="num_iterations: 2, or covariance_control: clip",
        about=("covariance_control", "num_iterations", "steps_per_generation"),
    ),
    Rule(
        code="C064",
        when=lambda settings: not settings.shuffle_dataset and settings.balance_column is not None,
        says=lambda settings: (
            "shuffle_dataset: false keeps the rows in their order, and balance_column draws them by weight."
        ),
        cure="Leave one of them out.",
        about=("shuffle_dataset", "balance_column"),
    ),
)
"""Settings that cannot work together."""

OFF_POLICY: tuple[Rule, ...] = (
    Rule(
        code="C033",
        when=lambda settings: (
            settings.rollout_device is not None and (not settings.async_rollouts or settings.use_vllm)
        ),
        says=lambda settings: (
            f"rollout_device is {settings.rollout_device!r}, where the live engine would have a copy of the "
            "weights to sample from while they are trained; here it has none (async_rollouts is "
            f"{settings.async_rollouts})."
        ),
        cure="Leave rollout_device out, or set async_rollouts: 1 without use_vllm.",
        about=("rollout_device", "async_rollouts"),
    ),
    Rule(
        code="C033",
        when=lambda settings: (
            settings.async_rollouts
            and settings.rollout_engine in ENGINES
            and not ENGINES[settings.rollout_engine].overlaps
        ),
        says=lambda settings: (
            f"async_rollouts samples while weights are trained, and rollout_engine: {settings.rollout_engine} has none "
            "of its own."
        ),
        cure="Leave one of the two out.",
        about=("async_rollouts", "rollout_engine"),
    ),
    Rule(
        code="C033",
        needs=("settings", "machine"),
        when=lambda settings, machine: settings.async_rollouts > 1 and settings.use_vllm and machine.processes > 1,
        says=lambda settings, machine: (
            f"async_rollouts: {settings.async_rollouts} needs a run of one process: a server samples from one version "
            f"of the weights at a time, and the rounds of {machine.processes} processes end at different times."
        ),
        cure="Set async_rollouts: 1.",
        about=("async_rollouts",),
    ),
    Rule(
        code="C033",
        when=lambda settings: settings.async_rollouts and settings.use_vllm and settings.vllm_mode == "colocate",
        says=lambda settings: (
            "async_rollouts samples on a device that does not train, and vllm_mode: colocate puts vLLM on "
            "the trainer's."
        ),
        cure="Start a server and set vllm_mode: server, or leave async_rollouts out.",
        about=("async_rollouts", "vllm_mode"),
    ),
    Rule(
        code="C033",
        when=lambda settings: settings.async_rollouts and settings.use_vllm and bool(filters_of(settings)),
        says=lambda settings: (
            "async_rollouts corrects by the sampler's log-probabilities, and vLLM's are of what top_p, "
            "top_k, min_p or repetition_penalty left."
        ),
        cure="Sample without a filter, or leave async_rollouts out.",
        about=("async_rollouts", "top_p", "top_k", "min_p", "repetition_penalty"),
    ),
    Rule(
        code="C033",
        needs=("settings", "machine"),
        when=lambda settings, machine: (
            settings.async_rollouts and not settings.use_vllm and not _has_second_device(settings, machine)
        ),
        says=lambda settings, machine: (
            "async_rollouts samples on a device that does not train, in a run of one process: training is on "
            f"{machine.device}, processes: {machine.processes}, rollout_device: {settings.rollout_device}."
        ),
        cure="Set rollout_device: cuda:1 (on a CPU leave it out), or leave async_rollouts out.",
        about=("async_rollouts", "rollout_device"),
    ),
)
"""Settings that keep a run from training on what an earlier policy sampled."""

ON_CPU = Rule(
    code="C013",
    needs=("settings", "machine"),
    when=lambda settings, machine: settings.fp16 and not machine.has_autocast,
    says=lambda settings, machine: "fp16=True needs a GPU, and this run is on the CPU.",
    cure="Leave it out, or bf16: true.",
    about=("fp16",),
)

FORMS: tuple[Rule, ...] = (
    *(_not_honoured(name, idle, reason) for name, (idle, reason) in REFUSED.items()),
    Rule(code="C030", when=generation_problem, about=("generation_kwargs",)),
    refused_by(on_error, "on_reward_error"),
)
"""Values that Podium does not honour or cannot read."""


# ---- what works, and is not what the paper of that name does ----


def _unlike(when: Callable[[Any], Any], says: Callable[[Any], str], why: str, cure: Mapping[str, Any]) -> Rule:
    return Rule(code="C025", severity="warning", when=when, says=says, why=why, cure=cure, about=("loss_type",))


UNLIKE_PAPER: tuple[Rule, ...] = (
    _unlike(
        lambda settings: settings.loss_type == "luspo" and settings.importance_sampling_level != "sequence",
        lambda settings: f"loss_type luspo with importance_sampling_level {settings.importance_sampling_level}",
        "LUSPO is defined by ratios of whole completions",
        {"importance_sampling_level": "sequence"},
    ),
    _unlike(
        lambda settings: settings.loss_type == "vespo" and settings.importance_sampling_level != "token",
        lambda settings: f"loss_type vespo with importance_sampling_level {settings.importance_sampling_level}",
        "VESPO weighs whole completions by itself",
        {"importance_sampling_level": "token"},
    ),
    _unlike(
        lambda settings: (
            settings.importance_sampling_level == "sequence"
            and settings.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo")
        ),
        lambda settings: f"importance_sampling_level sequence with loss_type {settings.loss_type}",
        "the loss sums over tokens, which weights each sequence by its completion length; GSPO takes their mean",
        {"loss_type": "grpo"},
    ),
    _unlike(
        lambda settings: settings.importance_sampling_level == "sequence" and settings.loss_type in ("gmpo", "dppo"),
        lambda settings: f"importance_sampling_level sequence with loss_type {settings.loss_type}",
        "it has its own way from ratios of tokens to a completion, and does not look at the setting",
        {"importance_sampling_level": "token"},
    ),
    _unlike(
        lambda settings: (
            settings.loss_type == "dr_grpo"
            and settings.scale_rewards == "group"
            and settings.advantage_estimator == "grpo"
        ),
        lambda settings: f"loss_type dr_grpo with scale_rewards {settings.scale_rewards}",
        "Dr. GRPO removes the division by the group's deviation; with it the bias towards easy prompts is back",
        {"scale_rewards": "none"},
    ),
    _unlike(
        lambda settings: settings.loss_type == "cispo" and upper_clip(settings) < 1,
        lambda settings: "loss_type cispo with an epsilon_high below 1 (it is epsilon unless set)",
        "for cispo it is the cap of the ratio itself, which is 1 on policy: nearly every token has the same weight",
        {"epsilon_high": 5.0},
    ),
)


def warn_unlike_paper(args: Any) -> None:
    """Log what `podium check` finds as C025, which is why the command line does not show it again."""
    for found in findings(UNLIKE_PAPER, Facts(settings=args)):
        [(name, value)] = found.changes.items()
        logger.warning("%s: %s. Set %s=%r.", found.what, found.why, name, value, extra={"code": found.code})


# ---- a run as a whole ----


def _unknown_trackers(args: Any) -> list[ConfigError]:
    """The error of each name in `report_to` that is no tracker."""
    trackers = integration_utils.INTEGRATION_TO_CALLBACK
    return [_unknown_tracker(name, trackers) for name in args.report_to or () if name not in trackers]


def _unknown_tracker(name: str, trackers: Mapping[str, Any]) -> ConfigError:
    near = f"[{', '.join(name.split(','))}]" if "," in name else nearest(name, trackers)
    return ConfigError(
        f"report_to names {name}, which is no tracker; there are {listed(trackers)}, none and all.",
        code="C004",
        fix=f"Did you mean `{near}`?" if near else "report_to: none",
        settings=("report_to", name),
        name=name,
        trackers=trackers,
        near=near,
    )


def _generate_alone(args: Any) -> dict[str, str] | None:
    """What `generate` alone takes, where an engine is asked for that does not take it."""
    reasons = only_generate(args)
    if args.rollout_engine not in ENGINES or ENGINES[args.rollout_engine].takes_any or not reasons:
        return None
    return {"reasons": "; ".join(reasons)}


def no_router(args: Any, config: PretrainedConfig, *, known: bool | None = None) -> ConfigError | None:
    """The error of a load-balancing loss for a model without a router. `known`: whether it has one, if it is loaded."""
    text = config.get_text_config()
    settings = ("num_experts", "num_local_experts", "n_routed_experts", "output_router_logits")
    has_router = any(hasattr(text, name) for name in settings) if known is None else known
    if not args.router_aux_loss_coef or has_router:
        return None
    return ConfigError(
        f"router_aux_loss_coef is {args.router_aux_loss_coef:g}, but this model ({text.model_type}) has no router.",
        code="M021",
        fix="leave router_aux_loss_coef out",
        settings=("router_aux_loss_coef",),
        router_aux_loss_coef=args.router_aux_loss_coef,
        model_type=text.model_type,
    )


def only_generate(args: Any) -> list[str]:
    """Settings that transformers' `generate` alone takes, in words."""
    unknown = sorted(set(args.generation_kwargs or {}) - {*ARGUMENTS, "do_sample", "eos_token_id"})
    reasons = [f"generation_kwargs {', '.join(unknown)} are `generate`'s alone"] if unknown else []
    if args.cache_implementation is not None:
        reasons.append("cache_implementation is `generate`'s alone")
    return reasons


def _no_folder(name: str) -> ConfigError | None:
    """The error of an `output_dir` that cannot be made or written to."""
    if reason := impossible_name(name):
        return _wrong_folder(f"is {reprlib.repr(name)}, which no folder can be called ({reason})")
    folder = Path(name)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not name.strip():
        return _wrong_folder("is empty; it must name a folder")
    if not there.is_dir():
        return _wrong_folder(
            f"is {name}, which is a file" if there == folder.absolute() else f"is {name}, and {there} is a file"
        )
    try:
        with tempfile.NamedTemporaryFile(prefix=".podium-", dir=there) as file:  # a full disk still makes a folder
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        return _wrong_folder(f"is {name}, and nothing can be written in {there} ({reason})")
    return None


def _wrong_folder(why: str) -> ConfigError:
    return ConfigError(
        f"output_dir {why}.",
        code="C036",
        fix="output_dir: runs/first, or another folder that can be written",
        settings=("output_dir",),
        why=why,
    )


_OPTIMIZER_PACKAGES: Mapping[str, tuple[str, str]] = {
    "bitsandbytes": (r"ademamix|(?!adamw_torch|galore).*(bnb|8bit|32bit)", "'podium[quant]'"),
    "torchao": (r"adamw_torch_[48]bit", "torchao"),
    "galore_torch": (r"galore_.*", "galore-torch"),
    "lomo_optim": (r"(ada)?lomo", "lomo-optim"),
    "grokadamw": (r"grokadamw", "grokadamw"),
    "schedulefree": (r"schedule_free_.*", "schedulefree"),
    "apollo_torch": (r"apollo_.*", "apollo-torch"),
    "optimi": (r"stable_adamw", "torch-optimi"),
}
"""Package, names of the optimizers that need it, and what to install."""

_TRACKER_PACKAGES = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}
"""Trackers whose `is_NAME_available` in transformers has another name."""


def missing_packages(args: Any) -> Iterator[ConfigError]:
    """Errors of packages that settings need and that are not installed here."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    for package, (names, install) in _OPTIMIZER_PACKAGES.items():
        if re.fullmatch(names, optimizer) and importlib.util.find_spec(package) is None:
            yield ConfigError(
                f"optim is {optimizer}, which needs the package {package}; it is not installed here.",
                code="C032",
                fix=f"pip install {install}, or optim: adamw_torch",
                changes={"optim": "adamw_torch"},
                settings=("optim",),
                optimizer=optimizer,
                package=package,
            )
    missing = [name for name in args.report_to or () if not _has_tracker(name)]
    for name in missing:
        package = name.replace("_", "-").replace("azure-ml", "azureml-sdk").replace("flyte", "flytekit")
        rest: Any = [tracker for tracker in args.report_to if tracker not in missing] or "none"
        changes = {"report_to": rest}
        yield ConfigError(
            f"report_to names {name}, whose package is not installed here.",
            code="C032",
            fix=f"pip install {package}, or {as_lines(changes)}",
            changes=changes,
            settings=("report_to",),
            name=name,
            package=package,
        )
    if args.use_vllm and args.vllm_mode == "colocate" and importlib.util.find_spec("vllm") is None:
        what, fix = NOT_INSTALLED
        fix = f"{fix}; or leave `use_vllm` out: the trainer's own weights are sampled from"
        gone = (field.name for field in dataclasses.fields(args) if field.name.startswith(("vllm_", "rollout_engine")))
        given = [name for name in gone if getattr(args, name) != getattr(type(args), name, None)]
        yield ConfigError(what, code="C032", fix=fix, changes=dict.fromkeys(["use_vllm", *given]))


def _has_tracker(name: str) -> bool:
    is_there = getattr(integration_utils, f"is_{_TRACKER_PACKAGES.get(name, name)}_available", lambda: True)
    with contextlib.suppress(Exception):  # a package that is there and broken raises its own error later
        return bool(is_there())
    return True


OF_RUN: tuple[Rule, ...] = (
    Rule(
        code="C030",
        needs=("settings", "adapter"),
        when=lambda args, adapter: args.sync_ref_model and adapter,
        says=lambda args, adapter: (
            "sync_ref_model moves a full copy of the model, but with an adapter the reference is the model without it."
        ),
        cure="leave sync_ref_model out, or train all weights",
        about=("sync_ref_model",),
    ),
    Rule(
        code="C030",
        needs=("settings", "evaluates"),
        when=lambda args, evaluates: (
            args.eval_strategy != "no" and not evaluates and {"eval_strategy_value": args.eval_strategy.value}
        ),
        says=lambda args, evaluates, *, eval_strategy_value: (
            f"eval_strategy is {eval_strategy_value}, and there are no rows to evaluate on."
        ),
        cure="eval_strategy: no, or give rows: `held_out: 0.1` or `eval_dataset`",
        about=("eval_strategy",),
    ),
    Rule(
        code="C030",
        when=_generate_alone,
        says=lambda args, *, reasons: f"rollout_engine: {args.rollout_engine} is not possible here: {reasons}.",
        cure={"rollout_engine": "auto"},
        about=("rollout_engine",),
    ),
    Rule(
        code="C030",
        when=lambda args: args.n_gpu > 1 and {"n_gpu": args.n_gpu},
        says=lambda args, *, n_gpu: f"One process sees {n_gpu} GPUs.",
        cure=lambda args, *, n_gpu: (
            f"podium train RECIPE --processes {n_gpu}, for a script accelerate launch --num_processes {n_gpu}; "
            "or show it one: CUDA_VISIBLE_DEVICES=0"
        ),
    ),
    Rule(code="C004", when=_unknown_trackers),
    Rule(code="C036", when=lambda args: _no_folder(str(args.output_dir))),
)
"""What settings, the model and the data of a run exclude in each other, or this folder and machine in the settings."""

PACKAGES = Rule(code="C032", when=lambda args: list(missing_packages(args)))
"""Packages that settings need and that are not installed here."""


# ---- rows that are a stream ----


STREAMS: tuple[Rule, ...] = (
    Rule(
        code="C030",
        needs=("settings", "stream"),
        when=lambda args, stream: getattr(args.accelerator_config, "dispatch_batches", None),
        says=lambda args, stream: (
            "Iterable datasets require `dispatch_batches=False`, but it is set to `True` in `accelerator_config`"
        ),
        cure={"accelerator_config": {"dispatch_batches": False}},
    ),
    Rule(
        code="C030",
        needs=("settings", "stream"),
        when=lambda args, stream: stream == "train" and args.max_steps <= 0,
        says=lambda args, stream: (
            "max_steps must be set: the training rows are a stream without a length, so epochs cannot be counted"
        ),
        cure={"max_steps": 500},
    ),
    Rule(
        code="C030",
        needs=("settings", "stream"),
        when=lambda args, stream: stream == "train" and args.dynamic_sampling,
        says=lambda args, stream: (
            "dynamic_sampling draws replacements from the whole dataset, which a stream does not offer"
        ),
        cure={"dataset_streaming": False},
    ),
    Rule(
        code="C064",
        needs=("settings", "stream"),
        when=lambda args, stream: stream == "train" and args.balance_column is not None,
        says=lambda args, stream: "balance_column chooses among all rows, which a stream does not offer",
        cure={"dataset_streaming": False},
    ),
)
"""Settings that need more of a dataset than a stream has."""
