"""Rules about settings that work and are likely a mistake. Those that cannot work are refused where they are read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import LoraConfig

from podium.agents.setup import user_code
from podium.algorithm.losses import CORRECTIONS
from podium.checks.setup import Setup, with_args
from podium.console.terminal import is_main
from podium.errors import CheckpointError, ConfigError, Finding, PodiumError
from podium.errors.rule import Rule
from podium.planning.answer_columns import chosen_columns
from podium.recipe.assume import assumed_words
from podium.recipe.schema import default
from podium.runs import checkpoint, environment
from podium.runs.monitors.history import usual_rate
from podium.runs.occupied import occupied
from podium.runs.redaction import without_secrets
from podium.trainer.assembly import plan_of
from podium.trainer.config import GRPOConfig
from podium.trainer.preflight import PACKAGES, RULES
from podium.trainer.processes import refuse_sharded_stage, refuse_undividable
from podium.trainer.resume import differences
from podium.trainer.rules import filters_of, missing_packages, reshaping
from podium.trainer.setting_rules import UNLIKE_PAPER
from podium.trainer.settings import loss_settings, vllm_settings

LORA_RATE = 5e-6
"""A learning rate for an adapter is suspect below; adapters want about ten times that of a full fine-tuning."""
TOO_LOW = 0.01
"""A learning rate for all weights is suspect below this share of the usual one."""
FEW_GENERATIONS = 4
FEW_GROUPS = 4
COLD, HOT = 0.3, 2.0

_PATHS = ("model", "dataset", "eval_dataset", "output_dir", "model_name_or_path", "dataset_name")


def assumed(setup: Setup) -> Iterator[Finding]:
    """Settings that were inferred rather than written."""
    if setup.assumed:
        fix = "write what should be otherwise, as a flag or in a recipe"
        if turned := _turned(setup):
            fix = f"where question and answer are the other way round: {turned}; else {fix}"
        yield Finding(severity="note", code="C040", what=assumed_words(setup.assumed), fix=fix)


def _turned(setup: Setup) -> str:
    """The flags for the other way round, where only the order of the columns told question and answer."""
    if setup.train is None or not {"prompt", "answer"} <= setup.assumed.keys():
        return ""
    names = [name for name in setup.train.columns if name not in ("prompt", "answer")]
    return chosen_columns(names, setup.train.examples).other if len(names) > 1 else ""


@with_args
def learning_rate(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """A learning rate of the other kind of fine-tuning, or of 0."""
    rate, lora = args.learning_rate, setup.lora is not None
    size = setup.model.num_parameters if setup.model is not None else 0
    sized = f" of a model with {size / 1e9:.1f} billion parameters" if size >= 1e9 else ""
    high = 5 * usual_rate(size, adapter=False)
    at, usual = setup.at("learning_rate"), usual_rate(size, adapter=lora)
    cure = setup.cure("learning_rate", float(f"{usual:g}"))
    if rate == 0:
        yield Finding(severity="warning", code="C026", what=f"{at} is 0: nothing is learnt", **cure)
    elif lora and rate < LORA_RATE:
        what = f"{at} is {rate:g} for a LoRA adapter, a rate for training all weights"
        why = "an adapter starts at zero and needs about ten times the rate; at this one rewards hardly move"
        yield Finding(severity="warning", code="C021", what=what, why=why, **cure)
    elif not lora and rate < TOO_LOW * usual:
        what = f"{at} is {rate:g} for all weights{sized}; usual is {usual:g}"
        why = "a step changes the weights by less than their precision can show, and the run goes nowhere"
        yield Finding(severity="warning", code="C037", what=what, why=why, **cure)
    elif not lora and rate > high:
        what = f"{at} is {rate:g} for all weights{sized}, a rate for a LoRA adapter"
        why = "the policy breaks within a few steps: its text turns to noise and does not come back"
        lower = float(f"{min(rate / 10, usual):g}")
        fix = setup.line("learning_rate", lower) + ", or train an adapter (`lora: {r: 16}`)"
        yield Finding(severity="warning", code="C022", what=what, why=why, fix=fix, changes={"learning_rate": lower})


@with_args
def group_size(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """Groups too small to compare in."""
    others = args.num_generations - 1
    if args.num_generations < FEW_GENERATIONS:
        what = f"{setup.at('num_generations')} is {others + 1}: an advantage compares a completion with {others} "
        what += f"other{'s' * (others > 1)}"
        why = "with so few the mean of the group is mostly noise, and most groups have no spread at all"
        changes = {"num_generations": 8}
        if plan_of(args).prompts_per_round * args.num_generations < 8 * FEW_GROUPS:  # the same prompts in a step
            changes["gradient_accumulation_steps"] = args.gradient_accumulation_steps * -(-8 // args.num_generations)
        fix = "; ".join(setup.line(key, value) for key, value in changes.items())
        yield Finding(severity="warning", code="C023", what=what, why=why, fix=fix, changes=changes)


@with_args
def few_groups(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """Optimizer steps that see few prompts."""
    plan = plan_of(args)
    groups = plan.prompts_per_round * plan.accumulation / plan.shares
    left_out = any(problem.code == "C010" for problem in setup.problems)  # the batch size is not the run's
    if groups >= FEW_GROUPS or left_out:
        return
    size = args.per_device_train_batch_size
    wanted = -(-8 * args.num_generations // (size * args.world_size))
    what = f"an optimizer step sees {groups:g} prompt{'s' * (groups != 1)}: per_device_train_batch_size {size} "
    what += f"counts completions, and {args.num_generations} of them are one prompt's"
    why = "a step towards one or two prompts forgets the others; equal rewards leave it empty"
    fix = setup.line("gradient_accumulation_steps", wanted) + " makes it 8 prompts"
    yield Finding(
        severity="warning", code="C024", what=what, why=why, fix=fix, changes={"gradient_accumulation_steps": wanted}
    )


_USUAL: Mapping[str, tuple[float, float, str]] = {
    "beta": (0.0, 1.0, "the pull back to the reference outweighs every reward, and nothing is learnt"),
    "weight_decay": (0.0, 1.0, "all weights shrink in every step by this share of the learning rate"),
    "max_grad_norm": (1e-3, math.inf, "every gradient is cut to next to nothing, and Adam's epsilon takes the rest"),
    "num_iterations": (1, 8, "the same completions are trained on again and again, until ratios leave every clip"),
    "epsilon": (1e-3, 1.0, "ratios are clipped at once, or never"),
    "adam_beta1": (0.0, 0.99, "a gradient reaches the weights over more steps than a run of GRPO has"),
    "adam_beta2": (0.5, 0.9999, "the size of a step follows a single gradient, or no gradient for thousands of steps"),
    "adam_epsilon": (0.0, 1e-3, "it outweighs the gradients, so the steps vanish"),
    "top_k": (2, float("inf"), "all completions of a group are the same, so nothing can be learnt"),
    "top_p": (0.05, 1.0, "nearly all completions of a group are the same, so nothing can be learnt"),
    "min_p": (0.0, 0.9, "nearly all completions of a group are the same, so nothing can be learnt"),
    "repetition_penalty": (0.8, 1.5, "text falls apart: every word that was used becomes unlikely, or the only one"),
    "max_completion_length": (4, float("inf"), "hardly any answer is so short"),
    "num_generations": (2, 512, "the error of a group's mean is small long before"),
}
"""Settings that work within (lowest, highest), and do hardly ever beyond, with what happens there. 0 switches off."""


def _usual_rule(key: str, low: float, high: float, why: str) -> Rule:
    """The rule of a value that runs, and with which hardly anything is learnt."""
    usual = f"{low:g} to {high:g}" if high < math.inf else f"{low:g} or more"

    def is_beyond(args: GRPOConfig) -> bool:
        value = getattr(args, key)
        if value is None or (value == 0 and key != "epsilon"):
            return False
        if key == "epsilon" and loss_settings(args).one_ratio_per_rollout:
            return not _LOWEST_OF_ROLLOUTS <= value <= high
        return not low <= value <= high

    def says(args: GRPOConfig) -> str:
        limits = usual
        if key == "epsilon" and loss_settings(args).one_ratio_per_rollout:
            limits = f"{_LOWEST_OF_ROLLOUTS:g} to {high:g}"
        return f"{key} is {getattr(args, key):g}; usual is {limits}"

    return Rule(
        code="C037", severity="warning", when=is_beyond, says=says, why=why, cure={key: default(key)}, about=(key,)
    )


_LOWEST_OF_ROLLOUTS = 1e-5
"""The lowest usual epsilon of a ratio for a whole rollout: the mean over its tokens moves less; GSPO's is 0.0003."""


