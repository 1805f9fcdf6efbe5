"""The live engine between turns draws what rounds of `sample` do, with the log-probabilities of a plain forward.

What follows a turn is scripted: a function of the drawn tokens alone, answered at once, in part, or by threads that
sleep.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn

from podium.engines.base import Rollout, RolloutEngine, Sampled, WholeTurns, continuation, first_requests, play
from podium.engines.live import cache as live_cache
from podium.engines.live import engine as live
from podium.engines.live.engine import LiveEngine
from podium.engines.live.schedule import Schedule
from podium.models import devices
from podium.models.attention import attention_implementation
from podium.records import Completion, Group, Prompt, RolloutRequest, SamplingSettings, Turn
from podium.testing import KINDS, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = frozenset(range(4, 264, 9))
"""One token in nine, so that turns are short."""

Reply = Callable[[int, int, int, Sequence[int]], tuple[int, ...]]


def of_last_token(prompt: int, completion: int, turn: int, token_ids: Sequence[int]) -> tuple[int, ...]:
    """The same reply to completions with the same tokens, 3 to 6 tokens long."""
    return tuple((7 * token_ids[-1] + i + turn) % 200 + 3 for i in range(3 + (token_ids[-1] + prompt) % 4))


def of_completion(prompt: int, completion: int, turn: int, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Another reply to every completion."""
    return (20 + completion, *of_last_token(prompt, completion, turn, token_ids))


class Script:
    """Replies `reply(prompt, completion, turn, token_ids)` until `turns` turns are over or the budget is used up."""

    def __init__(
        self,
        settings: SamplingSettings,
        reply: Reply = of_last_token,
        *,
        turns: int = 9,
        sleeps: random.Random | None = None,
    ) -> None:
        """`sleeps`: replies come late."""
        self.settings, self.reply, self.turns = settings, reply, turns
        self.sleeps = sleeps
        self.waiting = threading.Lock()

    def rollout(self, p: int, prompt: Prompt, g: int) -> Rollout:
        request = RolloutRequest(
            token_ids=prompt.token_ids, prompt_id=prompt.id, completion=g, max_tokens=self.settings.max_tokens
        )
        token_ids: list[int] = []
        logps: list[float] = []
        turns: list[Turn] = []
        over, asked = False, request
        while not over:
            drawn = yield [asked]
            assert drawn.request is asked
            turns.append(Turn(start=len(token_ids), stop=len(token_ids) + len(drawn.token_ids), message={}))
            token_ids += drawn.token_ids
            logps += drawn.logps
            if self.sleeps is not None:
                with self.waiting:
                    seconds = 0.002 * self.sleeps.random()
                time.sleep(seconds)
            given, over = self.answer(p, g, turns, token_ids)
            token_ids += given
            if not over:
                asked = continuation(request, token_ids)
        return Completion(
            token_ids=tuple(token_ids), logps=tuple(logps), finish="stop", text="", policy_step=0, turns=tuple(turns)
        )

    def answer(self, p: int, g: int, turns: Sequence[Turn], token_ids: Sequence[int]) -> tuple[tuple[int, ...], bool]:
        reply = self.reply(p, g, len(turns), token_ids)
        over = len(turns) == self.turns or token_ids[-1] not in self.settings.end_ids
        over = over or len(token_ids) + len(reply) >= self.settings.max_tokens
        return () if over else reply, over


def played(
    engine: RolloutEngine, how: SamplingSettings, script: Script, prompts: Sequence[Prompt] | None = None
) -> list[Group]:
    """Groups whose completions follow a script."""
    prompts = PROMPTS if prompts is None else prompts
    count = how.num_completions
    rollouts = [script.rollout(p, prompt, g) for p, prompt in enumerate(prompts) for g in range(count)]
    completions = iter(play(engine, how, rollouts, first_requests(prompts, how), threads=len(rollouts)))
    return [Group(prompt=each, completions=tuple(islice(completions, count))) for each in prompts]


class Rounds(LiveEngine):
    """The live engine in rounds of `sample`, over prompts with all tokens so far."""

    interleaves = False

    def session(self, settings: SamplingSettings, expected: Sequence[RolloutRequest], **_: Any) -> Any:
        return nullcontext(WholeTurns(self, settings))

    def sample(self, requests: Sequence[RolloutRequest], settings: SamplingSettings) -> list[list[Sampled]]:
        sampled: list[list[Sampled]] = [[([], [])] * request.num_completions for request in requests]
        with LiveEngine.session(self, settings, requests) as session:
            place = {session.submit(request): group for request, group in zip(requests, sampled, strict=True)}
            while session.is_busy:
                session.step()
                for each in session.poll():
                    place[each.request][each.place] = each.token_ids, each.logps
        return sampled


