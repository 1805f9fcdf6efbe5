"""A chain of look-ups by a tool, at 1 to 8 turns, Podium against TRL: `make bench-agents`.

    python -m benchmarks.agents
    python -m benchmarks.agents --turns 1 2 --drawn 4 --prompts 1 --generations 2    # to see that it works

One optimizer step at each number of turns, first with a tool that answers at once (A1), then with one that takes 100 ms
(A2); both trainers one after the other, in processes of their own. Every turn draws exactly `--drawn` tokens, every
turn but the last is parsed as one call, whatever was drawn, so that both trainers do the same. TRL samples with
`generate`, which computes the whole conversation again for every turn; with vLLM's prefix cache it would not.

Writes a JSON and a plot of seconds against turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bench import RESULTS, hardware, save
from benchmarks.workloads import Workload

TURNS = (1, 2, 4, 8)
SLEEPS = {"A1": 0.0, "A2": 0.1}
"""Seconds that a call takes."""
SETTINGS = (("podium", "auto"), ("trl", "float32"), ("trl", "bfloat16"))
SLACK = 48
"""Tokens that a reply of the tool with its headers may take: more than it does."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One worker's task."""

    trainer: str
    precision: str
    turns: int
    sleep: float
    drawn: int
    prompts: int
    generations: int
    prompt_tokens: int

    def workload(self) -> Workload:
        """As the benchmarks of single turns have it."""
        return Workload(
            name=f"{self.turns} turns",
            what="a chain of look-ups",
            prompts=self.prompts,
            generations=self.generations,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.turns * self.drawn + (self.turns - 1) * SLACK,
            length=lambda p, g: self.drawn,
            reward=lambda p, g: float(g % 2),
            warm_up=1 if self.trainer == "podium" else 0,
        )


# ---- in a worker ----


def measure(point: Point, threads: int) -> dict[str, Any]:
    """Seconds of sampling and of training of one step, and peak memory: run in a fresh process by `main`."""
    import torch

    from benchmarks.worker import load, peak_resident_gib
    from podium.agents.chat import set_tool_template

    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)
    model, tokenizer = load("builtin", "cpu")
    set_tool_template(tokenizer)
    look_up = LookUp(point.sleep)
    clock, turns = RUNNERS[point.trainer](point, model, tokenizer, look_up)
    counted = clock.steps[-1]
    expected = {point.turns: point.prompts * point.generations}
    if turns != expected:
        raise SystemExit(f"completions by turns: {turns}, not {expected}")
    return {
        **dataclasses.asdict(point),
        "seconds": counted["step"],
        "generate_seconds": counted["generate"],
        "train_seconds": counted["step"] - counted["generate"],
        "calls": look_up.calls // len(clock.steps),
        "peak_memory_gib": peak_resident_gib(),
    }


class LookUp:
    """A tool that takes `sleep` seconds."""

    def __init__(self, sleep: float) -> None:
        self.sleep = sleep
        self.calls = 0

    def tool(self) -> Any:
        """The function that trainers are given."""

        def look_up(key: int) -> str:
            """Look up the value that is stored under a key.

            Args:
                key: the key, a number from 0 to 999.
            """
            self.calls += 1
            time.sleep(self.sleep)
            return f"The value that is stored under key {key:03d} is {key * 7 % 1000:03d}."

        return look_up


