"""Decoding with random weights of real shapes: the live engine and transformers' `generate`, 8 to 512 rows.

python -m benchmarks.gpu.decode --out DIR

A step's time is that of a call with many tokens less that of a call with one, divided by the steps between them; so
prompts and what a call begins and ends with do not count, and what is captured on the way does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu.harness import (
    Measure,
    Options,
    Script,
    autocast_for,
    device_kind,
    free_memory,
    main,
    peak_bytes,
    random_model,
    seconds_of,
)

SHAPES = (("0.5B", "float32"), ("0.5B", "bfloat16"), ("1.5B", "float32"), ("7B", "bfloat16"))
"""Shapes and types of their weights; float32 ones compute in bfloat16 autocast, as training does by default."""
ROWS = (8, 64, 512)
ENGINES = ("live", "uncaptured", "generate")
"""The live engine, the same without CUDA graphs, and transformers."""
GENERATIONS, PROMPT_TOKENS, TOKENS = 8, 128, 129

Call = Callable[[int], Any]
"""Samples so many tokens for every row."""


def groups(options: Options) -> dict[str, Sequence[str]]:
    """Engines and rows for each shape, the fewest rows first."""
    shapes, rows = (SHAPES[:1], ROWS[:1]) if options.tiny else (SHAPES, ROWS)
    return {f"{shape} {dtype}": [f"{engine} {n}" for n in rows for engine in ENGINES] for shape, dtype in shapes}


def prepare(group: str, options: Options) -> Measure:
    """One model for all engines and rows."""
    import torch

    shape, name = group.split()
    dtype = getattr(torch, name)
    model = random_model(shape, dtype, options)
    tokens, prompt_tokens = (12, 8) if options.tiny else (TOKENS, PROMPT_TOKENS)

    def measure(case: str) -> dict[str, Any]:
        engine, rows = case.split()
        make = generate if engine == "generate" else live
        call = make(model, int(rows), prompt_tokens, autocast_for(dtype, options.device))
        with device_kind(options.device, graphs=engine == "live"):
            call(tokens)  # the first call chooses kernels and fills the allocator
            free_memory()
            one, many = (seconds_of(lambda n=n: call(n), options.device) for n in (1, tokens))
        step_seconds = max((many - one) / (tokens - 1), 1e-9)
        return {
            "rows": int(rows),
            "ms_a_step": 1e3 * step_seconds,
            "tokens_a_second": int(rows) / step_seconds,
            "seconds": many,
            "peak_gib": peak_bytes(options.device) / 2**30,
        }

    return measure


def live(model: Any, rows: int, prompt_tokens: int, precision: Callable[[], Any]) -> Call:
    """The live engine; without an end token every completion has full length."""
    from benchmarks.gpu.samples import prompts
    from podium.engines.live.engine import LiveEngine
    from podium.records import SamplingSettings
    from podium.testing import tiny_tokenizer

    engine = LiveEngine(model, tiny_tokenizer(), precision=precision)
    batch = prompts(rows // GENERATIONS, prompt_tokens)
    return lambda tokens: engine.generate(batch, SamplingSettings(num_completions=GENERATIONS, max_tokens=tokens))


def generate(model: Any, rows: int, prompt_tokens: int, precision: Callable[[], Any]) -> Call:
    """transformers' `generate`, one row per completion."""
    import torch
    from transformers import GenerationConfig

    from benchmarks.gpu.samples import prompts

    device = next(model.parameters()).device
    batch = [prompt.token_ids for prompt in prompts(rows // GENERATIONS, prompt_tokens) for _ in range(GENERATIONS)]
    ids = torch.tensor(batch, device=device)
    model.generation_config.eos_token_id = None  # or a random end token would stop some rows

    def call(tokens: int) -> None:
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens, "disable_compile": True}
        config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0, **length)
        with torch.no_grad(), precision():
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)

    return call


if __name__ == "__main__":
    sys.exit(main(Script(name="decode", groups=groups, prepare=prepare, limit=180)))
