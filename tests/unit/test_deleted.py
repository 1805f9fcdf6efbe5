"""Nothing is left of what was deleted: no setting, verb, flag, code, page, file or name of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ("src", "docs", "examples", "tests", "benchmarks", "website", "requirements", ".ci")
FILES = ("README.md", "SKILL.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")
KINDS = (".py", ".md", ".toml", ".yaml", ".yml", ".json", ".html", ".js", ".css", ".txt", ".sh", ".ipynb", "")
RECORDS = ("benchmarks/RESULTS.md", "benchmarks/results/", "tests/unit/test_deleted.py")
"""What was measured is still told, and this file."""

DELETED: dict[str, tuple[str, ...]] = {
    "the pilot": (
        r"podium[./]pilot",
        r"podium pilot",
        r"--pilot\b",
        r"cli/pilot",
        r"bench-pilot",
        r"benchmarks[./]pilot",
    ),
    "trial rollouts of check": (
        r"check\b[^\n`]* --rollouts",
        r"checks[./](rollouts|verdict)",
        r"cli[./]rollouts",
        r"\bR0\d\d\b",
    ),
    "the estimate of seconds": (r"estimates[./]duration", r"estimates-time", r"estimate_time"),
    "success history": (r"success_history", r"SuccessHistory", r"trainer[./]history\b"),
    "stored successes": (r"replay_successes", r"SuccessReplay", r"trainer[./]replay\b"),
    "extra completions": (r"extra_completions", r"C067"),
    "logs of other trainers": (r"\bread_log\b", r"actor/lr"),
    "curves in the terminal": (r"watch\b[^\n`]* --text", r"\bsparkline\b"),
    "attributes that refuse to change": (r"trainer[./]fixed\b",),
    "interruption of rewards in the process": (r"rewards[./]limits\b", r"\boff_main\b", r"\blast_resort\b"),
    "the first generation of verifiers": (
        r"adapters[./]verifiers\b",
        r"podium\[verifiers\]",
        r"environment: verifiers:",
    ),
    "digests of every tensor": (r"\bbase_digests\b", r"\badapter_changes\b"),
    "tables of other trainers' keys": (r"\bnames\.md\b",),
    "the file of texts": (r"texts\.toml", r"\bFinding\.of\(", r"\bis_key\("),
    "the result of a detector": (r"\bDetection\(", r"import Detection\b"),
    "pins of lines and hops": (r"CODE_LINES", r"test_hops_of_rewards", r"invariants/test_hops"),
}
"""What went, with patterns of its names, which stand neither in a file nor in a path."""


def texts() -> Iterator[tuple[str, str]]:
    """Every file that is kept by its hand, with its text."""
    found = [path for place in PLACES for path in (ROOT / place).rglob("*")]
    for path in [*found, *(ROOT / name for name in FILES)]:
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and path.suffix in KINDS and "__pycache__" not in name and not name.startswith(RECORDS):
            yield name, path.read_text(encoding="utf-8", errors="replace")


@pytest.fixture(scope="module")
def kept() -> list[tuple[str, str]]:
    return list(texts())


@pytest.fixture(scope="module")
def whole(kept: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name}\n{text}" for name, text in kept)


@pytest.mark.cases(6)
@pytest.mark.parametrize("thing", DELETED)
def test_nothing_is_left_of(thing: str, kept: list[tuple[str, str]], whole: str) -> None:
    pattern = re.compile("|".join(DELETED[thing]))
    if not any(re.search(one, whole) for one in DELETED[thing]):
        return
    left = [
        f"{name}:{number}: {line.strip()}"
        for name, text in kept
        for number, line in enumerate((name, *text.splitlines()))
        if pattern.search(line)
    ]
    assert not left, "\n".join(left)
