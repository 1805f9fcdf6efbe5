"""A recipe's datasets as sources of rows, each as it is trained on; files are streamed, in constant memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from podium.data.loading import DataSpec, OpenData, load_data, open_data
from podium.data.survey import Line, RowSource
from podium.data.transform import Attempts
from podium.errors import PodiumError


def open_sources(
    spec: DataSpec, attempts: Attempts, *, keep: bool
) -> tuple[RowSource | None, RowSource | None, OpenData]:
    """The training rows and the held-out rows; None where there are none, or where a problem explains why not.

    `keep`: whether the rows are to be loaded by the same pass.
    """
    opened = open_data(spec, attempts, keep=keep)
    if spec.parts and not keep and len(opened.train) == len(spec.parts):
        attempts.attempt(lambda: load_data(spec))  # only Arrow knows whether the parts' columns go together
    train = _joined([made.source for _, made in opened.train], spec.name, attempts)
    return train, _joined([made.source for _, made in opened.held_out], "the held-out rows", attempts), opened


def _joined(sources: Sequence[RowSource], name: str, attempts: Attempts) -> RowSource | None:
    """Several sources as one; every row keeps the place it has in its own."""
    if len(sources) < 2:
        return sources[0] if sources else None

    def rows_of(source: RowSource) -> Iterator[tuple[Line, Any]]:
        for index, (line, row) in enumerate(source.rows()):
            yield f"{source.name}:{line}, row {index}" if isinstance(line, int) else f"{source.name}, row {index}", row

    def rows() -> Iterator[tuple[Line, Any]]:
        for source in sources:
            try:
                yield from rows_of(source)
            except PodiumError as error:
                attempts.attempt(functools.partial(_raise, error))  # the other sources are still read

    abouts = [source.about for source in sources if source.about is not None]
    columns = [source.columns for source in sources if source.columns is not None]
    known = tuple(dict.fromkeys(itertools.chain.from_iterable(columns)))
    return RowSource(
        name=name,
        rows=rows,
        about=sum(abouts) if len(abouts) == len(sources) else None,
        columns=known if len(columns) == len(sources) else None,
        is_stream=any(source.is_stream for source in sources),
        form=next((source.form for source in sources if source.form), ""),
    )


def _raise(error: PodiumError) -> None:
    raise error
