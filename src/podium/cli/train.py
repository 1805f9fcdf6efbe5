"""`podium train RECIPE`: check, measure held-out prompts, train, measure again. With stages or without, one way."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podium.cli.check import is_of_reward_test, print_truths
from podium.cli.flags import NodeFlags, takes_records
from podium.console.next_command import next_line
from podium.console.terminal import (
    console,
    errors,
    ignoring_closed_pipes,
    is_main,
    prepare_output,
    print_findings,
    print_on_main,
    quiet,
)
from podium.errors import AgentError, EngineError, RewardError
from podium.isolation.machine import drop_if_gone, on_end_signals
from podium.runs.checkpoint import going_on
from podium.runs.occupied import occupying
from podium.runs.redaction import without_secrets

if TYPE_CHECKING:
    from podium.errors import Finding
    from podium.recipe import Recipe
    from podium.recipe.document import Document
    from podium.recipe.recipe import Stage
    from podium.trainer.checkpointing import EndsOnSignal
    from podium.trainer.health import ProgressLine
    from podium.trainer.trainer import GRPOTrainer

STOPPED = 3
"""Exit code of a run that a finding has stopped."""
UNFINISHED = os.EX_TEMPFAIL
"""Exit code (75) of a run that a signal has ended with a checkpoint: the same with `--resume auto` goes on."""


@takes_records
def train(
    context: typer.Context,
    no_eval: Annotated[
        bool, typer.Option("--no-eval", help="Do not look at held-out prompts before and after.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Print every check of the proof on the first batch.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option("--processes", metavar="N", help="Start N processes with accelerate's launcher.")
    ] = None,
    accelerate: Annotated[
        str | None,
        typer.Option(
            "--accelerate",
            metavar="CONFIG",
            help="How they share work: ddp (default), fsdp2, hsdp, zero1, zero2, zero3, or accelerate's config file.",
        ),
    ] = None,
    *,
    machines: NodeFlags,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            min=0,
            help="After a signal to end, how long to wait for the end of the step and its checkpoint.",
        ),
    ] = None,
) -> None:
    """Train as a recipe says.

    RECIPE is a YAML file, or the name of a recipe that comes with Podium (see `podium recipes`). Every key of a recipe
    is also a flag, with dashes or underscores: --learning_rate 2e-6, --num-generations=4, --bf16, --no-bf16.

    --resume auto goes on from the newest checkpoint in output_dir, and starts where there is none.
    """
    from podium.cli.launch import as_started, launch
    from podium.cli.words import recipe_and_flags

    path, overrides = recipe_and_flags(context.args, "train")
    if processes is not None or accelerate is not None or machines.nodes > 1:
        words = list(context.args)
        if no_eval:
            words.append("--no-eval")
        if verbose:
            words.append("--verbose")
        if grace is not None:
            words.append(f"--grace={grace}")
        raise typer.Exit(launch(words, processes, accelerate, machines))
    with as_started(), ended_by_signals(), ignoring_closed_pipes():
        run(path, overrides, evaluate=not no_eval, verbose=verbose, grace=grace)


def run(
    path: str | Document,
    overrides: dict[str, Any],
    *,
    evaluate: bool,
    verbose: bool = False,
    grace: float | None = None,
) -> None:
    """Everything `podium train` does."""
    started = time.perf_counter()
    recipe, found = _checked(path, overrides)
    os.environ.update(recipe.env)
    with occupying(recipe.folder) if is_main() else contextlib.nullcontext():
        prepare_output(details=verbose)
        job = (StagesRun if recipe.stages else SingleRun)(recipe, found, grace)
        outcome = _run(job, started, evaluate=evaluate)
        if outcome is None or not is_main():
            return
        if outcome == "no better" and (recipe.stages or not isinstance(path, str)):
            outcome = "better or not known"
        print_on_main(next_line(f"train, {outcome}", recipe=shlex.quote(str(path)), run=str(job.folder)))


def _checked(path: str | Document, overrides: dict[str, Any]) -> tuple[Recipe, list[Finding]]:
    """The recipe and its findings, warnings printed; errors, and what this machine lacks, are one `ConfigError`."""
    from podium.checks import as_error, examine, worth_saying
    from podium.checks.table import NOT_HERE

    quiet()
    checked = examine(path, overrides, keep_rows=True)
    wrong = [finding for finding in checked.findings if finding.severity == "error" or finding.code in NOT_HERE]
    if checked.recipe is None or wrong:
        if is_main() and is_of_reward_test(wrong):
            print_truths(errors, checked.tables)
        raise as_error(str(path), wrong)
    if is_main():
        printed = worth_saying(checked.findings)
        print_findings(errors, printed)
        if is_of_reward_test(printed):
            print_truths(errors, checked.tables)
            errors.print(f"More of the rewards: podium rewards test {path}", markup=False, soft_wrap=True)
    return checked.recipe, checked.findings


def _run(job: SingleRun | StagesRun, started: float, *, evaluate: bool) -> str | None:
    """Measure, train, measure again; the outcome as the doctor has it, None where nothing was left to train."""
    from podium.cli.report import report_of_finished_run
    from podium.cli.targets import held_out_name
    from podium.console.held_out import Size, measure_held_out, print_before_and_after
    from podium.runs.run import Run

    held_out = job.held_out if evaluate else None
    size = Size(job.recipe.eval_rows, job.recipe.eval_samples)
    measure = partial(measure_held_out, folder=job.folder, data=held_out_name(job.recipe.data), size=size)
    measures = held_out is not None and size.prompts > 0
    before = measure(_judge(job), held_out, "before") if measures else None
    begun = time.perf_counter()
    with resumable(job.folders, job.stop, is_main=is_main()):
        try:
            trainer = job.train()
        finally:
            for line in job.lines:
                line.close()
    trained = time.perf_counter() - begun
    if trainer is None:
        print_on_main(f"All {len(job.recipe.stages)} stages are done. Model saved in {job.folder}")
        return None
    try:
        if measures and not job.stopped and not job.stop.asked:
            after = measure(trainer, held_out, "after")
            if before is not None and after is not None:
                print_before_and_after(job.folder, before, after)
        steps, endings = job.summary()
        saved = None if job.stopped else job.folder
        for text in (*endings, closing(steps, trained, time.perf_counter() - started, saved)):
            print_on_main(text)
    finally:
        if is_main():
            with finished_first():
                print_on_main(report_of_finished_run(job.folder))
    if job.stop.asked:  # after the last step
        raise typer.Exit(UNFINISHED)
    if trainer.args.push_to_hub and not job.recipe.stages:
        trainer.push_to_hub(dataset_name=job.recipe.data.dataset)
    _end(trainer)
    return Run(folder=job.folder).outcome if is_main() else None


def _judge(job: SingleRun | StagesRun) -> GRPOTrainer:
    """The trainer that measures the model before training; what an earlier run left is set aside before that."""
    from podium.runs.recording import set_earlier_run_aside

    judge = job.judge()
    judge.accelerator.wait_for_everyone()  # another process may still load its model from there
    if is_main() and not job.recipe.resume:
        set_earlier_run_aside(job.folder, None, job.recipe.model, [stage.folder for stage in job.recipe.stages])
    return judge


def _end(trainer: Any) -> None:
    """Close what is open; a run that a finding has stopped has an exit code of its own."""
    stopped = trainer.health.decision == "stop"
    if stopped:
        print_on_main("Training was stopped by a finding.")
        print_on_main(next_line("train, with warnings", run=str(trainer.args.output_dir)))
    if hasattr(trainer, "end"):  # transformers 5.18 and later: trackers and process groups
        trainer.end()
    if stopped:
        raise typer.Exit(STOPPED)


class _Job:
    """A run, in stages or not: how it is trained, and by which trainer its model is measured."""

    stopped = False
    """Whether a finding ended a run in stages."""

    def __init__(self, recipe: Recipe, found: list[Finding], grace: float | None) -> None:
        from podium.trainer.checkpointing import EndsOnSignal

        self.recipe = recipe
        self.found = found
        self.folder = recipe.folder
        self.folders = [self.folder / stage.folder for stage in recipe.stages] or [self.folder]
        self.stop = EndsOnSignal(grace)
        self.lines: list[ProgressLine] = []

    def show_line(self, trainer: Any) -> None:
        """Put the progress line in place of the Trainer's bar."""
        from podium.trainer.health import ProgressLine, show_line

        self.lines.append(show_line(trainer, ProgressLine(console)))


