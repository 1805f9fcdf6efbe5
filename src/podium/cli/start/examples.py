"""The small datasets that `podium init` writes: a few hundred rows that are easy to check by eye."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from podium.data.functions import tiny_functions
from podium.data.orders import sentences

Row = TypeVar("Row", bound=tuple[str, ...])

NUM_ROWS = 200

WORDS = (
    *("apple", "bread", "cloud", "door", "earth", "flute", "grape", "house", "island", "jacket", "kettle", "lemon"),
    *("moon", "nest", "ocean", "piano", "queen", "river", "stone", "table", "umbrella", "violin", "window", "yarn"),
)
THINGS = (
    *("a bell", "a boat", "a bridge", "a candle", "a clock", "a coat", "a comb", "a cup", "a fence", "a fork"),
    *("a garden", "a hammer", "a hat", "a kite", "a ladder", "a lamp", "a map", "a mirror", "a needle", "a pillow"),
    *("a pond", "a rope", "a saw", "a scarf", "a shelf", "a shoe", "a spoon", "a stove", "a tent", "a wheel"),
)
QUESTIONS = (
    "What is {} used for?",
    "Who needs {}?",
    "Where would you look for {}?",
    "What is {} made of?",
    "Is {} heavier than a book?",
    "Can {} be bought for one coin?",
    "How would a child describe {}?",
)


def numbers() -> list[tuple[str, str]]:
    """Additions of two numbers from 1 to 20."""
    pairs = itertools.product(range(1, 21), repeat=2)
    return _some([(f"What is {a} + {b}?", str(a + b)) for a, b in pairs])


def words() -> list[tuple[str, str]]:
    """Two words, of which one comes first in the alphabet."""
    pairs = ((a, b) for a in WORDS for b in WORDS if a != b)
    return _some([(f"Which word comes first in the alphabet, {a} or {b}?", min(a, b)) for a, b in pairs])


def questions() -> list[tuple[str]]:
    """Questions without a right answer."""
    return _some([(form.format(thing),) for form in QUESTIONS for thing in THINGS])


def _some(rows: Sequence[Row]) -> list[Row]:
    """`NUM_ROWS` of them, in an order that looks random and depends on nothing but the rows."""
    return sorted(rows, key=lambda row: hashlib.sha256(row[0].encode()).digest())[:NUM_ROWS]


def _csv(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def _functions() -> str:
    """Functions to write, with their tests as JSON text: rows of a table cannot have values of several types."""
    train, held_out = tiny_functions()
    rows = [{"question": row["prompt"][-1]["content"], "tests": row["tests"]} for row in (*train, *held_out)]
    return "".join(json.dumps(row) + "\n" for row in rows)


EXAMPLES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "number": ("data.csv", lambda: _csv(("question", "answer"), numbers())),
    "exact": ("data.csv", lambda: _csv(("question", "answer"), words())),
    "json": ("data.csv", lambda: _csv(("question", "answer"), sentences(num_rows=NUM_ROWS))),
    "code": ("data.jsonl", _functions),
    "format": ("data.csv", lambda: _csv(("question",), questions())),
}
"""By task: the file's name, and what makes its text."""
