"""Values for keys that a recipe leaves out: rewards for reasoning-gym's tasks; all keys, where there is no recipe.

`podium train --dataset qa.csv` is a run by this: the columns by their usual names, a reward that compares with the
answer, one prompt in ten held out, the built-in model. Assumed values become a part of the recipe's, so that
`config.yaml` in the run's folder has all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from podium.data import gym
from podium.data.columns import Columns, usual
from podium.data.loading import DataSpec, first_rows, is_lines, part_splits
from podium.data.selection import is_held_out
from podium.data.templates import parse
from podium.errors import PodiumError
from podium.models.builtin import BUILTIN

OLD_NAMES: Mapping[str, str] = {
    "model_name_or_path": "model",
    "dataset_name": "dataset",
    "reward_funcs": "rewards",
    "torch_dtype": "dtype",
}
"""TRL's spellings of keys that have a shorter one here."""

LOOKED_AT = 200
"""Rows by which columns and answers are judged."""
HELD_OUT = 0.1
"""Share of the prompts."""
LONGEST_EXAMPLE = 500
"""Characters of a row that is shown as an example."""

_RUN: Mapping[str, Any] = {
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "temperature": 1.0,
    "loss_type": "dapo",
    "eval_samples": 4,
    "eval_temperature": 1.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
_SMALL_MODEL: Mapping[str, Any] = {
    "learning_rate": 3e-5,
    "lr_scheduler_type": "linear",
    "adam_beta2": 0.99,
    "max_grad_norm": 1.0,
}
"""Settings for the built-in model, as in the recipe `quickstart`; other models have TRL's defaults."""

_ADAPTER: Mapping[str, Any] = {"learning_rate": 3e-4, "lora_target_modules": "all-linear"}
"""Settings for an adapter on the built-in model, as in the recipe `csv`."""

_IN_TAGS = "Put the final answer inside tags, like this: <answer>{}</answer>."

_NUMBERS: Mapping[str, Any] = {
    "system": "Answer inside tags like this: <answer>7</answer>.",
    "rewards": ["answer_format", {"name": "numeric_match", "weight": 2}],
    "accuracy": "numeric_match",
    "max_completion_length": 32,
}
_WORKED: Mapping[str, Any] = {
    "answer_from": "after ####",
    "system": "Work it out step by step. " + _IN_TAGS.format("7"),
    "rewards": [
        {"name": "xml_format_partial", "args": {"sections": ["answer"], "penalty_per_character": 0.0}, "weight": 0.5},
        {"name": "numeric_match", "weight": 2},
    ],
    "accuracy": "numeric_match",
    "max_completion_length": 256,
}
_TEXTS: Mapping[str, Any] = {
    "system": _IN_TAGS.format("your answer"),
    "rewards": [
        "answer_format",
        {"name": "exact_match", "args": {"extract": ["tag:answer", "text"], "ignore_case": True}, "weight": 2},
    ],
    "accuracy": "exact_match",
    "max_completion_length": 64,
}


def assume(written: Mapping[str, Any], *, alone: bool) -> dict[str, Any]:
    """Values for keys that are not among those written. `alone`: there is no recipe, only flags.

    Reads the first rows of the dataset. Data that cannot be read is reported elsewhere.
    """
    known = {OLD_NAMES.get(key, key): value for key, value in written.items() if value is not None}
    made = _of_run(known) if alone else {}
    if not {"rewards", "reward_model_name_or_path"} & {**known, **made}.keys() and (tasks := _gym_tasks(known)):
        made["rewards"] = [{"name": "reasoning_gym", "args": {"dataset": task}} for task in tasks]
        if len(tasks) == 1:
            made["accuracy"] = "reasoning_gym"
        if not {"system", "examples"} & {**known, **made}.keys():
            made["system"] = _IN_TAGS.format("your answer")
    return {key: value for key, value in made.items() if key not in known}


def assumed_words(values: Mapping[str, Any]) -> str:
    """Assumed values in one line.

    >>> assumed_words({"prompt": "{question}", "held_out": 0.1})
    'assumed: prompt "{question}", held_out 0.1'
    """
    return "assumed: " + ", ".join(f"{key} {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())


def _gym_tasks(known: Mapping[str, Any]) -> list[str]:
    """The task of each part, where all of them are reasoning-gym's."""
    dataset = known.get("dataset")
    entries = dataset if isinstance(dataset, list) else [dataset]
    paths = [entry.get("path") if isinstance(entry, Mapping) else entry for entry in entries]
    tasks = [str(path).removeprefix(gym.PREFIX).partition("?")[0] for path in paths]
    return list(dict.fromkeys(tasks)) if all(str(path).startswith(gym.PREFIX) for path in paths) else []


def _of_run(known: Mapping[str, Any]) -> dict[str, Any]:
    model = known.get("model", BUILTIN)
    made = {"model": model, **_of_data(known), **_RUN, **(_SMALL_MODEL if model == BUILTIN else {})}
    if model == BUILTIN and known.get("use_peft"):
        made |= _ADAPTER
    elif model == BUILTIN and known.get("lora"):
        made["learning_rate"] = _ADAPTER["learning_rate"]
    if _gym_tasks(known):
        made["max_completion_length"] = 64
        for key in ("rewards", "accuracy", "system"):
            made.pop(key, None)
    if "rewards" in known:
        made.pop("accuracy", None)
    return made


def _of_data(known: Mapping[str, Any]) -> dict[str, Any]:
    """Templates, rewards and the split, as far as the first rows tell."""
    dataset = known.get("dataset")
    if not isinstance(dataset, str):
        return {}
    spec = DataSpec(
        dataset=dataset,
        dataset_config=known.get("dataset_config"),
        dataset_train_split=str(known.get("dataset_train_split", "train")),
    )
    try:
        [part] = spec.all_parts
        rows = first_rows(spec, part, LOOKED_AT)
        has_test = "eval_dataset" in known or (
            not is_lines(dataset) and "test" in part_splits(spec, part, streaming=True)
        )
    except PodiumError:
        return {}
    if not rows:
        return {}
    made = _columns(list(rows[0]), rows)
    columns = Columns(**{key: known.get(key, made.get(key)) for key in ("prompt", "answer", "answer_from")})
    answers = [answer for row in rows if (answer := columns(row).get("answer")) is not None]
    made |= _judged_by(answers) if answers else {}
    if not isinstance(columns.question(rows[0]), str):
        made.pop("system", None)  # a conversation has its own instructions
    elif "system" not in known and "answer_from" not in made and (example := _example(columns, rows)):
        made["examples"] = [example]
    sides = {is_held_out(columns.identity(row), HELD_OUT) for row in rows}  # of one question there is only one
    return made if has_test or len(sides) == 1 else {**made, "held_out": HELD_OUT}


def _example(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """A short row that is not held out, with its answer in tags: small models follow an example, not a rule."""
    asked = parse(columns.prompt).columns if columns.prompt else ("prompt",)
    told = parse(columns.answer).columns if columns.answer else ("answer",)
    for row in rows:
        text = {name: str(row.get(name)) for name in (*asked, *told) if row.get(name) is not None}
        fits = len(text) == len({*asked, *told}) and sum(map(len, text.values())) <= LONGEST_EXAMPLE
        if len(told) == 1 and fits and not is_held_out(columns.identity(row), HELD_OUT):
            return {**text, told[0]: f"<answer>{text[told[0]]}</answer>"}
    return None


def _columns(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Templates for the usual names; none where the rows have `prompt` already."""
    found = usual(names)
    if found is None:
        return {}
    question, answer = found
    made = {}
    if question != "prompt":
        both = question == "instruction" and any(row.get("input") for row in rows)
        made["prompt"] = "{instruction}\n\n{input}" if both else f"{{{question}}}"
    if answer != "answer" or not isinstance(rows[0].get("answer"), str):
        made["answer"] = f"{{{answer}}}"
    return made


def _judged_by(answers: Sequence[Any]) -> Mapping[str, Any]:
    """How to compare with answers like these."""
    texts = [str(answer) for answer in answers]
    if all("####" in text for text in texts):
        return _WORKED
    return _NUMBERS if all(map(_is_number, texts)) else _TEXTS


def _is_number(text: str) -> bool:
    """
    >>> _is_number("1,000.5"), _is_number("-7"), _is_number("3 apples"), _is_number("nan")
    (True, True, False, False)
    """
    plain = text.strip().replace(",", "")
    try:
        return math.isfinite(float(plain))
    except ValueError:
        return False
