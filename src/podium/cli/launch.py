"""`podium train RECIPE --processes N`: accelerate's launcher in a process of its own.

Output goes through descriptors sent over a socket, not by the launcher's own `--tee`: that prefixes every line, passes
it through a pipe, so that there is no terminal for the live line, and mixes it with the launcher's reports. The same
connection tells every process that this one has ended.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from podium.cli.flags import NodeFlags
from podium.cli.words import recipe_and_flags
from podium.errors import ConfigError, LostProcessError, PodiumError
from podium.errors.texts import clean, listed, nearest
from podium.isolation.machine import END_SIGNALS, drop_if_gone, on_end_signals, own_address
from podium.recipe import load
from podium.runs.checkpoint import going_on
from podium.trainer.planned import GROUPS, Launch

OUTPUT = "PODIUM_PROCESS_OUTPUT"
"""Environment variable: the folder that the processes write to, with the socket."""
SOCKET = "output.sock"
LAUNCHER = "launcher.txt"
LAST_LINES = 20
LOGS = "processes"
"""A folder in `output_dir` for the logs of the processes of a failed run."""
JOIN_TIMEOUT = 30.0
"""Seconds that processes have to end after an interrupt."""
MISTAKE = 2
SILENT = 124
LOST = 125
INTERRUPTED = 130
"""Codes of a process; `SILENT`: another one did not answer, `LOST`: another one ended."""
CONSEQUENCES = (SILENT, LOST, INTERRUPTED, *(128 + number for number in END_SIGNALS))
"""Codes of processes that ended since another one had."""

REPLICAS = "parallelism_config_dp_replicate_size"
"""The key of copies of divided weights, in a config file of accelerate's."""
HSDP = "hsdp"
"""The name of the layout that divides weights over the processes of a machine, and has all of them on each machine."""
CONFIGS = Path(__file__).parent.parent / "recipe" / "recipes" / "accelerate"


def machine_flags(machines: NodeFlags, processes: int) -> list[str]:
    """Flags of accelerate's launcher for a run on several machines.

    `processes`: on each machine. Raises `ConfigError` for an address or a rank that cannot be.
    """
    host, _, port = machines.rendezvous.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        is_set = f"it is {machines.rendezvous!r}." if machines.rendezvous else "it is not set."
        raise ConfigError(
            f"--nodes {machines.nodes} needs --rendezvous HOST:PORT, the same on all machines; {is_set}",
            fix="--rendezvous 10.0.0.1:29500, with the address of machine 0 and a port that is free there",
            settings=("rendezvous",),
            rendezvous=machines.rendezvous,
        )
    last = machines.nodes - 1
    if machines.node_rank > last:
        raise ConfigError(
            f"--node-rank is {machines.node_rank}; of {machines.nodes} machines each has one of 0 to {last}.",
            fix=f"--node-rank {last}",
            settings=("node-rank",),
            rank=machines.node_rank,
            count=machines.nodes,
        )
    return [
        f"--num_processes={processes * machines.nodes}",
        f"--num_machines={machines.nodes}",
        f"--machine_rank={machines.node_rank}",
        f"--main_process_ip={host.strip('[]')}",
        f"--main_process_port={port}",
    ]


ELSEWHERE = "192.0.2.1"
"""An address of no machine (RFC 5737), to which the default route leads."""


def interface_towards(host: str) -> dict[str, str]:
    """Return the variable that has gloo listen on the network interface of the way to the first machine.

    By itself gloo takes the address of the host's name, which on many machines is one of their own alone (127.0.1.1).
    So may be the name of the first machine on itself: the interface is then that of the default route. Empty where
    there is no way.
    """
    import psutil

    with contextlib.suppress(OSError):
        own = own_address(host)
        if ipaddress.ip_address(own).is_loopback and host != "localhost" and not _is_address(host):
            own = own_address(ELSEWHERE)
        for name, addresses in psutil.net_if_addrs().items():
            if own in [one.address.partition("%")[0] for one in addresses]:
                return {"GLOO_SOCKET_IFNAME": name}
    return {}


