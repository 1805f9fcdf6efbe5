"""A verb's flags as records: Typer sees each annotated field of a dataclass as an option of the verb."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Folder to write into; evaluation/ of the run, or evaluations/.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DataOption = Annotated[
    str, typer.Option("--data", help="Rows: a file, folder, hub id or builtin:task. Of a recipe: its own.")
]
OracleOption = Annotated[
    str, typer.Option("--oracle", help="file.py:function(row, messages) that gives each turn of a right episode.")
]
UncountedOption = Annotated[
    list[str] | None, typer.Option("--ignore", help="A code whose errors do not count, such as E006.")
]

IgnoreOption = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="CODE", help="A refusal of an adapter to overrule, as M031."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFlags:
    """Flags of a run on several machines."""

    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, help="Machines; the same command runs on each of them.")
    ] = 1
    node_rank: Annotated[
        int, typer.Option("--node-rank", metavar="R", min=0, help="Which of the machines this is, from 0.")
    ] = 0
    rendezvous: Annotated[
        str,
        typer.Option(
            "--rendezvous", metavar="HOST:PORT", help="Where machine 0 is reached by all; a port that is free."
        ),
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFlags:
    """Flags of the file of a job on several machines."""

    cluster: Annotated[
        str,
        typer.Option("--cluster", help="Write the file of a job that trains a recipe: slurm, kubernetes or skypilot."),
    ] = ""
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, help="Machines of the job; 1 unless given.")
    ] = None
    processes: Annotated[
        int | None, typer.Option("--processes", metavar="N", min=1, help="GPUs of each machine; 8 unless given.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """Flags of an evaluation."""

    recipe: Annotated[
        str, typer.Option("--recipe", help="A recipe with data, rewards and settings; of a run: its own.")
    ] = ""
    data: Annotated[
        str, typer.Option("--data", help="A file, folder, hub id or builtin:task, instead of its data.")
    ] = ""
    split: Annotated[str, typer.Option("--split", help="Of the data; the held-out one unless given.")] = ""
    k: Annotated[int | None, typer.Option("-k", min=1, help="pass@k, from as many completions of each prompt.")] = None
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, help="Completions of each prompt, where there are to be more than k."),
    ] = None
    greedy: Annotated[bool, typer.Option("--greedy", help="One completion: the likeliest token, always.")] = False
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=1e-6, help="Of sampling; `eval_temperature`, else the training's."),
    ] = None
    ignore: IgnoreOption = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Any key of a recipe."""


AnswerColumnOption = Annotated[
    str, typer.Option("--answer-column", help="The column with the right answer, or a template of several.")
]
ArgsOption = Annotated[list[str] | None, typer.Option("--args", help="A setting of the reward, key=value; repeatable.")]
FormOption = Annotated[
    list[str] | None, typer.Option("--form", help="One more way to write an answer, {} in its place; repeatable.")
]
BudgetOption = Annotated[float, typer.Option("--budget", min=1, help="Seconds that all calls of a reward take.")]
CallLimitOption = Annotated[float, typer.Option("--limit", min=0.1, help="Seconds that a call may take.")]
RowOption = Annotated[int, typer.Option("--row", min=0, help="Which of them is played.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFlags:
    """Flags of a test of rewards."""

    data: DataOption = ""
    answer_column: AnswerColumnOption = ""
    rows: Annotated[int, typer.Option("--rows", min=2, max=64, help="Rows to test with.")] = 8
    args: ArgsOption = None
    form: FormOption = None
    limit: CallLimitOption = 10.0
    budget: BudgetOption = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFlags:
    """Flags of a test of tools and environments."""

    data: DataOption = ""
    oracle: OracleOption = ""
    rows: Annotated[int, typer.Option("--rows", min=1, max=64, help="Rows to test with.")] = 6
    turns: Annotated[int, typer.Option("--turns", min=1, max=100, help="Turns of an episode, at most.")] = 8
    limit: CallLimitOption = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFlags:
    """Flags of a test of a program."""

    data: DataOption = ""
    row: RowOption = 0
    oracle: OracleOption = ""
    turns: Annotated[int, typer.Option("--turns", min=1, max=100, help="Answers in an episode, at most.")] = 8
    limit: Annotated[float, typer.Option("--limit", min=0.1, help="Seconds that an episode may take by itself.")] = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllFlags:
    """Flags of `podium test`."""

    data: DataOption = ""
    answer_column: AnswerColumnOption = ""
    rows: Annotated[
        int | None,
        typer.Option("--rows", min=2, max=64, help="Rows to test with; 8 for rewards, 6 for environments."),
    ] = None
    row: RowOption = 0
    args: ArgsOption = None
    form: FormOption = None
    oracle: OracleOption = ""
    turns: Annotated[int, typer.Option("--turns", min=1, max=100, help="Turns of an episode, at most.")] = 8
    limit: CallLimitOption = 10.0
    budget: BudgetOption = 120.0

    @property
    def of_reward(self) -> RewardFlags:
        """Those of a test of rewards."""
        return RewardFlags(
            data=self.data,
            answer_column=self.answer_column,
            rows=self.rows or RewardFlags().rows,
            args=self.args,
            form=self.form,
            limit=self.limit,
            budget=self.budget,
        )

    @property
    def of_environment(self) -> EnvironmentFlags:
        """Those of a test of tools and environments."""
        rows = self.rows or EnvironmentFlags().rows
        return EnvironmentFlags(data=self.data, oracle=self.oracle, rows=rows, turns=self.turns, limit=self.limit)

    @property
    def of_program(self) -> ProgramFlags:
        """Those of a test of a program."""
        return ProgramFlags(data=self.data, row=self.row, oracle=self.oracle, turns=self.turns, limit=self.limit)


def takes_records(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass by its `Annotated` fields, and fill the record when called.

    >>> @dataclass
    ... class Size:
    ...     width: Annotated[int, "--width"] = 3
    ...     area: int = 0
    >>> @takes_records
    ... def draw(size: Size, *, colour: Annotated[str, "--colour"] = "red") -> None:
    ...     print(size, colour)
    >>> list(inspect.signature(draw).parameters)
    ['width', 'colour']
    >>> draw(width=4, colour="blue")
    Size(width=4, area=0) blue
    """
    own = inspect.signature(verb, eval_str=True).parameters
    records = {
        name: _flags(parameter.annotation) for name, parameter in own.items() if is_dataclass(parameter.annotation)
    }

    @functools.wraps(verb)
    def called(**arguments: Any) -> None:
        for name, flags in records.items():
            arguments[name] = own[name].annotation(**{flag.name: arguments.pop(flag.name) for flag in flags})
        verb(**arguments)

    parameters = [
        flag.replace(kind=flag.KEYWORD_ONLY)
        for name, parameter in own.items()
        for flag in records.get(name, [parameter])
    ]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _flags(record: Any) -> list[inspect.Parameter]:
    parameters = inspect.signature(record, eval_str=True).parameters.values()
    return [parameter for parameter in parameters if get_origin(parameter.annotation) is Annotated]
