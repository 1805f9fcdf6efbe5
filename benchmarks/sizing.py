"""The table of sizes of docs/scale.md, and more: memory and seconds a step from 0.5B to 72B, on 1, 8 and 16 devices.

    python -m benchmarks.sizing

No GPU is needed and none was measured. Memory is that of `podium check --devices`, which
tests/system/test_memory_without_gpu.py compares with torch's tracker over fake tensors. Seconds are arithmetic; its
constants stand below.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass

import torch
from transformers import AutoConfig, PretrainedConfig

from benchmarks.tracked import LORA, Trained
from podium import GRPOConfig
from podium.models.devices import GPUS
from podium.models.memory import default_tokens_per_pack
from podium.planning.layouts import Candidate, plan_layouts
from podium.planning.memory import MemoryEstimate
from podium.trainer.planned import Launch, planned

SHAPES = {
    "135M": (576, 1536, 30, 9, 3, 49152, True),
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "72B": (8192, 29568, 80, 64, 8, 152064, False),
}
"""Of Qwen2.5 (135M: SmolLM2, not in the table): width, inner width, layers, heads, key-value heads, vocabulary, tied
head."""

EXPERTS = "30B-A3B"
"""Qwen3's mixture of experts: 128 in each layer, of which a token goes through 8."""

PROMPTS, GENERATIONS, PROMPT_TOKENS, COMPLETION_TOKENS, MEAN_TOKENS = 8, 8, 300, 1024, 512
"""Of a step, on each device."""

GPU = GPUS["h100"]
WAYS: tuple[tuple[str, Launch], ...] = (
    ("ddp", Launch(processes=1, gpu=GPU)),
    ("ddp", Launch(processes=8, gpu=GPU)),
    ("fsdp2", Launch(processes=8, fsdp=2, gpu=GPU)),
    ("fsdp2", Launch(processes=16, fsdp=2, gpu=GPU)),
)
NAMES: dict[Trained, str] = {
    "qlora": "QLoRA r=16, 4-bit base",
    "lora": "LoRA r=16, bfloat16 base",
    "full": "all weights, float32",
}

BANDWIDTH = 0.6 * 3.35e12
"""Bytes a second that a decode step reads (H100 SXM, 60 % of the data sheet)."""
FLOPS = 0.4 * 989e12
"""Of training in bfloat16 (40 % of the data sheet)."""
LAYER_SECONDS = 1e-3
"""Least time of one layer in a decode step that is not captured in a CUDA graph: launches of kernels."""
LINK, NETWORK = 2e11, 5e10
"""Bytes a second that a device gathers within a node (NVLink), and between nodes (one port of 400 Gbit/s each)."""
NODE = 8
"""Devices of a node."""


@dataclass(frozen=True)
class Model:
    """One model of the tables, and what is trained of it."""

    name: str
    trained: Trained

    @functools.cached_property
    def candidates(self) -> list[Candidate]:
        """One for each of `WAYS`, with packs of the size for a GPU whose free memory is not known."""
        return [self._candidate(layout, launch) for layout, launch in WAYS]

    def _candidate(self, layout: str, launch: Launch) -> Candidate:
        config = config_of(self.name)
        with planned(launch):
            args = GRPOConfig(
                "unused",
                per_device_train_batch_size=PROMPTS * GENERATIONS,
                num_generations=GENERATIONS,
                max_completion_length=COMPLETION_TOKENS,
                tokens_per_pack=default_tokens_per_pack(config, torch.device("cuda"), half=True, rounded=None),
                report_to=[],
            )
        peft = None if self.trained == "full" else LORA
        bits = 4 if self.trained == "qlora" else 0
        plan = plan_layouts(config, args, {layout: launch}, prompt_tokens=PROMPT_TOKENS, peft_config=peft, bits=bits)
        return plan.candidates[0]


def seconds(model: Model, estimate: MemoryEstimate) -> str:
    """Of a step: generate + train + gather."""
    parameters = estimate.num_parameters
    whole_bytes = 2 * parameters
    step = max(config_of(model.name).num_hidden_layers * LAYER_SECONDS, whole_bytes / BANDWIDTH)
    tokens = PROMPTS * (PROMPT_TOKENS + GENERATIONS * MEAN_TOKENS)
    packs = max(1, tokens / estimate.tokens_per_pack)
    reduced = 4 * parameters if model.trained == "full" else 0
    ranks = estimate.processes
    moved = whole_bytes + packs * (2 * whole_bytes + reduced) if ranks > 1 else 0
    parts = (
        COMPLETION_TOKENS * step,
        (6 if model.trained == "full" else 4) * parameters * tokens / FLOPS,
        moved / (LINK if ranks <= NODE else NETWORK),
    )
    return f"{sum(parts):.0f} s ({' + '.join(f'{part:.1f}' for part in parts)})"


def config_of(name: str) -> PretrainedConfig:
    """Of a model in the table."""
    if name == EXPERTS:
        return AutoConfig.for_model(
            "qwen3_moe",
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=False,
        )
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


HEADER = (
    "| model | trained | tokens a pack | one device, GB | DDP, GB each | FSDP2 of 8, GB each | FSDP2 of 16, GB each "
    "| a step |",
    "|---|---|---|---|---|---|---|---|",
)


def row(model: Model) -> str:
    """One line of the table."""
    fitting = [
        found for found in model.candidates if found.fits and (found.launch.processes == 1 or found.layout != "ddp")
    ]
    step = ""
    if fitting and fitting[0].estimate is not None:
        step = f"{seconds(model, fitting[0].estimate)} on {fitting[0].launch.processes}"
    first = model.candidates[0].estimate
    packed = "" if first is None else f"{first.tokens_per_pack:,}"
    cells = " | ".join(_cell(found) for found in model.candidates)
    return f"| {model.name} | {NAMES[model.trained]} | {packed} | {cells} | {step} |"


def _cell(found: Candidate) -> str:
    """Gigabytes; in brackets where they do not fit, with a star where activations are recomputed."""
    if found.estimate is None:
        return "-"
    text = f"{found.estimate.peak_bytes / 1e9:.0f}"
    text = text if found.fits else f"({text})"
    return f"{text} *" if found.estimate.checkpointing else text


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trained", nargs="*", default=list(NAMES), choices=NAMES, help="only these rows")
    chosen = parser.parse_args()
    print(*HEADER, sep="\n", flush=True)
    for trained in chosen.trained:
        for name in [*list(SHAPES)[1:], EXPERTS]:
            print(row(Model(name, trained)), flush=True)


if __name__ == "__main__":
    main()
