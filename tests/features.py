"""List every feature that users can name, one a line: `python -m tests.features`.

Public names, verbs and flags, recipe keys, finding codes, recipes, rewards of the library, metrics, engines. Two
commits are compared with `diff` of their lists.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import typer
from typer.core import TyperGroup

import podium


def public_names() -> Iterator[str]:
    """`podium.NAME`, and what its public modules offer with the arguments each takes."""
    for name in podium.__all__:
        value = getattr(podium, name)
        yield f"podium.{name}"
        for member in getattr(value, "__all__", ()):
            yield f"podium.{name}.{member}{arguments(getattr(value, member))}"
        if inspect.isclass(value):
            ours = {member for each in value.__mro__ if each.__module__.startswith("podium") for member in vars(each)}
            for member in sorted(ours):
                if not member.startswith("_"):
                    yield f"podium.{name}.{member}{arguments(getattr(value, member))}"


def arguments(value: object) -> str:
    """`(a, b)` of a function; nothing of anything else."""
    return f"({', '.join(inspect.signature(value).parameters)})" if inspect.isfunction(value) else ""


def flags(group: TyperGroup, prefix: str) -> Iterator[str]:
    """Every verb, and every verb with each of its parameters."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, TyperGroup):
            yield from flags(command, f"{prefix} {name}")
            continue
        yield f"{prefix} {name}"
        for parameter in command.params:
            yield f"{prefix} {name} {' '.join([*parameter.opts, *parameter.secondary_opts])}"


def features() -> Iterator[str]:
    """All of them."""
    from podium.algorithm.losses import OBJECTIVES
    from podium.algorithm.metrics import METRICS
    from podium.cli import app
    from podium.recipe.schema import key_types
    from podium.rewards import LIBRARY
    from podium.trainer.rules import CHOSEN_ENGINES, REFUSED

    yield from public_names()
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    yield from flags(group, "podium")
    package = Path(podium.__file__).parent
    listed = {
        "key": key_types(),
        "refused": REFUSED,
        "metric": METRICS,
        "loss": OBJECTIVES,
        "engine": CHOSEN_ENGINES,
        "reward": LIBRARY,
        "recipe": [path.stem for path in package.rglob("recipes/*.yaml")],
        "finding": [path.stem for path in package.rglob("pages/*.md")],
    }
    for kind, names in listed.items():
        yield from (f"{kind} {name}" for name in names)
    yield from (f"module {name}" for name in MODULES if import_module(name))


MODULES = ("podium.testing",)
"""Documented modules that `podium` itself does not list."""

if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in sorted(set(features()))))
