"""`rollout_func` as in TRL 1.16 (S48 to S54), and code that replaces `model.generate`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import trl

from podium.engines.base import RolloutEngine
from podium.models.packing import pack
from podium.testing import tiny_tokenizer
from podium.trainer.training_groups import training_group
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
    group = training_group(trainer.scored[0], np.ones(2))
    assert group.prompt_ids == tuple(ids("asked "))
    assert group.sampled_logps[0].tolist() == [-0.5] * 9


@pytest.mark.parametrize("missing", ["prompt_ids", "completion_ids", "logprobs"])
def test_s49_keys_it_must_return(missing: str) -> None:
    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {name: [] for name in ("prompt_ids", "completion_ids", "logprobs") if name != missing}

    with pytest.raises(ValueError, match=rf"must return keys \['{missing}'\]"):
        make(rollout_func=rollout).train()


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
    ],
)
def test_entries_of_another_number_are_one_message(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        make(rollout_func=Rollout(**extra)).train()


def test_s50_the_mask_and_other_keys() -> None:
    mask = [[1, 1, 0, 0, 0, 1, 1, 1, 1]] * 4
    rollout, seen = Rollout(env_mask=mask, score=[1.0, 2.0, 3.0, 4.0], level="high"), Seen()
    trainer = make(rollout_func=rollout, reward_funcs=seen)
    trainer.train()
    assert seen.given[0]["score"] == [1.0, 2.0, 3.0, 4.0]
    assert seen.given[0]["level"] == ["high"] * 4  # in place of the dataset's
    group = training_group(trainer.scored[0], np.ones(2))
    assert [each.tolist() for each in group.drawn] == [list(map(bool, mask[0]))] * 2
    [packed] = pack([group], tokens_per_pack=4096)
    drawn = [token for token, own in zip(group.completion_ids[0], mask[0], strict=True) if own]
    assert packed.target_N.tolist()[:6] == drawn
    assert trainer.state.log_history[0]["completions/mean_length"] == 6.0


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
    group = training_group(trainer.scored[0], np.array([1.0, -1.0]))
    assert group.token_advantages is None
    packed = next(iter(pack([group], tokens_per_pack=4096, device="cpu")))
    assert packed.advantages_R.tolist() == [1.0, -1.0]
    assert packed.token_advantages_N is None
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
    trainer.parts = dataclasses.replace(trainer.parts, engine=engine)
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
