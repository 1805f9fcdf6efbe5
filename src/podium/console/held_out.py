"""Held-out prompts before and after training: sampled, scored, kept in the run's folder, compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.console.comparison import show_comparison
from podium.console.terminal import print_on_main
from podium.data.selection import sampled_rows
from podium.evaluation import compare
from podium.evaluation.baselines import Scoring
from podium.evaluation.evaluate import settings_of
from podium.evaluation.held_out import HeldOut, keep
from podium.evaluation.saved import write_json
from podium.runs.run import EVALUATION as FOLDER
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


def measure_held_out(
    trainer: GRPOTrainer, rows: Any, when: str, *, folder: Path, data: str, size: Size, hint: str = ""
) -> HeldOut | None:
    """Sample held-out prompts several times each, at `eval_temperature`, and score the completions.

    The numbers are kept in the run's folder by the main process; the others return None. `data` is the name of the
    rows. `hint` is added to the line that is printed.
    """
    args = trainer.args
    run = trainer.run
    asked = dict(sampled_rows(rows, size.prompts))
    left_out = hasattr(rows, "__len__") and len(asked) < len(rows)
    many = f"{len(asked)} of {len(rows):,}" if left_out else f"{len(asked)}"
    completions = f"{size.completions} completions each" if size.completions > 1 else "one completion each"
    print_on_main(f"{when} training: {many} held-out prompts, {completions}{hint} ...")
    groups = trainer.generate_completions(
        [*asked.values()],
        numbers=[*asked],
        num_generations=size.completions,
        temperature=args.eval_temperature,
    )
    if not trainer.is_world_process_zero():
        return None
    scoring = Scoring(
        rewards=run.scoring.rewards,
        weights_K=run.scoring.advantage.weights_K,
        accuracy=run.scoring.accuracy,
        settings=call_settings(args),
        environments=run.agents.pools is not None,
    )
    rounded = getattr(run.policy.forward.precision, "enabled", None)
    settings = settings_of(
        scoring,
        run.step.sampling(size.completions, EVALUATION, temperature=args.eval_temperature or None),
        run.step.engine,
        run.policy.tokenizer,
        model=f"{folder.resolve().name}, {when}",
        data=data,
        products={None: "", True: "bfloat16", False: "float32"}[rounded],
    )
    path = folder / FOLDER / f"{when}.parquet"
    # Without baselines before training: no extra call of a reward.
    held_out = keep(path, settings, [groups], scoring if when == "after" else None)
    write_json(path.with_suffix(".json"), {"temperature": args.eval_temperature, **held_out.contents})
    return held_out


def print_before_and_after(folder: Path, before: HeldOut, after: HeldOut) -> Comparison:
    """Compare both on the same prompts: printed with a verdict, kept in the run's folder, and returned."""
    settings = (before.saved.settings, after.saved.settings)
    found = compare(before.scores, after.scores, names=("before", "after"), settings=settings)
    write_json(folder / FOLDER / "comparison.json", found.to_json())
    show_comparison(before, after, f"{after.scores.baselines.line(found.metric)}\n{found.verdict}".strip())
    return found
