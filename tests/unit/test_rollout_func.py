"""`rollout_func` as in TRL 1.16 (S48 to S54), and code that replaces `model.generate`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trl

from podium import check
from podium.agents.rollout_func import _warn
from podium.engines.base import RolloutEngine
from podium.models.packing import pack
from podium.runs.monitors.history import RunSettings
from podium.runs.monitors.policy import sampler_disagrees
from podium.testing import tiny_model, tiny_tokenizer
from podium.trainer.samples import samples_of
from tests.unit.agents_setup import Seen, called, make, multiply, one, replied, scripted

pytestmark = pytest.mark.filterwarnings("ignore:You are using")

EOS = tiny_tokenizer().eos_token_id


def ids(text: str) -> list[int]:
    return list(tiny_tokenizer()(text)["input_ids"])


class Rollout:
    """Answers with numbers, and keeps what it was called with."""

    def __init__(self, **extra: Any) -> None:
        self.extra, self.calls = extra, list[tuple[list[Any], Any]]()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        self.calls.append((prompts, trainer))
        return {
            "prompt_ids": [ids("asked ") for _ in prompts],
            "completion_ids": [[*ids(f"answer {i}"), EOS] for i, _ in enumerate(prompts)],
            "logprobs": [[-0.5] * 9 for _ in prompts],
            **self.extra,
        }


def test_s48_it_is_given_every_prompt_as_often_as_the_group_is_large() -> None:
    rollout, seen = Rollout(), Seen()
    config = {"prove_first_batch": True}  # which would call it once more
    trainer = make(rollout_func=rollout, reward_funcs=seen, processing_class=tiny_tokenizer(), config=config)
    assert trainer.rollout_func is rollout
    trainer.train()
    [(prompts, given)] = rollout.calls
    assert [prompt[0]["content"] for prompt in prompts] == ["Row 0", "Row 0", "Row 1", "Row 1"]
    assert given is trainer
    prompts[0][0]["content"] = "changed"
    assert trainer.train_dataset[0]["prompt"][0]["content"] == "Row 0"  # it was a copy
    assert [c[0]["content"] for c in seen.given[0]["completions"]] == [f"answer {i}" for i in range(4)]
    for sample in samples_of(trainer.scored[0], np.ones(2)):
        assert sample.prompt_ids == tuple(ids("asked "))
        assert sample.sampled_logps_A.tolist() == [-0.5] * 9


@pytest.mark.cases(1)
@pytest.mark.parametrize("missing", ["prompt_ids", "completion_ids", "logprobs"])
def test_s49_keys_it_must_return(missing: str) -> None:
    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {name: [] for name in ("prompt_ids", "completion_ids", "logprobs") if name != missing}

    with pytest.raises(ValueError, match=rf"must return keys \['{missing}'\]"):
        make(rollout_func=rollout).train()


@pytest.mark.cases(4)
@pytest.mark.defect("AG1", "entries of a rollout_func that are no ids, no numbers or no mask, or too few")
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"completion_ids": [[1]]}, "1 `completion_ids` for 4 prompts"),
        ({"completion_ids": None}, "0 `completion_ids` for 4 prompts"),
        ({"prompt_ids": None}, "0 `prompt_ids` for 4 prompts"),
        ({"env_mask": [[1] * 9]}, "1 `env_mask` for 4 prompts"),
        ({"completion_ids": [[]] * 4}, "no token for completion 0"),
        ({"env_mask": [[1]] * 4}, "1 entries of `env_mask` for the 9 tokens"),
        ({"logprobs": [[-1.0]] * 4}, "1 `logprobs` for a completion of 9 tokens"),
        ({"logprobs": [[*[-1.0] * 8, 0.7]] * 4}, "log-probability 0.7 for token 8 of completion 0"),
        ({"env_mask": [[*[1] * 8, 0.5]] * 4}, "0.5 in `env_mask`, at token 8 of completion 0"),
        ({"tool_mask": [[1] * 9] * 4}, "`tool_mask`, with an entry for each token, and no `env_mask`"),
        (
            {"completion_ids": [[5], [5, 10**6], [5], [5]], "logprobs": None},
            "id 1000000 in `completion_ids` of compl.* 1",
        ),
        ({"prompt_ids": [[5], [5], [5], [-1]]}, "id -1 in `prompt_ids` of completion 3"),
        ({"prompt_ids": [[5], [], [5], [5]]}, "no `prompt_ids` for completion 1"),
        ({"prompt_ids": [None] * 4}, "None in `prompt_ids` of completion 0"),
        ({"completion_ids": ["four"] * 4}, "'four' in `completion_ids` of completion 0; expected a list of ids"),
        ({"completion_ids": [[5, 5.5]] * 4}, r"\[5, 5.5\] in `completion_ids` of completion 0"),
        ({"completion_ids": [5, 6, 7, 8]}, "5 in `completion_ids` of completion 0"),
        ({"logprobs": [[*[-1.0] * 8, -math.inf]] * 4}, "log-probability -inf for token 8 of completion 0: it was dr"),
        ({"logprobs": [-1.0] * 4}, "-1.0 in `logprobs` of completion 0; expected numbers"),
        ({"logprobs": [["-1"] * 8 + ["x"]] * 4}, "in `logprobs` of completion 0; expected numbers"),
        ({"env_mask": [1] * 4}, "1 in `env_mask` of completion 0"),
        ({"assistant_masks": torch.ones(4, 9)}, "`assistant_masks`, with an entry for each token, and no `env_mask`"),
    ],
)
def test_entries_that_cannot_be_are_one_message(
    extra: dict[str, Any], message: str, now: Callable[[str], None]
) -> None:
    with pytest.raises(RuntimeError, match=message) as refused:
        make(rollout_func=Rollout(**extra)).train()
    now(str(refused.value).splitlines()[0])


@pytest.mark.defect("AG1", "a forgotten return")
def test_a_forgotten_return_is_one_message() -> None:
    with pytest.raises(RuntimeError, match="rollout_func returned None; expected a dict"):
        make(rollout_func=lambda prompts, trainer: None).train()


@pytest.mark.cases(1)
@pytest.mark.defect("AG1", "tensors in place of lists, columns with mask in their name beside env_mask")
@pytest.mark.parametrize(
    "extra",
    [
        {"completion_ids": torch.full((4, 9), 5), "logprobs": torch.full((4, 9), -0.5), "env_mask": torch.ones(4, 9)},
        {"prompt_ids": [torch.tensor([5, 6])] * 4, "logprobs": [np.full(9, -0.5)] * 4},
        {"env_mask": [[True] * 9] * 4, "tool_mask": [[1] * 9] * 4},
        {"attention_mask": [[1] * 15] * 4, "mask": "none"},
    ],
    ids=["tensors", "tensor rows", "two masks", "of prompt and completion"],
)
def test_what_can_be_read_trains(extra: dict[str, Any]) -> None:
    trainer = make(rollout_func=Rollout(**extra))
    trainer.train()
    assert math.isfinite(trainer.state.log_history[0]["grad_norm"])


TURNS = [*ids("ask"), EOS], [*ids("\nuser: 42"), EOS, *ids("\n")], [*ids("done"), EOS]
"""A drawn turn, a given one, a drawn one."""
HONEST = [int(i != 1) for i, turn in enumerate(TURNS) for _ in turn]


def said_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, **extra: Any) -> str:
    """What is said of completions before their first step."""
    monkeypatch.setattr(logging.getLogger("podium"), "propagate", True)  # a command may have shown its notes before
    _warn.cache_clear()
    make(rollout_func=Rollout(**extra)).train()
    return "\n".join(record.message for record in caplog.records if "rollout_func" in record.message)


@pytest.mark.cases(3)
@pytest.mark.defect("AG2", "masks of the wrong position or sense, and honest ones")
@pytest.mark.parametrize(
    ("mask", "doubt"),
    [
        (HONEST, ""),
        ([0] * len(HONEST), "nothing is trained"),
        ([1] * len(HONEST), "followed by tokens that `env_mask` calls drawn"),
        ([1, *HONEST[:-1]], "followed by tokens that `env_mask` calls drawn"),
        ([*HONEST[1:], 1], "given tokens begin with the end token of the drawn ones, 4 times"),
        ([1 - each for each in HONEST], "may be inverted"),
    ],
    ids=["honest", "zeros", "ones", "shifted", "shifted back", "inverted"],
)
def test_a_mask_that_is_odd_is_said(
    mask: list[int],
    doubt: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    now: Callable[[str], None],
) -> None:
    tokens = [token for turn in TURNS for token in turn]
    said = said_of(caplog, monkeypatch, completion_ids=[tokens] * 4, logprobs=None, env_mask=[mask] * 4)
    now(said)
    assert bool(said) == bool(doubt), said
    assert doubt in said


SEARCH = [*ids("ask </search>"), *ids("<information>42</information>"), *ids("done"), EOS]
"""Turns that end with a text, as those of search agents do."""


@pytest.mark.cases(1)
@pytest.mark.defect("AG2", "honest completions of other forms: turns that end with a text, cut turns, padding")
@pytest.mark.parametrize(
    ("tokens", "mask"),
    [
        (SEARCH, [1] * 13 + [0] * (len(SEARCH) - 18) + [1] * 5),
        ([*ids("cut of"), EOS, *ids("\nuser: no"), *ids("done"), EOS], None),
        ([*ids("done"), EOS, EOS, EOS], [1, 1, 1, 1, 1, 0, 0]),
        ([*ids("cut"), EOS, EOS], [1, 1, 1, 0, 0]),
        ([*ids("given first "), *ids("drawn"), EOS], [0] * 12 + [1] * 6),
        ([*ids("drawn"), EOS, *ids("last words of a game")], [1] * 6 + [0] * 20),
    ],
    ids=["stops at a text", "", "padded", "cut and padded", "begins with given text", "ends with given text"],
)
def test_an_honest_mask_is_not_doubted(
    tokens: list[int], mask: list[int] | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mask is None:
        mask = [1, 1, 1, 1, 1, 1, 0, *[0] * 9, *[1] * 5]  # a turn that the function has ended, and one that ended
        tokens = [*tokens, *ids("\nuser: go"), *ids("on"), EOS]
        mask = [*mask, *[0] * 9, *[1] * 3]
    said = said_of(caplog, monkeypatch, completion_ids=[tokens] * 4, logprobs=None, env_mask=[mask] * 4)
    assert said == ""


@pytest.mark.defect("AG2", "completions longer than max_completion_length")
def test_long_completions_are_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "300 tokens, more than max_completion_length 256" in said_of(
        caplog, monkeypatch, completion_ids=[[7] * 300] * 4, logprobs=None
    )


class Policy(Rollout):
    """Answers with the model's own log-probabilities, which `change` then makes wrong."""

    def __init__(self, change: Callable[[dict[str, Any]], Any] = lambda given: None) -> None:
        super().__init__()
        self.change = change

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        given = super().__call__(prompts, trainer)
        given["completion_ids"] = [[*ids(f"answer {'abcd'[i]} to {i}"), EOS] for i, _ in enumerate(prompts)]
        given["env_mask"] = [[*[1] * 8, *[0] * 4, *[1] * 2]] * len(prompts)
        with torch.no_grad():
            for i, completion in enumerate(given["completion_ids"]):
                logits_TV = trainer.model(input_ids=torch.tensor([given["prompt_ids"][i] + completion])).logits[0]
                at = range(len(given["prompt_ids"][i]) - 1, len(logits_TV) - 1)
                logps = logits_TV.log_softmax(-1)[list(at), completion]
                given["logprobs"][i] = [
                    x if own else 0.0 for x, own in zip(logps.tolist(), given["env_mask"][i], strict=True)
                ]
        self.change(given)
        return given


