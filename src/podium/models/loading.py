"""From what a user passes as `model` to a policy that can be trained, and its tokenizer."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from podium.errors import ConfigError, ModelError, way_on
from podium.errors.texts import listed, quoted
from podium.models.adapters import put_on
from podium.models.builtin import resolve_model
from podium.models.check import check_model_name, not_loadable, own_code, read_config, reading
from podium.models.forward import base_model, is_quantized
from podium.models.images import ImageProcessor
from podium.models.reference import add_reference_adapter, has_reference_adapter
from podium.models.stored import freeze_outside, judged, load, only_inside, outside, remember, with_ignored

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """Settings of loading weights for a model that is given by name."""

    init_kwargs: dict[str, Any]
    """To `from_pretrained`. A `dtype` in it is that of all weights."""
    frozen_dtype: torch.dtype = torch.float32
    """Type of the frozen weights under an adapter, unless a `dtype` is given; trained weights are float32."""
    device: torch.device | None = None
    """Device onto which weights are loaded directly; None: the CPU, from which they are sharded or moved."""
    trust_remote_code: bool = False
    quantization_config: Any = None
    peft_config: PeftConfig | None = None
    needs_reference: bool = False
    gradient_checkpointing: bool = False
    disable_dropout: bool = False
    cast_head_to_fp32: bool = False
    frozen_parameters: str | None = None
    train_image_encoder: bool = False
    """Whether what is outside the language model is trained, too."""
    """Regular expression of the names of parameters that are not trained."""
    ignored: frozenset[str] = frozenset()
    """Codes of errors in the weights that the user overrules."""


def model_name(model: str | nn.Module) -> str:
    """A short name for output folders and messages."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "") or "model"
    return str(name).rstrip("/").split("/")[-1].removeprefix("builtin:")


def load_config(model: str | PreTrainedModel, settings: LoadSettings) -> PretrainedConfig:
    """The model's configuration, before any weight is loaded."""
    if not isinstance(model, str):
        return model.config
    check_model_name(model, needs_tokenizer=False, trust_remote_code=settings.trust_remote_code)
    revision = settings.init_kwargs.get("revision")
    return read_config(resolve_model(model), revision=revision, trust_remote_code=settings.trust_remote_code)


def check_quantization(config: PretrainedConfig, settings: LoadSettings, device: torch.device) -> None:
    """Raises where rounded weights are asked for in a way, or on a machine, that cannot have them."""
    kwargs = settings.init_kwargs
    flat = [name for name in ("load_in_4bit", "load_in_8bit") if name in kwargs]
    if flat:
        raise ConfigError(
            f"model_init_kwargs has {flat[0]}, which transformers 5 does not take there any more.",
            fix=f"Pass quantization_config=BitsAndBytesConfig({flat[0]}=True) to the trainer; in a recipe "
            f"{flat[0]}: true is a key of its own.",
            settings=("model_init_kwargs",),
            first_flat=flat[0],
        )
    if settings.quantization_config is not None and "quantization_config" in kwargs:
        raise ConfigError(
            "quantization_config is given twice: to the trainer and in model_init_kwargs.",
            fix="Keep one.",
            settings=("model_init_kwargs",),
        )
    asked = settings.quantization_config or kwargs.get("quantization_config")
    asked = asked or getattr(config, "quantization_config", None) or {}
    values = asked if isinstance(asked, dict) else asked.to_dict()
    if bits := bits_of(values):
        for error in rounding_errors(bits, device):
            raise error


def rounding_errors(bits: int, device: torch.device) -> Iterator[ModelError]:
    """Errors of weights in so many bits on this machine."""
    if importlib.util.find_spec("bitsandbytes") is None:
        yield ModelError(
            f"Weights in {bits} bits need bitsandbytes, which is not installed.",
            code="M015",
            fix="Type: pip install 'podium[quant]'",
            settings=(f"load_in_{bits}bit",),
            bits=bits,
        )
    if bits == 8 and device.type == "cpu":
        yield ModelError(
            "Weights in 8 bits are no case for a CPU: bitsandbytes samples there by other products than "
            "it trains with.",
            code="M015",
            fix="Load it in 4 bits, which a CPU can, or as it is.",
            settings=(f"load_in_{bits}bit",),
        )


