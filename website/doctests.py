"""A griffe extension: examples in docstrings become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put fences around every run of lines that begins with `>>>`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)


def fenced(match: re.Match[str]) -> str:
    """The example as a block of pycon."""
    return f"\n{match[1]}```pycon\n{match[0]}\n{match[1]}```\n"
