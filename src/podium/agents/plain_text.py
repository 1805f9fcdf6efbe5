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

import functools
import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from podium.data.images import with_opened
from podium.errors import AgentError, DataError, PodiumError
from podium.isolation.functions import raised_by, shown
from podium.isolation.reward_results import read_values
from podium.isolation.threads import in_thread
from podium.records import Message

logger = logging.getLogger(__name__)


class RaisedError(AgentError):
    """An environment's code, or a function of the user's, raised."""


class OverrunError(AgentError):
    """It did not return within its limit."""


class Step(NamedTuple):
    """A checked result of `TextEnvironment.step`."""

    observation: str | list[Any] | None
    reward: float
    done: bool
    info: Mapping[str, Any]


class TextEnvironment(ABC):
    """An environment that answers each turn of the model with text, and pays for it.

    One instance plays one completion at a time and is reset for the next, so everything that belongs to an episode is
    set in `reset`. The rewards of the steps add up to `get_reward()`, the reward of the episode.
    """

    max_turns: ClassVar[int | None] = None
    """The last turn of an episode, as if the environment had ended it there; None: only the trainer's own limit."""

    actions: Sequence[str] = ()
    """Texts that are legal turns, for a test without a model; empty: not known."""
    row_index: int = -1
    """The dataset row of this episode, for messages; -1: unknown."""
    step_rewards: tuple[float, ...] = ()
    """Rewards of this episode's steps, in their order."""
    is_hanging: bool = False
    """Whether a step did not return within its limit: it may still be running, so no episode follows in this object."""

    @abstractmethod
    def reset(self, *given: Any, **row: Any) -> str | Sequence[Message] | None:
        """Begin an episode with a row's columns, each given by name.

        A string is appended to the last message of the prompt, messages come after it, None adds nothing. An argument
        named `seed`, where the row has no such column, is a number that all completions of a group share.
        """

    @abstractmethod
    def step(self, text: str) -> tuple[str | list[Any] | None, float, bool, Mapping[str, Any]]:
        """One turn of the model.

        Returns the observation (the next user turn, as a text or as content blocks with images, or None if the episode
        is over), the reward of this step, whether the episode is over, and anything worth logging.
        """

    def get_reward(self) -> float:
        """The reward of the episode: the sum over its steps."""
        return math.fsum(self.step_rewards)

    def take_step(self, text: str, limit: float | None = None) -> Step:
        """Play a turn with `step`, and keep its reward.

        A step that takes longer than `limit` seconds is left behind: it ends the episode unpaid, and `is_hanging`
        is set. Raises `AgentError` where `step` raises, or returns anything but a step.
        """
        number = len(self.step_rewards) + 1
        who = f"environment `{type(self).__name__}`"
        where = f"step {number}{of_row(self.row_index)}"
        try:
            returned = call_user(functools.partial(self.step, text), who=who, where=where, limit=limit)
        except TimeoutError:
            self.is_hanging = True
            logger.warning("%s did not return within %g s in %s; its episode ends.", who, limit, where)
            return Step(None, 0.0, True, {"timeout": limit})
        step = _checked(returned, f"{who} returned", where)
        self.step_rewards = (*self.step_rewards, step.reward)
        return step._replace(done=step.done or number == self.max_turns)


_RETURN = "return (observation, reward, done, info): a string, content blocks or None, a finite number, a bool, a dict"
_GYMNASIUM = "return (observation, reward, terminated or truncated, info): `done` is one value here"


def _checked(returned: Any, who: str, where: str) -> Step:
    try:
        observation, reward, done, info = returned
    except (TypeError, ValueError):
        fix = _GYMNASIUM if isinstance(returned, tuple) and len(returned) == 5 else _RETURN
        raise AgentError(
            f"{who} {what_came(returned)} in {where}", fix=fix, who=who, what_came=what_came(returned), place=where
        ) from None
    done = done.item() if hasattr(done, "item") else done  # numpy's, torch's
    read = read_values([reward])  # the rules for rewards
    for is_right, value, name in (
        (isinstance(observation, str | None) or _are_blocks(observation), observation, "the observation"),
        (not read.failures and read.values[0] is not None, reward, "the reward"),
        (isinstance(done, bool), done, "`done`"),
        (isinstance(info, Mapping), info, "`info`"),
    ):
        if not is_right:
            raise AgentError(
                f"{who} {shown(value)} for {name} in {where}",
                fix=_RETURN,
                who=who,
                shown=shown(value),
                name=name,
                place=where,
            )
    if observation is None and not done:
        raise AgentError(f"{who} no observation, though `done` is False, in {where}", fix=_RETURN, who=who, place=where)
    try:
        observation = with_opened(observation, "an image")
    except DataError as error:
        raise AgentError(f"{who} in {where} an observation in which {error.what}", fix=error.fix) from None
    return Step(observation, read.values[0] or 0.0, done, info)


def _are_blocks(observation: Any) -> bool:
    """Whether it is a list of texts and images as blocks of content."""
    return isinstance(observation, list) and all(
        isinstance(block, Mapping) and (isinstance(block.get("text"), str) or block.get("type") == "image")
        for block in observation
    )


def call_user(run: Callable[[], Any], *, who: str, where: str, limit: float | None = None) -> Any:
    """Call a user's code.

    Raises `RaisedError` with the user's own frames for whatever it raises, `TimeoutError` if it has not returned after
    `limit` seconds; it is left behind in a thread then.
    """
    if limit is None:
        return _call(run, who, where)
    return in_thread(lambda: _call(run, who, where), f"podium-{where}").result(limit)


def _call(run: Callable[[], Any], who: str, where: str) -> Any:
    try:
        return run()
    except PodiumError:
        raise
    except (Exception, SystemExit) as error:
        found = raised_by(error, _OWN_FRAMES)
        fix = f"correct {found.place}" if found.place else ""
        if isinstance(error, TypeError) and not found.place and where.startswith("reset"):
            fix = "write `def reset(self, **row):`, since every column of the row is given by name"
        trace = "".join(f"\n  {line}" for line in found.trace)
        raise RaisedError(
            f"{who} raised {found.what} in {where}{trace}",
            fix=fix,
            who=who,
            raised=found.what,
            place=where,
            trace=trace,
        ) from error


_OWN_FRAMES = frozenset([__file__])


def of_row(row: int) -> str:
    """The row in a message; empty where the dataset is a stream."""
    return f" of row {row}" if row >= 0 else ""


def what_came(value: Any) -> str:
    """A returned value in a message."""
    if inspect.iscoroutine(value):
        value.close()  # or Python complains that it was never awaited
        return "a coroutine (`async def`; the method must be `def`)"
    return shown(value)
