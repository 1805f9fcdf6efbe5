"""The back ends as data: how each starts the harness, and what the harness is to do about itself.

    Backend("bubblewrap")   namespaces, a read-only file system of the interpreter alone, no capabilities, seccomp
    Backend("landlock")     Landlock, seccomp and rlimits, applied by the harness; works where namespaces are denied
    Backend("none")         rlimits alone: for code that is trusted

Each has the same limits, the same filter for programs, an empty environment and no open descriptors but its pipes.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from podium.isolation.machine import cores
from podium.isolation.sandbox import seccomp

BackendName = Literal["bubblewrap", "landlock", "none"]

NOBODY = 65534
_numbers = itertools.cycle(range(60_001, 61_001))
"""User ids without a user: one for each sandbox that root starts, so that the threads of each are counted alone."""
MEGABYTE = 1 << 20
_DEVICES = (("/dev/null", True), ("/dev/zero", False), ("/dev/urandom", False), ("/dev/random", False))
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/libx32", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32")
_HARNESS = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
_ENVIRONMENT |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one test; passing one is an outcome, not a fault."""

    cpu_seconds: int = 1  # processor time of a test
    wall_seconds: float = 3.0  # time of a test: more than `cpu_seconds`, since several run at once
    total_seconds: float = 10.0  # time of all tests of one program
    memory_megabytes: int = 512  # address space
    output_bytes: int = 64 * 1024  # limit of standard output, and of a returned value
    lanes: int = min(2, cores())  # tests at the same time, where there are many
    go_on: bool = False  # whether tests are run after one that took too long


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Needs of a scorer besides the standard library."""

    paths: tuple[str, ...] = ()  # folders on `sys.path`, readable in the sandbox
    scorer: tuple[str, str, tuple[Any, ...]] | None = None
    """Source text, the function in it that makes the scorer, and its arguments."""


NO_EXTRAS = Extras()
USUAL = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Command that starts the harness, and the first message for it."""

    command: tuple[str, ...]  # ends with the harness; `{seccomp_fd}` stands for a descriptor with `seccomp`
    environment: dict[str, str]
    seccomp: bytes  # a filter for the launcher to load; empty where the harness loads its own
    setup: dict[str, Any]


def launch(backend: BackendName, limits: Limits, extras: Extras = NO_EXTRAS) -> Launch:
    """Make the command and the setup of one back end."""
    paths = readable_paths() + extras.paths
    setup: dict[str, Any] = {
        "limits": rlimits(limits, own_namespace=backend == "bubblewrap"),
        "paths": extras.paths,
        "scorer": extras.scorer,
    }
    command: tuple[str, ...] = (interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", _HARNESS)
    if backend != "none":
        setup["program_filter"] = seccomp.program()
    if backend == "landlock":
        devices = [device for device in _DEVICES if Path(device[0]).exists()]
        setup["landlock"] = [*((path, False) for path in paths), *devices]
        setup["filter"] = seccomp.program(harness=True)
        setup["uid"] = next(_numbers) if os.geteuid() == 0 and _nobody_may_read(paths) else None
    filter_bytes = b""
    if backend == "bubblewrap":
        command = (*_as_nobody(paths), *_bubblewrap(paths), "--", *command)
        filter_bytes = seccomp.packed(seccomp.program(harness=True))
    return Launch(command=command, environment=dict(_ENVIRONMENT), seccomp=filter_bytes, setup=setup)


def rlimits(limits: Limits, *, own_namespace: bool) -> dict[str, int]:
    """Limits of the harness and every test; the processor time is per test."""
    # Since Linux 5.14 RLIMIT_NPROC counts the tasks of a user namespace, before that all of the user.
    release = platform.release().split("-")[0].split(".")[:2]
    return {
        "RLIMIT_AS": limits.memory_megabytes * MEGABYTE,
        "RLIMIT_FSIZE": 16 * MEGABYTE,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_NPROC": 64 if own_namespace and tuple(map(int, release)) >= (5, 14) else own_tasks() + 512,
        "RLIMIT_CORE": 0,
        "RLIMIT_SIGPENDING": 128,  # timers count as well
    }


@functools.cache
def own_tasks() -> int:
    """Threads that this user has at the moment: where no namespace has a count of its own they count as well."""
    uid = os.getuid()
    total = 0
    for folder in Path("/proc").glob("[0-9]*/task"):
        try:
            total += len(list(folder.iterdir())) if folder.stat().st_uid == uid else 0
        except OSError:  # it has ended, or is somebody else's
            continue
    return total


@functools.cache
def interpreter() -> str:
    """The Python of this process without its virtual environment."""
    own = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return os.path.realpath(own if own.exists() else sys.executable)


@functools.cache
def readable_paths() -> tuple[str, ...]:
    """The interpreter, its library and the shared libraries of the system: all that a program can see."""
    base = Path(sys.base_prefix)
    own = [interpreter(), *(str(base / name) for name in ("lib", "lib64"))]
    found = [path for path in (*_LIBRARIES, "/etc/ld.so.cache", *own) if Path(path).exists()]
    return tuple(dict.fromkeys(found))


def _bubblewrap(paths: Sequence[str]) -> tuple[str, ...]:
    """Nothing is in the sandbox but `paths`, four devices and an empty folder of 16 MB; there is no /proc."""
    return (
        bubblewrap() or "bwrap",
        *("--unshare-all", "--unshare-user", *(("--disable-userns",) if _can_disable_userns() else ())),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--uid", str(NOBODY), "--gid", str(NOBODY)),
        *("--hostname", "sandbox"),
        *("--size", str(16 * MEGABYTE), "--tmpfs", "/tmp"),  # first: what is read may lie below it
        *(part for path in paths for part in _bind(path)),
        *(part for path, _ in _DEVICES if Path(path).exists() for part in ("--dev-bind", path, path)),
        *("--remount-ro", "/", "--chdir", "/tmp", "--seccomp", "{seccomp_fd}"),
    )


def _bind(path: str) -> tuple[str, str, str]:
    """Links stay links: /lib is one to /usr/lib on most systems."""
    if Path(path).is_symlink() and path in _LIBRARIES:
        return ("--symlink", os.readlink(path), path)
    return ("--ro-bind", path, path)


@functools.cache
def bubblewrap() -> str | None:
    """The path of `bwrap`, or None."""
    return shutil.which("bwrap")


@functools.cache
def _can_disable_userns() -> bool:
    """Whether this bubblewrap has `--disable-userns` (0.8 and later). As setuid root it refuses the option."""
    import subprocess

    path = bubblewrap()
    if path is None or Path(path).stat().st_mode & stat.S_ISUID:
        return False
    shown = subprocess.run([path, "--help"], capture_output=True, text=True, check=False, timeout=10)
    return "--disable-userns" in shown.stdout


def _as_nobody(paths: Sequence[str]) -> tuple[str, ...]:
    """Command that drops root for the user `nobody`; empty without root, or if `nobody` cannot read the interpreter."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None or not _nobody_may_read(paths):
        return ()
    return (setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--")


@functools.cache
def _nobody_may_read(paths: Sequence[str]) -> bool:
    """Whether the mode bits let everybody through to all of these paths (a Python in root's home is closed)."""
    steps = {step for path in paths for step in (Path(path), *Path(os.path.realpath(path)).parents)}
    return all(step.stat().st_mode & (stat.S_IXOTH if step.is_dir() else stat.S_IROTH) for step in steps)
