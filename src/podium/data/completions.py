"""The right completion of a row, for a stage of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from podium.data.columns import GOLD
from podium.data.templates import Template, parse
from podium.errors import DataError
from podium.errors.texts import as_line, did_you_mean

USUAL = ("completion", *GOLD)
"""Columns that are taken where a recipe names none, the first that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Makes the completion of a row from its columns."""

    template: Template

    @classmethod
    def of(cls, written: str | None, columns: Collection[str]) -> Completions:
        """By a stage's `completion:`, a column, a text with columns in braces, or None. `DataError`: no such column."""
        listed = ", ".join(columns)
        if written is None:
            if (found := next((name for name in USUAL if name in columns), None)) is None:
                what = f"an sft stage needs the right completion of each row, and none of the columns ({listed}) is "
                fix = "Write `completion: my_column`, or a text with columns in braces: `completion: 'It is {n}.'`"
                raise DataError(what + "called so.", code="D060", fix=fix)
            return cls(template=Template(("", found, "")))
        try:
            template = parse(written)
        except DataError as error:
            raise DataError(
                f"`completion: {written}`: {error.what}", code="D060", fix=error.fix, written=written, what=error.what
            ) from None
        if not template.columns:
            template = Template(("", written, ""))
        missing = next((name for name in template.columns if name not in columns), None)
        if missing is not None:
            raise DataError(
                f"`completion: {written}` names no column of the rows ({listed}): `{missing}`.",
                code="D060",
                fix=did_you_mean(missing, columns) or as_line("completion", next(iter(columns), None)),
                written=written,
                listed=listed,
                missing=missing,
            )
        return cls(template=template)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """`prompt` and `completion` as TRL's `SFTTrainer` takes them: both text, or both messages.

        Raises `DataError` where a column is null in this row.
        """
        for name in self.template.columns:
            if row[name] is None:
                raise DataError(
                    f"`{name}` is null in a row, so there is no right completion of it.",
                    code="D060",
                    fix=f"filter: {name} != ''",
                    name=name,
                )
        prompt = row["prompt"]
        right = self.template(row)
        if not isinstance(prompt, str) and isinstance(right, str):
            right = [{"role": "assistant", "content": right}]
        return {"prompt": prompt, "completion": right}
