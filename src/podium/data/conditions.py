"""`filter:` of a recipe: conditions on the columns of the rows to train on.

keep = parse_condition("level <= 2")
keep({"prompt": "...", "level": 1})
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from podium.data.query import as_json
from podium.errors import DataError
from podium.errors.texts import nearest

COMPARISONS: Mapping[str, Callable[[Any, Any], bool]]
COMPARISONS = {"==": eq, "!=": ne, "<=": le, ">=": ge, "<": lt, ">": gt}

_CONDITION = re.compile(r"\s*(?P<column>[^=!<>]*[^\s=!<>])\s*(?P<sign>==|!=|<=|>=|<|>)\s*(?P<value>.*\S)\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`column sign value`; a row without the column's value (null) does not meet it."""

    column: str
    sign: str
    value: Any

    @property
    def is_presence(self) -> bool:
        """Whether the condition is that the cell is not empty: then it is one for held-out rows too."""
        return self.sign == "!=" and self.value == ""

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Raises `DataError` for a value that cannot be compared with the condition's."""
        found = row.get(self.column)
        if found is None:
            return False
        try:
            return bool(COMPARISONS[self.sign](found, self.value))
        except TypeError:
            kind = type(found).__name__
            what = f"`filter: {self}`: `{self.column}` holds {kind} ({str(found)[:40]!r}), which cannot be compared so "
            what += f"with {self.value!r}."
            fix = f"filter: {self.column} {self.sign} VALUE, of the type {kind}"
            raise DataError(what, code="C061", fix=fix) from None

    def check(self, columns: Collection[str]) -> None:
        """Raises `DataError` where there is no such column."""
        if self.column not in columns:
            raise DataError(
                "C061.filter_rows_no",
                owner=self,
                column=self.column,
                columns=columns,
                near=nearest(self.column, columns),
                first_column=next(iter(columns), "COLUMN"),
            )

    def __str__(self) -> str:
        return f"{self.column} {self.sign} {self.value}"


def parse_condition(text: str) -> Condition:
    """The condition that a text describes; the value is a number, true, false or a word; quotes keep a number as text.

    Raises `ValueError` for a text that is no comparison.

    >>> parse_condition("level <= 2")({"level": 3}), parse_condition("kind == 'two words'")({"kind": "two words"})
    (False, True)
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"expected a comparison such as `level <= 2`, got `{text}`")
    value = found["value"]
    quoted = len(value) > 1 and value[0] == value[-1] == "'"
    return Condition(column=found["column"], sign=found["sign"], value=value[1:-1] if quoted else as_json(value))
