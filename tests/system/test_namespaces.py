"""Runs on two and four machines, each a network namespace with a folder of its own."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.system.namespaces import Node, needs_namespaces, nodes
from tests.system.test_machines import machine, same, started, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400), needs_namespaces]

STEPS = ("--max_steps", "12")
PATIENCE = 600


class Cluster:
    """Machines that run one recipe together."""

    def __init__(self, folder: Path, members: list[Node]) -> None:
        folder.mkdir()
        self.nodes = members
        self.folders = [machine(folder / str(k)) for k in range(len(members))]
        self.runs: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        shared = ("--processes", "1", "--nodes", str(len(self.nodes)), "--rendezvous", f"{self.nodes[0].address}:29500")
        self.runs = [
            started(folder, *STEPS, *shared, "--node-rank", str(rank), "--resume", "auto", inside=node.inside)
            for rank, (folder, node) in enumerate(zip(self.folders, self.nodes, strict=True))
        ]

    def ended(self) -> list[int]:
        return [run.wait(timeout=PATIENCE) for run in self.runs]

    def said(self, rank: int) -> str:
        return " ".join((self.folders[rank] / "said.txt").read_text().split())

    def saved(self, step: int) -> Path:
        """The last file of a checkpoint of the last machine."""
        return self.folders[-1] / f"out/checkpoint-{step}/manifest.json"

    def until_saved(self, step: int) -> None:
        """Wait for a checkpoint of the last machine."""
        end = time.monotonic() + PATIENCE
        while not self.saved(step).is_file():
            assert time.monotonic() < end, self.said(0)[-2000:]
            time.sleep(0.05)

    def whole(self) -> None:
        """Run to the end."""
        self.start()
        assert self.ended() == [0] * len(self.nodes), "\n".join(map(self.said, range(len(self.nodes))))[-6000:]


@pytest.mark.parametrize("count", [2, 4])
def test_a_machine_is_killed_and_comes_back(tmp_path: Path, count: int) -> None:
    with nodes(count) as members:
        calm = Cluster(tmp_path / "calm", members)
        calm.whole()
        disturbed = Cluster(tmp_path / "disturbed", members)
        disturbed.start()
        disturbed.until_saved(4)
        members[-1].kill()
        codes = disturbed.ended()
        assert all(codes), codes
        assert "Traceback" not in disturbed.said(0)
        written = disturbed.saved(4).stat().st_mtime_ns
        disturbed.whole()
        assert disturbed.saved(4).stat().st_mtime_ns == written, "it began anew"
        for folder in disturbed.folders:
            assert same(weights(folder), weights(calm.folders[0]))


@pytest.mark.parametrize("seconds", [8])
def test_a_cable_that_is_out_for_a_moment(tmp_path: Path, seconds: float) -> None:
    """The connections wait; the run goes on as if nothing had happened."""
    with nodes(2) as members:
        calm = Cluster(tmp_path / "calm", members)
        calm.whole()
        disturbed = Cluster(tmp_path / "disturbed", members)
        disturbed.start()
        disturbed.until_saved(4)
        members[1].cut()
        time.sleep(seconds)
        members[1].heal()
        codes = disturbed.ended()
        if any(codes):  # it was one message, then
            assert "Traceback" not in disturbed.said(0)
            disturbed.whole()
        assert same(weights(disturbed.folders[0]), weights(calm.folders[0]))
