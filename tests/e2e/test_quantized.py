"""Adapters over weights in 4 bits (QLoRA), and 8-bit optimizers: with bitsandbytes, on a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

from podium.engines.live.engine import CopyEngine, LiveEngine
from podium.errors import ConfigError, ModelError
from podium.models.packing import pack, unscored
from podium.planning.memory import model_sizes
from podium.records import Sample
from podium.testing import save_tiny_model
from podium.trainer.config import GRPOConfig

ADAPTER = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
HAS_IT = importlib.util.find_spec("bitsandbytes") is not None
needs_it = pytest.mark.skipif(not HAS_IT, reason="needs bitsandbytes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of 64 and 128 units: bitsandbytes packs weights in blocks of 64."""
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, hidden_size=64, intermediate_size=128)
    return path


def four_bits(**more: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **more)


def logs(trainer: Any, name: str) -> list[Any]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class InFull(nn.Module):
    """A 4-bit layer's weight, in float32 again."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        from bitsandbytes.functional import dequantize_4bit

        self.weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def gradients(trainer: Any, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    [packed] = pack(samples, tokens_per_pack=1000)
    trainer.model.zero_grad()
    trainer.model.train()
    with trainer.run.policy.forward.context(trainer.run.policy.model):
        trainer.run.policy.forward.token_logps(trainer.model, packed).logps_N.sum().backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def assert_resumed_alike(trainer: Any, again: Any) -> None:
    """From the second step on, to the last bit."""
    again.train(resume_from_checkpoint=str(Path(again.args.output_dir) / "checkpoint-2"))
    for mine, theirs in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@needs_it
@pytest.mark.parametrize("nested", [False, True])
def test_gradients_pass_through_weights_in_4_bits(make_trainer: Callable, folder: Path, nested: bool) -> None:
    """Also after sampling, which packs weights for a kernel without a backward unless it is kept from doing so."""
    trainer = make_trainer(
        model=str(folder),
        quantization_config=four_bits(bnb_4bit_use_double_quant=nested),
        peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    trainer.generate_completions([{"prompt": "1+1=", "answer": "2"}])
    samples = [unscored((50, 51, 52), ids) for ids in ((60, 61, 62), (70, 71))]
    quantized = gradients(trainer, samples)
    layers = [layer for layer in trainer.model.modules() if hasattr(layer, "base_layer")]
    assert len(layers) == 14
    for layer in layers:
        layer.base_layer = InFull(layer.base_layer)
    full = gradients(trainer, samples)
    assert quantized.keys() == full.keys()
    for name, gradient in full.items():
        torch.testing.assert_close(quantized[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


@needs_it
def test_qlora_trains_samples_proves_and_resumes(make_trainer: Callable, folder: Path) -> None:
    settings = {
        "model": str(folder),
        "quantization_config": four_bits(),
        "peft_config": ADAPTER,
        "max_steps": 4,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "beta": 0.05,
        "prove_first_batch": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "product_precision": "float32",
    }
    trainer = make_trainer(**settings)
    trainer.train()
    assert isinstance(trainer.run.step.engine, LiveEngine)
    assert trainer.run.policy.forward.path == "shared"
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    assert all(check.passed is not False for check in trainer.proof.checks)
    assert max(logs(trainer, "health/logp_gap_max")) < 1e-3
    assert logs(trainer, "health/moved_share")[1:] == pytest.approx([1, 1, 1], abs=0.01), "no update is rounded away"
    assert_resumed_alike(trainer, make_trainer(**settings))


@needs_it
def test_the_estimate_knows_of_4_bits(make_trainer: Callable, folder: Path) -> None:
    trainer = make_trainer(model=str(folder), quantization_config=four_bits(), peft_config=ADAPTER)
    states = [p.quant_state.absmax for p in trainer.model.parameters() if hasattr(p, "quant_state")]
    really = sum(x.numel() * x.element_size() for x in (*trainer.model.parameters(), *states))
    config = trainer.model.config
    del config.quantization_config
    estimated = model_sizes(config, trainer.args, ADAPTER, bits=4)
    assert estimated.weight_bytes == really
    assert estimated.num_parameters == model_sizes(config, trainer.args, ADAPTER).num_parameters
    assert estimated.weight_bytes < 0.5 * model_sizes(config, trainer.args, ADAPTER).weight_bytes


@needs_it
def test_a_round_ahead_shares_the_weights_in_4_bits(make_trainer: Callable, folder: Path) -> None:
    trainer = make_trainer(
        model=str(folder), quantization_config=four_bits(), peft_config=ADAPTER, max_steps=3, async_rollouts=1
    )
    trainer.train()
    assert isinstance(trainer.run.step.engine, CopyEngine)
    assert logs(trainer, "rollouts/staleness") == [0, 1, 1]
    theirs = dict(trainer.model.named_parameters())
    shared = [name for name, p in trainer.run.step.engine.model.named_parameters() if p is theirs[name]]
    assert any(theirs[name].dtype == torch.uint8 for name in shared)
    assert not any("lora_" in name for name in shared)


@needs_it
@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit", "lion_8bit"])
def test_8_bit_optimizers(make_trainer: Callable, folder: Path, optim: str) -> None:
    """On a CPU, too; states of small tensors stay in 32 bits. Paged ones are not paged there, and say so."""
    settings = {"model": str(folder), "max_steps": 4, "optim": optim, "learning_rate": 1e-3}
    settings |= {"save_strategy": "steps", "save_steps": 2, "prove_first_batch": True}
    trainer = make_trainer(**settings)
    trainer.train()
    kinds = {
        value.dtype for state in trainer.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    }
    assert torch.uint8 in kinds
    assert_resumed_alike(trainer, make_trainer(**settings))


@needs_it
def test_8_bit_weights_are_refused_on_a_cpu(make_trainer: Callable, folder: Path) -> None:
    from transformers import BitsAndBytesConfig

    with pytest.raises(ModelError, match="no case for a CPU") as error:
        make_trainer(model=str(folder), quantization_config=BitsAndBytesConfig(load_in_8bit=True), peft_config=ADAPTER)
    assert error.value.code == "M015"


def test_without_the_package_it_is_said_before_weights_load(
    make_trainer: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    with pytest.raises(ModelError, match="4 bits need bitsandbytes") as error:
        make_trainer(model=str(folder), quantization_config={"load_in_4bit": True}, peft_config=ADAPTER)
    assert error.value.code == "M015"


def test_the_flat_key_belongs_elsewhere(make_trainer: Callable, folder: Path) -> None:
    with pytest.raises(ConfigError, match="quantization_config=BitsAndBytesConfig"):
        make_trainer(model=str(folder), model_init_kwargs={"load_in_4bit": True}, peft_config=ADAPTER)


def test_activation_offloading_is_no_setting(tmp_path: Path) -> None:
    """TRL's GRPOConfig has none; a recipe says what to do in its place."""
    from podium.recipe.schema import unknown_key

    with pytest.raises(TypeError, match="activation_offloading"):
        GRPOConfig(str(tmp_path), activation_offloading=True)
    assert "gradient_checkpointing: true" in unknown_key("activation_offloading").fix
