"""How a launcher would divide a run, for a check that is one process: `podium check --processes 8 --accelerate fsdp2`.

with planned(Launch(processes=8, fsdp=2)):
    examine("run.yaml")
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podium.models.devices import Gpu

__all__ = ["GROUPS", "Launch", "gpu_planned", "launch_planned", "planned"]

GROUPS = "ACCELERATE_USE_PARALLELISM_CONFIG"
"""Environment variable: whether accelerate's launcher has set sizes of groups of processes, in others beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What `--processes` and `--accelerate` ask for."""

    processes: int
    """Of all machines."""
    machines: int = 1
    fsdp: int | None = None
    """FSDP's version; None: no FSDP."""
    replicas: int = 1
    """Copies of the divided weights: above 1 each is divided over as many fewer processes (HSDP)."""
    zero: int | None = None
    """DeepSpeed's stage; None: no DeepSpeed."""
    gpu: Gpu | None = None
    """The GPU of each process; None: a device of this machine."""


_PLANNED: ContextVar[Launch | None] = ContextVar("planned", default=None)


def launch_planned() -> Launch | None:
    """The launch that a check is of; None: this process is one of the run's own."""
    return _PLANNED.get()


def gpu_planned() -> Gpu | None:
    """The GPU that a check is for; None: the device is one of this machine."""
    launch = launch_planned()
    return None if launch is None else launch.gpu


@contextlib.contextmanager
def planned(launch: Launch | None) -> Iterator[None]:
    """Inside, settings are read as in a run that is launched so; with None as in this process."""
    token = _PLANNED.set(launch)
    try:
        yield
    finally:
        _PLANNED.reset(token)
