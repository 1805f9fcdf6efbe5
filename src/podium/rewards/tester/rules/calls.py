"""Rules about rows, calls and their repetition: they hold of any function, whatever it rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from podium.errors import Finding, Severity
from podium.rewards.score import HUGE, excerpt
from podium.rewards.tester.evidence import ENDLESS, NEARLY_ALL, Evidence, FailedCall, alike, close, shown

SLOW_SECONDS = 0.25
"""A completion; with 64 completions a round the reward takes 16 s of each."""


def answer_in_prompt(evidence: Evidence) -> Iterator[Finding]:
    """W116: the answer stands in the prompt."""
    golds = [case for case in evidence.cases if case.has_gold]
    if not evidence.is_correctness or len({case.gold for case in golds}) < 3:
        return
    lead = r"(?:(?:answer|solution|result|=)\W{0,4}(?:is\W{0,3})?|<answer>\s*|####\s*|\\boxed\{)"
    patterns = [rf"{lead}{re.escape(case.gold)}(?!\w|[.,]\d)" for case in golds]
    searched = [re.search(each, case.prompt_text, re.IGNORECASE) for each, case in zip(patterns, golds, strict=True)]
    held = [(case, match) for case, match in zip(golds, searched, strict=True) if match]
    if len(held) >= NEARLY_ALL * len(golds):
        case, match = held[0]
        around = f"row {case.row}: {excerpt(case.prompt_text[max(0, match.start() - 30) : match.end()])}"
        what = f"the prompt says the answer in {len(held)} of {len(golds)} rows, for example {around}"
        why = "the model learns to copy; its score says nothing of what it can do"
        yield evidence.finding("W116", "warning", what, why, "take the solution out of the `prompt` column")


def huge(evidence: Evidence) -> Iterator[Finding]:
    """W007 of numbers that can be trained on."""
    tables = (evidence.gold, evidence.wrong, evidence.probes, evidence.numbers)
    largest = max((abs(x) for table in tables for each in table.values() for x in each if not np.isnan(x)), default=0.0)
    if largest > HUGE:
        fix = "scale it: only differences within a group count"
        yield evidence.finding("W007", "warning", f"returned {largest:g}", "other rewards count for nothing", fix)


_COMPARED = re.compile(r"([\w.\[\]]+(?:\([^()]*\))?)\s*==\s*([\w.\[\]]+\()")


def _compares_kinds(code: str) -> bool:
    """Whether one side alone of a comparison is made a number.

    >>> _compares_kinds("text.strip() == int(answer)"), _compares_kinds("int(text) == int(answer)")
    (True, False)
    """
    number = ("int(", "float(")
    return any(left.startswith(number) != right.startswith(number) for left, right in _COMPARED.findall(code))


def constant(evidence: Evidence) -> Iterator[Finding]:
    """W008: within a row all texts score alike, so that no group has anything to learn from.

    A warning: the texts that the test does not have may score otherwise.
    """
    tables = (evidence.gold, evidence.wrong, evidence.probes, evidence.numbers)
    scores = np.array([values for table in tables for values in table.values()]).T
    known = [row[~np.isnan(row)] for row in scores]
    failed = any(failure.code in ENDLESS or failure.probe in evidence.gold for failure in evidence.failures)
    if scores.size < 20 or evidence.is_cut or failed or (evidence.failures and np.isnan(scores).all()):
        return
    for values in (*known, np.array(evidence.repeats.base)):
        if not np.allclose(values, values[:1], rtol=1e-4, atol=0.0, equal_nan=True):
            return
    every = {float(row[0]) for row in known if row.size}
    text = "None for everything" if not every else f"{min(every):g} for everything"
    text = "the same for all texts of a row" if len(every) > 1 else text
    what = f"returned {text} ({scores.size} completions of {len(scores)} rows)"
    fix = f"return more for better completions; {evidence.show_form}"
    if every == {0.0} and evidence.names_answer:  # no text was right, so the comparison is what to look at
        clean = "before comparing, strip white space from both sides (`.strip()`) and fold their case (`.casefold()`)"
        if _compares_kinds(evidence.info.code_text):
            clean = "a text never equals a number: convert both sides (float(text) == float(answer)), or neither"
        fix = f"{clean}; {evidence.show_form}"
    yield evidence.finding("W008", "warning", what, "in a group where all score alike nothing is learnt", fix)


def failures(evidence: Evidence) -> Iterator[Finding]:
    """Values that the boundary refused, and errors that were raised: one finding for each kind, at its first place.

    A warning where other texts get their values, since the run may do without such a text, and where a call took too
    long, which a slower machine alone may cause: the function was not tested on that text.
    """
    tables = (evidence.gold, evidence.wrong)
    works = any(not np.isnan(values).all() for table in tables for values in table.values())
    kinds: dict[tuple[str, str], list[FailedCall]] = {}
    for failure in evidence.failures:
        frames = _frames(failure.message)
        if failure.code == "W005":  # a matter of the function, not of a text
            kind = ""
        elif frames:
            kind = frames[-1].partition(", in ")[0]
        else:  # the message without what changes from text to text
            kind = re.sub(r"\d+|'.*'", "", failure.message.splitlines()[0])
        kinds.setdefault((failure.code, kind), []).append(failure)
    for (code, _), same in kinds.items():
        first = same[0]
        probes = list(dict.fromkeys(failure.probe for failure in same))
        others = f"; also {', '.join(probes[1:7])}" if len(probes) > 1 else ""
        place = f"row {first.row}, {first.probe}: {excerpt(first.text)}{others}"
        what = f"{first.message.splitlines()[0]}\n  at {place}"
        fix = first.fix or "try it with such texts; return a list with one number (or None) for each completion"
        endless = code in ENDLESS | {"W017"}
        severity: Severity = "warning" if code == "W016" or (works and not endless) else "error"
        yield Finding(code=code, severity=severity, what=what, why="".join(_frames(first.message)[-1:]), fix=fix)


def _frames(message: str) -> list[str]:
    """Lines of the user's files with the code below them, from a traceback or the dump of a stack."""
    lines = [line.strip() for line in message.splitlines()[1:]]
    return [" ".join(lines[k : k + 2]) for k, line in enumerate(lines) if line.startswith("File ")]


