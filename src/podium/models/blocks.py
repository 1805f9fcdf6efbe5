"""Decoder layers as one function each, for sampling: there a step's many small operations cost more than its products.

Llama's layer (Touvron et al., arXiv:2302.13971, section 2.2), which Qwen, Mistral and others share:

    x <- x + O attend(rotate(Q n(x)), rotate(K n(x)), V n(x)),    x <- x + W (silu(G m(x)) * (U m(x)))

with root mean square norms n and m. A layer is replaced only where a trial has shown that this is what it computes.

Shape letters: T tokens, D width of a head, H query heads, J key/value heads, E width of the model.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podium.models.attention import NAME, Attends, LayerShape, attention_implementation
from podium.models.devices import kind_of
from podium.models.lean import CLOSE, LeanLayers, epsilon, gated_unit, inverse_size, is_gated, is_norm
from podium.models.modes import replaced
from podium.models.precision import ProductPrecision, product

NORMS = ("input_layernorm", "post_attention_layernorm")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
"""Qwen 3 has them (Henry et al., arXiv:2010.04245)."""


class Blocks:
    """Inside `with blocks():` the layers that it knows compute the same in fewer operations, without gradients."""

    def __init__(self, model: nn.Module) -> None:
        """The model must be in evaluation mode: the layers are tried."""
        rotary = next((m for name, m in model.named_modules() if name.endswith("rotary_emb")), None)
        rotation = Rotation()
        tried = (block_of(layer, rotary, rotation) for layer in model.modules() if rotary and _is_known(layer))
        self._blocks = [block for block in tried if block is not None]

    def __len__(self) -> int:
        return len(self._blocks)

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        """The context; entering it inside itself changes nothing. A layer with hooks inside is left alone."""
        entered = [b for b in self._blocks if "forward" not in vars(b.layer) and not _is_watched(b.layer)]
        return replaced((block.layer, "forward", block) for block in entered)


class Rotation:
    """Rotary positions (Su et al., arXiv:2104.09864, equation 34), halves apart, prepared once for all layers."""

    def __init__(self) -> None:
        self._made_of: Tensor | None = None

    def __call__(self, x_THD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor) -> Tensor:
        """Queries and keys [T, H, D] turned by their positions' angles."""
        if self._made_of is not sin_1TD:
            half = sin_1TD.shape[-1] // 2
            self._made_of = sin_1TD
            self._cos = cos_1TD[0].unsqueeze(1)
            self._sin = torch.cat([-sin_1TD[0, :, :half], sin_1TD[0, :, half:]], -1).unsqueeze(1)
        return torch.addcmul(x_THD * self._cos, x_THD.roll(x_THD.shape[-1] // 2, -1), self._sin)


class Block:
    """One layer."""

    def __init__(self, layer: nn.Module, shape: LayerShape, rotation: Rotation) -> None:
        self.layer = layer
        self.shape = shape
        self.rotation = rotation
        self.head_width = layer.self_attn.head_dim

    def __call__(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], podium: Attends, **_: Any
    ) -> Tensor:
        """As the layer's forward: [1, T, E] -> [1, T, E]."""
        assert not torch.is_grad_enabled(), "a block has no backward"
        layer = self.layer
        attention = self.layer.self_attn
        mlp = self.layer.mlp
        x = hidden_states[0]
        normal = _normal(layer.input_layernorm, x)
        qkv_THD = product((attention.q_proj, attention.k_proj, attention.v_proj), normal).float()
        qkv_THD = qkv_THD.view(len(x), -1, self.head_width)
        heads = attention.o_proj.in_features // self.head_width
        turned = (qkv_THD.shape[1] + heads) // 2  # query and key heads
        query_key_THD = self._normalised(qkv_THD[:, :turned], heads)
        turned_THD = self.rotation(query_key_THD, *position_embeddings)
        seen = podium.attend(
            turned_THD[:, :heads].transpose(0, 1),
            turned_THD[:, heads:].transpose(0, 1),
            qkv_THD[:, turned:].transpose(0, 1),
            self.shape,
        )
        x = x + product((attention.o_proj,), seen.flatten(1))
        gate, up = product((mlp.gate_proj, mlp.up_proj), _normal(layer.post_attention_layernorm, x)).chunk(2, -1)
        return x.add_(product((mlp.down_proj,), gated_unit(gate, up)))[None]

    def _normalised(self, query_key_THD: Tensor, heads: int) -> Tensor:
        norms = [getattr(self.layer.self_attn, name, None) for name in HEAD_NORMS]
        if None in norms:
            return query_key_THD
        parts = query_key_THD[:, :heads], query_key_THD[:, heads:]
        return torch.cat([_normal(norm, part) for norm, part in zip(norms, parts, strict=True)], 1)


def lean_precision(model: nn.Module, *, enabled: bool) -> ProductPrecision:
    """Products of a model in evaluation mode, rounded or not, with everything lean around them."""
    return ProductPrecision(model, enabled=enabled, lean=LeanLayers(model), blocks=Blocks(model))


def _normal(norm: nn.Module, x: Tensor) -> Tensor:
    return (x * inverse_size(x, epsilon(norm))).mul_(norm.weight)


# ---- which layers ----


def _is_known(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    if set(children) != {"self_attn", "mlp", *NORMS} or not is_gated(children["mlp"]):
        return False
    attention = dict(children["self_attn"].named_children())
    with_norms = {*PROJECTIONS, *HEAD_NORMS}
    return set(attention) in (set(PROJECTIONS), with_norms) and all(is_norm(children[name]) for name in NORMS)


def _is_watched(layer: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules() if m is not layer)


@torch.no_grad()
def block_of(layer: nn.Module, rotary: nn.Module, rotation: Rotation) -> Block | None:
    """The layer as a `Block`, or None where a trial on made-up input fails or gives something else."""
    if any(weight.dtype != torch.float32 or not kind_of(weight.device).lean_layers for weight in layer.parameters()):
        return None
    positions = torch.tensor([[0, 3, 50]])
    x = torch.linspace(-2, 3, 3 * len(layer.input_layernorm.weight)).sin().view(1, 3, -1)
    causal = _Causal()
    try:
        given = {"position_embeddings": rotary(x, positions), "position_ids": positions, "attention_mask": None}
        with attention_implementation(layer, NAME):
            expected = layer(x, **given, podium=causal)
        assert causal.shape is not None
        block = Block(layer, causal.shape, rotation)
        difference = (block(x, **given, podium=causal) - expected).abs().max()
    except Exception:  # noqa: BLE001  any failure means the same: this layer is left alone
        return None
    return block if bool(difference <= CLOSE * expected.abs().max()) else None


class _Causal:
    """Plain causal attention that remembers what the layer says of itself."""

    shape: LayerShape | None = None

    def attend(self, query_HTD: Tensor, key_JTD: Tensor, value_JTD: Tensor, shape: LayerShape) -> Tensor:
        self.shape = shape
        output = F.scaled_dot_product_attention(
            query_HTD[None], key_JTD[None], value_JTD[None], is_causal=True, scale=shape.scaling, enable_gqa=True
        )
        return output[0].transpose(0, 1)
