"""The sizing table of docs/scale.md: devices, memory and seconds a step from 0.5B to 72B. Computed; nothing is run.

    python -m benchmarks.sizing

Memory is `podium.estimates.memory`, divided as FSDP2 divides it. Seconds are a cost model of four terms; its constants
stand below, and none of them was measured with Podium on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoConfig, PretrainedConfig

from podium.assembly import default_tokens_per_pack
from podium.devices import kind_of
from podium.estimates.memory import (
    Load,
    activations_bytes,
    model_sizes,
    optimizer_bytes,
    sampling_bytes,
)

SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "72B": (8192, 29568, 80, 64, 8, 152064, False),
}
"""Of Qwen2.5: width, inner width, layers, heads, key-value heads, vocabulary, tied head."""

DEVICE_BYTES = 0.9 * 80e9
COUNTS = (1, 2, 4, 8, 16, 32, 64)

PROMPTS, GENERATIONS, PROMPT_TOKENS, COMPLETION_TOKENS, MEAN_TOKENS = 8, 8, 300, 1024, 512
"""Of a step, on each device."""

BANDWIDTH = 0.6 * 3.35e12
"""Bytes a second that a decode step reads (H100 SXM, 60 % of the data sheet)."""
FLOPS = 0.4 * 989e12
"""Of training in bfloat16 (40 % of the data sheet)."""
LAYER_SECONDS = 1e-3
"""Least time of one layer in a decode step that is not captured in a CUDA graph: launches of kernels."""
LINK = 2e11
"""Bytes a second between devices of one node while gathering (NVLink); between nodes it is less."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    trained: str
    count: int | None
    """Fewest devices that fit; None: none do."""
    peak_bytes: float
    generate_seconds: float
    train_seconds: float
    gather_seconds: float

    def markdown(self) -> str:
        seconds = self.generate_seconds + self.train_seconds + self.gather_seconds
        parts = f"{self.generate_seconds:.0f} + {self.train_seconds:.0f} + {self.gather_seconds:.1f}"
        memory = f"{self.peak_bytes / 1e9:.0f} GB"
        if self.count is None:
            return f"| {self.model} | {self.trained} | does not fit | {memory} | | whole weights need a larger device |"
        how = "one process or DDP" if self.count == 1 else "FSDP2"
        return f"| {self.model} | {self.trained} | {self.count} | {memory} | {seconds:.0f} s ({parts}) | {how}, live |"


def config_of(name: str) -> PretrainedConfig:
    """Of a model in the table."""
    width, inner, layers, heads, kv, vocabulary, tied = SHAPES[name]
    return AutoConfig.for_model(
        "qwen2",
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


def row(name: str, *, lora: bool) -> Row:
    """Fewest devices that fit, and what a step takes on them."""
    config = config_of(name)
    peft = LoraConfig(r=16, target_modules="all-linear") if lora else None
    args: Any = SimpleNamespace(
        device=torch.device("cuda"),
        bf16=True,
        fp16=False,
        optim="adamw_torch",
        trust_remote_code=False,
        model_init_kwargs={"dtype": "bfloat16"} if lora else None,
    )
    sizes = model_sizes(config, args, peft)
    tokens_per_pack = default_tokens_per_pack(config, args, rounded=None)
    load = Load(
        prompts=PROMPTS,
        num_generations=GENERATIONS,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=COMPLETION_TOKENS,
        tokens_per_pack=tokens_per_pack,
        checkpointing=4 * tokens_per_pack < PROMPT_TOKENS + COMPLETION_TOKENS,
    )
    kind = kind_of("cuda")
    adapter = 2 * sizes.trained_bytes + optimizer_bytes(args, sizes) if lora else 0  # whole on every device
    divided = sizes.weight_bytes if lora else sizes.weight_bytes + sizes.trained_bytes + optimizer_bytes(args, sizes)
    whole = 2 * sizes.num_parameters
    sampling = sampling_bytes(sizes, load, kind, rounded=False) // (1 if lora else 2)  # the cache is in bfloat16
    training = activations_bytes(config, args, sizes, load, rounded=None)

    def peak(count: int) -> float:
        fixed = kind.runtime_bytes + kind.working_bytes + adapter
        if count == 1:  # autocast casts one weight at a time
            return fixed + divided + max(sampling, training)
        layers = 2 * whole / sizes.num_layers  # this one, and the next on its way
        return fixed + divided / count + max(whole + sampling, layers + training)

    count = next((n for n in COUNTS if peak(n) <= DEVICE_BYTES), None)
    tokens = PROMPTS * (PROMPT_TOKENS + GENERATIONS * MEAN_TOKENS)
    packs = max(1, tokens / load.pack_tokens)
    moved = whole + packs * (2 * whole + (0 if lora else 4 * sizes.num_parameters))
    step = max(sizes.num_layers * LAYER_SECONDS, whole / BANDWIDTH)
    return Row(
        model=name,
        trained="LoRA r=16, bfloat16 base" if lora else "all weights, float32",
        count=count,
        peak_bytes=peak(count or COUNTS[-1]),
        generate_seconds=COMPLETION_TOKENS * step,
        train_seconds=(4 if lora else 6) * sizes.num_parameters * tokens / FLOPS,
        gather_seconds=0.0 if count == 1 else moved / LINK,
    )


def main() -> None:
    """Print the table."""
    print("| model | trained | devices of 80 GB, at least | peak of each | a step: generate + train + gather | how |")
    print("|---|---|---|---|---|---|")
    for lora in (True, False):
        for name in SHAPES:
            print(row(name, lora=lora).markdown())


if __name__ == "__main__":
    main()
