"""The packed forward with shared prefixes says what one plain forward per completion says.

The plain one is transformers' own: eager attention, the whole logits, a log-softmax, nothing of Podium.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from podium.models import attention, forward
from podium.models.attention import attention_implementation, tree_attention
from podium.models.devices import KINDS
from podium.models.forward import choose_method, token_logps
from podium.models.head import ChunkedLogps, Head, LogitScaling, head_logps, learn_head
from podium.models.packing import Places, pack, unscored
from podium.records import Sample
from podium.testing import tiny_model

SHARED_KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2")
TEMPERATURE = 0.7
LONGEST_SUM = 380
"""Terms of the longest sum of a forward here: the keys that the last token of the longest row attends to, with its
trunk. The widths (64, 128) and the vocabulary (260) are smaller."""
TOLERANCE = LONGEST_SUM * torch.finfo(torch.float32).eps
"""The same sum of n float32 terms in two orders differs by at most n eps of the sum of their sizes (Higham, Accuracy
and Stability of Numerical Algorithms, 2002, section 4.2): 5e-5. Which orders are compared is the processor's choice;
differences of 1e-6 to 1.1e-5 were measured. A wrong key gives a hundred times the tolerance (below)."""


def group(rng: np.random.Generator, prompt: int, completions: list[int]) -> list[Sample]:
    """A prompt and its completions: random tokens of the given lengths."""
    prompt_ids = rng.integers(4, 260, prompt).tolist()
    return [unscored(prompt_ids, rng.integers(4, 260, n).tolist()) for n in completions]


def alike(rng: np.random.Generator, prompt: int, stem: int, tails: list[int], *, other: int = 1) -> list[Sample]:
    """Completions that begin alike; the last two are the same, one is another's beginning, one begins otherwise."""
    start, apart, *ends = group(rng, prompt, [stem, other, *tails])
    begun = [start.token_ids + end.token_ids for end in ends]
    completions = [apart.token_ids, *begun, start.token_ids, begun[0], begun[0]]
    return [unscored(start.prompt_ids, ids) for ids in completions]


@pytest.fixture(scope="module")
def groups() -> list[list[Sample]]:
    """Small groups that attend as one row; one of a single token; one too large for that (prefixes.FOLDED_ROW).

    Then some that begin alike: short, behind a long prompt, and longer than one row.
    """
    rng = np.random.default_rng(7)
    return [
        group(rng, 13, [9, 1, 12, 5]),
        group(rng, 1, [1]),
        group(rng, 90, [70, 3, 64, 80]),
        group(rng, 30, [1, 1]),
        alike(rng, 11, 6, [3, 5]),
        alike(rng, 140, 40, [30, 50]),
        alike(rng, 20, 60, [120, 150], other=140),
    ]


@pytest.fixture(scope="module")
def samples(groups: list[list[Sample]]) -> list[Sample]:
    """Those of all groups."""
    return [sample for each in groups for sample in each]


def test_what_completions_begin_with_alike_is_computed_once(groups: list[list[Sample]]) -> None:
    short, behind, long = groups[-3:]
    sizes = [len(pack(each, tokens_per_pack=4096)[0].input_ids_T) for each in (short, behind, long)]
    assert sizes == [11 + 6 + 2 + 4, 140 + 40 + 29 + 49, 20 + 60 + 119 + 149 + 139]


@pytest.mark.parametrize(("prompt", "stem", "shared"), [(3, 1, False), (3, 90, True), (20, 300, True)])
def test_long_completions_share_what_saves_enough(prompt: int, stem: int, shared: bool) -> None:
    """Four tokens of three rows of 200 are not worth it; 300 are worth it however long that is."""
    rng = np.random.default_rng(9)
    whole = alike(rng, prompt, stem, [200, 200, 200])
    [packed] = pack(whole[1:4], tokens_per_pack=4096)
    assert len(packed.input_ids_T) == (prompt + stem) * (1 if shared else 3) + 3 * 199


