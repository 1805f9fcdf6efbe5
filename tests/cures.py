"""What the cure of every finding must be: text and data that agree, and settings that a recipe takes."""

from __future__ import annotations

import re

from podium.errors import as_line
from podium.recipe.changes import apply_changes
from podium.records import Finding


def assert_agree(finding: Finding) -> None:
    """The changes of a finding make a valid recipe, and its `fix` has each of them as a line of one."""
    apply_changes({}, finding.changes, name=finding.code)
    for key, value in finding.changes.items():
        taken_out = value is None and re.search(rf"(take `|Remove .*){key.rpartition('.')[2]}\b", finding.fix)
        assert taken_out or as_line(key, value) in finding.fix, f"{finding}: {as_line(key, value)}"
