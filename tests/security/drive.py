"""Runs the attacks in one back end, as whoever runs this: `python drive.py BACKEND [--quick] [--no-namespaces]`.

`--quick`: without the attacks that only a time limit ends, a dozen of the others in one sandbox each time.

Prints JSON: the back end that `auto` chose, what bubblewrap said, and the attacks that got through.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from attacks import ATTACKS, ENDLESS, SYSCALLS, program

from podium.isolation.sandbox import Limits, choose, probe, run_program
from podium.isolation.sandbox.inside import load_filter
from podium.isolation.sandbox.process import Result

SECRET = "kept-outside-5ca1ab1e"
SECRET_NAME = "PODIUM_TEST_TOKEN"


def deny_namespaces() -> None:
    """As container engines do: no `unshare`, `setns`, `mount` and no `clone` with namespaces, for good."""
    arch, namespaces, eperm, allow = (
        {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[platform.machine()],
        0x7E020000,
        0x50001,
        0x7FFF0000,
    )
    numbers = SYSCALLS[platform.machine()]
    denied = [
        step
        for name in ("unshare", "setns", "mount", "pivot_root")
        for step in ((0x15, 0, 1, numbers[name]), (6, 0, 0, eperm))
    ]
    load_filter([
        (0x20, 0, 0, 4), (0x15, 1, 0, arch), (6, 0, 0, allow), (0x20, 0, 0, 0), *denied,
        (0x15, 0, 1, numbers["clone3"]), (6, 0, 0, 0x50000 | 38),
        (0x15, 0, 4, numbers["clone"]), (0x20, 0, 0, 16), (0x45, 0, 1, namespaces), (6, 0, 0, eperm), (6, 0, 0, allow),
        (6, 0, 0, allow),
    ])  # fmt: skip


class World:
    """What lies outside, and whether it is still as it was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = folder / "secret"
        self.victim = folder / "victim"
        self.secret.write_text(SECRET)
        self.victim.write_text("whole")
        self.link = folder / "link"
        self.link.symlink_to(self.secret)
        self.inheritable = os.open(self.secret, os.O_RDONLY)
        os.set_inheritable(self.inheritable, True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.by_path, self.abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.by_path.bind(str(folder / "stream"))
        self.abstract.bind(f"\0podium-{os.getpid()}")
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.bind(str(folder / "datagrams"))
        self.datagrams.setblocking(False)
        for each in (self.by_path, self.abstract):
            each.listen(64)
        self.sleeper = subprocess.Popen(["/bin/sleep", "600"])
        self.before = self.state()

    def described(self) -> dict[str, object]:
        return {
            "folder": str(self.folder),
            "secret": SECRET,
            "secret_name": SECRET_NAME,
            "secret_file": str(self.secret),
            "victim_file": str(self.victim),
            "link": str(self.link),
            "home": os.path.expanduser("~"),
            "port": self.listener.getsockname()[1],
            "unix_socket": str(self.folder / "stream"),
            "abstract_socket": f"\0podium-{os.getpid()}",
            "datagram_socket": str(self.folder / "datagrams"),
            "pid": self.sleeper.pid,
        }

    def state(self) -> object:
        files = {
            each.name: (each.stat().st_mode, each.stat().st_mtime_ns, each.stat().st_size)
            for each in self.folder.iterdir()
        }
        return files, self.secret.read_text(), self.sleeper.poll()

    def damage(self) -> list[str]:
        """What the attacks together have changed outside."""
        found = [] if self.state() == self.before else [f"outside: {self.before} became {self.state()}"]
        with contextlib.suppress(BlockingIOError):
            self.datagrams.recv(1)
            found.append("outside: a datagram arrived")
        for name, listener in (("TCP", self.listener), ("path", self.by_path), ("abstract", self.abstract)):
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                listener.accept()
                found.append(f"outside: a connection came ({name})")
        return found

    def close(self) -> None:
        self.sleeper.kill()
        self.sleeper.wait()


def is_through(result: Result) -> bool:
    said = result.value not in (None, "false", "null", '""', "[]", "0")
    return result.outcome == "fault" or said or "THROUGH" in result.stdout


def main() -> None:
    backend, flags = sys.argv[1], sys.argv[2:]
    if "--no-namespaces" in flags:
        deny_namespaces()
    os.environ[SECRET_NAME] = SECRET
    names = [name for name in ATTACKS if not ("--quick" in flags and name in ENDLESS)]
    names = [name for name in names if not (backend == "none" and os.geteuid() == 0 and name == "privileges: mount")]
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        described = world.described()

        def through(group: Sequence[str]) -> list[str]:
            """Those of a group that got through: as tests of one program, one after the other."""
            source = program(group, platform.machine())
            limits = Limits(cpu_seconds=1, wall_seconds=4.0, total_seconds=60.0, lanes=1, go_on=True)
            tests = [{"call": f"attack_{i}", "args": [described]} for i in range(len(group))]
            results = run_program(source, tests, backend=backend, limits=limits)
            return [name for name, result in zip(group, results, strict=True) if is_through(result)]

        start = time.monotonic()
        size = 12 if "--quick" in flags and backend != "none" else 1
        groups = [names[i : i + size] for i in range(0, len(names), size)]
        with ThreadPoolExecutor(4) as pool:
            got_through = [name for found in pool.map(through, groups) for name in found]
        time.sleep(3.5 if "--quick" not in flags else 0)  # a daemon would have shown itself
        damage = world.damage()
        world.close()
    report = {
        "user": os.geteuid(),
        "attacks": len(names),
        "through": got_through,
        "damage": damage,
        "seconds": round(time.monotonic() - start, 1),
        "bubblewrap": probe("bubblewrap"),
        "auto": choose("auto"),
        "threads": threading.active_count(),
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    ctypes.CDLL(None)
    main()
