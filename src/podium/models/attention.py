"""Attention over a tree of tokens, plugged into transformers' public attention interface.

The only layer of a model that sees that several completions share one prompt. A model's forward gets its own tokens as
one flat sequence [1, T] and the keyword `podium`, an `Attends`: a training pack, a prefill or a decode step. Positions
(rotary or absolute) come from `position_ids`, so nothing else has to know.

Shape letters: T tokens, H heads, J key/value heads, D width of a head; B, L, K as in prefix_tree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from podium.models.devices import kind_of
from podium.models.modes import replaced
from podium.models.prefix_tree import Bucket, Layout, Part
from podium.models.recurrence import TokenOrder, TreeRows, recurrent_layers

NAME = "podium"


class LayerShape(NamedTuple):
    """Attention parameters of a layer."""

    scaling: float
    window: int | None = None
    """Tokens that a query sees, itself included."""
    chunk: int | None = None
    """A query sees tokens of its own chunk only: those whose position divided by this number is its own."""
    softcap: float | None = None
    sinks_H: Tensor | None = None
    """A score of each head that takes a share of the softmax and has no value."""
    dropout: float = 0.0

    def hides(self, positions: int) -> bool:
        """Whether window or chunks may hide something among so many positions."""
        return any(limit is not None and positions > limit for limit in (self.window, self.chunk))

    def sees(self, now: Tensor, then: Tensor) -> Tensor:
        """Whether a query at position `now` may see a key at `then`, in a layer with a window or chunks."""
        if self.chunk is None:
            assert self.window is not None
            return now - then < self.window
        same = now // self.chunk == then // self.chunk
        return same if self.window is None else same & (now - then < self.window)

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Layers with the same have the same masks."""
        return self.window, self.chunk

    def softmax(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Weights [..., H or J, Q, K] or [..., H, L, K] of scores, in whose memory a mask of 0 and -inf is added.

        With scores squashed to +-softcap, as Gemma 2 does, and with sinks; at least in float32.
        """
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is not None:
            scores += mask
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.sinks_H is None:
            return scores.softmax(-1)
        per_head = self.sinks_H.to(scores.dtype).view(scores.shape[1], -1, 1)
        sink = per_head.expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]


class Attends(Protocol):
    """Anything that can answer a layer's queries over a flat sequence of tokens."""

    @property
    def rows(self) -> TokenOrder:
        """How the tokens follow each other, for layers with a state in place of keys and values."""
        ...

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
    kinds = getattr(module.config, "layer_types", None) or ()
    chunked = "chunked" in str(kinds[module.layer_idx]) if module.layer_idx < len(kinds) else False
    shape = LayerShape(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        chunk=getattr(module.config, "attention_chunk_size", None) if chunked else None,
        softcap=kwargs.get("softcap"),
        sinks_H=kwargs.get("s_aux"),
        dropout=dropout,
    )
    attends: Attends = kwargs["podium"]
    width = value.shape[-1]
    wide = query.shape[-1]
    if width == wide:
        return attends.attend(query[0], key[0], value[0], shape).unsqueeze(0), None
    most = max(width, wide)  # values of latent attention have another width; zeros change nothing
    query_HTD, key_JTD, value_JTD = (F.pad(x[0], (0, most - x.shape[-1])) for x in (query, key, value))
    return attends.attend(query_HTD, key_JTD, value_JTD, shape)[..., :width].unsqueeze(0), None


AttentionInterface.register(NAME, podium_attention)


@contextlib.contextmanager
def tree_attention(model: nn.Module) -> Iterator[None]:
    """Within this context the model's attention layers take the keyword `podium`; outside, nothing has changed.

    Recomputation under gradient checkpointing happens in the backward, so that belongs inside, too.
    """
    # Some models, GPT-2 among them, look for padding where there is no mask, and wait for the device in doing so.
    modules = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    unchecked = [(module, "warn_if_padding_and_no_attention_mask", lambda *_, **__: None) for module in modules]
    with attention_implementation(model, NAME), replaced(unchecked), recurrent_layers(model):
        yield


def attention_implementation(model: nn.Module, name: str) -> contextlib.AbstractContextManager[None]:
    """Within this context the attention layers of the language model use the registered function `name`."""
    configs = (getattr(module, "config", None) for module in model.modules())
    others = {id(encoder.config) for encoder in _encoders(model)}
    chosen = (x for x in configs if isinstance(x, PretrainedConfig) and id(x) not in others)
    return replaced((x, "_attn_implementation_internal", name) for x in chosen)


def _encoders(model: nn.Module) -> list[PreTrainedModel]:
    """The parts of a model that are models beside its language model, such as encoders of images."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if len(parts) < 3:  # the language model alone, and its inside
        return []
    decoder = parts[0].get_decoder()
    inside = {*decoder.modules()}
    return [part for part in parts if part not in inside and not any(x is decoder for x in part.modules())]


class TreeAttention:
    """`Attends` for a pack. On a CPU the layout's parts are joined, elsewhere every bucket is one attention call."""

    def __init__(self, layout: Layout, device: torch.device | str) -> None:
        self.layout = layout
        self.device = device
        self.span = 1 + int(layout.position_T.max())
        self._masks: dict[Any, Tensor] = {}
        self._parts: tuple[Part, ...] = ()
        self._part_masks: dict[torch.dtype, list[Tensor | None]] = {}
        self._buckets: tuple[tuple[Bucket, ...], Tensor] | None = None

    @cached_property
    def rows(self) -> TokenOrder:
        """See `Attends`."""
        return TreeRows(self.layout.paths, self.device)

    def attend(self, query_HTD: Tensor, key_JTD: Tensor, value_JTD: Tensor, shape: LayerShape) -> Tensor:
        """Attention of the layout; see `Attends`."""
        dtype = torch.float64 if _needs_float64(query_HTD, key_JTD, shape.scaling) else attention_dtype(query_HTD)
        # Only the CPU's kernel gives the log-sum-exp; it takes no soft cap, and parts take no window.
        plain = shape.softcap is None and not shape.dropout and not shape.hides(self.span)
        with without_autocast(query_HTD.device.type):
            query_THD, key_TJD, value_TJD = (x.transpose(0, 1).to(dtype) for x in (query_HTD, key_JTD, value_JTD))
            if plain and kind_of(query_HTD.device).joined_attention:
                sinks_H = None if shape.sinks_H is None else shape.sinks_H.to(dtype)
                self._parts = self._parts or self.layout.parts()
                if dtype not in self._part_masks:
                    masks = [part.mask_BLK for part in self._parts]
                    self._part_masks[dtype] = [None if x is None else additive(x, dtype).unsqueeze(1) for x in masks]
                joined_THD = Joined.apply(
                    query_THD, key_TJD, value_TJD, sinks_H, self._parts, self._part_masks[dtype], shape.scaling
                )
                return joined_THD.to(query_HTD.dtype)
            self._buckets = self._buckets or self.layout.buckets(query_THD.device)
            buckets, output_T = self._buckets
            outputs = [
                _bucket(bucket, query_THD, key_TJD, value_TJD, shape, self._mask(i, bucket, shape, dtype))
                for i, bucket in enumerate(buckets)
            ]
            flat = torch.cat([x.flatten(0, 1) for x in outputs]) if len(outputs) > 1 else outputs[0].flatten(0, 1)
            return flat[output_T].to(query_HTD.dtype)

    def _mask(self, i: int, bucket: Bucket, shape: LayerShape, dtype: torch.dtype) -> Tensor | None:
        """0 or minus infinity [B, 1, L, K], made once for all layers of a kind; None for a plain causal bucket."""
        hides = shape.hides(self.span)
        if bucket.causal and not hides and shape.softcap is None and shape.sinks_H is None:
            return None
        key = i, shape.limits if hides else None, dtype
        if key not in self._masks:
            seen = bucket.seen() & shape.sees(*bucket.positions()) if hides else bucket.seen()
            self._masks[key] = additive(seen, dtype).unsqueeze(1)
        return self._masks[key]


LARGE_SCORE = 128.0
"""Bound of a layer's scores above which attention on a CPU is computed in float64.

torch's fused backward computes weights again as exp(score - log-sum-exp), and float32 rounds both: by 1e-5 at a score
of 128, by 1e-2 at 1e5, where the queries' gradients can be wrong by more than their size.
"""


def _needs_float64(query_HTD: Tensor, key_JTD: Tensor, scaling: float) -> bool:
    """Whether scores may exceed `LARGE_SCORE`, by Cauchy and Schwarz's bound for each head; always False off a CPU."""
    if not kind_of(query_HTD.device).host_memory:
        return False
    with torch.no_grad():
        longest_H, longest_J = (x.float().norm(dim=-1).amax(-1) for x in (query_HTD, key_JTD))
        bound = (longest_H.unflatten(0, (len(longest_J), -1)) * longest_J[:, None]).max() * scaling
        return bool(bound > LARGE_SCORE)


def additive(seen: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """0 where a key is seen and minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


class Joined(torch.autograd.Function):
    """Attention [T, H, D] from a layout's parts, joined by their log-sum-exp; nothing gathered is kept.

    Softmax over two sets of keys is the mean of both softmaxes, weighted by the sets' sums of exponentials (Milakov and
    Gimelshein, arXiv:1805.02867). The gradient of a part follows from the joined output and log-sum-exp alone, since
    those turn its scores into the weights of the whole (Dao et al., arXiv:2205.14135, section B.4).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TJD: Tensor,
        value_TJD: Tensor,
        sinks_H: Tensor | None,
        parts: Sequence[Part],
        masks: Sequence[Tensor | None],
        scaling: float,
    ) -> Tensor:
        output_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype)
        lse_TH = torch.full(query_THD.shape[:2], float("-inf"), dtype=query_THD.dtype)
        for part, mask in zip(parts, masks, strict=True):
            query, key, value = _gathered(part, query_THD, key_TJD, value_TJD)
            output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, part.causal, attn_mask=mask, scale=scaling
            )
            own = part.query_BL.flatten()[part.queries_N]
            output_NHD = output.transpose(1, 2).flatten(0, 1).index_select(0, part.queries_N)
            lse_NH = lse.transpose(1, 2).flatten(0, 1).index_select(0, part.queries_N)
            before_NH = lse_TH.index_select(0, own)
            joined_NH = torch.logaddexp(before_NH, lse_NH)
            if part.adds:
                output_NHD *= (lse_NH - joined_NH).exp_().unsqueeze(-1)
                output_NHD += output_THD.index_select(0, own) * (before_NH - joined_NH).exp_().unsqueeze(-1)
            output_THD.index_copy_(0, own, output_NHD)
            lse_TH.index_copy_(0, own, joined_NH)
        if sinks_H is not None:  # one more key of every query, without a value
            whole_TH = torch.logaddexp(lse_TH, sinks_H)
            output_THD *= (lse_TH - whole_TH).exp_().unsqueeze(-1)
            lse_TH = whole_TH
        ctx.save_for_backward(query_THD, key_TJD, value_TJD, output_THD, lse_TH, sinks_H)
        ctx.parts = parts
        ctx.masks = masks
        ctx.scaling = scaling
        return output_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_THD, key_TJD, value_TJD, output_THD, lse_TH, sinks_H = ctx.saved_tensors
        by_query, by_key, by_value = (torch.zeros(x.shape, dtype=x.dtype) for x in (query_THD, key_TJD, value_TJD))
        for part, mask in zip(ctx.parts, ctx.masks, strict=True):
            query, key, value = _gathered(part, query_THD, key_TJD, value_TJD)
            output = _rows(output_THD, part.query_BL).transpose(1, 2)
            causal = part.causal
            # A padded query is that of another row, whose log-sum-exp knows nothing of this row's keys: their weights
            # could overflow, and infinity times a gradient of 0 is NaN. Below infinity every weight is 0.
            grad = _with_padding(part, grads[0], 0.0)
            lse = _with_padding(part, lse_TH, float("inf"))
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, output, lse, 0.0, causal, attn_mask=mask, scale=ctx.scaling
            )
            queries = (part.query_BL, part.queries_N)
            keys = (part.key_BK, part.keys_M)
            totals = ((by_query, *queries), (by_key, *keys), (by_value, *keys))
            for (total, places, own), grad in zip(totals, found, strict=True):
                heads = grad.unflatten(1, (total.shape[1], -1)).sum(2)  # of a key's queries
                flat = heads.transpose(1, 2).flatten(0, 1).index_select(0, own)
                total.index_add_(0, places.flatten()[own], flat)
        by_sink = None
        if sinks_H is not None:  # d loss / d score of a key is p (dO . value - dO . O)
            by_sink = -((sinks_H - lse_TH).exp_() * (grads[0] * output_THD).sum(-1)).sum(0)
        return by_query, by_key, by_value, by_sink, None, None, None


