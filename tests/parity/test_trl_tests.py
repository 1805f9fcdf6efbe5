"""What TRL's public tests of its trainer ask for, where no other test of ours shows it; and the list of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from peft import PromptTuningConfig, TaskType

from podium import GRPOConfig, GRPOTrainer
from podium.errors import ConfigError, DataError, ModelError
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer
from tests.parity.trl_tests import is_there, rows

ROWS = [{"prompt": f"{i}+1="} for i in range(8)]


def digits(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(str.isdigit, text)) + len(set(text)) / 100) for text in completions]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., GRPOTrainer]:
    def made(config: dict[str, Any] | None = None, **changes: Any) -> GRPOTrainer:
        settings = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}
        rest = {"max_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "bf16": False}
        args = GRPOConfig(str(tmp_path / "run"), **{**settings, **rest, **(config or {})})
        given = {"model": tiny_model(), "reward_funcs": digits, "processing_class": tiny_tokenizer()}
        return GRPOTrainer(**{**given, "args": args, "train_dataset": Dataset.from_list(ROWS), **changes})

    return made


@pytest.mark.defect("TT1", "the list of TRL's public tests")
def test_every_test_of_trl_holds_or_has_a_reason(now: Callable[[str], None]) -> None:
    listed = rows()
    assert [test for _, _, _, test in listed if test and not is_there(test)] == []
    assert [name for _, name, says, test in listed if says == "holds" and not test] == []
    assert all(says.strip() for _, _, says, _ in listed)
    now(f"{sum(says == 'holds' for _, _, says, _ in listed)} of {len(listed)} hold")


ENTROPIES = torch.tensor([[0.2, 1.9, 0.4, 0.6], [0.8, 1.0, 9.0, 1.2]])
VALID = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [
        (0.0, [[1, 1, 1, 1], [1, 1, 0, 0]]),
        (0.5, [[0, 1, 0, 0], [1, 1, 0, 0]]),
        (0.8, [[0, 1, 0, 0], [0, 1, 0, 0]]),
        (1.0, [[0, 1, 0, 0], [0, 0, 0, 0]]),
    ],
)
@pytest.mark.defect("TT2", "get_high_entropy_mask")
def test_the_mask_of_high_entropy(threshold: float, kept: list[list[int]]) -> None:
    mask = GRPOTrainer.get_high_entropy_mask(None, ENTROPIES, VALID, threshold)  # type: ignore[attr-defined]
    assert mask.tolist() == torch.tensor(kept).bool().tolist()
    none = GRPOTrainer.get_high_entropy_mask(None, ENTROPIES, 0 * VALID, threshold)  # type: ignore[attr-defined]
    assert not none.any()


@pytest.mark.defect("TT2", "get_off_policy_mask, padding and tokens without a log-probability aside")
def test_the_mask_of_off_policy_rollouts(now: Callable[[str], None]) -> None:
    drift = torch.tensor([[3.0, 3.0, 0.0], [0.4, 0.4, 0.0], [3.0, 3.0, -9e3], [0.4, float("nan"), 9e3]])
    mask = torch.tensor([[1.0, 1.0, 0.0]] * 4)
    signs = torch.tensor([[1.0], [-1.0], [-1.0], [-1.0]])
    kept = GRPOTrainer.get_off_policy_mask(signs, -drift, torch.zeros(4, 3), mask, 1.0)  # type: ignore[attr-defined]
    assert kept.tolist() == [[1.0], [1.0], [0.0], [1.0]]
    now(str(kept.tolist()))


@pytest.mark.defect("TT3", "a learning rate of 0.1, as all of TRL's tests have it")
def test_the_rate_of_trls_tests_trains_every_parameter(make: Callable[..., GRPOTrainer]) -> None:
    trainer = make({"learning_rate": 0.1, "max_steps": 2})
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] is not None
    assert [name for name, old in before.items() if torch.equal(old, trainer.model.get_parameter(name))] == []


@pytest.mark.defect("TT4", "dispatch_batches, workers of map-style rows and of streams")
def test_streams_and_workers(make: Callable[..., GRPOTrainer], now: Callable[[str], None]) -> None:
    whole, stream = Dataset.from_list(ROWS), Dataset.from_list(ROWS).to_iterable_dataset()
    wrong = {"accelerator_config": {"dispatch_batches": True}, "max_steps": -1}
    with pytest.raises(ConfigError, match="Iterable datasets require `dispatch_batches=False`") as refused:
        make(wrong, train_dataset=stream)
    now(str(refused.value))
    assert make({"dataloader_num_workers": 2}, train_dataset=stream).args.dataloader_num_workers == 0
    trainer = make({"dataloader_num_workers": 2}, train_dataset=whole, eval_dataset=stream)
    assert trainer.get_train_dataloader().num_workers == trainer.args.dataloader_num_workers == 2
    assert trainer.get_eval_dataloader().num_workers == 0
    trainer.is_in_train = True
    numbers = trainer.get_train_dataloader()
    assert numbers.num_workers == 0
    assert list(numbers) == [*range(8)]


def sets(kind: str) -> Any:
    rows: Any = Dataset.from_list(ROWS[:2])
    rows = rows.to_iterable_dataset() if kind.startswith("stream") else rows
    both = {"a": rows, "b": rows}
    made: dict[str, Callable[..., Any]] = {"dict": dict, "datasets": DatasetDict, "streams": IterableDatasetDict}
    return made[kind.split()[-1]](both) if " of " in kind else rows


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "kind", ["rows", "stream", "rows of dict", "stream of dict", "rows of datasets", "stream of streams"]
)
@pytest.mark.defect("TT4", "evaluation sets as rows, streams and dicts of them, given early and late")
def test_evaluation_sets_of_every_kind(make: Callable[..., GRPOTrainer], kind: str) -> None:
    given = sets(kind)
    early = make(eval_dataset=given).eval_dataset
    assert isinstance(early, dict) == (" of " in kind)
    measured = make().evaluate(eval_dataset=given)
    names = ["eval_a_loss", "eval_b_loss"] if " of " in kind else ["eval_loss"]
    assert all(measured[name] is not None for name in names)


@pytest.mark.defect("TT5", "a model whose code comes with it: refused, then trusted")
def test_a_model_with_custom_code_is_refused_and_then_loaded(
    tmp_path: Path, make: Callable[..., GRPOTrainer], now: Callable[[str], None]
) -> None:
    folder = Path(save_tiny_model(tmp_path / "own"))
    config = json.loads((folder / "config.json").read_text())
    mapped = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    changed = {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": mapped}
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(ModelError, match="custom code") as refused:
        make(model=str(folder), processing_class=None)
    now(str(refused.value).replace(str(tmp_path), "."))
    trusted = make({"trust_remote_code": True}, model=str(folder), processing_class=None)
    assert type(trusted.model).__name__ == "OwnForCausalLM"


@pytest.mark.defect("TT6", "all rewards are None")
def test_rewards_that_are_all_none_are_said_in_trls_words(
    make: Callable[..., GRPOTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    def silent(completions: Iterable[str], **_: Any) -> list[None]:
        return [None for _ in completions]

    trainer = make(reward_funcs=silent)
    logging.getLogger("podium").propagate = True
    trainer.train()
    assert "All reward functions returned None for the following kwargs:" in caplog.text


@pytest.mark.defect("TT6", "an adapter of virtual tokens")
def test_an_adapter_of_virtual_tokens_is_refused(make: Callable[..., GRPOTrainer], now: Callable[[str], None]) -> None:
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    with pytest.raises((ConfigError, DataError), match="prompt-learning") as refused:
        make(peft_config=config)
    now(str(refused.value))


@pytest.mark.defect("TT6", "a reward that needs the trainer's state, in its test before training")
def test_a_reward_that_reads_the_trainers_state_is_no_error(tmp_path: Path) -> None:
    from podium import check

    def by_step(completions: list[str], answer: list[str], **given: Any) -> list[float]:
        assert given["trainer_state"].global_step >= 0
        return [float(a == text.strip()) for text, a in zip(completions, answer, strict=True)]

    table = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    found = check(
        tiny_model(), by_step, GRPOConfig(str(tmp_path), use_cpu=True), table, processing_class=tiny_tokenizer()
    )
    assert [each for each in found if each.code == "W010"] == []


def test_the_state_before_training_is_a_new_one_of_a_run_that_has_a_length() -> None:
    from transformers import TrainerState

    from podium.rewards.score import before_training

    new = vars(TrainerState(max_steps=100, num_train_epochs=1))
    assert vars(before_training()) == {name: new[name] for name in vars(before_training())}
