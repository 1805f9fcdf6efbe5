"""The fields of the classes that take a recipe's settings, known without importing the classes.

Importing TRL, transformers and peft costs seconds, for torch. So names, types, defaults and help texts are kept in a
file of the user's cache folder. It is written when the classes had to be imported, and belongs to their releases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import tempfile
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from podium.models.builtin import cache_root

CLASSES = {
    "GRPOConfig": "podium.trainer.config",
    "GRPOScriptArguments": "trl.scripts.grpo",
    "ModelConfig": "trl",
    "DatasetMixtureConfig": "trl",
    "DatasetConfig": "trl.scripts.utils",
    "SFTConfig": "trl",
    "TrainingArguments": "transformers",
    "LoraConfig": "peft",
}
"""The classes by name, and the modules that have them."""

_PLAIN: Mapping[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, list, dict, tuple, set)},
    "Any": Any,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A field of a class."""

    owner: str
    name: str
    written: Any
    """Its type as JSON; None where only the class has it."""
    init: bool
    default: Any
    """`dataclasses.MISSING`: there is none, or only the class has it."""
    help: str
    choices: tuple[str, ...]

    @property
    def type(self) -> Any:
        """The resolved annotation."""
        return _type(self.owner, self.name)


class Types(Mapping[str, Any]):
    """The types of options by their names. A class of another library is imported when its option is looked up."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        self._options = options

    def __getitem__(self, name: str) -> Any:
        return self._options[name].type

    def __contains__(self, name: object) -> bool:
        return name in self._options

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)


@cache
def options(owner: str) -> Mapping[str, Option]:
    """The fields of a class of `CLASSES`, by name."""
    return {name: Option(owner=owner, name=name, **_read(row)) for name, row in _table()[owner].items()}


@cache
def arguments(owner: str) -> Types:
    """The types of the arguments of a class of `CLASSES`."""
    return Types({name: option for name, option in options(owner).items() if option.init})


@cache
def _type(owner: str, name: str) -> Any:
    written = options(owner)[name].written
    return _hints(owner)[name] if written is None else _decoded(written)


def _read(stored: Mapping[str, Any]) -> dict[str, Any]:
    return {"default": dataclasses.MISSING, **stored, "choices": tuple(stored["choices"])}


# ---- the file ----


@cache
def _table() -> Mapping[str, Any]:
    """Every class with its fields, from the file or, where there is none that can be read, from the classes."""
    file = _file()
    with contextlib.suppress(OSError, ValueError):
        stored = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(stored, dict) and stored.keys() == CLASSES.keys():
            return stored
    made = {owner: described(owner) for owner in CLASSES}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as written:
            json.dump(made, written)
        Path(written.name).replace(file)
    return made


def _file() -> Path:
    releases = [importlib.metadata.version(name) for name in ("trl", "transformers", "peft")]
    sources = [Path(__file__).with_name(name).read_bytes() for name in ("config.py", "fields.py")]
    key = hashlib.sha256(repr((releases, sources)).encode()).hexdigest()[:16]
    return cache_root() / f"fields-{key}.json"


def described(owner: str) -> dict[str, Any]:
    """The fields of a class as JSON, from the class itself."""
    hints = _hints(owner)
    return {field.name: _described(field, hints[field.name]) for field in dataclasses.fields(_class(owner))}


def _described(field: dataclasses.Field[Any], annotation: Any) -> dict[str, Any]:
    made = {
        "written": _encoded(annotation),
        "init": field.init,
        "help": str(field.metadata.get("help") or ""),
        "choices": [str(choice) for choice in field.metadata.get("choices") or ()],
    }
    is_plain = field.default is None or type(field.default) in (bool, int, float, str)
    return {**made, "default": field.default} if is_plain else made


@cache
def _class(owner: str) -> Any:
    return getattr(import_module(CLASSES[owner]), owner)


@cache
def _hints(owner: str) -> Mapping[str, Any]:
    return get_type_hints(_class(owner))


def _encoded(annotation: Any) -> Any:
    """A type as JSON: a name, or a list of a name and what it is of; None for a class of another library."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if annotation is type(None):
        return "None"
    if origin is Literal:
        return ["Literal", *args]
    if origin in (Union, types.UnionType):
        found = [_encoded_member(member) for member in args]
        return None if None in found else ["Union", *found]
    if origin is not None:
        found = [_encoded(member) for member in args]
        return None if None in found else [origin.__name__, *found]
    return next((name for name, kind in _PLAIN.items() if kind is annotation), None)


def _encoded_member(annotation: Any) -> Any:
    """The same of a member of a union, which may be an enumeration: beside `str` its values stay text."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ["Enum", annotation.__name__, {member.name: member.value for member in annotation}]
    return _encoded(annotation)


def _decoded(written: Any) -> Any:
    if isinstance(written, str):
        return type(None) if written == "None" else _PLAIN[written]
    kind, *rest = written
    if kind == "Literal":
        return Literal[tuple(rest)]
    if kind == "Enum":
        return Enum(rest[0], rest[1], type=str)
    of = tuple(_decoded(part) for part in rest)
    return Union[of] if kind == "Union" else _PLAIN[kind][of]  # noqa: UP007
