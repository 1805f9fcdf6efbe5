"""The memory that a run will take: counted and computed, against what the model really has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from podium import GRPOConfig
from podium.models import memory as models_memory
from podium.planning import memory
from podium.planning.memory import estimate_memory
from podium.testing import KINDS, tiny_model

GB = 10**9


def arguments(folder: Path, **settings: Any) -> GRPOConfig:
    given = {
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "max_completion_length": 8,
        "use_cpu": True,
        "product_precision": "float32",
        "report_to": [],
        **settings,
    }
    return GRPOConfig(str(folder), **given)


@pytest.mark.cases(5)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_the_loaded_model(tmp_path: Path, kind: str, lora: bool) -> None:
    model: Any = tiny_model(kind)
    peft = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    sizes = memory.model_sizes(model.config, arguments(tmp_path), peft)
    model = get_peft_model(model, peft) if peft else model
    assert sizes.num_parameters == sum(p.numel() for p in model.parameters())
    assert sizes.num_trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sizes.weight_bytes == 4 * sizes.num_parameters


def test_more_of_anything_takes_more(tmp_path: Path) -> None:
    config = tiny_model("llama").config
    base = estimate_memory(config, arguments(tmp_path), prompt_tokens=20)
    longer = estimate_memory(config, arguments(tmp_path, max_completion_length=64), prompt_tokens=20)
    reference = estimate_memory(config, arguments(tmp_path, beta=0.1), prompt_tokens=20)
    plain_sgd = estimate_memory(config, arguments(tmp_path, optim="sgd"), prompt_tokens=20)
    recomputing = estimate_memory(config, arguments(tmp_path, gradient_checkpointing=True), prompt_tokens=20)
    assert longer.peak_bytes > base.peak_bytes
    ahead = estimate_memory(config, arguments(tmp_path, async_rollouts=1), prompt_tokens=20)
    assert ahead.copy_bytes == base.weights_bytes
    assert ahead.peak_bytes - base.peak_bytes == ahead.copy_bytes + min(
        base.sampling_bytes, base.gradients_bytes + base.activations_bytes
    )
    assert reference.reference_bytes == base.weights_bytes
    assert base.reference_bytes == 0
    assert plain_sgd.optimizer_bytes == 0
    assert base.optimizer_bytes == 2 * base.gradients_bytes
    assert recomputing.activations_bytes < base.activations_bytes


def test_packs_are_those_that_a_gpu_s_free_memory_gives(
    tmp_path: Path, as_if_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the trainer makes them: on a large GPU a step takes much of it, and the estimate says so."""
    config, found = tiny_model("llama").config, []
    for free in (1 * GB, 8 * GB, 100 * GB):
        monkeypatch.setattr(memory, "available_memory", lambda _, free=free: free)
        found.append(estimate_memory(config, arguments(tmp_path), prompt_tokens=20).tokens_per_pack)
    assert found == sorted(set(found))
    monkeypatch.setattr(models_memory, "free_bytes", lambda _: 100 * GB)
    sizes: Any = {"half": True, "rounded": None, "copies": False}
    assert found[-1] == models_memory.fitting_tokens_per_pack(tiny_model("llama"), config, torch.device("cpu"), **sizes)


def test_what_fits_fits_and_the_next_size_does_not(tmp_path: Path) -> None:
    config = tiny_model("llama").config
    args = arguments(tmp_path, max_completion_length=256)
    available = estimate_memory(config, args, prompt_tokens=100).peak_bytes + 40_000_000
    found = estimate_memory(config, args, prompt_tokens=100, available_bytes=available)
    assert found.fits
    assert found.largest_num_generations
    assert found.largest_num_generations >= 4
    assert dict(found.rows())["largest num_generations"] == f"{found.largest_num_generations:,}"
    none = estimate_memory(config, args, prompt_tokens=100, available_bytes=1)
    assert not none.fits
    assert none.largest_num_generations is None
    assert dict(none.rows())["largest num_generations"] == "none fits"
