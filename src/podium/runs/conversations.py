"""Turns of a completion as JSON in the run's folder, and as passages to show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, NamedTuple

from podium.records import Call, Completion, Message, Turn, as_name, canonical, content_of

LONGEST = 20_000
"""Characters of one content that are kept."""

DEEPEST = 6
"""Depth from which on branches are no longer moved to the right."""


def written(completion: Completion) -> str | None:
    """The turns as JSON: the fields of `Turn`, and `mean_logp`, the mean log-probability of the turn's tokens.

    None: the run has neither tools nor environments.
    """
    if not completion.turns:
        return None
    logps = iter(completion.logps)
    made = []
    drawn = completion.action_mask
    for turn in completion.turns:
        own = [*islice(logps, sum(drawn[turn.start : turn.stop]))]
        made.append(_shortened({**asdict(turn), "mean_logp": sum(own) / max(len(own), 1)}))
    return json.dumps(made, default=as_name)


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
    """The sequences of an episode that has several, in the order in which they began, as plain values; else none.

    Of each: `turns` as `written` writes them; whether reward functions see it (`scored`); the number `of` the earlier
    sequence that it shares most with, from 1 (0: a conversation of its own); how many `messages`, `answers` among them,
    and tokens of its prompt (`shared`) they have in common; the `tokens` of its prompt, and `prompt`, its messages
    behind those.

    >>> from podium.records import Prompt
    >>> def sequence(asked, prompt, *ids, **more):
    ...     own = Prompt(id=0, row=0, token_ids=prompt, text="", content=asked)
    ...     turns = (Turn(start=0, stop=len(ids), message={"role": "assistant", "content": "7"}),)
    ...     fields = {"logps": (-1.0,) * len(ids), "finish": "stop", "text": "", "policy_step": 0, **more}
    ...     return Completion(token_ids=ids, prompt=own, turns=turns, **fields)
    >>> asked = [{"role": "user", "content": "1+1?"}]
    >>> first = sequence(asked, (1, 2), 3, 4)
    >>> more = [*asked, {"role": "assistant", "content": "7"}, {"role": "user", "content": "Sure?"}]
    >>> for branch in branches(sequence(more, (1, 2, 3, 4, 5), 6, begun=1, branches=(first,))):
    ...     print(*(branch[name] for name in ("of", "messages", "answers", "shared", "tokens", "prompt", "scored")))
    0 0 0 0 2 [{'role': 'user', 'content': '1+1?'}] False
    1 2 1 4 5 [{'role': 'user', 'content': 'Sure?'}] True
    """
    if not completion.branches:
        return []
    tree: dict[tuple[int, str], tuple[int, int]] = {}  # by a place and the message there: the next, whose it was first
    every = completion.in_order
    made = list[dict[str, Any]]()
    for number, sequence in enumerate(every, start=1):
        prompt = _asked(sequence)
        place = 0
        of = 0
        messages = 0
        asked = [canonical(message) for message in prompt]
        while messages < len(asked) and (place, asked[messages]) in tree:
            place, of = tree[place, asked[messages]]
            messages += 1
        place = 0
        for message in (*asked, *map(canonical, sequence.messages)):
            place, _ = tree.setdefault((place, message), (len(tree) + 1, number))
        facts = {
            "of": of,
            "messages": messages,
            "shared": _shared(_prompt_ids(sequence), _ids(every[of - 1])) if of else 0,
        }
        facts["answers"] = sum(message["role"] == "assistant" for message in prompt[:messages])
        facts |= {"tokens": len(_prompt_ids(sequence)), "prompt": _shortened(prompt[messages:])}
        made.append({**facts, "turns": conversation(written(sequence), whole=True), "scored": sequence is completion})
    return made


def _prompt_ids(sequence: Completion) -> tuple[int, ...]:
    return sequence.prompt.token_ids if sequence.prompt else ()


def _ids(sequence: Completion) -> tuple[int, ...]:
    return (*_prompt_ids(sequence), *sequence.token_ids)


def _asked(sequence: Completion) -> list[Message]:
    """The messages of a sequence's prompt; a plain text is one."""
    content = sequence.prompt.content if sequence.prompt else []
    return [{"role": "text", "content": content}] if isinstance(content, str) else content


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
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
    lines = [line if drawn else f"| {line}" for drawn, _, text, *_ in shown for line in text.splitlines()]
    return "\n".join(lines) if shown else completion.text


