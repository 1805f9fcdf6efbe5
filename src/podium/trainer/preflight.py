"""Rules about a run as a whole: settings that its model, its data, this folder or this machine rule out.

The trainer raises the first of these errors before it loads weights; `podium check` makes findings of all.
"""

from __future__ import annotations

import logging
import os
import reprlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.integrations import integration_utils

from podium.data.sources import is_stream
from podium.engines.table import ENGINES
from podium.errors import ConfigError, impossible_name
from podium.errors.rule import Facts, Rule, findings
from podium.errors.texts import listed, nearest
from podium.trainer.config import GRPOConfig
from podium.trainer.rules import ARGUMENTS, missing_packages

logger = logging.getLogger(__name__)


def _unknown_trackers(args: GRPOConfig) -> list[ConfigError]:
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


def _generate_alone(args: GRPOConfig) -> dict[str, str] | None:
    """What `generate` alone takes, where an engine is asked for that does not take it."""
    reasons = only_generate(args)
    if args.rollout_engine not in ENGINES or ENGINES[args.rollout_engine].takes_any or not reasons:
        return None
    return {"reasons": "; ".join(reasons)}


RULES: tuple[Rule, ...] = (
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


def no_router(args: GRPOConfig, config: PretrainedConfig, *, known: bool | None = None) -> ConfigError | None:
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


def only_generate(args: GRPOConfig) -> list[str]:
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


# ---- streams ----


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


def set_for_streams(args: GRPOConfig, train: Any, evaluation: Any) -> None:
    """Set accelerate and the dataloaders for streams as TRL does. Raises `ConfigError` for what a stream cannot give.

    Podium reads a stream itself, in order; the settings are for code that reads the arguments, or gets a dataloader.
    """
    others = evaluation.values() if isinstance(evaluation, Mapping) else [evaluation]
    if not any(each is not None and is_stream(each) for each in (train, *others)):
        return
    facts = Facts(settings=args, stream="train" if is_stream(train) else "evaluation")
    for problem in findings(STREAMS, facts):
        raise ConfigError(f"{problem.what}.", code=problem.code, fix=problem.fix, what=problem.what)
    args.accelerator_config.dispatch_batches = False
    if is_stream(train) and args.dataloader_num_workers:
        logger.warning(
            "Iterable datasets require `dataloader_num_workers=0`; the %d that were set are left out.",
            args.dataloader_num_workers,
        )
        args.dataloader_num_workers = 0
