"""A run that is resumed, compared with the one that wrote the checkpoint, and settings that hold from there on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from podium.errors import CheckpointError, Finding, PodiumError
from podium.errors.texts import as_lines
from podium.runs.redaction import without_secrets

STATE = "podium_state.json"
REFERENCE = "reference.safetensors"

_ELSEWHERE = re.compile(
    r"(output_dir|run_name|logging|log_|report_to|save_|push_to|hub_|eval_|do_|disable_tqdm|record|dataloader_|project|"
    r"trackio|print_|num_completions_to_print|reward_workers|reward_timeout|vllm_|ddp_|fsdp|deepspeed|parallelism|"
    r"resume_from|restore_callback|local_rank|use_cpu|bf16|tf32|prove_|on_finding|strict|per_device_eval|"
    r"generation_batch_size|num_generations_eval|tokens_per_pack|rollout_|ignore_data_skip|load_best|metric_for|"
    r"greater_is|skip_memory|include_|auto_find|accelerator_config|remove_unused|full_determinism|product_precision|"
    r"debug|torch_empty|past_index|label|length_column|batch_eval|prediction|neftune|gradient_checkpointing|seq_parallel)"
)
"""Settings that do not change what is trained: where it is written, shown, evaluated, computed."""

OF_OPTIMIZER = ("optim", "lr_scheduler_type", "frozen_parameters", "train_image_encoder")
"""Settings with which the states of optimizer and schedule are of another kind."""

_ONE_KIND = {"adamw_torch_fused": "adamw_torch"}
"""Optimizers whose states are the same."""

_OWN_STATE = ("reduce_lr_on_plateau", "greedy")
"""Schedules whose state no other can load."""

_SCHEDULE = frozenset(
    ("learning_rate", "max_steps", "num_train_epochs", "warmup_steps", "lr_scheduler_type", "lr_scheduler_kwargs")
)
"""Settings that the learning rate of a step follows from."""

_SHAPES = ("peft_type", "r", "target_modules", "modules_to_save", "use_dora", "rank_pattern", "bias", "lora_bias")
"""Arguments of an adapter that decide which weights it has."""


def differences(folder: Path, now: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare a run with the one that wrote a checkpoint: errors where it cannot continue from there, else less.

    `now` is as `Health.made_of`; parts that are not known are left out.
    """
    state = _json(folder / STATE).get("made_of") or {}
    settings = now.get("settings") or {}
    saved = state.get("settings") or {}
    if "adapter" in now:
        yield from _other_weights(folder, now["adapter"])
    for key in [key for key in OF_OPTIMIZER if key in saved and key in settings]:
        was = saved[key]
        is_now = settings[key]
        alike = _ONE_KIND.get(str(was), was) == _ONE_KIND.get(str(is_now), is_now)
        if not alike and (key != "lr_scheduler_type" or {was, is_now} & {*_OWN_STATE}):
            of = f"{folder.name} holds the state of a run with {was or 'none'}"
            yield _refused(f"{key} is {is_now or 'none'}, and {of}, which it cannot take over", {key: was})
    was = _model_name(state)
    is_now = _model_name(now)
    if Path(was).name != Path(is_now).name and not any("checkpoint-" in name or not name for name in (was, is_now)):
        what = f"model is {is_now}, and {folder.name} holds the weights of a run on {was}, which are gone on from"
        why = "only the names were compared: it may be the same model in another place"
        changes = {"model": was}
        yield Finding(code="K004", severity="warning", what=what, why=why, fix=as_lines(changes), changes=changes)
    changed = [
        f"{key} {saved.get(key)} -> {value}"
        for key, value in settings.items()
        if key in saved and saved[key] != value and not _ELSEWHERE.match(key)
    ]
    changed += _other_code("rewards", state, now) + _other_code("agents", state, now)
    digests = [(record.get("data") or {}).get("sha256") for record in (state, now)]
    if None not in digests and digests[0] != digests[1]:
        changed.append("the training rows are others")
    if changed:
        yield Finding(
            code="K002",
            severity="note",
            what=f"the run that wrote {folder.name} was made of something else: {'; '.join(changed)}",
            why="what is given now holds from here on; the curves before and after are of two runs",
            fix="to go on as before, give what was given then; to compare, start without resume_from_checkpoint",
            facts={"folder_name": folder.name, "changed": "; ".join(changed)},
        )


def _refused(what: str, changes: Mapping[str, Any]) -> Finding:
    fix = f"{as_lines(changes)}, or start a new run without resume_from_checkpoint"
    return Finding(code="K004", severity="error", what=what, fix=fix, changes=changes)


