"""What evidence means: one function a rule, all of them in `RULES`. Pure: nothing is called or loaded.

A rule says nothing where a rule named in its `unless` has spoken: one mistake gives one finding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal

from podium.records import Finding
from podium.rewards.results import excerpt
from podium.rewards.tester.cases import Case
from podium.rewards.tester.gather import ENDLESS, Evidence, Failure, Scores, close, gains_of, mean
from podium.rewards.tester.probes import PROBES

SLOW_SECONDS = 0.25
"""A completion; with 64 completions a round the reward takes 16 s of each."""
LIKE = 0.9
"""Of the way from the wrong answer's score to the right one's: from here on a text scores like the right answer."""
MOST = 0.5
"""Share of the rows from which on a finding is no accident."""

Severity = Literal["error", "warning", "note"]


def judge(evidence: Evidence) -> list[Finding]:
    """All that the rules say, errors first."""
    found: dict[str, list[Finding]] = {}
    for rule in RULES:
        if not set(rule.unless) & found.keys():
            said = list(rule.look(evidence))
            found |= {finding.code: [*found.get(finding.code, []), finding] for finding in said}
    order = ("error", "warning", "note")
    return sorted((f for findings in found.values() for f in findings), key=lambda f: order.index(f.severity))


def _finding(evidence: Evidence, code: str, severity: Severity, what: str, why: str = "", fix: str = "") -> Finding:
    where = f" ({evidence.described.where})" if evidence.described.where else ""
    return Finding(code=code, severity=severity, what=f"`{evidence.described.name}`{where}: {what}", why=why, fix=fix)


# --- what scores like the right answer -------------------------------------------------------------------------------


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
    shown = ", ".join(f"{each.name} ({len(each.hit)} of {each.num_rows} rows)" for each in hits[:most])
    return shown + (f" and {len(hits) - most} more" if len(hits) > most else "")


def _reached(evidence: Evidence) -> str:
    """What the right answer scores."""
    assert evidence.form is not None
    name = evidence.form.name
    return (
        f"the right answer ({name}) scores {_shown(mean(evidence.gold[name]))}, "
        f"a wrong one {_shown(mean(evidence.wrong[name]))}"
    )


def _shown(value: float) -> str:
    return "None" if math.isnan(value) else f"{value:.3g}"


def _from_probes(code: str, severity: Severity, what: str, fix: str) -> Callable[[Evidence], Iterator[Finding]]:
    """A rule that says `what` where probes of its code score like the right answer."""

    def look(evidence: Evidence) -> Iterator[Finding]:
        hits = _hits_with(evidence, code)
        if hits:
            yield _finding(evidence, code, severity, f"{what}: {_listed(hits)}", _reached(evidence), fix)

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
        what = f"{hit} of {asked} wrong numbers from 0 to 100 score like the right answer, among them {_few(names)}"
        severity: Severity = "error" if hit > 0.2 * asked else "warning"
        yield _finding(evidence, "W115", severity, what, _reached(evidence), _COMPARE)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:6])


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
        yield _finding(evidence, "W108", "warning", what, why, fix)
    elif first.share >= MOST and not _hits_with(evidence, "W106"):
        what = f"of two answers any may be right: {_listed([first, last])}"
        yield _finding(evidence, "W106", "error", what, _reached(evidence), _ONE_ANSWER)


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
        yield _finding(evidence, "W114", "warning", what, _reached(evidence), fix)


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
        yield _finding(evidence, "W119", "note", what, why, "`.strip()` the text, and the answer in it")


# --- right answers that do not score ---------------------------------------------------------------------------------


def _rows_beaten(evidence: Evidence, scores: Scores, wrong: Scores | None = None) -> int:
    """Rows whose right answer beats the wrong one, in the form where there are most."""
    wrong = evidence.wrong if wrong is None else wrong
    return max((sum(gain > 0 for gain in gains_of(scores, wrong, form.name)) for form in evidence.forms), default=0)


def other_rows(evidence: Evidence) -> Iterator[Finding]:
    """W103: the answers of a neighbour, or of one row for all."""
    if evidence.diagnosis is None or not evidence.diagnosis.depends:
        return
    for name, matrix in evidence.diagnosis.matrix.items():
        shift = _whose(matrix)
        if shift is not None:
            what = f"a completion is scored against {shift}, not against its own row's answer (form: {name})"
            fix = "`for completion, gold in zip(completions, answer, strict=True)`: lists run side by side"
            yield _finding(evidence, "W103", "error", what, "columns have one value for each completion", fix)
            return


def _whose(matrix: Sequence[Sequence[float]]) -> str | None:
    """Whose answer scores for whom: `the answer of the next row`, of the first; None where it is not so clear."""
    n = len(matrix)
    if n < 3:
        return None
    for shift, words in ((1, "the answer of the next row"), (-1, "the answer of the row before")):
        wins = [
            matrix[i][(i + shift) % n] > max(matrix[i][j] for j in range(n) if j != (i + shift) % n) for i in range(n)
        ]
        if sum(wins) >= 0.75 * n:
            return words
    for j, words in ((0, "the answer of the first row"), (n - 1, "the answer of the last row")):
        if all(matrix[i][j] > max(matrix[i][k] for k in range(n) if k != j) for i in range(n)):
            return words
    return None


def prompt_number(evidence: Evidence) -> Iterator[Finding]:
    """W104 where the right answer does not score, but a number of the question does."""
    if evidence.diagnosis is None:
        return
    for which, scores in evidence.diagnosis.prompt_numbers.items():
        for form in evidence.forms:
            gains = gains_of(scores, evidence.gold, form.name)
            if len(gains) >= 2 and sum(gain > 0 for gain in gains) >= 0.75 * len(gains):
                what = f"the {which} number of the question scores more than the right answer (form: {form.name})"
                fix = f"compare with the column `{evidence.column}`, not with what stands in the prompt"
                yield _finding(evidence, "W104", "error", what, "the reward reads its answer from the prompt", fix)
                return


def other_kind(evidence: Evidence) -> Iterator[Finding]:
    """W012: right answers would score if the prompts were of the other kind."""
    if evidence.diagnosis is None or evidence.diagnosis.other_kind is None:
        return
    gold, wrong = evidence.diagnosis.other_kind
    silent = not _has_values(evidence.gold) and _has_values(gold)
    if silent or (evidence.form is None and _rows_beaten(evidence, gold, wrong) >= 0.75 * len(evidence.cases)):
        yield _finding(evidence, "W012", "error", *_kinds(evidence.cases[0]))


def _has_values(scores: Scores) -> bool:
    return any(not math.isnan(value) for values in scores.values() for value in values)


def _kinds(case: Case) -> tuple[str, str, str]:
    if isinstance(case.prompt, str):
        what = "it scores message lists only, but the prompts are plain, so completions are strings"
        return what, "the prompts are plain strings", "use the completion itself: `text = completion`"
    what = "it scores strings only, but the prompts are conversations, so completions are message lists"
    return what, 'a completion is `[{"role": "assistant", "content": text}]`', 'use `completion[0]["content"]`'


def column_unfit(evidence: Evidence) -> Iterator[Finding]:
    """W113: with the answer column cleaned, more right answers would score."""
    best = None if evidence.diagnosis is None else _best_variant(evidence)
    if best is None:
        return
    name, now, then = best
    row = next((case for case in evidence.cases if case.has_gold), evidence.cases[0])
    value = row.columns.get(evidence.column or "")
    what = f"right answers score in {now} of {len(evidence.cases)} rows, with `{evidence.column}` {name} in {then}"
    why = f"row {row.row} has {type(value).__name__} {excerpt(value, 40) if isinstance(value, str) else repr(value)}"
    fix = "clean both sides before comparing: `str(gold).strip() == text.strip()`; or clean the column once"
    yield _finding(evidence, "W113", "error" if now < MOST * len(evidence.cases) else "warning", what, why, fix)


def _best_variant(evidence: Evidence) -> tuple[str, int, int] | None:
    """The change of the column after which most rows score, with rows before and after."""
    assert evidence.diagnosis is not None
    now = _rows_beaten(evidence, evidence.gold)
    then = {name: _rows_beaten(evidence, scores) for name, scores in evidence.diagnosis.variants.items()}
    name = max(then, key=lambda each: then[each], default=None)
    return (name, now, then[name]) if name is not None and then[name] > now else None


def wrong_sign(evidence: Evidence) -> Iterator[Finding]:
    """W102: wrong answers beat the right one."""
    if evidence.form is not None or evidence.column is None:
        return
    for form in evidence.forms:
        gains = gains_of(evidence.gold, evidence.wrong, form.name)
        lost = sum(gain < 0 for gain in gains)
        if gains and lost >= 0.75 * len(gains) and sum(gains) < -1e-9:
            right, wrong = mean(evidence.gold[form.name]), mean(evidence.wrong[form.name])
            what = f"wrong answers score {_shown(wrong)}, the right one {_shown(right)} (form: {form.name})"
            yield _finding(evidence, "W102", "error", what, "training raises what scores more", "turn the sign round")
            return


def right_scores_nothing(evidence: Evidence) -> Iterator[Finding]:
    """W101: no form helps, or not in all rows."""
    if not evidence.is_correctness or not any(case.has_gold for case in evidence.cases):
        return
    if evidence.form is None:
        if evidence.diagnosis is not None and evidence.diagnosis.depends:
            what = f"the right answer scores no more than a wrong one in any of {len(evidence.forms)} forms"
            yield _finding(evidence, "W101", "error", what, _tried(evidence), _SHOW_FORM)
        return
    gold, wrong = evidence.gold[evidence.form.name], evidence.wrong[evidence.form.name]
    rows = zip(evidence.cases, gold, wrong, strict=True)
    missed = [(case, right) for case, right, other in rows if case.has_gold and not _known_better(right, other)]
    if missed:
        case, right = missed[0]
        places = ", ".join(str(each.row) for each, _ in missed)
        what = f"the right answer scores nothing in {len(missed)} of {len(evidence.cases)} rows ({places})"
        why = f"in row {case.row} {excerpt(evidence.form.write(case.gold))} scores {_shown(right)}"
        yield _finding(evidence, "W101", "warning", what, why, "look at these rows: are their answers of another kind?")


def _known_better(right: float, other: float) -> bool:
    """Also where the wrong answer has no score, or the row was not asked for lack of time."""
    return right > other or (math.isnan(other) and (math.isnan(right) or right > 0))


_SHOW_FORM = "if answers are written in a form of your own, show it: --form 'Result => {}'"


def _tried(evidence: Evidence) -> str:
    best = max((mean(evidence.gold[form.name]), form.name) for form in evidence.forms)
    return f"the best form for the right answer is {best[1]}, with {_shown(best[0])} on average"


def never_compared(evidence: Evidence) -> Iterator[Finding]:
    """W120: right and wrong answers score alike, though the signature asks for the answer."""
    if evidence.form is not None or not evidence.is_correctness or evidence.diagnosis is None or _is_relative(evidence):
        return
    if evidence.diagnosis.depends or not any(case.has_gold for case in evidence.cases):
        return
    what = f"takes `{evidence.column}`, but no score changed when rows were given each other's answers"
    why = "right and wrong answers score alike, so the model is not taught to be right"
    lengths = _length_rule(evidence)
    yield _finding(
        evidence, "W120", "error", f"{what}{lengths}", why, f"compare with `{evidence.column}`; {_SHOW_FORM}"
    )


def _length_rule(evidence: Evidence) -> str:
    """Said where the score goes up or down with the length of the text alone."""
    pairs = sorted(
        (len(form.write(case.gold)), value)
        for form in evidence.forms
        for case, value in zip(evidence.cases, evidence.gold[form.name], strict=True)
        if not math.isnan(value)
    )
    by_length = [mean(value for _, value in same) for _, same in groupby(pairs, key=lambda pair: pair[0])]
    steps = [b - a for a, b in pairwise(by_length)]
    if len(steps) >= 5 and (all(step > 0 for step in steps) or all(step < 0 for step in steps)):
        return "; it follows the length of the text alone"
    return ""


# --- rows, numbers, calls --------------------------------------------------------------------------------------------


def answer_in_prompt(evidence: Evidence) -> Iterator[Finding]:
    """W116: the prompt says the answer."""
    golds = [case for case in evidence.cases if case.has_gold]
    if not evidence.is_correctness or len({case.gold for case in golds}) < 3:
        return
    held = [case for case in golds if _says(case.prompt_text, case.gold)]
    if len(held) >= 0.75 * len(golds):
        what = f"the prompt says the answer in {len(held)} of {len(golds)} rows, for example {_around(held[0])}"
        why = "the model learns to copy; its score says nothing of what it can do"
        yield _finding(evidence, "W116", "error", what, why, "take the solution out of the `prompt` column")


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
        yield _finding(evidence, "W008", severity, what, why, f"return more for better completions; {_SHOW_FORM}")


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
        others = f"; also {_few(probes[1:])}" if len(probes) > 1 else ""
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
        yield _finding(evidence, "W009", "warning", what, why, "score in parallel, cache, or cut long texts first")


def mutation(evidence: Evidence) -> Iterator[Finding]:
    """W011."""
    if evidence.mutated:
        what = f"changes its arguments: {', '.join(evidence.mutated)}"
        why = "Podium passes copies, so nothing else sees it; other trainers do not"
        yield _finding(evidence, "W011", "warning", what, why, "work on a copy: `texts = list(completions)`")


# --- the same again --------------------------------------------------------------------------------------------------


def unstable(evidence: Evidence) -> Iterator[Finding]:
    """W112 where earlier calls count, W111 for any other difference between equal calls."""
    repeats = evidence.repeats
    kept = repeats.again is not None and not _alike(repeats.base, repeats.again)
    seeded = repeats.reseeded is not None and not _alike(repeats.base, repeats.reseeded)
    if kept and repeats.remembers:
        what = f"scored the same texts otherwise the second time ({_change(repeats.base, repeats.again or ())})"
        why = "new processes change in the same way: earlier calls are remembered"
        fix = "keep nothing between calls: no global lists, counters or default arguments that grow"
        yield _finding(evidence, "W112", "warning", what, why, fix)
    elif kept or seeded:
        second = repeats.again if kept else repeats.reseeded
        what = f"scored the same texts otherwise the second time ({_change(repeats.base, second or ())})"
        why = "chance (or what earlier calls left behind) is part of the score, and becomes noise in every advantage"
        yield _finding(evidence, "W111", "warning", what, why, "take the chance out, or seed it with the text itself")


def order(evidence: Evidence) -> Iterator[Finding]:
    """W109."""
    repeats = evidence.repeats
    if repeats.shuffled is not None and not _alike(repeats.base, repeats.shuffled):
        what = f"the score of a text depends on its place in the batch ({_change(repeats.base, repeats.shuffled)})"
        why = "groups and completions come in any order"
        yield _finding(evidence, "W109", "error", what, why, "score each completion by itself")


def company(evidence: Evidence) -> Iterator[Finding]:
    """W110: other groups count (warning), or the own group does (note)."""
    repeats = evidence.repeats
    if repeats.alone is not None and not _alike(repeats.base, repeats.alone):
        what = f"the score of a text depends on other prompts' completions ({_change(repeats.base, repeats.alone)})"
        why = "advantages compare within a group; what other prompts got is noise there, and changes with batch size"
        yield _finding(evidence, "W110", "warning", what, why, "score by itself, or within the group of one prompt")
    elif _is_relative(evidence):
        what = "the score of a text depends on the other completions of its prompt"
        if evidence.form is None:
            what += "; asked one by one, right and wrong answers cannot be told apart: test the reward inside"
        yield _finding(evidence, "W110", "note", what, "that is right for diversity, and wrong for correctness")


def _is_relative(evidence: Evidence) -> bool:
    """Whether a text is scored by comparison with the others of its prompt, and by nothing else."""
    repeats = evidence.repeats
    if repeats.single is None or repeats.alone is None:
        return False
    first = repeats.base[: len(repeats.single)]
    return _alike(repeats.base, repeats.alone) and not _alike(first, repeats.single)


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(close(a, b) for a, b in zip(one, other, strict=True))


def _change(one: Sequence[float], other: Sequence[float]) -> str:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if not close(a, b)]
    return f"{len(pairs)} of {len(one)} texts, for example {_shown(pairs[0][0])} then {_shown(pairs[0][1])}"


def stray_hits(evidence: Evidence) -> Iterator[Finding]:
    """W118: another alphabet's letters or digits are taken for the answer's."""
    for hits in _hits_with(evidence, "W118"):
        what = f"{hits.name} count as the answer ({len(hits.hit)} of {hits.num_rows} rows)"
        why = "Python's `int`, `float` and `\\d` take the digits of every script"
        yield _finding(
            evidence, "W118", "note", what, why, "where that matters: `re.ASCII`, or refuse `not text.isascii()`"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A question to the evidence, and the findings after which it is not asked."""

    look: Callable[[Evidence], Iterable[Finding]]
    unless: tuple[str, ...] = ()


