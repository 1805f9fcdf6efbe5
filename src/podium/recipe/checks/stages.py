"""Checks of a recipe, or of a run in stages: every stage as a run of its own, each finding with its stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from podium.errors import PodiumError
from podium.recipe.checks.setup import Setup, findings_of
from podium.recipe.checks.table import errors_first, findings
from podium.recipe.recipe import Stage
from podium.recipe.stages.completions import Completions
from podium.recipe.stages.plan import Surveyed, by_stage
from podium.records import Finding

TRIED_ROWS = 1000
"""Rows whose right completion is made on trial."""


def findings_in(surveyed: Sequence[Surveyed], setups: Sequence[Setup]) -> list[Finding]:
    """Findings of a recipe, or of all its stages, errors first. Those of every stage come once, without a stage."""
    found = [[*findings(setup), *_of_sft(each.stage, setup)] for each, setup in zip(surveyed, setups, strict=True)]
    return errors_first(by_stage(surveyed, found))


def _of_sft(stage: Stage | None, setup: Setup) -> Iterator[Finding]:
    """Problems that keep an SFT stage from starting: its arguments, and rows without a right completion."""
    if stage is None or stage.kind != "sft":
        return
    try:
        stage.sft_arguments()
        if setup.train is not None:
            source = setup.train.source
            rows = [row for _, row in islice(source.rows(), TRIED_ROWS) if isinstance(row, dict) and row.get("prompt")]
            if rows:
                right = Completions.of(stage.completion, source.columns or tuple(rows[0]))
                for row in rows:
                    right(row)
    except PodiumError as error:
        yield from findings_of(error, stage.recipe.name)
