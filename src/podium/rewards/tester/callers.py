"""Calls of the reward under test: in this process, or in a worker that is killed at its limit.

    caller = WorkerCaller(Source(loader="podium.recipe.rewards:find_reward", arguments=("correct", {})))
    caller.call(groups)         # a ProbeResult: values, or the problem that came instead

All calls go through `podium.rewards.score`, so the function gets what it gets in training.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from podium.data.columns import SERVICES
from podium.errors import PodiumError, RewardError
from podium.isolation.workers.calls import seed
from podium.isolation.workers.functions import unwrapped
from podium.isolation.workers.process import Lost, Worker
from podium.records import Group
from podium.rewards.from_file import FileReward
from podium.rewards.model import RewardModel
from podium.rewards.resolve import ENVIRONMENTS, Reward, reads_environments, resolve_rewards
from podium.rewards.score import CallSettings, score
from podium.rewards.stand_ins import StandIns

FIRST_CALL_SECONDS = 30.0
"""Least limit of the first call: it may import libraries or load a model."""
LOAD_SECONDS = 120.0
"""Limit of importing the function."""
GRACE_SECONDS = 2.0
"""After the limit, for the worker to end the process of a function from a file itself."""
NOT_PLAYED = "not played"
"""In place of the code of an error: the function looks into the environment of a completion."""
MAX_RESTARTS = 6
"""Hangs and crashes after which no more calls are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The values of one call, or the finding that came instead."""

    values: Sequence[float] | None = None
    """One for each completion, NaN for None."""
    code: str = ""
    message: str = ""
    fix: str = ""
    """The error's fix, where it has one."""
    seconds: float = 0.0
    mutated: Sequence[str] = ()
    """Arguments that the function changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInfo:
    """The part of a `Reward` that can cross to another process: all but the function."""

    name: str
    where: str
    wants: frozenset[str] | None
    needs: tuple[str, ...]
    code_text: str
    """The function's source and settings, for the tags and columns they name; empty where Python does not have it."""
    is_model: bool
    """A reward model: its scores are a matter of degree, and its texts have a greatest length."""

    def __str__(self) -> str:
        return f"reward function `{self.name}`" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The function for a worker: `loader` is `module:function`, called with `arguments`."""

    loader: str
    arguments: tuple[Any, ...]
    limit_seconds: float = 10.0
    environments: bool = False
    """Whether completions of the run have environments."""


class LocalCaller:
    """Calls a function of this process, which is waited for as in training."""

    can_restart = False
    """Whether `close` makes the function forget its earlier calls."""

    def __init__(self, reward: Reward, limit_seconds: float, *, environments: bool = False) -> None:
        """`environments`: whether completions of the run have any."""
        self.reward = reward
        self.limit_seconds = limit_seconds
        self.environments = environments
        self.info = info_of(reward)
        self._is_first = True

    def call(self, groups: Sequence[Group], **settings: Any) -> ProbeResult:
        """One call; the random generators of the process are afterwards as they were. `settings`: of `call`."""
        limit = max(self.limit_seconds, FIRST_CALL_SECONDS if self._is_first else 0.0)
        states = random.getstate(), np.random.get_state()
        result = call(self.reward, groups, limit, environments=self.environments, **settings)
        random.setstate(states[0])
        np.random.set_state(states[1])
        self._is_first = self._is_first and bool(result.code)
        return result

    def close(self) -> None:
        """A function of this process keeps its state."""


class WorkerCaller:
    """Calls a function that a worker loads; the worker is killed when it hangs.

    Raises:
        RewardError: the loader's own error, or W013.
    """

    can_restart = True

    def __init__(self, source: Source) -> None:
        self.source = source
        self._worker = Worker(target=f"{__name__}:answer", variables=None, output="kept")
        self._num_lost = 0
        self._first: Sequence[Group] | None = None
        """Groups of the first call that went well; a new process makes that call before others."""
        reply = self._worker.ask({"source": source}, LOAD_SECONDS)
        if isinstance(reply, Lost):
            raise RewardError("\n".join(["loading the reward ended its process", *_last_words(reply)]), code="W013")
        if "refused" in reply:
            self.close()
            raise RewardError(reply["refused"], code=reply.get("code", "W013"), fix=reply.get("fix", ""))
        wants = None if reply["wants"] is None else frozenset(reply["wants"])
        self.info = RewardInfo(**{**reply, "wants": wants, "needs": tuple(reply["needs"])})

    def call(self, groups: Sequence[Group], **settings: Any) -> ProbeResult:
        """One call; a process that was lost before is started again. `settings`: of `call`."""
        if self._num_lost >= MAX_RESTARTS:
            return ProbeResult(code="W016", message="not asked: too many calls hung or crashed")
        patient = max(self.source.limit_seconds, FIRST_CALL_SECONDS)
        if self._first is None:
            result = self._exchange(groups, patient, **settings)
            self._first = None if result.code else groups
            return result
        if not self._worker.alive:  # what took long at the first call takes long again
            self._exchange(self._first, patient)
        return self._exchange(groups, self.source.limit_seconds, **settings)

    def _exchange(self, groups: Sequence[Group], limit: float, **settings: Any) -> ProbeResult:
        start = time.perf_counter()
        loading = 0.0 if self._worker.alive else LOAD_SECONDS
        sent = {"source": self.source, "call": (groups, limit), "settings": settings}
        reply = self._worker.ask(sent, limit + GRACE_SECONDS + loading)
        if not isinstance(reply, Lost):
            return ProbeResult(code="W013", message=reply["refused"]) if "refused" in reply else ProbeResult(**reply)
        self._num_lost += 1
        how = f"did not return within {limit:g} s" if reply.is_overrun else reply.how
        message = "\n".join([f"{self.info} {how}", *_last_words(reply)])
        code = "W016" if reply.is_overrun else "W017"
        return ProbeResult(code=code, message=message, seconds=time.perf_counter() - start)

    def close(self) -> None:
        self._worker.kill()


_REWARDS = str(Path(__file__).parents[1])


def _last_words(lost: Lost) -> Sequence[str]:
    """The user's outermost frame, or the last lines that the process printed."""
    users = [f"  {frame}" for frame in lost.trace if _REWARDS not in frame and not frame.startswith('File "<')]
    return users[:1] or [f"  {line}" for line in lost.output[-12:]]


