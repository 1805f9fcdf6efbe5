"""Which back end works here: found out by running a program in it, once per process.

The program must print the answer, and must fail at what a sandbox forbids: a back end that runs but does not hold is
as good as none. Where none is left, the `RewardError` names the fix for the error of each.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import re
import sys
from typing import Literal, get_args

from podium.errors import ConfigError, RewardError
from podium.errors.texts import nearest
from podium.isolation.sandbox.confinement import BackendName, Limits, bubblewrap
from podium.isolation.sandbox.process import Sandbox, SandboxFault
from podium.isolation.sandbox.seccomp import ARCHITECTURES

logger = logging.getLogger(__name__)

SandboxName = Literal["auto", "bubblewrap", "landlock", "none"]
SANDBOXES: tuple[str, ...] = get_args(SandboxName)

_PROBE = """
import os, socket
def attempt(name, function):
    try:
        function()
    except (OSError, PermissionError):
        return
    print("allowed:", name)
attempt("a process", os.fork)
attempt("a socket", socket.socket)
attempt("reading /etc/passwd", lambda: open("/etc/passwd").close())
attempt("writing /", lambda: open("/podium-probe", "w").close())
print(int(input()) * 7)
"""

FIXES: tuple[tuple[str, str], ...] = (
    (
        "bubblewrap is not installed",
        "install it: `apt-get install bubblewrap`, `dnf install bubblewrap` or `pacman -S bubblewrap`",
    ),
    (
        r"No permissions to create (a )?new namespace|[Cc]reating new namespace failed: Operation not permitted",
        "namespaces are denied, as in most containers: start it with `--security-opt seccomp=unconfined` (Docker) or "
        "set `sysctl kernel.unprivileged_userns_clone=1` (older Debian)",
    ),
    (
        r"setting up uid map: Permission denied|Failed RTM_NEWADDR|RTM_NEWADDR: Operation not permitted",
        "AppArmor denies namespaces (Ubuntu 23.10 and later): `apt-get install apparmor-profiles` and link "
        "/usr/share/apparmor/extra-profiles/bwrap-userns-restrict into /etc/apparmor.d, or set "
        "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`",
    ),
    (
        r"No space left on device|user namespaces? (is|are) (disabled|exhausted)|max_user_namespaces",
        "no user namespaces are left: `sysctl user.max_user_namespaces=15000`",
    ),
    (r"Can't mount|pivot_root|Failed to make .* slave", "the container denies mounts: give it CAP_SYS_ADMIN"),
    (r"Unknown option|unrecognized option", "this bubblewrap is too old: 0.4 or later is needed"),
    (r"landlock: ENOSYS", "the kernel has no Landlock: Linux 5.13 or later is needed"),
    (
        r"landlock: EOPNOTSUPP",
        "Landlock is off: add `landlock` to the kernel parameter `lsm=` (see /sys/kernel/security/lsm) and reboot",
    ),
    (r"landlock: EPERM", "a filter of the container denies Landlock: take a newer container engine"),
    (r"seccomp: E", "the kernel has no seccomp filters (CONFIG_SECCOMP_FILTER), or the container denies them"),
    (r"no table of system calls", "use a machine with an x86_64 or aarch64 processor"),
    (r"only on Linux", "train on Linux, or in a Linux container or virtual machine"),
)
"""Patterns of errors of back ends, and what to do about each."""


def choose(sandbox: str = "auto") -> BackendName:
    """The back end for this setting: for `auto` the first of bubblewrap and Landlock that works here.

    Raises `ConfigError` for another word, and `RewardError` with the fixes where the back end does not work.

    >>> choose("none")
    'none'
    """
    if sandbox not in SANDBOXES:
        raise ConfigError(
            "isolation.sandbox_must", sandbox=sandbox, sandboxes=SANDBOXES, near=nearest(str(sandbox), SANDBOXES)
        )
    if sandbox == "none":
        _warn_unconfined(os.getpid())
        return "none"
    wanted: tuple[BackendName, ...] = ("bubblewrap", "landlock") if sandbox == "auto" else (sandbox,)  # type: ignore[assignment]
    lines = ["No sandbox works here, so code that a model wrote is not run."]
    for backend in wanted:
        complaint = probe(backend)
        if complaint is None:
            return backend
        last = complaint.strip().splitlines()[-1] if complaint.strip() else "nothing"
        lines += [f"  {backend}: {last[:300]}", f"    fix: {fix_of(complaint)}"]
    lines.append("  To run it without one all the same, with all that your user may do, write `sandbox: none`.")
    raise RewardError("\n".join(lines))


@functools.cache
def probe(backend: BackendName) -> str | None:
    """None where a program runs in the back end and is held; otherwise what went wrong. Asked once per process."""
    if not sys.platform.startswith("linux"):
        return f"the sandbox works only on Linux, not on {sys.platform}"
    if platform.machine() not in ARCHITECTURES:
        return f"no table of system calls for {platform.machine()}"
    if backend == "bubblewrap" and bubblewrap() is None:
        return "bubblewrap is not installed"
    try:
        with Sandbox.start(backend, Limits(cpu_seconds=5, wall_seconds=15.0, total_seconds=20.0)) as sandbox:
            (result,) = sandbox.run(_PROBE, [{"stdin": "6"}])
    except SandboxFault as fault:
        return str(fault)
    if result.outcome != "ok" or result.stdout != "42\n":
        return f"the trial program ended as {result.outcome} {result.error or ''} {result.stdout[:200]!r}"
    return None


def fix_of(complaint: str) -> str:
    """The fix for the error of a back end.

    >>> fix_of("bwrap: No permissions to create new namespace, likely ...")[:21]
    'namespaces are denied'
    """
    return next((fix for pattern, fix in FIXES if re.search(pattern, complaint)), "see docs/rewards.md")


@functools.cache
def _warn_unconfined(process_id: int) -> None:
    logger.warning(
        "sandbox: none. Code that the model writes runs as your user, with your files and your network. "
        "Leave the setting out for a sandbox."
    )
