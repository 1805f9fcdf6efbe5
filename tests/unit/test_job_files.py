"""`podium init RECIPE --cluster NAME`: what the file of a job starts on each machine, and when it is started again."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from podium.cli import MISTAKE, app
from podium.cli.flags import NodeFlags
from podium.cli.start.cluster import CLUSTERS
from podium.cli.train import STOPPED, UNFINISHED

SLURM = Path(__file__).parents[1] / "system" / "slurm"
ODD = """it's "my" $(touch x) `id` $$HOME: {x} #1.yaml"""
NOTES_WORDS = '#!/bin/bash\nprintf "%s\\0" "$@" >"words-${SLURM_NODEID:-$SKYPILOT_NODE_RANK}"\nexit "${CODE:-0}"\n'
"""A `podium` that notes its words."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe, one with an odd name, and in `bin` the commands of SLURM and a `podium` that notes its words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "a-secret")
    for name in ("run.yaml", ODD):
        (tmp_path / name).write_text("model: builtin:smollm2-135m-instruct\ndataset: builtin:additions\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/podium").write_text(NOTES_WORDS)
    (tmp_path / "bin/podium").chmod(0o755)
    return tmp_path


def written(cluster: str, recipe: str) -> str:
    """The file of a job on two machines with four GPUs each."""
    words = ["init", recipe, "--cluster", cluster, "--nodes", "2", "--processes", "4"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    file = f"job{CLUSTERS[cluster].suffix}"
    assert done.output.splitlines()[-1] == f"  {CLUSTERS[cluster].submit} {file}"
    text = Path(file).read_text()
    assert "a-secret" not in text
    return text


def by_slurm(text: str) -> list[str]:
    """The words that the second machine types."""
    path = f"bin:{SLURM}:{os.environ['PATH']}"
    subprocess.run(["sbatch", "job.sh"], env={**os.environ, "PATH": path}, check=True, timeout=60)
    return Path("words-1").read_text().split("\0")[:-1]


def by_kubernetes(text: str) -> list[str]:
    """The same, with variables as Kubernetes replaces them."""
    _, job = yaml.safe_load_all(text)
    [container] = job["spec"]["template"]["spec"]["containers"]
    variables = {"$$": "$", "$(JOB_COMPLETION_INDEX)": "1"}
    words = [*container["command"], *container["args"]][1:]
    return [re.sub(r"\$\$|\$\(\w+\)", lambda found: variables[found[0]], word) for word in words]


def by_skypilot(text: str) -> list[str]:
    """The same, with the environment that SkyPilot sets."""
    task = yaml.safe_load(text)
    own = {"NUM_NODES": 2, "NODE_RANK": 1, "NODE_IPS": "10.0.0.1\n10.0.0.2", "NUM_GPUS_PER_NODE": 4}
    env = {**os.environ, **task["envs"], **{f"SKYPILOT_{name}": str(value) for name, value in own.items()}}
    subprocess.run(["bash", "-c", task["run"]], env={**env, "PATH": f"bin:{env['PATH']}"}, check=True, timeout=60)
    return Path("words-1").read_text().split("\0")[:-1]


@pytest.mark.parametrize("recipe", ["run.yaml", ODD])
@pytest.mark.parametrize(
    ("started", "rendezvous"),
    [(by_slurm, "127.0.0.1:20007"), (by_kubernetes, "podium-{}-0.podium-{}:29500"), (by_skypilot, "10.0.0.1:29500")],
)
def test_every_machine_types_the_same_command_with_its_rank(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: Callable[[str], list[str]],
    rendezvous: str,
    recipe: str,
) -> None:
    before = {file.name for file in place.iterdir()}
    words = started(written(started.__name__.removeprefix("by_"), recipe))
    assert words[:2] == ["train", recipe]
    launched: list[Any] = []
    monkeypatch.setattr("podium.cli.launch.launch", lambda *given: launched.append(given) or 0)
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    [(rest, processes, accelerate, machines)] = launched
    name = "run" if recipe == "run.yaml" else "it-s-my-touch-x-id-home-x-1"
    assert machines == NodeFlags(nodes=2, node_rank=1, rendezvous=rendezvous.format(name, name))
    assert (processes, accelerate) == (4, None)
    assert "auto" in " ".join(rest)
    made = {file.name for file in place.iterdir()} - before
    assert made <= {"job.sh", "job.yaml", "words-0", "words-1", "tasks"}


@pytest.mark.defect("LSdocs", "a job for SLURM is requeued after 75 alone")
@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (UNFINISHED, True)])
def test_slurm_requeues_what_a_signal_has_ended(place: Path, code: int, *, requeued: bool) -> None:
    text = written("slurm", "run.yaml")
    [notice] = re.findall(r"#SBATCH --signal=USR1@(\d+)\n", text)
    [grace] = re.findall(r"--grace (\d+)", text)
    assert int(grace) < int(notice)
    env = {**os.environ, "PATH": f"bin:{SLURM}:{os.environ['PATH']}", "CODE": str(code)}
    env |= {"SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "32", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"}
    assert subprocess.run(["bash", "job.sh"], env=env, timeout=60).returncode == code
    assert (place / "requeued").exists() is requeued


def test_pods_find_each_other_and_are_started_again(place: Path) -> None:
    service, job = yaml.safe_load_all(written("kubernetes", "run.yaml"))
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    [grace] = re.findall(r"--grace=(\d+)", " ".join(container["args"]))
    assert int(grace) < pod["terminationGracePeriodSeconds"]
    assert pod["restartPolicy"] == "Never"  # a policy of failures asks for it
    codes = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert codes == {"Ignore": [UNFINISHED], "FailJob": [MISTAKE, STOPPED]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert mounts["podium"] == container["workingDir"]


def test_skypilot_recovers_what_a_signal_has_ended(place: Path) -> None:
    task = yaml.safe_load(written("skypilot", "run.yaml"))
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:4"
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [UNFINISHED]
    words = by_skypilot(Path("job.yaml").read_text())
    [mounted] = task["file_mounts"]
    assert words[words.index("--output_dir") + 1] == f"{mounted}/machine-1"


def test_what_is_assumed_and_to_be_edited_is_printed(place: Path) -> None:
    for cluster, known in CLUSTERS.items():
        done = CliRunner().invoke(app, ["init", "--cluster", cluster, "--to", f"{cluster}{known.suffix}"])
        printed = [line.strip() for line in done.output.splitlines()]
        marked = re.findall(r"# (?:Assumed|Edit): (.+)", Path(f"{cluster}{known.suffix}").read_text())
        assert len(marked) >= 4
        assert set(marked) <= set(printed)
        assert (
            f"{cluster}{known.suffix} trains run.yaml on 1 machine with 8 GPUs each (--nodes, --processes)." in printed
        )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("none.yaml --cluster slurm", "There is no recipe none.yaml."),
        (
            "--cluster slrm",
            "--cluster is one of slurm, kubernetes, skypilot; got `slrm`.\n  fix: Did you mean `slurm`?",
        ),
        ("run.yaml --nodes 2", "fix: podium init run.yaml --cluster slurm"),
        (
            "--cluster slurm --task number --machine cpu",
            "is for a recipe that is there, and --task, --machine for a new",
        ),
        (
            "--cluster slurm --to there.sh",
            "there.sh is there already, and podium init overwrites no file.\n  fix: the same with --to there-2.sh",
        ),
        ("--cluster slurm --to nowhere/job.sh", "The job file nowhere/job.sh cannot be written: No such file"),
        ("../run.yaml --cluster skypilot", "fix: cd .., then podium init run.yaml --cluster skypilot"),
    ],
)
def test_a_mistake_is_one_message(place: Path, monkeypatch: pytest.MonkeyPatch, line: str, says: str) -> None:
    (place / "inside").mkdir()
    (place / "there.sh").write_text("mine")
    before = sorted(place.rglob("*"))
    if line.startswith("../"):
        monkeypatch.chdir(place / "inside")
    done = CliRunner().invoke(app, ["init", *shlex.split(line)])
    assert done.exit_code == MISTAKE
    assert says in done.stderr
    assert sorted(place.rglob("*")) == before
    assert (place / "there.sh").read_text() == "mine"
