"""Podium against TRL on the same machine, one after the other, in processes of their own: `make bench`.

python -m benchmarks.bench                     W1 to W5 on the built-in model
python -m benchmarks.bench W1 W4 --rounds 3
python -m benchmarks.bench W6 --model Qwen2.5-1.5B        on a GPU
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.workloads import CPU, WORKLOADS

RESULTS = Path(__file__).parent / "results"


def run(trainer: str, precision: str, workload: str, steps: int, model: str) -> dict[str, Any]:
    """One worker's JSON."""
    command = [sys.executable, "-m", "benchmarks.worker", trainer, workload, "--precision", precision]
    command += ["--steps", str(3 * steps if trainer == "podium" else steps), "--model", model]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parent.parent)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return {**json.loads(lines[-1]), "load_before": os.getloadavg()[0]}


def combined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of one setting."""
    first = results[0]
    seconds = {key: statistics.median(r["seconds"][key] for r in results) for key in first["seconds"]}
    step = statistics.median(second for r in results for second in r["all_steps"])
    return {
        **first,
        "seconds": {**seconds, "step": step},
        "all_steps": [second for r in results for second in r["all_steps"]],
        "peak_memory_gib": max(r["peak_memory_gib"] for r in results),
        "floor": {key: statistics.median(r["floor"][key] for r in results) for key in first["floor"]},
        "rates": {key: statistics.median(r["rates"][key] for r in results) for key in first["rates"]},
        "completions_per_second": first["completions"] / step,
        "useful_completions_per_second": first["useful"] / step,
        "tokens_per_second": first["tokens"] / step,
    }


def compare(workload: str, by_setting: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Podium against the better of TRL's precisions."""
    trl = [result for (trainer, _), result in by_setting.items() if trainer == "trl"]
    podium = next(result for (trainer, _), result in by_setting.items() if trainer == "podium")
    fastest = min(trl, key=lambda r: r["seconds"]["step"])
    return {
        "workload": workload,
        "what": WORKLOADS[workload].what,
        "target": WORKLOADS[workload].target,
        "ratio": fastest["seconds"]["step"] / podium["seconds"]["step"],
        "memory_ratio": podium["peak_memory_gib"] / min(r["peak_memory_gib"] for r in trl),
        "floor_fraction": podium["floor"]["total"] / podium["seconds"]["step"],
        "results": list(by_setting.values()),
    }


def table(comparisons: Iterable[dict[str, Any]]) -> Table:
    """One row per trainer and precision."""
    out = Table(
        title="Seconds a step (median)", caption="floor: matrix FLOPs and bytes over the rates measured just before"
    )
    for column in (
        "",
        "step",
        "generate",
        "reward",
        "compare",
        "train",
        "optimizer",
        "compl./s",
        "useful/s",
        "tokens/s",
        "GiB",
        "floor",
        "ratio",
    ):
        out.add_column(column, justify="left" if not column else "right")
    for c in comparisons:
        out.add_section()
        out.add_row(f"[bold]{c['workload']}[/] {c['what']}")
        for r in c["results"]:
            ours = r["trainer"] == "podium"
            s = r["seconds"]
            out.add_row(
                f"  {r['trainer']} {r['precision']}",
                *(f"{s[key]:.2f}" for key in ("step", "generate", "reward", "compare", "train", "optimizer")),
                f"{r['completions_per_second']:.1f}",
                f"{r['useful_completions_per_second']:.1f}",
                f"{r['tokens_per_second']:.0f}",
                f"{r['peak_memory_gib']:.2f}",
                f"{100 * c['floor_fraction']:.0f} % of {r['floor']['total']:.1f} s" if ours else "",
                f"[bold]{c['ratio']:.1f} x[/]" if ours else "",
            )
    return out


def processor() -> str:
    """Its model name, as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def hardware() -> str:
    """The accelerator's name, or the processor's."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else processor()


def versions() -> dict[str, str]:
    """Of what was measured."""
    from importlib.metadata import version

    return {name: version(name) for name in ("podium", "trl", "transformers", "torch", "peft", "accelerate")}


def save(name: str, content: dict[str, Any]) -> Path:
    """A JSON under `results/`, named after what was measured on which hardware."""
    slug = "".join(c if c.isalnum() else "-" for c in hardware().lower()).strip("-")
    while "--" in slug:
        slug = slug.replace("--", "-")
    path = RESULTS / f"{name}-{slug}.json"
    RESULTS.mkdir(exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    path.write_text(
        json.dumps({"hardware": hardware(), "measured": stamp, "versions": versions(), **content}, indent=1) + "\n"
    )
    return path


def main() -> None:
    """Alternate the settings, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(CPU), help=", ".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=2, help="how often the settings alternate")
    parser.add_argument("--steps", type=int, default=2, help="counted steps of TRL a round; Podium: times 3")
    parser.add_argument("--trl", nargs="+", default=["bfloat16", "float32"], help="TRL's precisions")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--name", default="bench")
    options = parser.parse_args()
    console = Console(width=170)
    settings = [("podium", "auto"), *(("trl", precision) for precision in options.trl)]
    comparisons = []
    for workload in options.workloads:
        found: dict[tuple[str, str], list[dict[str, Any]]] = {setting: [] for setting in settings}
        for _ in range(options.rounds):
            for setting in settings:
                found[setting].append(run(*setting, workload, options.steps, options.model))
                console.print(
                    f"{workload} {' '.join(setting)}: {found[setting][-1]['seconds']['step']:.2f} s a step",
                    highlight=False,
                )
        comparisons.append(compare(workload, {setting: combined(results) for setting, results in found.items()}))
        console.print(table(comparisons[-1:]))
        path = save(
            f"{options.name}-{options.model}" if options.model != "builtin" else options.name,
            {"comparisons": comparisons},
        )
    console.print(table(comparisons))
    console.print(f"{hardware()}; written to {path.relative_to(Path.cwd())}", highlight=False)


if __name__ == "__main__":
    main()
