"""Turns of a completion as passages to show: what the policy drew and what it was given, in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from podium.records import Completion
from podium.runs.recording import turns_json


class Passage(NamedTuple):
    """Text of one side."""

    drawn: bool
    """Whether the policy wrote it; such tokens alone are trained on."""
    head: str
    """The author, with the time and the numbers that are known."""
    text: str
    """As it is: hostile, until it is cleaned."""


def turns_of(completion: Completion) -> list[dict[str, Any]]:
    """The turns of a completion as `rollouts/*.parquet` has them; none for a single answer without calls."""
    return json.loads(turns_json(completion) or "[]")


def passages(turns: Sequence[Mapping[str, Any]]) -> list[Passage]:
    """All passages of an episode, from its turns as they are recorded.

    >>> call = {"name": "add", "content": "3", "failed": False, "seconds": 0.02, "cut": 0}
    >>> asked = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    >>> turn = {"start": 0, "stop": 9, "message": {"tool_calls": [asked]}, "calls": [call], "seconds": 0.5}
    >>> reply = {"role": "tool", "name": "add", "content": "3"}
    >>> for drawn, head, text in passages([{**turn, "replies": [reply], "mean_logp": -0.25}]):
    ...     print(drawn, "|", head, "|", text)
    True | model: 9 tokens, 0.5 s, log-probability -0.25 | add(a=1, b=2)
    False | tool add: 0.02 s | 3
    """
    return [passage for turn in turns for passage in (_drawn(turn), *_given(turn))]


def _drawn(turn: Mapping[str, Any]) -> Passage:
    numbers = [f"{turn['stop'] - turn['start']} tokens", f"{turn.get('seconds') or 0:.2g} s"]
    if turn.get("mean_logp") is not None:
        numbers.append(f"log-probability {turn['mean_logp']:.2f}")
    return Passage(True, f"model: {', '.join(numbers)}", message_text(turn.get("message") or {}))


def _given(turn: Mapping[str, Any]) -> Iterator[Passage]:
    replies, calls = turn.get("replies") or (), turn.get("calls") or ()
    reward = turn.get("reward")
    for number, reply in enumerate(replies or calls):  # calls alone: their results did not fit
        call = calls[number] if number < len(calls) else None
        if call is None:
            numbers = [f"{turn.get('reply_seconds') or 0:.2g} s"]
            numbers += [] if reward is None else [f"reward {reward:g}"]
            yield Passage(False, f"environment: {', '.join(numbers)}", _plain(reply.get("content")))
            continue
        notes = [f"{call.get('seconds') or 0:.2g} s", *["failed"] * bool(call.get("failed"))]
        notes += [f"{call['cut']} tokens cut off"] if call.get("cut") else []
        notes += [] if replies else ["left out: no room"]
        yield Passage(False, f"tool {call.get('name')}: {', '.join(notes)}", _plain(reply.get("content")))
    if not replies and not calls and reward is not None:
        yield Passage(False, f"environment: reward {reward:g}", "")


def message_text(message: Mapping[str, Any]) -> str:
    """Reasoning, content and calls of an assistant message, a line each."""
    calls = [_call_text(each.get("function") or each) for each in message.get("tool_calls") or ()]
    reasoning = message.get("reasoning_content") or message.get("thinking")
    return "\n".join(part for part in (_plain(reasoning), _plain(message.get("content")), *calls) if part)


def _call_text(call: Mapping[str, Any]) -> str:
    arguments = call.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    return f"{call.get('name')}({_plain(arguments)})"


def _plain(content: Any) -> str:
    """Content as text; blocks and values as JSON."""
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
