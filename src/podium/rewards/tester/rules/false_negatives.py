"""Rules about right answers that do not score, and why: from the most to the least particular."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby, pairwise

import numpy as np

from podium.data.columns import GOLD, NOT_ASKED
from podium.errors import Finding, Severity
from podium.rewards.score import excerpt
from podium.rewards.tester.evidence import AS_IT_IS, LEAST_ROWS, NEARLY_ALL, Evidence, Scores, gains_of, mean, shown


def _rows_beaten(evidence: Evidence, scores: Scores, wrong: Scores | None = None) -> int:
    """Rows whose right answer beats the wrong one, in the form where there are most."""
    wrong = evidence.wrong if wrong is None else wrong
    return max((int((gains_of(scores, wrong, form.name) > 0).sum()) for form in evidence.forms), default=0)


def other_rows(evidence: Evidence) -> Iterator[Finding]:
    """W103: the answers of a neighbour, or of one row for all, where the own row's gains nothing."""
    if evidence.diagnosis is None or not evidence.diagnosis.depends:
        return
    gains = np.array([evidence.diagnosis.changes(form.name).max(axis=0) for form in evidence.forms])
    if (gains.max(axis=0) > 0).sum() > 1:  # of the first row the answer is its own
        return
    severity: Severity = "error" if evidence.knows_answer and len(evidence.cases) >= LEAST_ROWS else "warning"
    for name, matrix in evidence.diagnosis.matrix.items():
        if (against := _scored_against(matrix)) is not None:
            shift, columns = against
            row = evidence.cases[1]
            other = evidence.cases[columns[1]]
            what = (
                f"a completion is scored against {shift}, not against its own row's answer (form: {name}): in row "
                f"{row.row} {excerpt(other.gold, 40)} scores {shown(matrix[1, columns[1]])}, the right answer "
                f"{excerpt(row.gold, 40)} {shown(matrix[1, 1])}"
            )
            fix = "`for completion, gold in zip(completions, answer, strict=True)`: lists run side by side"
            yield evidence.finding("W103", severity, what, "columns have one value for each completion", fix)
            return


def _scored_against(matrix: np.ndarray) -> tuple[str, np.ndarray] | None:
    """The row whose answer scores, in words (`the answer of the next row`) and by row; None where it is not clear."""
    rows = np.arange(len(matrix))
    places = {
        "the answer of the next row": (np.roll(rows, -1), NEARLY_ALL),
        "the answer of the row before": (np.roll(rows, 1), NEARLY_ALL),
        "the answer of the first row": (0 * rows, 1.0),
        "the answer of the last row": (0 * rows + rows[-1], 1.0),
    }
    for words, (columns, least) in places.items():
        others = matrix.copy()
        others[rows, columns] = -np.inf
        wins = matrix[rows, columns] > others.max(axis=1)  # the answer of that row scores more than all others
        if len(rows) >= 3 and wins.mean() >= least:
            return words, columns
    return None


def prompt_number(evidence: Evidence) -> Iterator[Finding]:
    """W104 where the right answer does not score, but a number of the question does, and nowhere but in its own row."""
    if evidence.diagnosis is None:
        return
    for which, (scores, elsewhere) in evidence.diagnosis.prompt_numbers.items():
        for form in evidence.forms:
            gains = gains_of(scores, evidence.gold, form.name)
            reads = gains_of(scores, elsewhere, form.name)
            if gains.size >= 2 and (gains > 0).mean() >= NEARLY_ALL and (reads > 0).mean() >= NEARLY_ALL:
                what = f"the {which} number of the question scores more than the right answer (form: {form.name})"
                fix = f"compare with the column {evidence.named}, not with what stands in the prompt"
                yield evidence.finding("W104", "warning", what, "the reward reads its answer from the prompt", fix)
                return


def other_kind(evidence: Evidence) -> Iterator[Finding]:
    """W012: right answers would score if the prompts were of the other kind."""
    if evidence.diagnosis is None:
        return
    gold, wrong = evidence.diagnosis.other_kind
    silent = not _has_values(evidence.gold) and _has_values(gold)
    several = len({case.gold for case in evidence.cases}) > 1  # else a wrong one may only be longer
    if silent or (
        several and evidence.form is None and _rows_beaten(evidence, gold, wrong) >= NEARLY_ALL * len(evidence.cases)
    ):
        if isinstance(evidence.cases[0].prompt, str):
            what = "it scores message lists only, but the prompts are plain, so completions are strings"
            why = "the prompts are plain strings"
            fix = (
                "for a model with a chat template `chat: true`, which makes conversations of the prompts; else "
                "use the completion itself: `text = completion`"
            )
        else:
            what = "it scores strings only, but the prompts are conversations, so completions are message lists"
            why = 'a completion is `[{"role": "assistant", "content": text}]`'
            fix = 'use `completion[0]["content"]`'
        yield evidence.finding("W012", "error" if silent else "warning", what, why, fix)


