"""What was estimated before a run against what was measured in it, on the built-in model.

    python -m benchmarks.estimates                     memory of six shapes, each in a process of its own
    python -m benchmarks.estimates "full, long"        one of them

The peak is the process's largest resident memory (Linux), the runtime's share what it has after its imports. A table is
printed, and `benchmarks/results/estimates-memory.json` renewed for what was run. Exit code 1 where one is off by
more than 15 %.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "estimates-memory.json"
MOST_OFF = 0.15
"""How far an estimate may be off."""

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
    from podium.models.builtin import resolve_model
    from podium.models.devices import kind_of
    from podium.planning.memory import estimate_memory

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
    estimate = estimate_memory(config, args, prompt_tokens=shape["prompt"], peft_config=peft)
    estimate = replace(estimate, runtime_bytes=runtime + kind_of(args.device).working_bytes)
    trainer = GRPOTrainer(model, _rewards, args, rows, peft_config=peft)
    trainer.train()
    return {"runtime": runtime, "estimate": estimate.peak_bytes, "measured": resident("VmHWM")}


def _rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(i % 5) for i in range(len(completions))]


def memory(names: Sequence[str]) -> bool:
    """The table and its JSON; whether every estimate is good enough."""
    if unknown := [name for name in names if name not in SHAPES]:
        sys.exit(f"no shape {', '.join(unknown)}; there are: {'; '.join(SHAPES)}")
    good = True
    print(f"{'shape':28} {'runtime':>8} {'estimate':>9} {'measured':>9}   off")
    for name in names or SHAPES:
        found = _in_a_process(name)
        off = found["estimate"] / found["measured"] - 1
        good &= abs(off) <= MOST_OFF
        sizes = "  ".join(f"{found[key] / 1e9:5.2f} GB" for key in ("runtime", "estimate", "measured"))
        print(f"{name:28} {sizes}  {off:+.0%}", flush=True)
        _keep(name, {**found, "off": round(off, 3)})
    return good


def _in_a_process(name: str) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.estimates", "one", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _keep(name: str, found: Mapping[str, Any]) -> None:
    """Renew the entry of one shape."""
    entries = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({**entries, name: dict(found)}, indent=1) + "\n")


def main() -> int:
    """See above."""
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(one(sys.argv[2])))
        return 0
    return int(not memory(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
