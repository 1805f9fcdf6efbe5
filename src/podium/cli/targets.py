"""MODEL_OR_RUN on the command line: the weights, and the data, rewards and settings to evaluate them by."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.cli.flags import EvalRequest
from podium.data.rows import OPENED, DataSpec, load_data, opening_of, shaped
from podium.data.selection import plain
from podium.data.sources import folder_of, load_splits
from podium.errors import ConfigError, DataError
from podium.errors.texts import listed
from podium.evaluation import accuracy_name
from podium.planning.columns import chosen_columns
from podium.recipe import Recipe, load
from podium.recipe.document import Document
from podium.runs.find_model import ModelSource, find_model
from podium.runs.run import CONFIG, Run, names_data
from podium.runs.shipping.origin import opening

if TYPE_CHECKING:
    from podium.evaluation.evaluate import EvalTask

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model on the command line."""

    given: str
    source: ModelSource
    run: Path | None
    """The folder of the run that it came from."""

    @property
    def name(self) -> str:
        """Short, for tables and files: `quickstart`, `quickstart/checkpoint-20`, `smollm2-135m-instruct`.

        >>> NamedModel(given="runs/x/checkpoint-20", source=ModelSource(base=""), run=Path("runs/x")).name
        'x/checkpoint-20'
        """
        own = Path(self.given).resolve().name if Path(self.given).is_dir() else self.given.removeprefix("builtin:")
        own = own.rstrip("/").rsplit("/", 1)[-1]
        if self.run is None or Path(self.given).resolve() == self.run.resolve():
            return own
        return f"{self.run.resolve().name}/{own}"


def find_target(name: str, ignore: Collection[str] | None = None) -> NamedModel:
    """The model of a name on the command line. Raises `ModelError` where there is none."""
    source = find_model(name, ignore=ignore)
    folder = Path(name).expanduser()
    parents = [folder.resolve().parent] if folder.is_dir() and folder.resolve().name.startswith("checkpoint-") else []
    run = next((place for place in (folder, *parents) if (place / CONFIG).is_file()), None)
    return NamedModel(given=name, source=source, run=run)


def base_of(target: NamedModel) -> NamedModel:
    """The model that a run started from. Raises `ConfigError` where it is no run."""
    if target.run is None:
        raise ConfigError(
            f"{target.given} belongs to no run, so there is no base to compare it with.",
            fix="podium compare A B",
            given=target.given,
        )
    if not (base := Run(folder=target.run).model):
        raise ConfigError(f"{target.run / CONFIG} names no model.", fix=f"podium compare BASE {target.given}")
    return find_target(base)


def recipe_of(target: NamedModel, request: EvalRequest) -> Recipe:
    """The recipe to evaluate a model by: the one that is named, else that of its run, else flags alone."""
    overrides: dict[str, Any] = {"report_to": "none", **request.overrides}
    if request.recipe:
        return load(request.recipe, overrides)
    if target.run is not None:
        # A run that a script started has functions as rewards and rows as data, which no file holds.
        if not names_data({**Run(folder=target.run).given, **overrides}):
            raise ConfigError(
                f"{target.run / CONFIG} names no dataset: the run was started by a script, which alone has its data "
                "and rewards.",
                fix="Give --recipe FILE with `dataset` and `rewards`.",
            )
        return load(target.run / CONFIG, overrides)
    if request.data:
        overrides.setdefault("dataset", request.data)
    flags = {"dataset": "--data FILE", "rewards": "--rewards NAME ..."}
    if missing := [flag for name, flag in flags.items() if name not in overrides]:
        raise ConfigError(
            f"{target.given} is a model, not a run: it does not say how to measure it.",
            fix=f"Give {' and '.join(missing)}, or --recipe FILE (or the name of one that comes with Podium: "
            "quickstart).",
            given=target.given,
            missing=" and ".join(missing),
        )
    document = Document(name="the command line", folder=Path(), values={}, lines={})
    return load(document, {"model": target.given, **overrides})


def task_of(
    recipe: Recipe,
    request: EvalRequest,
    given: tuple[Any, str] | None = None,
    *,
    source: ModelSource | None = None,
) -> EvalTask:
    """Prompts, rewards and sampling.

    Args:
        recipe: the recipe to evaluate by.
        request: flags of the command line.
        given: rows and their name, in place of those that the request asks for.
        source: the model, whose record may say what its prompts began with.
    """
    from podium.evaluation.evaluate import EvalTask, decided
    from podium.recipe import arguments_of
    from podium.trainer.assembly import environment_pools, program_of, reward_records
    from podium.trainer.run import Arguments

    count = num_completions(recipe, request)
    if request.overrides.get("eval_rows") == 0:
        raise ConfigError(
            "--eval_rows 0 leaves no row to evaluate on.",
            fix="Leave it out, or give a number of rows.",
            settings=("eval_rows",),
        )
    args = decided(arguments_of(recipe))
    pools = environment_pools(recipe.agents.environment)
    program = program_of(Arguments(model=None, agent=recipe.agents.program), args)
    rewards, _ = reward_records([spec.function for spec in recipe.rewards], None, args, pools, program)
    rows, data = given or rows_of(recipe, request, source)
    return EvalTask(
        data=data,
        rows=rows,
        rewards=rewards,
        accuracy=recipe.accuracy or accuracy_name([reward.name for reward in rewards]),
        args=args,
        num_completions=count,
        greedy=request.greedy,
        temperature=recipe.eval_temperature if request.temperature is None else request.temperature,
        num_rows=(recipe.eval_rows or None) if "eval_rows" in recipe.given else None,  # 0: training leaves it out
        tools=recipe.agents.tools,
        pools=pools,
        program=program,
    )