def bits_of(quantization: Mapping[str, Any]) -> int:
    """Bits of bitsandbytes' settings: 4 or 8; 0 for those of another method.

    >>> bits_of({"load_in_4bit": True})
    4
    """
    return next((bits for bits in (4, 8) if quantization.get(f"load_in_{bits}bit")), 0)


SIDES = ("padding_side", "truncation_side")
"""Settings of a tokenizer that are `left` while it generates, and saved as they were in its own file."""


def load_tokenizer(model: str | PreTrainedModel, tokenizer: Any, settings: LoadSettings) -> PreTrainedTokenizerBase:
    """The tokenizer passed in, or in a processor, or the model's own; with a pad token (its end token if it has none).

    Raises:
        ModelError: a model without a name, code of its own that is not trusted, files that cannot be read, or no pad
            token and no end token.
    """
    if tokenizer is None:
        source = resolve_model(model) if isinstance(model, str) else model.config._name_or_path
        if not source:
            raise ModelError(
                "The model has no name to load a tokenizer from.", fix="Pass processing_class=your_tokenizer."
            )
        own = {"revision": settings.init_kwargs.get("revision"), "trust_remote_code": settings.trust_remote_code}
        tokenizer = read_tokenizer(source, **own)
        tokenizer.podium_stored = {name: tokenizer.init_kwargs.get(name) for name in SIDES}
        for name in SIDES:
            setattr(tokenizer, name, "left")
    if isinstance(tokenizer, ProcessorMixin) and hasattr(tokenizer, "tokenizer"):
        processor = tokenizer
        template = getattr(processor, "chat_template", None)
        tokenizer = processor.tokenizer
        tokenizer.podium_processor = processor  # to be saved with it
        tokenizer.chat_template = tokenizer.chat_template or template
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"processing_class must be a tokenizer, not a {type(tokenizer).__name__}.")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                "The tokenizer has neither a pad token nor an end token.",
                code="M006",
                fix='write "eos_token": "..." into tokenizer_config.json of the model; in Python: set '
                "tokenizer.eos_token",
            )
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.podium_stored = {**getattr(tokenizer, "podium_stored", {}), "pad_token": None}
    return tokenizer


def image_processor(
    config: PretrainedConfig, model: str | PreTrainedModel | None, given: Any, settings: LoadSettings
) -> ImageProcessor | None:
    """The processor that was passed in, or the model's own; None where the model reads text alone.

    The model's own is loaded when it is first needed; that raises `ModelError` where there is none, or where it needs
    a package that is not installed.
    """
    placeholder = getattr(config, "image_token_id", None)
    if placeholder is None or config.get_text_config() is config:
        return None
    if isinstance(given, ProcessorMixin):
        return ImageProcessor(lambda: given, int(placeholder))
    source = resolve_model(model) if isinstance(model, str) else config._name_or_path
    own = {"revision": settings.init_kwargs.get("revision"), "trust_remote_code": settings.trust_remote_code}
    return ImageProcessor(functools.cache(lambda: read_processor(source, **own)), int(placeholder))


def read_processor(source: str, **settings: Any) -> ProcessorMixin:
    """The processor in a model's files. Raises `ModelError`."""
    try:
        processor = AutoProcessor.from_pretrained(source, **settings)
    except Exception as error:  # each family fails in its own way
        missing = "torchvision" in str(error) and importlib.util.find_spec("torchvision") is None
        raise ModelError(
            f"{source}: its processor of images cannot be read ({quoted(error)}).",
            code="M003",
            fix="pip install torchvision" if missing else "copy its files again, or pass `processing_class=` in Python",
            model=source,
            error=error,
        ) from error
    if not isinstance(processor, ProcessorMixin):
        raise ModelError(
            f"{source}: no processor of images is among its files.",
            code="M003",
            fix="copy preprocessor_config.json from the original model, or pass `processing_class=` in Python",
            model=source,
        )
    return processor


def read_tokenizer(source: str, **settings: Any) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's files. Raises `ModelError` where it cannot be read, or needs code that comes along."""
    with reading(
        lambda line: ModelError(
            f"{source}: its tokenizer cannot be read ({line}).",
            code="M003",
            fix="Copy the tokenizer's files from the original model, or pass `processing_class=` in Python.",
            model=source,
            line=line,
        )
    ):
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **settings)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise own_code(f"The tokenizer of {source}") from error
        values = {"model_max_length": (int, float), "chat_template": (str, dict, type(None))}
        for name, kinds in values.items():
            value = getattr(tokenizer, name, None)
            if not isinstance(value, kinds):
                raise ModelError(
                    f"{source}: `{name}` of its tokenizer is {value!r}, which is no value that it can have.",
                    code="M003",
                    fix="correct it in tokenizer_config.json, or copy that file again from the original model",
                    model=source,
                    name=name,
                    value=value,
                )
        tokenizer("1+1=")  # some settings are first used here
        tokenizer.convert_tokens_to_ids(tokenizer.all_special_tokens)
    return tokenizer


