"""The memory that a run will take: counted and computed, against what the model really has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from benchmarks.families import tiny
from podium import GRPOConfig
from podium.models import memory as models_memory
from podium.models.images import ImageProcessor, _part_with
from podium.models.stored import freeze_outside
from podium.planning import memory
from podium.planning.memory import estimate_memory
from podium.testing import KINDS, tiny_model
from tests.images.tiny import asked, picture, processor_of

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


# ---- images ----

FROM_SMALL_TO_LARGE = (0.4, 2.0)
"""Bounds of an estimate over what was measured: tiny layers keep much that is not in proportion to their widths."""
CLOSE = (0.75, 1.4)


def kept_bytes(model: Any, run: Callable[[], Any]) -> int:
    """Bytes of activations that a forward keeps for its backward, weights and inputs aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "smolvlm", "llava", "internvl"])
def test_what_an_encoder_keeps_of_an_image(tmp_path: Path, family: str) -> None:
    """A frozen one keeps nothing; what it takes for a moment is less than a trained one keeps in all its layers."""
    model: Any = tiny(family)
    processor = processor_of(family)
    reader = ImageProcessor(lambda: processor, model.config.image_token_id)
    _, images = reader(asked("What is it?", picture(0, 64, 64)), {"add_generation_prompt": True})
    part = _part_with(model, "get_image_features")
    known = inspect.signature(part.get_image_features).parameters
    given = {name: x for name, x in images.fields.items() if name in known}
    pixels = given["pixel_values"].numel()
    patches = models_memory.encoder_patches(model.config, pixels)
    low, high = FROM_SMALL_TO_LARGE
    trained = memory.model_sizes(model.config, arguments(tmp_path, train_image_encoder=True))
    kept = kept_bytes(model, lambda: part.get_image_features(**given))
    assert low * kept < patches * trained.patch_bytes < high * kept
    freeze_outside(model)
    assert kept_bytes(model, lambda: part.get_image_features(**given)) == 0
    frozen = memory.model_sizes(model.config, arguments(tmp_path))
    assert frozen.patch_bytes > 0
    config = model.config
    with_images = estimate_memory(config, arguments(tmp_path), prompt_tokens=20, pixels=pixels)
    without = estimate_memory(config, arguments(tmp_path), prompt_tokens=20)
    assert without.images_bytes == 0
    assert with_images.peak_bytes - without.peak_bytes == with_images.images_bytes
    assert with_images.images_bytes == 4 * (4 + 4) * pixels + 4 * patches * frozen.patch_bytes


def test_what_encoders_of_real_widths_keep(tmp_path: Path) -> None:
    """Two layers each of Qwen2.5-VL's encoder, of SigLIP so400m and of CLIP-L."""
    square = {"num_hidden_layers": 2, "num_attention_heads": 16, "patch_size": 14}
    qwen = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(depth=2, fullatt_block_indexes=[1]))
    siglip = SiglipVisionModel(
        SiglipVisionConfig(hidden_size=1152, intermediate_size=4304, image_size=224, vision_use_head=False, **square)
    )
    clip = CLIPVisionModel(CLIPVisionConfig(hidden_size=1024, intermediate_size=4096, image_size=224, **square))
    pixels = torch.randn(1, 3, 224, 224)
    runs: list[tuple[Any, int, Callable[[], Any]]] = [
        (qwen, 256, lambda: qwen(torch.randn(256, 1176), grid_thw=torch.tensor([[1, 16, 16]]))),
        (siglip, 256, lambda: siglip(pixel_values=pixels)),
        (clip, 257, lambda: clip(pixel_values=pixels)),
    ]
    for model, patches, run in runs:
        linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        ratio = patches * models_memory.encoder_bytes_per_patch(linears, trained=True) / kept_bytes(model, run)
        assert CLOSE[0] < ratio < CLOSE[1], type(model).__name__
