"""What evidence means: one function a rule, all of them in `RULES`. Pure: nothing is called or loaded.

A rule says nothing where a rule named in its `unless` has spoken: one mistake gives one finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from podium.records import Finding
from podium.rewards.tester.evidence import Evidence
from podium.rewards.tester.rules import calls, likes, misses


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A question to the evidence, and the findings after which it is not asked."""

    look: Callable[[Evidence], Iterable[Finding]]
    unless: tuple[str, ...] = ()


_UNSTABLE = ("W111", "W112")
_ELSEWHERE = ("W006", "W007", "W102", "W103", "W104", "W012", "W113", *_UNSTABLE)
"""Said instead of what follows from them."""

RULES = (
    Rule(look=misses.other_kind),
    Rule(look=calls.failures, unless=("W012",)),
    Rule(look=calls.mutation),
    Rule(look=calls.slow, unless=("W016",)),
    Rule(look=calls.unstable),
    # why right answers do not score, from the most to the least particular
    Rule(look=misses.other_rows, unless=("W012", *_UNSTABLE)),
    Rule(look=misses.column_unfit, unless=("W103", "W012", *_UNSTABLE)),
    Rule(look=misses.wrong_sign, unless=("W103", "W012", "W113", *_UNSTABLE)),
    Rule(look=misses.prompt_number, unless=("W102", "W103", "W012", "W113", *_UNSTABLE)),
    Rule(look=calls.constant, unless=_ELSEWHERE),
    Rule(look=misses.never_compared, unless=(*_ELSEWHERE, "W008")),
    Rule(look=misses.right_scores_nothing, unless=(*_ELSEWHERE, "W008", "W120")),
    Rule(look=calls.order, unless=("W103", *_UNSTABLE)),
    Rule(look=calls.company, unless=("W103", "W109", *_UNSTABLE)),
    Rule(look=calls.answer_in_prompt),
    Rule(look=misses.untested, unless=(*_ELSEWHERE, "W008", "W101", "W120")),
    # what scores like the right answer
    Rule(look=likes.no_answer, unless=_UNSTABLE),
    Rule(look=likes.prompt_copied, unless=(*_UNSTABLE, "W105", "W116")),
    Rule(look=likes.prompt_numbers, unless=(*_UNSTABLE, "W104", "W105")),
    Rule(look=likes.all_candidates, unless=(*_UNSTABLE, "W105")),
    Rule(look=likes.part_of_answer, unless=(*_UNSTABLE, "W105")),
    Rule(look=likes.wrong_answers, unless=(*_UNSTABLE, "W105", "W106", "W107")),
    Rule(look=likes.any_number, unless=(*_UNSTABLE, "W104", "W105", "W107")),
    Rule(look=likes.first_counts, unless=(*_UNSTABLE, "W105")),
    Rule(look=likes.folded_units, unless=_UNSTABLE),
    # good to know
    Rule(look=likes.stray_hits, unless=_UNSTABLE),
    Rule(look=likes.strictness, unless=_UNSTABLE),
)
"""In the order in which they are asked."""


def judge(evidence: Evidence) -> list[Finding]:
    """All that the rules say, errors first."""
    found: dict[str, list[Finding]] = {}
    for rule in RULES:
        if not set(rule.unless) & found.keys():
            said = list(rule.look(evidence))
            found |= {finding.code: [*found.get(finding.code, []), finding] for finding in said}
    order = ("error", "warning", "note")
    return sorted((f for findings in found.values() for f in findings), key=lambda f: order.index(f.severity))
