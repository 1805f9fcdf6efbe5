r"""Rewards for the right formula, whichever way it is written: `\frac{1}{2}`, `0.5` and `1/2` are the same.

By math-verify, in processes that can be killed: a completion that takes the computer algebra more than five seconds is
wrong. Each takes plain and chat completions.

    verdicts = compare([Formula(gold=r"\frac{1}{3}", text=r"\boxed{1/3}")], timeout_seconds=5)

Computer algebra on a model's text may run for ever, in C code that no alarm in Python ends, and an alarm works in the
main thread only. So every formula is given to a worker process; one that is not done in time is killed, a new one takes
its place, and the rest goes on. Processes stay for the next round.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from podium.data.extract import Extract, extractor, normal, placed, text_of
from podium.errors import ConfigError, RewardError
from podium.isolation.machine import cores
from podium.isolation.workers import Pool, Unanswered, Worker, pool_of
from podium.rewards.answers import golds_of
from podium.rewards.reading import WRITTEN, Unit, number_of, unit_of, words

LogExtra = Callable[[str, list[Any]], None]


def math_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    log_extra: LogExtra | None = None,
    *,
    extract: Extract = "boxed",
    timeout_seconds: float = 5.0,
) -> list[float | None]:
    r"""1 where the final answer is the same formula as the `answer` column, by math-verify.

    `extract` names the place of the final answer (`podium.data.extract`); what stands elsewhere is not read. 0 for a
    completion without that place, for one that takes longer than `timeout_seconds`, has another unit, words that the
    answer does not have, or is a chain of unequal sides (docs/rewards.md). Numbers are compared here, everything else
    by math-verify. The column's answer is what is in `\boxed{}` or follows `####`, else all of it. None for a column
    that cannot be read.

    >>> math_match([r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{2}", "1/2"], answer=[r"\frac{1}{2}"] * 4)
    [1.0, 1.0, 0.0, 0.0]
    >>> math_match(["<answer>$x + 1$</answer>"], answer=["1 + x"], extract="tag")
    [1.0]
    """
    take = placed(extract)
    golds = [[gold for one in golds_of(entry) if (gold := _tidy(_gold_of(str(one)) or ""))] for entry in answer]
    texts = [_tidy(take(text_of(completion)) or "") or None for completion in completions]
    return _scores(texts, golds, timeout_seconds, log_extra, shown=answer, reads=_read)


_gold_of = extractor(["boxed", "####", "text"])
_TIDIED = [(re.compile(pattern), plain) for pattern, plain in WRITTEN["tidied"]]


def _tidy(formula: str) -> str:
    """A formula in plain signs and one way of writing, without what is around it."""
    formula = normal(formula)
    for pattern, plain in _TIDIED:
        formula = pattern.sub(plain, formula)
    return formula.strip()


def _read(text: str, gold: str) -> bool | list[Formula]:
    """Whether an answer is right where that needs no algebra, or else what must all be equal.

    A chain of equations must be right in each of its sides; a name at its beginning (`x =`, `P(A) =`) is none of them.
    """
    if text == gold or _worded(text) == _worded(gold):
        return True
    if len(text) > LONGEST:
        return False
    if _is_no_answer(text, gold):
        return False
    if (verdict := _equal_numbers(text, gold)) is not None:
        return verdict
    if "," in gold:  # `{2,1}` are two numbers there
        text = re.sub(r",(?!\d{3}(?!\d))\s*", ", ", text)
    sides = [text] if "=" in gold else _NAMED.sub(r"\1", text).split("=")
    verdicts = [_side(side.strip(), gold) for side in sides] if len(sides) <= 50 else [False]
    if False in verdicts or all(verdict is True for verdict in verdicts):
        return False not in verdicts
    return [formula for formula in verdicts if isinstance(formula, Formula)]


LONGEST = 4000
"""Characters of a formula; a longer one is no answer."""
_NAMED = re.compile(
    r"(^|,|\\text\s*\{\s*(?:and|or)\s*\})\s*"
    r"(?:\\(?:text|mathrm|overline)\s*\{[^{}]*\}|\|?[A-Z]{2,3}\|?|m?\\angle\s*[A-Z]{1,3}|\([a-z](?:,\s*[a-z]){1,3}\)"
    r"|(?:\\[a-zA-Z]+|[A-Za-z])(?:_\w|_\{\w+\})?'?(?:\([^()]{0,30}\))?|\\frac\{d\w?\}\{d\w\})\s*=(?!=)"
)
"""A name at the beginning, or behind a comma."""


def _worded(formula: str) -> str:
    """A formula that is a word or a few, in small letters; a text that no other one equals where it is none."""
    plain = re.sub(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}", r"\1", formula).strip(" .")
    return plain.lower() if re.fullmatch(r"[^\W\d_]{2,}(?: [^\W\d_]{2,}){0,5}", plain) else f"\0{formula}"


def _side(text: str, gold: str) -> bool | Formula:
    if (verdict := _equal_numbers(text, gold)) is not None:
        return verdict
    formula, unit = _measured(text)
    right, unit_of_gold = _measured(gold)
    if unit and unit_of_gold and unit != unit_of_gold:
        return False
    return Formula(gold=rf"\boxed{{{right}}}", text=rf"\boxed{{{formula}}}", repairs=True)


def _equal_numbers(text: str, gold: str) -> bool | None:
    """Whether two numbers are equal in their units; None where they are not both numbers, or algebra must decide."""
    number = number_of(text)
    right = number_of(gold)
    if number is None or right is None or not number.value.is_finite():
        return None
    value = number.in_unit_of(right)
    if value is None or (number.is_percent and not right.is_percent):  # 7% is 7 only where the gold says so
        return False
    if right.is_percent and not number.is_percent and value != right.value:
        return None
    error = float(abs(value - right.value) / max(Decimal(1), abs(right.value)))
    return None if 1e-9 < error < 1e-4 else error <= 1e-9  # between them math-verify rounds


_WORD = re.compile(
    r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}|(?<![\\A-Za-z])([A-Za-z]{4,}|not|or|and|no|if|but)(?![A-Za-z])",
    re.IGNORECASE,
)
_FUNCTIONS = frozenset(words("functions"))
_RELATION = re.compile(r"[<>]|\\(?:[gl](?:e|t|eq)|neq?|pm)(?![a-zA-Z])|\\?%")


def _is_no_answer(text: str, gold: str) -> bool:
    """Whether an answer has a question mark, words, relations or several values that the gold does not have."""
    if "?" in text and "?" not in gold:
        return True
    bare, _ = _measured(text)
    is_several = "," in gold or "\\pm" in gold
    allowed = {*_words_of(gold), *_FUNCTIONS, *(("and", "or") if is_several else ())}
    letters = set(re.sub(r"\\(?:text|math)[a-z]*\s*\{[^{}]*\}|\\[a-zA-Z]+", "", gold))
    unknown = [word for word in _words_of(bare) if word not in allowed and not (len(word) > 3 and set(word) <= letters)]
    if unknown and number_of(text) is None:
        return True
    if _is_list(bare) and not is_several:
        return True
    signs = [set(_RELATION.findall(formula)) for formula in (text, gold)]
    if (signs[0] - {"\\pm"} if is_several else signs[0]) and not signs[1] and gold[0] not in "([":
        return True
    single = [set(re.findall(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", formula)) for formula in (text, gold)]
    same_but_case = single[0] != single[1] and {x.lower() for x in single[0]} == {x.lower() for x in single[1]}
    odd = re.compile(r"\d_|\d\s*:\s*\d")  # an index, and a ratio
    return same_but_case or (odd.search(text) is not None and odd.search(gold) is None)


def _words_of(formula: str) -> list[str]:
    found = (match[1] if match[1] is not None else match[2] for match in _WORD.finditer(formula))
    return [word for text in found for word in re.findall(r"[^\W\d_]{2,}|\?", text.lower())]


def _is_list(formula: str) -> bool:
    """Whether a comma or semicolon stands between values, outside of brackets and of numbers (`1,000`, `0,5`)."""
    formula = re.sub(r"\\[,;:!]", "", formula)
    while (inner := re.sub(r"\\?[({\[][^(){}\[\]]*\\?[)}\]]", "0", formula)) != formula:
        formula = inner
    return re.search(r",(?!\d)|(?<!\d),|;|\.\.\.|\\[lc]?dots", formula) is not None


def _measured(formula: str) -> tuple[str, Unit | None]:
    """A formula without its unit, and the unit."""
    found = _UNIT.search(formula)
    if found is None or not formula[: found.start()].strip():
        return formula, None
    power = f"^{found[4]}" if found[4] else ""
    unit = unit_of((found[1] or found[2] or found[3]).strip(" {}").replace("{", "") + power)
    return (formula, None) if unit is None else (formula[: found.start()], unit)


_UNIT = re.compile(
    r"(?<=[\d})\]a-z\s~,])(?:[\s~]|\\[,;: ])*(?:\\(?:text|mathrm|textrm)\s*\{\s*([^{}\d]+?)\s*\}|(\^\{?\\circ\}?)|"
    rf"(?<=[\d\s])({'|'.join(re.escape(unit) for unit in words('units') if unit.isalpha())})\b)(?:\^\{{?(\d)\}}?)?$"
)


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[Any], log_extra: LogExtra | None = None
) -> list[float | None]:
    r"""TRL's `accuracy_reward`: 1 where the LaTeX in the completion equals the `solution` column, by math-verify.

    None where the solution cannot be parsed. TRL's takes chat completions only, this one plain text too; and a list of
    solutions, each of which is right.

    >>> accuracy_reward([r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"], solution=[r"\frac{1}{3}", r"\frac{1}{3}"])
    [1.0, 0.0]
    >>> accuracy_reward([r"\boxed{0.5}", r"\boxed{0.5}"], solution=[["1", r"\frac{1}{2}"], float("nan")])
    [1.0, None]
    """
    return _scores(
        [text_of(completion) for completion in completions], _texts_of(solution), 5.0, log_extra, shown=solution
    )


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[Any],
    log_extra: LogExtra | None = None,
    *,
    reasoning_delimiters: Sequence[str] | None = None,
) -> list[float | None]:
    r"""TRL's `reasoning_accuracy_reward`: `accuracy_reward` of what follows `</think>`; 0 where nothing does.

    `reasoning_delimiters` are the marks after which the final answer may stand; the first of them that there is counts.

    >>> reasoning_accuracy_reward([r"<think>so</think> \boxed{4}", r"\boxed{4}"], solution=["4", "4"])
    [1.0, 0.0]
    """
    marks = ["</think>"] if reasoning_delimiters is None else list(reasoning_delimiters)
    whole = [text_of(completion) for completion in completions]
    texts = [next((text.split(mark)[-1] for mark in marks if mark in text), None) for text in whole]
    return _scores(texts, _texts_of(solution), 5.0, log_extra, shown=solution, without="[incomplete reasoning]")


def _texts_of(solution: Sequence[Any]) -> list[list[str]]:
    return [[str(one) for one in golds_of(entry)] for entry in solution]


def _scores(
    texts: Sequence[str | None],
    golds: Sequence[Sequence[str]],
    timeout_seconds: float,
    log_extra: LogExtra | None,
    shown: Sequence[Any],
    without: str = "[no answer]",
    reads: Callable[[str, str], bool | list[Formula]] = lambda text, gold: [Formula(gold=gold, text=text)],
) -> list[float | None]:
    """1 where one of a row's golds is met; None where none of them can be read.

    0 where there is no text (`without` says so in the table).
    """
    rows = list(zip(texts, golds, strict=True))
    read = [[] if text is None else [reads(text, gold) for gold in own] for text, own in rows]
    formulas = [formula for known in read for outcome in known if isinstance(outcome, list) for formula in outcome]
    verdicts = iter(compare(formulas, timeout_seconds=timeout_seconds))
    found: list[tuple[float | None, str, str]] = []
    for (text, own), known in zip(rows, read, strict=True):
        if text is None and own:
            found.append((0.0, without, without))
            continue
        each_gold = [
            (float(outcome), gold, text or "") if isinstance(outcome, bool) else _row([next(verdicts) for _ in outcome])
            for gold, outcome in zip(own, known, strict=True)
        ]
        unread = (None, "[unparseable]", "[skipped]")
        found.append(max(each_gold, key=lambda one: -1.0 if one[0] is None else one[0], default=unread))
    if log_extra is not None:
        log_extra("solution", list(shown))
        log_extra("gold_parsed", [gold for _, gold, _ in found])
        log_extra("answer_parsed", [answer for _, _, answer in found])
    return [score for score, _, _ in found]


def _row(verdicts: Sequence[Verdict]) -> tuple[float | None, str, str]:
    """The reward, and how gold and answer were understood: the first side that is not right, or else the last."""
    verdict = next((one for one in verdicts if not one.correct), verdicts[-1])
    if verdict.correct is None:
        return None, "[unparseable]", "[skipped]"
    nothing = "[took too long]" if verdict.timed_out else "[unparseable]"
    return float(verdict.correct), verdict.gold, verdict.answer or nothing


MAX_WORKERS = 4
START_SECONDS = 60.0
"""A worker imports sympy before its first formula."""
SLOW_SECONDS = 20.0
"""Once formulas of one call have run into the limit for so long together, the limit falls to a fifth."""

_MAKE = functools.partial(Worker, target=f"{Path(__file__).with_name('math_worker.py')}:answer", output="dropped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """One comparison."""

    gold: str
    """The right answer."""
    text: str
    r"""The text with the answer, as LaTeX between dollars or in `\boxed{}`."""
    repairs: bool = False
    r"""Whether `\frac12` and `\sqrt2` are read as LaTeX reads them; TRL's rewards do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a comparison."""

    correct: bool | None
    """None: the gold could not be read, or not in time."""
    gold: str = ""
    answer: str = ""
    """As they were understood, for a table; empty where they were not."""
    timed_out: bool = False


def compare(formulas: Sequence[Formula], *, timeout_seconds: float = 5.0) -> list[Verdict]:
    """One verdict for each formula, in their order. An answer that takes longer, or takes all memory, is not correct.

    Raises `ConfigError` where math-verify is not installed, `RewardError` where no worker can be started.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("comparing formulas needs math-verify: pip install 'podium[math]'")
    work = _Comparisons(timeout_seconds=timeout_seconds, waiting=deque(dict.fromkeys(formulas)))
    pool = _pool(os.getpid())
    with pool.lock:
        work.share_out(pool.take(min(MAX_WORKERS, cores(), len(work.waiting))))
    return [work.verdicts[formula] for formula in formulas]


@functools.cache
def _pool(process_id: int) -> Pool[Worker]:
    """Held for good; a forked child has its own."""
    return pool_of(("formulas",), _MAKE)


@dataclass(slots=True, kw_only=True)
class _Comparisons:
    """The distinct formulas of one call, and their verdicts so far."""

    timeout_seconds: float
    waiting: deque[Formula]
    verdicts: dict[Formula, Verdict] = field(default_factory=dict)
    lost_seconds: float = 0.0
    bad_golds: set[str] = field(default_factory=set)
    """Golds that ended a worker: they are not tried again."""

    def share_out(self, workers: Sequence[Worker]) -> None:
        """Every worker takes the next formula that waits, until none does. An interrupt ends the workers."""
        for worker in workers:  # here, since a worker may end with the thread that starts it
            worker.start()
        with ThreadPoolExecutor(max(1, len(workers))) as threads:
            try:
                list(threads.map(self._work, workers))
            except BaseException:
                self.waiting.clear()
                for worker in workers:
                    worker.end()
                raise

    def _work(self, worker: Worker) -> None:
        is_ready = False
        while self.waiting:
            if not (is_ready and worker.alive) and isinstance(worker.ask(None, START_SECONDS), Unanswered):
                fix = "try `python -c 'import math_verify'`"
                raise RewardError(f"the process that compares formulas does not start: {fix}", cure=fix)
            is_ready = True
            try:
                formula = self.waiting.popleft()
            except IndexError:  # another thread was faster
                return
            is_bad = formula.gold in self.bad_golds
            self.verdicts[formula] = Verdict(correct=None, timed_out=True) if is_bad else self._compare(worker, formula)

    def _compare(self, worker: Worker, formula: Formula) -> Verdict:
        """The worker first replies how it read the gold, then how the answer compares; each has its time."""
        limit = self.timeout_seconds if self.lost_seconds < SLOW_SECONDS else self.timeout_seconds / 5
        gold = worker.ask({**dataclasses.asdict(formula), "timeout_seconds": limit}, limit)
        if isinstance(gold, Unanswered):
            self.lost_seconds += limit * (gold.cause == "limit")
            self.bad_golds.add(formula.gold)
            return Verdict(correct=None, timed_out=True)
        if not gold["gold"]:
            return Verdict(correct=None)
        answer = worker.reply(time.monotonic() + limit)
        if isinstance(answer, Unanswered):
            self.lost_seconds += limit * (answer.cause == "limit")
            return Verdict(correct=False, gold=gold["gold"], timed_out=True)
        return Verdict(correct=answer["correct"], gold=gold["gold"], answer=answer["answer"])
