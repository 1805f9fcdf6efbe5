"""Rewards for the form of a completion, not its content: tags, sections, JSON, calls of tools.

Each takes plain and chat completions. Nothing is ever fetched: a JSON Schema that refers to another address is refused.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from podium.data.extract import compiled_pattern, seen, text_of
from podium.errors import ConfigError

_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_TRL_THINK = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)
_THINK_TAG = re.compile(r"<(/?)think\s*>")


def _says_something(content: str) -> bool:
    """Whether a text shows more than tags, white space, and characters that take no room, as entities too."""
    return bool(_TAG.sub("", seen(html.unescape(content))).strip())


def answer_format(completions: Sequence[Any]) -> list[float]:
    """How far a completion is one tagged answer: 0.25 for each tag that is there, 0.5 for nothing else around them.

    The parts make the reward reachable by small steps, for a model that hardly ever writes both tags by itself.

    >>> answer_format(["<answer>7</answer>", "It is <answer>7</answer>", "<answer>7", "7"])
    [1.0, 0.5, 0.25, 0.0]
    """
    return [_how_far_tagged(seen(text_of(completion)).strip()) for completion in completions]


def _how_far_tagged(text: str) -> float:
    content = text.removeprefix("<answer>").removesuffix("</answer>")
    is_one = text == f"<answer>{content}</answer>" and not _TAG.search(content) and _says_something(content)
    return 0.25 * ("<answer>" in text) + 0.25 * ("</answer>" in text) + 0.5 * is_one


def xml_format(completions: Sequence[Any], *, sections: Sequence[str] = ("reasoning", "answer")) -> list[float]:
    """1 where a completion is the given XML sections in their order, each once and not empty, and nothing else.

    >>> xml_format(["<reasoning>3+4</reasoning> <answer>7</answer>", "<answer>7</answer>"])
    [1.0, 0.0]
    >>> xml_format(["<answer>7</answer>"], sections=["answer"])
    [1.0]
    """
    tags = [re.escape(section) for section in _named(sections)]
    # Inside a section no tag of the list may open or close, so each appears once.
    inside = rf"((?:(?!</?(?:{'|'.join(tags)})>).)*)"
    whole = re.compile(r"\s*".join(f"<{tag}>{inside}</{tag}>" for tag in tags), re.DOTALL)
    found = [whole.fullmatch(seen(text_of(completion)).strip()) for completion in completions]
    return [float(match is not None and all(map(_says_something, match.groups()))) for match in found]


def xml_format_partial(
    completions: Sequence[Any],
    *,
    sections: Sequence[str] = ("reasoning", "answer"),
    penalty_per_character: float = 0.001,
) -> list[float]:
    """How far a completion is the given XML sections in their order: an equal share for each tag, once and in place.

    For a model that does not reach `xml_format` by itself. What stands after the last tag costs
    `penalty_per_character` for each character; the sum is never below 0.

    >>> done, started, goes_on = "<answer>7</answer>", "<answer>7", "<answer>7</answer> and so on."
    >>> xml_format_partial([done, started, goes_on, "7"], sections=["answer"], penalty_per_character=0.01)
    [1.0, 0.5, 0.9, 0.0]
    """
    if not penalty_per_character >= 0:
        raise ConfigError(
            f"`penalty_per_character` must be 0 or more; it is {penalty_per_character}.",
            penalty_per_character=penalty_per_character,
        )
    tags = [tag for section in _named(sections) for tag in (f"<{section}>", f"</{section}>")]
    return [_tags_in_place(text_of(completion).strip(), tags, penalty_per_character) for completion in completions]


def _tags_in_place(text: str, tags: Sequence[str], penalty_per_character: float) -> float:
    """A tag counts where it is there once, and behind all that are counted before it."""
    end = 0
    num_right = 0
    for tag in tags:
        start = text.find(tag)
        if start >= end and text.count(tag) == 1:
            end = start + len(tag)
            num_right += 1
    after = len(text[end:].strip()) if text.count(tags[-1]) else 0
    return round(max(0.0, num_right / len(tags) - penalty_per_character * after), 6)


def _named(sections: Sequence[str]) -> list[str]:
    if isinstance(sections, str) or not sections:
        raise ConfigError(f"`sections` must be a list of names; it is {sections!r}.", sections=sections)
    return list(sections)


def think_format(completions: Sequence[Any]) -> list[float]:
    """1 where a completion is one `<think>...</think>` block and then an answer, neither of them empty.

    Stricter than TRL's `think_format_reward`, which also takes an empty block, and one with no answer after it.

    >>> think_format(["<think>3+4</think> 7", "<think>3+4</think>", "<think></think> 7", "7"])
    [1.0, 0.0, 0.0, 0.0]
    """
    return [float(_is_thought_and_answer(seen(text_of(completion)).strip())) for completion in completions]


def _is_thought_and_answer(text: str) -> bool:
    before, *parts = _THINK_TAG.split(text)
    return not before and parts[::2] == ["", "/"] and all(map(_says_something, parts[1::2]))


def regex_format(completions: Sequence[Any], *, pattern: str) -> list[float]:
    r"""1 where the whole completion, white space around it aside, matches `pattern`; `.` matches line ends too.

    A pattern such as `(a+)+b` may take for ever on some texts; what ends it is the time limit of the reward.

    >>> regex_format(["#### 7", "7"], pattern=r"#### \d+")
    [1.0, 0.0]
    """
    whole = compiled_pattern(pattern, re.DOTALL)
    return [float(bool(whole.fullmatch(text_of(completion).strip()))) for completion in completions]


def think_format_reward(completions: Sequence[Any]) -> list[float]:
    """TRL's `think_format_reward`: 1 where a completion starts with `<think>...</think>`, plain text taken too.

    >>> think_format_reward(["<think>3+4</think> 7", "7"])
    [1.0, 0.0]
    """
    return [float(bool(_TRL_THINK.match(text_of(completion)))) for completion in completions]


_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*(?:json\b)?", re.IGNORECASE)


def json_format(completions: Sequence[Any], *, fenced: bool = True) -> list[float]:
    """1 where the whole completion is JSON, 0 otherwise.

    `fenced` also takes one Markdown block of it, with nothing around. `NaN` and `Infinity` are no JSON, and neither is
    an object with one name twice.

    >>> json_format(['{"answer": 7}', '```json\\n[1, 2]\\n```', 'It is {"answer": 7}', "NaN"])
    [1.0, 1.0, 0.0, 0.0]
    """
    return [float(_parsed(text_of(completion), fenced=fenced) is not _NO_JSON) for completion in completions]


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
    values = [_parsed(text_of(completion), fenced=fenced) for completion in completions]
    try:
        fits = [value is not _NO_JSON and _fits(validator, value) for value in values]
    except Unresolvable as error:
        reference = getattr(error, "ref", error)
        raise ConfigError(
            f"the schema refers to `{reference}`, which is not part of it, and nothing is fetched: put "
            "that schema into `$defs` and refer to it as `#/$defs/NAME`.",
            value=reference,
        ) from error
    scores = []
    for value, fit in zip(values, fits, strict=True):
        if value is _NO_JSON:
            scores.append(0.0)
        else:
            scores.append(1.0 if fit else parses)
    return scores


def json_match(completions: Sequence[Any], answer: Sequence[Any], *, fenced: bool = True) -> list[float | None]:
    """The share of the fields that are right, where the completion is a JSON object; 0 where it is none.

    The `answer` column holds the right object, as JSON text or as a mapping. A field that it does not have counts as a
    wrong one; one that is null as none at all, as objects of a typed column have the fields of all rows. Texts are
    compared with their white space, numbers by value; `true` is not 1. None where the column has no object; `fenced` as
    in `json_format`.

    >>> json_match(['{"name": "Ana", "age": 41}', '{"name": "Ana"}', "Ana"], answer=[{"name": "Ana", "age": 41}] * 3)
    [1.0, 0.5, 0.0]
    """
    pairs = zip(completions, answer, strict=True)
    return [
        _share_right(_parsed(text_of(completion), fenced=fenced, number=Decimal), gold) for completion, gold in pairs
    ]


def _share_right(found: Any, gold: Any) -> float | None:
    gold = _parsed(gold, fenced=False, number=Decimal) if isinstance(gold, str) else gold
    if not isinstance(gold, Mapping) or not gold:
        return None
    if not isinstance(found, Mapping):
        return 0.0
    gold = _filled(gold)
    found = _filled(found)
    names = gold.keys() | found.keys()
    right = sum(name in found and _equal(found[name], value) for name, value in gold.items())
    return right / len(names) if names else 1.0


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _equal(found: Any, gold: Any) -> bool:
    if isinstance(found, Mapping) and isinstance(gold, Mapping):
        found = _filled(found)
        gold = _filled(gold)
        return found.keys() == gold.keys() and all(_equal(found[name], gold[name]) for name in gold)
    if isinstance(found, (list, tuple)) and isinstance(gold, (list, tuple)):
        return len(found) == len(gold) and all(map(_equal, found, gold))
    gold = Decimal(repr(gold)) if isinstance(gold, float) else gold
    return isinstance(found, bool) == isinstance(gold, bool) and bool(found == gold)


def _validator(schema: Mapping[str, Any]) -> Any:
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY  # the drafts themselves, from the disk; retrieves nothing

    if not isinstance(schema, Mapping):
        raise ConfigError(
            f"`schema` must be a mapping, as in {{'type': 'object'}}; it is {schema!r:.80}.", schema=schema
        )
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path)) or "its top"
        raise ConfigError(
            f"`schema` is no JSON Schema: {error.message} (at {place}).", message=error.message, place=place
        ) from error
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


def tool_use(completions: Sequence[Any], *, most: int = 1) -> list[float]:
    """The share of `most` calls of tools that the completion made without an error; calls beyond them change nothing.

    Keep it beside a reward for the right answer, of a larger weight: it pays for the form of a call, so that there is
    something to learn from before the first answer is right.

    >>> called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
    >>> right, wrong = ({"role": "tool", "name": "f", "content": text} for text in ("7", "{'error': 'no such key'}"))
    >>> tool_use([[called, right], [called, wrong], [{"role": "assistant", "content": "7"}]])
    [1.0, 0.0, 0.0]
    """
    return [min(_succeeded(completion), most) / most for completion in completions]


def _succeeded(completion: Any) -> int:
    """Calls whose result is no error; none in plain text."""
    replies = [message for message in completion if not isinstance(message, str) and message.get("role") == "tool"]
    return sum(_ERROR.match(str(reply.get("content")).strip()) is None for reply in replies)


_ERROR = re.compile(
    r"""\{\s*(["'])error\1\s*:\s*+(?!None\b|null\b|[Ff]alse\b|""|'')|(?:\w*error|\w*exception|traceback[^:\n]{0,40}):""",
    re.I,
)
"""The beginning of a result that is an error: as an object (JSON or Python's), or as a line."""
