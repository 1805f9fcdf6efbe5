"""What the cure of every finding must be: text and data that agree, and settings that a recipe takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from podium.checks import check_recipe
from podium.errors import Finding
from podium.errors.texts import as_line
from podium.recipe.changes import apply_changes


def assert_cures(finding: Finding, before: Sequence[Finding], recipe: Path) -> None:
    """With the changes of a finding in its recipe, the finding is gone and no error is new."""
    recipe.write_text(apply_changes(recipe.read_text(), finding.changes))
    after = check_recipe(recipe)
    assert (finding.code, finding.what) not in {(each.code, each.what) for each in after}, finding
    known = {each.code for each in before}
    new = [str(each) for each in after if each.severity == "error" and each.code not in known]
    assert not new, (str(finding), new)


def assert_agree(finding: Finding) -> None:
    """The changes of a finding make a valid recipe, and its `fix` has each of them as a line of one."""
    apply_changes({}, finding.changes, name=finding.code)
    for key, value in finding.changes.items():
        last = key.rpartition(".")[2]
        if f"unknown key `{last}`" in finding.what or (finding.code == "C001" and f"`{last}`" in finding.fix):
            continue  # one name for another: both are said
        taken_out = value is None and re.search(rf"(take `|Remove .*){key.rpartition('.')[2]}\b", finding.fix)
        is_near = finding.fix == f"Did you mean `{value}`?"
        is_line = as_line(key, value) in finding.fix or as_line(last, value) in finding.fix  # `r: 8` of `lora.r`
        assert taken_out or is_near or is_line, f"{finding}: {as_line(key, value)}"
