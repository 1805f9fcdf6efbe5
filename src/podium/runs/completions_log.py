"""`log_completions`: what the policy wrote, as a table on the terminal, in Parquet files and in the trackers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from podium.records import ScoredGroup
from podium.trainer.config import GRPOConfig


class CompletionsLog:
    """Keeps the latest generation round and writes it out when the trainer logs."""

    def __init__(self, args: GRPOConfig) -> None:
        self.args = args
        self.rows: list[dict[str, Any]] = []

    def add(self, scored: Sequence[ScoredGroup], advantages_G: Sequence[np.ndarray]) -> None:
        """The completions of a round; those of the round before are forgotten."""
        self.rows = [
            row for group, advantage_G in zip(scored, advantages_G, strict=True) for row in rows(group, advantage_G)
        ]

    def write(self, step: int) -> None:
        """Table, file and trackers; does nothing when nothing is new."""
        if not self.rows:
            return
        frame = pd.DataFrame(self.rows)
        frame.insert(0, "step", step)
        self.rows = []
        print_table(frame, step, self.args.num_completions_to_print)
        folder = Path(self.args.output_dir) / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"completions_{step:05d}.parquet"
        frame.to_parquet(path)
        shown = frame.drop_duplicates("prompt") if self.args.log_unique_prompts else frame
        for tracker in _trackers(self.args):
            tracker.log({"completions": tracker.Table(dataframe=shown)})
        if self.args.log_completions_hub_repo is not None:
            self._upload(path)

    def _upload(self, path: Path) -> None:
        """To a dataset repository on the hub, in the background."""
        from huggingface_hub import HfApi

        api = HfApi(token=self.args.hub_token)
        repo = self.args.log_completions_hub_repo
        api.create_repo(repo, repo_type="dataset", private=self.args.hub_private_repo, exist_ok=True)
        api.upload_file(
            path_or_fileobj=path, path_in_repo=path.name, repo_id=repo, repo_type="dataset", run_as_future=True
        )


def rows(scored: ScoredGroup, advantage_G: np.ndarray) -> list[dict[str, Any]]:
    """One row per completion, with TRL's column names."""
    return [
        {
            "prompt": scored.group.prompt.text,
            "completion": completion.text,
            **dict(zip(scored.names_K, scored.rewards_GK[g].tolist(), strict=True)),
            **{column: values[g] for column, values in scored.extras.items()},
            "advantage": float(advantage_G[g]),
        }
        for g, completion in enumerate(scored.group.completions)
    ]


def print_table(frame: pd.DataFrame, step: int, limit: int | None) -> None:
    """Model text is shown as text: no markup, no control characters."""
    table = Table(title=f"Step {step}", show_lines=True, expand=True)
    columns = [column for column in frame.columns if column != "step"]
    for column in columns:
        table.add_column(column)
    for _, row in frame.head(limit if limit is not None else len(frame)).iterrows():
        table.add_row(*(_cell(row[column]) for column in columns))
    Console().print(table)


def _cell(value: Any) -> Text:
    if isinstance(value, float):
        return Text(f"{value:.2f}")
    return Text("".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(value)))


def _trackers(args: GRPOConfig) -> list[Any]:
    """The modules among `report_to` that take tables."""
    found = []
    if "wandb" in (args.report_to or []):
        import wandb

        if wandb.run is not None:
            found.append(wandb)
    if "trackio" in (args.report_to or []):
        import trackio

        found.append(trackio)
    return found
