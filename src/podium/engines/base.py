"""The interface of rollout engines and of what happens between turns, and the making of groups from sampled ids."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice
from typing import NamedTuple, Protocol

from torch import nn
from transformers import PreTrainedTokenizerBase

from podium.errors import AgentError, PodiumError
from podium.models.forward import Precision
from podium.models.turns import parse_turn, parses_turns
from podium.records import Completion, Finish, Group, Prompt, RolloutRequest, SamplingSettings, Turn

Sampled = tuple[list[int], list[float]]
"""Token ids of one completion, and the log-probabilities of those that were drawn."""


class Ended(NamedTuple):
    """A completion that has ended."""

    request: int
    """As `submit` gave it."""
    place: int
    """Number of the completion within its request."""
    token_ids: list[int]
    logps: list[float]


class Answer(NamedTuple):
    """Tokens that follow a turn of completion `completion` of prompt `prompt`, both by their places."""

    prompt: int
    completion: int
    token_ids: tuple[int, ...]
    """Replies and the beginning of the next turn, behind the last token that was drawn."""
    over: bool
    """Whether the completion ends here, without another turn."""


class Episodes(Protocol):
    """Completions of several turns between their turns: tools run, environments answer."""

    @abstractmethod
    def ended(self, prompt: int, completion: int, token_ids: Sequence[int]) -> None:
        """Begin with what follows a turn that has ended; returns at once.

        Args:
            prompt: index into the prompts given to `generate`.
            completion: index into the prompt's completions.
            token_ids: all tokens of the completion so far, given ones included.
        """

    @abstractmethod
    def answers(self, *, at_least: int) -> list[Answer]:
        """The answers that were not taken yet, by prompt and completion; waits until there are `at_least` so many."""

    @abstractmethod
    def finished(self, prompt: int, completion: int) -> tuple[tuple[Turn, ...], Finish]:
        """The turns of a completion, and why it ended."""


class EngineSession(Protocol):
    """Requests that an engine samples, of which new ones may come at any time; one thread at a time."""

    apart: bool
    """Whether what a request draws does not depend on what is sampled beside it, nor on when."""

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

    def poll(self) -> list[Ended]:
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
    """Turns prompts into groups of completions; a class inherits from it what engines are and do by default."""

    name: str = ""
    """As `rollout_engine` names it."""
    own_weights: bool = False
    """Whether it samples from a copy of the policy, which only `sync` renews, so that the policy may move meanwhile."""
    processed_logps: bool = False
    """Whether its log-probabilities are those of the distribution that is drawn from, after all filters."""
    interleaves: bool = False
    """Whether turns of different completions are drawn side by side, in a `session`; else all that wait together."""
    casts_weights: bool = False
    """Whether it computes in half precision whatever training does."""
    precision: Precision = contextlib.nullcontext

    tokenizer: PreTrainedTokenizerBase

    def session(
        self, settings: SamplingSettings, expected: Sequence[RolloutRequest], *, keeps: bool = False
    ) -> contextlib.AbstractContextManager[EngineSession]:
        """Requests that may come at any time, for as long as the context is entered.

        Args:
            settings: of requests that have none of their own.
            expected: the requests that will come, or some like them.
            keeps: whether requests will continue completions that have ended.

        Raises:
            AgentError: it takes no requests while it samples.
        """
        raise takes_no_requests(self.name, AgentError)

    def generate(
        self,
        prompts: Sequence[Prompt],
        settings: SamplingSettings,
        *,
        policy_step: int = 0,
        episodes: Episodes | None = None,
        own_prompts: Sequence[Sequence[Prompt]] | None = None,
        begun: Sequence[Sampled] | None = None,
    ) -> list[Group]:
        """One group per prompt, in order, sampled from the weights as they are now.

        Args:
            prompts: one for each group.
            settings: of the round.
            policy_step: optimizer steps that the weights have taken.
            episodes: continues completions after a turn; None: every completion is one turn.
            own_prompts: of each group's completions, where environments made them differ.
            begun: the first turn of every completion of `episodes`, where it was drawn elsewhere.
        """
        if not prompts:
            return []
        requests = first_requests(prompts, settings, own_prompts)
        if episodes is None:
            by_request = self.sample(requests, settings)
        else:
            by_request = play(self, requests, settings, episodes, begun)
        flat = [*chain(*by_request)]
        count = settings.num_completions
        sampled = [flat[start : start + count] for start in range(0, len(flat), count)]
        return make_groups(prompts, sampled, self.tokenizer, settings, policy_step, episodes, own_prompts)

    @abstractmethod
    def sample(self, requests: Sequence[RolloutRequest], settings: SamplingSettings) -> list[list[Sampled]]:
        """One turn of every completion of every request, in order."""

    def any_continues(self, count: int) -> bool:
        """Whether this process has completions to continue, `count` of them, or one that must call `sample` with it."""
        return count > 0

    def sync(self, policy: nn.Module, version: int) -> None:
        """Take the policy's weights as they are now, after `version` optimizer steps; until the next call they stay."""
        return

    def interrupt(self) -> None:
        """Have `generate`, in another thread, raise `Interrupted` soon and until the next `sync`, if it can."""
        return


