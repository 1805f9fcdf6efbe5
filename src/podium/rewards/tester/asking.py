"""Calls to the function under test, each with a limit: in this process, or in one that can be killed.

    asker = RemoteAsker(Source(loader="podium.recipe.rewards:find_reward", arguments=("correct", {})))
    asker.ask(Request(groups=groups))         # an Answer: values, or the problem that came instead

All calls go through `podium.rewards.score`, so the function gets what it gets in training.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from podium.errors import PodiumError, RewardError
from podium.records import Group
from podium.rewards.model import RewardModel
from podium.rewards.resolve import GIVEN, Reward
from podium.rewards.score import CallSettings, score

FIRST_CALL_SECONDS = 30.0
"""Least limit of the first call: it may import libraries or load a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why there are no values."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of the function."""

    groups: tuple[Group, ...]
    seed: int = 0
    """Of `random` and numpy's global generator, set before the call."""
    check_inputs: bool = False
    """Whether to look for changes to the arguments afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one call."""

    values: tuple[float, ...] | None
    """One for each completion, NaN for None; None where there is a problem."""
    problem: Problem | None = None
    seconds: float = 0.0
    mutated: tuple[str, ...] = ()
    """Arguments that the function changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What a signature says, without the function."""

    name: str
    where: str
    wants: frozenset[str] | None
    needs: tuple[str, ...]
    is_async: bool
    code_text: str
    """The function's source, for the tags it names; empty where Python does not have it."""
    is_model: bool = False
    """A reward model: its scores are a matter of degree, and its texts have a greatest length."""

    def __str__(self) -> str:
        return f"reward function `{self.name}`" + (f" ({self.where})" if self.where else "")


class RewardCaller(Protocol):
    """Whoever calls the function."""

    described: Described
    can_restart: bool

    def ask(self, request: Request) -> Answer:
        """One call, at most as long as the limit."""

    def restart(self) -> None:
        """Forget all that earlier calls may have left behind."""

    def close(self) -> None:
        """End what is still running."""


def describe(reward: Reward) -> Described:
    """The part of a reward that can cross to another process."""
    try:
        code_text = inspect.getsource(inspect.unwrap(_inner(reward.function)))
    except (OSError, TypeError):
        code_text = ""
    function = reward.function
    settings = " ".join(map(str, function.keywords.values())) if isinstance(function, functools.partial) else ""
    return Described(
        name=reward.name,
        where=reward.where,
        wants=reward.wants,
        needs=reward.needs,
        is_async=reward.is_async,
        code_text=f"{code_text}\n{settings}",
        is_model=isinstance(function, RewardModel),
    )


def _inner(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function)


# --- one call --------------------------------------------------------------------------------------------------------


def call(reward: Reward, request: Request, limit_seconds: float) -> Answer:
    """One call in this thread, ended by the boundary at its limit; whatever goes wrong becomes a `Problem`."""
    if not request.groups:
        return Answer(values=())
    _seed(request.seed)
    changed: list[str] = []
    if request.check_inputs and not reward.is_async:
        reward = replace(reward, function=_watched(reward.function, changed))
    start = time.perf_counter()
    try:
        settings = CallSettings(limit=limit_seconds)
        scored = score(request.groups, [reward], trainer_state=_trainer_state(reward), settings=settings)
    except PodiumError as error:
        code = error.code if isinstance(error, RewardError) else "W010"
        return Answer(values=None, problem=Problem(code=code, message=str(error)), seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    values = np.concatenate([group.rewards_GK[:, 0] for group in scored])
    return Answer(values=tuple(values.tolist()), seconds=seconds, mutated=tuple(changed))


def _watched(function: Any, changed: list[str]) -> Any:
    """The function, noting which of its arguments are other than before."""

    def watched(**arguments: Any) -> Any:
        data = {name: value for name, value in arguments.items() if name not in GIVEN[3:]}
        before = copy.deepcopy(data)
        answer = function(**arguments)
        changed.extend(name for name, value in data.items() if not _same(value, before[name]))
        return answer

    return watched


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arrays inside
        return repr(one) == repr(other)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


@functools.cache
def _first_state() -> Any:
    from transformers import TrainerState

    return TrainerState(global_step=0, max_steps=100)


def _trainer_state(reward: Reward) -> Any:
    """A real one, made only for those who name it: the import takes seconds."""
    return _first_state() if "trainer_state" in (reward.wants or ()) else None


# --- in this process -------------------------------------------------------------------------------------------------


class LocalAsker:
    """Calls a function of this process, under the watchdog that also stands over it in training."""

    can_restart = False

    def __init__(self, reward: Reward, limit_seconds: float) -> None:
        self.reward = reward
        self.limit_seconds = limit_seconds
        self.described = describe(reward)
        self._asked = False

    def ask(self, request: Request) -> Answer:
        """One call; the random generators of the process are afterwards as they were."""
        limit = self.limit_seconds if self._asked else max(self.limit_seconds, FIRST_CALL_SECONDS)
        states = random.getstate(), np.random.get_state()
        answer = call(self.reward, request, limit)
        random.setstate(states[0])
        np.random.set_state(states[1])
        self._asked = self._asked or answer.problem is None
        return answer

    def restart(self) -> None:
        """What a function keeps in this process cannot be taken from it."""

    def close(self) -> None:
        """Nothing is left running."""
