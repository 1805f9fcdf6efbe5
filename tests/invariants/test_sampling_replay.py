"""With filters of sampling the first step's ratio is 1: training normalizes over the tokens that could be drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.engines.live.engine import LiveEngine
from podium.models import candidates as of_candidates
from podium.models.candidates import ids_of, of_bits, packed_bits
from podium.models.forward import Forward, choose_method
from podium.models.head import LogitScaling, head_logps, logps_of_logits
from podium.models.packing import Places, pack
from podium.records import Prompt, SamplingSettings, ScoredGroup
from podium.testing import tiny_model, tiny_tokenizer
from podium.trainer.samples import samples_of

FILTERS: tuple[dict[str, Any], ...] = (
    *({"top_p": p} for p in (0.5, 0.8, 0.95)),
    *({"top_k": k} for k in (1, 5, 50)),
    *({"min_p": p} for p in (0.02, 0.3)),
    {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "temperature": 0.7},
)


def prompts(tokenizer: Any) -> list[Prompt]:
    texts = ("2+2=", "17+25=", "What is")
    return [
        Prompt(id=i, row=i, token_ids=tuple(tokenizer(text)["input_ids"]), text=text, content=text)
        for i, text in enumerate(texts)
    ]


def peaked(kind: str) -> torch.nn.Module:
    """A model whose distributions differ from uniform, so that filters leave parts of them."""
    model = tiny_model(kind)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    return model.eval()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_candidates_are_what_the_filters_leave(filters: dict[str, Any]) -> None:
    """Against transformers' own warpers, over one forward of each prefix."""
    from podium.engines.transformers import _filters

    model, tokenizer = peaked("llama"), tiny_tokenizer()
    settings = SamplingSettings(num_completions=4, max_tokens=6, seed=3, replay=True, **filters)
    groups = LiveEngine(model, tokenizer).generate(prompts(tokenizer), settings)
    model.requires_grad_(False)
    for group in groups:
        for completion in group.completions:
            ids = torch.tensor([group.prompt.token_ids + completion.token_ids])
            logits_TV = model(ids).logits[0, len(group.prompt.token_ids) - 1 : -1].float()
            for warper in _filters(settings):
                logits_TV = warper(ids, logits_TV)
            expected = logits_TV.log_softmax(-1)
            for t, token in enumerate(completion.token_ids):
                left = ids_of(completion.candidates[t]) if completion.candidates else np.arange(logits_TV.shape[1])
                assert set(left) == set((logits_TV[t] > -torch.inf).nonzero().flatten().tolist())
                assert completion.logps[t] == pytest.approx(float(expected[t, token]), abs=1e-4)


