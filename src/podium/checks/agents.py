"""Rules about tools and environments: environments reset with real rows, and there is something to reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podium.agents.environments import EnvironmentPools, refuse_silence, reset
from podium.agents.mcp import servers_of
from podium.data.survey import RowSurvey
from podium.errors import Finding, PodiumError
from podium.errors.rule import Rule
from podium.errors.texts import counted, listed
from podium.recipe.recipe import AgentSpec
from podium.rewards.resolve import Reward


def _resets(
    pools: EnvironmentPools, given: Mapping[str, Any], agents: AgentSpec, train: RowSurvey | None
) -> Finding | None:
    """Environments of a recipe that cannot be reset with the first row that is for them, and rows that name none.

    From Python `reset` is called for completions alone, as in TRL.
    """
    has_dataset = bool(given.get("dataset") or given.get("datasets"))
    wants_rows = pools.named or has_dataset
    if not given or (train is None and wants_rows):  # what is wrong with its rows is told elsewhere
        return None
    tried = set[str | None]()
    for row in train.examples if train is not None else ({},):
        try:
            name = pools.name_of(row)
            if name in tried:
                continue
            tried.add(name)
            [environment] = pools.take([name])
            try:
                content = reset(environment, row, named=pools.named, seed=0, index=0)
                if not (agents.tools or pools.tools(name)):
                    refuse_silence(content, 0)
            finally:
                pools.give_back([environment])
        except PodiumError as error:
            return Finding(
                code="C054",
                severity="error",
                what=f"environment: {error.what}",
                why="every episode begins with `reset`",
                fix=error.fix,
                settings=("environment",),
            )
    return None


def _servers(agents: AgentSpec) -> Iterator[Finding]:
    """The tools of MCP servers, by the names that the policy sees."""
    for server, names in servers_of(agents.tools).items():
        yield Finding(
            code="C066",
            severity="note",
            what=f"tools: MCP server {server.name} has {counted(len(names), 'tool')}: {listed(names)}",
            settings=("tools",),
        )


def _is_unrewarded(pools: EnvironmentPools, rewards: Sequence[Reward], problems: Sequence[Finding]) -> dict[str, str]:
    """No reward function, and no environment with `get_reward`."""
    is_refused = any(finding.code in ("C031", "W013") for finding in problems)
    return {} if is_refused or rewards or pools.reward_functions() else {"missing": "rewards"}


RULES: tuple[Rule, ...] = (
    Rule(code="C054", needs=("pools", "given", "agents"), wants=("train",), when=_resets),
    Rule(code="C066", needs=("agents",), when=_servers),
    Rule(
        code="C031",
        needs=("pools", "rewards", "problems"),
        when=_is_unrewarded,
        says=lambda pools, rewards, problems, *, missing: "no `rewards`, and no environment has `get_reward`",
        cure="rewards: [my_rewards.py:my_function], or write `get_reward(self)` in the class",
    ),
)
