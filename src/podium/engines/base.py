"""The interface of rollout engines, and the loop in which rollouts are drawn.

A rollout is a generator: it yields the requests that it asks, is sent what was drawn for each, and returns its
completion. `play` is the only loop, for a completion of one turn as for a program's conversations.

    def one_turn(...) -> Rollout:
        drawn = yield [request]
        return Completion(token_ids=tuple(drawn.token_ids), ...)

    completions = play(engine, settings, [one_turn(...), one_turn(...)], requests)
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from podium.errors import PodiumError
from podium.models.candidates import of_completion
from podium.models.forward import Precision
from podium.models.turns import parse_turn, parses_turns
from podium.records import Completion, Finish, GivenImages, Group, Prompt, RolloutRequest, SamplingSettings, Turn


class Sampled(NamedTuple):
    """Drawn tokens of one completion, with their log-probabilities."""

    token_ids: list[int]
    logps: list[float]
    candidates: list[np.ndarray] | None = None
    """As `Completion.candidates`."""


class EndedCompletion(NamedTuple):
    """A completion that has ended."""

    request: int
    """As `submit` gave it."""
    place: int
    """Number of the completion within its request."""
    token_ids: list[int]
    logps: list[float]
    candidates: list[np.ndarray] | None = None
    """As `Completion.candidates`."""


class Drawn(NamedTuple):
    """Tokens that an engine has drawn for a request of a rollout."""

    request: RolloutRequest
    """As the rollout yielded it."""
    token_ids: list[int]
    logps: list[float]
    seconds: float = 0.0
    """From the submission until the last token was there; not that in which other rollouts were waited for."""
    candidates: list[np.ndarray] | None = None
    """As `Completion.candidates`."""


Rollout = Generator[Sequence[RolloutRequest], Drawn, Completion]
"""A completion in the making: yields the requests that it asks now, each for one completion, and none where it waits
for what it asked before; is sent what was drawn for one of them at a time; returns the completion."""


class EngineSession(Protocol):
    """Requests that an engine samples, of which new ones may come at any time; one thread at a time."""

    @property
    def max_rows(self) -> int:
        """Completions that may be running or kept."""

    @property
    def is_busy(self) -> bool:
        """Whether there are completions that `poll` has not given."""

    @property
    def is_decoding(self) -> bool:
        """Whether completions are being drawn, to which others may come."""

    def submit(self, request: RolloutRequest) -> int:
        """Let a request wait for its completions; their id."""

    def cancel(self, request: int, place: int | None = None) -> None:
        """Stop a request or one of its completions, and keep nothing of it."""

    def step(self) -> None:
        """Sample for a moment."""

    def poll(self) -> list[EndedCompletion]:
        """The completions that have ended since the last call, in the order in which they ended."""


def takes_no_requests(engine: str, kind: type[PodiumError]) -> PodiumError:
    """The error of an agent with an engine that takes no requests while it samples."""
    return kind(
        "An agent needs an engine that takes requests while it samples: the live engine, or a vLLM "
        f"server; here {engine} samples.",
        code="C065",
        fix="rollout_engine: live, or vllm_mode: server",
        settings=("agent", "rollout_engine", "use_vllm", "vllm_mode"),
        engine=engine,
    )


class RolloutEngine(Protocol):
    """Draws completions in sessions; a class inherits from it what engines are and do by default."""

    name: str = ""
    """As `rollout_engine` names it."""
    own_weights: bool = False
    """Whether it samples from a copy of the policy, which only `sync` renews, so that the policy may move meanwhile."""
    processed_logps: bool = False
    """Whether its log-probabilities are those of the distribution that is drawn from, after all filters."""
    interleaves: bool = False
    """Whether a `session` takes requests while others are drawn; else all that wait are drawn together."""
    apart: bool = False
    """Whether what a request draws does not depend on what is sampled beside it, nor on when."""
    casts_weights: bool = False
    """Whether it computes in half precision whatever training does."""
    precision: Precision = contextlib.nullcontext

    tokenizer: PreTrainedTokenizerBase

    @property
    def returns_candidates(self) -> bool:
        """Whether its completions have their candidates, where these are asked for."""
        return True

    def session(
        self, settings: SamplingSettings, expected: Sequence[RolloutRequest], *, keeps: bool = False
    ) -> contextlib.AbstractContextManager[EngineSession]:
        """Requests that may come for as long as the context is entered.

        Args:
            settings: of requests that have none of their own.
            expected: the requests that will come, or some like them.
            keeps: whether requests will continue completions that have ended.
        """
        return contextlib.nullcontext(WholeTurns(self, settings))

    def sample(self, requests: Sequence[RolloutRequest], settings: SamplingSettings) -> list[list[Sampled]]:
        """Every completion of every request, in order; what the default `session` draws with."""
        what = f"{type(self).__name__} has a session of its own, which draws"
        raise NotImplementedError(what)

    def generate(self, prompts: Sequence[Prompt], settings: SamplingSettings, *, policy_step: int = 0) -> list[Group]:
        """One group per prompt, in order, of completions of one turn, sampled from the weights as they are now.

        Args:
            prompts: one for each group.
            settings: of the round.
            policy_step: optimizer steps that the weights have taken.
        """
        requests = first_requests(prompts, settings)
        rollouts = [
            one_turn(prompt, replace(request, completion=g, num_completions=1), settings, self.tokenizer, policy_step)
            for prompt, request in zip(prompts, requests, strict=True)
            for g in range(settings.num_completions)
        ]
        completions = iter(play(self, settings, rollouts, requests))
        return [
            Group(prompt=prompt, completions=(*islice(completions, settings.num_completions),)) for prompt in prompts
        ]

    def any_continues(self, count: int) -> bool:
        """Whether this process has requests to draw, `count` of them, or one that must draw together with it."""
        return count > 0

    def sync(self, policy: nn.Module, version: int) -> None:
        """Take the policy's weights as they are now, after `version` optimizer steps; until the next call they stay."""
        return

    def snapshot(self, policy: nn.Module, version: int) -> Callable[[], None]:
        """Keep the policy's weights as they are now while earlier ones are sampled from, with `own_weights` alone.

        Returns the function that makes them those of the engine, to be called between two rounds; a function that is
        never called changes nothing.
        """
        raise AssertionError(f"{self.name} has no weights of its own")

    def interrupt(self) -> None:
        """Have sampling in another thread raise `Interrupted` soon and until the next `sync`, if it can."""
        return


