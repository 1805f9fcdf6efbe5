"""`podium sample RECIPE`: prompts, completions, rewards and advantages, without training."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podium.console.next_command import print_next
from podium.console.terminal import (
    console,
    episode_lines,
    errors,
    failure_lines,
    plain_text,
    prepare_output,
    print_json,
    quiet,
    table,
)
from podium.data.columns import GOLD
from podium.data.images import with_blocks
from podium.errors import ConfigError
from podium.records import as_name, last_user_turn

if TYPE_CHECKING:
    from podium.recipe import Recipe
    from podium.records import ScoredGroup
    from podium.trainer.trainer import GRPOTrainer


def sample(
    context: typer.Context,
    num_prompts: Annotated[int, typer.Option("-n", "--num-prompts", min=1, help="Prompts to sample from.")] = 4,
    html: Annotated[str, typer.Option("--html", help="Write them as one page into this file instead.")] = "",
    save: Annotated[
        str, typer.Option("--save", help="Write the pass rate of every prompt into this file; print numbers alone.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show prompts, completions, rewards and advantages; trains nothing.

    RECIPE and flags are those of `podium train`. The prompts are drawn from all rows. Numbers follow: in how many
    groups rewards differ, which share of prompts is always or never solved, lengths, seconds.
    """
    if save and not Path(save).absolute().parent.is_dir():
        raise ConfigError(
            f"--save {save}: there is no folder {Path(save).parent}.", save=save, folder=Path(save).parent
        )
    from podium.cli.sampled import check_accuracy, drawn_rows, numbers, print_numbers, sample_groups, save_rates
    from podium.cli.words import recipe_and_flags
    from podium.recipe import load
    from podium.recipe.assume import assumed_words

    with opened(load(*recipe_and_flags(context.args, "sample"))) as (recipe, trainer, rows, _):
        prepare_output()
        if recipe.assumed:
            errors.print(assumed_words(recipe.assumed), soft_wrap=True, markup=False)
        if save:
            check_accuracy([reward.name for reward in trainer.run.scoring.rewards], recipe.accuracy)
        drawn = drawn_rows(trainer, rows, num_prompts)
        scored, seconds = sample_groups(trainer, drawn)
        found = numbers(scored, seconds, trainer, recipe.accuracy)
        if save:
            save_rates(Path(save), drawn, scored, recipe.accuracy)
        settings = trainer.run.scoring.advantage
        if html:
            Path(html).write_text(page(scored, settings, recipe.name), encoding="utf-8")
            console.print(f"{len(scored)} groups written to {html}")
        elif as_json:
            print_json({"groups": plain(scored, settings), "numbers": found})
        elif not save:
            print_groups(plain(scored, settings), scored[0].names_K)
        if as_json:
            return
        print_numbers(found)
        if save:
            console.print(f"Pass rates written to {save}; a recipe takes them as `pass_rates: {save}`.", soft_wrap=True)
        print_next("sample", recipe=shlex.join(context.args))


@contextlib.contextmanager
def opened(recipe: Recipe) -> Iterator[tuple[Recipe, GRPOTrainer, Any, Any]]:
    """A recipe, its trainer, rows to train on and held-out ones (or None); files of the Trainer are thrown away."""
    from podium.recipe import trainer_of

    with tempfile.TemporaryDirectory() as folder:  # the Trainer makes its folder even when it does not train
        if recipe.stages:  # as training begins
            recipe = next(stage.recipe for stage in recipe.stages if stage.kind == "grpo")
        recipe = replace(recipe, config={**recipe.config, "output_dir": folder, "report_to": "none"})
        quiet()
        os.environ.update(recipe.env)
        rows, held_out = recipe.load_rows()
        trainer = trainer_of(recipe, rows, None)
        yield recipe, trainer, trainer.run.rows.train if rows is None else rows, held_out


def plain(scored: Sequence[ScoredGroup], settings: Any) -> list[dict[str, Any]]:
    """Groups as plain values; a reward that is None is NaN. `settings` are those of the advantages."""
    import numpy as np

    from podium.algorithm.advantages import advantages

    lengths_PG = np.array([[len(one.logps) for one in group.group.completions] for group in scored])
    result = advantages(np.stack([group.rewards_GK for group in scored]), settings, lengths_PG)
    return [
        {
            "row": group.group.prompt.row,
            "prompt": _named_images(group.group.prompt.content),
            "answer": right_answer(group.group.prompt.columns),
            "completions": [
                {
                    **plain_completion(group, g),
                    "reward": result.reward_PG[p, g],
                    "advantage": result.advantages_PG[p, g],
                }
                for g in range(group.num_completions)
            ],
        }
        for p, group in enumerate(scored)
    ]


