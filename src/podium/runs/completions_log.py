"""`log_completions`: completions as a table on the terminal, in Parquet files and in the trackers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from podium.records import ScoredGroup

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionsLogSettings:
    """Destination and form of the tables."""

    output_dir: Path
    num_to_print: int | None
    unique_prompts: bool
    """Whether trackers get one completion of each prompt."""
    report_to: Sequence[str]
    hub_repo: str | None
    """A dataset repository on the hub for the files; None: they stay here."""
    hub_token: str | None
    hub_private: bool | None


class CompletionsLog:
    """Keeps the latest generation round and writes it out when the trainer logs."""

    def __init__(self, settings: CompletionsLogSettings) -> None:
        self.settings = settings
        self.rows: list[dict[str, Any]] = []

    def add(self, scored: Sequence[ScoredGroup], advantages_G: Sequence[np.ndarray]) -> None:
        """Replace the kept round by this one."""
        self.rows = [
            row for group, advantage_G in zip(scored, advantages_G, strict=True) for row in rows(group, advantage_G)
        ]

    def write(self, step: int) -> None:
        """Print, save and send the kept round, once."""
        import pandas as pd

        if not self.rows:
            return
        frame = pd.DataFrame(self.rows)
        frame.insert(0, "step", step)
        self.rows = []
        print_table(frame, step, self.settings.num_to_print)
        path = self.settings.output_dir / "completions" / f"completions_{step:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(path)
        shown = frame[~frame["prompt"].astype(str).duplicated()] if self.settings.unique_prompts else frame
        for name in {"wandb", "trackio"}.intersection(self.settings.report_to):
            tracker = importlib.import_module(name)
            if name != "wandb" or tracker.run is not None:
                tracker.log({"completions": tracker.Table(dataframe=shown)})
        if self.settings.hub_repo is not None:
            self._upload(path, self.settings.hub_repo)

    def _upload(self, path: Path, repo: str) -> None:
        from huggingface_hub import HfApi

        api = HfApi(token=self.settings.hub_token)
        api.create_repo(repo, repo_type="dataset", private=self.settings.hub_private, exist_ok=True)
        api.upload_file(
            path_or_fileobj=path, path_in_repo=path.name, repo_id=repo, repo_type="dataset", run_as_future=True
        )


def _messages(messages: Any) -> Any:
    """Messages for a table, whose columns have one type each: arguments of calls and lists as JSON."""
    if isinstance(messages, str):
        return messages
    return [
        {
            "role": str(message.get("role")),
            "content": _text(message.get("content")),
            "name": message.get("name"),
            "tool_calls": json.dumps(message["tool_calls"], default=str) if message.get("tool_calls") else None,
        }
        for message in messages
    ]


def _text(content: Any) -> str | None:
    """A message's content; blocks as JSON, with the word Image for an image."""
    return content if isinstance(content, str | None) else json.dumps(content, default=lambda x: type(x).__name__)


def rows(scored: ScoredGroup, advantage_G: np.ndarray) -> list[dict[str, Any]]:
    """One row per completion, with TRL's column names; parsed completions, and their prompts, as messages."""
    return [
        {
            "prompt": _messages(prompt.content) if completion.turns else prompt.text,
            "completion": _messages(completion.messages) if completion.turns else completion.text,
            **dict(zip(scored.names_K, scored.rewards_GK[g].tolist(), strict=True)),
            **{column: values[g] for column, values in scored.extras.items()},
            "advantage": float(advantage_G[g]),
        }
        for g, completion in enumerate(scored.group.completions)
        for prompt in [completion.prompt or scored.group.prompt]
    ]


def print_table(frame: pd.DataFrame, step: int, limit: int | None) -> None:
    """Print the first completions: model text without markup and control characters."""
    columns = [str(column) for column in frame.columns if column != "step"]
    table = Table(*columns, title=f"Step {step}", show_lines=True, expand=True)
    for _, row in frame.head(limit if limit is not None else len(frame)).iterrows():
        table.add_row(*(_cell(row[column]) for column in columns))
    Console().print(table)


def _cell(value: Any) -> Text:
    if isinstance(value, float):
        return Text(f"{value:.2f}")
    if isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value):
        value = "\n".join(
            f"{message['role']}: {message['content'] or ''}{message['tool_calls'] or ''}" for message in value
        )
    return Text("".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(value)))
