"""All programs of a round beside the engine: their requests become rows that decode, their endings rewards.

The thread that owns the engine takes requests and delivers answers; programs run in threads of their own, and so do
their connections. As with tools, rows go on together by default: the next turns begin once every program that runs
waits for an answer. So batches, and with them the last bits of the logits, do not depend on how long a program took.
Where the engine computes every request apart from others, as a server does, each program goes on by itself.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakSet

from podium.agents.chat import ChatFormat
from podium.agents.programs.program import Ending, Play, Program, Running, shown_lines
from podium.agents.programs.server import Endpoint, Job, Seat, refuse
from podium.agents.programs.sessions import Branch, Placed, Session, SessionLimits
from podium.agents.programs.wire import ApiError
from podium.engines.base import Ended, EngineSession, RolloutEngine, first_requests
from podium.engines.sampling import row_key
from podium.errors import AgentError
from podium.errors.texts import clean, counted
from podium.records import Group, Prompt, RolloutRequest, SamplingSettings

logger = logging.getLogger(__name__)

_shown: set[tuple[str, str]] = set()
"""Programs and problems whose output this process has shown; what fails alike in later rounds is named without it."""

_answered: WeakSet[Program] = WeakSet()
"""Programs that have got an answer in training or evaluation."""

MOST_REQUESTS = 1000
"""Answers that a program gets where `max_turns` is not set."""
TICK_SECONDS = 0.05
"""Between two looks at the clock while nothing decodes."""
SETTLE_SECONDS = {False: 0.02, True: 0.2}
"""After a request, how long others of the same program may take to come along with it; and where some have."""


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """One program with its session."""

    index: int
    prompt: Prompt
    completion: int
    """Its number in the group."""
    seat: Seat
    session: Session
    running: Running
    ending: Ending | None = None
    cleared: bool = False
    """Whether the engine has been told that it is over."""
    overdue: bool = False


class Result(NamedTuple):
    """How one episode ended: what reward functions get in `environments`."""

    reward: float | None
    rewards: Mapping[str, float]
    problem: str
    log: str
    capped: bool
    """Whether it had reached a limit of turns or tokens."""
    seconds: float
    """That it took by itself."""
    rejected: str = ""
    """The first error that one of its requests was answered with, but for limits; empty: none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The episodes of one call of `play`."""

    groups: list[Group]
    results: list[Result]
    """Of the completions of all groups."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySettings:
    """Bounds of episodes."""

    timeout: float | None
    """Seconds that a program may take by itself, without those in which it waits for answers."""
    max_turns: int | None
    context_length: int | None
    vocabulary: int | None = None
    """Token ids that the model has; None: those of the tokenizer."""


def play(
    program: Program,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    *,
    chat: ChatFormat,
    bounds: PlaySettings,
    policy_step: int = 0,
    evaluation: bool = False,
) -> Played:
    """An episode for every completion of every prompt.

    Raises `AgentError` where the engine takes no requests while it samples, and where all episodes so far have failed
    or none has got an answer, which is not needed in an evaluation.
    """
    if not prompts:
        return Played(groups=[], results=[], metrics={})
    with (
        Endpoint() as endpoint,
        engine.session(settings, first_requests(prompts, settings) * 2, keeps=True) as decoding,
    ):
        desk = Desk(program, endpoint, decoding, prompts, settings, chat, bounds)
        desk.run()
    return desk.played(policy_step, evaluation=evaluation)


