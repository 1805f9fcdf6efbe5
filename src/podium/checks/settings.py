"""Rules about settings that work and are likely a mistake. Those that cannot work are refused where they are read."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from podium.agents.environments import EnvironmentPools
from podium.agents.setup import Program, user_code
from podium.algorithm.losses import CORRECTIONS
from podium.checks.setup import ModelFacts, at, line
from podium.console.terminal import is_main
from podium.data.survey import RowSurvey
from podium.engines.table import connect_vllm
from podium.errors import CheckpointError, ConfigError, Finding, PodiumError
from podium.errors.rule import Rule, raised
from podium.errors.texts import as_lines
from podium.planning.columns import chosen_columns
from podium.recipe.assume import assumed_words
from podium.recipe.recipe import AgentSpec, Stage
from podium.recipe.schema import default
from podium.rewards.resolve import Reward
from podium.runs import checkpoint, environment
from podium.runs.monitors.history import usual_rate
from podium.runs.occupied import occupied
from podium.runs.redaction import without_secrets
from podium.trainer.arguments import peft_config_of
from podium.trainer.assembly import plan_of
from podium.trainer.config import GRPOConfig
from podium.trainer.processes import refuse_sharded_stage, refuse_undividable
from podium.trainer.resume import differences
from podium.trainer.rules import filters_of, reshaping
from podium.trainer.setting_rules import OF_RUN, PACKAGES, UNLIKE_PAPER, missing_packages
from podium.trainer.settings import loss_settings, vllm_settings

LORA_RATE = 5e-6
"""A learning rate for an adapter is suspect below; adapters want about ten times that of a full fine-tuning."""
TOO_LOW = 0.01
"""A learning rate for all weights is suspect below this share of the usual one."""
FEW_GENERATIONS = 4
FEW_GROUPS = 4
COLD = 0.3
HOT = 2.0

_NOT_INSTALLED = "training cannot start here; elsewhere the recipe may be right"


# ---- a recipe as it is written ----


def _inferred(assumed: Mapping[str, Any], train: RowSurvey | None) -> str:
    """The way to other values than the inferred ones."""
    fix = "write what should be otherwise, as a flag or in a recipe"
    if turned := _turned(assumed, train):
        return f"where question and answer are the other way round: {turned}; else {fix}"
    return fix


def _turned(assumed: Mapping[str, Any], train: RowSurvey | None) -> str:
    """The flags for the other way round, where only the order of the columns told question and answer."""
    if train is None or not {"prompt", "answer"} <= assumed.keys():
        return ""
    names = [name for name in train.columns if name not in ("prompt", "answer")]
    return chosen_columns(names, train.examples).other if len(names) > 1 else ""


_PATHS = ("model", "dataset", "eval_dataset", "output_dir", "model_name_or_path", "dataset_name")


def _variables(given: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[Finding]:
    """`$NAME` in a path: nothing replaces it."""
    for key, value in given.items():
        text = value if key in _PATHS and isinstance(value, str) else ""
        for name in re.findall(r"\$\{?([A-Za-z_]\w*)\}?", text):
            yield Finding(
                code="C020",
                severity="error",
                what=f"{at(places, key)}: `{value}` names the environment variable {name}; a recipe replaces none",
                why="a folder of that very name would be looked for, or made",
                fix=f"write the path out, or give it as a flag: --{key} {value}",
                facts={"at": at(places, key), "value": value, "name": name, "setting": key},
            )


WRITTEN: tuple[Rule, ...] = (
    Rule(
        code="C040",
        severity="note",
        needs=("assumed",),
        wants=("train",),
        when=lambda assumed, train: bool(assumed),
        says=lambda assumed, train: assumed_words(assumed),
        cure=_inferred,
    ),
    Rule(code="C020", needs=("given", "places"), when=_variables),
)
"""Keys that a recipe leaves out, and paths that it does not mean."""


# ---- contradictions ----


CONTRADICTIONS: tuple[Rule, ...] = (
    *OF_RUN,
    Rule(code="C036", when=lambda args: is_main() and occupied(Path(str(args.output_dir)))),
    Rule(
        code="C030",
        severity="warning",
        when=lambda args: args.max_steps > 0 and args.num_train_epochs != 3,  # the default
        says=lambda args: (
            f"num_train_epochs is {args.num_train_epochs:g}, which has no effect: max_steps {args.max_steps} "
            "ends the run"
        ),
        cure="keep one of the two",
        about=("num_train_epochs",),
    ),
    Rule(
        code="C030",
        severity="warning",
        when=lambda args: (
            args.load_best_model_at_end and args.metric_for_best_model in ("loss", "eval_loss")  # the Trainer's default
        ),
        says=lambda args: "load_best_model_at_end: the best checkpoint is the one with the lowest eval_loss",
        why="the loss of GRPO says nothing about how good completions are",
        cure={"metric_for_best_model": "eval_reward"},
        about=("load_best_model_at_end",),
    ),
)
"""Settings that exclude each other, of those that only the whole run shows."""


# ---- this machine, and the checkpoint ----


def _resumed(
    args: GRPOConfig,
    resume: str | bool,
    agents: AgentSpec,
    rewards: Sequence[Reward],
    model: ModelFacts | None,
    lora: Mapping[str, Any] | None,
    pools: EnvironmentPools | None,
    program: Program | None,
) -> Iterator[Finding]:
    """A checkpoint to go on from that is not there, is damaged, or is of another run than this one."""
    if not resume or (model is not None and model.config is None):
        return
    about = ("resume_from_checkpoint",)
    try:
        found = Path(str(checkpoint.to_resume_from(Path(str(args.output_dir)), asked=resume)))
    except CheckpointError as error:
        yield Finding(
            code=error.code,
            severity="error",
            what=f"resume_from_checkpoint: {error.what}",
            fix=error.fix,
            settings=about,
        )
        return
    adapter = None if lora is None else peft_config_of({"task_type": "CAUSAL_LM", **lora})
    code = user_code(agents.tools, pools, program)
    now: dict[str, Any] = {
        "settings": args.to_dict(),
        "rewards": {reward.name: environment.reward_source(reward) for reward in rewards},
        "agents": {name: environment.source_of(*code_of_role) for name, code_of_role in code.items()},
        "adapter": None if adapter is None else adapter.to_dict(),
        "model": {"name": model and model.config and model.config._name_or_path},
    }
    for finding in differences(found, without_secrets(now)):
        yield replace(finding, what=f"resume_from_checkpoint: {finding.what}", settings=about)


def _undividable(args: GRPOConfig | None, lora: Mapping[str, Any] | None, stage: Stage | None) -> PodiumError | None:
    """The error of settings that the division of weights over processes rules out; a stage takes them whole."""
    if stage is not None and (error := raised(refuse_sharded_stage, stage.recipe.config)):
        return error
    return None if args is None else raised(refuse_undividable, args, adapter=lora is not None)


def _no_server(args: GRPOConfig, model: ModelFacts, lora: Mapping[str, Any] | None) -> Finding | None:
    """A server that is not there, or does not fit."""
    if not args.use_vllm or model.config is None:
        return None
    adapter = None
    with contextlib.suppress(ConfigError):  # said by the rule that is about it
        adapter = peft_config_of(lora)
    error = raised(connect_vllm, vllm_settings(args), model.name, model.config, adapter=adapter, waits=False)
    if error is None or error.what in {missing.what for missing in missing_packages(args)}:
        return None
    asked = "training asks the same before it loads weights, and waits `vllm_server_timeout` seconds for an answer"
    return Finding(
        code=error.code,
        severity="warning",
        what=f"use_vllm: {error.what}",
        why=_NOT_INSTALLED if error.code == "C032" else asked,
        fix=error.fix,
        settings=("use_vllm",),
    )


MACHINE: tuple[Rule, ...] = (
    Rule(
        needs=("settings", "resume", "agents", "rewards"),
        wants=("model", "lora", "pools", "program"),
        when=_resumed,
    ),
    replace(PACKAGES, severity="warning", why=_NOT_INSTALLED),
    Rule(code="C030", needs=(), wants=("settings", "lora", "stage"), when=_undividable),
    Rule(needs=("settings", "model"), wants=("lora",), when=_no_server),
)
"""Rules about packages and files that are missing for the run."""


# ---- sampling ----


def _filters(args: GRPOConfig) -> list[dict[str, Any]]:
    """Filters of vLLM, where the correction is by whole completions."""
    corrects = args.use_vllm and args.vllm_importance_sampling_correction
    if not corrects or not CORRECTIONS[args.vllm_importance_sampling_mode].per_rollout:
        return []
    return [{"setting": name, "value": getattr(args, name)} for name in filters_of(args)]


def _reshaped(args: GRPOConfig) -> Iterator[Finding]:
    """Completions that are drawn from another distribution than is trained."""
    for name, value in reshaping(args).items():
        inside = name in (args.generation_kwargs or {})
        about = "generation_kwargs" if inside else name
        changes = {} if inside else {name: default(name)}
        yield Finding(
            code="C069",
            severity="warning",
            what=f"generation_kwargs has {name}: {value}" if inside else f"{name} is {value:g}",
            why=(
                "tokens are drawn from another distribution than the policy's, and trained as if they were from its own"
            ),
            fix=f"take `{name}` out of generation_kwargs" if inside else as_lines(changes),
            changes=changes,
            settings=(about,),
        )


SAMPLING: tuple[Rule, ...] = (
    Rule(
        code="C035",
        severity="warning",
        wants=("given",),
        when=lambda args, given: _filters(args),
        says=lambda args, given, *, setting, value: (
            f"{setting} is {value:g} with vLLM and vllm_importance_sampling_mode {args.vllm_importance_sampling_mode}"
        ),
        why=(
            "a completion's weight is the product over its tokens of what the filter left of the distribution: at 0.95 "
            "a token, one of 100 tokens weighs 0.006, and hardly anything is learnt"
        ),
        cure=lambda args, given, *, setting, value: (
            f"{line(given, 'vllm_importance_sampling_mode', 'token_truncate')}, or take `{setting}` out"
        ),
        about=lambda args, given, *, setting, value: (setting,),
    ),
    Rule(code="C069", when=_reshaped),
)
"""Completions of another distribution than the one that is trained."""


# ---- the learning rate, groups, the temperature ----


def _learning_rate(
    args: GRPOConfig, given: Mapping[str, Any], lora: Mapping[str, Any] | None, model: ModelFacts | None
) -> Finding | None:
    """A learning rate of the other kind of fine-tuning, or of 0."""
    rate = args.learning_rate
    size = 0 if model is None else model.num_parameters
    sized = f" of a model with {size / 1e9:.1f} billion parameters" if size >= 1e9 else ""
    usual = usual_rate(size, adapter=lora is not None)
    changes = {"learning_rate": float(f"{usual:g}")}
    finding = Finding(
        code="C026",
        severity="warning",
        what="learning_rate is 0: nothing is learnt",
        fix=as_lines(changes),
        changes=changes,
        settings=("learning_rate",),
    )
    if rate == 0:
        return finding
    if lora is not None and rate < LORA_RATE:
        return replace(
            finding,
            code="C021",
            what=f"learning_rate is {rate:g} for a LoRA adapter, a rate for training all weights",
            why="an adapter starts at zero and needs about ten times the rate; at this one rewards hardly move",
        )
    if lora is None and rate < TOO_LOW * usual:
        return replace(
            finding,
            code="C037",
            what=f"learning_rate is {rate:g} for all weights{sized}; usual is {usual:g}",
            why="a step changes the weights by less than their precision can show, and the run goes nowhere",
        )
    if lora is None and rate > 5 * usual:
        lower = float(f"{min(rate / 10, usual):g}")
        return replace(
            finding,
            code="C022",
            what=f"learning_rate is {rate:g} for all weights{sized}, a rate for a LoRA adapter",
            why="the policy breaks within a few steps: its text turns to noise and does not come back",
            fix=f"{line(given, 'learning_rate', lower)}, or train an adapter (`lora: {{r: 16}}`)",
            changes={"learning_rate": lower},
        )
    return None


def _larger_groups(args: GRPOConfig) -> dict[str, int]:
    """Groups of 8, with the same prompts in a step where these are few."""
    changes = {"num_generations": 8}
    if plan_of(args).prompts_per_round * args.num_generations < 8 * FEW_GROUPS:
        changes["gradient_accumulation_steps"] = args.gradient_accumulation_steps * -(-8 // args.num_generations)
    return changes


def _few_prompts(args: GRPOConfig, problems: Sequence[Finding], given: Mapping[str, Any]) -> Finding | None:
    """Optimizer steps that see few prompts."""
    plan = plan_of(args)
    groups = plan.prompts_per_round * plan.accumulation / plan.shares
    left_out = any(problem.code == "C010" for problem in problems)  # the batch size is not the run's
    if groups >= FEW_GROUPS or left_out:
        return None
    size = args.per_device_train_batch_size
    wanted = -(-8 * args.num_generations // (size * args.world_size))
    prompts = "prompt" if groups == 1 else "prompts"
    return Finding(
        code="C024",
        severity="warning",
        what=(
            f"an optimizer step sees {groups:g} {prompts}: per_device_train_batch_size {size} counts completions, and "
            f"{args.num_generations} of them are one prompt's"
        ),
        why="a step towards one or two prompts forgets the others; equal rewards leave it empty",
        fix=f"{line(given, 'gradient_accumulation_steps', wanted)} makes it 8 prompts",
        changes={"gradient_accumulation_steps": wanted},
    )


LEARNING: tuple[Rule, ...] = (
    Rule(needs=("settings", "given"), wants=("lora", "model"), when=_learning_rate),
    Rule(
        code="C023",
        severity="warning",
        when=lambda args: args.num_generations < FEW_GENERATIONS,
        says=lambda args: (
            f"num_generations is {args.num_generations}: an advantage compares a completion with "
            f"{args.num_generations - 1} {'others' if args.num_generations > 2 else 'other'}"
        ),
        why="with so few the mean of the group is mostly noise, and most groups have no spread at all",
        cure=_larger_groups,
        about=("num_generations",),
    ),
    Rule(code="C024", needs=("settings", "problems", "given"), when=_few_prompts),
    Rule(
        code="C027",
        severity="warning",
        when=lambda args: args.temperature < COLD,
        says=lambda args: f"temperature is {args.temperature:g}",
        why="completions of a group will rarely differ, and equal ones teach nothing",
        cure={"temperature": 1.0},
        about=("temperature",),
    ),
    Rule(
        code="C027",
        severity="warning",
        when=lambda args: args.temperature > HOT,
        says=lambda args: f"temperature is {args.temperature:g}",
        why="completions will mostly be noise, which no reward likes",
        cure={"temperature": 1.0},
        about=("temperature",),
    ),
)
"""How large a step is, and of how much it is made."""


# ---- values that work, and with which hardly anything is learnt ----


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
        code="C037",
        severity="warning",
        when=is_beyond,
        says=says,
        why=why,
        cure=lambda args: {key: default(key)},
        about=(key,),
    )


_LOWEST_OF_ROLLOUTS = 1e-5
"""The lowest usual epsilon of a ratio for a whole rollout: the mean over its tokens moves less; GSPO's is 0.0003."""


