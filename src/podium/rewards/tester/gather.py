"""Everything the rules look at, asked for in a few calls: right and wrong answers in every form, probes, repetitions.

    evidence = gather(asker, cases, column="answer", forms=FORMS)

Judges nothing; `rules` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from podium.records import Group
from podium.rewards.tester.asking import RewardCaller
from podium.rewards.tester.cases import Case, Form, gold_of
from podium.rewards.tester.evidence import ENDLESS, Diagnosis, Evidence, Repeats, Scores, Texts, differ, gains_of, mean
from podium.rewards.tester.probes import PROBES, Probe, number_probes
from podium.rewards.tester.session import Session

VARIANTS: Mapping[str, Callable[[Any], Any]] = {
    "as text": str,
    "without white space around it": lambda value: value.strip() if isinstance(value, str) else value,
    "as numbers": lambda value: _float_or_same(value),
    "as the final answer alone": gold_of,
    "in lower case": lambda value: value.lower() if isinstance(value, str) else value,
}
"""What may have to be done to the answer column before the function can compare with it."""


def _float_or_same(value: Any) -> Any:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value
    return int(number) if number == int(number) else number


def gather(
    asker: RewardCaller,
    cases: Sequence[Case],
    *,
    column: str | None,
    forms: tuple[Form, ...],
    asked: tuple[str, ...] = (),
    budget_seconds: float = 60.0,
) -> Evidence:
    """Asks, in order: one answer a row; every form; what is needed to say why; repetitions; the probes."""
    session = Session(asker=asker, cases=tuple(cases), budget_seconds=budget_seconds)
    evidence = Evidence(described=asker.described, cases=tuple(cases), column=column, forms=forms, asked=asked)
    session.warm_up()
    if session.failures and session.failures[0].problem.code in ENDLESS:
        return session.finish(evidence)
    evidence = _ask_forms(session, evidence)
    if session.is_over:
        return session.finish(evidence)
    if evidence.form is None or not all(_beats(evidence.gold, evidence.wrong, evidence.form.name)):
        evidence = _diagnose(session, evidence)
    evidence = replace(evidence, repeats=_repeat(session, evidence))
    return session.finish(_ask_probes(session, evidence))


def scores_in_a_form(asker: RewardCaller, cases: Sequence[Case], column: str | None, forms: tuple[Form, ...]) -> bool:
    """Whether right answers from this column, or this template, score above wrong ones in any form."""
    session = Session(asker=asker, cases=tuple(cases), budget_seconds=10.0)
    evidence = Evidence(described=asker.described, cases=tuple(cases), column=column, forms=forms)
    session.warm_up()
    return not session.failures and _ask_forms(session, evidence).form is not None


def _ask_forms(session: Session, evidence: Evidence) -> Evidence:
    rows = session.affordable_rows(2 * len(evidence.forms), 0.3)
    right: dict[str, list[str | None]] = {
        form.name: [form.write(case.gold) for case in rows] for form in evidence.forms
    }
    wrong = {form.name: [form.write(case.wrong) for case in rows] for form in evidence.forms}
    right["the column as it is"] = [_raw(case, evidence.column) for case in rows]
    evidence = replace(evidence, gold=session.scores(right), wrong=session.scores(wrong))
    return replace(evidence, form=best_form(evidence))


def _raw(case: Case, column: str | None) -> str | None:
    """The column's own text, where it is more than the answer."""
    value = case.columns.get(column or "")
    return value if isinstance(value, str) and value.strip() != case.gold else None


def best_form(evidence: Evidence) -> Form | None:
    """The form in which right answers score most, of those in which they beat wrong ones in half the rows or more."""
    if evidence.described.is_model or not any(case.has_gold for case in evidence.cases):
        return None
    ranked = []
    for place, form in enumerate(evidence.forms):
        gains = gains_of(evidence.gold, evidence.wrong, form.name)
        won, lost = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        needed = 0.5 if evidence.names_answer else 0.75
        enough = gains and won >= needed * len(gains) and sum(gains) > 1e-9
        if enough and (evidence.names_answer or evidence.described.wants is None or not lost):
            # The more rows, the higher the score; where that is equal a marked form tells more than a bare one.
            ranked.append((won / len(gains), round(mean(evidence.gold[form.name]), 6), place > 0, -place))
    return evidence.forms[-max(ranked)[-1]] if ranked else None


