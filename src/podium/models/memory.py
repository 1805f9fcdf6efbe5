"""The cost model of memory, which the trainer sizes its packs by and `podium check` estimates a run by.

Activations are counted per token and layer; keys and values per token; logits per row that is sampled. A GPU that runs
out of memory all the same is `explained` in one message: what took it, and which setting to lower.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PretrainedConfig

from podium.errors import ModelError
from podium.errors.texts import as_line
from podium.models.devices import free_bytes, kind_of

USED_SHARE = 0.7
"""Share of the memory left beside weights and states that a pack's activations may take. The rest is for logits,
attention masks, the key/value cache and fragmentation."""

LEAST_PACK = 128
"""Tokens below which smaller packs save nothing worth their overhead."""

FROZEN_COPIES = 8
"""Blocks as large as inputs and outputs of the widest layer, alive at once in an encoder that keeps no graph."""

SAMPLED_LOGITS = 3
"""Float32 blocks of logits that drawing a token keeps for each row."""


def head_width(config: PretrainedConfig) -> int:
    """Width of an attention head."""
    text = config.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def cache_bytes_per_token(config: PretrainedConfig, *, size: int) -> int:
    """Keys and values of one token in all layers; `size`: bytes of an element."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 2 * size * text.num_hidden_layers * heads * head_width(config)


def activation_bytes_per_token(
    config: PretrainedConfig, *, half: bool, rounded: bool | None, half_weights: bool = False
) -> int:
    """Bytes that a token keeps in one layer for the backward: vectors of the width and of the inner width.

    Args:
        config: of the model.
        half: whether autocast computes in half precision.
        rounded: whether `ProductPrecision` rounds products to bfloat16; None where it is not used.
        half_weights: whether the residual stream is in half precision, as the weights under an adapter are.
    """
    text = config.get_text_config()
    width = text.hidden_size
    inner = _widest(getattr(text, "intermediate_size", None)) or 4 * width
    if rounded is not None:  # counted on Llama's layers; see models.lean for what they keep
        return 25 * width + 4 * inner if rounded else 31 * width + 12 * inner
    attention = text.num_attention_heads * head_width(config)
    experts = 0
    chosen = getattr(text, "num_experts_per_tok", None)
    if chosen:  # each keeps its rows of inputs and outputs; gates, their activations, and what these are multiplied to
        expert = _widest(getattr(text, "moe_intermediate_size", None)) or inner
        experts = chosen * (2 * width + 4 * expert)
        shared = (getattr(text, "n_shared_experts", None) or 0) * expert
        inner = getattr(text, "shared_expert_intermediate_size", None) or shared
    if not half:
        return 24 * width + 20 * attention + 16 * inner + 4 * experts
    # Autocast: in each of two norms the input in float32, before and after it is divided by its size, and a rounded
    # copy of the output for each of five products; half-precision inputs are wide once, as the norm's own copy. In
    # attention rounded queries, keys and values for every head, and outputs before and after they are put in order.
    # The products of experts are left out by autocast: they are in the type of the weights.
    dense = (18 if half_weights else 26) * width + 10 * attention + 8 * inner
    return dense + (2 if half_weights else 4) * experts


def _widest(inner: int | Sequence[int] | None) -> int | None:
    """An inner width; the largest where layers have their own, as in Gemma 3n."""
    return max(inner) if isinstance(inner, (list, tuple)) else cast("int | None", inner)


def encoder_patches(config: PretrainedConfig, numbers: int) -> int:
    """Patches that the encoder makes of so many numbers of pixels; 0 where the configuration has no size of a patch."""
    vision = getattr(config, "vision_config", None)
    size = getattr(vision, "patch_size", None)
    if not size:
        return 0
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return math.ceil(numbers / (3 * height * width * (getattr(vision, "temporal_patch_size", None) or 1)))


def encoder_bytes_per_patch(linears: Sequence[nn.Linear], *, trained: bool) -> int:
    """Bytes that a patch takes in an encoder of images: kept for the backward, or by the largest layer for a moment.

    For the backward inputs and outputs of all its linear layers are counted: in those of SigLIP, CLIP and Qwen2.5-VL
    norms, attention and activations keep 0.8 to 1.2 times as much. Without one SigLIP and CLIP were measured to take 4
    to 5 times the inputs and outputs of their widest layer, and Qwen2.5-VL 9 times.

    Args:
        linears: the linear layers outside the language model.
        trained: whether any of its weights is.
    """
    widths = [linear.in_features + linear.out_features for linear in linears]
    return 4 * sum(widths) if trained else 4 * FROZEN_COPIES * max(widths, default=0)


