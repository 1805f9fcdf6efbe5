"""`podium sample RECIPE`: prompts, completions, rewards and advantages, without training."""

from __future__ import annotations

import itertools
import tempfile
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from podium.records import ScoredGroup


def sample(
    context: typer.Context,
    num_prompts: Annotated[int, typer.Option("-n", "--num-prompts", min=1, help="Prompts to sample from.")] = 4,
) -> None:
    """Show prompts, completions, rewards and advantages; trains nothing.

    RECIPE and flags are those of `podium train`.
    """
    from podium.cli.terminal import console, prepare_output
    from podium.cli.words import recipe_and_flags
    from podium.data.load import load_data
    from podium.recipe import load

    path, overrides = recipe_and_flags(context.args, "sample")
    with tempfile.TemporaryDirectory() as folder:  # the Trainer makes its folder even when it does not train
        recipe = load(path, {**overrides, "output_dir": folder})
        prepare_output()
        train_rows, _ = load_data(recipe.data)
        trainer = recipe.trainer(train_rows, None)
        scored = trainer.generate_completions(list(itertools.islice(train_rows, num_prompts)))
        for table in tables(scored, trainer.parts.advantage):
            console.print(table)


def tables(scored: list[ScoredGroup], settings: Any) -> list[Table]:
    """One table for each prompt: its completions with every reward, their weighted sum and the advantage."""
    import numpy as np
    from rich import box
    from rich.table import Table

    from podium.advantages import advantages
    from podium.cli.terminal import last_user_turn, shown

    result = advantages(np.stack([group.rewards_GK for group in scored]), settings)
    made = []
    for p, each in enumerate(scored):
        prompt = each.group.prompt
        title = f"Row {prompt.row}: {last_user_turn(prompt.content)}"
        table = Table(title=shown(title), title_justify="left", box=box.SIMPLE_HEAD)
        for name in (*each.names_K, "reward", "advantage"):
            table.add_column(name, justify="right", no_wrap=True)
        for name in ("ended", "completion"):
            table.add_column(name, overflow="fold")
        for g, completion in enumerate(each.group.completions):
            numbers = (*each.rewards_GK[g], result.reward_PG[p, g], result.advantages_PG[p, g])
            table.add_row(*(_number(x) for x in numbers), completion.finish, shown(completion.text))
        made.append(table)
    return made


def _number(value: float) -> str:
    return "none" if value != value else f"{value:.2f}"