@pytest.mark.diagonal
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("engine", ["live", "transformers"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_the_first_ratio_is_one(kind: str, engine: str, filters: dict[str, Any]) -> None:
    from podium.engines.transformers import TransformersEngine

    model, tokenizer = peaked(kind), tiny_tokenizer()
    settings = SamplingSettings(num_completions=4, max_tokens=8, seed=5, replay=True, **filters)
    method = choose_method(model)
    forward = Forward(
        temperature=settings.temperature, head=method.head, path=method.path, precision=contextlib.nullcontext
    )
    sampler: Any = LiveEngine(model, tokenizer)
    if engine == "transformers":
        sampler = TransformersEngine(model, tokenizer, forward=forward, tokens_per_pack=1000)
    groups = sampler.generate(prompts(tokenizer), settings)
    scored = [ScoredGroup(group=group, names_K=(), rewards_GK=np.zeros((4, 0))) for group in groups]
    samples = [sample for group in scored for sample in samples_of(group, np.ones(4))]
    with torch.no_grad(), forward.context(model):
        for packed in pack(samples, tokens_per_pack=60):
            logps_N = forward.token_logps(model, packed).logps_N
            ratio_N = (logps_N - packed.sampled_logps_N).exp()
            assert float((ratio_N - 1).abs().max()) < 1e-5


def random_case(seed: int) -> tuple[torch.nn.Linear, Tensor, Places, Tensor, tuple[np.ndarray, ...]]:
    generator = np.random.default_rng(seed)
    rows, tokens, vocabulary, width = 7, 12, 33, 5
    torch.manual_seed(seed)
    head = torch.nn.Linear(width, vocabulary, bias=True)
    row_N = np.concatenate([np.arange(rows), generator.integers(0, rows, tokens - rows)])
    target_N = generator.integers(0, vocabulary, tokens)
    known = []
    for target in target_N:
        ids = generator.choice(vocabulary, generator.integers(1, vocabulary), replace=False)
        known.append(np.unique([*ids, target]).astype(np.int32))
    known[2] = of_candidates.ALL
    known[3] = np.packbits(np.isin(np.arange(vocabulary), known[3]))
    hidden_PD = torch.randn(rows, width)
    return head, hidden_PD, Places.of(row_N, "cpu"), torch.from_numpy(target_N), tuple(known)


@pytest.mark.parametrize("cap", [None, 3.0], ids=["", "soft cap"])
@pytest.mark.parametrize("chunk_bytes", [1 << 30, 4 * 33 * 16], ids=["one chunk", "chunks"])
def test_gradients_are_those_of_a_plain_loop(
    chunk_bytes: int, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podium.models import devices

    kind = devices.KINDS["cpu"]
    monkeypatch.setitem(devices.KINDS, "cpu", kind.__class__(**{**_fields(kind), "logits_bytes": chunk_bytes}))
    head, hidden_PD, places, target_N, known = random_case(4)
    hidden_PD = hidden_PD.repeat(6, 1)  # more rows than fit into a chunk
    row_N = np.concatenate([places.host_row_N + 7 * i for i in range(6)])
    places = Places.of(row_N, "cpu")
    target_N, known = target_N.repeat(6), known * 6
    upstream_N = torch.randn(len(target_N))
    entropy_N = torch.randn(len(target_N)) * 0.1
    places = places.with_candidates(known)
    found = []
    for plain in (True, False):
        own = hidden_PD.clone().requires_grad_()
        head.zero_grad()
        if plain:
            logits_PV = head(own) if cap is None else cap * torch.tanh(head(own) / cap)
            logp_PV = (logits_PV / 0.7).log_softmax(-1)
            picked = [
                logp_PV[row, target] - (logp_PV[row, ids_of(left).copy()].logsumexp(0) if len(left) else 0.0)
                for row, target, left in zip(row_N, target_N, known, strict=True)
            ]
            logps_N = torch.stack(picked)
            entropies_N = -(logp_PV.exp() * logp_PV).sum(-1)[row_N]
        else:
            logps_N, entropies_N = head_logps(head, own, places, target_N, LogitScaling(cap=cap).at(0.7))
        ((logps_N * upstream_N).sum() + (entropies_N * entropy_N).sum()).backward()
        found.append((logps_N.detach(), own.grad, head.weight.grad.clone(), head.bias.grad.clone()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    if cap is None:
        logps_N, _ = logps_of_logits(head(hidden_PD), places, target_N, 0.7)
        torch.testing.assert_close(logps_N, found[0][0], atol=2e-5, rtol=2e-5)


def _fields(record: Any) -> dict[str, Any]:
    import dataclasses

    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def test_bits_and_ids_are_the_same_tokens() -> None:
    generator = np.random.default_rng(0)
    for count in (1, 2, 40, 99):
        kept = np.zeros(99, bool)
        kept[generator.choice(99, count, replace=False)] = True
        [bits_B] = packed_bits(torch.from_numpy(kept)[None]).numpy()
        assert list(ids_of(of_bits(bits_B))) == list(np.flatnonzero(kept))
        assert of_bits(bits_B).nbytes <= 13


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2, "beta": 0.1}, {"async_rollouts": 1}], ids=str)
def test_a_run_has_ratios_of_one_where_all_tokens_would_not(make_trainer: Callable[..., Any], changes: Any) -> None:
    gaps = {}
    for replay in (True, False):
        trainer = make_trainer(model=peaked("llama"), top_p=0.6, sampling_replay=replay, learning_rate=0.0, **changes)
        trainer.train()
        gaps[replay] = max(
            entry.get("sampling/sampling_logp_difference/max", 0.0) for entry in trainer.state.log_history
        )
        ratios = [
            entry["clip_ratio/region_mean"] for entry in trainer.state.log_history if "clip_ratio/region_mean" in entry
        ]
        assert not any(ratios)
        counts = [entry["rollouts/candidates"] for entry in trainer.state.log_history if "rollouts/candidates" in entry]
        assert all(1 <= count < 0.9 * trainer.model.config.vocab_size for count in counts)
        assert bool(counts) == replay
    assert gaps[True] < 1e-4


def test_a_resumed_run_is_the_same(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """The round of the checkpoint goes on with its candidates."""
    saved = {"save_strategy": "steps", "save_steps": 1}
    settings: dict[str, Any] = {"top_p": 0.6, "num_iterations": 2, "beta": 0.1, "max_steps": 4, **saved}
    whole = make_trainer(model=peaked("llama"), **settings)
    whole.train()
    again = make_trainer(model=peaked("llama"), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.model.state_dict().items())
