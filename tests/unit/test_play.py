"""`play`: which rollouts have begun, when their requests go to the engine, and how those end that are given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from podium.agents.episode import Observation
from podium.agents.rollouts import _given
from podium.engines.base import EndedCompletion, Rollout, RolloutEngine, grouped, play
from podium.records import Completion, RolloutRequest, SamplingSettings

SETTINGS = SamplingSettings(num_completions=2, max_tokens=9)


def request(prompt: int, completion: int = 0, **more: Any) -> RolloutRequest:
    return RolloutRequest(
        **{"token_ids": (prompt,), "prompt_id": prompt, "completion": completion, "max_tokens": 3, **more}
    )


def made(*token_ids: int) -> Completion:
    return Completion(token_ids=token_ids, logps=(), finish="stop", text="", policy_step=0)


class Session:
    """Draws a token for a completion in every step, the number of the completion, until there are `max_tokens`."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.submitted = list[RolloutRequest]()
        self.cancelled = list[tuple[int, int | None]]()
        self.left = dict[int, int]()
        self.ended = list[EndedCompletion]()

    @property
    def is_decoding(self) -> bool:
        return bool(self.left)

    @property
    def is_busy(self) -> bool:
        return bool(self.left or self.ended)

    def submit(self, request: RolloutRequest) -> int:
        self.submitted.append(request)
        number = len(self.submitted) - 1
        self.left[number] = request.max_tokens
        return number

    def cancel(self, request: int, place: int | None = None) -> None:
        self.cancelled.append((request, place))
        self.left.pop(request, None)

    def step(self) -> None:
        for number in [*self.left]:
            self.left[number] -= 1
            if not self.left[number]:
                del self.left[number]
                asked = self.submitted[number]
                drawn = [asked.completion + place for place in range(asked.num_completions)]
                self.ended += [EndedCompletion(number, i, [g] * asked.max_tokens, []) for i, g in enumerate(drawn)]

    def poll(self) -> list[EndedCompletion]:
        ended = self.ended
        self.ended = []
        return ended


class Engine(RolloutEngine):
    def __init__(self, *, apart: bool = False, max_rows: int = 99) -> None:
        self.apart = apart
        self.used = Session(max_rows)
        self.kept = False

    @contextmanager
    def session(self, settings: Any, expected: Sequence[Any], *, keeps: bool = False) -> Iterator[Any]:
        self.kept = keeps
        yield self.used


def once(*place: int, **more: Any) -> Rollout:
    drawn = yield [request(*place, **more)]
    return made(*drawn.token_ids)


def test_first_requests_of_a_prompt_are_one() -> None:
    engine = Engine()
    rollouts = [once(p, g) for p in (7, 8) for g in range(2)]
    found = play(engine, SETTINGS, rollouts, [])
    assert [each.token_ids for each in found] == [(0,) * 3, (1,) * 3] * 2
    assert engine.used.submitted == [request(7, num_completions=2), request(8, num_completions=2)]
    assert not engine.kept


def test_what_is_not_alike_is_not_joined() -> None:
    asked = [request(7), request(7, 1, max_tokens=2), request(7, 2, position=1), request(7, 3, turn=1), request(7, 5)]
    assert grouped(asked) == asked
    assert grouped([request(7), request(7, 1), request(7, 2)]) == [request(7, num_completions=3)]


@pytest.mark.parametrize("apart", [False, True])
def test_some_at_a_time(apart: bool) -> None:
    """No more have begun than may; an engine that computes requests apart gets each by itself."""
    running = set[int]()
    most = list[int]()

    def counted(g: int) -> Rollout:
        running.add(g)
        most.append(len(running))
        completion = yield from once(7, g)
        running.discard(g)
        return completion

    engine = Engine(apart=apart)
    found = play(engine, SETTINGS, [counted(g) for g in range(7)], [], threads=3, at_a_time=3)
    assert [each.token_ids for each in found] == [(g,) * 3 for g in range(7)]
    assert max(most) == 3
    assert engine.kept
    sizes = [each.num_completions for each in engine.used.submitted]
    assert sizes == ([1] * 7 if apart else [3, 3, 1])


def test_answers_of_parallel_requests_come_one_at_a_time() -> None:
    def two() -> Rollout:
        asked = [request(7, 0, max_tokens=3), request(7, 100, max_tokens=2, turn=1)]
        first = yield asked
        second = yield ()
        assert [first.request is asked[1], second.request is asked[0]] == [True, True]
        third = yield [request(7, 0, token_ids=(7, 0, 0, 0), position=3)]
        return made(*first.token_ids, *second.token_ids, *third.token_ids)

    engine = Engine()
    [found] = play(engine, SETTINGS, [two()], [], threads=2)
    assert found.token_ids == (100, 100, 0, 0, 0, 0, 0, 0)
    assert engine.used.cancelled == [(1, 0), (2, 0)] or engine.used.cancelled == [(2, 0), (1, 0)]