class Interrupted(Exception):
    """Sampling was given up: its completions are no longer wanted."""


class WholeTurns:
    """A session of an engine that draws whole turns: what was submitted is drawn together, in one call of `sample`."""

    is_decoding = False
    max_rows = sys.maxsize

    def __init__(self, engine: RolloutEngine, settings: SamplingSettings) -> None:
        self.engine = engine
        self.settings = settings
        self._count = 0
        self._waiting: dict[int, RolloutRequest] = {}
        self._ended: list[EndedCompletion] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._ended)

    def submit(self, request: RolloutRequest) -> int:
        self._count += 1
        self._waiting[self._count] = request
        return self._count

    def cancel(self, request: int, place: int | None = None) -> None:
        self._waiting.pop(request, None)

    def step(self) -> None:
        waiting = self._waiting
        self._waiting = {}
        sampled = self.engine.sample([*waiting.values()], self.settings)
        self._ended += [
            EndedCompletion(number, place, *drawn)
            for number, completions in zip(waiting, sampled, strict=True)
            for place, drawn in enumerate(completions)
        ]

    def poll(self) -> list[EndedCompletion]:
        ended = self._ended
        self._ended = []
        return ended


# ---- requests ----


def first_requests(prompts: Sequence[Prompt], settings: SamplingSettings) -> list[RolloutRequest]:
    """A request for the completions of each prompt."""
    return [
        RolloutRequest(
            token_ids=prompt.token_ids,
            prompt_id=prompt.id,
            num_completions=settings.num_completions,
            max_tokens=settings.max_tokens,
            images=prompt.images,
        )
        for prompt in prompts
    ]


