"""The columns of a user's dataset and the kind of its answers, for `podium init --data`."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.cli.start.choices import TASKS
from podium.data.columns import ANSWERS, QUESTIONS, as_flags, named
from podium.data.extract import last_number
from podium.data.loading import DataSpec, load_data
from podium.data.query import as_json
from podium.data.selection import is_held_out
from podium.errors import ConfigError, did_you_mean
from podium.recipe.assume import HELD_OUT, LONGEST_EXAMPLE

LOOKED_AT = 50
"""Rows that decide the kind of answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnData:
    """A dataset that is there."""

    name: str
    """As the user wrote it."""
    question: str
    answer: str | None
    """The columns; None: there is none with answers."""
    conversations: bool
    """Whether the questions are conversations, which no template is put around."""
    rows: tuple[Mapping[str, Any], ...]
    """The first `LOOKED_AT`."""
    has_tests: bool

    @property
    def answers(self) -> tuple[Any, ...]:
        """Answers of the first rows."""
        return tuple(row[self.answer] for row in self.rows if row[self.answer] is not None) if self.answer else ()

    @property
    def likely_task(self) -> str:
        """The task that the answers look like."""
        if self.has_tests:
            return "code"
        if self.answer is None:
            return "format"
        return next(task for task, looks in _LOOKS.items() if all(map(looks, self.answers)))

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of the first answer, if that is a JSON object."""
        first = next(iter(self.answers), None)
        found = as_json(first) if isinstance(first, str) else first
        return tuple(map(str, found)) if isinstance(found, Mapping) else ()

    @property
    def after_hashes(self) -> bool:
        """Whether answers end with `#### 7`, as those of GSM8K do."""
        return bool(self.answers) and all("####" in str(answer) for answer in self.answers)

    def example(self, task: str) -> tuple[str, str] | None:
        """A short row that is not held out, with its answer in the form of a task: small models follow an example."""
        form = _FORMS.get(task)
        if form is None or self.answer is None or self.conversations or self.after_hashes:
            return None
        for row in self.rows:
            asked, told = row[self.question], row[self.answer]
            short = asked is not None and told is not None and len(f"{asked}{told}") <= LONGEST_EXAMPLE
            if short and not is_held_out(asked, HELD_OUT):
                return str(asked), form.format(told if isinstance(told, str) else json.dumps(told, ensure_ascii=False))
        return None

    def check(self, task: str) -> None:
        """Raises `ConfigError` for a task that these rows cannot be judged by."""
        if task == "code" and not self.has_tests:
            raise ConfigError(
                f"{self.name} has no column `tests`, which `--task code` needs: a list of "
                '{"call": "double", "args": [2], "expected": 4}, as JSON text. Without --data an example is written.'
            )
        if TASKS[task].answered and task != "code" and self.answer is None:
            raise ConfigError(
                f"{self.name} has no column with answers (looked for {', '.join(ANSWERS)}); `--task {task}` compares "
                "with them.",
                fix='Name it: --answer "{COLUMN}"; or take --task format.',
            )
        fits = _FITS.get(task, lambda _: True)
        bad = next((answer for answer in self.answers if not fits(answer)), None)
        if self.answer is not None and bad is not None:
            what = f"{self.name}: the answer `{str(bad)[:60]}` is no {_NOUNS[task]}, which `--task {task}` needs. "
            what += f"Take --task {self.likely_task}."
            raise ConfigError(what)


def look_at(name: str, question: str | None = None, answer: str | None = None) -> OwnData:
    """The columns of a dataset and its first answers; the columns are found by their names where they are not given.

    Raises:
        DataError: it is not there, or cannot be read.
        ConfigError: it has no column that can be the question, or not the one that is given.
    """
    rows, _ = load_data(DataSpec(dataset=name, use_test_split="no"))
    first = tuple(itertools.islice(rows, LOOKED_AT))
    columns = list(first[0]) if first else list(rows.column_names or ())
    answer = _given(answer, columns, "--answer", name) or named(columns, ANSWERS)
    rest = [each for each in columns if each != answer]
    question = _given(question, columns, "--prompt", name) or named(rest, QUESTIONS)
    if question is None:
        what = f"{name}: which column is the question? It has {', '.join(columns) or 'none'}; none is named "
        what += f"{', '.join(QUESTIONS)}."
        raise ConfigError(what, fix=as_flags(columns).partition(";")[0])
    return OwnData(
        name=name,
        question=question,
        answer=answer,
        rows=first,
        conversations=bool(first) and not isinstance(first[0][question], str),
        has_tests="tests" in columns,
    )


def _given(written: str | None, columns: Sequence[str], flag: str, name: str) -> str | None:
    """The column that a flag names, with or without braces."""
    if written is None:
        return None
    column = written.removeprefix("{").removesuffix("}")
    if column not in columns:
        what = f"{flag}: {name} has no column `{column}`; it has {', '.join(columns)}."
        raise ConfigError(what, fix=did_you_mean(column, columns) or f'{flag} "{{{next(iter(columns), "COLUMN")}}}"')
    return column


def from_folder(name: str, folder: Path) -> str:
    """The name of a dataset as seen from a folder: a path that is there becomes relative to it."""
    path = Path(name).expanduser()
    if not path.exists() or path.is_absolute() or name.startswith("~"):
        return name
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def _is_object(answer: Any) -> bool:
    return isinstance(as_json(answer) if isinstance(answer, str) else answer, Mapping)


def _is_number(answer: Any) -> bool:
    """
    >>> [_is_number(each) for each in (7, "1,234.5", "so 5 - 2 = 3 #### 3", "$7", "4 apples", "July 4")]
    [True, True, True, True, False, False]
    """
    text = str(answer).rpartition("####")[2].strip().strip("$%").replace(",", "")
    return bool(text) and last_number(text) == text


_LOOKS: Mapping[str, Callable[[Any], bool]] = {"json": _is_object, "number": _is_number, "exact": lambda _: True}
"""By task, in the order they are tried: whether an answer looks like one of it."""

_FITS: Mapping[str, Callable[[Any], bool]] = {
    "json": _is_object,
    "number": lambda answer: last_number(str(answer)) is not None,
    "exact": lambda answer: isinstance(answer, (str, int, float)),
}
"""Whether an answer can be used for it."""
_NOUNS: Mapping[str, str] = {"json": "JSON object", "number": "number", "exact": "text"}
_FORMS: Mapping[str, str] = {"json": "{}", "number": "<answer>{}</answer>", "exact": "<answer>{}</answer>"}
"""By task, how an example shows an answer."""
