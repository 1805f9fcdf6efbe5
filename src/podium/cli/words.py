"""Parsing of command lines that take a recipe, or models, with any key of a recipe as a flag."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.recipe import shipped_recipes
from podium.recipe.document import Document
from podium.recipe.flags import Overrides, parse_flags


def recipe_and_flags(words: Sequence[str], verb: str) -> tuple[str | Document, Overrides]:
    """`run.yaml --beta 0.1`, or `--config run.yaml` as for `trl grpo`; or a dataset alone, `--dataset qa.csv`.

    Raises `ConfigError` for no recipe and no dataset, or more than one recipe.
    """
    paths, flags = parse_flags(["--config" if word == "-c" else word for word in words])
    paths += [str(flags.pop(name)) for name in ("config", "recipe", "config_file") if name in flags]
    if len(paths) == 1:
        return paths[0], flags
    dataset = flags.get("dataset", flags.get("dataset_name"))
    if not paths and dataset is not None:
        return Document(name=_name(dataset), folder=Path(), values={}, lines={}, is_file=False), flags
    got = f"got {len(paths)}: {', '.join(paths)}" if paths else "none given"
    raise ConfigError("cli.podium_takes_recipe", verb=verb, got=got)


_OTHER_WORDS = {
    "train": "grpo run fit sft rl finetune fine-tune start launch",
    "check": "validate lint verify dry-run",
    "rewards test": "test reward-test",
    "rewards": "reward reward_funcs",
    "recipes": "list ls config configs recipe templates examples",
    "init": "new create",
    "eval": "evaluate evaluation benchmark",
    "sample": "generate samples rollout",
    "chat": "predict infer inference",
    "push": "upload publish",
    "merge": "export save",
    "report": "plot dashboard show",
    "pilot": "tune sweep search",
    "explain": "docs rules codes",
    "train run.yaml --resume_from_checkpoint true": "resume continue",
    "environments": "environment env envs",
}
"""Verbs, and words that other tools have for them."""


def meant(words: Sequence[str], verbs: Collection[str], within: str = "") -> str:
    """Command to type in place of words that begin with no verb; `within` is the group whose `verbs` they are.

    >>> meant(["run.yaml", "--beta", "0.1"], ["train"]), meant(["q.csv"], ["train"]), meant(["r.py:f"], ["train"])
    ('podium train run.yaml --beta 0.1', 'podium train --dataset q.csv', 'podium rewards test r.py:f')
    >>> meant(["grpo", "run.yaml"], ["train"]), meant(["--model", "x"], ["train"]), meant(["trian"], ["train"])
    ('podium train run.yaml', 'podium train --model x', 'podium train')
    """
    from podium.data.files import kind_of

    first, *rest = words
    verb = next((verb for verb, others in _OTHER_WORDS.items() if first.casefold() in others.split()), "")
    near = get_close_matches(first.casefold(), verbs, n=1, cutoff=0.6)
    flag = get_close_matches(first, ("--version", "--help"), n=1, cutoff=0.75) if first.startswith("-") else []
    if flag:
        verb = flag[0]
    elif ".py" in first:
        verb, rest = "rewards test", list(words)
    elif within:
        verb, rest = f"{within} {near[0] if near else '-h'}", rest if near else []
    elif is_recipe(first) or first.startswith("-"):
        verb, rest = "train", list(words)
    elif kind_of(Path(first)):
        verb, rest = "train", ["--dataset", *words]
    elif Path(first).is_dir():
        verb, rest = "report" if (Path(first) / "metrics.jsonl").exists() else "chat", list(words)
    elif not verb or (near and near[0] in verb.split()):
        verb = near[0] if near else ""
    return shlex.join(["podium", *verb.split(), *rest]) if verb else "podium -h, which lists them"


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
        raise ConfigError("cli.podium_takes_before", verb=verb, wanted=wanted, got=got)
    return names, flags
