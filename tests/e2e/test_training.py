"""TRL's training arguments do what they say, on a tiny model: rounds, datasets, evaluation, metrics, sampling, logs."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from benchmarks.families import tiny
from podium import GRPOConfig, GRPOTrainer
from podium.engines.transformers import TransformersEngine
from podium.errors import ConfigError, DataError, ModelError
from podium.models.loading import disable_dropout
from podium.runs import checkpoint
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer

TRAINERS_OWN = {"loss", "grad_norm", "learning_rate", "epoch", "step"}
ROLLOUTS = {
    "num_tokens",
    "step_time",
    *(f"completions/{name}_{which}" for name in ("mean", "min", "max") for which in ("length", "terminated_length")),
    "completions/clipped_ratio",
    "rewards/digits/mean",
    "rewards/digits/std",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "entropy",
}
"""TRL 1.16's names for every run."""
OWN = ("time/", "health/", "finding/")
"""Podium's names besides TRL's."""
CLIP = {f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}


def weights_of(trainer: GRPOTrainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def moved(trainer: GRPOTrainer, before: dict[str, Tensor]) -> float:
    return max(float((value - before[name]).abs().max()) for name, value in weights_of(trainer).items())


_plain: list[tuple[dict[str, Tensor], list[Any]]] = []


def trained_plainly(make_trainer: Callable) -> tuple[dict[str, Tensor], list[Any]]:
    """Weights and counts of tokens after two steps with the settings of `make_trainer`, trained once."""
    if not _plain:
        trainer = make_trainer()
        trainer.train()
        _plain.append((weights_of(trainer), logs(trainer, "num_tokens")))
    return _plain[0]


def logs(trainer: GRPOTrainer, name: str) -> list[Any]:
    """Values logged under a name, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Seen:
    """A reward function that keeps what it was given."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> list[float]:
        self.calls.append(given)
        return [len(set(ids)) / 10 for ids in given["completion_ids"]]


# ---- metrics ----


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("settings", "more"),
    [
        *(({"loss_type": name}, CLIP) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "gspo")),
        ({"loss_type": "cispo"}, {"cispo_clip_ratio"}),
        ({"loss_type": "sapo"}, set()),
        ({"loss_type": "vespo"}, {"vespo/phi_seq_mean"}),
        ({"beta": 0.1}, CLIP | {"kl"}),
        ({"entropy_coef": 0.1}, CLIP | {"policy_loss", "entropy_coef"}),
        ({"use_adaptive_entropy": True}, CLIP | {"policy_loss", "entropy_coef"}),
    ],
    ids=lambda value: next(iter(value)) + "=" + str(next(iter(value.values()))) if isinstance(value, dict) else "",
)
def test_metrics_have_trls_names(make_trainer: Callable, settings: dict[str, Any], more: set[str]) -> None:
    trainer = make_trainer(
        **settings, eval_rows=[{"prompt": "1+1=", "answer": "2"}], eval_strategy="steps", eval_steps=2
    )
    trainer.train()
    train, evaluation = trainer.state.log_history[0], trainer.state.log_history[2]
    assert {name for name in train if not name.startswith(OWN)} == TRAINERS_OWN | ROLLOUTS | more
    trainers = {
        "epoch",
        "step",
        *(f"eval_{name}" for name in ("loss", "runtime", "samples_per_second", "steps_per_second")),
    }
    own = {f"eval_{name}" for name in (ROLLOUTS | more) - {"step_time", "policy_loss", "entropy_coef"}}
    assert set(evaluation) == trainers | own


@pytest.mark.versions
def test_numbers_that_can_be_counted_are_right(make_trainer: Callable) -> None:
    seen = Seen()
    trainer = make_trainer(seen, max_steps=2, max_completion_length=40)
    trainer.train()
    tokens = 0
    for call, entry in zip(seen.calls, trainer.state.log_history, strict=False):
        lengths = [len(ids) for ids in call["completion_ids"]]
        ended = [len(ids) for ids in call["completion_ids"] if ids[-1] == trainer.processing_class.eos_token_id]
        tokens += sum(lengths) + 4 * 16
        assert entry["num_tokens"] == tokens
        assert entry["completions/mean_length"] == pytest.approx(sum(lengths) / 16)
        assert entry["completions/max_length"] == max(lengths)
        assert entry["completions/clipped_ratio"] == pytest.approx(1 - len(ended) / 16)
        assert entry["completions/max_terminated_length"] == max(ended, default=0)
        rewards = torch.tensor([len(set(ids)) / 10 for ids in call["completion_ids"]])
        assert entry["reward"] == pytest.approx(float(rewards.mean()))
        assert entry["rewards/seen/std"] == pytest.approx(float(rewards.std()), rel=1e-5)
    assert trainer.state.num_input_tokens_seen == tokens
    assert any(0 < share < 1 for share in logs(trainer, "completions/clipped_ratio"))


def test_the_last_log_carries_what_came_in_since(make_trainer: Callable) -> None:
    trainer = make_trainer(max_steps=3, logging_steps=2)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history] == [2, 3]
    assert "train_runtime" in trainer.state.log_history[-1]
    assert trainer.state.log_history[-1]["reward"] > 0


