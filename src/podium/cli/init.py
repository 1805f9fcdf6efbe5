"""`podium init TABLE`: a folder to begin with, from a table and one sentence; `podium init NAME`: from an example.

`podium init RECIPE --cluster NAME`: the file of a job on several machines.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podium.cli.flags import JobFlags, takes_records
from podium.errors import ConfigError
from podium.errors.texts import counted, listed, nearest

if TYPE_CHECKING:
    from podium.cli.start.tasks import Machine, Task
    from podium.errors import Finding
    from podium.planning.propose import Table, Wishes


@takes_records
def init(
    target: Annotated[
        str,
        typer.Argument(
            help="Your rows: a file, a folder, a dataset; or a name for a new folder with an example; "
            "with --cluster a recipe, run.yaml unless given."
        ),
    ] = "",
    data: Annotated[
        str, typer.Option("--data", help="Your rows, where the argument is the name of the new folder.")
    ] = "",
    to: Annotated[
        str, typer.Option("--to", help="The folder to make, or the file of a job. Else it is called as the table is.")
    ] = "",
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
    *,
    job: JobFlags,
) -> None:
    """Write a folder with a recipe for a table of yours, or for an example, and what to type. Never overwrites.

    Columns, rewards, worked examples and the completion limit follow from the rows. What is not given is asked.

    With --cluster: the file of a job that trains a recipe on several machines, and goes on after each interruption.
    """
    from podium.cli.start import RECIPE, write
    from podium.cli.start.tasks import MACHINES
    from podium.planning.propose import Wishes

    if job != JobFlags():
        others: dict[str, object] = {
            "--data": data,
            "--prompt": prompt,
            "--answer": answer,
            "--answer-from": answer_from,
            "--task": task,
            "--reward-file": reward_file,
            "--machine": machine,
            "--model": model,
        }
        _write_job(target or RECIPE, to, job, [flag for flag, value in others.items() if value])
        return
    if machine is not None:
        _check_word("--machine", machine, MACHINES)
    word, sentence = task_of(task)
    folder, data = _folder_and_rows(target, data, to, word, yes=yes)
    wishes = Wishes(prompt=prompt, answer=answer, answer_from=answer_from, sentence=sentence)
    if data:
        start = _of_table(folder, data, wishes, word, machine or "cpu", model, reward_file=reward_file, yes=yes)
    elif sentence or prompt or answer or answer_from:
        raise ConfigError(
            "a sentence and columns are for a table of yours, and none is named.",
            fix='podium init TABLE.csv --task "What the model should do."',
        )
    else:
        start = Start(files=_of_example(folder, word, machine, model, yes=yes))
    write(folder, start.files)
    typer.echo("\n".join([*start.remarks, f"{folder} has {', '.join(start.files)}."]))
    findings = _sample(folder / RECIPE) if sample else []
    _print_end(folder, start, findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Files that `podium init` writes, with its remarks and doubts."""

    files: Mapping[str, str]
    """Names and texts."""
    remarks: Sequence[str] = ()
    """Lines that say how a table was read."""
    doubts: Sequence[str] = ()
    """Other possible readings, with the flags that choose them."""


# ---- what is asked ----


def _check_word(flag: str, word: str, table: Mapping[str, object]) -> None:
    """Raises `ConfigError` for a word of a flag that is not in its table."""
    if word not in table:
        near = nearest(word, table)
        raise ConfigError(
            f"{flag} is one of {listed(table)}; got `{word}`.",
            fix=f"Did you mean `{near}`?" if near else "",
            flag=flag,
            table=table,
            word=word,
            near=near,
        )


def task_of(task: str | None) -> tuple[str | None, str]:
    """The word of `TASKS`, or the sentence, that `--task` gave. Raises `ConfigError` for a single word of neither kind.

    >>> task_of("number"), task_of("Sort the words."), task_of(None)
    (('number', ''), (None, 'Sort the words.'), (None, ''))
    """
    from podium.cli.start.tasks import TASKS

    if task is None or task in TASKS:
        return task, ""
    if len(task.split()) > 1:
        return None, task
    near = nearest(task, TASKS)
    raise ConfigError(
        f"--task is a sentence of two words or more, or one of {listed(TASKS)}; got `{task}`.",
        fix=f"Did you mean `{near}`?" if near else '--task "What the model should do."',
        tasks=TASKS,
        task=task,
        near=near,
    )