def default_tokens_per_pack(
    config: PretrainedConfig, device: torch.device, *, half: bool, rounded: bool | None, budget: int | None = None
) -> int:
    """Tokens whose activations take what one pack may: `budget` bytes, or what the kind of device usually has."""
    a_layer = activation_bytes_per_token(config, half=half, rounded=rounded)
    a_token = config.get_text_config().num_hidden_layers * a_layer
    if budget is None:
        return max(LEAST_PACK, kind_of(device).activation_bytes // a_token)
    return max(LEAST_PACK, round_down(max(budget, 0) // a_token))


def fitting_tokens_per_pack(
    policy: nn.Module, config: PretrainedConfig, device: torch.device, *, half: bool, rounded: bool | None, copies: bool
) -> int:
    """`default_tokens_per_pack` for the memory that a GPU has left beside the loaded policy and `bytes_to_come`."""
    free = free_bytes(device)
    budget = None if free is None else int(USED_SHARE * (free - bytes_to_come(policy, half=half, copies=copies)))
    return default_tokens_per_pack(config, device, half=half, rounded=rounded, budget=budget)


def bytes_to_come(policy: nn.Module, *, half: bool, copies: bool) -> int:
    """Bytes that training adds to the loaded weights: gradients, Adam's states, autocast's casts, a reference.

    `copies`: whether the policy is compared with a reference, which is a copy unless an adapter is trained.
    """
    parameters = list(policy.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    weights = sum(p.nbytes for p in parameters)
    casts = 2 * trained if half else 0
    return 12 * trained + casts + (weights if copies and not isinstance(policy, PeftModel) else 0)


def round_down(count: int) -> int:
    """Round to two binary digits, so that small changes of free memory do not change the packs.

    >>> [round_down(n) for n in (8885, 1000, 127, 3)]
    [8192, 768, 96, 3]
    """
    unit = 1 << max(0, count.bit_length() - 2)
    return count // unit * unit


def needs_checkpointing(longest: int, tokens_per_pack: int) -> bool:
    """Whether the activations of one rollout of `longest` tokens may be too many, so that they are recomputed."""
    return longest > 4 * tokens_per_pack


@contextlib.contextmanager
def explained(doing: str, held: Callable[[], dict[str, int]], fix: Callable[[], str]) -> Iterator[None]:
    """Raise a `ModelError` in place of torch's out-of-memory error.

    Args:
        doing: `sampling` or `training`.
        held: bytes by what holds them; asked for when it is too late.
        fix: what to lower.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        parts = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in held().items() if size)
        device = ""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            device = f"of the device's {total / 1e9:.1f} GB {free / 1e9:.1f} are free (other processes count, too); "
        reason = str(error).splitlines()[0][:200]
        raise ModelError(
            f"The memory of the device was used up while {doing}. Held all the time: {parts}; {device}the "
            f"rest was needed for {doing} itself. torch says: {reason}",
            code="M024",
            fix=fix(),
            doing=doing,
            parts=parts,
            device=device,
            reason=reason,
        ) from error


def held_by(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states on this device."""
    parameters = list(model.parameters())
    states = optimizer.state.values() if optimizer is not None else ()
    return {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "optimizer states": sum(x.nbytes for state in states for x in state.values() if isinstance(x, Tensor)),
    }


def smaller_packs(tokens_per_pack: int, *, checkpointing: bool) -> str:
    """Setting to type when activations did not fit."""
    if tokens_per_pack >= 2 * LEAST_PACK:
        return as_line("tokens_per_pack", tokens_per_pack // 2)
    return as_line("max_completion_length", "a smaller number") if checkpointing else "gradient_checkpointing: true"


def fewer_rows(batch: int, group: int) -> str:
    """Setting to type when too many completions were sampled at once."""
    smaller = batch // 2 // group * group
    if smaller:
        return as_line("per_device_train_batch_size", smaller) + ", with gradient_accumulation_steps twice as large"
    return as_line("num_generations", max(2, group // 2))
