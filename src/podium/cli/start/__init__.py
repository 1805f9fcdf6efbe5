"""`podium init`: a folder with a recipe, a small dataset, a reward of one's own and its test.

    choices = Choices(task="number", machine="cpu", model="builtin:smollm2-135m-instruct")
    write(Path("my-run"), files(Path("my-run"), choices))

The files are made from the templates beside this one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from podium.cli.start.choices import MACHINES, TASKS, Choices
from podium.cli.start.examples import EXAMPLES
from podium.cli.start.own_data import OwnData, from_folder
from podium.errors import ConfigError
from podium.models.builtin import BUILTIN

RECIPE = "run.yaml"
COMMENTS = 39
"""Column where comments behind a value stand."""


def files(folder: Path, choices: Choices, own: OwnData | None = None) -> dict[str, str]:
    """Name and text of every file of a new run. `own` is the dataset that `choices.data` names."""
    name, make = EXAMPLES[choices.task]
    data = {} if own else {name: make()}
    values = _values(folder, choices, own)
    values["dataset"] = from_folder(own.name, folder) if own else name
    values["num_rows"] = sum(text.count("\n") for text in data.values()) - name.endswith(".csv")
    return {
        RECIPE: aligned(_rendered("run.yaml.j2", values)),
        **data,
        "rewards.py": _rendered(f"rewards-{choices.task}.py.j2", values),
        "test_rewards.py": _rendered(f"test_rewards-{choices.task}.py.j2", values),
        "README.md": _rendered("README.md.j2", values),
    }


def _values(folder: Path, choices: Choices, own: OwnData | None) -> dict[str, Any]:
    task, machine = TASKS[choices.task], MACHINES[choices.machine]
    lora = machine.lora or choices.model not in (BUILTIN, machine.model)
    system, fields = task.system, ("customer", "item", "quantity") if own is None else own.fields
    if choices.task == "json" and fields:
        system = f"Answer with one JSON object with the fields {', '.join(fields)}, and nothing else."
    return {
        "title": folder.resolve().name,
        "choices": choices,
        "task": task,
        "machine": machine,
        "own": own,
        "question": own.question if own else "question",
        "answer": (own.answer if own else "answer") if task.answered else None,
        "answer_from": "after ####" if own and own.after_hashes and task.answered else None,
        "system": system,
        "example": own.example(choices.task) if own else task.example,
        "temperature": 1.0 if own else machine.temperature,  # as where a dataset alone is trained on
        "lora": lora,
        "rate": f"{max(machine.learning_rate, 2e-5) if lora else machine.learning_rate:g}".replace("e-0", "e-"),
        "tokens": max(task.tokens, machine.tokens),
    }


def check_free(folder: Path) -> None:
    """Raises `ConfigError`, with a name that is free, unless the folder is new or empty."""
    if folder.is_dir() and any(folder.iterdir()):
        named = folder.with_name(folder.name or "run")
        numbered = (named.with_name(f"{named.name}-{number}") for number in itertools.count(2))
        free = next(path for path in numbered if not path.exists())
        what = f"{folder} is there already and not empty, and nothing is ever overwritten. Take another name: "
        raise ConfigError(f"{what}podium init {free}")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; a new run is a folder. Take another name.")


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


def aligned(text: str) -> str:
    r"""Comments behind values one below the other.

    >>> aligned("a: 1  # one\n# all\nlonger: 22  # two\n").splitlines()[0].index("#")
    39
    """
    return re.sub(r"^(?!\s*#)(.*\S)  # ", lambda found: found[1].ljust(COMMENTS - 1) + " # ", text, flags=re.MULTILINE)


def _rendered(name: str, values: Mapping[str, Any]) -> str:
    # YAML, Python and Markdown are not escaped; what is the user's goes through `yaml`.
    environment = Environment(loader=PackageLoader("podium.cli.start"), undefined=StrictUndefined, autoescape=False)
    environment.filters["yaml"] = in_yaml
    return environment.get_template(name).render(values).rstrip("\n") + "\n"


def in_yaml(value: str) -> str:
    r"""A text as YAML: as it is where that is safe, else in double quotes.

    >>> in_yaml("../my data.csv"), in_yaml("builtin:x"), in_yaml("a: b"), in_yaml("{question}"), in_yaml("x\n#y")
    ('../my data.csv', 'builtin:x', '"a: b"', '"{question}"', '"x\\n#y"')
    """
    plain = re.fullmatch(r"(?:\.{0,2}/)*[A-Za-z](?:[\w./<>,?+-]|:(?! |$)| (?!#))*(?<![ :])", value, re.ASCII)
    words = value.casefold() in ("true", "false", "null", "yes", "no", "on", "off")
    return value if plain and not words else json.dumps(value, ensure_ascii=False)
