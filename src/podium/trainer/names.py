"""Names of settings that are unknown: those that TRL and transformers renamed or removed, and misspelt ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import SequenceMatcher
from typing import Any

from podium.errors.texts import as_line, nearest

RENAMED: Mapping[str, str] = {
    "config": "args",
    "tokenizer": "processing_class",
    "dataset": "train_dataset",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "warmup_ratio": "warmup_steps",
    "push_to_hub_token": "hub_token",
    "push_to_hub_model_id": "hub_model_id",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "vllm_max_model_len": "vllm_max_model_length",
    "max_seq_length": "max_completion_length",
    "max_length": "max_completion_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "kl_coef": "beta",
    "kl_beta": "beta",
    "init_kl_coef": "beta",
}
"""Older names in TRL and transformers, and those of other trainers of TRL."""

_NOTES = {"warmup_ratio": "; below 1 it is a share of all steps"}
"""Ends of the advice on an older name."""

REMOVED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "overwrite_output_dir",
            "logging_dir",
            "save_safetensors",
            "use_mps_device",
            "include_tokens_per_second",
            "wandb_log_unique_prompts",
            "use_liger_loss",
        ),
        "leave it out",
    ),
    **dict.fromkeys(
        ("half_precision_backend", "fp16_backend", "fp16_opt_level"), "leave it out: `bf16` and `fp16` choose"
    ),
    "activation_offloading": "leave it out: packs bound the activations; `gradient_checkpointing: true` saves the most",
    "group_by_length": "leave it out: packs have no padding, so nothing is gained by sorting",
    "vllm_device": "leave it out: `vllm_mode: colocate` puts vLLM beside the trainer, `server` on a GPU of its own",
    "vllm_dtype": "leave it out: a server has options of its own (`vllm serve --help`)",
    "vllm_enable_prefix_caching": "leave it out: a server has options of its own (`vllm serve --help`)",
    "use_agent_loop": "leave it out: tools and environments make a run one of several turns",
    "rollouts": "leave it out: `podium sample RECIPE -n 8` shows spread, solved prompts, lengths and seconds",
}
"""Settings of older releases, or of other trainers of TRL, that have none in their place."""

_SLIP = 0.75
"""Likeness of a name that is taken for another one misspelt; below it the other is asked for and nothing is changed."""


def meant(name: str, value: Any, known: Collection[str]) -> tuple[str, dict[str, Any] | None]:
    """Advice on an unknown name, and the settings that say the same; None: only words can.

    >>> meant("warmup_ratio", 0.1, ["warmup_steps"])
    ('write `warmup_steps`; below 1 it is a share of all steps', {'warmup_steps': 0.1})
    >>> meant("num_generation", 4, ["num_generations"])
    ('Did you mean `num_generations`?', {'num_generations': 4})
    >>> meant("zzz", 4, ["num_generations"])
    ('take `zzz` out', {})
    """
    spelt = name.replace("-", "_").lower()
    if (renamed := RENAMED.get(spelt)) in known:
        return f"write `{renamed}`{_NOTES.get(spelt, '')}", {str(renamed): value}
    if spelt in REMOVED:
        return REMOVED[spelt], {}
    last = spelt.rpartition(".")[2]
    near = last if last in known else nearest(spelt, known)
    if not near:
        return as_line(name, None), {}
    is_slip = near == last or SequenceMatcher(None, spelt, near).ratio() >= _SLIP
    return f"Did you mean `{near}`?", {near: value} if is_slip else None
