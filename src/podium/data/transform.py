"""Rows of a source as a transform makes them: surveyed or loaded, or both in one pass."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from podium.data.columns import features
from podium.data.files import RowTable, good_rows
from podium.data.selection import RowFilter, RowTransform, as_difficulty, no_difficulty
from podium.data.survey import Line, RowSource, is_stream, is_transformed
from podium.errors import DataError, Finding

logger = logging.getLogger(__name__)
T = TypeVar("T")
NAMING_ROWS = 100  # rows of a file that are read for its columns, where it has no header


class Attempts:
    """Calls that may fail with a message for the user: here it is raised, a check collects it."""

    def attempt(self, make: Callable[[], T]) -> T | None:
        """The result of `make`; None where it raised and the error was collected."""
        return make()

    def attempt_rows(self, make: Callable[[], T], name: str | None) -> T | None:
        """The same, for the rows of a dataset of this name."""
        return make()

    def report(self, findings: Sequence[Finding]) -> None:
        """Raise the first error as a `DataError`; log the rest."""
        for finding in findings:
            if finding.severity == "error":
                raise DataError(
                    f"{finding.what}.", code=finding.code, fix=finding.fix, findings=[finding], what=finding.what
                )
            logger.info("%s", finding.what)


class TransformedRows:
    """Rows of a source, transformed as they are read; those that were read are there as a dataset."""

    def __init__(
        self,
        source: RowSource,
        transform: RowTransform,
        attempts: Attempts | None = None,
        *,
        keep: bool = True,
        difficulty: str | None = None,
    ) -> None:
        """Open the source; nothing is read yet. Raises `DataError` for columns that are not there.

        Args:
            source: the rows as they are.
            transform: what is made of a row.
            attempts: where findings about the rows are reported.
            keep: whether rows are kept for `dataset`; without, any number of them takes no memory.
            difficulty: a column that must hold a number in every row.
        """
        self._original = source
        self._transform = transform
        self._keep = keep
        self._difficulty = difficulty
        self._report = (attempts or Attempts()).report
        self._table = _table(source, transform) if keep else None
        self._kept: list[int] = []
        if source.columns:
            self._check_names(source.columns)
        made = [key for key in ("prompt", "answer") if getattr(transform.columns, key) is not None]
        made += transform.columns.columns or ()
        stay = [name for name in source.columns or () if name not in transform.columns.taken]
        columns = None if source.columns is None else tuple(dict.fromkeys([*stay, *made]))
        self.source = replace(source, rows=self._rows, columns=columns)

    def _rows(self) -> Iterator[tuple[Line, Any]]:
        take = RowFilter(self._transform)
        self._kept.clear()
        if self._table is not None:
            self._table.clear()
        for index, (line, row) in enumerate(self._with_known_names()):
            if isinstance(row, Mapping):
                if (made := take(row)) is not None:
                    self._add(index, made)
                yield line, made
            else:
                yield line, None if self._transform.wants_held_out else row
        self._report(take.findings(self._original.name))

    def _add(self, index: int, row: Mapping[str, Any]) -> None:
        if self._difficulty is not None:
            as_difficulty(row.get(self._difficulty), self._difficulty, index, self._original.name)
        if self._table is not None:
            self._table.add(row)
        elif self._keep and self._transform.selects:
            self._kept.append(index)

    def _with_known_names(self) -> Iterator[tuple[Line, Any]]:
        """The rows as they are. Raises `DataError` before the first where none has a column that is needed."""
        rows = self._original.rows()
        if self._original.columns:
            return rows
        first = list(itertools.islice(rows, NAMING_ROWS))
        if names := _names(first):
            try:
                self._check_names(names)
            except DataError:
                self._check_names(_names(self._original.rows()))
        return itertools.chain(first, rows)

    def _check_names(self, names: Sequence[str]) -> None:
        self._transform.check_names(names, self._original.name)
        if self._original.dataset is None or not is_stream(self._original.dataset):
            self._transform.columns.check_fields(lambda: (row for _, row in self._original.rows()), self._original.name)
        if self._difficulty is not None and self._difficulty not in names:
            raise no_difficulty(self._difficulty, names, self._original.name)

    def read(self) -> None:
        """Read all rows, unless the dataset is there without. Raises `DataError` for rows that cannot be read."""
        selects = self._transform.selects and not is_stream(self._original.dataset)
        if self._table is not None or selects or self._original.lines_first:
            for _ in good_rows(self.source.rows()):
                pass

    def dataset(self) -> Any:
        """The rows, once they were read from `source`."""
        rows = self._original.dataset
        if self._table is not None:
            return self._table.dataset()
        if is_stream(rows):
            return _lazily(self._original, self._transform)
        return rows.select(self._kept) if self._transform.selects else rows


def _table(source: RowSource, transform: RowTransform) -> RowTable | None:
    """An empty table for the rows; None for a stream, and where they can be taken from the dataset as they are."""
    from datasets import Json

    rows = source.dataset
    if rows is None:
        return RowTable()
    if is_stream(rows) or not transform.columns.changes:
        return None
    plain = is_transformed(rows) or any(isinstance(kind, Json) for kind in rows.features.values())
    return RowTable(None if plain else features(transform.columns, rows.features))


def _names(rows: Iterable[tuple[Line, Any]]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(row for _, row in rows if isinstance(row, Mapping))))


def _lazily(source: RowSource, transform: RowTransform) -> Any:
    """A stream whose rows are transformed as they are drawn."""
    rows = source.dataset
    names = rows.column_names or list(next(iter(rows), ()))  # a stream may not know them
    if names:
        transform.check_names(names, source.name)
    if transform.selects:
        take = RowFilter(transform)
        rows = rows.filter(lambda row: take(row) is not None)
    columns = transform.columns
    if not columns.changes:
        return rows
    gone = [name for name in columns.taken if name in (rows.column_names or columns.taken)]
    return rows.map(columns, features=features(columns, rows.features), remove_columns=gone)