def answer(asked: Mapping[str, Any], _: Callable[[int], None]) -> Iterator[Mapping[str, Any]]:
    """In the worker: the result of a call, or without a request the description of the function."""
    reward = _load(asked["source"])
    if "call" in asked:
        played = asked["source"].environments or reads_environments(info_of(reward).code_text)
        yield asdict(call(reward, *asked["call"], environments=played, **asked["settings"]))
    else:
        info = info_of(reward)
        yield {**asdict(info), "wants": None if info.wants is None else sorted(info.wants)}


_loaded: list[Reward] = []
"""The function of this worker, once it is there."""


def _load(source: Source) -> Reward:
    if not _loaded:
        module, _, name = source.loader.partition(":")
        _loaded.extend(resolve_rewards([getattr(importlib.import_module(module), name)(*source.arguments)]))
    return _loaded[0]


RewardCaller = LocalCaller | WorkerCaller


def info_of(reward: Reward) -> RewardInfo:
    """The description of a reward."""
    given = reward.function.keywords if isinstance(reward.function, functools.partial) else {}
    settings = " ".join(map(str, given.values()))
    function = unwrapped(reward.function)
    return RewardInfo(
        name=reward.name,
        where=reward.where,
        wants=reward.wants,
        needs=reward.needs,
        code_text=f"{_code_of(function)}\n{settings}",
        is_model=isinstance(reward.function, RewardModel),
    )


def _code_of(function: Any) -> str:
    try:
        if not isinstance(function, FileReward):
            return inspect.getsource(inspect.unwrap(function if inspect.isroutine(function) else type(function)))
        text = function.path.read_text(encoding="utf-8")
        named = (node for node in ast.parse(text).body if getattr(node, "name", None) == function.attribute)
        return next((ast.get_source_segment(text, node) or "" for node in named), text)
    except (OSError, TypeError, ValueError, SyntaxError):
        return ""


def call(
    reward: Reward,
    groups: Sequence[Group],
    limit_seconds: float,
    *,
    random_seed: int = 0,
    check_inputs: bool = False,
    environments: bool = False,
) -> ProbeResult:
    """One call in this thread, or in the worker of a file; every `PodiumError` becomes a result.

    Args:
        random_seed: of `random` and numpy's global generator.
        check_inputs: whether to look for changes to the arguments afterwards.
        environments: whether completions of the run have any; the result is `NOT_PLAYED` where the function looks into
            one, since the texts of the test have none.
    """
    if not groups:
        return ProbeResult(values=())
    seed(random_seed)
    changed: list[str] = []
    if check_inputs and not reward.is_async:
        reward = replace(reward, function=_watched(reward.function, changed))
    played = StandIns(groups) if environments else None
    start = time.perf_counter()
    try:
        scored = score(groups, [reward], settings=CallSettings(limit=limit_seconds), environments=played)
    except PodiumError as error:
        code = error.code if isinstance(error, RewardError) else "W010"
        result = ProbeResult(code=code, message=error.what, fix=error.fix, seconds=time.perf_counter() - start)
    else:
        seconds = time.perf_counter() - start
        values = np.concatenate([group.rewards_GK[:, 0] for group in scored])
        result = ProbeResult(values=values.tolist(), seconds=seconds, mutated=changed)
    if played is not None and played.asked:
        return ProbeResult(code=NOT_PLAYED)
    return result


def _watched(function: Any, changed: list[str]) -> Any:
    """The function, noting which of its arguments are other than before."""

    def watched(**arguments: Any) -> Any:
        data = {name: value for name, value in arguments.items() if name not in (*SERVICES, ENVIRONMENTS)}
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
