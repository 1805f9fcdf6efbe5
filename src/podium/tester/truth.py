"""A small table of the texts that matter most, with their mean score by each reward and by the weighted sum.

    table, found = score_truths(subjects, rows, 8, budget_seconds=1.0)
    print(table.as_text()[0])  # "mean score of 8 rows ..."

The texts are the same for all rewards, so that their sum is what training would see.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from podium.algorithm.advantages import combine
from podium.data.columns import GOLD
from podium.errors import Finding
from podium.errors.texts import clean
from podium.tester.calls import RewardCaller, Scores, Session, Texts
from podium.tester.cases import ProbeCase, ReturnFormat, forms_for, make_cases, worked_answers
from podium.tester.probe_rules import LIKE
from podium.tester.probes import PROBES, Write
from podium.tester.rewards import RewardReport, sum_finding
from podium.tester.scores import mean

_MAKE = {probe.name: probe.make for probe in PROBES}

_RIGHT = "right"
_WRONG = "wrong"
_VARIED = "varied"


def _other_case(case: ProbeCase, write: Write) -> str | None:
    other = next((text for text in (case.gold.upper(), case.gold.lower()) if text != case.gold), None)
    return None if other is None else write(other)


BARE = "right answer, bare"
WRONG = "a wrong answer"
AS_SHOWN = "right, as in the examples"
"""Names of lines."""

_LINES = {
    BARE: (_RIGHT, lambda case, _: case.gold),
    "right answer, {form}": (_RIGHT, lambda case, write: write(case.gold)),
    WRONG: (_WRONG, lambda case, write: write(case.wrong)),
    "no answer: empty text": (_WRONG, lambda _, __: ""),
    "the prompt copied": (_WRONG, _MAKE["prompt echoed"]),
    "every answer listed": (_WRONG, _MAKE["all candidates in one form"]),
    "right, a space in front": (_VARIED, lambda case, write: write(f" {case.gold}")),
    "right, in other case": (_VARIED, _other_case),
    "right, a full stop behind": (_VARIED, _MAKE["a full stop behind the answer"]),
}
"""By name: the kind of a text, and the text for a row in the form that the rewards read."""

SUM = "sum"
LIKE_RIGHT = "!"
LIKE_WRONG = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthLine:
    """One kind of text with its mean score over the rows, by reward."""

    text: str
    kind: str
    means: tuple[float, ...]
    """By the columns of the table; NaN: None, or not scored."""
    marks: tuple[str, ...]
    """`!` where a text without the right answer scores like it, `?` where the right one, varied, scores like a wrong
    one; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthTable:
    """Mean scores of right, wrong and varied answers before training."""

    columns: tuple[str, ...]
    """Names of the rewards, and `sum` where there are several that were all scored."""
    form: str
    """The form of the answers; `bare` where no other scores more."""
    num_rows: int
    lines: tuple[TruthLine, ...]
    template: str = "{}"
    """The form, with `{}` in place of the answer."""
    examples: tuple[tuple[str, str], ...] = ()
    """Answers of the worked examples in the prompts: as they are, and in the form."""

    def scores(self, text: str, column: str) -> float:
        """The mean score of a line by one reward, or by `sum`; NaN where there is none."""
        means = next((line.means for line in self.lines if line.text == text), ())
        return dict(zip(self.columns, means, strict=False)).get(column, math.nan)

    def best(self, column: str) -> float:
        """The greatest mean score of right answers."""
        rights = [self.scores(line.text, column) for line in self.lines if line.kind == _RIGHT]
        return max((value for value in rights if not math.isnan(value)), default=math.nan)

    def as_text(self) -> list[str]:
        """Aligned lines, the last with the meaning of the marks that occur. Names of others are without controls."""
        names = [clean(name)[:18] for name in self.columns]
        widths = [max(len(name), 6) for name in names]
        wide = max(len(line.text) for line in self.lines)
        head = f"{f'mean score of {self.num_rows} rows':<{wide}}"
        rows = ["  ".join([head, *(f"{name:>{width}} " for name, width in zip(names, widths, strict=True))]).rstrip()]
        for line in self.lines:
            cells = (
                f"{'-' if math.isnan(value) else f'{value:.2f}':>{width}}{mark or ' '}"
                for value, mark, width in zip(line.means, line.marks, widths, strict=True)
            )
            rows.append("  ".join([f"{line.text:<{wide}}", *cells]).rstrip())
        marks = {mark for line in self.lines for mark in line.marks}
        words = {
            LIKE_RIGHT: "scores like the right answer",
            LIKE_WRONG: "the right answer, and scores like a wrong one",
        }
        legend = [f"{mark} {meaning}" for mark, meaning in words.items() if mark in marks]
        return [*rows, *(["   ".join(legend)] if legend else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A reward for the table; `caller` is None where it is not to be called."""

    caller: RewardCaller | None
    name: str
    weight: float
    report: RewardReport


def score_truths(
    subjects: Sequence[Subject], rows: Sequence[Mapping[str, Any]], num_rows: int, budget_seconds: float
) -> tuple[TruthTable | None, list[Finding]]:
    """The table, and W121 where the weighted sum pays as much for a text without the right answer; None: no answers."""
    about = sorted(
        (subject for subject in subjects if subject.report.kind == "correctness"), key=lambda subject: -subject.weight
    )
    column = next((subject.report.column for subject in (*about[:1], *subjects[:1]) if subject.report.column), None)
    is_known = column in GOLD or any(subject.report.form for subject in subjects)
    cases = tuple(case for case in make_cases(rows, column, num_rows) if case.has_gold) if is_known else ()
    if not cases:
        return None, []
    sessions = [
        None if subject.caller is None else Session(caller=subject.caller, cases=cases, budget_seconds=budget_seconds)
        for subject in subjects
    ]
    weights = np.array([subject.weight for subject in subjects])
    form = _best_form(sessions, cases, subjects, weights)
    names = {name.format(form=form.name): make for name, (_, make) in _LINES.items()}
    texts = {name: [make(case, form.write) for case in cases] for name, make in names.items()}
    kinds = {name.format(form=form.name): kind for name, (kind, _) in _LINES.items()}
    worked = worked_answers(cases)
    if {around for around, _ in worked} not in (set(), {"{}"}, {form.template}):  # those have lines
        around = itertools.cycle(around for around, _ in worked)
        texts[AS_SHOWN] = [template.replace("{}", case.gold) for case, template in zip(cases, around, strict=False)]
        kinds[AS_SHOWN] = _VARIED
    scores = [_scores(session, texts) for session in sessions]
    table, found = _table(subjects, scores, {name: kinds[name] for name in texts}, form, weights)
    shown = tuple((template.replace("{}", answer), form.write(answer)) for template, answer in worked)
    return table and replace(table, template=form.template, examples=shown), found


def _scores(session: Session | None, texts: Texts) -> Scores | None:
    """Scores of all texts; None where the reward ran out of time, as a sum without it would be another sum."""
    scores = None if session is None else session.scores(texts, quietly=True)
    return None if session is None or session.num_skipped else scores


def _best_form(
    sessions: Sequence[Session | None], cases: Sequence[ProbeCase], subjects: Sequence[Subject], weights: np.ndarray
) -> ReturnFormat:
    """The form in which right answers have the greatest weighted sum, the bare one where that is equal."""
    called = [(session, subject) for session, subject in zip(sessions, subjects, strict=True) if session is not None]
    asked = [name for name in cases[0].columns if any(name in subject.report.asked for subject in subjects)]
    code = "\n".join(session.caller.info.code_text for session, _ in called)
    forms = forms_for([case.prompt for case in cases], code=code, keys=asked)
    texts = {form.name: [form.write(case.gold) for case in cases] for form in forms}
    scores = [session.scores(texts, quietly=True) for session, _ in called]
    own = np.array([subject.weight for _, subject in called])

    def total(form: ReturnFormat) -> float:
        value = mean(combine(np.array([by_form[form.name] for by_form in scores]).T, own))
        return -math.inf if math.isnan(value) else round(value, 6)

    return max(forms, key=total)


def _table(
    subjects: Sequence[Subject],
    scores: Sequence[Scores | None],
    kinds: Mapping[str, str],
    form: ReturnFormat,
    weights: np.ndarray,
) -> tuple[TruthTable | None, list[Finding]]:
    known = next((by_text for by_text in scores if by_text is not None), None)
    if known is None:
        return None, []
    nothing = {name: np.full_like(values, np.nan) for name, values in known.items()}
    by_column = [
        (subject.name, subject.report.kind, score or nothing) for subject, score in zip(subjects, scores, strict=True)
    ]
    is_whole = len(subjects) > 1 and None not in scores
    kind = "correctness" if any(subject.report.kind == "correctness" for subject in subjects) else "style"
    total: Scores = {}
    if is_whole:
        total = {
            name: combine(np.stack([by_text[name] for by_text in scores if by_text], axis=-1), weights)
            for name in kinds
        }
        by_column.append((SUM, kind, total))
    marks = [
        _marks(values, kinds) if kind == "correctness" else dict.fromkeys(kinds, "") for _, kind, values in by_column
    ]
    lines = tuple(
        TruthLine(
            text=name,
            kind=kinds[name],
            means=tuple(mean(values[name]) for _, _, values in by_column),
            marks=tuple(mark[name] for mark in marks),
        )
        for name in kinds
        if not all(np.isnan(values[name]).all() for _, _, values in by_column)
    )
    num_rows = len(next(iter(known.values())))
    table = TruthTable(columns=tuple(name for name, _, _ in by_column), form=form.name, num_rows=num_rows, lines=lines)
    found = list(_of_sum(subjects, total, kinds)) if is_whole and kind == "correctness" else []
    return (table, found) if lines else (None, [])


def _marks(values: Scores, kinds: Mapping[str, str]) -> dict[str, str]:
    """`!` and `?` by line of one column."""
    means = {name: mean(values[name]) for name in kinds}
    right = max((means[name] for name, kind in kinds.items() if kind == _RIGHT), default=math.nan)
    wrong = means[WRONG]
    marks = dict.fromkeys(kinds, "")
    for name, kind in kinds.items():
        least = right
        if name != WRONG and right > wrong:
            least = wrong + LIKE * (right - wrong)
        if kind == _WRONG and means[name] >= least - 1e-9 * abs(least):
            marks[name] = LIKE_RIGHT
        if kind == _VARIED and right > wrong and means[name] <= wrong + (1 - LIKE) * (right - wrong):
            marks[name] = LIKE_WRONG
    return marks


def _of_sum(subjects: Sequence[Subject], total: Scores, kinds: Mapping[str, str]) -> Iterator[Finding]:
    rights = [name for name, kind in kinds.items() if kind == _RIGHT]
    best = max(rights, key=lambda name: mean(total[name]))
    wrongs = {name: total[name] for name, kind in kinds.items() if kind == _WRONG}
    if found := sum_finding([subject.name for subject in subjects], best, total[best], wrongs):
        yield found
