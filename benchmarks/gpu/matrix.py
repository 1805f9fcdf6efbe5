"""Whether training is right on this device: tiny models, three steps, with the proof on the first batch.

python -m benchmarks.gpu.matrix --out DIR

Three precisions times all weights, LoRA and LoRA on a base in half precision; in each the model families, the settings
that change what is computed, a run that is resumed, and how often the host waits for the device.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.harness import Measure, Options, Script, main, waits

PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "bfloat16 autocast": {},
    "float16 autocast": {"fp16": True},
    "bfloat16 weights": {"weights": "bfloat16", "bf16": False},
}
TRAINED: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "LoRA": {"lora": True},
    "LoRA on half": {"lora": True, "weights": "bfloat16"},
}
KINDS = ("llama", "qwen3", "gemma3", "gpt2")
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "checkpointing": {"gradient_checkpointing": True},
    "beta": {"beta": 0.05},
    "iterations": {"num_iterations": 2},
    "quantile": {"top_entropy_quantile": 0.5},
    "penalty": {"repetition_penalty": 1.2},
    "top_p": {"top_p": 0.9},
    "async": {"async_rollouts": 1},
}
OTHERS = ("resume", "waits")
REHEARSED = ("bfloat16 autocast, full", "float16 autocast, LoRA", "bfloat16 weights, LoRA on half")
"""On a CPU the whole matrix is a test already (`tests/invariants/test_as_if_cuda.py`)."""

RESUMED_TOLERANCE = 0.1
"""Of the distance that training goes: kernels that add in any order give a GPU's run no exact repetition."""
DECODED, PROMPTS = 17, 4


def groups(options: Options) -> dict[str, Sequence[str]]:
    """All cases in every combination of precision and trained weights."""
    names = [f"{precision}, {trained}" for precision in PRECISIONS for trained in TRAINED]
    settings = [name for name in SETTINGS if name != "async" or options.device == "cpu"]  # it needs a second GPU
    return {name: (*KINDS, *settings, *OTHERS) for name in names if not options.tiny or name in REHEARSED}


def prepare(group: str, options: Options) -> Measure:
    """Cases train a tiny model each."""
    precision, trained = group.split(", ")
    half = {"weights": "float16"} if group == "float16 autocast, LoRA on half" else {}
    given = {**PRECISIONS[precision], **TRAINED[trained], **half, "use_cpu": options.device == "cpu"}

    def measure(case: str) -> dict[str, Any]:
        if case == "resume":
            return resume(given)
        if case == "waits":
            return count_waits(given, options.device)
        return train(case if case in KINDS else "llama", {**given, **SETTINGS.get(case, {})})

    return measure


def train(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Three steps; the gap of log-probabilities between sampling and training."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(kind, folder, **given)
        trainer.train()
    gaps = [entry["health/logp_gap_mean"] for entry in trainer.state.log_history if "health/logp_gap_mean" in entry]
    done = trainer.state.global_step == 3
    return {"ok": done, "logp_gap": None if kind == "gpt2" else max(gaps, default=None)}  # it trains with dropout


def resume(given: Mapping[str, Any]) -> dict[str, Any]:
    """A run, and one that goes on from its second step: how far apart they end."""
    with tempfile.TemporaryDirectory() as folder:
        saved = make_trainer("llama", folder, **given, save_strategy="steps", save_steps=1)
        before = trained_weights(saved.model)
        saved.train()
        again = make_trainer("llama", f"{folder}/again", **given)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    after = trained_weights(saved.model)
    off = float((after - trained_weights(again.model)).norm() / (after - before).norm())
    return {"ok": again.state.global_step == 3 and off <= RESUMED_TOLERANCE, "relative_difference": off}


def trained_weights(model: Any) -> Any:
    """All of them, in one vector on the host."""
    import torch

    return torch.cat([p.detach().double().flatten().cpu() for p in model.parameters() if p.requires_grad])


def count_waits(given: Mapping[str, Any], device: str) -> dict[str, Any]:
    """How often the host waits for the device in a decoded token, and in forward and backward of a pack."""
    from benchmarks.gpu.samples import prompts, samples
    from podium.models.packing import pack
    from podium.records import SamplingSettings

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer("llama", folder, **given)
    step = trainer.step
    forward = step.policy.forward
    model = trainer.model.to(trainer.args.device)

    def sampled(tokens: int) -> list[str]:
        settings = SamplingSettings(num_completions=4, max_tokens=tokens)
        with waits(device) as found:
            step.engine.generate(prompts(PROMPTS, 8), settings, policy_step=0)
        return found

    sampled(DECODED)
    a_step = (len(sampled(DECODED)) - len(sampled(1))) / (DECODED - 1)
    [packed] = pack(samples(PROMPTS, 4, 8, 8), tokens_per_pack=10_000, device=trainer.args.device)
    for _ in range(2):  # the first makes what later ones find made
        with waits(device) as found, forward.context(step.model):
            forward.token_logps(model, packed).logps_N.sum().backward()
    return {"waits_a_decode_step": a_step, "waits_a_pack": len(found), "where": sorted(set(found))}


def make_trainer(kind: str, folder: str, **given: Any) -> Any:
    """Three steps of four prompts on twelve sums."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from podium import GRPOConfig, GRPOTrainer
    from podium.testing import tiny_model, tiny_tokenizer

    weights, lora = getattr(torch, given.pop("weights", "float32")), given.pop("lora", False)
    settings = {
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "max_completion_length": 8,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "prove_first_batch": True,
        **given,
    }
    rows = [{"prompt": f"{a}+{b}="} for a in range(1, 4) for b in range(4)]
    return GRPOTrainer(
        tiny_model(kind).to(weights),
        digits,
        GRPOConfig(folder, **settings),
        Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear") if lora else None,
    )


def digits(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ within most groups of random bytes."""
    return [sum(c.isdigit() for c in text) + len(text) / 10 for text in completions]


if __name__ == "__main__":
    sys.exit(main(Script(name="matrix", groups=groups, prepare=prepare, limit=200)))
