"""Engines of `use_vllm`, and the one of `vllm_mode: server`: `vllm serve`, with weights known to be the policy's.

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from podium.engines.base import EndedCompletion, Interrupted, RolloutEngine
from podium.engines.vllm.requests import call_of, image_parts, read
from podium.engines.vllm.server import (
    MOST_CONNECTIONS,
    NEEDS_TOP_K,
    Send,
    ServerGone,
    ServerRefused,
    VllmServer,
    first_up,
)
from podium.engines.vllm.weights import LOADING, PREFIX, Transfer
from podium.errors import ConfigError, EngineError, PodiumError
from podium.errors.texts import listed
from podium.records import GivenImages, RolloutRequest, SamplingSettings

logger = logging.getLogger(__name__)

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
        self._run = agree(uuid.uuid4().hex[:8])
        self._count = 0
        self._sent: tuple[int, int] | None = None
        self._newest: tuple[tuple[int, int] | None, str] = None, ""
        """The state of the policy that was given last, and its version."""
        self.version = ""
        """Of the weights that were brought last; empty: none were."""

    @property
    def returns_candidates(self) -> bool:
        """See `engines.base.RolloutEngine`."""
        return False

    def sync(self, policy: nn.Module, version: int) -> None:
        """Bring the policy's weights, unless they are those that were brought last. All processes call it."""
        if (state := (version, _changes(policy))) == self._sent:
            return
        self.version = self._next_version(version)
        self._newest = state, self.version
        self.bring(policy)
        self._sent = state

    def _next_version(self, taken: int) -> str:
        """Name the weights after `taken` optimizer steps."""
        self._count += 1
        return str(self._agree(f"{PREFIX}{self._run}-{self._count}-step-{taken}"))

    @abstractmethod
    def bring(self, policy: nn.Module) -> None:
        """Make the policy's weights the engine's, under the version that has been set."""


def _changes(policy: nn.Module) -> int:
    """A number that grows whenever a parameter is written to, by an optimizer or by anyone else."""
    return sum(p._version for p in policy.parameters())


@dataclass(eq=False)
class Member:
    """A server of the pool that a run samples from."""

    server: VllmServer
    model: str
    """The name that it serves."""
    transfer: Transfer
    up: bool = True
    """Whether it takes part in the round."""

    def have_weights(self, engine: ServerEngine) -> None:
        """Send the weights of the last `sync` again, unless the server has them. Raises `EngineError`."""
        found = self.transfer.version_at(self.server)
        if found == engine.version:
            return
        if not engine.version:
            raise EngineError("Nothing was sent to the vLLM server yet: `sync` comes before `generate`.")
        if found.startswith(PREFIX) and not found.startswith(engine.prefix):
            raise EngineError(
                f"The weights of the vLLM server at {self.server.url} are {found}, those of another run; "
                f"ours are {engine.version}. Two runs cannot share a server: start one for each "
                "(vllm_server_port).",
                settings=("vllm_server_port",),
                url=self.server.url,
                found=found,
                version=engine.version,
            )
        if found != engine.version + LOADING:
            logger.warning(
                "The vLLM server at %s has weights %r, not %r: it was restarted, or somebody changed them. "
                "Sending them again.",
                self.server.url,
                found,
                engine.version,
            )
        self.transfer.again(self.server, engine.version)