_UNSTABLE = ("W111", "W112")
_ELSEWHERE = ("W006", "W007", "W102", "W103", "W104", "W012", "W113", *_UNSTABLE)
"""Said instead of what follows from them."""

RULES = (
    Rule(look=other_kind),
    Rule(look=failures, unless=("W012",)),
    Rule(look=mutation),
    Rule(look=slow, unless=("W016",)),
    Rule(look=unstable),
    # why right answers do not score, from the most to the least particular
    Rule(look=other_rows, unless=("W012", *_UNSTABLE)),
    Rule(look=column_unfit, unless=("W103", "W012", *_UNSTABLE)),
    Rule(look=wrong_sign, unless=("W103", "W012", "W113", *_UNSTABLE)),
    Rule(look=prompt_number, unless=("W102", "W103", "W012", "W113", *_UNSTABLE)),
    Rule(look=constant, unless=_ELSEWHERE),
    Rule(look=never_compared, unless=(*_ELSEWHERE, "W008")),
    Rule(look=right_scores_nothing, unless=(*_ELSEWHERE, "W008", "W120")),
    Rule(look=order, unless=("W103", *_UNSTABLE)),
    Rule(look=company, unless=("W103", "W109", *_UNSTABLE)),
    Rule(look=answer_in_prompt),
    # what scores like the right answer
    Rule(look=no_answer, unless=_UNSTABLE),
    Rule(look=prompt_copied, unless=(*_UNSTABLE, "W105", "W116")),
    Rule(look=prompt_numbers, unless=(*_UNSTABLE, "W104", "W105")),
    Rule(look=all_candidates, unless=(*_UNSTABLE, "W105")),
    Rule(look=part_of_answer, unless=(*_UNSTABLE, "W105")),
    Rule(look=wrong_answers, unless=(*_UNSTABLE, "W105", "W106", "W107")),
    Rule(look=any_number, unless=(*_UNSTABLE, "W104", "W105", "W107")),
    Rule(look=first_counts, unless=(*_UNSTABLE, "W105")),
    Rule(look=folded_units, unless=_UNSTABLE),
    # good to know
    Rule(look=stray_hits, unless=_UNSTABLE),
    Rule(look=strictness, unless=_UNSTABLE),
)
"""In the order in which they are asked."""


def named(findings: Iterable[Finding], name: str) -> list[Finding]:
    """The findings of one reward among several, with its name in front where it is not there yet."""
    return [
        finding if f"`{name}`" in finding.what else replace(finding, what=f"`{name}`: {finding.what}")
        for finding in findings
    ]
