"""`podium init`: a folder with a recipe, and for an example a small dataset, a reward of one's own and its test.

    choices = Choices(task="number", machine="cpu", model="builtin:smollm2-135m-instruct")
    write(Path("my-run"), example_files(Path("my-run"), choices))

`recipe_file` writes the recipe, and `EXAMPLES` has the datasets, a few hundred rows each that are easy to check by eye;
the other files are made from the templates beside this one.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from podium.cli.start.choices import MACHINES, TASKS, Choices
from podium.cli.start.own_data import from_folder
from podium.cli.start.recipe_file import recipe_text
from podium.data.tasks import sentences, shuffled, tiny_functions
from podium.errors import ConfigError
from podium.planning.propose import RUN, Proposal

RECIPE = "run.yaml"
_OWN_REWARD = {"function": "rewards.py:right", "weight": 2}


def example_files(folder: Path, choices: Choices, own: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Name and text of every file of a run on an example.

    `own` has `dataset` and `prompt` of a table whose answers are not compared.
    """
    task = TASKS[choices.task]
    machine = MACHINES[choices.machine]
    name, make = EXAMPLES[choices.task]
    data = {} if own else {name: make()}
    settings = {
        "model": from_folder(choices.model, folder),
        **({"dataset": name, "prompt": "{question}"} if own is None else own),
        "system": task.system,
        **(
            {"examples": [dict(zip(("question", "answer"), task.example, strict=True))]}
            if task.example and not own
            else {}
        ),
        **({} if "eval_dataset" in task.settings else {"held_out": 0.2}),
        **({"rewards": task.rewards} if task.rewards else {}),
        "accuracy": task.accuracy,
        **RUN,
        "max_completion_length": max(task.tokens, machine.tokens),
        "temperature": machine.temperature,
        **choices.settings,
        **task.settings,
        "seed": 1,
    }
    about = task.about[0].upper() + task.about[1:]
    head = f"{about}. Written by `podium init`: {choices.task}, {choices.machine}."
    values = {
        **_values(folder, choices, task.about, settings),
        "num_rows": sum(text.count("\n") for text in data.values()) - name.endswith(".csv"),
        "tested": choices.task in ("number", "exact", "json"),
    }
    return {
        RECIPE: recipe_text({**settings, "output_dir": "runs/first"}, head),
        **data,
        **_own_files(task.own, choices.task, values),
        "README.md": _rendered("README.md.j2", {**values, "own": task.own, "files": [f"{task.own}.py", *data]}),
    }


def own_files(folder: Path, choices: Choices, dataset: str, proposal: Proposal, *, reward_file: bool) -> dict[str, str]:
    """Name and text of every file of a run on a table. `reward_file`: with a reward function of the user's own."""
    places = {"model": from_folder(choices.model, folder), "dataset": from_folder(dataset, folder)}
    settings = {**proposal.settings, **places}
    if choices.machine != "cpu" or "learning_rate" not in settings:
        settings |= choices.settings
    reward_file = reward_file and proposal.shape not in ("code", "long")
    if reward_file:
        others = [each for each in settings["rewards"] if _name(each) != settings["accuracy"]]
        settings |= {"rewards": [_OWN_REWARD, *others], "accuracy": "right"}
    head = [f"{dataset}: the answer is {proposal.about}. Written by `podium init`.", *proposal.understood]
    if proposal.shape == "length":
        settings.pop("answer", None)  # the number is no answer, but a column that the reward reads
    values = {
        **_values(folder, choices, proposal.about, settings),
        "num_rows": 0,
        "number": json.dumps(proposal.chosen.told or "answer"),
        "unit": next((unit for unit in _UNITS if unit in settings.get("system", "").casefold()), "word"),
        "tested": proposal.settings.get("accuracy") is not None,
    }
    return {
        RECIPE: recipe_text({**settings, "output_dir": "runs/first"}, *(" ".join(line.split()) for line in head)),
        **(_own_files("rewards", _TEMPLATES.get(proposal.shape, "plain"), values) if reward_file else {}),
        "README.md": _rendered(
            "README.md.j2", {**values, "own": "rewards", "files": ["rewards.py"] if reward_file else []}
        ),
    }


_TEMPLATES: Mapping[str, str] = {"worked": "number", "json": "json", "number": "bare-number", "length": "length"}
"""By shape, the reward file that is written; the others compare texts."""
_UNITS = ("word", "letter", "character", "sentence", "line")
"""Units of a length; the first one named in the sentence of the task counts."""


def _name(reward: Any) -> Any:
    return reward.get("name") if isinstance(reward, Mapping) else reward


def _values(folder: Path, choices: Choices, about: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "title": folder.resolve().name,
        "model": choices.model,
        "about": about,
        "where": MACHINES[choices.machine].about,
        "dataset": settings["dataset"],
        "lora": "lora" in settings,
    }


def _own_files(stem: str, task: str, values: Mapping[str, Any]) -> dict[str, str]:
    """A Python file for the user to change, and its test."""
    template = f"{stem}-{task}" if stem == "rewards" else stem
    return {
        f"{stem}.py": _rendered(f"{template}.py.j2", values),
        f"test_{stem}.py": _rendered(f"test_{template}.py.j2", values),
    }


def check_free(folder: Path, flag: str = "") -> None:
    """Raises `ConfigError`, with a name that is free, unless the folder is new or empty.

    `flag`: the words before the folder, where it is not the one argument of `podium init`.
    """
    words = f"podium init {flag} ".replace("  ", " ")
    if folder.is_dir() and any(folder.iterdir()):
        named = folder.with_name(folder.name or "run")
        numbered = (named.with_name(f"{named.name}-{number}") for number in itertools.count(2))
        free = next(path for path in numbered if not path.exists())
        what = f"{folder} is there already and not empty, and nothing is ever overwritten. Take another name: "
        raise ConfigError(f"{what}{words}{free}", what=what, words=words, free=free)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file; a new run is a folder. Take another name: {words}{folder}-run",
            folder=folder,
            words=words,
        )


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Make the folder and its files. Raises `ConfigError` where it is not new or empty, or cannot be made."""
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}. Take another folder.") from error


def _rendered(name: str, values: Mapping[str, Any]) -> str:
    # Python and Markdown are not escaped: what is the user's stands in the README and the recipe alone.
    environment = Environment(loader=PackageLoader("podium.cli.start"), undefined=StrictUndefined, autoescape=False)
    return environment.get_template(name).render(values).rstrip("\n") + "\n"


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
