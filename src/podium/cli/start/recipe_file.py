"""The text of a recipe: settings in blocks, with a comment on each line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

COMMENTS = 39
"""Column where comments behind a value stand."""

_BLOCKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ("model", "dtype", "lora")),
    (
        "Rows: every name in braces is a column.",
        ("dataset", "prompt", "answer", "columns", "filter", "answer_from", "system", "examples"),
    ),
    ("", ("chat", "held_out", "eval_dataset")),
    ("Turns: what the model may do between its question and its answer.", ("tools", "environment")),
    (
        "Each completion gets the weighted sum. `podium rewards list` shows what else there is.",
        ("rewards", "accuracy", "eval_samples", "eval_temperature", "eval_rows"),
    ),
    (
        "Sampling: the batch size counts completions, so that 64 are 8 questions for each optimizer step.",
        (
            "per_device_train_batch_size",
            "num_generations",
            "max_completion_length",
            *("max_tool_calling_iterations", "max_turns", "max_call_corrections", "mask_void_turns", "turn_discount"),
            "tokens_per_pack",
            "temperature",
        ),
    ),
    (
        "Training",
        ("loss_type", "learning_rate", "lr_scheduler_type", "adam_beta2", "max_grad_norm", "max_steps", "seed"),
    ),
    ("Record", ("logging_steps", "save_strategy", "report_to", "output_dir")),
)
"""The blocks of a file: the line above, and the keys in their order."""

_KEYS: Mapping[str, str] = {
    "model": "or any Hugging Face id or folder",
    "dtype": "of the model's weights, which stay as they are: the adapter is float32",
    "lora": "an adapter is trained, not the model",
    "dataset": "as seen from this folder",
    "prompt": "the question: a column in braces, or a text with such columns in it",
    "answer": "the right answer, which rewards get as `answer`",
    "columns": "columns under the names that rewards ask for",
    "filter": "rows with an empty cell are left out",
    "answer_from": "the place of the answer",
    "system": "the instruction in front of every question",
    "examples": "turns in front of every question; these rows are not trained or tested on",
    "held_out": "share of the questions that is never trained on: accuracy is measured there",
    "eval_dataset": "the same games: their prompts are alike, so there is nothing to remember of one",
    "tools": "yours: edit it, and its test; or builtin:calculator, builtin:python",
    "environment": "yours: edit it, and its test; it pays the reward",
    "max_tool_calling_iterations": "rounds of calls in a completion",
    "accuracy": "the reward that the report before and after counts as right",
    "eval_samples": "completions per held-out question in that report,",
    "eval_temperature": "drawn from the model as it is,",
    "eval_rows": "for at most so many held-out questions",
    "per_device_train_batch_size": "completions of an optimizer step",
    "num_generations": "completions of a question; each is compared with the others",
    "max_completion_length": "tokens; a longer one is cut off, and seldom right",
    "tokens_per_pack": "most tokens in one forward and backward: more is faster and takes more memory",
    "temperature": "groups must differ for there to be something to learn from",
    "loss_type": "every token counts alike; or grpo, dr_grpo, bnpo, ...",
    "learning_rate": "of all weights; with `lora:` about ten times as much",
    "lr_scheduler_type": "falls to 0 over the run",
    "adam_beta2": "a short run averages over fewer steps than the default 0.999",
    "max_grad_norm": "larger gradients are scaled down to it",
    "max_steps": "optimizer steps; more where the curve still rises",
    "seed": "of the order and of sampling",
    "logging_steps": "a line for every step",
    "save_strategy": "the final model is saved all the same",
    "report_to": "or tensorboard, wandb, trackio",
    "output_dir": "the model, the metrics and the report",
}
_ADAPTER_RATE = "of an adapter: about ten times that of all weights"
_FUNCTIONS = "yours: edit it, and its test"
_REWARDS: Mapping[str, str] = {
    "answer_f1": "words in common with the right answer",
    "code_stages": "0.1 each for code that is there, parses, runs; the rest for tests passed",
    "exact_match": "1 where it equals the right answer, white space around it aside",
    "tool_use": "1 for a call without an error: something to learn from at the beginning",
    "json_format": "1 for JSON and nothing around it",
    "json_match": "the share of fields that are right",
    "multiple_choice": "1 for the right letter and no other",
    "numeric_match": "1 where the number in the answer's place is the right one",
    "text_similarity": "by degrees, so that a near miss is worth more than a far one",
    "xml_format": "1 for both sections in order and nothing around them",
    "xml_format_partial": "a share for each tag in place: steps that a model finds by itself",
}


def recipe_text(settings: Mapping[str, Any], *head: str) -> str:
    """The file: the lines of `head` as its first comments, then the blocks.

    >>> print(recipe_text({"model": "m", "max_steps": 9}, "A run."), end="")
    # A run.
    # Any key may be changed, or given as a flag: podium train run.yaml --max_steps 10
    <BLANKLINE>
    model: m                               # or any Hugging Face id or folder
    <BLANKLINE>
    # Training
    max_steps: 9                           # optimizer steps; more where the curve still rises
    """
    notes = {**_KEYS, "learning_rate": _ADAPTER_RATE} if "lora" in settings else _KEYS
    lines = [
        *(f"# {line}" for line in head),
        "# Any key may be changed, or given as a flag: podium train run.yaml --max_steps 10",
    ]
    placed = {key for _, keys in _BLOCKS for key in keys}
    assert settings.keys() <= placed, settings.keys() - placed
    for title, keys in _BLOCKS:
        block = [line for key in keys if key in settings for line in _lines(key, settings[key], notes.get(key, ""))]
        if block:
            lines += ["", *([f"# {title}"] if title else []), *block]
    return "\n".join(lines) + "\n"


def _lines(key: str, value: Any, note: str) -> Iterator[str]:
    if key == "rewards":
        yield "rewards:"
        for entry in value:
            yield from _reward(entry)
    elif key == "examples":
        yield _noted("examples:", note)
        for example in value:
            for number, (name, text) in enumerate(example.items()):
                yield f"  {' ' if number else '-'} {in_yaml(name)}: {_value(text)}"
    elif isinstance(value, Mapping):
        yield _noted(f"{key}:", note)
        yield from (f"  {name}: {_value(each)}" for name, each in value.items())
    else:
        yield _noted(f"{key}: {_value(value)}", note)


def _reward(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield _noted(f"  - {entry}", _REWARDS.get(entry, ""))
        return
    for number, (key, value) in enumerate(entry.items()):
        note = _REWARDS.get(str(value), "") if key == "name" else ""
        if key == "function":
            note = _FUNCTIONS
        yield _noted(f"  {' ' if number else '-'} {key}: {_value(value)}", note)


def _noted(line: str, note: str) -> str:
    return f"{line.ljust(COMMENTS - 1)} # {note}" if note else line


def _value(value: Any) -> str:
    """A value in the flow style of YAML.

    >>> _value({"sections": ["answer"], "x": True}), _value(3e-5), _value(1.0), _value("no")
    ('{sections: [answer], x: true}', '3e-5', '1.0', '"no"')
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{in_yaml(str(key))}: {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-") if 0 < abs(value) < 1e-3 else str(value)
    return in_yaml(value) if isinstance(value, str) else json.dumps(value)


def in_yaml(value: str) -> str:
    r"""A text as YAML: as it is where that is safe, else in double quotes.

    >>> in_yaml("../my data.csv"), in_yaml("builtin:x"), in_yaml("a: b"), in_yaml("{question}"), in_yaml("x\n#y")
    ('../my data.csv', 'builtin:x', '"a: b"', '"{question}"', '"x\\n#y"')
    """
    plain = re.fullmatch(r"(?:\.{0,2}/)*[A-Za-z](?:[\w./<>?+-]|:(?! |$)| (?!#))*(?<![ :])", value, re.ASCII)
    words = value.casefold() in ("true", "false", "null", "yes", "no", "on", "off")
    if plain and not words:
        return value
    quoted = json.dumps(value, ensure_ascii=False)  # leaves characters that YAML refuses
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)
