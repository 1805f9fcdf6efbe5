"""The command to type after each verb: the last line that it prints."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import typer

from podium.errors.texts import clean

NEXT: Mapping[str, str] = {
    "init": "podium check {recipe}",
    "rewards test": "podium check {recipe}",
    "rewards test, a function": "podium check --dataset {data} --rewards {target}",
    "test, findings": "podium explain {code}",
    "check": "podium sample {recipe} -n 8",
    "check, processes": "podium train {recipe}",
    "check, rewards": "podium rewards test {recipe}",
    "check, errors": "podium explain {code}",
    "check, curable": "podium cure {recipe}",
    "cure": "podium train {recipe}",
    "sample": "podium train {recipe}",
    "train, better or not known": "podium chat {run}",
    "train, no better": "podium sample {recipe}",
    "train, with warnings": "podium doctor {run}",
    "train, in Python": "podium report {run}",
    "eval": "podium compare {model}",
    "train, solved": "podium chat {run}",
    "doctor": "podium explain {code}",
    "doctor, curable": "podium cure {run}",
    "doctor, solved": "podium chat {run}",
    "doctor, nothing found": "podium compare {run}",
    "report, better or not known": "podium compare {run}",
    "report, solved": "podium chat {run}",
    "report, with warnings": "podium doctor {run}",
    "report, no better": "podium sample {recipe}",
    "compare": "podium merge {run} --out {merged}",
    "compare, no better": "podium report {run}",
    "merge": "podium chat {out}",
    "push": "podium push {recipe}",
}
"""By verb and outcome, with the places of what the user gave."""


def next_line(outcome: str, recipe: str = "", **places: str) -> str:
    """`next: podium ...`, to be pasted into a shell; `recipe` is a command line's words, joined for a shell already.

    >>> next_line("train, solved", run="runs/my run"), next_line("check", recipe="run.yaml --bf16")
    ("next: podium chat 'runs/my run'", 'next: podium sample run.yaml --bf16 -n 8')
    """
    quoted = {name: shlex.quote(clean(value)) for name, value in places.items()}
    return f"next: {NEXT[outcome].format(recipe=clean(recipe), **quoted)}"


def print_next(outcome: str, recipe: str = "", **places: str) -> None:
    """Print the line, never wrapped, so that it can be copied."""
    typer.echo(next_line(outcome, recipe, **places))
