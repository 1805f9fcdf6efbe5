"""The rollout of a program, driven by hand: what it yields, what it waits for, and how it ends."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from openai import APIStatusError, APITimeoutError, OpenAI

from podium.agents.programs import episode as episodes_module
from podium.agents.programs.episode import ProgramEpisode, program_episodes, program_rollouts
from podium.agents.programs.program import FunctionProgram
from podium.agents.programs.server import Endpoint
from podium.agents.setup import SampledGroups
from podium.engines.base import Drawn, Rollout
from podium.engines.live.engine import LiveEngine
from podium.records import Completion, RolloutRequest
from tests.agents.test_sessions import (
    CHAT,
    LIMITS,
    MODEL,
    SETTINGS,
    TOKENIZER,
    prompt_of,
    slow_to_submit,
    user,
)

SOON = 20.0
"""Seconds within which what should happen at once has happened, on a busy machine too."""

Body = Callable[[Callable[..., str]], Any]


def program(body: Body) -> FunctionProgram:
    def run(base_url: str, api_key: str) -> Any:
        client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)

        def ask(text: str, **more: Any) -> str:
            made = client.chat.completions.create(model="m", messages=[user(text)], **more)
            return made.choices[0].message.content or ""

        return body(ask)

    return FunctionProgram(run)


@contextlib.contextmanager
def begun(body: Body, *, in_order: bool = False, **changes: Any) -> Iterator[ProgramEpisode]:
    """The second of two episodes of a program."""

    settings = replace(SETTINGS, in_order_of_answers=in_order)
    limits = replace(LIMITS, **changes)
    with (
        Endpoint() as endpoint,
        program_episodes(program(body), endpoint, [prompt_of(0)], settings, chat=CHAT, limits=limits) as episodes,
    ):
        yield episodes[1]


def drawn(request: RolloutRequest, text: str = "hello") -> Drawn:
    ids = [*CHAT.encode(text), 2]
    return Drawn(request, ids, [-1.0] * len(ids))


def ended(rollout: Rollout, last: Drawn) -> Completion:
    with pytest.raises(StopIteration) as over:
        rollout.send(last)
    return over.value.value  # type: ignore[no-any-return]


def in_parallel(ask: Callable[[str], str], *texts: str) -> list[str]:
    with ThreadPoolExecutor(len(texts)) as threads:
        return [*threads.map(ask, texts)]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_request_is_yielded_and_answered_with_what_was_drawn() -> None:
    said: list[str] = []

    def body(ask: Callable[[str], str]) -> float:
        said.extend(ask(text) for text in ("one", "two"))
        return 2.0

    with begun(body) as episode:
        rollout = episode.rollout()
        [first] = next(rollout)
        [second] = rollout.send(drawn(first, "an answer"))
        completion = ended(rollout, drawn(second, "another"))
    assert said == ["an answer", "another"]
    assert (first.prompt_id, first.completion, first.turn, first.position, first.max_tokens) == (0, 1, 0, 0, 900)
    assert (second.completion % SETTINGS.num_completions, second.turn, second.position) == (1, 1, 0)
    assert second.completion != first.completion
    assert [each.text for each in completion.in_order] == ["an answer", "another"]
    record = episode.record()
    assert (record.result.reward, record.counts["requests"], record.is_answered) == (2.0, 2, True)


def test_what_is_asked_at_once_goes_to_the_engine_together_whatever_comes_first() -> None:
    """And nothing more is yielded, nor waited for, until all of it was answered."""

    def body(ask: Callable[[str], str]) -> float:
        in_parallel(ask, "b", "c", "a")
        return float(len(ask("d")))

    orders = []
    for _ in range(2):
        with begun(body) as episode:
            episode.client.endpoint.is_parallel = True
            rollout = episode.rollout()
            requests = next(rollout)
            orders.append([CHAT.tokenizer.decode(each.token_ids) for each in requests])
            assert [rollout.send(drawn(each)) for each in requests[:0:-1]] == [[], []]
            [last] = rollout.send(drawn(requests[0]))
            assert len(ended(rollout, drawn(last)).sequences) == 4
    assert orders[0] == orders[1]
    assert len(orders[0]) == 3


def test_in_the_order_of_answers_a_request_is_yielded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes_module, "SETTLE_SECONDS", {False: 1e9, True: 1e9})
    with begun(lambda ask: float(len(ask("one"))), in_order=True) as episode:
        rollout = episode.rollout()
        [request] = next(rollout)
        assert ended(rollout, drawn(request)).text == "hello"


def test_a_request_that_is_refused_is_answered_at_once_and_does_not_reach_the_engine() -> None:
    codes: list[int] = []

    def body(ask: Callable[..., str]) -> float:
        for text in ("long " * 1000, "short", "more"):
            try:
                ask(text)
            except APIStatusError as error:
                codes.append(error.status_code)
        return 1.0

    with begun(body, max_turns=1) as episode:
        rollout = episode.rollout()
        [request] = next(rollout)
        assert "short" in CHAT.tokenizer.decode(request.token_ids)
        completion = ended(rollout, drawn(request))
    assert codes == [400, 429]
    assert completion.finish == "turns"
    assert episode.record().result.capped


def test_nothing_is_trained_of_a_program_that_ends_while_its_requests_are_drawn() -> None:
    """Whoever it left waiting is told that the session is over."""
    errors: list[str] = []

    def left_behind(ask: Callable[[str], str], text: str) -> None:
        try:
            ask(text)
        except APIStatusError as error:
            errors.append(str(error.body))

    def body(ask: Callable[[str], str]) -> float:
        ask("first")
        for text in ("a", "b"):
            threading.Thread(target=left_behind, args=(ask, text)).start()
        leaves.wait(SOON)
        return 1.0

    leaves = threading.Event()
    with begun(body) as episode:
        episode.client.endpoint.is_parallel = True
        rollout = episode.rollout()
        [first] = next(rollout)
        requests = rollout.send(drawn(first))
        leaves.set()
        until(lambda: len(errors) == len(requests) == 2)
        completion = ended(rollout, drawn(requests[1]))
    assert all("session_not_found" in each for each in errors)
    assert completion.sequences == (completion,)
    assert completion.text == "hello"
    record = episode.record()
    assert (record.result.reward, record.counts["requests"], record.given_up) == (1.0, 1, 0)


def test_what_a_client_gives_up_while_it_is_drawn_is_forgotten() -> None:
    def body(ask: Callable[..., str]) -> float:
        with pytest.raises(APITimeoutError):
            ask("one", timeout=0.2)
        gone.set()
        return float(len(ask("two")))

    gone = threading.Event()
    with begun(body) as episode:
        rollout = episode.rollout()
        [request] = next(rollout)
        assert gone.wait(SOON)
        [second] = rollout.send(drawn(request))
        completion = ended(rollout, drawn(second, "kept"))
    assert [each.text for each in completion.sequences] == ["kept"]
    record = episode.record()
    assert (record.given_up, record.counts["requests"], record.counts["forks"]) == (1, 1, 0)


def test_a_program_that_takes_too_long_by_itself_is_stopped() -> None:
    """What it was answered before stays; the time in which it waits for answers does not count."""
    over = threading.Event()
    try:
        with begun(lambda ask: ask("one") and over.wait(SOON), timeout=0.3) as episode:
            rollout = episode.rollout()
            [request] = next(rollout)
            time.sleep(0.4)
            assert not episode.is_overdue
            assert ended(rollout, drawn(request)).text == "hello"
        assert "more than 0.3 s by itself (agent_timeout)" in episode.record().result.problem
    finally:
        over.set()


@pytest.mark.parametrize("when", ["it runs", "its request is drawn"])
def test_a_round_that_is_given_up_ends_the_program_and_refuses_its_requests(when: str) -> None:
    errors: list[str] = []

    def body(ask: Callable[[str], str]) -> float:
        if when == "it runs":
            goes_on.wait(SOON)
        try:
            ask("one")
        except APIStatusError as error:
            errors.append(str(error.body))
        return 1.0

    goes_on = threading.Event()
    with ThreadPoolExecutor() as threads:
        with begun(body) as episode:
            rollout = episode.rollout()
            step = threads.submit(next, rollout, None)
            if when == "it runs":
                until(episode.thread.is_alive)
                time.sleep(0.05)  # it waits for the program, for which nobody waits any more
            else:
                assert len(step.result() or ()) == 1
                rollout.close()
                until(lambda: bool(errors))
        assert not episode.thread.is_alive()
        if when == "it runs":
            assert step.result(SOON) is None
            assert episode.record().result.problem.startswith("was given up")
        else:
            assert "The round is over." in errors[0]
        goes_on.set()


def test_an_episode_that_has_not_begun_when_the_round_is_given_up_does_not_begin() -> None:
    with begun(lambda ask: 1.0) as episode:
        rollout = episode.rollout()
    assert next(rollout, None) is None
    assert episode.ending is None


# ---- in the loop of all rollouts ----


def played(body: Body, rows: int, **changes: Any) -> SampledGroups:
    """An episode for each of so many rows, of which the live engine decodes as many at a time as there are episodes."""

    settings = replace(SETTINGS, num_completions=1, **changes)
    engine = LiveEngine(MODEL, TOKENIZER, max_rows=rows)
    prompts = [prompt_of(i) for i in range(rows)]
    return program_rollouts(program(body), engine, prompts, settings, chat=CHAT, limits=LIMITS)


def test_the_place_of_what_was_given_up_is_free_for_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(ask: Callable[..., str]) -> float:
        with pytest.raises(APITimeoutError):
            ask("one", timeout=0.2)
        return float(len(ask("two")))

    slow_to_submit(monkeypatch, seconds=0.5)
    result = played(body, rows=1)
    assert [each.problem for each in result.environments] == [""]
    assert result.metrics["programs/given_up"] == 1
    assert [len(each.completions[0].turns) for each in result.groups] == [1]


@pytest.mark.parametrize("in_order", [False, True])
def test_programs_that_leave_requests_behind_end_beside_those_that_go_on(
    monkeypatch: pytest.MonkeyPatch, in_order: bool
) -> None:
    def suppressed(ask: Callable[..., str], text: str) -> None:
        with contextlib.suppress(APIStatusError):
            ask(text)

    def body(ask: Callable[..., str]) -> float:
        if next(numbers) % 2:
            return float(len(ask("one") + ask("two")))
        for i in range(4):
            threading.Thread(target=suppressed, args=(ask, f"way {i}")).start()
        time.sleep(0.4)
        return 0.5

    numbers = itertools.count()
    slow_to_submit(monkeypatch, seconds=0.1)
    result = played(body, rows=4, in_order_of_answers=in_order)
    assert [each.problem for each in result.environments] == [""] * 4
    turns = [sum(len(x.turns) for x in group.completions[0].sequences) for group in result.groups]
    assert [each for each, x in zip(turns, result.environments, strict=True) if x.reward != 0.5] == [2, 2]
