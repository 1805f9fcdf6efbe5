"""Memory of a run on GPUs that need not be here, in each layout that it can have, and the first layout that fits.

with planned(layouts["ddp"]):
    args = GRPOConfig("out")
plan = plan_layouts(config, args, layouts, prompt_tokens=300)
plan.chosen.layout, plan.chosen.estimate.parts
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PretrainedConfig

from podium.errors.rule import raised
from podium.models.memory import LEAST_PACK
from podium.planning.memory import MemoryEstimate, Sizes, estimate_memory, gigabytes, model_sizes
from podium.trainer.config import GRPOConfig
from podium.trainer.planned import Launch, planned
from podium.trainer.processes import divides_weights, refuse_undividable, zero_stage

SPARE = 0.1
"""Share of a GPU's memory that must be left: what the allocator loses in pieces is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout and its memory."""

    layout: str
    """A name that `--accelerate` takes."""
    launch: Launch
    estimate: MemoryEstimate | None = None
    """Memory of one process, whose `available_bytes` are the GPU's less `SPARE`. None: the run is refused."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that save memory, with which it is estimated, where the run as it is does not fit."""
    peak_without: int = 0
    """Bytes of the run as it is, without these settings."""
    refused: str = ""
    host_bytes: int = 0
    """Host memory that a machine needs while each of its processes loads the weights that FSDP2 will divide."""

    @property
    def fits(self) -> bool:
        """Whether `SPARE` of the GPU's memory is left at the peak."""
        return self.estimate is not None and self.estimate.fits

    @property
    def problem(self) -> str:
        """The reason why the run cannot have this layout; empty: it can."""
        estimate = self.estimate
        if estimate is None or estimate.fits:
            return self.refused
        assert self.launch.gpu is not None
        device = self.launch.gpu.num_bytes
        by_size = sorted(estimate.parts.items(), key=lambda part: -part[1])
        alone = [part for part in by_size if part[1] > device]
        parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in alone or by_size[:3])
        reason = f"Larger than the device alone: {parts}" if alone else f"The largest parts: {parts}"
        verdict = f"leaves less than {100 * SPARE:g} %" if estimate.peak_bytes <= device else "does not fit"
        return f"{verdict}, {gigabytes(estimate.peak_bytes)} of {gigabytes(device)}. {reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All candidates, the simplest layout first; no candidates where something is not known."""

    candidates: tuple[Candidate, ...] = ()
    prompt_tokens: int = 0
    """Tokens of the longest prompt; 0: not known."""
    unknown: str = ""

    @property
    def chosen(self) -> Candidate | None:
        """The simplest that fits: DDP, FSDP2, then these with settings that save memory, then DeepSpeed's."""
        fitting = (candidate for candidate in self.candidates if candidate.fits)
        return min(fitting, key=lambda it: (it.launch.zero is not None, bool(it.settings)), default=None)


def plan_layouts(
    config: PretrainedConfig,
    args: GRPOConfig,
    layouts: Mapping[str, Launch],
    *,
    prompt_tokens: int,
    pixels: int = 0,
    peft_config: Any = None,
    bits: int = 0,
) -> Plan:
    """The memory of each layout; of one that does not fit, with settings that save memory.

    Args:
        config: of the model; no weight is looked at.
        args: the run's, made in `planned` of one of the layouts.
        layouts: by the names that `--accelerate` takes, the simplest first, all of as many of the same GPUs.
        prompt_tokens: of the longest prompt; 0: not known.
        pixels: as in `estimate_memory`.
        peft_config: as in `estimate_memory`.
        bits: as in `estimate_memory`.
    """
    candidates: list[Candidate] = []
    sizes: Sizes | None = None
    for name, launch in layouts.items():
        assert launch.gpu is not None
        with planned(launch):
            refused = _refusal(args, adapter=peft_config is not None, bits=bits)
            if refused:
                candidates.append(Candidate(layout=name, launch=launch, refused=refused))
                continue
            sizes = sizes or model_sizes(config, args, peft_config, bits=bits)
            estimate = partial(
                estimate_memory,
                config,
                prompt_tokens=prompt_tokens,
                pixels=pixels,
                peft_config=peft_config,
                available_bytes=int((1 - SPARE) * launch.gpu.num_bytes),
                sizes=sizes,
            )
            loading = launch.processes // launch.machines * sizes.weight_bytes
            host_bytes = loading if launch.fsdp is not None and divides_weights(args) else 0
            candidate = Candidate(layout=name, launch=launch, estimate=estimate(args), host_bytes=host_bytes)
            candidates.append(candidate if candidate.fits else _saving(candidate, args, estimate))
    return Plan(candidates=tuple(candidates), prompt_tokens=prompt_tokens)


def _refusal(args: GRPOConfig, *, adapter: bool, bits: int) -> str:
    """The reason why a run cannot be divided as planned; empty: it can."""
    if bits and (divides_weights(args) or zero_stage(args) is not None):
        return f"weights in {bits} bits have not been tried with FSDP2 or DeepSpeed"
    error = raised(refuse_undividable, args, adapter=adapter)
    return "" if error is None else error.what


def _saving(candidate: Candidate, args: GRPOConfig, estimate: Callable[[GRPOConfig], MemoryEstimate]) -> Candidate:
    """The candidate with settings that the run leaves open and with which it fits, or takes the least.

    Smaller packs come before recomputed activations, which cost a third of the arithmetic.
    """
    assert candidate.estimate is not None
    as_it_is = candidate.estimate.peak_bytes
    ways: list[dict[str, Any]] = [{}]
    if args.gradient_checkpointing is None:
        ways.append({"gradient_checkpointing": True})
    best = candidate
    for settings in ways:
        found = estimate(_with(args, settings))
        smaller = found.largest_tokens_per_pack or (LEAST_PACK if settings is ways[-1] else None)
        if not found.fits and args.tokens_per_pack is None and smaller is not None:
            settings["tokens_per_pack"] = smaller
            found = estimate(_with(args, settings))
        best = replace(candidate, estimate=found, settings=settings, peak_without=as_it_is)
        if found.fits:
            break
    return best if best.estimate is not None and best.estimate.peak_bytes < as_it_is else candidate


def _with(args: GRPOConfig, settings: Mapping[str, Any]) -> GRPOConfig:
    changed = copy.copy(args)
    for name, value in settings.items():
        setattr(changed, name, value)
    return changed