def _has_values(scores: Scores) -> bool:
    return not np.isnan(list(scores.values())).all()


def column_unfit(evidence: Evidence) -> Iterator[Finding]:
    """W113: with the answer column cleaned, more right answers would score."""
    variants = {} if evidence.diagnosis is None else evidence.diagnosis.variants
    scored = {name: _rows_beaten(evidence, scores) for name, scores in variants.items()}
    now = _rows_beaten(evidence, evidence.gold)
    then = max(scored.values(), default=0)
    if then <= now:
        return
    name = next(name for name, rows in scored.items() if rows == then)
    row = next((case for case in evidence.cases if case.has_gold), evidence.cases[0])
    value = row.columns.get(evidence.columns[0])
    what = f"right answers score in {now} of {len(evidence.cases)} rows, with {evidence.named} {name} in {then}"
    why = f"row {row.row} has {type(value).__name__} {excerpt(value, 40) if isinstance(value, str) else repr(value)}"
    fix = "clean both sides before comparing: `str(gold).strip() == text.strip()`; or clean the column once"
    as_it_is = evidence.gold.get(AS_IT_IS, np.array([]))
    never = evidence.knows_answer and len(evidence.cases) >= LEAST_ROWS and not now and np.isnan(as_it_is).all()
    yield evidence.finding("W113", "error" if never else "warning", what, why, fix)


def wrong_sign(evidence: Evidence) -> Iterator[Finding]:
    """W102: the same text scores less where it is right."""
    if evidence.form is not None or evidence.column is None or evidence.diagnosis is None:
        return
    for form in evidence.forms:
        changes = evidence.diagnosis.changes(form.name)
        lost = (changes < 0).any(axis=0)
        if lost.mean() >= NEARLY_ALL and not (changes > 0).any():
            right = mean(evidence.gold[form.name])
            wrong = mean(evidence.wrong[form.name])
            case = evidence.cases[int(lost.argmax())]
            here = evidence.diagnosis.usual[form.name]
            there = np.array([scores[form.name] for scores in evidence.diagnosis.swapped])
            what = (
                f"wrong answers score {shown(wrong)}, the right one {shown(right)} (form: {form.name}): in row "
                f"{case.row} {excerpt(form.write(case.gold), 40)} scores {shown(here[lost.argmax()])}, and "
                f"{shown(there[:, lost.argmax()].max())} where the row has another one's answer"
            )
            sure = evidence.knows_answer and len(evidence.cases) >= LEAST_ROWS and lost.all()
            why = "training raises what scores more"
            yield evidence.finding("W102", "error" if sure else "warning", what, why, "turn the sign round")
            return


def right_scores_nothing(evidence: Evidence) -> Iterator[Finding]:
    """W101: no form helps, or not in all rows."""
    if not evidence.is_correctness or not evidence.has_gold or not (evidence.knows_answer or evidence.is_binary):
        return
    if evidence.form is None:
        if evidence.depends:
            best, name = max((mean(evidence.gold[form.name]), form.name) for form in evidence.forms)
            what = f"the right answer scores no more than a wrong one in any of {len(evidence.forms)} forms"
            why = f"the best form for the right answer is {name}, with {shown(best)} on average"
            yield evidence.finding("W101", "warning", what, why, evidence.show_form)
        return
    gold = evidence.gold[evidence.form.name]
    wrong = evidence.wrong[evidence.form.name]
    rows = zip(evidence.cases, gold, wrong, strict=True)
    if missed := [(case, right) for case, right, other in rows if case.has_gold and not _known_better(right, other)]:
        case, right = missed[0]
        places = ", ".join(str(each.row) for each, _ in missed)
        what = f"the right answer scores nothing in {len(missed)} of {len(evidence.cases)} rows ({places})"
        why = f"in row {case.row} {excerpt(evidence.form.write(case.gold))} scores {shown(right)}"
        yield evidence.finding("W101", "warning", what, why, "look at these rows: are their answers of another kind?")


def _known_better(right: float, other: float) -> bool:
    """Also where the wrong answer has no score, or the row was left out for lack of time."""
    return right > other or (math.isnan(other) and (math.isnan(right) or right > 0))


