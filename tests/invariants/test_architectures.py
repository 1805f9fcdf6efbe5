"""Architectures of `benchmarks.families`: packs and turns against plain forwards of every row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.families import FAMILIES, tiny
from podium.engines.live.engine import LiveEngine, state_bytes
from podium.models import devices
from podium.models.attention import attention_implementation, tree_attention
from podium.models.forward import choose_method, token_logps
from podium.models.head import LogitScaling
from podium.models.packing import pack
from podium.models.recurrence import SHORTEST_ROW, TreeRows, recurrent
from podium.records import RolloutRequest, Sample
from tests.invariants import test_turns as turns
from tests.invariants.test_forward import alike, group, packed, plain

PADDED = {
    "jamba": "NotImplementedError: selective scans",
    "mamba": "NotImplementedError: selective scans",
    "recurrent_gemma": "differed by",
    "minimax": "differed by",
    "bloom": "differed by",
    "gpt_neo": "differed by",
    "gptj": "differed by",
    "xlstm": "does not take `logits_to_keep`",
    "falcon": "failed",
    "stablelm": "failed",
    "nemotron": "failed",
}
"""Why: other recurrences, positions that are added to scores, attention that cannot be replaced."""
SHARED = [name for name in FAMILIES if name not in PADDED]
HYBRID = ["qwen3_5_text", "kimi_linear", "granitemoehybrid", "lfm2"]
"""Gated delta rule, Kimi's delta rule, Mamba-2, short convolution."""
SLOW = "kimi_linear"
"""A step of it takes seconds, a token at a time: its cases are in `make test-slow`."""
HYBRIDS = [pytest.param(name, marks=[pytest.mark.slow] * (name == SLOW)) for name in HYBRID]
TWO_KINDS = ("zamba2", "falcon_h1")
"""Attention and a recurrence in one layer."""
FEW = {*HYBRID, "gpt_oss", "deepseek_v3", "gemma4_text", "llama4_text", "qwen3_vl"} - {SLOW}
KINDS = [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in SHARED]


@pytest.fixture(scope="module")
def trunk() -> list[Sample]:
    """A tree of depth three: a trunk, two prompts, beginnings of completions."""
    rng = np.random.default_rng(3)
    begun = tuple(rng.integers(3, 200, 50).tolist())
    both = [*alike(rng, 70, 40, [5, 80, 130]), *group(rng, 9, [1, 64, 7])]
    return [replace(sample, prompt_ids=begun + sample.prompt_ids) for sample in both]


@pytest.fixture(scope="module")
def short() -> list[Sample]:
    """A prompt of its own, with short completions."""
    return group(np.random.default_rng(4), 33, [20, 20])


@pytest.fixture(scope="module")
def samples(trunk: list[Sample], short: list[Sample]) -> list[Sample]:
    """All of them."""
    return trunk + short


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of every parameter that has one; experts that no token took have none."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def apart(model: nn.Module, samples: Sequence[Sample]) -> tuple[float, float]:
    """Largest differences of packs from plain rows: of log-probabilities in nats, of gradients by their size."""
    expected, _ = plain(model, [*samples])
    by_plain = gradients(model)
    logps, _ = packed(model, [*samples])
    by_packs = gradients(model)
    assert by_packs.keys() == by_plain.keys()
    whole = sum(float(g.square().sum()) for g in by_plain.values()) ** 0.5
    off = [float((by_packs[n] - g).norm()) / max(float(g.norm()), 1e-3 * whole) for n, g in by_plain.items()]
    return float((logps - expected).abs().max()), max(off)


def test_a_balancing_loss_that_is_a_number_is_one(short: list[Sample]) -> None:
    """transformers gives the number 0 where no layer in use has a router."""
    model = tiny("granitemoehybrid", num_local_experts=0)
    [whole] = pack(short, tokens_per_pack=4096)
    with tree_attention(model):
        found = token_logps(model, whole, temperature=1.0, head=LogitScaling(), router=True).router_loss
    assert found is not None
    assert found.detach() == 0


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", KINDS)
def test_packs_are_plain_rows(name: str, samples: list[Sample]) -> None:
    model = tiny(name)
    assert choose_method(model).path == "shared"
    in_nats, in_gradients = apart(model, samples)
    assert in_nats < 5e-5
    assert in_gradients < 1e-4


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", KINDS)
def test_turns_are_those_of_rounds_and_of_plain_rows(name: str) -> None:
    model, how = tiny(name), turns.settings()
    groups = turns.sampled(model, how, max_rows=7)
    turns.check(groups, how)
    assert turns.off(model, groups) < 1e-4
    turns.assert_alike(groups, turns.sampled(model, how, engine=turns.Rounds))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "name", [*HYBRIDS, *(pytest.param(n, marks=pytest.mark.slow) for n in ("zamba2", "falcon_h1"))]
)
@pytest.mark.usefixtures("as_if_cuda")
def test_a_kept_state_holds_nothing_that_was_drawn_in_vain(name: str) -> None:
    """On a GPU rows are looked at every eighth token; what one draws behind its end must not be in its state."""
    model, how = tiny(name), turns.settings()
    assert turns.off(model, turns.sampled(model, how)) < 1e-4


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_turn_goes_on_from_the_kept_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(name)
    tokens: list[int] = []
    monkeypatch.setattr(model, "forward", _counted(model.forward, tokens))
    how = turns.settings()
    groups = turns.sampled(model, how)
    prompts = sum(len(prompt.token_ids) for prompt in turns.PROMPTS)
    assert sum(tokens) == prompts + turns.inputs_of(groups), "no token is computed twice"


