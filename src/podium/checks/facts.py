"""Facts about a model without its weights: its configurations, and the headers of its files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from podium.checks.public import MODELS, public_config
from podium.errors import ModelError, PodiumError
from podium.models.builtin import resolve_model
from podium.models.check import check_model_name
from podium.models.loading import LoadSettings, load_tokenizer
from podium.models.weights import stored_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as far as its small files describe it."""

    name: str
    config: PretrainedConfig | None = None
    generation_config: GenerationConfig | None = None
    folder: Path | None = None
    """None: on the hub and not here, or given as an object."""
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes by name, from the headers of safetensors files; empty where there are none to read."""
    unasked: bool = False
    """Whether the hub cannot be reached, and the configuration is one of `public.MODELS`."""

    @property
    def num_parameters(self) -> int:
        """0: unknown."""
        return sum(prod(shape) for shape in self.tensors.values())

    @property
    def embedding(self) -> tuple[int, ...] | None:
        """Shape [vocabulary, width] of the input embedding."""
        endings = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
        return next((shape for name, shape in self.tensors.items() if name.endswith(endings)), None)

    @property
    def end_ids(self) -> frozenset[int]:
        """The end tokens of the generation configuration."""
        ids = getattr(self.generation_config, "eos_token_id", None)
        return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def facts_of(model: Any, settings: LoadSettings, *, needs_tokenizer: bool) -> ModelFacts:
    """Raises `ModelError` for a name that cannot become a language model."""
    if not isinstance(model, str):
        inside = ((name.replace(".base_layer.", "."), each) for name, each in model.named_parameters())  # of an adapter
        shapes = {name: tuple(each.shape) for name, each in inside if ".lora_" not in name}
        generation = getattr(model, "generation_config", None)
        name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        return ModelFacts(name=name, config=model.config, generation_config=generation, tensors=shapes)
    try:
        check_model_name(model, needs_tokenizer=needs_tokenizer, trust_remote_code=settings.trust_remote_code)
    except ModelError as error:
        if error.code != "M002" or model not in MODELS:
            raise
        return ModelFacts(name=model, config=public_config(model), unasked=True)
    source, revision = resolve_model(model), settings.init_kwargs.get("revision")
    folder = Path(source).expanduser()
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=settings.trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError("M013.transformers_not_know", model=model, line=_first_line(error)) from error
    generation_config = None
    with contextlib.suppress(OSError, ValueError):  # many models have none
        generation_config = GenerationConfig.from_pretrained(source, revision=revision)
    return ModelFacts(
        name=model,
        config=config,
        generation_config=generation_config,
        folder=folder if folder.is_dir() else None,
        tensors=stored_shapes(folder),
    )


def tokenizer_of(model: Any, given: Any, settings: LoadSettings) -> PreTrainedTokenizerBase:
    """Raises `ModelError` where there is none that can be used."""
    try:
        return load_tokenizer(model, given, settings)
    except PodiumError:
        raise
    except Exception as error:  # tokenizers raises plain `Exception` for a file that it cannot read
        raise ModelError("M003.tokenizer_cannot_read", model=model, line=_first_line(error)) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"