def num_completions(recipe: Recipe, request: EvalRequest) -> int:
    """Completions of each prompt. Raises `ConfigError` for flags that cannot go together."""
    k = request.k
    samples = request.samples
    if request.greedy:
        if (k or 1) > 1 or (samples or 1) > 1 or request.temperature is not None:
            raise ConfigError(
                "--greedy takes the likeliest token always: leave out -k, --samples and --temperature.",
                settings=("temperature",),
            )
        return 1
    if k is not None and samples is not None and samples < k:
        raise ConfigError(f"pass@{k} needs at least {k} completions; --samples is {samples}.", k=k, samples=samples)
    return samples or k or recipe.eval_samples


def rows_of(recipe: Recipe, request: EvalRequest, source: ModelSource | None = None) -> tuple[Any, str]:
    """The rows and their name: held-out ones unless others are requested, whose prompts begin as in training."""
    spec = recipe.data
    name = request.data or spec.dataset
    if request.data or request.split:
        if name is None:
            raise ConfigError(
                f"{recipe.name} mixes datasets, whose splits cannot be named: leave out --split.",
                recipe_name=recipe.name,
            )
        config = None if request.data else spec.dataset_config
        splits = load_splits(name, config=config, streaming=spec.dataset_streaming)
        split = request.split or (next(iter(splits)) if len(splits) == 1 else spec.dataset_test_split)
        if split not in splits:
            raise ConfigError(
                f"{name} has no split `{split}`.",
                fix=f"Type --split with one of: {listed(splits)}.",
                settings=(name,),
                name=name,
                split=split,
                splits=splits,
            )
        rows = _shaped(splits[split], spec, str(name), folder_of(name, split))
        begun = _opening(spec, source) if request.data and not spec.columns.is_chat else None
        return _begun(rows, begun), name if len(splits) == 1 else f"{name} ({split})"
    held_out = load_data(dataclasses.replace(spec, use_test_split="if there"))[1]
    if held_out is None:
        raise ConfigError(
            f"{recipe.name} holds nothing out.",
            fix=f"Give --data FILE, or --split {spec.dataset_train_split} for the rows it trains on, which "
            "says little about new ones.",
            recipe_name=recipe.name,
            dataset_train_split=spec.dataset_train_split,
        )
    return held_out, held_out_name(spec)


def _shaped(rows: Any, spec: DataSpec, name: str, folder: Path | None) -> Any:
    """Rows by the recipe's columns. Raises `ConfigError`, with the flags to type, where they have no prompt."""
    names = list(getattr(rows, "column_names", None) or next(iter(rows), ()))
    if spec.columns.prompt is None and names and "prompt" not in names:
        try:
            found = chosen_columns(names, list(itertools.islice(rows, OPENED))).keys
        except ConfigError:
            found = {}
        flags = [f'--{key} "{found.get(key, "{COLUMN}")}"' for key in ("prompt", "answer") if key not in names]
        raise ConfigError(
            f"{name} has no column `prompt`, and the recipe names no other (its columns: {listed(names)}).",
            fix=f"name the columns: {' '.join(flags)}",
            name=name,
            names=names,
            flags=" ".join(flags),
        )
    return shaped(rows, spec.columns, name, folder=folder)


def _opening(spec: DataSpec, source: ModelSource | None) -> list[Any] | None:
    """The messages that the prompts of the training began with, though no key says so; None: they were plain texts."""
    try:
        found = opening_of(spec) if spec.is_given else None
    except DataError as error:
        found = None
        what = "What the prompts of the training began with cannot be read, and nothing is put in front of these: %s"
        logger.warning(what, error.what)
    if found is not None or source is None:
        return found
    return opening(source) or None


def _begun(rows: Any, begun: Sequence[Any] | None) -> Any:
    """The rows, with these messages in front of every prompt that does not begin so; None: as they are.

    A question that is asked in one of the messages is left out, as training leaves out its examples.
    """
    if begun is None:
        return rows
    before = list(begun)
    shown = {plain(turn["content"]) for turn in before if turn["role"] == "user"}

    def in_front(row: Mapping[str, Any]) -> dict[str, Any]:
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            return {**row, "prompt": [*before, {"role": "user", "content": prompt}]}
        if not isinstance(prompt, list) or prompt[: len(before)] == before:
            return dict(row)
        has_system = any(turn["role"] == "system" for turn in prompt)
        return dict(row) if has_system else {**row, "prompt": [*before, *prompt]}

    def is_shown(row: Mapping[str, Any]) -> bool:
        return isinstance(row.get("prompt"), str) and plain(row["prompt"]) in shown

    if hasattr(rows, "__len__"):
        return [in_front(row) for row in rows if not is_shown(row)]
    return rows.filter(lambda row: not is_shown(row)).map(in_front)


def held_out_name(spec: DataSpec) -> str:
    """The name of the rows that a recipe holds out."""
    side = spec.dataset_test_split if spec.held_out is None else "held out"
    return spec.eval_dataset or f"{spec.name} ({side})"


def stem(name: str, task: EvalTask) -> str:
    """Name of an evaluation's files: its model, data and way of sampling."""
    how = "greedy" if task.greedy else f"{task.num_completions}x-t{task.temperature or task.args.temperature:g}"
    data = Path(task.data).stem if Path(task.data).suffix else task.data.removeprefix("builtin:")
    return "-".join(re.sub(r"[^\w.]+", "-", part).strip("-") for part in (name, data, how))
