"""The table of sizes of docs/scale.md, and more: memory and seconds a step from 0.5B to 72B, on 1, 8 and 16 devices.

    python -m benchmarks.sizing

No GPU is needed and none was measured. Memory of training is what torch's tracker finds over fake tensors
(`benchmarks.tracked`), at two and three layers, continued to the model's depth; `--full-depth` checks that on the
smallest. Memory of sampling, and seconds, are arithmetic; its constants stand below.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from benchmarks.tracked import LORA, Division, Trained, track
from podium.models.devices import kind_of
from podium.models.memory import default_tokens_per_pack
from podium.planning.memory import Load, Sizes, model_sizes, sampling_bytes

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

DEVICE_BYTES = 0.9 * 80e9

PROMPTS, GENERATIONS, PROMPT_TOKENS, COMPLETION_TOKENS, MEAN_TOKENS = 8, 8, 300, 1024, 512
"""Of a step, on each device."""

WAYS: tuple[tuple[Division, int], ...] = (("one", 1), ("ddp", 8), ("fsdp2", 8), ("fsdp2", 16))
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
    def config(self) -> PretrainedConfig:
        """Its shape."""
        return config_of(self.name)

    @functools.cached_property
    def args(self) -> Any:
        """The few arguments of a run that memory depends on."""
        return SimpleNamespace(
            device=torch.device("cuda"), bf16=True, fp16=False, trust_remote_code=False, model_init_kwargs=None
        )

    @functools.cached_property
    def sizes(self) -> Sizes:
        """In numbers."""
        peft = None if self.trained == "full" else LORA
        return model_sizes(self.config, self.args, peft, bits=4 if self.trained == "qlora" else 0)

    @functools.cached_property
    def load(self) -> Load:
        """Of one step on one device, with the packs that Podium chooses."""
        tokens = default_tokens_per_pack(self.config, self.args.device, half=True, rounded=None)
        return Load(
            prompts=PROMPTS,
            num_generations=GENERATIONS,
            prompt_tokens=PROMPT_TOKENS,
            completion_tokens=COMPLETION_TOKENS,
            tokens_per_pack=tokens,
            checkpointing=4 * tokens < PROMPT_TOKENS + COMPLETION_TOKENS,
        )

    @property
    def whole_bytes(self) -> int:
        """All weights in bfloat16."""
        return 2 * self.sizes.num_parameters


def peak_bytes(model: Model, division: Division, ranks: int) -> float:
    """Of one device: of training or of sampling, whichever takes more."""
    load, sizes, kind = model.load, model.sizes, kind_of("cuda")
    training = track(
        model.config,
        trained=model.trained,
        tokens_per_pack=load.tokens_per_pack,
        prompts=2,  # as good as all: packs are cut from one group
        num_generations=GENERATIONS,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=COMPLETION_TOKENS,
        checkpointing=load.checkpointing,
        division=division if model.trained == "full" or division == "fsdp2" else "one",
        ranks=ranks,
    )
    sampling = training.optimizer + sampling_bytes(sizes, load, kind, rounded=False)
    if division == "fsdp2":  # its part, and all gathered
        sampling += sizes.weight_bytes // ranks + model.whole_bytes
    else:  # autocast keeps a copy of float32 weights
        sampling += sizes.weight_bytes + 2 * sizes.num_wide
    buckets = sizes.trained_bytes if division == "ddp" else 0
    counted = buckets if model.trained == "full" else 0  # an adapter's wrapper adds nothing but these
    return kind.runtime_bytes + kind.working_bytes + buckets + max(sampling, training.total - counted)


def seconds(model: Model, ranks: int) -> str:
    """Of a step: generate + train + gather."""
    parameters = model.sizes.num_parameters
    step = max(model.sizes.num_layers * LAYER_SECONDS, model.whole_bytes / BANDWIDTH)
    tokens = PROMPTS * (PROMPT_TOKENS + GENERATIONS * MEAN_TOKENS)
    packs = max(1, tokens / model.load.pack_tokens)
    reduced = 4 * parameters if model.trained == "full" else 0
    moved = model.whole_bytes + packs * (2 * model.whole_bytes + reduced) if ranks > 1 else 0
    parts = (
        COMPLETION_TOKENS * step,
        (6 if model.trained == "full" else 4) * parameters * tokens / FLOPS,
        moved / (LINK if ranks <= NODE else NETWORK),
    )
    return f"{sum(parts):.0f} s ({' + '.join(f'{part:.1f}' for part in parts)})"


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


HEADER = (
    "| model | trained | tokens a pack | one device, GB | DDP, GB each | FSDP2 of 8, GB each | FSDP2 of 16, GB each "
    "| a step |",
    "|---|---|---|---|---|---|---|---|",
)


def row(model: Model) -> str:
    """One line of the table."""
    ways = [way for way in WAYS if model.trained != "qlora" or way[0] != "fsdp2"]
    peaks = {way: peak_bytes(model, *way) for way in ways}
    counts = (ranks for (division, ranks), peak in peaks.items() if peak <= DEVICE_BYTES and division != "ddp")
    fewest = next(counts, None)
    step = "" if fewest is None else f"{seconds(model, fewest)} on {fewest}"
    packed = f"{model.load.tokens_per_pack:,}{' *' if model.load.checkpointing else ''}"
    cells = " | ".join(_cell(peaks.get(way)) for way in WAYS)
    return f"| {model.name} | {NAMES[model.trained]} | {packed} | {cells} | {step} |"


def _cell(peak: float | None) -> str:
    """Gigabytes; in brackets where they do not fit."""
    if peak is None:
        return "-"
    text = f"{peak / 1e9:.0f}"
    return text if peak <= DEVICE_BYTES else f"({text})"


def full_depth() -> str:
    """The smallest model at its full depth, beside the line through two and three layers."""
    model = Model("0.5B", "full")
    tokens = model.load.tokens_per_pack
    whole = track(model.config, trained="full", tokens_per_pack=tokens, layers=None).total
    line = track(model.config, trained="full", tokens_per_pack=tokens).total
    return f"0.5B, all 24 layers: {whole / 1e9:.2f} GB; by 2 and 3 layers: {line / 1e9:.2f} GB"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trained", nargs="*", default=list(NAMES), choices=NAMES, help="only these rows")
    parser.add_argument("--full-depth", action="store_true", help="check the line through few layers instead")
    chosen = parser.parse_args()
    if chosen.full_depth:
        print(full_depth())
        return
    print(*HEADER, sep="\n", flush=True)
    for trained in chosen.trained:
        for name in list(SHAPES)[1:]:
            print(row(Model(name, trained)), flush=True)


if __name__ == "__main__":
    main()
