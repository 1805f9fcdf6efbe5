"""What shared prefixes save in hybrids: a prompt of 256 tokens with 8 completions of 32, shared and not, alternating.

    python -m benchmarks.hybrids

Training: forward and backward of one pack over the tree, and over padded rows. Sampling: the live engine, and
transformers' `generate` on padded rows of the same prompt. Float32 on one core, medians of ratios.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.families import tiny
from podium.engines.live.engine import LiveEngine
from podium.models.attention import attention_implementation, tree_attention
from podium.models.forward import token_logps
from podium.models.head import learn_head
from podium.models.packing import pack, unscored
from podium.records import Prompt, SamplingSettings
from podium.testing import tiny_tokenizer

RESULTS = Path(__file__).parent / "results" / "hybrids.json"
PROMPT, COMPLETIONS, TOKENS, REPEATS = 256, 8, 32, 3
_WIDE: Mapping[str, Any] = {
    **{"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4},
    **{"head_dim": 64, "num_hidden_layers": 4},
}
_DELTA = {
    **{"linear_num_key_heads": 12, "linear_num_value_heads": 12, "linear_key_head_dim": 64},
    **{"linear_value_head_dim": 64, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5_text": {**_WIDE, **_DELTA},
    "olmo_hybrid": {**_WIDE, **_DELTA, "num_key_value_heads": 12},
    "lfm2": {**_WIDE, "layer_types": ["conv"] * 3 + ["full_attention"]},
    "granitemoehybrid": {
        **{**_WIDE, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_chunk_size": 64},
        **{"shared_intermediate_size": 2048, "layer_types": ["mamba"] * 3 + ["attention"]},
    },
}
"""One width for all; layers in the proportion that the families have."""


def training(model: nn.Module, path: Any) -> Callable[[], None]:
    """Forward and backward of one group."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(4, 200, TOKENS).tolist() for _ in range(COMPLETIONS)]
    prompt = rng.integers(4, 200, PROMPT).tolist()
    [packed] = pack([unscored(prompt, text) for text in texts], tokens_per_pack=1 << 20)

    head = learn_head(model)

    def run() -> None:
        with tree_attention(model) if path == "shared" else attention_implementation(model, "sdpa"):
            token_logps(model, packed, temperature=1.0, head=head, path=path).logps_N.sum().backward()
        model.zero_grad(set_to_none=True)

    return run


def sampling(model: Any, path: str) -> Callable[[], None]:
    """Completions of one prompt, all of the same length."""
    prompt = np.random.default_rng(0).integers(4, 200, PROMPT)
    asked = Prompt(id=0, row=0, token_ids=tuple(prompt.tolist()), text="", content="")
    settings = SamplingSettings(num_completions=COMPLETIONS, max_tokens=TOKENS, end_ids=frozenset(), seed=0)
    rows = torch.from_numpy(prompt).expand(COMPLETIONS, -1)
    exact = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS, "do_sample": True, "top_k": 0}

    def run() -> None:
        if path == "shared":
            LiveEngine(model, tiny_tokenizer()).generate([asked], settings)
        else:
            model.generate(rows, attention_mask=torch.ones_like(rows), **exact)

    return run


def ratio(make: Callable[[Any, str], Callable[[], None]], model: nn.Module) -> dict[str, float]:
    """Median seconds of both, and the median of their ratios."""
    both = [make(model, path) for path in ("shared", "padded")]
    times: list[list[float]] = [[], []]
    for run in both:  # once, untimed
        run()
    for _ in range(REPEATS):
        for run, found in zip(both, times, strict=True):
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    pairs = zip(*times, strict=True)
    shared, padded = map(statistics.median, times)
    return {"shared": shared, "padded": padded, "ratio": statistics.median(b / a for a, b in pairs)}


def main() -> None:
    """Measure all of them; a line each."""
    torch.set_num_threads(1)
    found = {}
    for name, wide in MODELS.items():
        model = tiny(name, **wide)
        found[name] = {"training": ratio(training, model), "sampling": ratio(sampling, model)}
        print(name, *(f"{kind} {each['ratio']:.2f}" for kind, each in found[name].items()), flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
