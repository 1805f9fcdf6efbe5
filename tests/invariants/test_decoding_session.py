"""A session of the live engine takes requests while it decodes, continues what it keeps, and gives up others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from podium.engines.base import RolloutEngine
from podium.engines.live import engine as live
from podium.engines.live.engine import DecodingSession, LiveEngine
from podium.engines.transformers import TransformersEngine
from podium.errors import EngineError
from podium.models.attention import attention_implementation
from podium.models.forward import Forward
from podium.models.head import LogitScaling
from podium.records import RolloutRequest, SamplingSettings
from podium.testing import KINDS, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SETTINGS = SamplingSettings(num_completions=1, max_tokens=12, seed=3)
LENGTHS = (5, 14, 1, 9)


def request(i: int, **how: Any) -> RolloutRequest:
    ids = np.random.default_rng(i).integers(3, 260, LENGTHS[i]).tolist()
    return RolloutRequest(**{"token_ids": tuple(ids), "prompt_id": i, "max_tokens": 12, **how})


REQUESTS = [request(i) for i in range(4)]


@pytest.fixture(params=["llama", pytest.param("mistral", marks=pytest.mark.slow), "gpt2"])
def engine(request: pytest.FixtureRequest) -> LiveEngine:
    return LiveEngine(tiny_model(request.param), TOKENIZER)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward."""
    tokens: list[int] = []
    original = live.logits_of
    monkeypatch.setattr(
        live, "logits_of", lambda model, ids, *rest: (tokens.append(len(ids)), original(model, ids, *rest))[1]
    )
    return tokens


def run(session: DecodingSession, each_step: Callable[[], None] = lambda: None) -> dict[tuple[int, int], list[int]]:
    """Token ids by request and place, in the order in which they ended."""
    found = {}
    while session.is_busy:
        session.step()
        found |= {(each.request, each.place): each.token_ids for each in session.poll()}
        each_step()
    return found


def sampled(
    engine: RolloutEngine, asked: Sequence[RolloutRequest], settings: SamplingSettings
) -> list[list[tuple[list[int], list[float]]]]:
    """Token ids and log-probabilities of requests that are decoded together."""
    found = {}
    with engine.session(settings, asked) as session:
        numbers = [session.submit(each) for each in asked]
        while session.is_busy:
            session.step()
            found |= {(each.request, each.place): (each.token_ids, each.logps) for each in session.poll()}
    return [
        [found[number, place] for place in range(each.num_completions)]
        for number, each in zip(numbers, asked, strict=True)
    ]


def alone(engine: LiveEngine, asked: RolloutRequest) -> list[list[int]]:
    [group] = sampled(engine, [asked], SETTINGS)
    return [token_ids for token_ids, _ in group]


def test_requests_that_come_while_others_decode_draw_what_they_draw_alone(engine: LiveEngine) -> None:
    late = [replace(each, num_completions=2) for each in REQUESTS[1:]]
    with engine.session(SETTINGS, REQUESTS, max_rows=4) as session:
        numbers = [session.submit(REQUESTS[0])]
        found = run(session, lambda: numbers.append(session.submit(late.pop(0))) if late else None)
    for i, number in enumerate(numbers):
        expected = alone(engine, replace(REQUESTS[i], num_completions=2 if i else 1))
        assert [found[number, place] for place in range(len(expected))] == expected
    assert len(found) == 7
    assert next(iter(found)) == (numbers[0], 0)


def logps_of(engine: LiveEngine, asked: RolloutRequest, token_ids: list[int]) -> np.ndarray:
    """Log-probabilities by a plain forward of all tokens."""
    ids = torch.tensor([*asked.token_ids, *token_ids])
    with torch.no_grad(), attention_implementation(engine.model, "eager"):
        logps = engine.model(ids[None]).logits[0].log_softmax(-1)
    places = torch.arange(len(asked.token_ids), len(ids))
    return logps[places - 1, ids[places]].numpy()


@pytest.mark.parametrize("back", [0, 4, 15], ids=["whole", "parts within the completion", "parts within the prompt"])
def test_a_continued_request_computes_its_new_tokens_alone(engine: LiveEngine, forwards: list[int], back: int) -> None:
    """From where it parts from the kept sequence; the last token drawn was not computed yet."""
    first = request(1)
    with engine.session(SETTINGS, REQUESTS, max_rows=4, keeps=True) as session:
        number = session.submit(first)
        seen = [*first.token_ids, *run(session)[number, 0]]
        shared = seen[: len(seen) - back]
        turn = replace(first, token_ids=(*shared, (seen[-1] + 1) % 200 + 3, 7, 8), turn=1, max_tokens=3)
        if back:
            turn = replace(turn, token_ids=(*shared, (seen[-back] + 1) % 200 + 3, 7, 8))
        forwards.clear()
        other = session.submit(request(0))
        session.submit(turn)
        ended = []
        while session.is_busy:
            session.step()
            ended += session.poll()
    [again] = [each for each in ended if each.request == other + 1]
    assert forwards[0] == 3 + (back == 0)
    assert forwards[1] == len(request(0).token_ids)
    assert [again.token_ids] == alone(engine, turn)
    np.testing.assert_allclose(again.logps, logps_of(engine, turn, again.token_ids), atol=1e-4)


