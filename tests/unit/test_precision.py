"""bfloat16 products: rounded copies that keep up with the weights, gradients near float32's, nothing left behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from podium.models import precision
from podium.models.lean import LeanLayers
from podium.models.precision import MeasuredProducts, ProductPrecision, can_pack, measure_products, narrow_product
from podium.testing import tiny_model


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 96, bias=False), nn.Linear(96, 8))


@pytest.mark.parametrize("optimizer", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_the_copy_follows_every_optimizer(optimizer: dict[str, bool]) -> None:
    """A fused optimizer does not raise the version of what it writes: a copy that trusts it stays at the first step."""
    model, x = wide(), torch.randn(5, 96)
    precision = ProductPrecision(model, enabled=True)
    steps = torch.optim.AdamW(model.parameters(), lr=0.1, **optimizer)
    with precision():
        before = model(x).detach()
        model(x).sum().backward()
        steps.step()
        after = model(x).detach()
    expected = model(x).detach()
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(after, expected, atol=0.15, rtol=0.05)


def test_the_copy_follows_loading_and_new_storage() -> None:
    model, other, x = wide(), wide(), torch.randn(5, 96)
    precision = ProductPrecision(model, enabled=True)
    with torch.no_grad(), precision():
        model(x)
        for parameter in other.parameters():
            parameter.add_(0.05)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(x), other(x), atol=0.1, rtol=0.05)
        model[0].weight.data = torch.zeros(128, 96)
        other[0].weight.data = torch.zeros(128, 96)
        torch.testing.assert_close(model(x), other(x), atol=0.1, rtol=0.05)


def test_gradients_are_those_of_float32_up_to_rounding_and_add_up() -> None:
    model, x = wide(), torch.randn(40, 96, requires_grad=True)
    precision = ProductPrecision(model, enabled=True)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()], x.grad.clone()
    model.zero_grad()
    x.grad = None
    with precision():
        for half in (slice(0, 25), slice(25, 40)):  # the second pack adds to what the first left
            model(x[half]).square().sum().backward()
    for got, want in zip([*(p.grad for p in model.parameters()), x.grad], [*expected[0], expected[1]], strict=True):
        assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.999
        assert abs(float(got.norm() / want.norm()) - 1) < 0.02


def test_a_gradient_that_somebody_listens_to_goes_the_ordinary_way() -> None:
    model, x, heard = wide(), torch.randn(5, 96), []
    precision = ProductPrecision(model, enabled=True)
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: heard.append(parameter.grad.norm()))
    with precision():
        model(x).sum().backward()
        model(x).sum().backward()
    assert len(heard) == 2
    assert heard[1] > heard[0]


def test_leaving_the_context_leaves_nothing_behind() -> None:
    model, x = wide(), torch.randn(5, 96)
    plain = model(x)
    precision = ProductPrecision(model, enabled=True)
    with precision(), precision():
        assert not torch.equal(model(x), plain)
    assert torch.equal(model(x), plain)
    assert all("forward" not in module.__dict__ for module in model.modules())
    with ProductPrecision(model, enabled=False)():
        assert torch.equal(model(x), plain)


def test_narrow_layers_and_half_precision_weights_are_left_alone() -> None:
    model = nn.ModuleList([nn.Linear(96, 8), nn.Linear(96, 96), nn.Linear(96, 96).to(torch.bfloat16)])
    with ProductPrecision(model, enabled=True)():
        assert ["forward" in module.__dict__ for module in model] == [False, True, False]


def test_a_run_trains_with_rounded_products() -> None:
    """What is sampled and what is trained follow the optimizer: the same as in float32 up to rounding."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16)
    ids = torch.arange(12)[None] + 5
    steps = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    with ProductPrecision(model, enabled=True)():
        for _ in range(20):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            steps.step()
            steps.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


def test_what_is_measured_decides() -> None:
    assert MeasuredProducts(float32=100, bfloat16=200).bfloat16_pays
    assert not MeasuredProducts(float32=100, bfloat16=110).bfloat16_pays
    assert all(rate > 0 for rate in measure_products(rows=16, width=64, inner=64, repeats=1))


class Attention(nn.Module):
    """Three siblings, as models name them; `v_proj` may get another input."""

    def __init__(self, *, bias: bool = False, same_input: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(96, n, bias=bias) for n in (128, 64, 64))
        self.same_input = same_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.v_proj(x if self.same_input else 2 * x)
        return torch.cat([self.q_proj(x).sin(), self.k_proj(x).cos() * value], -1)