def _gathered(part: Part, query_THD: Tensor, key_TJD: Tensor, value_TJD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H, L, D], keys and values [B, H, K, D] of a part."""
    repeat = query_THD.shape[1] // key_TJD.shape[1]
    query = _rows(query_THD, part.query_BL).transpose(1, 2)
    keys_values = (_rows(x, part.key_BK) for x in (key_TJD, value_TJD))
    key, value = (x.repeat_interleave(repeat, 2).transpose(1, 2) for x in keys_values)
    return query, key, value


def _rows(x_T: Tensor, places_BL: Tensor) -> Tensor:
    """Gather x[places] [B, L, ...] from x [T, ...]: on a CPU five times as fast as indexing with a tensor."""
    return x_T.index_select(0, places_BL.flatten()).unflatten(0, places_BL.shape)


def _with_padding(part: Part, x_TH: Tensor, padding: float) -> Tensor:
    """Rows of x for the part's queries [B, H, L, ...], `padding` where there is no query."""
    gathered_BLH = _rows(x_TH, part.query_BL)
    if len(part.queries_N) < part.query_BL.numel():
        real = torch.zeros(part.query_BL.numel(), dtype=torch.bool)
        real[part.queries_N] = True
        gathered_BLH[~real.view(part.query_BL.shape)] = padding
    return gathered_BLH.transpose(1, 2)


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast; entering one costs as much as a small operation, so only where there is some."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def attention_dtype(query: Tensor) -> torch.dtype:
    """The type in which attention computes here and now; asked before autocast is off, as it may be what says it."""
    if not kind_of(query.device).half_attention:
        return torch.float32
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    return query.dtype


def _bucket(
    bucket: Bucket, query_THD: Tensor, key_TJD: Tensor, value_TJD: Tensor, shape: LayerShape, mask: Tensor | None
) -> Tensor:
    """[B, L, H, D].

    With a mask keys and values are repeated for every query head: no fused kernel takes both a mask and grouped heads,
    and the one that does keeps all scores in float32.
    """
    query = query_THD[bucket.query_BL].transpose(1, 2)
    key = key_TJD[bucket.key_BK].transpose(1, 2)
    value = value_TJD[bucket.key_BK].transpose(1, 2)
    if mask is not None and query.shape[1] != key.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if shape.softcap is not None or shape.sinks_H is not None:  # no fused kernel knows them
        weights = shape.softmax(query @ key.transpose(-1, -2) * shape.scaling, mask).to(value.dtype)
        return (F.dropout(weights, shape.dropout) @ value).transpose(1, 2)
    masked = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": query.shape[1] != key.shape[1]}
    output = F.scaled_dot_product_attention(query, key, value, dropout_p=shape.dropout, scale=shape.scaling, **masked)
    return output.transpose(1, 2)
