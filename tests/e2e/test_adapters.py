"""Adapters: new ones, given ones, the reference they are compared with, what is frozen, what is saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from podium.errors import ConfigError, ModelError
from podium.testing import SIZES, save_tiny_model, tiny_model, tiny_tokenizer

LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}


def given_adapter(**overrides: Any) -> PeftModel:
    """A `PeftModel` whose adapter changes what the model says."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return get_peft_model(tiny_model("llama"), LoraConfig(**{**LORA, "init_lora_weights": False, **overrides}))


def parameters(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def changed(trainer: Any, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in parameters(trainer).items() if not torch.equal(value, before[name])}


def logs(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def optimized(trainer: Any) -> set[str]:
    """Names of what the optimizer holds."""
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    return {name for name, parameter in trainer.model.named_parameters() if id(parameter) in held}


@pytest.mark.cases(1)
@pytest.mark.versions
@pytest.mark.parametrize("model", ["instance", "folder"])
def test_a_new_adapter_alone_is_trained(make_trainer: Callable, tmp_path: Path, model: str) -> None:
    policy = tiny_model("llama") if model == "instance" else save_tiny_model(tmp_path / "model")
    trainer = make_trainer(model=policy, peft_config=LoraConfig(**LORA), beta=0.05)
    before = parameters(trainer)
    trainer.train()
    moved = changed(trainer, before)
    assert moved
    assert all("lora_" in name for name in moved)
    assert optimized(trainer) == {name for name in before if "lora_" in name}
    kl = logs(trainer, "kl")
    assert abs(kl[0]) < 1e-6, "the reference is the model without its adapter, which starts as nothing"
    assert kl[-1] > 1e-5


def test_a_new_adapter_is_the_same_for_the_same_seed(make_trainer: Callable) -> None:
    one, same, other = (
        parameters(make_trainer(model=tiny_model("llama"), peft_config=LoraConfig(**LORA), seed=seed))
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.cases(1)
@pytest.mark.versions
@pytest.mark.parametrize("adapter_name", ["default", "mine"])
def test_a_given_adapter_is_compared_with_a_frozen_copy(make_trainer: Callable, adapter_name: str) -> None:
    model = given_adapter()
    if adapter_name == "mine":
        model.add_adapter("mine", LoraConfig(**LORA, init_lora_weights=False))
        model.delete_adapter("default")
        model.set_adapter("mine")
    trainer = make_trainer(model=model, beta=0.05)
    before = parameters(trainer)
    copies = {name for name in before if ".ref." in name}
    assert len(copies) == len([name for name in before if f".{adapter_name}." in name]) > 0
    assert all(torch.equal(before[name], before[name.replace(".ref.", f".{adapter_name}.")]) for name in copies)
    trainer.train()
    moved = changed(trainer, before)
    assert moved
    assert all(f".{adapter_name}." in name for name in moved), "neither the base nor the reference has moved"
    requires_grad = {name for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert requires_grad == {name for name in before if f".{adapter_name}." in name} == optimized(trainer)
    assert trainer.model.active_adapter == adapter_name
    kl = logs(trainer, "kl")
    assert abs(kl[0]) < 1e-6, "the reference is the adapter that was passed in, not the base model"
    assert kl[-1] > 1e-5


def test_a_given_adapter_without_kl_has_no_copy(make_trainer: Callable) -> None:
    trainer = make_trainer(model=given_adapter(), max_steps=1)
    assert list(trainer.model.peft_config) == ["default"]
    before = parameters(trainer)
    trainer.train()
    assert all(".default." in name for name in changed(trainer, before))


@pytest.mark.versions
def test_a_saved_adapter_goes_on(make_trainer: Callable, tmp_path: Path) -> None:
    """Trained, saved, loaded with peft alone and on the base model given here: it says the same."""
    trainer = make_trainer(model=tiny_model("llama"), peft_config=LoraConfig(**LORA))
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path / "adapter"), is_trainable=True)
    again = make_trainer(model=loaded, max_steps=1)
    rows = [{"prompt": "1+1="}, {"prompt": "1+2="}]
    assert [g.group for g in again.generate_completions(rows)] == [
        _at_step_zero(g.group) for g in trainer.generate_completions(rows)
    ]
    before = parameters(again)
    again.train()
    assert changed(again, before)


def _at_step_zero(group: Any) -> Any:
    from dataclasses import replace

    return replace(group, completions=tuple(replace(c, policy_step=0) for c in group.completions))


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.versions
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_trains_an_adapter_alike(make_trainer: Callable, reentrant: bool) -> None:
    """The inputs of the first layer need gradients then, though the embeddings are frozen."""
    ends = []
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    for checkpointing in (False, True):
        config = LoraConfig(**LORA, init_lora_weights=True)
        trainer = make_trainer(
            model=tiny_model("llama"), peft_config=config, gradient_checkpointing=checkpointing, **kwargs
        )
        before = parameters(trainer)
        trainer.train()
        assert any("layers.0" in name for name in changed(trainer, before))
        ends.append(parameters(trainer))
    assert all(torch.allclose(value, ends[1][name], atol=1e-6) for name, value in ends[0].items())


def test_dropout_of_an_adapter_is_off_while_sampling(make_trainer: Callable) -> None:
    """With dropout of 0.9 sampled and recomputed log-probabilities would be far apart, and the ratio not near 1."""
    config = LoraConfig(**LORA, lora_dropout=0.9, init_lora_weights=False)
    trainer = make_trainer(model=tiny_model("llama"), peft_config=config)
    rows = [{"prompt": "1+1="}]
    trainer.model.train()
    first = trainer.generate_completions(rows)[0].group
    assert first == trainer.generate_completions(rows)[0].group
    assert trainer.model.training


@pytest.mark.slow
@pytest.mark.versions
def test_modules_to_save_and_dora(make_trainer: Callable) -> None:
    for config in (
        LoraConfig(**LORA, modules_to_save=["embed_tokens"]),
        LoraConfig(**LORA, use_dora=True),
        LoraConfig(**LORA, use_rslora=True, bias="all"),
    ):
        trainer = make_trainer(model=tiny_model("llama"), peft_config=config, beta=0.05, max_steps=1)
        before = parameters(trainer)
        trainer.train()
        assert changed(trainer, before)
        assert abs(logs(trainer, "kl")[0]) < 1e-6


def test_an_adapter_on_experts_writes_to_no_weights(make_trainer: Callable) -> None:
    """What peft writes to the frozen experts while it samples is none of a reward function's doing."""
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=len(tiny_tokenizer()), decoder_sparse_step=1, **sizes)
    trainer = make_trainer(
        model=AutoModelForCausalLM.from_config(config), peft_config=LoraConfig(r=4, target_modules="all-linear")
    )
    trainer.train()
    assert [finding.code for finding in trainer.health.found if finding.code == "M135"] == []


# ---- refused ----


def test_what_cannot_work_is_said_before_weights_are_loaded(make_trainer: Callable, tmp_path: Path) -> None:
    folder = broken_weights(tmp_path)
    config = LoraConfig(**LORA)
    with pytest.raises(ModelError, match=r"in the files and .* by config\.json"):
        make_trainer(model=folder, peft_config=config)
    with pytest.raises(ConfigError, match="lm_head"):
        make_trainer(model=folder, peft_config=LoraConfig(target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ConfigError, match="sync_ref_model"):
        make_trainer(model=folder, peft_config=config, beta=0.1, sync_ref_model=True)
    with pytest.raises(ConfigError, match="peft_config is the class LoraConfig"):
        make_trainer(model=folder, peft_config=LoraConfig)
    for other in (LoraConfig(**{**LORA, "task_type": "SEQ_CLS"}), {**LORA, "task_type": "TOKEN_CLS"}):
        with pytest.raises(ConfigError, match=r"`task_type` is (SEQ|TOKEN)_CLS"):
            make_trainer(model=folder, peft_config=other)
    with pytest.raises(ConfigError, match="PeftModel already"):
        make_trainer(model=given_adapter(), peft_config=config)
    with pytest.raises(ConfigError, match="sync_ref_model"):
        make_trainer(model=given_adapter(), beta=0.1, sync_ref_model=True)
    several = given_adapter()
    several.add_adapter("other", LoraConfig(target_modules=["q_proj"]))
    several.base_model.set_adapter([several.active_adapter, "other"])
    with pytest.raises(ConfigError, match="are active in the model together"):
        make_trainer(model=several)


def broken_weights(tmp_path: Path) -> str:
    """A model folder that looks whole, but whose weights are of another shape: loading them fails."""
    folder, other = tmp_path / "broken", tmp_path / "other"
    save_tiny_model(folder)
    save_tiny_model(other, hidden_size=16)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    return str(folder)


def test_a_frozen_adapter_is_refused(make_trainer: Callable, tmp_path: Path) -> None:
    given_adapter().save_pretrained(tmp_path)
    frozen = PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path))
    with pytest.raises(ModelError, match="is_trainable=True"):
        make_trainer(model=frozen)
