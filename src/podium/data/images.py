"""Images of dataset rows: opened as a person sees them, and placed in a conversation as TRL places them.

    images = [opened(value, "the image") for value in image_values({"image": "photos/3.jpg", ...})]
    messages = placed([{"role": "user", "content": "What is this?"}], images)

Nothing of Pillow is imported before a row has an image.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from podium.errors import DataError
from podium.errors.texts import quoted
from podium.records import GivenImages, Message, as_name

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageReader(Protocol):
    """Makes tokens of conversations with images; `models.images.ImageProcessor` is one."""

    @property
    def placeholder(self) -> int:
        """The token that stands for a feature of an image."""

    def __call__(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> tuple[list[int], GivenImages]:
        """Token ids and images; `settings` are those of `apply_chat_template`. Raises whatever a processor does."""


COLUMNS = ("images", "image")
"""Columns of images; of a row that has some in both, TRL takes the first."""

OPENED_ROWS = 1_000
"""Rows whose images a trainer opens before it starts; those of the others are opened when they are drawn."""

SEARCHED_ROWS = 10_000
"""Training rows among which one with images is looked for, to try the model's forward with."""

DATA_URL = "data:"
"""Begins an image that is written as text, in base64: `data:image/png;base64,...`."""

MOST_SHOWN = 200
"""Characters of a path in a message."""

LEAVE_OUT = "leave the row out, or save the image again, for example as PNG"


# ---- images in rows ----


def image_column(row: Mapping[str, Any]) -> str | None:
    """The column with a row's images; an empty list has none.

    >>> image_column({"images": [], "image": "a.png"}), image_column({"images": [], "image": None})
    ('image', None)
    """
    for name in COLUMNS:
        value = row.get(name)
        if value is not None and not (isinstance(value, list | tuple) and not value):
            return name
    return None


def has_images(row: Mapping[str, Any]) -> bool:
    """Whether a row has an image in a column, or in a block of a message."""
    if image_column(row) is not None:
        return True
    prompt = row.get("prompt")
    return isinstance(prompt, list | tuple) and any(image_blocks(message) for message in prompt)


def image_blocks(message: Any) -> list[Mapping[str, Any]]:
    """The blocks of a message that are images, or places for them."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return []
    return [block for block in content if isinstance(block, Mapping) and block.get("type") == "image"]


def image_values(row: Mapping[str, Any]) -> list[Any]:
    """The values in a row's image columns, one for each image.

    >>> image_values({"images": [{"bytes": None, "path": "a.png"}, "b.png"]}), image_values({"image": None})
    (['a.png', 'b.png'], [])
    """
    column = image_column(row)
    if column is None:
        return []
    values = row[column] if column == "images" and isinstance(row[column], list | tuple) else [row[column]]
    return [_content(value) for value in values]


def _content(value: Any) -> Any:
    """The bytes, or the path, of an image as `datasets` keeps it; everything else as it is."""
    if not isinstance(value, Mapping) or not {"bytes", "path"} & value.keys():
        return value
    return value.get("path") if value.get("bytes") is None else value["bytes"]


def file_name(value: Any) -> str:
    """A text that names an image by the bytes of its file, wherever they are; one that is not there by its path."""
    value = _content(value)
    if isinstance(value, str | Path):
        with contextlib.suppress(OSError, ValueError):
            value = Path(value).expanduser().read_bytes()
    return as_name(value)


def located(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The row with paths of images as seen from here, where they are relative to the folder of a file.

    >>> located({"images": "['a.png', '/b.png']"}, Path("data"))
    {'images': ['data/a.png', '/b.png']}
    """

    def path_of(value: Any) -> Any:
        is_relative = isinstance(value, str) and "://" not in value and not value.startswith(("~", DATA_URL))
        return str(folder / value) if is_relative else value

    found = dict(row)
    if row.get("image") is not None:
        found["image"] = path_of(row["image"])
    if row.get("images") is not None:
        found["images"] = [path_of(value) for value in _listed(row["images"])]
    if isinstance(row.get("prompt"), list | tuple):
        found["prompt"] = with_blocks(row["prompt"], lambda value, _: path_of(value))
    return found


def _listed(value: Any) -> Sequence[Any]:
    """Several images; a cell of a table may have them as a list that was written as text."""
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = ast.literal_eval(value)
    return value if isinstance(value, list | tuple) else [value]


def with_blocks(messages: Sequence[Any], change: Callable[[Any, int], Any]) -> list[Any]:
    """A conversation whose images in blocks are changed, by what a block has and the number of its message."""
    found: list[Any] = []
    for number, message in enumerate(messages, start=1):
        if not image_blocks(message):
            found.append(message)
            continue
        blocks = []
        for block in message["content"]:
            kept = {key: value for key, value in block.items() if value is not None}  # a column of blocks has all keys
            if kept.get("type") == "image" and "image" in kept:
                kept["image"] = change(kept["image"], number)
            blocks.append(kept)
        found.append({**message, "content": blocks})
    return found


