"""Every line of defects has a test, or says why it can have none."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

TESTS = Path(__file__).parents[1]


def test_every_line_has_a_test() -> None:
    lines = yaml.safe_load((TESTS / "defects" / "lines.yaml").read_text(encoding="utf-8"))
    source = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    assert set(re.findall(r"\bdefect\(\s*\"(\w+)\"", source)) - set(lines) == set()
    named = {line for line in lines if f'"{line}"' in source}  # some tests mark their cases through a helper
    assert {line for line, about in lines.items() if "left" not in about} - named == set()
