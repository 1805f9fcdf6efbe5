"""A backend of vLLM's interface for weights over gloo, for both sides: the phases are those of NCCL.

In the trainer's process `register_trainer()`; at a server `--worker-extension-cls gloo_podium_worker.FreshHead`, with
this folder and the one of `podium_worker` on its PYTHONPATH, and `--weight-transfer-config '{"backend": "gloo"}'`.
Imports nothing of Podium where the server runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from podium_worker import FreshHead as PodiumWorker
from torch.distributed import ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

PATIENCE = timedelta(seconds=120)


def _group(address: str, port: int, rank: int, size: int) -> Any:
    store = TCPStore(address, port, size, is_master=rank == 0, timeout=PATIENCE)
    return ProcessGroupGloo(store, rank, size, PATIENCE)


@dataclass
class WorkerInfo(WeightTransferInitInfo):
    """Where the group meets."""

    master_address: str
    master_port: int
    world_size: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The tensors that will come, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine[WorkerInfo, UpdateInfo]):
    """The side of a server's worker."""

    init_info_cls = WorkerInfo
    update_info_cls = UpdateInfo
    group: Any = None

    def init_transfer_engine(self, init_info: WorkerInfo) -> None:
        rank = 1 + self.parallel_config.rank
        self.group = _group(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        self.model.load_weights((name, self._received(kind, shape)) for name, kind, shape in described)

    def _received(self, kind: str, shape: list[int]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=getattr(torch, kind))
        self.group.broadcast(tensor, 0).wait()
        return tensor

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Without the base's synchronization of an accelerator, of which there is none."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None


@dataclass
class TrainerInfo(TrainerInitInfo):
    """As vLLM's of NCCL: where the group meets, and of how many processes it is."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    master_port: int
    world_size: int


class GlooTrainerEngine(TrainerWeightTransferEngine[TrainerInfo]):
    """The trainer's side."""

    init_info_cls = TrainerInfo
    group: Any = None
    largest: ClassVar[int] = 0
    """Bytes of the largest tensor that was sent."""

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> GlooTrainerEngine:
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            place = (init_info.master_address, init_info.master_port)
            told = asdict(WorkerInfo(*place, init_info.world_size))
            with ThreadPoolExecutor(1) as beside:
                joined = beside.submit(client.init_weight_transfer_engine, told)
                engine.group = _group(*place, 0, init_info.world_size)
                joined.result()
        return engine

    def send_weights(self) -> None:
        described = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        told = UpdateInfo(
            [facts.name for facts in described],
            [str(facts.dtype).removeprefix("torch.") for facts in described],
            [list(facts.shape) for facts in described],
        )
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as beside:
            received = beside.submit(self.client.update_weights, asdict(told))
            for tensor in self._checked(described):
                self.group.broadcast(tensor, 0).wait()
            received.result()
        self.client.finish_weight_update()

    def _checked(self, described: Any) -> Iterator[torch.Tensor]:
        for facts, (name, tensor) in zip(described, self.source, strict=True):
            assert (name, tensor.dtype, tuple(tensor.shape)) == tuple(facts)
            GlooTrainerEngine.largest = max(self.largest, tensor.nbytes)
            yield tensor.contiguous()

    def shutdown(self) -> None:
        self.group = None


class FreshHead(PodiumWorker):
    """The extension of vLLM's workers; its import has registered the engine."""


def register_trainer() -> None:
    """Make the backend known to the trainer's side."""
    from podium.engines.vllm import weights

    WeightTransferTrainerFactory.register_engine("gloo", GlooTrainerEngine)
    weights.BACKENDS["gloo"] = "gloo_podium_worker:TrainerInfo"


WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
