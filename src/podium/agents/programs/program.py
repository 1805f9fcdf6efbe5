"""What a user names as an agent: a function in Python, `file.py:run`, or a command.

    program = resolve_program("agent.py:run", folder)
    ending = program.begin().result(task)          # one episode; `stop` ends it from another thread

A function in Python runs in a thread of this process: one that hangs is given up. Files and commands run in processes,
which are killed with all that they have started.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from podium.agents.programs.child import CommandCall, ProgramCall, called, needs, plain
from podium.agents.setup import GIVEN, Program
from podium.data.query import parse_query
from podium.errors import ConfigError
from podium.errors.texts import clean
from podium.isolation.functions import FileFunction, function_name, location
from podium.isolation.user_files import find_file
from podium.isolation.workers import MARK, Pool, Reply, Unanswered, Worker, load, pool_of
from podium.records import data_url, is_picture

MOST_THREADS = 256
"""Episodes of a function in Python at a time."""
MOST_PROCESSES = 32
"""Episodes of a file or a command at a time."""
TAIL = 8192
"""Bytes of a program's output that are kept, its last ones."""
FIRST_LINES = 7
"""Lines of an output that a message shows: the first ones of a traceback that goes on to its end."""
LAST_LINES = 12
"""The last ones that it shows."""


class EpisodeTask(NamedTuple):
    """What one episode is given."""

    base_url: str
    api_key: str
    session: str
    row: Mapping[str, Any]
    seed: int
    begin: Callable[[], None] = lambda: None
    """Called when everything is there that the program needs; its own time runs from then on."""

    @property
    def arguments(self) -> dict[str, Any]:
        """By name; a column does not hide what every program is given."""
        return {**self.row, **{name: getattr(self, name) for name in GIVEN}}

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables from which clients take address and key of the endpoint."""
        anthropic = {"ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": self.api_key}
        openai = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}
        return {"PODIUM_SESSION": self.session, "PODIUM_SEED": str(self.seed), **openai, **anthropic}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an episode ended."""

    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The entries of a dict that was returned, of which `reward` is the sum."""
    problem: str = ""
    """Why it ended without returning, in words; empty: it returned."""
    log: str = ""
    """The end of what it wrote."""
    unread: str = ""
    """The last line of a command, where that is no reward and it gave no other."""


class Running(Protocol):
    """One episode of a program."""

    def result(self, task: EpisodeTask) -> Ending:
        """Run it to its end; never raises."""

    def stop(self) -> None:
        """Have `result`, in another thread, return soon; to be called until it has."""


def resolve_program(spec: Any, folder: Path | None = None) -> Program:
    """See `agents.table.resolve_program`."""
    try:
        return _resolved(spec, folder or Path())
    except ConfigError as error:
        raise error if error.code else ConfigError(error.what, fix=error.fix, code="C065") from error


def _resolved(spec: Any, folder: Path) -> Program:
    if isinstance(spec, str) and ".py:" in spec:
        name, settings = parse_query(spec)
        if set(settings) - {"env"}:
            raise ConfigError(
                f"`agent: {spec}` has a setting that is not known; there is `env`, the names of variables "
                "that it needs.",
                code="C065",
                fix=f"agent: {name}?env=SEARCH_KEY",
                settings=("agent",),
                spec=spec,
                name=name,
            )
        env = settings.get("env", [])
        return FileProgram(name, folder, [str(variable) for variable in (env if isinstance(env, list) else [env])])
    if isinstance(spec, Mapping) and set(spec) <= {"command", "env"} and spec.get("command"):
        command = spec["command"]
        env = spec.get("env") or []
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        return CommandProgram(words, folder, [str(variable) for variable in ([env] if isinstance(env, str) else env)])
    if isinstance(spec, FunctionProgram | FileProgram | CommandProgram):
        return spec
    if not callable(spec):
        raise ConfigError(
            f"`agent` must be a function in a file, or a command; got {spec!r}.",
            code="C065",
            fix="agent: agent.py:run, or agent: {command: [python, my_agent.py]}",
            settings=("agent",),
            spec=spec,
        )
    return FunctionProgram(spec)


def read_reward(returned: Any) -> Ending:
    """An ending with the reward that a program returned: a number, a dict of numbers, or None."""
    value = plain(returned)
    if value is None:
        return Ending()
    values = value if isinstance(value, dict) else {"": value}
    wrong = [number for number in values.values() if not isinstance(number, int | float) or not math.isfinite(number)]
    if wrong or not values:
        return Ending(problem=f"returned {str(value)[:80]!r}; a reward is a finite number, a dict of them, or None")
    rewards = {name: float(number) for name, number in values.items()}
    return Ending(reward=math.fsum(rewards.values()), rewards=rewards if isinstance(value, dict) else {})


# ---- in this process ----


class FunctionProgram:
    """A function in Python."""

    at_a_time = MOST_THREADS

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.code = function
        self.needs = needs(function)
        self.name = f"`{function_name(function)}`" + (f" ({location(function)})" if location(function) else "")

    def begin(self) -> Running:
        """See `Program`."""
        return _InThread(self.function)

    def tidy(self) -> None:
        """Nothing: what a function in this process leaves behind is the user's."""


