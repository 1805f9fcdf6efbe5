"""Checks of a run in stages: every stage as a run of its own, each finding with the stage it is about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from podium.errors import PodiumError
from podium.recipe.checks.setup import Setup, findings_of, of_stage
from podium.recipe.checks.table import errors_first, findings
from podium.recipe.completions import Completions
from podium.recipe.stage import Stage, Surveyed
from podium.records import Finding

TRIED_ROWS = 1000
"""Rows whose right completion is made on trial."""


def of_all(surveyed: Sequence[Surveyed]) -> list[Finding]:
    """What is wrong with any stage, errors first. What is found in every stage is said once, without a stage."""
    found = [_of_one(each) for each in surveyed]
    everywhere = [finding for finding in found[0] if len(found) > 1 and all(finding in others for others in found[1:])]
    own = [
        replace(finding, what=f"stage {each.stage.name}: {finding.what}")
        for each, listed in zip(surveyed, found, strict=True)
        for finding in listed
        if finding not in everywhere
    ]
    return errors_first([*everywhere, *own])


def _of_one(surveyed: Surveyed) -> list[Finding]:
    setup = of_stage(surveyed)
    stage = surveyed.stage
    return [*findings(setup), *(_of_sft(stage, setup) if stage.kind == "sft" else ())]


def _of_sft(stage: Stage, setup: Setup) -> Iterator[Finding]:
    """What keeps an SFT stage from starting: its arguments, and rows without a right completion."""
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