def _short_run(args: GRPOConfig, train: RowSurvey | None) -> dict[str, int] | None:
    """The steps of a run that has no more of them than its warm-up."""
    if train is None or train.source.is_stream:
        steps = max(args.max_steps, 0)
    else:
        plan = plan_of(args)
        rounds = train.num_rows // plan.prompts_per_round
        steps = plan.num_steps(args, rounds * plan.micro_steps_per_round)
    return {"steps": steps} if steps and args.warmup_steps >= steps else None


UNUSUAL: tuple[Rule, ...] = (
    *(_usual_rule(key, *usual) for key, usual in _USUAL.items()),
    Rule(
        code="C037",
        severity="warning",
        wants=("train",),
        when=_short_run,
        says=lambda args, train, *, steps: f"warmup_steps is {args.warmup_steps:g}, and the run has {steps:,} steps",
        why="the learning rate still rises when the run ends, and never reaches what learning_rate says",
        cure=lambda args, train, *, steps: {"warmup_steps": steps // 10},
        about=("warmup_steps",),
    ),
)

RULES: tuple[Rule, ...] = (*WRITTEN, *CONTRADICTIONS, *MACHINE, *SAMPLING, *UNLIKE_PAPER, *LEARNING)
"""All of them but `UNUSUAL`, of which some follow from the data."""
