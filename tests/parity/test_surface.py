"""What TRL's trainer shows is there: attributes with the same values, its warnings, and settings that are taken."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset

from podium import GRPOConfig, GRPOTrainer
from podium.errors import PodiumError
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer
from podium.trainer.attributes import ATTRIBUTES, NOT_HERE
from podium.trainer.rules import WITHOUT_EFFECT
from tests.parity import surface

ROWS = [{"prompt": f"{i}+1="} for i in range(8)]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 4,
    "temperature": 0.8,
    "top_k": 7,
    "beta": 0.1,
    "epsilon_high": 0.3,
    "reward_weights": [0.5, 2.0],
    "entropy_coef": 0.01,
    "generation_kwargs": {"do_sample": True},
    "chat_template_kwargs": {"enable_thinking": False},
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
}


def short(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def digits(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(str.isdigit, text))) for text in completions]


def both(folder: Path) -> tuple[Any, Any]:
    """TRL's trainer and Podium's with the same arguments."""
    model = save_tiny_model(folder / "model")
    made = []
    for config, trainer in ((trl.GRPOConfig, trl.GRPOTrainer), (GRPOConfig, GRPOTrainer)):
        args = config(str(folder / "run"), **SETTINGS)
        made.append(trainer(model, [short, digits], args, train_dataset=Dataset.from_list(ROWS)))
    return made[0], made[1]


def plain(value: Any) -> Any:
    """For a comparison: tensors as lists, models as the sum of their weights, ids without an order."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, torch.nn.Module):
        return round(sum(float(p.detach().double().sum()) for p in value.parameters()), 6)
    if isinstance(value, transformers.GenerationConfig):
        return {name: x for name, x in value.to_dict().items() if name != "eos_token_id"}
    if isinstance(value, dict):
        return {name: plain(x) for name, x in value.items() if name != "eos_token_id"}
    return value


@pytest.mark.versions
def test_nothing_of_trl_is_missing() -> None:
    rows = [*surface.attributes(), *surface.warnings(), *surface.settings()]
    assert [name for name, word, _ in rows if word == surface.MISSING] == []
    assert len(list(surface.attributes())) >= 59


def test_the_committed_list_is_current() -> None:
    if trl.__version__ != "1.16.0":
        pytest.skip("the list is of TRL 1.16.0")
    assert surface.section() in surface.PAGE.read_text(encoding="utf-8"), "python -m tests.parity.surface --write"


@pytest.mark.versions
@pytest.mark.defect("N", "attributes of TRL's trainer that scripts read")
def test_attributes_have_trls_values(tmp_path: Path, now: Callable[[str], None]) -> None:
    theirs, ours = both(tmp_path)
    differ = {
        name: (plain(getattr(theirs, name)), plain(getattr(ours, name)))
        for name in ATTRIBUTES
        if not name.startswith(("async_loop", "_")) and plain(getattr(theirs, name)) != plain(getattr(ours, name))
    }
    assert differ.pop("pad_to_multiple_of", None) in (None, (None, "auto"))
    assert differ == {}
    assert ours.async_loop.is_running()
    assert ours.async_loop_thread.is_alive()
    for name in NOT_HERE:
        with pytest.raises(AttributeError, match=f"no `{name}`, which TRL's has"):
            getattr(ours, name)
    with pytest.raises(AttributeError, match="`beta` cannot be set") as refused:
        ours.beta = 0.5
    now(str(refused.value))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("generation_config", lambda x: x.update(max_new_tokens=3)),
        ("generation_kwargs", lambda x: x.update(temperature=0.01)),
        ("reward_weights", lambda x: x.fill_(0.0)),
        ("reward_funcs", lambda x: x.append(len)),
        ("reward_func_names", lambda x: x.append("other")),
        ("tools", lambda x: x.append(len)),
    ],
)
def test_a_change_of_what_was_read_changes_nothing(make_trainer: Callable, name: str, change: Callable) -> None:
    trainer = make_trainer()
    before = plain(getattr(trainer, name))
    change(getattr(trainer, name))
    assert plain(getattr(trainer, name)) == before


