"""Lean layers: the model's own numbers and gradients, recognised by trial, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from podium.models.lean import LeanLayers, SwiGLU, lean_forward
from podium.models.precision import ProductPrecision
from podium.testing import tiny_model


class RMSNorm(nn.Module):
    """By name a norm that is known; what it computes is given."""

    def __init__(self, scale: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 2, 24))
        self.eps = 1e-5
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.scale(self.weight)


def gradients(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of something that depends on every token, added to what is there."""
    model(input_ids=ids).logits.square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2"])
def test_a_lean_model_computes_what_the_model_computes(kind: str) -> None:
    model = tiny_model(kind)
    lean_model = copy.deepcopy(model)
    ids = torch.arange(22).view(2, 11) + 3
    ids[1, 4:7] = ids[0, 0]  # one token several times: its gradients add up
    expected = [gradients(model, ids) for _ in range(2)][-1]
    lean = LeanLayers(lean_model)
    with lean():
        torch.testing.assert_close(lean_model(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5, rtol=1e-4)
        got = [gradients(lean_model, ids) for _ in range(2)][-1]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("kind", "layers"), [("llama", 2 * 3 + 2), ("gpt2", 2)])
def test_what_is_replaced(kind: str, layers: int) -> None:
    """Two layers of two norms and a gated unit, the last norm and the lookup; GPT-2 has its two lookups only."""
    assert len(LeanLayers(tiny_model(kind))) == layers


def test_a_norm_with_another_formula_is_left_alone() -> None:
    assert lean_forward(RMSNorm(lambda weight: weight)) is not None
    assert lean_forward(RMSNorm(lambda weight: 1 + weight)) is None


def test_lookups_honour_padding_and_frozen_tables() -> None:
    table, ids = nn.Embedding(10, 4, padding_idx=2), torch.tensor([[1, 2, 2, 3]])
    forward = lean_forward(table)
    assert forward is not None
    forward(ids).sum().backward()
    assert torch.equal(table.weight.grad.sum(1), torch.tensor([0.0, 4, 0, 4, 0, 0, 0, 0, 0, 0]))
    table.weight.requires_grad_(False)
    assert not forward(ids).requires_grad
    assert lean_forward(nn.Embedding(10, 4, max_norm=1.0)) is None


def test_with_bfloat16_products_the_gated_unit_still_gives_its_gradients() -> None:
    torch.manual_seed(0)
    model = tiny_model("llama", hidden_size=64, intermediate_size=128)
    ids = torch.arange(24).view(1, 24) + 3
    expected = gradients(copy.deepcopy(model), ids)
    with ProductPrecision(model, enabled=True, lean=LeanLayers(model))():
        got = gradients(model, ids)
    for name, a, b in zip(dict(model.named_parameters()), got, expected, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.99, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_units_of_many_tokens_are_computed_some_rows_at_a_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, up = (torch.randn(2, 9, 8, generator=torch.manual_seed(0), dtype=dtype).requires_grad_() for _ in range(2))

    def unit_and_gradients() -> list[torch.Tensor]:
        unit = SwiGLU.apply(gate, up)
        return [unit, *torch.autograd.grad(unit.float().square().sum(), [gate, up])]

    at_once = unit_and_gradients()
    monkeypatch.setattr("podium.models.lean.UNIT_ROWS", 4)  # 18 rows: four times four, and two
    assert all(map(torch.equal, unit_and_gradients(), at_once))
    torch.testing.assert_close(at_once[0], (torch.nn.functional.silu(gate) * up), atol=1e-2, rtol=1e-2)


def test_less_is_kept_for_the_backward() -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=128)

    def kept() -> int:
        sizes: dict[int, int] = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model(input_ids=torch.arange(200).view(1, 200) % 50).logits.sum()
        return sum(sizes.values())

    plain = kept()
    with LeanLayers(model)():
        assert kept() < 0.9 * plain
    with ProductPrecision(model, enabled=True, lean=LeanLayers(model))():
        assert kept() < 0.7 * plain


def test_leaving_the_context_leaves_nothing_behind() -> None:
    model = tiny_model("llama")
    lean = LeanLayers(model)
    with lean(), lean():
        assert any("forward" in module.__dict__ for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())
