"""Rows, calls and their repetition: what holds of a function whatever it rewards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from podium.records import Finding
from podium.rewards.results import excerpt
from podium.rewards.tester.cases import Case
from podium.rewards.tester.evidence import ENDLESS, Evidence, Failure, alike, close
from podium.rewards.tester.rules.words import Severity, few, finding, show_form, shown

SLOW_SECONDS = 0.25
"""A completion; with 64 completions a round the reward takes 16 s of each."""


def answer_in_prompt(evidence: Evidence) -> Iterator[Finding]:
    """W116: the prompt says the answer."""
    golds = [case for case in evidence.cases if case.has_gold]
    if not evidence.is_correctness or len({case.gold for case in golds}) < 3:
        return
    held = [case for case in golds if _says(case.prompt_text, case.gold)]
    if len(held) >= 0.75 * len(golds):
        what = f"the prompt says the answer in {len(held)} of {len(golds)} rows, for example {_around(held[0])}"
        why = "the model learns to copy; its score says nothing of what it can do"
        yield finding(evidence, "W116", "error", what, why, "take the solution out of the `prompt` column")


def _answer_pattern(gold: str) -> str:
    answer = re.escape(gold)
    lead = r"(?:answer|solution|result|=)\W{0,4}(?:is\W{0,3})?"
    return rf"(?:{lead}|<answer>\s*|####\s*|\\boxed\{{){answer}(?!\w|[.,]\d)"


def _says(text: str, gold: str) -> bool:
    return re.search(_answer_pattern(gold), text, re.IGNORECASE) is not None


def _around(case: Case) -> str:
    found = re.search(_answer_pattern(case.gold), case.prompt_text, re.IGNORECASE)
    assert found is not None
    return f"row {case.row}: {excerpt(case.prompt_text[max(0, found.start() - 30) : found.end()])}"


def constant(evidence: Evidence) -> Iterator[Finding]:
    """W008: within a row all texts score alike, so that no group has anything to learn from."""
    tables = (evidence.gold, evidence.wrong, evidence.probes, evidence.numbers)
    rows = [
        [value for table in tables for values in table.values() for value in values[place : place + 1]]
        for place in range(len(evidence.cases))
    ]
    known = [[value for value in row if not math.isnan(value)] for row in rows]
    count = sum(map(len, rows))
    if evidence.repeats.base and not all(close(value, evidence.repeats.base[0]) for value in evidence.repeats.base):
        return
    failed = any(failure.problem.code in ENDLESS or failure.probe in evidence.gold for failure in evidence.failures)
    if count < 20 or evidence.is_cut or failed:
        return
    if not any(known):
        text = "None for everything" if not evidence.failures else ""
    elif all(close(value, row[0]) for row in known for value in row):
        every = sorted({row[0] for row in known if row})
        text = f"{every[0]:g} for everything" if len(every) == 1 else "the same for all texts of a row"
    else:
        return
    if text:
        severity: Severity = "error" if evidence.is_correctness else "warning"
        what = f"returned {text} ({count} completions of {len(rows)} rows)"
        why = "in a group where all score alike nothing is learnt"
        yield finding(
            evidence, "W008", severity, what, why, f"return more for better completions; {show_form(evidence)}"
        )


def failures(evidence: Evidence) -> Iterator[Finding]:
    """What the boundary refused, and what was raised: one finding for each kind, at its first place."""
    kinds: dict[tuple[str, str], list[Failure]] = {}
    for failure in evidence.failures:
        kinds.setdefault((failure.problem.code, _kind_of(failure.problem.message)), []).append(failure)
    for (code, _), same in kinds.items():
        first, message = same[0], same[0].problem.message
        probes = list(dict.fromkeys(failure.probe for failure in same))
        what, _, rest = message.partition("\n")
        where = f"row {first.row}, {first.probe}: {excerpt(first.text)}"
        others = f"; also {few(probes[1:])}" if len(probes) > 1 else ""
        fix = "try it with such texts, and return a number (or None) for each of them"
        yield Finding(code=code, severity="error", what=f"{what}\n  at {where}{others}", why=_place_in(rest), fix=fix)


def _kind_of(message: str) -> str:
    """The message without what changes from text to text."""
    lines = [line for line in message.splitlines() if line.lstrip().startswith("File ")]
    return lines[-1] if lines else re.sub(r"\d+|'.*'", "", message.splitlines()[0])


def _place_in(message: str) -> str:
    """The user's line, from a traceback or the dump of a stack."""
    lines = message.splitlines()
    at = [k for k, line in enumerate(lines) if line.lstrip().startswith("File ")]
    return " ".join(line.strip() for line in lines[at[-1] : at[-1] + 2]) if at else ""


