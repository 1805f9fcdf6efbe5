"""Peak memory of two steps with random weights of real shapes against `podium.planning.memory`.

python -m benchmarks.gpu.memory --out DIR

The peak is that of torch's allocator, so the estimate leaves out what a process takes before it loads a model. On a
CPU, where this is rehearsed, it is the process's resident memory, of which a tiny model is hardly a part.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.gpu.harness import Measure, Options, Script, free_memory, main, peak_bytes, random_model

CASES: Mapping[str, tuple[str, bool]] = {
    "7B, LoRA on bfloat16": ("7B", True),
    "1.5B, all weights": ("1.5B", False),
    "3B, all weights": ("3B", False),
}
"""Shapes, and whether an adapter is trained."""
TARGET = 0.15
"""How far an estimate may be off."""
PROMPT_TOKENS, COMPLETION_TOKENS = 300, 256
TOKENS_PER_PACK = 2048
"""By default packs follow the memory that a device has free, which the estimate cannot know."""


def groups(options: Options) -> dict[str, Sequence[str]]:
    """Each case alone: what one leaves in the allocator would be counted in the next."""
    return {case: ["two steps"] for case in (list(CASES)[:2] if options.tiny else CASES)}


def prepare(group: str, options: Options) -> Measure:
    """The one case of a group."""

    def measure(_case: str) -> dict[str, Any]:
        free_memory()
        before = peak_bytes(options.device)
        trainer, estimate = prepared(*CASES[group], options, runtime=0 if options.device == "cuda" else before)
        trainer.train()
        measured = peak_bytes(options.device)
        ratio = estimate.peak_bytes / measured
        return {
            "ok": trainer.state.global_step == 2,
            "measured_gib": measured / 2**30,
            "estimated_gib": estimate.peak_bytes / 2**30,
            "ratio": ratio,
            "within_target": abs(ratio - 1) <= TARGET,
            "parts_gib": {part: round(getattr(estimate, part) / 2**30, 3) for part in parts(estimate)},
        }

    return measure


def parts(estimate: Any) -> list[str]:
    """Names of the estimate's parts: what to look at where the sum is off."""
    return [x for x in estimate.__slots__ if x.endswith("_bytes") and x not in ("peak_bytes", "available_bytes")]


def prepared(shape: str, lora: bool, options: Options, *, runtime: int) -> tuple[Any, Any]:  # noqa: FBT001
    """A trainer whose completions have full length, and the estimate for it."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from podium import GRPOConfig, GRPOTrainer
    from podium.models.devices import kind_of
    from podium.planning.memory import estimate_memory
    from podium.testing import tiny_tokenizer

    dtype = "bfloat16" if lora else "float32"
    model = random_model(shape, getattr(torch, dtype), options)
    prompt, completion = (16, 8) if options.tiny else (PROMPT_TOKENS, COMPLETION_TOKENS)
    args = GRPOConfig(
        tempfile.mkdtemp(),
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=completion,
        generation_kwargs={"eos_token_id": model.config.vocab_size - 1},  # random weights hardly ever draw it
        max_steps=2,
        tokens_per_pack=TOKENS_PER_PACK,
        learning_rate=1e-6,
        prove_first_batch=False,  # it keeps forwards of its own
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=options.device == "cpu",
    )
    peft = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    as_named = copy.copy(args)
    as_named.model_init_kwargs = {"dtype": dtype}  # the estimate is of a model that is given by its name
    estimate = estimate_memory(model.config, as_named, prompt_tokens=prompt, peft_config=peft, available_bytes=0)
    estimate = replace(estimate, runtime_bytes=runtime + kind_of(args.device).working_bytes)
    rows = Dataset.from_list([{"prompt": f"{i:04}".ljust(prompt, "x")} for i in range(64)])  # a token each letter
    trainer = GRPOTrainer(model, rewards, args, rows, processing_class=tiny_tokenizer(), peft_config=peft)
    return trainer, estimate


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Different within every group, whatever was written."""
    return [float(i % 5) for i in range(len(completions))]


if __name__ == "__main__":
    sys.exit(main(Script(name="memory", groups=groups, prepare=prepare, limit=240)))
