"""The engines by the names that `rollout_engine` takes: what each can do, why it may not be possible, how it is built.

Nothing of an engine is imported before it is built, so that settings can be checked against the names alone. vLLM's
package, `engines.vllm`, is known here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from packaging.version import Version

from podium.errors import ConfigError
from podium.lazy import imported

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from podium.engines.base import RolloutEngine
    from podium.models.forward import Forward
    from podium.records import Prompt, Sample

OLDEST = Version("0.32")
"""The first version of vLLM that Podium was tried with; older ones may keep no version with their weights."""
NOT_INSTALLED = (
    "vllm_mode: colocate runs vLLM in this environment, where it is not installed.",
    f'pip install "vllm>={OLDEST}"; or set vllm_mode: server and start one in an environment of its own',
)
"""A mistake and its fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Made from the run's arguments by `trainer.settings.vllm_settings`; names are TRL's without `vllm_`."""

    mode: str
    """`server` or `colocate`."""
    max_prompt_length: int | None
    max_completion_length: int
    max_model_length: int | None
    device: torch.device
    """The trainer's."""
    process_index: int
    local_process_index: int
    world_size: int
    output_dir: Path
    newest_checkpoint: Callable[[], Path | None]
    """In it; asked for when a server is gone."""
    trust_remote_code: bool

    server_base_url: str | list[str] | None
    server_host: str
    server_port: int
    server_timeout: float
    group_port: int
    weights_folder: str | None
    async_rollouts: int
    importance_sampling_correction: bool
    replays: bool
    """Whether training normalizes over the tokens that filters left."""
    top_k: int
    """0: off."""

    dtype: str
    """The type in which vLLM computes in this process: training's, where that is known."""
    tensor_parallel_size: int
    gpu_memory_utilization: float
    max_sequences: int
    """Completions at once."""
    enable_sleep_mode: bool
    """Whether it gives its memory back while the policy trains."""
    model_impl: str


class Connection(Protocol):
    """What vLLM samples with, found before the policy's weights load."""

    @property
    def longest(self) -> int | None:
        """Tokens of a prompt with its completion; None: what the model has positions for."""

    def with_images(self, example: Prompt) -> Connection:
        """The same for a run whose rows have images, tried with one of them. Raises `ConfigError`."""


class ServedTeacher(Protocol):
    """A teacher behind `vllm serve`."""

    root: str
    """The folder or hub id that the server was started with."""

    def logps(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities of every sample's drawn tokens, in order, at temperature 1. Raises `EngineError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInputs:
    """Everything that an engine is built from."""

    policy: nn.Module
    tokenizer: PreTrainedTokenizerBase
    forward: Forward
    tokens_per_pack: int
    copy_on: torch.device | None = None
    """Device of the copy to sample from while the policy trains; None: the policy itself is sampled."""
    served: Connection | None = None
    vllm: VllmSettings | None = None
    agree: Callable[[Any], Any] = lambda value: value
    """The first process's value, on every process."""


def _live(inputs: EngineInputs) -> RolloutEngine:
    from podium.engines.live.engine import CopyEngine, LiveEngine
    from podium.models.head import OwnLogits
    from podium.models.precision import ProductPrecision

    precision = inputs.forward.precision
    own_logits = isinstance(inputs.forward.head, OwnLogits)
    if inputs.copy_on is not None:
        return CopyEngine(
            inputs.policy, inputs.tokenizer, device=inputs.copy_on, precision=precision, own_logits=own_logits
        )
    sampling = precision.sampling if isinstance(precision, ProductPrecision) else precision
    return LiveEngine(inputs.policy, inputs.tokenizer, precision=sampling, own_logits=own_logits)


def _transformers(inputs: EngineInputs) -> RolloutEngine:
    from podium.engines.transformers import TransformersEngine

    return TransformersEngine(
        inputs.policy, inputs.tokenizer, forward=inputs.forward, tokens_per_pack=inputs.tokens_per_pack
    )


def _vllm(inputs: EngineInputs) -> RolloutEngine:
    engine: RolloutEngine = imported("podium.engines.vllm.connect:engine_of")(inputs)
    return engine


def connect_vllm(
    settings: VllmSettings, model: Any, config: PretrainedConfig, *, adapter: Any = None, waits: bool = True
) -> Connection:
    """Check what a run samples with before its weights load: vLLM here, or the servers that the settings name.

    Args:
        settings: the run's.
        model: what is trained, by its name, or loaded.
        config: its configuration.
        adapter: PEFT's configuration of the adapter that is trained; None where there is none.
        waits: whether to wait for a server, up to `vllm_server_timeout` seconds.

    Raises:
        ConfigError: no server answers, or it was started for something else; with the line to start it with.
        ModelError: it serves another model.
    """
    connect = imported("podium.engines.vllm.connect:connect")
    connection: Connection = connect(settings, model, config, adapter=adapter, waits=waits)
    return connection


def served_teacher(url: str) -> ServedTeacher:
    """The model that a vLLM server offers first. Raises `ConfigError` where none answers."""
    teacher: ServedTeacher = imported("podium.engines.vllm.teacher:VllmTeacher").at(url)
    return teacher


class EngineKind(NamedTuple):
    """One row of `ENGINES`."""

    build: Callable[[EngineInputs], RolloutEngine]
    attends_tree: bool
    """Whether the model must be able to attend over shared prefixes."""
    takes_any: bool
    """Whether it takes every one of transformers' `generation_kwargs`."""
    overlaps: bool
    """Whether it can sample while the policy trains (`async_rollouts`)."""
    interleaves: bool
    """Whether it takes requests while it samples (`agent`), in one of its modes at least."""

    def refusals(self, path: str, only_generate: Sequence[str]) -> list[str]:
        """Reasons why it cannot sample here. `only_generate`: settings that transformers' `generate` alone takes."""
        cannot = self.attends_tree and path != "shared"
        reasons = ["this model cannot attend over shared prefixes"] if cannot else []
        return reasons if self.takes_any else [*reasons, *only_generate]


ENGINES: Mapping[str, EngineKind] = {
    "live": EngineKind(_live, attends_tree=True, takes_any=False, overlaps=True, interleaves=True),
    "transformers": EngineKind(_transformers, attends_tree=False, takes_any=True, overlaps=False, interleaves=False),
    "vllm": EngineKind(_vllm, attends_tree=False, takes_any=True, overlaps=True, interleaves=True),
}


def choose(asked: str, path: str, only_generate: Sequence[str], *, overlaps: bool) -> tuple[str, list[str]]:
    """The name of the engine for `rollout_engine`, and why it is not the live one where that was left open.

    Args:
        asked: a name of the table, or `auto`.
        path: which the model can take; see `models.forward`.
        only_generate: settings that transformers' `generate` alone takes, in words.
        overlaps: whether it has to sample while the policy trains.

    Raises:
        ConfigError: the engine that was asked for is not possible here.
    """
    name = "live" if asked == "auto" else asked
    reasons = ENGINES[name].refusals(path, only_generate)
    if reasons and asked != "auto":
        raise ConfigError(
            f'rollout_engine="{asked}" is not possible here: {"; ".join(reasons)}. Use rollout_engine="auto".',
            settings=("rollout_engine",),
            asked=asked,
            reasons="; ".join(reasons),
        )
    name = "transformers" if reasons else name
    if overlaps and not ENGINES[name].overlaps:
        raise ConfigError(
            "async_rollouts needs the live engine or vLLM, and this model is sampled with transformers' generate.",
            code="C033",
            fix="Leave async_rollouts out.",
            settings=("async_rollouts",),
        )
    return name, reasons
