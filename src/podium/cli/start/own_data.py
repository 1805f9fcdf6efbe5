"""A table of the user's own, for `podium init`: its name, its rows, its answers against the word of `--task`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podium.cli.start.choices import TASKS, one_of
from podium.data.columns import NOT_ASKED, Columns
from podium.data.extract import last_number
from podium.data.files import kind_of
from podium.data.loading import DataSpec, load_data
from podium.data.query import as_json
from podium.data.sources import check_exists, task_library
from podium.errors import ConfigError, DataError
from podium.errors.texts import listed, nearest
from podium.planning.answer_columns import Chosen, chosen_columns
from podium.planning.propose import LOOKED_AT, SHAPES, Given, Proposal, Table, place_of_answer, propose, shape_of
from podium.planning.understood import is_a_setting, unnamed_columns
from podium.recipe.assume import read_table


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
    owner, slash, name = word.partition("/")
    return (
        bool(slash and owner and name)
        and "/" not in name
        and owner not in (".", "..", "~")
        and not Path(owner).is_dir()
    )


def folder_for(dataset: str) -> Path:
    """The folder of a run on a dataset: its name, in the working directory.

    >>> [str(folder_for(each)) for each in ("data/reviews.csv.gz", "openai/gsm8k", "reasoning-gym:chain_sum?size=9")]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Words of the command line about a table; None or empty: it is to be told from the rows."""

    prompt: str | None = None
    answer: str | None = None
    answer_from: str | None = None
    word: str | None = None
    """One of `TASKS`."""
    sentence: str = ""
    reward_file: bool = False

    def chosen(self, table: Table) -> Chosen:
        """The columns of a table. Raises `ConfigError` where they cannot be told."""
        return chosen_columns(table.names, table.rows[:LOOKED_AT], self.prompt, self.answer)

    def with_sentence(self, sentence: str) -> Wishes:
        """The same with a sentence that was typed."""
        return replace(self, sentence=sentence)


def of_words(task: str | None) -> tuple[str | None, str]:
    """The word of `TASKS`, or the sentence, that `--task` gave. Raises `ConfigError` for a single word of neither kind.

    >>> of_words("number"), of_words("Sort the words."), of_words(None)
    (('number', ''), (None, 'Sort the words.'), (None, ''))
    """
    if task is not None and task not in TASKS and len(task.split()) > 1:
        return None, task
    if task is not None and task not in TASKS:
        near = nearest(task, TASKS)
        raise ConfigError(
            f"--task is a sentence of two words or more, or one of {listed(TASKS)}; got `{task}`.",
            fix=f"Did you mean `{near}`?" if near else '--task "What the model should do."',
            tasks=TASKS,
            task=task,
            near=near,
        )
    return task, ""


def with_columns(table: Table, wishes: Wishes, *, asks: bool) -> Wishes:
    """The same with the columns of question and answer, asked for where they cannot be told, or two readings are left.

    Raises `ConfigError`, with the flags to type, where they cannot and no question can be asked.
    """
    likely = ("", "")
    try:
        chosen = wishes.chosen(table)
        if not (asks and chosen.other):
            return wishes
        likely = (chosen.asked, chosen.told)
    except ConfigError as error:
        if not asks or error.code != "D001":
            raise
    names = tuple(dict.fromkeys((*table.names, *filter(None, likely))))
    prompt = wishes.prompt or one_of(f"Which column is the question ({', '.join(names)})", names, likely[0])
    rest = [name for name in names if name != prompt]
    usual = ""
    if likely[1] in rest:
        usual = likely[1]
    elif likely[0] and len(rest) == 1:
        usual = rest[0]
    answer = wishes.answer or one_of(f"Which column is the right answer ({', '.join(rest)})", rest, usual)
    return replace(wishes, prompt=prompt, answer=answer)


def proposed(table: Table, name: str, wishes: Wishes, model: str) -> Proposal:
    """The proposal for a table. Raises `ConfigError` where the answers do not fit the task, and without any."""
    word = wishes.word
    if word == "code" and table.tests is None:
        raise ConfigError(
            f'{name} has no column `tests`, which `--task code` needs: a list of {{"call": "double", '
            '"args": [2], "expected": 4}, as JSON text. Without a table an example is written.',
            fix="where the tests have another form, a function that yields rows with `prompt` and `tests`: "
            "podium init rows.py:make --task code",
            settings=(name,),
            name=name,
        )
    shape = None if word is None else TASKS[word].shape or None
    answers = _answers(table, wishes)
    questions_alone = sum(each.casefold() not in NOT_ASKED for each in table.names) == 1
    if not answers and table.tests is None and (shape is not None or (word is None and not questions_alone)):
        wanted = f"; `--task {word}` compares with them" if word else ""
        raise ConfigError(
            f"{name} has no column with answers (its columns: {listed(table.names)}){wanted}.",
            fix='name it: --answer "{COLUMN}"; or reward the form alone: --task format',
            settings=(name,),
            name=name,
            names=table.names,
            wanted=wanted,
        )
    fits = _FITS.get(shape or "", lambda _: True)
    bad = next((answer for answer in answers if not fits(answer)), None)
    if shape is not None and bad is not None:
        found = shape_of(answers)
        better = next((task for task, each in TASKS.items() if each.shape == found), "exact")
        what = f"{name}: the answer `{str(bad)[:60]}` is no {_NOUNS[shape]}, which `--task {word}` needs."
        raise ConfigError(f"{what} Take --task {better}.", what=what, better=better)
    if shape == "number" and SHAPES["worked"].fits(answers):
        shape = "worked"
    if word is None and is_a_setting(_columns(table, wishes), table.rows[:LOOKED_AT], wishes.sentence):
        if not wishes.reward_file:
            words = ["podium", "init", name, "--task", wishes.sentence, "--reward-file"]
            raise ConfigError(
                f"not ready: the number in the answer of {name} stands in its question, so that it is a setting of "
                "the task and not what is to be written; whether a text has this length only a function can say.",
                fix=f"{shlex.join(words)}; or, if the number is the answer: --task number",
            )
        shape = "length"
    given = Given(
        prompt=wishes.prompt,
        answer=wishes.answer,
        answer_from=wishes.answer_from,
        sentence=wishes.sentence,
        shape=shape,
        model=model,
    )
    return propose(table, given)


def doubts_about(table: Table, name: str, wishes: Wishes, chosen: Chosen, folder: Path) -> list[str]:
    """Other readings of the columns and of a file's first line, each with the command for it."""
    made = []
    if chosen.other:
        task = ["--task", wishes.sentence] if wishes.sentence else []
        command = shlex.join(["podium", "init", name, *task])
        made = [
            f"In doubt: `{chosen.asked}` was taken for the question and `{chosen.told}` for the answer: {chosen.why}.",
            f"  the other way: {command} {chosen.other} --to {shlex.quote(f'{folder}-2')}",
        ]
    if not_named := unnamed_columns(table.names, table.rows[:LOOKED_AT], wishes.sentence):
        made += [
            f"In doubt: the first line of {name} was taken for the names of its columns, and `{not_named}` looks like "
            "a value; if the line is a row, it is lost.",
            "  the other way: write a line with names above it, such as question,answer",
        ]
    return made


