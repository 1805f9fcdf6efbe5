"""Calls of the reward under test: in this process, or in a worker that is killed at its limit.

    caller = WorkerCaller(Source(loader="podium.recipe.rewards:find_reward", arguments=("correct", {})))
    caller.call(groups)         # a CallOutcome: values, or the problem that came instead
    session = Session(caller=caller, cases=cases, budget_seconds=60.0)
    session.scores({"empty text": [""] * len(cases)})

All calls go through `podium.rewards.score`, so the function gets what it gets in training. Which calls a session makes
does not depend on the time that they take: where it runs out, nothing is known.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import math
import random
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from podium.data.columns import SERVICES
from podium.errors import PodiumError, RewardError
from podium.isolation.functions import seed, unwrapped
from podium.isolation.workers import Unanswered, Worker
from podium.records import Completion, Group, Prompt
from podium.rewards.from_file import FileReward
from podium.rewards.model import RewardModel
from podium.rewards.resolve import ENVIRONMENTS, Reward, reads_environments, resolve_rewards
from podium.rewards.score import CallSettings, StandIns, score
from podium.tester.cases import NOT_COLUMNS, ProbeCase

FIRST_CALL_SECONDS = 30.0
"""Least limit of the first call: it may import libraries or load a model."""
LOAD_SECONDS = 120.0
"""Limit of importing the function."""
GRACE_SECONDS = 2.0
"""After the limit, for the worker to end the process of a function from a file itself."""
NOT_PLAYED = "not played"
"""In place of the code of an error: the function looks into the environment of a completion."""
MAX_RESTARTS = 6
"""Hangs and crashes after which no more calls are made."""
MOST_LETTERS = 100_000
"""Greatest number of characters of one call."""
MOST_COMPLETIONS = 128
"""Greatest number of completions of one call."""
MODEL_LETTERS = 300
"""Greatest length of a text for a reward model, which may have no positions for longer ones."""
REPEATED_SECONDS = 0.5
"""Seconds of a timed call below which it is timed again."""
ENDLESS = frozenset({"W002", "W003", "W004", "W005", "W016", "W012", "W014"})
"""Codes of failures that hold of every call, so that nothing more can be learnt."""

Scores = Mapping[str, np.ndarray]
"""By name of a probe or form: one value a row, NaN where there is none."""
Texts = Mapping[str, Sequence[str | None]]
"""By name: one completion a row, None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """The values of one call, or the finding that came instead."""

    values: Sequence[float] | None = None
    """One for each completion, NaN for None."""
    code: str = ""
    message: str = ""
    fix: str = ""
    """The error's fix, where it has one."""
    seconds: float = 0.0
    mutated: Sequence[str] = ()
    """Arguments that the function changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInfo:
    """The part of a `Reward` that can cross to another process: all but the function."""

    name: str
    where: str
    wants: frozenset[str] | None
    needs: tuple[str, ...]
    code_text: str
    """The function's source and settings, for the tags and columns they name; empty where Python does not have it."""
    is_model: bool
    """A reward model: its scores are a matter of degree, and its texts have a greatest length."""

    def __str__(self) -> str:
        return f"reward function `{self.name}`" + (f" ({self.where})" if self.where else "")

    def asked_columns(self, columns: Iterable[str]) -> tuple[str, ...]:
        """Columns of the data that the signature names; with `**kwargs` also those in its code, as `x["name"]`."""
        named = {*(self.needs if self.wants is None else self.wants)}
        if self.wants is None:
            named |= set(re.findall(r"""(?:\[|\.get\()["'](\w+)["']""", self.code_text))
        return tuple(column for column in columns if column in named and column not in NOT_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The function for a worker: `loader` is `module:function`, called with `arguments`."""

    loader: str
    arguments: tuple[Any, ...]
    limit_seconds: float = 10.0
    environments: bool = False
    """Whether completions of the run have environments."""


class LocalCaller:
    """Calls a function of this process, which is waited for as in training."""

    can_restart = False
    """Whether `close` makes the function forget its earlier calls."""

    def __init__(self, reward: Reward, limit_seconds: float, *, environments: bool = False) -> None:
        """`environments`: whether completions of the run have any."""
        self.reward = reward
        self.limit_seconds = limit_seconds
        self.environments = environments
        self.info = info_of(reward)
        self._is_first = True

    def call(self, groups: Sequence[Group], *, random_seed: int = 0, check_inputs: bool = False) -> CallOutcome:
        """One call, as `call`; the random generators of the process are afterwards as they were."""
        limit = max(self.limit_seconds, FIRST_CALL_SECONDS if self._is_first else 0.0)
        python_state = random.getstate()
        numpy_state = np.random.get_state()
        result = call(
            self.reward,
            groups,
            limit,
            random_seed=random_seed,
            check_inputs=check_inputs,
            environments=self.environments,
        )
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        self._is_first = self._is_first and bool(result.code)
        return result

    def close(self) -> None:
        """A function of this process keeps its state."""


class WorkerCaller:
    """Calls a function that a worker loads; the worker is killed when it hangs.

    Raises:
        RewardError: the loader's own error, or W013.
    """

    can_restart = True

    def __init__(self, source: Source) -> None:
        self.source = source
        self._worker = Worker(target=f"{__name__}:answer", variables=None, output="kept")
        self._num_lost = 0
        self._first: Sequence[Group] | None = None
        """Groups of the first call that went well; a new process makes that call before others."""
        reply = self._worker.ask({"source": source, "call": None}, LOAD_SECONDS)
        if isinstance(reply, Unanswered) and reply.has_ended:
            raise RewardError("\n".join(["loading the reward ended its process", *_last_words(reply)]), code="W013")
        if isinstance(reply, Unanswered):
            self.close()
            raise RewardError(reply.how, code=reply.code or "W013", fix=reply.fix)
        wants = None if reply["wants"] is None else frozenset(reply["wants"])
        self.info = RewardInfo(**{**reply, "wants": wants, "needs": tuple(reply["needs"])})

    def call(self, groups: Sequence[Group], *, random_seed: int = 0, check_inputs: bool = False) -> CallOutcome:
        """One call, as `call`; a process that was lost before is started again."""
        if self._num_lost >= MAX_RESTARTS:
            return CallOutcome(code="W016", message="not asked: too many calls hung or crashed")
        patient = max(self.source.limit_seconds, FIRST_CALL_SECONDS)
        if self._first is None:
            result = self._exchange(groups, patient, random_seed, check_inputs=check_inputs)
            self._first = None if result.code else groups
            return result
        if not self._worker.alive:  # what took long at the first call takes long again
            self._exchange(self._first, patient)
        return self._exchange(groups, self.source.limit_seconds, random_seed, check_inputs=check_inputs)

    def _exchange(
        self, groups: Sequence[Group], limit: float, random_seed: int = 0, *, check_inputs: bool = False
    ) -> CallOutcome:
        start = time.perf_counter()
        loading = 0.0 if self._worker.alive else LOAD_SECONDS
        request = {"source": self.source, "call": (groups, limit, random_seed, check_inputs)}
        reply = self._worker.ask(request, limit + GRACE_SECONDS + loading)
        if not isinstance(reply, Unanswered):
            return CallOutcome(**reply)
        if not reply.has_ended:
            return CallOutcome(code="W013", message=reply.how)
        self._num_lost += 1
        how = f"did not return within {limit:g} s" if reply.cause == "limit" else reply.how
        message = "\n".join([f"{self.info} {how}", *_last_words(reply)])
        code = "W016" if reply.cause == "limit" else "W017"
        return CallOutcome(code=code, message=message, seconds=time.perf_counter() - start)

    def close(self) -> None:
        self._worker.kill()


_OWN = str(Path(__file__).parents[1])


def _last_words(lost: Unanswered) -> Sequence[str]:
    """The user's outermost frame, or the last lines that the process printed."""
    users = [f"  {frame}" for frame in lost.trace if _OWN not in frame and not frame.startswith('File "<')]
    return users[:1] or [f"  {line}" for line in lost.output[-12:]]


def answer(request: Mapping[str, Any], _: Callable[[int], None]) -> Iterator[Mapping[str, Any]]:
    """In the worker: the result of a call, or without one the description of the function."""
    reward = _load(request["source"])
    info = info_of(reward)
    if request["call"] is None:
        yield {**asdict(info), "wants": None if info.wants is None else sorted(info.wants)}
        return
    groups, limit, random_seed, check_inputs = request["call"]
    result = call(
        reward,
        groups,
        limit,
        random_seed=random_seed,
        check_inputs=check_inputs,
        environments=request["source"].environments or reads_environments(info.code_text),
    )
    yield asdict(result)


_loaded: list[Reward] = []
"""The function of this worker, once it is there."""


def _load(source: Source) -> Reward:
    if not _loaded:
        module, _, name = source.loader.partition(":")
        _loaded.extend(resolve_rewards([getattr(importlib.import_module(module), name)(*source.arguments)]))
    return _loaded[0]


RewardCaller = LocalCaller | WorkerCaller


def info_of(reward: Reward) -> RewardInfo:
    """The description of a reward."""
    given = reward.function.keywords if isinstance(reward.function, functools.partial) else {}
    settings = " ".join(map(str, given.values()))
    function = unwrapped(reward.function)
    return RewardInfo(
        name=reward.name,
        where=reward.where,
        wants=reward.wants,
        needs=reward.needs,
        code_text=f"{_code_of(function)}\n{settings}",
        is_model=isinstance(reward.function, RewardModel),
    )


def _code_of(function: Any) -> str:
    try:
        if not isinstance(function, FileReward):
            return inspect.getsource(inspect.unwrap(function if inspect.isroutine(function) else type(function)))
        text = function.path.read_text(encoding="utf-8")
        named = (node for node in ast.parse(text).body if getattr(node, "name", None) == function.attribute)
        return next((ast.get_source_segment(text, node) or "" for node in named), text)
    except (OSError, TypeError, ValueError, SyntaxError):
        return ""


def call(
    reward: Reward,
    groups: Sequence[Group],
    limit_seconds: float,
    *,
    random_seed: int = 0,
    check_inputs: bool = False,
    environments: bool = False,
) -> CallOutcome:
    """One call in this thread, or in the worker of a file; every `PodiumError` becomes a result.

    Args:
        random_seed: of `random` and numpy's global generator.
        check_inputs: whether to look for changes to the arguments afterwards.
        environments: whether completions of the run have any; the result is `NOT_PLAYED` where the function looks into
            one, since the texts of the test have none.
    """
    if not groups:
        return CallOutcome(values=())
    seed(random_seed)
    changed: list[str] = []
    if check_inputs and not reward.is_async:
        reward = replace(reward, function=_watched(reward.function, changed))
    played = StandIns(groups) if environments else None
    start = time.perf_counter()
    try:
        scored = score(groups, [reward], settings=CallSettings(limit=limit_seconds), environments=played)
    except PodiumError as error:
        code = error.code if isinstance(error, RewardError) else "W010"
        result = CallOutcome(code=code, message=error.what, fix=error.fix, seconds=time.perf_counter() - start)
    else:
        seconds = time.perf_counter() - start
        values = np.concatenate([group.rewards_GK[:, 0] for group in scored])
        result = CallOutcome(values=values.tolist(), seconds=seconds, mutated=changed)
    if played is not None and played.asked:
        return CallOutcome(code=NOT_PLAYED)
    return result


def _watched(function: Any, changed: list[str]) -> Any:
    """The function, noting which of its arguments are other than before."""

    def watched(**arguments: Any) -> Any:
        data = {name: value for name, value in arguments.items() if name not in (*SERVICES, ENVIRONMENTS)}
        before = copy.deepcopy(data)
        answer = function(**arguments)
        changed.extend(name for name, value in data.items() if not _same(value, before[name]))
        return answer

    return watched


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arrays inside
        return repr(one) == repr(other)


# ---- sessions ----

Entry = tuple[str, int, Group]
"""Name and row of a completion to score, and the completion as a group of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall:
    """A call that gave no values; `message` is what was raised, with the user's frames."""

    probe: str
    row: int
    text: str
    code: str
    message: str
    fix: str = ""


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

    def call(self, groups: Sequence[Group], *, random_seed: int = 0, check_inputs: bool = False) -> CallOutcome:
        """One call, as long as there is time. Raises `NotPlayedError`."""
        if self.is_over:
            self.num_skipped += sum(len(group.completions) for group in groups)
            return CallOutcome()
        result = self.caller.call(groups, random_seed=random_seed, check_inputs=check_inputs)
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
            together = [text for texts in (*calls[-1].values(), made) for text in texts if text is not None]
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
