"""Settings changed in the text of a recipe, which keeps its comments, order and everything else.

    apply_changes("temperature: 1.45  # hot\\nlora: {r: 8}\\n", {"temperature": 1.0, "lora.r": 16})

Changes are merged as RFC 7386 merges JSON: a mapping key by key into the mapping that is there, any other value in
place of the old one, and None takes a key out. `model_init_kwargs.dtype` is short for a mapping in a mapping.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import yaml

from podium.errors import ConfigError
from podium.errors.texts import as_yaml
from podium.recipe.assume import SPELLINGS
from podium.recipe.document import Loader, parse
from podium.recipe.schema import check_key, key_types, unknown_key
from podium.trainer.rules import ARGUMENTS, actions

STAGES = "stages"


@dataclass(frozen=True, slots=True)
class Change:
    """One setting before and after; None: not there."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


def shown(value: Any) -> str:
    """A value for a line of differences.

    >>> shown(None), shown(1e-06), shown([{"q": "1+1"}])
    ('not set', '1e-06', '[{q: "1+1"}]')
    """
    return "not set" if value is None else as_yaml(value)


def apply_changes(recipe: str | Mapping[str, Any], changes: Mapping[str, Any], *, name: str = "recipe") -> str:
    r"""The text of a recipe with changed settings; a recipe in stages gets them in every stage that sets them itself.

    Args:
        recipe: its text, or its keys and values.
        changes: values by key, as `podium.errors.Finding.changes`.
        name: of the recipe, for messages.

    Raises:
        ConfigError: the text is no recipe, a key is unknown (C001), or a value is none of that key.

    >>> print(apply_changes("beta: 0.04  # as in the paper\nmin_p: 0.1\n", {"beta": 0.0, "min_p": None}), end="")
    beta: 0.0  # as in the paper
    """
    text = recipe if isinstance(recipe, str) else _dumped(recipe)
    before = parse(text, name=name).values
    wanted = expanded(changes, before)
    after = _merged(before, wanted)
    check_changes(after, wanted)
    try:
        for place, value in _leaves(wanted):
            text = _edited(text, place, value, after)
        kept = parse(text, name=name).values == after
    except (yaml.YAMLError, ConfigError):  # the anchor of an alias was replaced
        kept = False
    return text if kept else _dumped(after)  # comments are lost before values are


def differences(recipe: str | Mapping[str, Any], changes: Mapping[str, Any]) -> list[Change]:
    """The settings that `changes` would change, old and new; those that are so already are left out."""
    before = parse(recipe, name="recipe").values if isinstance(recipe, str) else recipe
    wanted = expanded(changes, before)
    after = _merged(before, wanted)
    pairs = [(place, _at(before, place), _at(after, place)) for place, _ in _leaves(wanted)]
    return [Change(".".join(map(str, place)), old, new) for place, old, new in pairs if old != new]