def _named_images(content: Any) -> Any:
    """A prompt with the hashes of its images in their places."""
    return content if isinstance(content, str) else with_blocks(content, lambda image, _: as_name(image))


def plain_completion(scored: ScoredGroup, g: int) -> dict[str, Any]:
    """One completion of a group as plain values, with its rewards."""
    from podium.runs.conversations import branches, conversation, written

    completion = scored.group.completions[g]
    return {
        "text": completion.text,
        "tokens": len(completion.token_ids),
        "finish": completion.finish,
        "turns": conversation(written(completion)),
        "branches": branches(completion),
        **dict(zip(("failed", "log"), scored.failure(g), strict=True)),
        "rewards": dict(zip(scored.names_K, scored.rewards_GK[g], strict=True)),
    }


def print_groups(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """A table for each prompt: its completions with every reward, their weighted sum and the advantage.

    Where any completion has several turns, all are printed as conversations, one after the other.
    """
    every = [completion for group in groups for completion in group["completions"]]
    has_turns = any(one["turns"] or one.get("branches") or one.get("failed") for one in every)
    columns = [(name, "right whole") for name in (*names, "reward", "advantage")]
    columns += [("ended", "left"), ("completion", "left")]
    for group in groups:
        title = asked(group["row"], group["prompt"], group["answer"])
        if not has_turns:
            rows = [(*_numbers(one), one["finish"], one["text"]) for one in group["completions"]]
            console.print(table(columns, rows, title=title))
            continue
        console.print(plain_text(f"\n{title}"), style="bold", soft_wrap=True)
        for completion in group["completions"]:
            print_episode(completion, (*names, "reward", "advantage"))


def asked(row: int, prompt: Any, answer: Any) -> str:
    """The title of a prompt's completions."""
    return f"Row {row}: {last_user_turn(prompt)}" + ("" if answer is None else f"\nRight answer: {answer}")


def print_episode(completion: Mapping[str, Any], names: Sequence[str]) -> None:
    """Print an episode with its branches, and how its program has failed."""
    from podium.runs.conversations import Passage, tree_passages

    single = [Passage(True, f"model: {completion['tokens']} tokens", completion["text"])]
    numbers = ", ".join(f"{name} {value}" for name, value in zip(names, _numbers(completion), strict=True))
    console.print(plain_text(f"\n  {numbers}; ended: {completion['finish']}"), soft_wrap=True)
    shown = tree_passages(completion["turns"], completion.get("branches", ())) or single
    failure = failure_lines(completion.get("failed", ""), completion.get("log", ""))
    for line in (*episode_lines(shown), *failure):
        console.print(line, soft_wrap=True)


def right_answer(columns: Mapping[str, Any]) -> Any:
    """The value of the first column with a usual name for it; None: there is none."""
    return next((columns[name] for name in GOLD if columns.get(name) is not None), None)


def page(scored: Sequence[ScoredGroup], settings: Any, name: str) -> str:
    """The same as one HTML page that needs nothing else and runs nothing: its policy allows one style alone."""
    from podium.runs.conversations import tree_passages
    from podium.runs.html import asset, policy, render

    style = asset("groups.css")
    groups = plain(scored, settings)
    for group, source in zip(groups, scored, strict=True):
        group["text"] = source.group.prompt.text
        for completion in group["completions"]:
            completion |= {
                "numbers": _numbers(completion),
                "passages": tree_passages(completion["turns"], completion["branches"]),
            }
    return render(
        "groups.html",
        title=f"Completions of {name}",
        policy=policy([], [style]),
        style=style,
        names=[*scored[0].names_K, "reward", "advantage"],
        groups=groups,
    )


def _numbers(completion: Mapping[str, Any]) -> list[str]:
    values = (*completion["rewards"].values(), *(completion[x] for x in ("reward", "advantage") if x in completion))
    return ["none" if value != value else f"{value:.2f}" for value in values]
