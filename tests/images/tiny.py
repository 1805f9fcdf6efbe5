"""Tiny processors of images for the models of `benchmarks.families`, made of transformers' own classes offline.

Templates place images where the family's own does. What torchvision alone can do is left out: videos, and the tiles of
LFM2-VL, whose image processor is written again here for images of one tile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.processing_utils import ImagesKwargs
from transformers.video_processing_utils import BaseVideoProcessor

from benchmarks.families import tokenizer_of

CHATML = (
    "{{% for message in messages %}}<|im_start|>{{{{ message['role'] }}}}\n"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}"
    "{{% else %}}{{% for block in message['content'] %}}"
    "{{% if block['type'] == 'image' %}}{image}{{% else %}}{{{{ block['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
"""A template, but for what an image is in it."""


def unchecked(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """The class without a look at the types of its parts: a processor of videos needs torchvision."""

    def check_argument_for_proper_class(_self: Any, _name: str, argument: Any) -> type:
        return type(argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check_argument_for_proper_class})


@cache
def of(family: str, name: str) -> Any:
    """A class of a family's own modules, in which what needs torchvision is replaced by what needs Pillow."""
    folder = f"transformers.models.{family}"
    try:
        pillow = import_module(f"{folder}.image_processing_pil_{family}")
    except ModuleNotFoundError:
        pillow = None
    if hasattr(pillow, name):
        return getattr(pillow, name)
    try:
        module = import_module(f"{folder}.processing_{family}")
    except ModuleNotFoundError:
        with mock.patch.dict(sys.modules, {f"{folder}.image_processing_{family}": pillow}):
            module = import_module(f"{folder}.processing_{family}")
    return getattr(module, name)


def no_videos() -> BaseVideoProcessor:
    """A processor of videos that is never called."""
    made = BaseVideoProcessor.__new__(BaseVideoProcessor)
    made.num_frames = made.fps = None
    return made


class Lfm2Kwargs(ImagesKwargs, total=False):
    return_row_col_info: bool


