"""Tools, environments, a program and a `rollout_func` of a run in one record; without any a completion is one turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from podium.agents.chat import ChatFormat
from podium.agents.environments import EnvironmentPools, prompt_of
from podium.agents.tools import CallLimits, Tool, by_name
from podium.data.prompts import NOT_PASSED_ON
from podium.isolation.functions import function_name
from podium.records import Group, Prompt

GIVEN = ("base_url", "api_key", "session", "row")
"""Arguments of every program besides the columns of its row."""


class Program(Protocol):
    """An agent that samples its own turns, through an endpoint on this machine: see `agents.programs`."""

    name: str
    """For messages."""
    at_a_time: int
    """Episodes that may run at the same time."""

    @property
    def needs(self) -> Sequence[str]:
        """Arguments without a default."""

    @property
    def code(self) -> Any:
        """Object whose source is shown: the function, or the program itself with its `path`."""

    def begin(self) -> Any:
        """An episode that has not started, a `programs.program.Running`."""

    def tidy(self) -> None:
        """After a round: end what episodes have left behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """Bounds of a program's episodes."""

    timeout: float | None
    """Seconds that a program may take by itself, without those in which it waits for answers."""
    max_turns: int | None
    context_length: int | None
    vocabulary: int | None = None
    """Token ids that the model has; None: those of the tokenizer."""


class SampledGroups(NamedTuple):
    """Groups of completions, with the environment of each completion."""

    groups: list[Group]
    environments: list[Any] | None = None
    """Or how the program of each has ended; in the order of the completions of all groups. None: there are none. They
    keep their state until the next call."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """Of programs."""


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Everything that completions do besides being drawn."""

    chat: ChatFormat
    tools: tuple[Tool, ...] = ()
    """For every completion; those of its environment come after them."""
    pools: EnvironmentPools | None = None
    rollout_func: Callable[..., Any] | None = None
    program: Program | None = None
    program_timeout: float | None = None
    call_limits: CallLimits = field(default_factory=CallLimits)
    max_iterations: int | None = None
    max_turns: int | None = None
    max_corrections: int = 0
    context_length: int | None = None
    vocabulary: int | None = None
    """Token ids that the model has; None: those of the tokenizer."""

    def __post_init__(self) -> None:
        for name in self.pools.factories if self.pools else ():  # two tools of one name are refused here
            by_name(self.tools_of(name))

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) or (self.pools is not None and self.pools.has_tools)

    @property
    def environments(self) -> list[Any] | None:
        """The environments of the completions that were sampled last; None before the first round."""
        return None if self.pools is None else self.pools.latest

    def tools_of(self, name: str | None, environment: Any = None) -> tuple[Tool, ...]:
        """The tools of completions whose environment has that name."""
        return self.tools if self.pools is None else (*self.tools, *self.pools.tools(name, environment))

    @property
    def tool_names(self) -> list[str]:
        """Names of the tools of all environments, without repetitions."""
        names = [None] if self.pools is None else [*self.pools.factories]
        return [*dict.fromkeys(tool.name for name in names for tool in self.tools_of(name))]

    @property
    def takes_turns(self) -> bool:
        """Whether a completion may have several turns."""
        return self.has_tools or self.pools is not None or self.program is not None

    @property
    def program_limits(self) -> ProgramLimits:
        return ProgramLimits(
            timeout=self.program_timeout,
            max_turns=self.max_turns,
            context_length=self.context_length,
            vocabulary=self.vocabulary,
        )

    def schemas(self, name: str | None = None) -> list[Mapping[str, Any]]:
        return [tool.schema for tool in self.tools_of(name)]

    @property
    def common_schemas(self) -> list[Mapping[str, Any]]:
        """The schemas that every prompt has, whatever its environment is."""
        named = self.pools is not None and self.pools.named
        return [tool.schema for tool in self.tools] if named else self.schemas()


def user_code(
    tools: Sequence[Tool], pools: EnvironmentPools | None, program: Program | None = None
) -> dict[str, tuple[Any, str]]:
    """Functions of tools, factories of environments and a program by their names, each with its place for messages."""
    factories = {} if pools is None else pools.factories
    named = {f"environment {name}" if name else "environment": factory for name, factory in factories.items()}
    return {
        **{tool.name: (tool.function, tool.source) for tool in tools},
        **{name: (factory, function_name(factory)) for name, factory in named.items()},
        **({} if program is None else {"agent": (program.code, program.name)}),
    }


def bare_prompt(row: Mapping[str, Any], id: int, index: int) -> Prompt:
    """A row before its environment was reset; without a prompt of its own it has an empty one, as in TRL."""
    columns = {key: value for key, value in row.items() if key not in NOT_PASSED_ON}
    return Prompt(id=id, row=index, token_ids=(), text="", content=prompt_of(row), columns=columns)