@pytest.mark.versions
def test_an_optimizer_step_moves_the_policy_towards_the_reward(make_trainer: Callable) -> None:
    """More of one letter, in a dozen steps."""

    def letters(completions: list[str], **_: Any) -> list[float]:
        return [sum(c in "aeiou" for c in text) for text in completions]

    trainer = make_trainer(letters, max_steps=10, optim="adamw_torch", learning_rate=0.03)
    trainer.train()
    reward = logs(trainer, "reward")
    assert sum(reward[-3:]) / 3 > 3 * sum(reward[:3]) / 3


# ---- rounds ----


def test_batch_numbers_are_trls(make_trainer: Callable) -> None:
    """12 prompts, 4 a round: 3 rounds in an epoch, each of 2 x 2 micro-steps, two to an optimizer step."""
    seen = Seen()
    trainer = make_trainer(
        seen,
        max_steps=-1,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        steps_per_generation=2,
        num_iterations=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
    )
    assert trainer.args.generation_batch_size == 16
    calls = []
    inner = trainer.training_step
    trainer.training_step = lambda *args, **kwargs: calls.append(1) or inner(*args, **kwargs)
    trainer.train()
    assert trainer.state.global_step == 6
    assert len(calls) == 12
    assert len(seen.calls) == 3
    assert all(len(call["prompts"]) == 16 for call in seen.calls)


def test_generation_batch_size_and_steps_per_generation_say_the_same(make_trainer: Callable) -> None:
    one = make_trainer(per_device_train_batch_size=8, generation_batch_size=16)
    other = make_trainer(per_device_train_batch_size=8, steps_per_generation=2)
    assert one.run.plan == other.run.plan
    assert one.args.steps_per_generation == other.args.steps_per_generation == 2
    assert one.args.generation_batch_size == other.args.generation_batch_size == 16


def test_ratios_leave_one_when_a_round_is_used_twice(make_trainer: Callable) -> None:
    trainer = make_trainer(num_iterations=2, max_steps=4, learning_rate=0.5)
    trainer.train()
    clipped = logs(trainer, "clip_ratio/region_mean")
    assert clipped[0] == clipped[2] == 0
    assert clipped[1] > 0.1
    assert clipped[3] > 0.1


def test_an_epoch_draws_each_prompt_once_in_an_order_of_its_own(make_trainer: Callable) -> None:
    seen = Seen()
    make_trainer(seen, max_steps=-1, num_train_epochs=2).train()
    drawn = [call["prompts"][g] for call in seen.calls for g in range(0, 16, 4)]
    assert Counter(drawn[:12]) == Counter(drawn[12:]) == Counter(f"{a}+{b}=" for a in range(1, 4) for b in range(4))
    assert drawn[:12] != drawn[12:]
    assert all(len({*call["prompts"][g : g + 4]}) == 1 for call in seen.calls for g in range(0, 16, 4))
    assert all(
        len(set(map(str, call["completion_ids"][g : g + 4]))) > 1 for call in seen.calls for g in range(0, 16, 4)
    )


@pytest.mark.slow
def test_epochs_without_shuffling_are_whole_rounds_in_order(make_trainer: Callable) -> None:
    """And `max_steps: None` is no limit."""
    seen = Seen()
    rows = [{"prompt": str(i)} for i in range(9)]
    trainer = make_trainer(seen, rows=rows, max_steps=None, num_train_epochs=2, shuffle_dataset=False)
    trainer.train()
    assert [call["prompts"][g] for call in seen.calls for g in range(0, 16, 4)] == [str(i) for i in range(8)] * 2
    assert trainer.state.global_step == 4


# ---- datasets ----


def stream(rows: list[dict[str, Any]]) -> IterableDataset:
    def generate() -> Iterator[dict[str, Any]]:
        yield from rows

    return IterableDataset.from_generator(generate)


@pytest.mark.versions
def test_a_stream_is_read_on_and_on(make_trainer: Callable) -> None:
    seen = Seen()
    rows = [{"prompt": f"{i}=", "i": i} for i in range(6)]
    trainer = make_trainer(seen, rows=stream(rows), eval_rows=stream(rows[:2]), max_steps=3, shuffle_dataset=False)
    trainer.train()
    assert [call["i"][g] for call in seen.calls for g in range(0, 16, 4)] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    trainer.evaluate()
    assert len(seen.calls[-1]["prompts"]) == 8


def test_a_stream_without_max_steps_is_refused(make_trainer: Callable) -> None:
    with pytest.raises(ConfigError, match="max_steps"):
        make_trainer(rows=stream([{"prompt": "a"}] * 9), max_steps=-1)


def test_a_plain_list_of_rows_will_do(make_trainer: Callable) -> None:
    args = make_trainer().args
    rows = [{"prompt": "1+1="}] * 4
    trainer = GRPOTrainer(
        tiny_model(), lambda completions: [len(c) for c in completions], args, rows, rows, tiny_tokenizer()
    )
    trainer.train()
    assert trainer.evaluate()["eval_reward"] > 0


def test_conversations_reach_the_rewards_as_messages(make_trainer: Callable) -> None:
    seen = Seen()
    rows = [{"prompt": [{"role": "user", "content": f"add {i}"}], "i": i} for i in range(4)]
    trainer = make_trainer(seen, rows=rows, max_steps=1)
    trainer.train()
    call = seen.calls[0]
    assert {"prompts", "completions", "completion_ids", "i", "trainer_state", "log_extra", "log_metric"} == set(call)
    assert call["prompts"][0][0]["role"] == "user"
    [answer] = call["completions"][0]
    assert answer["role"] == "assistant"
    assert answer["content"] == trainer.processing_class.decode(call["completion_ids"][0], skip_special_tokens=True)


