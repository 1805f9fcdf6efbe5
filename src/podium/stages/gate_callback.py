"""A callback that watches a stage's gate, and ends the stage when it is met."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from podium.errors import ConfigError
from podium.recipe.gates import Gate, absent

NAME = "StopConditionCallback"
"""Under which `trainer_state.json` holds its state: the class's name."""


class StopConditionCallback(TrainerCallback, ExportableState):
    """Feeds a gate with numbers; its memory is part of every checkpoint.

    `gate` None: the stage ends at its bound alone. `step_values` returns the numbers of the optimizer step that has
    just ended; None: those of the log are taken (as another trainer than Podium's measures no more).
    """

    def __init__(self, gate: Gate | None, step_values: Callable[[], Mapping[str, float]] | None = None) -> None:
        self.gate = gate
        self.step_values = step_values
        self.values: list[float] = []
        self.met = False

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"values": self.values, "met": self.met}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """A run that is resumed has its callbacks' states in `state`; one that begins has this one's."""
        saved = _saved(state.stateful_callbacks)
        self.values, self.met = list(saved.get("values", [])), bool(saved.get("met", False))

    def on_step_end(self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if self.step_values is not None:
            self._add(self.step_values, args, control, held_out=False)

    def on_log(self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if self.step_values is None and logs and "train_runtime" not in logs:
            self._add(lambda: logs, args, control, held_out=None)

    def on_evaluate(self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if self.step_values is not None:
            self._add(lambda: kwargs.get("metrics") or {}, args, control, held_out=True)

    def _add(
        self, numbers: Callable[[], Mapping[str, Any]], args: Any, control: TrainerControl, *, held_out: bool | None
    ) -> None:
        """Numbers of training, of an evaluation, or (None) of both. The main process decides for all."""
        gate = self.gate
        if gate is None or (held_out is not None and gate.held_out is not held_out):
            return
        decided: list[Any] = [None, None]
        if args.process_index == 0:
            measured = numbers()
            value = measured.get(gate.metric)
            missing = gate.metric not in measured and not self.values
            decided = [float("nan") if value is None else float(value), absent(gate, measured) if missing else ""]
        if args.world_size > 1:
            broadcast_object_list(decided)
        value, problem = decided
        if problem:
            raise ConfigError(problem, code="C060")
        self.values = [*self.values, value][-gate.steps :]
        if gate.is_met(self.values):
            self.met = control.should_training_stop = control.should_save = True


def _saved(states: Any) -> Mapping[str, Any]:
    saved = states.get(NAME) if isinstance(states, Mapping) else None
    kept = saved.get("attributes") if isinstance(saved, Mapping) else None
    return kept if isinstance(kept, Mapping) else {}


def was_met(trainer_state: Mapping[str, Any]) -> bool:
    """Whether the gate was met when this `trainer_state.json` was written."""
    return bool(_saved(trainer_state.get("stateful_callbacks")).get("met"))
