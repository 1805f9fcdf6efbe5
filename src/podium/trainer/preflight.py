"""Rules about a run as a whole: settings that its model, its data, this folder or this machine rule out.

The trainer raises the first of these errors before it loads weights; `podium check` makes findings of all.
"""

from __future__ import annotations

import logging
import os
import reprlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.integrations import integration_utils

from podium.data.survey import is_stream
from podium.errors import ConfigError, Finding, impossible_name
from podium.errors.texts import as_lines, listed, nearest
from podium.trainer.config import GRPOConfig
from podium.trainer.rules import ARGUMENTS

logger = logging.getLogger(__name__)


def refusals(args: GRPOConfig, *, adapter: bool, evaluation: bool) -> Iterator[ConfigError]:
    """Errors of settings that exclude each other, or the model and data of the run.

    `adapter`: one is trained; `evaluation`: there are rows for it.
    """
    if args.sync_ref_model and adapter:
        yield ConfigError(
            "sync_ref_model moves a full copy of the model, but with an adapter the reference is the model without it.",
            code="C030",
            fix="leave sync_ref_model out, or train all weights",
            settings=("sync_ref_model",),
        )
    if args.eval_strategy != "no" and not evaluation:
        yield ConfigError(
            f"eval_strategy is {args.eval_strategy.value}, and there are no rows to evaluate on.",
            code="C030",
            fix="eval_strategy: no, or give rows: `held_out: 0.1` or `eval_dataset`",
            settings=("eval_strategy",),
            eval_strategy_value=args.eval_strategy.value,
        )
    if args.rollout_engine == "live" and (reasons := only_generate(args)):
        yield ConfigError(
            f"rollout_engine: live is not possible here: {'; '.join(reasons)}.",
            code="C030",
            changes={"rollout_engine": "auto"},
            settings=("rollout_engine",),
            reasons="; ".join(reasons),
        )
    if args.n_gpu > 1:
        yield ConfigError(
            f"One process sees {args.n_gpu} GPUs.",
            code="C030",
            fix=f"podium train RECIPE --processes {args.n_gpu}, for a script accelerate launch --num_processes "
            f"{args.n_gpu}; or show it one: CUDA_VISIBLE_DEVICES=0",
            n_gpu=args.n_gpu,
        )
    trackers = integration_utils.INTEGRATION_TO_CALLBACK
    for name in args.report_to or ():
        if name not in trackers:
            near = f"[{', '.join(name.split(','))}]" if "," in name else nearest(name, trackers)
            yield ConfigError(
                f"report_to names {name}, which is no tracker; there are {listed(trackers)}, none and all.",
                code="C004",
                fix=f"Did you mean `{near}`?" if near else "report_to: none",
                settings=("report_to", name),
                name=name,
                trackers=trackers,
                near=near,
            )
    if error := _no_folder(str(args.output_dir)):
        yield error


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
    return reasons + ["cache_implementation is `generate`'s alone"] * (args.cache_implementation is not None)


def _no_folder(name: str) -> ConfigError | None:
    """The error of an `output_dir` that cannot be made or written to."""
    if reason := impossible_name(name):
        shown_why = f"is {reprlib.repr(name)}, which no folder can be called ({reason})"
        return ConfigError(
            f"output_dir {shown_why}.",
            code="C036",
            fix="output_dir: runs/first, or another folder that can be written",
            settings=("output_dir",),
            why=shown_why,
        )
    folder = Path(name)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    why = ""
    if not name.strip():
        why = "is empty; it must name a folder"
    elif not there.is_dir():
        why = f"is {name}, and {there} is a file" if there != folder.absolute() else f"is {name}, which is a file"
    else:
        try:
            with tempfile.NamedTemporaryFile(prefix=".podium-", dir=there) as file:  # a full disk still makes a folder
                file.write(bytes(4096))
                file.flush()
        except OSError as error:
            why = f"is {name}, and nothing can be written in {there} ({os.strerror(error.errno or 0)})"
    return (
        ConfigError(
            f"output_dir {why}.",
            code="C036",
            fix="output_dir: runs/first, or another folder that can be written",
            settings=("output_dir",),
            why=why,
        )
        if why
        else None
    )


# ---- streams ----


def stream_problems(args: GRPOConfig, *, train: bool) -> Iterator[Finding]:
    """Settings that need more of a dataset than a stream has; `train`: it is trained on, else evaluated."""
    if getattr(args.accelerator_config, "dispatch_batches", None):
        yield Finding(
            code="C030",
            severity="error",
            what="Iterable datasets require `dispatch_batches=False`, but it is set to `True` in `accelerator_config`",
            fix=as_lines({"accelerator_config": {"dispatch_batches": False}}),
            changes={"accelerator_config": {"dispatch_batches": False}},
        )
    if train and args.max_steps <= 0:
        yield Finding(
            code="C030",
            severity="error",
            what="max_steps must be set: the training rows are a stream without a length, so epochs cannot be counted",
            fix=as_lines({"max_steps": 500}),
            changes={"max_steps": 500},
        )
    if train and args.dynamic_sampling:
        yield Finding(
            code="C030",
            severity="error",
            what="dynamic_sampling draws replacements from the whole dataset, which a stream does not offer",
            fix=as_lines({"dataset_streaming": False}),
            changes={"dataset_streaming": False},
        )
    if train and args.balance_column is not None:
        yield Finding(
            code="C064",
            severity="error",
            what="balance_column chooses among all rows, which a stream does not offer",
            fix=as_lines({"dataset_streaming": False}),
            changes={"dataset_streaming": False},
        )


def set_for_streams(args: GRPOConfig, train: Any, evaluation: Any) -> None:
    """Set accelerate and the dataloaders for streams as TRL does. Raises `ConfigError` for what a stream cannot give.

    Podium reads a stream itself, in order; the settings are for code that reads the arguments, or gets a dataloader.
    """
    others = evaluation.values() if isinstance(evaluation, Mapping) else [evaluation]
    if not any(each is not None and is_stream(each) for each in (train, *others)):
        return
    for problem in stream_problems(args, train=is_stream(train)):
        raise ConfigError(f"{problem.what}.", code=problem.code, fix=problem.fix, what=problem.what)
    args.accelerator_config.dispatch_batches = False
    if is_stream(train) and args.dataloader_num_workers:
        logger.warning(
            "Iterable datasets require `dataloader_num_workers=0`; the %d that were set are left out.",
            args.dataloader_num_workers,
        )
        args.dataloader_num_workers = 0
