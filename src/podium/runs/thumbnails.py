"""Thumbnails: the images of prompts, small enough to be kept in a run's folder and shown on its page.

A thumbnail is a JPEG of pixels alone: no text, place or profile of the original is in it. Its name is the hash of its
bytes, so an image that many completions are about is kept once.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from podium.data.images import image_blocks
from podium.records import Message

if TYPE_CHECKING:
    from PIL.Image import Image

EDGE = 160
"""Pixels of the longer side at most."""

QUALITY = 80
"""Quality of the JPEGs, at which a photograph takes about 5 kB."""


def name_of(jpeg: bytes) -> str:
    """The name of a thumbnail: 16 digits of its hash."""
    return hashlib.sha256(jpeg).hexdigest()[:16]


def thumbnails(content: str | Sequence[Message]) -> tuple[bytes, ...]:
    """JPEGs of the opened images in a conversation, in their order; none of a plain prompt."""
    if isinstance(content, str):
        return ()
    images: list[Any] = [block.get("image") for message in content for block in image_blocks(message)]
    return tuple(_jpeg(image) for image in images)


def _jpeg(image: Image) -> bytes:
    scale = min(1.0, EDGE / max(image.size))
    width, height = (max(1, round(scale * side)) for side in image.size)
    small = image.resize((width, height), reducing_gap=2.0)
    small.info = {}  # comments, which Pillow would write again
    stream = io.BytesIO()
    small.save(stream, format="JPEG", quality=QUALITY, subsampling=0)
    return stream.getvalue()
