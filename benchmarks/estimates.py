"""What was estimated before a run against what was measured in it, on the built-in model.

    python -m benchmarks.estimates                     memory of six shapes, each in a process of its own
    python -m benchmarks.estimates "full, long"        one of them
    python -m benchmarks.estimates --time              the time of the quickstart; wants a quiet machine
    python -m benchmarks.estimates --time --max_steps 20

Memory: the peak is the process's largest resident memory (Linux), the runtime's share what it has after its imports.
Time: `podium train quickstart` as it is typed, without loading the model and writing the report, against the estimate
of `podium.planning`. A table is printed, and `benchmarks/results/estimates-*.json` renewed for what was run. Exit code
1 where an estimate of memory is off by more than 15 %, or one of time by more than 25 %.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MEMORY, TIME = 0.15, 0.25
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
    from podium.planning.estimates.memory import estimate_memory

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


def memory(names: Sequence[str]) -> bool:
    """The table and its JSON; whether every estimate is good enough."""
    if unknown := [name for name in names if name not in SHAPES]:
        sys.exit(f"no shape {', '.join(unknown)}; there are: {'; '.join(SHAPES)}")
    good = True
    print(f"{'shape':28} {'runtime':>8} {'estimate':>9} {'measured':>9}   off")
    for name in names or SHAPES:
        found = _in_a_process("one", name)
        off = found["estimate"] / found["measured"] - 1
        good &= abs(off) <= MEMORY
        sizes = "  ".join(f"{found[key] / 1e9:5.2f} GB" for key in ("runtime", "estimate", "measured"))
        print(f"{name:28} {sizes}  {off:+.0%}", flush=True)
        _keep("estimates-memory.json", name, {**found, "off": round(off, 3)})
    return good


def quickstart(flags: Sequence[str]) -> dict[str, Any]:
    """Estimate on a trainer of its own, then the run: seconds of the steps and of both looks at held-out prompts."""
    from podium.cli.sample import opened
    from podium.cli.words import recipe_and_flags
    from podium.planning.estimates.duration import estimate_time, measure
    from podium.recipe import load

    with opened(load(*recipe_and_flags(["quickstart", *flags], "train"))) as (recipe, trainer, rows, held_out):
        looked_at = 0 if held_out is None else sum(1 for _ in itertools.islice(held_out, recipe.eval_rows))
        estimate = estimate_time(
            trainer.args,
            measure(trainer),
            num_rows=len(rows),
            evaluation_completions=2 * looked_at * recipe.eval_samples,
        )
    del trainer  # before another runs
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "podium", "train", "quickstart", *flags, "--output_dir", folder]
        started = time.perf_counter()
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        whole = time.perf_counter() - started
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
        after = json.loads(Path(folder, "evaluation", "after.json").read_text())
    steps = [row["values"] for row in map(json.loads, lines) if "step_time" in row["values"]]
    return {
        "steps": len(steps),
        "estimate": estimate.total_seconds - estimate.evaluation_seconds,
        "most": estimate.most_seconds - estimate.evaluation_seconds,
        "measured": sum(values["step_time"] for values in steps),
        "estimate_with_evaluation": estimate.total_seconds,
        "whole_command": whole,
        "accuracy": after["accuracy"],
        "closing_line": next(line for line in printed.splitlines() if " steps in " in line),
    }


def duration(flags: Sequence[str]) -> bool:
    """The line and its JSON; whether the estimate is good enough."""
    found = _in_a_process("run", *flags)
    off = found["estimate"] / found["measured"] - 1
    print(
        f"quickstart, {found['steps']} steps: estimated {found['estimate']:.0f} s (at most {found['most']:.0f} s)",
        end="",
    )
    print(f", measured {found['measured']:.0f} s: {off:+.0%}")
    print(f"with both evaluations {found['estimate_with_evaluation']:.0f} s estimated; the command took ", end="")
    print(f"{found['whole_command']:.0f} s with loading and report ({found['closing_line']})")
    print("held-out accuracy {value:.3f} [{low:.3f}, {high:.3f}]".format(**found["accuracy"]))
    _keep("estimates-time.json", " ".join(["quickstart", *flags]), {**found, "off": round(off, 3)})
    return abs(off) <= TIME


def _in_a_process(*command: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.estimates", *command], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def _keep(name: str, key: str, found: Mapping[str, Any]) -> None:
    """Renew one entry of a file of results."""
    file = RESULTS / name
    entries = json.loads(file.read_text()) if file.is_file() else {}
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps({**entries, key: dict(found)}, indent=1) + "\n")


def main() -> int:
    """See above."""
    first, *rest = sys.argv[1:] or [""]
    if first == "one":
        print(json.dumps(one(rest[0])))
        return 0
    if first == "run":
        print(json.dumps(quickstart(rest)))
        return 0
    return int(not (duration(rest) if first == "--time" else memory(sys.argv[1:])))


if __name__ == "__main__":
    sys.exit(main())
