"""verifiers' environments of its first generation (`verifiers.legacy`), in process: `verifiers:my-environment`.

An environment is driven turn by turn through its own methods, in the order of its `rollout`: `setup_state`, then
`is_completed` and `get_prompt_messages` (which calls `env_response`), at the end the rubric. The other way, a client
that the environment calls for each turn, would keep the loop inside the environment, so that a turn of every episode
could not be sampled in one batch; and the rollout would wait in a thread. Versions 0.3.x have these environments, 0.4
has removed them. Environments with tools are refused: a turn here is text.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from podium.agents.adapters import from_file
from podium.agents.plain_text import TextEnvironment
from podium.errors import AgentError, ConfigError
from podium.errors.texts import quoted
from podium.isolation.event_loop import background_loop
from podium.records import Message


class Verifiers(TextEnvironment):
    """An episode of a verifiers environment, paid by its rubric at the end.

    A row of its dataset (`prompt`, and `answer`, `info` where it has them) is taken as it is; without one, the seed
    chooses a row of the environment's own dataset.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._state: Any = None
        self._messages: Sequence[Any] = ()

    def reset(self, prompt: Any = None, seed: int = 0, **row: Any) -> list[Message] | None:
        """The prompt, where the row has none."""
        given = {"prompt": prompt, "example_id": 0, **row}
        if not prompt or not (isinstance(prompt, str) or prompt[-1]["content"]):
            rows = self._environment.get_dataset()
            given = dict(rows[seed % len(rows)])
        self._state = self._wait(self._begin(given))
        return None if given["prompt"] is prompt else [_plain(message) for message in self._state["prompt"]]

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        """One turn of the model."""
        replies, done = self._wait(self._turn(text))
        said = "\n".join(str(_plain(message)["content"]) for message in replies) or None
        if not done:
            return said, 0.0, False, {}
        info = {"stop": self._state.get("stop_condition"), **(self._state["metrics"] or {})}
        return said, float(self._state["reward"]), True, info

    def get_reward(self) -> float:
        """The rubric's, also for an episode that the trainer has ended."""
        if self.is_hanging:
            return super().get_reward()
        if self._state["reward"] is None:
            self._wait(self._score())
        return float(self._state["reward"])

    async def _begin(self, row: dict[str, Any]) -> Any:
        from verifiers.legacy.clients import OpenAIChatCompletionsClient

        no_client = OpenAIChatCompletionsClient(None)  # a state needs one; nothing calls it
        state = await self._environment.init_state(row, no_client, model="", sampling_args=None)
        self._messages = state["prompt"]
        return await self._environment.setup_state(state) or state

    async def _turn(self, text: str) -> tuple[Sequence[Any], bool]:
        """The messages that answer a turn, and whether the episode is over; then it is scored."""
        from verifiers.legacy.types import AssistantMessage, TrajectoryStep

        environment, state = self._environment, self._state
        turn = TrajectoryStep(
            prompt=self._messages,
            completion=[AssistantMessage(role="assistant", content=text)],
            is_truncated=False,
            trajectory_id=state["trajectory_id"],
            extras={},
            **dict.fromkeys(("response", "tokens", "reward", "advantage")),
        )
        await environment.add_trajectory_step(state, turn)
        before = [*turn["prompt"], *turn["completion"]]
        replies: Sequence[Any] = ()
        done = await environment.is_completed(state)
        if not done:
            self._messages = await environment.get_prompt_messages(state)
            if list(self._messages[: len(before)]) != before:
                what = f"verifiers' {type(environment).__name__} rewrites the conversation between turns."
                raise AgentError(what, fix="use an environment that only appends to it")
            replies = state["final_env_response"] or self._messages[len(before) :]
            done = await environment.is_completed(state)
        if done:
            await self._score()
        return replies, done

    async def _score(self) -> None:
        await self._environment.cleanup(self._state)
        await self._environment.rubric.score_group([self._state])

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, background_loop(os.getpid())[0]).result()


def _plain(message: Any) -> Message:
    return {"role": message["role"], "content": message["content"] or ""}


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Give SIGINT and SIGTERM back to their handlers, which the constructor of a verifiers environment replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in kept.items():
                signal.signal(number, handler)


def factory(name: str, folder: Path, /, **arguments: Any) -> Callable[[], Verifiers]:
    """Makes episodes of one environment: of an installed package, or of `file.py:load_environment`."""
    try:
        import verifiers.legacy as verifiers
    except ImportError as error:
        raise ConfigError(
            f"this version of verifiers has no `verifiers.legacy`: {quoted(error)}",
            fix="Type: pip install 'podium[verifiers]'",
            error=error,
        ) from error
    with _signals_kept():
        if ".py:" in name:
            environment = from_file(name, folder)(**arguments)
        else:
            try:
                environment = verifiers.load_environment(name, **arguments)
            except (ValueError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"verifiers cannot load `{name}`: {quoted(error)}",
                    fix=f"install its package, or write verifiers:{name.replace('-', '_')}.py:load_environment",
                    name=name,
                    error=error,
                ) from error
    if environment.tool_defs or not hasattr(environment, "env_response"):
        raise ConfigError(
            f"verifiers' {type(environment).__name__} is played with tool calls; here a turn is text.",
            fix="give its functions as `tools`, and its rubric's functions as rewards",
            kind=type(environment).__name__,
        )
    return functools.partial(Verifiers, environment)
