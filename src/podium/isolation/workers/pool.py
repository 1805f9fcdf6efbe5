"""Workers seen from the run: started when first asked, kept for the run, killed at a limit, started anew.

    [reply] = exchange(workers_of(path, ()), [pickle.dumps(request)], limit=60.0)

A worker gets a short list of environment variables and no GPU. Nothing that it sends is unpickled.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import podium
from podium.isolation.workers.serve import INDEX, LENGTH, NOTHING_TAKEN

ENVIRONMENT = frozenset(
    {"PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONHASHSEED"}
    | {"OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "SSL_CERT_FILE"}
)
"""Variables that every worker gets, with those that begin with `LC_`. Others, such as keys, have to be named."""

LONGEST_REPLY = 1 << 28
"""Bytes; whatever claims to be longer is no reply."""

LISTEN_SECONDS = 0.1
"""How often a waiting parent looks whether the worker still lives: a child of its may hold the connection open."""

STACK_SECONDS = 0.2
"""How long a worker at its limit gets to write down where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A worker that did not answer and is no more."""

    how: str
    is_overrun: bool
    index: int | None
    """The completion that it took last."""
    trace: tuple[str, ...]
    """Where it was, the outermost call first."""


@dataclass(slots=True)
class Worker:
    """One process and the connection to it."""

    variables: tuple[str, ...] = ()
    """Environment variables that it gets besides `ENVIRONMENT`."""
    process: subprocess.Popen[bytes] | None = None
    connection: socket.socket | None = None
    scratch: BinaryIO | None = None
    received: bytearray = field(default_factory=bytearray)

    @property
    def alive(self) -> bool:
        """Whether there is a process."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """A fresh process, unless one lives."""
        if self.alive:
            return
        self.kill()
        ours, theirs = socket.socketpair()
        self.scratch = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        self.scratch.write(INDEX.pack(NOTHING_TAKEN))
        self.scratch.flush()
        is_main_thread = threading.current_thread() is threading.main_thread()
        numbers = (theirs.fileno(), self.scratch.fileno(), os.getpid(), int(is_main_thread))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "podium.isolation.workers.serve", *map(str, numbers)],
            env=environment(self.variables),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what the user's functions print must not get into output that a program reads
            pass_fds=numbers[:2],
            start_new_session=True,
        )
        theirs.close()
        self.connection, self.received = ours, bytearray()

    def send(self, message: bytes, deadline: float) -> None:
        """One request. Raises `OSError`."""
        assert self.connection is not None
        self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
        self.connection.sendall(LENGTH.pack(len(message)) + message)

    def receive(self, deadline: float) -> bytes:
        """One reply. Raises `TimeoutError` at the deadline and `EOFError` where none will come."""
        assert self.connection is not None
        assert self.process is not None
        while (reply := self._complete()) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            died = self.process.poll() is not None
            self.connection.settimeout(min(remaining, LISTEN_SECONDS))
            try:
                chunk = self.connection.recv(1 << 20)
            except TimeoutError:
                chunk = None
            if not chunk and (died or chunk is not None):
                raise EOFError
            self.received += chunk or b""
        return reply

    def _complete(self) -> bytes | None:
        if len(self.received) < LENGTH.size:
            return None
        (count,) = LENGTH.unpack(self.received[: LENGTH.size])
        if count > LONGEST_REPLY:
            raise EOFError
        if len(self.received) < LENGTH.size + count:
            return None
        reply = bytes(self.received[LENGTH.size : LENGTH.size + count])
        self.received.clear()
        return reply

    # ---- the end of a process ----

    def lost(self, *, overrun: bool) -> Lost:
        """Ends the process and says what can be known of its last moments."""
        assert self.process is not None
        how = "ran over its limit" if overrun else self._how_it_ended()
        stacks = self._stacks(ask=self.alive)
        taken = self._scratch_bytes()[: INDEX.size]
        (index,) = INDEX.unpack(taken) if len(taken) == INDEX.size else (NOTHING_TAKEN,)
        self.kill()
        return Lost(how=how, is_overrun=overrun, index=None if index < 0 else index, trace=user_frames(stacks))

    def _how_it_ended(self) -> str:
        assert self.process is not None
        try:
            code = self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            return "closed the connection of its worker process"
        if code >= 0:
            return f"ended its worker process (exit code {code})"
        name = signal.Signals(-code).name
        return f"ended its worker process with {name}" + " (out of memory?)" * (name == "SIGKILL")

    def _stacks(self, *, ask: bool) -> str:
        """What `faulthandler` wrote, after asking for it."""
        before = self._scratch_bytes()[INDEX.size :]
        if ask:
            assert self.process is not None
            self.process.send_signal(signal.SIGUSR1)
            until = time.monotonic() + STACK_SECONDS
            size, last = len(before), -1
            while time.monotonic() < until and (size == len(before) or size != last):
                time.sleep(0.02)
                last, size = size, len(self._scratch_bytes()) - INDEX.size
        return self._scratch_bytes()[INDEX.size :].decode(errors="replace")

    def _scratch_bytes(self) -> bytes:
        assert self.scratch is not None
        return os.pread(self.scratch.fileno(), 1 << 16, 0)

    def kill(self) -> None:
        """No process, nothing open."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # its whole session, its children included
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for each in (self.connection, self.scratch):
            if each is not None:
                each.close()
        self.process = self.connection = self.scratch = None


