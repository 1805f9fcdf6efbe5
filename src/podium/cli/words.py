"""Parsing of command lines that take a recipe, or models, with any key of a recipe as a flag."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.recipe import shipped_recipes
from podium.recipe.document import Document
from podium.recipe.flags import Overrides, parse_flags


def recipe_and_flags(words: Sequence[str], verb: str) -> tuple[str | Document, Overrides]:
    """`run.yaml --beta 0.1`; as for `trl grpo`, `--config run.yaml --beta 0.1`; or a dataset alone, `--dataset qa.csv`.

    Raises `ConfigError` for no recipe and no dataset, or more than one recipe.
    """
    paths, flags = parse_flags(words)
    if "config" in flags:
        paths.append(str(flags.pop("config")))
    if len(paths) == 1:
        return paths[0], flags
    dataset = flags.get("dataset", flags.get("dataset_name"))
    if not paths and dataset is not None:
        return Document(name=_name(dataset), folder=Path(), values={}, lines={}, is_file=False), flags
    got = f"got {len(paths)}: {', '.join(paths)}" if paths else "none given"
    raise ConfigError(
        f"`podium {verb}` takes one recipe, before any flag ({got}).",
        fix=f"podium {verb} run.yaml, or with a file of questions and answers alone: podium {verb} --dataset qa.csv",
    )


def _name(dataset: Any) -> str:
    """Name of a run on a dataset alone.

    >>> [_name(each) for each in ("data/qa.csv", "org/math", "reasoning-gym:chain_sum?size=9", ["a.csv", "b.csv"])]
    ['qa.csv', 'math', 'chain_sum', 'mixture']
    """
    if not isinstance(dataset, str):
        return "mixture"
    return re.split(r"[/:]", dataset.partition("?")[0].rstrip("/"))[-1] or "run"


def is_recipe(word: str) -> bool:
    """Whether it is a YAML file or the name of a recipe that comes with Podium."""
    return word.endswith((".yaml", ".yml")) or word in shipped_recipes()


def models_and_flags(words: Sequence[str], verb: str, *, most: int) -> tuple[list[str], Overrides]:
    """`runs/a runs/b --beta 0.1`: one model or run, or up to `most`. Raises `ConfigError` for none, or too many."""
    names, flags = parse_flags(words)
    if not 1 <= len(names) <= most:
        got = f"got {len(names)}: {', '.join(names)}" if names else "none given"
        wanted = "one model or run" if most == 1 else "one model or run, or two"
        raise ConfigError(
            f"`podium {verb}` takes {wanted}, before any flag ({got}).", fix=f"podium {verb} runs/quickstart"
        )
    return names, flags