def _next(given: dict[str, Any]) -> None:
    given["logprobs"] = [[*each[1:], -1.0] for each in given["logprobs"]]


def _mask(given: dict[str, Any]) -> None:
    given["env_mask"] = [[1] * 14] * 4


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "honest": (lambda given: None, ""),
    "none": (lambda given: given.update(logprobs=None), ""),
    "some": (lambda given: given["logprobs"].__setitem__(1, [None] * 14), ""),
    "rounded": (lambda given: given.update(logprobs=[[round(x, 1) for x in each] for each in given["logprobs"]]), ""),
    "of the next token": (_next, "those of the token after each"),
    "constant": (lambda given: given.update(logprobs=[[-0.5] * 14] * 4), "all of them are -0.5"),
    "swapped": (lambda given: given["logprobs"].reverse(), "those of other completions"),
    "another text": (lambda given: given.update(prompt_ids=[ids("Something quite different!")] * 4), "by "),
    "all ones": (_mask, "right but for zeros: `env_mask` may call given tokens drawn"),
}


@pytest.mark.cases(2)
@pytest.mark.defect("AG3", "log-probabilities that are not of these ids, named before the first step; honest ones")
@pytest.mark.parametrize("case", WRONG)
def test_log_probabilities_of_something_else_are_said_first(
    case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, now: Callable[[str], None]
) -> None:
    monkeypatch.setattr(logging.getLogger("podium"), "propagate", True)
    change, expected = WRONG[case]
    trainer = make(
        rollout_func=Policy(change),
        processing_class=tiny_tokenizer(),
        model=tiny_model("llama", initializer_range=0.5),
        config={"prove_first_batch": True},
    )
    trainer.train()
    said = {id(record): record.message for record in caplog.records if "M135" in record.message}.values()
    now("".join(said))
    assert len(said) == bool(expected)
    assert expected in "".join(said)
    others = {finding.code for finding in trainer.health.found} - {
        "M135",
        "W109",
    }  # the last of the reward of these tests
    assert not others


