"""Everything the rules look at, asked for in a few calls: right and wrong answers in every form, probes, repetitions.

    evidence = gather(asker, cases, column="answer", forms=FORMS)

Judges nothing; `rules` does.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from podium.records import Completion, Group, Prompt
from podium.rewards.tester.asking import Answer, Asker, Described, Problem, Request
from podium.rewards.tester.cases import Case, Form, gold_of
from podium.rewards.tester.probes import PROBES, Probe, number_probes

Scores = Mapping[str, tuple[float, ...]]
"""By name of a probe or form: one value a row, NaN where there is none."""

Texts = Mapping[str, Sequence[str | None]]
"""By name: one completion a row, None where there is none."""

MOST_LETTERS = 100_000
"""Of one call."""

ENDLESS = frozenset({"W002", "W003", "W004", "W005", "W016", "W012", "W014"})
"""What is wrong with every call; nothing more can be learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A call that gave no values."""

    probe: str
    row: int
    problem: Problem
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The same completions, asked for in different ways; None where that was not done."""

    base: tuple[float, ...] = ()
    again: tuple[float, ...] | None = None
    """The same call once more, with the same seed."""
    reseeded: tuple[float, ...] | None = None
    remembers: bool | None = None
    """Where calls differ: whether new processes differ in the same way each time; None where none can be had."""
    shuffled: tuple[float, ...] | None = None
    """Groups, and completions within a group, in another order."""
    alone: tuple[float, ...] | None = None
    """Each group in a call of its own."""
    single: tuple[float, ...] | None = None
    """The completions of the first group, each in a call of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Asked for only where right answers do not score: what would make them."""

    matrix: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    """By form, [row][j]: the right answer of row j, as the completion of the row."""
    prompt_numbers: Mapping[str, Scores] = field(default_factory=dict)
    """`first` and `last` number of the question, by form; NaN where it is the right answer."""
    variants: Mapping[str, Scores] = field(default_factory=dict)
    """Right answers by form, where the answer column is as in `VARIANTS`."""
    other_kind: tuple[Scores, Scores] | None = None
    """Right and wrong answers by form, chat prompts made plain and plain ones chats."""
    depends: bool = False
    """Whether any score changes when rows are given each other's answers."""
    looks: bool = False
    """Whether a function that takes everything misses the column when it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that was seen of one reward function."""

    described: Described
    cases: tuple[Case, ...]
    column: str | None
    forms: tuple[Form, ...]
    gold: Scores = field(default_factory=dict)
    wrong: Scores = field(default_factory=dict)
    form: Form | None = None
    """In which right answers score best above wrong ones; None: in none."""
    probes: Scores = field(default_factory=dict)
    numbers: Scores = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    mutated: tuple[str, ...] = ()
    seconds_per_completion: float = 0.0
    is_cut: bool = False
    """Whether there was no time for all."""
    repeats: Repeats = field(default_factory=Repeats)
    diagnosis: Diagnosis | None = None

    @property
    def names_answer(self) -> bool:
        """Whether the signature asks for the answer column."""
        return self.column is not None and self.described.wants is not None and self.column in self.described.wants

    @property
    def is_correctness(self) -> bool:
        """Whether the reward is about the right answer: by what it scores, by its signature, or by what it misses."""
        seen = self.diagnosis is not None and (self.diagnosis.depends or self.diagnosis.looks)
        return self.form is not None or self.names_answer or seen

    def write(self) -> Callable[[str], str]:
        """How answers are written in probes."""
        return (self.form or self.forms[1]).write


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
    asker: Asker, cases: Sequence[Case], *, column: str | None, forms: tuple[Form, ...], budget_seconds: float = 60.0
) -> Evidence:
    """Asks, in order: one answer a row; every form; what is needed to say why; repetitions; the probes."""
    session = _Session(asker=asker, cases=tuple(cases), budget_seconds=budget_seconds)
    evidence = Evidence(described=asker.described, cases=tuple(cases), column=column, forms=forms)
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


def _ask_forms(session: _Session, evidence: Evidence) -> Evidence:
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
    if not any(case.has_gold for case in evidence.cases):
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


def gains_of(gold: Scores, wrong: Scores, name: str) -> list[float]:
    """By how much the right answer beats the wrong one, in the rows where both have a value."""
    pairs = zip(gold.get(name, ()), wrong.get(name, ()), strict=False)
    return [one - other for one, other in pairs if not math.isnan(one) and not math.isnan(other)]


