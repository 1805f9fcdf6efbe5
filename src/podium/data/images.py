"""Images of dataset rows: opened as a person sees them, and placed in a conversation as TRL places them.

    images = images_of({"image": "photos/3.jpg", ...}, row_index=3)
    messages = placed([{"role": "user", "content": "What is this?"}], images, row_index=3)

Nothing of Pillow is imported before a row has an image.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import DataError
from podium.records import Message, PromptImages

if TYPE_CHECKING:
    from PIL.Image import Image

ImageReader = Callable[[Sequence[Message], Mapping[str, Any]], tuple[list[int], PromptImages]]
"""Token ids and images of a conversation, by settings of `apply_chat_template`. Raises whatever a processor does."""

COLUMNS = ("images", "image")
"""Columns of images; of a row with both, TRL takes the first."""

LEAVE_OUT = "leave the row out, or save the image again, for example as PNG"


def has_images(row: Mapping[str, Any]) -> bool:
    """Whether a row has an image in a column, or in a block of a message."""
    if any(row.get(name) is not None and row[name] != [] for name in COLUMNS):
        return True
    prompt = row.get("prompt")
    return not isinstance(prompt, str | None) and any(_blocks(message, "image") for message in prompt)


def image_values(row: Mapping[str, Any]) -> list[Any]:
    """What a row has in its columns of images, one value an image."""
    if row.get("images") is not None:
        return [*row["images"]]
    return [] if row.get("image") is None else [row["image"]]


def opened(value: Any, where: str) -> Image:
    """An image in RGB, upright as a person sees it, with what is transparent on white.

    Args:
        value: a Pillow image, a path, bytes, or the mapping that `datasets` keeps of an image.
        where: row and number, for messages.

    Raises:
        DataError: it is none of these, cannot be read, moves, or is too large for Pillow to open safely.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if isinstance(value, Mapping) and {"bytes", "path"} & set(value):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, str) and "://" in value:
        raise _unreadable(where, "is an address; images are not downloaded", "save it as a file and name that")
    if not isinstance(value, Image.Image | str | Path | bytes | bytearray):
        what = f"is {type(value).__name__}, and no image, path or bytes"
        raise _unreadable(where, what, "give a Pillow image, the path of a file, or its bytes")
    try:
        if isinstance(value, Image.Image):
            image = value
        else:
            image = Image.open(io.BytesIO(value) if isinstance(value, bytes | bytearray) else Path(value).expanduser())
        frames = getattr(image, "n_frames", 1)
        if frames > 1:
            raise _unreadable(where, f"is animated, with {frames} frames", "save the frame that is meant as an image")
        return _in_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError as error:
        fix = "correct the path; paths are relative to the data's folder"
        raise _unreadable(where, f"is not there: {value}", fix) from error
    except Image.DecompressionBombError as error:
        raise _unreadable(where, f"is too large ({error})", "make it smaller") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, EOFError) as error:
        raise _unreadable(where, f"cannot be read ({error})", LEAVE_OUT) from error


def _in_rgb(image: Image) -> Image:
    """The image in RGB; 16 bits of grey become 8, and what is transparent is put on white."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image.convert("RGB")


def _unreadable(where: str, what: str, fix: str) -> DataError:
    return DataError(f"{where} {what}", code="D062", fix=fix, where=where)


def placed(prompt: Sequence[Message], images: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """A conversation whose contents are blocks, with the images in the blocks for them, as TRL places them.

    Raises:
        DataError: there are other numbers of images and of blocks without one, or a role that TRL does not know here.
    """
    from trl.data_utils import prepare_multimodal_messages

    try:
        messages: list[dict[str, Any]] = prepare_multimodal_messages([dict(m) for m in prompt], images=[*images])
    except ValueError as error:
        fix = 'write {"type": "image"} once for each image, or the content as a text: all images are put before it'
        raise DataError(f"{where}: {str(error).strip()}", code="D063", fix=fix, where=where) from None
    return messages


def with_opened(messages: Sequence[Message], where: str) -> list[dict[str, Any]]:
    """The conversation with every image in its blocks opened. Raises `DataError`."""
    found = []
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        if not isinstance(content, str | None):
            content = [
                {**block, "image": opened(block.get("image"), f"{where}: image of message {number}")}
                if block.get("type") == "image"
                else block
                for block in content
            ]
        found.append({**message, "content": content})
    return found


def _blocks(message: Any, kind: str) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    blocks = content if isinstance(content, list | tuple) else ()
    return [block for block in blocks if isinstance(block, Mapping) and block.get("type") == kind]