class Interrupted(Exception):
    """Sampling was given up: its completions are no longer wanted."""


class Turns:
    """A session of an engine that draws whole turns: what was submitted is drawn together, in one call of `sample`."""

    apart = False
    is_decoding = False

    def __init__(self, engine: RolloutEngine, settings: SamplingSettings) -> None:
        self.engine = engine
        self.settings = settings
        self._count = 0
        self._waiting: dict[int, RolloutRequest] = {}
        self._ended: list[Ended] = []

    @property
    def max_rows(self) -> int:
        return sum(request.num_completions for request in self._waiting.values())

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
            Ended(number, place, token_ids, logps)
            for number, completions in zip(waiting, sampled, strict=True)
            for place, (token_ids, logps) in enumerate(completions)
        ]

    def poll(self) -> list[Ended]:
        ended = self._ended
        self._ended = []
        return ended


def play(
    engine: RolloutEngine,
    requests: Sequence[RolloutRequest],
    settings: SamplingSettings,
    episodes: Episodes,
    begun: Sequence[Sampled] | None = None,
) -> list[list[Sampled]]:
    """Completions of several turns, by request: draw a turn, have it answered, go on behind the answer.

    Where the engine interleaves, no token is computed twice, and tools run while other rows decode. `begun`: the first
    turns, where they were drawn elsewhere.
    """
    alone = singles(requests)
    sampled: list[Sampled] = [([], []) for _ in alone]
    between: dict[int, Ended | None] = {}
    """Completions whose turn has ended and is not answered yet; None: it was drawn elsewhere."""

    def end(i: int, token_ids: Sequence[int], logps: Sequence[float], ended: Ended | None) -> None:
        between[i] = ended
        sampled[i][0].extend(token_ids)
        sampled[i][1].extend(logps)
        episodes.ended(*divmod(i, settings.num_completions), sampled[i][0])

    with _turns(engine, settings, requests) as session:
        first: dict[int, int] = {}
        if begun is None:
            firsts = accumulate((request.num_completions for request in requests), initial=0)
            first = {session.submit(request): i for request, i in zip(requests, firsts, strict=False)}
        for i, (token_ids, logps) in enumerate(begun or ()):
            end(i, token_ids, logps, None)
        while engine.any_continues(session.is_busy + len(between)):
            session.step()
            for ended in session.poll():
                end(first[ended.request] + ended.place, ended.token_ids, ended.logps, ended)
            for answer in _answers(session, settings, episodes, len(between)):
                i = answer.prompt * settings.num_completions + answer.completion
                before = between.pop(i)
                sampled[i][0].extend(answer.token_ids)
                if not answer.over:
                    first[session.submit(continuation(alone[i], sampled[i][0]))] = i
                elif before is not None:
                    session.cancel(before.request, before.place)
    groups = iter(sampled)
    return [[*islice(groups, request.num_completions)] for request in requests]


