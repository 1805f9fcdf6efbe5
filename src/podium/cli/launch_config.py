"""The config file of accelerate's launcher, for `--accelerate`: found, checked, and read for a check of a recipe."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from podium.errors import ConfigError
from podium.errors.texts import listed, nearest
from podium.trainer.planned import Launch

CONFIGS = Path(__file__).parent.parent / "recipe" / "recipes" / "accelerate"


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
        raise ConfigError(
            f"--processes is {processes}; say how many, at least 1: one for each GPU.", processes=processes
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
    file = checked_config(processes, asked)
    values = _read(file)
    kind = values.get("distributed_type")
    machines = values.get("num_machines")
    fsdp = values.get("fsdp_config") or {}
    deepspeed = values.get("deepspeed_config") or {}
    try:
        if "deepspeed_config_file" in deepspeed:
            stage = _read(Path(deepspeed["deepspeed_config_file"])).get("zero_optimization", {}).get("stage", 0)
        else:
            stage = deepspeed.get("zero_stage", 2)
        return Launch(
            processes=int(processes or 1),
            machines=int(machines or 1),
            fsdp=int(fsdp.get("fsdp_version", 1)) if kind == "FSDP" else None,
            zero=int(stage) if kind == "DEEPSPEED" else None,
        )
    except (AttributeError, TypeError, ValueError):
        raise _unreadable(file) from None
