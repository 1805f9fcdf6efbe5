"""Results of one reward function, from few calls: right and wrong answers in every form, probes, repetitions.

    evidence = gather(caller, [Evidence(info=caller.info, cases=cases, column="answer", forms=FORMS)], TimeLimits(60.0))

`rules` interprets them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from podium.records import Group, Message, last_user_turn
from podium.rewards.tester.callers import RewardCaller
from podium.rewards.tester.cases import ProbeCase, ReturnFormat, as_number, gold_of
from podium.rewards.tester.evidence import (
    Diagnosis,
    Evidence,
    Repeats,
    Texts,
    alike,
    differ,
    gains_of,
    mean,
)
from podium.rewards.tester.probes import PROBES, Probe, number_probes
from podium.rewards.tester.session import Session, group_of


def _number_or_same(value: Any) -> Any:
    number = as_number(str(value))
    if number is None:
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


class TimeLimits(NamedTuple):
    """Seconds of calls."""

    budget: float
    """Approximate time of all calls, in seconds."""
    most: float = math.inf
    """Seconds a completion beyond which only the first calls are made."""


def gather(
    caller: RewardCaller, candidates: Sequence[Evidence], time: TimeLimits, *, is_thorough: bool = True
) -> Evidence:
    """Score, in order: one answer a row; every form; whatever can show why answers do not score; repeats; probes.

    Args:
        candidates: one for each possible place of the answers; the first whose answers score is taken, else the first.
        is_thorough: whether more than right and wrong answers is scored.
    """
    evidence = candidates[0]
    session = Session(caller=caller, cases=evidence.cases, budget_seconds=time.budget)
    session.warm_up()
    too_slow = session.seconds_per_completion > time.most
    if not session.failed_for_good and not too_slow:
        if len(candidates) > 1:
            share = time.budget / len(candidates)
            evidence = next((each for each in candidates if scores_in_a_form(caller, each, share)), evidence)
            session.cases = evidence.cases
        evidence = _with_forms(session, evidence)
        if not session.is_over and is_thorough:
            evidence = replace(evidence, diagnosis=_diagnosis(session, evidence))
            evidence = replace(evidence, repeats=_repeats(session, evidence))
            evidence = _with_probes(session, evidence)
    return replace(
        evidence,
        failures=tuple(session.failures),
        mutated=session.mutated,
        seconds_per_completion=session.seconds_per_completion,
        is_cut=session.is_over or too_slow,
        num_skipped=session.num_skipped,
    )


def scores_in_a_form(caller: RewardCaller, evidence: Evidence, budget_seconds: float) -> bool:
    """Whether right answers from its column, or its template, score above wrong ones in any form."""
    session = Session(caller=caller, cases=evidence.cases, budget_seconds=budget_seconds)
    session.warm_up()
    # As if the function named no column: then more rows must agree.
    return not session.failures and _with_forms(session, replace(evidence, asked=())).form is not None


def _with_forms(session: Session, evidence: Evidence) -> Evidence:
    rows = session.affordable_rows(2 * len(evidence.forms), 0.3)
    columns = [(case.gold, case.columns.get(evidence.column or "")) for case in rows]
    as_it_is = [value if isinstance(value, str) and value.strip() != gold else None for gold, value in columns]
    right = {**_in_forms(evidence, [case.gold for case in rows]), "the column as it is": as_it_is}
    wrong = _in_forms(evidence, [case.wrong for case in rows])
    evidence = replace(evidence, gold=session.scores(right), wrong=session.scores(wrong))
    return replace(evidence, form=best_form(evidence))


def _in_forms(evidence: Evidence, answers: Sequence[str]) -> dict[str, list[str | None]]:
    return {form.name: [form.write(answer) for answer in answers] for form in evidence.forms}


def best_form(evidence: Evidence) -> ReturnFormat | None:
    """The form in which right answers score most, of those in which they beat wrong ones in half the rows or more."""
    if evidence.info.is_model or not evidence.has_gold:
        return None
    ranked = []
    for place, form in enumerate(evidence.forms):
        gains = gains_of(evidence.gold, evidence.wrong, form.name)
        won = (gains > 0).sum()
        needed = 0.5 if evidence.names_answer else 0.75
        enough = gains.size and won >= needed * gains.size and gains.sum() > 1e-9
        if enough and (evidence.names_answer or evidence.info.wants is None or gains.min() >= 0):
            # The more rows, the higher the score; where that is equal a marked form tells more than a bare one.
            ranked.append((won / gains.size, round(mean(evidence.gold[form.name]), 6), place > 0, -place))
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
    cases, answers = session.cases, evidence.columns
    texts = _in_forms(evidence, [case.gold for case in cases])
    wrong = _in_forms(evidence, [case.wrong for case in cases])

    scores = partial(session.scores, quietly=True)

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
    return Diagnosis(
        looks=takes_all and differ(scores(texts, without), usual),
        depends=any(differ(each, usual) for each in swapped),
        matrix=_matrix(session, evidence),
        prompt_numbers={
            which: scores({form.name: [probe.make(case, form.write) for case in cases] for form in evidence.forms})
            for which in ("first", "last")
            for probe in PROBES
            if probe.name == f"{which} number of the question"
        },
        variants={name: scores(texts, changed(change)) for name, change in VARIANTS.items()} if answers else {},
        other_kind=(scores(texts, turned), scores(wrong, turned)),
    )


def _other_kind(case: ProbeCase) -> str | list[Message]:
    """A plain prompt as a chat, or the other way round."""
    return [{"role": "user", "content": case.prompt}] if isinstance(case.prompt, str) else case.prompt_text


def _matrix(session: Session, evidence: Evidence) -> dict[str, np.ndarray]:
    """Fewer forms where calls are slow."""
    cases = session.cases
    forms = evidence.forms[: max(2, session.affordable(0.2) // len(cases) ** 2)]
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

    base = values(groups)
    if base is None:
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
        single=one_by_one([replace(groups[0], completions=(each,)) for each in groups[0].completions]),
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


def _with_probes(session: Session, evidence: Evidence) -> Evidence:
    write = evidence.write
    probes = session.scores(_texts(PROBES, session.affordable_rows(len(PROBES), 0.5), write))
    rows = session.affordable_rows(101, 0.5)
    step = 1 if session.affordable(0.5) >= 101 * len(rows) else 10
    return replace(evidence, probes=probes, numbers=session.scores(_texts(number_probes(step), rows, write)))


def _texts(probes: Sequence[Probe], cases: Sequence[ProbeCase], write: Callable[[str], str]) -> Texts:
    return {probe.name: [probe.make(case, write) for case in cases] for probe in probes}
