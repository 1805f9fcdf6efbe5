"""What is wrong with a run, all of it, before any weight is loaded.

    for finding in podium.check("run.yaml"):
        print(finding)

The list is the table in `podium.recipe.checks.table`: plain functions of a `Setup`, which holds what is knowable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError, PodiumError, with_fix
from podium.records import Finding

if TYPE_CHECKING:
    from podium.recipe.document import Document
    from podium.trainer.config import GRPOConfig

__all__ = ["as_error", "check", "check_recipe"]


def check(
    model: Any,
    reward_funcs: Any = None,
    args: GRPOConfig | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    reward_processing_classes: Any = None,
    quantization_config: Any = None,
    peft_config: Any = None,
) -> list[Finding]:
    """What is wrong with a run, errors first. No weight is loaded, and nothing is raised for what is wrong.

    A trainer in the same process is not disturbed: see `podium.recipe.checks.process`.

    Takes the arguments of `GRPOTrainer`; or, alone, a recipe: the path of a YAML file, the name of a recipe that comes
    with Podium, or a `Recipe`.

    >>> from podium import GRPOConfig, check
    >>> rows = [{"prompt": "1 + 1 = ", "answer": "2"}, {"prompt": None, "answer": "3"}]
    >>> def right(completions, answer):
    ...     return [float(a in text) for text, a in zip(completions, answer)]
    >>> args = GRPOConfig("out", per_device_train_batch_size=2, num_generations=2)
    >>> found = check("./nowhere", right, args, rows)
    >>> [(finding.code, finding.what) for finding in found if finding.severity == "error"]
    [('M001', 'There is no folder ./nowhere.'), ('D005', 'train_dataset, row 1: prompt is null')]
    """
    from podium.recipe import Recipe
    from podium.recipe.checks.process import process_as_it_was
    from podium.recipe.checks.setup import from_arguments, of_recipe
    from podium.recipe.checks.stages import of_all
    from podium.recipe.checks.table import findings
    from podium.recipe.stage import Surveyed

    alone = reward_funcs is None and args is None and train_dataset is None
    if alone and isinstance(model, (str, Path)):
        return check_recipe(model)
    with process_as_it_was():
        if isinstance(model, Recipe):
            return of_all([Surveyed(stage) for stage in model.stages]) if model.stages else findings(of_recipe(model))
        return findings(
            from_arguments(
                model,
                reward_funcs,
                args,
                train_dataset,
                eval_dataset,
                processing_class,
                quantization_config,
                peft_config,
                reward_processing_classes,
            )
        )


def check_recipe(path: str | Path | Document, overrides: Mapping[str, Any] | None = None) -> list[Finding]:
    """What is wrong with a recipe and values that override it, errors first."""
    from podium.recipe.checks.process import process_as_it_was
    from podium.recipe.checks.setup import findings_of, from_recipe, stages_of
    from podium.recipe.checks.stages import of_all
    from podium.recipe.checks.table import findings

    with process_as_it_was():
        try:
            stages = stages_of(path, overrides)
        except PodiumError as error:
            return findings_of(error)
        return findings(from_recipe(path, overrides)) if stages is None else of_all(stages)


def as_error(name: str, found: Sequence[Finding]) -> ConfigError:
    """Findings that stop a run as one error; `name` is what they were found in."""
    head = [f"{name} has {len(found)} problems:"] * (len(found) > 1)
    listed = [with_fix(f"{finding.what} [{finding.code}]", finding.fix) for finding in found]
    return ConfigError("\n".join([*head, *listed]), findings=found)