class _InThread:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._over = threading.Event()
        self._ending: Ending | None = None

    def result(self, task: EpisodeTask) -> Ending:
        def run() -> None:
            returned, raised, log = called(self._function, task.arguments)
            self._ending = Ending(problem=f"raised {raised}", log=log) if raised else read_reward(returned)
            self._over.set()

        task.begin()
        threading.Thread(target=run, name="podium-program", daemon=True).start()
        self._over.wait()
        return self._ending or Ending(problem="was given up; its thread is left behind")

    def stop(self) -> None:
        self._over.set()


# ---- in processes ----


class _Processes:
    """Workers of one kind, held so that they live as long as the program."""

    at_a_time = MOST_PROCESSES
    path: Path | None = None
    """The file that a run's folder keeps the digest of."""
    key: tuple[Any, ...]
    env: tuple[str, ...]

    def workers(self) -> Pool[Worker]:
        """The pool of this program in this process."""
        make = functools.partial(
            Worker, target="podium.agents.programs.child:answer", variables=self.env, output="dropped"
        )
        self._pool = pool_of(("programs", *self.key, self.env), make)
        return self._pool

    @property
    def code(self) -> Any:
        """See `Program`."""
        return self

    def left(self) -> dict[Worker, list[Any]]:
        """By worker, the processes that episodes have started in it and that live on."""
        import psutil

        marks = {owner.mark: owner for owner in self.workers().workers if owner.process is not None}
        found: dict[Worker, list[Any]] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # ended meanwhile, or of another user
                worker = marks.get(process.environ().get(MARK, ""))
                if worker is not None and worker.process is not None and process.pid != worker.process.pid:
                    found.setdefault(worker, []).append(process)
        return found

    def tidy(self) -> None:
        """End the workers in which processes of an episode live on, with those."""
        for worker in self.left():
            worker.kill()


class FileProgram(_Processes):
    """A function in a file. Raises `ConfigError` where it cannot be imported."""

    def __init__(self, name: str, folder: Path, env: Sequence[str] = ()) -> None:
        file, _, attribute = name.rpartition(":")
        self.path = find_file(file, folder).resolve()
        self.function = FileFunction(path=str(self.path), name=attribute, shown=file)
        self.env = tuple(env)
        self.key = (str(self.path),)
        with self.workers().lend(MOST_PROCESSES) as worker:
            described = load([worker], ProgramCall(function=self.function), file)
        self.needs = [str(need) for need in described["needs"]]
        self.name = f"`{name}` ({described['where']})"

    def begin(self) -> Running:
        """See `Program`."""
        return InProcess(self, is_fresh=False)

    def request(self, task: EpisodeTask, place: Path) -> ProgramCall:
        """What a worker is sent."""
        variables = {name: value for name, value in task.variables.items() if name not in self.env}
        return ProgramCall(
            function=self.function,
            arguments=task.arguments,
            seed=task.seed,
            variables=variables | {"TMPDIR": str(place)},
            log=str(place / "log"),
        )

    def read(self, reply: Reply, place: Path, log: str) -> Ending:
        """The ending that a worker's reply tells."""
        if raised := reply.get("raised"):
            return Ending(problem=f"raised {raised}", log=log)
        return read_reward(reply.get("returned"))


