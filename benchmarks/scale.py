"""How time and memory grow with completions per prompt, prompt length and completion length: `make bench-scale`.

Each point is one training step (sampling, forward, backward) in a process of its own. Writes a JSON and a plot.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.bench import RESULTS, hardware, save

AXES: dict[str, tuple[int, ...]] = {
    "generations": (2, 4, 8, 16, 32, 64),
    "prompt_tokens": (32, 128, 512, 2048),
    "completion_tokens": (8, 32, 128, 512),
}
BASE = {"generations": 8, "prompt_tokens": 128, "completion_tokens": 16}
TITLES = {
    "generations": "completions per prompt",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "completion tokens",
}


def measure(point: dict[str, int], threads: int) -> dict[str, Any]:
    """Seconds and memory of one step of two prompts: run in a fresh process by `main`."""
    import numpy as np
    import torch

    from benchmarks.worker import load, peak_resident_gib
    from podium.engines.live.engine import LiveEngine
    from podium.models.attention import tree_attention
    from podium.models.forward import token_logps
    from podium.models.head import LogitScaling
    from podium.models.lean import lean_precision
    from podium.models.packing import pack, unscored
    from podium.records import Prompt, SamplingSettings

    torch.set_num_threads(threads)
    model, tokenizer = load("builtin", "cpu")
    precision = lean_precision(model, enabled=True)
    rng = np.random.default_rng(0)
    length, g = point["completion_tokens"], point["generations"]
    prompts = [
        Prompt(
            id=i,
            row=i,
            token_ids=tuple(rng.integers(100, 40_000, point["prompt_tokens"]).tolist()),
            text="",
            content="",
        )
        for i in range(2)
    ]
    settings = SamplingSettings(
        num_completions=g, max_tokens=length, end_ids=frozenset([2]), lengths=lambda p, c: length
    )
    engine = LiveEngine(model, tokenizer, precision=precision.sampling)
    budget = 463  # what the trainer chooses for this model

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        groups = engine.generate(prompts, settings)
        sampled = time.perf_counter()
        samples = [unscored(group.prompt.token_ids, each.token_ids) for group in groups for each in group.completions]
        with precision(), tree_attention(model):
            for packed in pack(samples, tokens_per_pack=budget):
                token_logps(model, packed, temperature=1.0, head=LogitScaling()).logps_N.sum().backward()
        return sampled - start, time.perf_counter() - sampled

    step()
    generate, train = step()
    return {
        **point,
        "generate_seconds": generate,
        "train_seconds": train,
        "seconds_per_completion": (generate + train) / (2 * g),
        "peak_memory_gib": peak_resident_gib(),
    }


def plot(points: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One column per axis: seconds a completion above, memory below."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(2, 3, shared_xaxes=True, vertical_spacing=0.08)
    for column, (axis, found) in enumerate(points.items(), 1):
        x = [point[axis] for point in found]
        for row, key in ((1, "seconds_per_completion"), (2, "peak_memory_gib")):
            figure.add_trace(
                go.Scatter(x=x, y=[p[key] for p in found], mode="lines+markers", showlegend=False), row, column
            )
            figure.update_xaxes(type="log", tickvals=x, row=row, col=column)
            figure.update_yaxes(rangemode="tozero", row=row, col=column)
        figure.update_xaxes(title_text=TITLES[axis], row=2, col=column)
    figure.update_yaxes(title_text="seconds a completion", row=1, col=1)
    figure.update_yaxes(title_text="peak memory, GiB", row=2, col=1)
    figure.update_layout(title=f"How cost grows ({hardware()})", template="plotly_white", height=640)
    figure.write_html(path, include_plotlyjs=True)


def main() -> None:
    """Every point in a process of its own, or (with --point) one of them here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--point", type=json.loads)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(options.point, options.threads)))
        return
    points: dict[str, list[dict[str, Any]]] = {axis: [] for axis in AXES}
    for axis, values in AXES.items():
        for value in values:
            command = [sys.executable, "-m", "benchmarks.scale", "--threads", str(options.threads)]
            done = subprocess.run(
                [*command, "--point", json.dumps({**BASE, axis: value})], capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            point = json.loads(done.stdout.splitlines()[-1])
            points[axis].append(point)
            print(
                f"{TITLES[axis]} {value}: {point['seconds_per_completion']:.3f} s a completion,"
                f" {point['peak_memory_gib']:.2f} GiB"
            )
    print("written to", save("scale", {"points": points}).relative_to(Path.cwd()))
    plot(points, RESULTS / "scale.html")


if __name__ == "__main__":
    main()
