"""Forward and backward of one pack with random weights of real shapes: time, peak memory, precision.

python -m benchmarks.gpu.train_pack --out DIR

One factor at a time: the size of the head's blocks of logits, checkpointing, the type of the weights. The largest
difference of a log-probability is to the same weights computed in float32 throughout.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    waits,
)

SHAPES = (("0.5B", "float32"), ("0.5B", "bfloat16"), ("1.5B", "float32"))
CASES: Mapping[str, tuple[int, bool]] = {
    "head 1 GB": (1024, False),
    "head 256 MB": (256, False),
    "head 32 MB": (32, False),
    "head 1 GB, checkpointing": (1024, True),
}
"""MiB of one block of logits, and whether activations are computed again."""
PROMPTS, GENERATIONS, PROMPT_TOKENS, COMPLETION_TOKENS = 4, 8, 128, 128
"""About what one pack of a 1.5B model holds by default."""
TINY_BLOCK = 1024
"""Bytes a MiB in a rehearsal, so that small logits make several blocks, too."""


def groups(options: Options) -> dict[str, Sequence[str]]:
    """All cases for each shape."""
    return {f"{shape} {dtype}": list(CASES) for shape, dtype in (SHAPES[:2] if options.tiny else SHAPES)}


def prepare(group: str, options: Options) -> Measure:
    """One model and one pack for all cases."""
    import torch

    from benchmarks.gpu.samples import samples
    from podium.models.attention import tree_attention
    from podium.models.forward import token_logps
    from podium.models.head import LogitScaling
    from podium.models.packing import pack

    shape, name = group.split()
    dtype = getattr(torch, name)
    model = random_model(shape, dtype, options)
    lengths = (8, 8) if options.tiny else (PROMPT_TOKENS, COMPLETION_TOKENS)
    [packed] = pack(samples(PROMPTS, GENERATIONS, *lengths), tokens_per_pack=100_000, device=options.device)
    exact_N = float32_logps(model, packed)
    precision = autocast_for(dtype, options.device)

    def once() -> Any:
        model.zero_grad()
        with tree_attention(model), precision():
            out = token_logps(model, packed, temperature=1.0, head=LogitScaling())
            (packed.advantages_N * out.logps_N).mean().backward()
        return out.logps_N.detach()

    def measure(case: str) -> dict[str, Any]:
        mebibytes, checkpointing = CASES[case]
        block = mebibytes * (TINY_BLOCK if options.tiny else 2**20)
        with device_kind(options.device, logits_bytes=block), checkpointed(model, enabled=checkpointing):
            off_N = (once() - exact_N).abs()
            free_memory()
            seconds = sorted(seconds_of(once, options.device) for _ in range(3))[1]
            peak = peak_bytes(options.device)
            with waits(options.device) as found:
                once()
        return {
            "ok": bool(off_N.isfinite().all()),
            "ms": 1e3 * seconds,
            "input_tokens": len(packed.input_ids_T),
            "trained_tokens": packed.num_tokens,
            "peak_gib": peak / 2**30,
            "waits": len(found),
            "largest_difference": float(off_N.max()),
            "mean_difference": float(off_N.mean()),
        }

    return measure


def float32_logps(model: Any, packed: Any) -> Any:
    """Log-probabilities [N] with every product in float32."""
    import torch

    from podium.models.attention import tree_attention
    from podium.models.forward import token_logps
    from podium.models.head import LogitScaling
    from podium.models.modes import in_float32

    with torch.no_grad(), in_float32(model), tree_attention(model):
        return token_logps(model, packed, temperature=1.0, head=LogitScaling()).logps_N


@contextlib.contextmanager
def checkpointed(model: Any, *, enabled: bool) -> Iterator[None]:
    """Within this context the model trains, and computes activations again in the backward if `enabled`."""
    model.train()
    if enabled:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        if enabled:
            model.gradient_checkpointing_disable()
        model.eval()


if __name__ == "__main__":
    sys.exit(main(Script(name="train_pack", groups=groups, prepare=prepare, limit=200)))