class ServerEngine(SyncedEngine):
    """One vLLM server, or a pool of them."""

    interleaves = True
    apart = True

    def __init__(
        self,
        members: Sequence[Member],
        tokenizer: PreTrainedTokenizerBase,
        *,
        absent: Sequence[VllmServer] = (),
        join: Callable[[VllmServer], Member] | None = None,
        is_main: bool = True,
        agree: Callable[[Any], Any] = lambda value: value,
        casts_weights: bool = True,
        newest_checkpoint: Callable[[], Path | None] = lambda: None,
    ) -> None:
        """Begin with the servers that are there.

        Args:
            members: at least one.
            tokenizer: the policy's.
            absent: servers that may come later.
            join: checks one that came. Raises `PodiumError` where it does not fit.
            is_main: whether this process sends weights.
            agree: gives the first process's value on every process.
            casts_weights: see `engines.base.RolloutEngine`.
            newest_checkpoint: of the run, for messages.
        """
        super().__init__(agree)
        self.members = [*members]
        self.absent = [*absent]
        self.join = join
        self.tokenizer = tokenizer
        self.casts_weights = casts_weights
        self.newest_checkpoint = newest_checkpoint
        self._is_main = is_main
        self.unwanted = threading.Event()
        """Set when completions are no longer wanted."""

    @property
    def prefix(self) -> str:
        """The beginning of all versions of this run."""
        return f"{PREFIX}{self._run}"

    @property
    def returns_candidates(self) -> bool:
        """See `engines.base.RolloutEngine`."""
        return all(member.server.returns_masks for member in self.present)

    @property
    def present(self) -> list[Member]:
        """The servers that take part in the round."""
        return [member for member in self.members if member.up]

    def sync(self, policy: nn.Module, version: int) -> None:
        """Send the policy's weights, unless they are those that were sent last. All processes call it."""
        self.unwanted.clear()
        super().sync(policy, version)

    def bring(self, policy: nn.Module) -> None:
        """See `SyncedEngine`. Servers that were lost, or were not there yet, take part again if they answer now."""
        self._send(lambda member: member.transfer.bring(member.server, policy, self.version, here=self._is_main))

    def snapshot(self, policy: nn.Module, version: int) -> Callable[[], None]:
        """See `engines.base.RolloutEngine`: a file for each version, in a run of one process."""
        state = version, _changes(policy)
        if state != self._newest[0]:
            self._newest = state, self._next_version(version)
            for transfer in {member.transfer for member in self.members}:
                transfer.keep(policy, self._newest[1])
        _, word = self._newest

        def load() -> None:
            if self.version != word:
                self.version = word
                self._send(lambda member: member.transfer.again(member.server, word))
                self._sent = state

        return load

    def _send(self, send: Callable[[Member], None]) -> None:
        """Send weights to every server that answers. Raises `EngineError`."""
        with resumable(self.newest_checkpoint):
            for _ in range(TRIES):
                self._take_in()
                for member in self.present:
                    try:
                        send(member)
                    except ServerGone as gone:
                        self.lose(member, gone)
                self._agree_on_present()  # and a barrier: sampling waits until the weights are there
                if self.present:
                    return
                if self._is_main:
                    self._first_up()
            raise ServerGone(f"The vLLM server at {self.urls} died {TRIES} times while it was sent weights.")

    def _take_in(self) -> None:
        """Let servers that were lost, or had not come yet, take part if they answer now."""
        if self._is_main:
            for member in self.members:
                member.up = member.up or member.server.is_up()
        self._agree_on_present()
        came = set(self._agree([server.url for server in self.absent if self._is_main and server.is_up()]))
        for server in [server for server in self.absent if server.url in came]:
            assert self.join is not None
            try:
                self.members.append(self.join(server))
                self.absent.remove(server)
            except PodiumError as error:
                logger.warning("%s It is left out.", error.what)

    def lose(self, member: Member, why: object) -> None:
        """Leave a server out until the next weights are sent."""
        member.up = False
        count = len(self.members)
        others = f" {len(self.present)} of {count} servers are left." if count > 1 else ""
        logger.warning("%s%s", why, others)

    def wait(self) -> None:
        """Wait for a server, where none is left, and have the weights there.

        Raises:
            ServerGone: none comes back within `vllm_server_timeout` seconds.
        """
        for _ in range(TRIES):
            member = self._first_up()
            member.up = True
            try:
                member.have_weights(self)
            except ServerGone as gone:
                self.lose(member, gone)
            else:
                return
        raise ServerGone(f"The vLLM server at {self.urls} cannot be sent the weights of the round again.")

    def _first_up(self) -> Member:
        """Wait for one of the servers. Raises `ServerGone`."""
        servers = [member.server for member in self.members]
        return self.members[servers.index(first_up(servers, servers[0].seconds))]

    @property
    def urls(self) -> str:
        """The servers' addresses, in words."""
        return listed([member.server.url for member in self.members])

    def _agree_on_present(self) -> None:
        up = self._agree([member.up for member in self.members])
        for member, is_up in zip(self.members, up, strict=True):
            member.up = is_up

    def interrupt(self) -> None:
        """At the next look at the server."""
        self.unwanted.set()

    @contextlib.contextmanager
    def session(
        self, settings: SamplingSettings, expected: Sequence[RolloutRequest] = (), *, keeps: bool = False
    ) -> Iterator[ServerSession]:
        """See `engines.base.RolloutEngine`; the server's own prefix cache is what keeps sequences.

        Raises:
            EngineError: no server is left and none comes back, one is silent for `vllm_server_timeout` seconds or
                answers something else, or its weights are another run's; also inside of the context.
            ConfigError: a request asks a server for more than it can draw from.
        """
        assert settings.lengths is None, "vLLM draws no exact lengths"
        with resumable(self.newest_checkpoint), contextlib.ExitStack() as stack:
            if not self.present:  # the last one was lost since weights were sent
                self.wait()
            links = [Link(member, stack.enter_context(member.server.completing())) for member in self.members]
            yield ServerSession(self, links, settings)


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