def test_a_request_that_only_begins_alike_leaves_the_kept_sequence(engine: LiveEngine, forwards: list[int]) -> None:
    """Another completion branches off from it, by a copy; its own goes on afterwards."""
    first = request(1)
    with engine.session(SETTINGS, REQUESTS, max_rows=4, keeps=True) as session:
        number = session.submit(first)
        seen = (*first.token_ids, *run(session)[number, 0])
        turns = [replace(first, token_ids=(*seen, 9), completion=g, turn=1, num_completions=2) for g in (5, 0)]
        forwards.clear()
        session.submit(turns[0])
        branch = run(session)
        assert forwards[0] == 2
        session.cancel(number + 1)
        forwards.clear()
        session.submit(turns[1])
        own = run(session)
        assert forwards[0] == 2
    assert [*branch.values()] == alone(engine, turns[0])
    assert [*own.values()] == alone(engine, turns[1])


def test_first_turns_do_not_depend_on_what_is_kept(engine: LiveEngine, forwards: list[int]) -> None:
    with engine.session(SETTINGS, REQUESTS, max_rows=4, keeps=True) as session:
        session.submit(REQUESTS[1])
        run(session)
        forwards.clear()
        session.submit(REQUESTS[1])
        run(session)
    assert forwards[0] == len(REQUESTS[1].token_ids)


@pytest.mark.parametrize("keeps", [False, True])
def test_cancelling_frees_places(engine: LiveEngine, keeps: bool) -> None:
    """Of a waiting, a running and a kept request."""
    with engine.session(SETTINGS, REQUESTS, max_rows=1, keeps=keeps) as session:
        running, waiting, last = (session.submit(each) for each in REQUESTS[:3])
        session.step()
        session.cancel(waiting)
        session.cancel(running)
        assert run(session) == {(last, 0): alone(engine, REQUESTS[2])[0]}
        number = session.submit(REQUESTS[3])
        session.step()
        assert session.is_decoding != keeps, "what is kept holds its place"
        session.cancel(last)
        assert run(session) == {(number, 0): alone(engine, REQUESTS[3])[0]}


def test_one_completion_of_a_running_request_is_cancelled(engine: LiveEngine) -> None:
    three = replace(REQUESTS[0], num_completions=3)
    with engine.session(SETTINGS, [three]) as session:
        number = session.submit(three)
        session.step()
        session.cancel(number, 1)
        found = run(session)
    expected = alone(engine, three)
    assert found == {(number, 0): expected[0], (number, 2): expected[2]}


def test_what_can_never_fit_is_refused() -> None:
    engine = LiveEngine(tiny_model("llama"), TOKENIZER)
    with engine.session(SETTINGS, REQUESTS, max_rows=2) as session:
        with pytest.raises(EngineError, match="asks for 3 completions; the engine decodes 2 at a time"):
            session.submit(replace(REQUESTS[0], num_completions=3))
        for empty in (replace(REQUESTS[0], token_ids=()), replace(REQUESTS[0], max_tokens=0)):
            with pytest.raises(EngineError, match="both must be at least 1"):
                session.submit(empty)
        assert not session.is_busy


@pytest.mark.parametrize("kind", KINDS[:1])
def test_requests_have_settings_of_their_own(kind: str) -> None:
    engine = LiveEngine(tiny_model(kind), TOKENIZER)
    own = [SETTINGS, replace(SETTINGS, greedy=True), replace(SETTINGS, temperature=0.3), replace(SETTINGS, seed=9)]
    own[2] = replace(own[2], end_ids=frozenset(range(4, 264, 5)), repetition_penalty=1.3)
    asked = [replace(each, settings=settings) for each, settings in zip(REQUESTS, own, strict=True)]
    together = sampled(engine, asked, SETTINGS)
    for each, settings, [(token_ids, _)] in zip(REQUESTS, own, together, strict=True):
        [[(expected, _)]] = sampled(engine, [each], settings)
        assert token_ids == expected
    assert together[1] != sampled(engine, REQUESTS, SETTINGS)[1]


def test_the_engine_of_generate_takes_settings_of_requests() -> None:
    forward = Forward(path="shared", head=LogitScaling(), temperature=1.0, precision=contextlib.nullcontext)
    engine = TransformersEngine(tiny_model("llama"), TOKENIZER, forward=forward, tokens_per_pack=1000)
    greedy = replace(SETTINGS, greedy=True)
    mixed = sampled(engine, [replace(REQUESTS[0], settings=greedy), REQUESTS[1]], SETTINGS)
    assert mixed == [sampled(engine, [REQUESTS[0]], greedy)[0], sampled(engine, [REQUESTS[1]], SETTINGS)[0]]
