"""Sandbox entry point: drops its privileges, then runs programs, each test in a process of its own.

Started as `python -I -S -B -c <this text>`, so it imports the standard library alone. Its standard input and output
are the only way in and out; no test ever holds them:

    in   setup             out  {"ready": true}
    in   job, then nonce   out  {"nonce": ..., "results": [...]}           (as often as wanted; end of input ends it)

A message is its length in sixteen digits and then JSON. A job is {"source", "tests", "limits"}; expected answers are
never part of it. The nonce is read when the tests are over, so none of them has seen it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_OWN_PID = 0x7FFFFFF1
_PRIVATE_FDS = 10  # descriptors from here on belong to the harness; a test has 0 to 3
_RESULT_FD = 3

Json = Mapping[str, Any]
libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Prepares, then does jobs until the end of input."""
    job_fd, report_fd, null_fd = _private_descriptors()
    send(report_fd, {"ready": True, **prepare(receive(job_fd))})
    while (job := receive(job_fd)) is not None:
        results = run_tests(job, job_fd, null_fd)
        send(report_fd, {"nonce": receive(job_fd), "results": results})


def _private_descriptors() -> tuple[int, int, int]:
    """Standard input and output under high numbers; 0 to 9 become /dev/null."""
    job_fd, report_fd = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _PRIVATE_FDS) for fd in (0, 1))
    null_fd = fcntl.fcntl(os.open("/dev/null", os.O_RDWR), fcntl.F_DUPFD_CLOEXEC, _PRIVATE_FDS)
    for fd in (0, 1, *range(3, _PRIVATE_FDS)):
        os.dup2(null_fd, fd)
    return job_fd, report_fd, null_fd


def receive(fd: int) -> Any:
    """The next message; None at the end of input."""
    head = _exactly(fd, 16)
    return json.loads(_exactly(fd, int(head))) if head else None


