"""Rows of `--data` or of a recipe, for the verbs that play them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from podium.errors import ConfigError


def rows_of(data: str, given: Any) -> Iterable[Mapping[str, Any]]:
    """Rows of `--data`, with the prompts and answers that a recipe makes of its own; else those; else an empty row."""
    from podium.data.columns import Columns
    from podium.data.rows import DataSpec, load_data

    columns = Columns() if given is None else given.columns
    spec = DataSpec(dataset=data, columns=columns) if data else given
    if spec is None or not spec.is_given:
        return [{}]
    return load_data(spec)[0]


def row_of(data: str, given: Any, number: int) -> Mapping[str, Any]:
    """One row of `--data`, else of a recipe. Raises `ConfigError` where there are fewer."""
    rows = [dict(row) for row in islice(rows_of(data, given), number + 1)]
    if len(rows) <= number:
        raise ConfigError(
            f"There is no row {number}: the data has {len(rows)} (the first is row 0).",
            fix="--row 0",
            row=number,
            count=len(rows),
        )
    return rows[number]
