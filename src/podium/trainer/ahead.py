"""Rounds that are sampled and scored in threads, ahead of the training that they are for (`async_rollouts`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from podium.isolation.threads import in_thread
from podium.trainer.rounds import RoundKey, SampledRound

JOIN_TIMEOUT = 5.0
"""Seconds that the end of a run waits for a round; a reward function cannot always be interrupted."""


class RoundsAhead:
    """Rounds that were begun and are not taken yet, in the order of training; one after the other is sampled."""

    def __init__(self) -> None:
        self.ended: float | None = None
        """When the last round was sampled and scored, by `time.perf_counter`; None: there was none."""
        self._rounds: dict[RoundKey, Future[SampledRound]] = {}
        self._interrupt: Callable[[], None] = lambda: None

    def __contains__(self, key: RoundKey) -> bool:
        return key in self._rounds

    @property
    def is_sampling(self) -> bool:
        """Whether one of the rounds is not there yet."""
        return not all(future.done() for future in self._rounds.values())

    def begin(self, key: RoundKey, sample: Callable[[], SampledRound], interrupt: Callable[[], None]) -> None:
        """Sample a round in a thread, when those before it are there. `interrupt` has `sample` end soon."""
        before = [*self._rounds.values()][-1:]
        self._interrupt = interrupt

        def sampled() -> SampledRound:
            for earlier in before:
                earlier.result()  # raises where it failed, or was given up
            try:
                return sample()
            finally:
                self.ended = time.perf_counter()

        self._rounds[key] = in_thread(sampled, "podium-rollouts")

    def restore(self, sampled: SampledRound) -> None:
        """Add a round of a run that stopped, in order."""
        future: Future[SampledRound] = Future()
        future.set_result(sampled)
        self._rounds[sampled.key] = future

    def wait(self) -> list[SampledRound]:
        """Wait until nothing is being sampled; return the rounds without those that failed."""
        return [future.result() for future in self._rounds.values() if future.exception() is None]

    def take(self, key: RoundKey) -> SampledRound:
        """Return a round as soon as it is sampled. Raises the error of its sampling or its rewards."""
        return self._rounds.pop(key).result()

    def abandon(self) -> None:
        """Forget all rounds."""
        if self._rounds:
            given_up = [*self._rounds.values()]
            self._rounds.clear()
            self._interrupt()
            wait(given_up, JOIN_TIMEOUT)
