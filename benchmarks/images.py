"""Steps on images beside TRL's, alternating: seconds and memory, and how often an image is encoded.

    python -m benchmarks.images                      # a tiny model and one of a real shape
    python -m benchmarks.images --only real --rounds 3
    python -m benchmarks.images --chart docs/images/colours.svg runs/c1 runs/c2 runs/c3     # of `podium train colours`

Both trainers get the same model, rows and arguments, 8 completions a prompt and 256 tokens an image, and sample by
themselves. Every run is a process of its own; the step that is reported is the median of those after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.charts import Line, line_chart

MODELS: Mapping[str, Mapping[str, int]] = {
    "tiny": {"width": 64, "num_layers": 2, "text_layers": 2},
    "real": {"width": 384, "num_layers": 12, "text_layers": 30},
}
"""Width and layers of the encoder, and layers of SmolLM2-135M that are kept."""
IMAGE_SIZE = 128
STEPS = 4
WINDOW = 5
"""Steps that a point of the chart is the mean of."""
COLOURS = ("#1f77b4", "#d62728", "#2ca02c")
COMPLETIONS = 16
"""Of a step; with 32 TRL needs more than 20 GiB for the real shape."""


def write_model(name: str, folder: Path) -> None:
    """Save a model with 256 tokens an image."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from podium.models.builtin import BUILTIN, resolve_model, with_encoder

    sizes = MODELS[name]
    with tempfile.TemporaryDirectory() as text:
        source = resolve_model(BUILTIN)
        model = AutoModelForCausalLM.from_pretrained(source)
        model.model.layers = model.model.layers[: sizes["text_layers"]]
        model.config.num_hidden_layers = sizes["text_layers"]
        model.config.layer_types = None
        model.save_pretrained(text)
        AutoTokenizer.from_pretrained(source).save_pretrained(text)
        encoder = {key: sizes[key] for key in ("width", "num_layers")}
        with_encoder(text, folder, image_size=IMAGE_SIZE, **encoder)


def run(trainer: str, model: str) -> dict[str, float]:
    """Train a few steps; the median of the later ones in seconds, the peak of memory, and images encoded a step."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback

    import podium
    from podium.data.tasks import colours

    times: list[float] = []
    encoded: list[int] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())
            encoded.append(0)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times[-1] = time.perf_counter() - times[-1]

    policy = AutoModelForImageTextToText.from_pretrained(model)
    encode = policy.model.vision_tower.forward

    def counted(pixel_values: Any, *args: Any, **named: Any) -> Any:
        if encoded:
            encoded[-1] += len(pixel_values)
        return encode(pixel_values, *args, **named)

    policy.model.vision_tower.forward = counted
    rows = [{**row, "image": row["image"].resize((IMAGE_SIZE, IMAGE_SIZE))} for row in colours()[0][:64]]
    kinds = {"trl": (trl.GRPOTrainer, trl.GRPOConfig), "podium": (podium.GRPOTrainer, podium.GRPOConfig)}
    trainer_class, config_class = kinds[trainer]
    own = {"train_image_encoder": True, "prove_first_batch": False, "product_precision": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            output_dir=folder,
            per_device_train_batch_size=COMPLETIONS,
            num_generations=8,
            max_completion_length=16,
            max_steps=STEPS,
            learning_rate=1e-6,
            beta=0.0,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            **(own if trainer == "podium" else {}),
        )
        made = trainer_class(
            model=policy,
            reward_funcs=lambda completions, **_: [float(len(text[0]["content"])) for text in completions],
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoProcessor.from_pretrained(model, padding_side="left"),
            callbacks=[Clock()],
        )
        made.train()
    lengths = [x["completions/mean_length"] for x in made.state.log_history if "completions/mean_length" in x]
    return {
        "seconds": statistics.median(times[1:]),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "encoded": statistics.median(encoded[1:]),
        "length": statistics.mean(lengths or [0.0]),
    }


def chart(folders: Sequence[Path]) -> str:
    """An SVG of the share of right answers in training, by step, of runs of the recipe `colours`."""
    lines = []
    for number, folder in enumerate(folders, start=1):
        rows = [json.loads(line)["values"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        shares = [row["accuracy"] for row in rows]
        points = [
            (float(step), statistics.mean(shares[max(0, step - WINDOW) : step])) for step in range(1, len(rows) + 1)
        ]
        lines.append(Line(name=f"run {number}", points=points, colour=COLOURS[number - 1]))
    return line_chart(
        lines, x_ticks=[0, 25, 50, 75, 100], y_ticks=[0, 0.25, 0.5, 0.75, 1], x_title="step", y_format="{:.0%}"
    )


def main() -> None:
    """Run both trainers on each model, in turns, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*MODELS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", nargs=2, metavar=("TRAINER", "MODEL"), help="one run, printed as JSON")
    parser.add_argument("--chart", nargs="+", metavar=("SVG", "RUN"), help="draw the curves of runs of `colours`")
    given = parser.parse_args()
    if given.chart:
        svg, *folders = map(Path, given.chart)
        svg.write_text(chart(folders))
        return
    if given.run:
        sys.stdout.write(json.dumps(run(*given.run)) + "\n")
        return
    sys.stdout.write(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, float32\n")
    for name in [given.only] if given.only else MODELS:
        with tempfile.TemporaryDirectory() as folder:
            write_model(name, Path(folder))
            found: dict[str, list[dict[str, float]]] = {"podium": [], "trl": []}
            for _ in range(given.rounds):
                for trainer, results in found.items():
                    command = [sys.executable, "-m", "benchmarks.images", "--run", trainer, folder]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    results.append(json.loads(done.stdout.splitlines()[-1]))
            for trainer, results in found.items():
                medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
                sys.stdout.write(f"{name} {trainer}: " + ", ".join(f"{k} {v:.3g}" for k, v in medians.items()) + "\n")
            ratios = [
                theirs["seconds"] / ours["seconds"] for ours, theirs in zip(found["podium"], found["trl"], strict=True)
            ]
            sys.stdout.write(f"{name}: TRL / Podium {statistics.median(ratios):.2f} ({ratios})\n")


if __name__ == "__main__":
    main()
