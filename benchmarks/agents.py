"""A chain of look-ups by a tool, at 1 to 8 turns, Podium against TRL: `make bench-agents`.

    python -m benchmarks.agents
    python -m benchmarks.agents --turns 1 2 --drawn 4 --prompts 1 --generations 2    # to see that it works

The task and the prompts are those of the recipe `lookup`, with its two worked examples. One optimizer step at each
number of turns, both trainers one after the other, in processes of their own, with a tool that answers at once (A1).
Before that Podium alone with a tool that answers at once and with one that takes 100 ms (A2), and turns of four tokens,
so that the waiting is not lost in the noise of the rest. Every turn draws exactly `--drawn` tokens, as many as a call
has, and every turn but the last is parsed as one call, whatever was drawn, so that both trainers do the same. TRL
samples with `generate`, which computes the whole conversation again for every turn; with vLLM's prefix cache it would
not. It gets the completions of a step in micro-batches of one group: activations of all of them would not fit into the
memory of a small machine.

TRL is measured in float32 and bfloat16 at the first number of turns, and in the faster of them at the others. With all
numbers of turns it writes a JSON and the picture `docs/images/turns.svg`, seconds against turns.
"""

from __future__ import annotations

import argparse
import contextlib
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
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.bench import save
from benchmarks.charts import COLOURS, Line, line_chart
from benchmarks.workloads import Workload

