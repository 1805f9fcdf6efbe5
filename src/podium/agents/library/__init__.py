"""The built-in tools. `make` of each module takes the settings behind the question mark and returns the function."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "builtin:"

LIBRARY: Mapping[str, str] = {
    "calculator": "builtin:calculator",
    "python": "builtin:python?seconds=5&megabytes=512",
    "lookup": "builtin:lookup?path=prices.json",
    "search": "builtin:search?path=documents&results=3",
}
"""Name -> an example of its settings; `name=...` besides, where two tools would have the same name."""
