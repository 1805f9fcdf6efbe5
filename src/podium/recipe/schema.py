"""Keys of a recipe: the type of each value, its choices and limits.

The keys are those of `GRPOConfig`, those of a `trl grpo` file, and Podium's own few. Values are checked against the
annotations of the classes that take them, and against the table of `trainer.config`, so nothing is listed twice.
The classes are not imported for it; see `trainer.fields`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import shlex
import types
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from podium.data.columns import TEMPLATES
from podium.data.selection import ORDERS
from podium.errors import ConfigError
from podium.errors.texts import as_line, as_lines, as_yaml
from podium.recipe.assume import SPELLINGS
from podium.recipe.recipe import Recipe
from podium.trainer import names
from podium.trainer.fields import Option, arguments, options
from podium.trainer.rules import CHOICES, RANGES, SENSIBLE, enumerated, members, wrong_value

OWN_KEYS: Mapping[str, Any] = {
    "model": str,
    "dataset": str | list[Any],
    "eval_dataset": str | None,
    "prompt": str | None,
    "answer": str | None,
    "system": str | None,
    "examples": int | list[dict[str, Any]] | None,
    "answer_from": str | None,
    "chat": bool,
    "columns": dict[str, str] | None,
    "held_out": float | None,
    "pass_rates": str | None,
    "pass_rate": list[float] | None,
    "order": str | None,
    "difficulty": str | None,
    "rewards": list[Any],
    "lora": dict[str, Any] | None,
    "tools": list[Any] | None,
    "environment": str | dict[str, str] | None,
    "agent": str | dict[str, Any] | None,
    "env": dict[str, Any],
    "resume": str | bool | None,
    "datasets": list[dict[str, Any]],
    "torch_dtype": str | None,
    "filter": list[str] | str | None,
}
"""Keys that are in none of TRL's classes. `torch_dtype` is what older TRL files call `dtype`, `resume` is short for
`resume_from_checkpoint`."""

MEANINGS: Mapping[str, str] = {
    "model": "The model to train: a folder, a name of the hub, or a built-in one (docs/scale.md).",
    "dataset": "Rows to train on: a file, a folder, a name of the hub, a function, or a list of them (docs/data.md).",
    "eval_dataset": "Rows to test on, in place of those that are held out.",
    "prompt": "The column that is asked, or a template of columns in braces.",
    "answer": "The column with the right answer, or a template of columns in braces, for rewards that compare with it.",
    "system": "The system message of every prompt, which becomes a conversation.",
    "examples": "Worked examples at the beginning of every prompt: rows, or how many of the data to take.",
    "answer_from": "What is taken of the answer: after ####, last number, boxed, last turn, tag:NAME or json:FIELD.",
    "chat": "Whether a plain prompt becomes a message of the user, in the chat template of the model.",
    "columns": "Further names of columns, for reward functions that ask for them by another one.",
    "held_out": "The share of the prompts that are tested before and after training, and never trained on.",
    "filter": "Conditions on columns, which rows have to meet to be trained on.",
    "pass_rates": "A file of podium sample -n N --save FILE, by which rows are left out.",
    "pass_rate": "The lowest and the highest of these rates with which a row is trained on.",
    "order": "The order of the rows by difficulty; without it they are shuffled.",
    "difficulty": "A column of numbers, larger for harder rows, for the order.",
    "rewards": "Names of the library or FILE:FUNCTION, or mappings of name, weight and args (docs/rewards.md).",
    "lora": "The arguments of peft.LoraConfig of an adapter, which is trained in place of all weights.",
    "tools": "Functions the model may call: FILE:FUNCTION, names of the library, MCP servers (docs/agents.md).",
    "environment": "A class that the model plays with over several turns, as FILE:CLASS (docs/agents.md).",
    "agent": "A program that plays an episode with the model through an endpoint of OpenAI (docs/agents.md).",
    "env": "Environment variables of the run, such as WANDB_PROJECT.",
    "resume_from_checkpoint": "A checkpoint to go on from; true: the newest in output_dir; auto: that, where there is "
    "one, else the run starts.",
}
"""Purposes of keys of Podium's own, and of those that the classes do not describe, for `podium explain`."""