def _turns(
    engine: RolloutEngine, settings: SamplingSettings, requests: Sequence[RolloutRequest]
) -> contextlib.AbstractContextManager[EngineSession]:
    """The session in which an engine draws turns."""
    if engine.interleaves:
        return engine.session(settings, requests, keeps=True)
    return contextlib.nullcontext(Turns(engine, settings))


def _answers(session: EngineSession, settings: SamplingSettings, episodes: Episodes, between: int) -> list[Answer]:
    """The answers that completions go on behind now, of the `between` turns that have ended.

    All turns are answered before any goes on, unless completions go on in the order of their answers.
    """
    if not between or (session.is_decoding and not settings.in_order_of_answers):
        return []
    if settings.in_order_of_answers:
        return episodes.answers(at_least=0 if session.is_decoding else 1)
    return episodes.answers(at_least=between)


def first_requests(
    prompts: Sequence[Prompt], settings: SamplingSettings, own_prompts: Sequence[Sequence[Prompt]] | None = None
) -> list[RolloutRequest]:
    """A request for each prompt; for each completion where their prompts differ within a group."""
    if own_prompts is None:
        count = settings.num_completions
        most = settings.max_tokens
        return [
            RolloutRequest(token_ids=x.token_ids, prompt_id=x.id, num_completions=count, max_tokens=most)
            for x in prompts
        ]
    return [
        RolloutRequest(token_ids=x.token_ids, prompt_id=x.id, completion=g, max_tokens=settings.max_tokens)
        for group in own_prompts
        for g, x in enumerate(group)
    ]


def singles(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    """A request for each completion."""
    return [
        replace(request, completion=request.completion + g, num_completions=1)
        for request in requests
        for g in range(request.num_completions)
    ]


def continuation(request: RolloutRequest, token_ids: Sequence[int]) -> RolloutRequest:
    """The request for the next turn of a request's only completion, whose tokens so far are `token_ids`."""
    assert len(token_ids) < request.max_tokens, "no room for a token of the next turn"
    return replace(
        request,
        token_ids=(*request.token_ids, *token_ids),
        max_tokens=request.max_tokens - len(token_ids),
        position=request.position + len(token_ids),
    )


def make_groups(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[Sampled]],
    tokenizer: PreTrainedTokenizerBase,
    settings: SamplingSettings,
    policy_step: int,
    episodes: Episodes | None = None,
    own_prompts: Sequence[Sequence[Prompt]] | None = None,
) -> list[Group]:
    """Groups from `sampled[p][g] = (token_ids, logps)`.

    Without `episodes` a completion that ends in an end token or a stop text has stopped; else its episode says why it
    ended. If the tokenizer has a response template, an answer in a conversation is parsed, as in TRL: its content is
    without the reasoning.
    """
    ids = [token_ids for group in sampled for token_ids, _ in group]
    texts = iter(tokenizer.batch_decode(ids, skip_special_tokens=True))

    def completion(p: int, g: int, token_ids: list[int], logps: list[float]) -> Completion:
        text = next(texts)
        stopped: Finish = "stop" if settings.has_ended(token_ids, text) else "length"
        turns, finish = ((), stopped) if episodes is None else episodes.finished(p, g)
        if episodes is None and prompts[p].is_chat and parses_turns(tokenizer):
            message = parse_turn(tokenizer, token_ids, prefix=prompts[p].token_ids)
            turns = (Turn(start=0, stop=len(token_ids), message=message),)
        return Completion(
            token_ids=tuple(token_ids),
            logps=tuple(logps),
            finish=finish,
            text=text,
            policy_step=policy_step,
            turns=turns,
            prompt=None if own_prompts is None else own_prompts[p][g],
        )

    return [
        Group(prompt=prompt, completions=tuple(completion(p, g, *each) for g, each in enumerate(group)))
        for p, (prompt, group) in enumerate(zip(prompts, sampled, strict=True))
    ]
