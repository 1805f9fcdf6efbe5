"""`podium watch RUN`: the report's page while training goes on; with `--once`, where the run is, in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from podium.console.terminal import console, episode_lines, failure_lines, plain_text, table
from podium.runs.run import Run, best_and_worst

if TYPE_CHECKING:
    from pandas import DataFrame

METRICS = {
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


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder; training may go on in it.")],
    once: Annotated[
        bool,
        typer.Option("--once", help="Print numbers, findings and completions of the latest step, and serve no page."),
    ] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any free port.")] = 0,
    host: Annotated[str, typer.Option("--host", help="Other addresses than this machine's need --key.")] = "127.0.0.1",
    key: Annotated[str, typer.Option("--key", help="A secret for readers; part of the address then.")] = "",
) -> None:
    """Watch a run while it trains: the report's page, live, on this machine only."""
    loaded = Run.load(run)  # an error where it is none
    if once:
        _print(loaded)
        return
    from podium.runs.report.live import PageServer

    with PageServer([run], host=host, port=port, key=key) as server:
        typer.echo(f"{run} is at {server.url}  (Ctrl-C ends this; training does not notice)")
        server.serve_forever()


def _print(run: Run) -> None:
    """Numbers of the first and the latest step, findings, the best and the worst of the last completions, episodes."""
    from podium.runs.report.summary import headline

    metrics = run.series
    latest = run.history[-1].step if run.history else 0
    console.print(plain_text(f"{run.name}, step {latest}: {headline(metrics)}"))
    rows = []
    for name, title in METRICS.items():
        values = metrics[name].dropna().tolist() if name in metrics else []
        if values:
            rows.append((title, f"{values[0]:.3g}", f"{values[-1]:.3g}"))
    if rows:
        first = f"step {metrics.index[0]}"
        last = f"step {metrics.index[-1]}"
        console.print(table((("", "left"), (first, "right whole"), (last, "right whole")), rows))
    for finding in run.reported[-3:]:
        console.print(plain_text(f"{finding.severity}[{finding.code}] {finding.what}"))
    ends = best_and_worst(run.rollouts)
    if ends:
        columns = dict.fromkeys(("", "reward", "completion"), "left")
        completions = [(word, f"{reward:.2f}", completion) for word, reward, completion in ends]
        console.print(table(columns, completions, title=f"Completions of step {run.rollouts['step'].max()}"))
    for line in _trees(run.rollouts):
        console.print(line, soft_wrap=True)


def _trees(rollouts: DataFrame) -> Iterator[Text]:
    """Best, worst and the first failed of the last episodes of an agent; nothing of other runs."""
    from podium.runs.conversations import conversation, tree_passages

    if "branches" not in rollouts:  # of an earlier version
        return
    rows = rollouts[rollouts["step"] == rollouts["step"].max()].sort_values("reward").astype(object)
    rows = rows.where(rows.notna(), None)
    known = rows[rows["reward"].notna()]
    failed = rows[rows["program_failed"].notna()]
    for word, row in (("best", known.tail(1)), ("worst", known.head(1)), ("failed", failed.head(1))):
        for episode in row.to_dict("records"):
            if not (episode["branches"] or episode["program_failed"]):
                continue
            reward = "none" if episode["reward"] is None else f"{episode['reward']:.2f}"
            numbers = f"reward {reward}, advantage {episode['advantage']:.2f}, {episode['num_tokens']} tokens drawn"
            trained = "trained on" if episode["trained"] else "not trained on"
            yield plain_text(f"\n{word}: row {episode['row']}, {numbers}, {trained}")
            branches = json.loads(episode["branches"] or "[]")
            yield from episode_lines(tree_passages(conversation(episode["turns"]), branches))
            yield from failure_lines(episode["program_failed"] or "", episode["program_log"] or "")
