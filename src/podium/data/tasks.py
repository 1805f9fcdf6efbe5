"""Built-in tasks: small datasets made on the spot, with a part that is held out. `dataset: builtin:additions`.

Every prompt is a conversation with a worked example of the form; the order of rows depends on their content alone.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from podium.errors import DataError
from podium.errors.texts import nearest

if TYPE_CHECKING:
    from datasets import Dataset

PREFIX = "builtin:"
T = TypeVar("T")
Row = dict[str, Any]
Split = tuple[list[Row], list[Row]]  # training rows and held-out rows


def load_task(name: str) -> tuple[Dataset, Dataset]:
    """The training and held-out rows of a task as datasets. Raises `DataError` (D025)."""
    from datasets import Dataset

    train, held_out = task_rows(name)
    return Dataset.from_list(train), Dataset.from_list(held_out)


def is_task(name: Any) -> bool:
    """Whether a dataset is named as a built-in task."""
    return isinstance(name, str) and name.startswith(PREFIX)


def task_rows(name: str) -> Split:
    """The training and held-out rows of a task, `additions` or `builtin:additions`. Raises `DataError` (D025)."""
    key = name.removeprefix(PREFIX)
    if key not in TASKS:
        known = ", ".join(PREFIX + known for known in TASKS)
        near = nearest(key, TASKS)
        raise DataError(
            f"There is no built-in dataset `{name}`; known: {known}.",
            code="D025",
            fix=f"Did you mean `{near}`?" if near else f"dataset: {PREFIX}{next(iter(TASKS))}",
            name=name,
            known=known,
            near=near,
            prefix=PREFIX,
            first_column=next(iter(TASKS)),
        )
    return TASKS[key]()


def _conversation(system: str, example: tuple[str, str], question: str) -> list[dict[str, str]]:
    turns = zip(("system", "user", "assistant", "user"), (system, *example, question), strict=True)
    return [{"role": role, "content": content} for role, content in turns]


def shuffled(items: Iterable[T], text: Callable[[T], str]) -> list[T]:
    """The items by the hash of a text that names each."""
    return sorted(items, key=lambda item: hashlib.sha256(text(item).encode()).digest())


# ---- additions ----

EXAMPLE = (3, 4)  # the worked example of every prompt; never held out


def additions(smallest: int = 1, largest: int = 20) -> Split:
    """Sums of two numbers from 1 to 20: 320 rows to train on and 80 held out, with the columns `prompt` and `answer`.

    One unordered pair in five is held out, by its content alone, so that a + b is never learnt from b + a.

    >>> [len(rows) for rows in additions(10, 99)]
    [6480, 1620]
    """
    numbers = range(smallest, largest + 1)
    pairs = [pair for pair in itertools.combinations_with_replacement(numbers, 2) if pair != EXAMPLE]
    doubles, others = ([pair for pair in pairs if (pair[0] == pair[1]) is same] for same in (True, False))
    count = len(numbers)
    held_out = {
        *shuffled(doubles, "{0[0]}+{0[1]}".format)[: count // 5],
        *shuffled(others, "{0[0]}+{0[1]}".format)[: count * (count - 1) // 10],
    }
    question = "What is {} + {}?"
    first, second = EXAMPLE
    example = (question.format(first, second), f"<answer>{first + second}</answer>")
    rows: Split = ([], [])
    for a, b in itertools.product(numbers, repeat=2):
        prompt = _conversation("Answer inside tags like this: <answer>7</answer>.", example, question.format(a, b))
        rows[(min(a, b), max(a, b)) in held_out].append({"prompt": prompt, "answer": str(a + b)})
    return rows


def sums() -> Split:
    """The additions as a table of questions and answers: `question` and `expert_answer`, without any form.

    >>> train, held_out = sums()
    >>> len(train), len(held_out), train[0]
    (320, 80, {'question': 'What is 1 + 2?', 'expert_answer': '3'})
    """

    def table(rows: list[Row]) -> list[Row]:
        return [{"question": row["prompt"][-1]["content"], "expert_answer": row["answer"]} for row in rows]

    train, held_out = additions()
    return table(train), table(held_out)


# ---- orders, for rewards that compare fields ----

CUSTOMERS = ("Ana", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gina", "Hugo", "Ivy", "Jon")
ITEMS = ("apples", "books", "chairs", "cups", "hats", "lamps", "pens", "plants")
PHRASES = ("{customer} ordered {quantity} {item}.", "Please send {quantity} {item} to {customer}.")

ORDER_EXAMPLE = ("Max ordered 3 keys.", '{"customer": "Max", "item": "keys", "quantity": 3}')
"""The worked example of every prompt; its customer and item occur nowhere else."""


def orders() -> Split:
    """Sentences to be written as JSON, 240 to train on and 60 held out: `prompt`, and `answer` as JSON text.

    >>> train, held_out = orders()
    >>> len(train), len(held_out), train[0]["answer"]
    (240, 60, '{"customer": "Hugo", "item": "pens", "quantity": 3}')
    """
    system = "Write the order as a JSON object with customer, item and quantity."
    asked = ((_conversation(system, ORDER_EXAMPLE, sentence), answer) for sentence, answer in sentences(num_rows=300))
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in asked]
    return rows[60:], rows[:60]


def sentences(*, num_rows: int) -> list[tuple[str, str]]:
    """Sentences and the JSON of each, every order once."""
    every = itertools.product(CUSTOMERS, ITEMS, range(2, 10))
    named = [{"customer": customer, "item": item, "quantity": quantity} for customer, item, quantity in every]
    phrases = itertools.cycle(PHRASES)
    return [(next(phrases).format(**order), json.dumps(order)) for order in shuffled(named, json.dumps)[:num_rows]]


# ---- one-line functions with tests, for rewards that run code ----

FUNCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "double": ("two times x", lambda x: 2 * x),
    "triple": ("three times x", lambda x: 3 * x),
    "square": ("x times x", lambda x: x * x),
    "cube": ("x times x times x", lambda x: x**3),
    "negate": ("minus x", lambda x: -x),
    "increment": ("x plus 1", lambda x: x + 1),
    "decrement": ("x minus 1", lambda x: x - 1),
    "is_even": ("whether x is even", lambda x: x % 2 == 0),
    "is_odd": ("whether x is odd", lambda x: x % 2 == 1),
    "is_positive": ("whether x is greater than 0", lambda x: x > 0),
    "is_zero": ("whether x is 0", lambda x: x == 0),
    "last_digit": ("the remainder of x divided by 10", lambda x: x % 10),
    "identity": ("x", lambda x: x),
    "to_text": ("x as a string", lambda x: str(x)),
    "add": ("a plus b", lambda a, b: a + b),
    "subtract": ("a minus b", lambda a, b: a - b),
    "multiply": ("a times b", lambda a, b: a * b),
    "power": ("a to the power of b", lambda a, b: a**b),
    "remainder": ("the remainder of a divided by b", lambda a, b: a % b),
    "larger": ("the larger of a and b", lambda a, b: max(a, b)),
    "smaller": ("the smaller of a and b", lambda a, b: min(a, b)),
    "is_equal": ("whether a and b are equal", lambda a, b: a == b),
    "is_greater": ("whether a is greater than b", lambda a, b: a > b),
    "first": ("a", lambda a, b: a),
    "as_list": ("a list of a and b", lambda a, b: [a, b]),
}
"""By name: the value to return in words, and in Python for the tests."""

HELD_OUT_FUNCTIONS = ("decrement", "is_odd", "smaller", "is_zero")
_ASKING = ("Write a Python function {signature} that returns {returns}.", "{signature} returns {returns}. Write it.")
_ARGUMENTS = {1: ((0,), (1,), (4,), (7,), (12,)), 2: ((5, 2), (2, 5), (3, 3), (10, 4), (1, 7))}


def tiny_functions() -> Split:
    """Functions to train on and others that are held out, each asked for in two ways: `prompt` and `tests`.

    `tests` is JSON text of five calls with what they return. An example in every prompt shows a fenced block.

    >>> train, held_out = tiny_functions()
    >>> len(train), len(held_out), held_out[0]["prompt"][-1]["content"]
    (42, 8, 'Write a Python function decrement(x) that returns x minus 1.')
    """
    system = "Answer with one Python function in a code block."
    question = "Write a Python function half(x) that returns x divided by 2."
    example = (question, "```python\ndef half(x):\n    return x / 2\n```")
    rows: Split = ([], [])
    for name, (returns, solve) in FUNCTIONS.items():
        parameters = solve.__code__.co_varnames
        calls = _ARGUMENTS[len(parameters)]
        tests = json.dumps([{"call": name, "args": args, "expected": solve(*args)} for args in calls])
        for phrase in _ASKING:
            asked = phrase.format(signature=f"{name}({', '.join(parameters)})", returns=returns)
            rows[name in HELD_OUT_FUNCTIONS].append({"prompt": _conversation(system, example, asked), "tests": tests})
    return rows


# ---- games and tools: the model acts, and is answered ----


SHOWN_GUESSES = {7: ("4", "6", "5"), 15: ("8", "12", "10")}
"""Guesses of the worked example by the largest number, answered with higher and lower."""


def guesses(largest: int) -> Split:
    """Games of finding a number from 1 to 7 or 15, each number equally often: `prompt` and `number`.

    The held-out games hide the same numbers: all prompts are alike, so there is nothing to remember of a game.

    >>> train, held_out = guesses(7)
    >>> len(train), len(held_out), train[0]["number"], train[0]["prompt"][-1]["content"]
    (112, 56, 1, 'Guess a number from 1 to 7.')
    """
    asked = f"Guess a number from 1 to {largest}."
    first, second, third = SHOWN_GUESSES[largest]
    example = [asked, first, "higher", second, "lower", third]
    turns = [("system", "Find the number. Answer with one number each time.")]
    turns += [*zip(itertools.cycle(("user", "assistant")), example, strict=False), ("user", asked)]
    prompt = [{"role": role, "content": content} for role, content in turns]
    rows = [{"prompt": prompt, "number": number} for number in range(1, largest + 1)]
    return rows * 16, rows * 8


def products() -> Split:
    """Products of a number of three digits and one of two, 1,800 to train on and 200 held out: `prompt` and `answer`.

    >>> train, held_out = products()
    >>> len(train), len(held_out), train[0]["prompt"], train[0]["answer"]
    (1800, 200, 'What is 623 * 53?', '33019')
    """
    pairs = shuffled(itertools.product(range(101, 1000), range(11, 100)), "{0[0]}*{0[1]}".format)[:2000]
    rows = [{"prompt": f"What is {a} * {b}?", "answer": str(a * b)} for a, b in pairs]
    return rows[200:], rows[:200]


def chains(length: int = 2) -> Split:
    """Chains of codes, each found by looking up the one before, 500 to train on and 100 held out.

    `prompt` names the first code, `codes` has all of them in order, `answer` is the last one.

    >>> train, held_out = chains(3)
    >>> len(train), len(held_out), len(train[0]["codes"]), train[0]["answer"] == train[0]["codes"][-1]
    (500, 100, 4, True)
    """
    codes = shuffled(map(str, range(1000, 10000)), "chain {}".format)
    again = "Then look up the code that you were given. " * (length - 1)
    rows = []
    for number in range(600):
        own = [codes[(number * (length + 1) + place) % len(codes)] for place in range(length + 1)]
        asked = f"Look up {own[0]}. {again}Answer with the last code alone."
        rows.append({"prompt": asked, "codes": own, "answer": own[-1]})
    return rows[100:], rows[:100]


# ---- pictures ----

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 220), "yellow": (240, 210, 40)}
PICTURE_SIZE = 32
"""Pixels of a side."""


def colours() -> Split:
    """Pictures of a coloured square, 1,600 to train on and 80 held out: `prompt`, `image` and `answer`.

    Sizes, places and shades differ from picture to picture; each colour is as frequent as every other.

    >>> train, held_out = colours()
    >>> len(train), len(held_out), train[0]["image"].size, train[0]["answer"] in COLOURS
    (1600, 80, (32, 32), True)
    """
    from PIL import Image

    names = ", ".join(COLOURS)
    asked = f"Which colour is the square: {names}? Answer with one word."
    rng = random.Random(0)
    rows = []
    for number in range(1680):
        answer = [*COLOURS][number % len(COLOURS)]
        shade = tuple(min(255, max(0, value + rng.randint(-20, 20))) for value in COLOURS[answer])
        side = rng.randint(14, 24)
        corner = (rng.randint(0, PICTURE_SIZE - side), rng.randint(0, PICTURE_SIZE - side))
        picture = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), "white")
        picture.paste(shade, (*corner, corner[0] + side, corner[1] + side))
        prompt = [{"role": "user", "content": asked}]
        rows.append({"prompt": prompt, "image": picture, "answer": answer})
    return rows[80:], rows[:80]


TASKS: dict[str, Callable[[], Split]] = {
    "additions": additions,
    "chains": chains,
    "colours": colours,
    "guesses": functools.partial(guesses, 7),
    "guesses-15": functools.partial(guesses, 15),
    "orders": orders,
    "products": products,
    "sums": sums,
    "tiny-functions": tiny_functions,
    "two-digit-additions": functools.partial(additions, 10, 99),
}