def slow(evidence: Evidence) -> Iterator[Finding]:
    """W009 without a hang."""
    if evidence.seconds_per_completion > SLOW_SECONDS:
        seconds = evidence.seconds_per_completion
        what = f"takes {seconds:.2f} s a completion; 64 completions take {64 * seconds:.0f} s of each round"
        why = "no more was asked: the rest of the table is empty" if evidence.is_cut else ""
        yield finding(evidence, "W009", "warning", what, why, "score in parallel, cache, or cut long texts first")


def mutation(evidence: Evidence) -> Iterator[Finding]:
    """W011."""
    if evidence.mutated:
        what = f"changes its arguments: {', '.join(evidence.mutated)}"
        why = "Podium passes copies, so nothing else sees it; other trainers do not"
        yield finding(evidence, "W011", "warning", what, why, "work on a copy: `texts = list(completions)`")


def unstable(evidence: Evidence) -> Iterator[Finding]:
    """W112 where earlier calls count, W111 for any other difference between equal calls."""
    repeats = evidence.repeats
    kept = repeats.again is not None and not alike(repeats.base, repeats.again)
    seeded = repeats.reseeded is not None and not alike(repeats.base, repeats.reseeded)
    if kept and repeats.remembers:
        what = f"scored the same texts otherwise the second time ({_change(repeats.base, repeats.again or ())})"
        why = "new processes change in the same way: earlier calls are remembered"
        fix = "keep nothing between calls: no global lists, counters or default arguments that grow"
        yield finding(evidence, "W112", "warning", what, why, fix)
    elif kept or seeded:
        second = repeats.again if kept else repeats.reseeded
        what = f"scored the same texts otherwise the second time ({_change(repeats.base, second or ())})"
        why = "chance (or what earlier calls left behind) is part of the score, and becomes noise in every advantage"
        yield finding(evidence, "W111", "warning", what, why, "take the chance out, or seed it with the text itself")


def order(evidence: Evidence) -> Iterator[Finding]:
    """W109."""
    repeats = evidence.repeats
    if repeats.shuffled is not None and not alike(repeats.base, repeats.shuffled):
        what = f"the score of a text depends on its place in the batch ({_change(repeats.base, repeats.shuffled)})"
        why = "groups and completions come in any order"
        yield finding(evidence, "W109", "error", what, why, "score each completion by itself")


def company(evidence: Evidence) -> Iterator[Finding]:
    """W110: other groups count (warning), or the own group does (note)."""
    repeats = evidence.repeats
    if repeats.alone is not None and not alike(repeats.base, repeats.alone):
        what = f"the score of a text depends on other prompts' completions ({_change(repeats.base, repeats.alone)})"
        why = "advantages compare within a group; what other prompts got is noise there, and changes with batch size"
        yield finding(evidence, "W110", "warning", what, why, "score by itself, or within the group of one prompt")
    elif evidence.repeats.is_relative:
        what = "the score of a text depends on the other completions of its prompt"
        if evidence.form is None:
            what += "; asked one by one, right and wrong answers cannot be told apart: test the reward inside"
        yield finding(evidence, "W110", "note", what, "that is right for diversity, and wrong for correctness")


def _change(one: Sequence[float], other: Sequence[float]) -> str:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if not close(a, b)]
    return f"{len(pairs)} of {len(one)} texts, for example {shown(pairs[0][0])} then {shown(pairs[0][1])}"