def freeze_named(model: nn.Module, pattern: str | None) -> None:
    """Freeze the parameters in whose names the regular expression is found; None: freeze nothing.

    Raises `ModelError` for no regular expression, one that is found in no name, or nothing left to train.
    """
    if pattern is None:
        return
    named = dict(model.named_parameters())
    try:
        found = _names_like(named, pattern)
    except re.error as error:
        raise ModelError(
            f"frozen_parameters: {pattern} is no regular expression ({quoted(error)}).",
            code="M020",
            fix="frozen_parameters: embed_tokens",
            settings=("frozen_parameters",),
            pattern=pattern,
            error=error,
        ) from None
    if not found:
        names = [*dict.fromkeys(map(_without_numbers, named))]
        raise ModelError(
            f"frozen_parameters: {pattern} is found in the name of no parameter; they are named {listed(names)}.",
            code="M020",
            fix="frozen_parameters: a part of one of these names, or leave it out",
            settings=("frozen_parameters",),
            pattern=pattern,
            names=names,
        )
    for name in found:
        named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ModelError(
            f"frozen_parameters: {pattern} is found in the name of every parameter that would be trained, "
            "and leaves none.",
            code="M020",
            fix="frozen_parameters: embed_tokens, or leave it out",
            settings=("frozen_parameters",),
            pattern=pattern,
        )


def _names_like(names: Iterable[str], pattern: str) -> set[str]:
    return {name for name in names if re.search(pattern, name)}


def _without_numbers(name: str) -> str:
    """A parameter's name as those of all layers have it.

    >>> _without_numbers("model.layers.12.mlp.up_proj.weight")
    'mlp.up_proj'
    """
    return re.sub(r"^.*\.\d+\.|\.weight$", "", name)


def should_train(policy: nn.Module, settings: LoadSettings, *, by_name: bool) -> frozenset[str]:
    """Names of the parameters that a run on this policy trains, whatever is frozen later.

    Those of the active adapter; or all, for a model given `by_name`; or what the caller left trainable. None of them is
    among the frozen parameters, or outside the language model unless that is trained, too.
    """
    left = set() if settings.train_image_encoder else set(outside(policy))
    frozen_parameters = settings.frozen_parameters
    parameters = dict(policy.named_parameters())
    if frozen_parameters is not None:
        left |= _names_like(parameters, frozen_parameters)
    named = {name: p for name, p in parameters.items() if p.is_floating_point() and name not in left}
    trained = {name for name, p in named.items() if p.requires_grad}
    if isinstance(policy, PeftModel):
        layers = [m for m in policy.modules() if isinstance(m, BaseTunerLayer)]
        counters = {
            counter for layer in layers for counter in layer.other_param_names
        }  # AdaLoRA's `ranknum` is a parameter
        mine = {
            name for name in named if f".{policy.active_adapter}." in f"{name}." and name.split(".")[-2] not in counters
        }
        return frozenset(trained | mine)
    return frozenset(named if by_name else trained)


def load_policy(model: str | PreTrainedModel | PeftModel, settings: LoadSettings) -> PreTrainedModel | PeftModel:
    """The model to train, with its adapter if one was asked for.

    Raises:
        ConfigError: an adapter that does not fit.
        ModelError: weights of another configuration, quantized ones without an adapter, or nothing to train.
    """
    _check_given(model, settings)
    frozen = settings.peft_config is not None
    policy = _from_name(model, settings, frozen=frozen) if isinstance(model, str) else _as_given(model)
    quantized = is_quantized(policy)
    if quantized and settings.peft_config is None and not isinstance(policy, PeftModel):
        raise ModelError(
            "Quantized weights cannot be trained themselves.",
            fix="Pass peft_config=LoraConfig(...) to train an adapter.",
        )
    if settings.peft_config is not None:
        config = settings.peft_config
        policy = _with_adapter(policy, config if settings.train_image_encoder else only_inside(policy, config))
    elif isinstance(policy, PeftModel) and settings.needs_reference and not has_reference_adapter(policy):
        add_reference_adapter(policy)
    if not settings.train_image_encoder and (count := freeze_outside(policy)) and not isinstance(model, str):
        what = "%s parameters outside the language model are frozen; train_image_encoder: true trains them."
        logger.warning(what, f"{count:,}")
    freeze_named(policy, settings.frozen_parameters)
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ModelError(
            "The model has no parameter to train: all of them are frozen.",
            fix="Load an adapter with PeftModel.from_pretrained(..., is_trainable=True), or pass "
            "peft_config=LoraConfig(...) for a new one.",
        )
    if isinstance(policy, PeftModel) and settings.gradient_checkpointing:
        policy.enable_input_require_grads()
    if quantized:
        keep_differentiable(policy)
    if settings.disable_dropout:
        disable_dropout(policy)
    if settings.cast_head_to_fp32:
        cast_head_to_fp32(policy)
    return policy