def test_rollouts_go_on_together_or_each_by_itself() -> None:
    order = list[int]()
    slow = threading.Event()

    def turns(g: int) -> Rollout:
        yield [request(g, max_tokens=1)]
        if not g and not slow.wait(20):
            raise TimeoutError
        yield [request(g, max_tokens=1, position=1)]
        order.append(g)
        slow.set()
        return made(g)

    in_order = SamplingSettings(num_completions=1, max_tokens=9, in_order_of_answers=True)
    play(Engine(), in_order, [turns(0), turns(1)], [], threads=2)
    assert order == [1, 0]
    engine = Engine()
    play(engine, SETTINGS, [turns(0), turns(1)], [], threads=1)
    assert [each.prompt_id for each in engine.used.submitted] == [0, 1, 0, 1]


def test_the_sequence_that_was_kept_longest_makes_room() -> None:
    def several() -> Rollout:
        for number in range(3):
            yield [request(7, number, turn=number)]
        yield [request(7, 1, turn=1, position=3)]
        return made(1)

    engine = Engine(max_rows=2)
    play(engine, SETTINGS, [several()], [], threads=1)
    assert engine.used.cancelled[0] == (0, 0)
    assert sorted(engine.used.cancelled[1:]) == [(2, 0), (3, 0)]


def test_what_an_ended_rollout_has_asked_is_cancelled() -> None:
    def hasty() -> Rollout:
        yield [request(7, max_tokens=1), request(7, 1, max_tokens=8)]
        return made(1)

    engine = Engine(apart=True)
    play(engine, SETTINGS, [hasty()], [], threads=1)
    assert sorted(engine.used.cancelled) == [(0, 0), (1, 0)]


def test_every_rollout_is_closed_where_one_fails() -> None:
    closed = list[str]()
    go = threading.Event()
    ended = threading.Event()

    def waits() -> Rollout:
        try:
            drawn = yield [request(7, max_tokens=10**9)]  # is still being drawn when the other fails
            return made(*drawn.token_ids)
        finally:
            closed.append("waits")

    def works() -> Rollout:
        try:
            yield [request(8, max_tokens=1)]
            go.wait(20)
            yield [request(8, position=1)]
            return made()
        finally:
            closed.append("works")
            ended.set()

    def fails() -> Rollout:
        yield [request(9, max_tokens=1)]
        raise ValueError("a tool")

    rollouts = [waits(), works(), fails()]  # kept, so that nothing is closed because nothing refers to it
    with pytest.raises(ValueError, match="a tool"):
        play(Engine(), SETTINGS, rollouts, [], threads=3)
    assert closed == ["waits"]
    go.set()
    assert ended.wait(20)


@pytest.mark.parametrize(
    ("left", "context_left", "expected"),
    [
        (4, None, ((1, 2, 3), None)),
        (3, None, ((1, 2, 3), "length")),
        (2, None, ((), "context")),
        (4, 3, ((1, 2, 3), None)),
        (4, 2, ((), "context")),
    ],
)
def test_replies_end_a_completion_that_has_no_token_left(left: int, context_left: int | None, expected: Any) -> None:
    class Chat:
        def suffix(self, messages: Any, *, last: int, most: int) -> tuple[tuple[int, ...], tuple[()]]:
            return (1, 2, 3), ()

    token_ids, _, finish = _given(Chat(), Observation(), 9, left, context_left)
    assert (token_ids, finish) == expected


def test_the_seconds_of_a_turn_are_those_in_the_engine() -> None:
    """Not those in which the tools of another rollout were waited for."""
    seconds = list[float]()

    def quick() -> Rollout:
        for position in (0, 1):
            drawn = yield [request(7, max_tokens=1, position=position)]
            seconds.append(drawn.seconds)
        return made()

    def slow() -> Rollout:
        yield [request(8, max_tokens=1)]
        time.sleep(0.5)
        return made()

    play(Engine(), SETTINGS, [quick(), slow()], [], threads=2)
    assert len(seconds) == 2
    assert max(seconds) < 0.4


def test_a_rollout_that_waits_for_nothing_is_a_fault() -> None:
    def idle() -> Rollout:
        yield ()
        return made()

    with pytest.raises(RuntimeError, match="asks for nothing, and waits for nothing"):
        play(Engine(), SETTINGS, [idle()], [])
