"""`podium init`: a folder with a recipe, and for an example a small dataset, a reward of one's own and its test.

    choices = Choices(task="number", machine="cpu", model="builtin:smollm2-135m-instruct")
    write(Path("my-run"), example_files(Path("my-run"), choices))

The recipe is `templates/run.yaml`, filled in; the other files are made from the templates beside it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from podium.cli.start.examples import EXAMPLES
from podium.cli.start.recipe_file import recipe_text
from podium.cli.start.tasks import MACHINES, TASKS, Choices
from podium.errors import ConfigError
from podium.planning.propose import RUN, Proposal

RECIPE = "run.yaml"


def example_files(folder: Path, choices: Choices, own_rows: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Name and text of every file of a run on an example.

    `own_rows` has `dataset` and `prompt` of a table whose answers are not compared.
    """
    task = TASKS[choices.task]
    machine = MACHINES[choices.machine]
    name, make = EXAMPLES[choices.task]
    data: dict[str, str] = {}
    rows = own_rows
    if rows is None:
        data = {name: make()}
        rows = {"dataset": name, "prompt": "{question}"}
        if task.example:
            question, answer = task.example
            rows["examples"] = [{"question": question, "answer": answer}]
    settings = {
        "model": from_folder(choices.model, folder),
        **rows,
        "held_out": 0.2,
        **RUN,
        "max_completion_length": max(task.tokens, machine.tokens),
        "temperature": machine.temperature,
        **choices.settings,
        **task.recipe,
        "seed": 1,
        "output_dir": "runs/first",
    }
    if "eval_dataset" in settings:
        settings.pop("held_out")
    about = task.about[0].upper() + task.about[1:]
    head = f"{about}. Written by `podium init`: {choices.task}, {choices.machine}."
    values = {
        **_values(folder, choices, task.about, settings),
        "num_rows": sum(text.count("\n") for text in data.values()) - name.endswith(".csv"),
        "tested": choices.task in ("number", "exact", "json"),
        "own": task.own,
        "files": [f"{task.own}.py", *data],
    }
    return {
        RECIPE: recipe_text(settings, head),
        **data,
        **own_function(task.own, choices.task, values),
        "README.md": rendered("README.md.j2", values),
    }


REWARD_FILES: Mapping[str, str] = {"worked": "number", "json": "json", "number": "bare-number", "length": "length"}
"""By shape, the reward file that is written; the others compare texts."""
UNITS = ("word", "letter", "character", "sentence", "line")
"""Units of a length; the first one named in the sentence of the task counts."""


def own_files(folder: Path, choices: Choices, dataset: str, proposal: Proposal, *, reward_file: bool) -> dict[str, str]:
    """Name and text of every file of a run on a table. `reward_file`: with a reward function of the user's own."""
    settings = {**proposal.settings, "dataset": from_folder(dataset, folder), "output_dir": "runs/first"}
    settings["model"] = from_folder(choices.model, folder)
    if choices.machine != "cpu" or "learning_rate" not in settings:
        settings |= choices.settings
    reward_file = reward_file and proposal.shape not in ("code", "long")
    if reward_file:
        names = [reward.get("name") if isinstance(reward, Mapping) else reward for reward in settings["rewards"]]
        rewards = zip(names, settings["rewards"], strict=True)
        others = [reward for name, reward in rewards if name != settings["accuracy"]]
        settings |= {"rewards": [{"function": "rewards.py:right", "weight": 2}, *others], "accuracy": "right"}
    if proposal.shape == "length":
        settings.pop("answer", None)  # the number is no answer, but a column that the reward reads
    head = [f"{dataset}: the answer is {proposal.about}. Written by `podium init`.", *proposal.understood]
    values = {
        **_values(folder, choices, proposal.about, settings),
        "num_rows": 0,
        "tested": proposal.settings.get("accuracy") is not None,
        "own": "rewards",
        "files": ["rewards.py"] if reward_file else [],
        "number": json.dumps(proposal.chosen.answer_column or "answer"),
        "unit": next((unit for unit in UNITS if unit in settings.get("system", "").casefold()), "word"),
    }
    made = {RECIPE: recipe_text(settings, *(" ".join(line.split()) for line in head))}
    if reward_file:
        made |= own_function("rewards", REWARD_FILES.get(proposal.shape, "plain"), values)
    return {**made, "README.md": rendered("README.md.j2", values)}


def _values(folder: Path, choices: Choices, about: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "title": folder.resolve().name,
        "model": choices.model,
        "about": about,
        "where": MACHINES[choices.machine].about,
        "dataset": settings["dataset"],
        "lora": "lora" in settings,
    }


def own_function(stem: str, task: str, values: Mapping[str, Any]) -> dict[str, str]:
    """A Python file for the user to change, and its test."""
    template = f"{stem}-{task}" if stem == "rewards" else stem
    return {
        f"{stem}.py": rendered(f"{template}.py.j2", values),
        f"test_{stem}.py": rendered(f"test_{template}.py.j2", values),
    }


def rendered(name: str, values: Mapping[str, Any]) -> str:
    """A template, filled in."""
    # Nothing is escaped: what is the user's stands in the README and the recipe, and quoted in the file of a job.
    environment = Environment(loader=PackageLoader("podium.cli.start"), undefined=StrictUndefined, autoescape=False)
    return environment.get_template(name).render(values).rstrip("\n") + "\n"


def from_folder(name: str, folder: Path) -> str:
    """The name of a dataset or model as seen from a folder: a path that is there becomes relative to it."""
    path = Path(name).expanduser()
    if not path.exists() or path.is_absolute() or name.startswith("~"):
        return name
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


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
