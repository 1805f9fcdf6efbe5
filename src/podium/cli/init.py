"""`podium init TABLE`: a folder to begin with, from a table and one sentence; `podium init NAME`: from an example."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.errors import Finding


def init(
    target: Annotated[
        str, typer.Argument(help="Your rows: a file, a folder, a dataset; or a name for a new folder with an example.")
    ] = "",
    data: Annotated[
        str, typer.Option("--data", help="Your rows, where the argument is the name of the new folder.")
    ] = "",
    to: Annotated[str, typer.Option("--to", help="The folder to make. Else it is called as the table is.")] = "",
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "--question", help="The question: a column, or a template such as '{a} + {b} = ?'."),
    ] = None,
    answer: Annotated[str | None, typer.Option("--answer", help="The right answer: a column, or a template.")] = None,
    answer_from: Annotated[
        str | None,
        typer.Option("--answer-from", help="Its place in that column: 'after ####', 'last number', 'json:FIELD', ..."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="A sentence: what should the model do? Or number, exact, json, code, format, tool or game.",
        ),
    ] = None,
    reward_file: Annotated[
        bool, typer.Option("--reward-file", help="Write a reward function of your own and its test, too.")
    ] = False,
    machine: Annotated[
        str | None, typer.Option("--machine", help="Where it will be trained: cpu, small-gpu or large-gpu.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="builtin:..., a Hugging Face id or a folder. Else one that fits.")
    ] = None,
    sample: Annotated[bool, typer.Option("--sample/--no-sample", help="Sample a few rows at the end.")] = True,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: what is not given is as usual.")] = False,
) -> None:
    """Write a folder with a recipe for a table of yours, or for an example, and what to type. Never overwrites.

    Columns, rewards, worked examples and the completion limit follow from the rows. What is not given is asked.
    """
    from podium.cli.start import RECIPE, write
    from podium.cli.start.choices import MACHINES, known
    from podium.cli.start.own_data import Wishes, of_words

    machine = known(machine, MACHINES, "--machine")
    word, sentence = of_words(task)
    folder, data = _folder_and_rows(target, data, to, word, yes=yes)
    wishes = Wishes(
        prompt=prompt, answer=answer, answer_from=answer_from, word=word, sentence=sentence, reward_file=reward_file
    )
    if data:
        texts, remarks, doubts = _of_table(folder, data, wishes, machine or "cpu", model, yes=yes)
    else:
        texts = _of_example(folder, wishes, machine, model, yes=yes)
        remarks = []
        doubts = []
    write(folder, texts)
    typer.echo("\n".join([*remarks, f"{folder} has {', '.join(texts)}."]))
    findings = _sample(folder / RECIPE) if sample else []
    _print_end(folder, texts, doubts, findings)


def _folder_and_rows(target: str, data: str, to: str, word: str | None, *, yes: bool) -> tuple[Path, str]:
    """The folder to make, which is free, and the table; the latter is empty for an example.

    The one argument is either of them: a table where it is data, or where `to` names the folder.
    """
    from podium.cli.start import check_free
    from podium.cli.start.own_data import folder_for, is_dataset

    if not data and target and (to or is_dataset(target)):
        data = target
        target = ""
    data = data or _rows(target, word, yes=yes)
    folder = Path(to or target or folder_for(data)).expanduser()
    check_free(folder, "" if target and not data else f"{data} --to")
    return folder, data


def _rows(target: str, word: str | None, *, yes: bool) -> str:
    """The table, where none was named; empty for an example."""
    from podium.cli.start.choices import ask, at_terminal

    if not target and not at_terminal(yes=yes):
        raise ConfigError(
            "podium init takes a table of yours, or a name for a new folder with an example.",
            fix='podium init TABLE.csv --task "What the model should do."; or podium init my-run -y',
        )
    has_rows = word in ("tool", "game")  # of its own
    return "" if has_rows else ask("Your rows: a CSV or JSONL file, or nothing for an example", "", yes=yes)


def _of_example(folder: Path, wishes: Any, machine: str | None, model: str | None, *, yes: bool) -> dict[str, str]:
    """The files of an example."""
    from podium.cli.start import example_files
    from podium.cli.start.choices import MACHINES, TASKS, Choices, ask, choose

    if folder.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"{folder} is the name of a recipe; podium init takes a table, or a name for a new folder.",
            fix=f"podium recipes {folder.stem} > {folder}; or podium init {folder.stem} -y",
            folder=folder,
            folder_stem=folder.stem,
        )
    if wishes.sentence or wishes.prompt or wishes.answer or wishes.answer_from:
        raise ConfigError(
            "a sentence and columns are for a table of yours, and none is named.",
            fix='podium init TABLE.csv --task "What the model should do."',
        )
    word = wishes.word or choose("What is rewarded?", TASKS, "number", yes=yes)
    machine = machine or choose("Where will it be trained?", MACHINES, "cpu", yes=yes)
    model = model or ask("Which model: a Hugging Face id, a folder or", MACHINES[machine].model, yes=yes)
    return example_files(folder, Choices(task=word, machine=machine, model=model))


def _of_table(
    folder: Path, data: str, wishes: Any, machine: str, model: str | None, *, yes: bool
) -> tuple[dict[str, str], list[str], list[str]]:
    """The files of a run on a table, what the table was taken for, in lines, and what may be meant otherwise."""
    from podium.cli.start import example_files, own_files
    from podium.cli.start.choices import MACHINES, Choices, ask, at_terminal
    from podium.cli.start.own_data import doubts_about, from_folder, proposed, rows_of, with_columns

    typer.echo(f"Reading {data} ...", err=True)
    table = rows_of(data)
    asks = at_terminal(yes=yes)
    choices = Choices(task=wishes.word or "format", machine=machine, model=model or MACHINES[machine].model)
    if asks and wishes.word is None and not wishes.sentence:
        wishes = wishes.with_sentence(ask("What should the model do? One sentence", "", yes=False))
    wishes = with_columns(table, wishes, asks=asks)
    made = proposed(table, data, wishes, choices.model)
    doubts = doubts_about(table, data, wishes, made.chosen, folder)
    if wishes.word == "format" or not made.shape:
        own: Mapping[str, Any] = {"dataset": from_folder(data, folder)}
        own = {**own, "prompt": made.settings["prompt"]} if "prompt" in made.settings else own
        said = [] if made.shape else [f"No answers were found in {data}: rewards.py has a reward of your own to write."]
        return example_files(folder, choices, own), said, doubts
    remarks = [f"What {data} was taken for:", *(f"  {line}" for line in made.understood)]
    if empty := made.settings.get("filter"):
        left_out = f"Rows with an empty cell are left out: filter: {', '.join(empty)}."
        remarks.append(f"{left_out} If an empty answer can be right, take it out of run.yaml.")
    return own_files(folder, choices, data, made, reward_file=wishes.reward_file), remarks, doubts


def _commands(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Commands after a first look, whose findings are given: training only where no error was found."""
    curable = any(each.changes for each in findings if each.severity != "note")
    if any(each.severity == "error" for each in findings):
        return ("podium cure run.yaml" if curable else "podium check run.yaml",)
    return ("podium check run.yaml", "podium train run.yaml")


def _print_end(folder: Path, files: Iterable[str], doubts: Iterable[str], findings: Sequence[Finding]) -> None:
    """Print the guesses that may be wrong, and the commands to type next in the folder."""
    typer.echo("".join(f"{doubt}\n" for doubt in doubts), nl=False)
    tests = (f"python {name}" for name in files if name.startswith("test_"))
    typer.echo("\n  ".join(["Next:", f"cd {shlex.quote(str(folder))}", *tests, *_commands(findings)]))


def _sample(recipe: Path) -> Sequence[Finding]:
    """The findings of a check; a few rows are sampled where the model is small."""
    from podium.cli.start.first_look import can_sample, first_look
    from podium.recipe.document import open_document

    if can_sample(str(open_document(recipe).values["model"]), recipe.parent):
        typer.echo("Checking the recipe, then sampling a few rows ...", err=True)
        return first_look(recipe)
    typer.echo("Nothing was sampled: the model is not on this machine, or large.")
    return ()