@dataclass(eq=False)
class Link:
    """The requests of a session at one server."""

    member: Member
    send: Send
    sent: dict[int, Future[dict[str, Any]]] = field(default_factory=dict)
    """Requests without an answer, by their number."""
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Answers that were not given out."""
    heard: float = 0.0
    """When it last answered, or was first asked, by `time.monotonic`."""


class ServerSession:
    """Requests to the servers of a pool that may come at any time; see `engines.base.EngineSession`.

    All of them are sent at once, each to the server that has the fewest completions to draw; a conversation stays at
    its server. An answer is given out only after the server was asked for the version of its weights. What a server had
    that died or has other weights, and was not given out, is sampled again at the others, or there when none is left,
    with the same seeds.
    """

    def __init__(self, engine: ServerEngine, links: Sequence[Link], settings: SamplingSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.max_rows = MOST_CONNECTIONS * len(links)
        self._links = links
        self._numbers = itertools.count()
        self._open: dict[int, RolloutRequest] = {}
        """Requests whose completions were not given out."""
        self._places: dict[tuple[int, int], Link] = {}
        """The server that drew the last turn of each conversation, by prompt and completion."""
        self._done: queue.SimpleQueue[tuple[Link, int, Future[dict[str, Any]]]] = queue.SimpleQueue()
        self._parts: dict[GivenImages, list[dict[str, str]]] = {}
        """Images as they are sent, which a conversation asks again with each turn."""
        self._failures = 0
        for link in self._present:
            if why := self._without_weights(link):
                self._recover(link, why)

    @property
    def _present(self) -> list[Link]:
        return [link for link in self._links if link.member.up]

    def submit(self, request: RolloutRequest) -> int:
        """Send a request; the id of its completions."""
        number = next(self._numbers)
        self._open[number] = request
        self._ask(number)
        return number

    def cancel(self, request: int, place: int | None = None) -> None:
        """Give up a request whose completions were not given out, with all of them."""
        self._open.pop(request, None)
        for link in self._links:
            link.answers.pop(request, None)
            if future := link.sent.pop(request, None):
                future.cancel()

    @property
    def is_decoding(self) -> bool:
        """Whether there are requests without an answer."""
        return any(link.sent for link in self._links)

    @property
    def is_busy(self) -> bool:
        """Whether there are completions that `poll` has not given."""
        return bool(self._open)

    def step(self) -> None:
        """Wait a moment for answers. Raises `EngineError` and `Interrupted`."""
        if self.engine.unwanted.is_set():
            raise Interrupted
        try:
            self._take(*self._done.get(timeout=LOOK_SECONDS))
            while True:
                self._take(*self._done.get_nowait())
        except queue.Empty:
            for link in self._present:
                server = link.member.server
                if link.sent and time.monotonic() - link.heard > server.seconds:
                    silent = server.silent(len(link.sent))
                    if len(self._present) == 1:
                        raise silent from None
                    self._recover(link, silent)

    def poll(self) -> list[EndedCompletion]:
        """The completions that have ended since the last call. Raises `EngineError`."""
        ended = []
        for link in self._present:
            if not link.answers:
                continue
            if why := self._changed(link.member):
                self._recover(link, why)
                continue
            answers = link.answers
            link.answers = {}
            for number, answer in answers.items():
                request = self._open.pop(number)
                settings = self._settings_at(link.member, request)
                sampled = read(answer, request, settings, needs_top_k=link.member.server.needs_top_k)
                ended += [EndedCompletion(number, place, *drawn) for place, drawn in enumerate(sampled)]
        return ended

    def _changed(self, member: Member) -> object:
        """Return why a server's answers cannot be used; nothing where it has the weights of the round."""
        try:
            if member.transfer.version_at(member.server) == self.engine.version:
                return ""
        except ServerGone as gone:
            return gone
        return f"The weights of the vLLM server at {member.server.url} changed while it sampled; sampling again."

    def _ask(self, number: int) -> None:
        request = self._open[number]
        conversation = (request.prompt_id, request.completion)
        before = self._places.get(conversation)
        link = before if before and before.member.up else min(self._present, key=self._rows)
        self._places[conversation] = link
        member = link.member
        if not link.sent:
            link.heard = time.monotonic()
        settings = self._settings_at(member, request)
        if request.images and not member.server.keeps_images:
            raise ConfigError(
                f"A tool, an environment or a program gave images, which the vLLM server at {member.server.url} does "
                "not take.",
                code="C034",
                fix="Start it again with --enable-scale-out, as `podium check` prints it.",
            )
        if member.server.needs_top_k and not (settings.top_k or settings.greedy):
            what, fix = NEEDS_TOP_K
            raise ConfigError(f"The vLLM server at {member.server.url} {what}", code="C034", fix=f"{fix}.")
        name = member.transfer.asked(member.model, self.engine.version)
        masks = member.server.returns_masks and settings.keeps_candidates
        for images in request.images:
            if images not in self._parts:
                self._parts[images] = image_parts(images)
        parts = [part for images in request.images for part in self._parts[images]]
        call = call_of(name, request, settings, masks=masks, needs_top_k=member.server.needs_top_k, parts=parts)
        future = link.send(*call)
        link.sent[number] = future
        future.add_done_callback(lambda done: self._done.put((link, number, done)))

    def _settings_at(self, member: Member, request: RolloutRequest) -> SamplingSettings:
        """How a request's completions are drawn at a server; of one that takes no images, from all tokens."""
        settings = request.settings or self.settings
        return settings if member.server.keeps_images else replace(settings, never=())

    def _rows(self, link: Link) -> int:
        """Return the completions that a server has to draw."""
        return sum(self._open[number].num_completions for number in link.sent)

    def _take(self, link: Link, number: int, future: Future[dict[str, Any]]) -> None:
        if link.sent.get(number) is not future:  # cancelled
            return
        del link.sent[number]
        link.heard = time.monotonic()
        try:
            link.answers[number] = future.result()
        except ServerGone as gone:
            self._recover(link, gone, number)
        except ServerRefused:  # as of an adapter that a server has lost
            if not (why := self._changed(link.member)):
                raise
            self._recover(link, why, number)

    def _without_weights(self, link: Link) -> ServerGone | None:
        """Have the weights at a server; the error where it is gone."""
        try:
            link.member.have_weights(self.engine)
        except ServerGone as gone:
            return gone
        return None

    def _recover(self, link: Link, why: object, *numbers: int) -> None:
        """Sample once more what a server has not given out, and `numbers`.

        Raises:
            ServerGone: no server is left and none comes back, or this is the last of the tries.
        """
        lost = [*numbers, *link.sent, *link.answers]
        for future in link.sent.values():
            future.cancel()
        link.sent = {}
        link.answers = {}
        self.engine.lose(link.member, why)
        self._failures += 1
        if self._failures == TRIES * len(self._links):
            raise ServerGone(
                f"The vLLM server at {self.engine.urls} died or lost its weights {self._failures} times in one round."
            )
        if not self._present:
            self.engine.wait()
        for number in sorted(lost):
            self._ask(number)
