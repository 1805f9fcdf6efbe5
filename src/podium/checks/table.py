"""The table of rules: every function that looks at a setup, in the order of its findings.

A code that a rule gives has a page in `runs/pages`; the page is the only list of codes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from podium.checks import agents, data, model, rewards, settings
from podium.checks.setup import Setup
from podium.errors import Finding, gravest_first
from podium.errors.rule import Rule, broken
from podium.recipe.stages import Surveyed, by_stage
from podium.runs.agreement import agreed
from podium.trainer.rules import heeded, ignored_codes

RULES: tuple[Rule | Callable[[Setup], Iterable[Finding]], ...] = (
    *settings.RULES,
    data.long_answers,  # before the usual value: it names the length that these answers need
    *settings.UNUSUAL,
    *model.RULES,
    *agents.RULES,
    data.columns,
    data.without_braces,
    data.no_header,
    data.bad_rows,
    data.shapes,
    data.turns,
    data.unasked_in_chat,
    data.written_as_text,
    data.room,
    data.enough,
    data.streams,
    data.balance,
    data.repeats,
    data.leaks,
    data.unusable_answers,
    data.same_answers,
    data.sentences,
    data.mixed_types,
    data.odd_text,
    data.lengths,
    data.sampled,
    rewards.needs,
    rewards.models,
    rewards.trials,
    rewards.shown_forms,
    rewards.accuracy,
    data.right_completions,
)

NOT_HERE = frozenset({"C032", "D050", "M023"})
"""Codes of findings about this machine, not the recipe: a check warns, training stops before weights are loaded."""


def _found(rule: Any, setup: Setup) -> Iterable[Finding]:
    return map(setup.placed, broken(rule, setup)) if isinstance(rule, Rule) else rule(setup)


def findings(setup: Setup) -> list[Finding]:
    """The findings of all rules: errors first, each kind in the order of the table."""
    found = [*setup.problems, *itertools.chain.from_iterable(_found(rule, setup) for rule in RULES)]
    ignored = ignored_codes(setup.settings)
    return agreed(gravest_first(heeded(data.without_consequences(setup, found), ignored)))


def findings_in(surveyed: Sequence[Surveyed], setups: Sequence[Setup]) -> list[Finding]:
    """Findings of a recipe, or of all its stages, errors first. Those of every stage come once, without a stage."""
    return gravest_first(by_stage(surveyed, [findings(setup) for setup in setups]))
