"""Which of reasoning-gym's tasks does the built-in model learn? All of them tried, the promising ones trained.

    python -m benchmarks.gym_tasks --survey            # what the model does on each before training
    python -m benchmarks.gym_tasks --train 8           # the most promising ones: 60 steps each
    python -m benchmarks.gym_tasks --train 2 --only aiw "products?max_digits=1"    # these, however promising
    make bench-gym                                     # both; what is in the results is not repeated

All with their generators' own settings, and some with smaller questions, which a model of this size can answer. A task
is promising where some completions are right before training, and most are not. Every prompt has two worked examples of
the task in front; scores are reasoning-gym's own, in a sandbox.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.learning import write_between
from podium.runs.run import Run

RESULTS = Path(__file__).parent / "results" / "gym-tasks.json"
BEGIN, END = "<!-- gym -->\n", "<!-- /gym -->"
QUESTIONS, SAMPLES, EXAMPLES = 12, 8, 2
LONGEST_ANSWER, LONGEST_PROMPT = 24, 400
"""Tokens: longer ones take the built-in model more than minutes."""
SYSTEM = "Write the answer alone inside tags, like this: <answer>...</answer>"
SEEDS = (1, 2, 3)
SMALLER = (
    "products?max_digits=1",
    "basic_arithmetic?max_terms=2&max_digits=1&allow_parentheses=false&allow_negation=false",
    "chain_sum?max_terms=2&min_digits=1&max_digits=1",
    "number_sorting?max_numbers=3&min_value=0&max_value=20&max_decimals=0",
    "word_sequence_reversal?max_words=3",
    "spell_backward?max_word_len=4",
    "word_sorting?max_words=3&max_word_length=6",
    "simple_equations?max_terms=2&max_value=10",
    "letter_counting?min_words=2&max_words=3",
    "leg_counting?min_animals=1&max_animals=1",
    "gcd?max_value=20",
    "lcm?max_value=10",
    "count_bits?max_n=15",
    "prime_factorization?max_value=50",
    "number_format?max_num_candidates=2",
    "base_conversion?max_base=3&max_value=20",
    "number_sequence?min_value=0&max_value=10&max_complexity=1",
    "fraction_simplification?max_value=20&max_factor=5",
    "family_relationships?max_family_size=4",
    "isomorphic_strings?max_string_length=3",
    "ransom_note?max_note_length=3&max_magazine_length=6",
    "letter_jumble?min_words=1&max_words=1&max_word_len=5",
    "caesar_cipher?min_words=1&max_words=1&max_rotation=1",
    "sentence_reordering?max_words_in_sentence=4",
)
"""Tasks with smaller questions than the generator's own, as the name of a dataset says them."""


def tagged(answer: Any) -> str:
    """A worked example's turn."""
    return f"<answer>{answer}</answer>"


def surveyed(names: Sequence[str]) -> list[dict[str, Any]]:
    """Each task's scores before training, or why it was left out."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from podium.models.builtin import resolve_model

    folder = resolve_model("builtin:smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for name in names:
        try:
            found.append({"task": name, **_survey(name, model, tokenizer)})
        except Exception as error:  # noqa: BLE001  a generator of another package: told, and the next one is tried
            found.append({"task": name, "left_out": f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"})
        print(json.dumps(found[-1]), flush=True)
    return found


def _survey(name: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    from podium.data import PromptBuilder
    from podium.data.query import parse_query
    from podium.engines.live.engine import LiveEngine
    from podium.models.loading import end_ids
    from podium.records import SamplingSettings
    from podium.rewards import gym_rows
    from podium.rewards.resolve import library_reward

    task, arguments = parse_query(name)
    rows = gym_rows(task, size=EXAMPLES + QUESTIONS, seed=1, **arguments)
    turns = [{"role": "system", "content": SYSTEM}]
    for row in rows[:EXAMPLES]:
        turns += [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": tagged(row["answer"])}]
    asked = [{**row, "prompt": [*turns, {"role": "user", "content": row["prompt"]}]} for row in rows[EXAMPLES:]]
    longest = max(len(tokenizer(str(row["answer"]))["input_ids"]) for row in rows)
    if longest > LONGEST_ANSWER:
        return {"left_out": f"answers of {longest} tokens"}
    builder = PromptBuilder(tokenizer=tokenizer, context_length=None)
    prompts = [builder(row, id=i, row_index=i) for i, row in enumerate(asked)]
    longest_prompt = max(len(prompt.token_ids) for prompt in prompts if prompt is not None)
    if longest_prompt > LONGEST_PROMPT:
        return {"left_out": f"prompts of {longest_prompt} tokens"}
    settings = SamplingSettings(
        num_completions=SAMPLES, max_tokens=longest + 12, end_ids=end_ids(model, tokenizer), temperature=1.0
    )
    score = library_reward("reasoning_gym", dataset=task)
    groups = LiveEngine(model, tokenizer).generate(prompts, settings)
    scores_PG = []
    for group, row in zip(groups, asked, strict=True):
        texts = [[{"role": "assistant", "content": each.text}] for each in group.completions]
        columns = {key: [row[key]] * len(texts) for key in ("answer", "metadata")}
        scores_PG.append(score(texts, **columns))
    given = np.nan_to_num(np.array(scores_PG, float))
    differ = float((np.ptp(given, axis=1) > 0).mean())
    return {"right": float((given >= 1).mean()), "differ": differ, "answer_tokens": longest}


def recipe_of(name: str, answer_tokens: int, steps: int) -> dict[str, Any]:
    """The recipe of a task: chain-sum's settings, two worked examples."""
    from podium.data.query import parse_query
    from podium.rewards import gym_rows

    task, arguments = parse_query(name)
    shown = gym_rows(task, size=EXAMPLES, seed=0, **arguments)
    separator = "&" if arguments else "?"
    return {
        "model": "builtin:smollm2-135m-instruct",
        "dataset": f"reasoning-gym:{name}{separator}size=600&seed=1",
        "system": SYSTEM,
        "examples": [{"prompt": row["prompt"], "answer": tagged(row["answer"])} for row in shown],
        "held_out": 0.2,
        "rewards": ["answer_format", {"name": "reasoning_gym", "args": {"dataset": task}, "weight": 2}],
        "accuracy": "reasoning_gym",
        "eval_rows": 60,
        "eval_samples": 4,
        "eval_temperature": 1.0,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": answer_tokens + 12,
        "temperature": 1.15,
        "learning_rate": 3e-5,
        "lr_scheduler_type": "linear",
        "adam_beta2": 0.99,
        "max_grad_norm": 1.0,
        "max_steps": steps,
        "save_strategy": "no",
        "report_to": "none",
    }


