"""`podium eval MODEL_OR_RUN`: how good a model is on held-out prompts, in numbers with intervals."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podium.cli.targets import Asked, Target
from podium.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from podium.evaluation import HeldOut
    from podium.evaluation.evaluate import Loaded, Policy, Progress, Ready, Task
    from podium.evaluation.saved import Settings

FOLDER = Path("evaluations")
"""Where an evaluation goes that belongs to no run."""

RecipeOption = Annotated[
    str, typer.Option("--recipe", help="A recipe with data, rewards and settings; of a run: its own.")
]
DataOption = Annotated[str, typer.Option("--data", help="A file, folder, hub id or builtin:task, instead of its data.")]
SplitOption = Annotated[str, typer.Option("--split", help="Of the data; the held-out one unless given.")]
KOption = Annotated[int | None, typer.Option("-k", min=1, help="pass@k, from as many completions of each prompt.")]
SamplesOption = Annotated[
    int | None, typer.Option("--samples", min=1, help="Completions of each prompt, where there are to be more than k.")
]
GreedyOption = Annotated[bool, typer.Option("--greedy", help="One completion: the likeliest token, always.")]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", min=1e-6, help="Of sampling; `eval_temperature`, else the training's.")
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Folder to write into; evaluation/ of the run, or evaluations/.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def evaluate(
    context: typer.Context,
    recipe: RecipeOption = "",
    data: DataOption = "",
    split: SplitOption = "",
    k: KOption = None,
    samples: SamplesOption = None,
    greedy: GreedyOption = False,
    temperature: TemperatureOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sample a model on held-out prompts, score the completions, and show accuracy, pass@k and rewards.

    MODEL_OR_RUN is a run's folder, a checkpoint, an adapter, a model folder, a hub id or `builtin:...`. Data, rewards
    and settings are those of its run; any key of a recipe is a flag.
    """
    from podium.cli.structured import print_json
    from podium.cli.targets import find_target, policy_of, recipe_of, stem, task_of
    from podium.cli.terminal import console, prepare_output, shown
    from podium.cli.words import models_and_flags
    from podium.evaluation.evaluate import load, prepare

    [name], overrides = models_and_flags(context.args, "eval", most=1)
    asked = Asked.of(context.params, overrides)  # the options from `recipe` to `temperature`, as one
    target = find_target(name)
    prepare_output()
    measured_by = recipe_of(target, asked)
    task = task_of(measured_by, asked)
    policy = policy_of(target, measured_by)
    ready = prepare(policy, [task])
    path = made_folder(output, target) / f"{stem(target.name, task)}.parquet"
    loaded = load(policy, task.args, ready, task.rewards)
    settings, looked = look(policy, loaded, ready, task, path, k=asked.k)
    if as_json:
        print_json(contents(settings, looked, path))
    else:
        console.print(shown(title(settings, looked)), soft_wrap=True)
        console.print(table(looked))
        console.print(shown(f"Written: {path} and {path.with_suffix('.json').name}"), soft_wrap=True)


def made_folder(output: Path | None, *targets: Target) -> Path:
    """Where evaluations go: what was asked for, else into the last run among the models, else `evaluations`.

    Raises:
        ConfigError: it cannot be made.
    """
    from podium.runs.run import EVALUATION

    runs = [target.run for target in targets if target.run is not None]
    folder = output or (runs[-1] / EVALUATION if runs else FOLDER)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{folder} cannot be written to ({error.strerror})."
        raise ConfigError(what, fix="Give a folder with --output.") from error
    return folder


def look(
    policy: Policy, loaded: Loaded, ready: Ready, task: Task, path: Path, *, k: int | None = None
) -> tuple[Settings, HeldOut]:
    """One evaluation with its progress line, written to `path` and as JSON beside it."""
    from podium.evaluation import summarize
    from podium.evaluation.evaluate import evaluate as run
    from podium.evaluation.evaluate import settings_of
    from podium.evaluation.saved import write_json

    settings = settings_of(policy, task, loaded)
    with progress_line(f"{policy.name} on {task.data}") as on_progress:
        measured = run(loaded, ready, task, settings=settings, path=path, on_progress=on_progress)
    looked = summarize(measured, k=k)
    write_json(path.with_suffix(".json"), contents(settings, looked, path))
    return settings, looked


def contents(settings: Settings, looked: HeldOut, path: Path) -> dict[str, Any]:
    """An evaluation as JSON."""
    from podium.evaluation import numbers

    return {"settings": asdict(settings), **numbers(looked), "completions": str(path)}


# ---- shown ----


def table(looked: HeldOut) -> Table:
    """The numbers of one evaluation."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("")
    made.add_column("", justify="right")
    made.add_column("95 % interval", no_wrap=True)
    for name, interval in rows(looked):
        made.add_row(name, f"{interval.value:.3f}", ends(interval))
    return made


def title(settings: Settings, looked: HeldOut) -> str:
    """What was measured, in a line."""
    each = f"{settings.num_completions} completion{'s' * (settings.num_completions > 1)} each"
    how = "greedy" if settings.greedy else f"{each}, temperature {settings.temperature:g}"
    return f"{settings.model} on {settings.data}: {looked.num_prompts} prompts, {how}"


def rows(looked: HeldOut, *, every_k: bool = True) -> Iterator[tuple[str, Any]]:
    """The numbers by name, in the order of the table; of all pass@k but pass@1 only the last, unless `every_k`."""
    if looked.accuracy is not None:
        yield "accuracy (pass@1)", looked.accuracy
    for k, interval in looked.pass_at.items():
        if k > 1 and (every_k or k == max(looked.pass_at)):
            yield f"pass@{k}", interval
    for name, interval in looked.format.items():
        yield f"format kept ({name})", interval
    yield "reward", looked.reward
    for name, interval in looked.means.items():
        yield f"  {name}", interval
    yield "length, tokens", looked.mean_tokens
    yield "cut off at the limit", looked.truncated


def ends(interval: Any) -> str:
    """`[0.1, 0.2]`; nothing where it is not known."""
    return "" if interval.low != interval.low else f"[{interval.low:.3f}, {interval.high:.3f}]"


@contextlib.contextmanager
def progress_line(title: str) -> Iterator[Progress]:
    """One line on stderr, renewed on a terminal; elsewhere about ten lines in all."""
    from rich.live import Live
    from rich.text import Text

    from podium.cli.terminal import clean, errors

    started = time.perf_counter()
    printed = 0.0
    live = Live(console=errors, auto_refresh=False, transient=True) if errors.is_terminal else None

    def on_progress(done: int, total: int | None) -> None:
        nonlocal printed
        line = Text(clean(f"{title}: {progress(done, total, time.perf_counter() - started)}"), no_wrap=True)
        if live is not None:
            live.update(line, refresh=True)
        elif total is None or done / total - printed >= 0.1 or done == total:
            printed = done / total if total else 0.0
            errors.print(line, soft_wrap=True)

    with live or contextlib.nullcontext():
        yield on_progress


def progress(done: int, total: int | None, seconds: float) -> str:
    """
    >>> progress(20, 80, 10.0), progress(20, None, 10.0)
    ('20/80 prompts, 0:30 left', '20 prompts, 0:10')
    """
    from podium.recipe.estimates.duration import clock

    if total is None:
        return f"{done} prompts, {clock(seconds)}"
    return f"{done}/{total} prompts, {clock(seconds * (total - done) / done)} left"