def test_remove_unused_columns_keeps_the_prompt_alone(make_trainer: Callable) -> None:
    seen = Seen()
    make_trainer(seen, remove_unused_columns=True, max_steps=1).train()
    assert "answer" not in seen.calls[0]


def test_prompts_that_are_too_long(make_trainer: Callable) -> None:
    rows = [{"prompt": "x" * n} for n in (5, 9, 20, 3, 4, 6)]
    with pytest.raises(DataError, match=r"(?s)max_prompt_length is 6.*row 2: 20 tokens.*overlong_prompts"):
        make_trainer(rows=rows, max_prompt_length=6)
    seen = Seen()
    trainer = make_trainer(seen, rows=rows, max_prompt_length=6, overlong_prompts="drop", max_steps=1)
    assert len(trainer.train_dataset) == 4
    trainer.train()
    assert {len(prompt) for call in seen.calls for prompt in call["prompts"]} == {3, 4, 5, 6}
    cut = make_trainer(rows=rows, max_prompt_length=6, overlong_prompts="truncate")
    [group] = cut.generate_completions([{"prompt": "abcdefghij"}])
    assert cut.processing_class.decode(group.group.prompt.token_ids) == "efghij"
    assert group.group.prompt.content == "abcdefghij"


@pytest.mark.slow
def test_a_stream_drops_too_long_prompts_as_they_come(make_trainer: Callable) -> None:
    seen = Seen()
    rows = stream([{"prompt": "x" * n} for n in (3, 30, 4, 5, 40, 6)])
    make_trainer(seen, rows=rows, max_prompt_length=8, overlong_prompts="drop", shuffle_dataset=False).train()
    assert [len(call["prompts"][g]) for call in seen.calls for g in range(0, 16, 4)] == [3, 4, 5, 6, 3, 4, 5, 6]


@pytest.mark.slow
def test_chat_template_kwargs_reach_the_template(make_trainer: Callable) -> None:
    template = "{{ greeting }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    trainer = make_trainer(Seen(), chat_template_kwargs={"chat_template": template, "greeting": "Hey "})
    [group] = trainer.generate_completions([{"prompt": [{"role": "user", "content": "you"}]}])
    assert group.group.prompt.text == "Hey you"
    assert trainer.processing_class.decode(group.group.prompt.token_ids) == "Hey you"


# ---- evaluation ----


@pytest.mark.versions
def test_evaluation_samples_every_row(make_trainer: Callable) -> None:
    seen = Seen()
    trainer = make_trainer(seen, eval_rows=[{"prompt": f"{i}="} for i in range(5)], num_generations_eval=2)
    result = trainer.evaluate()
    assert [call["prompts"] for call in seen.calls] == [[f"{i}=" for i in range(5) for _ in range(2)]]
    assert math.isfinite(result["eval_loss"])
    assert result["eval_reward"] == pytest.approx(sum(len(set(x)) / 10 for x in seen.calls[0]["completion_ids"]) / 10)
    assert trainer.state.num_input_tokens_seen == 0, "evaluation is not training"
    trainer.evaluate()
    assert seen.calls[1]["completion_ids"] == seen.calls[0]["completion_ids"], "the same random numbers every time"


def test_evaluation_of_one_completion_has_no_spread(make_trainer: Callable) -> None:
    trainer = make_trainer(eval_rows=[{"prompt": "1+1="}], num_generations_eval=1, beta=0.1)
    assert trainer.evaluate()["eval_frac_reward_zero_std"] == 1


