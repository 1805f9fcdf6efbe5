"""The job file of `podium init --cluster slurm`, rehearsed on this machine by the commands in `slurm/`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.system.test_machines import machine, same, started, weights

SLURM = Path(__file__).with_name("slurm")


def free_job() -> str:
    """The number of a job whose port is free."""
    for port in range(20000 + os.getpid() % 9000, 30000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return str(port - 20000)
    pytest.fail("no port is free")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_that_gets_usr1_is_requeued_and_reaches_its_end(tmp_path: Path) -> None:
    folder = machine(tmp_path / "job")
    alone = machine(tmp_path / "alone")
    for place in (folder, alone):
        recipe = yaml.safe_load((place / "run.yaml").read_text())
        (place / "run.yaml").write_text(yaml.safe_dump({**recipe, "max_steps": 40, "save_steps": 100}))
    podium = [sys.executable, "-m", "podium"]
    subprocess.run([*podium, "init", "--cluster", "slurm", "--nodes", "2", "--processes", "1"], cwd=folder, check=True)
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "podium").write_text(f'#!/bin/bash\nexec {sys.executable} -m podium "$@"\n')
    (commands / "podium").chmod(0o755)
    env = {**os.environ, "PATH": f"{commands}:{SLURM}:{os.environ['PATH']}", "SLURM_JOB_ID": free_job()}
    with (folder / "job.txt").open("wb") as file:
        job = subprocess.Popen(["sbatch", "job.sh"], cwd=folder, env=env, stdout=file, stderr=file)
    metrics = folder / "out/metrics.jsonl"
    while job.poll() is None and not (metrics.is_file() and metrics.read_text().count("\n") > 3):
        time.sleep(0.05)
    for task in (folder / "tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    code = job.wait(timeout=900)
    printed = " ".join((folder / "job.txt").read_text().split())
    assert code == 0, printed[-3000:]
    assert printed.count("SIGUSR1 was passed on to the processes of the run.") == 2, printed[-3000:]
    [checkpoint] = re.findall(r"To go on from out/checkpoint-(\d+)", printed)
    assert f"{40 - int(checkpoint)} of 40 steps in" in printed
    assert started(alone, "--processes", "2").wait(timeout=500) == 0, (alone / "said.txt").read_text()[-3000:]
    assert same(weights(folder), weights(alone))
