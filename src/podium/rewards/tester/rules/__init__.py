"""Findings from evidence. Pure: no rule calls or loads anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from podium.errors import Finding, gravest_first
from podium.rewards.tester.evidence import Evidence
from podium.rewards.tester.rules import calls, false_negatives, false_positives


def evaluate_basic_rules(evidence: Evidence) -> list[Finding]:
    """Findings of a test by right and wrong answers alone."""
    rules = (calls.failures, calls.slow, false_negatives.out_of_time, false_negatives.unread)
    return [finding for rule in rules for finding in rule(evidence)]


def evaluate_rules(evidence: Evidence) -> list[Finding]:
    """All findings, errors first. Rules come in order: none is tried where a finding before it explains its own."""
    found: list[Finding] = []

    def add(*rules: Callable[[Evidence], Iterable[Finding]], unless: tuple[str, ...] = ()) -> bool:
        """Add the findings of the first rule that has any, unless there is one of these codes."""
        if any(finding.code in unless for finding in found):
            return False
        more = next(filter(None, (list(rule(evidence)) for rule in rules)), [])
        found.extend(more)
        return bool(more)

    if evidence.is_cut:
        add(calls.failures)
    else:
        add(false_negatives.other_kind, calls.failures)
    add(calls.huge, unless=("W007",))
    add(calls.mutation)
    add(calls.slow, unless=("W016",))
    if add(false_negatives.out_of_time):
        return found
    is_stable = not add(calls.unstable)
    if is_stable:
        explained = add(
            false_negatives.other_rows,
            false_negatives.column_unfit,
            false_negatives.wrong_sign,
            false_negatives.prompt_number,
            unless=("W012",),
        )
        if not explained:
            add(
                calls.constant,
                false_negatives.never_compared,
                false_negatives.right_scores_nothing,
                false_negatives.untested,
                unless=("W012", "W006", "W007") if evidence.failures else ("W012",),
            )
        add(calls.order, calls.company, unless=("W103",))
    add(calls.answer_in_prompt)
    if is_stable and (evidence.knows_answer or evidence.is_binary):
        if not add(false_positives.of("W105")):
            add(false_positives.of("W117"), unless=("W116",))
            add(false_positives.of("W104"), unless=("W104",))
            add(false_positives.of("W106"))
            add(false_positives.of("W107"))
            add(false_positives.wrong_answers, unless=("W106", "W107"))
            add(false_positives.any_number, unless=("W104", "W107"))
            add(false_positives.first_counts)
        add(false_positives.folded_units)
        add(false_positives.other_scripts)
        add(false_positives.strictness)
    return gravest_first(found)
