"""Rules about the settings: what works and is likely a mistake. What cannot work is refused where it is read."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import Any

from podium.assembly import plan_of
from podium.checks.setup import Setup
from podium.errors import PodiumError
from podium.losses import CORRECTIONS
from podium.recipe.assume import assumed_words
from podium.records import Finding
from podium.settings import UNLIKE_PAPER

LORA_RATE = 5e-6
"""A learning rate for an adapter is suspect below; adapters want about ten times that of a full fine-tuning."""
FULL_RATES = ((1e9, 2e-5), (0.0, 1e-4))
"""(parameters from, rate): a learning rate for all weights is suspect above."""
FEW_GENERATIONS = 4
FEW_GROUPS = 4
COLD, HOT = 0.3, 2.0

_PATHS = ("model", "dataset", "eval_dataset", "output_dir", "model_name_or_path", "dataset_name")


def assumed(setup: Setup) -> Iterator[Finding]:
    """What nobody wrote and is taken as said."""
    if setup.assumed:
        yield Finding(
            code="C040",
            severity="note",
            what=assumed_words(setup.assumed),
            fix="write what should be otherwise, as a flag or in a recipe",
        )


def learning_rate(setup: Setup) -> Iterator[Finding]:
    """One taken from the other kind of fine-tuning, or none."""
    if setup.args is None:
        return
    rate, lora = setup.args.learning_rate, setup.lora is not None
    size = setup.model.num_parameters if setup.model is not None else 0
    high = next(limit for parameters, limit in FULL_RATES if size >= parameters)
    if rate == 0:
        yield Finding(
            code="C026",
            severity="warning",
            what=f"{setup.at('learning_rate')} is 0: nothing is learnt",
            fix=setup.line("learning_rate", "1e-5" if lora else "1e-6"),
        )
    elif lora and rate < LORA_RATE:
        yield Finding(
            code="C021",
            severity="warning",
            what=f"{setup.at('learning_rate')} is {rate:g} for a LoRA adapter, a rate for training all weights",
            why="an adapter starts at zero and needs about ten times the rate; at this one rewards hardly move",
            fix=setup.line("learning_rate", f"{max(10 * rate, 1e-5):g}"),
        )
    elif not lora and rate > high:
        yield Finding(
            code="C022",
            severity="warning",
            what=f"{setup.at('learning_rate')} is {rate:g} for all weights{_sized(size)}, a rate for a LoRA adapter",
            why="the policy breaks within a few steps: its text turns to noise and does not come back",
            fix=setup.line("learning_rate", f"{rate / 10:g}") + ", or train an adapter (`lora: {r: 16}`)",
        )


def _sized(size: int) -> str:
    return f" of a model with {size / 1e9:.1f} billion parameters" if size >= 1e9 else ""


def group_size(setup: Setup) -> Iterator[Finding]:
    """Groups too small to compare in."""
    if setup.args is None or setup.args.num_generations >= FEW_GENERATIONS:
        return
    count = setup.args.num_generations
    yield Finding(
        code="C023",
        severity="warning",
        what=f"{setup.at('num_generations')} is {count}: an advantage compares a completion with {count - 1} other"
        f"{'s' * (count > 2)}",
        why="with so few the mean of the group is mostly noise, and most groups have no spread at all",
        fix=setup.line("num_generations", 8),
    )


def few_groups(setup: Setup) -> Iterator[Finding]:
    """Optimizer steps that see few prompts."""
    args = setup.args
    if args is None:
        return
    plan = plan_of(args)
    groups = plan.prompts_per_round * plan.accumulation / plan.shares
    if groups >= FEW_GROUPS:
        return
    size = args.per_device_train_batch_size
    wanted = -(-8 * args.num_generations // (size * args.world_size))
    yield Finding(
        code="C024",
        severity="warning",
        what=f"an optimizer step sees {groups:g} prompt{'s' * (groups != 1)}: per_device_train_batch_size {size} "
        f"counts completions, and {args.num_generations} of them are one prompt's",
        why="a step towards one or two prompts forgets the others; equal rewards leave it empty",
        fix=setup.line("gradient_accumulation_steps", wanted) + " makes it 8 prompts",
    )


_NOT_INSTALLED = "training cannot start here; elsewhere the recipe may be right"

_OPTIMIZER_PACKAGES: Mapping[str, tuple[str, str]] = {
    "bitsandbytes": (r"ademamix|(?!adamw_torch|galore).*(bnb|8bit|32bit)", "quant"),
    "torchao": (r"adamw_torch_[48]bit", ""),
}
"""Package, names of the optimizers that need it, and Podium's extra that has it."""