WIDER: Mapping[str, Any] = {
    "max_steps": int | None,
    "fsdp": bool | str | None,
    "scale_rewards": str | bool,
    "on_reward_error": float | str | None,
    "resume_from_checkpoint": str | bool | None,
    "rewards": list[Any] | str,
    "tools": list[Any] | str | None,
    "reward_funcs": list[str] | str | None,
    "lora_target_modules": list[str] | str | None,
    "lora_target_parameters": list[str] | str | None,
    "lora_modules_to_save": list[str] | str | None,
    "lr_scheduler_kwargs": dict[str, Any] | str | None,
}
"""Keys that accept more than their annotation."""

_SENSIBLE: Mapping[str, Any] = {**SENSIBLE, "held_out": 0.2, "examples": 2, "columns": {"tests": "test_list"}}
"""Values to type for keys that have no default, or one that is no example."""

PART_TYPES: Mapping[str, Any] = {
    "path": str,
    "weight": float | None,
    "split": str,
    "config": str | None,
    **{key: OWN_KEYS[key] for key in ("prompt", "answer", "system", "answer_from", "chat", "columns")},
    "examples": list[dict[str, Any]] | None,
}
"""Keys of one part where `dataset` is a list."""

_LISTED_CHOICES: Mapping[str, tuple[str, ...]] = {
    **CHOICES,
    **dict.fromkeys(("dtype", "torch_dtype"), ("auto", "bfloat16", "float16", "float32")),
    "order": ORDERS,
    "bnb_4bit_quant_type": ("fp4", "nf4"),
}

_LIMITS: Mapping[str, tuple[float, float, str]] = {
    **RANGES,
    "examples": (0, 16, "every prompt begins with all of them"),
    **{key: (1, float("inf"), "it is the rank of an adapter's matrices") for key in ("r", "lora_r")},
    "lora_alpha": (1e-9, float("inf"), "it scales the adapter, and 0 takes it away"),
    "lora_dropout": (0.0, 1.0, "it is a probability"),
    "held_out": (0.001, 0.999, "it is the share of the prompts that are not trained on"),
}

_LONG = 400
"""Characters of a description above which `about` gives its first sentences alone."""

_CLASSES = ("GRPOConfig", "GRPOScriptArguments", "ModelConfig", "DatasetMixtureConfig")


@cache
def key_types() -> Mapping[str, Any]:
    """Every key of a recipe and what its value must be."""
    return ChainMap({**OWN_KEYS, **WIDER}, *map(arguments, _CLASSES))  # type: ignore[arg-type]  # only read


def about(key: str) -> str:
    """Describe a key: its purpose, values and default; empty for a word that is no key."""
    key = SPELLINGS.get(key, key)
    if key not in key_types():
        return ""
    helps = (MEANINGS.get(key), *(option.help for option in _declared(key)))
    meaning = " ".join(next(filter(None, helps)).split())
    if len(meaning) > _LONG:
        meaning = re.match(r".{100,}?[.](?= )|.*", meaning)[0]  # type: ignore[index]  # the first sentences
    words = ", ".join(_LISTED_CHOICES.get(key) or _choices_of(key)) or _in_words(key_types()[key])
    default = f"; default {as_yaml(_defaults()[key])}" if _defaults().get(key) is not None else ""
    return f"{key}, a setting ({words}{default}): {meaning}"


@cache
def config_keys() -> frozenset[str]:
    """Keys that go to `GRPOConfig`."""
    return frozenset(arguments("GRPOConfig"))


def unknown_key(
    key: str, known: Mapping[str, Any] | None = None, *, value: Any = None, code: str = "C001"
) -> ConfigError:
    """The error of a key that is not among `known`, the keys of the mapping it is in (default: a recipe's)."""
    fix, meaning = names.meant(key, value, key_types() if known is None else known)
    changes = {} if meaning is None else {key: None, **meaning}
    return ConfigError(f"unknown key `{key}`.", code=code, fix=fix, changes=changes, settings=(key,), setting=key)


