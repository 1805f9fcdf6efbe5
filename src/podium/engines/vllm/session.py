"""Requests to a vLLM server that may come at any time: all of them are sent at once.

An answer is given out only after the server was asked for the version of its weights. Where it died or has other ones,
everything that was not given out is sampled again, with the same seeds.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from podium.engines.base import Ended, Interrupted
from podium.engines.vllm.requests import body, read
from podium.engines.vllm.server import MOST_CONNECTIONS, Send, Server, ServerGone
from podium.records import RolloutRequest, SamplingSettings

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.02
"""That a step waits for an answer."""
TRIES = 3
"""Generations of one round, before a server that loses its weights each time ends the run."""


class ServedWeights(NamedTuple):
    """The weights that a server is to sample from."""

    version: str
    bring: Callable[[], None]
    """Sends them again unless the server has them."""


class ServerSession:
    """See `engines.base.EngineSession`; `unwanted`: set when its completions are no longer wanted."""

    max_rows = MOST_CONNECTIONS

    def __init__(
        self,
        server: Server,
        model: str,
        send: Send,
        settings: SamplingSettings,
        weights: ServedWeights,
        unwanted: threading.Event,
    ) -> None:
        self.server = server
        self.model = model
        self.settings = settings
        self.weights = weights
        self._send = send
        self._unwanted = unwanted
        self._numbers = itertools.count()
        self._open: dict[int, RolloutRequest] = {}
        """Requests whose completions were not given out."""
        self._sent: dict[Future[dict[str, Any]], int] = {}
        self._done: queue.SimpleQueue[Future[dict[str, Any]]] = queue.SimpleQueue()
        self._answers: dict[int, dict[str, Any]] = {}
        self._heard = 0.0
        """When it last answered, or was first asked, by `time.monotonic`."""
        self._failures = 0
        self._begin_again(self._without_weights())

    def submit(self, request: RolloutRequest) -> int:
        """Send a request; the id of its completions."""
        number = next(self._numbers)
        self._open[number] = request
        self._ask(number)
        return number

    def cancel(self, request: int, place: int | None = None) -> None:
        """Give up a request whose completions were not given out, with all of them."""
        self._open.pop(request, None)
        self._answers.pop(request, None)
        for future in [each for each, number in self._sent.items() if number == request]:
            del self._sent[future]
            future.cancel()

    @property
    def is_decoding(self) -> bool:
        """Whether there are requests without an answer."""
        return bool(self._sent)

    @property
    def is_busy(self) -> bool:
        """Whether there are completions that `poll` has not given."""
        return bool(self._open)

    def step(self) -> None:
        """Wait a moment for answers. Raises `EngineError` and `Interrupted`."""
        if self._unwanted.is_set():
            raise Interrupted
        try:
            self._take(self._done.get(timeout=LOOK_SECONDS))
            while True:
                self._take(self._done.get_nowait())
        except queue.Empty:
            if self._sent and time.monotonic() - self._heard > self.server.seconds:
                raise self.server.silent(len(self._sent)) from None

    def poll(self) -> list[Ended]:
        """The completions that have ended since the last call. Raises `EngineError`."""
        if not self._answers:
            return []
        try:
            changed = self.server.weight_version() != self.weights.version
            why: object = "The weights of the vLLM server changed while it sampled; sampling again." if changed else ""
        except ServerGone as gone:
            why = gone
        if why:
            self._begin_again(why)
            return []
        answers = self._answers
        self._answers = {}
        ended = []
        for number, answer in answers.items():
            request = self._open.pop(number)
            sampled = read(answer, request, request.settings or self.settings)
            ended += [Ended(number, place, *each) for place, each in enumerate(sampled)]
        return ended

    def _ask(self, number: int) -> None:
        if not self._sent:
            self._heard = time.monotonic()
        request = self._open[number]
        future = self._send(body(self.model, request, request.settings or self.settings))
        self._sent[future] = number
        future.add_done_callback(self._done.put)

    def _take(self, future: Future[dict[str, Any]]) -> None:
        number = self._sent.pop(future, None)
        if number is None:  # cancelled
            return
        self._heard = time.monotonic()
        try:
            self._answers[number] = future.result()
        except ServerGone as gone:
            self._begin_again(gone)

    def _without_weights(self) -> ServerGone | None:
        """Have the weights at the server; the error where it is gone."""
        try:
            self.weights.bring()
        except ServerGone as gone:
            return gone
        return None

    def _begin_again(self, why: object) -> None:
        """Sample once more what was not given out, when the server is back with its weights; nothing without `why`.

        Raises `ServerGone` where it does not come back, or this is the last of its tries.
        """
        if not why:
            return
        for future in self._sent:
            future.cancel()
        self._sent = {}
        self._answers = {}
        while why:
            logger.warning("%s", why)
            self._failures += 1
            if self._failures == TRIES:
                died = f"The vLLM server at {self.server.url} died or lost its weights {TRIES} times in one round."
                raise ServerGone(died)
            self.server.wait()
            why = self._without_weights()
        for number in self._open:
            self._ask(number)
