"""Machines as network namespaces, joined by a bridge in one of their own: nothing leaves them. Needs root and `ip`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

needs_namespaces = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip`"
)


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@dataclass(frozen=True)
class Node:
    """One machine."""

    name: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        """The beginning of a command that runs on it."""
        return ("ip", "netns", "exec", self.name)

    def kill(self) -> None:
        """Everything that runs on it."""
        found = subprocess.run(["ip", "netns", "pids", self.name], check=False, capture_output=True, text=True)
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def cut(self) -> None:
        """Take its cable out."""
        ip("-n", self.name, "link", "set", "eth0", "down")

    def heal(self) -> None:
        """Put it back."""
        ip("-n", self.name, "link", "set", "eth0", "up")


@contextlib.contextmanager
def nodes(count: int) -> Iterator[list[Node]]:
    """Machines 10.77.0.1 and on, each with an interface `eth0`."""
    mark = f"podium{os.getpid()}"
    hub = f"{mark}-hub"
    made = [Node(f"{mark}-{k}", f"10.77.0.{k + 1}") for k in range(count)]
    try:
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for k, node in enumerate(made):
            ip("netns", "add", node.name)
            ip("-n", hub, "link", "add", f"port{k}", "type", "veth", "peer", "name", "eth0", "netns", node.name)
            ip("-n", hub, "link", "set", f"port{k}", "master", "bridge", "up")
            ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", "eth0")
            ip("-n", node.name, "link", "set", "lo", "up")
            node.heal()
        yield made
    finally:
        for node in made:
            node.kill()
            ip("netns", "delete", node.name, check=False)
        ip("netns", "delete", hub, check=False)