def slow(evidence: Evidence) -> Iterator[Finding]:
    """W009 without a hang."""
    if evidence.seconds_per_completion > SLOW_SECONDS:
        seconds = evidence.seconds_per_completion
        what = f"takes {seconds:.2f} s a completion; 64 completions take {64 * seconds:.0f} s of each round"
        why = "no more was asked: the rest of the table is empty" if evidence.is_cut else ""
        yield evidence.finding("W009", "warning", what, why, "score in parallel, cache, or cut long texts first")


def mutation(evidence: Evidence) -> Iterator[Finding]:
    """W011: changed arguments."""
    if evidence.mutated:
        what = f"changes its arguments: {', '.join(evidence.mutated)}"
        why = "Podium passes copies, so nothing else sees it; other trainers do not"
        yield evidence.finding("W011", "warning", what, why, "work on a copy: `texts = list(completions)`")


def unstable(evidence: Evidence) -> Iterator[Finding]:
    """W112 where earlier calls count, W111 for any other difference between equal calls."""
    repeats = evidence.repeats
    kept = change(repeats.base, repeats.again)
    if found := kept or change(repeats.base, repeats.reseeded):
        what = f"scored the same texts otherwise the second time ({found})"
        if kept and repeats.remembers:
            code = "W112"
            why = "new processes change in the same way: earlier calls are remembered"
            fix = "keep nothing between calls: no global lists, counters or default arguments that grow"
        else:
            code = "W111"
            fix = "take the chance out, or seed it with the text itself"
            why = (
                "chance (or what earlier calls left behind) is part of the score, and becomes noise in every advantage"
            )
        yield evidence.finding(code, "warning", what, why, fix)


def order(evidence: Evidence) -> Iterator[Finding]:
    """W109: the place in the batch counts."""
    if found := change(evidence.repeats.base, evidence.repeats.shuffled):
        what = f"the score of a text depends on its place in the batch ({found})"
        why = "groups and completions come in any order"
        yield evidence.finding("W109", "warning", what, why, "score each completion by itself")


def company(evidence: Evidence) -> Iterator[Finding]:
    """W110: other groups count (warning), or the own group does (note)."""
    if found := change(evidence.repeats.base, evidence.repeats.alone):
        what = f"the score of a text depends on other prompts' completions ({found})"
        why = "advantages compare within a group; what other prompts got is noise there, and changes with batch size"
        yield evidence.finding("W110", "warning", what, why, "score by itself, or within the group of one prompt")
    elif evidence.repeats.is_relative:
        what = "the score of a text depends on the other completions of its prompt"
        if evidence.form is None:
            what = f"{what}; asked one by one, right and wrong answers cannot be told apart: test the reward inside"
        yield evidence.finding("W110", "note", what, "that is right for diversity, and wrong for correctness")


def change(one: Sequence[float], other: Sequence[float] | None) -> str:
    """The difference of two scores of the same texts, in words; empty where there is none, or one is missing."""
    if other is None or alike(one, other):
        return ""
    places = np.flatnonzero(~close(one, other))
    first = places[0]
    return f"{len(places)} of {len(one)} texts, for example {shown(one[first])} then {shown(other[first])}"
