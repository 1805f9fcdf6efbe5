"""Calls of one reward function, and those that failed.

What is called does not depend on the time that calls take: where it runs out, nothing is known.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from podium.records import Completion, Group, Prompt
from podium.rewards.tester.callers import NOT_PLAYED, ProbeResult, RewardCaller
from podium.rewards.tester.cases import ProbeCase
from podium.rewards.tester.evidence import ENDLESS, FailedCall, Scores, Texts

MOST_LETTERS = 100_000
"""Greatest number of characters of one call."""

MOST_COMPLETIONS = 128
"""Greatest number of completions of one call."""

MODEL_LETTERS = 300
"""Greatest length of a text for a reward model, which may have no positions for longer ones."""

Entry = tuple[str, int, Group]
"""Name and row of a completion to score, and the completion as a group of its own."""


REPEATED_SECONDS = 0.5
"""Seconds of a timed call below which it is timed again."""


class NotPlayedError(Exception):
    """The function looks into the environment of a completion, and the texts of a test are played in none."""


@dataclass(slots=True, kw_only=True)
class Session:
    """Calls with the time that they took."""

    caller: RewardCaller
    cases: tuple[ProbeCase, ...]
    budget_seconds: float
    failures: list[FailedCall] = field(default_factory=list)
    mutated: Sequence[str] = ()
    seconds_per_completion: float = 0.0
    spent_seconds: float = 0.0
    num_skipped: int = 0
    """Completions that were not scored, as there was no time."""

    @property
    def is_over(self) -> bool:
        """Whether calls took more than the budget."""
        return self.spent_seconds > self.budget_seconds

    @property
    def failed_for_good(self) -> bool:
        """Whether the first failure shows that no call can go well."""
        return bool(self.failures) and self.failures[0].code in ENDLESS

    def call(self, groups: Sequence[Group], **settings: Any) -> ProbeResult:
        """One call, as long as there is time. Raises `NotPlayedError`."""
        if self.is_over:
            self.num_skipped += sum(len(group.completions) for group in groups)
            return ProbeResult()
        result = self.caller.call(groups, **settings)
        if result.code == NOT_PLAYED:
            raise NotPlayedError
        self.spent_seconds += result.seconds
        return result

    def warm_up(self) -> None:
        """Make a first call, which imports what it needs, and time the next: the fastest of seven, unless slow.

        On a machine that is busy, one call alone may take many times as long as it needs.
        """
        texts = {"the right answer": [case.gold for case in self.cases]}
        marked = {"the right answer in tags": [f"<answer>{case.gold}</answer>" for case in self.cases]}
        self.scores({**texts, **marked})
        if not self.failures:
            self.spent_seconds = 0.0  # of imports
        if not self.failed_for_good:
            groups = [entry[2] for entry in self._entries(texts, self.cases)]
            result = self.call(groups, check_inputs=True)
            self.mutated = result.mutated
            repeats = 6 if result.seconds < REPEATED_SECONDS else 0
            seconds = min([result.seconds, *(self.call(groups).seconds for _ in range(repeats))])
            self.seconds_per_completion = seconds / len(self.cases)

    def scores(self, texts: Texts, cases: Sequence[ProbeCase] = (), *, quietly: bool = False) -> Scores:
        """Rows one after the other for each name, each completion a group of its own.

        So a function that is one place off is off by a row. Calls that fail are repeated in parts, and what fails alone
        is noted, unless `quietly`. `cases`: the rows with changes.
        """
        found = {name: np.full(len(self.cases), np.nan) for name in texts}
        for part in self._calls(texts):
            self._score(list(self._entries(part, cases or self.cases)), found, quietly=quietly)
        return found

    def _calls(self, texts: Texts) -> list[Texts]:
        """Names that go into one call: not more than a batch in training has of completions and of letters."""
        calls: list[dict[str, Sequence[str | None]]] = [{}]
        for name, made in texts.items():
            together = [text for each in (*calls[-1].values(), made) for text in each if text is not None]
            if calls[-1] and (len(together) > MOST_COMPLETIONS or sum(map(len, together)) > MOST_LETTERS):
                calls.append({})
            calls[-1][name] = made
        return list(calls)

    def _entries(self, texts: Texts, cases: Sequence[ProbeCase]) -> Iterator[Entry]:
        most = MODEL_LETTERS if self.caller.info.is_model else math.inf
        for name, made in texts.items():
            for row, text in enumerate(made):
                if text is not None and len(text) <= most:
                    yield name, row, group_of(cases[row], [text])

    def _score(self, entries: Sequence[Entry], into: Mapping[str, np.ndarray], *, quietly: bool) -> None:
        result = self.call([group for _, _, group in entries])
        if result.values is not None:
            for (name, row, _), value in zip(entries, result.values, strict=True):
                into[name][row] = value
            return
        before = len(self.failures)
        names = [list(part) for _, part in groupby(entries, key=lambda entry: entry[0])]
        parts = names if len(names) > 1 else [[entry] for entry in entries] * (not quietly)
        if len(parts) > 1 and not self.is_over and not self._is_hopeless:
            for part in parts:
                if len(names) > 1 or len(self.failures) == before:  # of one name the first failure is enough
                    self._score(part, into, quietly=quietly)
        if len(self.failures) == before and result.code and not quietly:  # it fails alone, or only together
            name, row, group = entries[0]
            failure = FailedCall(
                probe=name,
                row=self.cases[row].row,
                text=group.completions[0].text,
                code=result.code,
                message=result.message,
                fix=result.fix,
            )
            self.failures.append(failure)

    @property
    def _is_hopeless(self) -> bool:
        """Whether calls fail in a way that splitting them tells no more about."""
        codes = [failure.code for failure in self.failures]
        return codes.count("W016") >= 2 or not (ENDLESS - {"W016"}).isdisjoint(codes)


def group_of(case: ProbeCase, texts: Sequence[str]) -> Group:
    """Completions of a row."""
    text = case.prompt_text
    content = case.prompt
    columns = case.columns
    prompt = Prompt(id=case.row, row=case.row, token_ids=(), text=text, content=content, columns=columns)
    completions = (
        Completion(token_ids=_token_ids(text), logps=(), finish="stop", text=text, policy_step=0) for text in texts
    )
    return Group(prompt=prompt, completions=tuple(completions))


def _token_ids(text: str) -> tuple[int, ...]:
    """Made up, as there is no tokenizer: one for each piece of at most four letters, the same for the same piece.

    >>> len(_token_ids("nothing new")), _token_ids("a a")[0] == _token_ids("a a")[1]
    (3, True)
    """
    return tuple(zlib.crc32(piece.encode()) % 50_000 for piece in re.findall(r"\w{1,4}|[^\w\s]", text))
