"""False alarms and misses of the health monitors, on real runs of the built-in model.

    python -m benchmarks.health                       # all runs, then the table (half an hour on two cores)
    python -m benchmarks.health healthy-1 leak        # some of them
    python -m benchmarks.health --replay              # the table alone, from the folders of earlier runs
    python -m benchmarks.health --thresholds          # the detectors with their thresholds; no run

Each run is GRPO on `builtin:additions`. Healthy runs are 16 steps of the quickstart's shape (8 prompts x 8 completions
of 16 tokens) and differ in seed, loss, temperature and in whether an adapter is trained; the table shows how far
their answers became right. Planted failures are 8 steps of 4 prompts x 8, change one thing each, and name the code that
has to come first in `podium doctor`. The limits of the detectors were set on runs of other seeds (1 to 8).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results" / "health.json"
STEPS = 8
"""Of a planted failure; healthy runs go on for longer, as a false alarm needs time."""
HEALTHY_STEPS = 16


# ---- rewards that are wrong ----


def constant(completions: Sequence[Any], **_: Any) -> list[float]:
    """The same for everything."""
    return [1.0] * len(completions)


def valid_json(completions: Sequence[Any], **_: Any) -> list[float]:
    """Something that the model never writes."""
    return [float(text(each).startswith('{"sum":')) for each in completions]


def tag_format(completions: Sequence[Any], **_: Any) -> list[float]:
    """A tag that no prompt asks for."""
    return [float("<anwser>" in text(each)) for each in completions]


def thoroughness(completions: Sequence[Any], **_: Any) -> list[float]:
    """More text, more reward."""
    return [len(text(each)) / 100 for each in completions]


def answer_match(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """Right answers lose."""
    return [-float(gold in text(each)) for each, gold in zip(completions, answer, strict=True)]


def slow_style(completions: Sequence[Any], **_: Any) -> list[float]:
    """Harmless, and slow."""
    time.sleep(0.25 * len(completions))
    return [0.1 * (len(set(text(each))) % 5) for each in completions]


KEPT: list[np.ndarray] = []


def remembering(completions: Sequence[Any], **_: Any) -> list[float]:
    """Keeps 64 MB of each call."""
    KEPT.append(np.ones(8_000_000))
    return [0.1 * (len(set(text(each))) % 5) for each in completions]


def text(completion: Any) -> str:
    """Of a completion."""
    return completion if isinstance(completion, str) else completion[0]["content"]


# ---- runs ----


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run."""

    first: str | None = None
    """The code that has to come first; None: a healthy run."""
    rewards: Callable[[], list[Any]] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    lora: bool = False
    rows: Callable[[list[Any]], list[Any]] = list
    sabotage: Callable[[Any], None] | None = None
    """What is done to the trainer."""
    steps: int | None = None


def nan_gradient(trainer: Any) -> None:
    """From the fourth step on, as of an overflow."""
    parameter = next(p for p in trainer.model.parameters() if p.requires_grad)
    parameter.register_hook(lambda grad: grad * math.nan if trainer.state.global_step >= 3 else grad)


def stale_optimizer(trainer: Any) -> None:
    """One that was made for other parameters: before the adapter was added, say."""
    copies = [p.detach().clone().requires_grad_() for p in trainer.model.parameters() if p.requires_grad]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    trainer.optimizer = torch.optim.AdamW(copies, lr=trainer.args.learning_rate)


def usual() -> list[Any]:
    """The quickstart's."""
    from podium.rewards import LIBRARY

    return [LIBRARY["answer_format"], LIBRARY["answer_correct"]]


RUNS: Mapping[str, Planned] = {
    **{f"healthy-{seed}": Planned(settings={"seed": seed}) for seed in (11, 12, 13)},
    **{
        f"healthy-lora-{seed}": Planned(settings={"seed": seed, "learning_rate": 3e-4}, lora=True)
        for seed in (11, 12, 13)
    },
    "healthy-grpo": Planned(settings={"seed": 15, "loss_type": "grpo", "temperature": 1.2}),
    "healthy-kl": Planned(settings={"seed": 16, "beta": 0.04, "learning_rate": 1e-5}),
    "healthy-dr-grpo": Planned(settings={"seed": 17, "loss_type": "dr_grpo", "scale_rewards": "none"}),
    "healthy-two-iterations": Planned(settings={"seed": 18, "num_iterations": 2}),
    "constant reward": Planned(first="M102", rewards=lambda: [constant]),
    "reward that never fires": Planned(first="M103", rewards=lambda: [valid_json]),
    "learning rate x100": Planned(first="M136", settings={"learning_rate": 3e-3}),
    "learning rate x1/1000": Planned(first="M137", settings={"learning_rate": 3e-8}),
    "max_completion_length too short": Planned(first="M141", settings={"max_completion_length": 4}),
    "temperature 0.05": Planned(first="M123", settings={"temperature": 0.05}),
    "KL unbounded": Planned(first="M132", settings={"beta": 1e-4, "learning_rate": 1e-3}),
    "format reward misspelt": Planned(first="M146", rewards=lambda: [tag_format, usual()[1]]),
    "length-hackable reward": Planned(
        first="M152", rewards=lambda: [thoroughness], settings={"max_completion_length": 48}
    ),
    "NaN gradient": Planned(first="M131", sabotage=nan_gradient),
    "adapter frozen": Planned(first="M138", lora=True, settings={"learning_rate": 3e-4}, sabotage=stale_optimizer),
    "one prompt repeated": Planned(first="M109", rows=lambda rows: [rows[0]] * 64),
    "reward with flipped sign": Planned(first="M107", rewards=lambda: [usual()[0], answer_match]),
    "duplicate completions": Planned(first="M122", settings={"top_k": 1}),
    "sleeping reward": Planned(first="M163", rewards=lambda: [*usual(), slow_style]),
    "memory leak": Planned(first="M161", rewards=lambda: [*usual(), remembering], steps=20),
}


