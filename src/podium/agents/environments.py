"""Environments as in TRL's `environment_factory`: built once, pooled, reset for every completion.

    pools = EnvironmentPools({"maze": Maze, "shop": Shop})
    environments = pools.take(["maze", "maze", "shop"])
    prompts = [reset(environment, row, named=pools.named) for environment, row in zip(environments, rows)]
    ...
    pools.give_back(environments)

Methods of an environment are tools of its completion; those of a `TextEnvironment` are not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from podium.agents.plain_text import OverrunError, TextEnvironment, call_user, of_row, what_came
from podium.errors import AgentError, ConfigError, DataError
from podium.errors.texts import did_you_mean, quoted
from podium.isolation.functions import shown
from podium.records import Message, content_of

if TYPE_CHECKING:
    from datasets import Dataset

    from podium.agents.tools import Tool

Factory = Callable[[], Any]

RESERVED = ("reset", "get_reward")
"""Methods of an environment that are no tools."""

EMPTY_PROMPT: Sequence[Message] = ({"role": "user", "content": ""},)
"""The prompt of a row without one, as in TRL."""


class EnvironmentPools:
    """The environments of a trainer: reusable instances for each name, those for evaluation apart from training's.

    Args:
        factory: makes one environment; or a factory for each value of the rows' `environment` column.

    Each factory is called once here, and the instance seeds the pool. Raises `ConfigError` for what is no factory and
    for an environment without `reset`, `AgentError` where a factory raises.
    """

    def __init__(self, factory: Factory | Mapping[str, Factory]) -> None:
        self.named = isinstance(factory, Mapping)
        factories: Mapping[Any, Factory] = factory if isinstance(factory, Mapping) else {None: factory}
        self.factories: dict[str | None, Factory] = dict(factories)
        if not self.factories:
            raise ConfigError("`environment_factory` is an empty dict.", fix="give at least one name and its factory")
        for name, make in self.factories.items():
            if not callable(make):
                kind = f"{type(make).__name__} {shown(make)}"
                what = f"`environment_factory`{_called(name)} is {kind}; expected a class "
                raise ConfigError(
                    f"{what}or a function that makes an environment.", fix="pass the class itself", what=what
                )
        self.training: dict[str | None, list[Any]] = {name: [self._make(name)] for name in self.factories}
        """Instances by name, in the order in which they are handed out; the first is the probe."""
        self.evaluation: dict[str | None, list[Any]] = {name: [] for name in self.factories}
        self.latest: list[Any] | None = None
        """The environments of the latest round, of training or of evaluation; None before the first."""
        self._of_round: dict[bool, list[Any]] = {}
        """The environments of the latest rounds of training and of evaluation (True)."""
        self._taken: dict[int, Any] = {}
        self._lock = Lock()
        self._tools = {name: _tools(probe) for name, [probe] in self.training.items()}
        """Tools of each name by the attribute that has the method."""

    @property
    def has_tools(self) -> bool:
        """Whether any environment has methods to be called by the model, which its chat template must render."""
        return any(self._tools.values())

    @property
    def sums_steps(self) -> bool:
        """Whether the reward of every environment is the sum of the rewards of its steps."""
        probes = [probe for [probe, *_] in self.training.values()]
        summed = TextEnvironment.get_reward
        return all(isinstance(x, TextEnvironment) and type(x).get_reward is summed for x in probes)

    def methods(self, name: str | None) -> list[Callable[..., Any]]:
        """The probe's methods that are tools, in TRL's order."""
        return [tool.function for tool in self._tools[name].values()]

    def tools(self, name: str | None, environment: Any = None) -> tuple[Tool, ...]:
        """Tools of the environments with that name, bound to one of them (None: to the probe)."""
        tools = self._tools[name]
        if environment is None:
            return tuple(tools.values())
        return tuple(replace(tool, function=getattr(environment, member)) for member, tool in tools.items())

    def name_of(self, row: Mapping[str, Any]) -> str | None:
        """The name of a row's environment; None with a single factory. Raises `DataError` for an unknown one."""
        if not self.named:
            return None
        name = row.get("environment")
        if name not in self.factories:
            raise DataError(
                f"Example has `environment={name!r}`, which is not among the environments passed to "
                f"`environment_factory`. Expected one of: {list(self.factories)}.",
                fix=did_you_mean(str(name), map(str, self.factories)),
            )
        return name

    def take(self, names: Sequence[str | None], *, evaluation: bool = False) -> list[Any]:
        """An environment for each name, in their order; new ones are made only where none of the pool is free."""
        pool = self.evaluation if evaluation else self.training
        taken: list[Any] = []
        with self._lock:
            for name in names:
                if (
                    free := next((instance for instance in pool[name] if id(instance) not in self._taken), None)
                ) is None:
                    free = self._make(name)
                    pool[name].append(free)
                self._taken[id(free)] = free
                taken.append(free)
        return taken

    def take_anew(self, names: Sequence[str | None], *, evaluation: bool = False) -> list[Any]:
        """The environments of a round; those of the round before, which have kept their state, are free again."""
        self.give_back(self._of_round.pop(evaluation, ()))
        self.latest = self._of_round[evaluation] = self.take(names, evaluation=evaluation)
        return self.latest

    def give_back(self, environments: Sequence[Any]) -> None:
        """Make environments free for the next round; they keep their state until then. Hanging ones are discarded."""
        for environment in environments:
            if getattr(environment, "is_hanging", False):
                self.discard(environment)
        with self._lock:
            for environment in environments:
                self._taken.pop(id(environment), None)

    def discard(self, environment: Any) -> None:
        """Never hand this environment out again: a call of it may still be running."""
        with self._lock:
            for pool in (self.training, self.evaluation):
                for instances in pool.values():
                    instances[:] = [instance for instance in instances if instance is not environment]
            self._taken.pop(id(environment), None)

    def reward_functions(self) -> list[Callable[..., Any]]:
        """A reward function for each class with `get_reward`, named after the class. The list is new at every call."""
        kinds = {_name_of(type(probe)): type(probe) for [probe, *_] in self.training.values()}
        return [_reward_of(kind) for kind in kinds.values() if "get_reward" in _functions(kind)]

    def _make(self, name: str | None) -> Any:
        environment = call_user(self.factories[name], who=f"`environment_factory`{_called(name)}", where="a call of it")
        if "reset" not in _functions(type(environment)):
            raise ConfigError(
                "Each environment instance returned by `environment_factory` must define a callable `reset`. "
                f"`{type(environment).__name__}`{_called(name)} has none.",
                fix="write `def reset(self, **row):` in the class",
            )
        if isinstance(environment, TextEnvironment):
            try:
                inspect.signature(environment.step).bind("")
            except TypeError as error:
                raise ConfigError(
                    f"`{type(environment).__name__}.step` cannot be called with a turn's text: {quoted(error)}",
                    fix="write `def step(self, text):` in the class",
                    kind=type(environment).__name__,
                    error=error,
                ) from None
        return environment