def _exactly(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (part := os.read(fd, min(size - len(data), 1 << 16))):
        data += part
    return bytes(data) if len(data) == size else b""


def send(fd: int, message: Json) -> None:
    """Write one message."""
    body = json.dumps(message).encode()
    data = memoryview(b"%016d" % len(body) + body)
    while data:
        data = data[os.write(fd, data) :]


def prepare(setup: Json) -> dict[str, Any]:
    """Confines this process as far as its launcher has not, and loads what tests need."""
    if setup.get("uid"):
        os.setgroups([])
        os.setresgid(setup["uid"], setup["uid"], setup["uid"])
        os.setresuid(setup["uid"], setup["uid"], setup["uid"])
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no test may look into this process, or into another test
    for name, value in setup["limits"].items():
        _limit(getattr(resource, name), value)
    abi = None
    if "landlock" in setup:
        for capability in range(64):  # also of a root that keeps its uid: no other user could read the interpreter
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        _checked(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        abi = landlock(setup["landlock"])
        load_filter(setup["filter"])
    sys.path[:0] = setup.get("paths", [])
    global _program_filter, _scorer
    _program_filter = setup.get("program_filter")
    if setup.get("scorer"):
        source, function, arguments = setup["scorer"]
        module = types.ModuleType("scorer")
        exec(compile(source, "<scorer>", "exec"), module.__dict__)
        _scorer = getattr(module, function)(*arguments)
    gc.freeze()
    return {"landlock_abi": abi}


def _limit(which: int, value: int | list[int]) -> None:
    hard = resource.getrlimit(which)[1]
    soft, top = value if isinstance(value, list) else (value, value)
    cap = [limit if hard == resource.RLIM_INFINITY else min(limit, hard) for limit in (soft, top)]
    resource.setrlimit(which, (cap[0], cap[1]))


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {errno.errorcode.get(code, code)} {os.strerror(code)}")
    return result


def landlock(readable: Sequence[tuple[str, bool]]) -> int:
    """Nothing of the file system but what is listed, for reading; no TCP, no signals and no sockets to the outside.

    `readable`: pairs of a path and whether it may be written (devices). Returns the kernel's ABI version.
    """
    abi = _checked(libc.syscall(_LANDLOCK_CREATE, None, 0, 1), "landlock")
    files = (1 << 13) - 1 | (abi >= 2) << 13 | (abi >= 3) << 14 | (abi >= 5) << 15
    num_fields = 1 + (abi >= 4) + (abi >= 6)
    rules = struct.pack("QQQ", files, 3, 3)[: 8 * num_fields]
    ruleset = _checked(libc.syscall(_LANDLOCK_CREATE, rules, len(rules), 0), "landlock_create_ruleset")
    for path, writable in readable:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", 4 | 1 | 8 * os.path.isdir(path) | 2 * writable, fd)
        _checked(libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(fd)
    _checked(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    return abi


def load_filter(instructions: Sequence[tuple[int, int, int, int]]) -> None:
    """Binds this process by a seccomp program, for good."""
    code = b"".join(struct.pack("HBBI", a, t, f, os.getpid() if k == _OWN_PID else k) for a, t, f, k in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(buffer))
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _checked(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "seccomp")


_program_filter: Sequence[tuple[int, int, int, int]] | None = None
_scorer: Callable[[Any, Any], float] | None = None


def run_tests(job: Json, job_fd: int, null_fd: int) -> list[dict[str, Any]]:
    """One result per test, in order. Many tests are dealt out to lanes, processes that run at the same time."""
    tests = job["tests"]
    end = time.monotonic() + job["limits"]["total_seconds"]
    count = job["limits"]["lanes"] if len(tests) >= _LEAST_FOR_LANES else 1
    if count == 1:
        return run_lane(job, tests, end, job_fd, null_fd)
    lanes = [start_lane(job, tests[k::count], end, job_fd, null_fd) for k in range(count)]
    parts = []
    for k, (pid, fd) in enumerate(lanes):
        lost = {"results": [{"outcome": "fault"}] * len(tests[k::count])}  # it ended without a word
        parts.append((receive(fd) or lost)["results"])
        os.close(fd)
        os.waitpid(pid, 0)
    return [parts[index % count][index // count] for index in range(len(tests))]


_LEAST_FOR_LANES = 8  # fewer tests are over before another process is there


def start_lane(job: Json, tests: Sequence[Json], end: float, job_fd: int, null_fd: int) -> tuple[int, int]:
    """Forks the harness; its pid, and the descriptor that its results come from."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            send(write, {"results": run_lane(job, tests, end, job_fd, null_fd)})
        finally:
            os._exit(0)
    os.close(write)
    return pid, read


def run_lane(job: Json, tests: Sequence[Json], end: float, job_fd: int, null_fd: int) -> list[dict[str, Any]]:
    """One result per test. After a test that took too long the rest are not run: they would as well."""
    limits = job["limits"]
    stopped = False
    results: list[dict[str, Any]] = []
    for test in tests:
        late = time.monotonic() >= end
        result = {"outcome": "not_run"} if stopped or late else run_test(job, test, end, job_fd, null_fd)
        stopped = stopped or (result["outcome"] == "timeout" and not limits.get("go_on"))
        results.append(result)
    return results


def run_test(job: Json, test: Json, end: float, job_fd: int, null_fd: int) -> dict[str, Any]:
    """Forks, feeds and watches one test; what it printed, what it returned and how it ended."""
    started = time.monotonic()
    limits = job["limits"]
    stdin_r, stdin_w = os.pipe()
    out_r, out_w = os.pipe()
    result_r, result_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(job, test, (stdin_r, out_w, null_fd, result_w))
    for fd in (stdin_r, out_w, result_w):
        os.close(fd)
    deadline = min(end, started + limits["wall_seconds"])
    text = (test.get("stdin") or "").encode("utf-8", "surrogatepass")
    streams = {out_r: bytearray(), result_r: bytearray()}
    ending = watch(stdin_w, text, streams, deadline, limits["output_bytes"], job_fd)
    status, usage, ending = reap(pid, ending, deadline)
    for fd in streams:
        os.close(fd)
    return {
        **outcome_of(test, status, usage, ending, bytes(streams[result_r]), limits),
        "seconds": round(time.monotonic() - started, 4),
        "stdout": bytes(streams[out_r]).decode("utf-8", "replace"),
    }


def watch(
    stdin_w: int, text: bytes, streams: Mapping[int, bytearray], deadline: float, cap: int, job_fd: int
) -> str | None:
    """Feeds and reads until both streams end; returns why it stopped earlier, or None."""
    poll = select.poll()
    open_fds = set(streams)
    feed = Feed(stdin_w, text)
    poll.register(job_fd, 0)  # only its end: the trainer is gone
    poll.register(stdin_w, select.POLLOUT)
    for fd in streams:
        poll.register(fd, select.POLLIN)
    try:
        while open_fds:
            wait = deadline - time.monotonic()
            events = poll.poll(wait * 1000) if wait > 0 else []
            for fd, event in events:
                if fd == job_fd:
                    return "orphan"
                if fd == stdin_w:
                    feed.write(event, poll)
                elif not (part := os.read(fd, 1 << 16)):
                    poll.unregister(fd)
                    open_fds.discard(fd)
                else:
                    streams[fd].extend(part)
                    if len(streams[fd]) > cap:
                        del streams[fd][cap:]
                        return "overflow"
            if not events:
                return "timeout"
    finally:
        feed.close()
    return None


class Feed:
    """The standard input of a test."""

    def __init__(self, fd: int, text: bytes) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.left = memoryview(text)
        self.is_open = True

    def write(self, event: int, poll: select.poll) -> None:
        """Write as much as the pipe takes; close it where all is written or the test no longer reads."""
        try:
            self.left = self.left[os.write(self.fd, self.left[: 1 << 16]) :] if self.left else self.left
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.left = self.left[:0]
        if not self.left or event & (select.POLLERR | select.POLLHUP):
            poll.unregister(self.fd)
            self.close()

    def close(self) -> None:
        if self.is_open:
            os.close(self.fd)
        self.is_open = False


def reap(pid: int, ending: str | None, deadline: float) -> tuple[int, resource.struct_rusage, str | None]:
    """Waits for the process until the deadline, then ends it. It may have closed its streams and live on."""
    pause = 0.0002
    while ending is None:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return status, usage, None
        if time.monotonic() >= deadline:
            ending = "timeout"
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    if ending == "orphan":
        os._exit(1)
    return status, usage, ending


def outcome_of(
    test: Json, status: int, usage: resource.struct_rusage, ending: str | None, report: bytes, limits: Json
) -> dict[str, Any]:
    """The end of a test: by the kernel's account of its process first, by its own marks second."""
    marks = report.split(b"\n")
    by_signal = os.WIFSIGNALED(status)
    code = os.WTERMSIG(status) if by_signal else os.WEXITSTATUS(status)
    spent = usage.ru_utime + usage.ru_stime
    late = code == signal.SIGXCPU or (code == signal.SIGKILL and spent >= limits["cpu_seconds"])
    value, error = (
        next((mark[len(head) :].decode("utf-8", "replace") for mark in marks if mark.startswith(head)), None)
        for head in (b"value ", b"error ")
    )
    wants_value = any(key in test for key in ("call", "entry", "expression"))
    outcomes = (
        (ending is not None, ending),
        (b"shut" not in marks, "fault"),  # written before the program has a say, so that it cannot be withheld
        (by_signal, "timeout" if late else "signal"),
        (error is not None, "error"),
        (b"missing" in marks, "missing"),
        (b"unusable" in marks, "unusable"),
        (value is None if wants_value else code != 0, "exit"),
        (True, "ok"),
    )
    outcome = next(outcome for holds, outcome in outcomes if holds)
    stage = "parsed" if b"parsed" in marks else "found"
    if b"ran" in marks:
        stage = "ran"
    return {
        "outcome": outcome,
        "stage": stage,
        "value": value if wants_value and outcome == "ok" else None,
        "error": error,
        "code": code,
    }


# --- in the process of a test ----------------------------------------------------------------------------------------


def child(job: Json, test: Json, descriptors: Sequence[int]) -> None:
    """Never returns. From `load_filter` on, the program may do as it likes."""
    code = 1
    try:
        for number, fd in enumerate(descriptors):
            os.dup2(fd, number)
        os.closerange(_RESULT_FD + 1, 1 << 12)
        seconds = job["limits"]["cpu_seconds"]
        _limit(resource.RLIMIT_CPU, [seconds, seconds + 1])
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if _program_filter is not None:
            load_filter(_program_filter)
        tell(b"shut")
        if "entry" in test:
            assert _scorer is not None
            tell(b"parsed")
            tell(b"ran")
            tell_value(float(_scorer(test["answer"], test["entry"])))
            code = 0
        else:
            code = run(job["source"], test)
    except BaseException as error:  # noqa: BLE001
        tell_error(error)
    finally:
        os._exit(code)


def run(source: str, test: Json) -> int:
    """Runs the program, and calls its function where the test names one; returns the exit code."""
    by_stdin = "stdin" in test
    module = types.ModuleType("__main__" if by_stdin else "solution")
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    code = compile(source, "<completion>", "exec", dont_inherit=True)
    tell(b"parsed")
    try:
        exec(code, module.__dict__)
        tell(b"ran")
        if "call" in test:
            tell_value(call(module, test))
        if "expression" in test:
            names = {"math": math, **module.__dict__}
            exec(compile(test.get("setup", ""), "<test>", "exec", dont_inherit=True), names)
            tell_json(tagged(eval(compile(test["expression"], "<test>", "eval", dont_inherit=True), names)))
        return end(0)
    except SystemExit as error:
        if not by_stdin:
            return 1
        return end(error.code if isinstance(error.code, int) else int(error.code is not None))


def end(code: int) -> int:
    """Do what an interpreter does at its end: wait for threads, run exit functions, empty the buffers."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()
    sys.stdout.flush()
    return code & 0xFF


def call(module: types.ModuleType, test: Json) -> Any:
    """`function(*args)`; a dotted name goes through classes, which are made on the way.

    A function that is not there may be a method of the class `Solution`.
    """
    solution = getattr(module, "Solution", None)
    target: Any = module if hasattr(module, test["call"].partition(".")[0]) or solution is None else solution
    for part in test["call"].split("."):
        target = target() if isinstance(target, type) else target
        try:
            target = getattr(target, part)
        except AttributeError:
            tell(b"missing")
            os._exit(1)
    return target(*test.get("args", ()), **test.get("kwargs", {}))


def tell(mark: bytes) -> None:
    """One line to the harness."""
    line = mark + b"\n"
    while line:
        line = line[os.write(_RESULT_FD, line) :]


def tell_value(value: Any) -> None:
    """The value as JSON, where it is plain data through and through."""
    tell_json(value if is_plain(value, 0) else object(), allow_nan=False)


def tell_json(value: Any, *, allow_nan: bool = True) -> None:
    """The value as JSON, or that it is none."""
    try:
        tell(b"value " + json.dumps(value, allow_nan=allow_nan).encode())
    except (ValueError, TypeError, RecursionError, MemoryError):
        tell(b"unusable")


def tagged(value: Any, depth: int = 0) -> Any:
    """Plain data as JSON that tells its containers apart, `["tuple", [1, 2]]`; an object that is no JSON for the rest.

    A subclass is written as what it is made of: what it may compare equal to plays no part outside.
    """
    if depth <= 50:
        for kind, name in _CONTAINERS.items():
            if isinstance(value, kind):
                return [name, [tagged(item, depth + 1) for item in kind.__iter__(value)]]
        if isinstance(value, dict):
            return ["dict", [["tuple", [tagged(k, depth + 1), tagged(v, depth + 1)]] for k, v in dict.items(value)]]
    if isinstance(value, complex):
        return ["complex", [complex.__dict__[part].__get__(value) for part in ("real", "imag")]]
    if value is None or type(value) is bool:
        return value
    return next((plain(value) for kind, plain in _SCALARS.items() if isinstance(value, kind)), object())


def is_plain(value: Any, depth: int) -> bool:
    """Exactly the types of JSON, tuples as lists; a subclass may compare equal to anything."""
    kind = type(value)
    if depth > 50:
        return False
    if kind in (list, tuple):
        return all(is_plain(item, depth + 1) for item in value)
    if kind is dict:
        return all(type(key) is str and is_plain(part, depth + 1) for key, part in value.items())
    return value is None or kind in (bool, int, float, str)


_CONTAINERS: Mapping[Any, str] = {
    **{list: "list", tuple: "tuple", set: "set", frozenset: "set", bytes: "bytes", bytearray: "bytes"},
    type({}.keys()): "set",
}
_SCALARS: Mapping[Any, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}


def tell_error(error: BaseException) -> None:
    """The type and the start of the message, on one line."""
    try:
        text = f"{type(error).__name__}: {error}"[:300]
    except BaseException:  # noqa: BLE001
        text = "an exception that cannot be shown"
    tell(b"error " + text.encode("utf-8", "backslashreplace").replace(b"\n", b" "))


if __name__ == "__main__":
    importlib.invalidate_caches()
    main()
