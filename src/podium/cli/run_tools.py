"""The tools that a run was trained with, for verbs that use its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.console.terminal import errors, plain_text
from podium.errors import PodiumError

if TYPE_CHECKING:
    from podium.agents.tools import Tool
    from podium.runs.find_model import ModelSource

MOST_ROUNDS = 8
"""Rounds of calls in one answer, where the run had no limit."""

PLAYS = "To play it on a row of its data: podium chat RUN --row 0"


def tools_of(source: ModelSource) -> tuple[tuple[Tool, ...], int]:
    """The tools in a run's recipe, and the most rounds of calls; none, and a note, where they cannot be had here.

    Files are looked for in the working directory, as `podium train` was started.
    """
    from podium.runs.find_model import run_of

    run = run_of(source)
    given: Any = {} if run is None else run.given
    if given.get("environment"):
        note(f"The run's environment is not played here: you write what it answered. {PLAYS}")
    if given.get("agent"):
        note(f"The run's agent is not played here: you talk to its model, without the prompts it writes. {PLAYS}")
    entries = given.get("tools") or []
    if not entries:
        return (), 0
    from podium.agents.resolve import resolve_tools

    try:
        tools = resolve_tools(entries if isinstance(entries, list) else [entries], Path.cwd())
    except PodiumError as error:
        note(f"Without the tools of the run: {error.what} Start in the folder of its recipe, or give --no-tools.")
        return (), 0
    note(f"With the tools of the run: {', '.join(tool.name for tool in tools)}; --no-tools leaves them out.")
    most = given.get("max_tool_calling_iterations")
    return tools, most if isinstance(most, int) else MOST_ROUNDS


def note(text: str) -> None:
    """A line on stderr."""
    errors.print(plain_text(f"note: {text}"), soft_wrap=True)