class ForcedCalls:
    """The message of a turn: a call in every turn but the last, whatever was drawn."""

    def __init__(self, tokenizer: Any, turns: int) -> None:
        self.end = tokenizer.eos_token_id
        self.turns = turns
        self.first: int | None = None
        """End tokens in a prompt."""

    def message(self, token_ids: Sequence[int], prefix: Sequence[int]) -> dict[str, Any]:
        """`prefix`: everything before the turn; each turn and each reply in it has one end token."""
        ends = list(prefix).count(self.end)
        self.first = ends if self.first is None else min(self.first, ends)
        if (ends - self.first) // 2 + 1 >= self.turns:
            return {"role": "assistant", "content": "The chain ends here."}
        call = {"name": "look_up", "arguments": {"key": token_ids[0] % 1000}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def rows_of(tokenizer: Any, point: Point, tool: Any) -> Any:
    """Different questions; with the tool's schema each prompt has about `prompt_tokens` tokens."""
    from datasets import Dataset

    def prompt(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    rendered = tokenizer.apply_chat_template(prompt(""), tools=[tool], add_generation_prompt=True)
    room = max(8, point.prompt_tokens - len(rendered["input_ids"]))
    texts = (f"Chain {i}: " + "which value is stored under the key that is stored there? " * 60 for i in range(64))
    return Dataset.from_list([{"prompt": prompt(tokenizer.decode(tokenizer(x)["input_ids"][:room]))} for x in texts])


def counting(reward: Callable[..., list[float]]) -> tuple[Callable[..., list[float]], dict[int, int]]:
    """The reward, and a dict that it fills at each call: completions by their number of messages of the assistant."""
    seen: dict[int, int] = {}

    def counted(completions: list[Any], **kwargs: Any) -> list[float]:
        seen.update(Counter(sum(m["role"] == "assistant" for m in messages) for messages in completions))
        return reward(completions, **kwargs)

    return counted, seen


def run_trl(point: Point, model: Any, tokenizer: Any, look_up: LookUp) -> tuple[Any, dict[int, int]]:
    """TRL's trainer with transformers' `generate`."""
    import trl
    from trl.trainer import grpo_trainer

    from benchmarks.worker import Clock, ForcedLengths, StepEnds, reward_function

    workload, clock, forced = point.workload(), Clock(), ForcedCalls(tokenizer, point.turns)
    rewarded, seen = counting(reward_function(workload))
    args = trl.GRPOConfig(
        tempfile.mkdtemp(),
        **workload.config(),
        max_steps=workload.warm_up + 1,
        bf16=point.precision == "bfloat16",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    tool = look_up.tool()
    trainer = trl.GRPOTrainer(
        model,
        rewarded,
        args,
        rows_of(tokenizer, point, tool),
        processing_class=tokenizer,
        tools=[tool],
        callbacks=[StepEnds(clock)],
    )
    generate = trainer.model.generate
    trainer.model.generate = lambda *a, **k: generate(
        *a, **k, logits_processor=[ForcedLengths(workload, tokenizer.eos_token_id, k["input_ids"].shape[1])]
    )
    grpo_trainer.parse_response = lambda tokenizer, ids, prefix=None, tools=None: forced.message(ids, prefix)
    clock.wrap(trainer, "_generate", "generate")
    trainer.train()
    return clock, seen


def run_podium(point: Point, model: Any, tokenizer: Any, look_up: LookUp) -> tuple[Any, dict[int, int]]:
    """Podium's trainer with its default engine."""
    from benchmarks.worker import Clock, StepEnds, reward_function
    from podium import GRPOConfig, GRPOTrainer
    from podium.agents.chat import ChatFormat
    from podium.engines.base import RolloutEngine

    workload, clock, forced = point.workload(), Clock(), ForcedCalls(tokenizer, point.turns)
    rewarded, seen = counting(reward_function(workload))
    args = GRPOConfig(
        tempfile.mkdtemp(),
        **workload.config(),
        max_steps=workload.warm_up + 1,
        product_precision=point.precision,
        prove_first_batch=False,  # it takes exact lengths for a fault: forced tokens are not drawn
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    tool = look_up.tool()
    trainer = GRPOTrainer(
        model,
        rewarded,
        args,
        rows_of(tokenizer, point, tool),
        processing_class=tokenizer,
        tools=[tool],
        callbacks=[StepEnds(clock)],
    )
    engine = trainer.parts.engine

    class Forced(RolloutEngine):
        """The engine with the benchmark's lengths."""

        tokenizer = engine.tokenizer

        def sample(self, prompts: Any, settings: Any) -> Any:
            with clock.phase("generate"):
                return engine.sample(prompts, dataclasses.replace(settings, lengths=workload.length))

        def converse(self, prompts: Any, settings: Any, episodes: Any) -> Any:
            with clock.phase("generate"):
                return engine.converse(prompts, dataclasses.replace(settings, lengths=workload.length), episodes)

    ChatFormat.parse = lambda self, ids, *, prefix, tools=(): forced.message(ids, prefix)  # type: ignore[method-assign]
    trainer.parts = dataclasses.replace(trainer.parts, engine=Forced())
    trainer.train()
    return clock, seen


RUNNERS = {"podium": run_podium, "trl": run_trl}


# ---- all of them ----


def run(point: Point, threads: int) -> dict[str, Any]:
    """One worker's JSON."""
    command = [sys.executable, "-m", "benchmarks.agents", "--threads", str(threads)]
    command += ["--point", json.dumps(dataclasses.asdict(point))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parent.parent)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return {**json.loads(lines[-1]), "load_before": os.getloadavg()[0]}


def fastest(points: Sequence[dict[str, Any]], trainer: str, turns: int, sleep: float) -> dict[str, Any]:
    """The better of a trainer's precisions."""
    mine = [p for p in points if (p["trainer"], p["turns"], p["sleep"]) == (trainer, turns, sleep)]
    return min(mine, key=lambda p: p["seconds"])


def compared(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each number of turns and each tool: TRL's seconds over Podium's, and what slow tools add.

    `tool_times_a_turn`: what the round grows by where tools sleep, a turn that calls one, in the time of one call.
    """
    rows = []
    for sleep in sorted({p["sleep"] for p in points}):
        for turns in sorted({p["turns"] for p in points}):
            ours, theirs = (fastest(points, trainer, turns, sleep) for trainer in ("podium", "trl"))
            row = {"turns": turns, "sleep": sleep, "ratio": theirs["seconds"] / ours["seconds"]}
            row["generate_ratio"] = theirs["generate_seconds"] / ours["generate_seconds"]
            if sleep and turns > 1:
                growth = ours["generate_seconds"] - fastest(points, "podium", turns, 0.0)["generate_seconds"]
                row["tool_times_a_turn"] = growth / (sleep * (turns - 1))
            rows.append(row)
    return rows


def table(points: Sequence[dict[str, Any]]) -> Table:
    """A row for each worker."""
    caption = "ratio: TRL's better precision over Podium, of the whole step and of sampling alone"
    out = Table(title="A chain of look-ups: seconds of one step", caption=caption, padding=(0, 0))
    for column in ("tool", "turns", "trainer", "sample", "train", "step", "GiB", "ratio", "sampling"):
        out.add_column(column, justify="left" if column in ("tool", "trainer") else "right")
    ratios = {(row["turns"], row["sleep"]): row for row in compared(points)}
    for point in points:
        ratio = ratios[point["turns"], point["sleep"]] if point["trainer"] == "podium" else None
        out.add_row(
            f"{1000 * point['sleep']:.0f} ms",
            str(point["turns"]),
            f"{point['trainer']} {point['precision']}",
            *(f"{point[key]:.2f}" for key in ("generate_seconds", "train_seconds", "seconds", "peak_memory_gib")),
            f"{ratio['ratio']:.1f} x" if ratio else "",
            f"{ratio['generate_ratio']:.1f} x" if ratio else "",
        )
    return out


def plot(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds against turns: the whole step and the sampling, one line for each trainer and tool."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=("whole step", "sampling"))
    turns = sorted({p["turns"] for p in points})
    for column, key in ((1, "seconds"), (2, "generate_seconds")):
        for trainer, color in (("trl", "#b45309"), ("podium", "#2563eb")):
            for sleep, dash in zip(sorted({p["sleep"] for p in points}), ("solid", "dot"), strict=False):
                y = [fastest(points, trainer, count, sleep)[key] for count in turns]
                line = go.Scatter(
                    x=turns,
                    y=y,
                    mode="lines+markers",
                    name=f"{trainer}, tool takes {1000 * sleep:.0f} ms",
                    line={"color": color, "dash": dash},
                    showlegend=column == 1,
                )
                figure.add_trace(line, 1, column)
        figure.update_xaxes(title_text="turns", tickvals=turns, row=1, col=column)
        figure.update_yaxes(title_text="seconds", rangemode="tozero", row=1, col=column)
    figure.update_layout(title=f"Seconds against turns ({hardware()})", template="plotly_white", height=480)
    figure.write_html(path, include_plotlyjs=True)


def main() -> None:
    """Every point in a process of its own, or (with --point) one of them here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    parser.add_argument("--tools", nargs="+", choices=SLEEPS, default=list(SLEEPS))
    parser.add_argument("--drawn", type=int, default=24, help="tokens drawn in a turn")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt_tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(Point(**options.point), options.threads)), flush=True)
        return
    shape = {name: getattr(options, name) for name in ("drawn", "prompts", "generations", "prompt_tokens")}
    points = []
    for name in options.tools:
        for turns in options.turns:
            for trainer, precision in SETTINGS:
                point = Point(trainer=trainer, precision=precision, turns=turns, sleep=SLEEPS[name], **shape)
                points.append(run(point, options.threads))
                print(f"{name} {turns} turns, {trainer} {precision}: {points[-1]['seconds']:.2f} s", flush=True)
    Console().print(table(points))
    print("written to", save("agents", {"points": points, "compared": compared(points)}))
    plot(points, RESULTS / "agents.html")


if __name__ == "__main__":
    main()
