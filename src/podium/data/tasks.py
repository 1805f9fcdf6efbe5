"""Built-in tasks: small datasets made on the spot, with a part that is held out. `dataset: builtin:additions`."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from podium.data.functions import tiny_functions
from podium.data.orders import orders
from podium.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

PREFIX = "builtin:"

Row = dict[str, Any]


def load_task(name: str) -> tuple[Dataset, Dataset]:
    """The training rows and the held-out rows of a built-in task, `additions` or `builtin:additions`.

    Raises:
        DataError: there is no such task.
    """
    from datasets import Dataset

    key = name.removeprefix(PREFIX)
    if key not in TASKS:
        known = ", ".join(PREFIX + known for known in TASKS)
        raise DataError(
            f"There is no built-in dataset `{name}`; known: {known}.",
            code="D025",
            fix=did_you_mean(key, TASKS) or f"dataset: {PREFIX}{next(iter(TASKS))}",
        )
    train, held_out = TASKS[key]()
    return Dataset.from_list(train), Dataset.from_list(held_out)


# ---- additions ----

LARGEST = 20
EXAMPLE = (3, 4)
"""The worked example of every prompt; never held out."""


def additions(smallest: int = 1, largest: int = LARGEST) -> tuple[list[Row], list[Row]]:
    """Sums of two numbers from 1 to 20: 320 rows to train on and 80 held out, with the columns `prompt` and `answer`.

    One unordered pair in five is held out, by its content alone, so that a + b is never learnt from b + a.

    >>> [len(rows) for rows in additions(10, 99)]
    [6480, 1620]
    """
    numbers = range(smallest, largest + 1)
    held_out = _held_out_pairs(numbers)
    rows: tuple[list[Row], list[Row]] = ([], [])
    for a, b in itertools.product(numbers, repeat=2):
        rows[(min(a, b), max(a, b)) in held_out].append({"prompt": _conversation(a, b), "answer": str(a + b)})
    return rows


def sums() -> tuple[list[Row], list[Row]]:
    """The additions as a table of questions and answers: `question` and `expert_answer`, without any form.

    >>> train, held_out = sums()
    >>> len(train), len(held_out), train[0]
    (320, 80, {'question': 'What is 1 + 2?', 'expert_answer': '3'})
    """
    train, held_out = additions()
    return _as_table(train), _as_table(held_out)


def _as_table(rows: list[Row]) -> list[Row]:
    return [{"question": row["prompt"][-1]["content"], "expert_answer": row["answer"]} for row in rows]


def _conversation(a: int, b: int) -> list[dict[str, str]]:
    first, second = EXAMPLE
    return [
        {"role": "system", "content": "Answer inside tags like this: <answer>7</answer>."},
        {"role": "user", "content": f"What is {first} + {second}?"},
        {"role": "assistant", "content": f"<answer>{first + second}</answer>"},
        {"role": "user", "content": f"What is {a} + {b}?"},
    ]


def _held_out_pairs(numbers: range) -> frozenset[tuple[int, int]]:
    """One in five of the pairs of different numbers (two rows each) and of the doubles (one row)."""
    pairs = [pair for pair in itertools.combinations_with_replacement(numbers, 2) if pair != EXAMPLE]
    doubles = [pair for pair in pairs if pair[0] == pair[1]]
    others = [pair for pair in pairs if pair[0] != pair[1]]
    count = len(numbers)
    return frozenset(_by_content(doubles)[: count // 5] + _by_content(others)[: count * (count - 1) // 10])


def _by_content(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In an order that looks random and depends on nothing but the numbers."""
    return sorted(pairs, key=lambda pair: hashlib.sha256(f"{pair[0]}+{pair[1]}".encode()).digest())


TASKS: dict[str, Callable[[], tuple[list[Row], list[Row]]]] = {
    "additions": additions,
    "orders": orders,
    "sums": sums,
    "tiny-functions": tiny_functions,
    "two-digit-additions": functools.partial(additions, 10, 99),
}