TURNS = (1, 2, 4, 8)
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "turns.svg"
SLEEP = 0.1
"""Seconds that a call of the slow tool takes."""
SHORT_TURN = 4
"""Tokens of a turn where the slow tool is measured."""
TRL_PRECISIONS = ("float32", "bfloat16")
SLACK = 32
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

    def workload(self) -> Workload:
        """As the benchmarks of single turns have it."""
        return Workload(
            name=f"{self.turns} turns",
            what="a chain of look-ups",
            prompts=self.prompts,
            generations=self.generations,
            prompt_tokens=0,  # those of the recipe
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

        def look_up(code: str) -> str:
            """Look up a code in the table.

            Args:
                code: The code to look up.

            Returns:
                The code that stands beside it, and whether it is the last one.
            """
            self.calls += 1
            time.sleep(self.sleep)
            return str(1000 + 7919 * int(code) % 9000)

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
            return {"role": "assistant", "content": "6052"}
        call = {"name": "look_up", "arguments": {"code": str(1000 + token_ids[0] % 9000)}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def rows_of(point: Point) -> Any:
    """Questions of the recipe behind its worked examples, for a chain as long as the turns allow."""
    from datasets import Dataset

    from podium.data.columns import Columns
    from podium.data.tasks import chains

    recipe = yaml.safe_load((resources.files("podium.recipe") / "recipes" / "lookup.yaml").read_text())
    columns, (questions, _) = Columns(examples=tuple(recipe["examples"])), chains(max(1, point.turns - 1))
    return Dataset.from_list([{"prompt": columns(row)["prompt"]} for row in questions])


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
        **workload.config() | {"per_device_train_batch_size": point.generations},
        gradient_accumulation_steps=point.prompts,
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
        rows_of(point),
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
        rows_of(point),
        processing_class=tokenizer,
        tools=[tool],
        callbacks=[StepEnds(clock)],
    )
    engine = trainer.run.step.engine

    class Forced(RolloutEngine):
        """The engine with the benchmark's lengths."""

        tokenizer = engine.tokenizer
        interleaves = True

        @contextlib.contextmanager
        def session(self, settings: Any, expected: Any, *, keeps: bool = False) -> Any:
            with clock.phase("generate"):
                forced = dataclasses.replace(settings, lengths=workload.length)
                with engine.session(forced, expected, keeps=keeps) as session:
                    yield session

    ChatFormat.parse = lambda self, ids, *, prefix, tools=(): forced.message(ids, prefix)  # type: ignore[method-assign]
    trainer.step.engine = Forced()
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


Points = Sequence[dict[str, Any]]


def of_trainer(points: Points, trainer: str) -> dict[int, dict[str, Any]]:
    """By the number of turns, the point in the better of a trainer's precisions."""
    slowest_first = sorted(points, key=lambda p: -p["seconds"])
    found = {point["turns"]: point for point in slowest_first if point["trainer"] == trainer}
    return dict(sorted(found.items()))


def compared(points: Points) -> list[dict[str, Any]]:
    """A row for each number of turns: TRL's seconds over Podium's, of the step, of sampling and of training."""
    ours, theirs = of_trainer(points, "podium"), of_trainer(points, "trl")
    names = ("seconds", "generate_seconds", "train_seconds")
    return [{"turns": n} | {x: theirs[n][x] / ours[n][x] for x in names} for n in ours if n in theirs]


def waiting(points: Points) -> list[dict[str, Any]]:
    """A row for each number of turns: what sampling takes longer with the slow tool, in calls of it for each turn."""
    quick, slow = (
        {p["turns"]: p["generate_seconds"] for p in points if bool(p["sleep"]) == is_slow} for is_slow in (False, True)
    )
    return [
        {"turns": n, "seconds": slow[n] - quick[n], "calls_a_turn": (slow[n] - quick[n]) / (SLEEP * (n - 1))}
        for n in slow
        if n > 1
    ]


def table(points: Points) -> Table:
    """A row for each worker."""
    caption = "ratio: TRL's seconds over Podium's, of the whole step, of sampling and of training"
    out = Table(title="A chain of look-ups: seconds of one step", caption=caption, padding=(0, 0))
    for column in ("trainer", "turns", "sample", "train", "step", "GiB", "ratio", "sampling", "training"):
        out.add_column(column, justify="left" if column == "trainer" else "right")
    ratios, ours = {row["turns"]: row for row in compared(points)}, of_trainer(points, "podium")
    for point in points:
        ratio = ratios.get(point["turns"], {}) if point is ours.get(point["turns"]) else {}
        out.add_row(
            f"{point['trainer']} {point['precision']}",
            str(point["turns"]),
            *(f"{point[key]:.2f}" for key in ("generate_seconds", "train_seconds", "seconds", "peak_memory_gib")),
            *(f"{ratio[x]:.1f} x" if ratio else "" for x in ("seconds", "generate_seconds", "train_seconds")),
        )
    return out


def picture(points: Points) -> str:
    """Seconds against turns as SVG: of the whole step and of sampling."""
    lines = []
    for (trainer, name), colour in zip((("trl", "TRL"), ("podium", "Podium")), reversed(COLOURS[:2]), strict=True):
        for key, part in (("seconds", "step"), ("generate_seconds", "sampling")):
            found = [(turns, point[key]) for turns, point in of_trainer(points, trainer).items()]
            dashed = part == "sampling"
            lines.append(Line(name=f"{name}, {part}", colour=colour, points=found, dashed=dashed))
    longest = max(y for line in lines for _, y in line.points)
    return line_chart(lines, x_ticks=(0, *TURNS), y_ticks=range(0, int(longest) + 100, 100), x_title="turns")


def main() -> None:
    """Every point in a process of its own, or (with --point) one of them here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    parser.add_argument("--drawn", type=int, default=35, help="tokens drawn in a turn")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(Point(**options.point), options.threads)), flush=True)
        return
    shape = {name: getattr(options, name) for name in ("prompts", "generations")}

    def measured(trainer: str, precision: str, turns: int, drawn: int, sleep: float = 0.0) -> dict[str, Any]:
        point = Point(trainer=trainer, precision=precision, turns=turns, drawn=drawn, sleep=sleep, **shape)
        found = run(point, options.threads)
        print(f"{turns} turns, {1000 * sleep:.0f} ms, {trainer} {precision}: {found['seconds']:.2f} s", flush=True)
        return found

    short = [measured("podium", "auto", n, SHORT_TURN, sleep) for n in options.turns for sleep in (0.0, SLEEP)]
    points: list[dict[str, Any]] = []
    precisions: Sequence[str] = TRL_PRECISIONS
    for turns in options.turns:
        points.append(measured("podium", "auto", turns, options.drawn))
        points += [measured("trl", precision, turns, options.drawn) for precision in precisions]
        precisions = [of_trainer(points, "trl")[turns]["precision"]]
    Console().print(table(points))
    for row in waiting(short):
        print("{turns} turns: {seconds:.1f} s more with the slow tool, {calls_a_turn:.1f} calls a turn".format(**row))
    found = {"points": points, "compared": compared(points), "short_turns": short, "waiting": waiting(short)}
    if tuple(options.turns) == TURNS:
        print("written to", save("agents", found))
        PICTURE.write_text(picture(points))


if __name__ == "__main__":
    main()
