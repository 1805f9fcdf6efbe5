"""Worked examples from the rows of a dataset: `examples: 2` in a recipe takes two, and leaves them out of all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podium.data.columns import Columns
from podium.data.selection import fingerprint, is_held_out
from podium.data.templates import parse
from podium.errors import DataError

LOOKED_AT = 200
"""Rows from which examples are taken."""
LONGEST = 500
"""Characters of a row that is an example."""


def worked_examples(
    rows: Sequence[Mapping[str, Any]], columns: Columns, count: int, *, held_out: float = 0.0, in_tags: bool = False
) -> dict[str, dict[str, str]]:
    """Short rows with different answers, by the digest of the question; of the shorter half, in order of the digests.

    Args:
        rows: as they come, the first ones of the dataset.
        columns: templates; only the columns that they name are part of an example.
        count: number of examples.
        held_out: share of the prompts that are held out, of which none is taken.
        in_tags: whether the answer is put in `<answer>` tags, where one column holds it.

    Raises:
        DataError: (D052) fewer rows than that have a short question and answer.
    """
    asked = parse(columns.prompt).columns if columns.prompt is not None else ("prompt",)
    told = parse(columns.answer).columns if columns.answer is not None else ("answer",)
    found: dict[str, dict[str, str]] = {}
    for row in rows[:LOOKED_AT]:
        text = {name: str(row[name]) for name in (*asked, *told) if _is_short(row.get(name))}
        question = columns.identity(row)
        fits = len(text) == len({*asked, *told}) and sum(map(len, text.values())) <= LONGEST
        if fits and not (held_out and is_held_out(question, held_out)):
            found.setdefault(fingerprint(question), text)
    short = sorted(found, key=lambda key: (sum(map(len, found[key].values())), key))
    half = sorted(short[: max(count, (len(short) + 1) // 2)])
    answers: dict[str, str] = {}
    for key in half:
        answers.setdefault(" ".join(found[key][name] for name in told), key)
    chosen = [*answers.values(), *(key for key in half if key not in answers.values())][:count]
    if len(chosen) < count:
        raise DataError(
            "D052.examples_first_rows", count=count, chosen_count=len(chosen), rows_count=len(rows[:LOOKED_AT])
        )
    tagged = in_tags and len(told) == 1 and columns.answer_from is None
    return {
        key: {**found[key], told[0]: f"<answer>{found[key][told[0]]}</answer>"} if tagged else found[key]
        for key in chosen
    }


def _is_short(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and 0 < len(str(value).strip()) <= LONGEST
