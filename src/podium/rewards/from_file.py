"""Reward functions that stay in their file: called in worker processes, which a limit can end.

    brevity = file_reward("my_rewards.py:brevity", args={"limit": 200})
    brevity(completions=["7"])

The file is never imported into the run's own process, so nothing in it can take the run down: an endless loop, a crash
in C code and `os._exit` end the worker, and the next call starts a fresh one.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from podium.errors import ConfigError, RewardError
from podium.isolation.user_files import find_file
from podium.isolation.workers.process import Lost, Pool, Worker, exchange, framed, pool_of
from podium.isolation.workers.replies import InvalidValue, Outcome, Returned, Stopped, from_json

LOAD_SECONDS = 60.0
"""Longest that the import of a file may take."""

SERVICES = ("log_extra", "log_metric")

FOR_EVER = 1e8
"""Seconds."""

LATEST_LOGS = 100
"""Entries of `trainer_state.log_history` that a worker gets to see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a call, and what the function logged."""

    outcome: Outcome
    extras: Sequence[tuple[str, list[Any]]] = ()
    metrics: Sequence[tuple[str, float]] = ()


class FileReward:
    """A function in a file, as a reward function: same name and signature, called elsewhere.

    Raises `ConfigError` where the file cannot be imported or has no such function.
    """

    def __init__(
        self,
        path: Path,
        attribute: str,
        *,
        args: Mapping[str, Any] | None = None,
        row_wise: bool | None = None,
        env: Sequence[str] = (),
        shown: str = "",
    ) -> None:
        self.path = path.resolve()
        self.attribute = attribute
        self.env = tuple(env)
        self._function = (str(self.path), attribute, pickle.dumps(dict(args or {})), shown or self.path.name)
        self.where = ""
        described = self._load(1)
        self.__name__ = str(described["name"])
        self.where = str(described["where"])
        self.row_wise = bool(described["row_wise"]) if row_wise is None else row_wise
        self.parameters = _parameters(described["parameters"])
        if self.parameters is not None:
            self.__signature__ = inspect.Signature(self.parameters)

    def __repr__(self) -> str:
        return f"file_reward({self.path.name}:{self.attribute})"

    def __call__(self, **arguments: Any) -> list[float | None]:
        """The values for these arguments; for use outside of a run. Raises `RewardError`."""
        services = {name: arguments.pop(name) for name in SERVICES if name in arguments}
        count = max((len(values) for values in arguments.values() if isinstance(values, (list, tuple))), default=0)
        found = self.ask(arguments, num_completions=count, services=tuple(services), limit=60.0)
        if (wrong := _in_words(found.outcome)) is not None:
            raise RewardError(f"reward function `{self.__name__}` ({self.where}) {wrong}")
        replay(found, services)
        return list(found.outcome.values)  # type: ignore[union-attr,arg-type]

    def ask(
        self,
        arguments: Mapping[str, Any],
        *,
        num_completions: int,
        services: Sequence[str],
        limit: float | None,
        num_workers: int = 1,
    ) -> Answer:
        """One call, cut over `num_workers` processes where the function judges every row by itself."""
        shares = _shares(num_completions, num_workers if self.row_wise else 1)
        self._load(len(shares))
        request = {"function": self._function, "services": tuple(services), "seed": random.getrandbits(32)}
        requests = [
            {
                **request,
                "arguments": {name: _sent(name, values, share) for name, values in arguments.items()},
                "num_completions": len(share),
            }
            for share in shares
        ]
        workers = self._workers().take(len(shares))
        messages = [_framed(each, self) for each in requests]
        replies = exchange(workers, messages, FOR_EVER if limit is None else limit)
        return _joined([_answer(reply, limit) for reply in replies], shares)

    def _workers(self) -> Pool[Worker]:
        """The workers of the file, held so that they live as long as a function of it."""
        make = functools.partial(Worker, target="podium.isolation.workers.calls:answer", variables=self.env)
        self._pool = pool_of((self.path, self.env), make)
        return self._pool

    def _load(self, count: int) -> Mapping[str, Any]:
        """Has the file imported in the first `count` workers, so that no call's limit pays for it."""
        workers = self._workers().take(count)
        fresh = [worker for worker in workers if not worker.alive or not self.where]
        replies = exchange(fresh, [framed({"function": self._function})] * len(fresh), LOAD_SECONDS)
        for reply in replies:
            if isinstance(reply, Lost):
                how = f"took more than {LOAD_SECONDS:g} s" if reply.is_overrun else reply.how
                raise ConfigError("\n  ".join([f"importing {self._function[3]} {how}", *reply.trace]))
            if "refused" in reply:
                raise ConfigError(reply["refused"], fix=reply.get("fix", ""), code=reply.get("code", ""))
        return replies[0] if replies else {}  # type: ignore[return-value]


def file_reward(
    name: str,
    *,
    args: Mapping[str, Any] | None = None,
    row_wise: bool | None = None,
    env: Sequence[str] = (),
    folder: Path | None = None,
) -> FileReward:
    """`file.py:function` as a reward function that runs in a worker process.

    Args:
        name: the file (looked for in `folder`, then in the working directory) and the function in it.
        args: given to the function at every call, or once to a class or function that makes the reward.
        row_wise: whether each value depends on its own row alone, so that `reward_workers` may share the rows out;
            None: what the function's attribute `row_wise` says, else no.
        env: names of environment variables that the function needs; others, such as keys, it does not see.
        folder: where the file is looked for first.

    Raises `ConfigError`.
    """
    file, _, attribute = name.rpartition(":")
    path = find_file(file, folder or Path())
    return FileReward(path, attribute, args=args, row_wise=row_wise, env=env, shown=file)


