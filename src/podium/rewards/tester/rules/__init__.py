"""Findings from evidence. Pure: no rule calls or loads anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from podium.records import Finding
from podium.rewards.tester.evidence import Evidence
from podium.rewards.tester.rules import calls, false_negatives, false_positives

SEVERITIES = ("error", "warning", "note")


def evaluate_rules(evidence: Evidence) -> list[Finding]:
    """All findings, errors first. Rules come in order: none is tried where a finding before it explains its own."""
    found: list[Finding] = []

    def add(*rules: Callable[[Evidence], Iterable[Finding]]) -> bool:
        """Add the findings of the first rule that has any."""
        more = next(filter(None, (list(rule(evidence)) for rule in rules)), [])
        found.extend(more)
        return bool(more)

    def has(*codes: str) -> bool:
        return any(finding.code in codes for finding in found)

    add(false_negatives.other_kind, calls.failures)
    add(calls.mutation)
    if not has("W016"):
        add(calls.slow)
    if add(calls.unstable):  # no score can be believed
        add(calls.answer_in_prompt)
    else:
        _why_right_answers_do_not_score(add, has)
        if not has("W103"):
            add(calls.order, calls.company)
        add(calls.answer_in_prompt)
        _texts_that_score_like_the_answer(add, has)
    return sorted(found, key=lambda each: SEVERITIES.index(each.severity))


def _why_right_answers_do_not_score(add: Callable[..., bool], has: Callable[..., bool]) -> None:
    """The most particular reason alone."""
    if has("W012") or add(
        false_negatives.other_rows,
        false_negatives.column_unfit,
        false_negatives.wrong_sign,
        false_negatives.prompt_number,
    ):
        return
    if not has("W006", "W007"):
        add(
            calls.constant,
            false_negatives.never_compared,
            false_negatives.right_scores_nothing,
            false_negatives.untested,
        )


def _texts_that_score_like_the_answer(add: Callable[..., bool], has: Callable[..., bool]) -> None:
    """Where texts without an answer do, so do many others."""
    if not add(false_positives.of("W105")):
        if not has("W116"):
            add(false_positives.of("W117"))
        if not has("W104"):
            add(false_positives.of("W104"))
        add(false_positives.of("W106"))
        add(false_positives.of("W107"))
        if not has("W106", "W107"):
            add(false_positives.wrong_answers)
        if not has("W104", "W107"):
            add(false_positives.any_number)
        add(false_positives.first_counts)
    add(false_positives.folded_units)
    add(false_positives.other_scripts)
    add(false_positives.strictness)
