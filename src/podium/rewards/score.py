"""The reward boundary: groups in, one number per completion and reward function out. TRL's contract to the letter.

    scored = score(groups, resolve_rewards([format_reward, correct_reward]))

Each function is called once a round, with keyword arguments, for all completions of the round (the G of a prompt one
after the other), and only with what its signature names (all of it where there is `**kwargs`):

    function(prompts=[...], completions=[...], completion_ids=[[...], ...], <each other column>=[...],
             trainer_state=..., log_extra=f(column, values), log_metric=f(name, value)) -> one number or None each

What is not one finite number (or None) per completion stops the run with a `RewardError` that names the function, the
row and the start of the completion. Knows nothing of models, advantages and losses.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from podium.errors import PodiumError, RewardError
from podium.records import Group, ScoredGroup
from podium.rewards.resolve import (
    GIVEN,
    Reward,
    check_rewards,
    load_reward_models,
    resolve_rewards,
    resolve_weights,
)
from podium.rewards.results import Batch, describe_raised, user_traceback, values_of

__all__ = [
    "GIVEN",
    "Reward",
    "check_rewards",
    "load_reward_models",
    "resolve_rewards",
    "resolve_weights",
    "score",
]

logger = logging.getLogger(__name__)

LogMetric = Callable[[str, float], None]


def score(
    groups: Sequence[Group],
    rewards: Sequence[Reward],
    *,
    trainer_state: Any = None,
    log_metric: LogMetric | None = None,
) -> list[ScoredGroup]:
    """Every completion of the round by every reward function: `rewards_GK` is float64, NaN for None.

    Synchronous functions run one after the other, then the `async` ones together. Raises `RewardError`.
    """
    if not groups:
        return []
    batch = _batch(groups)
    extras = _Extras(num_completions=len(batch))
    services = {"trainer_state": trainer_state, "log_metric": log_metric or _ignore}
    calls = [
        _Call(reward=reward, arguments=_arguments(reward, batch, {**services, "log_extra": extras.logger(reward)}))
        for reward in rewards
    ]
    answers = _answers(calls, batch)
    columns_KR = [values_of(answer, reward, batch) for answer, reward in zip(answers, rewards, strict=True)]
    rewards_RK = np.array(columns_KR, dtype=np.float64).reshape(len(rewards), len(batch)).T
    names_K = tuple(reward.name for reward in rewards)
    _warn_where_all_none(rewards_RK, names_K, batch)
    return _by_group(groups, rewards_RK, names_K, extras.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One reward function with what it is called with."""

    reward: Reward
    arguments: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class _Extras:
    """Collects what the reward functions hand to `log_extra`."""

    num_completions: int
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def logger(self, reward: Reward) -> Callable[[str, Sequence[Any]], None]:
        own: set[str] = set()

        def log_extra(column: str, values: Sequence[Any]) -> None:
            values = list(values)
            if len(values) != self.num_completions:
                raise ValueError(
                    f"log_extra({column!r}, ...) got {len(values)} values for {self.num_completions} completions; "
                    "give one for each"
                )
            # Two functions may use one name for different things: a column never mixes them.
            taken = column not in own and self.columns.get(column, values) != values
            key = f"{column} ({reward.name})" if taken else column
            own.add(key)
            self.columns[key] = values

        return log_extra


def _ignore(name: str, value: float) -> None:
    """Where nobody collects metrics."""


def _batch(groups: Sequence[Group]) -> Batch:
    members = [(group.prompt, completion) for group in groups for completion in group.completions]
    # Rows of a plain list may have different keys; a column has a value for every completion nevertheless.
    keys = dict.fromkeys(key for group in groups for key in group.prompt.columns if key not in GIVEN)
    return Batch(
        prompts=[prompt.content for prompt, _ in members],
        completions=[
            [{"role": "assistant", "content": completion.text}] if prompt.is_chat else completion.text
            for prompt, completion in members
        ],
        completion_ids=[list(completion.token_ids) for _, completion in members],
        columns={key: [prompt.columns.get(key) for prompt, _ in members] for key in keys},
        texts=[completion.text for _, completion in members],
        rows=[prompt.row for prompt, _ in members],
        places=[f"{g} of {len(group.completions)}" for group in groups for g in range(1, len(group.completions) + 1)],
    )