def load_to_sample(model: str, adapter: Path | None, settings: LoadSettings) -> PreTrainedModel | PeftModel:
    """A model that is only sampled from, with the adapter in a folder put on it. Raises as `put_on` does."""
    policy = _from_name(model, settings, frozen=adapter is not None)
    keep_differentiable(policy)
    if settings.cast_head_to_fp32:
        cast_head_to_fp32(policy)
    return policy if adapter is None else put_on(policy, adapter, settings.ignored)[0]


def _with_adapter(policy: PreTrainedModel, config: PeftConfig) -> PeftModel:
    try:
        return get_peft_model(policy, config)
    except ValueError as error:  # target_modules that name no layer: only the loaded model can tell
        layers = sorted({name.rsplit(".", 1)[-1] for name, m in policy.named_modules() if isinstance(m, nn.Linear)})
        raise ConfigError(
            f"The adapter does not fit this model: {quoted(error)} Its linear layers are {listed(layers)}; "
            'target_modules="all-linear" takes them all but the head.',
            error=error,
            layers=layers,
        ) from None


def _check_given(model: Any, settings: LoadSettings) -> None:
    if not isinstance(model, str):
        for name in ("model_init_kwargs", "quantization_config"):
            if getattr(settings, name.removeprefix("model_")):
                logger.warning("%s is ignored: the model is instantiated already.", name)
    if isinstance(model, PeftModel) and len(active := model.active_adapters) > 1:
        raise ConfigError(
            f"{listed(active)} are active in the model together; one adapter is trained.",
            fix="merge the others first with model.merge_and_unload(), or choose one with "
            f"model.set_adapter({active[0]!r})",
            active=active,
        )
    config = settings.peft_config
    if config is None:
        return
    if not isinstance(config, PeftConfig):
        kind = type(config).__name__
        raise TypeError(f"peft_config must be a PeftConfig such as peft.LoraConfig(...), not a {kind}.")
    if isinstance(model, PeftModel):
        raise ConfigError(
            "model is a PeftModel already and peft_config asks for another adapter.",
            fix="Pass one of the two: merge the first with model.merge_and_unload(), or leave peft_config out "
            "to train on.",
        )
    if not isinstance(model, str) and (trained := trained_adapter(model)):
        raise ConfigError(
            f"model has an adapter in it that was trained ({trained} is not zero), and peft_config would "
            "put a fresh one in its place, without what was learnt: a trainer with peft_config changes "
            "the model that it is given.",
            fix="pass the other trainer's `trainer.model` and leave peft_config out, to train on; or "
            "`trainer.model.merge_and_unload()` with peft_config, for a new adapter on top; or "
            "`trainer.model.unload()`, to begin again",
            trained=trained,
        )
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, (list, set, tuple)) and "lm_head" in targets:
        raise ConfigError("An adapter on `lm_head` is not supported.", fix="Take it out of target_modules.")


def trained_adapter(model: nn.Module) -> str:
    """A weight of an adapter in the model that is zero in a new one, and is not here; empty where there is none."""
    named = model.named_parameters()
    return next((name for name, parameter in named if ".lora_B." in name and bool(parameter.detach().any())), "")


def _as_given(policy: Any) -> Any:
    """A model that the caller has loaded, with what is known of its files."""
    base = base_model(policy)
    if not hasattr(base, "podium_stored"):
        remember(base, resolve_model(base.config._name_or_path) if base.config._name_or_path else "")
    return policy


