"""One episode: tools and an environment reply to the actions of a policy until the episode is done.

    episode = Episode(by_name(tools), environment, limits=EpisodeLimits(max_turns=8))
    for action, observation in episode.play(policy):
        print(action["content"], observation.messages, observation.reward)

Training (`agents.rollouts`), the test of environments (`tester`) and `podium chat` all take their turns here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from podium.agents.mcp import in_episode
from podium.agents.plain_text import TextEnvironment
from podium.agents.tools import CallLimits, Tool, ToolRunner
from podium.engines.sampling import row_key
from podium.records import Call, Finish, Message, has_malformed_call

CORRECTION = "The tool call could not be parsed. Write it once more, with arguments that are valid JSON."
"""User message after a malformed call, with `max_corrections`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Bounds of an episode."""

    max_iterations: int | None = None
    """Rounds of tool calls; None: any number, 0: calls are never run."""
    max_turns: int | None = None
    """Turns of the policy; None: any number."""
    max_corrections: int = 0
    """Times that the policy is told that a call of it cannot be parsed, and goes on."""
    calls: CallLimits = field(default_factory=CallLimits)
    """Limits of each call of a tool. The `timeout` is also that of a step of the environment."""


class Observation(NamedTuple):
    """The reply of the tools or the environment to an action of the policy."""

    messages: tuple[Message, ...] = ()
    """Results of tools, or what the environment said."""
    calls: tuple[Call, ...] = ()
    reward: float | None = None
    """Reward of this step; None where no environment gave one."""
    done: bool = False
    finish: Finish = "stop"
    """Why it is done."""
    seconds: float = 0.0
    """Time that tools or the environment took, in `Episode.play`."""


class Episode:
    """The state of one episode, which `step` advances."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        environment: Any = None,
        *,
        limits: EpisodeLimits,
        runner: ToolRunner | None = None,
        key: tuple[int, ...] = (),
    ) -> None:
        """Begin an episode in an environment that was reset.

        Args:
            tools: by name.
            environment: answers turns without calls if it is a `TextEnvironment`; None: nothing does.
            limits: of turns, calls and corrections.
            runner: runs the calls; None: one of its own.
            key: decides, with the number of the round of calls, the random numbers of tools in workers; empty: they are
                not seeded.
        """
        self._ending = ExitStack()
        self.tools: Mapping[str, Tool] = in_episode(tools, self._ending)
        self.environment = environment
        self.limits = limits
        self._runner = runner or ToolRunner()
        self._key = key
        self._turns = self._rounds = self._corrections = 0

    def close(self) -> None:
        """Give back the servers that its tools have for this episode alone."""
        self._ending.close()

    def play(self, policy: Callable[[Observation], Message | None]) -> Iterator[tuple[Message, Observation]]:
        """Every action with the observation that follows it, until the episode is done or the policy returns None.

        `policy` is given the latest observation, an empty one at first.
        """
        observation = Observation()
        while not observation.done and (action := policy(observation)) is not None:
            began = time.perf_counter()
            observation = self.step(action)._replace(seconds=time.perf_counter() - began)
            yield action, observation

    def step(self, action: Message, *, is_cut: bool = False) -> Observation:
        """The observation after an action, a message of the assistant.

        `is_cut`: the message ended at a limit of tokens, which ends the episode. Raises `AgentError` for what a text
        environment raises or returns; an error of a tool is its result.
        """
        if is_cut:
            return Observation(done=True, finish="length")
        self._turns += 1
        limits = self.limits
        is_last = limits.max_turns is not None and self._turns >= limits.max_turns
        calls = action.get("tool_calls") or []
        if calls and self.tools:
            if is_last or (limits.max_iterations is not None and self._rounds >= limits.max_iterations):
                return Observation(done=True, finish="turns")
            self._rounds += 1
            seed = int(row_key(*self._key, self._rounds) >> np.uint64(33)) if self._key else None
            results = self._runner.run(calls, self.tools, limits.calls, seed=seed)
            return Observation(tuple({"role": "tool", "name": x.name, "content": x.content} for x in results), results)
        correctable = self.tools and self._corrections < limits.max_corrections and not is_last
        if correctable and has_malformed_call(action):
            self._corrections += 1
            return Observation(({"role": "user", "content": CORRECTION},))
        if not isinstance(self.environment, TextEnvironment):
            return Observation(done=True)
        step = self.environment.take_step(str(action.get("content") or ""), limits.calls.timeout)
        messages: tuple[Message, ...] = ()
        if step.observation is not None:
            messages = ({"role": "user", "content": step.observation},)
        is_over = step.done or not messages
        finish: Finish = "turns" if is_last and not is_over else "stop"
        return Observation(messages, reward=step.reward, done=is_over or is_last, finish=finish)
