"""The line that training shows: step, reward, share of groups with signal, tokens a second, time left."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.utils.import_utils import is_in_notebook

from podium.runs.html import render

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

WINDOW = 8
"""Optimizer steps over which speed is averaged."""

LINES = 10
"""About as many lines a whole run has in a file or pipe."""

FIRST = "sampling and checking the first batch, which takes longer than a step"


class _Progress(TrainerCallback):
    """Collects the numbers of the line; subclasses show it."""

    def __init__(self) -> None:
        self.logs: dict[str, float] = {}
        self.rewards: dict[int, float] = {}
        self.marks: deque[tuple[float, int, float]] = deque(maxlen=WINDOW + 1)
        self.first = True

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._mark(state)
        self.first = True
        if state.is_world_process_zero:
            self.open(state)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.first:  # includes the proof, and completions that have not learnt to end: no measure of speed
            self.marks.clear()
            self.first = False
        self._mark(state)
        self.show(state)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs |= dict(logs or {})
        if state.is_world_process_zero and "reward" in (logs or {}):
            self.rewards[state.global_step] = self.logs["reward"]
            self.log(state)
        self.show(state)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.close()

    def line(self, state: TrainerState) -> str:
        return describe(state.global_step, state.max_steps, self.logs, tuple(self.marks))

    def _mark(self, state: TrainerState) -> None:
        self.marks.append((time.perf_counter(), state.global_step, float(state.num_input_tokens_seen)))

    def open(self, state: TrainerState) -> None:
        """Show that the first batch is checked, on the main process."""

    def show(self, state: TrainerState) -> None:
        """Update what is shown, after a step and after its numbers are logged."""

    def log(self, state: TrainerState) -> None:
        """Print a line where there is no live one, after numbers with a reward are logged on the main process."""

    def close(self) -> None:
        """Leave the terminal as it was; also called when training raises."""


class ProgressLine(_Progress):
    """One line on a terminal, updated at every step; about ten lines in all in a file or pipe."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.live: Live | None = None
        self.printed = 0

    def open(self, state: TrainerState) -> None:
        if self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()
            self._update(f"step {state.global_step}/{state.max_steps}  {FIRST} ...")

    def show(self, state: TrainerState) -> None:
        self._update(self.line(state))

    def log(self, state: TrainerState) -> None:
        every = math.ceil(state.max_steps / LINES) or 1
        due = state.global_step // every > self.printed // every or state.global_step in (1, state.max_steps)
        if self.live is None and due:
            self.printed = state.global_step
            self.console.print(Text(fitting(self.line(state), self.console.width)), soft_wrap=True)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _update(self, line: str) -> None:
        if self.live is not None:
            self.live.update(Text(fitting(line, self.console.width), overflow="ellipsis", no_wrap=True), refresh=True)


class NotebookProgress(_Progress):
    """The line and the reward curve below a notebook's cell."""

    def __init__(self) -> None:
        super().__init__()
        self.display: DisplayHandle | None = None

    def open(self, state: TrainerState) -> None:
        from IPython.display import HTML, display

        self.display = display(HTML(self._html(f"{FIRST} ...")), display_id=True)

    def show(self, state: TrainerState) -> None:
        from IPython.display import HTML

        if self.display is not None:
            self.display.update(HTML(self._html(self.line(state))))

    def _html(self, line: str) -> str:
        return render("progress.html", line=line, rewards=list(self.rewards.values()))


def show_line(trainer: Trainer, line: ProgressLine) -> ProgressLine:
    """Put our line in place of the Trainer's bar and its printed dicts."""
    for callback in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK, NotebookProgress):
        trainer.remove_callback(callback)
    trainer.add_callback(line)
    return line


def show_in_notebook(trainer: Trainer) -> None:
    """In a notebook, put our line and curve in place of the Trainer's table of losses."""
    if is_in_notebook() and not trainer.args.disable_tqdm:
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
        trainer.add_callback(NotebookProgress())


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

    >>> logs = {"reward": 1.25, "frac_reward_zero_std": 0.25}
    >>> describe(3, 5, logs, ((0.0, 1, 0.0), (4.0, 3, 4000.0)))
    'step 3/5  reward 1.250  groups with signal 75 %  1,000 tokens/s  0:04 left'
    """
    parts = [f"step {step}/{max_steps}"]
    if "reward" in logs:
        parts.append(f"reward {logs['reward']:.3f}")
    if "frac_reward_zero_std" in logs:
        parts.append(f"groups with signal {100 * (1 - logs['frac_reward_zero_std']):.0f} %")
    seconds, steps, tokens = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
    if steps > 0 and seconds > 0:
        parts += [f"{tokens / seconds:,.0f} tokens/s", f"{clock((max_steps - step) * seconds / steps)} left"]
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
