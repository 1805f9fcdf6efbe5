"""Completions of several turns between their turns: the drawn tokens become a message, its calls are run or its text is
given to an environment, and the replies become the tokens that follow.

Every completion is a conversation of its own, and what follows one of its turns runs in a thread, so that tools of
different completions overlap with each other and with the decoding of other rows. The answers depend on the tokens
alone, not on the order in which tools finish.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from podium.agents.chat import ChatFormat
from podium.agents.plain_text import TextEnvironment
from podium.agents.tools import CallLimits, Tool, ToolRunner
from podium.engines.base import Answer, Episodes
from podium.engines.sampling import row_key
from podium.records import Call, Finish, Message, Prompt, Turn, has_malformed_call

CORRECTION = "The tool call could not be parsed. Write it once more, with arguments that are valid JSON."
"""User message after a malformed call, with `max_call_corrections`."""
MOST_THREADS = 256
"""Turns that are answered at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Bounds of one completion."""

    end_ids: frozenset[int]
    max_tokens: int
    """Drawn and given tokens of all turns."""
    context_length: int | None = None
    """Positions of the model, for the prompt and all turns; None: unknown."""
    max_iterations: int | None = None
    """Rounds of tool calls; None: any number, 0: calls are never run."""
    max_turns: int | None = None
    """Turns of the policy; None: any number."""
    max_corrections: int = 0
    """Times that a completion is told that a call of it cannot be parsed, and goes on."""
    seed: int = 0
    """Seed of the run."""
    round: int = 0
    """Number of the generation round; with `seed` it decides the random numbers of tools in workers."""


@dataclass(slots=True)
class _Conversation:
    """State of one completion."""

    prompt: Prompt
    number: int
    """Index of the completion within its group."""
    tools: Mapping[str, Tool]
    environment: Any
    turns: list[Turn] = field(default_factory=list)
    finish: Finish = "stop"
    next_start: int = 0
    """Place of the next turn's first token."""
    began: float = 0.0
    """When its present turn began, by `time.perf_counter`."""
    rounds: int = 0
    """Rounds of tool calls so far."""
    corrections: int = 0
    """Calls so far that could not be parsed and were answered with `CORRECTION`."""


class _Reply(NamedTuple):
    """Messages that follow a turn; without any the completion has ended."""

    messages: tuple[Message, ...] = ()
    calls: tuple[Call, ...] = ()
    reward: float | None = None
    finish: Finish = "stop"


