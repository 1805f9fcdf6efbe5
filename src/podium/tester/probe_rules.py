"""Rules about texts that are no right answer and score like one; and `RULES`, the table of all rules about rewards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from podium.data.columns import GOLD
from podium.errors import Finding, Severity
from podium.rewards.score import excerpt
from podium.tester.calls import Scores
from podium.tester.probes import PROBES
from podium.tester.scores import MOST, Evidence, mean, shown

LIKE = 0.9
"""Least part of the way from the wrong answer's score to the right one's at which a text scores like the right one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Rows in which a probe scores like the right answer."""

    name: str
    places: np.ndarray
    num_rows: int
    """Rows where the probe has a value and the right answer beats the wrong one."""

    @property
    def share(self) -> float:
        """Part of those rows; 0 where there is none."""
        return len(self.places) / max(self.num_rows, 1)

    def __str__(self) -> str:
        return f"{self.name} ({len(self.places)} of {self.num_rows} rows)"


def hits_of(evidence: Evidence, name: str, scores: Scores) -> Hits:
    """The rows in which a probe reaches the right answer's score, where that is more than the wrong answer's."""
    if evidence.form is None or name not in scores:
        return Hits(name=name, places=np.array([], int), num_rows=0)
    gold = evidence.gold[evidence.form.name]
    wrong = evidence.wrong[evidence.form.name]
    tried = (gold > wrong) & ~np.isnan(scores[name])
    reached = scores[name] >= wrong + LIKE * (gold - wrong)
    return Hits(name=name, places=np.flatnonzero(tried & reached), num_rows=int(tried.sum()))


def _hits_with(evidence: Evidence, code: str) -> list[Hits]:
    """The probes of a code that score like the right answer in most rows, most often first."""
    all_hits = [hits_of(evidence, probe.name, evidence.probes) for probe in PROBES if probe.code == code]
    return sorted((hits for hits in all_hits if hits.share >= MOST), key=lambda hits: -hits.share)


def _listed(hits: Sequence[Hits], most: int = 5) -> str:
    return ", ".join(map(str, hits[:most])) + (f" and {len(hits) - most} more" if len(hits) > most else "")


def _reached(evidence: Evidence) -> str:
    """The score of the right answer."""
    assert evidence.form is not None
    name = evidence.form.name
    right = shown(mean(evidence.gold[name]))
    wrong = shown(mean(evidence.wrong[name]))
    return f"the right answer ({name}) scores {right}, a wrong one {wrong}"


_COMPARE = "compare the whole answer, as a number where it is one: `float(given) == float(answer)`"
_ONE_ANSWER = "read one answer (the last), then compare it alone"
_LIKE_THE_ANSWER = {
    "W105": ("texts without an answer score like the right one", "read an answer first; where there is none: 0"),
    "W117": ("a copy of the prompt scores like the right answer", "read the answer from its form alone"),
    "W104": ("a number of the question scores like the right answer", "compare with the answer column"),
    "W106": ("a list of all candidates scores like the right answer", _ONE_ANSWER),
    "W107": ("a part of the answer, or more than the answer, scores like it", "compare with `==`, not `in`"),
    "W115": ("wrong answers score like the right one", _COMPARE),
}
"""By the code of probes: what is wrong where they score like the right answer, and the fix."""


def of(code: str) -> Callable[[Evidence], Iterator[Finding]]:
    """The rule for probes of a code."""

    def rule(evidence: Evidence) -> Iterator[Finding]:
        if hits := _hits_with(evidence, code):
            what, fix = _LIKE_THE_ANSWER[code]
            golds = [name for name in GOLD if name in evidence.cases[0].columns]
            if code == "W117" and evidence.asked and golds and not {*golds, *evidence.columns[1:]} & {*evidence.asked}:
                fix = f"compare with the column `{golds[0]}`, which has the right answer, not with {evidence.named}"
            names = [probe.name for probe in hits]
            severity, shows = _demonstration(evidence, names, [evidence.probes[name] for name in names])
            yield evidence.finding(code, severity, f"{what}: {_listed(hits)}{shows}", _reached(evidence), fix)

    return rule


def _demonstration(evidence: Evidence, names: Sequence[str], scores: Sequence[np.ndarray]) -> tuple[Severity, str]:
    """An error, with a completion that gets as much as the right answer of its row; else a warning.

    An error needs a function that judges right and wrong alone (`Evidence.is_judge`), and a text that is no right
    answer: a copy of a prompt that has the answer in it may be.
    """
    if evidence.form is None or not evidence.is_judge:
        return "warning", ""
    right = evidence.gold[evidence.form.name]
    foreign = evidence.foreign
    better = right > evidence.wrong[evidence.form.name]
    for name, values in zip(names, scores, strict=True):
        make = next(probe.make for probe in PROBES if probe.name == name)
        copies = "question" in name or "prompt" in name
        for place in np.flatnonzero(better & (values >= right)):
            case = evidence.cases[place]
            if not (copies and case.gold.casefold() in case.prompt_text.casefold()):
                text = excerpt(make(case, evidence.form.write) or "", 40)
                shows = f"; in row {case.row} {text} scores {shown(values[place])}, as much as the right answer "
                shows += f"{excerpt(case.gold, 40)} ({shown(right[place])}), which scores {shown(foreign[place])} "
                return "error", f"{shows}where the row has another answer"
    return "warning", ""


def wrong_answers(evidence: Evidence) -> Iterator[Finding]:
    """W115; one more and one less alone may be a tolerance that is meant."""
    meant = {probe.name for probe in _hits_with(evidence, "W115")} <= {"one more", "one less"}
    for found in of("W115")(evidence):
        yield replace(found, severity="warning") if meant else found


def first_counts(evidence: Evidence) -> Iterator[Finding]:
    """W108, and W106 where any of two answers counts."""
    first = hits_of(evidence, "right, then wrong", evidence.probes)
    last = hits_of(evidence, "wrong, then right", evidence.probes)
    if first.share >= MOST and last.share < MOST:
        what = f"of two answers the first counts: {first}; the last does not"
        why = "a model writes what it considers on the way to its answer; the last one is what it means"
        fix = 'read the last: `re.findall(...)[-1]`, `text.rfind("<answer>")`'
        yield evidence.finding("W108", "warning", what, why, fix)
    elif first.share >= MOST and not _hits_with(evidence, "W106"):
        severity, shows = _demonstration(evidence, [first.name], [evidence.probes[first.name]])
        what = f"of two answers any may be right: {_listed([first, last])}{shows}"
        yield evidence.finding("W106", severity, what, _reached(evidence), _ONE_ANSWER)


_UNIT = re.compile(r"\d\s*(?:[kMGTPmnpfµ]?(?:[WVAJNKFHTBbLlgmsC]|Hz|Pa|eV|Wh|bit|mol|cal))(?:/\w+)?$")


def folded_units(evidence: Evidence) -> Iterator[Finding]:
    """W114, for answers in which the case of letters is part of a unit."""
    hits = hits_of(evidence, "case swapped", evidence.probes)
    for case in [evidence.cases[place] for place in hits.places if _UNIT.search(evidence.cases[place].gold)][:1]:
        what = f"{case.gold.swapcase()} scores like {case.gold} (row {case.row}); case is part of a unit"
        fix = "compare units as they are written; fold the case of words only"
        yield evidence.finding("W114", "warning", what, _reached(evidence), fix)


def _is_program(evidence: Evidence) -> bool:
    """Whether answers are programs, in which white space and case have a meaning."""
    return evidence.form is not None and evidence.form.name == "code block"


def other_scripts(evidence: Evidence) -> Iterator[Finding]:
    """W118: another alphabet's letters or digits are taken for the answer's."""
    for hits in [] if _is_program(evidence) else _hits_with(evidence, "W118"):
        what = f"{hits.name} count as the answer ({len(hits.places)} of {hits.num_rows} rows)"
        why = "Python's `int`, `float` and `\\d` take the digits of every script"
        fix = "where that matters: `re.ASCII`, or refuse `not text.isascii()`"
        yield evidence.finding("W118", "note", what, why, fix)


def strictness(evidence: Evidence) -> Iterator[Finding]:
    """W119: the right answer with white space around it, or in other case, does not score."""
    if _is_program(evidence):
        return
    names = ("white space around the answer", "new lines around the answer", "white space around the text")
    found = [hits_of(evidence, name, evidence.probes) for name in (*names, "case swapped")]
    if missed := [hits.name for hits in found if hits.num_rows and hits.share < MOST]:
        what = f"the right answer does not score with {', '.join(missed)}"
        why = "models often write it so, and learn nothing from a right answer that scores 0"
        cures = []
        if missed != ["case swapped"]:
            cures.append("`.strip()` the text, and the answer in it")
        if "case swapped" in missed:
            cures.append("`.casefold()` both, where case does not matter")
        yield evidence.finding("W119", "note", what, why, "; ".join(cures))
