"""`builtin:lookup?path=prices.json`: the value of a key in a file.

JSON: an object of keys and values. CSV: a header; the first column has the keys, the others the value.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.errors.texts import quoted
from podium.isolation.user_files import find_file


def make(*, path: str, folder: Path) -> Callable[[str], str]:
    """The tool over this file. Raises `ConfigError` for a file that is not there or has no keys."""
    values = _values(find_file(str(path), folder))

    def lookup(key: str) -> str:
        """Look up the value of a key.

        Args:
            key: The key.

        Returns:
            The value.
        """
        if (found := values.get(str(key))) is None:
            near = get_close_matches(str(key)[:100], values, n=3)
            similar = f"; similar: {', '.join(near)}" if near else ""
            raise ValueError(f"there is no key {key}{similar}")
        return found

    return lookup


def _values(path: Path) -> Mapping[str, str]:
    """Text by key. An entry that is not text becomes JSON."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = _of_csv(text) if path.suffix.casefold() == ".csv" else json.loads(text)
    except (ValueError, OSError, csv.Error) as error:
        raise ConfigError(
            f"{path} cannot be read as a table of keys: {quoted(error)}", path=path, error=error
        ) from error
    if not isinstance(rows, dict) or not rows:
        raise ConfigError(
            f"{path} has no keys and values.",
            fix='write {"key": "value"} (JSON), or a header and rows whose first column has the keys (CSV)',
            path=path,
        )
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in rows.items()
    }


def _of_csv(text: str) -> dict[str, Any]:
    header, *rows = csv.reader(text.splitlines()) or [[]]
    if len(header) == 2:
        return {row[0]: row[1] for row in rows if len(row) > 1}
    return {row[0]: dict(zip(header[1:], row[1:], strict=False)) for row in rows if row}