def _columns(table: Table, wishes: Wishes) -> Columns:
    chosen = wishes.chosen(table)
    place = wishes.answer_from or place_of_answer(table, chosen)
    columns = Columns(prompt=chosen.prompt, answer=chosen.answer, answer_from=place)
    for error in columns.problems():
        raise ConfigError(error.what, fix=error.fix, code=error.code)
    return columns


def _answers(table: Table, wishes: Wishes) -> list[Any]:
    """The answers that decide."""
    columns = _columns(table, wishes)
    found = (columns(row).get("answer") for row in table.rows[:LOOKED_AT])
    return [answer for answer in found if answer is not None]


def from_folder(name: str, folder: Path) -> str:
    """The name of a dataset as seen from a folder: a path that is there becomes relative to it."""
    path = Path(name).expanduser()
    if not path.exists() or path.is_absolute() or name.startswith("~"):
        return name
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def _is_object(answer: Any) -> bool:
    return isinstance(as_json(answer) if isinstance(answer, str) else answer, Mapping)


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "json": _is_object,
    "number": lambda answer: last_number(str(answer)) is not None,
    "text": lambda answer: isinstance(answer, (str, int, float)),
}
"""By shape, whether a word of `--task` can have an answer judged by it; the shape of the table may be another one."""
_NOUNS: Mapping[str, str] = {"json": "JSON object", "number": "number", "text": "text"}
