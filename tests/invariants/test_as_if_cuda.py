"""What a GPU runs by default, run on a CPU: the branches of CUDA's row of `devices.KINDS` (see `as_if_cuda`).

Half precision by autocast with and without a scaler, accelerate's preparation, attention over buckets with masks, rows
looked at every eighth token. Every training here goes through the proof on the first batch, which compares sampling,
packed and plain forwards, and gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig

from podium.testing import tiny_model

pytestmark = pytest.mark.usefixtures("as_if_cuda")

PRECISIONS: dict[str, dict[str, Any]] = {
    "bfloat16 autocast": {},
    "float16 autocast": {"fp16": True},
    "bfloat16 weights": {"weights": torch.bfloat16, "bf16": False},
}
TRAINED: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": True},
    "lora on half": {"lora": True, "weights": torch.bfloat16},
}
KINDS = ("llama", "qwen3", "gemma3", "gpt2")
SETTINGS: dict[str, dict[str, Any]] = {
    "beta": {"beta": 0.05},
    "checkpointing": {"gradient_checkpointing": True},
    "iterations": {"num_iterations": 2},
    "quantile": {"top_entropy_quantile": 0.5},
    "penalty": {"repetition_penalty": 1.2},
    "top_p": {"top_p": 0.9},
    "async": {"async_rollouts": 1},
}


def merged(precision: str, trained: str) -> dict[str, Any]:
    """Settings of both; a frozen base in half precision has autocast's own."""
    half = {"weights": torch.float16} if (precision, trained) == ("float16 autocast", "lora on half") else {}
    return {**PRECISIONS[precision], **TRAINED[trained], **half}


CASES = [(p, t, kind, "") for p in PRECISIONS for t in TRAINED for kind in KINDS] + [
    (p, t, "llama", setting) for p in PRECISIONS for t in ("full", "lora") for setting in SETTINGS
]


@pytest.mark.parametrize(("precision", "trained", "kind", "setting"), CASES, ids=lambda x: x or "plain")
def test_three_steps_pass_the_proof(precision: str, trained: str, kind: str, setting: str, make_trainer: Any) -> None:
    given = {"learning_rate": 1e-3, **merged(precision, trained), **SETTINGS.get(setting, {})}
    model = tiny_model(kind).to(given.pop("weights", torch.float32))
    if given.pop("lora", False):
        given["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    trainer = make_trainer(model=model, max_steps=3, prove_first_batch=True, **given)
    trainer.train()
    assert trainer.state.global_step == 3
