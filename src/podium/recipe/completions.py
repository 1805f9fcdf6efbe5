"""The right completion of a row, for a stage of supervised fine-tuning.

right = Completions.of("<answer>{answer}</answer>")
right({"prompt": "2+2=", "answer": "4"})          # "<answer>4</answer>"
"""

from __future__ import annotations

import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from podium.errors import DataError, as_line, did_you_mean
from podium.rewards.resolve import GOLD

_EXAMPLE = 'completion: "<answer>{answer}</answer>"'

USUAL = ("completion", *GOLD)
"""Columns that are taken where a recipe names none, the first that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Makes the completion of a row from its columns."""

    template: str
    """Text with columns in braces."""
    columns: tuple[str, ...]
    """That the template names."""
    alone: bool
    """Whether the column is taken as it is: it may hold messages."""

    @classmethod
    def of(cls, written: str | None, columns: Collection[str]) -> Completions:
        """What `completion:` of a stage says: a column, a text with columns in braces, or nothing.

        Raises:
            DataError: a column that the rows do not have.
        """
        if written is None:
            found = next((name for name in USUAL if name in columns), None)
            if found is None:
                raise DataError(
                    f"an sft stage needs the right completion of each row, and none of the columns "
                    f"({', '.join(columns)}) is called so.",
                    code="D060",
                    fix="Write `completion: my_column`, or a text with columns in braces: `completion: 'It is {n}.'`",
                )
            return cls(template=f"{{{found}}}", columns=(found,), alone=True)
        names = _names(written)
        alone = not names
        names = names or (written,)
        missing = [name for name in names if name not in columns]
        if missing:
            raise DataError(
                f"`completion: {written}` names no column of the rows ({', '.join(columns)}): `{missing[0]}`.",
                code="D060",
                fix=did_you_mean(missing[0], columns) or as_line("completion", next(iter(columns), None)),
            )
        return cls(template=f"{{{written}}}" if alone else written, columns=names, alone=alone)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """`prompt` and `completion` as TRL's `SFTTrainer` takes them: both text, or both messages.

        Raises:
            DataError: a column is null in this row.
        """
        for name in self.columns:
            if row[name] is None:
                what = f"`{name}` is null in a row, so there is no right completion of it."
                raise DataError(what, code="D060", fix=f"filter: {name} != ''")
        prompt, only = row["prompt"], row[self.columns[0]]
        if self.alone and isinstance(only, list):
            return {"prompt": prompt, "completion": only}
        text = str(only) if self.alone else self.template.format_map({name: row[name] for name in self.columns})
        said = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        return {"prompt": prompt, "completion": said}


def _names(written: str) -> tuple[str, ...]:
    """Columns in braces. Only plain names: nothing of a value can be reached into."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(written) if name is not None]
    except ValueError as error:
        raise DataError(
            f"`completion: {written}`: {error}; a brace that is text is written twice.", code="D060", fix=_EXAMPLE
        ) from None
    odd = [name for name in fields if not name.isidentifier()]
    if odd:
        raise DataError(
            f"`completion: {written}`: `{{{odd[0]}}}` is no column; a brace that is text is written twice.",
            code="D060",
            fix=_EXAMPLE,
        )
    return tuple(dict.fromkeys(fields))
