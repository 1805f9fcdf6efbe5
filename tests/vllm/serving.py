"""A real `vllm serve` on the CPU, for the tests here: `PODIUM_VLLM` names the program."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from podium.engines.vllm.connect import EXTENSION, WORKER
from podium.models.builtin import resolve_model

VLLM = os.environ.get("PODIUM_VLLM", "")
needs_vllm = [
    pytest.mark.skipif(not VLLM, reason="PODIUM_VLLM names no vllm program"),
    pytest.mark.timeout(1800),
]
MODEL = "builtin:smollm2-135m-instruct"
LONGEST = 256
WITH_ADAPTERS = ("--enable-lora", "--max-lora-rank", "8")
OVER_GLOO = (
    "--worker-extension-cls",
    "gloo_podium_worker.FreshHead",
    "--weight-transfer-config",
    '{"backend": "gloo"}',
)


class Vllm:
    """`vllm serve`, in a process group of its own."""

    def __init__(self, log: Path, *flags: str, model: str = MODEL, program: Sequence[str] = (VLLM,)) -> None:
        self.log = log
        self.flags = flags or ("--worker-extension-cls", EXTENSION)
        self.model = model
        self.program = program
        self.process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, dtype: str = "float32") -> None:
        command = [*self.program, "serve", resolve_model(self.model), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", dtype, "--max-model-len", str(LONGEST), "--enforce-eager"]
        command += ["--logprobs-mode", "processed_logprobs", "--no-enable-chunked-prefill", *self.flags]
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
        settings |= {"PYTHONPATH": f"{WORKER}:{Path(__file__).parent}", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **settings},
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def send(self, number: int) -> None:
        """A signal to all its processes."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.send(signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def serving(server: Vllm) -> Iterator[Vllm]:
    """A server that was started, in float32, until the end of the context."""
    server.start()
    try:
        yield server
    finally:
        server.kill()
