"""What of a file counts as the code of one of its functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.isolation.user_files import used_digest
from podium.rewards.from_file import file_reward
from podium.runs.environment import source_of
from podium.trainer.resume import _other_code

FILE = """
import re
LIMIT = 2
TABLE = {}
TABLE["a"] = 1

def helper(text):
    return len(text) > LIMIT

def vowels(completions, **kwargs):
    return [float(helper(c)) for c in completions]
"""


@pytest.mark.parametrize(
    ("old", "new", "is_another"),
    [
        ("import re", "import re, math\nMOST = 7\ndef short(completions):\n    return [math.e, MOST]", False),
        ("def vowels", "class Other:\n    pass\n\n\ndef vowels", False),
        ("LIMIT = 2", "# the limit\nLIMIT = 2", False),
        ("import re", '"""Rewards."""\nimport re', False),
        ("def vowels", "if __name__ == '__main__':\n    print(1)\n\ndef vowels", False),
        ("LIMIT = 2", "LIMIT = 3", True),
        ("> LIMIT", ">= LIMIT", True),
        ("float(helper(c))", "1 - float(helper(c))", True),
        ("def vowels", "LIMIT = 4\n\ndef vowels", True),
        ("def vowels", "LIMIT += 1\n\ndef vowels", True),
        ("def vowels", "@patched\ndef other():\n    return 1\n\ndef vowels", True),
        ("def vowels", "def vowels(completions):\n    return []\n\ndef vowels", True),
        ("helper(c)", "globals()['helper'](c)", True),
    ],
)
def test_what_the_function_needs_counts(old: str, new: str, is_another: bool) -> None:
    assert (used_digest(FILE.replace(old, new, 1), "vowels") != used_digest(FILE, "vowels")) is is_another


@pytest.mark.parametrize("text", ["def broken(:", "x = 1", ""])
def test_the_whole_file_counts_where_its_function_is_not_found(text: str) -> None:
    assert used_digest(text, "vowels") != used_digest(f"{text}\ny = 2", "vowels")


def test_a_function_that_is_looked_up_by_its_name_counts() -> None:
    looked_up = FILE.replace("helper(c)", "globals()['helper'](c)")
    assert used_digest(looked_up, "vowels") != used_digest(looked_up.replace("> LIMIT", "< LIMIT"), "vowels")


def test_of_a_reward_in_a_file(tmp_path: Path) -> None:
    """The file is another, and the code of the reward is not; a module that it imports counts whole."""
    (tmp_path / "mine.py").write_text(FILE.replace("import re", "import below"))
    (tmp_path / "below.py").write_text("N = 1\n")
    sources = []
    for changed in ("", "\ndef other(completions):\n    return [1.0]\n"):
        with (tmp_path / "mine.py").open("a") as file:
            file.write(changed)
        sources.append(source_of(file_reward("mine.py:vowels", folder=tmp_path), "mine.py:10"))
    first, second = sources
    assert first["sha256"] != second["sha256"]
    assert first["code"] == second["code"]
    (tmp_path / "below.py").write_text("N = 2\n")
    with (tmp_path / "mine.py").open("a") as file:
        file.write("\n")  # another file has workers of its own
    assert source_of(file_reward("mine.py:vowels", folder=tmp_path), "mine.py:10")["code"] != first["code"]


@pytest.mark.parametrize(
    ("was", "now", "is_another"),
    [
        ({"sha256": "a", "code": "c"}, {"sha256": "b", "code": "c"}, False),
        ({"sha256": "a", "code": "c"}, {"sha256": "b", "code": "d"}, True),
        ({"sha256": "a"}, {"sha256": "a", "code": "c"}, False),
        ({"sha256": "a"}, {"sha256": "b", "code": "c"}, True),
        ({}, {}, False),
    ],
)
def test_a_resumed_run_compares_the_code(was: dict[str, str], now: dict[str, str], is_another: bool) -> None:
    """An earlier Podium wrote no more than the digest of the file."""
    found = _other_code("rewards", {"rewards": {"vowels": was}}, {"rewards": {"vowels": {**now, "where": "mine.py:9"}}})
    assert found == ["the code of vowels (mine.py:9) is another"] * is_another
