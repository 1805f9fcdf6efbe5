"""Hands optimizer, schedule, adaptive weights and reference from one stage to the next, by the checkpoint between them.

They are always read from there, also in a run that was never stopped: so one that is killed at a stage's end and
resumed follows the same trajectory bit for bit.
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
class Boundary:
    """The end of one stage and the beginning of the next: a complete checkpoint."""

    checkpoint: Path

    @property
    def state(self) -> Mapping[str, Any]:
        """`podium_state.json`; empty behind a stage that was not GRPO."""
        path = self.checkpoint / STATE
        return json.loads(path.read_text()) if path.is_file() else {}

    @property
    def product_precision(self) -> str | None:
        """Kept from the stage before, as a CPU may measure otherwise another time. None: unknown."""
        rounds = self.state.get("bfloat16_products")
        return None if rounds is None else "bfloat16" if rounds else "float32"

    def saved(self, part: str) -> dict[str, Any]:
        """The state of the `optimizer` or the `scheduler`."""
        return torch.load(self.checkpoint / f"{part}.pt", map_location="cpu", weights_only=True)


class StageTrainer(GRPOTrainer):
    """`GRPOTrainer` that begins where another ended: at `boundary` (None: nothing came before).

    `keeps` are those of `optimizer`, `schedule` and `adaptive_weights` that are taken over, `schedule_steps` is the
    length of a schedule that spans several stages (None: it is this stage's own).
    """

    def __init__(
        self,
        *args: Any,
        boundary: Boundary | None = None,
        keeps: frozenset[str] = frozenset(),
        schedule_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.boundary = boundary
        self.keeps = keeps
        self.schedule_steps = schedule_steps

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Spans all stages that share it. States are taken over here; a checkpoint inside the stage replaces them."""
        scheduler = super().create_scheduler(self.schedule_steps or num_training_steps, optimizer)
        if self.boundary is not None:
            self._take_over(self.boundary)
        return scheduler

    def _take_over(self, boundary: Boundary) -> None:
        if "optimizer" in self.keeps:
            own = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": boundary.saved("optimizer")["state"], "param_groups": own})
        if "schedule" in self.keeps:
            state = boundary.saved("scheduler")
            self.lr_scheduler.load_state_dict(state)
            for group, rate in zip(self.optimizer.param_groups, state["_last_lr"], strict=True):
                group["lr"] = rate
        if "adaptive_weights" in self.keeps:
            self.weights = self.weights.restored(boundary.state.get("reward_weights", {}))


def follow_on(reference: Reference, boundary: Boundary) -> bool:
    """Load the reference of the stage before, if that one had moved. Returns whether it had."""
    moved = boundary.checkpoint / REFERENCE
    if reference.copy is None or not moved.is_file():
        return False
    load_model(reference.copy, str(moved))
    reference.moved = True
    return True
