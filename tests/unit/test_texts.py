"""The words of errors and findings: one file, each entry used, each use with the facts that its words name."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest

import podium
from podium.errors import ConfigError, Finding
from podium.errors.texts import FILE
from tests.unit.test_layout import trees

PACKAGE = Path(podium.__file__).parent


def test_the_file_is_sorted_and_its_comments_stay_at_the_top() -> None:
    headings = re.findall(r"(?m)^\[(.+)\]$", FILE.read_text(encoding="utf-8"))
    assert headings == sorted(headings)


def test_a_key_that_there_is_not_is_text_and_a_missing_fact_is_an_error_of_the_program() -> None:
    assert str(ConfigError("C999.not_a_key")) == "C999.not_a_key"
    with pytest.raises(KeyError):
        Finding.of("D024.empty_file", "error")


def test_facts_of_a_finding_are_written_as_json_whatever_they_are() -> None:
    odd = Finding.of("D024.empty_file", "error", file=test_no_message_is_read_back)
    assert json.loads(json.dumps(dataclasses.asdict(odd)))["facts"] == {"file": str(test_no_message_is_read_back)}


# ---- no message is read back ----

TEXTS = {"what", "why", "fix"}
METHODS = {
    "startswith",
    "endswith",
    "partition",
    "rpartition",
    "split",
    "removeprefix",
    "removesuffix",
    "replace",
    "find",
}
PATTERNS = {"search", "match", "fullmatch", "sub", "findall", "finditer"}

KNOWN_READERS = {
    "checks/rewards.py": "the flag that ends a fix becomes the key of a recipe that says the same",
    "cli/start/own_data.py": "the same for `podium init`, whose argument the data is",
    "console/terminal.py": "what a fix has said is not printed a second time",
}
"""Files that look into the words of a finding or an error, and why; nothing else depends on them there."""


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in TEXTS


def reads_text(node: ast.AST) -> bool:
    """Whether an expression looks for something in the words of a finding or an error."""
    if isinstance(node, ast.Compare):
        inside = any(isinstance(each, (ast.In, ast.NotIn)) for each in node.ops)
        return inside and any(map(is_text, node.comparators))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr in METHODS:
        return is_text(node.func.value)
    return node.func.attr in PATTERNS and any(is_text(each) for given in node.args for each in ast.walk(given))


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("'raised' in error.what", True),
        ("re.sub('a', 'b', finding.fix)", True),
        ("first.what.startswith(name)", True),
        ("error.facts['name'] in names", False),
        ("Finding(what=error.what)", False),
    ],
)
def test_a_reader_is_recognized(code: str, reads: bool) -> None:
    assert any(map(reads_text, ast.walk(ast.parse(code)))) is reads


def test_no_message_is_read_back() -> None:
    found = {str(path.relative_to(PACKAGE)) for path, tree in trees().items() if any(map(reads_text, ast.walk(tree)))}
    assert found == set(KNOWN_READERS)
