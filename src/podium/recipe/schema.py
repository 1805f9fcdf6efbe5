"""What a recipe may say: every key, what its value must be, and where it goes.

The keys are those of `GRPOConfig`, those of a `trl grpo` file, and Podium's own few. Values are checked against the
annotations of the classes they end up in, so nothing is listed twice. Importing this costs seconds (transformers).
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import trl
from peft import LoraConfig
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from trl.scripts.grpo import GRPOScriptArguments

from podium.data.columns import TEMPLATES
from podium.data.selection import ORDERS
from podium.errors import as_line, did_you_mean
from podium.recipe import Recipe
from podium.trainer.config import CHOICES, GONE, RANGES, SENSIBLE, GRPOConfig, out_of_range

OWN_KEYS: Mapping[str, Any] = {
    "model": str,
    "dataset": str | list[Any],
    "eval_dataset": str | None,
    "prompt": str | None,
    "answer": str | None,
    "system": str | None,
    "examples": list[dict[str, Any]] | None,
    "answer_from": str | None,
    "chat": bool,
    "held_out": float | None,
    "pass_rates": str | None,
    "pass_rate": list[float] | None,
    "order": str | None,
    "difficulty": str | None,
    "rewards": list[Any],
    "lora": dict[str, Any] | None,
    "accuracy": str | None,
    "eval_samples": int,
    "eval_temperature": float | None,
    "eval_rows": int,
    "env": dict[str, Any],
    "datasets": list[dict[str, Any]],
    "torch_dtype": str | None,
    "filter": list[str] | str | None,
}
"""Keys that are in none of TRL's classes. `torch_dtype` is what older TRL files call `dtype`."""

WIDER: Mapping[str, Any] = {
    "max_steps": int | None,
    "fsdp": bool | str | None,
    "scale_rewards": str | bool,
    "on_reward_error": float | str | None,
    "resume_from_checkpoint": str | bool | None,
    "rewards": list[Any] | str,
    "reward_funcs": list[str] | str | None,
    "lora_target_modules": list[str] | str | None,
    "lora_target_parameters": list[str] | str | None,
    "lora_modules_to_save": list[str] | str | None,
    "lr_scheduler_kwargs": dict[str, Any] | str | None,
}
"""Keys whose annotation says less than what is accepted."""

_ADAPTER_WORDS = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "modules": "target_modules"}
"""What people call the arguments of `LoraConfig`."""

_SENSIBLE: Mapping[str, Any] = {**SENSIBLE, "held_out": 0.2}
"""Values to type for keys that have no default, or one that says nothing."""

PART_TYPES: Mapping[str, Any] = {
    "path": str,
    "weight": float | None,
    "split": str,
    "config": str | None,
    **{key: OWN_KEYS[key] for key in ("prompt", "answer", "system", "examples", "answer_from", "chat")},
}
"""Keys of one part where `dataset` is a list."""

_LISTED_CHOICES: Mapping[str, tuple[str, ...]] = {
    **CHOICES,
    "order": ORDERS,
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "torch_dtype": ("auto", "bfloat16", "float16", "float32"),
    "bnb_4bit_quant_type": ("fp4", "nf4"),
}

_LIMITS: Mapping[str, tuple[float, float, str]] = {
    **RANGES,
    "eval_samples": (1, float("inf"), "to look at no held-out prompts there is `--no-eval`"),
    "eval_temperature": (1e-6, 100.0, "0.001 draws the likeliest completion"),
    "eval_rows": (1, float("inf"), "to look at no held-out prompts there is `--no-eval`"),
    **{key: (1, float("inf"), "it is the rank of an adapter's matrices") for key in ("r", "lora_r")},
    "lora_alpha": (1e-9, float("inf"), "it scales the adapter, and 0 takes it away"),
    "lora_dropout": (0.0, 1.0, "it is a probability"),
    "held_out": (0.001, 0.999, "it is the share of the prompts that are not trained on"),
}