def check_changes(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a changed key that is unknown, or whose value in `recipe` is none of that key."""
    for key in changes:
        if key == STAGES:
            continue
        if key not in key_types():
            if changes[key] is None:  # a misspelt key is taken out
                continue
            raise unknown_key(key)
        if recipe.get(key) is not None:
            _, error = check_key(key, recipe[key])
            if error is not None:
                raise error
            if key == "on_finding":
                actions(recipe[key])


def expanded(changes: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Changes as a mapping of mappings, in the spelling of the recipe, for its stages too.

    A value in `generation_kwargs` that would count instead of a changed argument is taken out.
    """
    wanted: dict[str, Any] = {}
    for key, value in changes.items():
        first, *rest = key.split(".")
        for part in reversed(rest):
            value = {part: value}
        spelled = next((old for old, new in SPELLINGS.items() if new == first and old in recipe), first)
        wanted = _joined(wanted, {spelled: value})
    if isinstance(wanted.get("examples"), int) and recipe.get("examples"):
        del wanted["examples"]  # the recipe has examples, of its author's choice
    given = recipe.get("generation_kwargs")
    hidden = [name for name, to in ARGUMENTS.items() if to in wanted and isinstance(given, Mapping) and name in given]
    if hidden:
        wanted = _joined({"generation_kwargs": dict.fromkeys(hidden)}, wanted)
    stages = recipe.get(STAGES)
    if isinstance(stages, list):
        own = {
            number: {key: value for key, value in wanted.items() if key in stage}
            for number, stage in enumerate(stages)
            if isinstance(stage, Mapping)
        }
        if own := {number: changed for number, changed in own.items() if changed}:
            wanted[STAGES] = own
    return wanted


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two mappings of changes as one; None stays, as it takes a key out."""
    made = dict(first)
    for key, value in second.items():
        both = isinstance(value, Mapping) and isinstance(made.get(key), Mapping)
        made[key] = _joined(made[key], value) if both else value
    return made


def _merged(value: Any, changes: Mapping[Any, Any]) -> Any:
    """A copy of `value` with the changes in it; a list by its indices."""
    made = deepcopy(value) if isinstance(value, (dict, list)) else {}
    for key, new in changes.items():
        old = made[key] if isinstance(made, list) else made.get(key)
        if isinstance(new, Mapping):
            new = _merged(old, new) or None
        if new is None and isinstance(made, dict):
            made.pop(key, None)
        else:
            made[key] = new
    return made


def _leaves(changes: Mapping[Any, Any], place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in changes.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*place, key))
        else:
            yield (*place, key), value


def _at(value: Any, place: Sequence[Any]) -> Any:
    for key in place:
        if isinstance(value, list):
            value = value[key] if key < len(value) else None
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _dumped(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)


# ---- edits of the text ----


def _edited(text: str, place: tuple[Any, ...], value: Any, after: Mapping[str, Any]) -> str:
    """The text with one value set, or taken out; as it was where that is not possible in place.

    `after`: the values to arrive at, for mappings that are written in one line.
    """
    if (root := yaml.compose(text, Loader=Loader)) is None:
        return text if value is None else f"{text.rstrip()}\n{_lines(place, value, 0)}".lstrip("\n")
    node: yaml.Node = root
    for depth, part in enumerate(place):
        if (found := _child(node, part)) is None:
            inside = isinstance(node, yaml.MappingNode) and not node.flow_style
            return _added(text, node, place[depth:], value) if inside and value is not None else text
        key, child = found
        last = depth == len(place) - 1
        if last and value is None:
            return _without(text, node, key, child)
        one_line = isinstance(child, yaml.ScalarNode) or (isinstance(child, yaml.MappingNode) and child.flow_style)
        if last or one_line:
            new = _at(after, place[: depth + 1])
            return _without(text, node, key, child) if new is None else _replaced(text, key, child, new)
        node = child
    return text


def _child(node: yaml.Node, part: Any) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
        return (node.value[part], node.value[part]) if part < len(node.value) else None
    if isinstance(node, yaml.MappingNode):
        return next((pair for pair in node.value if pair[0].value == part), None)
    return None


def _end(text: str, node: yaml.Node) -> int:
    """Index at which a value ends in the text; the mark of a block is at the start of the next token."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    return max(len(text[: node.end_mark.index].rstrip()), node.start_mark.index)


def _line_end(text: str, index: int) -> int:
    """The start of the line after `index`."""
    found = text.find("\n", index)
    return len(text) if found < 0 else found + 1


def _replaced(text: str, key: yaml.Node, old: yaml.Node, value: Any) -> str:
    start = old.start_mark.index
    end = _end(text, old)
    if key is not old:
        start = text.index(":", key.end_mark.index) + 1
        between = text[start : old.start_mark.index]
        comment = re.match(r"\s*(#[^\n]*)", between.partition("\n")[0]) if "\n" in between else None
        new = _lines((key.value,), value, key.start_mark.column).split(":", 1)[1].rstrip("\n")
        if comment and "\n" not in new:
            new += f"  {comment[1]}"
        elif comment:
            head, _, rest = new.partition("\n")
            new = f"{head}  {comment[1]}\n{rest}"
        return text[:start] + new + text[max(end, start) :]
    return text[:start] + as_yaml(value) + text[end:]


def _without(text: str, parent: yaml.Node, key: yaml.Node, old: yaml.Node) -> str:
    """The text without the lines of a key; not for flow mappings, nor for the last key of a mapping."""
    if not isinstance(parent, yaml.MappingNode) or parent.flow_style or len(parent.value) == 1:
        return text
    begin = text.rfind("\n", 0, key.start_mark.index) + 1
    if text[begin : key.start_mark.index].strip():  # behind the dash of a list
        return text
    return text[:begin] + text[_line_end(text, _end(text, old)) :]


def _added(text: str, node: yaml.Node, place: tuple[Any, ...], value: Any) -> str:
    at = _line_end(text, _end(text, node))
    head = text[:at] if text[:at].endswith("\n") else f"{text[:at]}\n"
    return head + _lines(place, value, node.start_mark.column) + text[at:]


def _lines(place: tuple[Any, ...], value: Any, column: int) -> str:
    """The lines of a new key; a list of mappings takes one line for each."""
    key, *rest = place
    for name in reversed(rest):
        value = {name: value}
    indent = " " * column
    if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        return f"{indent}{key}:\n" + "".join(f"{indent}  - {as_yaml(item)}\n" for item in value)
    return f"{indent}{key}: {as_yaml(value)}\n"
