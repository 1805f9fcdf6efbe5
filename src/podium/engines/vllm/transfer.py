"""Transfer of weights into a server: by a checkpoint in a folder that it reads, or NCCL.

A transfer takes the policy's weights as they are and brings them under a version. `again` brings the same ones to a
server that has lost them, without looking at the policy, which may be training.
"""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trl.generation.vllm_client import VLLMClient

from podium.engines.vllm.server import Server
from podium.engines.vllm.weights import tensors, write
from podium.errors import EngineError

LOADING = "-loading"
"""At the end of a version: weights that are not all there yet."""


class Folder:
    """Through files: any device, any server that sees the folder under the same path."""

    def __init__(
        self, server: Server, root: Path, dtype: torch.dtype, *, here: bool = True, refresh: bool = False
    ) -> None:
        """`dtype` is the server's: what it would round anyway need not travel. `here`: this process talks to it."""
        self.server = server
        self.root = root.absolute()
        self.dtype = dtype
        self.refresh = refresh
        self._count = 0
        if here:
            shutil.rmtree(self.root, ignore_errors=True)  # of a run that was killed
            weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    @property
    def _newest(self) -> Path:
        return self.root / str(self._count)

    def bring(self, policy: nn.Module, version: str, *, here: bool) -> None:
        """All processes call it; the one that is `here` writes. The checkpoint before goes when the new one is there.

        Raises:
            EngineError: the checkpoint cannot be written, or the server does not take it.
        """
        old = self._newest
        self._count += 1
        try:
            write(policy, self._newest, self.dtype, here=here)
        except OSError as error:
            raise EngineError(
                f"Cannot write weights for vLLM into {self._newest}: {error.strerror or error}.",
                fix="Set vllm_weights_folder to a folder with room for two copies of the model.",
            ) from error
        if here:
            self.again(version)
            shutil.rmtree(old, ignore_errors=True)

    def again(self, version: str) -> None:
        """Have the server, which may have been restarted, read the newest checkpoint."""
        self.server.set_weight_version(version + LOADING)
        self.server.reload_weights(str(self._newest), refresh=self.refresh)
        self.server.reset_prefix_cache()
        self.server.set_weight_version(version)


class Nccl(VLLMClient):
    """From GPU to GPU, by TRL's client: its packing and its groups, our HTTP and versions."""

    def __init__(
        self, server: Server, *, group_port: int, device: torch.device, dtype: torch.dtype, here: bool = True
    ) -> None:
        # Not TRL's: it waits for the server in its own way, and repeats requests that are not to be repeated.
        self.server = server
        self.base_url = server.url
        self.group_port = group_port
        self.dtype = dtype
        self.communicator: Any = None
        self._updating_weights = False
        self._version = ""
        self._metadata: list[tuple[str, str, list[int]]] | None = None
        if here:
            self.init_communicator(device=device)

    def bring(self, policy: nn.Module, version: str, *, here: bool) -> None:
        """As `Folder.bring`. The server must know every tensor before the first comes: the first time costs twice."""
        kind = str(self.dtype).removeprefix("torch.")
        if self._metadata is None:
            self._metadata = [(name, kind, list(x.shape)) for name, x in tensors(policy, self.dtype)]
        if not here:
            for _ in tensors(policy, self.dtype):
                pass
            return
        self._version = version
        self.server.set_weight_version(version + LOADING)
        self.update_named_params(self._metadata, tensors(policy, self.dtype))
        self.server.reset_prefix_cache()

    def again(self, version: str) -> None:
        """NCCL's group died with the server."""
        lost = f"The vLLM server at {self.server.url} was restarted and has lost the weights"
        raise EngineError(f"{lost}; NCCL cannot join it again.", lost=lost)

    # ---- what TRL's client asks of HTTP ----

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self.server.call(url.removeprefix(self.base_url))

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self.server.call(url.removeprefix(self.base_url), kwargs.get("json") or {})

    def get_server_info(self) -> dict[str, Any]:
        """The server's configuration."""
        return self.server.info()

    def _finish_weight_update(self) -> None:
        self.server.call("/finish_weight_update", {"weight_version": self._version})


Transfer = Folder | Nccl
