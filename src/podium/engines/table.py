"""The engines by the names that `rollout_engine` takes: what each can do, why it may not be possible, how it is built.

Nothing of an engine is imported before it is built, so that settings can be checked against the names alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from podium.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from podium.engines.base import RolloutEngine
    from podium.engines.vllm import Colocated, Served, VllmSettings
    from podium.models.forward import Forward


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInputs:
    """Everything that an engine is built from."""

    policy: nn.Module
    tokenizer: PreTrainedTokenizerBase
    forward: Forward
    tokens_per_pack: int
    copy_on: torch.device | None = None
    """Device of the copy to sample from while the policy trains; None: the policy itself is sampled."""
    served: Served | Colocated | None = None
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
    from podium.engines.vllm import engine_of

    assert inputs.served is not None
    assert inputs.vllm is not None
    return engine_of(inputs.served, inputs.vllm, inputs.tokenizer, inputs.agree)


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
