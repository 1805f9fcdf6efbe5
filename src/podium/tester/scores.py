"""Evidence about a reward function, from few calls: right and wrong answers in every form, probes, repetitions.

    evidence = gather(caller, [Evidence(info=caller.info, cases=cases, column="answer", forms=FORMS)], 60.0)

`reward_rules` interprets it. Arrays have one score for each row, NaN where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from podium.data.columns import GOLD
from podium.errors import Finding, Severity
from podium.records import Group, Message, last_user_turn
from podium.tester.calls import FailedCall, RewardCaller, RewardInfo, Scores, Session, group_of
from podium.tester.cases import ProbeCase, ReturnFormat, as_number, columns_of, gold_of
from podium.tester.probes import PROBES

MOST = 0.5
"""Share of the rows from which on a finding is no accident."""

NEARLY_ALL = 0.75
"""The same for what is concluded without a right answer that scores."""

LEAST_ROWS = 4
"""Rows below which no function is called wrong, but by an error that it raised."""

AS_IT_IS = "the column as it is"
"""Name of the right answers that are the answer column's own texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The same completions scored in different ways; None where that was not done."""

    base: Sequence[float] = ()
    again: Sequence[float] | None = None
    """The same call once more, with the same seed."""
    reseeded: Sequence[float] | None = None
    remembers: bool | None = None
    """Whether new processes differ in the same way each time; None where calls agree or there can be no process."""
    shuffled: Sequence[float] | None = None
    """Groups, and completions within a group, in another order."""
    alone: Sequence[float] | None = None
    """Each group in a call of its own."""
    single: Sequence[float] | None = None
    """The completions of the first group, each in a call of its own."""

    @property
    def is_relative(self) -> bool:
        """Whether a text is scored by comparison with the others of its prompt, and by nothing else."""
        if self.single is None or self.alone is None:
            return False
        return alike(self.base, self.alone) and not alike(self.base[: len(self.single)], self.single)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Reasons why right answers do not score; made only where they do not."""

    matrix: Mapping[str, np.ndarray]
    """By form, [row, j]: the right answer of row j, as the completion of the row."""
    prompt_numbers: Mapping[str, tuple[Scores, Scores]]
    """`first` and `last` number of the question, by form, NaN where it is the right answer; and the same texts as
    completions of another row."""
    variants: Mapping[str, Scores]
    """Right answers by form, where the answer column is as in `VARIANTS`."""
    other_kind: tuple[Scores, Scores]
    """Right and wrong answers by form, chat prompts made plain and plain ones chats."""
    usual: Scores
    """Right answers by form."""
    swapped: Sequence[Scores]
    """The same texts where rows are given each other's answers, each time of other rows."""
    looks: bool
    """Whether a function that takes everything misses the column when it is not there."""

    @property
    def depends(self) -> bool:
        """Whether any score changes when rows are given each other's answers."""
        return any(differ(scores, self.usual) for scores in self.swapped)

    def changes(self, name: str) -> np.ndarray:
        """By how much a right answer scores more than where its row has another's answer: [swap, row] of a form."""
        return np.nan_to_num(np.array([self.usual[name] - scores[name] for scores in self.swapped]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All results of one reward function."""

    info: RewardInfo
    cases: tuple[ProbeCase, ...]
    column: str | None
    """Place of the right answers: a column, or a template of several."""
    forms: tuple[ReturnFormat, ...]
    asked: tuple[str, ...] = ()
    """Columns of the data that the function reads, as far as its code shows."""
    is_column_given: bool = False
    """Whether the user named that place."""
    weight: float = 1.0
    """Weight of the function in the sum of a run's rewards."""
    gold: Scores = field(default_factory=dict)
    wrong: Scores = field(default_factory=dict)
    elsewhere: Scores = field(default_factory=dict)
    """Right answers by form, as completions of another row."""
    foreign: np.ndarray = field(default_factory=lambda: np.array([]))
    """Right answers in the form that scores best, where the row has another one's answer and is as it was otherwise."""
    form: ReturnFormat | None = None
    """The one in which right answers score best above wrong ones; None: none."""
    probes: Scores = field(default_factory=dict)
    failures: tuple[FailedCall, ...] = ()
    mutated: Sequence[str] = ()
    seconds_per_completion: float = 0.0
    is_cut: bool = False
    """Whether there was no time for all."""
    num_planned: int = 0
    """Completions of a whole test, at most."""
    repeats: Repeats = field(default_factory=Repeats)
    diagnosis: Diagnosis | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all calls of a test were made."""
        return not self.is_cut

    @property
    def all_scores(self) -> np.ndarray:
        """Every score: [row, text]; of no calls without entries."""
        tables = (self.gold, self.wrong, self.probes)
        return np.array([values for table in tables for values in table.values()]).T

    @property
    def returns_numbers(self) -> bool:
        """Whether no call gave NaN, infinity or a number beyond those that can be trained on."""
        return not any(failure.code in ("W006", "W007") for failure in self.failures)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that right answers are made of."""
        return columns_of(self.column)

    @property
    def names_answer(self) -> bool:
        """Whether the function reads the columns of the answer, as far as its code shows."""
        return bool(self.columns) and set(self.columns) <= set(self.asked)

    @property
    def knows_answer(self) -> bool:
        """Whether the place holds right answers: by its usual name, or since the user named it.

        Any other column that a function reads may be a setting of the task: a number of words, a letter.
        """
        return bool(self.columns) and (self.is_column_given or any(name in GOLD for name in self.columns))

    @property
    def is_judged(self) -> bool:
        """Whether it is known which texts are right, or shown by the scores."""
        return self.knows_answer or self.is_binary

    @property
    def is_judge(self) -> bool:
        """Whether the function is shown to tell right from wrong answers and to look at nothing else.

        Only then a score is called wrong. A list of texts may be one of which all are wanted.
        """
        values = [case.columns.get(name) for case in self.cases for name in self.columns]
        return self.knows_answer and self.is_binary and not any(isinstance(value, (list, tuple)) for value in values)

    @property
    def is_binary(self) -> bool:
        """Whether every right answer gets one score and every wrong one, in every form, another.

        And the same text gets less where the answer of its row is another's.
        """
        if self.form is None or len(self.cases) < LEAST_ROWS or not self.has_gold:
            return False
        right = self.gold[self.form.name]
        wrong = np.array([*self.wrong.values()])
        better = right > self.wrong[self.form.name]
        if better.sum() < LEAST_ROWS or not (self.foreign < right)[better].all():
            return False
        wrong = wrong[~np.isnan(wrong)]
        right = right[better]
        return bool(np.ptp(wrong) <= 1e-6 * np.ptp([*wrong, *right]) >= np.ptp(right))

    @property
    def has_gold(self) -> bool:
        return any(case.has_gold for case in self.cases)

    @property
    def named(self) -> str:
        """The columns of the answer, or else all that the function reads, for messages."""
        read = [column for column in self.columns if not self.asked or column in self.asked] or self.asked
        return " and ".join(f"`{column}`" for column in read)

    @property
    def depends(self) -> bool:
        return self.diagnosis is not None and self.diagnosis.depends

    @property
    def is_correctness(self) -> bool:
        """Whether the reward is about the right answer: by its scores, its signature, or a column that it misses."""
        looks = self.diagnosis is not None and self.diagnosis.looks
        return self.form is not None or (self.knows_answer and (self.names_answer or self.depends or looks))

    @property
    def show_form(self) -> str:
        """How to show what a right answer looks like: on the command line, and in Python."""
        if len(self.asked) < 2:
            how = "if answers are written in a form of your own, show it"
            flag = ""
            argument = ""
        else:
            columns = ", ".join(f"{{{column}}}" for column in self.asked)
            how = "show how a right answer is written, and in which form"
            flag = f"--answer-column '{columns}' "
            argument = f"answer_column='{columns}', "
        in_python = f"podium.rewards.audit(..., {argument}forms=['Result => {{}}'])"
        return f"{how}: podium rewards test {flag}--form 'Result => {{}}', or {in_python}"

    def finding(self, code: str, severity: Severity, what: str, why: str = "", fix: str = "", **facts: Any) -> Finding:
        """A finding that begins with the function and where it is."""
        where = f" ({self.info.where})" if self.info.where else ""
        what = f"`{self.info.name}`{where}: {what}"
        return Finding(code=code, severity=severity, what=what, why=why, fix=fix, facts=facts)

    @property
    def write(self) -> Callable[[str], str]:
        """The way answers are written in probes."""
        return (self.form or self.forms[1]).write


def gains_of(gold: Scores, wrong: Scores, name: str) -> np.ndarray:
    """By how much the right answer beats the wrong one, in the rows where both have a value."""
    gains = np.subtract(gold.get(name, ()), wrong.get(name, ()))
    return gains[~np.isnan(gains)]


def differ(one: Scores, other: Scores) -> bool:
    """Whether any two values are different, or only one of them is there."""
    return any(not alike(one[name], other[name]) for name in one)


def alike(one: ArrayLike, other: ArrayLike) -> bool:
    """Whether the same texts got the same scores."""
    return np.shape(one) == np.shape(other) and bool(np.all(close(one, other)))


def close(one: ArrayLike, other: ArrayLike) -> np.ndarray:
    """A mask of scores that are equal up to rounding in batches; NaN only to NaN."""
    return np.isclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def mean(values: ArrayLike) -> float:
    """Mean of the values that are numbers; NaN if there is none.

    >>> mean([1.0, math.nan, 0.0])
    0.5
    """
    known = np.asarray(values, float)
    known = known[~np.isnan(known)]
    return float(known.mean()) if known.size else math.nan


def significant(value: float) -> float:
    """A score to six significant digits, so that rounding in batches makes no difference.

    >>> significant(1.00000004e-9)
    1e-09
    """
    return float(f"{value:.6g}")


def shown(value: float) -> str:
    """A score in a message; NaN is what None became."""
    return "None" if math.isnan(value) else f"{value:.3g}"


# ---- calls in order ----


def _number_or_same(value: Any) -> Any:
    if (number := as_number(str(value))) is None:
        return value
    return int(number) if number == int(number) else number


VARIANTS: Mapping[str, Callable[[Any], Any]] = {
    "as text": str,
    "without white space around it": lambda value: value.strip() if isinstance(value, str) else value,
    "as numbers": _number_or_same,
    "as the final answer alone": gold_of,
    "in lower case": lambda value: value.lower() if isinstance(value, str) else value,
}
"""Changes to the answer column after which the function may be able to compare with it."""


def gather(
    caller: RewardCaller, candidates: Sequence[Evidence], budget_seconds: float, *, is_thorough: bool = True
) -> Evidence:
    """Score, in order: one answer a row; every form; whatever can show why answers do not score; repeats; probes.

    Which completions are scored does not depend on time. Where the first calls show that all would take longer than
    the budget, or where they did, `is_cut` is set and the scores are those of no whole test.

    Args:
        candidates: one for each possible place of the answers; the first whose answers score is taken, else the first.
        is_thorough: whether more than right and wrong answers is scored.
    """
    evidence = candidates[0]
    session = Session(caller=caller, cases=evidence.cases, budget_seconds=budget_seconds)
    session.warm_up()
    count = num_planned(evidence, is_thorough=is_thorough)
    too_slow = session.seconds_per_completion * count > budget_seconds
    if not session.failed_for_good and not too_slow:
        if len(candidates) > 1:
            evidence = next((candidate for candidate in candidates if _scores_in_a_form(session, candidate)), evidence)
            session.cases = evidence.cases
        evidence = _with_forms(session, evidence)
        if not session.is_over and is_thorough:
            evidence = replace(evidence, diagnosis=_diagnosis(session, evidence))
            evidence = replace(evidence, repeats=_repeats(session, evidence))
            write = evidence.write
            texts = {probe.name: [probe.make(case, write) for case in session.cases] for probe in PROBES}
            evidence = replace(evidence, probes=session.scores(texts))
    return replace(
        evidence,
        failures=tuple(session.failures),
        mutated=session.mutated,
        seconds_per_completion=session.seconds_per_completion,
        is_cut=bool(session.num_skipped) or too_slow,
        num_planned=count,
    )


def num_planned(evidence: Evidence, *, is_thorough: bool) -> int:
    """Completions that a whole test scores, at most."""
    a_row = 3 * len(evidence.forms)
    if is_thorough:
        a_row += 15 * len(evidence.forms) + len(PROBES)
    return a_row * len(evidence.cases)


def _scores_in_a_form(session: Session, evidence: Evidence) -> bool:
    """Whether right answers from its column, or its template, score above wrong ones in any form."""
    left = session.budget_seconds - session.spent_seconds
    trial = Session(caller=session.caller, cases=evidence.cases, budget_seconds=left)
    trial.warm_up()
    # As if the function named no column: then more rows must agree.
    found = not trial.failures and _with_forms(trial, replace(evidence, asked=())).form is not None
    session.spent_seconds += trial.spent_seconds
    session.num_skipped += trial.num_skipped
    return found


def _with_forms(session: Session, evidence: Evidence) -> Evidence:
    cases = evidence.cases
    columns = [(case.gold, case.columns.get(evidence.column or "")) for case in cases]
    as_it_is = [value if isinstance(value, str) and value.strip() != gold else None for gold, value in columns]
    answers = _in_forms(evidence, [case.gold for case in cases])
    wrong = _in_forms(evidence, [case.wrong for case in cases])
    evidence = replace(
        evidence,
        gold=session.scores({**answers, AS_IT_IS: as_it_is}),
        wrong=session.scores(wrong),
        elsewhere=session.scores(answers, [_in_place_of(case, evidence, whole=True) for case in cases], quietly=True),
    )
    evidence = replace(evidence, form=best_form(evidence))
    if evidence.form is None:
        return evidence
    name = evidence.form.name
    others = [_in_place_of(case, evidence, whole=False) for case in cases]
    return replace(evidence, foreign=session.scores({name: answers[name]}, others, quietly=True)[name])


def _in_place_of(case: ProbeCase, evidence: Evidence, *, whole: bool) -> ProbeCase:
    """The row with the answer of one for which its own answer is wrong; `whole`: with all that this one has.

    What a completion gains by its own row it loses there, unless its score has nothing to do with the row.
    """
    others = (other for other in evidence.cases if other.gold == case.wrong and other.gold != case.gold)
    other = next(others, None)
    if other is None:  # all rows have one answer
        return replace(case, columns={**case.columns, **dict.fromkeys(evidence.columns, case.wrong)})
    if whole:
        return replace(case, prompt=other.prompt, columns=other.columns)
    answered = {name: other.columns.get(name) for name in evidence.columns}
    return replace(case, columns={**case.columns, **answered})


def _in_forms(evidence: Evidence, answers: Sequence[str]) -> dict[str, list[str | None]]:
    return {form.name: [form.write(answer) for answer in answers] for form in evidence.forms}


def best_form(evidence: Evidence) -> ReturnFormat | None:
    """The form in which right answers score most, of those in which they beat wrong ones in half the rows or more.

    And the same texts, as completions of another row, which is what tells an answer from a length.
    """
    if evidence.info.is_model or not evidence.has_gold:
        return None
    ranked = []
    needed = MOST if evidence.names_answer else NEARLY_ALL
    for place, form in enumerate(evidence.forms):
        gains = gains_of(evidence.gold, evidence.wrong, form.name)
        here = gains_of(evidence.gold, evidence.elsewhere, form.name)
        won = (gains > 0).sum()
        enough = gains.size and won >= needed * gains.size and gains.sum() > 1e-9 * np.abs(gains).max()
        reads = here.size and (here > 0).sum() >= needed * here.size
        if enough and reads and (evidence.names_answer or evidence.info.wants is None or gains.min() >= 0):
            # The more rows, the higher the score; where that is equal a marked form tells more than a bare one.
            ranked.append((won / gains.size, significant(mean(evidence.gold[form.name])), place > 0, -place))
    return evidence.forms[-max(ranked)[-1]] if ranked else None


def _diagnosis(session: Session, evidence: Evidence) -> Diagnosis | None:
    """None where right answers score, and for a reward that can read neither the answer nor the question."""
    if evidence.form is not None:
        name = evidence.form.name
        if np.all(evidence.gold[name] > evidence.wrong[name]):
            return None
    wants = evidence.info.wants
    blind = evidence.info.is_model or (wants is not None and not {"prompts", *evidence.columns} & wants)
    silent = np.isnan(list(evidence.gold.values())).all()
    if not silent and (blind or not evidence.has_gold):
        return None
    cases = session.cases
    answers = evidence.columns
    texts = _in_forms(evidence, [case.gold for case in cases])
    wrong = _in_forms(evidence, [case.wrong for case in cases])

    scores = partial(session.scores, quietly=True)

    elsewhere = [_in_place_of(case, evidence, whole=True) for case in cases]

    def changed(change: Callable[[Any], Any] = lambda value: value, shift: int = 0) -> list[ProbeCase]:
        """The rows with the answer changed, of the row `shift` places on."""
        others = [*cases[shift:], *cases[:shift]]
        answered = [{name: change(other.columns.get(name)) for name in answers} for other in others]
        return [replace(case, columns={**case.columns, **own}) for case, own in zip(cases, answered, strict=True)]

    usual = scores(texts)
    swapped = [scores(texts, changed(shift=shift)) for shift in (1, -1, max(2, len(cases) // 2) % len(cases))]
    kept = [{name: value for name, value in case.columns.items() if name not in answers} for case in cases]
    without = [replace(case, columns=columns) for case, columns in zip(cases, kept, strict=True)]
    turned = [replace(case, prompt=_other_kind(case)) for case in cases]
    takes_all = wants is None and evidence.column is not None
    asked = {
        which: {form.name: [probe.make(case, form.write) for case in cases] for form in evidence.forms}
        for which in ("first", "last")
        for probe in PROBES
        if probe.name == f"{which} number of the question"
    }
    return Diagnosis(
        looks=takes_all and differ(scores(texts, without), usual),
        usual=usual,
        swapped=swapped,
        matrix=_matrix(session, evidence) if any(differ(swap, usual) for swap in swapped) else {},
        prompt_numbers={which: (scores(numbers), scores(numbers, elsewhere)) for which, numbers in asked.items()},
        variants={name: scores(texts, changed(change)) for name, change in VARIANTS.items()} if answers else {},
        other_kind=(scores(texts, turned), scores(wrong, turned)),
    )


def _other_kind(case: ProbeCase) -> str | list[Message]:
    """A plain prompt as a chat, or the other way round."""
    return [{"role": "user", "content": case.prompt}] if isinstance(case.prompt, str) else case.prompt_text


def _matrix(session: Session, evidence: Evidence) -> dict[str, np.ndarray]:
    """Of the forms that come first, in tags among them, and of the last, which the run itself shows."""
    cases = session.cases
    forms = dict.fromkeys([*evidence.forms[:6], *evidence.forms[-1:]])
    texts = {f"{form.name}|{j}": [form.write(case.gold)] * len(cases) for form in forms for j, case in enumerate(cases)}
    scores = session.scores(texts, quietly=True)
    return {form.name: np.stack([scores[f"{form.name}|{j}"] for j in range(len(cases))], axis=1) for form in forms}


_LEADS = ("", "", "Or not. I would say it is:\n", "Once more.\nOne, two, three.\n", "So\n")


def _repeats(session: Session, evidence: Evidence) -> Repeats:
    """Up to four groups of six completions that gave values before, in calls that should agree.

    Some of the texts are right, more from group to group; all differ but two.
    """
    groups = []
    for place, case in enumerate(session.cases[:4]):
        answers = [case.gold] * (1 + place) + [case.wrong] * (5 - place)
        leads = (*_LEADS, f"{last_user_turn(case.prompt)}\n")
        texts = [f"{lead}{evidence.write(answer)}" for lead, answer in zip(leads, answers, strict=True)]
        groups.append(group_of(case, texts))

    def values(asked: Sequence[Group], seed: int = 0) -> Sequence[float] | None:
        return session.call(asked, random_seed=seed).values

    def one_by_one(parts: Sequence[Group]) -> list[float] | None:
        found = [values([part]) for part in parts]
        return None if None in found else [value for part in found for value in part or ()]

    if (base := values(groups)) is None:
        return Repeats()
    again = values(groups)
    changing = again is not None and not alike(base, again)
    reseeded = values(groups, seed=1)
    remembers = _remembers(session, groups) if changing and session.caller.can_restart else None
    turned = values([replace(group, completions=group.completions[::-1]) for group in reversed(groups)])
    return Repeats(
        base=base,
        again=again,
        reseeded=reseeded,
        remembers=remembers,
        shuffled=None if turned is None else turned[::-1],
        alone=one_by_one(groups),
        single=one_by_one([replace(groups[0], completions=(completion,)) for completion in groups[0].completions]),
    )


def _remembers(session: Session, groups: Sequence[Group]) -> bool | None:
    """Whether two new processes give the same two values for the same two calls."""
    pairs = []
    for _ in range(2):
        session.caller.close()
        pairs.append([session.call(groups).values for _ in range(2)])
    if any(values is None for pair in pairs for values in pair):
        return None
    return all(alike(one or (), other or ()) for one, other in zip(*pairs, strict=True))