def text_of(turns: Sequence[Turn]) -> str:
    """The texts of turns, a line each; calls are left out, unless there is nothing else.

    >>> call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    >>> called = Turn(start=0, stop=9, message={"role": "assistant", "content": "", "tool_calls": [call]})
    >>> text_of([called]), text_of([called, Turn(start=9, stop=10, message={"role": "assistant", "content": "3"})])
    ('add {"a": 1, "b": 2}', '3')
    """
    contents = "\n".join(filter(None, (content_of(turn.message) for turn in turns)))
    calls = (call.get("function", call) for turn in turns for call in turn.message.get("tool_calls") or ())
    return contents or "\n".join(
        f"{call.get('name')} {json.dumps(call.get('arguments'), default=as_name)}" for call in calls
    )


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= LONGEST else f"{value[:LONGEST]}... ({len(value):,} characters)"
    if isinstance(value, Mapping):
        return {str(key): _shortened(part) for key, part in value.items()}
    return [_shortened(part) for part in value] if isinstance(value, (list, tuple)) else value


# ---- passages ----


class Passage(NamedTuple):
    """Text of one side."""

    drawn: bool
    """Whether the policy wrote it; such tokens alone are trained on."""
    head: str
    """The author, with the time and the numbers that are known."""
    text: str
    """As it is: hostile, until it is cleaned."""
    depth: int = 0
    """Branchings above it, at most `DEEPEST`."""
    begins: bool = False
    """Whether it is the line with which a branch begins, or goes on; without text."""


def passages(turns: Sequence[Mapping[str, Any]]) -> list[Passage]:
    """All passages of an episode, from its turns as they are recorded.

    >>> call = {"name": "add", "content": "3", "failed": False, "seconds": 0.02, "cut": 0}
    >>> asked = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    >>> turn = {"start": 0, "stop": 9, "message": {"tool_calls": [asked]}, "calls": [call], "seconds": 0.5}
    >>> reply = {"role": "tool", "name": "add", "content": "3"}
    >>> for drawn, head, text, *_ in passages([{**turn, "replies": [reply], "mean_logp": -0.25}]):
    ...     print(drawn, "|", head, "|", text)
    True | model: 9 tokens, 0.5 s, log-probability -0.25 | add(a=1, b=2)
    False | tool add: 0.02 s | 3
    """
    return [passage for turn in turns for passage in (_drawn(turn), *_replies(turn))]


def tree_passages(turns: Sequence[Mapping[str, Any]], branches: Sequence[Mapping[str, Any]]) -> list[Passage]:
    """The passages of an episode, from its turns; or of all its `branches`, what they share once, before they part.

    >>> turn = {"start": 0, "stop": 9, "message": {"content": "4"}, "replies": [{"role": "user", "content": "Sure?"}]}
    >>> first = {"of": 0, "messages": 0, "shared": 0, "tokens": 5, "scored": False, "turns": [turn]}
    >>> other = {**first, "of": 1, "messages": 2, "answers": 1, "shared": 14, "tokens": 18, "scored": True}
    >>> first["prompt"], other["prompt"] = ([{"role": "user", "content": text}] for text in ("2+2?", "Why?"))
    >>> for passage in tree_passages([], [first, other]):
    ...     print(passage.depth * "  " + passage.head, "|", passage.text or "-")
    branch 1: 9 tokens drawn | -
    user | 2+2?
    model: 9 tokens, 0 s | 4
      branch 1 goes on | -
      user | Sure?
      branch 2, from branch 1 behind answer 1, user: 9 tokens drawn, 14 of 18 prompt tokens shared, scored | -
      user | Why?
      model: 9 tokens, 0 s | 4
      user | Sure?
    """
    if not branches:
        return passages(turns)
    own = [[*map(_message, branch["prompt"]), *_answers(branch["turns"])] for branch in branches]
    places = [branch["messages"] for branch in branches]
    ends = [place + len(shown) for place, shown in zip(places, own, strict=True)]
    followers: dict[int, list[int]] = {}
    for number, branch in enumerate(branches):
        followers.setdefault(branch["of"] - 1, []).append(number)
    made = list[Passage]()
    waiting = [(number, 0, 0) for number in reversed(followers.get(-1, []))]
    while waiting:
        number, start, depth = waiting.pop()
        begins = start == places[number]
        head = _beginning(number + 1, branches[number]) if begins else f"branch {number + 1} goes on"
        made.append(Passage(False, head, "", depth, begins=True))
        later = [other for other in followers.get(number, ()) if places[other] > start]
        stop = min((places[other] for other in later), default=ends[number])
        shown = own[number][start - places[number] : stop - places[number]]
        made += [passage._replace(depth=depth) for passage in shown]
        parting = [(other, stop) for other in later if places[other] == stop]
        if later and stop < ends[number]:
            parting.insert(0, (number, stop))
        inner = min(depth + (len(parting) > 1), DEEPEST)
        waiting += [(other, place, inner) for other, place in reversed(parting)]
    return made