@pytest.mark.slow
def test_several_evaluation_sets(make_trainer: Callable) -> None:
    sets = {"easy": [{"prompt": "1+1="}], "hard": [{"prompt": "12+34="}, {"prompt": "5+6="}]}
    trainer = make_trainer(eval_rows=sets, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert len(logs(trainer, "eval_easy_loss")) == len(logs(trainer, "eval_hard_loss")) == 2
    assert len(logs(trainer, "eval_reward")) == 4


def test_evaluation_leaves_training_alone(make_trainer: Callable) -> None:
    evaluated = make_trainer(
        eval_rows=[{"prompt": "1+1="}], eval_strategy="steps", eval_steps=1, eval_on_start=True, disable_dropout=True
    )
    evaluated.train()
    assert len(logs(evaluated, "eval_reward")) == 3
    plain, num_tokens = trained_plainly(make_trainer)
    assert all(torch.equal(value, weights_of(evaluated)[name]) for name, value in plain.items())
    assert num_tokens == logs(evaluated, "num_tokens")


@pytest.mark.slow
@pytest.mark.versions
def test_the_best_model_can_be_chosen_by_its_reward(make_trainer: Callable, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(
        eval_rows=[{"prompt": "1+1="}, {"prompt": "1+2="}],
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
        max_steps=3,
        learning_rate=0.5,
    )
    with caplog.at_level("INFO", "podium"):
        trainer.train()
    rewards = logs(trainer, "eval_reward")
    best = rewards.index(max(rewards)) + 1
    assert Path(trainer.state.best_model_checkpoint).name == f"checkpoint-{best}"
    assert Path(trainer.state.best_model_checkpoint).is_dir()
    assert trainer.evaluate()["eval_reward"] == pytest.approx(max(rewards))
    trainer.save_model()
    assert checkpoint.model_step(Path(trainer.args.output_dir)) == (best, 3)
    assert f"/checkpoint-{best} (eval_reward {max(rewards):.4g})" in caplog.text


@pytest.mark.parametrize("is_kept", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["kept", "lost"])
def test_the_best_model_of_a_run_that_was_moved(make_trainer: Callable, tmp_path: Path, *, is_kept: bool) -> None:
    def trained(steps: int, **how: Any) -> Any:
        trainer = make_trainer(
            lambda completions, trainer_state, **_: [-float(trainer_state.global_step)] * len(completions),
            eval_rows=[{"prompt": "1+1="}],
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=1,
            save_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_reward",
            max_steps=steps,
        )
        trainer.train(**how)
        return trainer

    trained(2)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    if not is_kept:
        shutil.rmtree(moved / "checkpoint-1")
    best = trained(3, resume_from_checkpoint=str(moved / "checkpoint-2")).state.best_model_checkpoint
    assert best == str(moved / "checkpoint-1" if is_kept else tmp_path / "run" / "checkpoint-3")


def test_a_best_model_by_a_metric_that_nobody_measures(make_trainer: Callable) -> None:
    settings = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    rows = [{"prompt": "1+1="}]
    trainer = make_trainer(eval_rows=rows, load_best_model_at_end=True, metric_for_best_model="rewrd", **settings)
    with pytest.raises(ConfigError, match="must be one of eval_loss, eval_completions") as error:
        trainer.train()
    assert error.value.changes == {"metric_for_best_model": "eval_reward"}


def test_generate_completions_changes_nothing(make_trainer: Callable) -> None:
    trainer = make_trainer()
    before = weights_of(trainer)
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": "5"}]
    groups = trainer.generate_completions(rows, num_generations=3)
    assert [len(group.group.completions) for group in groups] == [3, 3]
    assert groups[0].names_K == ("digits",)
    assert groups[0].rewards_GK.shape == (3, 1)
    assert groups[1].group.prompt.columns == {"answer": "5"}
    again = trainer.generate_completions(rows, num_generations=3)
    assert [g.group for g in again] == [g.group for g in groups]
    [greedy] = trainer.generate_completions(rows[:1], num_generations=2, greedy=True)
    assert greedy.group.completions[0] == greedy.group.completions[1]
    assert moved(trainer, before) == 0
    trainer.train()
    plain, _ = trained_plainly(make_trainer)
    assert all(torch.equal(value, weights_of(trainer)[name]) for name, value in plain.items())


# ---- sampling ----


def test_sampling_arguments_reach_the_sampler(make_trainer: Callable) -> None:
    def completions(**settings: Any) -> list[list[int]]:
        [group] = make_trainer(**settings).generate_completions([{"prompt": "1+1="}], num_generations=8)
        return [list(completion.token_ids) for completion in group.group.completions]

    plain = completions()
    assert len(set(map(str, plain))) == 8
    assert len(set(map(str, completions(top_k=1)))) == 1
    assert len(set(map(str, completions(top_p=1e-6)))) == 1
    assert len(set(map(str, completions(min_p=1.0)))) == 1
    assert len(set(map(str, completions(temperature=1e-4)))) == 1
    assert completions(temperature=0.9) != plain
    assert all(len(set(ids)) == len(ids) for ids in completions(repetition_penalty=1e6))
    assert {len(ids) for ids in completions(max_completion_length=3)} <= {1, 2, 3}
    assert {len(ids) for ids in completions(generation_kwargs={"max_new_tokens": 2})} <= {1, 2}
    assert len(set(map(str, completions(generation_kwargs={"top_k": 1})))) == 1
    ends = completions(generation_kwargs={"eos_token_id": list(range(0, 264, 2))}, max_completion_length=30)
    assert all(ids[-1] % 2 == 0 and all(token % 2 for token in ids[:-1]) for ids in ends)


def test_generation_kwargs_of_generate_alone_go_to_generate(make_trainer: Callable, caplog: Any) -> None:
    forbidden = list(range(4, 200))
    trainer = make_trainer(generation_kwargs={"suppress_tokens": forbidden}, max_completion_length=20)
    assert isinstance(trainer.run.step.engine, TransformersEngine)
    assert "suppress_tokens" in caplog.text
    groups = trainer.generate_completions([{"prompt": "1+1="}, {"prompt": "12+34="}])
    assert not {token for g in groups for c in g.group.completions for token in c.token_ids} & set(forbidden)
    trainer.train()
    with pytest.raises(ConfigError, match="suppress_tokens"):
        make_trainer(generation_kwargs={"suppress_tokens": forbidden}, rollout_engine="live")


def test_a_stop_text_ends_a_completion_and_no_padding_is_trained(make_trainer: Callable) -> None:
    stops = ["e", "a", "1", "\n"]
    trainer = make_trainer(generation_kwargs={"stop_strings": stops}, max_completion_length=20)
    groups = trainer.generate_completions([{"prompt": "1+1="}, {"prompt": "12+34="}])
    completions = [c for group in groups for c in group.group.completions]
    stopped = [c for c in completions if any(stop in c.text for stop in stops)]
    assert stopped
    for completion in stopped:
        assert completion.finish == "stop"
        assert completion.text[-1] in stops
        assert trainer.processing_class.pad_token_id not in completion.token_ids
    trainer.train()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("config", "given"),
    [
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"), True),
        (LoHaConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"), True),
        (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[10, 50, 60], task_type="CAUSAL_LM"), True),
        (LoraConfig(target_modules=["q_proj"], bias="all", task_type="CAUSAL_LM"), True),
        (LoraConfig(target_modules=["q_proj"], bias="all", task_type="CAUSAL_LM"), False),
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM"), False),
    ],
    ids=["ia3", "loha", "tokens", "bias", "new bias", "new pissa"],
)
def test_every_adapter_starts_at_its_reference(config: Any, given: bool, tmp_path: Path) -> None:
    """The reference is where training starts: the adapter that was passed in, and all that is trained beside it."""
    model = tiny_model("qwen2")
    if given:
        model = get_peft_model(model, config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn_like(parameter))
    args = GRPOConfig(
        str(tmp_path),
        beta=0.1,
        learning_rate=0.01,
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model,
        lambda completions, **_: [sum(map(ord, text)) % 7 for text in completions],
        args,
        [{"prompt": f"{i}+1="} for i in range(8)],
        processing_class=tiny_tokenizer(),
        peft_config=None if given else config,
    )
    trainer.train()
    first, second = logs(trainer, "kl")[:2]
    assert first == pytest.approx(0, abs=1e-6)
    assert second > 1e-6
    assert "P016" not in [finding.code for finding in trainer.health.found]


@pytest.mark.versions
def test_the_transformers_engine_trains_alike(make_trainer: Callable) -> None:
    """Log-probabilities of what `generate` drew are those of training: the first ratio is 1, and groups are whole."""
    trainer = make_trainer(
        rollout_engine="transformers", num_iterations=2, max_completion_length=30, learning_rate=0.01
    )
    assert isinstance(trainer.run.step.engine, TransformersEngine)
    before = weights_of(trainer)
    trainer.train()
    assert logs(trainer, "clip_ratio/region_mean")[0] == 0
    assert moved(trainer, before) > 1e-4
    groups = trainer.generate_completions([{"prompt": "1+1="}, {"prompt": "12+34="}], num_generations=3)
    assert [len(group.group.completions) for group in groups] == [3, 3]
    end = trainer.processing_class.eos_token_id
    for completion in (c for group in groups for c in group.group.completions):
        assert end not in completion.token_ids[:-1]
        assert completion.finish == ("stop" if completion.token_ids[-1] == end else "length")
    again = trainer.generate_completions([{"prompt": "1+1="}, {"prompt": "12+34="}], num_generations=3)
    assert [group.group for group in again] == [group.group for group in groups]


def test_dropout_is_off_while_sampling_and_comparing_and_on_in_training(make_trainer: Callable) -> None:
    model = tiny_model("llama", attention_dropout=0.3)
    trainer = make_trainer(model=model, beta=0.1, num_iterations=2)
    flags: list[tuple[bool, bool]] = []
    model.model.layers[0].register_forward_pre_hook(
        lambda layer, _: flags.append((layer.training, torch.is_grad_enabled()))
    )
    trainer.train()
    assert set(flags) == {(False, False), (True, True)}
    assert (True, True) in flags


# ---- masks and bonuses ----


def test_truncated_completions_are_masked(make_trainer: Callable, count_trained_tokens: Callable) -> None:
    """With four tokens nothing ends by itself, so nothing is trained on."""
    masked = make_trainer(mask_truncated_completions=True, max_completion_length=3)
    before = weights_of(masked)
    masked.train()
    assert logs(masked, "completions/clipped_ratio") == [1, 1]
    assert moved(masked, before) == 0
    seen = Seen()
    some = make_trainer(
        seen, mask_truncated_completions=True, max_completion_length=60, loss_type="dr_grpo", max_steps=1
    )
    sizes = count_trained_tokens(some)
    some.train()
    end = some.processing_class.eos_token_id
    assert sum(sizes) == sum(len(ids) for ids in seen.calls[0]["completion_ids"] if ids[-1] == end) > 0
    assert 0 < logs(some, "completions/clipped_ratio")[0] < 1


def same_rewards(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def test_the_entropy_bonus_raises_entropy(make_trainer: Callable) -> None:
    entropy = {}
    for coef in (0.0, 0.5):
        trainer = make_trainer(same_rewards, entropy_coef=coef, beta=0.001, max_steps=3, learning_rate=0.3)
        trainer.train()
        entropy[coef] = logs(trainer, "entropy")
    assert entropy[0.5][-1] > entropy[0.5][0] + 0.01
    assert entropy[0.5][-1] > entropy[0.0][-1] + 0.01


def test_the_entropy_controller_follows_its_target(make_trainer: Callable) -> None:
    settings = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.02, "max_steps": 4}
    below = make_trainer(entropy_target=20.0, **settings)
    below.train()
    assert logs(below, "entropy_coef") == pytest.approx([0, 0.12, 0.14, 0.16])
    above = make_trainer(entropy_target=0.1, **settings)
    above.train()
    assert logs(above, "entropy_coef") == [0, 0, 0, 0], "the bonus rests above the target"
    assert above.entropy.coef == pytest.approx(0.02)


def test_tokens_of_low_entropy_can_be_left_out(make_trainer: Callable) -> None:
    every, some = make_trainer(max_steps=1), make_trainer(max_steps=1, top_entropy_quantile=0.3)
    every.train()
    some.train()
    assert moved(some, weights_of(every)) > 1e-3
    assert logs(some, "grad_norm")[0] < logs(every, "grad_norm")[0]


def test_off_policy_sequences_can_be_left_out(make_trainer: Callable) -> None:
    plain, loose, strict = (
        make_trainer(max_steps=1, **settings)
        for settings in ({}, {"off_policy_mask_threshold": 9.0}, {"off_policy_mask_threshold": -9.0})
    )
    for trainer in (plain, loose, strict):
        trainer.train()
    assert moved(loose, weights_of(plain)) == 0
    assert moved(strict, weights_of(plain)) > 1e-3, "everything with a negative advantage is out"
    assert strict.state.log_history[0]["loss"] < -0.1


def test_dynamic_sampling_replaces_groups_without_spread(make_trainer: Callable) -> None:
    calls = []

    def odd(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
        calls.append(len(prompts))
        return [
            len(text) + ord(text[:1] or "a") if int(prompt[0]) % 2 else 1.0
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    plain = make_trainer(odd, shuffle_dataset=False, max_steps=2)
    plain.train()
    assert logs(plain, "frac_reward_zero_std") == [0, 1]
    assert calls == [16, 16]
    calls.clear()
    trainer = make_trainer(odd, shuffle_dataset=False, max_steps=2, dynamic_sampling=True, max_resamples=3)
    trainer.train()
    assert logs(trainer, "frac_reward_zero_std")[1] < 0.6
    assert len(logs(trainer, "resampled_prompts")) == 2
    assert calls[0] == calls[1] == 16
    assert all(size % 4 == 0 and size <= 16 for size in calls)
    assert 3 <= len(calls) <= 5


def test_resampling_gives_up(make_trainer: Callable) -> None:
    calls = []

    def hopeless(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        time.sleep(0.01)
        return [0.0] * len(completions)

    trainer = make_trainer(hopeless, max_steps=1, dynamic_sampling=True, max_resamples=2)
    trainer.train()
    assert calls == [16, 16, 16]
    assert logs(trainer, "time/reward/hopeless_seconds")[0] >= 0.03, "the seconds of a round are those of all its calls"


# ---- reference ----


@pytest.mark.slow
def test_the_reference_is_a_copy_of_what_was_passed_in(make_trainer: Callable, tmp_path: Path) -> None:
    """Also where the instance was changed after it was loaded; KL starts at zero and grows."""
    model = tiny_model("llama")
    model.config._name_or_path = save_tiny_model(tmp_path / "other", seed=3)
    trainer = make_trainer(model=model, beta=0.001, max_steps=3)
    trainer.train()
    kl = logs(trainer, "kl")
    assert abs(kl[0]) < 1e-6
    assert kl[-1] > 1e-3
    reference = trainer.run.objective.reference.copy
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), tiny_model("llama").parameters(), strict=True))
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_kl_is_to_the_weights_before_training(make_trainer: Callable) -> None:
    trainer = make_trainer(beta=0.1, max_steps=2, learning_rate=0.5)
    trainer.train()
    first, second = logs(trainer, "kl")
    assert first == pytest.approx(0, abs=1e-6)
    assert second > 1e-4


@pytest.mark.versions
def test_the_reference_follows_the_policy(make_trainer: Callable) -> None:
    """pi_ref <- alpha pi + (1 - alpha) pi_ref after every second step, worked out here by hand."""
    trainer = make_trainer(
        beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.25, max_steps=5
    )
    expected = weights_of(trainer)
    policy: dict[int, dict[str, Tensor]] = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            policy[state.global_step] = weights_of(trainer)

    trainer.add_callback(Keep())
    trainer.train()
    for step in (2, 4):
        expected = {name: 0.25 * policy[step][name] + 0.75 * value for name, value in expected.items()}
    for name, value in trainer.run.objective.reference.copy.named_parameters():
        assert torch.allclose(value, expected[name], atol=1e-6), name
    with pytest.raises(ConfigError, match="sync_ref_model"):
        make_trainer(sync_ref_model=True)


# ---- logs, callbacks, outputs ----


def test_completions_are_logged(make_trainer: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def noted(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("size", [len(text) for text in completions])
        log_metric("mood", 0.5)
        return [len(text) for text in completions]

    trainer = make_trainer(noted, log_completions=True, num_completions_to_print=1)
    trainer.train()
    files = sorted((tmp_path / "run" / "completions").iterdir())
    assert [path.name for path in files] == ["completions_00001.parquet", "completions_00002.parquet"]
    table = pd.read_parquet(files[1])
    assert list(table.columns) == ["step", "prompt", "completion", "noted", "size", "advantage"]
    assert len(table) == 16
    assert (table["step"] == 2).all()
    assert (table["noted"] == table["completion"].str.len()).all()
    assert table.groupby("prompt")["advantage"].sum().abs().max() < 1e-4
    assert logs(trainer, "mood") == [0.5, 0.5]
    printed = capsys.readouterr().out
    assert printed.count("Step 1") == printed.count("Step 2") == 1
    assert "advantage" in printed


@pytest.mark.versions
def test_callbacks_are_called_and_can_stop(make_trainer: Callable) -> None:
    class Count(TrainerCallback):
        begun = ended = 0
        logged: tuple[float, ...] = ()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begun += 1

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.ended += 1
            control.should_training_stop = state.global_step == 3
            return control

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.logged = (*self.logged, *([logs["reward"]] if "reward" in logs else []))

    count = Count()
    trainer = make_trainer(callbacks=[count], max_steps=10)
    trainer.train()
    assert (count.begun, count.ended, trainer.state.global_step) == (3, 3, 3)
    assert list(count.logged) == logs(trainer, "reward")


@pytest.mark.versions
def test_an_optimizer_and_schedule_of_ones_own(make_trainer: Callable) -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    trainer = make_trainer(model=model, optimizers=(optimizer, schedule))
    before = weights_of(trainer)
    trainer.train()
    assert logs(trainer, "learning_rate") == [0.1, 0.05]
    changed = {name for name, value in weights_of(trainer).items() if not torch.equal(value, before[name])}
    assert changed == {"lm_head.weight"}


def test_report_to_tensorboard(make_trainer: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    make_trainer(report_to=["tensorboard"]).train()
    assert list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.versions
@pytest.mark.parametrize("side", ["right", None])
def test_a_saved_tokenizer_is_the_models_own(make_trainer: Callable, tmp_path: Path, side: str | None) -> None:
    path = Path(save_tiny_model(tmp_path / "model")) / "tokenizer_config.json"
    written = {**json.loads(path.read_text()), "padding_side": side, "truncation_side": side}
    path.write_text(json.dumps({name: value for name, value in written.items() if value is not None}))
    trainer = make_trainer(model=str(tmp_path / "model"), processing_class=None, max_steps=1)
    assert trainer.processing_class.padding_side == "left"
    trainer.save_model()
    saved = json.loads((tmp_path / "run" / "tokenizer_config.json").read_text())
    assert [saved.get("padding_side"), saved.get("truncation_side")] == [side, side]
    assert not {"local_files_only", "is_local"} & saved.keys()


def test_a_saved_model_is_the_trained_one(make_trainer: Callable, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = make_trainer(model=str(tmp_path / "saved"), processing_class=None)
    assert all(torch.equal(value, weights_of(loaded)[name]) for name, value in weights_of(trainer).items())
    rows = [{"prompt": "1+1="}]
    assert loaded.generate_completions(rows)[0].group.completions[0].token_ids == (
        trainer.generate_completions(rows)[0].group.completions[0].token_ids
    )


# ---- models ----


@pytest.mark.versions
def test_a_model_given_by_folder(make_trainer: Callable, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    assert make_trainer(model=folder, processing_class=None).model.dtype == torch.float32
    half = make_trainer(model=folder, processing_class=None, model_init_kwargs={"torch_dtype": "bfloat16"}, max_steps=1)
    assert half.model.dtype == torch.bfloat16
    before = weights_of(half)
    half.train()
    assert moved(half, before) > 0
    kwargs = {"dtype": torch.bfloat16}
    assert make_trainer(model=folder, processing_class=None, model_init_kwargs=kwargs).model.dtype == torch.bfloat16
    assert kwargs == {"dtype": torch.bfloat16}, "the user's dict is left alone"


@pytest.mark.versions
def test_no_args_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TRL's defaults, and a folder named after the model."""
    monkeypatch.chdir(tmp_path)
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    rows = Dataset.from_list([{"prompt": str(i)} for i in range(4)])
    trainer = GRPOTrainer(folder, lambda completions, **_: [len(c) for c in completions], train_dataset=rows)
    assert Path(trainer.args.output_dir).name == "tiny-GRPO"
    assert (trainer.args.learning_rate, trainer.args.num_generations, trainer.args.beta) == (1e-6, 8, 0.0)


@pytest.mark.cases(1)
@pytest.mark.versions
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2"])
def test_every_kind_of_model_trains(make_trainer: Callable, kind: str) -> None:
    settings = {"beta": 0.05, "num_iterations": 2, "learning_rate": 0.01, "disable_dropout": True}
    trainer = make_trainer(model=kind, max_completion_length=20, **settings)
    before = weights_of(trainer)
    trainer.train()
    assert moved(trainer, before) > 1e-4
    assert logs(trainer, "clip_ratio/region_mean")[0] == 0
    assert abs(logs(trainer, "kl")[0]) < 1e-5


def test_a_model_that_cannot_share_prefixes_trains_and_is_named(make_trainer: Callable, caplog: Any) -> None:
    trainer = make_trainer(model=tiny("jamba"))
    assert trainer.run.policy.forward.path == "padded"
    assert "Shared prefixes are off for this model" in caplog.text
    assert "generate" in caplog.text
    before = weights_of(trainer)
    trainer.train()
    assert moved(trainer, before) > 1e-4


def test_disable_dropout(make_trainer: Callable) -> None:
    model = tiny_model("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3)
    trainer = make_trainer(model=model, disable_dropout=True, beta=0.1)
    for policy in (trainer.model, trainer.run.objective.reference.copy):
        assert {module.p for module in policy.modules() if isinstance(module, nn.Dropout)} == {0.0}


def test_disable_dropout_where_modules_hand_it_to_functions() -> None:
    """OPT's layers have numbers in place of layers of dropout, and may leave a layer out."""
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 264}
    rates = {"dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.5, "word_embed_proj_dim": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **sizes, **rates))
    disable_dropout(model.train())
    ids = torch.arange(4, 20)[None]
    assert torch.equal(model(ids).logits, model.eval()(ids).logits)


def test_the_head_can_be_cast(make_trainer: Callable) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    trainer = make_trainer(model=model, cast_lm_head_to_fp32=True, max_steps=1)
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert trainer.model.model.embed_tokens.weight.dtype == torch.bfloat16
    before = weights_of(trainer)
    trainer.train()
    assert moved(trainer, before) > 0


def test_frozen_parameters_stay_and_the_proof_knows(make_trainer: Callable, tmp_path: Path) -> None:
    """No gradient, no state of the optimizer, and after a resume the same."""
    folder = save_tiny_model(tmp_path / "model")
    settings: dict[str, Any] = {
        "model": str(folder),
        "optim": "adamw_torch",
        "frozen_parameters": r"embed|layers\.0\.",
        "prove_first_batch": True,
    }
    trainer = make_trainer(**settings, save_strategy="steps", save_steps=1, max_steps=2)
    before, frozen = weights_of(trainer), {n for n, p in trainer.model.named_parameters() if not p.requires_grad}
    assert any("embed" in name for name in frozen)
    trainer.train()
    after = weights_of(trainer)
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    proof = json.loads((Path(trainer.args.output_dir) / "proof.json").read_text())
    assert [each["result"] for each in proof["checks"] if each["name"] == "trained tensors"] == ["ok"], proof
    resumed = make_trainer(**settings, max_steps=2)
    resumed.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-1"))
    assert all(torch.equal(after[name], each) for name, each in weights_of(resumed).items())
    with pytest.raises(ModelError, match="found in the name of no parameter"):
        make_trainer(model=str(folder), frozen_parameters="wte")


@pytest.mark.slow
def test_pad_and_end_may_share_an_id(make_trainer: Callable, count_trained_tokens: Callable) -> None:
    """The end token stays in the loss."""
    seen = Seen()
    tokenizer = tiny_tokenizer(pad_is_eos=True)
    trainer = make_trainer(seen, processing_class=tokenizer, max_completion_length=60, max_steps=1, beta=0.1)
    sizes = count_trained_tokens(trainer)
    trainer.train()
    assert sum(sizes) == sum(len(ids) for call in seen.calls for ids in call["completion_ids"])
    assert logs(trainer, "completions/clipped_ratio")[0] < 1


def test_every_end_id_of_the_model_ends(make_trainer: Callable) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [*range(4, 264, 3)]
    trainer = make_trainer(model=model, max_completion_length=30)
    assert trainer.run.policy.end_ids == {*range(4, 264, 3), trainer.processing_class.eos_token_id}
    [group] = trainer.generate_completions([{"prompt": "1+1="}])
    assert all(completion.finish == "stop" for completion in group.group.completions)


@pytest.mark.versions
def test_config_fields_are_trls(tmp_path: Path) -> None:
    import trl

    config = GRPOConfig(str(tmp_path))
    assert isinstance(config, trl.GRPOConfig)


@pytest.mark.slow
def test_generate_completions_takes_a_temperature_of_its_own(make_trainer: Callable) -> None:
    trainer = make_trainer(max_steps=1)
    rows = [{"prompt": "1+1=", "answer": "2"}] * 2

    def drawn(**how: Any) -> list[tuple[int, ...]]:
        scored = trainer.generate_completions(rows, num_generations=8, **how)
        return [completion.token_ids for group in scored for completion in group.group.completions]

    cold = drawn(temperature=1e-3)
    assert len(set(cold)) == 1
    assert cold[:1] == drawn(greedy=True)[:1]
    assert len(set(drawn())) > 1
    assert drawn(temperature=trainer.args.temperature) == drawn()


@pytest.mark.parametrize("pad", [0, None])
def test_configs_are_saved_as_the_base_has_them(make_trainer: Callable, tmp_path: Path, pad: int | None) -> None:
    """`use_cache` is off in training, the pad token may be the end token, and the tokenizer may have no first token."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer(pad_is_eos=True)
    model.config.update({"pad_token_id": pad, "bos_token_id": 1})
    model.generation_config.pad_token_id = pad
    tokenizer.pad_token = None
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "base")
    trainer = make_trainer(
        model=str(tmp_path / "base"), processing_class=None, save_strategy="steps", save_steps=1, max_steps=1
    )
    trainer.train()
    trainer.save_model()
    assert not trainer.model.config.use_cache
    names = ("use_cache", "pad_token_id", "bos_token_id", "pad_token")
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-1"):
        for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
            base, saved = (json.loads((each / file).read_text()) for each in (tmp_path / "base", folder))
            assert [saved.get(name) for name in names] == [base.get(name) for name in names], file


def test_drawn_tokens_without_text_are_said(make_trainer: Callable) -> None:
    size = len(tiny_tokenizer())
    trainer = make_trainer(model=tiny_model("llama", vocab_size=size + 60))
    trainer.train()
    [finding] = [each for each in trainer.health.found if each.code == "M035"]
    drawn = [t for x in trainer.round.scored for c in x.group.completions for t in c.token_ids]
    assert sum(token >= size for token in drawn), "in the last round, too, of which nothing is said again"
    assert f"have no text: the model has {size + 60} tokens to draw, the tokenizer {size}." in finding.what
    trainer = make_trainer(model=tiny_model("llama", vocab_size=size))
    trainer.train()
    assert "M035" not in [each.code for each in trainer.health.found]


@pytest.mark.slow
def test_an_adalora_is_trained_and_proved(make_trainer: Callable) -> None:
    """PEFT calls the base model past its hooks; `ranknum`, a parameter without a gradient, counts ranks."""
    config = AdaLoraConfig(target_modules=["q_proj"], total_step=9, task_type="CAUSAL_LM")
    trainer = make_trainer(peft_config=config, prove_first_batch=True)
    before = weights_of(trainer)
    trainer.train()
    assert moved(trainer, before) > 0
    checks = json.loads((Path(trainer.args.output_dir) / "proof.json").read_text())["checks"]
    assert {check["result"] for check in checks} == {"ok", "not checked"}
