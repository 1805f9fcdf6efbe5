"""Generation alone: the same prompts, 64 completions, lengths forced.

    python -m benchmarks.generation                          live and generate
    python -m benchmarks.generation --vllm PYTHON            and vLLM, run by another environment's interpreter

vLLM needs an environment of its own (its CPU build pins other versions): `pip install vllm` there, and name its python.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from benchmarks.bench import hardware, save
from benchmarks.worker import load, prompts
from benchmarks.workloads import WORKLOADS
from podium.engines.live.engine import LiveEngine
from podium.models.builtin import resolve_model
from podium.models.lean import lean_precision
from podium.records import Prompt, SamplingSettings

SEQUENCES, GENERATIONS = 64, 8
LENGTHS = (16, 64)
ROUNDS = 3


def live(model: Any, tokenizer: Any, rows: list[dict[str, str]], length: int, *, bfloat16: bool) -> float:
    """Seconds of Podium's engine."""
    ids = [tuple(tokenizer(row["prompt"])["input_ids"]) for row in rows]
    batch = [Prompt(id=i, row=i, token_ids=x, text="", content="") for i, x in enumerate(ids)]
    settings = SamplingSettings(
        num_completions=GENERATIONS,
        max_tokens=length,
        end_ids=frozenset([tokenizer.eos_token_id]),
        lengths=lambda p, g: length,
    )
    engine = LiveEngine(model, tokenizer, precision=lean_precision(model, enabled=bfloat16).sampling)
    start = time.perf_counter()
    engine.generate(batch, settings)
    return time.perf_counter() - start


def generate(model: Any, tokenizer: Any, rows: list[dict[str, str]], length: int, *, bfloat16: bool) -> float:
    """Seconds of transformers' `generate`, one row per completion."""
    inputs = tokenizer([row["prompt"] for row in rows for _ in range(GENERATIONS)], return_tensors="pt", padding=True)
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=length,
        min_new_tokens=length,
        eos_token_id=2,
        pad_token_id=2,
        disable_compile=True,
    )
    context = torch.autocast("cpu", dtype=torch.bfloat16) if bfloat16 else contextlib.nullcontext()
    start = time.perf_counter()
    with torch.no_grad(), context:
        model.generate(**inputs, generation_config=config)
    return time.perf_counter() - start


def with_vllm(python: str, length: int, prompt_tokens: int) -> list[float]:
    """Seconds of vLLM in another environment: bfloat16, prefix caching on, `n` completions a request, warmed up."""
    script = Path(__file__).with_name("vllm_worker.py")
    done = subprocess.run(
        [
            python,
            str(script),
            str(length),
            str(prompt_tokens),
            str(SEQUENCES // GENERATIONS),
            str(GENERATIONS),
            str(ROUNDS),
            resolve_model("builtin:smollm2-135m-instruct"),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"vLLM failed:\n{done.stderr[-3000:]}")
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("[")))


def main() -> None:
    """Alternate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load("builtin", "cpu")
    model.eval()
    workload = WORKLOADS["W1"]
    rows = prompts(tokenizer, workload, SEQUENCES // GENERATIONS)
    engines = {
        "live, bfloat16 products": lambda length: live(model, tokenizer, rows, length, bfloat16=True),
        "live, float32": lambda length: live(model, tokenizer, rows, length, bfloat16=False),
        "generate, float32": lambda length: generate(model, tokenizer, rows, length, bfloat16=False),
        "generate, bfloat16 autocast": lambda length: generate(model, tokenizer, rows, length, bfloat16=True),
    }
    found: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    for length in LENGTHS:
        for name, engine in engines.items():
            engine(length)
            found[name][str(length)] = []
        for _ in range(ROUNDS):
            for name, engine in engines.items():
                found[name][str(length)].append(engine(length))
        if options.vllm:
            found.setdefault("vLLM", {})[str(length)] = with_vllm(options.vllm, length, workload.prompt_tokens)
    out = Table(title=f"{SEQUENCES} sequences, prompts of {workload.prompt_tokens} tokens: seconds (median)")
    for column in ("", *(f"{length} tokens" for length in LENGTHS)):
        out.add_column(column, justify="right" if column else "left")
    for name, times in found.items():
        out.add_row(name, *(f"{statistics.median(times[str(length)]):.2f}" for length in LENGTHS))
    console = Console(width=110)
    console.print(out)
    console.print(
        f"{hardware()}; written to {save('generation', {'seconds': found}).relative_to(Path.cwd())}", highlight=False
    )


if __name__ == "__main__":
    sys.exit(main())
