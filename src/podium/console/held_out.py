"""Held-out prompts before and after training: sampled, scored, kept in the run's folder, compared."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.console.comparison import show_comparison
from podium.console.terminal import print_on_main
from podium.data.selection import sampled_rows
from podium.evaluation import EvalScores, EvalSummary, compare, measure, numbers, summarize
from podium.evaluation.baselines import baselines
from podium.evaluation.evaluate import how
from podium.evaluation.held_out import evidence
from podium.evaluation.saved import EvalSettings, save, write_json
from podium.records import ScoredGroup
from podium.runs import run
from podium.runs.environment import reward_source
from podium.trainer.rollouts import EVALUATION
from podium.trainer.settings import call_settings

if TYPE_CHECKING:
    from podium.evaluation.comparison import Comparison
    from podium.trainer.trainer import GRPOTrainer


@dataclass(frozen=True, slots=True)
class Size:
    """Number of held-out prompts at most, and of completions for each."""

    prompts: int
    completions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutResult:
    """One evaluation on held-out prompts."""

    numbers: EvalSummary
    measured: EvalScores
    groups: list[ScoredGroup]
    settings: EvalSettings


def measure_held_out(
    trainer: GRPOTrainer, rows: Any, when: str, *, folder: Path, data: str, size: Size, hint: str = ""
) -> HeldOutResult:
    """Sample held-out prompts several times each, at `eval_temperature`, and score the completions.

    The numbers are kept in the run's folder; `data` is the name of the rows. `hint` is added to the line that is
    printed.
    """
    args = trainer.args
    scoring = trainer.run.scoring
    asked = dict(sampled_rows(rows, size.prompts))
    left_out = hasattr(rows, "__len__") and len(asked) < len(rows)
    many = f"{len(asked)} of {len(rows):,}" if left_out else f"{len(asked)}"
    each = f"{size.completions} completions each" if size.completions > 1 else "one completion each"
    print_on_main(f"{when} training: {many} held-out prompts, {each}{hint} ...")
    drawing = {"num_generations": size.completions, "temperature": args.eval_temperature}
    groups = trainer.generate_completions([*asked.values()], numbers=[*asked], **drawing)
    measured = measure(groups, scoring.advantage.weights_K, scoring.accuracy)
    if when == "after" and trainer.is_world_process_zero():  # not before: no extra call of a reward before training
        prompts = [each.group.prompt for each in groups]
        found = baselines(
            prompts,
            scoring.rewards,
            measured.weights_K,
            scoring.accuracy,
            call_settings(args),
            environments=trainer.run.agents.pools is not None,
        )
        measured = dataclasses.replace(measured, baselines=found)
    summary = summarize(measured)
    settings = _settings(trainer, measured, size, model=f"{folder.resolve().name}, {when}", data=data)
    if trainer.is_world_process_zero():
        settings = save(folder / run.EVALUATION / f"{when}.parquet", settings, [groups])
        contents = {"temperature": args.eval_temperature, **numbers(summary), **evidence(measured)}
        write_json(folder / run.EVALUATION / f"{when}.json", contents)
    return HeldOutResult(numbers=summary, measured=measured, groups=groups, settings=settings)


def _settings(trainer: GRPOTrainer, measured: EvalScores, size: Size, *, model: str, data: str) -> EvalSettings:
    """Settings of the evaluation, as `podium eval` writes them."""
    args = trainer.args
    run = trainer.run
    sampling = run.step.sampling(size.completions, EVALUATION, temperature=args.eval_temperature or None)
    rounded = getattr(run.policy.forward.precision, "enabled", None)
    return EvalSettings(
        model=model,
        data=data,
        names=measured.names_K,
        weights=tuple(map(float, measured.weights_K)),
        accuracy=measured.accuracy,
        code=tuple(reward_source(reward).get("sha256", "") for reward in run.scoring.rewards),
        products={None: "", True: "bfloat16", False: "float32"}[rounded],
        **how(sampling, run.step.engine, run.policy.tokenizer),
    )


def print_before_and_after(folder: Path, before: HeldOutResult, after: HeldOutResult) -> Comparison:
    """Compare both on the same prompts: printed with a verdict, kept in the run's folder, and returned."""
    settings = (before.settings, after.settings)
    found = compare(before.measured, after.measured, names=("before", "after"), settings=settings)
    write_json(folder / run.EVALUATION / "comparison.json", found.to_json())
    line = after.measured.baselines.line(found.metric)
    show_comparison((before.numbers, after.numbers), (before.groups, after.groups), f"{line}\n{found.verdict}".strip())
    return found