def unusual(setup: Setup) -> Iterator[Finding]:
    """Values that run, and with which hardly anything is learnt."""
    return setup.found(_usual_rule(key, *usual) for key, usual in _USUAL.items())


@with_args
def warm_up(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """More steps of warm-up than there are steps."""
    if setup.train is None or setup.train.source.is_stream:
        steps = max(args.max_steps, 0)
    else:
        plan = plan_of(args)
        rounds = setup.train.num_rows // plan.prompts_per_round
        steps = plan.num_steps(args, rounds * plan.micro_steps_per_round)
    if steps and args.warmup_steps >= steps:
        what = f"{setup.at('warmup_steps')} is {args.warmup_steps:g}, and the run has {steps:,} steps"
        why = "the learning rate still rises when the run ends, and never reaches what learning_rate says"
        yield Finding(severity="warning", code="C037", what=what, why=why, **setup.cure("warmup_steps", steps // 10))


_NOT_INSTALLED = "training cannot start here; elsewhere the recipe may be right"


def packages(setup: Setup) -> Iterator[Finding]:
    """An optimizer or a tracker whose package is not installed."""
    return setup.found([replace(PACKAGES, severity="warning", why=_NOT_INSTALLED)])


def processes(setup: Setup) -> Iterator[Finding]:
    """Settings that the division of weights over processes rules out, and stages, of which each takes them whole."""
    try:
        if setup.stage is not None:
            refuse_sharded_stage(setup.stage.recipe.config)
        if setup.args is not None:
            refuse_undividable(setup.args, adapter=setup.lora is not None)
    except ConfigError as error:
        yield setup.finding(error)


@with_args
def vllm(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """A server that is not there, or does not fit."""
    if not args.use_vllm or setup.model is None or setup.model.config is None:
        return
    from podium.engines.vllm import prepare

    try:
        prepare(vllm_settings(args), setup.model.name, setup.model.config, waits=False)
    except PodiumError as error:
        asked = "training asks the same before it loads weights, and waits `vllm_server_timeout` seconds for an answer"
        if error.what not in {each.what for each in missing_packages(args)}:
            why = _NOT_INSTALLED if error.code == "C032" else asked
            yield Finding(
                severity="warning",
                code=error.code,
                what=f"{setup.at('use_vllm')}: {error.what}",
                why=why,
                fix=error.fix,
            )


@with_args
def filters(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """A correction by whole completions of what vLLM drew through a filter."""
    mode = args.vllm_importance_sampling_mode
    if not (args.use_vllm and args.vllm_importance_sampling_correction and CORRECTIONS[mode].per_rollout):
        return
    for key in filters_of(args):
        what = f"{setup.at(key)} is {getattr(args, key):g} with vLLM and vllm_importance_sampling_mode {mode}"
        why = "a completion's weight is the product over its tokens of what the filter left of the distribution: "
        why += "at 0.95 a token, one of 100 tokens weighs 0.006, and hardly anything is learnt"
        fix = setup.line("vllm_importance_sampling_mode", "token_truncate") + f", or take `{key}` out"
        yield Finding(severity="warning", code="C035", what=what, why=why, fix=fix)


@with_args
def reshaped(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """Completions that are drawn from another distribution than is trained."""
    for key, value in reshaping(args).items():
        inside = key in (args.generation_kwargs or {})
        what = f"{setup.at('generation_kwargs')} has {key}: {value}" if inside else f"{setup.at(key)} is {value:g}"
        why = "tokens are drawn from another distribution than the policy's, and trained as if they were from its own"
        cure = {"fix": f"take `{key}` out of generation_kwargs"} if inside else setup.cure(key, default(key))
        yield Finding(severity="warning", code="C069", what=what, why=why, **cure)


def combinations(setup: Setup) -> Iterator[Finding]:
    """Losses at a level that they were not made for."""
    return setup.found(UNLIKE_PAPER)


@with_args
def temperature(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """A temperature at which completions are equal, or noise."""
    value = args.temperature
    if not COLD <= value <= HOT:
        cold = "completions of a group will rarely differ, and equal ones teach nothing"
        why = cold if value < COLD else "completions will mostly be noise, which no reward likes"
        what = f"{setup.at('temperature')} is {value:g}"
        yield Finding(severity="warning", code="C027", what=what, why=why, **setup.cure("temperature", 1.0))


@with_args
def contradictions(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """Settings that exclude each other, of those that only the whole run shows."""
    yield from setup.found(RULES)
    other = occupied(Path(str(args.output_dir))) if is_main() else None
    if other is not None:
        yield setup.finding(other)
    if args.max_steps > 0 and args.num_train_epochs != 3:  # 3 is the default
        what = f"{setup.at('num_train_epochs')} is {args.num_train_epochs:g}, which has no effect: max_steps "
        what += f"{args.max_steps} ends the run"
        yield Finding(severity="warning", code="C030", what=what, fix="keep one of the two")
    if args.load_best_model_at_end and args.metric_for_best_model in ("loss", "eval_loss"):  # the Trainer's default
        what = f"{setup.at('load_best_model_at_end')}: the best checkpoint is the one with the lowest eval_loss"
        why = "the loss of GRPO says nothing about how good completions are"
        cure = setup.cure("metric_for_best_model", "eval_reward")
        yield Finding(severity="warning", code="C030", what=what, why=why, **cure)


@with_args
def resumed(setup: Setup, args: GRPOConfig) -> Iterator[Finding]:
    """A checkpoint to go on from that is not there, is damaged, or is of another run than this one."""
    if not setup.resume or (setup.model is not None and setup.model.config is None):
        return
    at = setup.at("resume_from_checkpoint")
    try:
        found = Path(str(checkpoint.to_resume_from(Path(str(args.output_dir)), asked=setup.resume)))
    except CheckpointError as error:
        yield Finding(severity="error", code=error.code, what=f"{at}: {error.what}", fix=error.fix)
        return
    adapter = None if setup.lora is None else LoraConfig(**{"task_type": "CAUSAL_LM", **setup.lora}).to_dict()
    code = user_code(setup.agents.tools, setup.pools, setup.program)
    now: dict[str, Any] = {
        "settings": args.to_dict(),
        "rewards": {reward.name: environment.reward_source(reward) for reward in setup.rewards},
        "agents": {name: environment.source_of(*each) for name, each in code.items()},
        "adapter": adapter,
        "model": {"name": setup.model and setup.model.config and setup.model.config._name_or_path},
    }
    for finding in differences(found, without_secrets(now)):
        yield replace(finding, what=f"{at}: {finding.what}")


def variables(setup: Setup) -> Iterator[Finding]:
    """`$NAME` in a path: nothing replaces it."""
    for key, value in setup.given.items():
        text = value if key in _PATHS and isinstance(value, str) else ""
        for name in re.findall(r"\$\{?([A-Za-z_]\w*)\}?", text):
            yield Finding(
                code="C020",
                severity="error",
                what=f"{setup.at(key)}: `{value}` names the environment variable {name}; a recipe replaces none",
                why="a folder of that very name would be looked for, or made",
                fix=f"write the path out, or give it as a flag: --{key} {value}",
                facts={"at": setup.at(key), "value": value, "name": name, "setting": key},
            )
