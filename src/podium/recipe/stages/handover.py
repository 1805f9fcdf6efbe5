"""What crosses the border between two stages besides the weights, read from the checkpoint at the border.

It is always read from there, also when the run was never stopped: so a run that is killed at a border and resumed goes
on bit for bit as one that was not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model

from podium.models.loading import Reference
from podium.trainer.resume import REFERENCE, STATE
from podium.trainer.trainer import GRPOTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """Where one stage ended and the next begins."""

    checkpoint: Path
    """Whole: weights, optimizer, schedule, Podium's state."""

    @property
    def state(self) -> Mapping[str, Any]:
        """`podium_state.json`; empty behind a stage that was not GRPO."""
        path = self.checkpoint / STATE
        return json.loads(path.read_text()) if path.is_file() else {}

    @property
    def product_precision(self) -> str | None:
        """Of the stage before, which this one keeps: a CPU may measure otherwise another time. None: not known."""
        rounds = self.state.get("bfloat16_products")
        return None if rounds is None else "bfloat16" if rounds else "float32"

    def optimizer_state(self) -> dict[str, Any]:
        """As it was at the border."""
        return torch.load(self.checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)

    def scheduler_state(self) -> dict[str, Any]:
        """Likewise."""
        return torch.load(self.checkpoint / "scheduler.pt", map_location="cpu", weights_only=True)


class StageTrainer(GRPOTrainer):
    """`GRPOTrainer` that begins where another ended.

    Attributes:
        border: None: nothing came before.
        keeps: of `optimizer`, `schedule` and `adaptive_weights` those that are taken over.
        schedule_steps: length of a schedule that spans several stages; None: it is this stage's own.
    """

    def __init__(
        self,
        *args: Any,
        border: Border | None = None,
        keeps: frozenset[str] = frozenset(),
        schedule_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.border = border
        self.keeps = keeps
        self.schedule_steps = schedule_steps

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Over all stages that share it; with what is taken over, which a checkpoint inside the stage replaces."""
        scheduler = super().create_scheduler(self.schedule_steps or num_training_steps, optimizer)
        if self.border is not None:
            self._take_over(self.border)
        return scheduler

    def _take_over(self, border: Border) -> None:
        if "optimizer" in self.keeps:
            own = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": border.optimizer_state()["state"], "param_groups": own})
        if "schedule" in self.keeps:
            state = border.scheduler_state()
            self.lr_scheduler.load_state_dict(state)
            for group, rate in zip(self.optimizer.param_groups, state["_last_lr"], strict=True):
                group["lr"] = rate
        if "adaptive_weights" in self.keeps:
            self.weights = self.weights.restored(border.state.get("reward_weights", {}))


def follow_on(reference: Reference, border: Border) -> bool:
    """Whether the reference of the stage before had moved; then this one is where that one was."""
    moved = border.checkpoint / REFERENCE
    if reference.copy is None or not moved.is_file():
        return False
    load_model(reference.copy, str(moved))
    reference.moved = True
    return True