def environment(variables: Sequence[str] = ()) -> dict[str, str]:
    """What a worker sees of the environment: no keys, no GPU, sets of text in the same order in every run."""
    kept = {key: value for key, value in os.environ.items() if key in ENVIRONMENT or key.startswith("LC_")}
    named = {key: os.environ[key] for key in variables if key in os.environ}
    fixed = {"PYTHONPATH": str(Path(podium.__file__).parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    return {"PYTHONHASHSEED": "0", **kept, **fixed, **named}


_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_ESCAPED = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}")
"""How `faulthandler` writes characters of a path that are not ASCII."""
_WORKERS_OWN = str(Path(__file__).with_name("serve.py"))
_BETWEEN = (str(Path(__file__).parent), "<frozen importlib", str(Path(asyncio.__file__).parent), selectors.__file__)
"""Files between ours and the user's, while a file is imported or an `async` function waits."""


def user_frames(stacks: str) -> tuple[str, ...]:
    """Of the last stacks of all threads the one that serves, as a traceback without our frames.

    >>> user_frames('Thread 0x1 (most recent call first):\\n  File "my.py", line 3 in slow\\n'
    ...             f'  File "{_WORKERS_OWN}", line 90 in call\\n')
    ('File "my.py", line 3, in slow',)
    >>> user_frames('  File "/home/\\\\xc5sa/my.py", line 3 in slow\\n'
    ...             f'  File "{_WORKERS_OWN}", line 90 in call\\n')
    ('File "/home/\xc5sa/my.py", line 3, in slow',)
    """
    stacks = _ESCAPED.sub(lambda escaped: chr(int(escaped[0][2:], 16)), stacks)
    for stack in reversed(re.split(r"^(?:Current thread|Thread|Stack).*$", stacks, flags=re.MULTILINE)):
        frames = [match.groupdict() for match in _FRAME.finditer(stack)]
        names = [frame["name"] if frame["file"] == _WORKERS_OWN else "" for frame in frames]
        ours = next((i for i, name in enumerate(names) if name in ("call", "load")), None)
        if ours is not None:
            users = [frame for frame in frames[:ours] if not frame["file"].startswith(_BETWEEN)]
            return tuple(f'File "{each["file"]}", line {each["line"]}, in {each["name"]}' for each in reversed(users))
    return ()


# ---- all workers of this process ----

_workers: dict[tuple[int, Path, tuple[str, ...]], list[Worker]] = {}


def workers_of(path: Path, variables: tuple[str, ...], count: int = 1) -> list[Worker]:
    """`count` workers for a file, the same ones every time; a forked child has its own."""
    own = _workers.setdefault((os.getpid(), path, variables), [])
    own += [Worker(variables) for _ in range(count - len(own))]
    return own[:count]


@atexit.register
def stop_all() -> None:
    """Kill every worker of this process; they start anew when they are asked."""
    for (pid, *_), workers in _workers.items():
        for worker in workers:
            if pid == os.getpid():
                worker.kill()


def exchange(workers: Sequence[Worker], messages: Sequence[bytes], limit: float) -> list[dict[str, Any] | Lost]:
    """Every worker's reply to its pickled request, all within `limit` seconds. An interrupt ends the workers."""
    deadline = time.monotonic() + limit
    try:
        for worker, message in zip(workers, messages, strict=True):
            worker.start()
            with contextlib.suppress(OSError):  # what went wrong is said when no reply comes
                worker.send(message, deadline)
        return [_reply(worker, deadline) for worker in workers]
    except BaseException:
        for worker in workers:
            worker.kill()
        raise


def _reply(worker: Worker, deadline: float) -> dict[str, Any] | Lost:
    try:
        reply = json.loads(worker.receive(deadline))
    except TimeoutError:
        return worker.lost(overrun=True)
    except (EOFError, OSError, ValueError):
        return worker.lost(overrun=False)
    return reply if isinstance(reply, dict) else worker.lost(overrun=False)
