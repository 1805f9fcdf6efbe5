"""A callback that watches a stage's gate, and ends the stage when it is met."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from podium.errors import ConfigError
from podium.recipe.stages.gates import Gate, absent

NAME = "StopConditionCallback"
"""Under which `trainer_state.json` holds its state: the class's name."""


class StopConditionCallback(TrainerCallback, ExportableState):
    """Feeds a gate with numbers; its memory is part of every checkpoint.

    Args:
        gate: None: the stage ends at its bound alone.
        step_values: the numbers of the optimizer step that has just ended; None: those of the log are taken (as
            another trainer than Podium's measures no more).
    """

    def __init__(self, gate: Gate | None, step_values: Callable[[], Mapping[str, float]] | None = None) -> None:
        self.gate = gate
        self.step_values = step_values
        self.values: list[float] = []
        self.met = False

    def state(self) -> dict[str, Any]:
        """For `trainer_state.json`."""
        return {"args": {}, "attributes": {"values": self.values, "met": self.met}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A run that is resumed has its callbacks' states in `state`; one that begins has this one's."""
        saved = state.stateful_callbacks.get(NAME) if isinstance(state.stateful_callbacks, Mapping) else None
        attributes = saved["attributes"] if isinstance(saved, Mapping) else {}
        self.values, self.met = list(attributes.get("values", [])), bool(attributes.get("met", False))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.gate is not None and self.step_values is not None and not self.gate.held_out:
            self._see(self.step_values(), args, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.gate is not None and self.step_values is None and logs and "train_runtime" not in logs:
            self._see(logs, args, control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.gate is not None and self.gate.held_out and self.step_values is not None:
            self._see(metrics or {}, args, control)

    def _see(self, numbers: Mapping[str, Any], args: TrainingArguments, control: TrainerControl) -> None:
        """The main process decides for all. Raises `ConfigError` for a metric that is not measured."""
        decided: list[Any] = [None, None]
        if args.process_index == 0:
            decided = self._judged(numbers)
        if args.world_size > 1:
            broadcast_object_list(decided)
        value, problem = decided
        if problem:
            raise ConfigError(problem, code="C060")
        assert self.gate is not None
        self.values = [*self.values, value][-self.gate.steps :]
        if self.gate.is_met(self.values):
            self.met = control.should_training_stop = control.should_save = True

    def _judged(self, numbers: Mapping[str, Any]) -> list[Any]:
        assert self.gate is not None
        value = numbers.get(self.gate.metric)
        if value is None and self.gate.metric not in numbers and not self.values:
            return [None, absent(self.gate, numbers)]
        return [float("nan") if value is None else float(value), ""]


def was_met(trainer_state: Mapping[str, Any]) -> bool:
    """Whether the gate was met when this `trainer_state.json` was written."""
    saved = (trainer_state.get("stateful_callbacks") or {}).get(NAME)
    return bool(isinstance(saved, Mapping) and saved.get("attributes", {}).get("met"))
