"""The line that training shows: reward, share of groups with signal, tokens a second, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from podium.recipe.estimates.duration import clock

WINDOW = 8
"""Optimizer steps over which speed is averaged."""


class ProgressLine(TrainerCallback):
    """One line on a terminal, renewed at every step; elsewhere (a file, a pipe) about twenty lines in all."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.logs: dict[str, float] = {}
        self.marks: deque[tuple[float, int, float]] = deque(maxlen=WINDOW + 1)
        self.live: Live | None = None
        self.printed = 0.0
        self.first = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._mark(state)
        self.first = True
        if state.is_world_process_zero and self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.first:  # with the proof on the first batch, and completions that have not learnt to end: no measure
            self.marks.clear()
            self.first = False
        self._mark(state)
        self._show(state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        self.logs |= dict(logs or {})
        self._show(state)
        if self.live is None and state.is_world_process_zero and "reward" in (logs or {}):
            self._print_now_and_then(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was; also called when training raises."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _mark(self, state: TrainerState) -> None:
        self.marks.append((time.perf_counter(), state.global_step, float(state.num_input_tokens_seen)))

    def _show(self, state: TrainerState) -> None:
        if self.live is not None:
            line = describe(state.global_step, state.max_steps, self.logs, tuple(self.marks))
            self.live.update(Text(fitting(line, self.console.width), overflow="ellipsis", no_wrap=True), refresh=True)

    def _print_now_and_then(self, state: TrainerState) -> None:
        done = state.global_step / max(state.max_steps, 1)
        if done - self.printed >= 0.05 or state.global_step in (1, state.max_steps):
            self.printed = done
            line = describe(state.global_step, state.max_steps, self.logs, tuple(self.marks))
            self.console.print(Text(fitting(line, self.console.width)), soft_wrap=True)


def fitting(line: str, width: int) -> str:
    """As many of its parts as fit.

    >>> fitting("step 3/5  reward 1.250  0:04 left", 25)
    'step 3/5  reward 1.250'
    """
    parts = line.split("  ")
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)


def describe(step: int, max_steps: int, logs: Mapping[str, float], marks: tuple[tuple[float, int, float], ...]) -> str:
    """The line; `marks` are (seconds, optimizer step, tokens so far) of the latest steps.

    >>> logs = {"reward": 1.25, "frac_reward_zero_std": 0.25, "loss": 0.5}
    >>> describe(3, 5, logs, ((0.0, 1, 0.0), (4.0, 3, 4000.0)))
    'step 3/5  reward 1.250  groups with signal 75 %  1,000 tokens/s  0:04 left  loss 0.5000'
    """
    parts = [f"step {step}/{max_steps}"]
    if "reward" in logs:
        parts.append(f"reward {logs['reward']:.3f}")
    if "frac_reward_zero_std" in logs:
        parts.append(f"groups with signal {100 * (1 - logs['frac_reward_zero_std']):.0f} %")
    seconds, steps, tokens = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
    if steps > 0 and seconds > 0:
        parts += [f"{tokens / seconds:,.0f} tokens/s", f"{clock((max_steps - step) * seconds / steps)} left"]
    if "loss" in logs:
        parts.append(f"loss {logs['loss']:.4f}")
    return "  ".join(parts)
