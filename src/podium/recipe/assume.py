"""Values for keys that a recipe leaves out: rewards for tasks of libraries; all keys, where there is no recipe.

`podium train --dataset qa.csv` is a run by this: the columns by their usual names, a reward that compares with the
answer, one prompt in ten held out, the built-in model. Assumed values become a part of the recipe's, so that
`config.yaml` in the run's folder has all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from podium.data.rows import DataSpec, first_rows, part_splits
from podium.data.sources import is_lines, task_library
from podium.errors import PodiumError
from podium.models.builtin import BUILTIN
from podium.planning.propose import ADAPTER, READ, RUN, SMALL_MODEL, Table, Wishes, propose

SPELLINGS: Mapping[str, str] = {
    "model_name_or_path": "model",
    "dataset_name": "dataset",
    "reward_funcs": "rewards",
    "torch_dtype": "dtype",
    "resume": "resume_from_checkpoint",
}
"""Other spellings of keys: TRL's, where one is shorter here, and short ones."""

_IN_TAGS = "Put the final answer inside tags, like this: <answer>your answer</answer>."
_READ_TAGS = frozenset({"answer_correct", "answer_format", "xml_format", "xml_format_partial"})
"""Rewards of the library that find the answer inside tags alone."""


def assume(written: Mapping[str, Any], *, alone: bool) -> dict[str, Any]:
    """Values for keys that are not among those written. `alone`: there is no recipe, only flags.

    Reads the first rows of the dataset. Data that cannot be read is reported elsewhere.
    """
    known = {SPELLINGS.get(key, key): value for key, value in written.items() if value is not None}
    made = _of_run(known) if alone else {}
    if not {"rewards", "reward_model_name_or_path"} & {**known, **made}.keys() and (tasks := _library_tasks(known)):
        made["rewards"] = [{"name": reward, "args": {"dataset": task}} for reward, task in tasks]
        if len(tasks) == 1:
            made["accuracy"] = tasks[0][0]
        if not {"system", "examples"} & {**known, **made}.keys():
            made["system"] = _IN_TAGS
    return {key: value for key, value in made.items() if key not in known}


def assumed_words(values: Mapping[str, Any]) -> str:
    """Assumed values in one line.

    >>> assumed_words({"prompt": "{question}", "held_out": 0.1})
    'assumed: prompt "{question}", held_out 0.1'
    """
    return "assumed: " + ", ".join(f"{key} {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())


def _library_tasks(known: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The reward and task of each part, where all of them are tasks of libraries."""
    dataset = known.get("dataset")
    entries = dataset if isinstance(dataset, list) else [dataset]
    tasks = []
    for entry in entries:
        path = str(entry.get("path") if isinstance(entry, Mapping) else entry)
        library = task_library(path)
        if library is None:
            return []
        tasks.append((library.reward, path.partition(":")[2].partition("?")[0]))
    return list(dict.fromkeys(tasks))


def _of_run(known: Mapping[str, Any]) -> dict[str, Any]:
    model = known.get("model", BUILTIN)
    made = {"model": model, **_of_data(known, model)}
    if model == BUILTIN and known.get("use_peft"):
        made |= ADAPTER
    elif model == BUILTIN and known.get("lora"):
        made["learning_rate"] = ADAPTER["learning_rate"]
    if "num_train_epochs" in known:
        made.pop("max_steps", None)  # which would win
    if "rewards" in known:
        made.pop("accuracy", None)
    if "system" in known:
        made.pop("examples", None)  # their form may be another one
    return made


def _of_data(known: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The proposal for the dataset; the settings of the run alone, where its rows or columns tell nothing."""
    made = {**RUN, **(SMALL_MODEL if model == BUILTIN else {})}
    if _library_tasks(known):
        return {**made, "max_completion_length": 64}
    dataset = known.get("dataset")
    if not isinstance(dataset, str):
        return made
    given: dict[str, Any] = {key: known.get(key) for key in ("prompt", "answer", "answer_from")}
    rewards = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in _listed(known.get("rewards"))]
    try:
        table = read_table(known, has_test="eval_dataset" in known)
        proposal = propose(table, Wishes(**given, model=model, tagged=bool(_READ_TAGS.intersection(map(str, rewards)))))
    except PodiumError:
        return made
    return dict(proposal.settings)


def read_table(known: Mapping[str, Any], *, has_test: bool = False) -> Table:
    """The first rows of the dataset that keys of a recipe name. Raises `DataError` where it cannot be read."""
    dataset = known["dataset"]
    spec = DataSpec(
        dataset=dataset,
        dataset_config=known.get("dataset_config"),
        dataset_train_split=str(known.get("dataset_train_split", "train")),
    )
    [part] = spec.all_parts
    rows = first_rows(spec, part, READ)
    has_test = has_test or (not is_lines(dataset) and "test" in part_splits(spec, part, streaming=True))
    return Table(names=tuple(dict.fromkeys(name for row in rows for name in row)), rows=tuple(rows), has_test=has_test)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
