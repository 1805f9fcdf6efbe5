"""Held-out prompts before and after training: sampled, scored, kept in the run's folder, compared."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.cli.comparison import show_comparison
from podium.cli.targets import held_out_name
from podium.cli.terminal import print_on_main
from podium.evaluation import EvalScores, EvalSummary, accuracy_name, compare, measure, numbers, summarize
from podium.evaluation.evaluate import how
from podium.evaluation.saved import EvalSettings, save, write_json
from podium.records import ScoredGroup
from podium.runs import run
from podium.trainer.rollouts import EVALUATION
from podium.trainer.settings import sampling_settings

if TYPE_CHECKING:
    from podium.recipe import Recipe
    from podium.trainer.trainer import GRPOTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutResult:
    """One evaluation on held-out prompts."""

    numbers: EvalSummary
    measured: EvalScores
    groups: list[ScoredGroup]


def measure_held_out(recipe: Recipe, trainer: GRPOTrainer, rows: Any, when: str) -> HeldOutResult:
    """Sample every held-out prompt several times, score, and keep the numbers in the run's folder."""
    rows = list(itertools.islice(rows, recipe.eval_rows))
    print_on_main(f"{when} training: {len(rows)} held-out prompts, {recipe.eval_samples} completions each ...")
    groups = trainer.generate_completions(
        rows, num_generations=recipe.eval_samples, temperature=recipe.eval_temperature
    )
    accuracy = recipe.accuracy or accuracy_name(groups[0].names_K)
    measured = measure(groups, trainer.parts.advantage.weights_K, accuracy)
    result = HeldOutResult(numbers=summarize(measured), measured=measured, groups=groups)
    if trainer.is_world_process_zero():
        folder = Path(str(recipe.config["output_dir"])) / run.EVALUATION
        save(folder / f"{when}.parquet", _settings(recipe, trainer, measured, when), [groups])
        write_json(folder / f"{when}.json", {"temperature": recipe.eval_temperature, **numbers(result.numbers)})
    return result


def _settings(recipe: Recipe, trainer: GRPOTrainer, measured: EvalScores, when: str) -> EvalSettings:
    """Settings of the evaluation, as `podium eval` writes them."""
    sampling = sampling_settings(
        trainer.args,
        trainer.parts.end_ids,
        num_completions=recipe.eval_samples,
        round_number=EVALUATION,
        temperature=recipe.eval_temperature,
    )
    rounded = getattr(trainer.parts.forward.precision, "enabled", None)
    return EvalSettings(
        model=f"{Path(str(recipe.config['output_dir'])).resolve().name}, {when}",
        data=held_out_name(recipe.data),
        names=measured.names_K,
        weights=tuple(map(float, measured.weights_K)),
        accuracy=measured.accuracy,
        products="" if rounded is None else "bfloat16" if rounded else "float32",
        **how(sampling, trainer.parts.engine),
    )


def print_before_and_after(folder: Path, before: HeldOutResult, after: HeldOutResult) -> None:
    """Compare both on the same prompts: printed with a verdict, and kept in the run's folder."""
    found = compare(before.measured, after.measured, names=("before", "after"))
    write_json(folder / run.EVALUATION / "comparison.json", numbers(found))
    show_comparison((before.numbers, after.numbers), (before.groups, after.groups), found.verdict)
