"""Images in a forward: which features the placeholders among its tokens stand for, and their positions.

A model encodes images by its own `get_image_features` and puts the features where placeholders are. Here the images of
a forward are encoded once each, whatever number of completions follow them, and the features are handed out in the
order of the placeholders. Everything is found in the model's class and its processor; there is no table of models.

Shape letters: T tokens of a forward, X placeholders among them, L tokens of a prompt, B rows, S tokens of a row.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from podium.models.modes import replaced
from podium.models.prefix_tree import Layout
from podium.records import GivenImages, Message

TOKEN_IDS = ("input_ids", "attention_mask")
"""Fields that a processor returns for text, too."""


def given_images(processed: Mapping[str, Any], placeholder: int) -> GivenImages:
    """The images of one text from what a processor returns for it; `placeholder` is the id that stands for them."""
    ids_L = processed["input_ids"][0]
    others = {name: x for name, x in processed.items() if isinstance(x, Tensor) and name not in TOKEN_IDS}
    is_of_tokens = {name: x.shape == (1, len(ids_L)) for name, x in others.items()}
    digest = hashlib.sha256(ids_L.numpy().tobytes())
    for name, x in sorted(others.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode() + x.contiguous().numpy().tobytes())
    return GivenImages(
        digest=digest.digest(),
        placeholder=placeholder,
        placeholders=np.flatnonzero((ids_L == placeholder).numpy()),
        fields={name: x for name, x in others.items() if not is_of_tokens[name]},
        token_fields={name: x[0] for name, x in others.items() if is_of_tokens[name]},
        num_tokens=len(ids_L),
    )


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """Makes tokens of conversations with images."""

    load: Callable[[], Any]
    """Returns transformers' processor of a model."""
    placeholder: int
    """The token that stands for a feature of an image."""

    def __call__(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> tuple[list[int], GivenImages]:
        """Token ids and images; `settings` are those of `apply_chat_template`. Raises whatever the processor does."""
        processor = self.load()
        how = {**settings, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        processed = processor.apply_chat_template([*messages], **how)
        text = processor.apply_chat_template([*messages], **settings, tokenize=False)
        begun = text.startswith(processor.tokenizer.bos_token or "\0")  # as the processor itself looks at it
        return self._read(processed, text, special_tokens=not begun)

    def encoded(self, text: str, image: Any) -> tuple[list[int], GivenImages]:
        """The same of the text that a chat template has for one image."""
        processed = self.load()(text=[text], images=[[image]], add_special_tokens=False, return_tensors="pt")
        ids, images = self._read(processed, text, special_tokens=False)
        return ids, replace(images, pictures=(image,))

    def _read(self, processed: Mapping[str, Any], text: str, *, special_tokens: bool) -> tuple[list[int], GivenImages]:
        """Token ids and images in what the processor returns for a text, with those of the text itself."""
        short_ids = self.load().tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
        images = replace(given_images(processed, self.placeholder), short_ids=tuple(short_ids))
        return processed["input_ids"][0].tolist(), images


class ImageOrder:
    """Images of several sequences, each once, and where the features of each begin."""

    def __init__(self) -> None:
        self.first: dict[GivenImages, int] = {}
        self._count = 0

    @property
    def images(self) -> tuple[GivenImages, ...]:
        """All of them, in order."""
        return tuple(self.first)

    def told_apart(self, token_ids: Sequence[int], images: Sequence[GivenImages], begin: int = 0) -> np.ndarray:
        """Token ids with -1 - n for the placeholder of feature n, so that different images are different tokens.

        `begin`: where the tokens begin that are computed; images before it are not among those of the order.
        """
        ids_L = np.array(token_ids, np.int64)
        for given in images:
            places = given.start + given.placeholders
            among = np.flatnonzero((places >= begin) & (places < len(ids_L)))
            if not len(among):
                continue
            if given not in self.first:
                self.first[given] = self._count
                self._count += len(places)
            ids_L[places[among]] = -1 - self.first[given] - among
        return ids_L

    def laid_out(
        self, layout: Layout, sequences: Sequence[tuple[Sequence[int], Sequence[GivenImages]]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The input ids [T] of a layout of sequences that were told apart, and the feature of each; -1: none."""
        ids_T = layout.token_ids_T.copy()
        feature_T = np.full(len(ids_T), -1)
        for path, (token_ids, images) in zip(layout.paths, sequences, strict=True):
            ids_T[path] = token_ids[: len(path)]
            feature_T[path] = np.maximum(-1 - self.told_apart(token_ids[: len(path)], images), -1)
        return ids_T, feature_T


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Fields of several prompts one after the other; those of fewer tiles or patches are filled up with zeros."""
    return {name: _stacked([part[name] for part in parts]) for name in parts[0]}


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    shape = np.max([x.shape[1:] for x in tensors], axis=0).tolist()
    filled = []
    for x in tensors:
        missing = [
            n for most, size in zip(reversed(shape), reversed(x.shape[1:]), strict=True) for n in (0, most - size)
        ]
        filled.append(torch.nn.functional.pad(x, missing) if any(missing) else x)
    return torch.cat(filled)


def described(model: nn.Module, images: Sequence[GivenImages], length: int) -> dict[str, Tensor]:
    """The arguments that describe the images of one sequence of so many tokens to the model's own forward."""
    if not images:
        return {}
    device = next(model.parameters()).device
    fields = joined([x.fields for x in images])
    return {name: x.to(device) for name, x in {**fields, **token_fields([images], length)}.items()}


@contextlib.contextmanager
def encoded_once(
    model: nn.Module, images: Sequence[GivenImages], features_X: np.ndarray, rows: Iterable[GivenImages]
) -> Iterator[dict[str, Tensor]]:
    """Within it, a forward that is given the yielded arguments encodes each of the images once.

    Args:
        model: with `get_image_features`.
        images: those of the forward, each once.
        features_X: the feature of each placeholder in the forward, in order.
        rows: those of each row of the forward, whose sizes the model may ask for.
    """
    if not images:
        yield {}
        return
    device = next(model.parameters()).device
    part = _part_with(model, "get_image_features")
    encode = part.get_image_features
    parameters = inspect.signature(encode).parameters
    known = inspect.signature(part.forward).parameters
    once = {name: x.to(device) for name, x in joined([x.fields for x in images]).items() if name in known}
    per_row = {name: x.to(device) for name, x in joined([x.fields for x in rows]).items()}
    index_X = torch.from_numpy(features_X).to(device)

    def encoded(*args: Any, **named: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **named}
        output = encode(**{**given, **{name: x for name, x in once.items() if name in parameters}})
        output.pooler_output = _in_order(output.pooler_output, index_X)
        if getattr(output, "deepstack_features", None) is not None:
            output.deepstack_features = [_in_order(x, index_X) for x in output.deepstack_features]
        return output

    with replaced([(part, "get_image_features", encoded)]):
        yield {name: x if x.is_floating_point() else per_row[name] for name, x in once.items()}


def _in_order(features: Tensor | Sequence[Tensor], index_X: Tensor) -> Tensor | list[Tensor]:
    """Features [..., D], or those of each image in a list, as the placeholders want them, in the same form."""
    if not isinstance(features, Tensor):
        return [torch.cat([*features])[index_X]]
    return features.flatten(0, -2)[index_X].view(-1, *features.shape[1:])


def token_fields(
    rows: Sequence[Sequence[GivenImages]], width: int, starts: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Fields of tokens [B, S]: zeros for padding, and for tokens that no images describe.

    Args:
        rows: the images of every row.
        width: S.
        starts: where each row's tokens begin; None: at 0.
    """
    found: dict[str, Tensor] = {}
    for row, images in enumerate(rows):
        for given in images:
            start = given.start + (0 if starts is None else starts[row])
            for name, x_L in given.token_fields.items():
                field_BS = found.setdefault(name, x_L.new_zeros(len(rows), width))
                field_BS[row, start : start + len(x_L)] = x_L[: max(0, width - start)]
    return found


# ---- positions ----


def rotary_positions(
    model: nn.Module, ids_T: np.ndarray, paths: Sequence[np.ndarray], images: Sequence[Sequence[GivenImages]]
) -> Tensor | None:
    """Positions [axes, T] of a layout by the model's own `get_rope_index`; None: tokens are counted.

    Args:
        model: whatever it is wrapped in.
        ids_T: the tokens of the layout.
        paths: the places of every sequence's tokens in it.
        images: those of every sequence.
    """
    part = _part_with(model, "get_rope_index", needed=False)
    if part is None:
        return None
    known = inspect.signature(part.get_rope_index).parameters
    found = [_positions_to_last(part, known, ids_T[path], x) for path, x in zip(paths, images, strict=True)]
    axes = max(len(first_CL) for first_CL in found)
    positions_CT = torch.zeros(axes, len(ids_T), dtype=torch.long)
    for path, first_CL in zip(paths, found, strict=True):
        behind = first_CL.amax() + 1 + torch.arange(len(path) - first_CL.shape[1])
        positions_CT[:, path] = torch.cat([first_CL.expand(axes, -1), behind.expand(axes, -1)], dim=1)
    return positions_CT


def _positions_to_last(part: Any, known: Collection[str], ids_L: np.ndarray, images: Sequence[GivenImages]) -> Tensor:
    """Positions [axes, tokens up to the last images]; of text, which goes on as it begins, [1, 1]."""
    if not images:
        return torch.zeros(1, 1, dtype=torch.long)
    last = images[-1]
    length = last.start + len(next(iter(last.token_fields.values())))
    given = {**joined([x.fields for x in images]), **token_fields([images], length)}
    named = {name: x for name, x in given.items() if name in known}
    positions_C1L, _ = part.get_rope_index(torch.from_numpy(ids_L[None, :length]), **named)
    return positions_C1L[:, 0]


def shift_behind(model: nn.Module, token_ids: Sequence[int], images: Sequence[GivenImages]) -> int:
    """Offset from the count of tokens to the rotary positions behind the last images; 0 for text."""
    if not images:
        return 0
    ids_L = np.array(token_ids)
    positions_CT = rotary_positions(model, ids_L, [np.arange(len(ids_L))], [images])
    return 0 if positions_CT is None else int(positions_CT.max()) + 1 - len(ids_L)


def _part_with(model: nn.Module, method: str, *, needed: bool = True) -> Any:
    """The innermost module with a method: outer ones pass calls on to it."""
    found = [module for module in model.modules() if hasattr(type(module), method)]
    assert found or not needed, f"no module has {method}"
    return found[-1] if found else None
