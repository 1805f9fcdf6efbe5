"""The device and the processes of a run, known before any `TrainingArguments` is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import get_int_from_env

from podium.models.devices import kind_of
from podium.trainer.planned import gpu_planned, launch_planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a run computes."""

    device: torch.device
    processes: int = 1

    @property
    def has_autocast(self) -> bool:
        """Whether products of the device are rounded by autocast, so that `fp16` and `bf16` mean something."""
        return kind_of(self.device.type).autocast


def this_machine(settings: Mapping[str, Any]) -> Machine:
    """The device that these settings choose here, and the processes of the launch, or of the check of one."""
    if gpu_planned() is not None:
        device = torch.device("cuda", 0)
    elif settings["use_cpu"] or not torch.cuda.is_available():
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    launch = launch_planned()
    return Machine(device=device, processes=_num_processes() if launch is None else launch.processes)


def _num_processes() -> int:
    """As accelerate counts them."""
    if PartialState._shared_state:
        return int(PartialState().num_processes)
    names = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
    return int(get_int_from_env(names, 1))
