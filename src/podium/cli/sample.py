"""`podium sample RECIPE`: prompts, completions, rewards and advantages, without training."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from podium.recipe import Recipe
    from podium.recipe.document import Document
    from podium.records import ScoredGroup
    from podium.trainer.trainer import GRPOTrainer


def sample(
    context: typer.Context,
    num_prompts: Annotated[int, typer.Option("-n", "--num-prompts", min=1, help="Prompts to sample from.")] = 4,
    html: Annotated[str, typer.Option("--html", help="Write them as one page into this file instead.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show prompts, completions, rewards and advantages; trains nothing.

    RECIPE and flags are those of `podium train`.
    """
    from podium.cli.terminal import console, errors, prepare_output
    from podium.cli.words import recipe_and_flags
    from podium.recipe.assume import assumed_words

    path, overrides = recipe_and_flags(context.args, "sample")
    with opened(path, overrides) as (recipe, trainer, rows, _):
        prepare_output()
        if recipe.assumed:
            errors.print(assumed_words(recipe.assumed), soft_wrap=True, markup=False)
        scored = trainer.generate_completions(list(itertools.islice(rows, num_prompts)))
        if html:
            from podium.cli.sample_page import page

            Path(html).write_text(page(scored, trainer.parts.advantage, recipe.name), encoding="utf-8")
            console.print(f"{len(scored)} groups written to {html}")
            return
        if as_json:
            from podium.cli.structured import print_json

            print_json({"groups": plain(scored, trainer.parts.advantage)})
            return
        for table in tables(scored, trainer.parts.advantage):
            console.print(table)


@contextlib.contextmanager
def opened(path: str | Document, overrides: Mapping[str, Any]) -> Iterator[tuple[Recipe, GRPOTrainer, Any, Any]]:
    """A recipe, its trainer, rows to train on and held-out ones (or None); what the Trainer writes is thrown away."""
    from podium.cli.terminal import quiet
    from podium.data.loading import load_data
    from podium.recipe import load

    with tempfile.TemporaryDirectory() as folder:  # the Trainer makes its folder even when it does not train
        recipe = load(path, {**overrides, "output_dir": folder, "report_to": "none"})
        if recipe.stages:  # as training begins
            recipe = next(stage.recipe for stage in recipe.stages if stage.kind == "grpo")
        quiet()
        rows, held_out = load_data(recipe.data)
        yield recipe, recipe.trainer(rows, None), rows, held_out


def tables(scored: list[ScoredGroup], settings: Any) -> list[Table]:
    """One table for each prompt: its completions with every reward, their weighted sum and the advantage."""
    import numpy as np
    from rich import box
    from rich.table import Table

    from podium.algorithm.advantages import advantages
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


def plain(scored: list[ScoredGroup], settings: Any) -> list[dict[str, Any]]:
    """The same as plain values; a reward that said None is NaN."""
    import numpy as np

    from podium.algorithm.advantages import advantages

    result = advantages(np.stack([group.rewards_GK for group in scored]), settings)
    return [
        {
            "row": each.group.prompt.row,
            "prompt": each.group.prompt.content,
            "completions": [
                {
                    "text": completion.text,
                    "tokens": len(completion.token_ids),
                    "finish": completion.finish,
                    "rewards": dict(zip(each.names_K, each.rewards_GK[g], strict=True)),
                    "reward": result.reward_PG[p, g],
                    "advantage": result.advantages_PG[p, g],
                }
                for g, completion in enumerate(each.group.completions)
            ],
        }
        for p, each in enumerate(scored)
    ]


def _number(value: float) -> str:
    return "none" if value != value else f"{value:.2f}"
