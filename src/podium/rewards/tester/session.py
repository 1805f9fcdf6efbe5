"""Calls of one reward function within a budget of time, and what went wrong with them.

Knows completions and values; what is asked, and why, is `gather`'s.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from podium.records import Completion, Group, Prompt
from podium.rewards.tester.asking import Answer, Request, RewardCaller
from podium.rewards.tester.cases import Case
from podium.rewards.tester.evidence import ENDLESS, Evidence, Failure, Scores, Texts

MOST_LETTERS = 100_000
"""Of one call."""

MODEL_LETTERS = 300
"""Of a text for a reward model: longer ones it may have no positions for."""


@dataclass(slots=True, kw_only=True)
class Session:
    """Calls, and what went wrong with them."""

    asker: RewardCaller
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
        """The evidence, with what is known of the calls themselves."""
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
        most = MODEL_LETTERS if self.asker.described.is_model else math.inf
        keys = [
            (name, row)
            for name, made in texts.items()
            for row, text in enumerate(made)
            if text is not None and len(text) <= most
        ]
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
