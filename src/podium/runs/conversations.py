"""Turns of a completion as JSON in the run's folder, and as passages to show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, NamedTuple

from podium.records import Call, Completion, Turn, content_of, last_user_turn

LONGEST = 20_000
"""Characters of one content that are kept."""


def written(completion: Completion) -> str | None:
    """The turns as JSON: the fields of `Turn`, and `mean_logp`, the mean log-probability of the turn's tokens.

    None: the run has neither tools nor environments.
    """
    if not completion.turns:
        return None
    logps, made = iter(completion.logps), []
    drawn = completion.is_drawn or (True,) * len(completion.token_ids)
    for turn in completion.turns:
        own = [*islice(logps, sum(drawn[turn.start : turn.stop]))]
        made.append(_shortened({**asdict(turn), "mean_logp": sum(own) / max(len(own), 1)}))
    return json.dumps(made, default=str)


def read(text: str | None) -> tuple[Turn, ...]:
    """The turns that `written` wrote.

    >>> turn = Turn(start=0, stop=1, message={"role": "assistant", "content": "7"})
    >>> both = (turn, Turn(start=2, stop=3, message={"role": "assistant", "content": "8"}))
    >>> completion = Completion(token_ids=(7, 1, 8), logps=(-1, -1), finish="stop", text="", policy_step=0, turns=both)
    >>> read(written(completion)) == both, read(None)
    (True, ())
    """
    turns = []
    for fields in json.loads(text) if text else ():
        known = {name: value for name, value in fields.items() if name in Turn.__dataclass_fields__}
        calls = tuple(Call(**call) for call in fields.get("calls", ()))
        turns.append(Turn(**{**known, "calls": calls, "replies": tuple(fields.get("replies", ()))}))
    return tuple(turns)


def conversation(text: str | None, *, whole: bool = False) -> list[dict[str, Any]]:
    """The turns that `written` wrote, as they are recorded; none for a single answer without calls, unless `whole`.

    >>> conversation('[{"start": 0, "stop": 1, "message": {"role": "assistant", "content": "7"}}]')
    []
    """
    turns: list[dict[str, Any]] = json.loads(text) if text else []
    is_answer = len(turns) == 1 and not turns[0]["message"].get("tool_calls")
    return [] if is_answer and not whole else turns


def branches(completion: Completion) -> list[dict[str, Any]]:
    """The branches of an episode as plain values: `turns` as `written` writes them, the `prompt`, its number of
    `tokens`, and what it shares with the sequence before it that it shares most with: `of` (0: the completion itself),
    `shared` tokens, and the `shared_turns` that lie within them.

    >>> from podium.records import Prompt
    >>> def sequence(prompt, *ids, **more):
    ...     own = Prompt(id=0, row=0, token_ids=prompt, text="", content="1+1?")
    ...     turns = (Turn(start=0, stop=len(ids), message={"role": "assistant", "content": "7"}),)
    ...     fields = {"logps": (-1.0,) * len(ids), "finish": "stop", "text": "", "policy_step": 0, **more}
    ...     return Completion(token_ids=ids, prompt=own, turns=turns, **fields)
    >>> [branch] = branches(sequence((1, 2), 3, 4, branches=(sequence((1, 2, 3, 4, 5), 6),)))
    >>> branch["of"], branch["shared"], branch["shared_turns"], branch["tokens"]
    (0, 4, 1, 5)
    """
    whole = [((each.prompt.token_ids if each.prompt else ()) + each.token_ids) for each in completion.sequences]
    made = []
    for number, branch in enumerate(completion.branches, start=1):
        prompt = branch.prompt
        assert prompt is not None  # every branch has its own
        alike = [_shared(prompt.token_ids, each) for each in whole[:number]]
        shared, of = max(alike), alike.index(max(alike))
        other = completion.sequences[of]
        start = len(whole[of]) - len(other.token_ids)
        turns = sum(start + turn.stop <= shared for turn in other.turns)
        facts = {"of": of, "shared": shared, "shared_turns": turns, "tokens": len(prompt.token_ids)}
        made.append({**facts, "prompt": prompt.content, "turns": conversation(written(branch), whole=True)})
    return made


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many items two sequences begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def drawn_text(completion: Completion) -> str:
    """The text that the policy wrote, without what it was given in between."""
    return text_of(completion.turns) if completion.turns else completion.text


def whole_text(completion: Completion) -> str:
    r"""The text of a completion, and of an episode all that was said: given lines stand behind a bar.

    >>> guess = {"start": 0, "stop": 1, "message": {"content": "4"}, "replies": [{"role": "user", "content": "lower"}]}
    >>> turns = read(json.dumps([guess, {"start": 2, "stop": 3, "message": {"content": "2"}}]))
    >>> both = Completion(token_ids=(7, 1, 8), logps=(-1, -1), finish="stop", text="", policy_step=0, turns=turns)
    >>> whole_text(both)
    '4\n| lower\n2'
    """
    shown = passages(conversation(written(completion)))
    lines = [line if drawn else f"| {line}" for drawn, _, text in shown for line in text.splitlines()]
    return "\n".join(lines) if shown else completion.text


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


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= LONGEST else f"{value[:LONGEST]}... ({len(value):,} characters)"
    if isinstance(value, Mapping):
        return {str(key): _shortened(each) for key, each in value.items()}
    return [_shortened(each) for each in value] if isinstance(value, (list, tuple)) else value


# ---- passages ----


class Passage(NamedTuple):
    """Text of one side."""

    drawn: bool
    """Whether the policy wrote it; such tokens alone are trained on."""
    head: str
    """The author, with the time and the numbers that are known."""
    text: str
    """As it is: hostile, until it is cleaned."""


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


def tree_passages(turns: Sequence[Mapping[str, Any]], branches: Sequence[Mapping[str, Any]]) -> list[Passage]:
    """The passages of an episode and of its branches, as `branches` gives them, each behind where it begins."""
    made = passages(turns)
    for number, each in enumerate(branches, start=1):
        source = f"branch {each['of']}" if each["of"] else "the completion"
        within = f", {each['shared_turns']} of its turns among them" if each["shared_turns"] else ""
        head = f"branch {number}: {each['shared']} of the {each['tokens']} tokens of its prompt are those of {source}"
        made += [Passage(False, f"{head}{within}", _plain(last_user_turn(each["prompt"]))), *passages(each["turns"])]
    return made


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
