"""Worker processes for user code: started at the first request, killed at a deadline, started again.

    pool = pool_of(("sums",), functools.partial(Worker, target="my_package.sums:answer"))
    [worker] = pool.take(1)
    reply = worker.ask({"numbers": [1, 2]}, limit=60.0)      # the reply as plain data, or `Unanswered`

In the process, `answer(request, took)` yields the replies to one request (see `child`); requests that call a function
of the user are `functions.Call`. A worker gets a short list of environment variables and no GPU. Nothing that it sends
is unpickled. Our own, because a pool of `pebble` or `loky` unpickles what comes back, and keeps neither the stack nor
the completion in hand of a process that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, Protocol, TypeVar

from podium.errors import ConfigError
from podium.errors.texts import clean, counted, quoted
from podium.isolation.child import INDEX, LENGTH, NOTHING_TAKEN

logger = logging.getLogger(__name__)

ENVIRONMENT = frozenset(
    {"PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONHASHSEED", "SSL_CERT_FILE"}
    | {"OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_CACHE"}
    | {"LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
)
"""Variables that every worker gets, with those that begin with `LC_`. Others, such as keys, have to be named."""

MARK = "PODIUM_WORKER"
"""Variable by which the processes that a worker started are found, also those with a session of their own."""

LONGEST_REPLY = 1 << 28  # bytes; whatever claims to be longer is no reply
LISTEN_SECONDS = 0.1  # between two looks whether the worker still lives: a child of its may hold the connection open
LOAD_SECONDS = 600.0  # longest that the import of a user's file may take: of large libraries on a slow disk
FOR_EVER = 1e8  # seconds
STACK_SECONDS = 0.2  # how long a worker at its limit gets to write down where it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """Reason why a request has no reply."""

    cause: Literal["limit", "ended", "refused", "unsent"]
    """`limit`: it ran over its limit and the process was ended; `ended`: its process ended, or sent what is no reply;
    `refused`: a `PodiumError` came in place of a reply, and the process lives; `unsent`: it cannot be pickled."""
    how: str
    """Read behind the name of what was asked: `ran over its limit`, `ended its worker process with SIGSEGV`; of a
    request that was refused or not sent, the text of the error."""
    fix: str = ""
    code: str = ""
    """Of the error that refused it."""
    index: int | None = None
    """The completion that it took last."""
    trace: tuple[str, ...] = ()
    """Where it was, the outermost call first."""
    output: tuple[str, ...] = ()
    """Lines that it printed, with `output="kept"`."""

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self.cause in ("limit", "ended")


Reply = dict[str, Any]
"""Reply of a worker, from JSON."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One process and the connection to it."""

    target: str  # `module:function` or `file.py:function`: what answers requests there
    variables: tuple[str, ...] | None = ()
    """Environment variables that it gets besides `ENVIRONMENT`; None: all, and the GPUs."""
    output: Literal["shown", "kept", "dropped"] = "shown"
    """Destination of its output: our stderr, into `Unanswered.output`, or nowhere."""
    has_children: bool = False
    """Whether it is to start processes in sessions of their own: they end with it without a word."""
    process: subprocess.Popen[bytes] | None = None
    connection: socket.socket | None = None
    scratch: BinaryIO | None = None
    received: bytearray = field(default_factory=bytearray)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def alive(self) -> bool:
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
        # What the user's functions print must not get into output that a program reads.
        printed = {"shown": 2, "kept": self.scratch.fileno(), "dropped": subprocess.DEVNULL}[self.output]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "podium.isolation.child", self.target, *map(str, numbers)],
            env={**environment(self.variables), MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=None if self.output == "shown" else printed,
            pass_fds=numbers[:2],
            start_new_session=True,
        )
        theirs.close()
        self.connection = ours
        self.received = bytearray()

    def ask(self, request: Any, limit: float | None) -> Reply | Unanswered:
        """The reply to a request within `limit` seconds; None: it may take for ever."""
        return exchange([self], [request], limit)[0]

    def send(self, message: bytes, deadline: float) -> None:
        """One framed request. Raises `OSError`."""
        assert self.connection is not None
        self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
        self.connection.sendall(LENGTH.pack(len(message)) + message)

    def reply(self, deadline: float) -> Reply | Unanswered:
        """The next reply to the request that was sent."""
        try:
            end = self._receive(deadline)
            reply = json.loads(self.received[LENGTH.size : end])
        except TimeoutError:
            return self._ended("limit")
        except (EOFError, OSError, ValueError, RecursionError):
            return self._ended("ended")
        del self.received[:end]
        if not isinstance(reply, dict):
            return self._ended("ended")
        if "refused" not in reply:
            return reply
        fix = str(reply.get("fix", ""))
        return Unanswered(cause="refused", how=str(reply["refused"]), fix=fix, code=str(reply.get("code", "")))

    def _receive(self, deadline: float) -> int:
        """Read on until a reply is there; its end. Raises `TimeoutError` at the deadline, `EOFError` if none comes."""
        assert self.connection is not None
        while (end := self._end_of_reply()) is None or len(self.received) < end:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            was_alive = self.alive
            self.connection.settimeout(min(remaining, LISTEN_SECONDS))
            try:
                chunk = self.connection.recv(1 << 20)
            except TimeoutError:
                chunk = None
            if not chunk and (chunk is not None or not was_alive):
                raise EOFError
            self.received += chunk or b""
        return end

    def _end_of_reply(self) -> int | None:
        """None while its length is not known."""
        if len(self.received) < LENGTH.size:
            return None
        (count,) = LENGTH.unpack_from(self.received)
        if count > LONGEST_REPLY:
            raise EOFError
        return LENGTH.size + count

    def _ended(self, cause: Literal["limit", "ended"]) -> Unanswered:
        """End the process and report what can be known of its last moments."""
        how = "ran over its limit" if cause == "limit" else self._how_it_ended()
        if self.alive:
            self._ask_for_stacks()
        taken, written = self._scratch_bytes()
        index = INDEX.unpack(taken)[0] if len(taken) == INDEX.size else NOTHING_TAKEN
        self.kill()
        output = tuple(written.splitlines()) if self.output == "kept" else ()
        index = None if index < 0 else index
        return Unanswered(cause=cause, how=how, index=index, trace=user_frames(written), output=output)

    def _how_it_ended(self) -> str:
        assert self.process is not None
        try:
            code = self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            return "closed the connection of its worker process"
        if code >= 0:
            return f"ended its worker process (exit code {code})"
        name = signal.Signals(-code).name
        why = " (out of memory, or killed from outside?)" if name == "SIGKILL" else ""
        return f"ended its worker process with {name}{why}"

    def _ask_for_stacks(self) -> None:
        """Have `faulthandler` write them, and wait until it has."""
        assert self.process is not None
        size = before = len(self._scratch_bytes()[1])
        self.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + STACK_SECONDS
        last = -1
        while time.monotonic() < until and (size == before or size != last):
            time.sleep(0.02)
            last = size
            size = len(self._scratch_bytes()[1])

    def _scratch_bytes(self) -> tuple[bytes, str]:
        """The number noted last, and what was written behind it."""
        assert self.scratch is not None
        content = os.pread(self.scratch.fileno(), 1 << 16, 0)
        return content[: INDEX.size], content[INDEX.size :].decode(errors="replace")

    def end(self) -> None:
        """End the process with its children. Whoever waits for its reply in another thread gets `Unanswered`."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # its whole session, its children included
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process, and close what belongs to it."""
        if self.process is not None:
            self.end()
            self.process.wait()
            self._end_left_behind()
        for resource in (self.connection, self.scratch):
            if resource is not None:
                resource.close()
        self.process = self.connection = self.scratch = None

    def _end_left_behind(self) -> None:
        """End what the process started outside of its group (`setsid`), and say so."""
        import psutil

        assert self.process is not None
        ended = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # ended meanwhile, or of another user
                if process.environ().get(MARK) == self.mark and os.getpgid(process.pid) != self.process.pid:
                    ended.append(clean(" ".join(process.cmdline()))[:80])
                    process.kill()
        if ended and not self.has_children:
            what = f"{counted(len(ended), 'process', 'processes')} that a worker process left behind"
            logger.warning("%s, ended now: %s", what, "; ".join(dict.fromkeys(ended)))


