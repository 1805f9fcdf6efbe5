"""A generation round before it is trained on, and the thread in which the next one is sampled and scored.

    flight = Flight(key, work, engine)      # `work() -> Sampled`, in a thread
    ...                                     # train on the round before
    sampled = flight.land()                 # waits; raises what `work` raised

Knows threads and arrays; what a round is sampled from is the business of `rollouts`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from podium.engines.base import Interruptible
from podium.records import Prompt, ScoredGroup
from podium.trainer.rounds import RoundKey

Measured = tuple[str, float]
"""The name of a metric and a value of it."""

PATIENCE_SECONDS = 5.0
"""How long the end of a run waits for a round that nobody wants; a reward function cannot always be interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A round as this process sampled and scored it: all that happens to it before processes compare."""

    key: RoundKey
    policy_step: int
    """Optimizer steps the sampling weights had taken."""
    places: tuple[int, ...]
    """Of this process's prompts in the round."""
    scored: tuple[ScoredGroup, ...]
    metrics: tuple[Measured, ...]
    """What reward functions logged."""
    seconds: tuple[Measured, ...]
    """How long parts of it took."""
    num_fresh: int
    """Prompts that were drawn for want of spread."""


class Flight:
    """A round that is being sampled and scored in a thread of its own."""

    def __init__(self, key: RoundKey, work: Callable[[], Sampled], engine: Any = None) -> None:
        self.key = key
        self._engine = engine
        self._work = work
        self._sampled: Sampled | None = None
        self._error: BaseException | None = None
        # A daemon: a reward function that never returns must not keep a run that has ended from exiting.
        self._thread = threading.Thread(target=self._run, name="podium-rollouts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._sampled = self._work()
        except BaseException as error:  # noqa: BLE001  raised again where the round is wanted
            self._error = error

    def wait(self) -> Sampled | None:
        """Until it has ended, well or not; the round, if it went well."""
        self._thread.join()
        return self._sampled

    def land(self) -> Sampled:
        """The round; raises what was raised in the thread."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._sampled is not None
        return self._sampled

    def abandon(self) -> None:
        """Nobody wants it any more."""
        if isinstance(self._engine, Interruptible):
            self._engine.interrupt()
        self._thread.join(PATIENCE_SECONDS)


class Landed(Flight):
    """A round that was sampled before: by a run that stopped."""

    def __init__(self, sampled: Sampled) -> None:
        super().__init__(sampled.key, lambda: sampled)


# ---- as arrays, for checkpoints ----


def to_arrays(sampled: Sampled) -> dict[str, np.ndarray]:
    """The round as flat numpy arrays that need no pickle. Prompts are named by id and row, and made again."""
    groups = [scored.group for scored in sampled.scored]
    completions = [completion for group in groups for completion in group.completions]
    rest = {
        "metrics": sampled.metrics,
        "seconds": sampled.seconds,
        "num_fresh": sampled.num_fresh,
        "names_K": sampled.scored[0].names_K if sampled.scored else (),
        "extras": [dict(scored.extras) for scored in sampled.scored],
    }
    return {
        "round": np.array([*sampled.key, sampled.policy_step]),
        "places": np.array(sampled.places, np.int64),
        "prompts": np.array([[g.prompt.id, g.prompt.row] for g in groups], np.int64).reshape(-1, 2),
        "group_sizes": np.array([len(group.completions) for group in groups], np.int64),
        "lengths": np.array([len(completion.token_ids) for completion in completions], np.int64),
        "token_ids": np.array([i for completion in completions for i in completion.token_ids], np.int64),
        "logps": np.array([x for completion in completions for x in completion.logps], np.float64),
        "rewards": np.concatenate([np.zeros(0), *(scored.rewards_GK.ravel() for scored in sampled.scored)]),
        "rest": np.array(json.dumps(rest, default=str)),
    }


def from_arrays(
    arrays: Mapping[str, np.ndarray],
    prompt: Callable[[RoundKey, int, int], Prompt],
    group: Callable[[Prompt, Sequence[tuple[list[int], list[float]]], int], Any],
) -> Sampled:
    """The inverse of `to_arrays`.

    Args:
        arrays: what it gave.
        prompt: a prompt of a round from its id and row.
        group: a group from its prompt, the ids and log-probabilities of its completions, and the step they are of.
    """
    epoch, number, policy_step = arrays["round"].tolist()
    key = RoundKey(epoch, number)
    rest = json.loads(str(arrays["rest"]))
    completions = zip(_split(arrays, "token_ids"), _split(arrays, "logps"), strict=True)
    rewards = iter(arrays["rewards"].reshape(-1, max(len(rest["names_K"]), 1)))
    scored = tuple(
        ScoredGroup(
            group=group(prompt(key, id, row), list(islice(completions, size)), policy_step),
            names_K=tuple(rest["names_K"]),
            rewards_GK=np.array(list(islice(rewards, size))),
            extras={name: tuple(values) for name, values in extras.items()},
        )
        for (id, row), size, extras in zip(
            arrays["prompts"].tolist(), arrays["group_sizes"].tolist(), rest["extras"], strict=True
        )
    )
    return Sampled(
        key=key,
        policy_step=policy_step,
        places=tuple(arrays["places"].tolist()),
        scored=scored,
        metrics=tuple((name, value) for name, value in rest["metrics"]),
        seconds=tuple((name, value) for name, value in rest["seconds"]),
        num_fresh=rest["num_fresh"],
    )


def _split(arrays: Mapping[str, np.ndarray], name: str) -> Iterator[list[Any]]:
    values = iter(arrays[name].tolist())
    return (list(islice(values, length)) for length in arrays["lengths"].tolist())