class Desk:
    """Between programs and engine."""

    def __init__(
        self,
        program: Program,
        endpoint: Endpoint,
        decoding: EngineSession,
        prompts: Sequence[Prompt],
        settings: SamplingSettings,
        chat: ChatFormat,
        bounds: PlaySettings,
    ) -> None:
        self.program = program
        self.endpoint = endpoint
        self.decoding = decoding
        self.settings = settings
        self.inbox = endpoint.inbox
        self.bounds = bounds
        self.prompts = prompts
        limits = SessionLimits(
            settings=settings,
            context_length=bounds.context_length,
            vocabulary=bounds.vocabulary or len(chat.tokenizer),
            max_requests=bounds.max_turns or MOST_REQUESTS,
        )
        members = [(prompt, g) for prompt in prompts for g in range(settings.num_completions)]
        self.episodes = [
            Episode(
                index=i,
                prompt=prompt,
                completion=g,
                seat=endpoint.seat(i),
                session=Session(chat, limits, str(i)),
                running=program.begin(),
            )
            for i, (prompt, g) in enumerate(members)
        ]
        self.queue: list[Job] = []
        """Requests that were taken and have no place in the engine yet."""
        self.drawing: dict[tuple[int, int], tuple[Job, Placed]] = {}
        """By the engine's request and the place in it."""
        self.held: dict[Branch, tuple[int, int]] = {}
        """Places whose keys and values wait for the next request of a branch, the longest waiting first."""
        self.moment = 0

    def run(self) -> None:
        """Until every episode is over. Whatever happens, no program and no request is left waiting."""
        most = min(self.program.at_a_time, len(self.episodes))
        threads = ThreadPoolExecutor(most, thread_name_prefix="podium-programs")
        plays = list[Future[None]]()
        try:
            plays = [threads.submit(self._play, episode) for episode in self.episodes]
            while self._unfinished:
                self._take()
                if self.decoding.is_busy:
                    self.decoding.step()
                for ended in self.decoding.poll():
                    self._deliver(ended)
                self._end_overdue()
                self._clear()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            self._end_all(plays)
            self.program.tidy()

    def _end_all(self, plays: Sequence[Future[None]]) -> None:
        """End the programs that still run, where a round is given up, and refuse what waits."""
        for episode in self.episodes:
            self.inbox.close(episode.seat)
        for job in (*self.queue, *(job for job, _ in self.drawing.values())):
            refuse(job, ApiError(503, "The round is over."))
        while not all(each.done() for each in plays):
            for episode in self.episodes:
                if episode.ending is None:
                    episode.running.stop()
            wait(plays, TICK_SECONDS)

    @property
    def _unfinished(self) -> int:
        return sum(not episode.cleared for episode in self.episodes)

    def _play(self, episode: Episode) -> None:
        """One program from beginning to end, in a thread."""
        seat = episode.seat
        prompt = episode.prompt
        row = {"prompt": prompt.content, **prompt.columns}
        key = row_key(self.settings.seed, self.settings.round, prompt.id, episode.completion, -1)
        given = Play(
            self.endpoint.base_url(seat), seat.key, seat.id, row, int(key) >> 33, lambda: self.inbox.begin(seat)
        )
        try:
            ending = episode.running.result(given)
        except Exception as error:  # noqa: BLE001  a mistake of ours must not keep the round waiting
            ending = Ending(problem=f"could not be run: {error!r}")
        if episode.overdue:
            what = f"took more than {self.bounds.timeout:g} s by itself (agent_timeout) and was ended"
            ending = replace(ending, reward=None, rewards={}, problem=what)
        with self.inbox.changed:
            episode.ending = ending
            self.inbox.close(seat)

    # ---- requests ----

    def _take(self) -> None:
        """Take requests from the endpoint; waits where nothing decodes."""
        with self.inbox.changed:
            while not (self.decoding.is_busy or self.queue or self._is_ready()):
                self.inbox.changed.wait(SETTLE_SECONDS[False] if self.inbox.jobs else TICK_SECONDS)
                self._end_overdue()
                self.inbox.drop()
            jobs = set(self._due())
            self.inbox.jobs = [job for job in self.inbox.jobs if job not in jobs]
        if jobs:
            self.moment += 1
            self.queue += sorted(jobs, key=lambda job: (job.seat.episode, job.asked.key))
        placed: list[tuple[Job, Placed]] = []
        while self.queue and self._has_room(len(placed)):
            placed += self._placed(self.queue.pop(0))
        for lot in self._lots(placed):
            self.submit(lot)

    def _is_ready(self) -> bool:
        """Whether the next requests may be taken, or an episode has ended."""
        jobs = self.inbox.jobs
        ended = any(each.ending is not None and not each.cleared for each in self.episodes)
        return bool(self._due()) or (ended and (self.decoding.apart or not jobs))

    def _due(self) -> list[Job]:
        """The requests that may be taken now."""
        jobs = self.inbox.jobs
        if self.settings.in_order_of_answers:
            return jobs
        if self.decoding.apart:
            asking = {job.seat for job in (*self.queue, *(job for job, _ in self.drawing.values()))}
            latest = {job.seat: job.came for job in jobs}
            seats = {seat for seat, came in latest.items() if seat not in asking and self._is_settled(came)}
            return [job for job in jobs if job.seat in seats]
        return [] if self.decoding.is_busy or not self._all_wait() else jobs

    def _all_wait(self) -> bool:
        """Whether every program that runs waits for an answer."""
        active = min(self.program.at_a_time, sum(episode.ending is None for episode in self.episodes))
        waiting = {job.seat.episode for job in self.inbox.jobs}
        return len(waiting) >= active and self._is_settled(self.inbox.arrived)

    def _is_settled(self, arrived: float) -> bool:
        """Whether others would have come along with a request that arrived then."""
        return time.monotonic() - arrived >= SETTLE_SECONDS[self.inbox.parallel]

    def _has_room(self, more: int) -> bool:
        """Whether the engine has a place for one row after `more`; the branch that has waited longest may lose its."""
        most = self.decoding.max_rows
        taken = len(self.drawing) + more
        if taken + len(self.held) >= most and self.held:
            self.decoding.cancel(*self.held.pop(next(iter(self.held))))
        return taken + len(self.held) < most

    def _placed(self, job: Job) -> list[tuple[Job, Placed]]:
        """A request with its branch; none where it is refused or given up, or its program has ended."""
        session = self.episodes[job.seat.episode].session
        if self.inbox.cancel_if_gone(job) or not job.seat.open:
            return []
        try:
            placed = session.place(job.asked, self.moment)
        except ApiError as error:
            self._answered(job)
            if session.is_spent:
                job.seat.refusal = error
            refuse(job, error)
            return []
        self.held.pop(placed.branch, None)
        return [(job, placed)]

    def _lots(self, placed: Sequence[tuple[Job, Placed]]) -> Iterator[list[tuple[Job, Placed]]]:
        """Requests to the engine: first ones of a group with equal tokens are one, whose rows are one for a while."""
        lot: list[tuple[Job, Placed]] = []
        for job, each in placed:
            if lot and (self.decoding.apart or not self._goes_with(lot[-1], (job, each))):
                yield lot
                lot = []
            lot.append((job, each))
        if lot:
            yield lot

    def _goes_with(self, before: tuple[Job, Placed], after: tuple[Job, Placed]) -> bool:
        episodes = [self.episodes[job.seat.episode] for job, _ in (before, after)]
        firsts = not any(each.branch.number or each.branch.turns for _, each in (before, after))
        alike = before[1].ids == after[1].ids and before[1].room == after[1].room
        follows = episodes[0].completion + 1 == episodes[1].completion
        return firsts and alike and follows and episodes[0].prompt.id == episodes[1].prompt.id

    def submit(self, lot: Sequence[tuple[Job, Placed]]) -> None:
        """One request to the engine."""
        job, placed = lot[0]
        episode = self.episodes[job.seat.episode]
        number = placed.branch.number
        request = RolloutRequest(
            token_ids=placed.ids,
            prompt_id=episode.prompt.id,
            completion=episode.completion + self.settings.num_completions * number,
            num_completions=len(lot),
            max_tokens=placed.room,
            turn=int(number > 0),
            position=placed.position,
        )
        submitted = self.decoding.submit(request)
        self.drawing |= {(submitted, place): each for place, each in enumerate(lot)}

    def _deliver(self, ended: Ended) -> None:
        job, placed = self.drawing.pop((ended.request, ended.place))
        session = self.episodes[job.seat.episode].session
        now = time.monotonic()
        if self.inbox.cancel_if_gone(job):  # the program knows nothing of it, and no limit and no loss should
            session.give_up(placed)
            self.decoding.cancel(ended.request, ended.place)
            return
        drawn = session.settle(placed, ended.token_ids, ended.logps, seconds=now - job.came, own=job.own)
        self.held[placed.branch] = ended.request, ended.place
        self._answered(job)
        job.answer.set_result(drawn)

    def _answered(self, job: Job) -> None:
        """The program goes on by itself from here."""
        with self.inbox.changed:
            job.seat.answered()

    # ---- endings ----

    def _end_overdue(self) -> None:
        """End the programs that have taken longer than they may."""
        if self.bounds.timeout is None:
            return
        for episode in self.episodes:
            if episode.ending is None and episode.seat.own_seconds() > self.bounds.timeout:
                episode.overdue = True
                episode.running.stop()

    def _clear(self) -> None:
        """Take what belongs to ended episodes out of the engine."""
        for episode in self.episodes:
            if episode.cleared or episode.ending is None:
                continue
            episode.cleared = True
            over = ApiError(404, "The session is over.", code="session_not_found")
            for place, (job, placed) in [*self.drawing.items()]:
                if job.seat is episode.seat:
                    self.decoding.cancel(*place)
                    episode.session.give_up(placed)
                    if not self.inbox.cancel_if_gone(job):
                        refuse(job, over)
                    del self.drawing[place]
            for branch in episode.session.branches:
                if branch in self.held:
                    self.decoding.cancel(*self.held.pop(branch))

    # ---- results ----

    def played(self, policy_step: int, *, evaluation: bool = False) -> Played:
        """Groups, endings and counts. Raises `AgentError` where every episode so far has failed, or drawn nothing."""
        endings = [episode.ending or Ending(problem="did not run") for episode in self.episodes]
        capped = [bool(episode.session.counts["capped"]) for episode in self.episodes]
        failed = [i for i, each in enumerate(endings) if each.problem and not capped[i]]
        self._say(failed, endings)
        self._say_rejected()
        self._say_given_up()
        self._say_unread(endings)
        self._say_idle(failed, evaluation=evaluation)
        _say_forms(self.program.name, frozenset(name for each in self.episodes for name in each.seat.forms))
        made = iter([each.session.completion(each.prompt, policy_step) for each in self.episodes])
        groups = []
        for _ in self.prompts:
            completions = tuple(next(made) for _ in range(self.settings.num_completions))
            first = completions[0].in_order[0].prompt  # the last branch's may hold what was drawn
            assert first is not None
            groups.append(Group(prompt=first, completions=completions))
        results = [
            Result(each.reward, each.rewards, each.problem, each.log, is_capped, seat.own_seconds(), seat.rejection)
            for each, is_capped, seat in zip(endings, capped, [each.seat for each in self.episodes], strict=True)
        ]
        return Played(groups=groups, results=results, metrics=dict(self._metrics(failed)))

    def _say(self, failed: Sequence[int], endings: Sequence[Ending]) -> None:
        if not failed:
            return
        first = endings[failed[0]]
        row = self.episodes[failed[0]].prompt.row
        shown = "\n  ".join(shown_lines(first.log))
        if len(failed) == len(endings) and self.program not in _answered:
            output = f"\n  {shown}" if shown else ""
            raise AgentError(
                f"All {len(failed)} episodes of {self.program.name} failed; the first, of row {row}, "
                f"{clean(first.problem)}{output}",
                code="C065",
                fix="correct the program; what it writes to its standard output and error is shown here",
                count=len(failed),
                name=self.program.name,
                row=row,
                problem=clean(first.problem),
                shown=output,
            )
        what = f"{len(failed)} of {len(endings)} episodes of {self.program.name} failed; the first, of row {row}"
        is_new = (self.program.name, first.problem) not in _shown
        _shown.add((self.program.name, first.problem))
        output = f"\n  {shown}" if shown and is_new else ""
        logger.warning("%s, %s%s", what, clean(first.problem), output)

    def _say_rejected(self) -> None:
        """Programs may catch an error, and then nothing else tells of it."""
        rejected = [episode for episode in self.episodes if episode.seat.rejected]
        if not rejected:
            return
        count = sum(episode.seat.rejected for episode in rejected)
        first = rejected[0]
        where = f"in {len(rejected)} of {len(self.episodes)} episodes of {self.program.name}"
        what = f"{count} requests {where} were answered with an error; the first, of row {first.prompt.row}, with"
        logger.warning("%s %s", what, clean(first.seat.rejection))

    def _say_given_up(self) -> None:
        """Name a client's timeout once: the program may hide that too."""
        left = [each for each in self.episodes if each.seat.given_up]
        name = self.program.name
        if not left or (name, "given up") in _shown:
            return
        _shown.add((name, "given up"))
        count = sum(each.seat.given_up for each in left)
        first = left[0]
        logger.warning(
            "%d requests in %d of %d episodes of %s were given up by the client before they were answered; the first, "
            "of row %s, after %.3g s. They are neither counted nor trained on. Is the client's timeout too short? "
            "An answer waits for the other programs of the round.",
            *(count, len(left), len(self.episodes), name, first.prompt.row, first.seat.given_up_after),
        )

    def _say_unread(self, endings: Sequence[Ending]) -> None:
        """Tell once what stood where a command's reward is looked for; a warning where other episodes have one."""
        unread = [i for i, each in enumerate(endings) if each.unread]
        name = self.program.name
        if not unread or (name, "unread") in _shown:
            return
        _shown.add((name, "unread"))
        row = self.episodes[unread[0]].prompt.row
        said = clean(endings[unread[0]].unread)
        logger.log(
            logging.WARNING if any(each.reward is not None for each in endings) else logging.INFO,
            "%d of %d episodes of %s ended with a last line that is no reward, the first, of row %s, with %r: "
            "the reward functions of the recipe score them.",
            *(len(unread), len(endings), name, row, said),
        )

    def _say_idle(self, failed: Sequence[int], *, evaluation: bool) -> None:
        """Report episodes in which the endpoint answered nothing: they have no tokens to train on.

        Raises `AgentError` where that is every episode so far. Once a program has got an answer, later rounds without
        any are a warning: it may answer some rows without the model.
        """
        silent = [each for each in self.episodes if not any(branch.turns for branch in each.session.branches)]
        name = self.program.name
        count = len(self.episodes)
        if len(silent) < count:
            _answered.add(self.program)
        elif not evaluation and self.program not in _answered:
            seats = [each.seat for each in silent if each.seat.rejected]
            rejected = sum(seat.rejected for seat in seats)
            said = clean(seats[0].rejection) if seats else ""
            given_up = sum(each.seat.given_up for each in silent)
            raise no_answer(name, count, rejected=rejected, rejection=said, given_up=given_up)
        quiet = [x for x in silent if not (x.seat.rejected or x.seat.asked or x.index in failed)]
        if quiet and (key := (name, "all idle" if len(quiet) == count else "idle")) not in _shown:
            _shown.add(key)
            row = quiet[0].prompt.row
            what = f"{len(quiet)} of {count} episodes of {name} made no request, the first for row {row}"
            logger.warning("%s: nothing of them is trained on. Does it keep answers (DSPy: cache=False)?", what)

    def _metrics(self, failed: Sequence[int]) -> Iterator[tuple[str, float]]:
        counts: Counter[str] = sum((episode.session.counts for episode in self.episodes), Counter())
        seconds = [episode.seat.own_seconds() for episode in self.episodes]
        total = max(len(self.episodes), 1)
        yield "programs/seconds", sum(seconds) / total
        yield "programs/seconds_max", max(seconds, default=0.0)
        yield from self._row_with_most("programs/slowest_row", seconds)
        yield "programs/failed", len(failed) / total
        rejected = [float(episode.seat.rejected) for episode in self.episodes]
        yield "programs/rejected", sum(rejected) / total
        yield from self._row_with_most("programs/rejected_row", rejected)
        yield "programs/given_up", sum(episode.seat.given_up for episode in self.episodes) / total
        yield "programs/requests", counts["requests"] / total
        if counts["offers"]:
            yield "programs/calls", counts["calls"] / total
        yield "programs/forks", counts["forks"] / total
        yield "programs/realigned", counts["realigned"] / max(counts["requests"], 1)
        yield "programs/capped", counts["capped"] / total

    def _row_with_most(self, name: str, values: Sequence[float]) -> Iterator[tuple[str, float]]:
        """The row of the episode with the largest value; nothing where all are 0, or it has no row."""
        most = max(values, default=0.0)
        row = self.episodes[values.index(most)].prompt.row if most else -1
        if row >= 0:
            yield name, row