def prompts_of(*lengths: int) -> list[Prompt]:
    ids = np.random.default_rng(0).integers(3, 260, max(lengths)).tolist()
    return [
        Prompt(id=i, row=i, token_ids=(3 + i, *ids[: length - 1]), text="", content="")
        for i, length in enumerate(lengths)
    ]


PROMPTS = prompts_of(5, 14, 1, 9)


def settings(**overrides: Any) -> SamplingSettings:
    return SamplingSettings(**{"num_completions": 3, "max_tokens": 40, "end_ids": END, "seed": 3, **overrides})


def sampled(
    model: nn.Module,
    how: SamplingSettings,
    *,
    engine: type[LiveEngine] = LiveEngine,
    max_rows: int | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
    **script: Any,
) -> list[Group]:
    return played(engine(model, TOKENIZER, max_rows=max_rows), how, Script(how, **script), prompts)


def completions_of(groups: Sequence[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def completion_errors(model: nn.Module, prompt: Prompt, completion: Completion, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of the drawn tokens, less those of a forward of prompt and completion alone."""
    ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
    with torch.no_grad(), attention_implementation(model, "eager"):
        logps_NV = model(ids[None]).logits[0].div(temperature).log_softmax(-1)
    drawn = np.concatenate([np.arange(turn.start, turn.stop) for turn in completion.turns])
    places = torch.from_numpy(drawn) + len(prompt.token_ids)
    return np.array(completion.logps) - logps_NV[places - 1, ids[places]].numpy()


def off(model: nn.Module, groups: Sequence[Group], temperature: float = 1.0) -> float:
    """The greatest of these differences, in nats."""
    errors = [completion_errors(model, group.prompt, x, temperature) for group in groups for x in group.completions]
    return float(np.abs(np.concatenate(errors)).max())


def check(groups: Sequence[Group], how: SamplingSettings) -> None:
    """Budgets, ends and counts of every completion."""
    for completion in completions_of(groups):
        count = len(completion.token_ids)
        assert count <= how.max_tokens
        assert sum(turn.stop - turn.start for turn in completion.turns) == len(completion.logps)
        assert completion.turns[-1].stop == count
        for turn in completion.turns:
            drawn = completion.token_ids[turn.start : turn.stop]
            assert drawn
            assert not how.end_ids & set(drawn[:-1])
            assert drawn[-1] in how.end_ids or turn.stop == how.max_tokens


def assert_alike(some: Sequence[Group], others: Sequence[Group]) -> None:
    for one, other in zip(completions_of(some), completions_of(others), strict=True):
        assert one.token_ids == other.token_ids
        assert one.turns == other.turns
        np.testing.assert_allclose(one.logps, other.logps, atol=1e-4)


# ---- against rounds, and against a plain forward ----


FEW = ("llama", "mistral", "gemma2", "gpt2")
"""The other kinds add nothing to attention; they are slow tests."""


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [pytest.param(x, marks=[] if x in FEW else [pytest.mark.slow]) for x in KINDS])
def test_turns_are_those_of_rounds_and_of_a_plain_forward(kind: str) -> None:
    """Windows, soft caps, shared key heads and learned positions; few rows, so that groups wait for others' tools."""
    model, how = tiny_model(kind), settings()
    groups = sampled(model, how, max_rows=7)
    check(groups, how)
    assert len({len(completion.turns) for completion in completions_of(groups)}) > 1, "budgets end completions"
    assert off(model, groups) < 1e-4
    assert_alike(groups, sampled(model, how, engine=Rounds))
    by_arrival = replace(how, in_order_of_answers=True)
    assert_alike(groups, sampled(model, by_arrival, max_rows=7, sleeps=random.Random(0)))


HOW: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "penalty": {"repetition_penalty": 1.3},
    "filters": {"top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "lengths": {"lengths": lambda prompt, completion: 2 + (prompt + completion) % 5},
    "greedy": {"greedy": True},
}


def check_drawing(model: nn.Module, groups: Sequence[Group], how: SamplingSettings) -> None:
    """Exact lengths of turns, where they are set; then a log-probability is among the tokens that may be drawn."""
    check(groups, how)
    if how.lengths is None:
        assert off(model, groups, how.temperature) < 1e-4
        return
    for group in groups:
        for g, completion in enumerate(group.completions):
            for turn in completion.turns:
                cut = how.max_tokens - turn.start
                assert turn.stop - turn.start == min(how.lengths(group.prompt.id, g), cut)


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", ["penalty", *(name for name in HOW if name != "penalty")])
def test_ways_of_drawing(how: str) -> None:
    model, drawn_how = tiny_model("llama"), settings(**HOW[how])
    groups = sampled(model, drawn_how, max_rows=7)
    check_drawing(model, groups, drawn_how)
    assert_alike(groups, sampled(model, drawn_how, engine=Rounds))


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("how", "in_order_of_answers"), [("temperature", False), ("penalty", False), ("lengths", True)]
)
@pytest.mark.usefixtures("as_if_cuda")
def test_rows_that_are_looked_at_every_eighth_token(
    how: str, in_order_of_answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU samples, without autocast: a row for each completion, which draws some tokens in vain after its turn.

    The model has no more positions than the longest prompt and completion need.
    """
    assert not devices.KINDS["cpu"].immediate
    drawn_how = settings(in_order_of_answers=in_order_of_answers, **HOW[how])
    model = tiny_model("gpt2", n_positions=14 + drawn_how.max_tokens)
    groups = sampled(model, drawn_how, max_rows=7, sleeps=random.Random(1))
    check_drawing(model, groups, drawn_how)
    assert_alike(groups, sampled(model, drawn_how, engine=Rounds))
    monkeypatch.setattr(live, "STEPS_PER_LOOK", 1)
    assert_alike(groups, sampled(model, drawn_how, max_rows=7))


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["gemma2", "llama"])
@pytest.mark.usefixtures("as_if_cuda")
def test_in_bfloat16_a_later_turn_is_as_near_as_the_first(kind: str) -> None:
    """To a forward in float32, in the mean over tokens; by autocast, attention included."""
    model, how = tiny_model(kind), settings()
    engine = LiveEngine(model, TOKENIZER, precision=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    groups = played(engine, how, Script(how))
    check(groups, how)
    errors = [np.abs(completion_errors(model, group.prompt, x)) for group in groups for x in group.completions]
    first = [x.turns[0].stop for x in completions_of(groups)]
    early = np.concatenate([e[:n] for e, n in zip(errors, first, strict=True)])
    late = np.concatenate([e[n:] for e, n in zip(errors, first, strict=True)])
    assert len(late) > len(early) > 50
    assert 0 < late.mean() < 2 * early.mean() < 0.1


# ---- budgets ----


@pytest.mark.cases(3)
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 30])
def test_budgets_are_exact(max_tokens: int) -> None:
    """Of drawn and given tokens together, whichever token uses them up; a turn that is cut has no end token."""
    how = settings(max_tokens=max_tokens, num_completions=8)
    groups = sampled(tiny_model("llama"), how, reply=lambda *_: (9, 9, 9))
    check(groups, how)
    lengths = {len(completion.token_ids) for completion in completions_of(groups)}
    assert max(lengths) == max_tokens
    ends = [completion.token_ids[-1] in how.end_ids for completion in completions_of(groups)]
    assert max_tokens < 9 or 0 < sum(ends) < len(ends)


def test_an_answer_that_leaves_no_token_to_draw_is_a_fault() -> None:
    how = settings(max_tokens=12)

    class Greedy(Script):
        def answer(self, *_: Any) -> tuple[tuple[int, ...], bool]:
            return (9,) * 12, False

    with pytest.raises(AssertionError, match="no room"):
        played(LiveEngine(tiny_model("llama"), TOKENIZER), how, Greedy(how))


@pytest.mark.parametrize("engine", [LiveEngine, Rounds])
def test_what_follows_the_last_turn_is_kept_and_nothing_is_drawn_after_it(engine: type[LiveEngine]) -> None:
    class LastWords(Script):
        def answer(self, *_: Any) -> tuple[tuple[int, ...], bool]:
            return (11, 12), True

    how = settings()
    groups = played(engine(tiny_model("llama"), TOKENIZER), how, LastWords(how))
    for completion in completions_of(groups):
        assert completion.token_ids[-2:] == (11, 12)
        assert len(completion.logps) == len(completion.token_ids) - 2 == completion.turns[-1].stop
        assert completion.action_mask == (*(True,) * len(completion.logps), False, False)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("reply", [(), (9,)], ids=["nothing", "one token"])
def test_the_shortest_replies(reply: tuple[int, ...]) -> None:
    model, how = tiny_model("qwen3"), settings()
    groups = sampled(model, how, reply=lambda *_: reply)
    check(groups, how)
    assert off(model, groups) < 1e-4


def test_rounds_go_on_while_another_process_has_completions_to_continue() -> None:
    """Processes that share an engine's weights call `sample` as often as each other."""
    called: list[int] = []

    class Together(Rounds):
        def sample(self, requests: Sequence[RolloutRequest], how: SamplingSettings) -> Any:
            called.append(len(requests))
            return super().sample(requests, how)

        def any_continues(self, count: int) -> bool:
            return len(called) < 12

    groups = sampled(tiny_model("llama"), settings(), engine=Together)
    assert_alike(groups, sampled(tiny_model("llama"), settings(), engine=Rounds))
    assert len(called) == 12
    assert called[-1] == 0


# ---- which tokens are computed ----


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward."""
    tokens: list[int] = []
    original = live.logits_of

    def counting(model: nn.Module, ids_T: torch.Tensor, *rest: Any) -> torch.Tensor:
        tokens.append(len(ids_T))
        return original(model, ids_T, *rest)

    monkeypatch.setattr(live, "logits_of", counting)
    return tokens


def inputs_of(groups: Sequence[Group]) -> int:
    """Tokens that one computation of every different beginning takes, behind the prompts."""
    inputs: set[tuple[Any, ...]] = set()
    for p, group in enumerate(groups):
        for completion in group.completions:
            for turn, following in zip(completion.turns, [*completion.turns[1:], None], strict=True):
                inputs |= {(p, completion.token_ids[:n]) for n in range(turn.start + 1, turn.stop)}
                if following is not None:
                    given = completion.token_ids[: following.start]
                    inputs |= {(p, given, n) for n in range(turn.stop, following.start + 1)}
    return len(inputs)


@pytest.mark.cases(2)
@pytest.mark.parametrize("reply", [of_last_token, of_completion])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_no_token_is_computed_twice(forwards: list[int], temperature: float, reply: Reply) -> None:
    """Completions with the same tokens and the same replies stay one row; with other replies the row forks."""
    how = settings(num_completions=6, temperature=temperature)
    model = tiny_model("llama")
    groups = sampled(model, how, reply=reply)
    assert off(model, groups, temperature) < 1e-4
    assert sum(forwards) == sum(len(prompt.token_ids) for prompt in PROMPTS) + inputs_of(groups)
    assert inputs_of(groups) < sum(len(completion.token_ids) for completion in completions_of(groups))


def test_greedy_completions_stay_one_row_through_all_turns(forwards: list[int]) -> None:
    how = settings(num_completions=8, greedy=True)
    groups = sampled(tiny_model("llama"), how, prompts=PROMPTS[:1])
    completion = groups[0].completions[0]
    assert groups[0].completions == (completion,) * 8
    assert len(completion.turns) > 1
    assert sum(forwards) == len(PROMPTS[0].token_ids) + len(completion.token_ids) - 1
    forwards.clear()
    apart = sampled(tiny_model("llama"), how, prompts=PROMPTS[:1], reply=of_completion)
    assert len({x.token_ids for x in apart[0].completions}) == 8
    assert 8 in forwards


def test_rows_that_were_answered_go_on_in_few_forwards(forwards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all of them, or as many as its tokens allow; attention within it also over one row at a time."""
    model, how = tiny_model("llama"), settings(lengths=lambda *_: 4, num_completions=2)
    whole = sampled(model, how, turns=3)
    assert len(forwards) == 3 * 4, "each turn one forward for its first token and three more"
    forwards.clear()
    monkeypatch.setattr(live_cache, "SCORES_AT_ONCE", 1)
    assert_alike(sampled(model, how, turns=3), whole)
    assert len(forwards) == 3 * 4
    forwards.clear()
    monkeypatch.setattr(live, "PREFILL_TOKENS", 16)
    assert_alike(sampled(model, how, turns=3), whole)
    assert len(forwards) > 3 * 4


# ---- the order of answers ----


def test_fixed_order_is_bit_equal_however_long_tools_take() -> None:
    """Two runs with threads that sleep for random times, and one without."""
    model, how = tiny_model("llama"), settings()
    expected = sampled(model, how, max_rows=7)
    for seed in range(2):
        assert sampled(model, how, max_rows=7, sleeps=random.Random(seed)) == expected


class Slow(Script):
    """The first completion's first answer comes when nothing else is left."""

    num_ended = 0
    ended_before = 0

    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self.changed = threading.Condition()

    def rollout(self, *given: Any) -> Rollout:
        completion = yield from super().rollout(*given)
        with self.changed:
            self.num_ended += 1
            self.changed.notify()
        return completion

    def answer(self, p: int, g: int, turns: Sequence[Turn], *rest: Any) -> tuple[tuple[int, ...], bool]:
        if (p, g, len(turns)) == (0, 0, 1):
            with self.changed:
                others = len(PROMPTS) * self.settings.num_completions - 1
                self.changed.wait_for(lambda: self.num_ended == others, 60)
                self.ended_before = self.num_ended
        return super().answer(p, g, turns, *rest)


def test_arrival_order_goes_on_without_the_slow_ones() -> None:
    """A completion whose tool hangs until all others are done does not hold them up."""

    how = settings(in_order_of_answers=True)
    script = Slow(how)
    model = tiny_model("llama")
    groups = played(LiveEngine(model, TOKENIZER), how, script)
    assert_alike(groups, sampled(model, how))
    assert script.ended_before > 6


# ---- rows, slots and places ----


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    return {
        "kind": draw(st.sampled_from(KINDS)),
        "lengths": draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)),
        "max_rows": draw(st.integers(1, 12)),
        "turns": draw(st.integers(1, 5)),
        "reply": draw(st.lists(st.integers(0, 12), min_size=1, max_size=4)),
        "apart": draw(st.booleans()),
        "gpu": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
        "how": {
            "num_completions": draw(st.integers(1, 4)),
            "max_tokens": draw(st.integers(1, 40)),
            "end_ids": frozenset(range(4, 264, draw(st.sampled_from([2, 5, 20])))),
            "temperature": draw(st.sampled_from([1.0, 0.2])),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.2])),
            "in_order_of_answers": draw(st.booleans()),
            "seed": draw(st.integers(0, 99)),
        },
    }


