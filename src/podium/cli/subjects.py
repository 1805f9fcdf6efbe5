"""Kind of the subject of `podium test`, read from a name or from the source of a file without running it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, NamedTuple

from podium.agents.setup import GIVEN as OF_PROGRAMS
from podium.agents.table import ADAPTERS
from podium.cli.words import is_recipe
from podium.data.query import parse_query
from podium.errors import ConfigError
from podium.errors.texts import did_you_mean, named_list
from podium.isolation.user_files import find_file
from podium.recipe import shipped_recipes
from podium.rewards import LIBRARY

COMMAND = "command:"
"""Begins a program that is a command."""

SUBJECTS = ("reward", "environment", "program")

OF_REWARDS = frozenset({"prompts", "completions", "completion_ids", "solution_str"})
"""Arguments that rewards alone have; the last is verl's."""


class Target(NamedTuple):
    """What was typed."""

    name: str
    recipe: Any | None
    """Read, where it is one."""
    folder: Path
    """In which files are looked for first."""


def target_of(name: str) -> Target:
    """The recipe of that name, or the name as it is. Raises `ConfigError` for a recipe that cannot be read."""
    if not is_recipe(name):
        return Target(name, None, Path())
    from podium.recipe import load

    return Target(name, load(name), Path(name).parent if Path(name).is_file() else Path())


def subjects_of(target: Target) -> tuple[str, ...]:
    """What a name stands for, some of `SUBJECTS`; of a recipe all that it has.

    Raises `ConfigError` for a recipe with nothing to test, and for a name in a file that does not show what it is.
    """
    if target.recipe is not None:
        return _in_recipe(target)
    name, _ = parse_query(target.name)
    if target.name.startswith(COMMAND):
        return ("program",)
    if ".py:" in name:
        return (_in_file(target.name, name),)
    if name.isidentifier() and name not in LIBRARY:
        near = did_you_mean(name, [*shipped_recipes(), *LIBRARY])
        what = f"there is neither a recipe nor a reward of the library called {name}."
        raise ConfigError(what, fix=near or "podium recipes, podium rewards list", name=name)
    library = name.partition(":")[0].replace("-", "_")
    return ("environment",) if ":" in name and library in ADAPTERS else ("reward",)


def _in_recipe(target: Target) -> tuple[str, ...]:
    recipe = target.recipe
    assert recipe is not None
    keys = {
        "reward": ("rewards", "reward_funcs"),
        "environment": ("environment", "tools"),
        "program": ("agent",),
    }
    found = tuple(subject for subject, names in keys.items() if any(recipe.given.get(name) for name in names))
    if not found:
        fix = "rewards: [my_rewards.py:my_function]"
        raise ConfigError(f"{target.name} has neither rewards, tools, an environment nor an agent.", fix=fix)
    return found


def _in_file(shown: str, name: str) -> str:
    """The subject that a class or the arguments of a function in a file show."""
    file, _, attribute = name.rpartition(":")
    path = find_file(file, Path())
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # whoever imports it says what is wrong
        return "reward"
    node = next((node for node in tree.body if getattr(node, "name", None) == attribute), None)
    if isinstance(node, ast.ClassDef):
        methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
        return "reward" if "__call__" in methods and "reset" not in methods else "environment"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        names = {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        if names & OF_REWARDS:
            return "reward"
        if names & {*OF_PROGRAMS}:
            return "program"
        return "reward" if node.args.kwarg else "environment"
    assigned = _assigned(tree)
    if attribute not in assigned and "*" not in assigned:
        public = [node.name for node in tree.body if hasattr(node, "name") and not node.name.startswith("_")]
        raise ConfigError(
            f"{file} has no `{attribute}`; its classes and functions: {named_list(public) or 'none'}.",
            fix=did_you_mean(attribute, public),
            attribute=attribute,
            file=file,
        )
    raise ConfigError(
        f"what `{attribute}` of {file} is cannot be seen in the file: it is no class and no function there.",
        fix=f"podium test {shown} --as reward (or environment, or program)",
        attribute=attribute,
        file=file,
    )


def _assigned(tree: ast.Module) -> set[str]:
    """Names that a file binds by assignment or import; `*` where it imports all names of a module."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names
