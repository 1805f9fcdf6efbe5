"""`podium watch RUN`: the report's page while training goes on, or its main curves in the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from podium.console.terminal import console, plain_text, table
from podium.runs.run import Run, best_and_worst

if TYPE_CHECKING:
    from pandas import DataFrame

EVERY_SECONDS = 2.0

FEWEST_BARS = 8
"""A narrow terminal has the numbers alone."""

CURVES = {
    "reward": "reward",
    "reward_std": "reward spread",
    "frac_reward_zero_std": "groups without signal",
    "completions/mean_length": "mean length",
    "completions/clipped_ratio": "cut off",
    "kl": "KL",
    "entropy": "entropy",
    "grad_norm": "gradient norm",
    "step_time": "seconds a step",
}
"""Metrics on the terminal, with their titles there."""

PLAIN_BARS = " .:-=+*#"
BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder; training may go on in it.")],
    text: Annotated[bool, typer.Option("--text", help="Draw the main curves here instead of serving a page.")] = False,
    once: Annotated[
        bool, typer.Option("--once", help="As --text, but once, with an agent's episodes as trees.")
    ] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any free port.")] = 0,
    host: Annotated[str, typer.Option("--host", help="Other addresses than this machine's need --key.")] = "127.0.0.1",
    key: Annotated[str, typer.Option("--key", help="A secret for readers; part of the address then.")] = "",
) -> None:
    """Watch a run while it trains: the report's page, live, on this machine only; or --text in the terminal."""
    if text or once:
        _watch_text(run, once=once)
        return
    from podium.runs.report.live import PageServer

    Run.load(run)  # an error where it is none
    with PageServer([run], host=host, port=port, key=key) as server:
        typer.echo(f"{run} is at {server.url}  (Ctrl-C ends this; training does not notice)")
        server.serve_forever()


def _watch_text(run: Path, *, once: bool) -> None:
    plain = not console.encoding.lower().startswith("utf")
    loaded = Run.load(run)
    drawn = screen(loaded, console.width, plain=plain)
    if once or not console.is_terminal:
        console.print(drawn)
        for line in _trees(loaded.rollouts):
            console.print(line, soft_wrap=True)
        return
    with Live(drawn, console=console, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_SECONDS)
            live.update(screen(Run.load(run), console.width, plain=plain), refresh=True)


def screen(run: Run, width: int, *, plain: bool = False) -> Group:
    """Curves, findings, and the best and the worst of the last completions."""
    from podium.runs.report.series import finite_metrics
    from podium.runs.report.summary import headline

    metrics = finite_metrics(run)
    title = plain_text(f"{run.name}, step {run.history[-1].step if run.history else 0}: {headline(metrics)}")
    last = run.findings.tail(3).to_dict("records")
    findings = [plain_text(f"{each['severity']}[{each['code']}] {each['what']}") for each in last]
    drawn: list[RenderableType] = [title, _curves(metrics, width, PLAIN_BARS if plain else BARS), *findings]
    if ends := best_and_worst(run.rollouts):
        rows = [(word, f"{reward:.2f}", completion) for word, reward, completion in ends]
        columns = dict.fromkeys(("", "reward", "completion"), "left")
        drawn.append(table(columns, rows, title=f"Completions of step {run.rollouts['step'].max()}"))
    return Group(*drawn)


def _trees(rollouts: DataFrame) -> Iterator[Text]:
    """Best, worst and the first failed of the last episodes of an agent; nothing of other runs."""
    from podium.console.episodes import episode_lines, failure_lines
    from podium.runs.conversations import conversation, tree_passages

    if "branches" not in rollouts:  # of an earlier version
        return
    rows = rollouts[rollouts["step"] == rollouts["step"].max()].sort_values("reward").astype(object)
    rows = rows.where(rows.notna(), None)
    known, failed = rows[rows["reward"].notna()], rows[rows["program_failed"].notna()]
    for word, row in (("best", known.tail(1)), ("worst", known.head(1)), ("failed", failed.head(1))):
        for each in row.to_dict("records"):
            if not (each["branches"] or each["program_failed"]):
                continue
            reward = "none" if each["reward"] is None else f"{each['reward']:.2f}"
            numbers = f"reward {reward}, advantage {each['advantage']:.2f}, {each['num_tokens']} tokens drawn"
            yield plain_text(f"\n{word}: row {each['row']}, {numbers}, {'' if each['trained'] else 'not '}trained on")
            yield from episode_lines(tree_passages(conversation(each["turns"]), json.loads(each["branches"] or "[]")))
            yield from failure_lines(each["program_failed"] or "", each["program_log"] or "")


def _curves(metrics: DataFrame, width: int, bars: str) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    drawn.add_column("", overflow="fold")
    for step in (metrics.index[:1], metrics.index[-1:]):
        drawn.add_column(f"step {step[0]}" if len(step) else "", justify="right", no_wrap=True, min_width=8)
    room = width - 48
    if room >= FEWEST_BARS:
        drawn.add_column("", no_wrap=True)
    for name, label in CURVES.items():
        values = metrics[name].dropna().tolist() if name in metrics else []
        if values:
            curve = [Text(sparkline(values, room, bars))] if room >= FEWEST_BARS else []
            drawn.add_row(label, f"{values[0]:.3g}", f"{values[-1]:.3g}", *curve)
    return drawn


def sparkline(values: list[float], width: int, bars: str = BARS) -> str:
    """Values as bars, at most `width` of them, each the mean of its share.

    >>> sparkline([0, 1, 2, 3], 2)
    '\u2581\u2588'
    """
    edges = [len(values) * i // min(width, len(values)) for i in range(min(width, len(values)) + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)