MODELS = {kind: tiny_model(kind) for kind in KINDS}


@examples(derandomize=True, max_examples=8, deadline=None)
@given(cases())
def test_any_shape(case: dict[str, Any]) -> None:
    """Rows fork, wait, go on and leave in any order: budgets hold, and log-probabilities are a plain forward's."""

    def reply(prompt: int, completion: int, turn: int, token_ids: Sequence[int]) -> tuple[int, ...]:
        length = case["reply"][(token_ids[-1] + turn) % len(case["reply"])]
        return tuple((completion * case["apart"] + turn + i) % 200 + 30 for i in range(length))

    model, how = MODELS[case["kind"]], settings(**case["how"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(devices.KINDS, "cpu", replace(devices.KINDS["cpu"], immediate=not case["gpu"]))
        groups = sampled(
            model,
            how,
            prompts=prompts_of(*case["lengths"]),
            max_rows=case["max_rows"],
            reply=reply,
            turns=case["turns"],
            sleeps=random.Random(case["seed"]),
        )
    check(groups, how)
    assert off(model, groups, how.temperature) < 2e-4


def test_rows_between_turns_keep_their_room() -> None:
    """Nothing is admitted in their place, so that running and waiting rows fit into `max_rows` places of the cache."""
    taken, slots = [], []
    original = Schedule.append

    class Watching(Schedule):
        def append(self, *given: Any) -> Any:
            moves = original(self, *given)
            taken.append(sum(len(row.completions) for row in (*self.rows, *self.kept)))
            slots.append(len(self.slots))
            assert len(self.rows) + len(self.kept) <= taken[-1]
            assert {row.slot for row in (*self.rows, *self.kept)} == set(range(len(self.slots)))
            return moves

    how = settings(in_order_of_answers=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "Schedule", Watching)
        played(LiveEngine(tiny_model("llama"), TOKENIZER, max_rows=7), how, Slow(how, sleeps=random.Random(0)))
    assert max(taken) == 7, "a group enters when there is room for all of it"
    assert max(slots) < len(PROMPTS)
    assert slots[-1] == 1


# ---- the same tokens in every release ----


def recorded(turns: int) -> list[dict[str, Any]]:
    """Tokens and log-probabilities of a model whose weights depend on no library's way to make them."""
    model, rng = tiny_model("llama"), np.random.default_rng(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.from_numpy(rng.normal(0.0, 0.3, tuple(parameter.shape))))
    groups = sampled(model, settings(), max_rows=7, turns=turns, reply=of_last_token)
    return [{"token_ids": [*x.token_ids], "logps": [*x.logps]} for x in completions_of(groups)]


@pytest.mark.parametrize("turns", [1, 9])
def test_the_same_seed_draws_the_tokens_that_it_drew_before(turns: int) -> None:
    """`sampled.json` is from before engines took requests; rounding of other processors moves log-probabilities."""
    before = json.loads(Path(__file__).with_name("sampled.json").read_text())[str(turns)]
    found = recorded(turns)
    assert [x["token_ids"] for x in found] == [x["token_ids"] for x in before]
    for now, then in zip(found, before, strict=True):
        np.testing.assert_allclose(now["logps"], then["logps"], atol=1e-4)
