"""A running sandbox: started, spoken to within a time limit, and killed with all that is in it.

with Sandbox.start("bubblewrap", Limits()) as sandbox:
    results = sandbox.run("print(input())", [{"stdin": "7"}])  # [Result(outcome="ok", stdout="7\n", ...)]
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from podium.isolation.sandbox.confinement import NO_EXTRAS, BackendName, Extras, Launch, Limits, launch

Outcome = Literal[
    "ok",  # ended by itself; what it printed or returned is to be compared
    "error",  # an exception, a syntax error among them
    "exit",  # ended before it returned a value, or with an exit code other than 0
    "signal",  # ended by a signal, such as a segmentation fault
    "timeout",  # processor time or time ran out
    "overflow",  # more output than allowed
    "missing",  # has no function of the name that the test calls
    "unusable",  # returned what is not plain data
    "not_run",  # an earlier test took too long
    "fault",  # the sandbox, not the program: no opinion
]
OUTCOMES: tuple[str, ...] = Outcome.__args__  # type: ignore[attr-defined]

START_SECONDS = 30.0
"""For the interpreter and what a scorer imports, on a busy machine."""
GRACE_SECONDS = 5.0
"""For the harness, beyond the time of all tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one test went. All text in it is hostile."""

    outcome: Outcome
    stage: Literal["found", "parsed", "ran"] = "found"
    """How far the program came: its text was there, it compiled, it ran to its end (before any function was called)."""
    stdout: str = ""
    value: str | None = None
    """JSON of what the function returned."""
    error: str | None = None
    """Type and start of the exception."""
    code: int | None = None
    """Exit code, or number of the signal."""
    seconds: float = 0.0


FAULT = Result(outcome="fault")


class SandboxFault(Exception):
    """The sandbox could not do its work; `str()` is what it said."""


@dataclass(slots=True, kw_only=True)
class Sandbox:
    """One harness in its sandbox. Programs that should not meet need one each."""

    process: subprocess.Popen[bytes]
    limits: Limits

    @classmethod
    def start(cls, backend: BackendName, limits: Limits, extras: Extras = NO_EXTRAS) -> Self:
        """Raises `SandboxFault` where it does not come up."""
        plan = launch(backend, limits, extras)
        try:
            process = _spawner(os.getpid()).submit(_spawn, plan).result()
        except OSError as error:
            raise SandboxFault(str(error)) from error
        sandbox = cls(process=process, limits=limits)
        try:
            sandbox._exchange([plan.setup], START_SECONDS)
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def run(self, source: str, tests: Sequence[Mapping[str, Any]]) -> list[Result]:
        """One result per test, each run in a fresh process. Raises `SandboxFault`.

        `tests`: `{"stdin": text}`, `{"call": name, "args": [...], "kwargs": {...}}`, `{}` (load the program alone), or
        `{"answer", "entry"}` for a scorer. What is expected has no place in them.
        """
        limits = self.limits
        nonce = secrets.token_hex(16)
        job = {
            "source": source,
            "tests": list(tests),
            "limits": {
                name: getattr(limits, name)
                for name in ("cpu_seconds", "wall_seconds", "total_seconds", "output_bytes", "lanes", "go_on")
            },
        }
        answer = self._exchange([job, nonce], limits.total_seconds + GRACE_SECONDS)
        if not isinstance(answer, dict) or answer.get("nonce") != nonce or len(answer.get("results", ())) != len(tests):
            raise SandboxFault("the report does not fit the job")
        return [Result(**result) for result in answer["results"]]

    def close(self) -> None:
        """Kills everything in it."""
        with_group = (ProcessLookupError, PermissionError)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except with_group:
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _exchange(self, messages: Sequence[Any], seconds: float) -> Any:
        """Sends messages and reads one, both at once, until the deadline."""
        outgoing = b"".join(_framed(message) for message in messages)
        body = _talk(self.process, outgoing, time.monotonic() + seconds, self._most_bytes(messages))
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise SandboxFault("the report is not JSON") from error

    def _most_bytes(self, messages: Sequence[Any]) -> int:
        """What a report may have: per test its output and its value, six bytes a character at worst."""
        first = messages[0]
        num_tests = len(first["tests"]) if isinstance(first, dict) and "tests" in first else 0
        return (num_tests + 1) * (12 * self.limits.output_bytes + 4096)


def _framed(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return b"%016d" % len(body) + body


def _spawn(plan: Launch) -> subprocess.Popen[bytes]:
    """In a session of its own, without other descriptors, and without `preexec_fn`: a large trainer is not copied."""
    seccomp_fd = _readable(plan.seccomp) if plan.seccomp else None
    try:
        return subprocess.Popen(
            [part.replace("{seccomp_fd}", str(seccomp_fd)) if len(part) < 32 else part for part in plan.command],
            env=plan.environment,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=[] if seccomp_fd is None else [seccomp_fd],
        )
    finally:
        if seccomp_fd is not None:
            os.close(seccomp_fd)


def _readable(data: bytes) -> int:
    """A descriptor to read `data` from; it fits into the buffer of a pipe."""
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    return read


@functools.cache
def _spawner(process_id: int) -> ThreadPoolExecutor:
    """One thread that starts all sandboxes: `--die-with-parent` means the thread, and others come and go."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"podium-sandbox-{process_id}")


