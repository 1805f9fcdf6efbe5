"""A running sandbox: started, spoken to within a time limit, and killed with all that is in it.

with Sandbox.start("bubblewrap", Limits()) as sandbox:
    results = sandbox.run("print(input())", [{"stdin": "7"}])  # [Result(outcome="ok", stdout="7\n", ...)]
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

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

START_SECONDS = 30.0  # for the interpreter and what a scorer imports, on a busy machine
GRACE_SECONDS = 5.0  # for the harness, beyond the time of all tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one test. All text in it is hostile."""

    outcome: Outcome
    stage: Literal["found", "parsed", "ran"] = "found"
    """Stages reached: its text was there, it compiled, it ran to its end (before any function was called)."""
    stdout: str = ""
    value: str | None = None  # JSON of what the function returned
    error: str | None = None  # type and start of the exception
    code: int | None = None  # exit code, or number of the signal
    seconds: float = 0.0


FAULT = Result(outcome="fault")


class SandboxFault(Exception):
    """The sandbox could not do its work; `str()` is its error output."""


@dataclass(slots=True, kw_only=True)
class Sandbox:
    """One harness in its sandbox. Programs that should not meet need one each."""

    process: subprocess.Popen[bytes]
    connection: socket.socket  # its standard input and output
    errors: BinaryIO  # its standard error
    limits: Limits

    @classmethod
    def start(cls, backend: BackendName, limits: Limits, extras: Extras = NO_EXTRAS) -> Self:
        """Raises `SandboxFault` where it does not come up."""
        plan = launch(backend, limits, extras)
        ours, theirs = socket.socketpair()
        errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        with theirs:
            try:
                process = _spawner(os.getpid()).submit(_spawn, plan, theirs, errors).result()
            except OSError as error:
                ours.close()
                raise SandboxFault(str(error)) from error
        sandbox = cls(process=process, connection=ours, errors=errors, limits=limits)
        try:
            sandbox._exchange([plan.setup], START_SECONDS, most_bytes=4096)
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
        names = ("cpu_seconds", "wall_seconds", "total_seconds", "output_bytes", "lanes", "go_on")
        job = {"source": source, "tests": list(tests), "limits": {name: getattr(limits, name) for name in names}}
        # Per test its output and its value, six bytes a character at worst.
        most_bytes = (len(tests) + 1) * (12 * limits.output_bytes + 4096)
        answer = self._exchange([job, nonce], limits.total_seconds + GRACE_SECONDS, most_bytes)
        if not isinstance(answer, dict) or answer.get("nonce") != nonce or len(answer.get("results", ())) != len(tests):
            raise SandboxFault("the report does not fit the job")
        return [Result(**result) for result in answer["results"]]

    def close(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        self.connection.close()
        self.errors.close()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _exchange(self, messages: Sequence[Any], seconds: float, most_bytes: int) -> Any:
        """Send messages and read one of at most so many bytes, until the deadline. Raises `SandboxFault`."""
        deadline = time.monotonic() + seconds
        bodies = [json.dumps(message).encode() for message in messages]
        try:
            self.connection.settimeout(seconds)
            with contextlib.suppress(ConnectionError):  # it has ended; its errors are reported below
                self.connection.sendall(b"".join(b"%016d" % len(body) + body for body in bodies))
            head = self._read(16, deadline)
            if not head.strip().isdigit():
                raise SandboxFault("the report has no head")
            if int(head) > most_bytes:
                raise SandboxFault(f"a report of {int(head)} bytes")
            body = self._read(int(head), deadline)
        except TimeoutError:
            raise SandboxFault(f"no report in time; it said: {self._said()}") from None
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise SandboxFault("the report is not JSON") from error

    def _read(self, count: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < count:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self.connection.settimeout(left)
            try:
                part = self.connection.recv(min(count - len(content), 1 << 16))
            except ConnectionError:
                part = b""
            if not part:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=1)
                raise SandboxFault(self._said())
            content += part
        return bytes(content)

    def _said(self) -> str:
        """The end of what it wrote on standard error."""
        self.errors.seek(0)
        return self.errors.read(1 << 20).decode("utf-8", "replace").strip()[-2000:] or "nothing"


def _spawn(plan: Launch, connection: socket.socket, errors: BinaryIO) -> subprocess.Popen[bytes]:
    """In a session of its own, without other descriptors, and without `preexec_fn`: a large trainer is not copied."""
    seccomp_fd = None
    if plan.seccomp:
        seccomp_fd, write = os.pipe()
        os.write(write, plan.seccomp)  # it fits into the buffer of a pipe
        os.close(write)
    try:
        return subprocess.Popen(
            [part.replace("{seccomp_fd}", str(seccomp_fd)) if len(part) < 32 else part for part in plan.command],
            env=plan.environment,
            cwd="/",
            stdin=connection.fileno(),
            stdout=connection.fileno(),
            stderr=errors,
            start_new_session=True,
            pass_fds=[] if seccomp_fd is None else [seccomp_fd],
        )
    finally:
        if seccomp_fd is not None:
            os.close(seccomp_fd)


@functools.cache
def _spawner(process_id: int) -> ThreadPoolExecutor:
    """One thread that starts all sandboxes: `--die-with-parent` means the thread, and others come and go."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"podium-sandbox-{process_id}")
