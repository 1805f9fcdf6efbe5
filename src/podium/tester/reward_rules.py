"""Rules about a reward function: its rows and calls, right answers that do not score, and what of it is not known.

`probe_rules` has those about texts that are no right answer. `RULES` is the table of all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np

from podium.data.columns import GOLD, NOT_ASKED
from podium.errors import Finding, Severity
from podium.rewards.score import HUGE, excerpt
from podium.tester import probe_rules
from podium.tester.calls import ENDLESS, FailedCall, Scores
from podium.tester.rules import Rule, Subject
from podium.tester.scores import AS_IT_IS, LEAST_ROWS, NEARLY_ALL, Evidence, alike, close, gains_of, mean, shown

SLOW_SECONDS = 0.25
"""A completion; with 64 completions a round the reward takes 16 s of each."""


def answer_in_prompt(evidence: Evidence) -> Iterator[Finding]:
    """W116: the answer stands in the prompt."""
    golds = [case for case in evidence.cases if case.has_gold]
    if not evidence.is_correctness or len({case.gold for case in golds}) < 3:
        return
    lead = r"(?:(?:answer|solution|result|=)\W{0,4}(?:is\W{0,3})?|<answer>\s*|####\s*|\\boxed\{)"
    matches = [
        (case, match)
        for case in golds
        if (match := re.search(rf"{lead}{re.escape(case.gold)}(?!\w|[.,]\d)", case.prompt_text, re.IGNORECASE))
    ]
    if len(matches) >= NEARLY_ALL * len(golds):
        case, match = matches[0]
        around = f"row {case.row}: {excerpt(case.prompt_text[max(0, match.start() - 30) : match.end()])}"
        yield evidence.finding(
            "W116",
            "warning",
            f"the prompt says the answer in {len(matches)} of {len(golds)} rows, for example {around}",
            "the model learns to copy; its score says nothing of what it can do",
            "take the solution out of the `prompt` column",
        )


def negative_weight(evidence: Evidence) -> Iterator[Finding]:
    """W102: a reward that tells right from wrong, with a negative weight."""
    if evidence.weight < 0:
        yield Finding(
            code="W102",
            severity="error" if evidence.is_judge else "warning",
            what=f"`{evidence.info.name}` scores right answers higher, but its weight is {evidence.weight:g}",
            why="wrong answers are what this trains",
            fix=f"write `weight: {-evidence.weight:g}`",
            facts={"name": evidence.info.name, "weight": evidence.weight, "wanted": -evidence.weight},
        )


def huge(evidence: Evidence) -> Iterator[Finding]:
    """W007 of numbers that can be trained on."""
    known = evidence.all_scores[~np.isnan(evidence.all_scores)]
    largest = np.abs(known).max(initial=0.0)
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
    scores = evidence.all_scores
    known = [row[~np.isnan(row)] for row in scores]
    failed = any(failure.code in ENDLESS or failure.probe in evidence.gold for failure in evidence.failures)
    if scores.size < 20 or failed or (evidence.failures and np.isnan(scores).all()):
        return
    for values in (*known, np.array(evidence.repeats.base)):
        if not np.allclose(values, values[:1], rtol=1e-4, atol=0.0, equal_nan=True):
            return
    values_of_rows = {float(row[0]) for row in known if row.size}
    if not values_of_rows:
        text = "None for everything"
    elif len(values_of_rows) == 1:
        text = f"{min(values_of_rows):g} for everything"
    else:
        text = "the same for all texts of a row"
    what = f"returned {text} ({scores.size} completions of {len(scores)} rows)"
    fix = f"return more for better completions; {evidence.show_form}"
    if values_of_rows == {0.0} and evidence.names_answer:  # no text was right: the comparison is what to look at
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
    works = _has_values(evidence.gold) or _has_values(evidence.wrong)
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


# ---- right answers that do not score ----


def _rows_beaten(evidence: Evidence, scores: Scores, wrong: Scores) -> int:
    """Rows whose right answer beats the wrong one, in the form where there are most."""
    return max((int((gains_of(scores, wrong, form.name) > 0).sum()) for form in evidence.forms), default=0)


def other_rows(evidence: Evidence) -> Iterator[Finding]:
    """W103: the answers of a neighbour, or of one row for all, where the own row's gains nothing."""
    assert evidence.diagnosis is not None
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
    assert evidence.diagnosis is not None
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
    assert evidence.diagnosis is not None
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
    assert evidence.diagnosis is not None
    beaten = {
        name: _rows_beaten(evidence, scores, evidence.wrong) for name, scores in evidence.diagnosis.variants.items()
    }
    now = _rows_beaten(evidence, evidence.gold, evidence.wrong)
    then = max(beaten.values(), default=0)
    if then <= now:
        return
    name = next(name for name, rows in beaten.items() if rows == then)
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
    assert evidence.diagnosis is not None
    if evidence.form is not None:
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
        places = ", ".join(str(case.row) for case, _ in missed)
        what = f"the right answer scores nothing in {len(missed)} of {len(evidence.cases)} rows ({places})"
        why = f"in row {case.row} {excerpt(evidence.form.write(case.gold))} scores {shown(right)}"
        yield evidence.finding("W101", "warning", what, why, "look at these rows: are their answers of another kind?")


def _known_better(right: float, other: float) -> bool:
    """Also where the wrong answer has no score, or the row was left out for lack of time."""
    return right > other or (math.isnan(other) and (math.isnan(right) or right > 0))