def _called(name: str | None) -> str:
    return "" if name is None else f" `{name}`"


def _functions(kind: type) -> list[str]:
    """Names of the functions of a class, alphabetical: inherited and static ones count, class methods do not.

    They are listed on the class, since `getattr` on an instance evaluates properties.
    """
    return [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]


def methods_of(environment: Any) -> list[Callable[..., Any]]:
    """The methods of an environment that are tools, bound to it, in TRL's order."""
    return [getattr(environment, name) for name in _members(environment)]


def _members(environment: Any) -> list[str]:
    """Attributes of an environment whose functions are tools."""
    if isinstance(environment, TextEnvironment):
        return []
    return [name for name in _functions(type(environment)) if name not in RESERVED and not name.startswith("_")]


def _tools(environment: Any) -> dict[str, Tool]:
    members = _members(environment)
    if not members:
        return {}
    from podium.agents.tools import as_tools

    tools = as_tools([getattr(environment, member) for member in members])
    return dict(zip(members, tools, strict=True))


def _name_of(kind: type) -> tuple[str, str]:
    """Module and name of a class. A factory whose class is defined within it makes a new class at every call."""
    return kind.__module__, kind.__qualname__


def _reward_of(kind: Any) -> Callable[..., Any]:
    """`get_reward` of the environments of exactly this class, None for others."""
    name = _name_of(kind)
    if inspect.iscoroutinefunction(kind.get_reward):

        async def get_reward(environments: Sequence[Any], **kwargs: Any) -> list[Any]:
            return [
                await environment.get_reward() if _name_of(type(environment)) == name else None
                for environment in environments
            ]
    else:

        def get_reward(environments: Sequence[Any], **kwargs: Any) -> list[Any]:  # type: ignore[misc]
            return [
                environment.get_reward() if _name_of(type(environment)) == name else None
                for environment in environments
            ]

    get_reward.__name__ = get_reward.__qualname__ = kind.__name__
    return get_reward


