"""Episodes of a program as rollouts: what it asks at the endpoint is drawn, what was drawn is its answer.

    with Endpoint() as endpoint, program_episodes(program, endpoint, prompts, settings, ...) as episodes:
        completions = play(engine, settings, [episode.rollout() for episode in episodes], expected, ...)

A program runs in a thread of its own, and so does each of its connections; its rollout waits for them. Requests that it
makes in parallel go to the engine together: so batches, and with them the last bits of the logits, do not depend on
how long each took.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from podium.agents.chat import ChatFormat
from podium.agents.programs.program import Ending, EpisodeTask, Running
from podium.agents.programs.report import EpisodeRecord, EpisodeResult, report_round
from podium.agents.programs.server import Client, Endpoint, PendingRequest, session_over
from podium.agents.programs.sessions import Placed, ProgramSession, SessionLimits
from podium.agents.programs.wire import ApiError, Asked
from podium.agents.setup import Program, ProgramLimits, SampledGroups
from podium.engines.base import Drawn, Rollout, RolloutEngine, first_requests, play, takes_no_requests
from podium.engines.sampling import row_key
from podium.errors import AgentError
from podium.records import Group, Prompt, RolloutRequest, SamplingSettings

MOST_REQUESTS = 1000
"""Answers that a program gets where `max_turns` is not set."""
STOP_SECONDS = 0.05
"""Between two attempts to stop a program."""
SETTLE_SECONDS = {False: 0.02, True: 0.2}
"""After a request, how long others may take to come along with it; and where a program has asked in parallel."""


def program_rollouts(
    program: Program,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    *,
    chat: ChatFormat,
    limits: ProgramLimits,
    policy_step: int = 0,
    evaluation: bool = False,
) -> SampledGroups:
    """An episode for every completion of every prompt.

    Raises `AgentError` where the engine takes no requests while it samples, and where all episodes so far have failed
    or none has got an answer, which is not needed in an evaluation.
    """
    if not engine.interleaves:
        raise takes_no_requests(engine.name, AgentError)
    if not prompts:
        return SampledGroups([])
    with contextlib.ExitStack() as inside:
        episodes = inside.enter_context(
            program_episodes(
                program,
                inside.enter_context(Endpoint()),
                prompts,
                settings,
                chat=chat,
                limits=limits,
                apart=engine.apart,
                policy_step=policy_step,
            )
        )
        at_a_time = min(program.at_a_time, len(episodes))
        completions = play(
            engine,
            settings,
            [episode.rollout() for episode in episodes],
            first_requests(prompts, settings) * 2,
            threads=at_a_time,
            at_a_time=at_a_time,
        )
    records = [episode.record() for episode in episodes]
    metrics = report_round(program, records, evaluation=evaluation)
    groups = []
    for start in range(0, len(completions), settings.num_completions):
        of_prompt = tuple(completions[start : start + settings.num_completions])
        first = of_prompt[0].in_order[0].prompt  # the last branch's may hold what was drawn
        assert first is not None
        groups.append(Group(prompt=first, completions=of_prompt))
    return SampledGroups(groups, [record.result for record in records], metrics)


@contextlib.contextmanager
def program_episodes(
    program: Program,
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    *,
    chat: ChatFormat,
    limits: ProgramLimits,
    apart: bool = False,
    policy_step: int = 0,
) -> Iterator[list[ProgramEpisode]]:
    """An episode for every completion of every prompt. Behind the context no program runs and no request waits.

    `apart`: whether the engine draws the requests of each program apart from those of others.
    """
    session_limits = SessionLimits(
        settings=settings,
        context_length=limits.context_length,
        vocabulary=limits.vocabulary or len(chat.tokenizer),
        max_requests=limits.max_turns or MOST_REQUESTS,
    )
    members = [(prompt, g) for prompt in prompts for g in range(settings.num_completions)]
    episodes = [
        ProgramEpisode(
            running=program.begin(),
            client=endpoint.register(),
            session=ProgramSession(chat, session_limits, str(i)),
            prompt=prompt,
            completion=g,
            settings=settings,
            timeout=limits.timeout,
            apart=apart,
            policy_step=policy_step,
        )
        for i, (prompt, g) in enumerate(members)
    ]
    try:
        yield episodes
    finally:
        for episode in episodes:
            episode.client.close(ApiError(503, "The round is over."))
        while running := [episode for episode in episodes if episode.thread.is_alive()]:
            for episode in running:
                episode.running.stop()
            running[0].thread.join(STOP_SECONDS)
        program.tidy()


@dataclass(slots=True, kw_only=True, eq=False)
class ProgramEpisode:
    """One program from its beginning to its ending, with its client at the endpoint and its session."""

    running: Running
    client: Client
    session: ProgramSession
    prompt: Prompt
    completion: int
    """Its number in the group."""
    settings: SamplingSettings
    timeout: float | None
    """Seconds that the program may take by itself."""
    apart: bool
    policy_step: int
    thread: threading.Thread = field(init=False)
    """The program's own."""
    ending: Ending | None = None
    is_overdue: bool = False
    drawing: dict[int, tuple[PendingRequest, Placed]] = field(default_factory=dict)
    """Requests that the engine has, by the number of the completion that they draw."""

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="podium-program-episode", daemon=True)

    def rollout(self) -> Rollout:
        """Yield what the program asks, answer it with what is drawn, and return all its branches.

        What its branches have drawn is trained on together; the completion is empty where it has drawn nothing.
        """
        try:
            with self.client.changed:
                if self.client.is_open:
                    self.thread.start()
            while requests := self._next_requests():
                while self.drawing and self.ending is None:
                    self._answer((yield requests))
                    requests = []
        finally:
            # Its own requests need no answer any more; nor does a program whose round is given up.
            for _, placed in self.drawing.values():
                self.session.give_up(placed)
            self.client.close(ApiError(503, "The round is over."))
            self.running.stop()
        return self.session.completion(self.prompt, self.policy_step)

    def asked(self, request: RolloutRequest) -> Asked:
        """The program's request behind one that the engine is drawing."""
        return self.drawing[request.completion][1].asked

    def record(self) -> EpisodeRecord:
        """The facts of an episode that is over."""
        client = self.client
        ending = self.ending
        assert ending is not None, "it runs"
        return EpisodeRecord(
            row=self.prompt.row,
            result=EpisodeResult(
                reward=ending.reward,
                rewards=ending.rewards,
                problem=ending.problem,
                log=ending.log,
                capped=bool(self.session.counts["capped"]),
                seconds=client.clock.seconds,
                rejected=client.rejection,
            ),
            unread=ending.unread,
            counts=self.session.counts,
            is_answered=any(branch.turns for branch in self.session.branches),
            asked=client.asked,
            rejected=client.rejected,
            given_up=client.given_up,
            given_up_after=client.given_up_after,
            forms=frozenset(client.forms),
        )

    # ---- the program's own thread ----

    def _run(self) -> None:
        """The program from its beginning to its end."""
        prompt = self.prompt
        key = row_key(self.settings.seed, self.settings.round, prompt.id, self.completion, -1)
        task = EpisodeTask(
            base_url=self.client.base_url,
            api_key=self.client.key,
            session=self.client.id,
            row={"prompt": prompt.content, **prompt.columns},
            seed=int(key) >> 33,
            begin=self.client.begin,
        )
        try:
            ending = self.running.result(task)
        except Exception as error:  # noqa: BLE001  a mistake of ours must not keep the round waiting
            ending = Ending(problem=f"could not be run: {error!r}")
        if self.is_overdue:
            what = f"took more than {self.timeout:g} s by itself (agent_timeout) and was ended"
            ending = replace(ending, reward=None, rewards={}, problem=what)
        with self.client.changed:
            self.ending = ending
            self.client.close(session_over())

    # ---- requests ----

    def _next_requests(self) -> list[RolloutRequest]:
        """The program's next requests, in an order that does not depend on when they came; none once it has ended."""
        while self._wait():
            requests = [request for pending in self.client.take() for request in self._placed(pending)]
            if requests:
                return requests
        return []

    def _wait(self) -> bool:
        """Wait until the program has asked all that it asks at once, and return whether it has not ended before.

        One that takes longer by itself than it may is stopped.
        """
        client = self.client
        with client.changed:
            while self.ending is None and client.is_open:
                if client.new:
                    arrived = client.arrived if self.apart else client.endpoint.arrived
                    left = arrived + SETTLE_SECONDS[client.endpoint.is_parallel] - time.monotonic()
                    if left <= 0 or self.settings.in_order_of_answers:
                        return True
                elif self.timeout is None:
                    left = None
                else:
                    left = self.timeout - client.clock.seconds
                    if left < 0:
                        self.is_overdue = True
                        self.running.stop()
                        left = STOP_SECONDS
                client.changed.wait(left)
        return False

    def _placed(self, pending: PendingRequest) -> list[RolloutRequest]:
        """A request to the engine; none where the program's request is refused."""
        try:
            placed = self.session.place(pending.asked)
        except ApiError as error:
            if self.session.is_spent:
                self.client.refusal = error
            self.client.refuse(pending, error)
            return []
        number = placed.branch.number
        request = RolloutRequest(
            token_ids=placed.ids,
            prompt_id=self.prompt.id,
            completion=self.completion + self.settings.num_completions * number,
            max_tokens=placed.room,
            turn=int(number > 0),
            position=placed.position,
            images=placed.images,
        )
        self.drawing[request.completion] = pending, placed
        return [request]

    def _answer(self, drawn: Drawn) -> None:
        """Answer the program with what was drawn; a request that it has given up is forgotten."""
        pending, placed = self.drawing.pop(drawn.request.completion)
        if self.client.is_given_up(pending):  # the program knows nothing of it, and no limit and no loss should
            self.session.give_up(placed)
            return
        seconds = time.monotonic() - pending.came
        answer = self.session.settle(placed, drawn, seconds=seconds, own=pending.own)
        self.client.answer(pending, answer)