def weights(samples: list[Sample]) -> tuple[list[Tensor], list[Tensor]]:
    """What each token's log-probability and entropy count in the scalar that is differentiated."""
    rng = np.random.default_rng(8)
    lengths = [len(sample.token_ids) for sample in samples]
    draw = [[torch.from_numpy(rng.normal(size=n).astype(np.float32)) for n in lengths] for _ in range(2)]
    return draw[0], draw[1]


def plain(model: nn.Module, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """One eager forward per completion: log-probabilities and entropies, flat; gradients are left on the model."""
    of_logp, of_entropy = weights(samples)
    logps, entropies = [], []
    with attention_implementation(model, "eager"):
        for i, sample in enumerate(samples):
            ids = torch.tensor([sample.prompt_ids + sample.token_ids])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
            logp_NV = (logits.float() / TEMPERATURE).log_softmax(-1)
            logps.append(logp_NV.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0])
            entropies.append(-(logp_NV.exp() * logp_NV).sum(-1))
            ((logps[-1] * of_logp[i]).sum() + (entropies[-1] * of_entropy[i]).sum()).backward()
    return torch.cat(logps).detach(), torch.cat(entropies).detach()


def packed(
    model: nn.Module,
    samples: list[Sample],
    *,
    tokens_per_pack: int = 4096,
    path: forward.AttentionPath = "shared",
    head: Head | None = None,
) -> tuple[Tensor, Tensor]:
    """The same through packs; `head` is learnt where none is given."""
    of_logp, of_entropy = (torch.cat(x) for x in weights(samples))
    logps, entropies, at = [], [], 0
    head = head or learn_head(model)
    for part in pack(samples, tokens_per_pack=tokens_per_pack):
        with tree_attention(model) if path == "shared" else contextlib.nullcontext():
            out = token_logps(model, part, temperature=TEMPERATURE, head=head, path=path)
            here = slice(at, at + part.num_tokens)
            ((out.logps_N * of_logp[here]).sum() + (out.entropy_N * of_entropy[here]).sum()).backward()
        logps.append(out.logps_N.detach())
        entropies.append(out.entropy_N.detach())
        at += part.num_tokens
    return torch.cat(logps), torch.cat(entropies)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of every trainable parameter; all of them must have one. Leaves none behind."""
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in found.values()), [name for name, grad in found.items() if grad is None]
    model.zero_grad(set_to_none=True)
    return found


def compare(model: nn.Module, run: Callable[[], tuple[Tensor, Tensor]], samples: list[Sample]) -> None:
    expected_logps, expected_entropy = plain(model, samples)
    expected_grads = gradients(model)
    logps, entropy = run()
    grads = gradients(model)
    assert (logps - expected_logps).abs().max() < TOLERANCE
    assert (entropy - expected_entropy).abs().max() < TOLERANCE
    assert grads.keys() == expected_grads.keys()
    whole = math.sqrt(sum(float(grad.square().sum()) for grad in expected_grads.values()))
    for name, expected in expected_grads.items():
        assert float((grads[name] - expected).norm()) < TOLERANCE * max(float(expected.norm()), 1e-3 * whole), name


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_a_single_key_too_many_is_far_beyond_the_tolerance(
    kind: str, groups: list[list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One completion's first token is seen by another completion of its group."""
    model = tiny_model(kind)
    expected, _ = plain(model, groups[0])
    original = attention.additive

    def leaking(seen_BLK: Tensor, dtype: torch.dtype) -> Tensor:
        seen_BLK = seen_BLK.clone()
        seen_BLK[0, -1] |= torch.arange(seen_BLK.shape[2]) == (~seen_BLK[0, -1]).nonzero()[0, 0]
        return original(seen_BLK, dtype)

    monkeypatch.setattr(attention, "additive", leaking)
    got, _ = packed(model, groups[0])
    assert (got - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.slow
def test_the_tolerance_covers_sums_in_another_order(samples: list[Sample]) -> None:
    """The hidden units of every gated unit in reverse: the same function, summed differently."""
    longest = 150 + max(len(sample.prompt_ids) + len(sample.token_ids) for sample in samples)
    assert longest * torch.finfo(torch.float32).eps <= TOLERANCE
    model, other = tiny_model("llama"), tiny_model("llama")
    for layer in other.model.layers:
        for linear, dim in ((layer.mlp.gate_proj, 0), (layer.mlp.up_proj, 0), (layer.mlp.down_proj, 1)):
            linear.weight.data = linear.weight.data.flip(dim)
    difference = (plain(model, samples)[0] - plain(other, samples)[0]).abs().max()
    assert 0 < difference < TOLERANCE


def with_lora(model: nn.Module) -> nn.Module:
    """An adapter that changes the model: both of its factors random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = get_peft_model(
            model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        )
    return model.eval()


@pytest.mark.cases(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_shared_prefix_equals_one_plain_forward_per_row(kind: str, lora: bool, samples: list[Sample]) -> None:
    model = tiny_model(kind)
    model = with_lora(model) if lora else model
    assert choose_method(model).path == "shared"
    compare(model, lambda: packed(model, samples), samples)


@pytest.mark.cases(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_gradient_checkpointing_changes_nothing(kind: str, lora: bool, reentrant: bool, samples: list[Sample]) -> None:
    model = tiny_model(kind)
    model = with_lora(model) if lora else model
    model.train()  # checkpointing is on in training mode only; these models have no dropout
    head = learn_head(model)
    counted = _count_layer_calls(model)

    def run() -> tuple[Tensor, Tensor]:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        counted.clear()
        return packed(model, samples, head=head)

    compare(model, run, samples)
    assert len(counted) == 2 * model.config.num_hidden_layers, "each layer runs once forward and once again backward"


def _count_layer_calls(model: nn.Module) -> list[str]:
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_the_padded_path_equals_one_plain_forward_per_row(kind: str, samples: list[Sample]) -> None:
    """GPT-2 has absolute positions: padding must not shift them."""
    model = tiny_model(kind)
    compare(model, lambda: packed(model, samples, path="padded"), samples)


def _with_trunk(samples: list[Sample], length: int) -> list[Sample]:
    """The same behind a system prompt."""
    trunk = tuple(np.random.default_rng(9).integers(4, 260, length).tolist())
    return [dataclasses.replace(sample, prompt_ids=trunk + sample.prompt_ids) for sample in samples]


@pytest.mark.cases(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("length", [16, 150])
@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_what_all_prompts_begin_with_is_computed_once(kind: str, length: int, samples: list[Sample]) -> None:
    """Shorter than gemma's window and than a chunk of attention, and longer than both."""
    model = tiny_model(kind)
    behind = _with_trunk(samples, length)
    [alone] = pack(samples, tokens_per_pack=4096)
    [packed_once] = pack(behind, tokens_per_pack=4096)
    assert len(packed_once.input_ids_T) == len(alone.input_ids_T) + length
    compare(model, lambda: packed(model, behind), behind)


def test_a_long_trunk_is_not_repeated_for_every_group() -> None:
    rng = np.random.default_rng(2)
    prompts = [tuple(rng.integers(4, 260, 10).tolist()) for _ in range(40)]
    behind = _with_trunk([unscored(prompt, (first, *range(10))) for prompt in prompts for first in (1, 2)], 200)
    parts = pack(behind, tokens_per_pack=64)
    assert [len(part.input_ids_T) for part in parts] == [200 + 20 * 30, 200 + 20 * 30]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("tokens_per_pack", [100, 1, 300])
def test_the_size_of_packs_with_a_trunk_changes_nothing(tokens_per_pack: int, samples: list[Sample]) -> None:
    behind = _with_trunk(samples, 40)
    model = tiny_model("qwen3")
    compare(model, lambda: packed(model, behind, tokens_per_pack=tokens_per_pack), behind)


def test_the_same_prompt_twice() -> None:
    """Its last token predicts the first of each completion of both groups."""
    rng = np.random.default_rng(3)
    drawn = [sample for _ in range(2) for sample in group(rng, 1, [5, 6])]
    twice = [dataclasses.replace(sample, prompt_ids=tuple(range(4, 44))) for sample in drawn]
    [part] = pack(twice, tokens_per_pack=4096)
    assert len(part.input_ids_T) == 40 + 2 * (4 + 5)
    model = tiny_model("llama")
    compare(model, lambda: packed(model, twice), twice)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_padded_rows_of_a_pack_with_a_trunk(kind: str, samples: list[Sample]) -> None:
    behind = _with_trunk(samples, 20)
    model = tiny_model(kind)
    compare(model, lambda: packed(model, behind, path="padded"), behind)


def test_a_long_prompt_is_not_repeated_for_every_completion() -> None:
    """A prompt larger than the budget: each part holds five times its tokens, this one included."""
    length, count = 200, 43
    samples = [unscored(range(1, length + 1), (i, *range(1, 41))) for i in range(count)]
    parts = pack(samples, tokens_per_pack=64)
    assert [(part.num_rollouts, len(part.input_ids_T)) for part in parts] == [(20, 1000), (20, 1000), (3, 320)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("tokens_per_pack", [150, 1, 40, 300, 100_000])
def test_the_size_of_packs_changes_nothing(tokens_per_pack: int, samples: list[Sample]) -> None:
    model = tiny_model("qwen3")
    parts = pack(samples, tokens_per_pack=tokens_per_pack)
    assert [len(sample.token_ids) for sample in samples] == [
        int((part.rollout_N == r).sum()) for part in parts for r in range(part.num_rollouts)
    ]
    for part in parts:
        longest = max(span.prompt_length for span in part.spans_R)
        room = max(tokens_per_pack, KINDS["cpu"].beginnings_per_pack * longest)
        assert len(part.input_ids_T) <= room or part.num_rollouts == 1
    compare(model, lambda: packed(model, samples, tokens_per_pack=tokens_per_pack), samples)


def test_the_head_in_chunks_is_the_head_at_once(samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        KINDS, "cpu", dataclasses.replace(KINDS["cpu"], logits_bytes=4 * 260 * 16)
    )  # 16 tokens at a time
    model = tiny_model("gemma2")  # soft-capped, tied to the embeddings
    compare(model, lambda: packed(model, samples), samples)


def test_a_row_of_padding_queries_changes_nothing() -> None:
    """Rows of a bucket are padded to its longest; a completion of one token has no row of its own at all."""
    rng = np.random.default_rng(1)
    samples = [*group(rng, 200, [1, 90, 65, 1]), *group(rng, 250, [100, 127])]
    model = tiny_model("llama")
    compare(model, lambda: packed(model, samples), samples)


# ---- models that cannot share prefixes ----


def test_a_model_that_gives_other_numbers_takes_the_padded_path() -> None:
    """Absolute positions that ignore `position_ids` cannot be packed; the trial finds out."""
    model = tiny_model("llama")
    rotary = model.model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids: original(
        x, torch.arange(position_ids.shape[1])[None].expand_as(position_ids)
    )
    method = choose_method(model)
    assert method.path == "padded"
    assert "differed by" in method.not_shared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hides_nothing_in_the_trial(dtype: torch.dtype) -> None:
    """Rounding alone is more than the trial allows; it computes in float32, and leaves the weights as they were."""
    model = tiny_model("llama").to(dtype)
    places = [p.data_ptr() for p in model.parameters()]
    assert choose_method(model).path == "shared"
    assert [p.data_ptr() for p in model.parameters()] == places
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    rotary = model.model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids: original(x, position_ids // 2 * 2)
    assert choose_method(model).path == "shared", "the same in both"
    rotary.forward = lambda x, position_ids: original(
        x, torch.arange(position_ids.shape[1])[None].expand_as(position_ids)
    )
    assert choose_method(model).path == "padded"
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_a_model_that_fails_in_the_trial_takes_the_padded_path() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    original = attention.forward

    def strict(*args: object, **kwargs: object) -> object:
        if "podium" in kwargs:
            raise TypeError("unexpected keyword argument 'podium'")
        return original(*args, **kwargs)

    attention.forward = strict
    method = choose_method(model)
    assert method.path == "padded"
    assert "unexpected keyword" in method.not_shared


def test_the_heads_gradient_of_a_half_precision_model_is_rounded_once() -> None:
    """However small the chunks: adding them up in bfloat16 would lose what is small beside the sum."""
    torch.manual_seed(0)
    hidden_ND, target_N = torch.randn(512, 32), torch.randint(0, 40, (512,))
    grads = []
    for dtype, chunk in ((torch.float32, 512), (torch.bfloat16, 512), (torch.bfloat16, 16)):
        weight_VD = torch.linspace(-1, 1, 40 * 32).sin().view(40, 32).to(dtype).requires_grad_()
        factor_VD, scaling = weight_VD.detach(), LogitScaling()
        logps_N, _ = ChunkedLogps.apply(
            hidden_ND.to(dtype), weight_VD, factor_VD, None, Places.of(np.arange(512), "cpu"), target_N, scaling, chunk
        )
        logps_N.sum().backward()
        grads.append(weight_VD.grad.float())
    exact, whole, chunked = grads
    assert (chunked - exact).norm() < 1.1 * (whole - exact).norm()


def test_a_head_whose_weight_is_given_away_after_the_forward_still_has_a_backward() -> None:
    """As ZeRO-3 does with weights that stand on other processes."""
    torch.manual_seed(0)
    grads = []
    for given_away in (False, True):
        head = nn.Linear(16, 40, bias=False).requires_grad_(False)
        head.weight.data = torch.linspace(-1, 1, 640).sin().view(40, 16)
        hidden_ND = torch.linspace(-2, 2, 128).cos().view(8, 16).requires_grad_()
        if given_away:
            head.weight.ds_id = 0
        places = Places.of(np.arange(8), "cpu")
        logps_N, _ = head_logps(head, hidden_ND, places, torch.arange(8), LogitScaling())
        if given_away:
            head.weight.data.untyped_storage().resize_(0)
        logps_N.sum().backward()
        grads.append(hidden_ND.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize(("size", "offset"), [(1.0, 0.0), (1.0, 100.0), (1.0, 1e5), (300.0, 0.0), (1e5, 0.0)])
def test_large_logits_are_as_exact_as_torchs_log_softmax(
    size: float, offset: float, blocks: int, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that are far apart, or that all lie as far from 0: the distance to float64 is that of plain float32."""
    torch.manual_seed(0)
    places, target_N = Places.of(np.arange(40), "cpu"), torch.randint(0, 300, (40,))
    monkeypatch.setitem(KINDS, "cpu", dataclasses.replace(KINDS["cpu"], logits_bytes=4 * 300 * 40 // blocks))
    hidden_PD, weight_VD = torch.randn(40, 16), torch.randn(300, 16) * size
    hidden_PD[:, 0], weight_VD[:, 0] = 1.0, offset
    upstream_2N = torch.randn(2, 40)

    def plain(hidden_PD: Tensor, head: nn.Linear) -> tuple[Tensor, Tensor]:
        z = head(hidden_PD)
        logp_PV = (z if cap is None else torch.tanh(z / cap) * cap).log_softmax(-1)
        return logp_PV[torch.arange(40), target_N], -(logp_PV.exp() * logp_PV).sum(-1)

    def chunked(hidden_PD: Tensor, head: nn.Linear) -> tuple[Tensor, Tensor]:
        return head_logps(head, hidden_PD, places, target_N, LogitScaling(cap=cap))

    found = []
    for run, dtype in ((plain, torch.float64), (plain, torch.float32), (chunked, torch.float32)):
        head, hidden = nn.Linear(16, 300, bias=False).to(dtype), hidden_PD.detach().clone().to(dtype).requires_grad_()
        head.weight.data.copy_(weight_VD)
        outputs = run(hidden, head)
        sum((x * up).sum() for x, up in zip(outputs, upstream_2N, strict=True)).backward()
        found.append([x.double() for x in (*outputs, hidden.grad, head.weight.grad)])
    for exact, usual, mine in zip(*found, strict=True):
        assert (mine - exact).norm() <= 2 * (usual - exact).norm() + 1e-6 * exact.norm()