class CommandProgram(_Processes):
    """A command, a process of its own for each episode.

    It finds the endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, and its row as JSON in the file `PODIUM_ROW`. Its
    reward is what it writes into the file `PODIUM_REWARD`, else the last line of its standard output where that is a
    number or a JSON object.
    """

    needs = ()

    def __init__(self, command: Sequence[str], folder: Path, env: Sequence[str] = ()) -> None:
        word = sys.executable if command[0] in ("python", "python3") else command[0]
        found = shutil.which(word) or shutil.which(str(folder / word))
        if found is None:
            raise ConfigError(
                f"`agent`: there is no command {command[0]}.",
                code="C065",
                fix="give the path of a program, or the name of one that is on the PATH",
                settings=("agent",),
                command=command[0],
            )
        self.command = [found, *command[1:]]
        self.env = tuple(env)
        self.folder = folder.resolve()
        files = [self.folder / word for word in self.command[1:]]
        self.path = next((file for file in files if file.is_file()), None)
        self.key = ("command",)
        self.name = f"`{shlex.join(command)[:80]}`"

    def begin(self) -> Running:
        """See `Program`."""
        return InProcess(self, is_fresh=True)

    def request(self, task: EpisodeTask, place: Path) -> CommandCall:
        """What a worker is sent."""
        files = {"PODIUM_ROW": place / "row.json", "PODIUM_REWARD": place / "reward"}
        files["PODIUM_ROW"].write_text(json.dumps(_in_json(dict(task.row))), encoding="utf-8")
        return CommandCall(
            command=self.command,
            folder=str(self.folder),
            variables=task.variables | {name: str(path) for name, path in files.items()} | {"TMPDIR": str(place)},
            log=str(place / "log"),
            stdout=str(place / "stdout"),
        )

    def read(self, reply: Reply, place: Path, log: str) -> Ending:
        """The ending that a worker's reply, a file and the last line of its standard output tell."""
        if code := reply.get("code"):
            return Ending(
                problem=f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}", log=log
            )
        file = place / "reward"
        lines = tail(place / "stdout").split("\n")
        written = next((line for line in reversed(lines) if line.strip()), "")
        is_there = file.is_file() and not file.is_symlink()
        if is_there:
            with file.open("rb") as stream:
                written = stream.read(TAIL).decode(errors="replace")
        try:
            return read_reward(json.loads(written))
        except (ValueError, RecursionError):
            return Ending(problem=f"wrote {written[:80]!r} as its reward") if is_there else Ending(unread=written[:80])


def _in_json(value: Any) -> Any:
    """A value as JSON has it: an image as a data URL, a number that is not finite as null, all else by its text."""
    if isinstance(value, Mapping):
        return {name: _in_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(item) for item in value]
    if is_picture(value):
        return data_url(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


class InProcess:
    """An episode in a worker; `is_fresh`: whether that ends with the episode."""

    def __init__(self, program: FileProgram | CommandProgram, *, is_fresh: bool) -> None:
        self._program = program
        self._is_fresh = is_fresh
        self._worker: Worker | None = None
        self._stopped = False

    def result(self, task: EpisodeTask) -> Ending:
        with _folder() as place, self._program.workers().lend(MOST_PROCESSES) as worker:
            try:
                request = self._program.request(task, place)
                self._load(worker)
            except Exception as error:  # noqa: BLE001  a row that cannot be written, a file that cannot be imported now
                return Ending(problem=f"could not be started: {error}")
            worker.start()
            self._worker = worker
            if self._stopped:
                return Ending(problem="was stopped before it began")
            task.begin()
            reply = worker.ask(request, None)
            self._worker = None
            if self._is_fresh:
                worker.kill()
            text = "\n".join(filter(None, (tail(place / "stdout").rstrip("\n"), tail(place / "log"))))
            if isinstance(reply, Unanswered):
                return Ending(problem=reply.how if reply.has_ended else f"could not be started: {reply.how}", log=text)
            return replace(self._program.read(reply, place, text), log=text)

    def _load(self, worker: Worker) -> None:
        if isinstance(self._program, FileProgram) and not worker.alive:
            load([worker], ProgramCall(function=self._program.function), self._program.name)

    def stop(self) -> None:
        self._stopped = True
        if (worker := self._worker) is not None:
            worker.end()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for one episode, which goes with all that is in it."""
    place = Path(tempfile.mkdtemp(prefix="podium-episode-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def shown_lines(log: str) -> list[str]:
    """The last lines of an output; of a traceback that is longer the first ones too, where the user's own line is."""
    lines = [clean(line) for line in log.rstrip().splitlines()]
    last = max(len(lines) - LAST_LINES, 0)
    begun = next((i for i in range(last - 1, -1, -1) if "Traceback (most recent call last)" in lines[i]), last)
    if begun + FIRST_LINES >= last:
        return lines[begun:]
    return [*lines[begun : begun + FIRST_LINES], "  ...", *lines[last:]]


def tail(log: Path) -> str:
    """The last bytes of a file as text; empty where there is none."""
    with contextlib.suppress(OSError):
        file = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            size = os.fstat(file).st_size
            return os.pread(file, TAIL, max(0, size - TAIL)).decode(errors="replace")
        finally:
            os.close(file)
    return ""
