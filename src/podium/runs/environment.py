"""The environment of a run: versions, hardware, the user's commit, digests of rewards and data. No secrets.

Whatever cannot be determined is left out.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from podium.isolation.machine import cores
from podium.isolation.user_files import used_digest
from podium.runs.redaction import HIDDEN, is_secret, without_secrets

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "safetensors", "tokenizers")

ROWS_IN_DIGEST = 100_000


class RewardRecord(Protocol):
    """The fields of `podium.rewards.resolve.Reward` that are recorded."""

    @property
    def name(self) -> str:
        """Name in the metrics."""

    @property
    def function(self) -> Callable[..., Any]:
        """Scores completions."""

    @property
    def where(self) -> str:
        """File and line."""


def describe_environment(rewards: Iterable[RewardRecord], dataset: Any) -> dict[str, Any]:
    """The contents of `environment.json`, but for the settings."""
    return {
        "podium": _version("podium"),
        "python": platform.python_version(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
        "platform": platform.platform(),
        "hardware": _hardware(),
        "command": without_secrets(_hidden_flags(sys.argv)),
        "git": _git(Path.cwd()),
        "rewards": {reward.name: reward_source(reward) for reward in rewards},
        "data": _dataset(dataset),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _hardware() -> dict[str, Any]:
    import psutil
    import torch

    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "devices": [{"name": device.name, "memory_gb": round(device.total_memory / 1e9, 1)} for device in devices],
        "threads": torch.get_num_threads(),
    }


def _hidden_flags(arguments: Sequence[str]) -> list[str]:
    """`--hub_token X` and `--hub-token=X` without X."""
    shown: list[str] = []
    hide = False
    for argument in arguments:
        flag, has_value, _ = argument.partition("=")
        secret = argument.startswith("--") and is_secret(flag, "text")
        if hide:
            shown.append(HIDDEN)
        else:
            shown.append(f"{flag}={HIDDEN}" if secret and has_value else argument)
        hide = secret and not has_value
    return shown


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit of the working directory and number of files that differ from it; None outside of a repository."""

    def output(*arguments: str) -> str:
        env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        return subprocess.check_output(
            ["git", *arguments], cwd=folder, env=env, text=True, stderr=subprocess.DEVNULL, timeout=5
        )

    try:
        commit = output("rev-parse", "HEAD").strip()
    except (OSError, subprocess.SubprocessError):
        return None
    changes = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        changes = output("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed_files": len(changes.splitlines())}


def reward_source(reward: RewardRecord) -> dict[str, str]:
    """As `source_of`, of a reward function."""
    return source_of(reward.function, reward.where)


def source_of(function: Any, where: str) -> dict[str, str]:
    """The place of a function or class, and the sha256 of its file where it has one; of a reward in a worker process
    also of the modules below that it imports. `code`: that of what the function needs of them (`used_digest`)."""
    function = getattr(function, "func", function)
    if isinstance(digest := getattr(function, "digest", None), str):
        return {"where": where, "sha256": digest, "code": getattr(function, "used_digest", digest)}
    with contextlib.suppress(TypeError, OSError):
        code = function if hasattr(function, "__code__") or inspect.isclass(function) else type(function)
        own = getattr(function, "path", None)
        text = own.read_bytes() if isinstance(own, Path) else _imported(inspect.getsourcefile(code) or "")
        name = "" if isinstance(own, Path) else code.__qualname__.partition(".")[0]
        used = used_digest(text.decode("utf-8", "surrogateescape"), name)
        return {"where": where, "sha256": hashlib.sha256(text).hexdigest(), "code": used}
    return {"where": where}


@functools.cache
def _imported(file: str) -> bytes:
    """Read once: what this process has imported stays as it is, whatever is edited later."""
    return Path(file).read_bytes()


def _dataset(dataset: Any) -> dict[str, Any]:
    """Columns, number of rows, and sha256 of the rows as JSON."""
    columns = getattr(dataset, "column_names", None)
    found: dict[str, Any] = {"columns": list(columns)} if columns else {}
    if not hasattr(dataset, "__len__"):
        return {**found, "stream": True}
    rows = len(dataset)
    digest = hashlib.sha256()
    for i in range(min(rows, ROWS_IN_DIGEST)):
        digest.update(json.dumps(dataset[i], sort_keys=True, default=_text).encode("utf-8", "replace"))
    return {**found, "rows": rows, "rows_in_digest": min(rows, ROWS_IN_DIGEST), "sha256": digest.hexdigest()}


def _text(value: Any) -> str:
    """Text of an object that JSON lacks, without its address in memory, which differs between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