class SingleRun(_Job):
    """A recipe without stages: one trainer."""

    def __init__(self, recipe: Recipe, found: list[Finding], grace: float | None) -> None:
        from podium.recipe import trainer_of
        from podium.runs.checkpoint import to_resume_from

        super().__init__(recipe, found, grace)
        rows, self.held_out = recipe.load_rows()
        self.trainer = trainer_of(recipe, callbacks=[self.stop])
        if (begun := to_resume_from(self.folder, asked=recipe.resume)) is not None:
            self.trainer.processes.check_parts(Path(begun))  # before held-out prompts are sampled
        self.trainer.health.config = without_secrets(recipe.given)
        self.trainer.health.overruled_before(found)
        self.show_line(self.trainer)
        count = f"{len(rows):,}" if hasattr(rows, "__len__") else "a stream of"
        names = ", ".join(reward.name for reward in self.trainer.run.scoring.rewards)
        print_on_main(f"{recipe.model}: {count} prompts, rewards {names}")

    def judge(self) -> GRPOTrainer:
        """The trainer that measures the model before training."""
        return self.trainer

    def train(self) -> GRPOTrainer:
        """Train and save."""
        self.trainer.train(resume_from_checkpoint=self.recipe.resume)
        self.trainer.save_model(str(self.folder))
        return self.trainer

    def summary(self) -> tuple[str, list[str]]:
        """Steps taken by this command, and lines about the stages."""
        first = self.lines[0].pace.first
        last = self.trainer.state.global_step
        if self.recipe.resume and first > last:
            done = f"The run had ended at step {last} already: nothing was trained."
            return f"0 of {last} steps", [f"{done} To go on, give a higher --max_steps."]
        return f"{last - first + 1} of {last} steps" if self.recipe.resume and first > 1 else f"{last} steps", []