def machines_apart(machines: int, processes: int) -> dict[str, str]:
    """Return the variables by which accelerate divides weights over the `processes` of each machine by itself.

    Raises `ConfigError` where a machine has one process.
    """
    if processes == 1:
        raise ConfigError(
            f"--accelerate {HSDP} divides the weights over the processes of each machine, and here each has one.",
            fix="--accelerate ddp, or --processes with the number of GPUs of a machine",
            settings=("accelerate", "processes"),
        )
    sizes = {"DP_REPLICATE_SIZE": machines, "DP_SHARD_SIZE": processes}
    return {GROUPS: "true", **{f"PARALLELISM_CONFIG_{name}": str(size) for name, size in sizes.items()}}


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def launch(words: Sequence[str], processes: int | None, asked: str | None, machines: NodeFlags) -> int:
    """Run to the end; gives the exit code. The first process writes where we do, the others into files.

    The end of this process, however it comes, ends all others. Signals to end, and the first Ctrl-C, are passed on to
    them; they end after their step, with a checkpoint.

    Raises:
        ConfigError: as `checked_config`.
        KeyboardInterrupt: after a second Ctrl-C, when all have ended.
    """
    config = checked_config(processes, asked)
    flags = [f"--num_processes={processes}", "--main_process_port=0"]
    variables: dict[str, str] = {}
    if machines.nodes > 1:
        flags = machine_flags(machines, processes or 1)
        variables = interface_towards(machines.rendezvous.rpartition(":")[0].strip("[]"))
        if asked == HSDP:
            variables |= machines_apart(machines.nodes, processes or 1)
    launcher = ["-m", "accelerate.commands.launch", f"--config_file={config}", *flags]
    command = [sys.executable, *launcher, "--module", "podium", "train", *words]
    # A short path, for the socket; processes whose connection is lost remove the folder, too.
    with tempfile.TemporaryDirectory(prefix="podium-processes-", dir="/tmp", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        with (folder / LAUNCHER).open("wb") as log, _lending_output(folder / SOCKET), on_end_signals(_interrupt):
            child = subprocess.Popen(
                command,
                # Or the reducer warns of each DDP run that it looked for parameters without gradients and found none.
                env={"TORCH_CPP_LOG_LEVEL": "ERROR", **variables, **os.environ, OUTPUT: made},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            came: list[int] = []

            def pass_on(number: int, _: object) -> None:
                if signal.SIGINT == number in came:
                    raise KeyboardInterrupt
                came.append(number)
                _pass_on(number, child, folder)

            try:
                with on_end_signals(pass_on, interrupts=True):
                    code = child.wait()
            except KeyboardInterrupt:
                _end(child)
                raise
            return _explained(folder, code, words) if code else _agreed(folder)


@contextlib.contextmanager
def _lending_output(path: Path) -> Iterator[None]:
    """Serve this process's standard output and error on a socket, since torch's launcher closes inherited ones.

    The connection stays open as long as this process lives, so its loss tells the others to end.
    """
    connections: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def lend() -> None:
            with contextlib.suppress(OSError):  # closed at the end
                while True:
                    connections.append(server.accept()[0])
                    socket.send_fds(connections[-1], [b"."], [1, 2])

        threading.Thread(target=lend, daemon=True).start()
        try:
            yield
        finally:
            for connection in connections:
                connection.close()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _end(child: subprocess.Popen[bytes]) -> None:
    """The launcher passes the signal on to its processes; those that do not end are killed."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGINT)
        psutil.wait_procs([psutil.Process(child.pid), *family], timeout=JOIN_TIMEOUT)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    child.kill()
    child.wait()


def _pass_on(number: int, child: subprocess.Popen[bytes], folder: Path) -> None:
    """Send a signal to the processes of the run; to the launcher, which ends at once, where none has started."""
    if number == signal.SIGHUP:
        for stream in (1, 2):
            drop_if_gone(stream)
    pids = [int(file.read_text() or 0) for file in folder.glob("*.pid")]
    for pid in filter(None, pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    if not any(pids):
        child.send_signal(number)
    typer.echo(f"\n{signal.Signals(number).name} was passed on to the processes of the run.", err=True)


def _codes(folder: Path) -> dict[int, int]:
    """The code that each process noted as it ended, by rank; a process that a signal ended has none."""
    files = sorted(folder.glob("*.code"), key=lambda file: int(file.stem))
    return {int(file.stem): int(file.read_text()) for file in files}


def _agreed(folder: Path) -> int:
    """The code of a run that all its processes ended alike, as at a signal or by a finding; the first one said why.

    Raises `KeyboardInterrupt` where it was a second signal that ended it.
    """
    code = next(filter(None, _codes(folder).values()), 0)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code


def _explained(folder: Path, code: int, words: Sequence[str]) -> int:
    """Print what the first process could not print itself; gives the exit code of the process that failed first.

    A mistake that a process has named comes before a signal: the launcher kills those that wait for it.
    """
    codes = _codes(folder)
    failed = [rank for rank, own in codes.items() if own and own not in CONSEQUENCES]
    mistaken = [rank for rank in failed if codes[rank] == MISTAKE]
    if mistaken:
        if mistaken[0] != 0:
            message = (folder / f"{mistaken[0]}.error").read_text(errors="replace")
            typer.echo(f"error: In process {mistaken[0]}: {message}", err=True)
        return MISTAKE
    log = (folder / LAUNCHER).read_text(errors="replace")
    killed = ("The launcher", -code) if code < 0 else killed_in(log)
    if killed is not None and killed[1] == signal.SIGTERM and failed:
        killed = None  # by the launcher, since another had failed
    silent = SILENT in codes.values()  # the launcher has killed the one that the others had waited for
    if killed is not None:
        typer.echo(killed_words(*killed, silent=silent), err=True)
    elif failed[:1] != [0]:
        rank = next(iter(failed or codes), None)
        file = folder / (LAUNCHER if rank is None else f"{rank}.txt")
        text = file.read_text(errors="replace") if file.is_file() else log
        who = "The launcher" if rank is None else f"Process {rank}"
        last = (clean(line) for line in text.splitlines()[-LAST_LINES:])
        typer.echo("\n".join([f"{who} wrote last:", *last]), err=True)
    _keep(folder, words)
    if killed is not None and not silent:
        return 128 + killed[1]
    if failed:
        return codes[failed[0]]
    return SILENT if silent else code


def killed_in(log: str) -> tuple[str, int] | None:
    """The process that a signal ended, and the signal's number, from the launcher's report; None: it names none.

    Of several it is the first that the launcher did not end itself, by SIGTERM, since another had failed.
    """
    killed = re.findall(r"rank\s*: (\d+) [^\n]*\n\s*exitcode\s*: -(\d+)", log)
    found = [(f"Process {rank}", int(number)) for rank, number in killed]
    return min(found, key=lambda one: one[1] == signal.SIGTERM, default=None)


def killed_words(who: str, number: int, *, silent: bool = False) -> str:
    """Describe a process that a signal ended; `silent`: since others had waited for it in vain."""
    if silent:
        return f"error: {who} did not answer (stopped, or it hangs), so it was ended, and the run with it."
    names = {known.value: known.name for known in signal.Signals}
    why = " Linux sends it where memory runs out (`dmesg` tells)." if number == signal.SIGKILL else ""
    return f"error: {who} was ended by {names.get(number, f'signal {number}')}, and the run with it.{why}"


def _keep(folder: Path, words: Sequence[str]) -> None:
    """Logs into the run's own folder, if there is one, and how the run goes on."""
    with contextlib.suppress(PodiumError, OSError):
        recipe = load(*recipe_and_flags([word for word in words if word not in ("--no-eval", "--verbose")], "train"))
        output = recipe.folder
        if output.is_dir():
            (output / LOGS).mkdir(exist_ok=True)
            for file in folder.glob("*.txt"):
                shutil.copy(file, output / LOGS / file.name)
            typer.echo(f"What the launcher and the other processes wrote is in {output / LOGS}", err=True)
            typer.echo(going_on([output, *(output / stage.folder for stage in recipe.stages)]), err=True)


# ---- the config file of accelerate's launcher ----


def config_file(asked: str) -> Path:
    """A file of accelerate's, or one of those that come with Podium, by name. Raises `ConfigError` for neither."""
    shipped = {file.stem: file for file in sorted(CONFIGS.glob("*.yaml"))}
    file = shipped.get(asked, Path(asked))
    if not file.is_file():
        near = nearest(asked, shipped)
        raise ConfigError(
            f"--accelerate {asked}: there is no such file, and it is not one of {listed(shipped)}.",
            fix=f"Did you mean `{near}`?" if near else "",
            asked=asked,
            shipped=shipped,
            near=near,
        )
    return file


def checked_config(processes: int | None, asked: str | None) -> Path:
    """The launcher's config file; `asked`: its path or name, None for DDP.

    Raises:
        ConfigError: no number of processes, an unknown or damaged config, DeepSpeed that is not installed, or this is
            one of several processes already.
    """
    if processes is None or processes < 1:
        number = "not set" if processes is None else processes
        raise ConfigError(
            f"--processes is {number}; say how many on this machine, at least 1: one for each GPU.",
            processes=processes,
        )
    if "LOCAL_RANK" in os.environ:
        raise ConfigError(
            "--processes starts processes, and this is one of several already: leave it out under "
            "`accelerate launch` and `torchrun`, whose own flags say how many."
        )
    config = config_file(asked or "ddp")
    if _read(config).get("distributed_type") == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"--accelerate {asked} shares work by DeepSpeed, which is not installed.",
            code="C032",
            fix="pip install deepspeed; or --accelerate fsdp2, which needs no other package",
            asked=asked,
        )
    return config


def _read(config: Path) -> Mapping[str, Any]:
    """Raises `ConfigError` for a file that is no mapping."""
    try:
        values = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        values = None
    if not isinstance(values, Mapping):
        raise _unreadable(config)
    return values


def _unreadable(file: Path) -> ConfigError:
    return ConfigError(
        f"--accelerate {file}: this is no config file of accelerate's, which is YAML: keys with values.",
        fix="--accelerate ddp or fsdp2, or a file that `accelerate config` writes",
        asked=file,
    )


def as_launch(processes: int | None, asked: str | None) -> Launch:
    """The launch of `podium train --processes ... --accelerate ...`, for a check. Raises as `checked_config`."""
    checked_config(processes, asked)
    return launch_of(asked or "ddp", processes or 1)


def launch_of(asked: str, processes: int, machines: int | None = None) -> Launch:
    """Return the launch that `--accelerate` asks for.

    Args:
        asked: the path or name of a config file.
        processes: of all machines.
        machines: None: as the file says.

    Raises:
        ConfigError: an unknown or damaged file.
    """
    file = config_file(asked)
    values = _read(file)
    kind = values.get("distributed_type")
    groups = values.get("parallelism_config") or {}
    fsdp = values.get("fsdp_config") or {}
    deepspeed = values.get("deepspeed_config") or {}
    try:
        if "deepspeed_config_file" in deepspeed:
            stage = _read(Path(deepspeed["deepspeed_config_file"])).get("zero_optimization", {}).get("stage", 0)
        else:
            stage = deepspeed.get("zero_stage", 2)
        return Launch(
            processes=processes,
            machines=machines or int(values.get("num_machines") or 1),
            replicas=(machines or 1) if asked == HSDP else int(groups.get(REPLICAS) or 1),
            fsdp=int(fsdp.get("fsdp_version", 1)) if kind == "FSDP" else None,
            zero=int(stage) if kind == "DEEPSPEED" else None,
        )
    except (AttributeError, TypeError, ValueError):
        raise _unreadable(file) from None


# ---- in a process that was started so ----


@contextlib.contextmanager
def as_started() -> Iterator[None]:
    """Around a run: output where it belongs, and the exit code noted for the process that started this one.

    An end that all processes agree on is no failure to the launcher, which would kill those that are still at it.
    """
    rank = int(os.environ.get("RANK", "0"))
    folder = os.environ.get(OUTPUT)
    if folder:
        _write_to(Path(folder), rank)
    code = 0
    try:
        yield
    except BaseException as error:
        lost = None
        if isinstance(error, RuntimeError):
            from podium.trainer.processes import lost_process

            lost = lost_process(error)
        code = _code(error, lost)
        if lost is not None:
            if folder:  # the process that started this one says which ended, and how to go on
                _leave(folder, f"{rank}.txt", f"error: {lost.what}\n")
            else:
                typer.echo(f"error: {lost}", err=True)
            raise typer.Exit(SILENT if lost.is_silent else 1) from None
        if isinstance(error, PodiumError):
            _leave(folder, f"{rank}.error", str(error))
        elif folder and isinstance(error, (typer.Exit, KeyboardInterrupt)):
            raise typer.Exit(0) from None
        raise
    finally:
        _leave(folder, f"{rank}.code", str(code))


def _code(error: BaseException, lost: LostProcessError | None) -> int:
    if lost is not None:
        return SILENT if lost.is_silent else LOST
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):  # by a signal
        return int(error.code or 0)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return MISTAKE if isinstance(error, PodiumError) else 1


def _leave(folder: str | None, name: str, text: str) -> None:
    """Append to a file in the folder of the process that started this one, with which the folder goes."""
    if folder:
        with contextlib.suppress(OSError), (Path(folder) / name).open("a", encoding="utf-8") as file:
            file.write(text)


def _write_to(folder: Path, rank: int) -> None:
    """The first process's output goes where that of `podium train` does, the others' into files."""
    lent = _connected(folder)
    _leave(str(folder), f"{rank}.pid", str(os.getpid()))
    if rank != 0:
        own = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number, file in zip((1, 2), lent, strict=True):
        os.dup2(file if rank == 0 else own, number)
        os.close(file)


def _connected(folder: Path) -> list[int]:
    """Standard output and error of the process that started this one; when it is gone, this one ends, too."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(folder / SOCKET))
    lent = list(socket.recv_fds(connection, 1, 2)[1])

    def watch() -> None:
        with contextlib.suppress(OSError):
            connection.recv(1)
        shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(JOIN_TIMEOUT)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return lent
