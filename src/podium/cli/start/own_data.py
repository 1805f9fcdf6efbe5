"""A table of the user's own, for `podium init`: its name, its rows, its answers against the word of `--task`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from podium.cli.start.tasks import TASKS
from podium.data.columns import NOT_ASKED
from podium.data.extract import last_number, numbers
from podium.data.files import kind_of
from podium.data.rows import DataSpec, load_data
from podium.data.sources import check_exists, task_library
from podium.errors import ConfigError, DataError
from podium.errors.texts import listed
from podium.planning.columns import ChosenColumns, unnamed_columns
from podium.planning.propose import LOOKED_AT, Proposal, Reading, Table, Wishes, propose, read
from podium.planning.shapes import SHAPES, is_object, shape_of
from podium.recipe.assume import read_table
from podium.records import last_user_turn

_LENGTH_TASK = re.compile(
    r"\W*(write|compose|make|generate|describe|tell)\b.*\b(word|letter|character|sentence|line)s?\b"
)


def is_dataset(word: str) -> bool:
    """Whether a word is data that is there, or the name of a task or of a dataset of a hub; else it is a new folder's.

    >>> is_dataset("builtin:additions"), is_dataset("openai/gsm8k"), is_dataset("my-run"), is_dataset("../my-run")
    (True, True, False, False)
    """
    path = Path(word).expanduser()
    if path.is_dir():
        return any(map(kind_of, (*path.glob("*"), *path.glob("*/*"))))  # the hub's are in `data/`
    if path.exists() or kind_of(path) or task_library(word) or re.match(r"builtin:|[^?]+\.py:\w", word):
        return True
    owner, _, name = word.partition("/")
    of_hub = bool(owner and name) and "/" not in name and owner not in (".", "..", "~")
    return of_hub and not Path(owner).is_dir()


def folder_for(dataset: str) -> Path:
    """The folder of a run on a dataset: its name, in the working directory.

    >>> names = ("data/reviews.csv.gz", "openai/gsm8k", "reasoning-gym:chain_sum?size=9")
    >>> [str(folder_for(name)) for name in names]
    ['reviews', 'gsm8k', 'chain_sum']
    """
    last = re.split(r"[/:]", dataset.partition("?")[0].rstrip("/"))[-1]
    path = Path(dataset).expanduser()
    stem = last.lstrip(".").split(".")[0] if kind_of(path) or path.is_file() else last
    return Path(f"{stem}-run" if path.is_dir() and Path(stem).exists() else stem or "run")


def rows_of(dataset: str) -> Table:
    """The rows that a proposal looks at. Raises `DataError` for data that is not there, or cannot be read."""
    try:
        check_exists(dataset)
        load_data(DataSpec(dataset=dataset, use_test_split="no"))  # every line of a file, for its errors
        return read_table({"dataset": dataset})
    except DataError as error:
        name = error.changes.get("dataset")
        fix = error.fix.replace("then dataset: ", "then podium init ")
        raise DataError(error.what, code=error.code, fix=f"podium init {name}" if name else fix) from error


def proposed(
    table: Table, name: str, wishes: Wishes, *, word: str | None = None, reward_file: bool = False
) -> Proposal:
    """The proposal for a table. `word`: one of `TASKS` that the answers have to fit.

    Raises `ConfigError` where they do not, where there are none, and where a number may be a setting of the task.
    """
    if word == "code" and table.tests is None:
        raise ConfigError(
            f'{name} has no column `tests`, which `--task code` needs: a list of {{"call": "double", '
            '"args": [2], "expected": 4}, as JSON text. Without a table an example is written.',
            fix="where the tests have another form, a function that yields rows with `prompt` and `tests`: "
            "podium init rows.py:make --task code",
            settings=(name,),
            name=name,
        )
    reading = read(table, wishes)
    for error in reading.columns.problems():
        raise ConfigError(error.what, fix=error.fix, code=error.code)
    shape = _shape_of_word(reading, name, word)
    if word is None and _is_a_setting(reading, wishes.sentence):
        if not reward_file:
            words = ["podium", "init", name, "--task", wishes.sentence, "--reward-file"]
            raise ConfigError(
                f"not ready: the number in the answer of {name} stands in its question, so that it is a setting of "
                "the task and not what is to be written; whether a text has this length only a function can say.",
                fix=f"{shlex.join(words)}; or, if the number is the answer: --task number",
            )
        shape = "length"
    return propose(table, replace(wishes, shape=shape))


_WANTED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "json": ("JSON object", is_object),
    "number": ("number", lambda answer: last_number(str(answer)) is not None),
    "text": ("text", lambda answer: isinstance(answer, (str, int, float))),
}
"""By shape, what a word of `--task` needs, and whether an answer is one; the shape of the table may be another one."""


def _shape_of_word(reading: Reading, name: str, word: str | None) -> str | None:
    """The shape of a word of `--task`; None: the answers decide. Raises `ConfigError` where the answers do not fit."""
    table = reading.table
    answers = reading.answers[:LOOKED_AT]
    shape = (TASKS[word].shape or None) if word else None
    question_alone = sum(column.casefold() not in NOT_ASKED for column in table.names) == 1
    if not answers and table.tests is None and (shape or (word is None and not question_alone)):
        wanted = f"; `--task {word}` compares with them" if word else ""
        raise ConfigError(
            f"{name} has no column with answers (its columns: {listed(table.names)}){wanted}.",
            fix='name it: --answer "{COLUMN}"; or reward the form alone: --task format',
            settings=(name,),
            name=name,
            names=table.names,
            wanted=wanted,
        )
    if shape is not None and shape in _WANTED:
        noun, fits = _WANTED[shape]
        for answer in answers:
            if not fits(answer):
                found = shape_of(answers)
                better = next((task for task in TASKS if TASKS[task].shape == found), "exact")
                what = f"{name}: the answer `{str(answer)[:60]}` is no {noun}, which `--task {word}` needs."
                raise ConfigError(f"{what} Take --task {better}.", what=what, better=better)
    return "worked" if shape == "number" and SHAPES["worked"].fits(answers) else shape


def _is_a_setting(reading: Reading, sentence: str) -> bool:
    """Whether a number may not be the answer but a setting: a text of so many words, as nearly every question says."""
    if not _LENGTH_TASK.match(sentence.casefold()):
        return False
    rows = reading.table.first
    pairs = [(last_user_turn(reading.columns.question(row)), reading.columns(row).get("answer")) for row in rows]
    return sum(last_number(str(answer)) in numbers(question) for question, answer in pairs) >= 0.9 * len(pairs) > 0


def doubts_about(table: Table, name: str, wishes: Wishes, chosen: ChosenColumns, folder: Path) -> list[str]:
    """Other readings of the columns and of a file's first line, each with the command for it."""
    doubts = []
    if chosen.other:
        task = ["--task", wishes.sentence] if wishes.sentence else []
        command = shlex.join(["podium", "init", name, *task])
        doubts = [
            f"In doubt: `{chosen.question_column}` was taken for the question and `{chosen.answer_column}` for the "
            "answer: their names leave it open, so the left one is the question.",
            f"  the other way: {command} {chosen.other} --to {shlex.quote(f'{folder}-2')}",
        ]
    if value := unnamed_columns(table.names, table.first):
        doubts += [
            f"In doubt: the first line of {name} was taken for the names of its columns, and `{value}` looks like "
            "a value; if the line is a row, it is lost.",
            "  the other way: write a line with names above it, such as question,answer",
        ]
    return doubts
