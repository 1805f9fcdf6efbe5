"""Right answers that do not score, and why: from the most to the least particular."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from podium.records import Finding
from podium.rewards.results import excerpt
from podium.rewards.tester.cases import Case
from podium.rewards.tester.evidence import Evidence, Scores, gains_of, mean
from podium.rewards.tester.rules.words import MOST, finding, show_form, shown


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
            yield finding(evidence, "W103", "error", what, "columns have one value for each completion", fix)
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
                fix = f"compare with the column {evidence.named}, not with what stands in the prompt"
                yield finding(evidence, "W104", "error", what, "the reward reads its answer from the prompt", fix)
                return


def other_kind(evidence: Evidence) -> Iterator[Finding]:
    """W012: right answers would score if the prompts were of the other kind."""
    if evidence.diagnosis is None or evidence.diagnosis.other_kind is None:
        return
    gold, wrong = evidence.diagnosis.other_kind
    silent = not _has_values(evidence.gold) and _has_values(gold)
    if silent or (evidence.form is None and _rows_beaten(evidence, gold, wrong) >= 0.75 * len(evidence.cases)):
        yield finding(evidence, "W012", "error", *_kinds(evidence.cases[0]))


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
    value = row.columns.get(evidence.columns[0])
    what = f"right answers score in {now} of {len(evidence.cases)} rows, with {evidence.named} {name} in {then}"
    why = f"row {row.row} has {type(value).__name__} {excerpt(value, 40) if isinstance(value, str) else repr(value)}"
    fix = "clean both sides before comparing: `str(gold).strip() == text.strip()`; or clean the column once"
    yield finding(evidence, "W113", "error" if now < MOST * len(evidence.cases) else "warning", what, why, fix)


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
            what = f"wrong answers score {shown(wrong)}, the right one {shown(right)} (form: {form.name})"
            yield finding(evidence, "W102", "error", what, "training raises what scores more", "turn the sign round")
            return


def right_scores_nothing(evidence: Evidence) -> Iterator[Finding]:
    """W101: no form helps, or not in all rows."""
    if not evidence.is_correctness or not any(case.has_gold for case in evidence.cases):
        return
    if evidence.form is None:
        if evidence.diagnosis is not None and evidence.diagnosis.depends:
            what = f"the right answer scores no more than a wrong one in any of {len(evidence.forms)} forms"
            yield finding(evidence, "W101", "error", what, _tried(evidence), show_form(evidence))
        return
    gold, wrong = evidence.gold[evidence.form.name], evidence.wrong[evidence.form.name]
    rows = zip(evidence.cases, gold, wrong, strict=True)
    missed = [(case, right) for case, right, other in rows if case.has_gold and not _known_better(right, other)]
    if missed:
        case, right = missed[0]
        places = ", ".join(str(each.row) for each, _ in missed)
        what = f"the right answer scores nothing in {len(missed)} of {len(evidence.cases)} rows ({places})"
        why = f"in row {case.row} {excerpt(evidence.form.write(case.gold))} scores {shown(right)}"
        yield finding(evidence, "W101", "warning", what, why, "look at these rows: are their answers of another kind?")


def _known_better(right: float, other: float) -> bool:
    """Also where the wrong answer has no score, or the row was not asked for lack of time."""
    return right > other or (math.isnan(other) and (math.isnan(right) or right > 0))


def _tried(evidence: Evidence) -> str:
    best = max((mean(evidence.gold[form.name]), form.name) for form in evidence.forms)
    return f"the best form for the right answer is {best[1]}, with {shown(best[0])} on average"


def never_compared(evidence: Evidence) -> Iterator[Finding]:
    """W120: right and wrong answers score alike, though the signature asks for the answer."""
    if (
        evidence.form is not None
        or not evidence.is_correctness
        or evidence.diagnosis is None
        or evidence.repeats.is_relative
    ):
        return
    if evidence.diagnosis.depends or not any(case.has_gold for case in evidence.cases):
        return
    what = f"takes {evidence.named}, but no score changed when rows were given each other's answers"
    why = "right and wrong answers score alike, so the model is not taught to be right"
    lengths = _length_rule(evidence)
    yield finding(
        evidence, "W120", "error", f"{what}{lengths}", why, f"compare with {evidence.named}; {show_form(evidence)}"
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


def untested(evidence: Evidence) -> Iterator[Finding]:
    """W122: nothing is known about right and wrong answers, so that no test of them was made."""
    if evidence.form is not None or evidence.repeats.is_relative or evidence.failures or evidence.is_cut:
        return
    if evidence.described.is_model:
        what = "not tested on right and wrong answers: a reward model's scores are a matter of degree"
        fix = "look in the table at what right and wrong answers score"
        yield finding(evidence, "W122", "note", what, _NOTHING_KNOWN, fix)
    elif evidence.asked:
        what = f"not tested on right and wrong answers: with {evidence.named} no text that was tried scores as right"
        yield finding(evidence, "W122", "warning", what, _NOTHING_KNOWN, show_form(evidence))
    else:
        what = "not tested on right and wrong answers: it reads no column of the data"
        what = what if evidence.described.wants is not None else f"{what} that could be found in its code"
        fix = "if it is about the right answer, name the column with --answer-column"
        yield finding(evidence, "W122", "note", what, _NOTHING_KNOWN, fix)


_NOTHING_KNOWN = "tested were its calls, their repetition and order; texts that should not score could not be told"
