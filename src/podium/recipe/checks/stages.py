"""Checks of a recipe, or of a run in stages: every stage as a run of its own, each finding with its stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from podium.errors import PodiumError
from podium.recipe.checks.setup import Setup, findings_of
from podium.recipe.checks.table import errors_first, findings
from podium.recipe.recipe import Stage
from podium.recipe.stages.completions import Completions
from podium.recipe.stages.plan import Surveyed
from podium.records import Finding

TRIED_ROWS = 1000
"""Rows whose right completion is made on trial."""


def findings_in(surveyed: Sequence[Surveyed], setups: Sequence[Setup]) -> list[Finding]:
    """Findings of a recipe, or of all its stages, errors first. Those of every stage come once, without a stage."""
    found = [_of_one(setup, each.stage) for each, setup in zip(surveyed, setups, strict=True)]
    everywhere = [finding for finding in found[0] if all(finding in others for others in found[1:])]
    if len(surveyed) == 1 and surveyed[0].stage is not None:
        everywhere = []
    own = [
        replace(finding, what=f"stage {each.stage.name}: {finding.what}")
        for each, listed in zip(surveyed, found, strict=True)
        for finding in listed
        if each.stage is not None and finding not in everywhere
    ]
    return errors_first([*everywhere, *own])


def _of_one(setup: Setup, stage: Stage | None) -> list[Finding]:
    return [*findings(setup), *(_of_sft(stage, setup) if stage is not None and stage.kind == "sft" else ())]


def _of_sft(stage: Stage, setup: Setup) -> Iterator[Finding]:
    """Problems that keep an SFT stage from starting: its arguments, and rows without a right completion."""
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
