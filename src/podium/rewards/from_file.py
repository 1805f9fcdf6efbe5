"""Reward functions that stay in their file: called in worker processes, which a limit can end.

    brevity = file_reward("my_rewards.py:brevity", args={"limit": 200})
    brevity(completions=["7"])

The file is never imported into the run's own process, so nothing in it can take the run down: an endless loop, a crash
in C code and `os._exit` end the worker, and the next call starts a fresh one. That runs the code which the first one
had imported, from the file and from modules below its folder, also where these have been edited since.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from podium.errors import RewardError
from podium.errors.texts import quoted
from podium.isolation.functions import FileFunction
from podium.isolation.reward_calls import RewardCall, made_in_file
from podium.isolation.reward_results import CallResult, Failure, result_from
from podium.isolation.user_files import find_file, used_digest
from podium.isolation.workers import Pool, Reply, Unanswered, Worker, exchange, load, pool_of

logger = logging.getLogger(__name__)

SERVICES = ("log_extra", "log_metric")

LATEST_LOGS = 100
"""Entries of `trainer_state.log_history` that a worker gets to see."""


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
        self.settings = pickle.dumps(dict(args or {}))
        """The arguments that are given to the function, pickled."""
        self._function = FileFunction(path=str(self.path), name=attribute, shown=shown or self.path.name)
        self.where = ""
        self._version = _digest({"": _contents(self.path)})
        self._sources: dict[str, str] = {}
        """Text of the file and of the modules below its folder that it imports, by path; bytes as Latin-1."""
        self._said: set[str] = set()
        self._process_id = 0
        """The process whose workers have loaded the file; a forked one has its own."""
        described = self._load(1)
        self._sources = dict(described["sources"])
        self.__name__ = str(described["name"])
        self.where = str(described["where"])
        self.row_wise = bool(described["row_wise"]) if row_wise is None else row_wise
        self.parameters = _parameters(described["parameters"])
        if self.parameters is not None:
            self.__signature__ = inspect.Signature(self.parameters)

    @property
    def code(self) -> str:
        """Text of the file and of the modules below its folder that it imports."""
        return "\n".join(self._sources.values())

    @property
    def digest(self) -> str:
        """SHA-256 of the code that scores: of the file, and of the modules below its folder that it imports."""
        return _digest(self._sources)

    @property
    def used_digest(self) -> str:
        """SHA-256 of that code without what the function does not need of its file."""
        own = str(self.path)
        needed = {
            path: used_digest(text, self.attribute if path == own else "") for path, text in self._sources.items()
        }
        return _digest(needed)

    def __repr__(self) -> str:
        return f"file_reward({self.path.name}:{self.attribute})"

    def __call__(self, **arguments: Any) -> list[float | None]:
        """The values for these arguments; for use outside of a run. Raises `RewardError`."""
        count = max((len(values) for values in arguments.values() if isinstance(values, (list, tuple))), default=0)
        result = self.ask(arguments, num_completions=count, limit=None)
        failure = next((failure for failure in result.failures if failure.code not in ODD_NUMBERS), None)
        if failure is not None:
            what = f"{failure.what} as a value" if failure.kind == "value" else failure.what
            wrong = "\n  ".join([what, *failure.trace])
            raise RewardError(
                f"reward function `{self.__name__}` ({self.where}) {wrong}",
                owner=self.__name__,
                place=self.where,
                wrong=wrong,
            )
        return list(result.values)

    def in_this_process(self) -> Callable[..., Any]:
        """The function itself. For one that takes environments, which are objects that no worker has."""
        return made_in_file(self._function, self.settings)

    def ask(
        self, arguments: Mapping[str, Any], *, num_completions: int, limit: float | None, num_workers: int = 1
    ) -> CallResult:
        """One call, cut over `num_workers` processes where the function judges every row by itself."""
        services = {name: arguments[name] for name in SERVICES if name in arguments}
        columns = {name: values for name, values in arguments.items() if name not in services}
        if "trainer_state" in columns:
            columns["trainer_state"] = _plain_state(columns["trainer_state"])
        shares = _shares(num_completions, num_workers if self.row_wise else 1)
        self._load(len(shares))
        seed = random.getrandbits(32)
        requests = [
            RewardCall(
                function=self._function,
                args=self.settings,
                arguments={
                    name: values[share.start : share.stop] if isinstance(values, list) else values
                    for name, values in columns.items()
                },
                seed=seed,
                num_completions=len(share),
                services=tuple(services),
            )
            for share in shares
        ]
        replies = exchange(self._workers().take(len(shares)), requests, limit)
        if any(isinstance(reply, Unanswered) and reply.cause == "unsent" for reply in replies):
            self._refuse_unsent(columns)
        results = [_result(reply, limit) for reply in replies]
        result = results[0] if len(results) == 1 else _joined(results, shares)
        for column, values in result.extras:
            services["log_extra"](column, values)
        for name, value in result.metrics:
            services["log_metric"](name, value)
        return result

    def _refuse_unsent(self, columns: Mapping[str, Any]) -> None:
        """Raise `RewardError` for a column that cannot be pickled."""
        for column, values in columns.items():
            try:
                pickle.dumps(values)
            except Exception as error:  # any class may refuse in its own way
                raise RewardError(
                    f"reward function `{self.__name__}` ({self.where}): column `{column}` cannot be sent to the worker "
                    f"process of its file: {quoted(error)}",
                    code="W017",
                    fix="name only the columns you need in the signature (no `**kwargs`), or import the function and "
                    "pass it itself",
                    column=column,
                    error=error,
                ) from error

    def _workers(self) -> Pool[Worker]:
        """The workers of the file, held so that they live as long as a function of it."""
        make = functools.partial(Worker, target="podium.isolation.reward_calls:answer", variables=self.env)
        self._pool = pool_of((self.path, self._version, self.env), make)
        return self._pool

    def _load(self, count: int) -> Mapping[str, Any]:
        """Has the file imported in the first `count` workers, so that no call's limit pays for it."""
        workers = self._workers().take(count)
        fresh = [worker for worker in workers if not worker.alive or not self.where]
        if fresh and self._process_id == os.getpid() and any(worker.process is not None for worker in fresh):
            self._say_restart()
        self._process_id = os.getpid()
        request = RewardCall(function=self._function, args=self.settings, sources=self._sources)
        return load(fresh, request, self._function.shown)

    def _say_restart(self) -> None:
        """Say once that a worker ended, and once of each file that it goes on with the code of the start."""
        name = self.path.name
        messages = [f"The worker process of {name} ({self.__name__}) ended, and is started again."]
        messages += [
            f"{path} has changed since this run began: {name} ({self.__name__}) scores with the code of then to the "
            "end of the run. Start another run for the new one."
            for path, source in self._sources.items()
            if _contents(Path(path)) != source
        ]
        for message in messages:
            if message not in self._said:
                self._said.add(message)
                logger.warning("%s", message)


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
            None: the function's attribute `row_wise`, else no.
        env: names of environment variables that the function needs; others, such as keys, it does not see.
        folder: where the file is looked for first.

    Raises `ConfigError`.
    """
    file, _, attribute = name.rpartition(":")
    path = find_file(file, folder or Path())
    return FileReward(path, attribute, args=args, row_wise=row_wise, env=env, shown=file)


def _contents(path: Path) -> str:
    """The bytes of a file as Latin-1; empty where it cannot be read."""
    try:
        return path.read_bytes().decode("latin-1")
    except OSError:
        return ""


def _digest(sources: Mapping[str, str]) -> str:
    """SHA-256 of some files, whatever folder they are in."""
    return hashlib.sha256("\0".join(sorted(sources.values())).encode("latin-1")).hexdigest()


def _shares(num_completions: int, num_workers: int) -> list[range]:
    """Consecutive rows for each worker, as equal as they can be.

    >>> _shares(5, 2), _shares(1, 4)
    ([range(0, 2), range(2, 5)], [range(0, 1)])
    """
    count = max(1, min(num_workers, num_completions))
    return [range(i * num_completions // count, (i + 1) * num_completions // count) for i in range(count)]


def _plain_state(state: Any) -> Any:
    """The fields of a `TrainerState` without its class, which would make a worker import transformers."""
    if state is None:  # scored outside a run
        return None
    fields = {key: value for key, value in vars(state).items() if type(value) in (str, bool, int, float, type(None))}
    return SimpleNamespace(**fields, log_history=list(getattr(state, "log_history", ()))[-LATEST_LOGS:])


OVERRUN_FIX = (
    "give what may hang a limit of its own (`timeout=...`), or raise `reward_timeout` (seconds a call; 0: no limit)"
)

ODD_NUMBERS = ("W006", "W007")
"""Codes of values that are numbers, but none to train on."""


_STOPPED_FIX: Mapping[str, str] = {
    "limit": OVERRUN_FIX,
    "ended": "run the function alone on this completion, to see what ends its process",
    "refused": "pass columns of plain data",
    "unsent": "pass columns of plain data",
}


def _result(reply: Reply | Unanswered, limit: float | None) -> CallResult:
    if not isinstance(reply, Unanswered):
        return result_from(reply)
    is_overrun = reply.cause == "limit"
    failure = Failure(
        kind="stopped",
        what=f"{reply.how} of {limit:g} s" if is_overrun else reply.how,
        fix=_STOPPED_FIX[reply.cause],
        code="W016" if is_overrun else "W017",
        trace=reply.trace,
        index=reply.index,
    )
    return CallResult(failures=(failure,))


def _joined(results: Sequence[CallResult], shares: Sequence[range]) -> CallResult:
    """The shares' results as one: all their values, or the first failure of a whole share."""
    failures: list[Failure] = []
    extras: dict[str, list[Any]] = {}
    for result, share in zip(results, shares, strict=True):
        own = [
            failure if failure.index is None else replace(failure, index=failure.index + share.start)
            for failure in result.failures
        ]
        if result.failure is not None:
            return replace(result, failures=tuple(one for one in own if one.kind != "value")[:1], extras=())
        if len(result.values) != len(share):
            came = f"returned {len(result.values)} values for {len(share)} completions, its share of them"
            fix = "return one number (or None) for each completion"
            return CallResult(failures=(Failure(kind="returned", what=came, fix=fix, code="W005"),))
        failures += own
        for column, values in result.extras:
            extras.setdefault(column, []).extend(values)
    return CallResult(
        values=tuple(value for result in results for value in result.values),
        extras=tuple((column, values) for column, values in extras.items() if len(values) == shares[-1].stop),
        metrics=tuple(metric for result in results for metric in result.metrics),
        failures=tuple(failures),
    )


def _parameters(described: Sequence[Sequence[Any]] | None) -> list[inspect.Parameter] | None:
    if described is None:
        return None
    kinds = {kind.name: kind for kind in inspect._ParameterKind}
    empty = inspect.Parameter.empty
    return [inspect.Parameter(name, kinds[kind], default=None if has else empty) for name, kind, has in described]
