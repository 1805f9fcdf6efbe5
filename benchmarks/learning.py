"""What is learnt per minute, beside TRL: the quickstart's task with TRL's `GRPOTrainer` and with Podium's.

    make bench-learning                          # what is missing of three seeds and one LoRA run, then the pictures
    python -m benchmarks.learning --seeds 1      # one seed; runs that are in the results are not repeated
    python -m benchmarks.learning --draw         # the pictures and the table alone

Model, rows, rewards, batch, learning rate, temperature and steps are the same; only the import differs. After every
few steps the weights are copied into a plain model beside the trainer, which answers the held-out questions; that time
is not counted. Both copies are sampled in the same way, with the same random numbers. Each run is a process of its
own, and each is written down when it ends. TRL computes in bfloat16, the better of its precisions here. All steps take
an hour with it, so only its first run of all weights takes them; others end with the first evaluation at 0.6 or above.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import hardware
from benchmarks.charts import COLOURS, Line, line_chart

RESULTS = Path(__file__).parent / "results" / "learning.json"
DOCS = Path(__file__).parents[1] / "docs"
PAGE, BEGIN, END = Path(__file__).parent / "RESULTS.md", "<!-- learning -->\n", "<!-- /learning -->"
TRAINERS = {"podium": "Podium", "trl": "TRL"}
TASKS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {},
    "quickstart, LoRA": {"use_peft": True, "lora_r": 16, "lora_target_modules": "all-linear", "learning_rate": 3e-4},
}
SEEDS: Mapping[str, Sequence[int]] = {"quickstart": (1, 2, 3), "quickstart, LoRA": (1,)}
WHOLE = ("quickstart", 1)
"""Task and seed whose run with TRL takes all steps."""
EVERY = 5
"""Optimizer steps between two evaluations."""
SAMPLES, LEVEL = 4, 0.6
"""Answers to each held-out question; the accuracy whose time is compared."""


class Curve:
    """A callback: seconds of training alone, and held-out accuracy by step; it ends the training at an accuracy."""

    def __init__(self, probe: Any, questions: Any, last: float = math.inf, every: int = EVERY) -> None:
        from transformers import TrainerCallback

        curve = self

        class Callback(TrainerCallback):
            def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
                curve.measure(0, model)

            def on_step_end(self, _args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
                curve.seconds += time.perf_counter() - curve.mark
                if state.global_step % every == 0 or state.global_step == state.max_steps:
                    control.should_training_stop |= curve.measure(state.global_step, model) >= last
                curve.mark = time.perf_counter()

        self.callback = Callback()
        self.probe, self.questions = probe, questions
        self.seconds, self.points = 0.0, list[dict[str, Any]]()
        self.mark = 0.0

    def measure(self, step: int, policy: Any) -> float:
        """Held-out accuracy of the policy's weights."""
        self.probe.load_state_dict(policy.state_dict())
        right_PG = self.questions(self.probe)
        self.points.append({"step": step, "seconds": self.seconds, "right": right_PG})
        mean = statistics.mean(map(statistics.mean, right_PG))
        print(f"step {step}: {self.seconds:.0f} s, {mean:.3f}", file=sys.stderr, flush=True)
        self.mark = time.perf_counter()
        return mean


