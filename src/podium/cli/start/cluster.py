"""`podium init RECIPE --cluster NAME`: the file of a job that trains a recipe on several machines.

The file is a template, `templates/job-NAME.*`, with few places to fill. Its comments say what it assumes and what to
edit, and `podium init` prints them.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from podium.cli.start import rendered
from podium.cli.start.recipe_file import in_yaml
from podium.errors import ConfigError
from podium.recipe.document import open_document

ASSUMED = "# Assumed: "
EDIT = "# Edit: "
"""How comments begin that are printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A scheduler of jobs."""

    suffix: str
    """Suffix of the file and of its template."""
    submit: str
    """The command that takes the file."""
    quoted: Callable[[str], str]
    """The name of a recipe as the file must have it."""
    is_remote: bool = True
    """Whether machines have the working directory under another path."""


def _argument(text: str) -> str:
    """An argument in YAML of Kubernetes, which would replace `$(NAME)` in it."""
    return in_yaml(text.replace("$", "$$"))


CLUSTERS: Mapping[str, Cluster] = {
    "slurm": Cluster(suffix=".sh", submit="sbatch", quoted=shlex.quote, is_remote=False),
    "kubernetes": Cluster(suffix=".yaml", submit="kubectl apply -f", quoted=_argument),
    "skypilot": Cluster(suffix=".yaml", submit="sky jobs launch", quoted=in_yaml),
}
"""By the word that is typed."""


def job_text(name: str, recipe: str, *, nodes: int, processes: int) -> str:
    """The file of a job on a cluster of `CLUSTERS`. `processes`: on each machine, one for each GPU.

    Raises `ConfigError` for a recipe that is not there, or that the machines would not have.
    """
    cluster = CLUSTERS[name]
    open_document(recipe)
    path = Path(recipe).expanduser()
    is_elsewhere = path.is_absolute() or Path(os.path.normpath(path)).parts[0] == ".."
    if cluster.is_remote and is_elsewhere:
        raise ConfigError(
            f"{recipe} is no path from the working directory, and the machines of {name} have nothing else.",
            fix=f"cd {shlex.quote(str(path.parent))}, then podium init {shlex.quote(path.name)} --cluster {name}",
            recipe=recipe,
            cluster=name,
        )
    values = {"name": _job_name(recipe), "recipe": cluster.quoted(recipe), "nodes": nodes, "processes": processes}
    return rendered(f"job-{name}{cluster.suffix}.j2", values)


def _job_name(recipe: str) -> str:
    """A name that clusters and buckets take: small letters, digits and dashes.

    >>> _job_name("recipes/My run.yaml"), _job_name("\u4e2d.yaml")
    ('podium-my-run', 'podium-run')
    """
    stem = re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower())[:40].strip("-")
    return f"podium-{stem or 'run'}"


def write_job(file: Path, text: str) -> None:
    """Write a new file. Raises `ConfigError` where one is there, or none can be made."""
    try:
        with file.open("x", encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
            stream.write(text)
    except FileExistsError:
        numbered = (file.with_stem(f"{file.stem}-{number}") for number in itertools.count(2))
        free = next(path for path in numbered if not path.exists())
        raise ConfigError(
            f"{file} is there already, and podium init overwrites no file.",
            fix=f"the same with --to {shlex.quote(str(free))}",
            file=file,
            free=free,
        ) from None
    except OSError as error:
        raise ConfigError(
            f"The job file {file} cannot be written: {error.strerror or error}.",
            fix="--to with another file",
            file=file,
        ) from error
