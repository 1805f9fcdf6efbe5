"""Names of settings in other trainers and older releases: the tables of `docs/from-other-trainers.md`, read by rows.

`names.md` has the tables. A row is read as one name for another where both of its cells are names in code, or both are
a name with a value (`loss_agg_mode: token-mean`, `loss_type: dapo`); any other row is words to show.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from podium.errors.texts import as_line, nearest

_ANY = "NAME"
"""Stands for any value in a row that is about one."""
_SHORT = 4
"""Letters up to which the last part of a dotted name is too common to be known without the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A name elsewhere, or a name with one of its values."""

    fix: str
    certain: bool
    """Whether the settings say the same; else only the words of `fix` do."""
    keys: tuple[str, ...] = ()
    """The settings that it stands for."""
    values: tuple[str, str] | None = None
    """A value elsewhere, and what it is here."""

    def fits(self, value: Any, known: Collection[str]) -> bool:
        """Whether the row is about this value, and its settings are among those known."""
        same = self.values is None or self.values[0] in (_ANY, str(value).capitalize(), str(value))
        return same and all(key in known for key in self.keys)

    def settings(self, value: Any) -> dict[str, Any]:
        """The settings that say the same as the name with this value."""
        if self.values is not None:
            return dict.fromkeys(self.keys, yaml.safe_load(self.values[1].replace(_ANY, str(value))))
        if len(self.keys) == 1:
            return {self.keys[0]: value}
        parts = {key: value.get(key) if isinstance(value, Mapping) else getattr(value, key, None) for key in self.keys}
        return {key: part for key, part in parts.items() if part is not None}


def meant(name: str, value: Any, known: Collection[str]) -> tuple[str, dict[str, Any] | None]:
    """Advice on an unknown name, and the settings that say the same; None: only words can.

    >>> meant("group_size", 8, ["num_generations"])
    ('write `num_generations`; completions of one prompt', {'num_generations': 8})
    >>> meant("num_generation", 4, ["num_generations"])
    ('Did you mean `num_generations`?', {'num_generations': 4})
    >>> meant("zzz", 4, ["num_generations"])
    ('take `zzz` out', {})
    """
    spelt, table = name.replace("-", "_").lower(), _rows()
    ends = (spelt.split(".", dots)[-1] for dots in range(spelt.count(".") + 1))
    rows = sorted(next((table[end] for end in ends if end in table), ()), key=lambda row: not row.keys)
    row = next((row for row in rows if row.fits(value, known)), None)
    if row is not None:
        return row.fix.replace(_ANY, str(value)), row.settings(value) if row.certain else None
    words = next((row.fix for row in rows if row.values or not row.keys), "")
    near = nearest(spelt, known)
    if near and not words:
        return f"Did you mean `{near}`?", {near: value}
    return words or as_line(name, None), None if words else {}


@cache
def _rows() -> Mapping[str, list[_Row]]:
    """By name, in the order of the tables."""
    made = defaultdict[str, list[_Row]](list)
    for line in Path(__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines():
        cells = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`([^`]+)`", cells[0])
        if len(cells) != 3 or not names:
            continue
        here = re.findall(r"`([^`]+)`", cells[1])
        pairs = len(names) == len(here) > 1
        for number, each in enumerate(names):
            name, _, old = each.partition(": ")
            last = name.rpartition(".")[2]
            row = _row(old, f"`{here[number]}`" if pairs else cells[1], cells[2])
            for spelt in {name, last if len(last) > _SHORT else name}:
                made[spelt].append(row)
    return made


def _row(old: str, cell: str, note: str) -> _Row:
    """The row of one name, which may be about its value `old` alone, from the other two cells of a table."""
    note = f"; {note}" * bool(note)
    if cell == "leave out":
        return _Row(fix="leave it out" + note.replace("; ", ": ", 1), certain=True, values=(old, "") if old else None)
    here = [each.partition(": ") for each in re.findall(r"`([^`]+)`", cell)]
    plain = not re.sub(r"`\w+(: [\w-]+|: \"\{NAME\}\")?`|[, ]", "", cell)
    one_for_one = plain and all(bool(new) == bool(old) for _, _, new in here)
    keys = tuple(key for key, _, _ in here) if one_for_one else ()
    lead = "" if cell.startswith(("the ", "a ", "chosen")) else "write "
    values = (old, here[0][2]) if old and keys else None
    return _Row(fix=f"{lead}{cell}{note}", certain=bool(keys), keys=keys, values=values)