def replay(found: Answer, services: Mapping[str, Callable[..., None]]) -> None:
    """Hand what a function logged in its worker to the run's own `log_extra` and `log_metric`."""
    for column, values in found.extras:
        services["log_extra"](column, values)
    for name, value in found.metrics:
        services["log_metric"](name, value)


# ---- there ----


def _shares(num_completions: int, num_workers: int) -> list[range]:
    """Consecutive rows for each worker, as equal as they can be.

    >>> _shares(5, 2), _shares(1, 4)
    ([range(0, 2), range(2, 5)], [range(0, 1)])
    """
    count = max(1, min(num_workers, num_completions))
    return [range(i * num_completions // count, (i + 1) * num_completions // count) for i in range(count)]


def _sent(name: str, values: Any, share: range) -> Any:
    if name == "trainer_state":
        return _plain_state(values)
    return values[share.start : share.stop] if isinstance(values, list) else values


def _plain_state(state: Any) -> Any:
    """The fields of a `TrainerState` without its class, which would make a worker import transformers."""
    if state is None:  # scored outside a run
        return None
    fields = {key: value for key, value in vars(state).items() if type(value) in (str, bool, int, float, type(None))}
    return SimpleNamespace(**fields, log_history=list(getattr(state, "log_history", ()))[-LATEST_LOGS:])


def _framed(request: Mapping[str, Any], reward: FileReward) -> bytes:
    """The request as bytes. Raises `RewardError` for a column that cannot be sent."""
    try:
        return framed(request)
    except Exception as error:
        column = next(name for name, values in request["arguments"].items() if not _can_be_pickled(values))
        raise RewardError(
            f"reward function `{reward.__name__}` ({reward.where}): column `{column}` cannot be sent to the worker "
            f"process of its file: {error}",
            code="W017",
            fix="name only the columns you need in the signature (no `**kwargs`), or import the function and pass it "
            "itself",
        ) from error


def _can_be_pickled(value: Any) -> bool:
    try:
        return bool(pickle.dumps(value))
    except Exception:  # noqa: BLE001  any class may refuse in its own way
        return False


# ---- and back ----


def _answer(reply: Mapping[str, Any] | Lost, limit: float | None) -> Answer:
    if isinstance(reply, Lost):
        return Answer(outcome=_stopped(reply, limit))
    if "refused" in reply:
        return Answer(outcome=Stopped(how=str(reply["refused"]), fix="pass columns of plain data"))
    try:
        extras = [(str(column), list(values)) for column, values in reply["extras"]]
        metrics = [(str(name), float(value)) for name, value in reply["metrics"]]
        return Answer(outcome=from_json(reply), extras=extras, metrics=metrics)
    except (KeyError, TypeError, ValueError) as error:
        return Answer(outcome=Stopped(how=f"sent what is no reply ({error})", fix="do not write to the worker's files"))


def _stopped(lost: Lost, limit: float | None) -> Stopped:
    how = f"{lost.how} of {limit:g} s" if lost.is_overrun else lost.how
    fix = OVERRUN_FIX if lost.is_overrun else "run the function alone on this completion, to see what ends its process"
    return Stopped(how=how, fix=fix, trace=lost.trace, index=lost.index, is_overrun=lost.is_overrun)


OVERRUN_FIX = (
    "give what may hang a limit of its own (`timeout=...`), or raise `reward_timeout` (seconds a call; 0: no limit)"
)


def _in_words(outcome: Outcome) -> str | None:
    """What is wrong with a call that nobody makes for a run; None: nothing."""
    if isinstance(outcome, Returned):
        odd = next((value for value in outcome.values if isinstance(value, InvalidValue)), None)
        what = outcome.instead or (odd and f"{odd.kind} {odd.shown} as a value")
        return f"returned {what}" if what else None
    what = outcome.how if isinstance(outcome, Stopped) else f"raised {outcome.kind}: {outcome.text}"
    return "\n  ".join([what, *outcome.trace])


def _joined(answers: Sequence[Answer], shares: Sequence[range]) -> Answer:
    """The shares' answers as one: all their values, or the first thing that went wrong."""
    for answer, share in zip(answers, shares, strict=True):
        if not isinstance(answer.outcome, Returned) or answer.outcome.instead:
            return _shifted(answer, share.start)
        if len(answer.outcome.values) != len(share) and len(shares) > 1:
            came = f"{len(answer.outcome.values)} values for {len(share)} completions, its share of them"
            return Answer(outcome=Returned(instead=came, fix="return one number (or None) for each completion"))
    values = tuple(value for answer in answers for value in answer.outcome.values)  # type: ignore[union-attr]
    extras: dict[str, list[Any]] = {}
    for answer in answers:
        for column, own in answer.extras:
            extras.setdefault(column, []).extend(own)
    whole = [(column, own) for column, own in extras.items() if len(own) == shares[-1].stop]
    return Answer(outcome=Returned(values=values), extras=whole, metrics=[m for a in answers for m in a.metrics])


def _shifted(answer: Answer, start: int) -> Answer:
    outcome = answer.outcome
    index = getattr(outcome, "index", None)
    return answer if index is None else replace(answer, outcome=replace(outcome, index=index + start))


def _parameters(described: Sequence[Sequence[Any]] | None) -> list[inspect.Parameter] | None:
    if described is None:
        return None
    kinds = {kind.name: kind for kind in inspect._ParameterKind}
    empty = inspect.Parameter.empty
    return [inspect.Parameter(name, kinds[kind], default=None if has else empty) for name, kind, has in described]