def test_what_is_read_is_used_as_before(make_trainer: Callable) -> None:
    trainer = make_trainer()
    weights = trainer.reward_weights
    doubled = weights * 2
    doubled[0] = 5.0
    assert (repr(weights), weights.tolist(), type(doubled)) == ("tensor([1.])", [1.0], torch.Tensor)
    assert torch.stack([weights, copy.deepcopy(weights)]).sum() == 2.0
    ids = torch.tensor([[5, 6, 7]])
    config = trainer.generation_config
    made = trainer.model.generate(ids, generation_config=config, max_new_tokens=2)
    assert made.shape[1] <= 5
    assert trainer.model.generate(ids, **trainer.generation_kwargs).shape[1] <= 3 + trainer.max_completion_length
    assert json.dumps(trainer.generation_kwargs)
    assert config == trainer.generation_config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, marks=pytest.mark.defect("K1", f"{name}={value!r}: taken with a note"))
        for name, value in {
            "pad_to_multiple_of": 8,
            "use_liger_kernel": True,
            "torch_compile": True,
            "torch_compile_backend": "inductor",
            "torch_compile_mode": "default",
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": {"max_memory_percent": 0.4},
        }.items()
    ],
)
def test_settings_without_effect_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, now: Callable[[str], None], name: str, value: Any
) -> None:
    logging.getLogger("podium").propagate = True
    with caplog.at_level(logging.INFO, logger="podium"):
        args = GRPOConfig(str(tmp_path), **{name: value})
    assert (args.torch_compile, args.use_liger_kernel) == (False, False)
    said = next(text for text in caplog.messages if text.startswith(f"{name}="))
    assert said == f"{name}={value!r} has no effect: {WITHOUT_EFFECT[name][1]}."
    now(said)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"importance_sampling_level": "sequence", "loss_type": "dapo"}, "weights each sequence by its"),
        ({"importance_sampling_level": "sequence", "loss_type": "bnpo"}, "Set loss_type='grpo'"),
        ({"loss_type": "luspo"}, "Set importance_sampling_level='sequence'"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "Set importance_sampling_level='token'"),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, ""),
        ({"loss_type": "dr_grpo", "advantage_estimator": "rloo"}, ""),
        ({"loss_type": "cispo"}, "Set epsilon_high=5.0"),
        ({}, ""),
    ],
)
@pytest.mark.defect("N", "warnings of TRL about losses and levels, in Python")
def test_losses_at_another_level_are_warned_of(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture, settings: dict[str, Any], says: str
) -> None:
    logging.getLogger("podium").propagate = True
    make_trainer(**settings)
    said = [record.getMessage() for record in caplog.records if getattr(record, "code", "") == "C025"]
    assert len(said) == bool(says)
    assert says in "".join(said)


@pytest.mark.parametrize("what", ["model", "tokenizer", "reward"])
@pytest.mark.defect("N", "a model, tokenizer or reward model with code of its own")
def test_code_of_a_models_own_is_refused_by_name(tmp_path: Path, now: Callable[[str], None], what: str) -> None:
    own = Path(save_tiny_model(tmp_path / "own"))
    file = own / ("tokenizer_config.json" if what == "tokenizer" else "config.json")
    made_up = {
        "auto_map": {"AutoTokenizer": ["t.Mine", None]} if what == "tokenizer" else {"AutoConfig": "c.Mine"},
        **({"tokenizer_class": "Mine"} if what == "tokenizer" else {"model_type": "mine"}),
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), **made_up}))
    (own / "t.py").write_text("print('ran')")
    model: Any = tiny_model() if what == "reward" else str(own)
    reward: Any = str(own) if what == "reward" else short
    args = GRPOConfig(str(tmp_path / "run"), max_completion_length=4, use_cpu=True, report_to=[])
    tokenizer = None if what == "tokenizer" else tiny_tokenizer()
    with pytest.raises(PodiumError, match="trust_remote_code") as refused:
        GRPOTrainer(model, reward, args, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer)
    now(str(refused.value))


@pytest.mark.defect("K2", "a list of rows, and a dict of columns as dataset[:2] gives")
def test_generate_completions_takes_a_slice_of_a_dataset(
    make_trainer: Callable[..., Any], now: Callable[[str], None]
) -> None:
    trainer = make_trainer()
    dataset = trainer.train_dataset
    by_columns = trainer.generate_completions(dataset[:2], num_generations=3)
    by_rows = trainer.generate_completions([dataset[0], dataset[1]], num_generations=3)
    assert [group.group for group in by_columns] == [group.group for group in by_rows]
    assert [len(group.group.completions) for group in by_columns] == [3, 3]
    now(f"{len(by_columns)} groups of 3")
