"""Memory of a run at its worst case, from the model's config and the run's arguments: no weight is loaded.

    estimate = estimate_memory(config, args, prompt_tokens=300)
    estimate.fits, estimate.peak_bytes, estimate.rows()

The worst case is the longest prompt with completions of full length. Parameters are counted on a model without storage
(torch's meta device). Activations are counted per token and layer (`models.memory`), as `tokens_per_pack` is chosen.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from podium.engines.live.engine import PREFILL_TOKENS
from podium.isolation.machine import group_memory
from podium.models.devices import DeviceKind, kind_of
from podium.models.loading import freeze_named
from podium.models.memory import (
    LEAST_PACK,
    SAMPLED_LOGITS,
    USED_SHARE,
    activation_bytes_per_token,
    cache_bytes_per_token,
    default_tokens_per_pack,
    encoder_bytes_per_patch,
    encoder_patches,
    head_width,
    needs_checkpointing,
)
from podium.models.precision import NARROW, can_pack, families_of, rounds_products
from podium.models.stored import auto_class, freeze_outside, made_whole, only_inside, outside
from podium.trainer.assembly import plan_of
from podium.trainer.config import GRPOConfig
from podium.trainer.planned import gpu_planned, launch_planned
from podium.trainer.processes import divides_weights, num_shards, zero_stage
from podium.trainer.settings import half_dtype

KEPT_BESIDES = 1.15
"""Activations over those that `activation_bytes_per_token` counts, on a CPU: gathered keys and values, masks, graph
nodes. For a GPU see `gathered_bytes_per_token`."""

HEAD_BLOCKS = 3
"""Blocks of logits alive at once: the logits, their gradient, and its rounded copy."""

UNLOOKED_HEAD_BLOCKS = 3.25
"""The same where the host does not look whether they are finite: logits, exponentials, these times the logits, and a
byte an element that says which exponentials are 0."""

OPTIMIZER_BYTES: Mapping[str, int] = {
    "adamw_torch": 8,
    "adamw_torch_fused": 8,
    "adamw_apex_fused": 8,
    "adamw_8bit": 2,
    "adamw_bnb_8bit": 2,
    "paged_adamw_8bit": 2,
    "paged_adamw_32bit": 8,
    "lion_32bit": 4,
    "lion_8bit": 1,
    "adagrad": 4,
    "rmsprop": 4,
    "sgd": 0,
}
"""Bytes of optimizer state a trained parameter; others count as Adam's, but Adafactor's, which are nearly none."""

ACTIVATIONS = "activations of a pack"
"""Name of the last part."""

LARGEST = 1 << 16
"""End of the search for the largest setting that fits."""

ZERO_BUCKET = 500_000_000
"""Gradients that DeepSpeed reduces at once, by its default."""

ROUNDED_BYTES: Mapping[int, float] = {4: 0.5 + 4 / 64, 8: 1.0}
"""Bytes of a weight in so many bits, by bitsandbytes: 64 weights of 4 bits share a scale in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A model in numbers."""

    num_parameters: int
    num_trained: int
    num_wide: int
    """Parameters of the linear layers whose products may be rounded: each has a bfloat16 copy then."""
    weight_bytes: int
    """Bytes of all parameters in the type they are loaded in."""
    trained_bytes: int
    merged_bytes: int
    """Weights that an adapter changes as one tensor, as PEFT does with experts: a layer keeps a changed copy."""
    num_layers: int
    adapter_width: int
    """Outputs of all adapter matrices: each is kept in float32 beside the layer's own."""
    vocabulary: int
    cache_bytes_per_token: int
    """Keys and values of one token in all layers, in float32 on a CPU, else as attention computes."""
    gathered_share: float
    """Share of the weights that is whole at once in a forward or backward of weights divided over processes: two
    layers, and all that is in none."""
    patch_bytes: int
    """Bytes that a patch of an image takes in the encoder, at its peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The largest batch that goes through the model at once."""

    prompts: int
    """Prompts of a generation round on this process."""
    num_generations: int
    prompt_tokens: int
    completion_tokens: int
    tokens_per_pack: int
    beginnings_per_pack: int
    checkpointing: bool
    pixels: int
    """Numbers that describe the images of a prompt."""

    @property
    def encoded_prompts(self) -> int:
        """Prompts whose images are encoded at once: those of a pack, or those that are begun together in sampling."""
        packed = -(-self.pack_tokens // (self.prompt_tokens + self.completion_tokens - 1))
        return min(self.prompts, max(packed, PREFILL_TOKENS // self.prompt_tokens, 1))

    @property
    def pack_tokens(self) -> int:
        """Input tokens of the largest pack: as in `packing`, it may hold several times the tokens of a prompt."""
        share = self.prompts * (self.prompt_tokens + self.num_generations * (self.completion_tokens - 1))
        rollout = self.prompt_tokens + self.completion_tokens
        return min(share, max(self.tokens_per_pack, self.beginnings_per_pack * self.prompt_tokens, rollout))

    @property
    def predicting_tokens(self) -> int:
        """Tokens of a pack that predict a trained token: those of completions, and the last one of each prompt."""
        completions = self.num_generations * (self.completion_tokens - 1)
        return -(-self.pack_tokens * (completions + 1) // (completions + self.prompt_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one process at its peak, part by part."""

    processes: int
    num_parameters: int
    num_trained: int
    runtime_bytes: int
    """Bytes of the process before it loads a model, and of all that is not counted."""
    weights_bytes: int
    rounded_bytes: int
    """Copies of float32 weights in half precision: our own (CPU, `product_precision`), or autocast's, which live as
    long as its context: that of sampling, and that of all packs of a step."""
    reference_bytes: int
    copy_bytes: int
    """The copy that `async_rollouts` samples from, on this device."""
    gradients_bytes: int
    buckets_bytes: int
    """What data-parallel gradients are reduced in, all the time."""
    optimizer_bytes: int
    sampling_bytes: int
    """Cache, logits, packed weights and gathered weights while sampling: not at the same time as the activations, but
    for `overlaps`."""
    activations_bytes: int
    """Activations that one pack keeps for its backward, the head's blocks of logits, and gathered layers."""
    images_bytes: int
    """Pixels of a round, where the device has them all, and what the encoder takes."""
    available_bytes: int | None
    """Memory that is left for this process; None: unknown."""
    overlaps: bool
    """Whether this device samples while it trains (`async_rollouts`)."""
    keeps_gradients: bool
    """Whether they keep their memory from step to step (CPU)."""
    tokens_per_pack: int
    checkpointing: bool
    largest_num_generations: int | None = None
    """Largest group that fits with everything else as it is; None: nothing fits, or the device is unknown."""
    largest_tokens_per_pack: int | None = None
    """The same of `tokens_per_pack`."""

    @property
    def peak_bytes(self) -> int:
        """The sum, with the larger of sampling and training; with both where they overlap."""
        kept = self.gradients_bytes if self.keeps_gradients else 0
        both = self.sampling_bytes + kept, self.gradients_bytes + self.activations_bytes
        fixed = sum(self.parts.values()) - self.gradients_bytes - self.sampling_bytes - self.activations_bytes
        return fixed + (sum(both) - kept if self.overlaps else max(both))

    @property
    def fits(self) -> bool:
        """Whether the device has that much; True where that is unknown."""
        return self.available_bytes is None or self.peak_bytes <= self.available_bytes

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes by kind of tensor. `peak_bytes` says which of them are there at the same time."""
        return {
            "runtime": self.runtime_bytes,
            "weights": self.weights_bytes,
            "rounded copies of weights": self.rounded_bytes,
            "reference model": self.reference_bytes,
            "copy to sample from": self.copy_bytes,
            "gradients": self.gradients_bytes,
            "buckets of gradients": self.buckets_bytes,
            "optimizer": self.optimizer_bytes,
            "sampling (cache, logits, copies of weights)": self.sampling_bytes,
            "images (pixels and their encoder)": self.images_bytes,
            ACTIVATIONS: self.activations_bytes,
        }

    def rows(self) -> list[tuple[str, str]]:
        """A table of parts and sizes."""
        parts = [("parameters", f"{self.num_parameters:,}, of which trained {self.num_trained:,}")]
        parts += [(name, gigabytes(size)) for name, size in self.parts.items() if name != ACTIVATIONS]
        parts += [
            (ACTIVATIONS, f"{gigabytes(self.activations_bytes)} ({self.tokens_per_pack:,} tokens)"),
            ("peak", gigabytes(self.peak_bytes)),
        ]
        if self.available_bytes is not None:
            parts.append(("the device has", gigabytes(self.available_bytes)))
            largest_settings = {
                "largest num_generations": self.largest_num_generations,
                "largest tokens_per_pack": self.largest_tokens_per_pack,
            }
            for name, most in largest_settings.items():
                shown = "none fits"
                if most is not None:
                    shown = f"{most:,} or more" if most >= LARGEST else f"{most:,}"
                parts.append((name, shown))
        return [(what, much) for what, much in parts if much != "0.0 GB"]


def gigabytes(count: int) -> str:
    """
    >>> gigabytes(1_540_000_000)
    '1.5 GB'
    """
    return f"{count / 1e9:.1f} GB"


def estimate_memory(
    config: PretrainedConfig,
    args: GRPOConfig,
    *,
    prompt_tokens: int,
    pixels: int = 0,
    peft_config: Any = None,
    bits: int = 0,
    available_bytes: int | None = None,
    sizes: Sizes | None = None,
) -> MemoryEstimate:
    """The peak of one process, and what would fit.

    Args:
        config: of the model; no weight is looked at.
        args: the run's.
        prompt_tokens: of the longest prompt; 0: not known.
        pixels: numbers that describe the images of a prompt, the most that one has; 0: there are none.
        peft_config: of the adapter to train; None: all weights.
        bits: of the linear layers' weights under that adapter, where they are rounded (QLoRA): 4 or 8.
        available_bytes: what the process may take; None: what the device has free now.
        sizes: of the model, where it was counted before.
    """
    kind = kind_of(args.device)
    rounded = _rounds(args)
    sizes = sizes or model_sizes(config, args, peft_config, bits=bits)
    free = available_memory(args)
    available = free if available_bytes is None else available_bytes
    divided = divides_weights(args)
    parts = num_shards(args)
    halved = _halves(args)
    share = process_share(args, sizes, adapter=peft_config is not None)
    gathered = share.gathered_bytes
    budget = pack_budget(args, sizes, peft_config, None if divided else free)
    load = worst_case(config, args, max(prompt_tokens, 1), pixels=pixels, rounded=rounded, budget=budget)
    served = args.use_vllm and args.vllm_mode == "server"
    elsewhere = served or (args.rollout_device is not None and not kind.host_memory)
    overlaps = bool(args.async_rollouts) and not elsewhere and not args.use_vllm
    copy_bytes = 0
    if overlaps:
        # What is sampled from, and the weights of the rounds that wait for it.
        copy_bytes = args.async_rollouts * sizes.trained_bytes + (2 * sizes.num_wide if rounded else 0)

    def estimate(load: Load) -> MemoryEstimate:
        return MemoryEstimate(
            processes=args.world_size,
            num_parameters=sizes.num_parameters,
            num_trained=sizes.num_trained,
            runtime_bytes=kind.runtime_bytes + kind.working_bytes,
            weights_bytes=share.weights_bytes,
            rounded_bytes=2 * sizes.num_wide if rounded or (_casts(args) and not divided and not halved) else 0,
            reference_bytes=sizes.weight_bytes // parts if args.beta and peft_config is None else 0,
            copy_bytes=copy_bytes,
            gradients_bytes=share.gradients_bytes,
            buckets_bytes=share.buckets_bytes,
            optimizer_bytes=share.optimizer_bytes,
            sampling_bytes=0 if elsewhere else gathered + sampling_bytes(sizes, load, kind, rounded=bool(rounded)),
            activations_bytes=activations_bytes(config, args, sizes, load, rounded=rounded)
            + int(gathered * sizes.gathered_share),
            images_bytes=images_bytes(config, sizes, load, kind),
            available_bytes=available,
            overlaps=overlaps,
            keeps_gradients=kind.host_memory,
            tokens_per_pack=load.tokens_per_pack,
            checkpointing=load.checkpointing,
        )

    return with_largest(estimate, load)


def with_largest(estimate: Callable[[Load], MemoryEstimate], load: Load) -> MemoryEstimate:
    """The estimate of a load, with the largest settings that fit where the device's memory is known."""
    here = estimate(load)
    if here.available_bytes is None:
        return here
    return dataclasses.replace(
        here,
        largest_num_generations=largest(lambda n: estimate(dataclasses.replace(load, num_generations=n)).fits, first=2),
        largest_tokens_per_pack=largest(
            lambda n: estimate(dataclasses.replace(load, tokens_per_pack=n)).fits, first=LEAST_PACK
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessShare:
    """Bytes of weights and training state that one process holds: all of them unless FSDP2 or ZeRO divides them."""

    weights_bytes: int
    gradients_bytes: int
    buckets_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    """All weights, as a forward gathers them where they are divided; else 0."""


def process_share(args: GRPOConfig, sizes: Sizes, *, adapter: bool) -> ProcessShare:
    """The division of `args` over processes: FSDP2 divides everything, ZeRO what its stage says, DDP nothing.

    An adapter under FSDP2 is whole on every process; only its base is divided. DDP accumulates the gradients of all
    packs but a step's last beside the buckets that it reduces.
    """
    divided = divides_weights(args)
    stage = zero_stage(args)
    copied = sizes.trained_bytes if divided and adapter else 0
    parts = args.world_size if stage is not None else 1
    if divided and not copied:
        parts = num_shards(args)
    gathered = 0
    if divided:
        gathered = 2 * sizes.num_parameters if _casts(args) else sizes.weight_bytes
    trained = sizes.trained_bytes
    masters = 0
    if _halves(args):
        trained = 2 * sizes.num_trained
        masters = sizes.trained_bytes
    buckets = 0
    if stage is not None:
        buckets = trained * min(sizes.num_trained, ZERO_BUCKET) // max(sizes.num_trained, 1)
    elif args.world_size > 1 and not divided:
        buckets = trained
    weights = sizes.weight_bytes - sizes.trained_bytes + trained
    return ProcessShare(
        weights_bytes=copied + (weights - copied) // num_shards(args),
        gradients_bytes=trained // (1 if stage == 1 else parts),
        buckets_bytes=buckets,
        optimizer_bytes=(optimizer_bytes(args, sizes) + masters) // parts,
        gathered_bytes=gathered,
    )


def pack_budget(args: GRPOConfig, sizes: Sizes, peft_config: Any, free: int | None) -> int | None:
    """Bytes that a pack's activations may take of a GPU's free memory, as `fitting_tokens_per_pack` shares it out."""
    if free is None or kind_of(args.device).host_memory:
        return None
    states = sizes.trained_bytes + optimizer_bytes(args, sizes) + (2 * sizes.num_wide if _casts(args) else 0)
    copies = 2 if args.beta and peft_config is None else 1
    return int(USED_SHARE * (free - copies * sizes.weight_bytes - states))


def worst_case(
    config: PretrainedConfig,
    args: GRPOConfig,
    prompt_tokens: int,
    *,
    pixels: int = 0,
    rounded: bool | None,
    budget: int | None = None,
) -> Load:
    """The largest load of a step: longest prompts, completions of full length; `budget`: bytes that a pack may take."""
    plan = plan_of(args)
    half = half_dtype(args) is not None
    tokens_per_pack = args.tokens_per_pack or default_tokens_per_pack(
        config, args.device, half=half, rounded=rounded, budget=budget
    )
    checkpointing = args.gradient_checkpointing
    if checkpointing is None:
        longest = args.max_completion_length + (args.max_prompt_length or 0)
        checkpointing = needs_checkpointing(longest, tokens_per_pack)
    return Load(
        prompts=max(1, plan.prompts_per_round // plan.ranks),
        num_generations=plan.num_generations,
        prompt_tokens=prompt_tokens,
        completion_tokens=args.max_completion_length,
        tokens_per_pack=tokens_per_pack,
        beginnings_per_pack=kind_of(args.device).beginnings_per_pack,
        checkpointing=checkpointing,
        pixels=pixels,
    )


def _rounds(args: GRPOConfig) -> bool | None:
    """Whether products are rounded; None on devices where autocast decides."""
    if kind_of(args.device).autocast:
        return None
    return not divides_weights(args) and rounds_products(args.product_precision)


def _casts(args: GRPOConfig) -> bool:
    """Whether autocast rounds float32 weights."""
    return kind_of(args.device).autocast and half_dtype(args) is not None


def _halves(args: GRPOConfig) -> bool:
    """Whether DeepSpeed keeps trained weights and gradients in half precision, and float32 weights in its optimizer.

    As in ZeRO (arXiv:1910.02054), section 3.1.
    """
    return zero_stage(args) is not None and _casts(args)


def model_sizes(config: PretrainedConfig, args: GRPOConfig, peft_config: Any = None, *, bits: int = 0) -> Sizes:
    """Counted on a model without storage. `bits` as in `estimate_memory`."""
    model = meta_model(config, args, peft_config)
    parameters = list(model.parameters())
    rounded: set[int] = set()
    if bits:  # bitsandbytes rounds the weights of linear layers that are not trained, but for the head
        head = model.get_output_embeddings()  # type: ignore[operator]
        linears = [module for module in model.modules() if type(module) is nn.Linear and module is not head]
        rounded = {id(module.weight) for module in linears if not module.weight.requires_grad}
    trained = [p for p in parameters if p.requires_grad]
    adapter = {id(p) for name, p in model.named_parameters() if ".lora_" in name}  # of experts: as wide as a layer
    wide = [member.weight for family in families_of(model) for member in family.members]
    text = config.get_text_config()
    weight = max(parameters, key=nn.Parameter.numel)
    cached = 4
    if kind_of(args.device).half_attention:
        cached = 2 if _casts(args) else weight.element_size()
    changed: list[Any] = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    layers = getattr(model, "_no_split_modules", None) or ()
    layer_bytes = [_bytes(module) for module in model.modules() if type(module).__name__ in layers]
    encoder = outside(model)
    places = {name.rpartition(".")[0] for name in encoder}
    linears = [x for name, x in model.named_modules() if name in places and isinstance(x, nn.Linear)]
    whole = _bytes(model) - sum(layer_bytes) + 2 * max(layer_bytes, default=0)
    return Sizes(
        gathered_share=min(1.0, whole / _bytes(model)),
        patch_bytes=encoder_bytes_per_patch(linears, trained=any(p.requires_grad for p in encoder.values())),
        num_parameters=sum(p.numel() for p in parameters),
        num_trained=sum(p.numel() for p in trained),
        num_wide=sum(weight.numel() for weight in wide if id(weight) not in rounded | adapter),
        weight_bytes=sum(
            int(p.numel() * (ROUNDED_BYTES[bits] if id(p) in rounded else p.element_size())) for p in parameters
        ),
        trained_bytes=sum(p.numel() * p.element_size() for p in trained),
        merged_bytes=sum(module.get_param().nbytes for module in changed),
        num_layers=text.num_hidden_layers,
        adapter_width=sum(p.shape[0] for name, p in model.named_parameters() if "lora_B" in name),
        vocabulary=text.vocab_size,
        cache_bytes_per_token=cache_bytes_per_token(config, size=cached),
    )


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def meta_model(config: PretrainedConfig, args: GRPOConfig, peft_config: Any = None) -> nn.Module:
    """The model with its adapter, every tensor without storage."""
    frozen = (half_dtype(args) if peft_config is not None else None) or torch.float32
    dtype = (args.model_init_kwargs or {}).get("dtype") or frozen
    if isinstance(dtype, str):
        dtype = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"), made_whole():
        trusted = bool(args.trust_remote_code)
        model: Any = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trusted)
        if peft_config is not None:
            from peft import get_peft_model

            own = copy.deepcopy(peft_config)  # it writes names into it
            model = get_peft_model(model, own if args.train_image_encoder else only_inside(model, own))
    if not args.train_image_encoder:
        freeze_outside(model)
    freeze_named(model, args.frozen_parameters)
    return model


def optimizer_bytes(args: GRPOConfig, sizes: Sizes) -> int:
    """State of the optimizer, in the trained tensors' own type for Adam."""
    name = str(getattr(args.optim, "value", args.optim))
    if name == "adafactor":
        return sizes.num_trained // 256
    per_parameter = OPTIMIZER_BYTES.get(name, 8)
    return int(per_parameter * sizes.trained_bytes / 4) if per_parameter >= 4 else per_parameter * sizes.num_trained


def sampling_bytes(sizes: Sizes, load: Load, kind: DeviceKind, *, rounded: bool) -> int:
    """Keys and values of the running rows and their prompts, logits, and weights packed for sampling."""
    rows = min(load.prompts * load.num_generations, max(kind.max_rows, load.num_generations))
    prompts = -(-rows // load.num_generations)
    cached = rows * load.completion_tokens + prompts * load.prompt_tokens
    logits = SAMPLED_LOGITS * 4 * rows * sizes.vocabulary
    packed = 2 * sizes.num_wide if rounded and can_pack(torch.ones(NARROW, NARROW, dtype=torch.bfloat16)) else 0
    return cached * sizes.cache_bytes_per_token + logits + packed


def images_bytes(config: PretrainedConfig, sizes: Sizes, load: Load, kind: DeviceKind) -> int:
    """Pixels in float32, of all prompts of a round in the host's memory and of a pack on a GPU, and their encoder's."""
    kept = load.encoded_prompts + (load.prompts if kind.host_memory else 0)
    return 4 * load.pixels * kept + encoder_patches(config, load.pixels) * load.encoded_prompts * sizes.patch_bytes


def activations_bytes(
    config: PretrainedConfig, args: GRPOConfig, sizes: Sizes, load: Load, *, rounded: bool | None
) -> int:
    """Activations that a pack keeps for its backward; under checkpointing a layer's input each, and one layer in full.

    The thin products of an adapter keep their inputs in float32, whatever the wide ones do.
    """
    kind = kind_of(args.device)
    tokens = load.pack_tokens
    if rounded and sizes.num_trained < sizes.num_parameters / 2:
        rounded = False
    one_layer: float = activation_bytes_per_token(
        config, half=half_dtype(args) is not None, rounded=rounded, half_weights=not sizes.num_wide
    )
    if kind.autocast:
        one_layer += gathered_bytes_per_token(config, args, load)
    else:
        one_layer = KEPT_BESIDES * one_layer + 4 * sizes.adapter_width / sizes.num_layers
    inputs = sizes.num_layers * 4 * config.get_text_config().hidden_size
    merged = sizes.merged_bytes // (sizes.num_layers if load.checkpointing else 1)
    head = max(kind.logits_bytes, 64 * sizes.vocabulary)
    if kind.immediate:
        kept = inputs + one_layer if load.checkpointing else sizes.num_layers * one_layer
        return int(tokens * kept) + merged + HEAD_BLOCKS * head
    logits = UNLOOKED_HEAD_BLOCKS * min(head, 4 * load.predicting_tokens * sizes.vocabulary)
    if load.checkpointing:  # the head is done when the first layer is computed again
        return int(tokens * inputs + max(tokens * one_layer + merged, logits))
    return int(tokens * sizes.num_layers * one_layer + merged + logits)


def gathered_bytes_per_token(config: PretrainedConfig, args: GRPOConfig, load: Load) -> float:
    """Bytes kept per completion token and layer for its prompt, where a bucket of rows is one attention call.

    Every row gathers its prompt's keys and values for every head, and has a mask over them, of which the
    memory-efficient kernel keeps a copy of its own in every layer unless the number of keys is a multiple of eight.
    """
    width = config.get_text_config().num_attention_heads * head_width(config)
    size = 4 if half_dtype(args) is None else 2
    gathered = 2 * width * load.prompt_tokens / load.completion_tokens
    return size * (gathered + load.prompt_tokens + load.completion_tokens)


def largest(fits: Callable[[int], bool], *, first: int) -> int | None:
    """The largest of first, 2 first, 4 first, ... that fits; None: not even the first.

    >>> largest(lambda count: count <= 100, first=3)
    96
    """
    best = None
    while first <= LARGEST and fits(first):
        best = first
        first = 2 * first
    return LARGEST if first > LARGEST else best


def available_memory(args: GRPOConfig) -> int | None:
    """Bytes that each process of a run could take here now; those on a CPU share its memory. None: unknown."""
    gpu = gpu_planned()
    if gpu is not None:
        return gpu.num_bytes
    if args.device.type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    if args.device.type != "cpu":
        return None
    import psutil

    free = int(psutil.virtual_memory().available)
    left = group_memory()
    launch = launch_planned()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if launch is not None:
        here = -(-launch.processes // launch.machines)
    return (free if left is None else min(free, left)) // here