def grouped(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    """The requests with one for neighbouring completions of a prompt whose first tokens are alike.

    Those are computed once, and random numbers depend on the number of the completion alone.
    """
    groups: list[RolloutRequest] = []
    for request in requests:
        last = groups[-1] if groups else request
        follows = last.completion + last.num_completions == request.completion and not (
            request.position or request.turn
        )
        if follows and replace(request, completion=last.completion, num_completions=last.num_completions) == last:
            groups[-1] = replace(last, num_completions=last.num_completions + request.num_completions)
        else:
            groups.append(request)
    return groups


def continuation(
    request: RolloutRequest, token_ids: Sequence[int], images: Sequence[GivenImages] = ()
) -> RolloutRequest:
    """The request for the next turn of a completion that `request` began, whose tokens so far are `token_ids`, with
    images among them."""
    assert len(token_ids) < request.max_tokens, "no room for a token of the next turn"
    return replace(
        request,
        token_ids=(*request.token_ids, *token_ids),
        max_tokens=request.max_tokens - len(token_ids),
        position=request.position + len(token_ids),
        images=(*request.images, *images),
    )


# ---- rollouts ----


def one_turn(
    prompt: Prompt,
    request: RolloutRequest,
    settings: SamplingSettings,
    tokenizer: PreTrainedTokenizerBase,
    policy_step: int,
) -> Rollout:
    """A completion without anything between turns, which has stopped with an end token or a stop text.

    If the tokenizer has a response template, an answer in a conversation is parsed, as in TRL: its content is without
    the reasoning. `policy_step`: optimizer steps that the weights have taken.
    """
    drawn = yield [request]
    token_ids = tuple(drawn.token_ids)
    text = str(tokenizer.decode(drawn.token_ids, skip_special_tokens=True))
    finish: Finish = "stop" if settings.has_ended(token_ids, text) else "length"
    turns: tuple[Turn, ...] = ()
    if prompt.is_chat and parses_turns(tokenizer):
        message = parse_turn(tokenizer, drawn.token_ids, prefix=prompt.token_ids)
        turns = (Turn(start=0, stop=len(token_ids), message=message),)
    return Completion(
        token_ids=token_ids,
        logps=tuple(drawn.logps),
        finish=finish,
        text=text,
        policy_step=policy_step,
        turns=turns,
        candidates=of_completion(drawn.candidates or (), len(token_ids)),
    )


def play(
    engine: RolloutEngine,
    settings: SamplingSettings,
    rollouts: Sequence[Rollout],
    expected: Sequence[RolloutRequest],
    *,
    threads: int = 0,
    at_a_time: int | None = None,
) -> list[Completion]:
    """The completions of rollouts, in order.

    Requests go to the engine once every rollout has asked or ended and nothing decodes, in the order of the rollouts:
    batches, and with them the last bits of log-probabilities, do not depend on how long tools take. With
    `settings.in_order_of_answers`, or where the engine computes each request apart, they go as soon as they are asked.

    Args:
        engine: draws.
        settings: of the round.
        rollouts: generators that have not begun. They are closed whatever happens, by their thread where one is busy.
        expected: the first requests, or some like them: memory is shared out by these.
        threads: in which rollouts go on between turns; 0: each has one turn, and goes on here.
        at_a_time: rollouts that have begun and not ended; None: all begin at once and are waited for, so that first
            requests of a prompt are drawn as one by every engine.

    Raises whatever a rollout or the engine does.
    """
    if not rollouts:
        return []
    if never := {given.placeholder for request in expected for given in request.images}:
        settings = replace(settings, never=tuple(never.union(settings.never)))
    runs = [_Run(i, rollout) for i, rollout in enumerate(rollouts)]
    pool: Executor = ThreadPoolExecutor(threads, thread_name_prefix="podium-rollouts") if threads else _Here()
    try:
        with engine.session(settings, expected, keeps=threads > 0) as session:
            by_itself = settings.in_order_of_answers or engine.apart
            playing = _Playing(session, runs, pool, at_a_time, groups=not engine.apart or at_a_time is None)
            playing.go_on(by_itself=by_itself and at_a_time is not None)
            while engine.any_continues(len(playing.drawing) + len(playing.going)):
                session.step()
                if threads or not session.is_decoding:  # a server is asked for its version at each look
                    playing.deliver(session.poll())
                playing.go_on(by_itself=by_itself)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for run in runs:
            if run.going is None:
                run.rollout.close()
            else:
                run.going.add_done_callback(run.close)
    return [run.completion for run in runs if run.completion is not None]


class _Here(Executor):
    """Runs what it is given in the calling thread."""

    def submit(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*given, **named))
        return done


@dataclass(slots=True, eq=False)
class _Run:
    """A rollout in play."""

    index: int
    rollout: Rollout
    going: Future[None] | None = None
    """Its thread; None: it waits."""
    asked: list[RolloutRequest] = field(default_factory=list)
    """Requests that were not submitted yet."""
    drawn: deque[Any] = field(default_factory=lambda: deque([None]))
    """Values to send it, in order; None begins it."""
    num_drawing: int = 0
    numbers: set[int] = field(default_factory=set)
    """Numbers of the completions that it has requested."""
    completion: Completion | None = None
    """Once it has ended."""

    def advance(self) -> None:
        """Send the rollout what was drawn for it."""
        try:
            while self.drawn:
                self.asked += self.rollout.send(self.drawn.popleft())
        except StopIteration as end:
            self.completion = end.value

    def close(self, _: Any) -> None:
        """End a rollout that was given up, when its thread is done."""
        self.rollout.close()


