"""Memory estimated before a run against the peak measured in it: six shapes on the built-in model.

    python -m benchmarks.estimates                 all shapes, each in a process of its own, as a table
    python -m benchmarks.estimates "full, long"    one of them

The peak is the process's largest resident memory
(Linux), the runtime's share what it has after its imports. Exit code 1 where an estimate is off by more than 15 %.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ALLOWED = 0.15
RARE_TOKEN = 49_000
"""As the only end token it lets completions run to their full length, as the estimate assumes."""

SHORT: Mapping[str, Any] = {"prompt": 24, "max_completion_length": 16, "num_generations": 8, "batch": 64}
LONG: Mapping[str, Any] = {"prompt": 128, "max_completion_length": 128, "num_generations": 4, "batch": 8, "pack": 2048}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "full, short": SHORT,
    "full, long": LONG,
    "full, long, checkpointing": {**LONG, "checkpointing": True},
    "lora, short": {**SHORT, "lora": True},
    "lora, long": {**LONG, "lora": True},
    "lora, long, checkpointing": {**LONG, "lora": True, "checkpointing": True},
}


def resident(field: str) -> int:
    """Bytes: `VmRSS` now, `VmHWM` at most."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, "needs Linux"
    return int(found[1]) * 1024


def one(name: str) -> dict[str, int]:
    """Estimate, train two steps, measure."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig
    from transformers.models.llama import modeling_llama  # noqa: F401  part of what is imported before a model

    from podium import GRPOConfig, GRPOTrainer
    from podium.estimates.memory import estimate_memory
    from podium.models.builtin import resolve_model

    shape = SHAPES[name]
    model = "builtin:smollm2-135m-instruct"
    args = GRPOConfig(
        tempfile.mkdtemp(),
        num_generations=shape["num_generations"],
        per_device_train_batch_size=shape["batch"],
        max_completion_length=shape["max_completion_length"],
        tokens_per_pack=shape.get("pack"),
        gradient_checkpointing=shape.get("checkpointing", False),
        generation_kwargs={"eos_token_id": RARE_TOKEN},
        product_precision="bfloat16",
        max_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    peft = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    peft = peft if shape.get("lora") else None
    rows = Dataset.from_list([{"prompt": f"{i} " + " seven" * (shape["prompt"] - 2)} for i in range(64)])
    runtime = resident("VmRSS")
    config = AutoConfig.from_pretrained(resolve_model(model))
    estimate = estimate_memory(config, args, prompt_tokens=shape["prompt"], peft_config=peft, runtime_bytes=runtime)
    trainer = GRPOTrainer(model, _rewards, args, rows, peft_config=peft)
    trainer.train()
    return {"runtime": runtime, "estimate": estimate.peak_bytes, "measured": resident("VmHWM")}


def _rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(i % 5) for i in range(len(completions))]


def main() -> int:
    """The table; 1 where an estimate is too far off."""
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(one(sys.argv[2])))
        return 0
    worst = 0.0
    print(f"{'shape':28} {'runtime':>8} {'estimate':>9} {'measured':>9}   off")
    for name in sys.argv[1:] or SHAPES:
        command = [sys.executable, "-m", "benchmarks.estimates", "one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        off = found["estimate"] / found["measured"] - 1
        worst = max(worst, abs(off))
        sizes = "  ".join(f"{found[key] / 1e9:5.2f} GB" for key in ("runtime", "estimate", "measured"))
        print(f"{name:28} {sizes}  {off:+.0%}", flush=True)
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
