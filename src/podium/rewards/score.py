"""The reward boundary: groups in, one number per completion and reward function out. TRL's contract to the letter.

    scored = score(groups, resolve_rewards([format_reward, correct_reward]))

Each function is called once a round, with keyword arguments, for all completions of the round (the G of a prompt one
after the other), and only with what its signature names (all of it where there is `**kwargs`):

    function(prompts=[...], completions=[...], completion_ids=[[...], ...], <each other column>=[...],
             trainer_state=..., log_extra=f(column, values), log_metric=f(name, value)) -> one number or None each

A call in a worker process ends within `CallSettings.limit`, if there is one; one in this process is waited for. What is
not one finite number (or None) per completion stops the run with a `RewardError` that names the function, the row and
the start of the completion, or becomes what `CallSettings.on_error` sets.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from podium.errors import Finding, RewardError
from podium.errors.texts import counted
from podium.isolation.functions import unwrapped, user_traceback
from podium.isolation.reward_calls import checked_extra
from podium.isolation.reward_results import CallResult, Failure
from podium.records import Group, ScoredGroup
from podium.rewards.call import OWN_FRAMES, call_here, call_together, said_when_long
from podium.rewards.from_file import FileReward
from podium.rewards.model import RewardModel
from podium.rewards.resolve import ENVIRONMENTS, GIVEN, Reward

logger = logging.getLogger(__name__)

LogMetric = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """Settings of calls of reward functions."""

    limit: float | None = None
    """Seconds, after which a call in a worker is ended and one in this process is said to take long; None: never."""
    on_error: Literal["raise", "none"] | float = "raise"
    """Replaces a failed call, or a value that is no finite number: the end of the run, None, or a number."""
    num_workers: int = 1
    """Processes for a function from a file that judges every row by itself."""


def before_training() -> SimpleNamespace:
    """Make an object with the fields of a `TrainerState` before the first step.

    The class itself would make every worker import transformers.
    """
    return SimpleNamespace(
        epoch=0,
        global_step=0,
        max_steps=100,  # no run is known, and rewards that fade divide by its length
        num_train_epochs=1,
        num_input_tokens_seen=0,
        total_flos=0,
        log_history=[],
        logging_steps=500,
        eval_steps=500,
        save_steps=500,
        best_metric=None,
        best_global_step=None,
        is_local_process_zero=True,
        is_world_process_zero=True,
    )


def score(
    groups: Sequence[Group],
    rewards: Sequence[Reward],
    *,
    trainer_state: Any = None,
    log_metric: LogMetric | None = None,
    log_seconds: LogMetric | None = None,
    settings: CallSettings = CallSettings(),
    environments: Sequence[Any] | None = None,
) -> list[ScoredGroup]:
    """Every completion of the round by every reward function: `rewards_GK` is float64, NaN for None.

    Synchronous functions run one after the other, then the `async` ones together. `log_seconds` is told how long each
    took. `environments`: of every completion, for functions that take them; stand-ins where none was played. Raises
    `RewardError`.
    """
    if not groups:
        return []
    batch = Batch.of(groups)
    extras: dict[str, Sequence[Any]] = {}
    state = before_training() if trainer_state is None else trainer_state  # a function may read it unasked
    services: dict[str, Any] = {"trainer_state": state, "log_metric": _ignore}
    if environments is not None:
        services[ENVIRONMENTS] = list(environments)
    arguments_K = []
    for reward in rewards:
        services["log_extra"] = _extra_logger(reward, extras, len(batch))
        if log_metric is not None:
            services["log_metric"] = functools.partial(_log_own, reward, log_metric)
        arguments_K.append(_arguments(reward, batch, services))
    results: dict[int, CallResult] = {}
    for k, result in _results(rewards, arguments_K, len(batch), settings):
        if log_seconds is not None:
            log_seconds(f"reward/{rewards[k].name}_seconds", result.seconds)
        results[k] = fitted(result, len(batch))
        if results[k].failures and settings.on_error == "raise":
            cause = result.error
            error = error_of(results[k], rewards[k], batch)
            raise error from cause and cause.with_traceback(user_traceback(cause, OWN_FRAMES))
    results_K = [results[k] for k in range(len(rewards))]
    rewards_RK = np.array([result.values for result in results_K], np.float64).reshape(len(rewards), len(batch)).T
    ends = itertools.accumulate(len(group.completions) for group in groups)
    places_P = [slice(end - len(group.completions), end) for group, end in zip(groups, ends, strict=True)]
    if settings.on_error != "raise":
        rewards_RK = _with_failures(rewards_RK, results_K, rewards, places_P, batch, settings, log_metric or _ignore)
    names_K = tuple(reward.name for reward in rewards)
    return [
        ScoredGroup(
            group=group,
            names_K=names_K,
            rewards_GK=rewards_RK[own].copy(),
            extras={column: tuple(values[own]) for column, values in extras.items()},
        )
        for group, own in zip(groups, places_P, strict=True)
    ]


def _extra_logger(
    reward: Reward, columns: dict[str, Sequence[Any]], num_completions: int
) -> Callable[[str, Sequence[Any]], None]:
    """The `log_extra` of one reward function, which adds to `columns`."""
    own: set[str] = set()

    def log_extra(column: str, values: Sequence[Any]) -> None:
        values = checked_extra(column, values, num_completions)
        # Two functions may use one name for different things: a column never mixes them.
        taken = column not in own and columns.get(column, values) != values
        key = f"{column} ({reward.name})" if taken else column
        own.add(key)
        columns[key] = values

    return log_extra


_renamed: set[str] = set()


def _log_own(reward: Reward, log_metric: LogMetric, name: str, value: float) -> None:
    """A user's metric, as `custom/NAME` where Podium writes NAME itself: the two would be averaged together.

    Functions that come with Podium may log under names of its metrics.
    """
    from podium.algorithm.metrics import describe

    function = unwrapped(reward.function)
    module = str(getattr(function, "__module__", ""))
    comes_with_podium = not isinstance(function, FileReward) and module.startswith("podium.rewards.")
    if comes_with_podium or (describe(name) is None and name not in _OF_TRANSFORMERS):
        log_metric(name, value)
        return
    if name not in _renamed:
        _renamed.add(name)
        what = f"{reward} logs the metric `{name}`, a name that Podium writes itself; it is recorded as `custom/{name}`"
        logger.warning("%s. Give it a name of its own, such as `my_%s`.", what, name.rpartition("/")[2])
    log_metric(f"custom/{name}", value)


_OF_TRANSFORMERS = ("loss", "grad_norm", "learning_rate", "epoch", "train_loss", "train_runtime", "eval_loss")
"""Names that the base trainer writes."""


def _ignore(name: str, value: float) -> None:
    """A sink for metrics that are not collected."""


def _arguments(reward: Reward, batch: Batch, services: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call: copies, so that the function can change nothing but its own."""
    columns = {name: getattr(batch, name) for name in GIVEN[:3]}
    wanted = {**batch.columns, **columns, **services}
    if reward.wants is not None:
        wanted = {name: value for name, value in wanted.items() if name in reward.wants}
    if isinstance(reward.function, FileReward):  # with `**kwargs`: what only this process has stays here
        wanted.pop(ENVIRONMENTS, None)
    return {name: value if name in services else _copied(value) for name, value in wanted.items()}


