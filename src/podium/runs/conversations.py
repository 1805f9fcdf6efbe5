"""Turns of a completion as text in the run's folder: written by `recording`, read by monitors and the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from podium.records import Call, Completion, Turn

LONGEST = 20_000
"""Characters of one content that are kept."""


def written(completion: Completion) -> str | None:
    """The turns as JSON: the fields of `Turn`, and `logp`, the mean log-probability of the turn's tokens.

    Results of tools stand in `calls`, and not a second time in `replies`. None: a single uninterrupted answer.
    """
    if not completion.turns:
        return None
    logps, made = iter(completion.logps), []
    for turn in completion.turns:
        own = [next(logps) for _ in range(turn.start, turn.stop)]
        fields = {**asdict(turn), "logp": sum(own) / max(len(own), 1)}
        fields["replies"] = [reply for reply in turn.replies if reply.get("role") != "tool"]
        made.append(_shortened(fields))
    return json.dumps(made, default=str)


def read(text: str | None) -> tuple[Turn, ...]:
    """The turns that `written` wrote.

    >>> turn = Turn(start=0, stop=1, message={"role": "assistant", "content": "7"})
    >>> completion = Completion(token_ids=(7,), logps=(-0.5,), finish="stop", text="7", policy_step=0, turns=(turn,))
    >>> read(written(completion)) == (turn,), read(None)
    (True, ())
    """
    turns = []
    for fields in json.loads(text) if text else ():
        known = {name: value for name, value in fields.items() if name in Turn.__dataclass_fields__}
        calls = tuple(Call(**call) for call in fields.get("calls", ()))
        turns.append(Turn(**{**known, "calls": calls, "replies": tuple(fields.get("replies", ()))}))
    return tuple(turns)


def drawn_text(completion: Completion) -> str:
    """The text that the policy wrote, without what it was given in between."""
    return text_of(completion.turns) if completion.turns else completion.text


def text_of(turns: Sequence[Turn]) -> str:
    """The texts of turns, a line each; calls are left out, unless there is nothing else.

    >>> call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    >>> called = Turn(start=0, stop=9, message={"role": "assistant", "content": "", "tool_calls": [call]})
    >>> text_of([called]), text_of([called, Turn(start=9, stop=10, message={"role": "assistant", "content": "3"})])
    ('add {"a": 1, "b": 2}', '3')
    """
    said = "\n".join(filter(None, (content_of(turn.message) for turn in turns)))
    calls = (each.get("function", each) for turn in turns for each in turn.message.get("tool_calls") or ())
    return said or "\n".join(f"{each.get('name')} {json.dumps(each.get('arguments'), default=str)}" for each in calls)


def content_of(message: Mapping[str, Any]) -> str:
    """The text of a message: of several blocks, those with text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(str(block.get("text", "")) for block in content if isinstance(block, Mapping))


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= LONGEST else f"{value[:LONGEST]}... ({len(value):,} characters)"
    if isinstance(value, Mapping):
        return {str(key): _shortened(each) for key, each in value.items()}
    return [_shortened(each) for each in value] if isinstance(value, (list, tuple)) else value
