"""A sandbox for code that a model wrote: one per program, all its tests inside, judged from outside.

    backend = choose("auto")                                          # bubblewrap, else Landlock, else RewardError
    results = run_program("print(int(input()) * 2)", [{"stdin": "3"}], backend=backend)
    [passed(test, result) for test, result in zip(tests, results)]    # expected answers stay here

It can be used without the rest of Podium: it imports `podium.isolation.machine` and `podium.errors` alone.
`confinement` puts `seccomp` (numbers) and `inside` (the harness) into a command, which `process` runs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from podium.errors import ConfigError, RewardError, not_whole
from podium.errors.texts import listed, nearest
from podium.isolation.sandbox.confinement import USUAL, BackendName, Extras, Limits, bubblewrap
from podium.isolation.sandbox.process import FAULT, OUTCOMES, Outcome, Result, Sandbox, SandboxFault
from podium.isolation.sandbox.seccomp import ARCHITECTURES

logger = logging.getLogger(__name__)


SandboxName = Literal["auto", "bubblewrap", "landlock", "none"]
SANDBOXES: tuple[str, ...] = get_args(SandboxName)


_TO_THE_PROGRAM = ("stdin", "call", "args", "kwargs", "expression", "setup")


def run_program(
    source: str, tests: Sequence[Mapping[str, Any]], *, backend: BackendName, limits: Limits = USUAL
) -> list[Result]:
    """One result per test, from a sandbox of their own. After two failures of the sandbox itself, `FAULT` for each.

    Landlock has no count of threads for each sandbox: where there were too many, a program is run again alone. `tests`
    may have what is expected in them; it is taken out before they go in.

    >>> run_program("print(input()[::-1])", [{"stdin": "abc", "stdout": "cba"}], backend="none")[0].stdout
    'cba\\n'
    """
    inputs = [{key: test[key] for key in _TO_THE_PROGRAM if key in test} for test in tests]
    results = [FAULT] * len(tests)
    for alone in (False, True):
        try:
            with _turns(os.getpid()).taken(alone=alone), Sandbox.start(backend, limits) as sandbox:
                results = sandbox.run(source, inputs)
        except SandboxFault as fault:
            logger.warning("The %s sandbox failed: %s", backend, fault)
        # Other programs may have taken what this one needed.
        crowded = "RuntimeError: can't start new thread"
        if not any(result.outcome == "fault" or (result.error or "").startswith(crowded) for result in results):
            break
    return results


class _Turns:
    """A lock for programs that run at the same time, and now and then one that runs alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._is_alone = False

    @contextlib.contextmanager
    def taken(self, *, alone: bool) -> Iterator[None]:
        """Waits until there is room: for one that runs `alone`, until no other runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone)
            if alone:
                self._is_alone = True
                self._changed.wait_for(lambda: not self._running)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._is_alone = self._is_alone and not alone
                self._changed.notify_all()


@functools.cache
def _turns(process_id: int) -> _Turns:
    return _Turns()


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
        near = nearest(str(sandbox), SANDBOXES)
        raise ConfigError(
            f"sandbox is {sandbox!r}; it must be one of {listed(SANDBOXES)}.",
            fix=f"Did you mean `{near}`?" if near else "",
            sandbox=sandbox,
            sandboxes=SANDBOXES,
            near=near,
        )
    if sandbox == "none":
        _warn_unconfined(os.getpid())
        return "none"
    wanted: tuple[BackendName, ...] = ("bubblewrap", "landlock") if sandbox == "auto" else (sandbox,)  # type: ignore[assignment]
    lines = ["No sandbox works here, so code that a model wrote is not run."]
    for backend in wanted:
        if (complaint := probe(backend)) is None:
            return backend
        last = complaint.strip().splitlines()[-1] if complaint.strip() else "nothing"
        lines += [f"  {backend}: {last[:300]}", f"    fix: {fix_of(complaint)}"]
    lines.append("  To run it without one all the same, with all that your user may do, write `sandbox: none`.")
    raise RewardError("\n".join(lines))


@functools.cache
def probe(backend: BackendName) -> str | None:
    """None where a program runs in the back end and is held; otherwise what went wrong. Asked once per process.

    The program must print the answer, and must fail at what a sandbox forbids: a back end that runs but does not hold
    is as good as none.
    """
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


DEPTH = 60
"""Nested values deeper than this are not equal."""
TOLERANCE = 1e-9
"""Largest relative difference of floats that are equal."""


def passed(test: Mapping[str, Any], result: Result) -> bool:
    """Whether the outcome is what the test expects: the same standard output, or the same value.

    It is decided outside the sandbox, from plain data. Of standard output, white space at the end of lines and of the
    whole is left out. Types of values count: `True` is not 1, and 1 is not 1.0. Tuples come back as lists. What is not
    strict JSON (NaN, keys given twice) passes nothing.

    >>> passed({"stdin": "3", "stdout": "9"}, Result(outcome="ok", stdout="9\\n"))
    True
    >>> passed({"stdin": "3", "stdout": "9\\n16"}, Result(outcome="ok", stdout="9\\n"))
    False
    >>> passed({"call": "f", "expected": 1}, Result(outcome="ok", value="true"))
    False

    The value of an `expression` is equal to one of `one_of` as in Python (with `exact`, the same object), or `within`
    the limits of `math.isclose`, or nearer than `below`:

    >>> passed({"expression": "f()", "one_of": [(1, 2)]}, Result(outcome="ok", value='["tuple", [1.0, 2]]'))
    True
    """
    if result.outcome != "ok":
        return False
    if "stdout" in test:
        return _lines(result.stdout) == _lines(str(test["stdout"]))
    try:
        if "expression" in test:
            value = _untagged(json.loads(result.value or ""))
            return any(_holds(value, expected, test) for expected in test["one_of"])
        value = json.loads(result.value or "", parse_constant=_refuse, object_pairs_hook=_distinct)
        return any(_same(value, expected) for expected in test.get("one_of", [test.get("expected")]))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return False


def _holds(value: Any, expected: Any, test: Mapping[str, Any]) -> bool:
    within = test.get("within")
    if within is None:
        return value is expected if test.get("exact") else bool(value == expected)
    if "below" in within:
        return bool(abs(value - expected) < within["below"])
    return math.isclose(value, expected, **within)


def _untagged(value: Any) -> Any:
    """The value that `inside.tagged` wrote down, sets as frozensets. Raises `ValueError` and `TypeError`."""
    if isinstance(value, dict):
        raise ValueError("no value has this form")
    if not isinstance(value, list):
        return value
    kind, items = value
    parts = [_untagged(item) for item in items]
    return parts if kind == "list" else _KINDS[kind](parts)


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    **{"tuple": tuple, "set": frozenset, "dict": dict, "bytes": bytes},
    "complex": lambda parts: complex(*parts),
}


def _lines(text: str) -> list[str]:
    """Without white space at the end of each line and of the whole.

    >>> _lines("a  \\nb\\n\\n") == _lines("a\\nb")
    True
    """
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same(value: Any, expected: Any, depth: int = 0) -> bool:
    """Whether two values are equal in value and type, at every depth.

    >>> _same([1, 2], [1, 2]), _same([1], [1, 2]), _same(1.0, 1), _same(0.1 + 0.2, 0.3), _same([1, 2], (1, 2))
    (True, False, False, True, True)
    >>> _same(0.1 + 0.2 - 0.3, 0.0), _same(0.0, 1e-10)
    (True, False)
    """
    if depth > DEPTH:
        return False
    if isinstance(expected, tuple):
        expected = list(expected)
    if type(value) is not type(expected):
        return False
    if isinstance(value, Mapping):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key], depth + 1) for key in value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return len(value) == len(expected) and all(map(_same, value, expected, [depth + 1] * len(value)))
    if isinstance(value, float):
        absolute = 1e-12 if expected else TOLERANCE
        return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=absolute) and math.isfinite(value)
    return bool(value == expected)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


def check_settings(reward: Any, ways: Iterable[str]) -> None:
    """Raises `ConfigError` for settings of a reward in a sandbox that cannot work; `extract` is one of `ways`."""
    if reward.extract not in ways:
        raise ConfigError(
            f"extract is {reward.extract!r}; it must be one of {listed(ways)}.", extract=reward.extract, ways=ways
        )
    if not reward.call_seconds > 0:
        raise ConfigError(
            f"call_seconds is {reward.call_seconds!r}; it must be above 0.", call_seconds=reward.call_seconds
        )
    for name in ("timeout", "memory_megabytes", "workers"):
        value = getattr(reward, name)
        if value is not None and (type(value) is not int or value < 1):
            raise not_whole(name, value)


__all__ = ["FAULT", "OUTCOMES", "SANDBOXES", "BackendName", "Extras", "Limits", "Outcome", "Result", "Sandbox"]
__all__ += ["SandboxFault", "SandboxName", "check_settings", "choose", "fix_of", "passed", "probe", "run_program"]
