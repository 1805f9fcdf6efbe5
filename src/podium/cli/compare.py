"""`podium compare A B`: the same prompts and random numbers for two models, and whether they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podium.cli.eval import (
    DataOption,
    GreedyOption,
    JsonOption,
    KOption,
    OutputOption,
    RecipeOption,
    SamplesOption,
    SplitOption,
    TemperatureOption,
)
from podium.cli.targets import Asked
from podium.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from podium.cli.targets import Target
    from podium.evaluation import Comparison
    from podium.evaluation.evaluate import Task
    from podium.evaluation.saved import Saved

SAVED = (".parquet", ".json")
"""Endings of an evaluation that was saved."""


def compare(
    context: typer.Context,
    recipe: RecipeOption = "",
    data: DataOption = "",
    split: SplitOption = "",
    k: KOption = None,
    samples: SamplesOption = None,
    greedy: GreedyOption = False,
    temperature: TemperatureOption = None,
    by: Annotated[
        str | None, typer.Option("--by", help="Show differences by this column; `category`, where there is one.")
    ] = None,
    also: Annotated[
        str, typer.Option("--also", help="A second set (data, or a recipe) on which B must not be worse.")
    ] = "",
    examples: Annotated[int, typer.Option("--show", min=0, help="Prompts to show that got better, and worse.")] = 3,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether B is better than A: paired, with intervals, and one test that decides.

    A and B are runs, checkpoints, adapters, models, or two files that `podium eval` has written. One run alone is
    compared with the model it started from. The data, rewards and settings are those of B's run, else of A's.
    """
    from podium.cli.words import models_and_flags

    names, overrides = models_and_flags(context.args, "compare", most=2)
    asked = Asked.of(context.params, overrides)  # the options from `recipe` to `temperature`, as one
    if any(_is_saved(name) for name in names):
        _check_only_saved(names, asked, also)
        pairs = [_load(names)]
    else:
        pairs = _evaluate(names, asked, also, output, by)
    _show(pairs, by=by, examples=examples, as_json=as_json)


def _is_saved(name: str) -> bool:
    return name.endswith(SAVED)


def _check_only_saved(names: Sequence[str], asked: Asked, also: str) -> None:
    if len(names) != 2 or not all(map(_is_saved, names)):
        raise ConfigError("Give two saved evaluations, or two models; `podium eval` makes the one of the other.")
    if asked != Asked() or also:
        raise ConfigError("Two saved evaluations are compared as they are: of the flags only --by, --show and --json.")


def _load(names: Sequence[str]) -> tuple[Saved, Saved]:
    from podium.evaluation.saved import Saved

    return Saved.load(names[0]), Saved.load(names[1])


# ---- evaluating both ----


def _evaluate(
    names: Sequence[str], asked: Asked, also: str, output: Path | None, by: str | None
) -> list[tuple[Saved, Saved]]:
    """Both models on every set; a pair of saved evaluations for each."""
    from podium.cli.eval import look, made_folder
    from podium.cli.targets import base_of, find_target, policy_of, recipe_of, stem, task_of
    from podium.cli.terminal import errors, prepare_output, shown
    from podium.evaluation.evaluate import load, prepare, unload
    from podium.evaluation.saved import Saved

    given = find_target(names[-1])
    targets = (base_of(given), given) if len(names) == 1 else (find_target(names[0]), given)
    prepare_output()
    measuring = next((target for target in reversed(targets) if target.run is not None), given)
    recipes = [recipe_of(measuring, asked)]
    tasks = [task_of(recipes[0], asked)]
    _check_column(tasks[0], by)
    if also:
        second = _asked_also(asked, also)
        recipes.append(recipe_of(measuring, second))
        tasks.append(task_of(recipes[1], second))
        tasks[1] = dataclasses.replace(tasks[1], args=_computed_alike(tasks))
    if not asked.recipe and (told := _whose_rewards(targets, measuring)):
        errors.print(shown(f"note: {told}"), soft_wrap=True)
    policies = [policy_of(target, recipes[0]) for target in targets]
    if policies[0].name == policies[1].name:
        policies = [
            dataclasses.replace(each, name=f"{each.name} ({x})") for each, x in zip(policies, "AB", strict=True)
        ]
    ready = [prepare(policy, tasks) for policy in policies]
    folder = made_folder(output, *targets)
    saved: list[list[Saved]] = [[] for _ in tasks]
    for policy, prepared in zip(policies, ready, strict=True):
        loaded = load(policy, tasks[0].args, prepared, [reward for task in tasks for reward in task.rewards])
        for place, task in enumerate(tasks):
            path = folder / f"{stem(policy.name, task)}.parquet"
            look(policy, loaded, prepared, task, path)
            saved[place].append(Saved.load(path))
        del loaded
        unload()
    return [(a, b) for a, b in saved]


