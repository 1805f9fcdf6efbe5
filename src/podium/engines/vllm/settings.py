"""The settings of a run that decide how vLLM samples for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

if TYPE_CHECKING:
    import torch

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

    server_base_url: str | None
    server_host: str
    server_port: int
    server_timeout: float
    group_port: int
    weights_folder: str | None
    importance_sampling_correction: bool

    dtype: str
    """The type in which vLLM computes in this process: training's, where that is known."""
    tensor_parallel_size: int
    gpu_memory_utilization: float
    max_sequences: int
    """Completions at once."""
    enable_sleep_mode: bool
    """Whether it gives its memory back while the policy trains."""
    model_impl: str
