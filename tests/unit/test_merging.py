"""A merge is given back only where the merged model answers as the adapter does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from podium.errors import ModelError, ProofError
from podium.models.merging import MergeProof, expect, merge, prove
from podium.testing import KINDS, tiny_model, tiny_tokenizer


def adapted(kind: str = "llama", size: float = 0.1, dtype: torch.dtype = torch.float32) -> PeftModel:
    """A model with an adapter that has been trained: its second matrices are not zero."""
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=True)
    model: Any = get_peft_model(tiny_model(kind).to(dtype), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model


def merged_and_proved(model: PeftModel) -> tuple[Any, MergeProof]:
    expected = expect(model, tiny_tokenizer())
    merged = merge(model)
    return merged, prove(merged, expected, merged.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_that_holds(kind: str) -> None:
    merged, proof = merged_and_proved(adapted(kind))
    assert proof.difference < 1e-4 < proof.effect
    assert not any("lora" in name for name, _ in merged.named_parameters())


def test_an_adapter_that_changes_nothing_yet() -> None:
    merged, proof = merged_and_proved(adapted(size=0.0))
    assert proof.effect == 0
    assert merged.config.model_type == "llama"


@pytest.mark.parametrize("fault", ["base", "twice", "one layer", "nan"])
def test_a_broken_merge_is_refused(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A merge that forgot the adapter, added it twice, missed a layer or overflowed."""
    model = adapted()
    tuner = type(model.base_model)
    original = tuner.merge_and_unload

    def broken(self: Any, *given: Any, **settings: Any) -> Any:
        if fault == "base":
            return self.unload()
        layers = [module for _, module in self.model.named_modules() if hasattr(module, "lora_B")]
        with torch.no_grad():
            for layer in layers[-1:] if fault == "one layer" else layers:
                factor = {"twice": 2.0, "one layer": 0.0, "nan": float("nan")}[fault]
                layer.lora_B["default"].weight.mul_(factor)
        return original(self, *given, **settings)

    monkeypatch.setattr(tuner, "merge_and_unload", broken)
    with pytest.raises(ProofError, match="The merge is refused") as refused:
        merged_and_proved(model)
    assert refused.value.code == "P013"
    assert "podium explain P013" in refused.value.fix


def test_half_precision_that_drops_the_adapter_is_refused() -> None:
    """The adapter's change is smaller than what bfloat16 can add to the weights: close, but no closer than the base."""
    model = adapted(size=1e-4)
    expected = expect(model, tiny_tokenizer())
    rounded = merge(model).to(torch.bfloat16).float()
    with pytest.raises(ProofError, match=r"Rounding has lost what was trained.*--dtype float32"):
        prove(rounded, expected, torch.bfloat16)


def test_nothing_to_merge() -> None:
    with pytest.raises(ModelError, match="no adapter"):
        merge(tiny_model("llama"))  # type: ignore[arg-type]
