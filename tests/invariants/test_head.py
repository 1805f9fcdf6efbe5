"""What a model does between its hidden states and its logits is learnt from its own forward, and computed so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from benchmarks.families import SCALED, tiny
from podium.models import head
from podium.models.attention import attention_implementation, tree_attention
from podium.models.forward import choose_method, token_logps
from podium.models.head import LogitScaling, OwnLogits, learn_head
from podium.models.packing import pack, unscored
from podium.testing import tiny_model

TEMPERATURE = 0.7
PROMPT, COMPLETIONS = (5, 6, 7, 8), ((10, 11, 12, 2), (10, 20, 21, 22, 2))


def own(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities under the model's own logits, row by row, and the gradient of a weighted sum of them."""
    found, before = [], len(PROMPT) - 1
    with attention_implementation(model, "eager"):  # others leave out a cap of attention
        for completion in COMPLETIONS:
            logits_1SV = model(input_ids=torch.tensor([PROMPT + completion]), use_cache=False).logits
            logp_TV = (logits_1SV[0, before:-1].float() / TEMPERATURE).log_softmax(-1)
            found.append(logp_TV.gather(1, torch.tensor(completion)[:, None])[:, 0])
        return finished(model, torch.cat(found))


def computed(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The same as training computes them."""
    method = choose_method(model)
    [packed] = pack([unscored(PROMPT, completion) for completion in COMPLETIONS], tokens_per_pack=1000)
    with tree_attention(model) if method.path == "shared" else contextlib.nullcontext():
        out = token_logps(model, packed, temperature=TEMPERATURE, head=method.head, path=method.path)
        return finished(model, out.logps_N)


def finished(model: nn.Module, logps_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    (logps_N * torch.linspace(0.5, 1.5, len(logps_N))).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logps_N.detach(), grads


def check(model: nn.Module) -> None:
    (expected, grads), (found, found_grads) = own(model), computed(model)
    assert (found - expected).abs().max() < 1e-5
    assert found_grads.keys() == grads.keys()
    whole = sum(float(g.square().sum()) for g in grads.values()) ** 0.5
    for name, grad in grads.items():
        assert (found_grads[name] - grad).norm() <= 1e-4 * max(float(grad.norm()), 1e-2 * whole), name


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", SCALED)
def test_training_computes_the_models_own_log_probabilities(name: str) -> None:
    """Families whose scales, caps and divisors are not neutral, and composite classes over such language models."""
    check(tiny(name))


@pytest.mark.parametrize(
    ("name", "scale", "cap"),
    [
        ("falcon_h1", 0.3, None),
        ("hyperclovax", 1.7, None),
        ("granite", 1 / 1.7, None),
        ("recurrent_gemma", 1.0, 3.0),
        ("muse_glimmer", 0.6, 3.0 / 0.6),
        ("cohere2", 0.3, None),
        ("cohere2_vision", 1.0, None),
        ("llava_granite", 1.0, None),
    ],
)
def test_what_a_class_does_is_learnt_whatever_its_config_calls_it(name: str, scale: float, cap: float | None) -> None:
    """`logits_scaling` divides in one class, multiplies in another, and does nothing in a third."""
    head = learn_head(tiny(name))
    assert isinstance(head, LogitScaling)
    assert head.scale == pytest.approx(scale, rel=1e-7)
    assert head.cap == (cap and pytest.approx(cap, rel=1e-7))


@pytest.mark.cases(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mamba", "jamba", "minimax_m2", "zamba2"])
def test_rounding_is_no_difference(name: str, dtype: torch.dtype) -> None:
    """Weights in half precision: the trial computes in float32, also where a layer reads those of another (Mamba)."""
    halved = tiny(name).to(dtype)
    before = {key: x.clone() for key, x in halved.state_dict().items()}
    assert learn_head(halved) == learn_head(tiny(name))
    assert all(x.dtype == before[key].dtype and x.equal(before[key]) for key, x in halved.state_dict().items())


def test_a_trial_that_fails_leaves_the_logits_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(head, "_learnt_scaling", fail)
    assert learn_head(tiny_model("llama")) == OwnLogits("a trial of its forward failed (RuntimeError: no such kernel)")


def test_a_vocabulary_may_be_smaller_than_the_trial() -> None:
    assert learn_head(tiny_model("llama", vocab_size=4, pad_token_id=0, eos_token_id=1)) == LogitScaling()


def test_a_bias_that_forbids_tokens_is_a_product() -> None:
    model = tiny_model("llama")
    bias = torch.zeros(model.config.vocab_size)
    bias[100:] = -1e20
    model.lm_head.bias = nn.Parameter(bias)
    assert learn_head(model) == LogitScaling()
    check(model)


# ---- models that compute their logits by themselves ----


def _behind(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """The model with a class of which the forward changes the logits."""
    base = type(model)

    class Changed(base):
        def forward(self, *given: object, logits_to_keep: object = 0, **named: object) -> object:
            outputs = super().forward(*given, logits_to_keep=logits_to_keep, **named)
            outputs.logits = change(outputs.logits)
            return outputs

    model.__class__ = Changed
    return model


def masked(logits: Tensor) -> Tensor:
    """As Chameleon does with the tokens of images."""
    allowed = torch.arange(logits.shape[-1]) < 200
    return torch.where(allowed, logits, torch.finfo(logits.dtype).min)


CHANGES = {
    "a mask of tokens": masked,
    "a bias of its own": lambda logits: logits + torch.linspace(-1, 1, logits.shape[-1]),
    "a cap of another form": lambda logits: 3 * logits / (1 + logits.abs()),
    "other scales": lambda logits: logits * torch.linspace(0.5, 2, logits.shape[-1]),
    "fewer logits": lambda logits: logits[..., :250],
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_no_scale_and_no_cap_is_computed_by_the_model(what: str) -> None:
    model = _behind(tiny_model("llama"), CHANGES[what])
    assert isinstance(learn_head(model), OwnLogits)
    check(model)


def test_an_output_embedding_that_is_no_product() -> None:
    model = tiny_model("llama")
    inner = model.lm_head.forward
    model.lm_head.forward = lambda hidden: inner(hidden.tanh())
    assert learn_head(model) == OwnLogits("its output embedding is not a product with its weight")
    check(model)


def test_an_adapter_on_the_output_embedding() -> None:
    """Its product with the weight alone would be right at the beginning, and wrong as soon as it has learnt."""
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    assert learn_head(model) == OwnLogits("its output embedding trains more than its weight and bias")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    check(model)


def test_tokens_that_are_trained_alone() -> None:
    model = get_peft_model(
        tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5, 10])
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.normal_(std=0.3)
    check(model)
