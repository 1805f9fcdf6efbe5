"""Rules about tools and environments: environments reset with real rows, and there is something to reward."""

from __future__ import annotations

from collections.abc import Iterator

from podium.agents.mcp import servers_of
from podium.checks.setup import Setup
from podium.errors import Finding, PodiumError
from podium.errors.texts import counted, listed


def resets(setup: Setup) -> Iterator[Finding]:
    """Environments of a recipe that cannot be reset with the first row that is for them, and rows that name none.

    From Python `reset` is called for completions alone, as in TRL.
    """
    if setup.pools is None or not setup.given:
        return
    has_dataset = bool(setup.given.get("dataset") or setup.given.get("datasets"))
    if setup.train is None and (setup.pools.named or has_dataset):  # what is wrong with its rows is told elsewhere
        return
    from podium.agents.environments import refuse_silence, reset

    pools = setup.pools
    tried = set[str | None]()
    for row in setup.train.examples if setup.train is not None else ({},):
        try:
            name = pools.name_of(row)
            if name in tried:
                continue
            tried.add(name)
            [environment] = pools.take([name])
            try:
                content = reset(environment, row, named=pools.named, seed=0, index=0)
                if not (setup.agents.tools or pools.tools(name)):
                    refuse_silence(content, 0)
            finally:
                pools.give_back([environment])
        except PodiumError as error:
            yield Finding(
                code="C054",
                severity="error",
                what=f"{setup.at('environment')}: {error.what}",
                why="every episode begins with `reset`",
                fix=error.fix,
            )
            return


def servers(setup: Setup) -> Iterator[Finding]:
    """The tools of MCP servers, by the names that the policy sees."""
    for server, names in servers_of(setup.agents.tools).items():
        yield Finding(
            code="C066",
            severity="note",
            what=f"{setup.at('tools')}: MCP server {server.name} has {counted(len(names), 'tool')}: {listed(names)}",
        )


def something_to_reward(setup: Setup) -> Iterator[Finding]:
    """No reward function, and no environment with `get_reward`."""
    if setup.pools is None or setup.rewards or setup.pools.reward_functions():
        return
    if any(finding.code in ("C031", "W013") for finding in setup.problems):
        return
    yield Finding(
        code="C031",
        severity="error",
        what="no `rewards`, and no environment has `get_reward`",
        fix="rewards: [my_rewards.py:my_function], or write `get_reward(self)` in the class",
        facts={"missing": "rewards"},
    )