class AgentEpisodes(Episodes):
    """The episodes of one call of `generate`."""

    def __init__(
        self,
        prompts: Sequence[Sequence[Prompt]],
        tools: Sequence[Sequence[Mapping[str, Tool]]],
        environments: Sequence[Sequence[Any]],
        *,
        chat: ChatFormat,
        call_limits: CallLimits,
        limits: EpisodeLimits,
    ) -> None:
        """`prompts[p][g]`, `tools[p][g]` by their names, and `environments[p][g]` are completion g's of group p."""
        self.chat, self.call_limits, self.limits = chat, call_limits, limits
        self._runner = ToolRunner()
        now = time.perf_counter()
        self._conversations = [
            [
                _Conversation(prompt, g, own_tools, environment, began=now)
                for g, (prompt, own_tools, environment) in enumerate(zip(*of_group, strict=True))
            ]
            for of_group in zip(prompts, tools, environments, strict=True)
        ]
        count = sum(map(len, self._conversations))
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, max(count, 1)), thread_name_prefix="podium-turns")
        self._pending: dict[tuple[int, int], Future[Answer]] = {}

    def ended(self, prompt: int, completion: int, token_ids: Sequence[int]) -> None:
        """See `engines.base.Episodes`."""
        given = prompt, completion, tuple(token_ids), time.perf_counter()
        self._pending[prompt, completion] = self._threads.submit(self._answer, *given)

    def answers(self, *, at_least: int) -> list[Answer]:
        """See `engines.base.Episodes`. Raises the error of an environment."""
        while sum(future.done() for future in self._pending.values()) < min(at_least, len(self._pending)):
            wait_for([x for x in self._pending.values() if not x.done()], return_when="FIRST_COMPLETED")
        done = sorted(place for place, future in self._pending.items() if future.done())
        answers = [self._pending.pop(place).result() for place in done]
        now = time.perf_counter()
        for answer in answers:
            self._conversations[answer.prompt][answer.completion].began = now
        return answers

    def finished(self, prompt: int, completion: int) -> tuple[tuple[Turn, ...], Finish]:
        """See `engines.base.Episodes`."""
        conversation = self._conversations[prompt][completion]
        return tuple(conversation.turns), conversation.finish

    def close(self) -> None:
        """End the threads; those of tools that hang are given up."""
        self._runner.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _answer(self, prompt: int, completion: int, token_ids: tuple[int, ...], ended: float) -> Answer:
        conversation = self._conversations[prompt][completion]
        start, prefix = conversation.next_start, conversation.prompt.token_ids
        message = self.chat.parse(
            token_ids[start:],
            prefix=(*prefix, *token_ids[:start]),
            tools=[tool.schema for tool in conversation.tools.values()],
        )
        reply = self._reply(conversation, message, cut=token_ids[-1] not in self.limits.end_ids)
        suffix: tuple[int, ...] = ()
        if reply.messages:
            suffix = self.chat.suffix(reply.messages, last=token_ids[-1])
            total, room = len(token_ids) + len(suffix), self.limits.context_length
            if total > self.limits.max_tokens or (room is not None and len(prefix) + total >= room):
                reply, suffix = reply._replace(messages=(), finish="context"), ()
            elif total == self.limits.max_tokens:
                reply = reply._replace(finish="length")
        conversation.turns.append(
            Turn(
                start=start,
                stop=len(token_ids),
                message=message,
                calls=reply.calls,
                replies=reply.messages,
                reward=reply.reward,
                seconds=ended - conversation.began,
                reply_seconds=time.perf_counter() - ended,
            )
        )
        conversation.next_start = len(token_ids) + len(suffix)
        conversation.finish = reply.finish
        over = not reply.messages or reply.finish == "length"
        return Answer(prompt, completion, suffix, over)

    def _reply(self, conversation: _Conversation, message: Message, *, cut: bool) -> _Reply:
        """The messages that follow `message`; `cut`: its turn has no end token."""
        if cut:
            return _Reply(finish="length")
        last = self.limits.max_turns is not None and len(conversation.turns) + 1 >= self.limits.max_turns
        calls = message.get("tool_calls") or []
        if calls and conversation.tools:
            most = self.limits.max_iterations
            if last or (most is not None and conversation.rounds >= most):
                return _Reply(finish="turns")
            conversation.rounds += 1
            key = self.limits.seed, self.limits.round, conversation.prompt.id, conversation.number
            seed = int(row_key(*key, conversation.rounds) >> np.uint64(33))
            results = self._runner.run(calls, conversation.tools, self.call_limits, seed=seed)
            return _Reply(tuple({"role": "tool", "name": x.name, "content": x.content} for x in results), results)
        correctable = conversation.tools and conversation.corrections < self.limits.max_corrections and not last
        if correctable and has_malformed_call(message):
            conversation.corrections += 1
            return _Reply(({"role": "user", "content": CORRECTION},))
        if not isinstance(conversation.environment, TextEnvironment):
            return _Reply()
        step = conversation.environment.take_step(str(message.get("content") or ""), self.call_limits.timeout)
        over = step.done or step.observation is None
        observed: Message = {"role": "user", "content": step.observation}
        finish: Finish = "turns" if last and not over else "stop"
        return _Reply(() if over or last else (observed,), reward=step.reward, finish=finish)
