"""A recipe's datasets as sources of rows, each as it is trained on; files are streamed, in constant memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from podium.data.files import kind_of
from podium.data.loading import (
    DataSpec,
    Part,
    eval_rows,
    held_out_rows,
    held_out_shape,
    is_lines,
    kept_rows,
    load_data,
    part_splits,
    pass_rates_of,
    train_rows,
    train_shape,
)
from podium.data.selection import Shape, Taking, as_difficulty, no_difficulty
from podium.recipe.checks.rows import Line, Source, dataset_source, file_source
from podium.records import Finding

if TYPE_CHECKING:
    from podium.recipe.recipe import Recipe

T = TypeVar("T")

NAMING_ROWS = 100
"""Rows by which it is known which columns there are, where the source does not say."""


class Gathering(Protocol):
    """Where problems are collected."""

    problems: list[Finding]

    def attempt(self, make: Callable[[], T], where: str = "") -> T | None:
        """What `make` gives; None where it raises, which is then said."""

    def attempt_rows(self, make: Callable[[], T], name: str | None) -> T | None:
        """Likewise, for a dataset of this name."""


def recipe_sources(recipe: Recipe, gathering: Gathering) -> tuple[Source | None, Source | None]:
    """The training rows and the held-out rows; None where there are none, or where a problem says why not."""
    spec = recipe.data
    rates = gathering.attempt(lambda: pass_rates_of(spec))
    parts = [(part, gathering.attempt_rows(functools.partial(_raw, spec, part), part.name)) for part in spec.all_parts]
    train, held_out = [], []
    for part, sources in parts:
        if sources is None:
            continue
        raw_train, raw_held_out = sources
        train.append(_shaped(raw_train, train_shape(spec, part, rates), gathering, spec.difficulty))
        if train[-1] is not None and raw_held_out is not None:
            held_out.append(_shaped(raw_held_out, held_out_shape(spec, part), gathering))
    if spec.eval_dataset is not None:
        evaluation = gathering.attempt(lambda: _eval(spec))
        held_out = [_shaped(evaluation, Shape(columns=spec.columns), gathering)]
    if spec.parts and not gathering.problems:
        gathering.attempt(lambda: load_data(spec))  # whether the parts' columns go together, only Arrow knows
    return _joined(train, spec.name), _joined(held_out, "the held-out rows")


def _raw(spec: DataSpec, part: Part) -> tuple[Source | None, Source | None]:
    """One part's training rows and held-out rows before they are shaped; both may be of one file."""
    name = spec.name if spec.datasets else part.name
    if is_lines(part.path) and not spec.filter:
        there = {"train": file_source(Path(part.path).expanduser(), name)}
        held = None if spec.eval_dataset is not None else held_out_rows(spec, part, there)
        return train_rows(spec, part, there), None if held is None else replace(
            held, name=f"{name} (held out)", form=""
        )
    ends = _is_file(part.name)
    splits = part_splits(spec, part, streaming=ends)
    train = dataset_source(kept_rows(spec, part, splits), name, is_file=ends)
    held = None if spec.eval_dataset is not None else held_out_rows(spec, part, splits)
    side = spec.dataset_test_split if spec.held_out is None else "held out"
    return train, None if held is None else dataset_source(held, f"{name} ({side})", is_file=ends)


def _eval(spec: DataSpec) -> Source | None:
    name = Part(path=spec.eval_dataset).name
    if is_lines(name):
        return file_source(Path(name).expanduser(), name)
    return dataset_source(eval_rows(spec, streaming=_is_file(name)), name, is_file=_is_file(name))


def _is_file(name: str) -> bool:
    path = Path(name).expanduser()
    return kind_of(path) is not None and path.is_file()


# ---- shaping ----


def _shaped(source: Source | None, shape: Shape, gathering: Gathering, difficulty: str | None = None) -> Source | None:
    """The source with its rows as a shape makes them, None for those it leaves out; None where columns are missing."""
    if source is None or not (shape.selects or shape.columns.changes or difficulty):
        return source
    names = _names(source)

    def check() -> bool:
        shape.columns.check_names(names, source.name)
        if difficulty is not None and difficulty not in names:
            raise no_difficulty(difficulty, names, source.name)
        return True

    if names and gathering.attempt(check) is None:
        return None

    def rows() -> Iterator[tuple[Line, Any]]:
        take = Taking(shape)
        for index, (line, row) in enumerate(source.rows()):
            is_row = isinstance(row, Mapping)
            if difficulty is not None and is_row:
                as_difficulty(row.get(difficulty), difficulty, index, source.name)
            yield line, take(row) if is_row else None if shape.wants_held_out else row
        gathering.problems += take.findings(source.name)

    made = [key for key in ("prompt", "answer") if getattr(shape.columns, key) is not None]
    stay = [name for name in source.columns or () if name not in shape.columns.taken]
    columns = None if source.columns is None else tuple(dict.fromkeys([*stay, *made]))
    return replace(source, rows=rows, columns=columns)


def _names(source: Source) -> list[str]:
    """The columns; of a file of lines those of its first rows."""
    if source.columns:
        return list(source.columns)
    first = (row for _, row in itertools.islice(source.rows(), NAMING_ROWS) if isinstance(row, Mapping))
    return list(dict.fromkeys(itertools.chain.from_iterable(first)))


def _joined(sources: Sequence[Source | None], name: str) -> Source | None:
    """Several sources as one; every row keeps the place it has in its own."""
    there = [source for source in sources if source is not None]
    if len(there) < 2:
        return there[0] if there else None

    def rows() -> Iterator[tuple[Line, Any]]:
        for source in there:
            for index, (line, row) in enumerate(source.rows()):
                yield (
                    f"{source.name}:{line}, row {index}" if isinstance(line, int) else f"{source.name}, row {index}",
                    row,
                )

    abouts = [source.about for source in there]
    columns = [source.columns for source in there]
    return Source(
        name=name,
        rows=rows,
        about=None if None in abouts else sum(about or 0 for about in abouts),
        columns=None
        if None in columns
        else tuple(dict.fromkeys(itertools.chain.from_iterable(c or () for c in columns))),
        is_stream=any(source.is_stream for source in there),
        form=next((source.form for source in there if source.form), ""),
    )