def never_compared(evidence: Evidence) -> Iterator[Finding]:
    """W120: right and wrong answers score alike, though the signature names the answer."""
    if evidence.form is not None or evidence.depends or evidence.repeats.is_relative:
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
    is_tested = evidence.form is not None and evidence.is_judged
    if is_tested or evidence.repeats.is_relative or evidence.failures:
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
    what = (
        f"not tested on right and wrong answers: a completion takes {evidence.seconds_per_completion:.2g} s, and the "
        f"test has up to {evidence.num_planned:,}"
    )
    seconds = math.ceil(1.2 * evidence.seconds_per_completion * evidence.num_planned)
    fix = f"with that time it is tested: podium rewards test --budget {seconds}; `--rows 4` needs less"
    yield evidence.finding("W122", "warning", what, "a test of what was not called finds nothing", fix)


def unread(evidence: Evidence) -> Iterator[Finding]:
    """W101 of a reward of the library: it reads the answers of this data in no form."""
    if evidence.column not in GOLD or evidence.form is not None or evidence.failures:
        return
    if any((gains_of(evidence.gold, evidence.wrong, form.name) != 0).any() for form in evidence.forms):
        return
    case = next(case for case in evidence.cases if case.has_gold)
    what = f"the right answer scores no more than a wrong one in any of {len(evidence.forms)} forms"
    why = f"row {case.row} has {excerpt(case.gold, 40)} in {evidence.named}, which this reward may not be able to read"
    fix = "a reward for such answers: podium rewards list"
    yield evidence.finding("W101", "warning", what, why, fix)


# ---- the table ----

CHANCE = ("W111", "W112")
"""Codes of functions that score the same texts otherwise the second time: nothing else is concluded of their scores."""

REWARD: tuple[Subject, ...] = ("reward",)
LIBRARY: tuple[Subject, ...] = ("library reward",)
ALL: tuple[Subject, ...] = (*REWARD, *LIBRARY)


def _of_right_answers(codes: str, find: Callable[[Evidence], Iterator[Finding]], *needs: str) -> Rule:
    """A row about the reason why right answers do not score, of which one is said."""
    return Rule(
        codes=codes,
        of=REWARD,
        find=find,
        needs=("is_whole", *needs),
        unless=("W012", *CHANCE),
        question="why right answers do not score",
    )


def _of_wrong_texts(codes: str, find: Callable[[Evidence], Iterator[Finding]], *unless: str) -> Rule:
    """A row about texts that score like the right answer. Where those without any answer do, no other says more."""
    return Rule(codes=codes, of=REWARD, find=find, needs=("is_whole", "is_judged"), unless=("W105", *CHANCE, *unless))


RULES: tuple[Rule, ...] = (
    Rule(codes="W102", of=ALL, find=negative_weight, needs=("form",)),
    Rule(codes="W012", of=REWARD, find=other_kind, needs=("is_whole", "diagnosis"), question="calls"),
    Rule(codes="W003 W004 W005 W006 W007 W010 W013 W014 W016 W017", of=ALL, find=failures, question="calls"),
    Rule(codes="W007", of=REWARD, find=huge, unless=("W007",)),
    Rule(codes="W011", of=REWARD, find=mutation, needs=("mutated",)),
    Rule(codes="W009", of=ALL, find=slow, unless=("W016",)),
    Rule(codes="W122", of=ALL, find=out_of_time, needs=("is_cut",)),
    Rule(codes="W101", of=LIBRARY, find=unread, needs=("is_whole", "names_answer", "has_gold", "gold")),
    Rule(codes="W111 W112", of=REWARD, find=unstable, needs=("is_whole",)),
    _of_right_answers("W103", other_rows, "depends"),
    _of_right_answers("W113", column_unfit, "diagnosis"),
    _of_right_answers("W102", wrong_sign, "column", "diagnosis"),
    _of_right_answers("W104", prompt_number, "diagnosis"),
    _of_right_answers("W008", constant, "returns_numbers"),
    _of_right_answers("W120", never_compared, "returns_numbers", "diagnosis", "has_gold", "is_correctness"),
    _of_right_answers("W101", right_scores_nothing, "returns_numbers", "has_gold", "is_correctness", "is_judged"),
    _of_right_answers("W122", untested, "returns_numbers"),
    Rule(codes="W109", of=REWARD, find=order, needs=("is_whole",), unless=("W103", *CHANCE), question="batch"),
    Rule(codes="W110", of=REWARD, find=company, needs=("is_whole",), unless=("W103", *CHANCE), question="batch"),
    Rule(codes="W116", of=REWARD, find=answer_in_prompt, needs=("is_whole", "is_correctness")),
    _of_wrong_texts("W105", probe_rules.of("W105")),
    _of_wrong_texts("W117", probe_rules.of("W117"), "W116"),
    _of_wrong_texts("W104", probe_rules.of("W104"), "W104"),
    _of_wrong_texts("W106", probe_rules.of("W106")),
    _of_wrong_texts("W107", probe_rules.of("W107")),
    _of_wrong_texts("W115", probe_rules.wrong_answers, "W106", "W107"),
    _of_wrong_texts("W106 W108", probe_rules.first_counts),
    Rule(codes="W114", of=REWARD, find=probe_rules.folded_units, needs=("is_whole", "is_judged"), unless=CHANCE),
    Rule(codes="W118", of=REWARD, find=probe_rules.other_scripts, needs=("is_whole", "is_judged"), unless=CHANCE),
    Rule(codes="W119", of=REWARD, find=probe_rules.strictness, needs=("is_whole", "is_judged"), unless=CHANCE),
)
"""All rules about rewards, in the order in which they are asked."""
