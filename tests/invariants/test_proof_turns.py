"""The proof on the first batch for completions of several turns: silent on sound runs, and it finds planted faults."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import podium
import podium.models.packing
import podium.trainer.proof.completions
import podium.trainer.proof.evidence
import podium.trainer.samples
import podium.trainer.step
from podium.engines.base import Rollout, continuation, first_requests, play
from podium.errors import ProofError
from podium.records import Completion, Group, Prompt, RolloutRequest, Sample, SamplingSettings, Turn
from podium.testing import tiny_tokenizer
from podium.trainer.proof.checks import OF_TURNS

TOKENIZER = tiny_tokenizer()
END = 2
GIVEN = (11, 12, 13, 14, 15)
"""Tokens that stand between two turns."""


def three_turns(prompt: Prompt, g: int, settings: SamplingSettings, policy_step: int) -> Rollout:
    """Three turns at most: after each one the same tokens are given."""
    request = RolloutRequest(
        token_ids=prompt.token_ids, prompt_id=prompt.id, completion=g, max_tokens=settings.max_tokens
    )
    token_ids: list[int] = []
    logps: list[float] = []
    turns: list[Turn] = []
    drawn = yield [request]
    while True:
        turns.append(
            Turn(
                start=len(token_ids),
                stop=len(token_ids) + len(drawn.token_ids),
                message={"role": "assistant", "content": ""},
            )
        )
        token_ids += drawn.token_ids
        logps += drawn.logps
        stopped = token_ids[-1] == END
        if not stopped or len(token_ids) + len(GIVEN) >= settings.max_tokens or len(turns) == 3:
            break
        token_ids += GIVEN
        drawn = yield [continuation(request, token_ids)]
    return Completion(
        token_ids=tuple(token_ids),
        logps=tuple(logps),
        finish="stop" if stopped else "length",
        text=TOKENIZER.decode(token_ids, skip_special_tokens=True),
        policy_step=policy_step,
        turns=tuple(turns),
    )


@pytest.fixture
def make(make_trainer: Callable, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """A trainer whose completions have several turns; `change` is made to every completion of the round."""

    def made(change: Callable[[Completion], Completion] = lambda c: c, **settings: Any) -> Any:
        model = tiny_llama()
        head = model.get_output_embeddings()
        head.bias = nn.Parameter(torch.zeros(head.out_features), requires_grad=False)
        head.bias.data[END] = 4.0  # turns of a few tokens
        trainer = make_trainer(
            model=model, prove_first_batch=True, **{"max_completion_length": 48, "max_steps": 1, **settings}
        )
        engine, generate = trainer.run.step.engine, trainer.run.step.engine.generate

        def played(prompts: Sequence[Prompt], given: Any, *, policy_step: int = 0) -> list[Group]:
            if given.round < 0:
                return generate(prompts, given, policy_step=policy_step)
            count = given.num_completions
            rollouts = [three_turns(prompt, g, given, policy_step) for prompt in prompts for g in range(count)]
            made = play(engine, given, rollouts, first_requests(prompts, given), threads=2)
            completions = iter(map(change, made))
            return [Group(prompt=each, completions=tuple(islice(completions, count))) for each in prompts]

        monkeypatch.setattr(engine, "generate", played)
        return trainer

    return made


def results(trainer: Any) -> dict[str, dict[str, Any]]:
    proof = json.loads((Path(trainer.args.output_dir) / "proof.json").read_text(encoding="utf-8"))
    return {check["code"]: check for check in proof["checks"] if check["passed"] is False} or {
        check["code"]: check for check in proof["checks"]
    }


def failed(trainer: Any) -> dict[str, dict[str, Any]]:
    with pytest.raises(ProofError):
        trainer.train()
    assert trainer.state.global_step == 0
    return results(trainer)


@pytest.mark.cases(1)
@pytest.mark.parametrize("engine", ["live", "transformers"])
def test_sound_runs_pass(make: Callable, engine: str) -> None:
    trainer = make(rollout_engine=engine)
    trainer.train()
    found = results(trainer)
    assert {each["result"] for code, each in found.items() if code in ("P017", "P018", "P009", "P004", "P007")} == {
        "ok"
    }
    assert "of turns 2 to 3" in found["P018"]["detail"]
    assert len(OF_TURNS) == sum(code in found for code in ("P017", "P018", "P019"))


@pytest.mark.slow
def test_one_turn_needs_no_further_checks(make_trainer: Callable) -> None:
    trainer = make_trainer(prove_first_batch=True, max_steps=1)
    trainer.train()
    assert "P017" not in results(trainer)


def shifted(sample: Sample) -> Sample:
    """With an action mask that is off by one."""
    return dataclasses.replace(sample, actions=np.roll(sample.actions, -1))


def test_a_mask_shifted_by_one(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    samples_of = podium.trainer.samples.samples_of
    monkeypatch.setattr(
        podium.trainer.samples, "samples_of", lambda *given: [shifted(sample) for sample in samples_of(*given)]
    )
    found = failed(make())
    assert "was drawn and is no target" in found["P017"]["detail"]


def packed_otherwise(monkeypatch: pytest.MonkeyPatch, change: Callable[[Sample], Sample]) -> None:
    """Wherever samples are packed, these in place of those that were given."""
    pack = podium.models.packing.pack
    for module in (podium.trainer.step, podium.trainer.proof.evidence, podium.trainer.proof.completions):
        monkeypatch.setattr(module, "pack", lambda samples, **given: pack([*map(change, samples)], **given))


@pytest.mark.slow
def test_targets_shifted_by_one_in_the_pack(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    packed_otherwise(monkeypatch, shifted)
    assert {"P005", "P017"} <= set(failed(make()))


def test_a_given_token_in_the_loss(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_one_given(sample: Sample) -> Sample:
        """With the first given token in place of the last drawn one."""
        actions = sample.actions.copy()
        if not actions.all():
            actions[np.flatnonzero(actions)[-1]] = False
            actions[np.flatnonzero(~sample.actions)[0]] = True
        return dataclasses.replace(sample, actions=actions)

    packed_otherwise(monkeypatch, with_one_given)
    found = failed(make())
    assert "was given to the policy and is a target" in found["P017"]["detail"]


def test_other_tokens_than_the_engine_saw(make: Callable) -> None:
    """The record has another observation than the engine: the first turn agrees, the second does not."""

    def other_observation(c: Completion) -> Completion:
        ids = list(c.token_ids)
        for turn in c.turns[1:]:
            ids[turn.start - 1] = 40
        return dataclasses.replace(c, token_ids=tuple(ids))

    found = failed(make(other_observation))
    assert "first in turn 2" in found["P018"]["detail"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: dataclasses.replace(c, logps=(*c.logps, -1.0)), "drawn tokens came with"),
        (lambda c: dataclasses.replace(c, turns=(c.turns[0], *c.turns)), "overlap"),
        (lambda c: dataclasses.replace(c, token_ids=(*c.token_ids, *GIVEN * 9)), "nor is 48 long"),
    ],
)
def test_contradictions_of_turns_are_named(make: Callable, change: Callable, message: str) -> None:
    from podium.trainer.proof.completions import _completion_problem

    turns = tuple(Turn(start=a, stop=b, message={}) for a, b in ((0, 3), (8, 10)))
    ids = (5, 6, END, *GIVEN, 7, END)
    sound = Completion(token_ids=ids, logps=(-1.0,) * 5, finish="stop", text="", policy_step=0, turns=turns)
    tokenizer = type("T", (), {"decode": staticmethod(lambda ids, skip_special_tokens: "")})
    training = SimpleNamespace(policy=SimpleNamespace(tokenizer=tokenizer))
    run = SimpleNamespace(training=training, shown=str)
    x: Any = type("X", (), {"run": run})
    settings: Any = SimpleNamespace(end_ids=frozenset({END}), max_tokens=48)
    assert _completion_problem(x, sound, settings) == ""
    assert message in _completion_problem(x, change(sound), settings)


class Asks(podium.TextEnvironment):
    """Three turns, whatever is answered."""

    def reset(self, **row: Any) -> None:
        self.turns = 0

    def step(self, text: str) -> Any:
        self.turns += 1
        return "and now?", float(len(text)), self.turns >= 3, {}


def player(make_trainer: Callable, tiny_llama: Callable, end_bias: float) -> Any:
    """A trainer whose completions play `Asks`; the larger `end_bias`, the shorter their turns."""
    model = tiny_llama()
    head = model.get_output_embeddings()
    head.bias = nn.Parameter(torch.zeros(head.out_features), requires_grad=False)
    head.bias.data[END] = end_bias
    return make_trainer(
        None,
        model=model,
        rows=[{"prompt": [{"role": "user", "content": f"{i} + 1"}]} for i in range(8)],
        environment_factory=Asks,
        prove_first_batch=True,
        max_completion_length=96,
        max_steps=1,
    )


def test_an_environment_is_proved_with_its_own_rendering(make_trainer: Callable, tiny_llama: Callable) -> None:
    trainer = player(make_trainer, tiny_llama, 4.0)
    trainer.train()
    found = results(trainer)
    assert [found[code]["result"] for code in ("P004", "P009", "P017", "P018")] == ["ok"] * 4
    assert found["P019"]["passed"]
    compared = re.match(r"(\d+) of (\d+) conversations", found["P019"]["detail"])
    assert compared is not None
    assert (found["P019"]["result"] == "note") == (compared[1] != compared[2])


def test_a_difference_from_the_template_is_shown(make_trainer: Callable, tiny_llama: Callable) -> None:
    """The observation stands in the stream in other words than in the messages."""
    from podium.agents.chat import ChatFormat

    def twice(self: ChatFormat, replies: Sequence[Any], *, last: int, most: int | None = None) -> tuple[int, ...]:
        doubled = [{**reply, "content": f"{reply['content']} {reply['content']}"} for reply in replies]
        return suffix(self, doubled, last=last, most=most)

    suffix = ChatFormat.suffix
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatFormat, "suffix", twice)
        trainer = player(make_trainer, tiny_llama, 9.0)  # turns without text, which have no other division into tokens
        trainer.train()
    check = results(trainer)["P019"]
    assert check["result"] == "note"
    assert "and now" in check["detail"]