def _copied(value: Any) -> Any:
    """A deep copy of what is plain data. Other objects are passed as they are: copying them may be wrong, or costly."""
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(entry) for entry in value)
    return value.copy() if isinstance(value, np.ndarray) else value


class StandIns(list[Any]):
    """Objects in place of the environments of completions that were not played: in a test, a baseline, a second call.

    environments = StandIns(groups)
    score(groups, [reward], environments=environments)
    environments.asked         # whether the function looked into one, so that its values mean nothing
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.asked = False
        """Whether anything of any of them was read, whatever the function did with the error that this raises."""

        def ask(_: object, *arguments: object) -> Any:
            self.asked = True
            raise AttributeError("this completion was not played in an environment")

        reads = ("__getattribute__", "__getitem__", "__iter__", "__len__", "__call__", "__contains__")
        stand_in = type("Environment", (), dict.fromkeys(reads, ask))
        super().__init__(stand_in() for group in groups for _ in group.completions)


def repeat_findings(
    scored: Sequence[ScoredGroup],
    rewards: Sequence[Reward],
    *,
    trainer_state: Any = None,
    settings: CallSettings = CallSettings(),
    environments: bool = False,
) -> Iterator[Finding]:
    """W111 for each function that scores the same completions otherwise a second time.

    Not asked are reward models, `async` functions, those that say `is_random = True`, and those that look into the
    `environments` of the run, which the first call may have changed.
    """
    groups = [group.group for group in scored]
    for reward in rewards:
        function = unwrapped(reward.function)
        if isinstance(function, RewardModel) or reward.is_async or getattr(function, "is_random", False):
            continue
        if ENVIRONMENTS in (reward.needs if reward.wants is None else reward.wants):
            continue
        played = StandIns(groups) if environments else None
        try:
            again = score(groups, [reward], trainer_state=trainer_state, settings=settings, environments=played)
        except RewardError:  # reported at the next round, if it is so again
            continue
        if played is not None and played.asked:
            continue
        first_R = np.concatenate([group.rewards_GK[:, group.names_K.index(reward.name)] for group in scored])
        second_R = np.concatenate([group.rewards_GK[:, 0] for group in again])
        [other] = np.nonzero(~np.isclose(first_R, second_R, rtol=1e-4, atol=1e-6, equal_nan=True))
        if other.size:
            values = f"{first_R[other[0]]:.3g}, then {second_R[other[0]]:.3g}".replace("nan", "None")
            yield Finding(
                code="W111",
                severity="warning",
                what=f"{reward} gave the same completion {values} ({other.size} of {first_R.size} completions differ)",
                why="chance, or what earlier calls left behind, is part of the score and noise in every advantage",
                fix="take the chance out, or seed it with the text itself; `is_random = True` on the function "
                "where it is meant",
                facts={"reward": reward, "values": values, "size": other.size, "first_r_size": first_R.size},
            )


def _results(
    rewards: Sequence[Reward], arguments_K: Sequence[Mapping[str, Any]], num_completions: int, settings: CallSettings
) -> Iterator[tuple[int, CallResult]]:
    """Call the functions that are not `async` in order, then the others together.

    Yields the number of each function and the result of its call.
    """
    for k, (reward, arguments) in enumerate(zip(rewards, arguments_K, strict=True)):
        if reward.is_async:
            continue
        start = time.perf_counter()
        if isinstance(reward.function, FileReward):
            with said_when_long(str(reward)):
                result = reward.function.ask(
                    arguments, num_completions=num_completions, limit=settings.limit, num_workers=settings.num_workers
                )
        else:
            result = call_here(reward, arguments, long_after=settings.limit)
        yield k, replace(result, seconds=time.perf_counter() - start)
    if waiting := [k for k, reward in enumerate(rewards) if reward.is_async]:
        calls = [(rewards[k], arguments_K[k]) for k in waiting]
        yield from zip(waiting, call_together(calls, long_after=settings.limit), strict=True)


def _with_failures(
    rewards_RK: np.ndarray,
    results_K: Sequence[CallResult],
    rewards: Sequence[Reward],
    places_P: Sequence[slice],
    batch: Batch,
    settings: CallSettings,
    log_metric: LogMetric,
) -> np.ndarray:
    """rewards_RK with failed values as `on_error` has it: counted, logged, and the end of the run where too many fail.

    `places_P`: of each group's completions in the round.

    As None they are left out of the sum, which is fair only where the whole group is judged without that function: a
    completion on which a function failed, while it judged a sibling, is left out altogether.
    """
    becomes = "None" if settings.on_error == "none" else f"{settings.on_error:g}"
    errors_K = [
        error_of(result, reward, batch) if result.failures else None
        for result, reward in zip(results_K, rewards, strict=True)
    ]
    failed_RK = np.array([failed_R(result) for result in results_K], bool).T
    for k, (reward, error) in enumerate(zip(rewards, errors_K, strict=True)):
        log_metric(f"rewards/{reward.name}/failed", float(failed_RK[:, k].mean()))
        if error is not None:
            number = f"{failed_RK[:, k].sum()} of {len(batch)} values become {becomes} (on_reward_error)"
            logger.warning("%s: %s", number, error)
    if not isinstance(settings.on_error, str):
        rewards_RK = np.where(failed_RK, settings.on_error, rewards_RK)
    else:
        for own in places_P:
            partly_K = failed_RK[own].any(axis=0) & ~failed_RK[own].all(axis=0)
            rewards_RK[own][(failed_RK[own] & partly_K).any(axis=1)] = np.nan
    _stop_where_none_is_scored(rewards_RK, failed_RK, errors_K)
    return rewards_RK


def _stop_where_none_is_scored(
    rewards_RK: np.ndarray, failed_RK: np.ndarray, errors_K: Sequence[RewardError | None]
) -> None:
    """Raise where errors left no completion of the round to train on; a None that a function meant is no error."""
    unscored_R = np.isnan(rewards_RK).all(axis=1)
    if unscored_R.all() and failed_RK.any():
        first = next(error for error in errors_K if error is not None)
        raise RewardError(
            f"None of the {unscored_R.size} completions of this round has a score, because of errors: "
            f"there is nothing to train on. The first error:\n{first.what}",
            code="W018",
            fix=first.fix,
            size=unscored_R.size,
            what=first.what,
        ) from first


def warn_of_values(scored: Sequence[ScoredGroup], warned: set[str]) -> None:
    """Warn of completions that no function of the run judges, and of values beside which other functions count nothing.

    `warned`: what the run has warned of; it is added to, as there may be such values in every round.
    """
    if not scored:
        return
    rewards_RK = np.concatenate([group.rewards_GK for group in scored])
    unscored = np.flatnonzero(np.isnan(rewards_RK).all(axis=1))
    if unscored.size and "all None" not in warned:  # these completions carry no signal
        warned.add("all None")
        first = int(unscored[0])
        batch = Batch.of([group.group for group in scored])
        row = {key: values[first] for key, values in batch.columns.items()}
        logger.warning(
            "All reward functions returned None for the following kwargs:\n%s\n"
            "Please ensure that at least one reward function returns a valid reward.\n"
            "  This is so for %d of %d completions, which are not trained on; the first is %s. The functions are %s. "
            "(Said once.)",
            {**row, "prompt": batch.prompts[first], "completion": batch.completions[first]},
            unscored.size,
            len(batch),
            batch.place(first),
            ", ".join(scored[0].names_K),
        )
    for name, values in zip(scored[0].names_K, rewards_RK.T, strict=True):
        huge = np.flatnonzero(np.abs(np.nan_to_num(values)) > HUGE)
        if huge.size and f"W007 {name}" not in warned:
            warned.add(f"W007 {name}")
            text = "`%s` returned %g at %s: beside it other rewards count for nothing; scale it. [W007, said once]"
            place = Batch.of([group.group for group in scored]).place(int(huge[0]))
            logger.warning(text, name, values[huge[0]], place)


HUGE = 1e6
"""A reward above it is warned of: beside it the others count for nothing."""
EXCERPT_LENGTH = 80
"""Characters of a completion that messages show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The R completions of one round as reward functions see them: R values in each list."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    """Strings, or lists of one message where the prompt is a conversation."""
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    texts: Sequence[str]
    rows: Sequence[int]
    """Dataset rows; -1 in a stream."""
    places: Sequence[str]
    """`3 of 8`: which completion of its prompt it is."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Batch:
        """The completions of these groups, one group after the other."""
        members = [
            (completion.prompt or group.prompt, completion) for group in groups for completion in group.completions
        ]
        # Rows of a plain list may have different keys; a column has a value for every completion nevertheless.
        keys = dict.fromkeys(key for prompt, _ in members for key in prompt.columns if key not in GIVEN)
        return cls(
            prompts=[prompt.content for prompt, _ in members],
            completions=[completion.messages if prompt.is_chat else completion.text for prompt, completion in members],
            completion_ids=[list(completion.token_ids) for _, completion in members],
            columns={key: [prompt.columns.get(key) for prompt, _ in members] for key in keys},
            texts=[completion.text for _, completion in members],
            rows=[prompt.row for prompt, _ in members],
            places=[f"{g} of {len(group.completions)}" for group in groups for g, _ in enumerate(group.completions, 1)],
        )

    def __len__(self) -> int:
        return len(self.texts)

    def place(self, index: int) -> str:
        """The row of a completion, and how it starts."""
        row = f"row {self.rows[index]}" if self.rows[index] >= 0 else f"prompt {excerpt(str(self.prompts[index]))}"
        return f"{row}, completion {self.places[index]}: {excerpt(self.texts[index])}"


