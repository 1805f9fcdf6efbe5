"""The datasets of `podium init`'s examples: a few hundred rows each that are easy to check by eye."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from podium.data.tasks import sentences, shuffled, tiny_functions

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


def _numbers() -> str:
    pairs = itertools.product(range(1, 21), repeat=2)
    return _csv(_some((f"What is {a} + {b}?", str(a + b)) for a, b in pairs))


def _words() -> str:
    pairs = itertools.permutations(WORDS, 2)
    return _csv(_some((f"Which word comes first in the alphabet, {a} or {b}?", min(a, b)) for a, b in pairs))


def _questions() -> str:
    return _csv(_some((form.format(thing),) for form in QUESTIONS for thing in THINGS), "question")


def _products() -> str:
    pairs = itertools.product(range(101, 1000), range(11, 100))
    return _csv(_some((f"What is {a} * {b}?", str(a * b)) for a, b in pairs))


def _games() -> str:
    """Seven games, each several times: a table must have as many rows as a step has questions."""
    return _csv([("Guess a number from 1 to 7.", str(number)) for number in range(1, 8)] * 8, "question", "number")


def _functions() -> str:
    """Functions to write, with their tests as JSON text: rows of a table cannot have values of several types."""
    train, held_out = tiny_functions()
    rows = [{"question": row["prompt"][-1]["content"], "tests": row["tests"]} for row in (*train, *held_out)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def _some(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return shuffled(rows, lambda row: row[0])[:NUM_ROWS]


def _csv(rows: Iterable[Sequence[str]], *header: str) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header or ("question", "answer"), *rows])
    return text.getvalue()


EXAMPLES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "number": ("data.csv", _numbers),
    "exact": ("data.csv", _words),
    "json": ("data.csv", lambda: _csv(sentences(num_rows=NUM_ROWS))),
    "code": ("data.jsonl", _functions),
    "format": ("data.csv", _questions),
    "tool": ("data.csv", _products),
    "game": ("data.csv", _games),
}
"""By task: the file's name, and a function that makes its text."""