@pytest.mark.defect("AG3", "the fix of M135 is for the function")
def test_log_probabilities_of_something_else_are_the_functions_own() -> None:
    gap = np.array([0.8, 0.8, 0.8])
    found = {
        own: sampler_disagrees(SimpleNamespace(series=lambda *_, **__: gap, settings=RunSettings(rollout_func=own)))  # type: ignore[arg-type]
        for own in (True, False)
    }
    assert found[True] is not None
    assert found[False] is not None
    assert not found[True].changes
    assert "completion_ids" in found[True].fix
    assert found[False].changes


def test_s50_the_mask_and_other_keys() -> None:
    mask = [[1, 1, 0, 0, 0, 1, 1, 1, 1]] * 4
    rollout, seen = Rollout(env_mask=mask, score=[1.0, 2.0, 3.0, 4.0], level="high"), Seen()
    trainer = make(rollout_func=rollout, reward_funcs=seen)
    trainer.train()
    assert seen.given[0]["score"] == [1.0, 2.0, 3.0, 4.0]
    assert seen.given[0]["level"] == ["high"] * 4  # in place of the dataset's
    samples = samples_of(trainer.scored[0], np.ones(2))
    assert [sample.actions.tolist() for sample in samples] == [list(map(bool, mask[0]))] * 2
    [packed] = pack(samples, tokens_per_pack=4096)
    drawn = [token for token, own in zip(samples[0].token_ids, mask[0], strict=True) if own]
    assert packed.target_N.tolist()[:6] == drawn
    assert trainer.state.log_history[0]["completions/mean_length"] == 6.0


