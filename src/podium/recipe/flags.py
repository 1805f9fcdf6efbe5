"""Any key of a recipe as a flag: `--learning_rate 2e-6`, `--num-generations=4`, `--bf16`, `--no-bf16`.

Dashes or underscores; names in full, never abbreviated. Several words after a flag make a list.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.recipe.document import scalar

_FLAG = re.compile(r"--[^\W\d][\w-]*(=.*)?", re.DOTALL)
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""A dash, and those that text editors and chat programs make of it."""
_NEARLY = re.compile(rf"(?:[{_DASHES}]+|\+*(?=[\w.]+=))([^\W\d][\w.-]*)(?:\s*[=:]\s*|\s+|$)(.*)", re.DOTALL)
"""`-max_steps`, `\u2014max_steps 5`, `max_steps=5`, `--max_steps:5`, `--lora.r=8`."""
_NEGATIVE = re.compile(r"-(\d|\.\d)")
_TEMPLATES = ("prompt", "answer", "system", "answer_from")
"""Keys whose values are text, braces and all."""
Overrides = dict[str, Any]


def parse_flags(words: Sequence[str]) -> tuple[list[str], Overrides]:
    """Words of a command line, parted into those before any flag and the flags' values. Raises `ConfigError`.

    >>> parse_flags("run.yaml --learning-rate 2e-6 --reward_weights 1 2 --no-bf16 --report_to=none".split())
    (['run.yaml'], {'learning_rate': 2e-06, 'reward_weights': [1, 2], 'bf16': False, 'report_to': 'none'})
    """
    first = next((index for index, word in enumerate(words) if _is_flag(word)), len(words))
    given: dict[str, list[str]] = {}
    name = ""
    for word in words[:first]:
        _refuse_nearly(word)
    for word in words[first:]:
        if not _is_flag(word):
            if word[:1] in _DASHES and name not in _TEMPLATES:
                _refuse_nearly(word)
            given[name].append(word)
            continue
        if not _FLAG.fullmatch(word):
            _refuse_nearly(word)
        written, equals, value = word[2:].partition("=")
        name = written.replace("-", "_")
        if name in given:
            raise ConfigError("recipe.given_twice", name=name)
        given[name] = [value] if equals else []
    return list(words[:first]), dict(_value(name, values) for name, values in given.items())


def _refuse_nearly(word: str) -> None:
    """Raises `ConfigError` for a word that is no flag and can only be meant as one."""
    found = _NEARLY.fullmatch(word)
    if found is None or Path(word).exists():
        return
    name, value = found.groups()
    if "." in name:  # a key of a mapping
        name, _, inner = name.partition(".")
        value = f"{{{inner}: {value or '...'}}}"
    raise ConfigError(
        "recipe.key_set_name", fix=f"--{name.rstrip('-')}" + f" {shlex.quote(value)}" * bool(value), word=word
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
