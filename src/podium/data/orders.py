"""`builtin:orders`: sentences about orders, to be written as JSON. For rewards that compare fields."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

Row = dict[str, Any]

CUSTOMERS = ("Ana", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gina", "Hugo", "Ivy", "Jon")
ITEMS = ("apples", "books", "chairs", "cups", "hats", "lamps", "pens", "plants")
QUANTITIES = range(2, 10)
PHRASES = ("{customer} ordered {quantity} {item}.", "Please send {quantity} {item} to {customer}.")

SYSTEM = "Write the order as a JSON object with customer, item and quantity."
EXAMPLE = ("Max ordered 3 keys.", '{"customer": "Max", "item": "keys", "quantity": 3}')
"""The worked example of every prompt; its customer and item occur nowhere else."""

HELD_OUT = 60


def orders() -> tuple[list[Row], list[Row]]:
    """240 sentences to train on and 60 that are held out: `prompt`, and `answer` as JSON text.

    >>> train, held_out = orders()
    >>> len(train), len(held_out), train[0]["answer"]
    (240, 60, '{"customer": "Hugo", "item": "pens", "quantity": 3}')
    """
    rows = [
        {"prompt": _conversation(sentence), "answer": answer} for sentence, answer in sentences(num_rows=240 + HELD_OUT)
    ]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def sentences(*, num_rows: int) -> list[tuple[str, str]]:
    """Sentences and the JSON of each, every order once, in an order that depends on nothing but the words."""
    every = itertools.product(CUSTOMERS, ITEMS, QUANTITIES)
    mixed = sorted(every, key=lambda order: hashlib.sha256(_json(*order).encode()).digest())[:num_rows]
    return [
        (phrase.format(customer=order[0], item=order[1], quantity=order[2]), _json(*order))
        for order, phrase in zip(mixed, itertools.cycle(PHRASES), strict=False)
    ]


def _json(customer: str, item: str, quantity: int) -> str:
    return json.dumps({"customer": customer, "item": item, "quantity": quantity})


def _conversation(sentence: str) -> list[dict[str, str]]:
    asked, answer = EXAMPLE
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": sentence},
    ]