def _counted(forward: Any, tokens: list[int]) -> Any:
    def counting(*args: Any, **kwargs: Any) -> Any:
        tokens.append(kwargs["input_ids"].numel())
        return forward(*args, **kwargs)

    return counting


@pytest.mark.parametrize("name", [*HYBRIDS, "llama"])
def test_an_edited_history_is_computed_anew(name: str) -> None:
    """A state cannot be taken back to an earlier token; keys and values can."""
    model, how = tiny(name), turns.settings(num_completions=1, max_tokens=6)
    prompt = tuple(range(5, 45))
    first = RolloutRequest(token_ids=prompt, prompt_id=0, max_tokens=6)
    with LiveEngine(model, turns.TOKENIZER).session(how, [first], keeps=True) as session:
        session.submit(first)
        drawn = _next(session)
        edited = (*prompt, *drawn.token_ids[:2], 77, 78)
        session.submit(RolloutRequest(token_ids=edited, prompt_id=0, position=4, max_tokens=6))
        again = _next(session)
        assert session.schedule.taken == 1, "the sequence before is kept no longer"
    ids = torch.tensor([[*edited, *again.token_ids]])
    with torch.no_grad(), attention_implementation(model, "eager"):
        logps = model(ids).logits[0].log_softmax(-1)[len(edited) - 1 : -1]
    expected = logps.gather(1, torch.tensor(again.token_ids)[:, None])[:, 0]
    np.testing.assert_allclose(again.logps, expected, atol=1e-4)


def _next(session: Any) -> Any:
    while session.is_busy:
        session.step()
    [ended] = session.poll()
    return ended


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", PADDED)
def test_others_take_the_padded_path(name: str, tmp_path: Path) -> None:
    """Also as they are initialised, where an earlier token hardly changes a later one."""
    FAMILIES[name](tmp_path)
    for model in (tiny(name), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)):
        method = choose_method(model)
        assert method.path == "padded"
        assert PADDED[name] in method.not_shared


def test_rows_of_a_tree() -> None:
    """A beginning that saves less than a row is computed in every row; any other is a level of its own."""
    stem, short = np.arange(SHORTEST_ROW), np.arange(3)
    for beginning, levels in ((stem, 2), (short, 1)):
        behind = [np.concatenate([beginning, 100 * i + np.arange(5)]) for i in (1, 2)]
        assert len(TreeRows(behind, "cpu").levels) == levels
    assert [len(group) for level in TreeRows([stem, stem], "cpu").levels for group in level] == [1]


@pytest.mark.parametrize("name", HYBRIDS)
def test_bytes_of_a_rows_states(name: str) -> None:
    model = tiny(name)
    with torch.no_grad(), tree_attention(model):
        assert state_bytes(model, torch.device("cpu")) > 0
    assert recurrent(model)
    assert not recurrent(tiny("llama"))
    assert state_bytes(tiny("llama"), torch.device("cpu")) == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_that_are_computed_again_in_the_backward(name: str, samples: list[Sample]) -> None:
    """Gradient checkpointing, while another pack of the same model was computed in between."""
    model = tiny(name)
    packed(model, samples)
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    packed(model, samples)
    found = gradients(model)
    assert all(torch.allclose(found[n], x, rtol=1e-4, atol=1e-5) for n, x in expected.items())


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", HYBRIDS)
def test_gradients_are_the_same_every_time(name: str) -> None:
    """Bit by bit, on several threads: many completions add to the state and the last inputs of one prompt."""
    wide = {"hidden_size": 128, **({"mamba_n_heads": 32} if name == "granitemoehybrid" else {})}
    model, threads = tiny(name, **wide), torch.get_num_threads()
    rng = np.random.default_rng(5)
    many = group(rng, 70, [40] * 16)
    torch.set_num_threads(4)
    try:
        found = []
        for _ in range(3):
            packed(model, many)
            found.append(gradients(model))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, each[n]) for each in found[1:] for n, x in found[0].items())


def test_packs_of_one_group_are_smaller_than_its_rows(trunk: list[Sample]) -> None:
    [both] = pack(trunk, tokens_per_pack=4096)
    assert len(both.input_ids_T) < sum(len(span.tokens) for span in both.spans_R)


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("name", [*sorted(FEW), pytest.param(SLOW, marks=pytest.mark.slow)])
def test_packs_by_the_branches_of_a_gpu(name: str, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in buckets with dense masks, rows by indexing; in float32."""
    monkeypatch.setitem(devices.KINDS, "cpu", devices.KINDS["cuda"])
    in_nats, in_gradients = apart(tiny(name), samples)
    assert in_nats < 5e-5
    assert in_gradients < 1e-4
