"""Environments in plain text: each turn of the model is an action, each observation the next user turn.

class Guess(TextEnvironment):
    def reset(self, number, **row):
        self.number = number
        return "Guess my number from 1 to 7."

    def step(self, text):
        guess = int(text) if text.strip().isdigit() else 0
        if guess == self.number:
            return None, 1.0, True, {}
        return ("higher" if guess < self.number else "lower"), 0.0, False, {}

GRPOTrainer(..., environment_factory=Guess)
"""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from podium.errors import AgentError, PodiumError
from podium.isolation.workers.call_result import LONGEST_TEXT, shown, trace_lines, user_traceback
from podium.isolation.workers.functions import function_name
from podium.records import Message


class TextEnvironment(ABC):
    """An environment that answers each turn of the model with text, and pays for it.

    One instance plays one completion at a time and is reset for the next, so everything that belongs to an episode is
    set in `reset`. The rewards of the steps add up to `get_reward()`, the reward of the episode.
    """

    max_turns: ClassVar[int | None] = None
    """The last turn of an episode, as if the environment had ended it there; None: only the trainer's own limit."""

    step_rewards: tuple[float, ...] = ()
    """Rewards of the steps of this episode, in their order; kept by `reset` and `take_step` of the trainer."""

    @abstractmethod
    def reset(self, **row: Any) -> str | Sequence[Message] | None:
        """Begin an episode with a row's columns, each given by name.

        A string is appended to the last message of the prompt, messages come after it, None adds nothing. An argument
        named `seed`, where the row has no such column, is a number that all completions of a group share.
        """

    @abstractmethod
    def step(self, text: str) -> tuple[str | None, float, bool, Mapping[str, Any]]:
        """One turn of the model.

        Returns the observation (the next user turn, or None if the episode is over), the reward of this step, whether
        the episode is over, and anything worth logging.
        """

    def get_reward(self) -> float:
        """The reward of the episode: the sum over its steps."""
        return math.fsum(self.step_rewards)


class Step(NamedTuple):
    """A checked result of `TextEnvironment.step`."""

    observation: str | None
    reward: float
    done: bool
    info: Mapping[str, Any]


_RETURN = "return (observation, reward, done, info): a string or None, a finite number, a bool, a dict"
_GYMNASIUM = "return (observation, reward, terminated or truncated, info): done is one value here"


def take_step(environment: TextEnvironment, text: str, *, row: int = -1) -> Step:
    """Play a turn and keep its reward. `row`: the dataset row, for messages.

    Raises `AgentError` where the environment raises, or returns anything but a step.
    """
    number = len(environment.step_rewards) + 1
    where = f"step {number}{of_row(row)}"
    returned = call_user(environment.step, where, text)
    try:
        observation, reward, done, info = returned
    except (TypeError, ValueError):
        fix = _GYMNASIUM if isinstance(returned, tuple) and len(returned) == 5 else _RETURN
        raise _refused(environment, where, _awaitable_or_shown(returned), fix) from None
    reward, done = (_scalar(value) for value in (reward, done))
    if not isinstance(done, bool):
        raise _refused(environment, where, f"{shown(done)} for `done`", _RETURN)
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise _refused(environment, where, f"{shown(reward)} for the reward", _RETURN)
    if not isinstance(info, Mapping):
        raise _refused(environment, where, f"{shown(info)} for `info`", _RETURN)
    if not isinstance(observation, str | None):
        raise _refused(environment, where, f"{shown(observation)} for the observation", _RETURN)
    if observation is None and not done:
        fix = "return the text of the next user turn, or True for `done`"
        raise _refused(environment, where, "no observation, though the episode goes on", fix)
    environment.step_rewards = (*environment.step_rewards, float(reward))
    return Step(observation, float(reward), done or number == environment.max_turns, info)


def call_user(function: Callable[..., Any], where: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of an environment; whatever it raises becomes an `AgentError` with the user's own frames."""
    try:
        return function(*args, **kwargs)
    except PodiumError:
        raise
    except (Exception, SystemExit) as error:
        entries = traceback.extract_tb(user_traceback(error, _OWN_FRAMES))
        name = type(function.__self__).__name__ if inspect.ismethod(function) else function_name(function)
        text = f"{type(error).__name__}: {error}"[:LONGEST_TEXT]
        what = "\n  ".join([f"environment `{name}` raised {text} in {where}", *trace_lines(entries)])
        raise AgentError(what, fix=_fix(error, entries, function)) from error


_OWN_FRAMES = frozenset([__file__])


def _fix(error: BaseException, entries: Sequence[traceback.FrameSummary], function: Callable[..., Any]) -> str:
    """The line to correct; the signature, where the call itself was refused."""
    if entries:
        return f"correct line {entries[0].lineno} of {entries[0].filename}"
    name = getattr(function, "__name__", "")
    if isinstance(error, TypeError) and name == "reset":
        return "write `def reset(self, **row):`, since every column of the row is given by name"
    return ""


def _refused(environment: TextEnvironment, where: str, what: str, fix: str) -> AgentError:
    return AgentError(f"environment `{type(environment).__name__}` returned {what} in {where}", fix=fix)


def of_row(row: int) -> str:
    """The row in a message; empty where the dataset is a stream."""
    return f" of row {row}" if row >= 0 else ""


def _awaitable_or_shown(value: Any) -> str:
    if inspect.iscoroutine(value):
        value.close()  # or Python complains that it was never awaited
        return "a coroutine (`async def`; the method must be `def`)"
    return shown(value)


def _scalar(value: Any) -> Any:
    """A number of numpy or torch as Python's own."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
