"""Policies without a model: nothing, noise, copies and columns of a row, and what the user's oracle plays.

policies = policies_of(rows, actions=())
policies["every candidate"](Situation(row, messages, tools, turn))
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podium.agents.plain_text import call_user
from podium.agents.tools import Tool
from podium.errors import AgentError
from podium.records import content_of
from podium.tester.episodes import Action, Policy, Situation

WORDS = ("amber", "1", "north", "yes", "7", "left", "42", "open the box", "3.5", "ümläut ✓", "0", "look")
"""Turns of the noise."""

MOST_COLUMNS = 6
"""Columns of a row that are tried as answers."""

COLUMN = "column "
"""Prefix of the policies that say the value of a column."""

ORACLE = "oracle"
LEGAL = "legal actions"
"""Names of policies that know the task, or its actions."""


def silence(now: Situation) -> Action:
    """Say nothing; with tools, call nothing."""
    return None if now.tools else ""


def noise(now: Situation) -> Action:
    """Words without sense; with tools, each in turn with arguments of the types in its schema."""
    if not now.tools:
        return WORDS[now.turn % len(WORDS)]
    tool = now.tools[now.turn % len(now.tools)]
    return tool.name, arguments_of(tool, now.turn // len(now.tools))


def repetition(now: Situation) -> Action:
    """The same word, or the same call, in every turn; rows take turns in the tool that is called."""
    if not now.tools:
        return WORDS[1]
    tool = now.tools[now.number % len(now.tools)]
    return tool.name, arguments_of(tool, 0)


POLICIES: Mapping[str, Policy] = {"silence": silence, "noise": noise, "repetition": repetition}


def scripted(oracle: Callable[..., Any], limit: float) -> Policy:
    """A policy from a function `oracle(row, messages)`, which gives the next turn: a text, `(tool, arguments)` or None.

    Raises, when played, `AgentError` for what the function raises, and for anything else that it returns.
    """

    def play(now: Situation) -> Action:
        run = functools.partial(oracle, dict(now.row), list(now.messages))
        action = call_user(run, who="the oracle", where=f"turn {now.turn + 1}", limit=limit)
        is_call = isinstance(action, (tuple, list)) and len(action) == 2 and isinstance(action[1], Mapping)
        if action is None or isinstance(action, str):
            return action
        if not is_call or not now.tools:  # a text environment would take the call for an empty turn
            raise AgentError(
                f"the oracle returned {action!r}",
                fix="return a text, (tool, arguments) where there are tools, or None",
                action=action,
            )
        return str(action[0]), action[1]

    return play


_SAMPLES: Mapping[str, Sequence[Any]] = {
    "integer": (3, 12, 0, -1),
    "number": (3.5, 12.0, 0.0, -1.5),
    "string": ("amber", "3", "", "ümläut ✓"),
    "boolean": (True, False),
    "array": ([], [1, 2]),
    "object": ({},),
}


def arguments_of(tool: Tool, which: int) -> dict[str, Any]:
    """Arguments of the types in a tool's schema; never from a row, which may have the answer."""
    wanted = tool.schema["function"].get("parameters", {}).get("properties") or {}
    given = {}
    for name, schema in wanted.items():
        schema = schema if isinstance(schema, Mapping) else {}  # `true`: anything
        kind = schema.get("type") or "string"
        samples = schema.get("enum") or _SAMPLES.get(kind if isinstance(kind, str) else kind[0], (None,))
        given[name] = samples[which % len(samples)]
    return given


def policies_of(rows: Sequence[Mapping[str, Any]], actions: Sequence[str]) -> dict[str, Policy]:
    """All policies by name; those of columns come last.

    Args:
        rows: of the test, for candidates and columns.
        actions: legal turns; empty: not known.
    """
    short = {k: None for row in rows for k, v in row.items() if k != "prompt" and isinstance(v, (str, int, float))}
    names = [*short][:MOST_COLUMNS]
    texts: dict[str, Callable[[Situation], str]] = {
        "polite words": lambda now: "please",
        "punctuation": lambda now: "!",
        "long noise": lambda now: " ".join(WORDS * 20),
        "words of the prompt": _word_of_prompt,
        "the prompt": lambda now: content_of(now.messages[0]) if now.messages else "",
        "the observation": lambda now: content_of(now.messages[-1]) if now.messages else "",
    }
    if names:
        texts["every candidate"] = lambda now: _every_candidate(now, rows, names)
    if actions:
        texts["legal actions"] = lambda now: actions[(now.turn + now.number) % len(actions)]
    texts |= {f"{COLUMN}{name}": lambda now, name=name: str(now.row.get(name)) for name in names}  # type: ignore[misc]
    return {**POLICIES, **{name: _saying(text) for name, text in texts.items()}}


def again(policy: Policy) -> Policy:
    """A policy that says its last turn once more where it would leave."""

    def play(now: Situation) -> Action:
        action = policy(now)
        mine = [message for message in now.messages if message["role"] == "assistant"]
        if action is not None or not mine:
            return action
        calls = mine[-1].get("tool_calls")
        return (calls[0]["function"]["name"], calls[0]["function"]["arguments"]) if calls else content_of(mine[-1])

    return play


def _saying(text_of: Callable[[Situation], str]) -> Policy:
    """Says the text; with tools, calls each of them once with the text in every argument that takes it."""

    def play(now: Situation) -> Action:
        text = text_of(now)
        if not now.tools:
            return text
        return _called_with(now.tools[now.turn], text) if now.turn < len(now.tools) else None

    return play


def _called_with(tool: Tool, text: str) -> Action:
    given = arguments_of(tool, 0)
    kinds = {"string": str, "integer": int, "number": float}
    for name, schema in tool.schema["function"].get("parameters", {}).get("properties", {}).items():
        try:
            given[name] = given[name] if "enum" in schema else kinds[str(schema.get("type"))](text)
        except (KeyError, ValueError):  # another type keeps its sample
            continue
    return tool.name, given


def _word_of_prompt(now: Situation) -> str:
    words = re.findall(r"\w+", content_of(now.messages[0])) if now.messages else []
    return words[now.turn % len(words)] if words else ""


def _every_candidate(now: Situation, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """All values of the columns, the row's own in the middle, since the first or the last one may be what counts."""
    listed = []
    for name in names:
        others = [*dict.fromkeys(str(row.get(name)) for row in rows if row.get(name) != now.row.get(name))]
        half = len(others) // 2
        listed += ["0", *others[:half], str(now.row.get(name)), *others[half:], "0"]
    return (", " if now.turn % 2 else " ").join(listed)