def at_terminal(*, yes: bool) -> bool:
    """Whether questions can be asked."""
    return not yes and sys.stdin.isatty()


def ask(question: str, usual: str, *, yes: bool) -> str:
    """Read an answer; `usual` for an empty line, and with --yes. Raises `ConfigError` where the input has ended."""
    if yes:
        return usual
    try:
        return str(typer.prompt(question, default=usual, show_default=bool(usual))).strip()
    except typer.Abort:
        if sys.stdin.isatty():
            raise KeyboardInterrupt from None
        typer.echo()  # behind the question
        raise ConfigError(
            "not every question was answered.",
            fix="Give the name of your table, or --task, --machine and --model, or --yes for what is usual.",
        ) from None


def choose(question: str, choices: Mapping[str, Task] | Mapping[str, Machine], usual: str, *, yes: bool) -> str:
    """Read a word of a table."""
    if yes:
        return usual
    typer.echo("\n".join([question, *(f"  {word:<10} {choices[word].about}" for word in choices)]))
    return one_of("Type one of them", list(choices), usual)


def one_of(question: str, words: Sequence[str], usual: str = "") -> str:
    """Read one of some words."""
    while (word := ask(question, usual, yes=False)) not in words:
        typer.echo(f"`{word}` is none of {', '.join(words)}.")
    return word


# ---- an example, or a table ----


def _folder_and_rows(target: str, data: str, to: str, word: str | None, *, yes: bool) -> tuple[Path, str]:
    """The folder to make, which is free, and the table; the latter is empty for an example.

    The one argument is either of them: a table where it is data, or where `to` names the folder.
    """
    from podium.cli.start import check_free
    from podium.cli.start.own_data import folder_for, is_dataset

    if not data and target and (to or is_dataset(target)):
        data = target
        target = ""
    if not data and not target and not at_terminal(yes=yes):
        raise ConfigError(
            "podium init takes a table of yours, or a name for a new folder with an example.",
            fix='podium init TABLE.csv --task "What the model should do."; or podium init my-run -y',
        )
    if not data and word not in ("tool", "game"):  # which have rows of their own
        data = ask("Your rows: a CSV or JSONL file, or nothing for an example", "", yes=yes)
    folder = Path(to or target or folder_for(data)).expanduser()
    check_free(folder, "" if target and not data else f"{data} --to")
    return folder, data


def _of_example(
    folder: Path, word: str | None, machine: str | None, model: str | None, *, yes: bool
) -> Mapping[str, str]:
    """The files of an example."""
    from podium.cli.start import example_files
    from podium.cli.start.tasks import MACHINES, TASKS, Choices

    if folder.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"{folder} is the name of a recipe; podium init takes a table, or a name for a new folder.",
            fix=f"podium recipes {folder.stem} > {folder}; or podium init {folder.stem} -y",
            folder=folder,
            folder_stem=folder.stem,
        )
    word = word or choose("What is rewarded?", TASKS, "number", yes=yes)
    machine = machine or choose("Where will it be trained?", MACHINES, "cpu", yes=yes)
    model = model or ask("Which model: a Hugging Face id, a folder or", MACHINES[machine].model, yes=yes)
    return example_files(folder, Choices(task=word, machine=machine, model=model))


def _of_table(
    folder: Path,
    data: str,
    wishes: Wishes,
    word: str | None,
    machine: str,
    model: str | None,
    *,
    reward_file: bool,
    yes: bool,
) -> Start:
    """The files of a run on a table, and what is said about them."""
    from podium.cli.start import example_files, from_folder, own_files
    from podium.cli.start.own_data import doubts_about, proposed, rows_of
    from podium.cli.start.tasks import MACHINES, Choices

    typer.echo(f"Reading {data} ...", err=True)
    table = rows_of(data)
    choices = Choices(task=word or "format", machine=machine, model=model or MACHINES[machine].model)
    wishes = replace(wishes, model=choices.model)
    if at_terminal(yes=yes):
        if word is None and not wishes.sentence:
            sentence = ask("What should the model do? One sentence", "", yes=False)
            wishes = replace(wishes, sentence=sentence)
        wishes = _ask_for_columns(table, wishes)
    proposal = proposed(table, data, wishes, word=word, reward_file=reward_file)
    doubts = doubts_about(table, data, wishes, proposal.chosen, folder)
    if word == "format" or not proposal.shape:
        rows = {"dataset": from_folder(data, folder)}
        if "prompt" in proposal.settings:
            rows["prompt"] = proposal.settings["prompt"]
        remarks = [f"No answers were found in {data}: rewards.py has a reward of your own to write."]
        return Start(
            files=example_files(folder, choices, rows), remarks=[] if proposal.shape else remarks, doubts=doubts
        )
    remarks = [f"What {data} was taken for:", *(f"  {line}" for line in proposal.understood)]
    if empty := proposal.settings.get("filter"):
        left_out = f"Rows with an empty cell are left out: filter: {', '.join(empty)}."
        remarks.append(f"{left_out} If an empty answer can be right, take it out of run.yaml.")
    files = own_files(folder, choices, data, proposal, reward_file=reward_file)
    return Start(files=files, remarks=remarks, doubts=doubts)


