"""The table of rules, in the order of their findings.

A code that a rule gives has a page in `runs/pages`; the page is the only list of codes.
"""

from __future__ import annotations

from collections.abc import Sequence

from podium.checks import agents, data, model, rewards, settings
from podium.checks.setup import Setup
from podium.errors import Finding, gravest_first, rule
from podium.errors.rule import Rule
from podium.recipe.stages import Surveyed, by_stage
from podium.runs.monitors import agreed
from podium.trainer.rules import heeded, ignored_codes

RULES: tuple[Rule, ...] = (
    *settings.RULES,
    data.LONG_ANSWERS,  # before the usual value: it names the length that these answers need
    *settings.UNUSUAL,
    *model.RULES,
    *agents.RULES,
    *data.RULES,
    *rewards.RULES,
    data.RIGHT_COMPLETIONS,
)
"""Every rule, in the order of the findings."""

NOT_HERE = frozenset({"C032", "D050", "M023"})
"""Codes of findings about this machine, not the recipe: a check warns, training stops before weights are loaded."""


def findings(setup: Setup) -> list[Finding]:
    """The findings of all rules: errors first, each kind in the order of the table."""
    found = [*setup.problems, *(setup.placed(finding) for finding in rule.findings(RULES, setup))]
    ignored = ignored_codes(setup.settings)
    return agreed(gravest_first(heeded(data.without_consequences(setup, found), ignored)))


def findings_in(surveyed: Sequence[Surveyed], setups: Sequence[Setup]) -> list[Finding]:
    """Findings of a recipe, or of all its stages, errors first. Those of every stage come once, without a stage."""
    return gravest_first(by_stage(surveyed, [findings(setup) for setup in setups]))
