"""Every kind of reward through the trainer, and what a reward does wrong in one clear message."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, TrainerCallback

from podium.errors import ConfigError, RewardError
from podium.testing import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 4) for b in range(4)]


def logs(trainer: Any, name: str) -> list[Any]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def length(completions: list[str], **_: Any) -> list[float]:
    return [len(text) for text in completions]


async def slow(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [len(text) / 2 for text in completions]


class Graded:
    def __call__(self, completions: list[str], answer: list[str]) -> list[float]:
        return [float(right in text) for text, right in zip(completions, answer, strict=True)]


def scaled(completions: list[str], factor: float, **_: Any) -> list[float]:
    return [factor * len(text) for text in completions]


@pytest.mark.slow
def test_all_kinds_together(make_trainer: Callable) -> None:
    rewards = [
        length,
        slow,
        Graded(),
        functools.partial(scaled, factor=3.0),
        lambda completions: [1] * len(completions),
    ]
    trainer = make_trainer(rewards, reward_weights=[1.0, 2.0, 0.0, 0.5, 10.0])
    trainer.train()
    last = trainer.state.log_history[-2]
    mean = last["rewards/length/mean"]
    assert last["rewards/slow/mean"] == pytest.approx(mean / 2)
    assert last["rewards/scaled/mean"] == pytest.approx(mean * 3)
    assert last["rewards/Graded/mean"] >= 0
    assert last["rewards/<lambda>/mean"] == 1
    assert last["reward"] == pytest.approx(mean * (1 + 1 + 1.5) + 10)


def test_two_of_one_name_have_columns_of_their_own(make_trainer: Callable) -> None:
    ones, zeros = (lambda completions: [1.0] * len(completions)), (lambda completions: [0.0] * len(completions))
    trainer = make_trainer([ones, zeros], max_steps=1)
    trainer.train()
    last = trainer.state.log_history[-2]
    assert (last["rewards/<lambda>/mean"], last["rewards/<lambda>_2/mean"]) == (1, 0)


@pytest.mark.slow
def test_none_does_not_apply(make_trainer: Callable) -> None:
    """Left out of the sum and of the metric; a row that nobody scores is not trained on."""

    def odd(completions: list[str], prompts: list[str]) -> list[float | None]:
        return [float(len(text)) if int(p[0]) % 2 else None for p, text in zip(prompts, completions, strict=True)]

    both = make_trainer([odd, length], max_steps=1)
    both.train()
    entry = both.state.log_history[0]
    assert math.isfinite(entry["reward"])
    alone = make_trainer(odd, shuffle_dataset=False, max_steps=2)
    alone.train()
    first, second = alone.state.log_history[:2]
    assert first["frac_reward_zero_std"] < 1
    assert second["rewards/odd/mean"] is None
    assert second["loss"] == 0
    assert second["grad_norm"] == 0


class EditsTheReward(TrainerCallback):
    """After the first step, edits a reward file and a module that it imports, and ends its worker process."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 1:
            return
        self.reward.path.write_text("def mine(completions):\n    return [9.0] * len(completions)\n")
        self.reward.path.with_name("its_part.py").write_text("MOST = 9.0\n")
        [worker] = self.reward._workers().take(1)
        worker.end()
        worker.process.wait(timeout=30)


def test_a_reward_file_edited_in_a_run_scores_as_it_began(
    make_trainer: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "its_part.py").write_text("MOST = 1.0\n")
    (tmp_path / "mine.py").write_text(
        "from its_part import MOST\n\n\ndef mine(completions):\n    return [min(len(c), MOST) for c in completions]\n"
    )
    edits = EditsTheReward()
    trainer = make_trainer(f"{tmp_path}/mine.py:mine", max_steps=2, callbacks=[edits])
    edits.reward = trainer.run.scoring.rewards[0].function
    before = edits.reward.digest
    trainer.train()
    assert logs(trainer, "reward") == [1.0, 1.0]
    assert edits.reward.digest == before
    changed = sorted(message for message in caplog.messages if "has changed since this run began" in message)
    assert [Path(message.split()[0]).name for message in changed] == ["its_part.py", "mine.py"]


def reward_model(folder: Path) -> str:
    """A tiny classifier and its tokenizer."""
    config = tiny_model("llama").config
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_reward_model_by_folder_and_as_a_module(make_trainer: Callable, tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "judge")
    module = AutoModelForSequenceClassification.from_pretrained(folder)
    by_name = make_trainer(folder, max_steps=1)
    by_module = make_trainer(
        [module, length],
        reward_processing_classes=[tiny_tokenizer(), None],
        reward_weights=[1, 0],
        max_steps=1,
    )
    for trainer in (by_name, by_module):
        trainer.train()
    assert logs(by_name, "rewards/judge/mean") == pytest.approx(logs(by_module, "rewards/judge/mean"))
    assert logs(by_name, "rewards/judge/std")[0] > 0
    assert logs(by_name, "loss")[0] == pytest.approx(logs(by_module, "loss")[0], abs=1e-6)


def test_what_a_reward_may_ask_for(make_trainer: Callable) -> None:
    seen: list[tuple[int, list[str], int]] = []

    def curious(
        prompts: Any, completions: Any, completion_ids: Any, answer: Any, trainer_state: Any, log_metric: Any
    ) -> list[float]:
        assert len(prompts) == len(completions) == len(completion_ids) == len(answer) == 16
        seen.append((trainer_state.global_step, answer, len(completion_ids[0])))
        log_metric("step_seen", trainer_state.global_step)
        return [len(ids) for ids in completion_ids]

    trainer = make_trainer(curious)
    trainer.train()
    assert [step for step, *_ in seen] == [0, 1]
    assert logs(trainer, "step_seen") == [0, 1]


