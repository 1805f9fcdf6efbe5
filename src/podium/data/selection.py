"""Selection of the rows to train on: by conditions, by content (held out or not), and by measured pass rates.

    transform = RowTransform(columns=Columns(prompt="{question}"), held_out=0.2)
    transform(row, Counter())         # the row with its prompt; None: it is left out

Every row is judged alone, so that a stream, a file and a dataset are split in the same way. `worked_examples` takes
the rows that `examples: 2` puts in front of every prompt; they are left out of all others.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any, Literal

import numpy as np

from podium.data.columns import Columns, names_or_none
from podium.data.files import jsonl_rows
from podium.data.images import file_name, has_images, image_values, with_blocks
from podium.data.query import as_json
from podium.data.sources import IMAGES, undecoded
from podium.data.templates import column_of, field_of, parse
from podium.errors import DataError, Finding
from podium.errors.texts import listed, named_list, nearest
from podium.records import as_name

Order = Literal["easy_first", "hard_first"]
ORDERS: tuple[Order, ...] = ("easy_first", "hard_first")


TOO_HARD = "solved too rarely"
TOO_EASY = "solved too often"


def plain(prompt: Any) -> str:
    """The content of a prompt, text or messages: white space, capitals and ways to write an accent aside.

    >>> plain("What is  1+1?\\n")
    'what is 1+1?'
    """
    if isinstance(prompt, (list, tuple)):
        turns = [[turn.get("role"), turn.get("content")] if isinstance(turn, Mapping) else turn for turn in prompt]
        prompt = json.dumps(turns, ensure_ascii=False, default=as_name)
    text = str(prompt)
    return " ".join((text if text.isascii() else unicodedata.normalize("NFC", text)).casefold().split())


def fingerprint(prompt: Any) -> str:
    """A name of the content of a prompt (`plain`): the start of its sha256.

    >>> fingerprint("What is  1+1?") == fingerprint("what is 1+1?\\n")
    True
    """
    return hashlib.sha256(plain(prompt).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def asked_about(row: Mapping[str, Any]) -> Any:
    """The prompt of a row by which pass rates know it: with names of its images, by the bytes of their files."""
    prompt: Any = row.get("prompt")
    if not has_images(row):
        return prompt
    turns = [prompt] if isinstance(prompt, str) else with_blocks(prompt, lambda value, _: file_name(value))
    return [*turns, *map(file_name, image_values(row))]


def sampled_rows(rows: Any, most: int | None, seed: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield at most `most` rows with their numbers, drawn without replacement, in the order of their numbers.

    The first rows of a table that is sorted are of one kind. A seed always draws the same rows, and those of a smaller
    number are among those of a larger one. Of a stream, whose length is not known, the first rows. None: all rows.

    >>> list(sampled_rows("abcdefgh", 3)), list(sampled_rows(iter("abc"), 2))
    ([(2, 'c'), (3, 'd'), (4, 'e')], [(0, 'a'), (1, 'b')])
    """
    if most is None or not hasattr(rows, "__len__"):
        yield from enumerate(islice(rows, most))
        return
    order = np.random.default_rng(seed).permutation(len(rows))[:most]
    yield from ((number, rows[number]) for number in sorted(order.tolist()))


def is_held_out(question: Any, share: float) -> bool:
    """Whether a prompt is on the held-out side: by its content alone, system messages aside.

    Prompts of equal content are always on one side, whatever the file, the order and the seed; a larger share holds
    out what a smaller one does, and more.

    >>> sum(is_held_out(f"{a}+{b}", 0.2) for a in range(100) for b in range(100))
    1984
    """
    if isinstance(question, (list, tuple)):
        question = [turn for turn in question if not (isinstance(turn, Mapping) and turn.get("role") == "system")]
    return int(fingerprint(question)[:16], 16) < share * 2**64


COMPARISONS: Mapping[str, Callable[[Any, Any], bool]]
COMPARISONS = {"==": eq, "!=": ne, "<=": le, ">=": ge, "<": lt, ">": gt}

