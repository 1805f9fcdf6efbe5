"""MODEL_OR_RUN on the command line: what to load, and by which data, rewards and settings to measure it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.data.loading import DataSpec
    from podium.evaluation.evaluate import Policy, Task
    from podium.recipe import Recipe
    from podium.runs.find_model import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model on the command line."""

    given: str
    source: ModelSource
    run: Path | None
    """The folder of the run that it came from."""

    @property
    def name(self) -> str:
        """Short, for tables and files: `quickstart`, `quickstart/checkpoint-20`, `smollm2-135m-instruct`.

        >>> from podium.runs.find_model import ModelSource
        >>> Target(given="runs/x/checkpoint-20", source=ModelSource(base=""), run=Path("runs/x")).name
        'x/checkpoint-20'
        """
        own = Path(self.given).resolve().name if Path(self.given).is_dir() else self.given.removeprefix("builtin:")
        own = own.rstrip("/").rsplit("/", 1)[-1]
        if self.run is None or Path(self.given).resolve() == self.run.resolve():
            return own
        return f"{self.run.resolve().name}/{own}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How the command line wants things measured."""

    recipe: str = ""
    data: str = ""
    split: str = ""
    k: int | None = None
    samples: int | None = None
    greedy: bool = False
    temperature: float | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Any key of a recipe."""

    @classmethod
    def of(cls, options: Mapping[str, Any], overrides: Mapping[str, Any]) -> Asked:
        """Out of all the options of a verb (`context.params`), and the keys of a recipe among its flags."""
        own = {field.name for field in dataclasses.fields(cls)}
        return cls(overrides=overrides, **{name: value for name, value in options.items() if name in own})


def find_target(name: str) -> Target:
    """What a name on the command line stands for.

    Raises:
        ModelError: nothing there.
    """
    from podium.runs.find_model import find_model
    from podium.runs.run import CONFIG

    source = find_model(name)
    folder = Path(name).expanduser()
    parents = [folder.resolve().parent] if folder.is_dir() and folder.resolve().name.startswith("checkpoint-") else []
    places = [folder, *parents]
    run = next((place for place in places if (place / CONFIG).is_file()), None)
    return Target(given=name, source=source, run=run)


def base_of(target: Target) -> Target:
    """The model that a run started from.

    Raises:
        ConfigError: it is no run.
    """
    import yaml

    from podium.runs.run import CONFIG

    if target.run is None:
        raise ConfigError(
            f"{target.given} belongs to no run, so there is no base to compare it with.", fix="podium compare A B"
        )
    config = yaml.safe_load((target.run / CONFIG).read_text(encoding="utf-8")) or {}
    base = config.get("model") or config.get("model_name_or_path")
    if not base:
        raise ConfigError(f"{target.run / CONFIG} names no model.", fix=f"podium compare BASE {target.given}")
    return find_target(str(base))


def recipe_of(target: Target, asked: Asked) -> Recipe:
    """The recipe to measure a model by: the one that is named, else that of its run, else flags alone.

    Raises:
        ConfigError: none of them, or wrong.
    """
    from podium.recipe import load
    from podium.recipe.document import Document
    from podium.runs.run import CONFIG

    overrides = dict(asked.overrides)
    if asked.recipe:
        return load(asked.recipe, {"report_to": "none", **overrides})
    if target.run is not None:
        _check_has_recipe(target.run / CONFIG, asked)
        return load(target.run / CONFIG, {"report_to": "none", **overrides})
    if asked.data:
        overrides.setdefault("dataset", asked.data)
    if missing := [name for name in ("dataset", "rewards") if name not in overrides]:
        flags = {"dataset": "--data FILE", "rewards": "--rewards NAME ..."}
        raise ConfigError(
            f"{target.given} is a model, not a run: it does not say how to measure it.",
            fix=f"Give {' and '.join(flags[name] for name in missing)}, or --recipe FILE (or the name of one that "
            "comes with Podium: quickstart).",
        )
    document = Document(name="the command line", folder=Path(), values={}, lines={})
    return load(document, {"model": target.given, "report_to": "none", **overrides})


def _check_has_recipe(config: Path, asked: Asked) -> None:
    """A run that a script started has functions as rewards and rows as data, which no file holds."""
    import yaml

    values = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    if not {"dataset", "datasets", "dataset_name"} & {*values, *asked.overrides}:
        raise ConfigError(
            f"{config} names no dataset: the run was started by a script, which alone has its data and rewards.",
            fix="Give --recipe FILE with `dataset` and `rewards`.",
        )


def task_of(recipe: Recipe, asked: Asked) -> Task:
    """What to ask and how to score.

    Raises:
        PodiumError: settings, data or rewards that cannot be had.
    """
    from podium.evaluation import accuracy_name
    from podium.evaluation.evaluate import Task, decided
    from podium.rewards.resolve import resolve_rewards

    count = num_completions(recipe, asked)
    args = decided(recipe.arguments())
    rewards = resolve_rewards(
        [spec.function for spec in recipe.rewards],
        None,
        args.model_init_kwargs,
        trust_remote_code=args.trust_remote_code,
        chat_template_kwargs=args.chat_template_kwargs,
        device=args.device,
    )
    rows, data = rows_of(recipe, asked)
    return Task(
        data=data,
        rows=rows,
        rewards=rewards,
        accuracy=recipe.accuracy or accuracy_name([reward.name for reward in rewards]),
        args=args,
        num_completions=count,
        greedy=asked.greedy,
        temperature=recipe.eval_temperature if asked.temperature is None else asked.temperature,
        num_rows=recipe.eval_rows if "eval_rows" in recipe.given else None,
    )


def num_completions(recipe: Recipe, asked: Asked) -> int:
    """Completions of each prompt.

    Raises:
        ConfigError: flags that cannot go together.
    """
    if asked.greedy:
        if (asked.k or 1) > 1 or (asked.samples or 1) > 1 or asked.temperature is not None:
            raise ConfigError("--greedy takes the likeliest token always: leave out -k, --samples and --temperature.")
        return 1
    if asked.k is not None and asked.samples is not None and asked.samples < asked.k:
        raise ConfigError(f"pass@{asked.k} needs at least {asked.k} completions; --samples is {asked.samples}.")
    return asked.samples or asked.k or recipe.eval_samples


def rows_of(recipe: Recipe, asked: Asked) -> tuple[Any, str]:
    """The rows to ask, and what to call them: held-out ones unless told otherwise.

    Raises:
        DataError: not there.
        ConfigError: not clear which.
    """
    from podium.data.loading import load_data, shaped
    from podium.data.sources import load_splits

    spec = recipe.data
    name = asked.data or spec.dataset
    if asked.data or asked.split:
        if name is None:
            raise ConfigError(f"{recipe.name} mixes datasets, whose splits cannot be named: leave out --split.")
        config = None if asked.data else spec.dataset_config
        splits = load_splits(name, config=config, streaming=spec.dataset_streaming)
        split = asked.split or (next(iter(splits)) if len(splits) == 1 else spec.dataset_test_split)
        if split not in splits:
            raise ConfigError(f"{name} has no split `{split}`.", fix=f"Type --split with one of: {', '.join(splits)}.")
        return shaped(splits[split], spec.columns, str(name)), name if len(splits) == 1 else f"{name} ({split})"
    held_out = load_data(dataclasses.replace(spec, use_test_split="if there"))[1]
    if held_out is None:
        raise ConfigError(
            f"{recipe.name} holds nothing out.",
            fix=f"Give --data FILE, or --split {spec.dataset_train_split} for the rows it trains on, which says little "
            "about new ones.",
        )
    return held_out, held_out_name(spec)


def held_out_name(spec: DataSpec) -> str:
    """What to call the rows that a recipe holds out."""
    side = spec.dataset_test_split if spec.held_out is None else "held out"
    return spec.eval_dataset or f"{spec.name} ({side})"


def policy_of(target: Target, recipe: Recipe) -> Policy:
    """What to load."""
    from podium.evaluation.evaluate import Policy

    return Policy(name=target.name, source=target.source, quantization_config=recipe.quantization_config())


def stem(name: str, task: Task) -> str:
    """Of the files of an evaluation: its model, data and way of sampling."""
    how = "greedy" if task.greedy else f"{task.num_completions}x-t{task.temperature or task.args.temperature:g}"
    data = Path(task.data).stem if Path(task.data).suffix else task.data.removeprefix("builtin:")
    return "-".join(re.sub(r"[^\w.]+", "-", part).strip("-") for part in (name, data, how))
