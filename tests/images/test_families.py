"""Families of models that read images, each against its own forward of one row at a time."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin

from benchmarks.families import tiny
from podium.engines.live.engine import LiveEngine
from podium.engines.transformers import TransformersEngine
from podium.models.forward import AttentionPath, Forward, Method, choose_method
from podium.models.images import ImageProcessor, placeholder_id
from podium.models.packing import pack, unscored
from podium.models.stored import outside
from podium.records import Prompt, Sample, SamplingSettings
from tests.images.tiny import PROCESSORS, asked, picture, processor_of

PATHS: dict[str, AttentionPath] = {name: "shared" for name in PROCESSORS} | {"gemma3": "padded", "gemma4": "padded"}
"""Which path a family ends on: the tokens of an image see each other in Gemma 3 and 4, which no tree of tokens has."""


@dataclass(frozen=True)
class Family:
    """A tiny model, its processor, and how it computes."""

    name: str
    model: PreTrainedModel
    processor: ProcessorMixin
    method: Method

    @property
    def placeholder(self) -> int:
        return placeholder_id(self.model)

    def prompt(self, number: int, text: str, *images: Image.Image) -> Prompt:
        return prompt_of(self.processor, self.placeholder, number, text, images)

    def forward(self, path: AttentionPath, temperature: float = 1.0) -> Forward:
        head = self.method.head
        return Forward(path=path, head=head, temperature=temperature, precision=contextlib.nullcontext)


def prompt_of(
    processor: ProcessorMixin, placeholder: int, number: int, text: str, images: Sequence[Image.Image]
) -> Prompt:
    messages = asked(text, *images)
    ids, found = ImageProcessor(lambda: processor, placeholder)(messages, {"add_generation_prompt": True})
    return Prompt(
        id=number, row=number, token_ids=tuple(ids), text="", content=messages, images=found if images else None
    )


@functools.cache
def family_of(name: str) -> Family:
    model = tiny(name)
    processor = processor_of(name)
    example = prompt_of(processor, placeholder_id(model), 0, "What is it?", [picture(9)])
    return Family(name, model, processor, choose_method(model, example))


@pytest.fixture(params=list(PROCESSORS))
def family(request: pytest.FixtureRequest) -> Family:
    return family_of(request.param)


def prompts_of(family: Family) -> list[Prompt]:
    """One image; another one behind the same tokens; two of other sizes; none."""
    return [
        family.prompt(0, "hi?", picture(0)),
        family.prompt(1, "hi?", picture(1)),
        family.prompt(2, "two", picture(2, 16, 16), picture(3, 32, 64)),
        family.prompt(3, "text only"),
    ]


def samples_of(prompts: Sequence[Prompt], each: int = 3) -> list[Sample]:
    """Completions of unequal lengths."""
    random = np.random.default_rng(1)
    return [
        unscored(prompt.token_ids, random.integers(4, 250, 5 + i).tolist(), prompt.images)
        for prompt in prompts
        for i in range(each)
    ]


def own_logps(model: PreTrainedModel, sample: Sample, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [A] by one call of the model's own forward."""
    images = sample.images
    given = {} if images is None else dict(images.fields)
    for name, field_L in {} if images is None else images.token_fields.items():
        given[name] = torch.cat([field_L, field_L.new_zeros(len(sample.token_ids))])[None]
    ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
    logits_TV = model(input_ids=ids, **given, use_cache=False).logits[0].float() / temperature
    start = len(sample.prompt_ids)
    return logits_TV[start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]


def packed_logps(
    family: Family, samples: Sequence[Sample], path: AttentionPath, tokens_per_pack: int = 10_000
) -> Tensor:
    """Those of all samples, from a forward for every pack."""
    forward = family.forward(path)
    with forward.context(family.model):
        packs = pack(samples, tokens_per_pack=tokens_per_pack)
        return torch.cat([forward.token_logps(family.model, packed).logps_N for packed in packs])


@contextlib.contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[int]]:
    """Within it, the numbers of images in each call of `get_image_features`."""
    part = [module for module in model.modules() if hasattr(type(module), "get_image_features")][-1]
    own = part.get_image_features
    signature = inspect.signature(own)
    calls: list[int] = []

    @functools.wraps(own)
    def counting(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        of_images = next((given[name] for name in ("image_grid_thw", "image_sizes") if name in given), None)
        calls.append(len(given["pixel_values"] if of_images is None else of_images))
        return own(*args, **named)

    part.get_image_features = counting  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        del part.get_image_features


def test_path(family: Family) -> None:
    assert family.method.path == PATHS[family.name], family.method.not_shared


@pytest.mark.parametrize("tokens_per_pack", [150, 10_000])
@pytest.mark.parametrize("path", ["chosen", "padded"])
def test_log_probabilities_are_the_models_own(family: Family, path: str, tokens_per_pack: int) -> None:
    taken = family.method.path if path == "chosen" else "padded"
    samples = samples_of(prompts_of(family))
    with torch.no_grad():
        expected = torch.cat([own_logps(family.model, sample) for sample in samples])
        got = packed_logps(family, samples, taken, tokens_per_pack)
    print("ERR", family.name, path, float((got - expected).abs().max()))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
