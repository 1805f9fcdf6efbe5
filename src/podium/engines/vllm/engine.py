"""Engines of `use_vllm`, and the one of `vllm_mode: server`: a `vllm serve`, with weights known to be the policy's.

    engine.sync(policy, version=step)         once a round: sends the weights if they have changed
    engine.generate(prompts, settings, ...)   touches nothing of the policy
    engine.session(settings)                  the same, with requests that may come at any time

Every set of weights that is sent has a version, which the server keeps with them. It is asked for it before and after
each generation: a server that was restarted gets the weights again, one that serves another run's ends this one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from podium.engines.base import EndedCompletion, Interrupted, RolloutEngine
from podium.engines.vllm.requests import body, read
from podium.engines.vllm.server import MOST_CONNECTIONS, Send, ServerGone, VllmServer
from podium.engines.vllm.weights import LOADING, Folder, Nccl
from podium.errors import EngineError
from podium.records import RolloutRequest, SamplingSettings

logger = logging.getLogger(__name__)

PREFIX = "podium-"
"""Begins the versions that Podium gives to weights."""
LOOK_SECONDS = 0.02
"""That a step waits for an answer."""
TRIES = 3
"""Generations of one round, before a server that loses its weights each time ends the run."""


class SyncedEngine(RolloutEngine):
    """An engine whose weights are the policy's of the last `sync`, under a version of their own."""

    name = "vllm"
    own_weights = True
    processed_logps = True

    def __init__(self, agree: Callable[[Any], Any] = lambda value: value) -> None:
        """`agree` gives the first process's value on every process."""
        self._agree = agree
        self._run = uuid.uuid4().hex[:8]
        self._count = 0
        self._sent: tuple[int, int] | None = None
        self.version = ""
        """Of the weights that were brought last; empty: none were."""

    def sync(self, policy: nn.Module, version: int) -> None:
        """Bring the policy's weights, unless they are those that were brought last. All processes call it."""
        if (state := (version, _changes(policy))) == self._sent:
            return
        self._count += 1
        self.version = self._agree(f"{PREFIX}{self._run}-{self._count}-step-{version}")
        self.bring(policy)
        self._sent = state

    @abstractmethod
    def bring(self, policy: nn.Module) -> None:
        """Make the policy's weights the engine's, under the version that has been set."""


def _changes(policy: nn.Module) -> int:
    """A number that grows whenever a parameter is written to, by an optimizer or by anyone else."""
    return sum(p._version for p in policy.parameters())


class ServerEngine(SyncedEngine):
    """A vLLM server."""

    interleaves = True
    apart = True

    def __init__(
        self,
        server: VllmServer,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        transfer: Folder | Nccl,
        *,
        is_main: bool = True,
        agree: Callable[[Any], Any] = lambda value: value,
        casts_weights: bool = True,
        newest_checkpoint: Callable[[], Path | None] = lambda: None,
    ) -> None:
        """`model` is the name that it serves; `agree` gives the first process's value on every process."""
        super().__init__(agree)
        self.server = server
        self.model = model
        self.tokenizer = tokenizer
        self.transfer = transfer
        self.casts_weights = casts_weights
        self.newest_checkpoint = newest_checkpoint
        self._is_main = is_main
        self.unwanted = threading.Event()
        """Set when completions are no longer wanted."""

    def sync(self, policy: nn.Module, version: int) -> None:
        """Send the policy's weights, unless they are those that were sent last. All processes call it."""
        self.unwanted.clear()
        super().sync(policy, version)

    def bring(self, policy: nn.Module) -> None:
        """See `SyncedEngine`."""
        with resumable(self.newest_checkpoint):
            try:
                self.transfer.bring(policy, self.version, here=self._is_main)
            except ServerGone as gone:
                logger.warning("%s", gone)
                self.server.wait()
                self.transfer.again(self.version)
        self._agree(None)  # a barrier: sampling waits until they are there

    def interrupt(self) -> None:
        """At the next look at the server."""
        self.unwanted.set()

    @contextlib.contextmanager
    def session(
        self, settings: SamplingSettings, expected: Sequence[RolloutRequest] = (), *, keeps: bool = False
    ) -> Iterator[ServerSession]:
        """See `engines.base.RolloutEngine`; the server's own prefix cache is what keeps sequences.

        Raises:
            EngineError: the server is gone and does not come back, is silent for `vllm_server_timeout` seconds,
                answers something else, or its weights are another run's; also inside of the context.
        """
        assert settings.lengths is None, "vLLM draws no exact lengths"
        with resumable(self.newest_checkpoint), self.server.completing() as send:
            yield ServerSession(self, send, settings)

    def have_weights(self) -> None:
        """Send the weights of the last `sync` again, unless the server has them."""
        found = self.server.weight_version()
        if found == self.version:
            return
        if not self.version:
            raise EngineError("Nothing was sent to the vLLM server yet: `sync` comes before `generate`.")
        if found.startswith(PREFIX) and not found.startswith(f"{PREFIX}{self._run}"):
            raise EngineError(
                f"The weights of the vLLM server at {self.server.url} are {found}, those of another run; "
                f"ours are {self.version}. Two runs cannot share a server: start one for each "
                "(vllm_server_port).",
                settings=("vllm_server_port",),
                url=self.server.url,
                found=found,
                version=self.version,
            )
        if found != self.version + LOADING:
            logger.warning(
                "The vLLM server at %s has weights %r, not %r: it was restarted, or somebody changed them. "
                "Sending them again.",
                self.server.url,
                found,
                self.version,
            )
        self.transfer.again(self.version)


@contextlib.contextmanager
def resumable(newest_checkpoint: Callable[[], Path | None]) -> Iterator[None]:
    """Failures of a server with what to do about them."""
    try:
        yield
    except EngineError as error:
        fix = getattr(error, "fix_in_a_run", error.fix)
        newest = newest_checkpoint()
        again = f" {newest} is whole: resume with --resume_from_checkpoint true." if newest else ""
        raise type(error)(error.what, fix=f"{fix}{again}".strip()) from None


class ServerSession:
    """Requests to a server that may come at any time: all of them are sent at once; see `engines.base.EngineSession`.

    An answer is given out only after the server was asked for the version of its weights. Where it died or has other
    ones, everything that was not given out is sampled again, with the same seeds.
    """

    max_rows = MOST_CONNECTIONS

    def __init__(self, engine: ServerEngine, send: Send, settings: SamplingSettings) -> None:
        self.engine = engine
        self.server = engine.server
        self.settings = settings
        self._send = send
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
        for future in [future for future, number in self._sent.items() if number == request]:
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
        if self.engine.unwanted.is_set():
            raise Interrupted
        try:
            self._take(self._done.get(timeout=LOOK_SECONDS))
            while True:
                self._take(self._done.get_nowait())
        except queue.Empty:
            if self._sent and time.monotonic() - self._heard > self.server.seconds:
                raise self.server.silent(len(self._sent)) from None

    def poll(self) -> list[EndedCompletion]:
        """The completions that have ended since the last call. Raises `EngineError`."""
        if not self._answers:
            return []
        try:
            changed = self.server.weight_version() != self.engine.version
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
            ended += [EndedCompletion(number, place, *drawn) for place, drawn in enumerate(sampled)]
        return ended

    def _ask(self, number: int) -> None:
        if not self._sent:
            self._heard = time.monotonic()
        request = self._open[number]
        future = self._send(body(self.engine.model, request, request.settings or self.settings))
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
            self.engine.have_weights()
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