def no_answer(name: str, count: int, *, rejected: int, rejection: str, given_up: int) -> AgentError:
    """The error of episodes of which none has got an answer.

    Args:
        name: of the program.
        count: of episodes.
        rejected: requests that were answered with an error.
        rejection: the first of these errors.
        given_up: requests whose client did not wait for the answer.
    """
    said = ""
    if rejected:
        said = f"; it refused {counted(rejected, 'request')}, the first with {rejection}"
    if given_up:
        said = f"{said}; {counted(given_up, 'request')} ended at a timeout of the client"
    return AgentError(
        f"No completion has a token to train on: none of the {count} episodes of {name} got an answer from the "
        f"endpoint{said}.",
        code="C065",
        fix="let each episode ask at its `base_url` with its `api_key` (commands: OPENAI_BASE_URL, OPENAI_API_KEY), "
        "and keep no answers of earlier ones (DSPy: cache=False); let a client wait for the round's other programs",
        settings=["agent"],
        count=count,
        name=name,
        rejected=rejected,
        rejection=rejection,
        given_up=given_up or None,
    )


@functools.cache
def _say_forms(program: str, names: frozenset[str]) -> None:
    """Tell once that a form which requests prescribe is learnt, and not forced."""
    if names:
        said = "%s asks for %s, which forces nothing here: tokens are the policy's own; the reward teaches the form."
        logger.info(said, program, " and ".join(f"`{name}`" for name in sorted(names)))
