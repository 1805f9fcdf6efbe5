"""A run on two machines with folders of their own, rehearsed as two launches on this one: `podium train --nodes 2`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from podium.cli import app, launch
from podium.cli.flags import NodeFlags
from podium.cli.launch import interface_towards, machine_flags
from podium.errors import ConfigError
from podium.testing import save_tiny_model

RECIPE = {
    "model": "model",
    "dataset": "rows.jsonl",
    "rewards": ["rewards.py:digits"],
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 8,
    "max_steps": 6,
    "learning_rate": 1e-3,
    "save_strategy": "steps",
    "save_steps": 2,
    "use_cpu": True,
    "report_to": "none",
    "output_dir": "out",
}
REWARD = """def digits(completions, **kwargs):
    return [sum(c.isdigit() for c in text) + len(text) / 10 for text in completions]
"""


def machine(folder: Path) -> Path:
    """A folder with everything that a run needs, as a machine of its own would have it."""
    folder.mkdir()
    save_tiny_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{a}+{b}="}}\n' for a in range(8) for b in range(8)))
    (folder / "rewards.py").write_text(REWARD)
    (folder / "run.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


def started(folder: Path, *words: str, inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a run; `inside`: the beginning of a command that runs on another machine."""
    command = [*inside, sys.executable, "-m", "podium", "train", "run.yaml", "--no-eval", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # launchers set it where a machine has several processes
    said = (folder / "said.txt").open("wb")
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=said)


def together(machines: list[Path], *words: str) -> str:
    """Run on all machines to the end; what the first one said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = ("--processes", "1", "--nodes", str(len(machines)), "--rendezvous", f"127.0.0.1:{port}", *words)
    runs = [started(folder, *shared, "--node-rank", str(rank)) for rank, folder in enumerate(machines)]
    codes = [run.wait(timeout=500) for run in runs]
    said = " ".join((machines[0] / "said.txt").read_text().split())
    assert codes == [0] * len(machines), said[-3000:] + (machines[-1] / "said.txt").read_text()[-3000:]
    return said


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out/model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_machines_train_as_two_processes_and_go_on_from_what_both_have(tmp_path: Path) -> None:
    machines = [machine(tmp_path / name) for name in ("first", "second")]
    said = together(machines)
    assert "out is not shared: every machine saves there for itself." in said
    final = weights(machines[0])
    assert same(final, weights(machines[1]))

    alone = machine(tmp_path / "alone")
    assert started(alone, "--processes", "2").wait(timeout=500) == 0, (alone / "said.txt").read_text()[-3000:]
    assert same(final, weights(alone))

    shutil.rmtree(machines[1] / "out/checkpoint-6")  # lost while it was saved
    (machines[0] / "out/checkpoint-4/optimizer.pt").unlink()
    for folder in machines:
        (folder / "out/model.safetensors").unlink()
    assert "resuming from checkpoint-2" in together(machines, "--resume", "auto")
    assert same(final, weights(machines[0]))
    assert same(final, weights(machines[1]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_machines_that_divide_weights_inside_of_each(tmp_path: Path) -> None:
    """Two processes on each, with a shared folder; fewer processes on one machine go on from its checkpoint."""
    shared = machine(tmp_path / "shared")
    together([shared, shared], "--processes", "2", "--accelerate", "hsdp")
    final = weights(shared)
    alone = machine(tmp_path / "alone")
    assert started(alone, "--processes", "4").wait(timeout=500) == 0, (alone / "said.txt").read_text()[-3000:]
    for name, value in weights(alone).items():
        torch.testing.assert_close(final[name], value, atol=1e-5, rtol=0)

    shutil.rmtree(shared / "out/checkpoint-6")
    words = ("--processes", "2", "--accelerate", "fsdp2", "--per_device_train_batch_size", "16", "--resume", "auto")
    assert started(shared, *words).wait(timeout=500) == 0, (shared / "said.txt").read_text()[-3000:]
    for name, value in weights(shared).items():
        torch.testing.assert_close(value, final[name], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_machine_without_any_checkpoint_is_named(tmp_path: Path) -> None:
    machines = [machine(tmp_path / name) for name in ("first", "second")]
    together(machines, "--max_steps", "2")
    shutil.rmtree(machines[1] / "out")
    with pytest.raises(AssertionError, match=r"is on all machines; that of process 1 has none"):
        together(machines, "--resume", "auto")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--nodes 2", "--nodes 2 needs --rendezvous HOST:PORT, the same on all machines; it is not set."),
        ("--nodes 2 --rendezvous 10.0.0.1", "it is '10.0.0.1'."),
        (
            "--nodes 2 --rendezvous 10.0.0.1:29500 --node-rank 2",
            "--node-rank is 2; of 2 machines each has one of 0 to 1.",
        ),
    ],
)
def test_machines_that_cannot_be(words: str, says: str) -> None:
    done = CliRunner().invoke(app, ["train", "run.yaml", "--processes", "1", *words.split()])
    assert done.exit_code == 2
    assert says in done.output


def test_flags_of_the_launcher() -> None:
    machines = NodeFlags(nodes=2, node_rank=1, rendezvous="[fe80::1]:29500")
    assert machine_flags(machines, 8) == [
        *("--num_processes=16", "--num_machines=2", "--machine_rank=1"),
        *("--main_process_ip=fe80::1", "--main_process_port=29500"),
    ]
    with pytest.raises(ConfigError):
        machine_flags(NodeFlags(nodes=2, rendezvous="host:99999"), 1)


def test_gloo_listens_where_the_first_machine_can_be_reached() -> None:
    assert interface_towards("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_towards("no-such-machine.invalid") == {}


def test_a_first_machine_whose_name_is_a_loopback_address_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Debian writes it into /etc/hosts: `127.0.1.1 node0`."""
    monkeypatch.setattr(launch, "own_address", {"node0": "127.0.1.1", launch.ELSEWHERE: "10.0.0.7"}.__getitem__)
    cards = {"lo": [SimpleNamespace(address="127.0.0.1")], "eth1": [SimpleNamespace(address="10.0.0.7")]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: cards)
    assert interface_towards("node0") == {"GLOO_SOCKET_IFNAME": "eth1"}