def optimizer(setup: Setup) -> Iterator[Finding]:
    """An optimizer whose package is not installed."""
    name = "" if setup.args is None else str(getattr(setup.args.optim, "value", setup.args.optim))
    for package, (names, extra) in _OPTIMIZER_PACKAGES.items():
        if re.fullmatch(names, name) and importlib.util.find_spec(package) is None:
            yield Finding(
                code="C032",
                severity="warning",
                what=f"{setup.at('optim')} is {name}, which needs the package {package}; it is not installed here",
                why=_NOT_INSTALLED,
                fix="pip install " + (f"'podium[{extra}]'" if extra else package),
            )


def vllm(setup: Setup) -> Iterator[Finding]:
    """A server that is not there, or does not fit."""
    if setup.args is None or not setup.args.use_vllm or setup.model is None or setup.model.config is None:
        return
    from podium.engines.vllm.connect import prepare

    try:
        prepare(setup.args, setup.model.name, setup.model.config, waits=False)
    except PodiumError as error:
        asked = "training asks the same before it loads weights, and waits `vllm_server_timeout` seconds for an answer"
        yield Finding(
            code=error.code,
            severity="warning",
            what=f"{setup.at('use_vllm')}: {error.what}",
            why=_NOT_INSTALLED if error.code == "C032" else asked,
            fix=error.fix,
        )


def filters(setup: Setup) -> Iterator[Finding]:
    """A correction by whole completions of what vLLM drew through a filter."""
    args = setup.args
    if args is None or not args.use_vllm or not args.vllm_importance_sampling_correction:
        return
    if not CORRECTIONS[args.vllm_importance_sampling_mode].per_rollout:
        return
    off = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    for key in (key for key, idle in off.items() if getattr(args, key) not in (idle, 0.0)):
        yield Finding(
            code="C035",
            severity="warning",
            what=f"{setup.at(key)} is {getattr(args, key):g} with vLLM and vllm_importance_sampling_mode "
            f"{args.vllm_importance_sampling_mode}",
            why="a completion's weight is the product over its tokens of what the filter left of the distribution: "
            "at 0.95 a token, one of 100 tokens weighs 0.006, and hardly anything is learnt",
            fix=setup.line("vllm_importance_sampling_mode", "token_truncate") + f", or take `{key}` out",
        )


def combinations(setup: Setup) -> Iterator[Finding]:
    """Losses at a level that they were not made for."""
    for applies, what, why, (key, value) in UNLIKE_PAPER:
        if setup.args is not None and applies(setup.args):
            yield Finding(
                code="C025",
                severity="warning",
                what=f"{setup.at('loss_type')}: {what.format(args=setup.args)}",
                why=why,
                fix=setup.line(key, value),
            )


def temperature(setup: Setup) -> Iterator[Finding]:
    """So cold that completions are equal, so hot that they are noise."""
    if setup.args is None or COLD <= setup.args.temperature <= HOT:
        return
    value = setup.args.temperature
    cold = value < COLD
    yield Finding(
        code="C027",
        severity="warning",
        what=f"{setup.at('temperature')} is {value:g}",
        why="completions of a group will rarely differ, and equal ones teach nothing"
        if cold
        else "completions will mostly be noise, which no reward likes",
        fix=setup.line("temperature", 1.0),
    )


def contradictions(setup: Setup) -> Iterator[Finding]:
    """Settings that exclude each other, of those that only the whole run shows."""
    args = setup.args
    if args is None:
        return
    if args.sync_ref_model and setup.lora is not None:
        yield Finding(
            code="C030",
            severity="error",
            what=f"{setup.at('sync_ref_model')}: it moves a full copy of the model, but with an adapter the reference "
            "is the model without it",
            fix="leave sync_ref_model out, or train all weights",
        )
    if setup.train is not None and setup.train.source.is_stream:
        if args.max_steps <= 0:
            yield Finding(
                code="C030",
                severity="error",
                what=f"{setup.train.name} is a stream without a length, and max_steps is not set",
                fix=setup.line("max_steps", 500),
            )
        if args.dynamic_sampling:
            yield Finding(
                code="C030",
                severity="error",
                what=f"{setup.at('dynamic_sampling')} draws replacements from the whole dataset, which a stream does "
                "not offer",
                fix="load the dataset without streaming",
            )


def variables(setup: Setup) -> Iterator[Finding]:
    """`$NAME` in a path: nothing replaces it."""
    for key, value in _texts(setup.given):
        for name in re.findall(r"\$\{?([A-Za-z_]\w*)\}?", value) if key in _PATHS else ():
            yield Finding(
                code="C020",
                severity="error",
                what=f"{setup.at(key)}: `{value}` names the environment variable {name}; a recipe replaces none",
                why="a folder of that very name would be looked for, or made",
                fix=f"write the path out, or give it as a flag: --{key} {value}",
            )


def _texts(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((key, value) for key, value in given.items() if isinstance(value, str))
