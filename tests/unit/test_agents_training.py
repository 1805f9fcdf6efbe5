"""Training with tools and environments: every way of sampling, checkpoints, records, tables; TRL's own examples."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

import podium
from podium import TextEnvironment
from podium.agents.chat import ChatFormat
from podium.agents.episode import CORRECTION
from podium.cli.sampled import drawn_rows, sample_groups
from podium.errors import ConfigError
from podium.records import Call, Sample
from podium.runs import conversations
from podium.testing import tiny_model, tiny_tokenizer
from podium.trainer import rollouts as rollouts_of_a_round
from podium.trainer.rounds import Measurements, RoundKey, SampledRound
from podium.trainer.samples import Feature, ScoredRound, loss_tokens, turn_credit
from podium.trainer.saved_run import from_arrays, to_arrays
from tests.unit.agents_setup import ROWS, Seen, called, make, multiply, one, replied, scripted, tool_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using"),
    pytest.mark.skipif(not hasattr(PreTrainedTokenizerFast, "get_response_parser"), reason="needs transformers 5.13"),
]

SHORT_TURNS = {"generation_kwargs": {"eos_token_id": [2, *range(10, 60)]}, "max_completion_length": 400}
"""Turns of a few random tokens."""


@pytest.fixture
def calls_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in three turns are calls, by their tokens."""

    def parse(self: ChatFormat, token_ids: Any, *, prefix: Any, tools: Any = ()) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.tokenizer.decode(list(token_ids), skip_special_tokens=True)}
        if sum(token_ids) % 3:
            function = {"name": "multiply", "arguments": {"a": len(prefix) % 50, "b": 2}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message

    monkeypatch.setattr(ChatFormat, "parse", parse)


class Guess(TextEnvironment):
    def reset(self, **row: Any) -> str:
        self.number = 3
        return " Guess."

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        return "again", len(text) % 3 / 2, False, {}


def sampled(trainer: Any) -> list[tuple[int, ...]]:
    return [each.token_ids for scored in trainer.scored for each in scored.group.completions]


@pytest.mark.slow
@pytest.mark.usefixtures("calls_by_chance")
def test_random_turns_are_trained_and_repeat_however_long_tools_take() -> None:
    def slow(a: int, b: int) -> int:
        """Multiply.

        Args:
            a: A.
            b: B.
        """
        time.sleep(random.random() / 50)
        return a * b

    slow.__name__ = "multiply"
    config = {**SHORT_TURNS, "max_steps": 2, "learning_rate": 1e-2, "prove_first_batch": True}
    runs = []
    for _ in range(2):
        trainer = make(tools=[slow], config=config)
        trainer.train()
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        runs.append((sampled(trainer), weights))
        log = trainer.state.log_history[1]
        assert log["turns/max"] > 2
        assert log["health/logp_gap_max"] < 1e-3
    assert all(run[0] == runs[0][0] and torch.equal(run[1], runs[0][1]) for run in runs[1:])


@pytest.mark.cases(1)
@pytest.mark.usefixtures("calls_by_chance")
@pytest.mark.parametrize("engine", ["live", "transformers"])
def test_drawn_tokens_of_all_turns_keep_their_candidates(engine: str) -> None:
    config = {**SHORT_TURNS, "top_p": 0.6, "max_steps": 2, "prove_first_batch": True, "rollout_engine": engine}
    trainer = make(tools=[multiply], config=config)
    trainer.train()
    completions = [completion for scored in trainer.scored for completion in scored.group.completions]
    assert max(len(completion.turns) for completion in completions) > 1
    assert all(len(completion.candidates) == len(completion.logps) for completion in completions)
    assert trainer.state.log_history[1]["health/logp_gap_max"] < 1e-3


@pytest.mark.cases(1)
@pytest.mark.parametrize("config", [{}, {"tool_order": "arrival"}, {"rollout_engine": "transformers"}], ids=str)
def test_the_calls_of_a_turn_run_at_the_same_time(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call ends when those of all four completions have begun: a turn waits for one tool time, not for four."""

    def parse(self: ChatFormat, token_ids: Any, *, prefix: Any, tools: Any = ()) -> dict[str, Any]:
        if self.tokenizer.decode(list(prefix)).count("<tool_response>\n") == 3:
            return {"role": "assistant", "content": ""}
        function = {"name": "meet", "arguments": {}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    barrier = threading.Barrier(4)

    def meet() -> str:
        """Wait for the other calls."""
        barrier.wait(20)
        return "met"

    monkeypatch.setattr(ChatFormat, "parse", parse)
    trainer = make(tools=[meet], config={**SHORT_TURNS, **config})
    trainer.train()
    log = trainer.state.log_history[0]
    assert (log["tools/call_frequency"], log["tools/failure_frequency"]) == (3, 0)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("calls_by_chance")
@pytest.mark.parametrize(
    "config",
    [
        {"rollout_engine": "transformers"},
        {"dynamic_sampling": True, "max_resamples": 2},
        {"async_rollouts": 1, "max_steps": 3},
        {"tool_order": "arrival"},
        {"max_turns": 2},
        {"loss_type": "bnpo", "num_iterations": 2, "beta": 0.1, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_every_way_of_sampling(config: dict[str, Any]) -> None:
    trainer = make(tools=[multiply], config={**SHORT_TURNS, "max_steps": 2, **config}, eval_dataset=ROWS[:2])
    trainer.train()
    turns = [len(each.turns) for scored in trainer.scored for each in scored.group.completions]
    assert 1 < max(turns) <= config.get("max_turns", 100)
    assert np.isfinite(trainer.state.log_history[0]["loss"])
    assert trainer.evaluate()["eval_loss"] is not None


@pytest.mark.cases(1)
@pytest.mark.parametrize("config", [{}, {"async_rollouts": 1}, {"dynamic_sampling": True}], ids=str)
def test_a_text_environment_is_played_for_its_reward(config: dict[str, Any]) -> None:
    given = {"environment_factory": Guess, "reward_funcs": None, "train_dataset": None}
    trainer = make(config={**SHORT_TURNS, "max_turns": 4, **config}, **given)
    trainer.train()
    assert trainer.reward_func_names == ["Guess"]
    [completion, *_] = trainer.scored[0].group.completions
    assert trainer.scored[0].rewards_GK[0, 0] == sum(turn.reward for turn in completion.turns)
    assert [message["content"] for message in completion.messages if message["role"] == "user"] == ["again"] * 3


def test_rows_whose_prompt_is_null_are_asked_by_reset() -> None:
    """With a reward model too, which is asked before training whether it can read the prompts."""
    config = tiny_model(max_position_embeddings=4096).config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    given = {"reward_funcs": model, "reward_processing_classes": tool_tokenizer()}
    rows = [{"prompt": None, "number": i} for i in range(4)]
    trainer = make(environment_factory=Guess, train_dataset=rows, config={**SHORT_TURNS, "max_turns": 2}, **given)
    trainer.train()
    assert all("Guess." in scored.group.prompt.text for scored in trainer.scored)


def test_a_turn_that_ends_at_a_stop_text_is_answered() -> None:
    """Only a turn that fills `max_completion_length` is cut off."""
    kwargs = {"stop_strings": [*"aeiou135"], "eos_token_id": 2}
    config = {"generation_kwargs": kwargs, "max_turns": 3, "max_completion_length": 200, "prove_first_batch": True}
    trainer = make(environment_factory=Guess, reward_funcs=None, train_dataset=None, config=config)
    trainer.train()
    completions = [each for scored in trainer.scored for each in scored.group.completions]
    played = [each for each in completions if len(each.turns) == 3]
    assert played
    assert any(each.token_ids[each.turns[0].stop - 1] != 2 for each in played)
    assert all(each.finish == "turns" or len(each.token_ids) == 200 for each in completions)


@pytest.mark.cases(1)
@pytest.mark.parametrize("config", [{"loss_type": "dr_grpo"}, {"loss_type": "vespo"}, {"async_rollouts": 1}], ids=str)
def test_turns_have_advantages_of_their_own(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[Sample]] = []

    def watch(samples: Sequence[Sample], _: ScoredRound) -> list[Sample]:
        made.append(list(samples))
        return made[-1]

    monkeypatch.setattr(
        rollouts_of_a_round, "STEPS", (Feature(turn_credit), Feature(watch), *rollouts_of_a_round.STEPS)
    )
    given = {"environment_factory": Guess, "reward_funcs": None, "train_dataset": None}
    config = {**SHORT_TURNS, "max_steps": 2, "max_turns": 3, "prove_first_batch": True, **config}
    trainer = make(config={**config, "scale_rewards": "none", "turn_discount": 1.0}, **given)
    trainer.train()
    completions = trainer.scored[-1].group.completions
    totals = np.array([sum(turn.reward for turn in each.turns) for each in completions])
    last = np.array([each.turns[-1].reward for each in completions])
    of_group = made[-1][-len(completions) :]
    for sample, total, reward in zip(of_group, totals, last, strict=True):
        assert sample.advantages_A[0] == pytest.approx(sample.advantage) == pytest.approx(total - totals.mean())
        assert sample.advantages_A[-1] == pytest.approx(reward - last.mean(), abs=1e-6)


def test_turn_discount_needs_rewards_of_steps() -> None:
    class Paid(Guess):
        def get_reward(self) -> float:
            return 1.0

    for given in ({"tools": [multiply]}, {"environment_factory": Paid, "reward_funcs": None}):
        with pytest.raises(ConfigError, match="turn_discount needs rewards of steps"):
            make(config={**SHORT_TURNS, "turn_discount": 0.9}, **given)
    config = {"turn_discount": 1.0, "multi_objective_aggregation": "normalize_then_sum"}
    with pytest.raises(ConfigError, match="cannot be used with multi_objective_aggregation"):
        make(config={**SHORT_TURNS, **config}, environment_factory=Guess, reward_funcs=None)


MALFORMED = "<tool_call>\n{'name': multiply}\n</tool_call>"


@pytest.mark.parametrize("masks", [False, True])
def test_void_turns_are_masked(masks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[np.ndarray] = []

    def kept(*given: Any) -> np.ndarray:
        made.append(loss_tokens(*given))
        return made[-1]

    monkeypatch.setattr(rollouts_of_a_round, "loss_tokens", kept)
    trainer = make(tools=[multiply], config={"mask_void_turns": masks})
    scripted(trainer, lambda text, i: [MALFORMED, "six", "", "six"][i])
    trainer.train()
    [counted_PG] = made
    assert (counted_PG == 0).tolist() == [[masks, False], [masks, False]]


def test_malformed_calls_are_corrected_as_often_as_allowed() -> None:
    trainer = make(tools=[multiply], config={"max_call_corrections": 2, "max_completion_length": 1000})
    good = called("multiply", a=2, b=3)

    def answer(text: str, i: int) -> str:
        tried = text.count(CORRECTION)
        return "six" if replied(text) else good if i and tried == i else MALFORMED

    scripted(trainer, answer)
    trainer.train()
    completions = [each for scored in trainer.scored for each in scored.group.completions]
    corrections = [sum(message.get("content") == CORRECTION for message in each.messages) for each in completions]
    assert sorted(corrections) == [1, 2, 2, 2]


def test_a_step_that_hangs_ends_its_episode_and_the_environment_is_replaced() -> None:
    class Slow(Guess):
        def step(self, text: str) -> Any:
            time.sleep(0.0 if self.row_index else 5.0)
            return None, 1.0, True, {}

    trainer = make(environment_factory=Slow, reward_funcs=None, config={"tool_timeout": 0.2})
    scripted(trainer, lambda text, row: "go")
    started = time.perf_counter()
    first = trainer.generate_completions(ROWS[:2])
    assert time.perf_counter() - started < 3
    assert [each.rewards_GK[:, 0].tolist() for each in first] == [[0.0, 0.0], [1.0, 1.0]]
    stuck = trainer.environments[:2]
    trainer.generate_completions(ROWS[:2])
    assert not {id(each) for each in stuck} & {id(each) for each in trainer.environments}


def test_a_method_that_hangs_is_a_failed_call_and_its_environment_is_replaced() -> None:
    class Shop:
        def reset(self, **row: Any) -> None: ...

        def buy(self, what: str) -> str:
            """Buy.

            Args:
                what: Any.
            """
            time.sleep(5)
            return what

    seen = Seen()
    trainer = make(environment_factory=Shop, reward_funcs=seen, config={"tool_timeout": 0.1})
    scripted(trainer, lambda text, row: "done" if replied(text) else called("buy", what="x"))
    trainer.generate_completions(ROWS[:1])
    assert "did not return within 0.1 s" in seen.given[0]["completions"][0][1]["content"]
    stuck = trainer.environments
    trainer.generate_completions(ROWS[:1])
    assert not {id(each) for each in stuck} & {id(each) for each in trainer.environments}


@pytest.mark.versions
@pytest.mark.usefixtures("calls_by_chance")
def test_a_round_with_turns_is_saved_and_read() -> None:
    class Extends(Guess):
        def reset(self, **row: Any) -> str:
            return f" {id(self)}"

    trainer = make(environment_factory=Extends, tools=[multiply], config=SHORT_TURNS)
    trainer.train()
    scored = tuple(trainer.scored)
    saved = SampledRound(
        key=RoundKey(0, 0), policy_step=0, places=(0, 1), scored=scored, measured=Measurements(), num_fresh=0
    )
    for record in (saved, trainer.round):
        arrays = {name: np.array(values) for name, values in to_arrays(record).items()}
        read = from_arrays(arrays, trainer.saved._prompt)
        again = to_arrays(read)
        assert all(np.array_equal(arrays[name], again[name]) for name in arrays)
    read = from_arrays(to_arrays(saved), trainer.saved._prompt)
    assert read.scored[0].group == scored[0].group


@pytest.mark.versions
def test_a_killed_run_continues_bit_equal(tmp_path: Path) -> None:
    config = {**SHORT_TURNS, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "num_iterations": 2}
    given = {"environment_factory": Guess, "reward_funcs": None, "train_dataset": None}

    def run(folder: str, **changes: Any) -> Any:
        all_of_it = {**config, "max_turns": 3, "output_dir": str(tmp_path / folder), "async_rollouts": 1, **changes}
        return make(config=all_of_it, **given)

    whole = run("whole")
    whole.train()
    resumed = run("whole")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for one_, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one_, other)


@pytest.mark.versions
def test_turns_are_recorded_and_in_the_tables(tmp_path: Path) -> None:
    trainer = make(tools=[multiply], config={"output_dir": str(tmp_path), "log_completions": True})
    scripted(trainer, lambda text, row: "It is 42." if replied(text) else called("multiply", a=6, b=7))
    trainer.train()
    recorded = pd.read_parquet(next((tmp_path / "rollouts").glob("*.parquet")))
    turns = conversations.read(recorded["turns"][0])
    assert [turn.message["content"] for turn in turns] == ["", "It is 42."]
    assert turns[0].calls[0] == Call(
        name="multiply", arguments={"a": 6, "b": 7}, content="42", failed=False, seconds=turns[0].calls[0].seconds
    )
    assert turns[1].start > turns[0].stop
    assert recorded["num_tokens"][0] == sum(turn.stop - turn.start for turn in turns)
    table = pd.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
    assert [message["role"] for message in table["completion"][0]] == ["assistant", "tool", "assistant"]
    assert json.loads(table["completion"][0][0]["tool_calls"])[0]["function"]["name"] == "multiply"
    assert table["prompt"][0][0]["content"] == "Row 0"


def test_s39_reward_models_read_the_whole_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_model().config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    tokenizer, texts = tool_tokenizer(), list[str]()
    apply = type(tokenizer).apply_chat_template

    def kept(self: Any, *args: Any, **given: Any) -> Any:
        result = apply(self, *args, **given)
        if self is tokenizer:
            texts.append(result)
        return result

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", kept)
    config = {"max_completion_length": 160}
    trainer = make(tools=[multiply], reward_funcs=model, reward_processing_classes=tokenizer, config=config)
    scripted(trainer, lambda text, row: "It is 42." if replied(text) else called("multiply", a=6, b=7))
    trainer.generate_completions(ROWS[:1])
    assert "<tool_response>\n42\n</tool_response>" in texts[-1]
    assert texts[-1].endswith("It is 42.<|im_end|>\n")


def test_rewards_that_need_environments_are_not_tested_without_them(caplog: pytest.LogCaptureFixture) -> None:
    def counted(environments: list[Any], **_: Any) -> list[float]:
        return [float(i % 2) for i, _ in enumerate(environments)]

    given = {"environment_factory": Guess, "reward_funcs": [counted], "train_dataset": None}
    trainer = make(podium.GRPOTrainer, config={**SHORT_TURNS, "max_turns": 2}, **given)
    trainer.train()
    assert not [text for text in caplog.messages if "W002" in text or "W122" in text]


# ---- examples of TRL's documentation, with the import changed ----


@pytest.mark.versions
def test_trls_example_of_tools() -> None:
    async def async_add(a: int, b: int) -> int:
        """
        Asynchronously adds two integers.

        Args:
            a: The first integer.
            b: The second integer.

        Returns:
            The sum of the two integers.
        """
        await asyncio.sleep(0)
        return a + b

    trainer = make(
        podium.GRPOTrainer,
        tools=[multiply, async_add],
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": "What is 3 * 4?"}], "answer": 12}] * 4
        ),
    )
    scripted(trainer, lambda text, row: "12" if replied(text) else called("async_add", a=6, b=6))
    trainer.train()
    assert trainer.state.log_history[0]["tools/call_frequency"] == 1.0


class IncrementEnv:
    def reset(self, **kwargs: Any) -> str | None:
        self.counter = 0
        return None

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


@pytest.mark.versions
def test_trls_example_of_an_environment() -> None:
    def reward_func(environments: list[IncrementEnv], **kwargs: Any) -> list[float]:
        return [float(environment.counter) for environment in environments]

    rows = [{"prompt": [{"role": "user", "content": f"Increment the counter by {i}."}]} for i in range(1, 7)]
    trainer = make(
        podium.GRPOTrainer,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=reward_func,
        environment_factory=IncrementEnv,
    )
    scripted(trainer, lambda text, row: "done" if replied(text) else called("increment", step=row))
    trainer.train()
    assert sorted(x for each in trainer.scored for x in each.rewards_GK[:, 0]) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.versions
def test_trls_example_of_several_environments() -> None:
    class Other(IncrementEnv):
        def get_reward(self) -> float:
            return 1.0

    rows = [{"environment": name, "prompt": [{"role": "user", "content": "Go"}]} for name in ("a", "b") * 3]
    given = {"environment_factory": {"a": IncrementEnv, "b": Other}, "train_dataset": Dataset.from_list(rows)}
    trainer = make(podium.GRPOTrainer, reward_funcs=[one], **given)
    scripted(trainer, lambda text, row: "done")
    trainer.train()
    assert trainer.state.log_history[0]["rewards/Other/mean"] == 1.0


@pytest.mark.versions
def test_trls_example_of_rollout_func() -> None:
    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        with torch.no_grad():
            output = trainer.model.generate(**inputs, max_new_tokens=6, do_sample=True)
        completion_ids = output[:, inputs["input_ids"].shape[1] :].tolist()
        return {
            "prompt_ids": tokenizer(prompts)["input_ids"],
            "completion_ids": completion_ids,
            "logprobs": [[0.0] * len(ids) for ids in completion_ids],
            "env_reward": [float(i % 2) for i, _ in enumerate(prompts)],
        }

    def reward(completions: list[str], env_reward: list[float], **kwargs: Any) -> list[float]:
        return env_reward

    rows = Dataset.from_dict({"prompt": [f"Say {i}" for i in range(6)]})
    given = {"train_dataset": rows, "reward_funcs": reward, "processing_class": tiny_tokenizer()}
    trainer = make(podium.GRPOTrainer, rollout_func=rollout_func, **given)
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == 0.5


def test_trials_before_training_play_whole_episodes() -> None:
    """`podium sample` samples and scores as training does."""
    given = {"environment_factory": Guess, "reward_funcs": None, "train_dataset": None}
    trainer = make(config={**SHORT_TURNS, "max_turns": 3}, **given)
    assert sample_groups(trainer, drawn_rows(trainer, trainer.train_dataset, 2))[0][0].rewards_GK.shape == (2, 1)


@pytest.mark.cases(1)
@pytest.mark.defect("AG15", "a first batch with next to no gradient: the proof stops nothing")
@pytest.mark.parametrize("config", [{}, {"beta": 0.1}, {"num_iterations": 2, "max_steps": 2}], ids=str)
@pytest.mark.parametrize("certainty", [30, 300])
def test_a_policy_that_is_sure_is_no_fault(config: dict[str, Any], certainty: float) -> None:
    model = tiny_model("llama", initializer_range=0.5)
    with torch.no_grad():
        model.lm_head.weight.mul_(certainty)
    config = {"prove_first_batch": True, "max_completion_length": 32, "learning_rate": 1e-6, **config}
    trainer = make(model=model, processing_class=tiny_tokenizer(), config=config)
    trainer.train()
    words = {check.code: check.word for check in trainer.proof.checks}
    assert {words[code] for code in ("P007", "P012")} <= {"ok", "not checked"}
    assert "FAILED" not in words.values()
