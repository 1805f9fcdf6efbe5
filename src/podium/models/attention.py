"""Attention over a tree of tokens, plugged into transformers' public attention interface.

The only layer of a model that sees that several completions share one prompt. A model's forward gets its own tokens as
one flat sequence [1, T] and the keyword `podium`, an `Attends`: a training pack, a prefill or a decode step. Positions
(rotary or absolute) come from `position_ids`, so nothing else has to know.

Shape letters: T tokens, H heads, J key/value heads, D width of a head; B, L, K as in packing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig

from podium.errors import ModelError
from podium.packing import Bucket, Layout

NAME = "podium"


class LayerShape(NamedTuple):
    """What a layer says of its own attention."""

    layer: int
    scaling: float
    window: int | None
    softcap: float | None
    dropout: float


class Attends(Protocol):
    """Anything that can answer a layer's queries over a flat sequence of tokens."""

    def attend(self, query_HTD: Tensor, key_JTD: Tensor, value_JTD: Tensor, shape: LayerShape) -> Tensor:
        """The attention output [T, H, D]."""
        ...


def podium_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, H, T, D], key and value [1, J, T, D] -> [1, T, H, D]."""
    if kwargs.get("s_aux") is not None:
        raise ModelError("attention sinks are not supported with shared prefixes")
    shape = LayerShape(
        layer=module.layer_idx,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        dropout=dropout,
    )
    attends: Attends = kwargs["podium"]
    return attends.attend(query[0], key[0], value[0], shape).unsqueeze(0), None


AttentionInterface.register(NAME, podium_attention)


def tree_attention(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within this context the model's attention layers take the keyword `podium`; outside, nothing has changed.

    Recomputation under gradient checkpointing happens in the backward, so that belongs inside, too.
    """
    return attention_implementation(model, NAME)


@contextlib.contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Within this context the model's attention layers use the registered function `name`."""
    configs = {
        id(m.config): m.config for m in model.modules() if isinstance(getattr(m, "config", None), PretrainedConfig)
    }
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


class TreeAttention:
    """`Attends` for a pack: every bucket of the layout is one attention call."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, query_HTD: Tensor, key_JTD: Tensor, value_JTD: Tensor, shape: LayerShape) -> Tensor:
        """Attention of the layout; see `Attends`."""
        with torch.autocast(query_HTD.device.type, enabled=False):
            query_THD, key_TJD, value_TJD = (
                x.transpose(0, 1).to(attention_dtype(query_HTD)) for x in (query_HTD, key_JTD, value_JTD)
            )
            outputs = [
                _bucket(bucket, query_THD, key_TJD, value_TJD, shape, self._mask(i, bucket, shape, query_THD.dtype))
                for i, bucket in enumerate(self.layout.buckets)
            ]
            flat = torch.cat([x.flatten(0, 1) for x in outputs]) if len(outputs) > 1 else outputs[0].flatten(0, 1)
            return flat[self.layout.output_T].to(query_HTD.dtype)

    def _mask(self, i: int, bucket: Bucket, shape: LayerShape, dtype: torch.dtype) -> Tensor | None:
        """0 or minus infinity [B, 1, L, K], made once for all layers of a kind; None for a plain causal bucket."""
        window = shape.window if shape.window is not None and bucket.reach >= shape.window else None
        if bucket.causal and window is None and shape.softcap is None:
            return None
        if (i, window) not in self._masks:
            seen = bucket.mask_BLK if window is None else bucket.mask_BLK & (bucket.distance_BLK < window)
            hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
            self._masks[i, window] = hidden.unsqueeze(1)
        return self._masks[i, window]


def attention_dtype(query: Tensor) -> torch.dtype:
    """float32 on a CPU, whose half-precision attention kernels are several times slower; else what the model uses."""
    if query.device.type == "cpu":
        return torch.float32
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    return query.dtype


def _bucket(
    bucket: Bucket, query_THD: Tensor, key_TJD: Tensor, value_TJD: Tensor, shape: LayerShape, mask: Tensor | None
) -> Tensor:
    """[B, L, H, D]."""
    query = query_THD[bucket.query_BL].transpose(1, 2)
    key = key_TJD[bucket.key_BK].transpose(1, 2)
    value = value_TJD[bucket.key_BK].transpose(1, 2)
    if shape.softcap is not None:
        return _capped(query, key, value, mask, shape).transpose(1, 2)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=shape.dropout,
        scale=shape.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    ).transpose(1, 2)


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, shape: LayerShape) -> Tensor:
    """Attention whose scores are squashed to +-softcap, as Gemma 2 does: no fused kernel on every device knows it."""
    cap = shape.softcap or 1.0
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.tanh(query @ key.transpose(-1, -2) * (shape.scaling / cap)) * cap
    weights = (scores + mask).softmax(-1, dtype=torch.float32).to(value.dtype)
    return F.dropout(weights, shape.dropout) @ value
