"""The line that training shows: step, reward, share of right completions, their length, time left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.utils.import_utils import is_in_notebook

from podium.runs.html import render
from podium.runs.monitors.detection import percent
from podium.runs.pace import clock, steps_per_round, typical_seconds

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

NUMBERS: Mapping[str, Callable[[float], str]] = {
    "reward": "reward {:.3f}".format,
    "accuracy": lambda share: f"right {percent(share)}",
    "completions/mean_length": "length {:.0f} tokens".format,
}
"""Metrics on the line. The loss is not among them: GRPO's is near 0 by construction, whatever is learnt."""

_ROUND = ("steps_per_generation", "num_iterations", "gradient_accumulation_steps")

LINES = 10
"""About as many lines a whole run has in a file or pipe."""

FIRST = "sampling and checking the first batch, which takes longer than a step"


@dataclass(slots=True)
class Pace:
    """Seconds of the steps of a run, evaluations and checkpoints apart, and of what is to come.

    The first step is left out: it holds the proof, and completions that have not learnt to end.
    """

    per_round: int = 1
    """Optimizer steps of a generation round."""
    first: int = 1
    """Number of the first step."""
    seconds: list[float] = field(default_factory=list)
    """Duration of each step after the first."""
    others: float = 0.0
    """Seconds of evaluations and checkpoints so far, which recur."""
    _mark: float | None = None

    def step_ended(self) -> None:
        """After every optimizer step, before its evaluation and checkpoint."""
        now = time.perf_counter()
        if self._mark is not None:
            self.seconds.append(now - self._mark)
        self._mark = now

    def interrupted(self) -> None:
        """After an evaluation or a checkpoint."""
        now = time.perf_counter()
        if self._mark is not None:
            self.others += now - self._mark
            self._mark = now

    def left(self, step: int, max_steps: int) -> float | None:
        """Seconds from the end of a step to that of the run; None: not known yet."""
        if (typical := typical_seconds(self.seconds, self.per_round)) is None:
            return None
        return (max_steps - step) * (typical + self.others / (step - self.first + 1))


class _Progress(TrainerCallback):
    """Collects the numbers of the line; subclasses show it."""

    def __init__(self) -> None:
        self.logs: dict[str, float] = {}
        self.rewards: dict[int, float] = {}
        self.pace = Pace()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        settings = {name: getattr(args, name, None) for name in _ROUND}
        self.pace = Pace(per_round=steps_per_round(settings), first=state.global_step + 1)
        if state.is_world_process_zero:
            self.open(state)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.pace.step_ended()
        self.show(state)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.pace.interrupted()

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.pace.interrupted()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs |= dict(logs or {})
        if state.is_world_process_zero and "reward" in (logs or {}):
            self.rewards[state.global_step] = self.logs["reward"]
            self.log(state)
        self.show(state)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.close()

    def line(self, state: TrainerState) -> str:
        left = self.pace.left(state.global_step, state.max_steps)
        return describe(state.global_step, state.max_steps, self.logs, left)

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


def describe(step: int, max_steps: int, logs: Mapping[str, float], left: float | None) -> str:
    """The line; `left` are the seconds to come, None where they are not known.

    >>> logs = {"reward": 1.25, "accuracy": 0.25, "completions/mean_length": 31.4}
    >>> describe(3, 5, logs, 4.0)
    'step 3/5  reward 1.250  right 25 %  length 31 tokens  0:04 left'
    >>> describe(3, 5, {"programs/seconds_max": 8.04, "programs/slowest_row": 12.0}, None)
    'step 3/5  slowest program 8.0 s (row 12)  ... left'
    >>> describe(5, 5, {"programs/rejected": 0.5, "programs/rejected_row": 12.0}, None)
    'step 5/5  rejected requests a program 0.5 (row 12)'
    """
    parts = [f"step {step}/{max_steps}"]
    parts += [form(logs[name]) for name, form in NUMBERS.items() if logs.get(name) is not None]
    if (row := logs.get("programs/slowest_row")) is not None and (seconds := logs.get("programs/seconds_max")):
        parts.append(f"slowest program {seconds:.1f} s (row {row:.0f})")
    if (row := logs.get("programs/rejected_row")) is not None and (rejected := logs.get("programs/rejected")):
        parts.append(f"rejected requests a program {rejected:.1f} (row {row:.0f})")
    if step < max_steps:
        parts.append("... left" if left is None else f"{clock(left)} left")
    return "  ".join(parts)
