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