_CONDITION = re.compile(r"\s*(?P<column>[^=!<>]*[^\s=!<>])\s*(?P<sign>==|!=|<=|>=|<|>)\s*(?P<value>.*\S)\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition of a recipe's `filter:`, `column sign value`; a row without the column's value (null) fails it."""

    column: str
    sign: str
    value: Any

    @property
    def is_presence(self) -> bool:
        """Whether the condition is that the cell is not empty: then it is one for held-out rows too."""
        return self.sign == "!=" and self.value == ""

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Raises `DataError` for a value that cannot be compared with the condition's."""
        if (found := field_of(row, self.column)) is None:
            return False
        try:
            return bool(COMPARISONS[self.sign](found, self.value))
        except TypeError:
            kind = type(found).__name__
            raise DataError(
                f"`filter: {self}`: `{self.column}` holds {kind} ({str(found)[:40]!r}), which cannot be compared so "
                f"with {self.value!r}.",
                code="C061",
                fix=f"filter: {self.column} {self.sign} VALUE, of the type {kind}",
            ) from None

    def check(self, columns: Collection[str]) -> None:
        """Raises `DataError` where there is no such column."""
        if column_of(self.column, columns) is None:
            near = nearest(self.column, columns)
            first_column = next(iter(columns), "COLUMN")
            raise DataError(
                f"`filter: {self}`: the rows have no column `{self.column}`, but {listed(columns)}.",
                code="C061",
                fix=f"Did you mean `{near}`?" if near else f"filter: {first_column} == VALUE",
                settings=("filter",),
                owner=self,
                column=self.column,
                columns=columns,
                near=near,
                first_column=first_column,
            )

    def __str__(self) -> str:
        return f"{self.column} {self.sign} {self.value}"


def parse_condition(text: str) -> Condition:
    """The condition that a text describes; the value is a number, true, false or a word; quotes keep a number as text.

    Raises `ValueError` for a text that is no comparison.

    >>> parse_condition("level <= 2")({"level": 3}), parse_condition("kind == 'two words'")({"kind": "two words"})
    (False, True)
    """
    if (found := _CONDITION.fullmatch(text)) is None:
        raise ValueError(f"expected a comparison such as `level <= 2`, got `{text}`")
    value = found["value"]
    quoted = len(value) > 1 and value[0] == value[-1] == "'"
    return Condition(column=found["column"], sign=found["sign"], value=value[1:-1] if quoted else as_json(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRates:
    """Share of completions that solved each prompt, and the shares with which a row stays."""

    name: str  # the file, for messages
    by_prompt: Mapping[str, float] = field(repr=False)  # by fingerprint of `asked_about` of its row
    bounds: tuple[float, float] | None = None  # lowest and highest that stay; None: all between never and always

    def rate(self, row: Mapping[str, Any]) -> float | None:
        """Rate of a row as the trainer gets it; None: not measured."""
        return self.by_prompt.get(fingerprint(asked_about(row)))

    def reason_to_drop(self, rate: float) -> str | None:
        """The reason to leave out a row with this rate, in words; None: it stays."""
        if self.bounds is None:
            return {0.0: TOO_HARD, 1.0: TOO_EASY}.get(rate)
        lowest, highest = self.bounds
        if rate < lowest:
            return TOO_HARD
        return TOO_EASY if rate > highest else None


def read_pass_rates(file: str, bounds: Sequence[float] | None = None) -> PassRates:
    """Read a file that `podium sample -n N --save FILE` wrote. Raises `DataError` (D025, D054)."""
    path = Path(file).expanduser()
    fix = f"Measure them: podium sample RECIPE -n 200 --save {file}"
    if not path.is_file():
        raise DataError(
            f"`pass_rates`: there is no file {file}.", code="D025", fix=fix, settings=("pass_rates",), file=file
        )
    rates = {}
    for number, row in jsonl_rows(path):
        rate: Any = row.get("pass_rate") if isinstance(row, Mapping) else None
        fits = isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 <= rate <= 1
        if not fits or not isinstance(row.get("fingerprint"), str):
            raise DataError(
                f"`pass_rates`: {file} line {number} is no measured pass rate, with `fingerprint` and "
                "`pass_rate` (from 0 to 1).",
                code="D054",
                fix=fix,
                settings=("pass_rates",),
                file=file,
                number=number,
            )
        rates[row["fingerprint"]] = float(rate)
    low_high = None if bounds is None else (float(bounds[0]), float(bounds[1]))
    return PassRates(name=file, by_prompt=rates, bounds=low_high)


@dataclass(frozen=True, kw_only=True)
class RowTransform:
    """A way to make rows with a prompt and an answer, and to leave rows out.

    Rows that are worked examples of the prompt are left out. A pass over rows counts in a `Counter` how many were
    `seen`, `met` the conditions, were `measured` (have a pass rate), left out for it (by the reason), and `kept`.
    """

    columns: Columns = field(default_factory=Columns)
    filter: tuple[Condition, ...] = ()  # conditions that a row must meet, by its columns as they come
    held_out: float | None = None  # share of the prompts on the held-out side; None: there are no sides
    wants_held_out: bool = False  # whether the held-out side is kept, and not the other
    rates: PassRates | None = None

    @property
    def selects(self) -> bool:
        """Whether rows may be left out."""
        has_sides = self.held_out is not None
        return has_sides or self.rates is not None or bool(self.filter or self.columns.examples)

    @functools.cached_property
    def _examples(self) -> frozenset[str]:
        """Fingerprints of the worked examples."""
        return frozenset(fingerprint(self.columns.identity(example)) for example in self.columns.examples)

    def check_names(self, names: Sequence[str], dataset: str) -> None:
        """Raises `DataError` for columns that the dataset lacks (C061, D052)."""
        for condition in self.filter:
            condition.check(names)
        self.columns.check_names(names, dataset)

    def __call__(self, row: Mapping[str, Any], counts: Counter[str]) -> Mapping[str, Any] | None:
        """The row with its prompt and answer; None: it is left out."""
        counts["seen"] += 1
        if not all(condition(row) for condition in self.filter):
            return None
        counts["met"] += 1
        question = self.columns.identity(row)
        if self.held_out is not None and is_held_out(question, self.held_out) is not self.wants_held_out:
            return None
        if self._examples and fingerprint(question) in self._examples:
            return None
        made = self.columns(row) if self.columns.changes else row
        rate = None if self.rates is None else self.rates.rate(made)
        if self.rates is not None and rate is not None:
            counts["measured"] += 1
            if (reason := self.rates.reason_to_drop(rate)) is not None:
                counts[reason] += 1
                return None
        counts["kept"] += 1
        return made

    def findings(self, name: str, counts: Counter[str]) -> list[Finding]:
        """Rows left out for their pass rates, or none measured. Raises `DataError` where no row meets the filter."""
        if counts["seen"] and not counts["met"]:
            conditions = " and ".join(map(str, self.filter))
            raise DataError(
                f"`filter: {conditions}` keeps none of the {counts['seen']:,} rows.",
                code="C061",
                fix="filter: a condition that some rows meet",
                settings=("filter",),
                map=conditions,
                num_seen=counts["seen"],
            )
        dropped = counts[TOO_HARD] + counts[TOO_EASY]
        total = counts["kept"] + dropped
        rates = self.rates
        if rates is None or not total:
            return []
        if not counts["measured"]:
            what = (
                f"`pass_rates`: none of the {len(rates.by_prompt):,} prompts in {rates.name} is one of {name}: they "
                "were measured on other prompts, or with another `system` or other `examples`"
            )
            fix = f"measure them again: podium sample RECIPE -n 200 --save {rates.name}"
            return [Finding(code="D054", severity="error", what=what, fix=fix)]
        if not dropped:
            return []
        why = ", ".join(f"{counts[reason]:,} {reason}" for reason in (TOO_HARD, TOO_EASY) if counts[reason])
        unknown = total - counts["measured"]
        stay = f"; {unknown:,} without a measured rate stay" if unknown else ""
        bounds = "their pass rates" if rates.bounds is None else "pass_rate [{:g}, {:g}]".format(*rates.bounds)
        return [
            Finding(
                code="D051",
                severity="note",
                what=f"{name}: {dropped:,} of {total:,} rows are left out by {bounds}: {why}{stay}",
                fix="`pass_rate: [0, 1]` keeps them",
                facts={"name": name, "dropped": dropped, "total": total, "bounds": bounds, "why": why, "stay": stay},
            )
        ]


def in_order(dataset: Any, order: Order, *, name: str, difficulty: str | None, rates: PassRates | None) -> Any:
    """The rows of a `Dataset` from easy to hard or the reverse; equals stay in their order.

    Hard is a high number in the column `difficulty`, or without one a low pass rate; rows that were not measured come
    last. Raises `DataError` (D055) for a column that is not there or has something else than numbers in it.
    """
    if difficulty is None:
        assert rates is not None, "an order needs a column or pass rates"
        columns = [name for name in IMAGES if name in dataset.column_names]
        found = map(rates.rate, undecoded(dataset.select_columns(columns)))
        ranks = [None if rate is None else -rate for rate in found]
    elif difficulty in dataset.column_names:
        ranks = [as_difficulty(value, difficulty, row, name) for row, value in enumerate(dataset[difficulty])]
    else:
        raise no_difficulty(difficulty, dataset.column_names, name)
    sign = 1.0 if order == "easy_first" else -1.0
    keys = [(rank is None, 0.0 if rank is None else sign * rank) for rank in ranks]
    return dataset.select(sorted(range(len(keys)), key=keys.__getitem__))


def no_difficulty(column: str, columns: Iterable[str], name: str) -> DataError:
    """D055: there is no such column."""
    columns = list(columns)
    other = next((column for column in columns if column != "prompt"), "COLUMN")
    near = nearest(column, columns)
    return DataError(
        f"`difficulty`: {name} has no column `{column}`; its columns are {names_or_none(columns)}.",
        code="D055",
        fix=f"Did you mean `{near}`?" if near else f"difficulty: {other}, or another with a number in every row",
        settings=("difficulty",),
        name=name,
        column=column,
        listed=names_or_none(columns),
        near=near,
        other=other,
    )


def as_difficulty(value: Any, column: str, row: int, name: str) -> float:
    """The number in a field. Raises `DataError` (D055)."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise DataError(
            f"`difficulty`: {name}, row {row}: `{column}` is {value!r:.40}, not a number.",
            code="D055",
            fix="Give every row a number, larger for harder.",
            settings=("difficulty",),
            name=name,
            row=row,
            column=column,
            value=value,
        )
    return number


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
    of_answer = parse(columns.answer).columns if columns.answer is not None else ("answer",)
    found: dict[str, dict[str, str]] = {}
    for row in rows[:LOOKED_AT]:
        found_in = {name: field_of(row, name) for name in (*asked, *of_answer)}
        text = {name: str(value) for name, value in found_in.items() if _is_short(value)}
        question = columns.identity(row)
        fits = len(text) == len({*asked, *of_answer}) and sum(map(len, text.values())) <= LONGEST
        if fits and not (held_out and is_held_out(question, held_out)):
            found.setdefault(fingerprint(question), text)
    short = sorted(found, key=lambda key: (sum(map(len, found[key].values())), key))
    half = sorted(short[: max(count, (len(short) + 1) // 2)])
    answers: dict[str, str] = {}
    for key in half:
        answers.setdefault(" ".join(found[key][name] for name in of_answer), key)
    chosen = [*answers.values(), *(key for key in half if key not in answers.values())][:count]
    if len(chosen) < count:
        looked_at = len(rows[:LOOKED_AT])
        names = named_list(dict.fromkeys((*asked, *of_answer)))
        raise DataError(
            f"`examples: {count}`: {len(chosen)} of the first {looked_at} rows have a short text in each of {names}.",
            code="D052",
            fix="examples: [{...}], written by hand",
            settings=("examples",),
            count=count,
            chosen_count=len(chosen),
            rows_count=looked_at,
            columns=names,
        )
    tagged = in_tags and len(of_answer) == 1 and columns.answer_from is None
    return {
        key: {**found[key], of_answer[0]: f"<answer>{found[key][of_answer[0]]}</answer>"} if tagged else found[key]
        for key in chosen
    }


def _is_short(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and 0 < len(str(value).strip()) <= LONGEST