def never_compared(evidence: Evidence) -> Iterator[Finding]:
    """W120: right and wrong answers score alike, though the signature names the answer."""
    untried = evidence.form is not None or evidence.diagnosis is None or not evidence.has_gold
    if untried or evidence.depends or evidence.repeats.is_relative or not evidence.is_correctness:
        return
    what = f"takes {evidence.named}, but no score changed when rows were given each other's answers"
    why = "right and wrong answers score alike, so the model is not taught to be right"
    fix = f"compare with {evidence.named}; {evidence.show_form}"
    yield evidence.finding("W120", "warning", f"{what}{_length_rule(evidence)}", why, fix)


def _length_rule(evidence: Evidence) -> str:
    """A remark where the score goes up or down with the length of the text alone."""
    pairs = sorted(
        (len(form.write(case.gold)), value)
        for form in evidence.forms
        for case, value in zip(evidence.cases, evidence.gold[form.name], strict=True)
        if not math.isnan(value)
    )
    by_length = [mean([value for _, value in same]) for _, same in groupby(pairs, key=lambda pair: pair[0])]
    steps = [(b > a) - (b < a) for a, b in pairwise(by_length)]
    return "; it follows the length of the text alone" if len(steps) >= 5 and set(steps) in ({1}, {-1}) else ""


def untested(evidence: Evidence) -> Iterator[Finding]:
    """W122: nothing is known about right and wrong answers, so that no test of them was made."""
    is_tested = evidence.form is not None and (evidence.knows_answer or evidence.is_binary)
    if is_tested or evidence.repeats.is_relative or evidence.failures or evidence.is_cut:
        return
    not_tested = "not tested on right and wrong answers"
    why = "tested were its calls, their repetition and order; texts that should not score could not be told"
    if evidence.info.is_model:
        what = f"{not_tested}: a reward model's scores are a matter of degree"
        fix = "look in the table at what right and wrong answers score"
        yield evidence.finding("W122", "note", what, why, fix)
    elif evidence.form is not None:
        what = f"{not_tested}: {evidence.named} may be a setting of the task as well as the right answer"
        fix = f"none, if it is a setting; if it has the right answer: --answer-column {evidence.asked[0]}"
        yield evidence.finding("W122", "note", what, why, fix, answer_column=evidence.asked[0])
    elif evidence.asked:
        what = f"{not_tested}: with {evidence.named} no text that was tried scores as right"
        yield evidence.finding("W122", "warning" if evidence.knows_answer else "note", what, why, evidence.show_form)
    else:
        what = f"{not_tested}: it reads no column of the data"
        if evidence.info.wants is None:
            what = f"{what} that could be found in its code"
        columns = [name for name in evidence.cases[0].columns if name not in NOT_ASKED]
        column = next((name for name in [*GOLD, *columns] if name in columns), "COLUMN")
        fix = f"none, if it is about style; if it is about the right answer, name its column: --answer-column {column}"
        yield evidence.finding("W122", "note", what, why, fix, answer_column=column)


def out_of_time(evidence: Evidence) -> Iterator[Finding]:
    """W122: calls were so slow that the test was not made. What it found until then is not said."""
    if not evidence.is_cut:
        return
    what = (
        f"not tested on right and wrong answers: a completion takes {evidence.seconds_per_completion:.2g} s, and the "
        f"test has up to {evidence.num_planned:,}"
    )
    seconds = math.ceil(1.2 * evidence.seconds_per_completion * evidence.num_planned)
    fix = f"with that time it is tested: podium rewards test --budget {seconds}; `--rows 4` needs less"
    yield evidence.finding("W122", "warning", what, "a test of what was not called finds nothing", fix)


def unread(evidence: Evidence) -> Iterator[Finding]:
    """W101 of a reward of the library: it reads the answers of this data in no form."""
    known = evidence.column in GOLD and evidence.names_answer and evidence.has_gold and not evidence.is_cut
    if not known or evidence.form is not None or evidence.failures or not evidence.gold:
        return
    if any((gains_of(evidence.gold, evidence.wrong, form.name) != 0).any() for form in evidence.forms):
        return
    case = next(case for case in evidence.cases if case.has_gold)
    what = f"the right answer scores no more than a wrong one in any of {len(evidence.forms)} forms"
    why = f"row {case.row} has {excerpt(case.gold, 40)} in {evidence.named}, which this reward may not be able to read"
    fix = "a reward for such answers: podium rewards list"
    yield evidence.finding("W101", "warning", what, why, fix)
