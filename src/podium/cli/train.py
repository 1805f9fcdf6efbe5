"""`podium train RECIPE`: check, look at held-out prompts, train, look again."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from transformers import Trainer

    from podium.evaluation import EvalScores, EvalSummary
    from podium.recipe import Recipe
    from podium.recipe.document import Document
    from podium.records import ScoredGroup
    from podium.trainer.checkpointing import StopsOnTerm
    from podium.trainer.trainer import GRPOTrainer

STOPPED = 3
"""Exit code of a run that a finding has stopped."""

TERMINATED = 143
"""Exit code of a run that SIGTERM has ended."""

ASSUMED = "C040"
"""The note that says what nobody wrote."""

EXAMPLES = 3
"""Held-out prompts whose completions are printed before and after."""


def train(
    context: typer.Context,
    no_eval: Annotated[
        bool, typer.Option("--no-eval", help="Do not look at held-out prompts before and after.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option("--processes", metavar="N", help="Start N processes with accelerate's launcher.")
    ] = None,
    accelerate: Annotated[
        str | None,
        typer.Option(
            "--accelerate",
            metavar="CONFIG",
            help="How they share work: ddp (default), fsdp2, zero1, zero2, zero3, or a config file of accelerate's.",
        ),
    ] = None,
) -> None:
    """Train as a recipe says.

    RECIPE is a YAML file, or the name of a recipe that comes with Podium (see `podium recipes`). Every key of a recipe
    is also a flag, with dashes or underscores: --learning_rate 2e-6, --num-generations=4, --bf16, --no-bf16.
    """
    from podium.cli.launch import as_started, launch
    from podium.cli.words import recipe_and_flags

    path, overrides = recipe_and_flags(context.args, "train")
    if processes is not None or accelerate is not None:
        raise typer.Exit(launch([*context.args, *(["--no-eval"] * no_eval)], processes, accelerate))
    with as_started():
        run(path, overrides, evaluate=not no_eval)


def run(path: str | Document, overrides: dict[str, Any], *, evaluate: bool) -> None:
    """Everything `podium train` does."""
    from podium.runs.occupied import occupying

    started = time.perf_counter()
    recipe = _checked(path, overrides)
    os.environ.update(recipe.env)
    if recipe.stages:
        from podium.cli.stages import run_stages

        return run_stages(recipe, evaluate=evaluate)
    folder = Path(str(recipe.config["output_dir"]))
    with occupying(folder) if int(os.environ.get("RANK", 0)) == 0 else contextlib.nullcontext():
        _run(recipe, started, evaluate=evaluate)


def _run(recipe: Recipe, started: float, *, evaluate: bool) -> None:
    """Training of one stage, with what is before and after it."""
    from podium.cli.progress import ProgressLine
    from podium.cli.report import report_of_finished_run
    from podium.cli.terminal import console, prepare_output
    from podium.runs.redaction import without_secrets
    from podium.trainer.checkpointing import StopsOnTerm

    arguments = recipe.arguments()
    prepare_output()
    train_rows, held_out = recipe.load_rows()
    progress, stop = ProgressLine(console), StopsOnTerm()
    trainer = recipe.trainer(callbacks=[progress, stop])
    silence(trainer)
    say = functools.partial(console.print, soft_wrap=True) if trainer.is_world_process_zero() else nothing
    say(f"{recipe.model}: {_count(train_rows)} prompts, rewards {', '.join(r.name for r in trainer.parts.rewards)}")
    trainer.health.config = without_secrets(recipe.given)

    before = look(recipe, trainer, held_out, say, "before") if evaluate and held_out is not None else None
    begun = time.perf_counter()
    with resumable([Path(arguments.output_dir)], stop, is_main=trainer.is_world_process_zero()):
        try:
            trainer.train(resume_from_checkpoint=recipe.resume)
        finally:
            progress.close()
    trained = time.perf_counter() - begun
    trainer.save_model(arguments.output_dir)
    after = look(recipe, trainer, held_out, say, "after") if before is not None else None
    if before is not None and after is not None and trainer.is_world_process_zero():
        show_looks(console, Path(arguments.output_dir), before, after)
    say(closing(trainer.state.global_step, trained, time.perf_counter() - started, str(arguments.output_dir)))
    if trainer.is_world_process_zero():
        say(report_of_finished_run(str(arguments.output_dir)))
    if arguments.push_to_hub:
        trainer.push_to_hub(dataset_name=recipe.data.dataset)
    end(trainer, say)


@contextlib.contextmanager
def resumable(folders: Sequence[Path], stop: StopsOnTerm, *, is_main: bool) -> Iterator[None]:
    """Training that Ctrl-C or SIGTERM ends says how it goes on; `folders` may hold its checkpoints, oldest first."""
    write: Callable[[str], object] = sys.stderr.write if is_main else nothing
    try:
        with stop.listening(lambda text: write(f"\n{text}\n")):
            yield
    except KeyboardInterrupt:
        write(f"\n{going_on(folders)}\n")
        raise
    if stop.asked:
        write(f"\n{going_on(folders)}\n")
        raise typer.Exit(TERMINATED)


def going_on(folders: Sequence[Path]) -> str:
    """How a run that has ended early goes on from the newest checkpoint in `folders`."""
    from podium.runs.checkpoint import checkpoints

    newest = next((path for folder in reversed(folders) for path in checkpoints(folder)), None)
    if newest is None:
        return (
            "No checkpoint was written, so this run cannot go on. One that can: the same command with "
            "--save_strategy steps --save_steps 20"
        )
    return f"To go on from {newest}: the same command with --resume_from_checkpoint true"


def end(trainer: GRPOTrainer, say: Any) -> None:
    """Close what is open; a run that a finding has stopped says so, and to scripts, too."""
    stopped = trainer.health.decision == "stop"
    if stopped:
        say("Training was stopped by a finding; `podium doctor` on the run's folder says more.")
    if hasattr(trainer, "end"):  # transformers 5.18 and later: trackers and process groups
        trainer.end()
    if stopped:
        raise typer.Exit(STOPPED)


def _checked(path: str | Document, overrides: dict[str, Any]) -> Recipe:
    """The recipe, checked: warnings are printed; errors, and whatever this machine lacks, stop the run.

    Raises:
        ConfigError: with all of them.
    """
    from podium.cli.check import show_findings
    from podium.cli.terminal import errors, quiet
    from podium.recipe.checks import as_error, examine
    from podium.recipe.checks.table import NOT_HERE

    quiet()
    checked = examine(path, overrides, keep_rows=True)
    wrong = [finding for finding in checked.findings if finding.severity == "error" or finding.code in NOT_HERE]
    if checked.recipe is None or wrong:
        raise as_error(str(path), wrong)
    if int(os.environ.get("RANK", 0)) == 0:
        shown = [each for each in checked.findings if each.severity == "warning" or each.code == ASSUMED]
        show_findings(errors, shown)
    return checked.recipe


def silence(trainer: Trainer) -> None:
    """Our line replaces the Trainer's bar and its printed dicts."""
    from transformers import PrinterCallback, ProgressCallback

    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """One look at held-out prompts."""

    numbers: EvalSummary
    measured: EvalScores
    groups: list[ScoredGroup]