def _other_weights(folder: Path, adapter: Mapping[str, Any] | None) -> Iterator[Finding]:
    """An adapter where the checkpoint has all weights, all weights where it has an adapter, or another adapter."""
    was = _json(folder / "adapter_config.json")
    if bool(was) != (adapter is not None):
        if not was and not (folder / "config.json").is_file():
            return
        kind, lora = (
            ("an adapter, and all weights are trained here", {"r": was.get("r", 16)})
            if was
            else ("all weights, and an adapter is trained here", None)
        )
        yield _refused(f"{folder.name} holds {kind}", {"lora": lora})
        return
    for key in _SHAPES:
        then = _plain((was or {}).get(key))
        now = _plain((adapter or {}).get(key))
        if then != now and not (key == "target_modules" and (isinstance(now, str) or now is None)):
            yield _refused(f"lora: {key} is {now}, and the adapter in {folder.name} has {then}", {"lora": {key: then}})


def _model_name(run: Mapping[str, Any]) -> str:
    """The name of the model of a run; empty where it is not recorded."""
    return str((run.get("model") or {}).get("name") or "")


def _plain(value: Any) -> Any:
    """A value of a configuration, for comparing: sets in order, enumerations as text, nothing as None."""
    if isinstance(value, (set, list, tuple)):
        return sorted(map(str, value)) or None
    return getattr(value, "value", value) or None


def _other_code(kind: str, state: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """Differences of the `rewards`, or of the tools and environments (`agents`), where both are known."""
    was = state.get(kind)
    now = run.get(kind)
    if was is None or now is None:
        return []
    if list(was) != list(now):
        return [f"{kind} {', '.join(was) or 'none'} -> {', '.join(now) or 'none'}"]
    other = [name for name in now if _is_another(was[name], now[name])]
    return [f"the code of {name} ({now[name].get('where')}) is another" for name in other]


def _is_another(source: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """By the digest of the code, and by that of the whole file where one of the two is from an earlier Podium."""
    key = "code" if "code" in source and "code" in other else "sha256"
    return source.get(key) != other.get(key)


def apply_settings(folder: Path, args: Any, optimizer: Any, scheduler: Any) -> None:
    """Give a loaded optimizer and its schedule the rates of this run where they differ from the checkpoint's."""
    saved = (_json(folder / STATE).get("made_of") or {}).get("settings") or {}
    now = {key: value for key, value in without_secrets(args.to_dict()).items() if saved.get(key, value) != value}
    if "learning_rate" in now and hasattr(scheduler, "base_lrs"):
        factor = args.learning_rate / saved["learning_rate"] if saved["learning_rate"] else 1.0
        scheduler.base_lrs = [rate * factor or args.learning_rate for rate in scheduler.base_lrs]
    for number, group in enumerate(optimizer.param_groups):
        if _SCHEDULE & now.keys() and hasattr(scheduler, "lr_lambdas"):
            group["initial_lr"] = scheduler.base_lrs[number]
            group["lr"] = group["initial_lr"] * scheduler.lr_lambdas[number](scheduler.last_epoch)
            scheduler._last_lr[number] = group["lr"]  # the next log's
        if (
            "weight_decay" in now
            and group["weight_decay"] == saved["weight_decay"]
            and (saved["weight_decay"] or not number)
        ):
            group["weight_decay"] = args.weight_decay
        if {"adam_beta1", "adam_beta2"} & now.keys() and "betas" in group:
            group["betas"] = (args.adam_beta1, args.adam_beta2)
        if "adam_epsilon" in now and isinstance(group.get("eps"), float):
            group["eps"] = args.adam_epsilon


@contextmanager
def readable(folder: str | None, part: str) -> Iterator[None]:
    """Raise one `CheckpointError` for any error in loading a part of a checkpoint."""
    try:
        yield
    except PodiumError:
        raise
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError, EOFError, OSError, UnpicklingError) as error:
        if folder is None or "out of memory" in str(error).lower():
            raise
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, UnpicklingError):
            reason = "a pickle that holds more than tensors and numbers; nothing in it was run"
        raise CheckpointError(
            f"{folder} cannot be gone on from: its {part} cannot be loaded ({type(error).__name__}: {reason}).",
            fix="give model, lora, frozen_parameters and optim as they were, take an older checkpoint, or "
            "start without resume_from_checkpoint",
            folder=folder,
            part=part,
            kind=type(error).__name__,
            reason=reason,
        ) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
