"""The end of a run on the terminal: what it took, how one that ended early goes on, the next command."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from podium.errors import RewardError

if TYPE_CHECKING:
    from podium.trainer.checkpointing import StopsOnTerm


NONE = (
    "No checkpoint was written, so this run cannot go on. One that can: the same command with "
    "--save_strategy steps --save_steps 20"
)


@contextlib.contextmanager
def resumable(folders: Sequence[Path], stop: StopsOnTerm, *, is_main: bool) -> Iterator[None]:
    """After Ctrl-C, SIGTERM or SIGHUP, print how training goes on; `folders` may hold its checkpoints, oldest first.

    The message of a reward that fails says it, too.
    """
    write: Callable[[str], object] = sys.stderr.write if is_main else lambda text: None
    try:
        with stop.listening(lambda text: write(f"\n{text}\n")):
            yield
    except KeyboardInterrupt:
        write(f"\n{going_on(folders)}\n")
        raise
    except RewardError as error:
        way = going_on(folders, otherwise="")
        error.fix = "; ".join(filter(None, (error.fix, way[:1].lower() + way[1:])))
        raise
    if stop.asked:
        write(f"\n{going_on(folders)}\n")
        raise typer.Exit(128 + stop.asked)


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
