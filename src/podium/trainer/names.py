"""Names of settings in other trainers and older releases: the tables of `docs/trl.md`, read by rows.

`names.md` has the tables. A row is read as one name for another where both of its cells are names in code, or both are
a name with a value (`loss_agg_mode: token-mean`, `loss_type: dapo`); any other row is words to show.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from podium.errors.texts import as_line, nearest

_ANY = "NAME"
"""Stands for any value in a row that is about one."""
_SHORT = 4
"""Letters up to which the last part of a dotted name is too common to be known without the others; so is `enable`."""
_SLIP = 0.75
"""Likeness of a name that is taken for another one misspelt; below it the other is asked for and nothing is changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A name elsewhere, or a name with one of its values."""

    fix: str
    certain: bool
    """Whether the settings say the same; else only the words of `fix` do."""
    keys: tuple[str, ...] = ()
    """The settings that it stands for."""
    old: str = ""
    """The value elsewhere that the row is about; empty: any."""
    new: tuple[str, ...] = ()
    """The equivalent value of each of `keys`, in their order."""

    def fits(self, value: Any, known: Collection[str]) -> bool:
        """Whether the row is about this value, and its settings are among those known."""
        same = self.old in ("", _ANY, str(value).capitalize(), str(value))
        return same and all(key in known for key in self.keys)

    def settings(self, value: Any) -> dict[str, Any]:
        """The settings that say the same as the name with this value."""
        if self.old:
            made = (yaml.safe_load(each.replace(_ANY, str(value))) for each in self.new)
            return dict(zip(self.keys, made, strict=True))
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
    spelt = name.replace("-", "_").lower()
    rows = sorted(_rows_of(spelt), key=lambda row: not row.keys)
    row = next((row for row in rows if row.fits(value, known)), None)
    if row is not None:
        return row.fix.replace(_ANY, str(value)), row.settings(value) if row.certain else None
    last = spelt.rpartition(".")[2]
    near = last if last in known else nearest(spelt, known)
    valued = [row for row in rows if row.old]
    if isinstance(value, bool) and valued:  # the other one of the two changes nothing
        return "leave it out", {}
    words = "; ".join(f"for `{row.old}` {row.fix}" for row in valued) or next((x.fix for x in rows if not x.keys), "")
    if near and (near == last or not words):
        is_slip = near == last or SequenceMatcher(None, spelt, near).ratio() >= _SLIP
        return f"Did you mean `{near}`?", {near: value} if is_slip else None
    return words or as_line(name, None), None if words else {}


def meant_within(name: str, value: Any, known: Collection[str]) -> dict[str, str]:
    """Advice on the names in a section that only other trainers have, of those in the tables, by their whole names.

    >>> meant_within("actor_rollout_ref", {"rollout": {"n": 8, "seed": 1}}, ["num_generations", "seed"])
    {'actor_rollout_ref.rollout.n': 'write `num_generations`'}
    """
    if not isinstance(value, Mapping):
        return {name: meant(name, value, known)[0]} if name.rpartition(".")[2] not in known and _rows_of(name) else {}
    parts = (meant_within(f"{name}.{key}", each, known) for key, each in value.items())
    return {inner: said for part in parts for inner, said in part.items()}


def meant_value(name: str, value: Any) -> tuple[str, dict[str, Any]] | None:
    """Advice on a value that a known name has elsewhere, and the settings that say the same; None: no row has it.

    >>> meant_value("advantage_estimator", "dr_grpo")
    ('write `loss_type: dr_grpo`, `scale_rewards: none`', {'loss_type': 'dr_grpo', 'scale_rewards': 'none'})
    """
    row = next((row for row in _rows().get(name, ()) if row.certain and row.old == str(value)), None)
    return None if row is None else (row.fix, row.settings(value))


def _rows_of(name: str) -> Sequence[_Row]:
    """The rows of a name, or of the longest end of a dotted one that has any."""
    ends = (name.split(".", dots)[-1] for dots in range(name.count(".") + 1))
    return next((_rows()[end] for end in ends if end in _rows()), ())


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
            cell = f"`{here[number]}`" if pairs else f"`{last}`" if cells[1] == "the same" else cells[1]
            row = _row(old, cell, cells[2])
            for spelt in {name, last if len(last) > _SHORT and last != "enable" else name}:
                made[spelt].append(row)
    return made


def _row(old: str, cell: str, note: str) -> _Row:
    """The row of one name, which may be about its value `old` alone, from the other two cells of a table."""
    note = f"; {note}" * bool(note)
    if cell == "leave out":
        return _Row(fix="leave it out" + note.replace("; ", ": ", 1), certain=True, old=old)
    here = [each.partition(": ") for each in re.findall(r"`([^`]+)`", cell)]
    plain = not re.sub(r"`\w+(: [\w-]+|: \"\{NAME\}\")?`|[, ]", "", cell)
    one_for_one = plain and all(bool(new) == bool(old) for _, _, new in here)
    keys = tuple(key for key, _, _ in here) if one_for_one else ()
    lead = "" if cell.startswith(("the ", "a ", "chosen")) else "write "
    new = tuple(each for _, _, each in here) if old and keys else ()
    return _Row(fix=f"{lead}{cell}{note}", certain=bool(keys), keys=keys, old=old if new else "", new=new)