def _whose_rewards(targets: Sequence[Target], measuring: Target) -> str:
    """Name the run whose rewards measure both, where they were trained on different ones."""
    from podium.runs.run import Run

    runs = {target.run.resolve(): Run(folder=target.run) for target in targets if target.run is not None}
    given = [
        {key: run.given.get(key) for key in ("rewards", "reward_funcs", "reward_weights")} for run in runs.values()
    ]
    sources = [run.environment.get("rewards") for run in runs.values()]
    if len(runs) < 2 or (given[0] == given[1] and sources[0] == sources[1]) or measuring.run is None:
        return ""
    named = {run.name: ", ".join(run.environment.get("reward_weights", {})) or "not known" for run in runs.values()}
    listed = "; ".join(f"{name}: {rewards}" for name, rewards in named.items())
    ours = runs[measuring.run.resolve()].name
    return f"the two runs were trained on other rewards ({listed}). Both are measured with those of {ours}."


def _check_column(task: Task, by: str | None) -> None:
    columns = getattr(task.rows, "column_names", None)
    if by is not None and columns is not None and by not in columns:
        there = ", ".join(columns)
        what = f"--by {by}: {task.data} has no such column. It has {there}."
        raise ConfigError(what, fix=did_you_mean(by, columns))


def _asked_also(asked: Asked, also: str) -> Asked:
    """A second set: a recipe with rewards of its own, or data for the same ones."""
    from podium.recipe import shipped_recipes

    if also.endswith((".yaml", ".yml")) or also in shipped_recipes():
        return dataclasses.replace(asked, recipe=also, data="", split="")
    return dataclasses.replace(asked, data=also, split="")


def _computed_alike(tasks: Sequence[Any]) -> Any:
    """The second set's arguments with the first one's precision: the model is loaded once."""
    import copy

    args = copy.copy(tasks[1].args)
    args.product_precision = tasks[0].args.product_precision
    return args


# ---- shown ----


def _show(pairs: Sequence[tuple[Saved, Saved]], *, by: str | None, examples: int, as_json: bool) -> None:
    from podium.cli.comparison import categories, counts, differences, moved
    from podium.cli.structured import print_json
    from podium.cli.terminal import console, errors, prepare_output, shown
    from podium.evaluation.comparison import regression_check

    prepare_output()
    found = [_compared(pair, by if place == 0 else None) for place, pair in enumerate(pairs)]
    (a, b), comparison = pairs[0], found[0]
    checks = [
        regression_check(each.main, each.metric, pair[1].settings.data)
        for each, pair in zip(found[1:], pairs[1:], strict=True)
    ]
    for note in _notes(a, b, comparison):
        errors.print(shown(f"note: {note}"), soft_wrap=True)
    if as_json:
        print_json(_contents(pairs, found, checks))
        return
    console.print(differences(comparison, b.settings.data))
    console.print(shown(counts(comparison)), soft_wrap=True)
    if comparison.categories:
        console.print(categories(comparison))
    for word, places in (("better", comparison.better), ("worse", comparison.worse)):
        if places and examples:
            console.print(moved(a, b, word, places, examples))
    for check, each, pair in zip(checks, found[1:], pairs[1:], strict=True):
        console.print(differences(each, pair[1].settings.data))
        console.print(shown(check), soft_wrap=True)
    console.print(shown(comparison.verdict), soft_wrap=True)


def _compared(pair: tuple[Saved, Saved], by: str | None) -> Comparison:
    from podium.evaluation import compare as compare_measured

    a, b = pair
    names = (a.settings.model, b.settings.model)
    if names[0] == names[1]:
        names = (f"{names[0]}, {a.path.stem}", f"{names[1]}, {b.path.stem}")
    return compare_measured(a.measured(), b.measured(), names=names, by=by)


_SHOULD_AGREE = ("data", "num_completions", "greedy", "temperature", "max_tokens", "seed", "engine", "products")


def _notes(a: Saved, b: Saved, comparison: Comparison) -> list[str]:
    """What makes the comparison less than one of the models alone."""
    notes = []
    for name in _SHOULD_AGREE:
        of_a, of_b = getattr(a.settings, name), getattr(b.settings, name)
        if of_a != of_b:
            notes.append(f"`{name}` differs, {of_a} and {of_b}: the models are not all that is compared.")
    if any(comparison.num_unpaired):
        only_a, only_b = comparison.num_unpaired
        notes.append(f"{only_a + only_b} prompts are left out: {only_a} only A has answered, {only_b} only B.")
    return notes


def _contents(
    pairs: Sequence[tuple[Saved, Saved]], found: Sequence[Comparison], checks: Sequence[str]
) -> Mapping[str, Any]:
    """Everything as JSON; the regression check under `also`."""
    from podium.evaluation import numbers

    listed = [
        {**numbers(each), "completions": [str(saved.path) for saved in pair]}
        for each, pair in zip(found, pairs, strict=True)
    ]
    also = [
        {"verdict": check, **{k: v for k, v in each.items() if k != "verdict"}}
        for check, each in zip(checks, listed[1:], strict=True)
    ]
    return {**listed[0], "also": also[0] if also else None}