def environment(variables: Sequence[str] | None = ()) -> dict[str, str]:
    """Environment of a worker: no keys, no GPU, sets of text in the same order in every run."""
    package = str(Path(__file__).parents[2])
    if variables is None:
        return {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    kept = {key: value for key, value in os.environ.items() if key in ENVIRONMENT or key.startswith("LC_")}
    named = {key: os.environ[key] for key in variables if key in os.environ}
    return {"PYTHONHASHSEED": "0", **kept, "PYTHONPATH": package, "CUDA_VISIBLE_DEVICES": "", **named}


def exchange(workers: Sequence[Worker], requests: Sequence[Any], limit: float | None) -> list[Reply | Unanswered]:
    """Every worker's reply to its request, all within `limit` seconds; None: they may take for ever.

    Where a request cannot be pickled, none is sent. An interrupt ends the workers.
    """
    try:
        messages = [_framed(request) for request in requests]
    except Exception as error:  # noqa: BLE001  any class may refuse in its own way
        return [Unanswered(cause="unsent", how=quoted(error))] * len(requests)
    deadline = time.monotonic() + (FOR_EVER if limit is None else limit)
    try:
        for worker, message in zip(workers, messages, strict=True):
            worker.start()
            with contextlib.suppress(OSError):  # reported when no reply comes
                worker.send(message, deadline)
        return [worker.reply(deadline) for worker in workers]
    except BaseException:
        for worker in workers:
            worker.kill()
        raise


def _framed(request: Any) -> bytes:
    """A request as a worker reads it, after the import path of this process. Raises whatever `pickle` does."""
    return pickle.dumps([entry or os.getcwd() for entry in sys.path]) + pickle.dumps(request)


def load(workers: Sequence[Worker], request: Any, shown: str) -> Reply:
    """Have the file `shown` imported in workers, so that no call's limit pays for it; the first one's reply, if any.

    Raises `ConfigError` for an import that fails, hangs or ends the process.
    """
    replies = exchange(workers, [request] * len(workers), LOAD_SECONDS)
    for reply in replies:
        if isinstance(reply, Unanswered):
            raise _import_failed(reply, shown)
    return replies[0] if replies else {}  # type: ignore[return-value]


def _import_failed(reply: Unanswered, shown: str) -> ConfigError:
    if reply.cause == "refused":
        return ConfigError(reply.how, fix=reply.fix, code=reply.code)
    how = f"took more than {LOAD_SECONDS:g} s" if reply.cause == "limit" else reply.how
    return ConfigError("\n  ".join([f"importing {shown} {how}", *reply.trace]))


_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_ESCAPED = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}")
"""Escapes of `faulthandler` for characters of a path that are not ASCII."""
_CHILD = str(Path(__file__).with_name("child.py"))
_BETWEEN = (str(Path(__file__).parent), "<frozen importlib", str(Path(asyncio.__file__).parent), selectors.__file__)
"""Files between ours and the user's, while a file is imported or an `async` function waits."""


