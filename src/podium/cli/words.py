"""Parsing of command lines that take a recipe, or models, with any key of a recipe as a flag.

    --learning_rate 2e-6 --num-generations=4 --bf16 --no-bf16

Dashes or underscores; names in full, never abbreviated. Several words after a flag make a list.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.recipe.document import Document, scalar, shipped_recipes

_FLAG = re.compile(r"--[^\W\d][\w-]*(=.*)?", re.DOTALL)
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""A dash, and those that text editors and chat programs make of it."""
_NEARLY = re.compile(rf"(?:[{_DASHES}]+|\+*(?=[\w.]+=))([^\W\d][\w.-]*)(?:\s*[=:]\s*|\s+|$)(.*)", re.DOTALL)
"""`-max_steps`, `\u2014max_steps 5`, `max_steps=5`, `--max_steps:5`, `--lora.r=8`."""
_NEGATIVE = re.compile(r"-(\d|\.\d)")
_TEMPLATES = ("prompt", "answer", "system", "answer_from")
"""Keys whose values are text, braces and all."""
Overrides = dict[str, Any]


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
    raise ConfigError(
        f"`podium {verb}` takes one recipe, before any flag ({got}).",
        fix=f"podium {verb} run.yaml, or with a file of questions and answers alone: podium {verb} --dataset qa.csv",
        verb=verb,
        got=got,
    )


def parse_flags(words: Sequence[str]) -> tuple[list[str], Overrides]:
    """Words of a command line, parted into those before any flag and the flags' values. Raises `ConfigError`.

    >>> parse_flags("run.yaml --learning-rate 2e-6 --reward_weights 1 2 --no-bf16 --report_to=none".split())
    (['run.yaml'], {'learning_rate': 2e-06, 'reward_weights': [1, 2], 'bf16': False, 'report_to': 'none'})
    """
    first = next((index for index, word in enumerate(words) if _is_flag(word)), len(words))
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words[:first]:
        _refuse_nearly(word)
    for word in words[first:]:
        if not _is_flag(word):
            if word[:1] in _DASHES and name not in _TEMPLATES:
                _refuse_nearly(word)
            flags[name].append(word)
            continue
        if not _FLAG.fullmatch(word):
            _refuse_nearly(word)
        written, equals, value = word[2:].partition("=")
        name = written.replace("-", "_")
        if name in flags:
            raise ConfigError(f"--{name} is given twice", settings=(name,), name=name)
        flags[name] = [value] if equals else []
    return list(words[:first]), dict(_value(name, values) for name, values in flags.items())


def _refuse_nearly(word: str) -> None:
    """Raises `ConfigError` for a word that is no flag and can only be meant as one."""
    found = _NEARLY.fullmatch(word)
    if found is None or Path(word).exists():
        return
    name, value = found.groups()
    if "." in name:  # a key of a mapping
        name, _, inner = name.partition(".")
        value = f"{{{inner}: {value or '...'}}}"
    flag = f"--{name.rstrip('-')}"
    raise ConfigError(
        f"`{word}`: a key is set by its name in full, behind two dashes, and a value.",
        fix=f"{flag} {shlex.quote(value)}" if value else flag,
        word=word,
    )


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NEGATIVE.match(word)


def _value(name: str, words: list[str]) -> tuple[str, Any]:
    if not words:
        return (name.removeprefix("no_"), False) if name.startswith("no_") else (name, True)
    if name in _TEMPLATES:
        return name, " ".join(words)
    values = [scalar(word) for word in words]
    return name, values[0] if len(values) == 1 else values


_OTHER_WORDS = {
    "train": "grpo run fit sft rl finetune fine-tune start launch",
    "check": "validate lint verify dry-run",
    "test": "try reward-test",
    "rewards": "reward reward_funcs",
    "recipes": "list ls config configs recipe templates examples",
    "init": "new create",
    "eval": "evaluate evaluation benchmark",
    "sample": "generate samples rollout",
    "chat": "predict infer inference",
    "push": "upload publish",
    "merge": "export save",
    "report": "plot dashboard show",
    "explain": "docs rules codes",
    "train run.yaml --resume_from_checkpoint true": "resume continue",
    "environments": "environment env envs",
    "agents": "agent program programs",
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
        verb = "rewards test"
        rest = list(words)
    elif within:
        verb = f"{within} {near[0] if near else '-h'}"
        rest = rest if near else []
    elif is_recipe(first) or first.startswith("-"):
        verb = "train"
        rest = list(words)
    elif kind_of(Path(first)):
        verb = "train"
        rest = ["--dataset", *words]
    elif Path(first).is_dir():
        verb = "report" if (Path(first) / "metrics.jsonl").exists() else "chat"
        rest = list(words)
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
        raise ConfigError(
            f"`podium {verb}` takes {wanted}, before any flag ({got}).",
            fix=f"podium {verb} runs/quickstart",
            verb=verb,
            wanted=wanted,
            got=got,
        )
    return names, flags