def reset(
    environment: Any,
    row: Mapping[str, Any],
    *,
    named: bool,
    seed: int | None = None,
    index: int = -1,
    limit: float | None = None,
) -> str | list[Message]:
    """Reset an environment with a row of the dataset; the row's prompt with what `reset` returned.

    Args:
        environment: gets every column by name, and `prompt` only where the row has it.
        row: is not changed.
        named: whether the row's `environment` column has chosen the factory; then it is not passed on.
        seed: for a `reset` that names an argument `seed`, where the row has no such column; one number for all
            completions of a group gives them the same beginning.
        index: of the row, for messages.
        limit: in seconds; None: no limit.

    Raises `AgentError` where `reset` raises, takes longer, or returns anything but text, a list or None.
    """
    columns = {name: value for name, value in row.items() if not (named and name == "environment")}
    if seed is not None and "seed" not in columns and "seed" in inspect.signature(environment.reset).parameters:
        columns["seed"] = seed
    if isinstance(environment, TextEnvironment):
        environment.row_index = index
        environment.step_rewards = ()
    who = f"environment `{type(environment).__name__}`"
    where = f"reset{of_row(index)}"
    try:
        returned = call_user(functools.partial(environment.reset, **columns), who=who, where=where, limit=limit)
    except TimeoutError:
        raise OverrunError(
            f"{who} did not return within {limit:g} s in {where}",
            fix=f"tool_timeout: 0 waits for it, or {10 * (limit or 0):g} for longer; if it hangs, look at its `reset`",
            who=who,
            limit=limit,
            place=where,
        ) from None
    try:
        return extended(prompt_of(row), returned)
    except TypeError as error:
        raise AgentError(
            f"{who} returned {what_came(returned)} in {where}: {quoted(error)}",
            fix="return a string, a list of messages or content blocks, or None",
            who=who,
            what_came=what_came(returned),
            place=where,
            error=error,
        ) from None


def prompt_of(row: Mapping[str, Any]) -> str | list[Message]:
    """The prompt of a row; the empty one, as in TRL, where the row has none or null.

    >>> prompt_of({"prompt": "Play."}), prompt_of({"prompt": None})
    ('Play.', [{'role': 'user', 'content': ''}])
    """
    prompt = row.get("prompt")
    if prompt is None:  # null: other rows of the table have one
        prompt = EMPTY_PROMPT
    return prompt if isinstance(prompt, str) else list(prompt)


def refuse_silence(prompt: str | list[Message], index: int) -> None:
    """Raise `DataError` for a conversation without any text after `reset`, in which no tools are described either."""
    if not isinstance(prompt, str) and not any(content_of(message).strip() for message in prompt):
        raise DataError(
            f"row {index}: neither the row nor `reset` of its environment gives the model anything to read.",
            code="D003",
            fix="return the prompt from `reset`, as text",
            index=index,
        )


def extended(prompt: str | list[Message], returned: Any) -> str | list[Message]:
    """A prompt with what `reset` returned; a new list.

    A string is appended to the last message without a separator, content blocks are appended to its content, messages
    come after it (in place of a last message without content). Raises `TypeError` for anything else.

    >>> extended([{"role": "user", "content": "Play. "}], "Your move.")
    [{'role': 'user', 'content': 'Play. Your move.'}]
    >>> extended([{"role": "user", "content": ""}], [{"role": "system", "content": "Be brief."}])
    [{'role': 'system', 'content': 'Be brief.'}]
    """
    if returned is None:
        return prompt
    if not isinstance(returned, (str, list, tuple)):
        raise TypeError("it cannot be added to a prompt")
    if isinstance(prompt, str):
        if not isinstance(returned, str):
            raise TypeError("a prompt in plain text takes a string")
        return prompt + returned
    before = prompt[:-1]
    last = prompt[-1]
    content = last["content"]
    if isinstance(returned, str):
        added = content + returned if isinstance(content, str) else [*content, _block(returned)]
        return [*before, {**last, "content": added}]
    if not all(isinstance(item, Mapping) for item in returned):
        raise TypeError("its entries are neither messages nor content blocks")
    if returned and all("role" in item for item in returned):
        return [*(prompt if content else before), *returned]
    blocks = [_block(content)] if isinstance(content, str) else list(content)
    return [*before, {**last, "content": [*blocks, *returned]}]


def _block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def placeholder_rows(pools: EnvironmentPools, *, num_prompts: int, max_steps: int) -> Dataset:
    """Rows with empty prompts, for a trainer without a dataset whose environment makes the prompts.

    Args:
        num_prompts: of a generation round.
        max_steps: of the run; must be positive, since there is no epoch.

    Raises `ConfigError`.
    """
    if pools.named:
        raise ConfigError(
            "A `dict` `environment_factory` (multiple environments) requires a `train_dataset` with an `environment` "
            "column to route each example to its environment.",
            fix="Provide a dataset, or pass a single environment factory.",
        )
    if max_steps <= 0:
        raise ConfigError(
            "When training without a `train_dataset` (the environment owns the data and returns the prompt from "
            "`reset()`), `max_steps` must be set to a positive value to define the training length.",
            fix="Set it via `GRPOConfig(max_steps=...)`.",
        )
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [list(EMPTY_PROMPT)] * num_prompts})