def questions(recipe: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """What asks a model all held-out questions: True or False by question and answer."""
    from podium.data import PromptBuilder
    from podium.engines.live.engine import LiveEngine
    from podium.models.loading import end_ids
    from podium.records import SamplingSettings
    from podium.rewards import answer_correct

    builder = PromptBuilder(tokenizer=tokenizer, context_length=None)
    prompts = [builder(row, id=i, row_index=i) for i, row in enumerate(rows)]

    def ask(model: Any) -> list[list[bool]]:
        settings = SamplingSettings(
            num_completions=SAMPLES,
            max_tokens=recipe.config["max_completion_length"],
            temperature=recipe.eval_temperature,
            end_ids=end_ids(model, tokenizer),
            seed=0,
            round=0,
        )
        groups = LiveEngine(model, tokenizer).generate(prompts, settings, policy_step=0)
        marks = []
        for group, row in zip(groups, rows, strict=True):
            texts = [[{"role": "assistant", "content": each.text}] for each in group.completions]
            marks.append([mark >= 1 for mark in answer_correct(texts, answer=[row["answer"]] * SAMPLES)])
        return marks

    return ask


def run(task: str, trainer: str, seed: int, steps: int | None, rows: int | None) -> dict[str, Any]:
    """One training, in this process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from podium.models.builtin import resolve_model
    from podium.recipe import load

    recipe = load("quickstart", {**TASKS[task], "seed": seed, **({"max_steps": steps} if steps else {})})
    folder = resolve_model(recipe.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train, held_out = recipe.load_rows()
    policy, probe = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    lora = recipe.peft_config()
    if lora is not None:
        from peft import get_peft_model

        probe = get_peft_model(probe, lora)
    on_gpu = torch.cuda.is_available()
    probe.to("cuda" if on_gpu else "cpu")
    ends = trainer == "trl" and (task, seed) != WHOLE
    curve = Curve(probe, questions(recipe, tokenizer, list(held_out)[:rows]), LEVEL if ends else math.inf)
    with tempfile.TemporaryDirectory() as out:
        given = {
            "model": policy,
            "reward_funcs": [spec.function for spec in recipe.rewards],
            "train_dataset": Dataset.from_list([dict(row) for row in train]),
            "processing_class": tokenizer,
            "peft_config": lora,
            "callbacks": [curve.callback],
        }
        settings = {**recipe.config, "output_dir": out, "use_cpu": not on_gpu, "disable_tqdm": True}
        made = MAKERS[trainer](given, settings)
        begin = time.perf_counter()
        made.train()
    return {
        "task": task,
        "trainer": trainer,
        "seed": seed,
        "completions_per_step": settings["per_device_train_batch_size"],
        "points": curve.points,
        "wall_seconds": time.perf_counter() - begin,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
    }


def _podium(given: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    import podium

    return podium.GRPOTrainer(args=podium.GRPOConfig(**_known(podium.GRPOConfig, settings)), **given)


def _trl(given: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    import trl

    given = {**given, "reward_funcs": [_of_all_columns(function) for function in given["reward_funcs"]]}
    # Activations are computed again in the backward pass, as by default: without that TRL needs more memory than here.
    return trl.GRPOTrainer(args=trl.GRPOConfig(**_known(trl.GRPOConfig, settings), bf16=True), **given)


def _of_all_columns(function: Any) -> Any:
    """A reward function that TRL can call: it gives every column by name, Podium those that a function asks for."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(**columns: Any) -> Any:
        return function(**{name: value for name, value in columns.items() if name in names})

    return called


def _known(kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in kind.__dataclass_fields__}


MAKERS = {"podium": _podium, "trl": _trl}


# ---- results ----


def means(points: Sequence[Mapping[str, Any]]) -> list[float]:
    """Accuracy at each evaluation."""
    return [statistics.mean(map(statistics.mean, point["right"])) for point in points]


def seconds_to(level: float, result: Mapping[str, Any]) -> float | None:
    """Seconds of training to an accuracy, on the straight line between evaluations; None: never reached.

    >>> seconds_to(0.5, {"points": [{"seconds": s, "right": [[r]]} for s, r in [(0, 0), (10, 0.25), (20, 0.75)]]})
    15.0
    """
    points, values = result["points"], means(result["points"])
    for i in range(1, len(points)):
        if values[i] >= level > values[i - 1]:
            share = (level - values[i - 1]) / (values[i] - values[i - 1])
            return points[i - 1]["seconds"] + share * (points[i]["seconds"] - points[i - 1]["seconds"])
    return None


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A line for each run, and the ratios of times where both trainers ran a seed."""
    import numpy as np

    from podium.evaluation.statistics import share_interval

    lines = [
        f"| task | seed | trainer | held out, after | minutes to {LEVEL:g} | minutes in all | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    ratios: dict[tuple[str, int], dict[str, float]] = {}
    for each in results:
        last, reached = each["points"][-1], seconds_to(LEVEL, each)
        found = share_interval(np.array(last["right"], float).mean(axis=1), SAMPLES)
        if reached is not None:
            ratios.setdefault((each["task"], each["seed"]), {})[each["trainer"]] = reached
        lines.append(
            f"| {each['task']} | {each['seed']} | {TRAINERS[each['trainer']]} | "
            f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}] | "
            f"{'never' if reached is None else f'{reached / 60:.1f}'} | {last['seconds'] / 60:.1f} | "
            f"{each['peak_gib']:.1f} |"
        )
    both = {key: times["trl"] / times["podium"] for key, times in ratios.items() if len(times) == 2}
    told = [f"{ratio:.1f} ({task}, seed {seed})" for (task, seed), ratio in both.items()]
    return "\n".join([*lines, "", f"TRL's time to {LEVEL:g} over Podium's: {', '.join(told) or 'not measured'}.", ""])


def draw(results: Sequence[Mapping[str, Any]]) -> None:
    """The pictures, and the table in benchmarks/RESULTS.md."""
    chosen = [each for each in results if each["task"] == "quickstart"]
    for name, title in (("minutes", "minutes of training"), ("completions", "completions seen")):
        lines = [
            Line(
                name=TRAINERS[each["trainer"]],
                colour=COLOURS[each["trainer"] == "trl"],
                points=[
                    (p["seconds"] / 60 if name == "minutes" else p["step"] * each["completions_per_step"], value)
                    for p, value in zip(each["points"], means(each["points"]), strict=True)
                ],
            )
            for each in chosen
        ]
        longest = max(x for line in lines for x, _ in line.points)
        ticks = _ticks(longest)
        chart = line_chart(lines, x_ticks=ticks, y_ticks=[0, 0.2, 0.4, 0.6, 0.8, 1], x_title=title)
        (DOCS / "images" / f"learning-{name}.svg").write_text(chart, encoding="utf-8")
    write_between(BEGIN, table(results), END)


def write_between(begin: str, text: str, end: str) -> None:
    """Put a table between two marks of benchmarks/RESULTS.md."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    PAGE.write_text(before + begin + text + end + rest.partition(end)[2], encoding="utf-8")


def _ticks(longest: float) -> list[float]:
    """Six ticks at most, from 0 to above the longest.

    >>> _ticks(61.0), _ticks(5760)
    ([0, 20, 40, 60, 80], [0, 1000, 2000, 3000, 4000, 5000, 6000])
    """
    size = 10 ** (len(str(int(longest))) - 1)
    step = next(s for s in (size, 2 * size, 5 * size) if longest / s <= 6)
    return [step * i for i in range(-int(-longest // step) + 1)]


def main() -> None:
    """Run what is missing, one after the other, trainers in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--trainers", nargs="+", default=list(TRAINERS), choices=TRAINERS)
    parser.add_argument("--steps", type=int, default=None, help="fewer, to see that it works: nothing is kept")
    parser.add_argument("--rows", type=int, default=None, help="held-out questions, all of them unless given")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("TASK", "TRAINER", "SEED"), help="in this process, as JSON")
    options = parser.parse_args()
    if options.one:
        task, trainer, seed = options.one
        print(json.dumps(run(task, trainer, int(seed), options.steps, options.rows)))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for task in () if options.draw else options.tasks:
        for seed in options.seeds or SEEDS[task]:
            for trainer in options.trainers:
                if any((r["task"], r["trainer"], r["seed"]) == (task, trainer, seed) for r in results):
                    continue
                print(f"{task}, {TRAINERS[trainer]}, seed {seed}", flush=True)
                results.append(apart(__spec__.name, (task, trainer, seed), options))
                if options.steps is None and options.rows is None:
                    results.sort(key=lambda r: (list(TASKS).index(r["task"]), r["seed"], r["trainer"]))
                    RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(table(results))
    if options.steps is None and options.rows is None:
        draw(results)


def apart(module: str, key: Sequence[Any], options: argparse.Namespace, *flags: str) -> Any:
    """The result of one run in a process of its own; `key` is what the module's `--one` takes."""
    command = [sys.executable, "-m", module, "--one", *map(str, key), *flags]
    command += [f"--steps={options.steps}"] * bool(options.steps) + [f"--rows={options.rows}"] * bool(options.rows)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