class _Playing:
    """Rollouts and their requests: waiting, being drawn, and kept by the session."""

    def __init__(
        self, session: EngineSession, runs: Sequence[_Run], pool: Executor, at_a_time: int | None, *, groups: bool
    ) -> None:
        """`groups`: whether first requests of a prompt are drawn as one."""
        self.session = session
        self.runs = runs
        self.pool = pool
        self.at_a_time = at_a_time
        self.groups = groups
        self.waiting = deque(runs)
        self.num_begun = 0
        """Rollouts that have begun and not ended."""
        self.due: dict[int, _Run] = {}
        """Rollouts that something was drawn for, or that are to begin."""
        self.going: dict[Future[None], _Run] = {}
        self.asking: dict[int, _Run] = {}
        self.finished: list[_Run] = []
        """Rollouts that have ended and are still in the session."""
        self.drawing: dict[tuple[int, int], tuple[_Run, RolloutRequest]] = {}
        """By the session's request and the place in it."""
        self.submitted: dict[int, float] = {}
        """When each request of the session was submitted, by `time.perf_counter`."""
        self.kept: dict[tuple[int, int], tuple[int, int]] = {}
        """Places in the session that wait to be continued, by the rollout and the number of the completion."""

    def go_on(self, *, by_itself: bool) -> None:
        """Submit what rollouts ask when it is time; waits for them where nothing decodes.

        `by_itself`: whether a rollout goes on without the others.
        """
        self._take()
        while self.going and not (self.session.is_decoding or (by_itself and self.asking)):
            wait(self.going, return_when=FIRST_COMPLETED)
            self._take()
        if by_itself or not self.session.is_decoding:
            self._submit()

    def deliver(self, ended: Sequence[EndedCompletion]) -> None:
        """Send rollouts what was drawn for them."""
        for done in ended:
            run, request = self.drawing.pop((done.request, done.place))
            run.num_drawing -= 1
            self.kept[run.index, request.completion] = done.request, done.place
            seconds = time.perf_counter() - self.submitted[done.request]
            run.drawn.append(Drawn(request, done.token_ids, done.logps, seconds, done.candidates))
            if run.going is None and run.completion is None:
                self.due[run.index] = run

    def _take(self) -> None:
        """Take what threads have brought, and have rollouts go on; others begin in place of those that have ended."""
        for future in [future for future in self.going if future.done()]:
            future.result()
            run = self.going.pop(future)
            run.going = None
            if run.completion is not None:
                self.finished.append(run)
                self.num_begun -= 1
            elif run.drawn:
                self.due[run.index] = run
            elif run.asked:
                self.asking[run.index] = run
            elif not run.num_drawing:
                raise RuntimeError("a rollout asks for nothing, and waits for nothing")
        while self.waiting and (self.at_a_time is None or self.num_begun < self.at_a_time):
            self.num_begun += 1
            run = self.waiting.popleft()
            self.due[run.index] = run
        for run in self.due.values():
            run.going = self.pool.submit(run.advance)
            self.going[run.going] = run
        self.due = {}

    def _submit(self) -> None:
        """Submit all that is asked, and take what is kept of rollouts that have ended out of the session."""
        finished = [(run.index, number) for run in self.finished for number in run.numbers]
        for place in [self.kept.pop(key) for key in finished if key in self.kept]:
            self.session.cancel(*place)
        if any(run.num_drawing for run in self.finished):
            for place in [key for key, (run, _) in self.drawing.items() if run.completion is not None]:
                self.session.cancel(*place)
                del self.drawing[place]
        self.finished = []
        asked = [(run, request) for _, run in sorted(self.asking.items()) for request in run.asked]
        for run, request in asked:
            run.num_drawing += 1
            run.numbers.add(request.completion)
            run.asked = []
            before = self.kept.pop((run.index, request.completion), None)
            if before is not None and not (request.position or request.turn):  # else the session continues it
                self.session.cancel(*before)
        self.asking = {}
        self._make_room(len(asked))
        requests = [request for _, request in asked]
        members = iter(asked)
        for request in grouped(requests) if self.groups else requests:
            number = self.session.submit(request)
            self.submitted[number] = time.perf_counter()
            self.drawing |= {(number, g): next(members) for g in range(request.num_completions)}

    def _make_room(self, more: int) -> None:
        """Cancel the sequences that were kept longest, as far as places are needed.

        Those of a rollout between two turns stay: it will continue them.
        """
        excess = len(self.drawing) + len(self.kept) + more - self.session.max_rows
        if excess > 0:
            for key in [key for key in self.kept if self.runs[key[0]].going is None][:excess]:
                self.session.cancel(*self.kept.pop(key))