def run(name: str, folder: Path) -> None:
    """One run, recorded in its own folder."""
    from datasets import Dataset
    from peft import LoraConfig

    from podium import GRPOConfig, GRPOTrainer
    from podium.data.tasks import additions
    from podium.errors import PodiumError

    planned = RUNS[name]
    KEPT.clear()
    settings = {
        "per_device_train_batch_size": 32 if planned.first else 64,
        "num_generations": 8,
        "max_completion_length": 16,
        "temperature": 1.3 if planned.first else 1.15,
        "loss_type": "dapo",
        "learning_rate": 3e-5,
        "lr_scheduler_type": "constant" if planned.first else "linear",
        "adam_beta2": 0.99,
        "max_steps": planned.steps or (STEPS if planned.first else HEALTHY_STEPS),
        "seed": 14,
        # It would stop some of the planted failures before their first step.
        "prove_first_batch": planned.first is None,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **planned.settings,
    }
    trainer = GRPOTrainer(
        model="builtin:smollm2-135m-instruct",
        reward_funcs=(planned.rewards or usual)(),
        args=GRPOConfig(str(folder), **settings),
        train_dataset=Dataset.from_list(planned.rows(additions()[0])),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if planned.lora else None,
    )
    if planned.sabotage is not None:
        planned.sabotage(trainer)
    try:
        trainer.train()
    except (PodiumError, RuntimeError, ValueError) as error:  # a ruined model may not be able to sample
        print(f"{name}: training ended with {type(error).__name__}: {error}")


# ---- the table ----


def verdict(name: str, folder: Path) -> dict[str, Any]:
    """What `podium doctor` says about a run, against what it should say."""
    from podium.runs.doctor import examine

    report = examine(folder)
    issues = report.issues
    expected = RUNS[name].first
    first = issues[0].finding.code if issues else None
    found = next((c for c in issues if c.finding.code == expected), None)
    levels = [issue.finding.severity for issue in issues]
    seconds = [each.values for each in report.history[2:]]
    overhead = [row["time/monitor_seconds"] / row["step_time"] for row in seconds if row.get("step_time")]
    return {
        "run": name,
        "expected": expected,
        "first": first,
        "found_at_step": None if found is None else found.first_step,
        "steps": len(report.history),
        "right_answers": [_right_answers(report.history[:3]), _right_answers(report.history[-3:])],
        "errors": levels.count("error"),
        "warnings": levels.count("warning"),
        "said": [f"{c.finding.severity} {c.finding.code} (step {c.first_step})" for c in issues],
        "overhead": round(float(np.median(overhead)), 4) if overhead else None,
        "right": first == expected if expected else levels.count("error") == 0 and levels.count("warning") <= 1,
    }


def _right_answers(steps: Sequence[Any]) -> float | None:
    """Share of completions over some steps; None: another reward was given."""
    name = "rewards/answer_correct/mean"
    values = [each.values[name] for each in steps if name in each.values]
    return round(float(np.mean(values)), 2) if values else None


def table(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """What `benchmarks/RESULTS.md` shows of the results."""
    healthy = [each for each in verdicts if each["expected"] is None]
    planted = [each for each in verdicts if each["expected"] is not None]
    errors, warnings = (sum(each[level] for each in healthy) for level in ("errors", "warnings"))
    most = max(each["warnings"] for each in healthy)
    first = sum(each["first"] == each["expected"] for each in planted)
    share = float(np.median([each["overhead"] for each in verdicts if each["overhead"] is not None]))
    steps = min(each["steps"] for each in healthy)
    lines = [
        f"{len(healthy)} healthy runs of {steps} steps: {errors} errors, {warnings} warnings, at most {most} a run.",
        f"{len(planted)} planted failures: {first} named first. Recording and monitors: {100 * share:.1f} % of a step.",
        "",
        "| run | expected | first | at step | right answers, first and last 3 steps | all that was said |",
        "|---|---|---|---|---|---|",
    ]
    for each in verdicts:
        right = "" if None in each["right_answers"] else "{} to {}".format(*each["right_answers"])
        cells = (each["expected"] or "nothing", each["first"] or "nothing", each["found_at_step"] or "", right)
        lines.append(f"| {each['run']} | {' | '.join(map(str, cells))} | {'; '.join(each['said'])} |")
    return "\n".join(lines)


def thresholds() -> str:
    """What `benchmarks/RESULTS.md` shows of the table of detectors."""
    from podium.runs.monitors import DETECTORS

    rows = [
        f"| `{row.code}` | {row.measured} | {row.reported} | {row.severity} | {row.set_on} |"
        for row in DETECTORS.values()
    ]
    return "\n".join(["| code | measured | reported | severity | set on |", "|---|---|---|---|---|", *rows])


def main() -> None:
    """Runs, table, JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--thresholds", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/health"))
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.thresholds:
        print(thresholds())
        return
    folders = {name: given.folder / name.replace(" ", "-").replace("/", "-") for name in given.names or RUNS}
    if not given.replay:
        for name, folder in folders.items():
            print(f"--- {name}", flush=True)
            run(name, folder)
    verdicts = [verdict(name, folder) for name, folder in folders.items() if (folder / "metrics.jsonl").is_file()]
    for each in verdicts:
        print(f"{'ok  ' if each['right'] else 'BAD '} {each['run']:34} {each['expected'] or '-':6} {each['said']}")
    if set(given.names or RUNS) == set(RUNS):
        given.json.write_text(json.dumps(verdicts, indent=1) + "\n")
        print(table(verdicts))


if __name__ == "__main__":
    main()