def _beats(gold: Scores, wrong: Scores, name: str) -> list[bool]:
    return [one > other for one, other in zip(gold[name], wrong[name], strict=True)]


def mean(values: Iterable[float]) -> float:
    """Of what is a number; NaN of nothing.

    >>> mean([1.0, math.nan, 0.0])
    0.5
    """
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


# --- why right answers do not score ----------------------------------------------------------------------------------


def _diagnose(session: _Session, evidence: Evidence) -> Evidence:
    """Nothing for a reward that can know neither the answer nor the question."""
    wants = evidence.described.wants
    blind = wants is not None and not {"prompts", evidence.column} & wants
    silent = all(math.isnan(value) for values in evidence.gold.values() for value in values)
    if not silent and (blind or not any(case.has_gold for case in evidence.cases)):
        return evidence
    texts = {form.name: [form.write(case.gold) for case in session.cases] for form in evidence.forms}
    asked = session.scores(texts, quietly=True)
    shifts = (1, -1, max(2, len(session.cases) // 2))
    rotated = [_rotated(session.cases, evidence.column, shift) for shift in shifts]
    swapped = [session.scores(texts, columns=columns, quietly=True) for columns in rotated]
    takes_all = wants is None and evidence.column is not None
    missed = (
        session.scores(texts, columns=_without(session.cases, evidence.column), quietly=True) if takes_all else asked
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


def differ(one: Scores, other: Scores) -> bool:
    """Whether any two values are different, or only one of them is there."""
    return any(not close(a, b) for name in one for a, b in zip(one[name], other[name], strict=True))


def close(one: float, other: float) -> bool:
    """Equal up to rounding in batches; NaN only to NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return abs(one - other) <= 1e-6 + 1e-4 * max(abs(one), abs(other))


def _rotated(cases: Sequence[Case], column: str | None, shift: int) -> list[Mapping[str, Any]]:
    """Each row with the answer of the row `shift` places on."""
    given = [cases[(place + shift) % len(cases)].columns.get(column or "") for place in range(len(cases))]
    return [
        {**case.columns, column: value} if column else case.columns for case, value in zip(cases, given, strict=True)
    ]


def _without(cases: Sequence[Case], column: str | None) -> list[Mapping[str, Any]]:
    return [{key: value for key, value in case.columns.items() if key != column} for case in cases]


def _ask_matrix(session: _Session, evidence: Evidence) -> dict[str, tuple[tuple[float, ...], ...]]:
    """Fewer forms where calls are slow."""
    cases = session.cases
    forms = evidence.forms[: max(2, session.affordable(0.2) // len(cases) ** 2)]
    texts = {f"{form.name}|{j}": [form.write(case.gold)] * len(cases) for form in forms for j, case in enumerate(cases)}
    scores = session.scores(texts, quietly=True)
    rows = range(len(cases))
    return {form.name: tuple(tuple(scores[f"{form.name}|{j}"][i] for j in rows) for i in rows) for form in forms}


def _ask_prompt_numbers(session: _Session, evidence: Evidence) -> dict[str, Scores]:
    found: dict[str, Scores] = {}
    for which in ("first", "last"):
        [probe] = [probe for probe in PROBES if probe.name == f"{which} number of the question"]
        texts = {form.name: [probe.make(case, form.write) for case in session.cases] for form in evidence.forms}
        found[which] = session.scores(texts, quietly=True)
    return found


def _ask_variants(session: _Session, evidence: Evidence, texts: Texts) -> dict[str, Scores]:
    column = evidence.column
    if column is None:
        return {}
    changed = {name: [_changed(case, column, change) for case in session.cases] for name, change in VARIANTS.items()}
    return {name: session.scores(texts, columns=columns, quietly=True) for name, columns in changed.items()}


def _changed(case: Case, column: str, change: Callable[[Any], Any]) -> Mapping[str, Any]:
    return {**case.columns, column: change(case.columns.get(column))}


def _ask_other_kind(session: _Session, evidence: Evidence, texts: Texts) -> tuple[Scores, Scores]:
    wrong = {form.name: [form.write(case.wrong) for case in session.cases] for form in evidence.forms}
    return (
        session.scores(texts, other_kind=True, quietly=True),
        session.scores(wrong, other_kind=True, quietly=True),
    )


# --- the same again --------------------------------------------------------------------------------------------------


def _repeat(session: _Session, evidence: Evidence) -> Repeats:
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


def _remembers(session: _Session, groups: tuple[Group, ...]) -> bool | None:
    """Whether two new processes both say first one thing and then another, and the same two."""
    pairs = []
    for _ in range(2):
        session.asker.restart()
        pairs.append((session.values(groups), session.values(groups)))
    (first, second), (first_again, second_again) = pairs
    if first is None or second is None or first_again is None or second_again is None:
        return None
    return not differ({"1": first, "2": second}, {"1": first_again, "2": second_again})


def _shuffled(session: _Session, groups: Sequence[Group]) -> tuple[float, ...] | None:
    """Groups and their completions the other way round; the values come back in the first order."""
    turned = tuple(replace(group, completions=group.completions[::-1]) for group in reversed(groups))
    values = session.values(turned)
    return None if values is None else values[::-1]


def _one_by_one(session: _Session, group: Group) -> tuple[float, ...] | None:
    """Each completion in a call of its own."""
    singles = [replace(group, completions=(completion,)) for completion in group.completions]
    return _joined([session.values((single,)) for single in singles])


def _joined(parts: Sequence[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    if any(part is None for part in parts):
        return None
    return tuple(value for part in parts for value in part or ())


# --- probes ----------------------------------------------------------------------------------------------------------


def _ask_probes(session: _Session, evidence: Evidence) -> Evidence:
    write = evidence.write()
    probes = session.scores(_texts(PROBES, session.affordable_rows(len(PROBES), 0.5), write))
    rows = session.affordable_rows(101, 0.5)
    step = 1 if session.affordable(0.5) >= 101 * len(rows) else 10
    return replace(
        evidence, probes=probes, numbers=session.scores(_texts(number_probes(step), rows, write)) if rows else {}
    )


def _texts(probes: Sequence[Probe], cases: Sequence[Case], write: Callable[[str], str]) -> Texts:
    return {probe.name: [probe.make(case, write) for case in cases] for probe in probes}


@dataclass(slots=True, kw_only=True)
class _Session:
    """Calls, and what went wrong with them."""

    asker: Asker
    cases: tuple[Case, ...]
    budget_seconds: float
    failures: list[Failure] = field(default_factory=list)
    mutated: tuple[str, ...] = ()
    seconds_per_completion: float = 0.0
    spent_seconds: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether far more time went than was meant to."""
        return self.spent_seconds > 2 * self.budget_seconds

    def ask(self, request: Request) -> Answer:
        """One call, as long as there is time."""
        if self.is_over:
            return Answer(values=None)
        answer = self.asker.ask(request)
        self.spent_seconds += answer.seconds
        return answer

    def warm_up(self) -> None:
        """The first call imports what it needs; the second is timed."""
        texts = {"the right answer": [case.gold for case in self.cases]}
        self.scores(texts)
        if self.failures and self.failures[0].problem.code in ENDLESS:
            return
        answer = self.ask(Request(groups=self._singles(texts, None, other_kind=False)[0], check_inputs=True))
        self.mutated = answer.mutated
        self.seconds_per_completion = answer.seconds / len(self.cases)

    def finish(self, evidence: Evidence) -> Evidence:
        return replace(
            evidence,
            failures=tuple(self.failures),
            mutated=self.mutated,
            seconds_per_completion=self.seconds_per_completion,
            is_cut=self.is_over,
        )

    def affordable(self, share: float) -> int:
        """Completions that fit into a share of the budget."""
        return int(share * self.budget_seconds / max(self.seconds_per_completion, 1e-5))

    def affordable_rows(self, num_texts: int, share: float) -> tuple[Case, ...]:
        """As many rows as can be asked with that many texts each, two at least."""
        return self.cases[: max(2, self.affordable(share) // num_texts)]

    def values(self, groups: tuple[Group, ...], *, seed: int = 0) -> tuple[float, ...] | None:
        """One call; None where it fails."""
        return self.ask(Request(groups=groups, seed=seed)).values

    def group(self, case: Case, texts: Sequence[str], *, columns: Any = None, other_kind: bool = False) -> Group:
        content = _other_kind(case.prompt) if other_kind else case.prompt
        prompt = Prompt(
            id=case.row,
            row=case.row,
            token_ids=(),
            text=case.prompt_text,
            content=content,
            columns=case.columns if columns is None else columns,
        )
        return Group(prompt=prompt, completions=tuple(_completion(text) for text in texts))

    def scores(self, texts: Texts, *, columns: Any = None, other_kind: bool = False, quietly: bool = False) -> Scores:
        """Rows one after the other for each name, each completion a group of its own.

        So a function that is one place off is off by a row. Calls that fail are asked again in parts, and what fails
        alone is noted, unless `quietly`.
        """
        found: dict[tuple[str, int], float] = {}
        for part in self._calls(texts):
            groups, keys = self._singles(part, columns, other_kind=other_kind)
            found |= self._in_parts(groups, keys, quietly=quietly)
        rows = range(len(self.cases))
        return {name: tuple(found.get((name, row), math.nan) for row in rows) for name in texts}

    def _calls(self, texts: Texts) -> list[Texts]:
        """Names that go into one call: seconds of work, and not more than a batch in training has of letters."""
        most = max(len(self.cases), min(512, int(2.5 / max(self.seconds_per_completion, 1e-5))))
        calls: list[dict[str, Sequence[str | None]]] = [{}]
        for name, made in texts.items():
            together = [text for each in (*calls[-1].values(), made) for text in each if text is not None]
            if calls[-1] and (len(together) > most or sum(map(len, together)) > MOST_LETTERS):
                calls.append({})
            calls[-1][name] = made
        return list(calls)

    def _singles(self, texts: Texts, columns: Any, *, other_kind: bool) -> tuple[Any, Any]:
        keys = [(name, row) for name, made in texts.items() for row, text in enumerate(made) if text is not None]
        groups = tuple(
            self.group(
                self.cases[row],
                [str(texts[name][row])],
                columns=None if columns is None else columns[row],
                other_kind=other_kind,
            )
            for name, row in keys
        )
        return groups, keys

    def _in_parts(self, groups: Any, keys: Any, *, quietly: bool) -> dict[tuple[str, int], float]:
        answer = self.ask(Request(groups=groups))
        if answer.values is not None:
            return dict(zip(keys, answer.values, strict=True))
        names = list(dict.fromkeys(name for name, _ in keys))
        if quietly or len(keys) == 1 or self.is_over or self._hopeless():
            self._note(keys, answer, groups, quietly=quietly)
            return {}
        parts = [[k for k, (name, _) in enumerate(keys) if name == each] for each in names]
        if len(names) == 1:
            parts = [[k] for k in range(len(keys))]
        before = len(self.failures)
        found: dict[tuple[str, int], float] = {}
        for part in parts:
            found |= self._in_parts(tuple(groups[k] for k in part), [keys[k] for k in part], quietly=quietly)
            if len(names) == 1 and len(self.failures) > before:
                break  # one row of a probe is enough to show
        if len(self.failures) == before:  # only together
            self._note(keys, answer, groups, quietly=quietly)
        return found

    def _hopeless(self) -> bool:
        """Whether calls are wrong in a way that splitting them does not tell more about."""
        slow = [failure for failure in self.failures if failure.problem.code == "W016"]
        return len(slow) >= 2 or any(failure.problem.code in ENDLESS - {"W016"} for failure in self.failures)

    def _note(self, keys: Any, answer: Answer, groups: Any, *, quietly: bool) -> None:
        if quietly or answer.problem is None:
            return
        name, row = keys[0]
        text = groups[0].completions[0].text
        self.failures.append(Failure(probe=name, row=self.cases[row].row, problem=answer.problem, text=text))


def _other_kind(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return "\n".join(str(message.get("content") or "") for message in prompt)


def _completion(text: str) -> Completion:
    return Completion(token_ids=_token_ids(text), logps=(), finish="stop", text=text, policy_step=0)


def _token_ids(text: str) -> tuple[int, ...]:
    """Made up, as there is no tokenizer: one for each piece of at most four letters, the same for the same piece.

    >>> len(_token_ids("nothing new")), _token_ids("a a")[0] == _token_ids("a a")[1]
    (3, True)
    """
    return tuple(zlib.crc32(piece.encode()) % 50_000 for piece in re.findall(r"\w{1,4}|[^\w\s]", text))