@pytest.mark.cases(1)
@pytest.mark.parametrize("logprobs", [None, [None] * 4, [[None] * 9] * 4])
def test_s51_log_probabilities_may_be_missing(logprobs: Any) -> None:
    trainer = make(rollout_func=Rollout(logprobs=logprobs))
    trainer.train()
    assert np.isnan(trainer.scored[0].group.completions[0].logps).all()
    assert math.isfinite(trainer.state.log_history[0]["loss"])
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_s52_completions_are_parsed_where_there_is_a_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = trl.chat_template_utils.qwen3_chat_template
    tokenizer, seen = trl.chat_template_utils.add_response_schema(tokenizer), Seen()
    thought = [[*ids("<think>\nhm\n</think>\n\nfour"), EOS]] * 4
    trainer = make(
        rollout_func=Rollout(completion_ids=thought, logprobs=None), reward_funcs=seen, processing_class=tokenizer
    )
    trainer.train()
    assert seen.given[0]["completions"][0][0]["content"] == "four"


def test_s46_all_tokens_of_a_completion_have_one_advantage() -> None:
    trainer = make(tools=[multiply])
    scripted(trainer, lambda text, i: "six" if replied(text) else called("multiply", a=2, b=3))
    trainer.train()
    samples = samples_of(trainer.scored[0], np.array([1.0, -1.0]))
    assert [set(sample.advantages_A.tolist()) for sample in samples] == [{1.0}, {-1.0}]
    packed = next(iter(pack(samples, tokens_per_pack=4096, device="cpu")))
    assert packed.advantages_R.tolist() == [1.0, -1.0]
    assert torch.equal(packed.advantages_N, packed.advantages_R[packed.rollout_N])
    assert set(packed.rollout_N.tolist()) == {0, 1}


