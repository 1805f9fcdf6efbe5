"""What a process may use: a container's quota and memory, in both versions of control groups; threads that fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from podium.isolation import machine

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 64),
        ({"cpu.max": "nonsense"}, 64),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_cores_follow_the_quota(files: dict[str, str], expected: int, groups: Path) -> None:
    write(groups, files)
    assert machine.cores() == expected


def test_cores_without_affinity_are_those_of_the_machine(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert machine.cores() == 10


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "5"}, None),
        ({"memory.max": str(8 * GIB), "memory.current": str(3 * GIB)}, 5 * GIB),
        (
            {
                "memory.max": str(8 * GIB),
                "memory.current": str(3 * GIB),
                "memory.stat": f"anon 1\ninactive_file {GIB}\n",
            },
            6 * GIB,
        ),
        ({"memory/memory.limit_in_bytes": str(4 * GIB), "memory/memory.usage_in_bytes": str(GIB)}, 3 * GIB),
    ],
)
def test_memory_of_a_group(files: dict[str, str], expected: int | None, groups: Path) -> None:
    write(groups, files)
    assert machine.group_memory() == expected


@pytest.mark.parametrize(("variable", "expected"), [(None, 2), ("8", 8)])
def test_threads_fit_unless_the_environment_says_how_many(
    variable: str | None, expected: int, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(groups, {"cpu.max": "200000 100000"})
    threads = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    machine.fit_threads()
    assert threads[-1] == expected