def test_metrics_of_an_evaluation_stay_apart(make_trainer: Callable) -> None:
    def measured(completions: list[str], log_metric: Any) -> list[float]:
        log_metric("mood", len(completions))
        return [len(text) for text in completions]

    trainer = make_trainer(measured, eval_rows=ROWS[:3], eval_strategy="steps", eval_steps=1, max_steps=1)
    trainer.train()
    assert logs(trainer, "mood") == [16]
    assert logs(trainer, "eval_mood") == [12]


@pytest.mark.cases(2)
@pytest.mark.parametrize("scale", ["group", "batch", "none", True, False])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_scalings_and_aggregations_train(make_trainer: Callable, scale: Any, aggregation: str) -> None:
    trainer = make_trainer([length, slow], scale_rewards=scale, multi_objective_aggregation=aggregation, max_steps=1)
    trainer.train()
    assert logs(trainer, "grad_norm")[0] > 0


def test_a_function_in_a_file_draws_the_same_numbers_after_a_resume(make_trainer: Callable, tmp_path: Path) -> None:
    """Its process knows nothing of the run's generators but the seed that comes with every call."""
    (tmp_path / "mine.py").write_text(
        "import random\ndef noisy(completions, trainer_state, log_metric):\n"
        "    log_metric('seen', trainer_state.global_step)\n"
        "    return [len(text) + random.random() for text in completions]\n"
    )
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    whole = make_trainer(f"{tmp_path}/mine.py:noisy", **settings)
    whole.train()
    again = make_trainer(f"{tmp_path}/mine.py:noisy", **settings)
    again.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-1"))
    assert logs(again, "rewards/noisy/mean") == logs(whole, "rewards/noisy/mean")
    assert logs(again, "loss") == logs(whole, "loss")
    assert logs(whole, "seen") == [0, 1]


def test_a_judge_that_fails_is_left_out_and_the_run_goes_on(make_trainer: Callable, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\ndef dies(completions):\n    os._exit(1)\n")
    trainer = make_trainer([f"{tmp_path}/mine.py:dies", length], on_reward_error="none", max_steps=2)
    trainer.train()
    assert logs(trainer, "rewards/dies/failed") == [1.0, 1.0]
    assert logs(trainer, "rewards/dies/mean") == [None, None]
    assert logs(trainer, "reward") == logs(trainer, "rewards/length/mean")
    with pytest.raises(RewardError, match="None of the 16 completions"):
        make_trainer(f"{tmp_path}/mine.py:dies", on_reward_error="none").train()


# ---- what goes wrong ----


def raises(completions: list[str], **_: Any) -> list[float]:
    return [1 / (len(text) - len(text)) for text in completions]


async def raises_later(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    raise KeyError("verdict")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (raises, ["`raises`", "ZeroDivisionError", "row ", "completion 1 of 4", "test_rewards_in_training.py"]),
        (raises_later, ["`raises_later`", "KeyError", "verdict"]),
        (lambda completions: [float("inf")] * len(completions), ["<lambda>", "inf", "row "]),
        (lambda completions: [float("nan")] * len(completions), ["<lambda>", "NaN", "return None"]),
    ],
    ids=["raises", "async", "inf", "nan"],
)
def test_a_broken_reward_stops_the_run_and_is_named(make_trainer: Callable, reward: Any, says: list[str]) -> None:
    trainer = make_trainer(reward)
    with pytest.raises(RewardError) as error:
        trainer.train()
    for word in says:
        assert word in str(error.value), str(error.value)
    assert trainer.state.global_step == 0


@pytest.mark.cases(2)
@pytest.mark.usefixtures("pretest_each_time")
@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (lambda completions: [1.0], ["returned 1 values for 2 completions"]),
        (lambda completions: ["1.0"] * len(completions), ["returned str '1.0' as value 0", "row 0, completion 1 of 2"]),
        (lambda completions: 1.0, ["returned float 1.0; expected a list of 2 numbers"]),
        (lambda completions: None, ["returned None; expected a list of 2 numbers", "does the function end without"]),
    ],
    ids=["count", "string", "scalar", "none"],
)
def test_what_is_no_list_of_numbers_is_refused_before_training(
    make_trainer: Callable, reward: Any, says: list[str]
) -> None:
    with pytest.raises(RewardError) as error:
        make_trainer(reward)
    for words in ["`<lambda>` (", "test_rewards_in_training.py", *says]:
        assert words in str(error.value), str(error.value)


def test_a_broken_reward_says_what_the_completion_was(make_trainer: Callable) -> None:
    written: list[str] = []

    def picky(completions: list[str]) -> list[float]:
        written.extend(completions)
        return [float("inf") if i == 5 else 1.0 for i in range(len(completions))]

    with pytest.raises(RewardError, match=r"row 1, completion 2 of 4") as error:
        make_trainer(picky, shuffle_dataset=False).train()
    assert repr(written[5]) in str(error.value)


def test_weights_must_match(make_trainer: Callable) -> None:
    with pytest.raises(ConfigError, match="must match"):
        make_trainer([length, slow], reward_weights=[1.0])
    with pytest.raises(ConfigError, match="must match"):
        make_trainer([length], reward_processing_classes=[None, None])
    with pytest.raises(ConfigError, match="No reward source provided"):
        make_trainer([])


def test_a_column_that_is_not_there_is_named_early(make_trainer: Callable) -> None:
    def needs(completions: list[str], answr: list[str]) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"(?s)`needs`.*`answr`.*Did you mean `answer`"):
        make_trainer(needs)