def default(key: str) -> Any:
    """The default of a key, or a value to type where that is no example; None for none.

    >>> default("temperature"), default("top_entropy_quantile"), default("min_p")
    (1.0, 1.0, None)
    """
    return {**_defaults(), **_SENSIBLE}.get(key)


@cache
def _defaults() -> Mapping[str, Any]:
    of: list[Iterable[Any]] = [
        options("LoraConfig").values(),
        dataclasses.fields(Recipe),
        options("GRPOConfig").values(),
    ]
    return {option.name: option.default for option in itertools.chain(*of) if option.default is not dataclasses.MISSING}


def meant(key: str, value: Any) -> Any:
    """The value that another type of value stands for, where it can mean nothing else; None where it may.

    >>> meant("lora", True), meant("learning_rate", "1,5e\u22125"), meant("rewards", {"exact_match": 2.0})
    ({'r': 16}, 1.5e-05, [{'name': 'exact_match', 'weight': 2.0}])
    >>> meant("dataset", {"path": "q.csv"}), meant("learning_rate", "small"), meant("max_steps", "1,000")
    ('q.csv', None, 1000)
    """
    short = SPELLINGS.get(key, key)
    if key in _MEANT or short in _MEANT:
        return _MEANT[short](value)
    types = members(key_types()[key]) if key in key_types() else set()
    if not isinstance(value, str) or not {int, float} & types:
        return None
    text = value.strip().replace("\u2212", "-").replace("\u2013", "-")
    whole = re.fullmatch(r"\d{1,3}(,\d{3})+", text)
    if int in types:
        return int(text.replace(",", "")) if whole or re.fullmatch(r"[-+]?\d+", text) else None
    number = re.fullmatch(r"[-+]?\d+([.,]\d+)?(e[-+]?\d+)?", text, re.IGNORECASE)
    return float(text.replace(",", ".")) if number and not whole else None


def _adapter_of(value: Any) -> dict[str, int] | None:
    """An adapter by its rank: `true`, `8`, `[8, 16]`, which is the rank and alpha, or `r=8`."""
    if value is True or value in ("yes", "on", "true"):
        return {"r": 16}
    found = re.fullmatch(r"\[?(?:r=|r: |rank=)?(\d+)(?:, (\d+))?\]?", str(value))
    given = zip(("r", "lora_alpha"), found.groups() if found else (), strict=False)
    return {name: int(number) for name, number in given if number} or None


def _rewards_of(value: Any) -> list[Any] | None:
    """Rewards with their weights, where names stand before numbers; one reward that is not in a list."""
    if not isinstance(value, Mapping) or not value:
        return None
    if {"name", "function"} & value.keys():
        return [dict(value)]
    numbers = all(isinstance(weight, (int, float)) and not isinstance(weight, bool) for weight in value.values())
    return [{"name": name, "weight": weight} for name, weight in value.items()] if numbers else None


def _dataset_of(value: Any) -> Any:
    if not isinstance(value, Mapping) or not isinstance(value.get("path"), str):
        return None
    return value["path"] if len(value) == 1 else [dict(value)]


_MEANT: Mapping[str, Callable[[Any], Any]] = {"lora": _adapter_of, "rewards": _rewards_of, "dataset": _dataset_of}
"""By key, what a value of another type stands for."""


def check_key(key: str, value: Any) -> tuple[Any, ConfigError | None]:
    """The value of a top-level key in its own type, or the error in it."""
    checked, error = check_type(key, value, key_types()[key])
    return checked, error or check_value(key, checked, _LISTED_CHOICES.get(key) or _choices_of(key))


def check_value(key: str, value: Any, choices: Sequence[str] = ()) -> ConfigError | None:
    """The error of a value that is none of `choices`, or a number out of its range."""
    words = choices if isinstance(value, str) else ()
    return wrong_value(key, value, choices=words, limits=_LIMITS, default=default)


