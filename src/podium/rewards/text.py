"""The text of a completion. Used by every reward of the library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a plain completion, or of the last message of a chat completion, which the policy must have written.

    >>> text_of("7"), text_of([{"role": "assistant", "content": "7"}]), text_of([{"role": "tool", "content": "7"}])
    ('7', '7', '')
    """
    if isinstance(completion, str):
        return completion
    last = completion[-1]
    return str(last.get("content") or "") if last.get("role", "assistant") == "assistant" else ""


_INVISIBLE = dict.fromkeys(
    map(ord, "\u00ad\u061c\u115f\u1160\u180e\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2800\u3164\ufeff")
)


def visible(text: str) -> str:
    """The text without characters that take no room, so that nothing is not taken for something.

    >>> visible("<answer>\u200b</answer>")
    '<answer></answer>'
    """
    return text.translate(_INVISIBLE)


def group_of_each(prompts: Sequence[Any]) -> list[int]:
    """The number of the group that each completion of a round is in: those with equal prompts are one group.

    >>> group_of_each(["3+4", "3+4", "8-1", "8-1"])
    [0, 0, 1, 1]
    """
    keys = [
        prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str) for prompt in prompts
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]
