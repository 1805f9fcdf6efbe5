"""What helps a task along: variants of one recipe with Podium, seed by seed: `make bench-practice`.

    python -m benchmarks.practice --variants "teacher alone" --seeds 1   # what is in the results is not repeated
    python -m benchmarks.practice --task two-digit --steps 2 --rows 4      # to see that it works: nothing is kept
    python -m benchmarks.practice --draw                                   # the table alone

Held-out accuracy is measured as in `benchmarks.learning`: a plain copy of the weights answers the held-out questions
every few steps. Compared are completions, not minutes: runs may share the machine. The teacher of a distillation is the
model that the recipe itself makes with seed 1; it saw the rows that the student sees.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import learning
from benchmarks.bench import hardware
from benchmarks.learning import Curve, means, questions, seconds_to

RESULTS = Path(__file__).parent / "results" / "practice.json"
BEGIN, END = "<!-- practice -->\n", "<!-- /practice -->"
TEACHERS = Path(__file__).parents[1] / "build" / "teachers"

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "teacher alone": {"teacher_model": "TEACHER", "reward_weights": [0.0, 0.0]},
    "teacher beside rewards": {"teacher_model": "TEACHER", "teacher_coef": 0.5},
    "itself, with the answer": {"teacher_model": "policy", "reward_weights": [0.0, 0.0]},
    "itself, with examples": {"teacher_model": "policy", "reward_weights": [0.0, 0.0]},
    "itself, with examples, beside rewards": {"teacher_model": "policy", "teacher_coef": 0.5},
    "rloo": {"advantage_estimator": "rloo"},
    "maxrl": {"advantage_estimator": "maxrl"},
    "constant rate": {"lr_scheduler_type": "constant"},
    "rate 5e-5": {"learning_rate": 5e-5},
    "two steps a round": {"per_device_train_batch_size": 64, "steps_per_generation": 2, "max_steps": 90},
    "half the batch, twice the steps": {"per_device_train_batch_size": 64, "max_steps": 90},
}
"""Settings beside the recipe's."""
SEEDS = (1, 2, 3)
LEVELS = (0.6, 0.8)


EXAMPLES = 8


def told(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], variant: str) -> list[dict[str, str]]:
    """What the policy sees as its own teacher: the answer in the prompt, or worked examples of other rows before it."""
    *before, last = row["prompt"]
    if "examples" not in variant:
        return [*before, {**last, "content": f"{last['content']} The answer is {row['answer']}."}]
    shown = [each for each in rows[: EXAMPLES + 1] if each is not row][:EXAMPLES]
    turns = [
        turn
        for each in shown
        for turn in (each["prompt"][-1], {"role": "assistant", "content": f"<answer>{each['answer']}</answer>"})
    ]
    return [*before, *turns, last]