# ---- images as they are shown ----


def opened(value: Any, name: str, most_pixels: int | None = None) -> Image:
    """An image in RGB, upright as a person sees it, with what is transparent on white.

    Args:
        value: a Pillow image, a path, bytes, a data URL, or the mapping that `datasets` keeps of an image.
        name: for messages, such as `image 1`.
        most_pixels: it may have; None: as many as Pillow opens.

    Raises:
        DataError: it is none of these, cannot be read, moves, or is too large for Pillow to open safely.
    """
    from PIL import Image, UnidentifiedImageError

    def unreadable(what: str, fix: str) -> DataError:
        return DataError(f"{name} {what}", code="D062", fix=fix)

    value = _content(value)
    if isinstance(value, str) and "://" in value:
        what = f"is an address, and images are not downloaded: {_short(value)}"
        raise unreadable(what, "save it as a file, and name that")
    if not isinstance(value, Image.Image | str | Path | bytes | bytearray):
        what = "is null" if value is None else f"is of type {type(value).__name__}, and no image, path or bytes"
        raise unreadable(what, "give a Pillow image, the path of a file, or its bytes; or leave the row out")
    at = f": {_short(value)}" if isinstance(value, str | Path) else ""
    try:
        if isinstance(value, Image.Image):
            return _upright(value, most_pixels)
        with Image.open(_file(value)) as image:
            return _upright(image, most_pixels)
    except _Frames as error:
        what = f"has {error} frames, where one is read{at}"
        raise unreadable(what, "save the frame that is meant as an image") from None
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        fix = "correct the path; in a file it is relative to the file's folder"
        raise unreadable(f"is no file{at}", fix) from error
    except Image.DecompressionBombError as error:
        raise unreadable(f"is too large{at} ({quoted(error)})", "make it smaller") from error
    except UnidentifiedImageError as error:
        raise unreadable(f"is empty, or in no format that is known{at}", LEAVE_OUT) from error
    except Exception as error:  # the reader of each format fails in its own way
        raise unreadable(f"cannot be read{at} ({_short(quoted(error))})", LEAVE_OUT) from error


def _file(value: str | Path | bytes | bytearray) -> Path | io.BytesIO:
    """The file of an image, or its bytes, which a data URL has in base64."""
    if isinstance(value, str) and value.startswith(DATA_URL):
        return io.BytesIO(base64.b64decode(value.partition(",")[2], validate=True))
    return Path(value).expanduser() if isinstance(value, str | Path) else io.BytesIO(value)


def with_opened(content: Any, name: str) -> Any:
    """The content of a message with its images opened. Raises `DataError` as `opened`, which takes the name."""
    [message] = with_blocks([{"content": content}], lambda value, _: opened(value, name))
    return message["content"]


class _Frames(ValueError):
    """The number of frames of an image that has several."""


def _upright(image: Image, most_pixels: int | None) -> Image:
    """The image in RGB. Raises `_Frames` for one that moves; a photo may have a preview behind it (MPO)."""
    from PIL import Image, ImageOps

    if most_pixels is not None and image.width * image.height > most_pixels:
        raise Image.DecompressionBombError(f"{image.width:,} x {image.height:,} pixels, more than {most_pixels:,}")
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":
        raise _Frames(frames)
    return _in_rgb(ImageOps.exif_transpose(image))


def _in_rgb(image: Image) -> Image:
    """The image in RGB; 16 bits of grey become 8, and what is transparent is put on white."""
    import numpy as np
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, of which white is not known")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).clip(0, 0xFFFF) // 257).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image.convert("RGB")


def _short(value: Any) -> str:
    """A path for a message; an image that was written as text has no end."""
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


# ---- images in conversations ----


def placed(prompt: Sequence[Message], images: Sequence[Any]) -> list[dict[str, Any]]:
    """A conversation whose contents are blocks, with the images in the blocks for them, as TRL places them.

    Raises:
        DataError: there are other numbers of images and of blocks without one, or a role that TRL does not know here.
    """
    from trl.data_utils import prepare_multimodal_messages

    try:
        messages: list[dict[str, Any]] = prepare_multimodal_messages([dict(m) for m in prompt], images=[*images])
    except ValueError as error:
        fix = (
            'write {"type": "image"} once for each image of a column, {"type": "image", "image": PATH} for any other, '
            "or the contents of all messages as texts: all images are put before the first of the user; beside blocks "
            'that one is written in blocks, too: [{"type": "text", "text": ...}]'
        )
        raise DataError(f"the images have no place: {str(error).strip()}", code="D063", fix=fix) from None
    return messages
