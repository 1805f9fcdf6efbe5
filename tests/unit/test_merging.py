"""A merge is given back only where the merged model answers as the adapter does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from podium.errors import ModelError, ProofError
from podium.models.merging import merge_adapter, prove_merge
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_that_holds(kind: str) -> None:
    model = adapted(kind)
    before = {name: p.clone() for name, p in model.named_parameters()}
    merged, proof = merge_adapter(model, tiny_tokenizer())
    assert proof.passed
    assert proof.difference < 1e-4 < proof.effect
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert all(p.equal(before[name]) for name, p in model.named_parameters()), "the model given is left as it is"


def test_an_adapter_that_changes_nothing_yet() -> None:
    merged, proof = merge_adapter(adapted(size=0.0), tiny_tokenizer())
    assert proof.effect == 0
    assert merged.config.model_type == "llama"


@pytest.mark.parametrize("fault", ["base", "twice", "one layer", "nan"])
def test_a_broken_merge_is_refused(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A merge that forgot the adapter, added it twice, missed a layer or overflowed."""
    model = adapted()
    tuner = type(model.base_model)
    merge = tuner.merge_and_unload

    def broken(self: Any, *given: Any, **settings: Any) -> Any:
        if fault == "base":
            return self.unload()
        layers = [module for _, module in self.model.named_modules() if hasattr(module, "lora_B")]
        with torch.no_grad():
            for layer in layers[-1:] if fault == "one layer" else layers:
                factor = {"twice": 2.0, "one layer": 0.0, "nan": float("nan")}[fault]
                layer.lora_B["default"].weight.mul_(factor)
        return merge(self, *given, **settings)

    monkeypatch.setattr(tuner, "merge_and_unload", broken)
    with pytest.raises(ProofError, match="The merge is refused") as refused:
        merge_adapter(model, tiny_tokenizer())
    assert refused.value.code == "P013"


def test_half_precision_that_drops_the_adapter_is_refused() -> None:
    """The adapter's change is smaller than what bfloat16 can add to the weights."""
    model = adapted(size=1e-3, dtype=torch.bfloat16)
    merged = model.merge_and_unload()
    with torch.no_grad():
        for p, q in zip(merged.parameters(), tiny_model("llama").to(torch.bfloat16).parameters(), strict=True):
            p.copy_(q)
    proof = prove_merge(adapted(size=1e-3, dtype=torch.bfloat16), merged, tiny_tokenizer())
    assert proof.difference <= proof.tolerance
    assert not proof.passed, "close enough, but no closer than the base"


def test_nothing_to_merge() -> None:
    with pytest.raises(ModelError, match="no adapter"):
        merge_adapter(tiny_model("llama"), tiny_tokenizer())  # type: ignore[arg-type]