def _from_name(name: str, settings: LoadSettings, *, frozen: bool) -> PreTrainedModel:
    kwargs = dict(settings.init_kwargs)
    if settings.quantization_config is not None:
        kwargs["quantization_config"] = settings.quantization_config
    if "torch_dtype" in kwargs:
        kwargs.setdefault("dtype", kwargs.pop("torch_dtype"))
    dtype = kwargs.pop("dtype", None) or (settings.frozen_dtype if frozen else torch.float32)
    if settings.device is not None:
        kwargs.setdefault("device_map", {"": settings.device})
    if isinstance(dtype, str) and dtype != "auto":
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigError(
                f"dtype is {dtype!r}; it must be float32, bfloat16, float16 or auto.", settings=("dtype",), dtype=dtype
            )
        dtype = getattr(torch, dtype)
    kwargs.setdefault("trust_remote_code", settings.trust_remote_code)
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with reading(functools.partial(not_loadable, name)):
        model, info = load(resolve_model(name), dtype=dtype, **kwargs)
    if not hasattr(model.config, "quantization_config"):
        for found in judged(name, with_ignored(info, model, model.podium_stored.types), model.state_dict()):
            if found.severity == "error" and found.code not in settings.ignored:
                raise ModelError(
                    f"{found.what}: {found.why}.", code=found.code, fix=way_on(found), what=found.what, why=found.why
                )
            logger.warning("%s; %s. [%s]", found.what, found.why, found.code)
    return model


def keep_differentiable(model: nn.Module) -> None:
    """Have 4-bit layers of bitsandbytes on a CPU compute the same in sampling and in training, and with a gradient.

    In its first forward in evaluation mode, on processors with AVX512-BF16, such a layer packs its weights for a kernel
    that rounds more and has no backward (0.50). Training that came after it got no gradient through the layer, with a
    warning from torch at most.
    """
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

            layer.weight.data, layer.weight.quant_state = _convert_weight_packed_for_cpu_inverse(
                layer.weight.data, layer.weight.quant_state
            )


def disable_dropout(model: nn.Module) -> None:
    """Set the probability of every dropout to 0."""
    for module, name in dropouts(model):
        setattr(module, name, 0.0)


def dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Modules and their attributes that hold a probability of dropout above 0.

    Those of layers, and those that modules hand to functions (OPT, Falcon).
    """
    return [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0
        if "drop" in name or (name == "p" and isinstance(module, nn.Dropout))
    ]


def cast_head_to_fp32(model: nn.Module) -> None:
    """Run the output projection in float32, for models kept in half precision; tied embeddings raise `ConfigError`."""
    head = model.get_output_embeddings()
    if head.weight.dtype == torch.float32:
        return
    if head.weight is model.get_input_embeddings().weight:
        raise ConfigError(
            "cast_lm_head_to_fp32 needs a head of its own, but this model ties it to the input embeddings.",
            fix="Load the model in float32 instead (model_init_kwargs={'dtype': 'float32'}).",
            settings=("cast_lm_head_to_fp32",),
        )
    head.float()
    head.register_forward_pre_hook(lambda _module, args: (args[0].float(), *args[1:]))


def end_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a completion: the model's own end ids and the tokenizer's."""
    declared = declared_ends(getattr(model, "generation_config", None))
    return declared | {tokenizer.eos_token_id} - {None}


def declared_ends(generation_config: GenerationConfig | None) -> frozenset[int]:
    """The end ids of a generation configuration. Raises `ModelError` for values that are no ids."""
    declared = getattr(generation_config, "eos_token_id", None)
    if declared is None:
        return frozenset()
    ids = declared if isinstance(declared, list | tuple) else [declared]
    if not all(type(id) is int and abs(id) < 2**63 for id in ids):
        raise ModelError(
            f"eos_token_id of the model's generation_config.json is {declared!r}; it must be a token's "
            "number, or a list of them.",
            code="M018",
            fix="correct it there, or copy that file again from the original model",
            value=declared,
        )
    return frozenset(ids)


def align_pad_token(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """The model's configs take the tokenizer's pad id. Nothing of Podium reads it: masks come from lengths."""
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def context_length(config: PretrainedConfig) -> int | None:
    """Positions the model has; None: not said."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def is_mixture_of_experts(model: nn.Module) -> bool:
    """Whether the model can report a load-balancing loss."""
    return "output_router_logits" in inspect.signature(base_model(model).forward).parameters
