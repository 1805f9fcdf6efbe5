"""The sandbox holds: every attack in both back ends, as root and as nobody, with and without namespaces."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from podium.isolation.sandbox import Limits, probe, run_program, seccomp
from podium.rewards.code import CodeTests

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
NOBODY = 65534

sys.path.insert(0, str(HERE))
from attacks import ATTACKS  # noqa: E402
from hacks import ASSERTIONS, HACKS, HONEST, STDIN_TESTS, TESTS  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is for Linux")


@functools.cache
def interpreter_for_nobody() -> str | None:
    """A Python of this version that nobody may run: this one, or the system's where this is in root's home."""
    own = os.path.realpath(sys.executable)
    for python in (own, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        command = [*as_nobody(), python, "-c", "pass"]
        if Path(python).exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return python
    return None


def as_nobody() -> list[str]:
    return [str(shutil.which("setpriv")), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]


def drive(backend: str, *flags: str, user: str = "root") -> dict:
    """The report of `drive.py`; skips where this machine cannot show it."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), site]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": os.path.expanduser("~"),
    }
    command = [sys.executable]
    if user == "nobody":
        if os.geteuid() != 0 or shutil.which("setpriv") is None or interpreter_for_nobody() is None:
            pytest.skip("needs root, setpriv and a Python that everybody may run")
        command = [*as_nobody(), str(interpreter_for_nobody())]
    complaint = None if backend == "none" else probe(backend)
    if complaint:
        pytest.skip(f"{backend} does not work here: {complaint}")
    command += [str(HERE / "drive.py"), backend, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.cases(1)
@pytest.mark.defect("B12", "targets of links, locks, sessions, priorities, processors of others, timers")
@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_no_attack_gets_through(backend):
    """As whoever runs the tests. The few that only a time limit ends are with the slow tests."""
    report = drive(backend, "--quick")
    assert (report["through"], report["damage"]) == ([], [])
    assert report["attacks"] >= 60


@pytest.mark.slow
@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize(
    ("backend", "flags"), [("bubblewrap", ()), ("landlock", ()), ("landlock", ("--no-namespaces",))]
)
def test_no_attack_gets_through_as_anybody(backend, flags, user):
    if user == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    report = drive(backend, *flags, user=user)
    assert report["user"] == (0 if user == "root" else NOBODY)
    assert (report["through"], report["damage"]) == ([], [])
    assert report["attacks"] == len(ATTACKS)
    if flags:  # as in a container: bubblewrap is refused, and Landlock is taken
        assert "namespace" in report["bubblewrap"]
        assert report["auto"] == "landlock"


@pytest.mark.slow
def test_the_attacks_are_live():
    """Without a sandbox, as an unprivileged user, most of them get through: those that are held are held by it."""
    report = drive("none", "--quick", user="nobody")
    assert len(report["through"]) >= 45
    assert report["damage"]


@pytest.fixture(params=["bubblewrap", "landlock"])
def backend(request):
    if complaint := probe(request.param):
        pytest.skip(f"{request.param} does not work here: {complaint}")
    return request.param


@pytest.mark.cases(2)
@pytest.mark.parametrize("tests", [TESTS, ASSERTIONS, STDIN_TESTS], ids=["calls", "assertions", "programs"])
def test_no_hack_of_the_grader_is_accepted(backend, tests):
    reward = CodeTests(extract="raw", sandbox=backend)
    scores = reward(completions=[*HACKS.values(), HONEST], tests=[tests] * (len(HACKS) + 1))
    accepted = [name for name, score in zip(HACKS, scores[:-1], strict=True) if score != 0]
    assert len(HACKS) >= 17
    assert (accepted, scores[-1]) == ([], 1.0)


def test_the_hacks_are_live():
    """Against a grader that compares inside, in the process of the program, some are accepted."""
    accepted = []
    for name, source in HACKS.items():
        grader = f"{source}\ntest = {{'expected': 9}}\nassert square(3) == test['expected'], 'wrong'\nprint('GRADED')\n"
        done = subprocess.run([sys.executable, "-I", "-c", grader], capture_output=True, check=False, timeout=20)
        if done.returncode == 0:
            accepted.append(name)
    assert len(accepted) >= 6


def test_a_program_cannot_reach_another_test(backend):
    """What one test leaves in the folder, another may see; its memory and its result it may not."""
    source = """
import os, glob
def f(x):
    left = os.path.exists('/tmp/left')
    try: open('/tmp/left', 'w').close()
    except OSError: pass
    return [x, os.getpid() == 1, sorted(name for name in globals() if name.startswith('leak'))]
"""
    results = run_program(source, [{"call": "f", "args": [x]} for x in range(3)], backend=backend)
    assert [json.loads(result.value) for result in results] == [[x, False, []] for x in range(3)]


@pytest.mark.cases(1)
def test_nothing_is_left_running(backend):
    before = _sandboxed_processes()
    source = "import time\ntime.sleep(60)"
    (result,) = run_program(source, [{"stdin": ""}], backend=backend, limits=Limits(wall_seconds=0.4))
    assert result.outcome == "timeout"
    end = time.monotonic() + 5
    while _sandboxed_processes() > before and time.monotonic() < end:  # the kernel takes a moment for a namespace
        time.sleep(0.05)
    assert _sandboxed_processes() == before


def _sandboxed_processes() -> int:
    """Below this process, or left behind: other tests may have sandboxes of their own."""
    return sum(_is_ours(process) for process in psutil.process_iter())


def _is_ours(process: psutil.Process) -> bool:
    try:
        sandboxed = any("_private_descriptors" in part for part in process.cmdline())
        return sandboxed and (process.ppid() == 1 or os.getpid() in [parent.pid for parent in process.parents()])
    except psutil.Error:
        return False


@pytest.mark.parametrize(("machine", "header"), [
    ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    ("aarch64", "/usr/include/asm-generic/unistd.h"),
])  # fmt: skip
def test_numbers_of_system_calls_are_the_kernel_s(machine, header):
    if not Path(header).exists():
        pytest.skip("no kernel headers")
    words = [line.split() for line in Path(header).read_text().splitlines() if line.startswith("#define __NR")]
    there = {w[1].removeprefix("__NR_").removeprefix("__NR3264_"): int(w[2]) for w in words if w[2].isdigit()}
    there["newfstatat"] = there.get("newfstatat", there.get("fstatat"))
    assert {name: there.get(name) for name in seccomp.numbers(machine)} == dict(seccomp.numbers(machine))


def run_filter(program, nr: int, arch: int, args=()) -> int:
    """The verdict of a seccomp program about a call: a small BPF machine."""
    words = [nr, arch, 0, 0, *(half for arg in (*args, *[0] * 6)[:6] for half in (arg & 0xFFFFFFFF, arg >> 32))]
    at = register = 0
    while True:
        code, true, false, k = program[at]
        at += 1
        if code == 0x06:
            return k
        if code == 0x20:
            register = words[k // 4]
        elif code == 0x54:
            register &= k
        else:
            holds = {0x15: register == k, 0x25: register > k, 0x35: register >= k, 0x45: bool(register & k)}[code]
            at += true if holds else false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_says_what_its_tables_say(machine):
    arch, _ = seccomp.ARCHITECTURES[machine]
    program, calls = seccomp.program(machine), seccomp.numbers(machine)
    allow, deny, kill = 0x7FFF0000, 0x50001, 0x80000000

    def verdict(name, *args):
        return run_filter(program, calls[name], arch, args)

    assert verdict("read") == verdict("exit_group") == allow
    assert {verdict(name) for name in ("execve", "execveat", "capset")} == {deny}
    assert verdict("clone", 0x3D0F00) == allow  # a thread of libc
    assert {verdict("clone", 17), verdict("clone", 0x10010000), verdict("clone", 0)} == {deny}
    assert (verdict("kill", seccomp.OWN_PID), verdict("kill", 1), verdict("kill", 0xFFFFFFFF)) == (allow, deny, deny)
    assert (verdict("fcntl", 1, 3), verdict("fcntl", 1, 8)) == (allow, deny)
    assert (verdict("ioctl", 0, 0x5401), verdict("ioctl", 0, 0x5412)) == (allow, deny)
    assert (verdict("socketpair", 1, 0x80001), verdict("socketpair", 1, 2), verdict("socketpair", 2, 1)) == (
        allow,
        deny,
        deny,
    )
    assert (verdict("sendto", 0, 0, 0, 0, 0), verdict("sendto", 0, 0, 0, 0, 1 << 40)) == (allow, deny)
    assert verdict("clone3") == 0x50000 | 38
    assert run_filter(program, calls["read"], 0xDEAD) == kill
    assert run_filter(program, 9999, arch) == deny
    if machine == "x86_64":
        assert run_filter(program, 0x40000000, arch) == kill


def test_the_filter_is_for_this_machine():
    assert platform.machine() in seccomp.ARCHITECTURES
    assert len(seccomp.program()) < 4096  # the kernel's limit
