"""Decoding steps of a fixed shape draw what ordinary ones do; on a CPU, where they are computed and not captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from podium.engines.live import graphs
from podium.engines.live.engine import LiveEngine
from podium.engines.live.graphs import FixedGrid, Graphs
from podium.models import devices
from podium.records import Group, Prompt, SamplingSettings
from podium.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("as_if_cuda")

SETTINGS = SamplingSettings(num_completions=3, max_tokens=70, end_ids=frozenset(range(1, 5)), seed=3)


def prompts(count: int = 5, longest: int = 15) -> list[Prompt]:
    ids = [tuple(range(5, 6 + longest * (i + 1) // count)) for i in range(count)]
    return [Prompt(id=i, row=i, token_ids=x, text="", content="") for i, x in enumerate(ids)]


def make_engine(kind: str = "llama", max_rows: int | None = 7) -> LiveEngine:
    return LiveEngine(tiny_model(kind), tiny_tokenizer(), max_rows=max_rows)


def ordinary(engine: LiveEngine, given: Sequence[Prompt], settings: SamplingSettings, **how: Any) -> list[Group]:
    """What an engine samples without steps of a fixed shape."""
    before = devices.KINDS["cpu"]
    devices.KINDS["cpu"] = replace(before, graphs=False)
    try:
        return LiveEngine(engine.model, engine.tokenizer, max_rows=engine.max_rows).generate(given, settings, **how)
    finally:
        devices.KINDS["cpu"] = before


def assert_same(found: Sequence[Group], expected: Sequence[Group]) -> None:
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.completions, other.completions, strict=True):
            assert mine.token_ids == theirs.token_ids
            np.testing.assert_allclose(mine.logps, theirs.logps, atol=1e-4)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[graphs.GraphShape]:
    """The shapes that are captured."""
    found: list[graphs.GraphShape] = []
    original = graphs.FixedDecode.__init__

    def init(self: Any, cache: Any, shape: graphs.GraphShape, device: Any) -> None:
        found.append(shape)
        original(self, cache, shape, device)

    monkeypatch.setattr(graphs.FixedDecode, "__init__", init)
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("max_rows", [7, None])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2"])
def test_they_draw_what_ordinary_steps_do(kind: str, max_rows: int | None, shapes: list[graphs.GraphShape]) -> None:
    """Rows end at different tokens, others come into their places, windows hide, and unused rows are there."""
    engine = make_engine(kind, max_rows)
    groups = engine.generate(prompts(), SETTINGS)
    lengths = {len(c.token_ids) for group in groups for c in group.completions}
    assert len(lengths) > 3
    assert len(set(shapes)) > 2, "the shape changed on the way"
    assert engine.graphs.refused is None
    assert_same(groups, ordinary(engine, prompts(), SETTINGS))


def test_a_wrong_cell_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FixedGrid.load

    def load(self: FixedGrid, slots_R: np.ndarray) -> None:
        original(self, slots_R)
        self.cell_R.copy_(self.cell_R.roll(1))

    monkeypatch.setattr(FixedGrid, "load", load)
    engine, short = make_engine(), replace(SETTINGS, max_tokens=12)
    groups = engine.generate(prompts(), short)
    with pytest.raises(AssertionError):
        assert_same(groups, ordinary(engine, prompts(), short))


def test_a_step_that_cannot_be_captured_is_computed_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def capture(*_: Any) -> Any:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Graphs, "capture", capture)
    engine, short = make_engine(), replace(SETTINGS, max_tokens=12)
    assert_same(engine.generate(prompts(), short), ordinary(engine, prompts(), short))
    engine.generate(prompts(), short)
    assert tried == [1], "it is tried once"
    assert engine.graphs.refused == "operation not permitted when stream is capturing"


# ---- from one session to the next ----


def train(engine: LiveEngine) -> None:
    """Change the weights where they are, as an optimizer does."""
    with torch.no_grad():
        for i, parameter in enumerate(engine.model.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))


@pytest.mark.parametrize("kept", [True, False])
def test_the_next_session_has_the_new_weights(
    kept: bool, shapes: list[graphs.GraphShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no new capture, where the steps were kept: small caches and models."""
    monkeypatch.setattr(graphs, "CAST_BYTES", 10**9 if kept else 0)
    engine, short = make_engine(max_rows=None), replace(SETTINGS, max_tokens=12)

    def precision() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    engine.precision = precision
    first = engine.generate(prompts(), short)
    captures = len(shapes)
    train(engine)
    second = engine.generate(prompts(), short)
    assert len(shapes) == captures * (1 if kept else 2)
    assert [c.token_ids for g in first for c in g.completions] != [c.token_ids for g in second for c in g.completions]
    fresh = LiveEngine(engine.model, engine.tokenizer, precision=precision).generate(prompts(), short)
    for one, other in zip(second, fresh, strict=True):
        assert [(c.token_ids, c.logps) for c in one.completions] == [(c.token_ids, c.logps) for c in other.completions]


def test_what_is_sampled_does_not_depend_on_earlier_sessions() -> None:
    """Longer completions, longer and more prompts before: a run that is resumed has not seen them."""
    engine, short = make_engine(max_rows=None), replace(SETTINGS, max_tokens=12)
    for given, settings in ((prompts(9, 60), SETTINGS), (prompts(3, 40), short), (prompts(), short)):
        last = engine.generate(given, settings)
    fresh = LiveEngine(engine.model, engine.tokenizer).generate(prompts(), short)
    for one, other in zip(last, fresh, strict=True):
        assert [(c.token_ids, c.logps) for c in one.completions] == [(c.token_ids, c.logps) for c in other.completions]


def test_weights_that_have_moved_are_read_where_they_are(shapes: list[graphs.GraphShape]) -> None:
    engine, short = make_engine(max_rows=None), replace(SETTINGS, max_tokens=12)
    engine.generate(prompts(), short)
    captures = len(shapes)
    for parameter in engine.model.parameters():
        parameter.data = parameter.data + 0.05
    assert_same(engine.generate(prompts(), short), ordinary(engine, prompts(), short))
    assert len(shapes) == 2 * captures


def test_a_large_cache_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_rows=None)
    engine.generate(prompts(), SETTINGS)
    assert engine.graphs._kept is not None
    monkeypatch.setattr(graphs, "KEPT_BYTES", 1000)
    engine.generate(prompts(), SETTINGS)
    assert engine.graphs._kept is None