class StagesRun(_Job):
    """A recipe with stages: a trainer for each, measured before and after as the last stage is."""

    def __init__(self, recipe: Recipe, found: list[Finding], grace: float | None) -> None:
        from podium.stages.running import StagedRun

        super().__init__(recipe, found, grace)
        self.run = StagedRun(recipe, callbacks=lambda stage: [self.stop], began=self._began)
        self.judge = self.run.judge

    @property
    def held_out(self) -> Any:
        """Rows to measure on, or None."""
        return self.recipe.stages[-1].load_rows()[1]

    def _began(self, stage: Stage, trainer: Any, inside: str | None) -> None:
        self.show_line(trainer)
        if stage.kind == "grpo":
            trainer.health.overruled_before(self.found)
        names = ", ".join(spec.name for spec in stage.recipe.rewards) if stage.kind == "grpo" else "supervised"
        until = f", until {stage.until.text}" if stage.until else ""
        bound = f"at most {stage.max_steps} steps" if stage.until else f"{stage.max_steps} steps"
        length = bound if stage.max_steps else f"{stage.recipe.config.get('num_train_epochs', 3):g} epochs"
        on = f", going on from {inside}" if inside else ""
        of = f"Stage {stage.number} of {len(self.recipe.stages)}, {stage.name}"
        print_on_main(f"{of}: {names}; {length}{until}{on}")

    def train(self) -> Any:
        """Train every stage; the last trainer, None where all were done."""
        trainer = self.run.train(resume_from_checkpoint=self.recipe.resume)
        self.stopped = self.run.stopped
        return trainer

    def summary(self) -> tuple[str, list[str]]:
        """Steps of all stages, and how each stage ended."""
        ended = list(zip(self.recipe.stages, self.run.ended, strict=False))
        steps = sum(entry["steps"] for entry in self.run.ended)
        return f"{steps} steps", [ending(stage, entry) for stage, entry in ended]


def ending(stage: Stage, entry: Mapping[str, Any]) -> str:
    """A stage that has ended, in a line."""
    why = "its gate was met" if entry["ended_by"] == "gate" else "its end was reached"
    if stage.until is not None and entry["ended_by"] != "gate":
        why = "its gate was not met"
    return f"Stage {stage.name}: {entry['steps']} steps, {why}"


# ---- the end of a run ----


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it a signal to end unwinds the stack, so that what is open is closed; exit code 128 + its number."""

    def end(number: int, _: object) -> None:
        if number == signal.SIGHUP:
            for stream in (1, 2):
                drop_if_gone(stream)
        raise SystemExit(128 + number)

    with on_end_signals(end):
        yield


@contextlib.contextmanager
def finished_first() -> Iterator[None]:
    """As `ended_by_signals`, at the end of the block."""
    came: list[int] = []
    with on_end_signals(lambda number, _: came.append(number)):
        yield
    if came:
        raise SystemExit(128 + came[0])


@contextlib.contextmanager
def resumable(folders: Sequence[Path], stop: EndsOnSignal, *, is_main: bool) -> Iterator[None]:
    """After a signal to end or Ctrl-C, print how training goes on; `folders` may hold its checkpoints, oldest first.

    The message of a reward, a tool or an engine that fails says it, too.
    """
    write: Callable[[str], object] = sys.stderr.write if is_main else lambda text: None
    try:
        with stop.listening(lambda text: write(f"\n{text}\n")):
            yield
    except KeyboardInterrupt:
        write(f"\n{going_on(folders)}\n")
        raise
    except (RewardError, AgentError, EngineError) as error:
        way = going_on(folders, otherwise="")
        error.fix = "; ".join(filter(None, (error.fix, way[:1].lower() + way[1:])))
        raise
    if stop.agreed:
        write(f"\n{going_on(folders)}\n")
        raise typer.Exit(UNFINISHED)


def closing(steps: str, trained: float, total: float, folder: Path | None) -> str:
    """Steps, seconds and memory of a run, also of its tensors on a GPU; no folder: no model was saved."""
    import torch

    from podium.runs.pace import clock

    saved = f". Model saved in {folder}" if folder else ""
    memory = f"peak memory {peak_bytes() / 1e9:.1f} GB"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        memory = f"peak memory of the GPU {torch.cuda.max_memory_allocated() / 1e9:.1f} GB, {memory} on the host"
    return f"{steps} in {clock(trained)}, all in {clock(total)}; {memory}{saved}"


def peak_bytes() -> int:
    """Most memory this process has had (resident); macOS counts in bytes, Linux in kibibytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
