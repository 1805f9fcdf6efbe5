"""Sampling by vLLM, from a copy of the weights that is brought up to date before every generation round.

server.py     a running `vllm serve`: its routes, its silence, its death
weights.py    the policy's tensors under the names of a checkpoint, adapters merged
transfer.py   how they get there: a folder that both see, or NCCL
requests.py   prompts as requests, answers as completions
session.py    requests that may come at any time, and what becomes of them where the server dies
engine.py     `use_vllm` with `vllm_mode: server`: sync, generate, versions
colocate.py   the same with an engine in the trainer's process
connect.py    everything that is checked of a server before weights load
settings.py   what a run says about all of this

Other packages import from here alone; a module is loaded when a name of it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from podium.lazy import lazy_names

if TYPE_CHECKING:
    from podium.engines.vllm.connect import Colocated, Served, engine_of, prepare
    from podium.engines.vllm.server import Server, ServerRefused
    from podium.engines.vllm.settings import NOT_INSTALLED, VllmSettings

__all__ = ["NOT_INSTALLED", "Colocated", "Served", "Server", "ServerRefused", "VllmSettings", "engine_of", "prepare"]


__getattr__ = lazy_names(
    __name__,
    connect="Colocated Served engine_of prepare",
    server="Server ServerRefused",
    settings="NOT_INSTALLED VllmSettings",
)
