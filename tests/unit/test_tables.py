"""What `podium init` takes everyday tables for."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables import TABLES, outcome


def test_everyday_tables_are_read_as_they_are_meant(tmp_path: Path) -> None:
    assert len({table.name for table in TABLES}) == len(TABLES) == 60
    found = [outcome(table, tmp_path) for table in TABLES]
    wrong = [each for each in found if each.wrong]
    assert len(wrong) <= 3, [(each.table.name, each.wrong) for each in wrong]
    assert all(each.doubts for each in wrong)
