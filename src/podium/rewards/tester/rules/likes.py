"""Texts that are no right answer and score like one, found by probes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from podium.records import Finding
from podium.rewards.tester.evidence import Evidence, Scores, mean
from podium.rewards.tester.probes import PROBES
from podium.rewards.tester.rules.words import MOST, Severity, few, finding, shown

LIKE = 0.9
"""Of the way from the wrong answer's score to the right one's: from here on a text scores like the right answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Rows in which a probe scores like the right answer."""

    name: str
    hit: tuple[int, ...]
    """Places of the rows."""
    num_rows: int
    """Rows where the probe has a value and the right answer beats the wrong one."""

    @property
    def share(self) -> float:
        """Of those rows; 0 where there is none."""
        return len(self.hit) / self.num_rows if self.num_rows else 0.0


def hits_of(evidence: Evidence, name: str, scores: Scores) -> Hits:
    """How often the probe reaches the right answer's score, and that is more than the wrong answer's."""
    assert evidence.form is not None
    gold, wrong = evidence.gold[evidence.form.name], evidence.wrong[evidence.form.name]
    rows = [
        (place, value >= other + LIKE * (right - other))
        for place, (value, right, other) in enumerate(zip(scores.get(name, ()), gold, wrong, strict=False))
        if right > other and not math.isnan(value)
    ]
    return Hits(name=name, hit=tuple(place for place, like in rows if like), num_rows=len(rows))


def _hits_with(evidence: Evidence, code: str) -> list[Hits]:
    """Of the probes of a code, those that score like the right answer in most rows, most often first."""
    if evidence.form is None:
        return []
    all_hits = [hits_of(evidence, probe.name, evidence.probes) for probe in PROBES if probe.code == code]
    return sorted((hits for hits in all_hits if hits.share >= MOST), key=lambda hits: -hits.share)


def _listed(hits: Sequence[Hits], most: int = 5) -> str:
    names = ", ".join(f"{each.name} ({len(each.hit)} of {each.num_rows} rows)" for each in hits[:most])
    return names + (f" and {len(hits) - most} more" if len(hits) > most else "")


def _reached(evidence: Evidence) -> str:
    """What the right answer scores."""
    assert evidence.form is not None
    name = evidence.form.name
    return (
        f"the right answer ({name}) scores {shown(mean(evidence.gold[name]))}, "
        f"a wrong one {shown(mean(evidence.wrong[name]))}"
    )


def _from_probes(code: str, severity: Severity, what: str, fix: str) -> Callable[[Evidence], Iterator[Finding]]:
    """A rule that says `what` where probes of its code score like the right answer."""

    def look(evidence: Evidence) -> Iterator[Finding]:
        hits = _hits_with(evidence, code)
        if hits:
            yield finding(evidence, code, severity, f"{what}: {_listed(hits)}", _reached(evidence), fix)

    return look


_COMPARE = "compare the whole answer, as a number where it is one: `float(given) == float(answer)`"
_ONE_ANSWER = "read one answer (the last), then compare it alone"

no_answer = _from_probes(
    "W105", "error", "texts without an answer score like the right one", "read an answer first; where there is none: 0"
)
prompt_copied = _from_probes(
    "W117", "error", "a copy of the prompt scores like the right answer", "read the answer from its form alone"
)
prompt_numbers = _from_probes(
    "W104", "error", "a number of the question scores like the right answer", "compare with the answer column"
)
all_candidates = _from_probes("W106", "error", "a list of all candidates scores like the right answer", _ONE_ANSWER)
part_of_answer = _from_probes(
    "W107", "error", "a part of the answer, or more than the answer, scores like it", "compare with `==`, not `in`"
)


def wrong_answers(evidence: Evidence) -> Iterator[Finding]:
    """W115; one more and one less alone may be a tolerance that is meant."""
    hits = _hits_with(evidence, "W115")
    severity: Severity = "warning" if {each.name for each in hits} <= {"one more", "one less"} else "error"
    yield from _from_probes("W115", severity, "wrong answers score like the right one", _COMPARE)(evidence)


def any_number(evidence: Evidence) -> Iterator[Finding]:
    """W115 by the numbers from 0 to 100."""
    if evidence.form is None or _hits_with(evidence, "W115"):
        return
    all_hits = [hits_of(evidence, name, evidence.numbers) for name in evidence.numbers]
    hit, asked = sum(len(each.hit) for each in all_hits), sum(each.num_rows for each in all_hits)
    if asked and hit > 0.02 * asked:
        names = [each.name.removeprefix("number ") for each in all_hits if each.hit]
        what = f"{hit} of {asked} wrong numbers from 0 to 100 score like the right answer, among them {few(names)}"
        severity: Severity = "error" if hit > 0.2 * asked else "warning"
        yield finding(evidence, "W115", severity, what, _reached(evidence), _COMPARE)


def first_counts(evidence: Evidence) -> Iterator[Finding]:
    """W108, and W106 where any of two answers counts."""
    if evidence.form is None:
        return
    first = hits_of(evidence, "right, then wrong", evidence.probes)
    last = hits_of(evidence, "wrong, then right", evidence.probes)
    if first.share >= MOST and last.share < MOST:
        what = f"of two answers the first counts: {_listed([first])}; the last does not"
        why = "a model writes what it considers on the way to its answer; the last one is what it means"
        fix = 'read the last: `re.findall(...)[-1]`, `text.rfind("<answer>")`'
        yield finding(evidence, "W108", "warning", what, why, fix)
    elif first.share >= MOST and not _hits_with(evidence, "W106"):
        what = f"of two answers any may be right: {_listed([first, last])}"
        yield finding(evidence, "W106", "error", what, _reached(evidence), _ONE_ANSWER)


def folded_units(evidence: Evidence) -> Iterator[Finding]:
    """W114, for answers in which the case of letters is part of a unit."""
    if evidence.form is None:
        return
    units = [place for place, case in enumerate(evidence.cases) if _UNIT.search(case.gold)]
    hits = hits_of(evidence, "case swapped", evidence.probes)
    hit = [place for place in units if place in hits.hit]
    if hit:
        gold = evidence.cases[hit[0]].gold
        what = f"{gold.swapcase()} scores like {gold} (row {evidence.cases[hit[0]].row}); case is part of a unit"
        fix = "compare units as they are written; fold the case of words only"
        yield finding(evidence, "W114", "warning", what, _reached(evidence), fix)


_UNIT = re.compile(r"\d\s*(?:[kMGTPmnpfµ]?(?:[WVAJNKFHTBbLlgmsC]|Hz|Pa|eV|Wh|bit|mol|cal))(?:/\w+)?$")


def strictness(evidence: Evidence) -> Iterator[Finding]:
    """W119: the right answer with white space around it does not score."""
    if evidence.form is None:
        return
    names = ("white space around the answer", "new lines around the answer", "white space around the text")
    missed = [
        name for name in names if (hits := hits_of(evidence, name, evidence.probes)).num_rows and hits.share < MOST
    ]
    if missed:
        what = f"the right answer does not score with {', '.join(missed)}"
        why = "models often write a space or a new line there, and learn nothing from a right answer that scores 0"
        yield finding(evidence, "W119", "note", what, why, "`.strip()` the text, and the answer in it")


def stray_hits(evidence: Evidence) -> Iterator[Finding]:
    """W118: another alphabet's letters or digits are taken for the answer's."""
    for hits in _hits_with(evidence, "W118"):
        what = f"{hits.name} count as the answer ({len(hits.hit)} of {hits.num_rows} rows)"
        why = "Python's `int`, `float` and `\\d` take the digits of every script"
        yield finding(
            evidence, "W118", "note", what, why, "where that matters: `re.ASCII`, or refuse `not text.isascii()`"
        )
