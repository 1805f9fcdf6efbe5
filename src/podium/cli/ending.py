"""The end of a run on the terminal: what it took, how one that ended early goes on, the next command."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from podium.errors import AgentError, EngineError, RewardError
from podium.isolation.machine import drop_if_gone, on_end_signals

if TYPE_CHECKING:
    from podium.trainer.checkpointing import StopsOnTerm


NONE = (
    "No checkpoint was written, so this run cannot go on. One that can: the same command with "
    "--save_strategy steps --save_steps 20"
)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP unwind the stack, so that what is open is closed; exit code 128 + their number."""

    def end(number: int, _: object) -> None:
        if number == signal.SIGHUP:
            for stream in (1, 2):
                drop_if_gone(stream)
        raise SystemExit(128 + number)

    with on_end_signals(end):
        yield


@contextlib.contextmanager
def finished_first() -> Iterator[None]:
    """As `ended_by_signals`, at the end of the block."""
    came: list[int] = []
    with on_end_signals(lambda number, _: came.append(number)):
        yield
    if came:
        raise SystemExit(128 + came[0])


@contextlib.contextmanager
def resumable(folders: Sequence[Path], stop: StopsOnTerm, *, is_main: bool) -> Iterator[None]:
    """After Ctrl-C, SIGTERM or SIGHUP, print how training goes on; `folders` may hold its checkpoints, oldest first.

    The message of a reward, a tool or an engine that fails says it, too.
    """
    write: Callable[[str], object] = sys.stderr.write if is_main else lambda text: None
    try:
        with stop.listening(lambda text: write(f"\n{text}\n")):
            yield
    except KeyboardInterrupt:
        write(f"\n{going_on(folders)}\n")
        raise
    except (RewardError, AgentError, EngineError) as error:
        way = going_on(folders, otherwise="")
        error.fix = "; ".join(filter(None, (error.fix, way[:1].lower() + way[1:])))
        raise
    if stop.agreed:
        write(f"\n{going_on(folders)}\n")
        raise typer.Exit(128 + stop.agreed)


def going_on(folders: Sequence[Path], otherwise: str = NONE) -> str:
    """Instructions to resume from the newest checkpoint in `folders`; `otherwise`: where there is none."""
    from podium.runs.checkpoint import checkpoints

    if (newest := next((path for folder in reversed(folders) for path in checkpoints(folder)), None)) is None:
        return otherwise
    return f"To go on from {newest}: the same command with --resume_from_checkpoint true"


def closing(steps: str, trained: float, total: float, folder: Path | None) -> str:
    """Steps, seconds and memory of a run, also of its tensors on a GPU; no folder: no model was saved."""
    import torch

    from podium.runs.pace import clock

    saved = f". Model saved in {folder}" if folder else ""
    memory = f"peak memory {peak_bytes() / 1e9:.1f} GB"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        memory = f"peak memory of the GPU {torch.cuda.max_memory_allocated() / 1e9:.1f} GB, {memory} on the host"
    return f"{steps} in {clock(trained)}, all in {clock(total)}; {memory}{saved}"


def peak_bytes() -> int:
    """Most memory this process has had (resident); macOS counts in bytes, Linux in kibibytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
