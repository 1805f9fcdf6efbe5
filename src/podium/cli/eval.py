"""`podium eval MODEL_OR_RUN`: how good a model is on held-out prompts, in numbers with intervals."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.live import Live
from rich.text import Text

from podium.cli.flags import EvalRequest, JsonOption, OutputOption, takes_records
from podium.console.next_command import print_next
from podium.console.terminal import console, errors, plain_text, prepare_output, print_json
from podium.errors import ConfigError
from podium.errors.texts import clean, counted
from podium.runs.run import EVALUATION

if TYPE_CHECKING:
    from podium.cli.targets import NamedModel
    from podium.evaluation.evaluate import EvalTask, LoadedModel, Progress
    from podium.evaluation.held_out import HeldOut

FOLDER = Path("evaluations")
"""Folder of evaluations that belong to no run."""


@takes_records
def evaluate(
    context: typer.Context, request: EvalRequest, output: OutputOption = None, as_json: JsonOption = False
) -> None:
    """Sample a model on held-out prompts, score the completions, and show accuracy, pass@k and rewards.

    MODEL_OR_RUN is a run's folder, a checkpoint, an adapter, a model folder, a hub id or `builtin:...`. Data, rewards
    and settings are those of its run; any key of a recipe is a flag.
    """
    from podium.cli.targets import find_target, recipe_of, stem, task_of
    from podium.cli.words import models_and_flags
    from podium.console.comparison import evaluation_table
    from podium.evaluation.comparison import standing
    from podium.evaluation.evaluate import Policy, load, prepare

    [name], overrides = models_and_flags(context.args, "eval", most=1)
    request = dataclasses.replace(request, overrides=overrides)
    target = find_target(name, request.ignore)
    prepare_output()
    recipe = recipe_of(target, request)
    task = task_of(recipe, request, source=target.source)
    policy = Policy(name=target.name, source=target.source, quantization_config=recipe.quantization_config())
    prepared = prepare(policy, [task])
    path = made_folder(output, target) / f"{stem(target.name, task)}.parquet"
    held_out, contents = evaluated(load(prepared, task.args, task.rewards), task, path, k=request.k)
    if as_json:
        print_json(contents)
    else:
        console.print(plain_text(title(held_out)), soft_wrap=True)
        console.print(evaluation_table(held_out.summary))
        for text in filter(None, (contents["baselines"]["line"], *standing(held_out.scores))):
            console.print(plain_text(text), soft_wrap=True)
        console.print(plain_text(f"Written: {path} and {path.with_suffix('.json').name}"), soft_wrap=True)
        if target.run is not None:
            print_next("eval", model=name)


def made_folder(output: Path | None, *targets: NamedModel) -> Path:
    """Make the folder for evaluations: `output`, else one in the last run among the models, else `evaluations`."""
    runs = [target.run for target in targets if target.run is not None]
    folder = output or (runs[-1] / EVALUATION if runs else FOLDER)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to ({error.strerror}).",
            fix="Give a folder with --output.",
            folder=folder,
            strerror=error.strerror,
        ) from error
    return folder


def evaluated(
    loaded: LoadedModel, task: EvalTask, path: Path, *, k: int | None = None
) -> tuple[HeldOut, dict[str, Any]]:
    """One evaluation with its progress line, written to `path` and as JSON, the last value, beside it."""
    from podium.evaluation.evaluate import evaluate as run
    from podium.evaluation.saved import write_json

    with progress_line(f"{loaded.prepared.policy.name} on {task.data}") as on_progress:
        held_out = run(loaded, task, path, on_progress, k=k)
    settings = dataclasses.asdict(held_out.saved.settings)
    contents = {"settings": settings, **held_out.contents, "completions": str(path)}
    write_json(path.with_suffix(".json"), contents)
    return held_out, contents


def title(held_out: HeldOut) -> str:
    """The model, the data and the way of sampling, in a line."""
    settings = held_out.saved.settings
    completions = f"{counted(settings.num_completions, 'completion')} each"
    how = "greedy" if settings.greedy else f"{completions}, temperature {settings.temperature:g}"
    return f"{settings.model} on {settings.data}: {held_out.summary.num_prompts} prompts, {how}"


@contextlib.contextmanager
def progress_line(title: str) -> Iterator[Progress]:
    """One line on stderr, renewed on a terminal; elsewhere about ten lines in all."""
    started = time.perf_counter()
    printed = 0.0

    def on_progress(done: int, total: int | None) -> None:
        nonlocal printed
        line = Text(clean(f"{title}: {progress(done, total, time.perf_counter() - started)}"), no_wrap=True)
        if live is not None:
            live.update(line, refresh=True)
        elif total is None or done / total - printed >= 0.1 or done == total:
            printed = done / total if total else 0.0
            errors.print(line, soft_wrap=True)

    on_terminal = errors.is_terminal
    with Live(console=errors, auto_refresh=False, transient=True) if on_terminal else contextlib.nullcontext() as live:
        yield on_progress


def progress(done: int, total: int | None, seconds: float) -> str:
    """
    >>> progress(20, 80, 10.0), progress(20, None, 10.0)
    ('20/80 prompts, 0:30 left', '20 prompts, 0:10')
    """
    from podium.runs.pace import clock

    if total is None:
        return f"{done} prompts, {clock(seconds)}"
    return f"{done}/{total} prompts, {clock(seconds * (total - done) / done)} left"
