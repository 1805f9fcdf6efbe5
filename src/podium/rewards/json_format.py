"""Rewards for completions that are JSON, and JSON of a certain form. Each takes plain and chat completions.

Nothing is ever fetched: a schema that refers to another address is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from podium.errors import ConfigError
from podium.rewards.text import text_of

_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*(?:json\b)?", re.IGNORECASE)


def json_format(completions: Sequence[Any], *, fenced: bool = True) -> list[float]:
    """1 where the whole completion is JSON, 0 otherwise.

    `fenced` also takes one Markdown block of it, with nothing around. `NaN` and `Infinity` are no JSON, and neither is
    an object with one name twice.

    >>> json_format(['{"answer": 7}', '```json\\n[1, 2]\\n```', 'It is {"answer": 7}', "NaN"])
    [1.0, 1.0, 0.0, 0.0]
    """
    return [float(_parsed(text_of(each), fenced=fenced) is not _NO_JSON) for each in completions]


def json_schema(
    completions: Sequence[Any], *, schema: Mapping[str, Any], fenced: bool = True, parses: float = 0.0
) -> list[float]:
    """1 where the whole completion is JSON that fits `schema` (JSON Schema, draft 2020-12 unless it names another).

    `parses` is what JSON that does not fit gets, for a model that has both to learn; `fenced` as in `json_format`.

    >>> schema = {"type": "object", "required": ["answer"], "properties": {"answer": {"type": "integer"}}}
    >>> json_schema(['{"answer": 7}', '{"answer": "7"}', "7, I think"], schema=schema, parses=0.25)
    [1.0, 0.25, 0.0]
    """
    from referencing.exceptions import Unresolvable

    validator = _validator(schema)
    values = [_parsed(text_of(each), fenced=fenced) for each in completions]
    try:
        return [0.0 if value is _NO_JSON else 1.0 if _fits(validator, value) else parses for value in values]
    except Unresolvable as error:
        raise ConfigError(
            f"the schema refers to `{getattr(error, 'ref', error)}`, which is not part of it, and nothing is fetched: "
            "put that schema into `$defs` and refer to it as `#/$defs/NAME`."
        ) from error


def json_match(completions: Sequence[Any], answer: Sequence[Any], *, fenced: bool = True) -> list[float | None]:
    """The share of the fields that are right, where the completion is a JSON object; 0 where it is none.

    The `answer` column holds the right object, as JSON text or as a mapping. A field that it does not have counts as a
    wrong one. Texts are compared with their white space, numbers by value; `true` is not 1. None where the column has
    no object; `fenced` as in `json_format`.

    >>> json_match(['{"name": "Ana", "age": 41}', '{"name": "Ana"}', "Ana"], answer=[{"name": "Ana", "age": 41}] * 3)
    [1.0, 0.5, 0.0]
    """
    pairs = zip(completions, answer, strict=True)
    return [_share_right(_parsed(text_of(each), fenced=fenced, number=Decimal), gold) for each, gold in pairs]


def _share_right(given: Any, gold: Any) -> float | None:
    gold = _parsed(gold, fenced=False, number=Decimal) if isinstance(gold, str) else gold
    if not isinstance(gold, Mapping) or not gold:
        return None
    if not isinstance(given, Mapping):
        return 0.0
    right = sum(name in given and _equal(given[name], value) for name, value in gold.items())
    return right / len(gold.keys() | given.keys())


def _equal(given: Any, gold: Any) -> bool:
    if isinstance(given, Mapping) and isinstance(gold, Mapping):
        return given.keys() == gold.keys() and all(_equal(given[name], gold[name]) for name in gold)
    if isinstance(given, (list, tuple)) and isinstance(gold, (list, tuple)):
        return len(given) == len(gold) and all(map(_equal, given, gold))
    gold = Decimal(repr(gold)) if isinstance(gold, float) else gold
    return isinstance(given, bool) == isinstance(gold, bool) and bool(given == gold)


def _validator(schema: Mapping[str, Any]) -> Any:
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY  # the drafts themselves, from the disk; retrieves nothing

    if not isinstance(schema, Mapping):
        raise ConfigError(f"`schema` must be a mapping, as in {{'type': 'object'}}; it is {schema!r:.80}.")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path)) or "its top"
        raise ConfigError(f"`schema` is no JSON Schema: {error.message} (at {place}).") from error
    return kind(schema, registry=REGISTRY)


def _fits(validator: Any, value: Any) -> bool:
    try:
        return bool(validator.is_valid(value))
    except RecursionError:  # nested as deep as a schema that refers to itself can follow
        return False


_NO_JSON = object()


def _parsed(text: str, *, fenced: bool, number: Callable[[str], Any] = float) -> Any:
    """The value of a text, or `_NO_JSON`."""
    text = text.strip().lstrip("\ufeff").strip()
    if fenced and (fence := _FENCE.match(text)) and text.endswith(fence[1]):
        text = text[fence.end() : -len(fence[1])]
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=number, object_pairs_hook=_each_once)
    except (ValueError, RecursionError, ArithmeticError):
        return _NO_JSON


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
