"""Tools, environments and a `rollout_func` of a trainer in one record, and groups of completions sampled with them.

    agents = Agents(chat=chat, tools=as_tools([multiply]), pools=None, call_limits=CallLimits())
    sampled = agents.sample(engine, prompts, settings, builder=builder)
    sampled.groups, sampled.environments

Without any of the three a completion is one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from podium.agents.chat import ChatFormat
from podium.agents.environments import EMPTY_PROMPT, EnvironmentPools, prompt_of, refuse_silence, reset
from podium.agents.episode import EpisodeLimits
from podium.agents.episodes import AgentEpisodes
from podium.agents.plain_text import TextEnvironment
from podium.agents.programs.program import Program
from podium.agents.programs.running import PlaySettings, play
from podium.agents.rollout_func import RolloutFunction, first_turns, given_groups
from podium.agents.tools import CallLimits, Tool, by_name
from podium.data.prompts import NOT_PASSED_ON, PromptBuilder
from podium.engines.base import RolloutEngine, Sampled
from podium.engines.sampling import row_key
from podium.errors import DataError
from podium.isolation.workers.functions import function_name
from podium.records import Group, Prompt, SamplingSettings


class Acted(NamedTuple):
    """Sampled groups, with the environment of each of their completions."""

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
    """Samples its own turns, through an endpoint on this machine."""
    program_timeout: float | None = None
    call_limits: CallLimits = field(default_factory=CallLimits)
    max_iterations: int | None = None
    max_turns: int | None = None
    max_corrections: int = 0
    context_length: int | None = None
    vocabulary: int | None = None
    """Token ids that the model has; None: those of the tokenizer."""
    lent: dict[bool, list[Any]] = field(default_factory=dict)
    """The environments of the latest call, for training and for evaluation (True)."""

    def __post_init__(self) -> None:
        for name in self.pools.factories if self.pools else ():  # two tools of one name are refused here
            by_name(self.tools_of(name))

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) or (self.pools is not None and self.pools.has_tools)

    @property
    def environments(self) -> list[Any] | None:
        """The environments of the completions that were sampled last; None before the first round."""
        return list(self.lent.values())[-1] if self.lent else None

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

    def schemas(self, name: str | None = None) -> list[Mapping[str, Any]]:
        return [tool.schema for tool in self.tools_of(name)]

    @property
    def common_schemas(self) -> list[Mapping[str, Any]]:
        """The schemas that every prompt has, whatever its environment is."""
        named = self.pools is not None and self.pools.named
        return [tool.schema for tool in self.tools] if named else self.schemas()

    def sample(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        settings: SamplingSettings,
        *,
        builder: PromptBuilder,
        policy_step: int = 0,
        evaluation: bool = False,
        rollout_func: RolloutFunction | None = None,
    ) -> Acted:
        """Groups of completions, one per prompt, with all their turns.

        Args:
            engine: draws the turns.
            prompts: with the tools rendered; with environments as the dataset has them.
            settings: of the round.
            builder: makes the prompts again after environments were reset.
            policy_step: of the sampling weights.
            evaluation: whether environments come from the pool of evaluations.
            rollout_func: called in place of the engine's first turn.
        """
        if self.program is not None:
            bounds = PlaySettings(
                timeout=self.program_timeout,
                max_turns=self.max_turns,
                context_length=self.context_length,
                vocabulary=self.vocabulary,
            )
            played = play(
                self.program,
                engine,
                prompts,
                settings,
                chat=self.chat,
                bounds=bounds,
                policy_step=policy_step,
                evaluation=evaluation,
            )
            return Acted(played.groups, played.results, played.metrics)
        if self.pools is not None:
            cast = self._cast(prompts, settings, builder, evaluation=evaluation)
        else:
            cast = [[_Member(prompt) for _ in range(settings.num_completions)] for prompt in prompts]
        environments = None if self.pools is None else [member.environment for group in cast for member in group]
        if rollout_func is not None:
            return Acted(self._given(engine, cast, settings, policy_step, rollout_func), environments)
        if not prompts:
            return Acted([], environments)
        if not self.takes_turns:
            return Acted(engine.generate(prompts, settings, policy_step=policy_step))
        members = [[member.prompt for member in group] for group in cast]
        groups = self._converse(engine, members, cast, settings, policy_step)
        self._discard_stuck(groups, environments)
        return Acted(groups, environments)

    def _converse(
        self,
        engine: RolloutEngine,
        members: Sequence[Sequence[Prompt]],
        cast: Sequence[Sequence[_Member]],
        settings: SamplingSettings,
        policy_step: int,
        begun: Sequence[Sampled] | None = None,
    ) -> list[Group]:
        """Groups with all turns. `members`: the prompt of every completion, which may differ within a group; `begun`:
        the first turns, where they were drawn elsewhere."""
        prompts = [group[0] for group in members]
        alike = all(each is group[0] for group in members for each in group)
        episodes = self._episodes(members, cast, settings)
        try:
            return engine.generate(
                prompts,
                settings,
                policy_step=policy_step,
                episodes=episodes,
                own_prompts=None if alike else members,
                begun=begun,
            )
        finally:
            episodes.close()

    # ---- before sampling ----

    def _cast(
        self, prompts: Sequence[Prompt], settings: SamplingSettings, builder: PromptBuilder, *, evaluation: bool
    ) -> list[list[_Member]]:
        """Every completion with its environment, reset with the row, and its prompt. Completions with equal prompts
        share one record."""
        assert self.pools is not None
        self.pools.give_back(self.lent.pop(evaluation, ()))
        names = [self.pools.name_of(prompt.columns) for prompt in prompts]
        count = settings.num_completions
        flat = self.pools.take([name for name in names for _ in range(count)], evaluation=evaluation)
        self.lent[evaluation] = flat
        cast = []
        for p, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            row = dict(prompt.columns) if _is_placeholder(prompt) else {"prompt": prompt.content, **prompt.columns}
            seed = int(row_key(settings.seed, settings.round, prompt.id, -1)) >> 33
            group: list[_Member] = []
            for environment in flat[p * count : (p + 1) * count]:
                content = reset(
                    environment,
                    row,
                    named=self.pools.named,
                    seed=seed,
                    index=prompt.row,
                    limit=self.call_limits.timeout,
                )
                same = next((each.prompt for each in group if each.prompt.content == content), None)
                made = same or self._rebuilt(prompt, content, builder, name)
                group.append(_Member(made, name, environment))
            cast.append(group)
        return cast

    def _rebuilt(self, prompt: Prompt, content: Any, builder: PromptBuilder, name: str | None) -> Prompt:
        tools = self.schemas(name)
        if not tools:
            refuse_silence(content, prompt.row)
        made = builder({**prompt.columns, "prompt": content}, id=prompt.id, row_index=prompt.row, tools=tools)
        if made is None:
            what = f"row {prompt.row}: with what its environment added the prompt is too long, and a prompt cannot be "
            raise DataError(what + "left out once sampling has begun.", fix='overlong_prompts="truncate"')
        return made

    def _episodes(
        self, members: Sequence[Sequence[Prompt]], cast: Sequence[Sequence[_Member]], settings: SamplingSettings
    ) -> AgentEpisodes:
        for (prompt, *_), group in zip(members, cast, strict=True):
            plays = any(isinstance(member.environment, TextEnvironment) for member in group)
            if not prompt.is_chat and (plays or self.tools_of(group[0].name)):
                raise DataError(
                    f"row {prompt.row}: the prompt is plain text, and turns and tools need a conversation.",
                    fix='write it as [{"role": "user", "content": text}]',
                    row=prompt.row,
                )
        return AgentEpisodes(
            members,
            [[by_name(self.tools_of(member.name, member.environment)) for member in group] for group in cast],
            [[member.environment for member in group] for group in cast],
            chat=self.chat,
            limits=EpisodeLimits(
                max_iterations=self.max_iterations,
                max_turns=self.max_turns,
                max_corrections=self.max_corrections,
                calls=self.call_limits,
            ),
            settings=settings,
            context_length=self.context_length,
        )

    # ---- after sampling ----

    def _given(
        self,
        engine: RolloutEngine,
        cast: Sequence[Sequence[_Member]],
        settings: SamplingSettings,
        policy_step: int,
        rollout_func: RolloutFunction,
    ) -> list[Group]:
        """Groups from what a `rollout_func` returned; with tools its completions are the first turns (as in TRL)."""
        members = [[member.prompt for member in group] for group in cast]
        given = first_turns(rollout_func, members, settings, self.chat.tokenizer)
        if not self.has_tools:
            return given_groups(given, settings, policy_step, self._message)
        own = [[each.prompt for each in group] for group in given]
        begun = [(each.token_ids, each.logps) for group in given for each in group]
        return self._converse(engine, own, cast, settings, policy_step, begun)

    def _message(self, prompt: Prompt, token_ids: Sequence[int]) -> Mapping[str, Any]:
        return self.chat.parse(token_ids, prefix=prompt.token_ids, tools=self.common_schemas)

    def _discard_stuck(self, groups: Sequence[Group], environments: Sequence[Any] | None) -> None:
        """Never use an environment again of which a call has not ended."""
        if environments is None or self.pools is None:
            return
        completions = (completion for group in groups for completion in group.completions)
        for environment, completion in zip(environments, completions, strict=True):
            names = {call.name for turn in completion.turns for call in turn.calls if call.problem == "timeout"}
            if any(hasattr(type(environment), name) for name in names):
                self.pools.discard(environment)


def user_code(
    tools: Sequence[Tool], pools: EnvironmentPools | None, program: Program | None = None
) -> dict[str, tuple[Any, str]]:
    """Functions of tools, factories of environments and a program by their names, each with its place for messages."""
    factories = {} if pools is None else pools.factories
    named = {f"environment {name}" if name else "environment": each for name, each in factories.items()}
    return {
        **{tool.name: (tool.function, tool.source) for tool in tools},
        **{name: (each, function_name(each)) for name, each in named.items()},
        **({} if program is None else {"agent": (program.code, program.name)}),
    }


class _Member(NamedTuple):
    """One completion to be sampled."""

    prompt: Prompt
    name: str | None = None
    """Name of its environment in the dict of factories; None where there is only one."""
    environment: Any = None


def bare_prompt(row: Mapping[str, Any], id: int, index: int) -> Prompt:
    """A row before its environment was reset; without a prompt of its own it has an empty one, as in TRL."""
    columns = {key: value for key, value in row.items() if key not in NOT_PASSED_ON}
    return Prompt(id=id, row=index, token_ids=(), text="", content=prompt_of(row), columns=columns)


def _is_placeholder(prompt: Prompt) -> bool:
    """Whether its row has no prompt of its own, so that `reset` is given none."""
    return prompt.is_chat and prompt.content[0] is EMPTY_PROMPT[0]