@pytest.mark.parametrize("same_input", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_siblings_are_multiplied_as_one_and_keep_their_own_outputs_and_gradients(bias: bool, same_input: bool) -> None:
    model, x = Attention(bias=bias, same_input=same_input), torch.randn(3, 20, 96, requires_grad=True)
    precision = ProductPrecision(model, enabled=True)
    expected_y = model(x)
    expected_y.sum().backward()
    expected = [p.grad.clone() for p in model.parameters()], x.grad.clone()
    model.zero_grad()
    x.grad = None
    with precision():
        y = model(x)
        y.sum().backward()
    torch.testing.assert_close(y, expected_y, atol=0.03, rtol=0.05)
    for got, want in zip([*(p.grad for p in model.parameters()), x.grad], [*expected[0], expected[1]], strict=True):
        assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.999
        assert abs(float(got.norm() / want.norm()) - 1) < 0.02


@pytest.fixture(params=["packed where it can be", "never packed"])
def both_products(request: pytest.FixtureRequest) -> None:
    """The product that this processor takes while sampling, and the one of processors without AVX-512."""
    if request.param == "never packed":
        request.getfixturevalue("refuse_packed_weights")


@pytest.mark.usefixtures("both_products")
def test_packed_weights_follow_training_and_agree_with_the_plain_ones() -> None:
    model, x = Attention(), torch.randn(7, 96)
    precision = ProductPrecision(model, enabled=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    for _ in range(2):
        with torch.no_grad(), precision.sampling():
            before = model(x)
            model.k_proj.weight.mul_(1.1)
        with torch.no_grad(), precision.sampling():
            sampled = model(x)
            assert not torch.equal(sampled, before)
        with precision():
            trained = model(x)
            torch.testing.assert_close(sampled, trained.detach(), atol=0.02, rtol=0.02)
            trained.sum().backward()
        optimizer.step()


def test_siblings_may_be_frozen_later_and_asked_in_two_precisions() -> None:
    model, x = Attention(), torch.randn(20, 96)
    precision = ProductPrecision(model, enabled=True)
    model.q_proj.weight.requires_grad_(False)
    with precision():
        model(x).sum().backward()
        narrow = narrow_product(model.q_proj, x)
        other = model.k_proj(x)  # a sibling that asks for float32 after one that did not
    assert model.q_proj.weight.grad is None
    assert all(layer.weight.grad.abs().sum() > 0 for layer in (model.k_proj, model.v_proj))
    assert (narrow.dtype, other.dtype) == (torch.bfloat16, torch.float32)


def test_a_hook_on_a_layer_is_called_although_its_product_could_be_part_of_a_larger_one() -> None:
    model, seen = tiny_model("llama", hidden_size=64, intermediate_size=128), []
    precision = ProductPrecision(model, enabled=True, lean=LeanLayers(model))
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    with precision():
        model(input_ids=torch.arange(8).view(1, 8)).logits.sum().backward()
    assert seen == [1]


def test_operators_that_raise_are_tried_once_and_then_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(*_: object) -> None:
        calls.append(1)
        raise RuntimeError("bf16 path needs the cpu support")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", SimpleNamespace(default=refuse))
    monkeypatch.setattr(precision, "_packable", {})
    model, x = wide(), torch.randn(5, 96)
    products = ProductPrecision(model, enabled=True)
    for _ in range(3):
        with torch.no_grad(), products.sampling():
            sampled = model(x)
    with torch.no_grad(), products():
        assert torch.equal(sampled, model(x))
    assert len(calls) == len({tuple(layer.weight.shape) for layer in model if isinstance(layer, nn.Linear)}) - 1


@pytest.mark.parametrize("missing", ["_reorder_linear_weight", "_linear_pointwise"])
def test_operators_that_a_build_lacks_are_not_used(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_packable", {})
    operators = {"_reorder_linear_weight": torch.Tensor.clone, "_linear_pointwise": F.linear}
    del operators[missing]
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**operators))
    assert not can_pack(torch.ones(128, 96, dtype=torch.bfloat16))


def test_operators_that_give_other_numbers_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(128, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    monkeypatch.setattr(precision, "_packable", {})
    monkeypatch.setattr(precision, "_pack", lambda weight_OI: weight_OI)
    monkeypatch.setattr(precision, "_packed_linear", lambda x16, packed_OI: F.linear(x16, packed_OI) * 1.02)
    assert not can_pack(weight)
    monkeypatch.setattr(precision, "_packable", {})
    monkeypatch.setattr(precision, "_packed_linear", F.linear)
    assert can_pack(weight)
