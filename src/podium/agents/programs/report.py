"""Results of a round of programs: rewards, log lines, metrics, and the errors that end a run.

Programs may catch an error and go on, so nothing else may tell of what the endpoint has refused. What is likely to come
again in every round is logged once in a process.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from podium.agents.programs.program import shown_lines
from podium.agents.setup import Program
from podium.algorithm.metrics import nanmean
from podium.errors import AgentError
from podium.errors.texts import clean, counted
from podium.records import PROGRAM_FAILED, PROGRAM_LOG

logger = logging.getLogger(__name__)

SHORT = 1000
"""Characters of the output of a program that has not failed that are recorded, its last ones."""

_reported: set[tuple[str, str]] = set()
"""Programs and problems that this process has reported."""
_answered: WeakSet[Program] = WeakSet()
"""Programs that have got an answer in training or evaluation."""


class EpisodeResult(NamedTuple):
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
class EpisodeRecord:
    """One episode that is over."""

    row: int
    result: EpisodeResult
    unread: str
    """The last line of a command, where that is no reward and it gave no other."""
    counts: Mapping[str, int]
    """Those of its `Session`."""
    is_answered: bool
    """Whether the policy has drawn anything for it."""
    asked: int
    """Requests that came, but for those that were wrong in themselves."""
    rejected: int
    """Requests that were answered with an error, but for limits and the end of the session."""
    given_up: int
    """Requests whose client went before the answer."""
    given_up_after: float
    """Seconds that the first of them had waited."""
    forms: frozenset[str]
    """Arguments by which its requests prescribed the form of an answer."""

    @property
    def has_failed(self) -> bool:
        """Whether it ended with a problem that is not a limit of the recipe."""
        return bool(self.result.problem) and not self.result.capped


def program_reward(*, failed: float | None, capped: float | None) -> Callable[..., list[float | None]]:
    """A reward function that gives what each program has returned.

    Entries of dicts become metrics; why programs failed, and the end of their output, are recorded beside completions.
    See `agents.table.program_reward`.
    """

    def agent(
        environments: Sequence[EpisodeResult], log_extra: Any, log_metric: Any, **kwargs: Any
    ) -> list[float | None]:
        names = dict.fromkeys(name for result in environments for name in result.rewards)
        for name in names:
            values = [result.rewards.get(name, np.nan) for result in environments]
            log_metric(f"agent/{name}", nanmean(np.array(values)))
            log_extra(f"agent/{name}", [result.rewards.get(name) for result in environments])
        log_extra("program seconds", [round(result.seconds, 3) for result in environments])
        if any(result.problem for result in environments):
            log_extra(PROGRAM_FAILED, [result.problem for result in environments])
        if any(result.rejected for result in environments):
            log_extra("program rejected", [result.rejected for result in environments])
        if any(result.log for result in environments):
            log_extra(
                PROGRAM_LOG,
                [result.log if result.problem else result.log[-SHORT:] for result in environments],
            )
        instead = [capped if result.capped else failed for result in environments]
        return [other if result.problem else result.reward for result, other in zip(environments, instead, strict=True)]

    return agent


def report_round(program: Program, episodes: Sequence[EpisodeRecord], *, evaluation: bool) -> dict[str, float]:
    """Log what went wrong, and return the metrics.

    Raises `AgentError` where all episodes so far have failed, or none has got an answer, which is not needed in an
    evaluation.
    """
    _report_failed(program, episodes)
    _report_requests(program.name, episodes)
    _report_unread(program.name, episodes)
    _report_silent(program, episodes, evaluation=evaluation)
    _report_forms(program.name, episodes)
    return dict(_metrics(episodes))


def no_answer(name: str, count: int, *, rejected: int, rejection: str, given_up: int) -> AgentError:
    """The error of episodes of which none has got an answer.

    Args:
        name: of the program.
        count: of episodes.
        rejected: requests that were answered with an error.
        rejection: the first of these errors.
        given_up: requests whose client did not wait for the answer.
    """
    more = ""
    if rejected:
        more = f"; it refused {counted(rejected, 'request')}, the first with {rejection}"
    if given_up:
        more = f"{more}; {counted(given_up, 'request')} ended at a timeout of the client"
    return AgentError(
        f"No completion has a token to train on: none of the {count} episodes of {name} got an answer from the "
        f"endpoint{more}.",
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


def _is_new(name: str, problem: str) -> bool:
    """Whether a problem of a program is reported for the first time."""
    before = len(_reported)
    _reported.add((name, problem))
    return len(_reported) > before


def _report_failed(program: Program, episodes: Sequence[EpisodeRecord]) -> None:
    """Raises `AgentError` where all have failed and none ever got an answer."""
    failed = [episode for episode in episodes if episode.has_failed]
    if not failed:
        return
    first = failed[0]
    problem = clean(first.result.problem)
    output = "".join(f"\n  {line}" for line in shown_lines(first.result.log))
    if len(failed) == len(episodes) and program not in _answered:
        raise AgentError(
            f"All {len(failed)} episodes of {program.name} failed; the first, of row {first.row}, {problem}{output}",
            code="C065",
            fix="correct the program; what it writes to its standard output and error is shown here",
            count=len(failed),
            name=program.name,
            row=first.row,
            problem=problem,
            shown=output,
        )
    logger.warning(
        "%d of %d episodes of %s failed; the first, of row %s, %s%s",
        len(failed),
        len(episodes),
        program.name,
        first.row,
        problem,
        output if _is_new(program.name, first.result.problem) else "",
    )


def _report_requests(name: str, episodes: Sequence[EpisodeRecord]) -> None:
    """Log requests that were answered with an error in every round, and once those that their client gave up."""
    if rejected := [episode for episode in episodes if episode.rejected]:
        logger.warning(
            "%d requests in %d of %d episodes of %s were answered with an error; the first, of row %s, with %s",
            sum(episode.rejected for episode in rejected),
            len(rejected),
            len(episodes),
            name,
            rejected[0].row,
            clean(rejected[0].result.rejected),
        )
    given_up = [episode for episode in episodes if episode.given_up]
    if given_up and _is_new(name, "given up"):
        logger.warning(
            "%d requests in %d of %d episodes of %s were given up by the client before they were answered; the first, "
            "of row %s, after %.3g s. They are neither counted nor trained on. Is the client's timeout too short? "
            "An answer waits for the other programs of the round.",
            sum(episode.given_up for episode in given_up),
            len(given_up),
            len(episodes),
            name,
            given_up[0].row,
            given_up[0].given_up_after,
        )


def _report_unread(name: str, episodes: Sequence[EpisodeRecord]) -> None:
    """Log once the last line of a command that gave no reward; a warning if other episodes gave one."""
    unread = [episode for episode in episodes if episode.unread]
    if not unread or not _is_new(name, "unread"):
        return
    logger.log(
        logging.WARNING if any(episode.result.reward is not None for episode in episodes) else logging.INFO,
        "%d of %d episodes of %s ended with a last line that is no reward, the first, of row %s, with %r: "
        "the reward functions of the recipe score them.",
        len(unread),
        len(episodes),
        name,
        unread[0].row,
        clean(unread[0].unread),
    )


def _report_silent(program: Program, episodes: Sequence[EpisodeRecord], *, evaluation: bool) -> None:
    """Episodes in which the endpoint answered nothing: they have no tokens to train on.

    Raises `AgentError` where that is every episode so far. Once a program has got an answer, later rounds without any
    are a warning: it may answer some rows without the model.
    """
    name = program.name
    count = len(episodes)
    silent = [episode for episode in episodes if not episode.is_answered]
    if len(silent) < count:
        _answered.add(program)
    elif not evaluation and program not in _answered:
        rejected = [episode for episode in silent if episode.rejected]
        raise no_answer(
            name,
            count,
            rejected=sum(episode.rejected for episode in rejected),
            rejection=clean(rejected[0].result.rejected) if rejected else "",
            given_up=sum(episode.given_up for episode in silent),
        )
    idle = [episode for episode in silent if not (episode.rejected or episode.asked or episode.has_failed)]
    if idle and _is_new(name, "all idle" if len(idle) == count else "idle"):
        what = f"{len(idle)} of {count} episodes of {name} made no request, the first for row {idle[0].row}"
        logger.warning("%s: nothing of them is trained on. Does it keep answers (DSPy: cache=False)?", what)


def _report_forms(name: str, episodes: Sequence[EpisodeRecord]) -> None:
    """Log once that a form which requests prescribe is learnt and not forced."""
    forms = sorted({form for episode in episodes for form in episode.forms})
    if forms and _is_new(name, f"forms {forms}"):
        logger.info(
            "%s asks for %s, which forces nothing here: tokens are the policy's own; the reward teaches the form.",
            name,
            " and ".join(f"`{form}`" for form in forms),
        )


def _metrics(episodes: Sequence[EpisodeRecord]) -> Iterator[tuple[str, float]]:
    """`programs/*`: means over the episodes, and the rows of the slowest and of the most often refused one."""
    total = len(episodes)
    counts: Counter[str] = sum((Counter(episode.counts) for episode in episodes), Counter())
    slowest = max(episodes, key=lambda episode: episode.result.seconds)
    most_rejected = max(episodes, key=lambda episode: episode.rejected)
    yield "programs/seconds", sum(episode.result.seconds for episode in episodes) / total
    yield "programs/seconds_max", slowest.result.seconds
    if slowest.result.seconds and slowest.row >= 0:
        yield "programs/slowest_row", slowest.row
    yield "programs/failed", sum(episode.has_failed for episode in episodes) / total
    yield "programs/rejected", sum(episode.rejected for episode in episodes) / total
    if most_rejected.rejected and most_rejected.row >= 0:
        yield "programs/rejected_row", most_rejected.row
    yield "programs/given_up", sum(episode.given_up for episode in episodes) / total
    yield "programs/requests", counts["requests"] / total
    if counts["offers"]:
        yield "programs/calls", counts["calls"] / total
    yield "programs/forks", counts["forks"] / total
    yield "programs/realigned", counts["realigned"] / max(counts["requests"], 1)
    yield "programs/capped", counts["capped"] / total
