"""Rewards for the calls of a completion, whatever they are for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def tool_use(completions: Sequence[Any], *, most: int = 1) -> list[float]:
    """The share of `most` calls of tools that the completion made without an error; calls beyond them change nothing.

    Keep it beside a reward for the right answer, of a larger weight: it pays for the form of a call, so that there is
    something to learn from before the first answer is right.

    >>> called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
    >>> right, wrong = ({"role": "tool", "name": "f", "content": text} for text in ("7", "{'error': 'no such key'}"))
    >>> tool_use([[called, right], [called, wrong], [{"role": "assistant", "content": "7"}]])
    [1.0, 0.0, 0.0]
    """
    return [min(_succeeded(each), most) / most for each in completions]


def _succeeded(completion: Any) -> int:
    """Calls whose result is no error; none in plain text."""
    replies = [each for each in completion if not isinstance(each, str) and each.get("role") == "tool"]
    return sum(_ERROR.match(str(each.get("content")).strip()) is None for each in replies)


_ERROR = re.compile(
    r"""\{\s*(["'])error\1\s*:\s*+(?!None\b|null\b|[Ff]alse\b|""|'')|(?:\w*error|\w*exception|traceback[^:\n]{0,40}):""",
    re.I,
)
"""The beginning of a result that is an error: as an object (JSON or Python's), or as a line."""