def look(recipe: Recipe, trainer: GRPOTrainer, held_out: Any, say: Any, when: str) -> Looked:
    """Sample every held-out prompt several times, score, and keep the numbers in the run's folder."""
    from podium.evaluation import accuracy_name, measure, numbers, summarize

    rows = list(itertools.islice(held_out, recipe.eval_rows))
    say(f"{when} training: {len(rows)} held-out prompts, {recipe.eval_samples} completions each ...")
    groups = trainer.generate_completions(
        rows, num_generations=recipe.eval_samples, temperature=recipe.eval_temperature
    )
    accuracy = recipe.accuracy or accuracy_name(groups[0].names_K)
    measured = measure(groups, trainer.parts.advantage.weights_K, accuracy)
    looked = summarize(measured)
    if trainer.is_world_process_zero():
        _keep(recipe, trainer, measured, groups, {"temperature": recipe.eval_temperature, **numbers(looked)}, when)
    return Looked(numbers=looked, measured=measured, groups=groups)


def _keep(
    recipe: Recipe,
    trainer: GRPOTrainer,
    measured: EvalScores,
    groups: list[ScoredGroup],
    contents: dict[str, Any],
    when: str,
) -> None:
    """Numbers and completions in the run's folder, as `podium eval` writes them."""
    from podium.cli.targets import held_out_name
    from podium.evaluation.evaluate import how
    from podium.evaluation.saved import EvalSettings, save, write_json
    from podium.runs.run import EVALUATION
    from podium.trainer.rollouts import EVALUATION as EVALUATION_ROUND
    from podium.trainer.settings import sampling_settings

    folder = Path(str(recipe.config["output_dir"]))
    sampling = sampling_settings(
        trainer.args,
        trainer.parts.end_ids,
        num_completions=recipe.eval_samples,
        round_number=EVALUATION_ROUND,
        temperature=recipe.eval_temperature,
    )
    settings = EvalSettings(
        model=f"{folder.resolve().name}, {when}",
        data=held_out_name(recipe.data),
        names=measured.names_K,
        weights=tuple(map(float, measured.weights_K)),
        accuracy=measured.accuracy,
        products=_products(trainer),
        **how(sampling, trainer.parts.engine),
    )
    save(folder / EVALUATION / f"{when}.parquet", settings, [groups])
    write_json(folder / EVALUATION / f"{when}.json", contents)


def _products(trainer: GRPOTrainer) -> str:
    """The precision of matrix products on a CPU."""
    rounded = getattr(trainer.parts.precision, "enabled", None)
    return "" if rounded is None else "bfloat16" if rounded else "float32"


def show_looks(console: Any, folder: Path, before: Looked, after: Looked) -> None:
    """Before and after on the same prompts: shown, with a verdict, and kept in the run's folder."""
    from podium.cli.comparison import show_comparison
    from podium.evaluation import compare, numbers
    from podium.evaluation.saved import write_json
    from podium.runs.run import EVALUATION

    found = compare(before.measured, after.measured, names=("before", "after"))
    write_json(folder / EVALUATION / "comparison.json", numbers(found))
    looks, groups = (before.numbers, after.numbers), (before.groups, after.groups)
    show_comparison(console, looks, groups, found.verdict, EXAMPLES)


def closing(steps: int, trained: float, total: float, folder: str | None) -> str:
    """What a run took, in seconds; None: no model was saved."""
    from podium.recipe.estimates.duration import clock

    saved = f". Model saved in {folder}" if folder else ""
    return f"{steps} steps in {clock(trained)}, all in {clock(total)}; {peak_words()}{saved}"


def peak_words() -> str:
    """The most memory that the process has had, and that its tensors have had on a GPU."""
    import torch

    host = f"peak memory {peak_bytes() / 1e9:.1f} GB"
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return host
    return f"peak memory of the GPU {torch.cuda.max_memory_allocated() / 1e9:.1f} GB, {host} on the host"


def peak_bytes() -> int:
    """Most memory this process has had (resident); macOS counts in bytes, Linux in kibibytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _count(rows: Any) -> str:
    return f"{len(rows):,}" if hasattr(rows, "__len__") else "a stream of"


def nothing(*_: Any) -> None:
    """In place of printing, on all processes but the first."""
