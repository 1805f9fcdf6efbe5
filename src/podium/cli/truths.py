"""The reward test before training, as `check` and `train` print it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from podium.console.terminal import plain_text
from podium.errors import Finding

if TYPE_CHECKING:
    from rich.console import Console

    from podium.rewards.tester.truth import TruthTable


def print_truths(to: Console, tables: Iterable[TruthTable]) -> None:
    """Scores of right and wrong answers, without a model."""
    for table in tables:
        for line in table.as_text():
            to.print(plain_text(line), soft_wrap=True)


def is_of_reward_test(found: Sequence[Finding]) -> bool:
    """Whether `podium rewards test` has more to show about one of the findings."""
    return any(finding.severity != "note" and finding.code.startswith("W") for finding in found)
