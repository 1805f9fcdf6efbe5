"""Tiny models that read images, their rows, and trainers of them that sample by vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from benchmarks.families import WITH_IMAGES, tiny
from podium import GRPOConfig, GRPOTrainer
from tests.images.tiny import NAMED, picture, processor_of
from tests.vllm.served import lengths

SIDES = {
    "qwen2_5_vl": (16, 24),
    "qwen2_vl": (16, 24),
    "llava": (16, 16),
    "llava_next": (16, 16),
    "internvl": (32, 32),
    "idefics3": (64, 64),
}
"""Families, with a height and a width of images that their processors leave as they are, or cut into tiles.

Where one makes an image smaller, as Idefics3 does beside tiles, torchvision's pixels differ by 1/255 from Pillow's.
"""


def save_family(name: str, folder: Path) -> str:
    """Write a tiny model and its processor; vLLM's attention on a CPU takes heads of 32 and more."""
    text = {**WITH_IMAGES[name]["text_config"], "hidden_size": 128}
    vision = {**WITH_IMAGES[name]["vision_config"]}
    if "head_dim" in text:
        text["head_dim"] = 32
    if "rope_parameters" in text:
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [4, 6, 6]}
    if name == "qwen2_vl":
        vision["hidden_size"] = 128
    if "out_hidden_size" in vision:
        vision["out_hidden_size"] = 128
    tied = name == "qwen2_vl"  # as small released ones are
    tiny(name, text_config=text, vision_config=vision, tie_word_embeddings=tied).save_pretrained(folder)
    if name.startswith("llava"):  # names as in released ones, which vLLM asks for
        file = folder / "model.safetensors"
        named = {key.replace("vision_tower.", "vision_tower.vision_model."): x for key, x in load_file(file).items()}
        save_file(named, file, metadata={"format": "pt"})
    processor_of(name).save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **NAMED}))
    return str(folder)


def rows_of(name: str) -> list[dict[str, Any]]:
    """Two rows with images and two of text, in turns; the first two images are asked the same."""
    asked = {"prompt": [{"role": "user", "content": "What is this?"}]}
    images = [{**asked, "image": picture(seed, *SIDES[name])} for seed in range(6)]
    texts = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], "image": None} for i in range(6)]
    return [row for pair in zip(images, texts, strict=True) for row in pair]


def made(folder: Path, model: str, name: str, *, rank: int = 0, **settings: Any) -> GRPOTrainer:
    """A trainer of four prompts a step, in float32, whose encoder is trained, too, unless there is an adapter.

    `settings`: besides, of vLLM.
    """
    given = {
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "max_completion_length": 12,
        "shuffle_dataset": False,
        "optim": "sgd",
        "learning_rate": 0.3,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "product_precision": "float32",
        "train_image_encoder": not rank,
        **settings,
    }
    return GRPOTrainer(
        model,
        lengths,
        GRPOConfig(str(folder), use_vllm=True, **given),
        Dataset.from_list(rows_of(name)),
        processing_class=processor_of(name),
        peft_config=LoraConfig(r=rank, target_modules="all-linear") if rank else None,
    )