def teacher_of(task: str) -> str:
    """The model that a recipe makes with seed 1, trained where it is not there yet."""
    folder = TEACHERS / task
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "podium", "train", task, "--seed", "1", "--eval_rows", "0"]
        subprocess.run([*command, "--output_dir", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return str(folder)


def run(task: str, variant: str, seed: int, steps: int | None, rows: int | None, every: int) -> dict[str, Any]:
    """One training, in this process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import podium
    from podium.models.builtin import resolve_model
    from podium.recipe import load

    recipe = load(task, {"seed": seed, **({"max_steps": steps} if steps else {})})
    settings = {**recipe.config, **VARIANTS[variant], "use_cpu": True, "disable_tqdm": True}
    if settings.get("teacher_model") == "TEACHER":
        settings["teacher_model"] = teacher_of(task)
    folder = resolve_model(recipe.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train, held_out = recipe.load_rows()
    made = [dict(row) for row in train]
    if settings.get("teacher_model") == "policy":
        made = [{**row, "teacher_prompt": told(row, made, variant)} for row in made]
    policy, probe = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    asked = list(held_out)[: rows or recipe.config.get("eval_rows")]
    curve = Curve(probe, questions(recipe, tokenizer, asked), every=every)
    with tempfile.TemporaryDirectory() as out:
        known = podium.GRPOConfig.__dataclass_fields__
        args = podium.GRPOConfig(**{name: x for name, x in {**settings, "output_dir": out}.items() if name in known})
        trainer = podium.GRPOTrainer(
            policy,
            [spec.function for spec in recipe.rewards],
            args,
            Dataset.from_list(made),
            processing_class=tokenizer,
            callbacks=[curve.callback],
        )
        begin = time.perf_counter()
        trainer.train()
    return {
        "task": task,
        "variant": variant,
        "seed": seed,
        "completions_per_step": args.generation_batch_size // (args.steps_per_generation or 1),
        "points": curve.points,
        "wall_seconds": time.perf_counter() - begin,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
    }


# ---- results ----


def completions_to(level: float, result: Mapping[str, Any]) -> float | None:
    """Completions seen until an accuracy, on the straight line between evaluations; None: never reached."""
    by_step = [{**point, "seconds": point["step"]} for point in result["points"]]
    steps = seconds_to(level, {"points": by_step})
    return None if steps is None else steps * result["completions_per_step"]


def with_plain(results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The results, and before them the runs of `benchmarks.learning` with the recipe as it is."""
    plain = json.loads(learning.RESULTS.read_text(encoding="utf-8"))
    return [
        *({**r, "variant": "as it is"} for r in plain if r["trainer"] == "podium" and r["task"] == "quickstart"),
        *results,
    ]


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A line for each variant of a task, over its seeds."""
    lines = [
        "| task | variant | seeds | completions to 0.6 | to 0.8 | held out, after |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in results:
        groups.setdefault((each["task"], each["variant"]), []).append(each)
    for (task, variant), runs in groups.items():
        cells = [_all(runs, lambda r, level=level: completions_to(level, r), "{:,.0f}") for level in LEVELS]
        cells.append(_all(runs, lambda r: means(r["points"])[-1], "{:.2f}"))
        lines.append(f"| `{task}` | {variant} | {', '.join(str(r['seed']) for r in runs)} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _all(runs: Sequence[Mapping[str, Any]], of: Callable[..., float | None], form: str) -> str:
    """The values of the seeds, with their mean where all have one."""
    values = [of(run) for run in runs]
    shown = ", ".join("never" if value is None else form.format(value) for value in values)
    known = [value for value in values if value is not None]
    return f"{shown} (mean {form.format(statistics.mean(known))})" if len(known) == len(values) > 1 else shown


def main() -> None:
    """Run what is missing, one after the other; draw the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="quickstart")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=None, help="fewer, to see that it works: nothing is kept")
    parser.add_argument("--rows", type=int, default=None, help="held-out questions, the recipe's unless given")
    parser.add_argument("--every", type=int, default=5, help="optimizer steps between two evaluations")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("TASK", "VARIANT", "SEED"), help="in this process, as JSON")
    options = parser.parse_args()
    if options.one:
        task, variant, seed = options.one
        print(json.dumps(run(task, variant, int(seed), options.steps, options.rows, options.every)))
        return
    results = read()
    kept = options.steps is None and options.rows is None
    for variant in () if options.draw else options.variants:
        for seed in options.seeds:
            key = (options.task, variant, seed)
            if any((r["task"], r["variant"], r["seed"]) == key for r in results):
                continue
            print(", ".join(map(str, key)), flush=True)
            made = learning.apart(__spec__.name, key, options, f"--every={options.every}")
            results = [*(read() if kept else results), made]  # another process may have added some
            if kept:
                order = list(VARIANTS)
                results.sort(key=lambda r: (r["task"], order.index(r["variant"]), r["seed"]))
                RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")
    shown = table(with_plain(results))
    print(shown)
    if kept:
        learning.write_between(BEGIN, shown, END)


def read() -> list[dict[str, Any]]:
    """What has been run so far."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []


if __name__ == "__main__":
    main()