def _ask_for_columns(table: Table, wishes: Wishes) -> Wishes:
    """The columns of question and answer, asked for where they cannot be told, or two readings are left."""
    from podium.planning.propose import read

    question = ""
    answer = ""
    try:
        chosen = read(table, wishes).chosen
        if not chosen.other:
            return wishes
        question = chosen.question_column
        answer = chosen.answer_column
    except ConfigError as error:
        if error.code != "D001":
            raise
    names = tuple(dict.fromkeys((*table.names, *filter(None, (question, answer)))))
    prompt = wishes.prompt or one_of(f"Which column is the question ({', '.join(names)})", names, question)
    rest = [name for name in names if name != prompt]
    usual = answer if answer in rest else ""
    if question and len(rest) == 1:
        usual = rest[0]
    answer = wishes.answer or one_of(f"Which column is the right answer ({', '.join(rest)})", rest, usual)
    return replace(wishes, prompt=prompt, answer=answer)


# ---- a job on several machines ----


def _write_job(recipe: str, to: str, job: JobFlags, others: Sequence[str]) -> None:
    """Write the file of a job; print what it assumes, what to edit in it and what to type.

    `others`: flags of a new recipe that were given. Raises `ConfigError` for them, and as `job_text` and `write_job`.
    """
    from podium.cli.start.cluster import ASSUMED, CLUSTERS, EDIT, job_text, write_job

    command = f"podium init {shlex.quote(recipe)} --cluster {job.cluster or 'slurm'}"
    if not job.cluster:
        raise ConfigError("--nodes and --processes are of a job, and --cluster does not say where.", fix=command)
    _check_word("--cluster", job.cluster, CLUSTERS)
    if others:
        raise ConfigError(f"--cluster is for a recipe that is there, and {listed(others)} for a new one.", fix=command)
    cluster = CLUSTERS[job.cluster]
    nodes = job.nodes or 1
    processes = job.processes or 8
    text = job_text(job.cluster, recipe, nodes=nodes, processes=processes)
    file = Path(to or f"job{cluster.suffix}").expanduser()
    write_job(file, text)
    size = f"{counted(nodes, 'machine')} with {counted(processes, 'GPU')} each"
    typer.echo(f"{file} trains {recipe} on {size} (--nodes, --processes).")
    typer.echo(f"A step has {nodes * processes} times per_device_train_batch_size completions.")
    lines = [line.strip() for line in text.splitlines()]
    for title, mark in (("Assumed", ASSUMED), (f"To edit in {file}", EDIT)):
        typer.echo("\n  ".join([f"{title}:", *(line.removeprefix(mark) for line in lines if line.startswith(mark))]))
    check = f"podium check {shlex.quote(recipe)} --processes {processes}"
    typer.echo("\n  ".join(["Next:", check, f"{cluster.submit} {shlex.quote(str(file))}"]))


# ---- the end ----


def _commands(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Commands after a first look, whose findings are given: training only where no error was found."""
    curable = any(finding.changes for finding in findings if finding.severity != "note")
    if any(finding.severity == "error" for finding in findings):
        return ("podium cure run.yaml" if curable else "podium check run.yaml",)
    return ("podium check run.yaml", "podium train run.yaml")


def _print_end(folder: Path, start: Start, findings: Sequence[Finding]) -> None:
    """Print the guesses that may be wrong, and the commands to type next in the folder."""
    typer.echo("".join(f"{doubt}\n" for doubt in start.doubts), nl=False)
    tests = (f"python {name}" for name in start.files if name.startswith("test_"))
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
