"""Decoder layers as one function each: the layers' own numbers, recognised by trial, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from podium.engines.live.engine import LiveEngine
from podium.models.attention import tree_attention
from podium.models.forward import token_logps
from podium.models.head import LogitScaling
from podium.models.lean import Blocks, DecoderBlock, lean_precision
from podium.models.packing import pack, unscored
from podium.models.precision import ProductPrecision
from podium.records import Group, Prompt, SamplingSettings
from podium.testing import tiny_model, tiny_tokenizer

KNOWN = ("llama", "qwen2", "qwen3", "mistral")
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""Wide enough that every product is rounded."""


def sampled(model: nn.Module, precision: Callable[[], object]) -> list[Group]:
    ids = ((5, 6, 7, 8), (9, 10), (11, 12, 13, 14, 15, 16, 17))
    prompts = [Prompt(id=i, row=i, token_ids=x, text="", content="") for i, x in enumerate(ids)]
    settings = SamplingSettings(num_completions=3, max_tokens=20, end_ids=frozenset([1]))
    return LiveEngine(model, tiny_tokenizer(), precision=precision).generate(prompts, settings)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[DecoderBlock]:
    """Which blocks were called."""
    seen: list[DecoderBlock] = []
    original = DecoderBlock.__call__
    monkeypatch.setattr(DecoderBlock, "__call__", lambda self, *a, **k: seen.append(self) or original(self, *a, **k))
    return seen


@pytest.mark.parametrize(("kind", "count"), [*((kind, 2) for kind in KNOWN), ("gemma2", 0), ("gemma3", 0), ("gpt2", 0)])
def test_what_is_recognised(kind: str, count: int) -> None:
    assert len(Blocks(tiny_model(kind))) == count


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KNOWN)
def test_in_float32_the_same_completions(kind: str, calls: list[DecoderBlock]) -> None:
    model = tiny_model(kind)
    expected = sampled(model, ProductPrecision(model, enabled=False).sampling)
    assert not calls
    got = sampled(model, lean_precision(model, enabled=False).sampling)
    assert calls
    for a, b in zip(expected, got, strict=True):
        assert [c.token_ids for c in a.completions] == [c.token_ids for c in b.completions]
        for c, d in zip(a.completions, b.completions, strict=True):
            np.testing.assert_allclose(c.logps, d.logps, atol=1e-4)


def with_adapter(model: nn.Module, seed: int = 0) -> nn.Module:
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"]))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.2
    return model.eval()


@pytest.mark.cases(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("kind", KNOWN)
def test_in_bfloat16_what_was_sampled_is_what_training_sees(
    kind: str, adapter: bool, packed: bool, calls: list[DecoderBlock], request: pytest.FixtureRequest
) -> None:
    if not packed:
        request.getfixturevalue("refuse_packed_weights")
    model = tiny_model(kind, **WIDE)
    model = with_adapter(model) if adapter else model
    precision = lean_precision(model, enabled=True)
    calls.clear()
    groups = sampled(model, precision.sampling)
    assert calls
    samples = [
        replace(unscored(group.prompt.token_ids, each.token_ids), sampled_logps_A=np.array(each.logps, np.float32))
        for group in groups
        for each in group.completions
    ]
    for part in pack(samples, tokens_per_pack=4096):
        with torch.no_grad(), precision(), tree_attention(model):
            trained = token_logps(model, part, temperature=1.0, head=LogitScaling()).logps_N
        with torch.no_grad():
            largest = float(model(input_ids=part.input_ids_T[None]).logits.abs().max())
        difference = (part.sampled_logps_N - trained).abs()
        # A sum in another order moves a bfloat16 logit by at most one step, 2^-7 of its size. A log-probability is the
        # difference of two: the token's own and the log-sum-exp. Few values lie so near the middle between two steps.
        assert difference.max() <= 2 * 2**-7 * largest
        assert difference.mean() <= 2**-4 * 2**-7 * largest


@pytest.mark.cases(1)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_an_adapter_changes_what_is_sampled(packed: bool, request: pytest.FixtureRequest) -> None:
    if not packed:
        request.getfixturevalue("refuse_packed_weights")
    model = with_adapter(tiny_model("llama", **WIDE))
    precision = lean_precision(model, enabled=True)
    with_it = sampled(model, precision.sampling)
    with model.disable_adapter():
        without = sampled(model, precision.sampling)
    assert [g.completions for g in with_it] != [g.completions for g in without]


class Scaled(LlamaDecoderLayer):
    """By its parts a layer that is known; it computes something else."""

    def forward(self, hidden_states: torch.Tensor, **given: object) -> torch.Tensor:
        return 1.01 * super().forward(hidden_states, **given)


def test_a_layer_with_another_formula_is_left_alone() -> None:
    model = tiny_model("llama")
    model.model.layers[1].__class__ = Scaled
    assert len(Blocks(model)) == 1


def test_a_layer_that_somebody_listens_into_is_left_alone(calls: list[DecoderBlock]) -> None:
    model = tiny_model("llama")
    precision, heard = lean_precision(model, enabled=False), []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: heard.append(1))
    calls.clear()
    sampled(model, precision.sampling)
    assert heard
    assert {block.layer for block in calls} == {model.model.layers[1]}


def test_leaving_the_context_leaves_nothing_behind() -> None:
    model = tiny_model("llama")
    blocks = Blocks(model)
    with blocks(), blocks():
        assert all("forward" in layer.__dict__ for layer in model.model.layers)
    assert not any("forward" in module.__dict__ for module in model.modules())
