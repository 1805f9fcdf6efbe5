"""Podium: GRPO for language models.

    from podium import GRPOConfig, GRPOTrainer

Public names are loaded when first used, so that `import podium` (and the command line's `--help`) costs milliseconds:
no torch, no transformers.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from podium.lazy import lazy_names

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
    from podium.records import Completion, Group, Prompt, Sample, ScoredGroup, StepMetrics
    from podium.runs.run import Run
    from podium.stages.running import Stages
    from podium.trainer.config import GRPOConfig

__all__ = [
    "Completion",
    "Finding",
    "GRPOConfig",
    "GRPOTrainer",
    "Group",
    "Loop",
    "Prompt",
    "Run",
    "Sample",
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


__getattr__ = lazy_names(
    __name__,
    **{
        "agents.mcp": "mcp_tools",
        "agents.plain_text": "TextEnvironment",
        "algorithm.advantages": "advantages",
        "algorithm.losses": "losses",
        "checks": "check",
        "data": "data",
        "errors": "Finding",
        "grpo_trainer": "GRPOTrainer",
        "loop": "Loop",
        "models.packing": "packing",
        "records": "Completion Group Prompt Sample ScoredGroup StepMetrics",
        "rewards": "rewards",
        "runs.run": "Run",
        "stages.running": "Stages",
        "trainer.config": "GRPOConfig",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