class Lfm2Images(PilBackend):
    """LFM2-VL's image processor for images that are no larger than a tile."""

    model_input_names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
    valid_kwargs = Lfm2Kwargs
    encoder_patch_size = 4
    downsample_factor = 2
    tile_size = 16
    max_num_patches = 128
    use_thumbnail = True
    do_rescale = True
    do_normalize = True
    image_mean = (0.5, 0.5, 0.5)
    image_std = (0.5, 0.5, 0.5)

    def __call__(self, images: Any, **_: Any) -> BatchFeature:
        """Patches of every image, filled up to the largest number; sizes are rounded down to whole features."""
        flat = transformers.image_utils.make_flat_list_of_images(images)
        size = self.encoder_patch_size
        step = size * self.downsample_factor
        patches, masks, shapes, sizes = [], [], [], []
        for image in flat:
            height, width = (side // step * step for side in (image.height, image.width))
            values_HWC = torch.from_numpy(np.array(image.resize((width, height)), np.float32)) / 127.5 - 1
            found = values_HWC.unflatten(1, (-1, size)).unflatten(0, (-1, size)).transpose(1, 2).flatten(2)
            shapes.append(found.shape[:2])
            sizes.append([height, width])
            missing = self.max_num_patches - found.shape[0] * found.shape[1]
            patches.append(torch.nn.functional.pad(found.flatten(0, 1), (0, 0, 0, missing)))
            masks.append(torch.arange(self.max_num_patches) < self.max_num_patches - missing)
        ones = torch.ones(len(flat), dtype=torch.long)
        described = {"image_rows": ones, "image_cols": ones, "image_sizes": sizes}
        pixels = {"pixel_values": torch.stack(patches), "pixel_attention_mask": torch.stack(masks).long()}
        return BatchFeature({**pixels, "spatial_shapes": torch.tensor(shapes), **described})


def _qwen(kind: str, patches: type) -> Callable[[PreTrainedTokenizerFast], ProcessorMixin]:
    def made(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
        images = patches(patch_size=4, min_pixels=64, max_pixels=4096, temporal_patch_size=2, merge_size=2)
        parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": no_videos()}
        return unchecked(getattr(transformers, kind))(
            **parts, chat_template=CHATML.format(image="<image_start><image><image_end>")
        )

    return made


def _gemma3(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    images = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    template = CHATML.format(image="<image_start>")
    return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


def _gemma4(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    tokenizer.boa_token = tokenizer.eoa_token = tokenizer.audio_token = "<|audio|>"
    images = of("gemma4", "Gemma4ImageProcessorPil")(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    kind = unchecked(of("gemma4", "Gemma4Processor"))
    return kind(None, images, tokenizer, no_videos(), chat_template=CHATML.format(image="<image>"))


def _smolvlm(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    images = of("smolvlm", "SmolVLMImageProcessorPil")(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    kind = unchecked(of("smolvlm", "SmolVLMProcessor"))
    with mock.patch("transformers.models.smolvlm.processing_smolvlm.num2words", str):  # says lengths of videos
        return kind(images, tokenizer, no_videos(), image_seq_len=4, chat_template=CHATML.format(image="<image>"))


def _idefics3(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    images = of("idefics3", "Idefics3ImageProcessorPil")(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    template = CHATML.format(image="<image>")
    return of("idefics3", "Idefics3Processor")(images, tokenizer, image_seq_len=4, chat_template=template)


_SQUARE = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
_OF_CLIP = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def _llava(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    images = transformers.CLIPImageProcessorPil(**_SQUARE)
    return transformers.LlavaProcessor(images, tokenizer, chat_template=CHATML.format(image="<image>\n"), **_OF_CLIP)


def _llava_next(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    images = transformers.LlavaNextImageProcessorPil(image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]], **_SQUARE)
    template = CHATML.format(image="<image>\n")
    return transformers.LlavaNextProcessor(images, tokenizer, chat_template=template, **_OF_CLIP)


def _internvl(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    sizes = {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 3}
    images = transformers.GotOcr2ImageProcessorPil(**sizes)
    kind = unchecked(transformers.InternVLProcessor)
    template = CHATML.format(image="<image>\n")
    return kind(images, tokenizer, no_videos(), image_seq_length=4, chat_template=template)


def _lfm2_vl(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    kind = unchecked(of("lfm2_vl", "Lfm2VlProcessor"))
    return kind(Lfm2Images(), tokenizer, chat_template=CHATML.format(image="<image>"))


def _mistral3(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    images = of("pixtral", "PixtralImageProcessorPil")(patch_size={"height": 8, "width": 8}, size={"longest_edge": 32})
    names = {"image_token": "<image>", "image_break_token": "<image_start>", "image_end_token": "<image_end>"}
    template = CHATML.format(image="<image>")
    return of("pixtral", "PixtralProcessor")(
        images, tokenizer, patch_size=8, spatial_merge_size=2, chat_template=template, **names
    )


PROCESSORS: Mapping[str, Callable[[PreTrainedTokenizerFast], ProcessorMixin]] = {
    "qwen2_vl": _qwen("Qwen2VLProcessor", transformers.Qwen2VLImageProcessorPil),
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor", transformers.Qwen2VLImageProcessorPil),
    "qwen3_vl": _qwen("Qwen3VLProcessor", transformers.Qwen2VLImageProcessorPil),
    "qwen3_vl_moe": _qwen("Qwen3VLProcessor", transformers.Qwen2VLImageProcessorPil),
    "qwen3_5": _qwen("Qwen3VLProcessor", transformers.Qwen2VLImageProcessorPil),
    "qwen3_5_moe": _qwen("Qwen3VLProcessor", transformers.Qwen2VLImageProcessorPil),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "smolvlm": _smolvlm,
    "idefics3": _idefics3,
    "llava": _llava,
    "llava_next": _llava_next,
    "internvl": _internvl,
    "lfm2_vl": _lfm2_vl,
    "mistral3": _mistral3,
}
"""What makes a family's processor around the tokenizer of its tiny model."""

NAMED = {
    **{"image_token": "<image>", "video_token": "<video>", "context_image_token": "<image>"},
    **{"boi_token": "<image_start>", "eoi_token": "<image_end>"},
    **{"image_start_token": "<image_start>", "image_end_token": "<image_end>"},
    **{"start_image_token": "<image_start>", "end_image_token": "<image_end>"},
    **{"vision_start_token": "<image_start>", "vision_end_token": "<image_end>"},
}
"""Tokens by the names that tokenizers of the families have for them."""


def processor_of(name: str) -> ProcessorMixin:
    """A new processor of the family, with its tokenizer."""
    tokenizer = tokenizer_of(name)
    tokenizer.padding_side = "left"  # as TRL loads it
    for attribute, token in NAMED.items():
        setattr(tokenizer, attribute, token)
        setattr(tokenizer, f"{attribute}_id", tokenizer.convert_tokens_to_ids(token))
    return PROCESSORS[name](tokenizer)


def picture(seed: int, height: int = 16, width: int = 24) -> Image.Image:
    """An image of noise."""
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def asked(text: str, *images: Image.Image) -> list[dict[str, Any]]:
    """A conversation of one message: the images, then the text."""
    blocks = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": text}]}]