def _arguments(reward: Reward, batch: Batch, services: Mapping[str, Any]) -> dict[str, Any]:
    """What the function is called with: copies, so that it can change nothing but its own."""
    shared = {
        **batch.columns,
        "prompts": batch.prompts,
        "completions": batch.completions,
        "completion_ids": batch.completion_ids,
    }
    copies = {name: _copied(values) for name, values in shared.items() if reward.wants is None or name in reward.wants}
    return {**copies, **{name: service for name, service in services.items() if _takes(reward, name)}}


def _takes(reward: Reward, name: str) -> bool:
    return reward.wants is None or name in reward.wants


def _copied(value: Any) -> Any:
    """A deep copy of what is plain data. Other objects are passed as they are: copying them may be wrong, or costly."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    return value.copy() if isinstance(value, np.ndarray) else value


# --- calling ---------------------------------------------------------------------------------------------------------


def _answers(calls: Sequence[_Call], batch: Batch) -> list[Any]:
    """What each function returned, in the order of `calls`."""
    answers = {k: _ask(call, batch) for k, call in enumerate(calls) if not call.reward.is_async}
    waiting = {k: call for k, call in enumerate(calls) if call.reward.is_async}
    if waiting:
        answers |= dict(zip(waiting, _ask_together(list(waiting.values()), batch), strict=True))
    return [answers[k] for k in range(len(calls))]


def _ask(call: _Call, batch: Batch) -> Any:
    try:
        return call.reward.function(**call.arguments)
    except PodiumError:  # says all that is to be said
        raise
    # Whatever a user's function raises becomes one message, also `exit()`: a run must not end without a word.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        raise _reward_error(error, call, batch) from error.with_traceback(user_traceback(error))


def _ask_together(calls: Sequence[_Call], batch: Batch) -> list[Any]:
    """Runs `async` functions at the same time on a loop in the background (the caller may have a loop of its own)."""
    future = asyncio.run_coroutine_threadsafe(_gather(calls), _background_loop(os.getpid()))
    try:
        answers = future.result()
    except BaseException:  # an interrupted run leaves no task behind
        future.cancel()
        raise
    for call, answer in zip(calls, answers, strict=True):
        if isinstance(answer, _Raised):
            error = answer.error
            raise _reward_error(error, call, batch) from error.with_traceback(user_traceback(error))
    return answers


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


async def _gather(calls: Sequence[_Call]) -> list[Any]:
    return await asyncio.gather(*(_awaited(call) for call in calls))


async def _awaited(call: _Call) -> Any:
    try:
        return await call.reward.function(**call.arguments)
    # As in `_ask`; caught in the task itself, because `SystemExit` would end the loop and leave the caller waiting.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return _Raised(error)


@functools.cache
def _background_loop(process_id: int) -> asyncio.AbstractEventLoop:
    """One loop per process, on a daemon thread; a forked child gets its own, since threads do not survive a fork."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"podium-rewards-{process_id}", daemon=True).start()
    return loop


def _reward_error(error: BaseException, call: _Call, batch: Batch) -> RewardError:
    return RewardError(describe_raised(error, call.reward, call.arguments, batch))


# --- after the calls -------------------------------------------------------------------------------------------------

_warned: set[tuple[str, ...]] = set()


def _warn_where_all_none(rewards_RK: np.ndarray, names_K: tuple[str, ...], batch: Batch) -> None:
    """Once for each set of functions: such rows carry no signal, and there may be one in every round."""
    unscored = np.flatnonzero(np.isnan(rewards_RK).all(axis=1))
    if unscored.size == 0 or names_K in _warned:
        return
    _warned.add(names_K)
    columns = {key: values[unscored[0]] for key, values in batch.columns.items()}
    logger.warning(
        "All reward functions returned None for %d of %d completions, which are not trained on. The first is %s\n"
        "  functions: %s; columns of that row: %s\n"
        "Please ensure that at least one reward function returns a valid reward. (Said once.)",
        unscored.size,
        len(batch),
        batch.place(int(unscored[0])),
        ", ".join(names_K),
        columns,
    )


def _by_group(
    groups: Sequence[Group], rewards_RK: np.ndarray, names_K: tuple[str, ...], extras: Mapping[str, Sequence[Any]]
) -> list[ScoredGroup]:
    scored, start = [], 0
    for group in groups:
        own = slice(start, start + len(group.completions))
        scored.append(
            ScoredGroup(
                group=group,
                names_K=names_K,
                rewards_GK=rewards_RK[own].copy(),
                extras={column: tuple(values[own]) for column, values in extras.items()},
            )
        )
        start = own.stop
    return scored