_CLASSES = (GRPOConfig, GRPOScriptArguments, trl.ModelConfig, trl.DatasetMixtureConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """What is wrong with a key or its value, wherever it stands."""

    what: str
    code: str
    fix: str
    """What to type."""


@cache
def key_types() -> Mapping[str, Any]:
    """Every key of a recipe and what its value must be."""
    types: dict[str, Any] = {}
    for cls in reversed(_CLASSES):
        types |= field_types(cls)
    return {**types, **OWN_KEYS, **WIDER}


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Annotations of a dataclass's constructor arguments."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


@cache
def config_keys() -> frozenset[str]:
    """Keys that go to `GRPOConfig`."""
    return frozenset(field_types(GRPOConfig))


def unknown_key(key: str, known: Mapping[str, Any] | None = None, *, code: str = "C001") -> Mistake:
    """What to say about a key that is none; `known` are the keys of the mapping it is in (default: a recipe's)."""
    fix = GONE.get(key)
    known = key_types() if known is None else known
    meant = _ADAPTER_WORDS.get(key)
    fix = fix or did_you_mean(key.replace("-", "_"), known)
    if not fix:
        fix = f"write `{meant}` in place of `{key}`" if meant in known else as_line(key, None)
    return Mistake(what=f"unknown key `{key}`.", code=code, fix=fix)


def default_line(key: str) -> str:
    """What to type for a setting to be as when nobody sets it.

    >>> default_line("temperature"), default_line("top_entropy_quantile"), default_line("min_p")
    ('temperature: 1.0', 'top_entropy_quantile: 1.0', 'take `min_p` out')
    """
    return as_line(key, {**_defaults(), **_SENSIBLE}.get(key))


@cache
def _defaults() -> Mapping[str, Any]:
    """Of settings by their names, adapters' and recipes' own among them."""
    fields = (field for record in (LoraConfig, Recipe, GRPOConfig) for field in dataclasses.fields(record))
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def check_key(key: str, value: Any) -> tuple[Any, Mistake | None]:
    """The value of a top-level key in its own type, or what is wrong with it."""
    checked, mistake = check_type(key, value, key_types()[key])
    return checked, mistake or _wrong_choice(key, checked) or beyond_limits(key, checked)


def check_type(key: str, value: Any, annotation: Any) -> tuple[Any, Mistake | None]:
    """`value` converted to `annotation`, or what is wrong with it as the value of `key`."""
    checked, problem = _converted(value, annotation)
    if problem is None:
        return checked, None
    if int in members(annotation):
        return checked, Mistake(what=f"`{key}`: {problem}", code="C002", fix=_whole_line(key, value))
    unquoted = isinstance(value, Mapping) and len(value) == 1 and key in TEMPLATES
    fix = f'{key}: "{{{next(iter(value))}}}"' if unquoted else default_line(key)
    return checked, Mistake(what=f"`{key}`: {problem}", code="C003", fix=fix)


def of_flag(mistake: Mistake, key: str, value: Any) -> Mistake:
    """The same of a key that was given as a flag, with the flag to type.

    >>> _, mistake = check_key("learning_rate", True)
    >>> of_flag(mistake, "learning_rate", True)
    Mistake(what='needs a number behind it.', code='C003', fix='--learning_rate 1e-06')
    """
    words = _in_words(key_types()[key])
    fix = mistake.fix.replace(f"{key}: ", f"--{key} ", 1) if mistake.fix.startswith(f"{key}: ") else mistake.fix
    what = f"needs {words} behind it." if value is True else mistake.what
    return dataclasses.replace(mistake, what=what, fix=fix)


def _whole_line(key: str, value: Any) -> str:
    """The nearest whole number, where there is one."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    return as_line(key, round(number)) if math.isfinite(number) else default_line(key)


def _converted(value: Any, annotation: Any) -> tuple[Any, str | None]:
    """`value` converted to `annotation`, or what is wrong: 4.5 is no whole number, a list no number, true no number."""
    if isinstance(value, bool) and bool not in members(annotation) and members(annotation) & {int, float, str}:
        return value, f"expected {_in_words(annotation)}, got {str(value).lower()}"
    adapter = _adapter(annotation)
    if adapter is None:
        return value, None
    try:
        return adapter.validate_python(value), None
    except ValidationError:
        return value, f"expected {_in_words(annotation)}, got {_shown(value)}"


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    """None for annotations that pydantic cannot check (classes of other libraries): their owners will."""
    try:
        return TypeAdapter(annotation, config=ConfigDict(coerce_numbers_to_str=True, arbitrary_types_allowed=True))
    except PydanticUserError:  # the annotation is a dataclass, which brings its own configuration
        return None


def _wrong_choice(key: str, value: Any) -> Mistake | None:
    choices = _LISTED_CHOICES.get(key) or _choices_of(key)
    if not choices or value is None or isinstance(value, bool) or not isinstance(value, str):
        return None
    value = value.value if isinstance(value, Enum) else value
    if value in choices:
        return None
    what = f"`{key}` must be one of {', '.join(choices)}; got `{value}`."
    return Mistake(what=what, code="C004", fix=did_you_mean(value, choices) or default_line(key))


@cache
def _choices_of(key: str) -> tuple[str, ...]:
    """Closed sets that transformers declares: an enumeration in the annotation, or `choices` of the field."""
    enums = [member for member in members(key_types()[key]) if isinstance(member, type) and issubclass(member, Enum)]
    if enums and list not in members(key_types()[key]):
        return tuple(str(member.value) for enum in enums for member in enum)
    for cls in _CLASSES:
        for field in dataclasses.fields(cls):
            if field.name == key and field.metadata.get("choices"):
                return tuple(field.metadata["choices"])
    return ()


def beyond_limits(key: str, value: Any) -> Mistake | None:
    """What is wrong with a number that is out of its range."""
    wrong = out_of_range(key, value, _LIMITS)
    if not wrong:
        return None
    code = "C011" if key.startswith("num_generations") else "C016"
    return Mistake(what=f"`{key}` {wrong}", code=code, fix=default_line(key))


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
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        words = dict.fromkeys(_in_words(arg) for arg in args)
        return " or ".join(words)
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin is list and args[0] in _PLURALS:
        return f"a list of {_PLURALS[args[0]]}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "text"
    return _WORDS.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


def members(annotation: Any) -> set[Any]:
    """The plain types in a union; of `list[float]` it is `list`."""
    return set(_walk(annotation))


def _walk(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for arg in get_args(annotation):
            yield from _walk(arg)
    else:
        yield origin or annotation


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (list, dict)):
        return f"a {'list' if isinstance(value, list) else 'mapping'}, {str(value)[:60]}"
    return f"`{value}`" if isinstance(value, str) else str(value)
