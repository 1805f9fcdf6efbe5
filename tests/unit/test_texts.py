"""The words of errors and findings: each stands where it is raised, and none is read back."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import podium
from podium.errors import Finding
from tests.unit.test_layout import trees

PACKAGE = Path(podium.__file__).parent


def test_facts_of_a_finding_are_written_as_json_whatever_they_are() -> None:
    odd = Finding(code="D024", severity="error", what="", facts={"file": test_no_message_is_read_back})
    assert json.loads(json.dumps(odd.as_dict()))["facts"] == {"file": str(test_no_message_is_read_back)}


def test_there_is_no_file_of_texts() -> None:
    assert not list(PACKAGE.rglob("*.toml"))


LONG = 30
"""Characters of the longest constant part of a message that must stand in one place alone."""


def messages() -> Iterator[tuple[str, str]]:
    """The longest constant part of each message that is written where it is raised, and its place."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (words := words_of(node)) is not None:
                parts = [each.value for each in ast.walk(words) if isinstance(each, ast.Constant)]
                longest = max((part for part in parts if isinstance(part, str)), key=len, default="")
                if len(longest) >= LONG:
                    yield longest, f"{path.relative_to(PACKAGE)}:{node.lineno}"


def words_of(call: ast.Call) -> ast.expr | None:
    """The message of a call that makes an error or a finding; None for any other call."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name.endswith("Error") and call.args:
        return call.args[0]
    if name == "Finding":
        return next((each.value for each in call.keywords if each.arg == "what"), None)
    return None


def test_a_message_stands_in_one_place() -> None:
    found = defaultdict(list)
    for words, place in messages():
        found[words].append(place)
    assert len(found) > 300
    assert not {words: places for words, places in found.items() if len(places) > 1}


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
