"""`podium compare A B`: the same prompts and random numbers for two models, and whether they differ."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podium.cli.flags import EvalRequest, JsonOption, OutputOption, takes_records
from podium.console.next_command import print_next
from podium.console.terminal import console, errors, plain_text, prepare_output, print_json
from podium.errors import ConfigError
from podium.errors.texts import listed, nearest
from podium.runs.run import RECORD, Run

if TYPE_CHECKING:
    from podium.cli.targets import NamedModel
    from podium.evaluation import Comparison
    from podium.evaluation.evaluate import EvalTask
    from podium.evaluation.saved import Saved
    from podium.recipe import Recipe

SAVED = (".parquet", ".json")
"""Endings of an evaluation that was saved."""


@takes_records
def compare(
    context: typer.Context,
    request: EvalRequest,
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
    from podium.evaluation.saved import Saved

    names, overrides = models_and_flags(context.args, "compare", most=2)
    request = dataclasses.replace(request, overrides=overrides)
    if any(name.endswith(SAVED) for name in names):
        _check_only_saved(names, request, also)
        pairs = [(Saved.load(names[0]), Saved.load(names[1]))]
    else:
        pairs = _evaluate(names, request, also, output, by)
    is_better = _show(pairs, by=by, examples=examples, as_json=as_json)
    folder = Path(names[-1])
    if as_json or not folder.is_dir():
        return
    if is_better:
        print_next("compare", run=names[-1], merged=f"{folder.resolve().name}-merged")
    elif any((folder / name).exists() for name in RECORD):
        print_next("compare, no better", run=names[-1])


def _check_only_saved(names: Sequence[str], request: EvalRequest, also: str) -> None:
    if len(names) != 2 or not all(name.endswith(SAVED) for name in names):
        raise ConfigError("Give two saved evaluations, or two models; `podium eval` makes the one of the other.")
    if request != EvalRequest() or also:
        raise ConfigError("Two saved evaluations are compared as they are: of the flags only --by, --show and --json.")


# ---- evaluating both ----


def _evaluate(
    names: Sequence[str], request: EvalRequest, also: str, output: Path | None, by: str | None
) -> list[tuple[Saved, Saved]]:
    from podium.cli.eval import evaluated, made_folder
    from podium.cli.targets import base_of, find_target, recipe_of, stem
    from podium.evaluation.evaluate import Policy, load, prepare, unload

    last = find_target(names[-1], request.ignore)
    targets = (base_of(last) if len(names) == 1 else find_target(names[0], request.ignore), last)
    prepare_output()
    measuring = next((target for target in reversed(targets) if target.run is not None), last)
    recipe = recipe_of(measuring, request)
    tasks = _tasks(recipe, measuring, request, also, by)
    if not request.recipe and (note := _whose_rewards(targets, measuring)):
        errors.print(plain_text(f"note: {note}"), soft_wrap=True)
    names = [target.name for target in targets]
    if names[0] == names[1]:
        names = [f"{names[0]} (A)", f"{names[1]} (B)"]
    config = recipe.quantization_config()
    prepared = [
        prepare(Policy(name=name, source=target.source, quantization_config=config), tasks)
        for name, target in zip(names, targets, strict=True)
    ]
    folder = made_folder(output, *targets)
    saved: list[list[Saved]] = []
    for model in prepared:
        loaded = load(model, tasks[0].args, [reward for task in tasks for reward in task.rewards])
        paths = [folder / f"{stem(model.policy.name, task)}.parquet" for task in tasks]
        saved.append([evaluated(loaded, task, path)[0].saved for task, path in zip(tasks, paths, strict=True)])
        del loaded
        unload()
    return list(zip(*saved, strict=True))


def _tasks(recipe: Recipe, measuring: NamedModel, request: EvalRequest, also: str, by: str | None) -> list[EvalTask]:
    """The set that decides, and the one of `also`: a recipe with rewards of its own, or data for the same ones."""
    from podium.cli.targets import recipe_of, task_of
    from podium.cli.words import is_recipe

    task = task_of(recipe, request, source=measuring.source)
    columns = getattr(task.rows, "column_names", None)
    if by is not None and columns is not None and by not in columns:
        near = nearest(by, columns)
        raise ConfigError(
            f"--by {by}: {task.data} has no such column. It has {listed(columns)}.",
            fix=f"Did you mean `{near}`?" if near else "",
            by=by,
            data=task.data,
            columns=columns,
            near=near,
        )
    if not also:
        return [task]
    recipe_name, data = (also, "") if is_recipe(also) else (request.recipe, also)
    request = dataclasses.replace(request, recipe=recipe_name, data=data, split="")
    second = task_of(recipe_of(measuring, request), request, source=measuring.source)
    args = copy.copy(second.args)
    args.product_precision = task.args.product_precision  # the model is loaded once
    return [task, dataclasses.replace(second, args=args)]


def _whose_rewards(targets: Sequence[NamedModel], measuring: NamedModel) -> str:
    """Name the run whose rewards measure both, where they were trained on different ones."""
    runs = {target.run.resolve(): Run(folder=target.run) for target in targets if target.run is not None}
    keys = ("rewards", "reward_funcs", "reward_weights")
    settings = [{key: run.given.get(key) for key in keys} for run in runs.values()]
    sources = [run.environment.get("rewards") for run in runs.values()]
    if len(runs) < 2 or (settings[0] == settings[1] and sources[0] == sources[1]) or measuring.run is None:
        return ""
    named = {run.name: ", ".join(run.environment.get("reward_weights", {})) or "not known" for run in runs.values()}
    listed = "; ".join(f"{name}: {rewards}" for name, rewards in named.items())
    ours = runs[measuring.run.resolve()].name
    return f"the two runs were trained on other rewards ({listed}). Both are measured with those of {ours}."


# ---- shown ----


def _show(pairs: Sequence[tuple[Saved, Saved]], *, by: str | None, examples: int, as_json: bool) -> bool:
    """Print both models beside each other; whether the second one is better."""
    from podium.console.comparison import categories, changed_prompts, counts, differences
    from podium.evaluation.comparison import regression_check

    prepare_output()
    a, b = pairs[0]
    comparison = _compared(a, b, by)
    also = [(_compared(*pair, None), pair) for pair in pairs[1:]]
    for note in _notes(a, b, comparison):
        errors.print(plain_text(f"note: {note}"), soft_wrap=True)
    if as_json:
        second = None
        for found, (of_a, of_b) in also:
            check = regression_check(found, of_b.settings.data)
            second = {**found.to_json(), "completions": [str(of_a.path), str(of_b.path)], "verdict": check}
        print_json({**comparison.to_json(), "completions": [str(a.path), str(b.path)], "also": second})
        return comparison.is_better
    console.print(differences(comparison, b.settings.data))
    console.print(plain_text(counts(comparison)), soft_wrap=True)
    if comparison.categories:
        console.print(categories(comparison))
    for word, changed in (("better", comparison.better), ("worse", comparison.worse)):
        if changed and examples:
            console.print(changed_prompts(a, b, word, changed, examples))
    for found, (_, of_b) in also:
        console.print(differences(found, of_b.settings.data))
        console.print(plain_text(regression_check(found, of_b.settings.data)), soft_wrap=True)
    console.print(plain_text(comparison.verdict), soft_wrap=True)
    return comparison.is_better


def _compared(a: Saved, b: Saved, by: str | None) -> Comparison:
    from podium.evaluation import compare as compare_scores

    names = (a.settings.model, b.settings.model)
    if names[0] == names[1]:
        names = (f"{names[0]}, {a.path.stem}", f"{names[1]}, {b.path.stem}")
    return compare_scores(a.scores(), b.scores(), names=names, settings=(a.settings, b.settings), by=by)


_SHOULD_AGREE = ("data", "num_completions", "seed", "engine", "products")
"""Settings that do not turn the verdict; those that do are in it."""


def _notes(a: Saved, b: Saved, comparison: Comparison) -> Iterator[str]:
    for name in _SHOULD_AGREE:
        of_a = getattr(a.settings, name)
        of_b = getattr(b.settings, name)
        if of_a != of_b:
            yield f"`{name}` differs, {of_a} and {of_b}: the models are not all that is compared."
    only_a, only_b = comparison.num_unpaired
    if only_a or only_b:
        yield f"{only_a + only_b} prompts are left out: {only_a} only A has answered, {only_b} only B."
