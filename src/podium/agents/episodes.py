"""Episodes in tokens: the tokens that a policy drew become an action, and the observation becomes the tokens after it.

Every completion is an episode of its own. Each of its steps runs in a thread, so that tools of different completions
overlap with each other and with the decoding of other rows. The answers depend on the tokens alone, not on the order in
which tools finish.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any

from podium.agents.chat import ChatFormat, TooManyTokens
from podium.agents.episode import Episode, EpisodeLimits
from podium.agents.tools import Tool, ToolRunner
from podium.engines.base import Answer, Episodes
from podium.records import Finish, Prompt, SamplingSettings, Turn

MOST_THREADS = 256
"""Turns that are answered at a time."""


@dataclass(slots=True)
class _Conversation:
    """State of one completion."""

    prompt: Prompt
    episode: Episode
    turns: list[Turn] = field(default_factory=list)
    finish: Finish = "stop"
    next_start: int = 0
    """Place of the next turn's first token."""
    began: float = 0.0
    """When its present turn began, by `time.perf_counter`."""


class AgentEpisodes(Episodes):
    """The episodes of one call of `generate`."""

    def __init__(
        self,
        prompts: Sequence[Sequence[Prompt]],
        tools: Sequence[Sequence[Mapping[str, Tool]]],
        environments: Sequence[Sequence[Any]],
        *,
        chat: ChatFormat,
        limits: EpisodeLimits,
        settings: SamplingSettings,
        context_length: int | None,
    ) -> None:
        """`prompts[p][g]`, `tools[p][g]` by their names, and `environments[p][g]` are completion g's of group p.

        `settings`: of the round. Its `max_tokens` are the drawn and given ones of all turns; its seed and its number
        decide the random numbers of tools in workers. `context_length`: positions of the model, for the prompt and
        all turns; None: unknown.
        """
        self.chat = chat
        self.settings = settings
        self.context_length = context_length
        self._runner = ToolRunner()
        now = time.perf_counter()

        def begun(g: int, prompt: Prompt, own_tools: Mapping[str, Tool], environment: Any) -> _Conversation:
            key = (settings.seed, settings.round, prompt.id, g)
            episode = Episode(own_tools, environment, limits=limits, runner=self._runner, key=key)
            return _Conversation(prompt, episode, began=now)

        self._conversations = [
            [begun(g, *each) for g, each in enumerate(zip(*of_group, strict=True))]
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
        for conversation in (each for of_group in self._conversations for each in of_group):
            conversation.episode.close()

    def _answer(self, prompt: int, completion: int, token_ids: tuple[int, ...], ended: float) -> Answer:
        conversation = self._conversations[prompt][completion]
        start = conversation.next_start
        prefix = conversation.prompt.token_ids
        message = self.chat.parse(
            token_ids[start:],
            prefix=(*prefix, *token_ids[:start]),
            tools=[tool.schema for tool in conversation.episode.tools.values()],
        )
        text = str(self.chat.tokenizer.decode(token_ids[start:], skip_special_tokens=True))
        observation = conversation.episode.step(message, is_cut=not self.settings.has_ended(token_ids, text))
        is_over = observation.done
        finish = observation.finish
        suffix: tuple[int, ...] = ()
        if not is_over:
            room = self.settings.max_tokens - len(token_ids)
            if self.context_length is not None:
                room = min(room, self.context_length - len(prefix) - len(token_ids) - 1)
            try:
                suffix = self.chat.suffix(observation.messages, last=token_ids[-1], most=max(room, 0))
                fits = len(suffix) <= room
            except TooManyTokens:
                fits = False
            if not fits:
                is_over = True
                finish = "context"
                suffix = ()
            elif len(token_ids) + len(suffix) == self.settings.max_tokens:
                is_over = True
                finish = "length"
        conversation.turns.append(
            Turn(
                start=start,
                stop=len(token_ids),
                message=message,
                calls=observation.calls,
                replies=observation.messages if suffix else (),
                reward=observation.reward,
                seconds=ended - conversation.began,
                reply_seconds=time.perf_counter() - ended,
            )
        )
        if is_over:
            conversation.episode.close()
        conversation.next_start = len(token_ids) + len(suffix)
        conversation.finish = finish
        return Answer(prompt, completion, suffix, is_over)