def trained(task: Mapping[str, Any], seed: int, steps: int) -> dict[str, Any]:
    """Held-out accuracy before and after, with intervals, and the verdict."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "run.yaml", Path(folder) / "run"
        file.write_text(yaml.safe_dump(recipe_of(task["task"], task["answer_tokens"], steps)))
        command = [sys.executable, "-m", "podium", "train", str(file), "--seed", str(seed), "--output_dir", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        if done.returncode:
            return {"seed": seed, "failed": (done.stderr.strip().splitlines() or ["no words"])[0][:200]}
        run = Run.load(out)
        before, after = (run.evaluations[moment]["accuracy"] for moment in ("before", "after"))
        return {"seed": seed, "before": before, "after": after, "verdict": run.evaluations["comparison"]["verdict"]}


def promising(tasks: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The tasks where right and wrong completions are most mixed, of those that are not mostly right already."""
    open_ones = [each for each in tasks if each.get("differ", 0) > 0 and 0 < each["right"] < 0.7]
    return sorted(open_ones, key=lambda each: (-each["right"] * (1 - each["right"]), each["task"]))[:count]


def table(results: Mapping[str, Any]) -> str:
    """The trained tasks, and what was left out or not promising, by name."""
    lines = ["| task | before | after, by seed | said |", "|---|---|---|---|"]
    for name, runs in results["trained"].items():
        shown = [run for run in runs if "after" in run]
        before = ", ".join(f"{run['before']['value']:.2f}" for run in shown[:1])
        after = ", ".join(
            f"{run['after']['value']:.2f} [{run['after']['low']:.2f}, {run['after']['high']:.2f}]" for run in shown
        )
        said = ", ".join(sorted({str(run.get("verdict", run.get("failed"))).split(":")[0] for run in runs}))
        lines.append(f"| `{name}` | {before} | {after} | {said} |")
    known = {each["task"]: each for each in results["tasks"]}
    flat = [n for n, each in known.items() if "left_out" not in each and n not in results["trained"]]
    out = [f"{n} ({each['left_out']})" for n, each in known.items() if "left_out" in each]
    lines += ["", f"Of {len(known)} tasks, surveyed and not trained: {', '.join(flat) or 'none'}.", ""]
    return "\n".join([*lines, f"Left out: {', '.join(out) or 'none'}.", ""])


def main() -> None:
    """Survey, train, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--survey", action="store_true")
    parser.add_argument("--only", nargs="+", default=None, metavar="TASK")
    parser.add_argument("--train", type=int, default=0, metavar="COUNT")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"tasks": [], "trained": {}}
    if options.survey:
        from reasoning_gym.factory import DATASETS

        done = {each["task"] for each in results["tasks"]}
        names = [name for name in options.only or (*sorted(DATASETS), *SMALLER) if name not in done]
        for start in range(0, len(names), 10):
            results["tasks"] += surveyed(names[start : start + 10])
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for seed in options.seeds if options.train else ():
        named = [each for each in results["tasks"] if each["task"] in (options.only or ())]
        for task in named or promising(results["tasks"], options.train):
            runs = results["trained"].setdefault(task["task"], [])
            if all(run["seed"] != seed for run in runs):
                runs.append(trained(task, seed, options.steps))
                print(task["task"], json.dumps(runs[-1]), flush=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_between(BEGIN, table(results), END)
    print(table(results))


if __name__ == "__main__":
    main()
