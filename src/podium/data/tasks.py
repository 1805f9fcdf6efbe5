"""Built-in tasks: small datasets made on the spot, with a part that is held out. `dataset: builtin:additions`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
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
            f"There is no built-in dataset `{name}`; known: {known}.{did_you_mean(key, TASKS)}", code="D025"
        )
    train, held_out = TASKS[key]()
    return Dataset.from_list(train), Dataset.from_list(held_out)


# ---- additions ----

LARGEST = 20
EXAMPLE = (3, 4)
"""The worked example of every prompt; never held out."""


def additions() -> tuple[list[Row], list[Row]]:
    """Sums of two numbers from 1 to 20: 320 rows to train on and 80 held out, with the columns `prompt` and `answer`.

    One unordered pair in five is held out, by its content alone, so that a + b is never learnt from b + a.
    """
    held_out = _held_out_pairs()
    rows: tuple[list[Row], list[Row]] = ([], [])
    for a in range(1, LARGEST + 1):
        for b in range(1, LARGEST + 1):
            rows[_unordered(a, b) in held_out].append({"prompt": _conversation(a, b), "answer": str(a + b)})
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


def _held_out_pairs() -> frozenset[tuple[int, int]]:
    """One in five of the 190 pairs of different numbers (80 rows less four) and of the 20 doubles (four rows)."""
    pairs = [pair for pair in _pairs() if pair != EXAMPLE]
    doubles = [pair for pair in pairs if pair[0] == pair[1]]
    others = [pair for pair in pairs if pair[0] != pair[1]]
    return frozenset(_by_content(doubles)[:4] + _by_content(others)[:38])


def _pairs() -> Iterator[tuple[int, int]]:
    return ((a, b) for a in range(1, LARGEST + 1) for b in range(a, LARGEST + 1))


def _unordered(a: int, b: int) -> tuple[int, int]:
    return min(a, b), max(a, b)


def _by_content(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In an order that looks random and depends on nothing but the numbers."""
    return sorted(pairs, key=lambda pair: hashlib.sha256(f"{pair[0]}+{pair[1]}".encode()).digest())


TASKS: dict[str, Callable[[], tuple[list[Row], list[Row]]]] = {
    "additions": additions,
    "orders": orders,
    "sums": sums,
    "tiny-functions": tiny_functions,
}
