"""Images that tools, environments and programs give: their tokens, what is drawn behind them, and training on them."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable

import pytest
import torch
from PIL import Image

from podium.agents.chat import ChatFormat
from podium.models.images import ImageProcessor, joined
from podium.records import Message
from tests.images.test_families import FAST, family_of
from tests.images.tiny import PROCESSORS, asked, picture, processor_of

families = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in FAST else pytest.mark.slow) for x in PROCESSORS]
)

ANSWER: Message = {"role": "assistant", "content": "look"}


def chat_of(name: str) -> tuple[ChatFormat, ImageProcessor]:
    processor = processor_of(name)
    images = ImageProcessor(lambda: processor, family_of(name).placeholder)
    return ChatFormat(tokenizer=processor.tokenizer, images=images), images


def shown(role: str, text: str, *images: Image.Image) -> Message:
    return {**asked(text, *images)[0], "role": role, "name": "look"}


TEMPLATES = [
    file
    for file in (files("trl") / "chat_templates").iterdir()
    if file.name.endswith(".jinja") and "image" in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda file: file.name)
def test_the_text_of_an_image_is_found_in_every_template(template: Traversable) -> None:
    """Of those that TRL has for models of images; some write all images before all texts."""
    chat, _ = chat_of("llava")
    chat = replace(chat, chat_template=template.read_text(encoding="utf-8"))
    reply = shown("user", "seen", picture(1), picture(2))
    text = chat.render([{"role": "user", "content": "hi?"}, ANSWER, reply], add_generation_prompt=True)
    assert chat._image_text
    assert text.count(chat._image_text) == 2


@families
@pytest.mark.parametrize("role", ["tool", "user"])
def test_tokens_are_those_of_the_processor(name: str, role: str) -> None:
    """Of two images with text, behind a turn that was drawn."""
    chat, images = chat_of(name)
    reply = shown(role, "seen", picture(1), picture(2, 32, 32))
    whole = [*asked("hi?"), ANSWER, reply]
    expected_ids, expected = images(whole, {"add_generation_prompt": True})
    suffix, given = chat.suffix([reply], last=-1)
    assert list(suffix) == expected_ids[len(expected_ids) - len(suffix) :]
    assert len(suffix) > len(expected.placeholders)
    places = [x.start + place for x in given for place in x.placeholders]
    assert places == [int(place) - len(expected_ids) + len(suffix) for place in expected.placeholders]
    fields = joined([x.fields for x in given])
    assert fields.keys() == expected.fields.keys()
    for key, x in fields.items():
        assert x.flatten().tolist() == pytest.approx(expected.fields[key].flatten().tolist()), key
    for key, x_L in expected.token_fields.items():
        own_L = torch.zeros_like(x_L)
        for found in given:
            start = len(expected_ids) - len(suffix) + found.start
            own_L[start : start + len(found.token_fields[key])] = found.token_fields[key]
        assert own_L.tolist() == x_L.tolist(), key