def _beginning(number: int, branch: Mapping[str, Any]) -> str:
    """The line with which a branch begins: where it parts from which, and how much of it was drawn."""
    facts = [f"{sum(turn['stop'] - turn['start'] for turn in branch['turns'])} tokens drawn"]
    where = ", a conversation of its own" if number > 1 else ""
    if branch["of"]:
        place = f"behind answer {branch['answers']}" if branch["answers"] else "before any answer"
        author = branch["prompt"][0]["role"] if branch["prompt"] else "another answer"
        where = f", from branch {branch['of']} {place}, {author}"
        facts.append(f"{branch['shared']} of {branch['tokens']} prompt tokens shared")
    if branch["scored"]:
        facts.append("scored")
    return f"branch {number}{where}: {', '.join(facts)}"


def _answers(turns: Sequence[Mapping[str, Any]]) -> Iterator[Passage]:
    for turn in turns:
        yield _drawn(turn)
        yield from map(_message, turn.get("replies") or ())


def _message(message: Mapping[str, Any]) -> Passage:
    """A message that the policy was given."""
    role = message.get("role")
    name = message.get("name")
    return Passage(False, f"{role} {name}" if name else str(role), message_text(message))


def _drawn(turn: Mapping[str, Any]) -> Passage:
    numbers = [f"{turn['stop'] - turn['start']} tokens", f"{turn.get('seconds') or 0:.2g} s"]
    if turn.get("mean_logp") is not None:
        numbers.append(f"log-probability {turn['mean_logp']:.2f}")
    return Passage(True, f"model: {', '.join(numbers)}", message_text(turn.get("message") or {}))


def _replies(turn: Mapping[str, Any]) -> Iterator[Passage]:
    replies = turn.get("replies") or ()
    calls = turn.get("calls") or ()
    reward = turn.get("reward")
    for number, reply in enumerate(replies or calls):  # calls alone: their results did not fit
        call = calls[number] if number < len(calls) else None
        if call is None:
            numbers = [f"{turn.get('reply_seconds') or 0:.2g} s"]
            if reward is not None:
                numbers.append(f"reward {reward:g}")
            author = _message(reply).head if reply.get("role") == "tool" else "environment"
            yield Passage(False, f"{author}: {', '.join(numbers)}", _plain(reply.get("content")))
            continue
        notes = [f"{call.get('seconds') or 0:.2g} s"]
        if call.get("failed"):
            notes.append("failed")
        if call.get("cut"):
            notes.append(f"{call['cut']} tokens cut off")
        if not replies:
            notes.append("left out: no room")
        yield Passage(False, f"tool {call.get('name')}: {', '.join(notes)}", _plain(reply.get("content")))
    if not replies and not calls and reward is not None:
        yield Passage(False, f"environment: reward {reward:g}", "")


def message_text(message: Mapping[str, Any]) -> str:
    """Reasoning, content and calls of an assistant message, a line each."""
    calls = [_call_text(call.get("function") or call) for call in message.get("tool_calls") or ()]
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
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=as_name)
