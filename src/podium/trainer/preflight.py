"""Rules about a run as a whole: settings that its model, its data, this folder or this machine rule out.

The trainer raises the first of these errors before it loads weights; `podium check` makes findings of all.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.integrations import integration_utils

from podium.data.survey import is_stream
from podium.errors import ConfigError, Finding
from podium.errors.texts import did_you_mean
from podium.trainer.config import GRPOConfig
from podium.trainer.rules import ARGUMENTS

logger = logging.getLogger(__name__)


def refusals(args: GRPOConfig, *, adapter: bool, evaluation: bool) -> Iterator[ConfigError]:
    """Errors of settings that exclude each other, or the model and data of the run.

    `adapter`: one is trained; `evaluation`: there are rows for it.
    """
    if args.sync_ref_model and adapter:
        what = (
            "sync_ref_model moves a full copy of the model, but with an adapter the reference is the model without it."
        )
        yield ConfigError(what, code="C030", fix="leave sync_ref_model out, or train all weights")
    if args.eval_strategy != "no" and not evaluation:
        what = f"eval_strategy is {args.eval_strategy.value}, and there are no rows to evaluate on."
        yield ConfigError(what, code="C030", fix="eval_strategy: no, or give rows: `held_out: 0.1` or `eval_dataset`")
    if args.rollout_engine == "live" and (reasons := only_generate(args)):
        what = f"rollout_engine: live is not possible here: {'; '.join(reasons)}."
        yield ConfigError(what, code="C030", fix="rollout_engine: auto")
    if args.n_gpu > 1:
        yield ConfigError(
            f"One process sees {args.n_gpu} GPUs.",
            code="C030",
            fix=f"podium train RECIPE --processes {args.n_gpu}, for a script accelerate launch --num_processes "
            f"{args.n_gpu}; or show it one: CUDA_VISIBLE_DEVICES=0",
        )
    trackers = integration_utils.INTEGRATION_TO_CALLBACK
    for name in args.report_to or ():
        if name not in trackers:
            what = f"report_to names {name}, which is no tracker; there are {', '.join(trackers)}, none and all."
            yield ConfigError(what, code="C004", fix=did_you_mean(name, trackers) or "report_to: none")
    if error := _no_folder(str(args.output_dir)):
        yield error


def no_router(args: GRPOConfig, config: PretrainedConfig, *, known: bool | None = None) -> ConfigError | None:
    """The error of a load-balancing loss for a model without a router. `known`: whether it has one, if it is loaded."""
    text = config.get_text_config()
    settings = ("num_experts", "num_local_experts", "n_routed_experts", "output_router_logits")
    has_router = any(hasattr(text, name) for name in settings) if known is None else known
    if not args.router_aux_loss_coef or has_router:
        return None
    what = f"router_aux_loss_coef is {args.router_aux_loss_coef:g}, but this model ({text.model_type}) has no router."
    return ConfigError(what, code="M021", fix="leave router_aux_loss_coef out")


def only_generate(args: GRPOConfig) -> list[str]:
    """Settings that transformers' `generate` alone takes, in words."""
    unknown = sorted(set(args.generation_kwargs or {}) - {*ARGUMENTS, "do_sample", "eos_token_id"})
    reasons = [f"generation_kwargs {', '.join(unknown)} are `generate`'s alone"] if unknown else []
    return reasons + ["cache_implementation is `generate`'s alone"] * (args.cache_implementation is not None)


def _no_folder(name: str) -> ConfigError | None:
    """The error of an `output_dir` that cannot be made or written to."""
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
    fix = "output_dir: runs/first, or another folder that can be written"
    return ConfigError(f"output_dir {why}.", code="C036", fix=fix) if why else None


# ---- streams ----


def stream_problems(args: GRPOConfig, *, train: bool) -> Iterator[Finding]:
    """Settings that need more of a dataset than a stream has; `train`: it is trained on, else evaluated."""
    if getattr(args.accelerator_config, "dispatch_batches", None):
        what = "Iterable datasets require `dispatch_batches=False`, but it is set to `True` in `accelerator_config`"
        yield Finding(code="C030", severity="error", what=what, fix="accelerator_config: {dispatch_batches: false}")
    if train and args.max_steps <= 0:
        what = "max_steps must be set: the training rows are a stream without a length, so epochs cannot be counted"
        yield Finding(code="C030", severity="error", what=what, fix="max_steps: 500")
    if train and args.dynamic_sampling:
        what = "dynamic_sampling draws replacements from the whole dataset, which a stream does not offer"
        yield Finding(code="C030", severity="error", what=what, fix="dataset_streaming: false")


def set_for_streams(args: GRPOConfig, train: Any, evaluation: Any) -> None:
    """Set accelerate and the dataloaders for streams as TRL does. Raises `ConfigError` for what a stream cannot give.

    Podium reads a stream itself, in order; the settings are for code that reads the arguments, or gets a dataloader.
    """
    others = evaluation.values() if isinstance(evaluation, Mapping) else [evaluation]
    if not any(each is not None and is_stream(each) for each in (train, *others)):
        return
    for problem in stream_problems(args, train=is_stream(train)):
        raise ConfigError(f"{problem.what}.", code=problem.code, fix=problem.fix)
    args.accelerator_config.dispatch_batches = False
    if is_stream(train) and args.dataloader_num_workers:
        logger.warning(
            "Iterable datasets require `dataloader_num_workers=0`; the %d that were set are left out.",
            args.dataloader_num_workers,
        )
        args.dataloader_num_workers = 0
