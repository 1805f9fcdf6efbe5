"""`podium.GRPOTrainer` in a script: findings printed first, held-out numbers around training, nothing else changed."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import HfArgumentParser, TrainerCallback, TrainingArguments

import podium
from podium import GRPOConfig, GRPOTrainer
from podium.algorithm.advantages import AdvantageSettings
from podium.algorithm.losses import LossSettings
from podium.data.selection import sampled_rows
from podium.errors import ConfigError, DataError, ModelError, overrule
from podium.evaluation.saved import Saved
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer
from podium.trainer import trainer as base
from podium.trainer.attributes import HOOKS
from podium.trainer.evaluation import rows_in
from podium.trainer.rules import OF_THE_OPTIMIZER, READ_ONCE

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 5) for b in range(5)]
HELD_OUT = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5, 9) for b in range(5)]

SETTINGS: dict[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 4,
    "max_steps": 2,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "prove_first_batch": False,
}


def f(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [len(text) / 4 + float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    def made(cls: Any = GRPOTrainer, *, rows: Any = ROWS, eval_dataset: Any = None, **settings: Any) -> Any:
        args = GRPOConfig(str(tmp_path / "run"), **{**SETTINGS, **settings})
        return cls(tiny_model(), f, args, rows, eval_dataset, processing_class=tiny_tokenizer())

    return made


# ---- held-out numbers ----


def test_a_round_of_completions_is_measured_before_and_after_and_trains_the_same(
    make: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make(eval_dataset=Dataset.from_list(HELD_OUT))
    one.train()
    printed = capsys.readouterr().out
    assert "before training: 8 of 20 held-out prompts, one completion each (eval_rows=0: none) ..." in " ".join(
        printed.split()
    )
    assert "after training: 8 of 20 held-out prompts, one completion each ..." in printed
    assert re.search(r"^next: podium report \S+run$", printed, re.MULTILINE)
    files = sorted(path.name for path in (tmp_path / "run" / "evaluation").iterdir())
    assert files == ["after.json", "after.parquet", "before.json", "before.parquet", "comparison.json"]
    other = make(base.GRPOTrainer, eval_dataset=Dataset.from_list(HELD_OUT))
    other.train()
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "what is measured must not change what is trained"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"eval_rows": 3}, "3 of 20 held-out prompts, 4 completions each"),
        ({"eval_samples": 2}, "20 held-out prompts, 2 completions each"),
        ({"eval_rows": 5, "eval_samples": 1}, "5 of 20 held-out prompts, one completion each"),
        ({"generation_batch_size": 16}, "16 of 20 held-out prompts, one completion each"),
        ({"eval_rows": 0}, ""),
    ],
    ids=str,
)
def test_the_size_that_is_set_is_measured(
    make: Callable[..., Any], capsys: pytest.CaptureFixture[str], settings: dict[str, Any], line: str
) -> None:
    make(eval_dataset=HELD_OUT, max_steps=1, **settings).train()
    printed = capsys.readouterr().out
    assert (f"before training: {line}" in printed) if line else ("training:" not in printed and "next:" not in printed)


def test_of_a_dict_of_sets_the_first_is_measured(make: Callable[..., Any], tmp_path: Path) -> None:
    sets = {"easy": Dataset.from_list(HELD_OUT[:3]), "hard": Dataset.from_list(HELD_OUT[3:])}
    trainer = make(eval_dataset=sets, eval_strategy="steps", eval_steps=1, max_steps=1)
    trainer.train()
    assert Saved.load(tmp_path / "run" / "evaluation" / "after.parquet").settings.data == "eval_dataset['easy']"
    assert {"eval_easy_loss", "eval_hard_loss"} <= {name for row in trainer.state.log_history for name in row}


@pytest.mark.slow
def test_of_a_stream_the_first_rows_are_measured(make: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield from HELD_OUT

    stream = IterableDataset.from_generator(rows)
    make(eval_dataset=stream, max_steps=1).train()
    assert "before training: 8 held-out prompts" in capsys.readouterr().out


def test_without_held_out_rows_nothing_is_measured(
    make: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(max_steps=1).train()
    printed = capsys.readouterr().out
    assert "training:" not in printed
    assert "next:" not in printed
    assert not (tmp_path / "run" / "evaluation").exists()


def test_evaluate_alone_is_trls(make: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    numbers = make(eval_dataset=HELD_OUT).evaluate()
    assert numbers == make(base.GRPOTrainer, eval_dataset=HELD_OUT).evaluate() | {
        name: value for name, value in numbers.items() if "runtime" in name or "per_second" in name
    }
    assert "training:" not in capsys.readouterr().out


def test_numbers_that_rewards_log_are_those_of_the_evaluation_alone(make: Callable[..., Any]) -> None:
    def counted(completions: list[str], log_metric: Callable[[str, float], None], **kwargs: Any) -> list[float]:
        log_metric("completions_seen", len(completions))
        return [float(len(text)) for text in completions]

    class Counting(GRPOTrainer):
        def __init__(self, model: Any, _: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(model, counted, *args, **kwargs)

    trainer = make(Counting, eval_dataset=HELD_OUT, eval_strategy="steps", eval_steps=2)
    trainer.train()
    [row] = [row for row in trainer.state.log_history if "eval_completions_seen" in row]
    assert row["eval_completions_seen"] == 20 * 4


@pytest.mark.slow
def test_of_a_sorted_table_rows_of_all_kinds_are_asked_whatever_the_seed(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    asked = []
    for seed in (1, 2):
        make(eval_dataset=HELD_OUT, eval_rows=6, eval_samples=1, max_steps=1, seed=seed).train()
        files = (tmp_path / "run" / "evaluation" / f"{when}.parquet" for when in ("before", "after"))
        asked += [pd.read_parquet(file)["row"].tolist() for file in files]
    assert asked[0] == asked[1] == asked[2] == asked[3] == [number for number, _ in sampled_rows(HELD_OUT, 6)]
    assert len({HELD_OUT[number]["prompt"][0] for number in asked[0]}) > 2, "the first six begin with 5 and 6"


@pytest.mark.slow
def test_trained_twice_the_second_begins_where_the_first_ended(make: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make(eval_dataset=HELD_OUT, eval_rows=6, max_steps=1)
    trainer.train()
    first = json.loads((tmp_path / "run" / "evaluation" / "after.json").read_text())
    trainer.train()
    second = json.loads((tmp_path / "run" / "evaluation" / "before.json").read_text())
    assert first["reward"] == second["reward"]


@pytest.mark.slow
def test_a_run_is_resumed_as_without_the_measurements(make: Callable[..., Any], tmp_path: Path) -> None:
    whole = make(eval_dataset=HELD_OUT, save_strategy="steps", save_steps=1)
    whole.train()
    resumed = make(eval_dataset=HELD_OUT, save_strategy="steps", save_steps=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert resumed.state.global_step == 2
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# ---- findings ----


@pytest.mark.slow
def test_the_first_step_after_a_resume_logs_its_own_learning_rate(make: Callable[..., Any]) -> None:
    used: dict[int, float] = {}

    class Seen(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, *given: Any, **kwargs: Any) -> None:
            used[state.global_step + 1] = kwargs["optimizer"].param_groups[0]["lr"]

    make(base.GRPOTrainer, max_steps=1, save_strategy="steps", save_steps=1).train()
    trainer = make(base.GRPOTrainer, learning_rate=0.005)
    trainer.add_callback(Seen())
    trainer.train(resume_from_checkpoint=True)
    logged = {row["step"]: row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row}
    assert logged[2] == used[2] == 0.0025


@pytest.mark.slow
def test_findings_are_printed_once_and_above_the_bar(tmp_path: Path) -> None:
    """A user's script with transformers' bar, in a process of its own."""
    save_tiny_model(tmp_path / "model")
    script = written(tmp_path, disable_tqdm=False, prove_first_batch=True, learning_rate=5e-2)
    done = started([sys.executable, script], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in re.split(r"[\r\n]", done.stderr)]
    found = [line for line in lines if re.match(r"(note|warning|error): [A-Z]\d{3} ", line)]
    assert found, done.stderr
    assert len(found) == len(set(found)), found
    assert not [line for line in lines if "it/s]" in line and re.search(r"[A-Z]\d{3} ", line)], done.stderr
    assert "Rewards before training" in done.stderr


def test_mistakes_that_end_a_run_are_raised_as_what_they_are(make: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match=r"row 0.*null"):
        make(rows=[{"prompt": None, "answer": "1"}, *ROWS])


def test_weights_are_not_read_for_an_adapter_that_fits_no_layer(tmp_path: Path) -> None:
    from peft import LoraConfig

    folder = Path(save_tiny_model(tmp_path / "model"))
    args = GRPOConfig(str(tmp_path / "run"), **SETTINGS)
    with pytest.raises(ModelError, match=r"name no layer of .*M020"):
        GRPOTrainer(str(folder), f, args, ROWS, peft_config=LoraConfig(target_modules=["nowhere"]))


def test_judgements_are_printed_and_the_run_goes_on(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """float16 on a CPU is slow; it trains."""
    folder = save_tiny_model(tmp_path / "model")
    args = GRPOConfig(str(tmp_path / "run"), model_init_kwargs={"dtype": "float16"}, **SETTINGS)
    found = podium.check(str(folder), f, args, ROWS)
    assert "M015" in {finding.code for finding in found if finding.severity == "warning"}
    GRPOTrainer(str(folder), f, args, ROWS)
    assert [each.levelname for each in caplog.records if each.getMessage().startswith("M015 ")] == ["WARNING"]


# ---- as TRL's ----


def test_arguments_pickling_and_copies_are_those_of_a_plain_class(make: Callable[..., Any]) -> None:
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (GRPOTrainer, base.GRPOTrainer))
    assert list(ours) == list(theirs)
    assert pickle.loads(pickle.dumps(GRPOTrainer)) is GRPOTrainer is podium.GRPOTrainer
    assert GRPOTrainer.__module__ == "podium.grpo_trainer"
    assert inspect.getsource(GRPOTrainer).startswith("class GRPOTrainer")
    assert copy.copy(GRPOTrainer) is GRPOTrainer
    with pytest.raises(TypeError, match="Did you mean `reward_funcs`"):
        GRPOTrainer(tiny_model(), reward_func=f)


def test_a_subclass_that_overrides_what_trl_scripts_override(make: Callable[..., Any]) -> None:
    class Mine(GRPOTrainer):
        logged: int = 0

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            self.logged += 1
            super().log(logs, start_time)

        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(*args, **kwargs)

    trainer = make(Mine, eval_dataset=HELD_OUT)
    result = trainer.train()
    assert result.global_step == 2
    assert trainer.logged == 3


# ---- what scripts do with TRL's trainer ----


def test_an_own_training_step_may_add_to_the_gradient(make: Callable[..., Any], tmp_path: Path) -> None:
    class Mine(base.GRPOTrainer):
        calls = 0

        def training_step(self, model: Any, *given: Any) -> Any:
            self.calls += 1
            loss, own = super().training_step(model, *given), sum(1e-3 * (p**2).sum() for p in model.parameters())
            self.accelerator.backward(own)
            return loss + own.detach()

    trainer = make(Mine, prove_first_batch=True, max_steps=1)
    trainer.train()
    assert trainer.calls == 1, "the proof checks the step without it"
    assert (tmp_path / "run" / "proof.json").exists()


def test_a_parser_of_any_training_arguments_leaves_the_config_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in dataclasses.fields(TrainingArguments):  # which the parser changes, for all subclasses
        monkeypatch.setattr(field, "type", field.type)
    before = GRPOConfig("run", report_to="none").include_num_input_tokens_seen
    HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    assert GRPOConfig("run", report_to="none").include_num_input_tokens_seen == before


@pytest.mark.slow
def test_numbers_of_an_evaluation_with_a_prefix_stay_in_it(make: Callable[..., Any]) -> None:
    class Probe(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                self.found = trainer.evaluate(HELD_OUT[:2], metric_key_prefix="probe")

    trainer = make(eval_dataset=ROWS, eval_rows=0, logging_steps=2)
    probe = Probe()
    trainer.add_callback(probe)
    trainer.train()
    assert probe.found["probe_reward"] == probe.found["eval_reward"]
    logs = trainer.state.log_history
    assert [("probe_reward" in row, "eval_reward" in row, "reward" in row) for row in logs[:2]] == [
        (True, True, False),
        (False, False, True),
    ]
    assert logs[1]["num_tokens"] == trainer.state.num_input_tokens_seen
    predicted = trainer.predict(HELD_OUT[:2]).metrics
    assert "test_reward" in predicted
    assert "eval_reward" not in predicted
    first = trainer.evaluate()["eval_reward"]
    trainer.evaluate(HELD_OUT[:2], metric_key_prefix="test")
    assert trainer.evaluate()["eval_reward"] == first


def test_an_own_loader_gives_the_rows_of_an_evaluation(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(base.GRPOTrainer):
        sampler, collate = (2, 0), staticmethod(lambda rows: [{**row, "prompt": f"{row['prompt']}?"} for row in rows])

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            loader = DataLoader(self.eval_dataset, batch_size=2, sampler=self.sampler, collate_fn=self.collate)
            return self.accelerator.prepare(loader)

    seen: list[str] = []

    def g(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        seen.extend(prompts)
        return [float(len(text)) for text in completions]

    monkeypatch.setitem(globals(), "f", g)
    trainer = make(Mine, eval_dataset=HELD_OUT)
    trainer.evaluate()
    assert [*dict.fromkeys(seen)] == [f"{HELD_OUT[i]['prompt']}?" for i in (2, 0)]
    trainer.collate = None
    with pytest.raises(ConfigError, match=r"(?s)yields an object of type dict.*collate_fn=list"):
        trainer.evaluate()
    with pytest.raises(ConfigError, match=r"without accelerator\.prepare"):
        rows_in(trainer.get_eval_dataloader(), processes=2)


def test_an_own_loader_of_training_yields_numbers_of_micro_steps(make: Callable[..., Any]) -> None:
    class Mine(base.GRPOTrainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=2, collate_fn=list)

    with pytest.raises(ConfigError, match=r"(?s)yields an object of type list.*fix: set train_dataset"):
        make(Mine).train()


def test_an_evaluation_draws_no_random_numbers(make: Callable[..., Any]) -> None:
    trainer, before = make(eval_dataset=HELD_OUT), torch.get_rng_state()
    trainer.evaluate()
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_that_are_set_between_two_trainings_are_trained_on(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []

    def g(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        seen.extend(prompts)
        return [float(len(text)) for text in completions]

    monkeypatch.setitem(globals(), "f", g)
    trainer = make(max_steps=1)
    trainer.train()
    assert set(seen) <= {row["prompt"] for row in ROWS}
    trainer.train()
    assert len(seen) == 16  # the second training draws its own round

    trainer.train_dataset = [{"prompt": 3}, {"prompt": "1+1="}]
    with pytest.raises(DataError, match="train_dataset"):
        trainer.train()
    seen.clear()
    second = [{"prompt": f"{a}-1=", "answer": str(a - 1)} for a in range(4)]
    trainer.train_dataset = pd.DataFrame(second)
    trainer.train()
    assert len(seen) == 8
    assert set(seen) <= {row["prompt"] for row in second}
    assert len(trainer.train_dataset) == 4
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["data"]["rows"] == 4


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", HOOKS)
def test_methods_that_training_does_not_call_are_not_overridden(make: Callable[..., Any], name: str) -> None:
    mine = type("Mine", (type("Mixin", (), {name: lambda *_, **__: None}), GRPOTrainer), {})
    with pytest.raises(ConfigError, match=f"Mine overrides TRL's `{name}`") as error:
        make(mine)
    assert error.value.fix.startswith(HOOKS[name])
    assert error.value.fix.endswith(overrule("C068"))


def test_all_methods_that_are_overridden_are_named(make: Callable[..., Any]) -> None:
    mine = type("Mine", (GRPOTrainer,), dict.fromkeys(("compute_loss", "_calculate_rewards"), lambda *_, **__: None))
    with pytest.raises(ConfigError) as error:
        make(mine)
    assert {each.what.split("`")[1] for each in error.value.findings} == {"compute_loss", "_calculate_rewards"}
    for each in error.value.findings:
        assert each.what in str(error.value)
        assert each.fix in str(error.value)
    assert str(error.value).count(overrule("C068")) == 1


def test_an_override_that_only_logs_is_overruled(
    make: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []
    mine = type("Mine", (GRPOTrainer,), {"compute_loss": lambda *_, **__: called.append("compute_loss")})
    trainer = make(mine, on_finding={"C068": "ignore"})
    assert trainer.train().global_step == 2
    assert not called
    said = "overruled: Mine overrides TRL's `compute_loss`, which training does not call here"
    assert caplog.text.count(said) == 1
    assert said in (tmp_path / "run" / "findings.jsonl").read_text()


@pytest.mark.parametrize("weights", [torch.tensor([2.0]), np.array([2.0])], ids=["tensor", "array"])
def test_reward_weights_may_be_an_array(make: Callable[..., Any], weights: Any) -> None:
    trainer = make(reward_weights=weights, max_steps=1)
    trainer.train()
    assert trainer.args.reward_weights == [2.0]


@pytest.mark.parametrize("cls", [base.GRPOTrainer, GRPOTrainer])
def test_another_model_is_given_to_another_trainer(
    make: Callable[..., Any], cls: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make(cls, eval_dataset=HELD_OUT)
    trainer.model = tiny_model()
    with pytest.raises(ConfigError, match=r"(?s)trainer\.model was set to another model.*load_state_dict"):
        trainer.train()
    assert "held-out" not in capsys.readouterr().out, "nothing is measured before"


def test_nor_replaced(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    with pytest.raises(AttributeError, match="`compute_loss` cannot be set: training does not call it"):
        trainer.compute_loss = f
    with pytest.raises(AttributeError, match=r"`data_collator` cannot be set: .*`train_dataset`"):
        trainer.data_collator = f
    with trainer.compute_loss_context_manager():
        pass
    for name, said in (("_metrics", "log_metric"), ("_calculate_rewards", "reward_funcs")):
        with pytest.raises(AttributeError, match=said):
            getattr(trainer, name)
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "get_off_policy_mask", f)
        with pytest.raises(ConfigError, match="get_off_policy_mask"):
            trainer.train()
    with monkeypatch.context() as patched:
        patched.setattr(GRPOTrainer, "_generate", f, raising=False)
        with pytest.raises(ConfigError, match="GRPOTrainer overrides TRL's `_generate`"):
            trainer.train()
    assert trainer.train().global_step == 2


def test_what_is_set_too_late_is_said_once_and_changes_nothing(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    values = {"temperature": 0.5, "num_generations": 8, "loss_type": "bnpo", "beta": 0.5, "learning_rate": 1.0}

    class Late(TrainerCallback):
        def on_step_end(self, args: Any, *given: Any, **kwargs: Any) -> None:
            changed(args, **values)

    alone, trainer = make(max_steps=3), make(max_steps=3)
    alone.train()
    trainer.add_callback(Late())
    trainer.train()
    weights = zip(alone.model.parameters(), trainer.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    for name, value in values.items():
        assert caplog.text.count(f"{name}={value!r} (was ") == 1
    assert trainer.temperature == 1.0
    assert len(trainer.generate_completions(ROWS[:1])[0].group.completions) == 4


def test_settings_that_a_loss_reads_are_read_once() -> None:
    known = {each.name for each in dataclasses.fields(GRPOConfig)}
    assert {*READ_ONCE, *OF_THE_OPTIMIZER} <= known
    read = {each.name for record in (LossSettings, AdvantageSettings) for each in dataclasses.fields(record)}
    assert read & known - {"max_completion_length"} <= {*READ_ONCE}


def changed(args: GRPOConfig, **values: Any) -> GRPOConfig:
    for name, value in values.items():
        setattr(args, name, value)
    return args


def started_with(args: GRPOConfig) -> Any:
    return GRPOTrainer(tiny_model(), f, args, ROWS, processing_class=tiny_tokenizer())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"loss_type": "dr_gpro"}, "Did you mean `dr_grpo`"),
        ({"num_generations": 3}, "num_generations 3"),
        ({"num_generations": 1}, "must be at least 2"),
        ({"generation_batch_size": 16}, "generation_batch_size 16, per_device_train_batch_size 8"),
        ({"max_resamples": 0}, "max_resamples"),
        ({"vllm_structured_outputs_regex": "a*"}, "does not honour"),
    ],
)
@pytest.mark.parametrize("is_copy", [False, True])
def test_arguments_that_are_changed_are_checked_again(values: dict[str, Any], says: str, is_copy: bool) -> None:
    args = GRPOConfig("run", **SETTINGS)
    with pytest.raises(ConfigError, match=says):
        started_with(changed(copy.deepcopy(args) if is_copy else args, **values))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "copied", [lambda args: args, copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_and_the_batch_follows_from_them(tmp_path: Path, copied: Callable[[GRPOConfig], GRPOConfig]) -> None:
    args = copied(GRPOConfig(str(tmp_path), hub_token="hf_secret", **SETTINGS))
    assert "hf_secret" not in str(args.__getstate__()["_made"])
    trainer = started_with(changed(args, per_device_train_batch_size=16, gradient_accumulation_steps=2))
    assert (trainer.run.plan.prompts_per_round, trainer.run.plan.shares, args.generation_batch_size) == (4, 1, 16)
    args = changed(
        GRPOConfig(str(tmp_path), **SETTINGS), learning_rate="1e-5", loss_type="gspo", steps_per_generation=2
    )
    trainer = started_with(args)
    assert (trainer.args.learning_rate, trainer.loss_type, trainer.importance_sampling_level) == (
        1e-5,
        "grpo",
        "sequence",
    )
    assert trainer.run.plan.prompts_per_round == 4


def written(folder: Path, **settings: Any) -> str:
    """The name of a user's script in the folder."""
    (folder / "script.py").write_text(
        f"from podium import GRPOConfig, GRPOTrainer\nROWS = {ROWS!r}\n"
        "def f(completions, answer, **kwargs):\n"
        "    return [len(text) / 4 + float(text == right) for text, right in zip(completions, answer)]\n"
        f"args = GRPOConfig('run', **{ {**SETTINGS, **settings}!r})\n"
        "GRPOTrainer('model', f, args, ROWS, ROWS[:6]).train()\n"
    )
    return "script.py"


def started(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "120"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_of_two_processes_the_first_prints_alone(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    script = written(tmp_path, per_device_train_batch_size=4)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    done = started([*command, "--main_process_port=0", script], tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("before training: 6 held-out prompts", "after training:", "next: podium report"):
        assert done.stdout.count(text) == 1, done.stdout
    found = re.findall(r"(?:note|warning): ([A-Z]\d{3}) ", done.stderr)
    assert found
    assert len(found) == len(set(found)), done.stderr
    assert Saved.load(tmp_path / "run" / "evaluation" / "after.parquet").scores().num_prompts == 6
