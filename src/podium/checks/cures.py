"""What to type against an error that does not say it: the line of YAML, the command, the words to change.

    cure("C016", "run.yaml:9: `temperature` must be between 1e-06 and 100, got 0")      "temperature: 1.0"

Whoever raises an error may give its cure with it; this table is for those that name only what is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from podium.models.builtin import BUILTIN_MODELS

BUILTIN = f"builtin:{next(iter(BUILTIN_MODELS))}"
ADAPTER_WORDS = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "modules": "target_modules"}


def cure(code: str, what: str, key: str = "") -> str:
    """The concrete line for a finding, or "" where the table knows none.

    Args:
        code: of the finding.
        what: its message.
        key: of the recipe, at the place that the message names; empty: unknown.

    >>> cure("D025", "run.yaml:2: There is no file or folder row.jsonl. Similar: rows.jsonl.", "dataset")
    'dataset: rows.jsonl'
    """
    for wanted, pattern, make in CURES:
        found = re.search(pattern, what, re.DOTALL) if code == wanted else None
        if found is not None:
            return make(found, key) if callable(make) else make.format(*found.groups(), key=key)
    return ""


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Default values of settings by their names, adapters' and recipes' own among them."""
    from peft import LoraConfig

    from podium.config import GRPOConfig
    from podium.recipe import Recipe

    return {
        field.name: field.default
        for record in (LoraConfig, Recipe, GRPOConfig)
        for field in dataclasses.fields(record)
        if field.default is not dataclasses.MISSING
    }


def default_line(key: str) -> str:
    """A setting as it is when nobody sets it.

    >>> default_line("temperature"), default_line("top_entropy_quantile"), default_line("min_p")
    ('temperature: 1.0', 'top_entropy_quantile: 1.0', 'take `min_p` out')
    """
    value = defaults().get(key)
    if value is None:
        return f"take `{key}` out"
    shown = str(value).lower() if isinstance(value, bool) else getattr(value, "value", value)
    return f"{key}: {shown}"


# ---- cures that need more than the words of the message ----


def _default(found: re.Match[str], _: str) -> str:
    return default_line(found[1])


def _whole(found: re.Match[str], _: str) -> str:
    try:
        number = float(found[2])
    except ValueError:
        number = math.nan
    return f"{found[1]}: {round(number)}" if math.isfinite(number) else default_line(found[1])


def _unknown(found: re.Match[str], _: str) -> str:
    meant = ADAPTER_WORDS.get(found[1])
    return f"write `{meant}` in place of `{found[1]}`" if meant else f"take `{found[1]}` out"


def _group_of(found: re.Match[str], _: str) -> str:
    size, group = math.prod(map(int, found[1].split("*"))), int(found[2])
    return f"per_device_eval_batch_size: {-(-size // group) * group}"


def _similar(found: re.Match[str], key: str) -> str:
    return f"{key or 'dataset'}: {found[1]}"


def _folder(found: re.Match[str], _: str) -> str:
    path = found[1]
    return f"model: {path if path.startswith(('/', '.', '~')) else './' + path}"


def _quoted(found: re.Match[str], _: str) -> str:
    name, text = found[1], found[2].strip().replace('"', '\\"')
    return f'{name}: "{text}"'


def _excel(found: re.Match[str], key: str) -> str:
    to = f"{Path(found[1]).stem}.jsonl"
    program = f"import pandas; pandas.read_excel('{found[1]}').to_json('{to}', orient='records', lines=True)"
    return f'python -c "{program}", then {key or "dataset"}: {to}'


def _as_lines(found: re.Match[str], key: str) -> str:
    return f"write one JSON object a line to {Path(found[1]).stem}.jsonl, then {key or 'dataset'}: " + (
        f"{Path(found[1]).stem}.jsonl"
    )


def _script(found: re.Match[str], key: str) -> str:
    to = f"{Path(found[1]).name}.jsonl"
    program = f"load_dataset('{found[1]}', trust_remote_code=True)['train'].to_json('{to}')"
    return f'once, where `pip install "datasets<4"`: {program}; then {key or "dataset"}: {to}'


Make = str | Callable[[re.Match[str], str], str]

