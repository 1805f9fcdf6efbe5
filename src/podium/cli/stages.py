"""`podium train` of a recipe with stages."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from podium.recipe import Recipe
    from podium.recipe.recipe import Stage
    from podium.recipe.stages.running import StagedRun


def run_stages(recipe: Recipe, *, evaluate: bool) -> None:
    """Look at held-out prompts, train stage after stage, look again: judged as the last stage is, both times."""
    from podium.cli.report import report_of_finished_run
    from podium.cli.terminal import console, prepare_output
    from podium.cli.train import closing, end, look, nothing, show_looks
    from podium.recipe.stages.running import StagedRun

    started = time.perf_counter()
    prepare_output()
    run = StagedRun(recipe)
    say = functools.partial(console.print, soft_wrap=True, markup=False) if run.is_main else nothing
    held_out = recipe.stages[-1].load_rows()[1] if evaluate else None
    before = None if held_out is None else look(recipe, run.judge(), held_out, say, "before")
    begun = time.perf_counter()
    trainer = _train(run, say)
    trained = time.perf_counter() - begun
    if trainer is None:
        say(f"All {len(recipe.stages)} stages are done. Model saved in {run.folder}")
        return
    if before is not None and not run.stopped:
        after = look(recipe, trainer, held_out, say, "after")
        if run.is_main:
            show_looks(console, run.folder, before, after)
    for stage, entry in zip(recipe.stages, run.ended, strict=False):
        say(ending(stage, entry))
    steps = sum(entry["steps"] for entry in run.ended)
    say(closing(steps, trained, time.perf_counter() - started, None if run.stopped else str(run.folder)))
    if run.is_main:
        say(report_of_finished_run(run.folder))
    end(trainer, say)


def _train(run: StagedRun, say: Callable[..., None]) -> Any:
    """Every stage with a line of progress of its own."""
    from podium.cli.progress import ProgressLine
    from podium.cli.terminal import console
    from podium.cli.train import resumable, silence
    from podium.trainer.checkpointing import StopsOnTerm

    lines: list[ProgressLine] = []
    stop = StopsOnTerm()

    def callbacks(stage: Stage) -> list[TrainerCallback]:
        lines.append(ProgressLine(console))
        return [lines[-1], stop]

    def began(stage: Stage, trainer: Any, inside: str | None) -> None:
        silence(trainer)
        say(introduction(stage, len(run.stages), inside))

    run.callbacks, run.began = callbacks, began
    with resumable([run.folder / stage.folder for stage in run.stages], stop, is_main=run.is_main):
        try:
            return run.train(resume_from_checkpoint=run.recipe.resume)
        finally:
            for line in lines:
                line.close()


def introduction(stage: Stage, count: int, inside: str | None) -> str:
    """What a stage is, in a line."""
    names = ", ".join(spec.name for spec in stage.recipe.rewards) if stage.kind == "grpo" else "supervised"
    until = f", until {stage.until.text}" if stage.until else ""
    bound = f"at most {stage.max_steps} steps" if stage.until else f"{stage.max_steps} steps"
    length = bound if stage.max_steps else f"{stage.recipe.config.get('num_train_epochs', 3):g} epochs"
    on = f", going on from {inside}" if inside else ""
    return f"Stage {stage.number} of {count}, {stage.name}: {names}; {length}{until}{on}"


def ending(stage: Stage, entry: Mapping[str, Any]) -> str:
    """How a stage ended, in a line."""
    why = "its gate was met" if entry["ended_by"] == "gate" else "its end was reached"
    if stage.until is not None and entry["ended_by"] != "gate":
        why = "its gate was not met"
    return f"Stage {stage.name}: {entry['steps']} steps, {why}"
