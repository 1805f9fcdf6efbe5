"""`use_vllm` with `vllm_mode: server`: completions of a `vllm serve`, from weights that are known to be the policy's.

    engine.sync(policy, version=step)         once a round: sends the weights if they have changed
    engine.generate(prompts, settings, ...)   touches nothing of the policy
    engine.session(settings)                  the same, with requests that may come at any time

Every set of weights that is sent has a version, which the server keeps with them. It is asked for it before and after
each generation: a server that was restarted gets the weights again, one that serves another run's ends this one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from podium.engines.vllm.server import Server, ServerGone
from podium.engines.vllm.session import ServedWeights, ServerSession
from podium.engines.vllm.transfer import LOADING, Transfer
from podium.engines.vllm.weights import PREFIX, SyncedEngine
from podium.errors import EngineError
from podium.records import RolloutRequest, SamplingSettings

logger = logging.getLogger(__name__)


class ServerEngine(SyncedEngine):
    """A vLLM server."""

    interleaves = True
    apart = True

    def __init__(
        self,
        server: Server,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        transfer: Transfer,
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
        self._unwanted = threading.Event()

    def sync(self, policy: nn.Module, version: int) -> None:
        """Send the policy's weights, unless they are those that were sent last. All processes call it."""
        self._unwanted.clear()
        super().sync(policy, version)

    def bring(self, policy: nn.Module) -> None:
        """See `SyncedEngine`."""
        with resumable(self.newest_checkpoint):
            try:
                self.transfer.bring(policy, self._version, here=self._is_main)
            except ServerGone as gone:
                logger.warning("%s", gone)
                self.server.wait()
                self.transfer.again(self._version)
        self._agree(None)  # a barrier: sampling waits until they are there

    def interrupt(self) -> None:
        """At the next look at the server."""
        self._unwanted.set()

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
            weights = ServedWeights(self._version, self._have_weights)
            yield ServerSession(self.server, self.model, send, settings, weights, self._unwanted)

    def _have_weights(self) -> None:
        """The server's weights are those of the last `sync`, now."""
        found = self.server.weight_version()
        if found == self._version:
            return
        if not self._version:
            raise EngineError("Nothing was sent to the vLLM server yet: `sync` comes before `generate`.")
        if found.startswith(PREFIX) and not found.startswith(f"{PREFIX}{self._run}"):
            raise EngineError(
                f"The weights of the vLLM server at {self.server.url} are {found}, those of another run; "
                f"ours are {self._version}. Two runs cannot share a server: start one for each "
                "(vllm_server_port).",
                settings=("vllm_server_port",),
                url=self.server.url,
                found=found,
                version=self._version,
            )
        if found != self._version + LOADING:
            logger.warning(
                "The vLLM server at %s has weights %r, not %r: it was restarted, or somebody changed them. "
                "Sending them again.",
                self.server.url,
                found,
                self._version,
            )
        self.transfer.again(self._version)


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
