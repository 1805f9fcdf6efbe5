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
from podium.errors.texts import nearest
from podium.trainer.config import GRPOConfig
from podium.trainer.rules import ARGUMENTS

logger = logging.getLogger(__name__)


def refusals(args: GRPOConfig, *, adapter: bool, evaluation: bool) -> Iterator[ConfigError]:
    """Errors of settings that exclude each other, or the model and data of the run.

    `adapter`: one is trained; `evaluation`: there are rows for it.
    """
    if args.sync_ref_model and adapter:
        yield ConfigError("C030.sync_ref_model")
    if args.eval_strategy != "no" and not evaluation:
        yield ConfigError("C030.eval_strategy_no", eval_strategy_value=args.eval_strategy.value)
    if args.rollout_engine == "live" and (reasons := only_generate(args)):
        yield ConfigError("C030.rollout_engine_live", changes={"rollout_engine": "auto"}, reasons="; ".join(reasons))
    if args.n_gpu > 1:
        yield ConfigError("C030.process_sees_gpus", n_gpu=args.n_gpu)
    trackers = integration_utils.INTEGRATION_TO_CALLBACK
    for name in args.report_to or ():
        if name not in trackers:
            near = f"[{', '.join(name.split(','))}]" if "," in name else nearest(name, trackers)
            yield ConfigError("C004.report_names_no", name=name, trackers=trackers, near=near)
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
        "M021.router_aux_loss", router_aux_loss_coef=args.router_aux_loss_coef, model_type=text.model_type
    )


def only_generate(args: GRPOConfig) -> list[str]:
    """Settings that transformers' `generate` alone takes, in words."""
    unknown = sorted(set(args.generation_kwargs or {}) - {*ARGUMENTS, "do_sample", "eos_token_id"})
    reasons = [f"generation_kwargs {', '.join(unknown)} are `generate`'s alone"] if unknown else []
    return reasons + ["cache_implementation is `generate`'s alone"] * (args.cache_implementation is not None)


def _no_folder(name: str) -> ConfigError | None:
    """The error of an `output_dir` that cannot be made or written to."""
    if reason := impossible_name(name):
        return ConfigError("C036.output_dir", why=f"is {reprlib.repr(name)}, which no folder can be called ({reason})")
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
    return ConfigError("C036.output_dir", why=why) if why else None


# ---- streams ----


def stream_problems(args: GRPOConfig, *, train: bool) -> Iterator[Finding]:
    """Settings that need more of a dataset than a stream has; `train`: it is trained on, else evaluated."""
    if getattr(args.accelerator_config, "dispatch_batches", None):
        yield Finding.of(
            "C030.iterable_datasets_require", "error", changes={"accelerator_config": {"dispatch_batches": False}}
        )
    if train and args.max_steps <= 0:
        yield Finding.of("C030.max_steps_must", "error", changes={"max_steps": 500})
    if train and args.dynamic_sampling:
        yield Finding.of("C030.dynamic_sampling_draws", "error", changes={"dataset_streaming": False})
    if train and (args.success_history or args.balance_column is not None):
        yield Finding.of("C064.stream", "error", changes={"dataset_streaming": False})


def set_for_streams(args: GRPOConfig, train: Any, evaluation: Any) -> None:
    """Set accelerate and the dataloaders for streams as TRL does. Raises `ConfigError` for what a stream cannot give.

    Podium reads a stream itself, in order; the settings are for code that reads the arguments, or gets a dataloader.
    """
    others = evaluation.values() if isinstance(evaluation, Mapping) else [evaluation]
    if not any(each is not None and is_stream(each) for each in (train, *others)):
        return
    for problem in stream_problems(args, train=is_stream(train)):
        raise ConfigError("trainer.set_for_streams", fix=problem.fix, code=problem.code, what=problem.what)
    args.accelerator_config.dispatch_batches = False
    if is_stream(train) and args.dataloader_num_workers:
        logger.warning(
            "Iterable datasets require `dataloader_num_workers=0`; the %d that were set are left out.",
            args.dataloader_num_workers,
        )
        args.dataloader_num_workers = 0
