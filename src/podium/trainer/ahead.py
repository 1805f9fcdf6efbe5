"""A round that is sampled and scored in a thread, ahead of the training that it is for (`async_rollouts`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from podium.isolation.threads import in_thread
from podium.trainer.rounds import RoundKey, SampledRound

JOIN_TIMEOUT = 5.0
"""Seconds that the end of a run waits for a round; a reward function cannot always be interrupted."""


class RoundAhead:
    """At most one round that is being sampled, or was, and is not taken yet."""

    def __init__(self) -> None:
        self.key: RoundKey | None = None
        """Of the round; None: there is none."""
        self.ended: float | None = None
        """When the last round was sampled and scored, by `time.perf_counter`; None: there was none."""
        self._future: Future[SampledRound] = Future()
        self._interrupt: Callable[[], None] = lambda: None

    def begin(self, key: RoundKey, sample: Callable[[], SampledRound], interrupt: Callable[[], None]) -> None:
        """Sample a round in a thread. `interrupt` has `sample` end soon."""
        self.key = key
        self._interrupt = interrupt

        def sampled() -> SampledRound:
            try:
                return sample()
            finally:
                self.ended = time.perf_counter()

        self._future = in_thread(sampled, "podium-rollouts")

    def restore(self, sampled: SampledRound) -> None:
        """Take the round of a run that stopped."""
        self.key = sampled.key
        self._future = Future()
        self._future.set_result(sampled)

    def wait(self) -> SampledRound | None:
        """Until nothing is being sampled; the round, unless there is none, or it failed."""
        if self.key is None or self._future.exception() is not None:
            return None
        return self._future.result()

    def take(self) -> SampledRound:
        """The round, as soon as it is sampled. Raises the error of its sampling or its rewards."""
        self.key = None
        return self._future.result()

    def abandon(self) -> None:
        """Forget the round."""
        if self.key is not None:
            self.key = None
            self._interrupt()
            wait([self._future], JOIN_TIMEOUT)