def test_s47_sampling_log_probabilities_are_no_part_of_the_loss() -> None:
    weights = []
    for logp in (-0.5, -9.0):
        trainer = make(rollout_func=Rollout(logprobs=[[logp] * 9] * 4), processing_class=tiny_tokenizer())
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(*weights)


def test_s53_weights_are_synced_before_the_call() -> None:
    order: list[str] = []

    class Server(RolloutEngine):
        """An engine with weights of its own."""

        own_weights = True

        def sync(self, model: Any, step: int) -> None:
            order.append("sync")

        def sample(self, prompts: Any, settings: Any) -> Any:
            raise AssertionError("the function samples")

    class Ordered(Rollout):
        def __call__(self, *given: Any) -> dict[str, Any]:
            order.append("call")
            return super().__call__(*given)

    trainer = make(rollout_func=Ordered(), processing_class=tiny_tokenizer(), config={"max_steps": 2})
    engine = Server()
    engine.tokenizer = trainer.processing_class
    trainer.step.engine = engine
    trainer.train()
    assert order == ["sync", "call", "sync", "call"]


def test_s54_with_tools_its_completions_are_first_turns() -> None:
    call = [[*ids(called("multiply", a=6, b=7)), EOS]] * 4
    seen = Seen()
    trainer = make(rollout_func=Rollout(completion_ids=call, logprobs=None), reward_funcs=seen, tools=[multiply])
    calls = scripted(trainer, lambda text, row: "It is 42.")
    trainer.train()
    assert [len(rows) for rows in calls] == [4]
    assert calls[0][0].startswith("asked <tool_call>")
    assert replied(calls[0][0])
    assert [message["role"] for message in seen.given[0]["completions"][0]] == ["assistant", "tool", "assistant"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("named", [True, False])
def test_rewards_may_read_what_it_returns(named: bool) -> None:
    def by_name(completions: list[Any], env_reward: list[float], **kwargs: Any) -> list[float]:
        return env_reward

    def by_key(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(x) for x in kwargs["env_reward"]]

    reward, rollout = by_name if named else by_key, Rollout(env_reward=[0.0, 1.0, 2.0, 3.0])
    trainer = make(rollout_func=rollout, reward_funcs=reward, config={"prove_first_batch": True})
    trainer.train()
    assert trainer.scored[0].rewards_GK[:, 0].tolist() == [0.0, 1.0]
    given = {"model": trainer.run.policy.source, "args": trainer.args, "train_dataset": trainer.train_dataset}
    found = check(**given, reward_funcs=reward, rollout_func=rollout, processing_class=trainer.processing_class)
    assert not [each for each in found if each.severity == "error"]


def test_plain_prompts_and_evaluation() -> None:
    rollout = Rollout()
    trainer = make(
        rollout_func=rollout, train_dataset=[{"prompt": f"{i}"} for i in range(4)], eval_dataset=[{"prompt": "x"}]
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] is not None
    assert rollout.calls[-1][0] == ["x", "x"]


def test_s37_a_replaced_generate_samples() -> None:
    trainer = make(reward_funcs=one)
    calls = scripted(trainer, lambda text, row: f"scripted {row}")
    trainer.train()
    assert [each.text for scored in trainer.scored for each in scored.group.completions] == [
        f"scripted {i}" for i in range(4)
    ]
    assert len(calls) == 1
    del trainer.model.generate
    assert "scripted" not in trainer.generate_completions(trainer.train_dataset[:1])[0].group.completions[0].text
