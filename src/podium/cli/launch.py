"""`podium train RECIPE --processes N`: accelerate's launcher in a process of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from podium.cli.terminal import clean
from podium.errors import ConfigError, PodiumError, did_you_mean

CONFIGS = Path(__file__).parent.parent / "recipes" / "accelerate"
OUTPUT = "PODIUM_PROCESS_OUTPUT"
"""Environment variable: the folder for what the processes write; its socket hands our own output to the first one."""
SOCKET = "output.sock"
LAUNCHER = "launcher.txt"
LAST_LINES = 20
PATIENCE = 30.0
"""Seconds that processes have to end after an interrupt."""
MISTAKE = 2


def config_file(asked: str) -> Path:
    """A file of accelerate's, or one of those that come with Podium, by name.

    Raises:
        ConfigError: neither.
    """
    shipped = {file.stem: file for file in sorted(CONFIGS.glob("*.yaml"))}
    file = shipped.get(asked, Path(asked))
    if not file.is_file():
        names = ", ".join(shipped)
        raise ConfigError(
            f"--accelerate {asked}: there is no such file, and it is not one of {names}.",
            fix=did_you_mean(asked, shipped),
        )
    return file


def command(words: Sequence[str], processes: int, config: Path) -> list[str]:
    """What is run: `podium train` with the same words, `processes` times."""
    launcher = ["-m", "accelerate.commands.launch", f"--config_file={config}", f"--num_processes={processes}"]
    return [sys.executable, *launcher, "--main_process_port=0", "--module", "podium", "train", *words]


def launch(words: Sequence[str], processes: int | None, asked: str | None) -> int:
    """Run to the end; gives the exit code. The first process writes where we do, the others into files.

    Ctrl-C and SIGTERM end all processes.

    Raises:
        ConfigError: no number of processes, an unknown config, or this is one of several processes already.
        KeyboardInterrupt: after Ctrl-C, when all have ended.
    """
    if processes is None or processes < 1:
        raise ConfigError(f"--processes is {processes}; say how many, at least 1: one for each GPU.")
    if "LOCAL_RANK" in os.environ:
        raise ConfigError(
            "--processes starts processes, and this is one of several already: leave it out under `accelerate launch` "
            "and `torchrun`, whose own flags say how many."
        )
    config = config_file(asked or "ddp")
    folder = Path(tempfile.mkdtemp(prefix="podium-processes-", dir="/tmp"))  # a socket's path must be short
    with (folder / LAUNCHER).open("wb") as log, _lending_output(folder / SOCKET):
        child = subprocess.Popen(
            command(words, processes, config),
            env={**os.environ, OUTPUT: str(folder)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        with _terminated_like_interrupted():
            try:
                code = child.wait()
            except KeyboardInterrupt:
                _end(child)
                raise
    if code:
        return _explained(folder, code)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


@contextlib.contextmanager
def _lending_output(path: Path) -> Iterator[None]:
    """Whoever connects gets our standard output and error: torch's launcher closes what it could inherit."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def lend() -> None:
            with contextlib.suppress(OSError):  # closed at the end
                connection, _ = server.accept()
                with connection:
                    socket.send_fds(connection, [b"."], [1, 2])

        threading.Thread(target=lend, daemon=True).start()
        yield


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(child: subprocess.Popen[bytes]) -> None:
    """The launcher passes the signal on to its processes; those that do not end are killed."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGINT)
        psutil.wait_procs([psutil.Process(child.pid), *family], timeout=PATIENCE)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    child.kill()
    child.wait()


def _explained(folder: Path, code: int) -> int:
    """Says what the first process could not say by itself; gives the code of the process that failed."""
    codes = {int(file.stem): int(file.read_text()) for file in folder.glob("*.code")}
    first = min((rank for rank, own in codes.items() if own), default=None)
    if first != 0:
        file = folder / (LAUNCHER if first is None else f"{first}.txt")
        who = "The launcher" if first is None else f"Process {first}"
        lines = file.read_text(errors="replace").splitlines()[-LAST_LINES:]
        sys.stderr.write("\n".join([f"{who} wrote last:", *(clean(line) for line in lines)]) + "\n")
    sys.stderr.write(f"What the launcher and the other processes wrote is in {folder}\n")
    return code if first is None else codes[first]


# ---- in a process that was started so ----


@contextlib.contextmanager
def as_started() -> Iterator[None]:
    """Around a run: output where it belongs, and the exit code noted for the process that started this one."""
    rank, folder = int(os.environ.get("RANK", "0")), os.environ.get(OUTPUT)
    if not folder:
        yield
        return
    for number, file in zip((1, 2), _borrowed(folder) if rank == 0 else _own(folder, rank), strict=True):
        os.dup2(file, number)
        os.close(file)
    code = 1
    try:
        yield
        code = 0
    except typer.Exit as ended:
        code = ended.exit_code
        raise
    except PodiumError:
        code = MISTAKE
        raise
    finally:
        (Path(folder) / f"{rank}.code").write_text(str(code))


def _borrowed(folder: str) -> list[int]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/{SOCKET}")
        return list(socket.recv_fds(connection, 1, 2)[1])


def _own(folder: str, rank: int) -> list[int]:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    return [os.open(f"{folder}/{rank}.txt", flags, 0o600) for _ in range(2)]