def excerpt(text: str, length: int = EXCERPT_LENGTH) -> str:
    """The start of a text, in quotes and on one line.

    >>> excerpt("one two", 3)
    "'one'..."
    """
    return f"{text[:length]!r}..." if len(text) > length else repr(text)


def fitted(result: CallResult, num_completions: int) -> CallResult:
    """The result with one number for each completion: NaN for None, and where it failed."""
    count = len(result.values)
    if result.failure is None and count != num_completions:
        failure = Failure(
            kind="returned",
            what=f"returned {count} values for {num_completions} completions",
            fix="return one number (or None) for each completion, in their order",
            code="W003",
            index=count if count < num_completions else None,
        )
        result = replace(result, failures=(failure,))
    if result.failure is not None:
        return replace(result, values=(math.nan,) * num_completions)
    failed = {failure.index for failure in result.failures}
    numbers = tuple(math.nan if value is None or r in failed else value for r, value in enumerate(result.values))
    return replace(result, values=numbers)


def failed_R(result: CallResult) -> list[bool]:
    """Whether each value of a fitted result failed."""
    failed = {failure.index for failure in result.failures}
    return [result.failure is not None or r in failed for r in range(len(result.values))]


def error_of(result: CallResult, reward: Reward, batch: Batch) -> RewardError:
    """The first failure of a fitted result: what the function did, at which completion, where in its code."""
    failure = result.failures[0]
    lines = [f"{reward} {failure.what}"]
    if failure.kind == "value":
        lines[0] += f" as value {failure.index}"
    if failure.kind == "returned":
        if failure.code != "W003":
            lines[0] += f"; expected a list of {counted(len(batch), 'number')}"
        elif failure.index is not None:
            lines[0] += f". The first without one is {batch.place(failure.index)}"
    elif failure.index is None or not 0 <= failure.index < len(batch):
        lines.append(f"  while scoring {len(batch)} completions, the first of them {batch.place(0)}")
    else:
        lines.append(f"  at {batch.place(failure.index)}")
    if failure.is_shape_error:
        is_plain = isinstance(batch.completions[0], str)
        note = "conversations, so the text of a completion is `completion[0]['content']`"
        lines.append(f"  note: the prompts are {'plain, so each completion is a string' if is_plain else note}")
    lines += [f"  {line}" for line in failure.trace]
    return RewardError("\n".join(lines), code=failure.code, fix=failure.fix)
