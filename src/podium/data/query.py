"""Names with arguments behind them: `reasoning-gym:chain_sum?size=10`, `rows.py:make?levels=[1,2]`."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl

from podium.errors import DataError

_WORDS: dict[str, Any] = {"true": True, "false": False}


def parse_query(text: str) -> tuple[str, dict[str, Any]]:
    """The name before the question mark, and the arguments behind it: JSON, else text. Raises `DataError` (D057).

    >>> parse_query("rows.py:make?size=10&levels=[1,2]&name=a%20b&strict=True")
    ('rows.py:make', {'size': 10, 'levels': [1, 2], 'name': 'a b', 'strict': True})
    """
    name, mark, query = text.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(mark))
    except ValueError:
        raise DataError(
            f"`{text}`: behind the question mark stand arguments.",
            code="D057",
            fix=f"{name}?size=100&seed=1",
            text=text,
            name=name,
        ) from None
    return name, {key: _WORDS.get(value.casefold(), as_json(value)) for key, value in pairs}


def as_json(text: str) -> Any:
    """The value that a text is in JSON, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