def user_frames(stacks: str) -> tuple[str, ...]:
    """The stack of the thread that serves, from the last stacks of all threads, as a traceback without our frames.

    >>> user_frames('Thread 0x1 (most recent call first):\\n  File "my.py", line 3 in slow\\n'
    ...             f'  File "{_CHILD}", line 90 in serve\\n')
    ('File "my.py", line 3, in slow',)
    >>> user_frames('  File "/home/\\\\xc5sa/my.py", line 3 in slow\\n'
    ...             f'  File "{_CHILD}", line 90 in serve\\n')
    ('File "/home/\xc5sa/my.py", line 3, in slow',)
    """
    stacks = _ESCAPED.sub(lambda escaped: chr(int(escaped[0][2:], 16)), stacks)
    for stack in reversed(re.split(r"^(?:Current thread|Thread|Stack).*$", stacks, flags=re.MULTILINE)):
        frames = [match.groupdict() for match in _FRAME.finditer(stack)]
        ours = next((i for i, frame in enumerate(frames) if (frame["file"], frame["name"]) == (_CHILD, "serve")), None)
        if ours is not None:
            users = [frame for frame in frames[:ours] if not frame["file"].startswith(_BETWEEN)]
            return tuple(f'File "{frame["file"]}", line {frame["line"]}, in {frame["name"]}' for frame in users[::-1])
    return ()


class Killable(Protocol):
    """A worker, a sandbox: something that is or has a process."""

    def kill(self) -> None: ...


T = TypeVar("T", bound=Killable)

POOLS_KEPT = 8  # pools used last that stay when nothing refers to them any more


class Pool(Generic[T]):
    """Workers of one kind, made when first needed. They are killed once nothing refers to the pool."""

    def __init__(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> None:
        self.key = key
        self.make = make
        self.workers: list[T] = []
        self.lock = threading.Lock()
        self.lent: list[T] = []
        self.returned = threading.Condition()
        weakref.finalize(self, _kill_all, self.workers, os.getpid())

    def __reduce__(self) -> Any:  # copies are the pool of this key in the process where they are made
        return pool_of, (self.key, self.make)

    def take(self, count: int) -> list[T]:
        """The first `count` workers, the same ones every time."""
        self.workers += [self.make() for _ in range(count - len(self.workers))]
        return self.workers[:count]

    @contextlib.contextmanager
    def lend(self, most: int | None) -> Iterator[T]:
        """A worker for one thread alone; where `most` are lent, wait until one is returned (None: as many as asked)."""
        with self.returned:
            self.returned.wait_for(lambda: most is None or len(self.lent) < most)
            workers = self.take(most or len(self.lent) + 1)
            self.lent.append(worker := next(worker for worker in workers if worker not in self.lent))
        try:
            yield worker
        finally:
            with self.returned:
                self.lent.remove(worker)
                self.returned.notify()


_pools: weakref.WeakValueDictionary[tuple[Hashable, ...], Pool[Any]] = weakref.WeakValueDictionary()
_recent: deque[Pool[Any]] = deque(maxlen=POOLS_KEPT)


def pool_of(key: tuple[Hashable, ...], make: Callable[[], T]) -> Pool[T]:
    """The pool under a key; a forked child has its own."""
    full = (os.getpid(), *key)
    if (pool := _pools.get(full)) is None:
        _pools[full] = pool = Pool(key, make)
    with contextlib.suppress(ValueError):
        _recent.remove(pool)
    _recent.append(pool)
    return pool


def _kill_all(workers: list[Any], process_id: int) -> None:
    for worker in workers if os.getpid() == process_id else ():
        worker.kill()


def stop_all() -> None:
    """Kill every worker of this process; they start again when they are asked."""
    for (process_id, *_), pool in list(_pools.items()):
        _kill_all(pool.workers, process_id)  # type: ignore[arg-type]
