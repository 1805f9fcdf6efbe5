"""The text of a recipe: `templates/run.yaml`, whose keys are filled in, each with its comment."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

COMMENTS = 39
"""Column where comments behind a value stand."""
_ADAPTER_RATE = "of an adapter: about ten times that of all weights"


@functools.cache
def _shipped() -> str:
    return files("podium.cli.start").joinpath("templates/run.yaml").read_text(encoding="utf-8")


@functools.cache
def _comments() -> Mapping[str, str]:
    """The comment on each key, and on each reward, of the shipped recipe."""
    return dict(re.findall(r"^ *(?:- )?(\w+):? +# (.+)$", _shipped(), re.MULTILINE))


def recipe_text(settings: Mapping[str, Any], *head: str) -> str:
    """The shipped recipe with these settings: `head` as its first comments, then the blocks that have any.

    >>> print(recipe_text({"model": "m", "max_steps": 9}, "A run."), end="")
    # A run.
    # Any key may be changed, or given as a flag: podium train run.yaml --max_steps 10
    <BLANKLINE>
    model: m                               # or any Hugging Face id or folder
    <BLANKLINE>
    # Training
    max_steps: 9                           # optimizer steps; more where the curve still rises
    """
    first, *blocks = _shipped().split("\n\n")
    text = "\n".join([*(f"# {line}" for line in head), first]) + "\n"
    left = dict(settings)
    for block in blocks:
        keys = [key for key in re.findall(r"^(\w+):", block, re.MULTILINE) if key in left]
        lines = [line for key in keys for line in _lines(key, left.pop(key), adapter="lora" in settings)]
        title = [line for line in block.splitlines() if line.startswith("#")]
        if lines:
            text += "\n".join(["", *title, *lines]) + "\n"
    assert not left, f"keys without a place: {left}"
    return text


def _lines(key: str, value: Any, *, adapter: bool) -> Iterator[str]:
    """The lines of a key."""
    comment = _ADAPTER_RATE if adapter and key == "learning_rate" else _comments().get(key, "")
    if key == "rewards":
        yield "rewards:"
        for entry in value:
            yield from _reward(entry)
    elif key == "examples":
        yield _commented("examples:", comment)
        for example in value:
            yield from _item({in_yaml(name): text for name, text in example.items()})
    elif isinstance(value, Mapping):
        yield _commented(f"{key}:", comment)
        yield from (f"  {name}: {_value(item)}" for name, item in value.items())
    else:
        yield _commented(f"{key}: {_value(value)}", comment)


def _reward(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield _commented(f"  - {entry}", _comments().get(entry, ""))
        return
    named = "function" if "function" in entry else entry["name"]
    first, *others = _item(entry)
    yield _commented(first, _comments().get(named, ""))
    yield from others


def _item(mapping: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a mapping in a list."""
    for number, (key, value) in enumerate(mapping.items()):
        yield f"  {' ' if number else '-'} {key}: {_value(value)}"


def _commented(line: str, comment: str) -> str:
    return f"{line.ljust(COMMENTS - 1)} # {comment}" if comment else line


def _value(value: Any) -> str:
    """A value in the flow style of YAML.

    >>> _value({"sections": ["answer"], "x": True}), _value(3e-5), _value(1.0), _value("no")
    ('{sections: [answer], x: true}', '3e-5', '1.0', '"no"')
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{in_yaml(str(key))}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-") if 0 < abs(value) < 1e-3 else str(value)
    return in_yaml(value) if isinstance(value, str) else json.dumps(value)


def in_yaml(value: str) -> str:
    r"""A text as YAML: as it is where that is safe, else in double quotes.

    >>> in_yaml("../my data.csv"), in_yaml("builtin:x"), in_yaml("a: b"), in_yaml("{question}"), in_yaml("x\n#y")
    ('../my data.csv', 'builtin:x', '"a: b"', '"{question}"', '"x\\n#y"')
    """
    plain = re.fullmatch(r"(?:\.{0,2}/)*[A-Za-z](?:[\w./<>?+-]|:(?! |$)| (?!#))*(?<![ :])", value, re.ASCII)
    words = value.casefold() in ("true", "false", "null", "yes", "no", "on", "off")
    if plain and not words:
        return value
    quoted = json.dumps(value, ensure_ascii=False)  # leaves characters that YAML refuses
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)