CURES: tuple[tuple[str, str, Make], ...] = (
    ("C001", r"unknown key `(\w+)`", _unknown),
    ("C002", r"`(\w+)`: expected a whole number.*got `?([^`\s]+)", _whole),
    ("C002", r"`(\w+)`: expected", _default),
    ("C003", r"`(prompt|answer|system)`: expected .* a mapping, \{'([^']+)'", '{0}: "{{{1}}}"'),
    ("C003", r"`(\w+)`: expected", _default),
    ("C004", r"`?(\w+)`? (?:is|must)", _default),
    ("C006", r":(\d+): `(\w+)` is already set at line (\d+)", "delete line {0} or line {2}: one `{1}` is enough"),
    ("C011", "", "num_generations: 8"),
    ("C012", r"eval batch size \(([\d* ]+)\).*evaluation \((\d+)\)", _group_of),
    ("C013", "", "take `bf16`, `fp16` and `tf32` out: what the device can is chosen"),
    ("C014", r"(\w+)=", "take `{0}` out"),
    ("C016", r"`(pass_rate)`", "{0}: [0.05, 0.95]"),
    ("C016", r"`(held_out)`", "{0}: 0.2"),
    ("C016", r"`(weight)`", "{0}: 1"),
    ("C016", r"`(\w+)`", _default),
    ("C016", r"(?:: |^)(\w+) is", _default),
    ("C018", r"(\w+)=", "take `{0}` out"),
    ("C018", r"(\w+) is an option", "take `{0}` out"),
    ("C019", r"a tab;", "write two spaces in place of the tab"),
    ("C019", r"a second `:`.*\n\s*([\w-]+): ([^\n]*:[^\n]*)\n", _quoted),
    ("C031", r"no `(model|dataset)`; for example `([^`]+)`", "{0}: {1}"),
    ("C031", r"a stage needs a `name`", "name: format"),
    ("C003", r"`name` must be made of", "name: format"),
    ("C003", r"`stages` must be a list", "stages: [{{name: format, rewards: [answer_format], max_steps: 20}}]"),
    ("C060", r"needs `max_steps`, too", "max_steps: 50"),
    ("C060", r"`until: ", "until: reward >= 0.9 for 3 steps"),
    ("C060", r"add `eval_strategy: steps`", "eval_strategy: steps"),
    ("C060", r"the rewards here are ([^,.]+)", "until: rewards/{0}/mean >= 0.9"),
    ("C060", r"`record: false`", "record: true"),
    ("C061", r"no column `([^`]+)`, but ([^,.]+)", "filter: {1} == VALUE"),
    ("C061", r"", "filter: level <= 2"),
    ("D060", r"columns? [^(]*\(([^,)]+)", "completion: {0}"),
    ("D060", r"`([^`]+)` is null", "filter: {0} != ''"),
    ("D060", r"", 'completion: "<answer>{{answer}}</answer>"'),
    ("C031", r"no `rewards`; for example `- ([^`]+)`", "rewards: [{0}]"),
    ("D025", r"Similar: ([^\s,]+?)[.,]?(?:\s|$)", _similar),
    ("D025", r"built-in dataset.*known: ([^\s,.]+)", _similar),
    ("D025", r"no file or folder (\S+?)\.(?:\s|$)", "the path of a file that is there, as seen from here (`ls`)"),
    ("D027", r"names `([^`]+)` twice", "call one of them `{0}_2`"),
    ("D027", r"line (\d+)", 'quote fields that hold a comma in line {0}: "1,5"'),
    ("D029", r"NaN|Infinity", 'write null in its place: {{"answer": null}}'),
    ("D030", r"^(?:\S+: )?(\S+) starts", "write it again: pandas.DataFrame(rows).to_parquet('{0}')"),
    ("D031", "", '{{"prompt": "...", "answer": "..."}}, one object a line'),
    ("D034", r"folder (\S+) cannot", _script),
    ("D034", r"`(\S+)` is no", _script),
    ("D039", r"(\S+\.xlsx?) is not", _excel),
    ("D039", r"(\S+\.\w+) (?:is not|cannot)", _as_lines),
    ("D053", r"`answer_from`", "answer_from: last number"),
    ("D055", r"columns are (?:`prompt`, )?`([^`]+)`", "difficulty: {0}, or another with a number in every row"),
    ("D056", r"at (\S+):(\d+): ", "correct line {1} of {0}"),
    ("D056", r"^(?:\S+: )?(\S+): row", "have {0} yield dicts: yield {{'prompt': '...', 'answer': '...'}}"),
    ("D056", "", "dataset: FILE.py:FUNCTION, with a function that yields dicts"),
    ("D057", r"takes (\w+) as `(\w+)`.* It is (\S+) by default", "{1}={2}"),
    ("D057", "", "dataset: reasoning-gym:chain_sum?size=1000&seed=1"),
    ("M001", r"folder \S+\. Similar: ([^\s,]+?)[.,]?(?:\s|$)", _folder),
    ("M001", "", f"model: {BUILTIN}"),
    ("M002", r"`(\S+)` is not", f"hf download {{0}}, where there is a network; or model: {BUILTIN}"),
    ("M002", r"`(\S+)`", f"model: {BUILTIN}, or another name than {{0}} (hf models ls)"),
    ("M013", "is a ", f"model: {BUILTIN}, or another whose `architectures` end with ForCausalLM"),
    ("M016", r"(\S+) has no config\.json", "copy the whole model there again: hf download NAME --local-dir {0}"),
    ("M016", r"(\S+config\.json)", "copy {0} again"),
    ("W010", r'File "([^"]+)", line (\d+)', "correct line {1} of {0}; podium rewards test FILE:FUNCTION tries it"),
    ("W013", r"(\S+\.py):(\d+): ", "correct line {1} of {0}; python -m py_compile {0} says when it is right"),
)  # fmt: skip
"""(code, what the message must hold, the cure with the parts found); the first that fits."""