def _talk(process: subprocess.Popen[bytes], outgoing: bytes, deadline: float, most_bytes: int) -> bytes:
    """Writes `outgoing` and reads one message, never longer than the deadline. Raises `SandboxFault`."""
    stdin, stdout, stderr = _pipes(process)
    left, incoming, said = memoryview(outgoing), bytearray(), bytearray()
    os.set_blocking(stdin, False)
    with selectors.DefaultSelector() as selector:
        selector.register(stdin, selectors.EVENT_WRITE)
        selector.register(stdout, selectors.EVENT_READ)
        selector.register(stderr, selectors.EVENT_READ)
        while not _is_whole(incoming, most_bytes):
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                raise SandboxFault(f"no report in time; it said: {_shown(said)}")
            for key, _ in events:
                if key.fd == stdin:
                    left = _written(stdin, left)
                elif part := os.read(key.fd, 1 << 16):
                    (incoming if key.fd == stdout else said).extend(part)
                elif key.fd == stdout:
                    raise SandboxFault(_shown(said + _rest(process)))
                if not left if key.fd == stdin else not part:
                    selector.unregister(key.fd)
            del said[4096:]
    return bytes(incoming[16:])


def _pipes(process: subprocess.Popen[bytes]) -> tuple[int, int, int]:
    streams = (process.stdin, process.stdout, process.stderr)
    stdin, stdout, stderr = (stream.fileno() for stream in streams if stream is not None)
    return stdin, stdout, stderr


def _is_whole(incoming: bytearray, most_bytes: int) -> bool:
    """Whether the message that begins is there to its end. Raises `SandboxFault` where it claims to be too long."""
    size = _size(incoming)
    if size is not None and not 0 <= size <= most_bytes:
        raise SandboxFault(f"a report of {size} bytes")
    return size is not None and len(incoming) >= 16 + size


def _size(incoming: bytearray) -> int | None:
    """Of the message that begins; None while its head is not there."""
    if len(incoming) < 16:
        return None
    try:
        return int(incoming[:16])
    except ValueError as error:
        raise SandboxFault("the report has no head") from error


def _written(fd: int, left: memoryview) -> memoryview:
    try:
        return left[os.write(fd, left[: 1 << 16]) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:  # it has ended; what it said comes with the end of its output
        return left[:0]


def _rest(process: subprocess.Popen[bytes]) -> bytes:
    """The end of what it said on standard error."""
    assert process.stderr is not None
    try:
        process.wait(timeout=1)
        os.set_blocking(process.stderr.fileno(), False)
        return os.read(process.stderr.fileno(), 4096) or b""
    except (subprocess.TimeoutExpired, BlockingIOError):
        return b""


def _shown(said: bytes | bytearray) -> str:
    return bytes(said).decode("utf-8", "replace").strip()[-2000:] or "nothing"