def _beats(gold: Scores, wrong: Scores, name: str) -> list[bool]:
    return [one > other for one, other in zip(gold[name], wrong[name], strict=True)]


# --- why right answers do not score ----------------------------------------------------------------------------------


def _diagnose(session: Session, evidence: Evidence) -> Evidence:
    """Nothing for a reward that can know neither the answer nor the question."""
    wants = evidence.described.wants
    blind = evidence.described.is_model or (wants is not None and not {"prompts", *evidence.columns} & wants)
    silent = all(math.isnan(value) for values in evidence.gold.values() for value in values)
    if not silent and (blind or not any(case.has_gold for case in evidence.cases)):
        return evidence
    texts = {form.name: [form.write(case.gold) for case in session.cases] for form in evidence.forms}
    asked = session.scores(texts, quietly=True)
    shifts = (1, -1, max(2, len(session.cases) // 2))
    rotated = [_rotated(session.cases, evidence.columns, shift) for shift in shifts]
    swapped = [session.scores(texts, columns=columns, quietly=True) for columns in rotated]
    takes_all = wants is None and evidence.column is not None
    missed = (
        session.scores(texts, columns=_without(session.cases, evidence.columns), quietly=True) if takes_all else asked
    )
    return replace(
        evidence,
        diagnosis=Diagnosis(
            matrix=_ask_matrix(session, evidence),
            prompt_numbers=_ask_prompt_numbers(session, evidence),
            variants=_ask_variants(session, evidence, texts),
            other_kind=_ask_other_kind(session, evidence, texts),
            depends=any(differ(scores, asked) for scores in swapped),
            looks=differ(missed, asked),
        ),
    )


def _rotated(cases: Sequence[Case], columns: Sequence[str], shift: int) -> list[Mapping[str, Any]]:
    """Each row with the answer of the row `shift` places on."""
    others = [cases[(place + shift) % len(cases)].columns for place in range(len(cases))]
    return [
        {**case.columns, **{column: other.get(column) for column in columns}}
        for case, other in zip(cases, others, strict=True)
    ]


def _without(cases: Sequence[Case], columns: Sequence[str]) -> list[Mapping[str, Any]]:
    return [{key: value for key, value in case.columns.items() if key not in columns} for case in cases]


def _ask_matrix(session: Session, evidence: Evidence) -> dict[str, tuple[tuple[float, ...], ...]]:
    """Fewer forms where calls are slow."""
    cases = session.cases
    forms = evidence.forms[: max(2, session.affordable(0.2) // len(cases) ** 2)]
    texts = {f"{form.name}|{j}": [form.write(case.gold)] * len(cases) for form in forms for j, case in enumerate(cases)}
    scores = session.scores(texts, quietly=True)
    rows = range(len(cases))
    return {form.name: tuple(tuple(scores[f"{form.name}|{j}"][i] for j in rows) for i in rows) for form in forms}


def _ask_prompt_numbers(session: Session, evidence: Evidence) -> dict[str, Scores]:
    found: dict[str, Scores] = {}
    for which in ("first", "last"):
        [probe] = [probe for probe in PROBES if probe.name == f"{which} number of the question"]
        texts = {form.name: [probe.make(case, form.write) for case in session.cases] for form in evidence.forms}
        found[which] = session.scores(texts, quietly=True)
    return found


def _ask_variants(session: Session, evidence: Evidence, texts: Texts) -> dict[str, Scores]:
    if not evidence.columns:
        return {}
    changed = {
        name: [_changed(case, evidence.columns, change) for case in session.cases] for name, change in VARIANTS.items()
    }
    return {name: session.scores(texts, columns=columns, quietly=True) for name, columns in changed.items()}


def _changed(case: Case, columns: Sequence[str], change: Callable[[Any], Any]) -> Mapping[str, Any]:
    return {**case.columns, **{column: change(case.columns.get(column)) for column in columns}}


def _ask_other_kind(session: Session, evidence: Evidence, texts: Texts) -> tuple[Scores, Scores]:
    wrong = {form.name: [form.write(case.wrong) for case in session.cases] for form in evidence.forms}
    return (
        session.scores(texts, other_kind=True, quietly=True),
        session.scores(wrong, other_kind=True, quietly=True),
    )


# --- the same again --------------------------------------------------------------------------------------------------


def _repeat(session: Session, evidence: Evidence) -> Repeats:
    """Four groups of up to eight completions that gave values before, in calls that should agree."""
    write = evidence.write()
    cases = session.cases[:4]
    groups = tuple(session.group(case, _mixed(case, write, num_right=1 + place)) for place, case in enumerate(cases))
    base = session.values(groups)
    if base is None:
        return Repeats()
    again = session.values(groups)
    changing = again is not None and differ({"": base}, {"": again})
    return Repeats(
        base=base,
        again=again,
        reseeded=session.values(groups, seed=1),
        remembers=_remembers(session, groups) if changing and session.asker.can_restart else None,
        shuffled=_shuffled(session, groups),
        alone=_joined([session.values((group,)) for group in groups]),
        single=_one_by_one(session, groups[0]),
    )


def _mixed(case: Case, write: Callable[[str], str], num_right: int) -> list[str]:
    """Six different texts, some of them right: groups that are not alike, and have two texts that are."""
    answers = [case.gold] * num_right + [case.wrong] * (6 - num_right)
    leads = ("", "", "Or not. I would say it is:\n", "Once more.\nOne, two, three.\n", "So\n", f"{case.question}\n")
    return [f"{lead}{write(answer)}" for lead, answer in zip(leads, answers, strict=True)]


def _remembers(session: Session, groups: tuple[Group, ...]) -> bool | None:
    """Whether two new processes both say first one thing and then another, and the same two."""
    pairs = []
    for _ in range(2):
        session.asker.restart()
        pairs.append((session.values(groups), session.values(groups)))
    (first, second), (first_again, second_again) = pairs
    if first is None or second is None or first_again is None or second_again is None:
        return None
    return not differ({"1": first, "2": second}, {"1": first_again, "2": second_again})


def _shuffled(session: Session, groups: Sequence[Group]) -> tuple[float, ...] | None:
    """Groups and their completions the other way round; the values come back in the first order."""
    turned = tuple(replace(group, completions=group.completions[::-1]) for group in reversed(groups))
    values = session.values(turned)
    return None if values is None else values[::-1]


def _one_by_one(session: Session, group: Group) -> tuple[float, ...] | None:
    """Each completion in a call of its own."""
    singles = [replace(group, completions=(completion,)) for completion in group.completions]
    return _joined([session.values((single,)) for single in singles])


def _joined(parts: Sequence[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    if any(part is None for part in parts):
        return None
    return tuple(value for part in parts for value in part or ())


# --- probes ----------------------------------------------------------------------------------------------------------


def _ask_probes(session: Session, evidence: Evidence) -> Evidence:
    write = evidence.write()
    probes = session.scores(_texts(PROBES, session.affordable_rows(len(PROBES), 0.5), write))
    rows = session.affordable_rows(101, 0.5)
    step = 1 if session.affordable(0.5) >= 101 * len(rows) else 10
    return replace(
        evidence, probes=probes, numbers=session.scores(_texts(number_probes(step), rows, write)) if rows else {}
    )


def _texts(probes: Sequence[Probe], cases: Sequence[Case], write: Callable[[str], str]) -> Texts:
    return {probe.name: [probe.make(case, write) for case in cases] for probe in probes}
