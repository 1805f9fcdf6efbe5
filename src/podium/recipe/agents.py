"""Tools, environments and agents as a recipe names them.

    tools: [tools.py:multiply, builtin:calculator]     # functions in files beside the recipe, or of the library
    tools: [{mcp: {command: [python, -m, mcp_server_time]}}]      # those of an MCP server
    environment: game.py:Guess                         # a class with `reset`, and `step` or methods that are tools
    environment:                                       # or several, chosen by the rows' column `environment`
      easy: game.py:Guess?largest=7
      word: textarena:Hangman-v0
    max_turns: 4
    agent: agent.py:run                                # or a program, which samples turns by itself
    agent: {command: [python, my_agent.py]}

Nothing is run here but the files themselves; `checks.agents` tries the environments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError, Finding, PodiumError
from podium.recipe.document import Place, mistake

if TYPE_CHECKING:
    from podium.agents.setup import Program
    from podium.agents.tools import Tool

Factory = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """The tools, environments and the agent of a recipe, resolved."""

    tools: tuple[Tool, ...] = ()
    environment: Factory | Mapping[str, Factory] | None = None
    program: Program | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of `GRPOTrainer`; none of those that the recipe does not have."""
        given = {"tools": list(self.tools), "environment_factory": self.environment, "agent": self.program}
        return {name: value for name, value in given.items() if value}


@dataclass(slots=True)
class AgentReader:
    """Reads `tools`, `environment` and `agent` of one recipe and collects what is wrong with them."""

    folder: Path
    """The recipe's; files are searched here, then in the working directory."""
    where: Callable[[Place], str]
    problems: list[Finding] = field(default_factory=list)

    def read(self, tools: Any, environment: Any, agent: Any = None) -> AgentSpec:
        """The tools, the environments and the program, without those that are refused."""
        return AgentSpec(
            tools=self._tools(tools), environment=self._environment(environment), program=self._program(agent)
        )

    def _program(self, given: Any) -> Program | None:
        if not given:
            return None
        from podium.agents.table import resolve_program

        try:
            return resolve_program(given, self.folder)
        except PodiumError as error:
            self.problems.append(mistake(self.where(("agent",)), error, code="C065"))
            return None

    def _tools(self, entries: Any) -> tuple[Tool, ...]:
        if not entries:
            return ()
        from podium.agents.resolve import resolve_tools
        from podium.agents.tools import distinct

        listed = entries if isinstance(entries, list) else [entries]
        found: tuple[Tool, ...] = ()
        for index, entry in enumerate(listed):
            place: Place = ("tools", index) if isinstance(entries, list) else ("tools",)
            if not isinstance(entry, (str, Mapping)) and not callable(entry):
                unnamed = ConfigError(f"a tool is a name, got `{entry}`", fix="tools: [tools.py:my_function]")
                self.problems.append(mistake(self.where(place), unnamed, code="C053"))
                continue
            try:
                found = distinct([*found, *resolve_tools([entry], self.folder)])
            except PodiumError as error:
                self.problems.append(mistake(self.where(place), error, code="C053"))
        return found

    def _environment(self, given: Any) -> Factory | Mapping[str, Factory] | None:
        if not isinstance(given, Mapping):
            return self._factory(given, ("environment",)) if given else None
        made = {str(name): self._factory(spec, ("environment", name)) for name, spec in given.items()}
        return {name: factory for name, factory in made.items() if factory is not None} or None

    def _factory(self, spec: Any, place: Place) -> Factory | None:
        from podium.agents.table import resolve_environment

        if callable(spec):
            return spec
        try:
            if not isinstance(spec, str):
                raise ConfigError(
                    f"an environment is a name, got `{spec}`", fix="environment: game.py:Guess", spec=spec
                )
            return resolve_environment(spec, self.folder)
        except PodiumError as error:
            self.problems.append(mistake(self.where(place), error, code="C054"))
            return None
