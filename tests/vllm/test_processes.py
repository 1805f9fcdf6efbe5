"""Several processes that sample from one server: the same losses and weights as one process. On CPUs over gloo."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import podium
from podium.engines.vllm.connect import WORKER
from podium.testing import save_tiny_model
from tests.vllm.served import SIZES
from tests.vllm.serving import OVER_GLOO, VLLM, WITH_ADAPTERS, Vllm, serving
from tests.vllm.stand_in import StandIn

logger = logging.getLogger(__name__)
HERE = Path(__file__).parent
CONFIG = Path(podium.__file__).parent / "recipe" / "recipes" / "accelerate" / "fsdp2.yaml"
FLAGS = {"one": [], "ddp": ["--multi_gpu"], "fsdp2": ["--config_file", str(CONFIG)]}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with StandIn(save_tiny_model(tmp_path_factory.mktemp("served") / "tiny", **SIZES)) as running:
        yield running


def run(folder: Path, url: str, division: str, *rank: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """A run of one process, or of two, after each of whose steps the server is compared with the trainer's modules."""
    folder.mkdir()
    launcher = ["-m", "accelerate.commands.launch", *FLAGS[division], "--num_processes=2", "--main_process_port=0"]
    command = [
        sys.executable,
        *(launcher if division != "one" else []),
        str(HERE / "served.py"),
        str(folder),
        url,
        *rank,
    ]
    settings = {"OMP_NUM_THREADS": "1", "ACCELERATE_CONFIG_FILE": str(folder / "none.yaml")}
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    texts, apart = json.loads((folder / "compared.json").read_text())
    logger.info("%s: greedy texts %s, log-probabilities apart by %s", division, len({str(ids) for ids in texts}), apart)
    assert len(apart) == 5
    assert max(apart) < 1e-4
    return json.loads((folder / "log.json").read_text()), load_file(folder / "weights.safetensors")


def assert_same(log: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    for mine, theirs in zip(log, other, strict=True):
        for name in ("loss", "reward", "entropy", "sampling/sampling_logp_difference/mean"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


@pytest.fixture(scope="module")
def alone(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("alone") / "run", server.url, "one")


@pytest.mark.parametrize("division", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(alone: Any, server: Any, tmp_path: Path, division: str) -> None:
    server.requests.clear()
    log, weights = run(tmp_path / "run", server.url, division)
    assert_same(log, alone[0])
    assert log[0]["loss"] != log[1]["loss"]
    for name, theirs in alone[1].items():
        assert torch.allclose(weights[name], theirs, atol=1e-5), name
    reloads = [body for route, body in server.requests if route == "/collective_rpc"]
    assert len(reloads) == 6 + (
        division == "ddp"
    )  # before and after each step, and the proof, which sharded weights have less of


def test_an_adapter_on_a_divided_base_goes_alone(server: Any, tmp_path: Path) -> None:
    server.lora_rank = 8
    server.weight_version = "default"  # as one that no run has sent weights to
    one = run(tmp_path / "one", server.url, "one", "4")
    server.requests.clear()
    log, weights = run(tmp_path / "two", server.url, "fsdp2", "4")
    assert_same(log, one[0])
    assert max(row["sampling/sampling_logp_difference/mean"] for row in log) < 1e-5
    moved = [name for name in weights if "lora_B" in name and weights[name].any()]
    assert moved
    for name in moved:
        assert torch.allclose(weights[name], one[1][name], atol=1e-5), name
    assert server.weight_version == "default"
    assert not [body for route, body in server.requests if route == "/collective_rpc"]
    assert len([body for route, body in server.requests if route == "/v1/load_lora_adapter" and body]) == 6


@pytest.mark.skipif(not VLLM, reason="PODIUM_VLLM names no vllm program")
@pytest.mark.parametrize("way", ["folder", "gloo", "adapter"])
def test_a_real_server_beside_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """After each step its greedy texts are those of the divided modules, and training is that of one process."""
    if way == "gloo":
        pytest.importorskip("vllm", reason="the trainer's side of vLLM's interface is in its package")
        monkeypatch.setenv("PODIUM_OVER_GLOO", "1")
        monkeypatch.setenv("PYTHONPATH", f"{WORKER}:{os.environ.get('PYTHONPATH', '')}")
    model = save_tiny_model(tmp_path / "tiny", **SIZES)
    flags = {"folder": (), "gloo": OVER_GLOO, "adapter": WITH_ADAPTERS}[way]
    rank = ["4"] if way == "adapter" else []
    with serving(Vllm(tmp_path / "log.txt", *flags, model=model)) as server:
        log, weights = run(tmp_path / "two", server.url, "fsdp2", *rank)
        one = run(tmp_path / "one", server.url, "one", *rank)
    assert_same(log, one[0])
    assert max(row["sampling/sampling_logp_difference/max"] for row in log) < 1e-4
    for name, mine in weights.items():
        assert torch.allclose(mine, one[1][name], atol=1e-5), name
    routes = {"folder": "/collective_rpc", "gloo": "/update_weights", "adapter": "/v1/load_lora_adapter"}
    asked = server.log.read_text()
    assert [name for name, route in routes.items() if f'"POST {route} HTTP' in asked] == [way]


def test_a_process_holds_few_tensors_beside_its_part_while_weights_are_sent(tmp_path: Path) -> None:
    """Measured: memory of each of two processes, of a model of 700 MB.

    That is the tensor that was sent last, the next one, and what gloo keeps of an all-gather, more where the other
    process is ahead; of a folder's files one is in memory.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(HERE / "gathered.py"), str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    slack = 8 << 20
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["part"] <= found["whole"] / 2 + slack
        assert found["walked"] <= 5 * found["largest"] + slack
        assert found["written"] <= 5 * found["largest"] + 2 * found["file"] + slack
