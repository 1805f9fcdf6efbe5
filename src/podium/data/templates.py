"""Templates: text with columns of a row in braces, `"{question} Answer with one number."`.

A name in braces is the name of a column, or of a field of the objects in one (`{context.text}`), and nothing else: it
is looked up, never evaluated, so there are no attributes, indices or formats. `{{` and `}}` stand for braces. The
column `choices` becomes a line for each of them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from podium.errors import DataError

_PIECE = re.compile(r"(\{\{|\}\})|\{([^{}]+)\}|([{}])")


@dataclass(frozen=True, slots=True)
class Template:
    """A template that was read: texts and, at the odd places, names of columns."""

    pieces: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it names, each once."""
        return tuple(dict.fromkeys(self.pieces[1::2]))

    def __call__(self, row: Mapping[str, Any]) -> Any:
        """The text for a row. None where one of the columns is null; of a column alone lists and mappings as they are.

        >>> parse("{a}+{b}=")({"a": 1, "b": "2"}), parse("{a}+{b}=")({"a": 1, "b": None})
        ('1+2=', None)
        >>> parse("{q}\\n{choices}")({"q": "Which is it?", "choices": ["Paris", "Rome"]})
        'Which is it?\\nA. Paris\\nB. Rome'
        >>> parse("{turns}")({"turns": [{"role": "user", "content": "1+1"}]})
        [{'role': 'user', 'content': '1+1'}]
        """
        if len(self.pieces) == 3 and self.pieces[0] == self.pieces[2] == "":
            value = field_of(row, self.pieces[1])
            return value if value is None or isinstance(value, (list, tuple, Mapping)) else str(value)
        values = {column: field_of(row, column) for column in self.columns}
        if any(value is None for value in values.values()):
            return None
        return "".join(_written(piece, values[piece]) if i % 2 else piece for i, piece in enumerate(self.pieces))


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a field of the objects in one; None where there is none.

    >>> field_of({"a": {"b": 1}}, "a.b"), field_of({"a.b": 2, "a": {"b": 1}}, "a.b"), field_of({"a": 1}, "a.b")
    (1, 2, None)
    """
    if name in row or "." not in name:
        return row.get(name)
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def has_field(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has a column, or a field of the object in one, be it null; keys alone count, never attributes.

    >>> has_field({"a": {"b": None}}, "a.b"), has_field({"a": 7}, "a.real")
    (True, False)
    """
    if name in row:
        return True
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def column_of(name: str, names: Collection[str]) -> str | None:
    """The column that a name in braces reads, itself or a field of its objects; None where there is none.

    >>> column_of("a.b", ["a"]), column_of("a.b", ["a.b", "a"]), column_of("b", ["a"])
    ('a', 'a.b', None)
    """
    return next((candidate for candidate in (name, name.partition(".")[0]) if candidate in names), None)


def as_text(value: Any) -> str:
    """A value inside a text: an object, and a list of objects, as JSON.

    >>> as_text({"a": [True]}), as_text([1, "b"]), as_text(2.5)
    ('{"a": [true]}', "[1, 'b']", '2.5')
    """
    items = value if isinstance(value, (list, tuple)) else (value,)
    if any(isinstance(item, Mapping) for item in items):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


CHOICES = "choices"
"""The column with the choices of a question: a list of texts, a mapping from labels to texts, or one with `text` and
`label`, as ARC has it."""


def labelled(choices: Any) -> tuple[tuple[str, str], ...]:
    """The labels and texts of a row's choices.

    >>> labelled(["Paris", "Rome"]), labelled({"text": ["Rome"], "label": ["a"]})
    ((('A', 'Paris'), ('B', 'Rome')), (('A', 'Rome'),))
    >>> labelled({"a": "Paris", "b": "Rome", "c": None})
    (('A', 'Paris'), ('B', 'Rome'))
    """
    if isinstance(choices, Mapping):
        as_arc = {"text", "label"} <= choices.keys()
        pairs = zip(choices["label"], choices["text"], strict=True) if as_arc else choices.items()
        # Rows of a typed column have the labels of all of them.
        return tuple((str(label).upper(), str(text)) for label, text in pairs if text is not None)
    return tuple((chr(ord("A") + index), str(text)) for index, text in enumerate(choices))


def _written(column: str, value: Any) -> str:
    if column != CHOICES or isinstance(value, str):
        return as_text(value)
    return "\n".join(f"{label}. {text}" for label, text in labelled(value))


@functools.cache
def parse(text: str) -> Template:
    """The template that a text is. Raises `DataError` for a brace without its other half.

    >>> parse("{question} as {{json}}").pieces
    ('', 'question', ' as {json}')
    """
    pieces = [""]
    end = 0
    for found in _PIECE.finditer(text):
        pieces[-1] += text[end : found.start()]
        end = found.end()
        doubled, column, alone = found.groups()
        if alone:
            cut = text if len(text) <= 60 else text[:57] + "..."
            what = f"`{alone}` at character {found.start() + 1} of `{cut}` has no other half."
            raise DataError(what, code="D053", fix="Write a column as {column}, and {{ and }} for braces.")
        if doubled:
            pieces[-1] += doubled[0]
        else:
            pieces += [column, ""]
    pieces[-1] += text[end:]
    return Template(tuple(pieces))
