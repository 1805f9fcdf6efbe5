"""On a CUDA device: the engine samples what `generate` would, and what is sampled, packed and trained agrees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from podium.engines.live.engine import LiveEngine
from podium.models import devices
from podium.models.attention import tree_attention
from podium.models.forward import token_logps
from podium.models.head import LogitScaling
from podium.models.packing import pack, unscored
from podium.records import Prompt, SamplingSettings
from podium.testing import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TEXTS = ("hello world", "a", "What is 2+2? Tell me now please, it is a long prompt")


def prompts() -> list[Prompt]:
    tokenizer = tiny_tokenizer()
    ids = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]
    return [
        Prompt(id=i, row=i, token_ids=x, text=t, content=t) for i, (x, t) in enumerate(zip(ids, TEXTS, strict=True))
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_greedy_tokens_equal_generate(kind: str) -> None:
    model = tiny_model(kind).cuda()
    settings = SamplingSettings(num_completions=2, max_tokens=24, end_ids=frozenset([2]), greedy=True)
    for group in LiveEngine(model, tiny_tokenizer()).generate(prompts(), settings):
        ids = torch.tensor([group.prompt.token_ids], device="cuda")
        expected = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=0)
        for completion in group.completions:
            assert list(completion.token_ids) == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-3), (True, 0.1)])
def test_sampled_log_probabilities_equal_the_training_forward(autocast: bool, tolerance: float) -> None:
    model = tiny_model("llama").cuda()

    def precision() -> torch.autocast:
        return torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast)

    settings = SamplingSettings(num_completions=4, max_tokens=24, end_ids=frozenset([2]), seed=1)
    groups = LiveEngine(model, tiny_tokenizer(), precision=precision).generate(prompts(), settings)
    samples = [
        replace(unscored(group.prompt.token_ids, each.token_ids), sampled_logps_A=np.array(each.logps, np.float32))
        for group in groups
        for each in group.completions
    ]
    [packed] = pack(samples, tokens_per_pack=10_000, device="cuda")
    with torch.no_grad(), precision():
        with tree_attention(model):
            shared = token_logps(model, packed, temperature=1.0, head=LogitScaling()).logps_N
        padded = token_logps(model, packed, temperature=1.0, head=LogitScaling(), path="padded").logps_N
    assert (shared - packed.sampled_logps_N).abs().max() < tolerance
    assert (shared - padded).abs().max() < tolerance


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_replayed_steps_draw_what_steps_one_by_one_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end at different tokens, and prompts enter as others leave, so that several shapes are captured."""
    engine = LiveEngine(tiny_model(kind).cuda(), tiny_tokenizer(), max_rows=7)
    settings = SamplingSettings(num_completions=3, max_tokens=70, end_ids=frozenset(range(1, 5)), seed=1)
    given = [prompt for i in range(3) for prompt in (replace(p, id=3 * i + p.id) for p in prompts())]
    replayed = engine.generate(given, settings)
    assert engine.graphs.last is not None, engine.graphs.refused
    monkeypatch.setitem(devices.KINDS, "cuda", replace(devices.KINDS["cuda"], graphs=False))
    for one, other in zip(replayed, engine.generate(given, settings), strict=True):
        for mine, theirs in zip(one.completions, other.completions, strict=True):
            assert mine.token_ids == theirs.token_ids
            np.testing.assert_allclose(mine.logps, theirs.logps, atol=1e-4)
