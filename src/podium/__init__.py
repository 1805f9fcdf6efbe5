"""Podium: GRPO for language models.

    from podium import GRPOConfig, GRPOTrainer

Public names are loaded when first used, so that `import podium` (and the command line's `--help`) costs milliseconds:
no torch, no transformers.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

# transformers 5.23 calls it activation checkpointing; TRL, PEFT and recipes use the older name.
warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing", FutureWarning)

__version__ = "0.2.0"

if TYPE_CHECKING:
    from podium import data, rewards
    from podium.agents.mcp import mcp_tools
    from podium.agents.plain_text import TextEnvironment
    from podium.algorithm import advantages, losses
    from podium.checks import check
    from podium.errors import Finding
    from podium.grpo_trainer import GRPOTrainer
    from podium.loop import Loop
    from podium.models import packing
    from podium.records import Completion, Datum, Group, Prompt, ScoredGroup, StepMetrics
    from podium.runs.run import Run
    from podium.stages.api import Stages
    from podium.trainer.config import GRPOConfig

_HOME = {
    "check": "podium.checks",
    "GRPOConfig": "podium.trainer.config",
    "GRPOTrainer": "podium.grpo_trainer",
    "Completion": "podium.records",
    "Datum": "podium.records",
    "Finding": "podium.errors",
    "Group": "podium.records",
    "Loop": "podium.loop",
    "Prompt": "podium.records",
    "Run": "podium.runs.run",
    "ScoredGroup": "podium.records",
    "Stages": "podium.stages.api",
    "StepMetrics": "podium.records",
    "TextEnvironment": "podium.agents.plain_text",
    "mcp_tools": "podium.agents.mcp",
}
"""Module of each public name."""

_MODULES = {
    "advantages": "podium.algorithm.advantages",
    "data": "podium.data",
    "losses": "podium.algorithm.losses",
    "packing": "podium.models.packing",
    "rewards": "podium.rewards",
}
"""Public modules, `podium.losses` and so on."""

__all__ = [
    "Completion",
    "Datum",
    "Finding",
    "GRPOConfig",
    "GRPOTrainer",
    "Group",
    "Loop",
    "Prompt",
    "Run",
    "ScoredGroup",
    "Stages",
    "StepMetrics",
    "TextEnvironment",
    "__version__",
    "advantages",
    "check",
    "data",
    "losses",
    "mcp_tools",
    "packing",
    "rewards",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module `podium` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
