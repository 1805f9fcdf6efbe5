"""What trains a recipe: its `GRPOConfig`, and its trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.recipe.recipe import Recipe
    from podium.trainer.config import GRPOConfig
    from podium.trainer.trainer import GRPOTrainer


def arguments_of(recipe: Recipe) -> GRPOConfig:
    """The run's `GRPOConfig`. Raises `ConfigError` for a contradiction, with the line of what is named first."""
    from podium.trainer.config import GRPOConfig, survey

    problems, args = survey(GRPOConfig, recipe.config)
    if problems or args is None:
        raise recipe.placed(problems[0])
    return args


def trainer_of(recipe: Recipe, train_dataset: Any = None, eval_dataset: Any = None, **more: Any) -> GRPOTrainer:
    """The trainer, with its model loaded; datasets are those of the recipe unless given.

    `more` goes to `GRPOTrainer` (callbacks, optimizers, ...).

    Raises:
        PodiumError: settings, rows, rewards or a model that cannot work, before any weight is loaded.
    """
    from podium.trainer.trainer import GRPOTrainer

    if recipe.stages:
        raise ConfigError(
            f"{recipe.name} has {len(recipe.stages)} stages, each with a trainer of its own.",
            fix=f"podium train {recipe.name}, or in Python: podium.Stages.load({recipe.name!r}).train()",
            settings=(recipe.name,),
            name=recipe.name,
            stages_count=len(recipe.stages),
        )
    arguments = arguments_of(recipe)
    if train_dataset is None:
        train_dataset, eval_dataset = recipe.rows or recipe.load_rows()
    return GRPOTrainer(
        model=recipe.model,
        reward_funcs=[spec.function for spec in recipe.rewards],
        args=arguments,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=recipe.peft_config(),
        quantization_config=recipe.quantization_config(),
        **recipe.agents.arguments(),
        **more,
    )
