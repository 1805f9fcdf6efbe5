"""Findings of the checks and errors of the settings in every test, so that two commits can be compared.

    python -m pytest -p tests.found --found before.json tests/unit/test_checks.py ...    in each of two checkouts
    python -m tests.found before.json after.json

Only the outermost call of an entry point is recorded. Codes, severities and changes must be the same; a fact of the
first commit must be there in the second with the same value. Words are not compared.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ENTRIES = (
    ("podium.checks", "check"),
    ("podium.checks", "check_arguments"),
    ("podium.checks", "check_recipe"),
    ("podium.recipe", "load"),
    ("podium.trainer.config.GRPOConfig", "__new__"),
    ("podium.trainer.config.GRPOConfig", "__init__"),
    ("podium.trainer.trainer.GRPOTrainer", "__init__"),
)
"""Functions whose findings, returned or raised, are recorded."""

Row = dict[str, Any]


class Recorder:
    """A plugin of pytest: findings by test, in the order in which they were made."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.test = ""
        self.depth = 0
        self.rows: dict[str, list[Row]] = defaultdict(list)
        for module, name in ENTRIES:
            self.wrap(module, name)

    def wrap(self, module: str, name: str) -> None:
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            holder, _, cls = module.rpartition(".")
            owner = getattr(importlib.import_module(holder), cls)
        own: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(own)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                made = own(*args, **kwargs)
            except Exception as error:
                entry = "__init__" if name == "__new__" else name  # a constructor may raise in either
                self.record(entry, [*getattr(error, "findings", ())] or [error])
                raise
            else:
                self.record(name, findings_in(made))
                return made
            finally:
                self.depth -= 1

        setattr(owner, name, staticmethod(recorded) if name == "__new__" else recorded)

    def record(self, entry: str, found: Iterable[Any]) -> None:
        if self.depth == 1 and self.test:
            self.rows[self.test] += [row for each in found if (row := row_of(entry, each))["code"]]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid

    def pytest_sessionfinish(self) -> None:
        self.file.write_text(json.dumps(self.rows, indent=0, sort_keys=True), encoding="utf-8")


def findings_in(made: Any) -> list[Any]:
    """The findings in what an entry point returned: a list, an object that has one, or a pair that begins with one."""
    if isinstance(made, tuple):
        return findings_in(made[0])
    found = getattr(made, "findings", made)
    return [each for each in found if hasattr(each, "severity")] if isinstance(found, (list, tuple)) else []


def row_of(entry: str, found: Any) -> Row:
    facts = json.loads(json.dumps(dict(getattr(found, "facts", {})), default=str))
    return {
        "entry": entry,
        "code": getattr(found, "code", ""),
        "severity": getattr(found, "severity", "raised"),
        "changes": json.loads(json.dumps(dict(getattr(found, "changes", {})), default=str)),
        "facts": {name: fact for name, fact in facts.items() if name != "changes"},
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--found", type=Path, default=Path("found.json"))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.getoption("--found")))


def differences(before: Mapping[str, list[Row]], after: Mapping[str, list[Row]]) -> list[str]:
    """One text for each test of both that found other codes, severities, changes or facts."""
    return [
        f"{test}\n  before: {described(before[test])}\n  after:  {described(after[test])}"
        for test in sorted(before.keys() & after.keys())
        if not same(before[test], after[test])
    ]


def same(before: list[Row], after: list[Row]) -> bool:
    def order(row: Row) -> str:
        return json.dumps([row["entry"], row["code"], row["severity"], row["changes"]], sort_keys=True)

    if len(before) != len(after):
        return False
    pairs = zip(sorted(before, key=order), sorted(after, key=order), strict=True)
    return all(
        all(one[name] == other[name] for name in ("entry", "code", "severity", "changes"))
        and all(
            plain(other["facts"].get(name)) == plain(value) for name, value in one["facts"].items() if name != "changes"
        )
        for one, other in pairs
    )


def plain(fact: Any) -> str:
    """A fact without what differs from run to run: folders of tests and addresses of objects."""
    return re.sub(r"pytest-\d+|0x[0-9a-f]+", "", json.dumps(fact, sort_keys=True))


def described(rows: list[Row]) -> str:
    return "; ".join(f"{row['entry']} {row['severity']} {row['code']} {row['changes']} {row['facts']}" for row in rows)


if __name__ == "__main__":
    first, second = (json.loads(Path(each).read_text(encoding="utf-8")) for each in sys.argv[1:3])
    differing = differences(first, second)
    total = sum(map(len, first.values()))
    summary = (
        f"{len(first)} tests with {total} findings before, {len(second)} after; "
        f"{len(first.keys() & second.keys())} in both, {len(differing)} of them differ"
    )
    sys.stdout.write("\n".join([*differing, summary, ""]))
    sys.exit(bool(differing))