def check_type(key: str, value: Any, annotation: Any) -> tuple[Any, ConfigError | None]:
    """`value` converted to `annotation`, or the error in it as the value of `key`.

    4.5 is no whole number, a list no number, true no number.
    """
    whole = members(annotation)
    adapter = _adapter(annotation)
    shown = _shown(value)
    if isinstance(value, bool) and bool not in whole and whole & {int, float, str}:
        shown = str(value).lower()
    elif adapter is None:
        return value, None
    else:
        with contextlib.suppress(ValidationError):
            return adapter.validate_python(value), None
    changes: dict[str, Any] = {}
    code = "C003"
    if (same := meant(key, value)) is not None:
        changes = {key: same}
    elif value is False and bool not in whole:  # none of it
        changes = {key: None}
    elif int in whole:
        changes = _whole_number(key, value)
        code = "C002"
    elif isinstance(value, Mapping) and len(value) == 1 and key in TEMPLATES:  # a template without quotes
        changes = {key: f"{{{next(iter(value))}}}"}
    example = {} if changes or default(key) is None else {key: default(key)}
    kind = _in_words(annotation)
    fix = as_lines(changes)
    if example:
        fix = f"for example {as_lines(example)}"
    return value, ConfigError(
        f"`{key}`: expected {kind}, got {shown}",
        code=code,
        fix=fix,
        changes=changes,
        settings=(key,),
        setting=key,
        kind=kind,
        shown=shown,
        example=example,
    )


def of_flag(error: ConfigError, key: str, value: Any) -> ConfigError:
    """The same error of a key that was given as a flag, with the flag to type.

    >>> _, error = check_key("learning_rate", True)
    >>> print(of_flag(error, "learning_rate", True))
    needs a number behind it.
      fix: for example --learning_rate 1e-06
    """
    example = error.facts.get("example") or {}
    wanted = {**example, **error.changes}.get(key)
    fix = error.fix
    if wanted is not None and not error.facts.get("near"):
        fix = f"--{key} {shlex.quote(as_line(key, wanted).removeprefix(f'{key}: '))}"
        if key in example:
            fix = f"for example {fix}"
    if value is True:
        return ConfigError(
            f"needs {_in_words(key_types()[key])} behind it.",
            code=error.code,
            fix=fix,
            kind=_in_words(key_types()[key]),
        )
    return ConfigError(error.what, code=error.code, fix=fix)


def _whole_number(key: str, value: Any) -> dict[str, Any]:
    """The nearest whole number, where there is one."""
    try:
        return {} if isinstance(value, bool) else {key: round(float(value))}
    except (TypeError, ValueError, OverflowError):
        return {}


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    """None for annotations that pydantic cannot check (classes of other libraries): their owners will."""
    try:
        return TypeAdapter(annotation, config=ConfigDict(coerce_numbers_to_str=True, arbitrary_types_allowed=True))
    except PydanticUserError:  # the annotation is a dataclass, which brings its own configuration
        return None


@cache
def _choices_of(key: str) -> tuple[str, ...]:
    """Closed sets that transformers declares: an enumeration in the annotation, or `choices` of the field."""
    if found := enumerated(key_types()[key]):
        return found
    return next((option.choices for option in _declared(key) if option.choices), ())


def _declared(key: str) -> list[Option]:
    """The fields of a name."""
    return [options(owner)[key] for owner in _CLASSES if key in options(owner)]


# ---- annotations in words ----

_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    list: "a list",
    type(None): "null",
}
_PLURALS: Mapping[Any, str] = {int: "whole numbers", float: "numbers", str: "texts", dict: "mappings"}


def _in_words(annotation: Any) -> str:
    """`list[float] | None` as `a list of numbers or null`."""
    if annotation is Any:
        return "anything"
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_in_words, args)))
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin is list and args[0] in _PLURALS:
        return f"a list of {_PLURALS[args[0]]}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "text"
    return _WORDS.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (list, dict)):
        return f"a {'list' if isinstance(value, list) else 'mapping'}, {str(value)[:60]}"
    return f"`{value}`" if isinstance(value, str) else str(value)
