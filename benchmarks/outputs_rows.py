"""Rows and their order, and what a check finds in them, of datasets of every kind: kind `rows` of `benchmarks.outputs`.

Every dataset is made here, small and by rule, so that two commits can be compared: digests and findings must be equal.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

import podium
from podium import GRPOConfig, check
from podium.checks import check_recipe, examine
from podium.data import PromptBuilder, find_problems, load
from podium.errors import Finding, PodiumError
from podium.testing import save_tiny_model, tiny_tokenizer

QUESTIONS: list[dict[str, Any]] = [
    {"question": f"What is {n} + {n % 7}?", "answer": str(n + n % 7), "level": n % 5} for n in range(60)
]
PLAIN = [{"prompt": row["question"], "answer": row["answer"]} for row in QUESTIONS]
CHAT = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in PLAIN]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOLS = [
    {
        "prompt": [
            {"role": "user", "content": f"Rain on day {n}?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "weather", "content": "no"},
            {"role": "user", "content": "And then?"},
        ],
        "tools": [{"name": "weather", "parameters": {"city": {"type": "string"}}}],
        "answer": str(n),
    }
    for n in range(12)
]
SPOKEN = [
    {
        "conversations": [
            {"from": "system", "value": "Add."},
            {"from": "human", "value": row["question"]},
            {"from": "gpt", "value": row["answer"]},
        ]
    }
    for row in QUESTIONS
]
GSM8K = [
    {"question": row["question"], "answer": f"It is easy.\n#### {row['answer']}", "choices": ["1", "2"]}
    for row in QUESTIONS
]
MIXED = [
    {"prompt": "a", "checks": {"min": 1}, "answer": 7},
    {"prompt": "b", "checks": {"regex": "a"}, "answer": "7", "limit": 3},
    {"prompt": "c", "answer": 10**30},
]

MODULE = """
def make(size=5, start=0):
    for n in range(int(start), int(start) + int(size)):
        yield {"prompt": f"{n} + 1", "answer": str(n + 1), "own": {"n": n}}


def broken():
    yield {"prompt": "1"}
    raise ValueError("no more")


def no_rows():
    return [1, 2]
"""


def lines(rows: list[dict[str, Any]]) -> str:
    """Rows as JSON, one a line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(rows: list[dict[str, Any]], separator: str = ",") -> str:
    """Rows as a table with a header."""
    names = list(rows[0])
    return "\n".join(separator.join(map(str, row)) for row in (names, *(row.values() for row in rows))) + "\n"


def write_files() -> None:
    """Write the files of all cases into the working directory."""
    texts = {
        "rows.jsonl": lines(QUESTIONS),
        "plain.jsonl": lines(PLAIN),
        "chat.jsonl": lines(CHAT),
        "spoken.jsonl": lines(SPOKEN),
        "tools.jsonl": lines(TOOLS),
        "gsm8k.jsonl": lines(GSM8K),
        "mixed.jsonl": lines(MIXED),
        "rows.json": json.dumps(QUESTIONS, indent=1),
        "rows.csv": table(QUESTIONS),
        "semicolons.csv": table(QUESTIONS, ";"),
        "rows.txt": "one\n\ntwo\nthree\n",
        "twice.jsonl": lines([*QUESTIONS[:10], *QUESTIONS[5:20]]),
        "rows.py": MODULE,
        "folder/train.csv": table(QUESTIONS[:30]),
        "folder/test.jsonl": lines([{name: str(value) for name, value in row.items()} for row in QUESTIONS[30:]]),
        "kinds/a.csv": table([{"question": row["question"], "answer": row["answer"]} for row in QUESTIONS[:9]]),
        "kinds/b.jsonl": lines([{"question": row["question"], "answer": row["answer"]} for row in QUESTIONS[9:]]),
        "apart/a.csv": "question,answer\n1+1,2\n",
        "apart/b.csv": "frage,antwort\n1+1,2\n",
        "rates.jsonl": lines(
            [
                {"fingerprint": hashlib.sha256(row["prompt"].lower().encode()).hexdigest()[:32], "pass_rate": n % 5 / 4}
                for n, row in enumerate(PLAIN[:50])
            ]
        ),
    }
    for name, text in texts.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    Path("rows.csv.gz").write_bytes(gzip.compress(table(QUESTIONS).encode(), mtime=0))
    Path("utf16.csv").write_text(table(QUESTIONS), encoding="utf-16")
    Dataset.from_list(QUESTIONS).to_parquet("rows.parquet")
    both = DatasetDict({"train": Dataset.from_list(QUESTIONS[:40]), "test": Dataset.from_list(QUESTIONS[40:])})
    both.save_to_disk("saved")
    Dataset.from_list(PLAIN).save_to_disk("alone")


def transformed() -> Dataset:
    """A dataset whose rows a function of the user's makes as they are read."""
    rows = Dataset.from_list(QUESTIONS)
    rows.set_transform(
        lambda batch: {"prompt": [text.upper() for text in batch["question"]], "answer": batch["answer"]}
    )
    return rows


def generated() -> Iterator[dict[str, Any]]:
    """Rows as a user's function yields them."""
    for row in QUESTIONS:
        yield {"prompt": row["question"], "answer": row["answer"]}


ASKED: dict[str, Any] = {"prompt": "{question}", "answer": "{answer}"}
EXAMPLE = {"question": "What is 100 + 1?", "answer": "101"}

LOADED: dict[str, tuple[Any, dict[str, Any]]] = {
    "csv": ("rows.csv", ASKED),
    "csv held out": ("rows.csv", {**ASKED, "held_out": 0.25}),
    "csv, semicolons": ("semicolons.csv", {**ASKED, "chat": True}),
    "csv, gzip": ("rows.csv.gz", {**ASKED, "system": "Add {level}."}),
    "csv, UTF-16": ("utf16.csv", ASKED),
    "jsonl": ("rows.jsonl", ASKED),
    "jsonl as it is": ("mixed.jsonl", {}),
    "jsonl, a system": ("mixed.jsonl", {"system": "Check.", "answer": "{checks}"}),
    "jsonl, examples": ("rows.jsonl", {**ASKED, "examples": [EXAMPLE, QUESTIONS[3]]}),
    "jsonl, filter by order": ("rows.jsonl", {**ASKED, "order": "hard_first", "difficulty": "level"}),
    "jsonl, easy first, held out": (
        "rows.jsonl",
        {**ASKED, "order": "easy_first", "difficulty": "level", "held_out": 0.2},
    ),
    "jsonl, pass rates": ("plain.jsonl", {"pass_rates": "rates.jsonl"}),
    "jsonl, pass rates in order": (
        "plain.jsonl",
        {"pass_rates": "rates.jsonl", "pass_rate": [0.2, 0.9], "order": "easy_first"},
    ),
    "json": ("rows.json", {**ASKED, "columns": {"hard": "level"}}),
    "txt": ("rows.txt", {}),
    "parquet": ("rows.parquet", ASKED),
    "parquet, held out": ("rows.parquet", {**ASKED, "held_out": 0.3, "chat": True}),
    "function in a file": ("rows.py:make?size=7&start=2", {}),
    "function": (generated, {"chat": True}),
    "folder of splits": ("folder", ASKED),
    "folder of kinds": ("kinds", ASKED),
    "saved": ("saved", ASKED),
    "saved, a dataset alone": ("alone", {"held_out": 0.2}),
    "Dataset": (lambda: Dataset.from_list(QUESTIONS), ASKED),
    "Dataset as it is": (lambda: Dataset.from_list(PLAIN), {}),
    "Dataset, held out": (lambda: Dataset.from_list(QUESTIONS), {**ASKED, "held_out": 0.4, "eval_dataset": None}),
    "Dataset, transformed": (transformed, {}),
    "Dataset, transformed, chat": (transformed, {"chat": True, "held_out": 0.2}),
    "splits": (lambda: {"train": Dataset.from_list(PLAIN), "test": Dataset.from_list(PLAIN[:5])}, {}),
    "stream": ("rows.jsonl", {**ASKED, "dataset_streaming": True}),
    "stream of a Dataset": (lambda: Dataset.from_list(QUESTIONS).to_iterable_dataset(), {**ASKED, "held_out": 0.2}),
    "stream of a table, chat": ("rows.csv", {**ASKED, "chat": True, "dataset_streaming": True}),
    "stream of parquet": ("rows.parquet", {**ASKED, "dataset_streaming": True}),
    "stream of a function": ("rows.py:make", {"dataset_streaming": True}),
    "list in a mixture": ([{"path": "rows.jsonl", **ASKED}, {"path": "gsm8k.jsonl", "prompt": "{question}"}], {}),
    "mixture with weights": (
        [{"path": "rows.jsonl", "weight": 3, **ASKED}, {"path": "plain.jsonl", "weight": 1}],
        {"seed": 5},
    ),
    "mixture of one path twice": (["plain.jsonl", "plain.jsonl"], {"held_out": 0.2}),
    "mixture of streams": (
        [{"path": "plain.jsonl", "weight": 2}, {"path": "twice.jsonl", "weight": 1, **ASKED}],
        {"dataset_streaming": True, "seed": 3},
    ),
    "mixture with JSON": ([{"path": "mixed.jsonl"}, {"path": "plain.jsonl"}], {}),
    "TRL's mixture": (
        None,
        {
            "datasets": (
                {"path": "plain.jsonl", "fraction": 1.0, "columns": ["prompt"]},
                {"path": "chat.jsonl", "fraction": 3.0, "columns": ["answer"]},
            ),
            "use_test_split": "no",
        },
    ),
    "TRL's mixture, split": (
        None,
        {"datasets": ({"path": "plain.jsonl"},), "test_split_size": 0.25, "use_test_split": "needed"},
    ),
    "chat": ("chat.jsonl", {}),
    "chat, a system": ("chat.jsonl", {"system": "Add."}),
    "conversations, last turn": ("spoken.jsonl", {"prompt": "{conversations}", "answer_from": "last turn"}),
    "tools": ("tools.jsonl", {}),
    "tools, examples with calls": (
        "tools.jsonl",
        {
            "examples": [
                {
                    "prompt": "Rain?",
                    "calls": [{"name": "weather", "arguments": {"city": "Bonn"}, "result": "no"}],
                    "answer": "no",
                }
            ]
        },
    ),
    "answers behind ####": ("gsm8k.jsonl", {"prompt": "{question}\n{choices}", "answer_from": "after ####"}),
    "eval_dataset": ("plain.jsonl", {"eval_dataset": "chat.jsonl"}),
    **{
        f"builtin:{task}": (f"builtin:{task}", {})
        for task in ("additions", "sums", "orders", "tiny-functions", "guesses", "products", "chains")
    },
    "builtin:sums, held out": ("builtin:sums", {"prompt": "{question}", "answer": "{expert_answer}", "held_out": 0.1}),
}
"""By name, a dataset (or what makes it) and arguments of `load`."""

REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "no column": ("rows.csv", {"prompt": "{questions}"}),
    "no field": ("mixed.jsonl", {"prompt": "{checks.max}"}),
    "a brace": ("rows.csv", {"prompt": "{question"}),
    "no split": ("saved", {"dataset_train_split": "all"}),
    "no file": ("row.csv", {}),
    "no file with a folder": ("./none/rows.csv", {}),
    "no hub": ("owner/name", {}),
    "a name without its ending": ("plain", {}),
    "a long name": ("x" * 300, {}),
    "no task": ("builtin:adition", {}),
    "columns differ": ("apart", {}),
    "types differ": (["plain.jsonl", "chat.jsonl"], {}),
    "weights of some": ([{"path": "plain.jsonl", "weight": 2}, "chat.jsonl"], {}),
    "a part of other keys": ([{"paths": "plain.jsonl"}], {}),
    "a function that fails": ("rows.py:broken", {}),
    "a function without rows": ("rows.py:no_rows", {}),
    "no function": ("rows.py:none", {}),
    "a query": ("rows.py:make?size", {}),
    "a number": (7, {}),
    "no dataset": (None, {}),
    "order of a stream": ("plain.jsonl", {"order": "easy_first", "dataset_streaming": True}),
    "order of nothing": ("plain.jsonl", {"order": "easy_first"}),
    "order by no column": ("rows.jsonl", {**ASKED, "order": "easy_first", "difficulty": "levels"}),
    "order by texts": ("rows.jsonl", {**ASKED, "order": "easy_first", "difficulty": "question"}),
    "difficulty alone": ("rows.jsonl", {**ASKED, "difficulty": "level"}),
    "both held out": ("rows.jsonl", {**ASKED, "held_out": 0.1, "eval_dataset": "plain.jsonl"}),
    "pass_rate alone": ("plain.jsonl", {"pass_rate": [0, 1]}),
    "no pass rates": ("plain.jsonl", {"pass_rates": "none.jsonl"}),
    "pass rates of something else": ("plain.jsonl", {"pass_rates": "plain.jsonl"}),
    "pass rates of other prompts": ("chat.jsonl", {"pass_rates": "rates.jsonl"}),
    "columns that are no mapping": ("plain.jsonl", {"columns": ["answer"]}),
    "a name that is taken": ("plain.jsonl", {"columns": {"completions": "answer"}}),
    "an example without an answer": ("rows.jsonl", {"prompt": "{question}", "examples": [{"question": "1"}]}),
    "calls that are none": (
        "rows.jsonl",
        {**ASKED, "examples": [{**EXAMPLE, "calls": [{"arguments": {}}]}]},
    ),
    "fraction of some": (None, {"datasets": ({"path": "plain.jsonl", "fraction": 1.0}, {"path": "chat.jsonl"})}),
    "a split of a stream": (None, {"datasets": ({"path": "plain.jsonl"},), "streaming": True, "test_split_size": 0.1}),
}
"""By name, what `load` refuses."""

TURNS = [{"role": "user", "content": "1 + 1"}]
BAD: dict[str, list[Any]] = {
    "null": [{"prompt": None}],
    "empty": [{"prompt": ""}],
    "blank": [{"prompt": " \n"}],
    "number": [{"prompt": 5}],
    "mapping": [{"prompt": {"role": "user", "content": "x"}}],
    "no messages": [{"prompt": []}],
    "null content": [{"prompt": [{"role": "user", "content": None}]}],
    "no role": [{"prompt": [{"content": "x"}]}],
    "sharegpt": [{"prompt": [{"from": "human", "value": "x"}]}],
    "no content": [{"prompt": [{"role": "user"}]}],
    "text for a message": [{"prompt": [*TURNS, "hello"]}],
    "a role": [{"prompt": [{"role": "usr", "content": "x"}]}],
    "no text": [{"prompt": [{"role": "user", "content": " "}]}],
    "an image": [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}],
    "half a character": [{"prompt": "a\ud800"}],
    "text for a row": ["b"],
    "no prompt": [{"question": "b"}],
}

RECIPES: dict[str, tuple[list[Any] | str, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "chat": (CHAT, {}),
    "few": (PLAIN[:2], {}),
    "held out": (PLAIN, {"held_out": 0.2}),
    "nothing held out": (PLAIN[:1] * 9, {"held_out": 0.5}),
    "no prompt": (QUESTIONS, {}),
    "no prompt of three": ([{"x": row["question"], "y": "1", "z": row["answer"]} for row in QUESTIONS], {}),
    "reserved": ([{**row, "completions": 1, "trainer_state": 2, "image": 3} for row in PLAIN], {}),
    "no braces": (QUESTIONS, {"prompt": "question", "answer": "{{answer}}"}),
    "null prompts": ([*PLAIN, {"prompt": None, "answer": "1"}, {"prompt": "", "answer": "1"}], {}),
    "many null prompts": ([*PLAIN, *[{"prompt": None, "answer": "1"}] * 30], {}),
    "null prompts by a template": (
        [*QUESTIONS, {"question": None, "answer": "1", "level": 0}],
        {"prompt": "{question}", "answer": "{answer}", "filter": "level < 4"},
    ),
    "chat and plain": ([*CHAT, *PLAIN[:3]], {}),
    "continued": ([*CHAT, {"prompt": [*TURNS, {"role": "assistant", "content": "It"}], "answer": "2"}], {}),
    "late system": ([*CHAT, {"prompt": [*TURNS, {"role": "system", "content": "No."}], "answer": "2"}], {}),
    "system alone": ([*CHAT, {"prompt": [{"role": "system", "content": "No."}], "answer": "2"}], {}),
    "tools": (TOOLS, {}),
    "control tokens": ([*CHAT, {"prompt": [{"role": "user", "content": "1<|im_end|>"}], "answer": "2"}], {}),
    "written out": ([{**row, "prompt": f"<|im_start|>user\n{row['prompt']}"} for row in PLAIN], {}),
    "lists as text": ([{"prompt": str(row["prompt"]), "answer": row["answer"]} for row in CHAT], {}),
    "too long": ([*PLAIN, {"prompt": "x" * 900, "answer": "1"}], {"max_prompt_length": 100}),
    "too long, dropped": (
        [*PLAIN[:3], {"prompt": "x" * 900, "answer": "1"}, *PLAIN[3:], {"prompt": "y" * 901, "answer": "1"}],
        {"max_prompt_length": 100, "overlong_prompts": "drop"},
    ),
    "too long, cut": (
        [*PLAIN, {"prompt": "x" * 900, "answer": "1"}],
        {"max_prompt_length": 100, "overlong_prompts": "truncate"},
    ),
    "no room": (PLAIN, {"max_prompt_length": 30000}),
    "repeats": ([*PLAIN, *PLAIN[:5]], {}),
    "contradictions": ([*PLAIN, {"prompt": " WHAT is 3 + 3?", "answer": "7"}], {}),
    "repeats by templates": ("twice.jsonl", {"prompt": "{question}", "answer": "{answer}"}),
    "leaks": (PLAIN, {"eval_dataset": "leak.jsonl"}),
    "null answers": ([*PLAIN, {"prompt": "1+1", "answer": None}], {}),
    "only null answers": ([{"prompt": row["prompt"], "answer": None} for row in PLAIN], {}),
    "marked answers": (
        [*PLAIN, {"prompt": "1+1", "answer": "N/A"}, {"prompt": "1+2", "answer": ""}, {"prompt": "1+3", "answer": []}],
        {},
    ),
    "marked texts": ([*PLAIN, {"prompt": "1+1", "answer": "N/A"}, {"prompt": "1+2", "answer": "nan"}], {}),
    "one answer": ([{**row, "answer": "4"} for row in PLAIN], {}),
    "sentences": ([{**row, "answer": f"The sum is {row['answer']}."} for row in PLAIN], {}),
    "sentences of words": (
        [{**row, "answer": f"The colour is {('red', 'blue', 'green')[n % 3]}"} for n, row in enumerate(PLAIN)],
        {},
    ),
    "sentences of one number": (
        [{**row, "answer": f"one gets {n * 31 + 100} here"} for n, row in enumerate(PLAIN)],
        {},
    ),
    "answers of two types": ([*PLAIN, {"prompt": "1+1", "answer": 2}], {}),
    "long answers": ([*PLAIN, {"prompt": "1+1", "answer": "word " * 60}], {}),
    "NUL": ([*PLAIN, {"prompt": "1\x00+1", "answer": "2"}], {}),
    "large": ([*PLAIN, {"prompt": "x " * 600_000, "answer": "2"}], {}),
    "1,200 rows": ([{"prompt": f"{n} + {n % 9}", "answer": str(n + n % 9)} for n in range(1200)], {}),
    "no header": ("headless.csv", {}),
    "no header, named": ("headless.csv", {"prompt": "{What is 0 + 0?}", "answer": "{0}"}),
    "semicolons": ("semicolons.csv", {"prompt": "{question}", "answer": "{answer}"}),
    "assumed": ("rows.csv", {"rewards": None}),
    "streaming": (PLAIN, {"dataset_streaming": True, "max_steps": 3}),
    "streaming without an end": (PLAIN, {"dataset_streaming": True}),
    "balance": (PLAIN, {"balance_column": "kind"}),
    "broken lines": ("broken.jsonl", {}),
    "an open quote": ("quote.csv", {}),
    "filter that keeps nothing": ("rows.jsonl", {"prompt": "{question}", "answer": "{answer}", "filter": "level > 9"}),
    "filter of no column": ("rows.jsonl", {"prompt": "{question}", "answer": "{answer}", "filter": "levels > 1"}),
    "pass rates": ("plain.jsonl", {"pass_rates": "rates.jsonl"}),
    "order": (
        "rows.jsonl",
        {"prompt": "{question}", "answer": "{answer}", "order": "easy_first", "difficulty": "level"},
    ),
    "order by a text": (
        "rows.jsonl",
        {"prompt": "{question}", "answer": "{answer}", "order": "easy_first", "difficulty": "question"},
    ),
    "mixture": (
        "rows.jsonl",
        {"dataset": [{"path": "rows.jsonl", "weight": 2, **ASKED}, {"path": "plain.jsonl", "weight": 1}]},
    ),
    "mixture of other columns": ("rows.jsonl", {"dataset": [{"path": "rows.jsonl"}, {"path": "plain.jsonl"}]}),
    "eval from a file of chat": (PLAIN, {"eval_dataset": "chat.jsonl"}),
    "built in": ("builtin:additions", {}),
    "transposed": ("columns.json", {}),
    "no file": ("none.jsonl", {}),
    "sft": (
        "rows.jsonl",
        {
            "prompt": "{question}",
            "stages": [{"name": "a", "type": "sft", "completion": "It is {answer}."}, {"name": "b", "max_steps": 1}],
        },
    ),
    "sft without a column": (
        "rows.jsonl",
        {
            "prompt": "{question}",
            "stages": [{"name": "a", "type": "sft", "completion": "{answers}"}, {"name": "b", "max_steps": 1}],
        },
    ),
}
"""By name, rows (or a dataset's name) and keys of a recipe, whose check is compared."""


ARGUMENTS = (
    *("null prompts", "many null prompts", "repeats", "null answers", "marked answers", "answers of two types", "NUL"),
    *("sentences", "too long", "continued", "chat and plain", "lists as text", "system alone", "long answers", "plain"),
)
"""Cases of `RECIPES` whose rows are checked as the argument of a trainer as well."""


def digest(value: Any) -> str:
    """The start of a hash of a value as Python writes it."""
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def told_rows(rows: Any, build: PromptBuilder) -> dict[str, Any] | None:
    """Number, columns, types and digests of rows in their order; and of the prompts made of them."""
    if rows is None:
        return None
    listed = list(rows)
    prompts: list[Any] = []
    for number, row in enumerate(listed):
        try:
            prompt = build(row, id=number, row_index=number)
            prompts.append(prompt and (prompt.token_ids, prompt.text, sorted(prompt.columns.items())))
        except PodiumError as error:
            prompts.append((error.code, error.what))
    return {
        "kind": type(rows).__name__,
        "count": len(listed),
        "columns": list(listed[0]) if listed else [],
        "features": str(getattr(rows, "features", None)),
        "rows": digest(listed),
        "content": digest(sorted(map(repr, listed))),
        "first": repr(listed[0])[:200] if listed else "",
        "prompts": digest(prompts),
    }


def outcome(make: Callable[[], Any]) -> Any:
    """What a call returns; of an error all its parts."""
    try:
        return make()
    except PodiumError as error:
        parts = ("what", "code", "fix", "changes", "settings", "where")
        found = {name: str(getattr(error, name)) for name in parts}
        return {**found, "facts": str(error.facts), "findings": [finding.as_dict() for finding in error.findings]}
    except Exception as error:  # noqa: BLE001  of a library, which is compared as well
        return {"raised": f"{type(error).__name__}: {error}"}


def loaded(dataset: Any, how: dict[str, Any], build: PromptBuilder) -> dict[str, Any]:
    """The rows that `load` gives."""
    if callable(dataset) and dataset is not generated:
        dataset = dataset()
    train, held_out = load(dataset, **how)
    return {"train": told_rows(train, build), "held_out": told_rows(held_out, build)}


def checked(name: str, dataset: list[Any] | str, keys: dict[str, Any], model: str) -> dict[str, Any]:
    """The findings of a check, and the rows that it hands to a training."""
    if not isinstance(dataset, str):
        file = f"check-{len(name)}-{digest(name)}.jsonl"
        Path(file).write_text(lines(dataset), encoding="utf-8")
        dataset = file
    recipe: dict[str, Any] = {"model": model, "dataset": dataset, "max_completion_length": 32}
    recipe |= {"rewards": ["exact_match"], "output_dir": "out", "per_device_train_batch_size": 64} | keys
    Path("run.yaml").write_text(json.dumps({key: value for key, value in recipe.items() if value is not None}))
    found = examine("run.yaml", keep_rows=True)
    rows = None if found.recipe is None else found.recipe.rows
    kept = [] if rows is None else [(each and (digest(list(each.rows)), each.too_long)) for each in rows]
    return {
        "findings": named(check_recipe("run.yaml")),
        "num_rows": found.num_rows,
        "kept": kept,
    }


def checked_arguments(rows: list[Any], model: str) -> list[dict[str, Any]]:
    """The findings of `podium.check` with the arguments of a trainer."""

    def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text == str(told)) for text, told in zip(completions, answer, strict=True)]

    args = GRPOConfig("out", max_completion_length=32, per_device_train_batch_size=64, max_prompt_length=100)
    return named(check(model, right, args, rows, rows[:1]))


def named(found: list[Finding]) -> list[dict[str, Any]]:
    """Findings about rows and settings by the names of their parts, without those about the memory of this machine."""
    about = [finding for finding in found if finding.code[0] in "CD" and finding.code not in ("C028", "C029")]
    return [finding.as_dict() for finding in about]


def problems(rows: list[Any], build: PromptBuilder) -> list[dict[str, Any]]:
    """What `find_problems` finds in rows, between good ones."""
    good: list[Any] = (
        CHAT[:1] if isinstance(rows[0], Mapping) and isinstance(rows[0].get("prompt"), list) else PLAIN[:1]
    )
    return named(find_problems([*good, *rows], "train_dataset", num_needed=4, builder=build))


def rows() -> dict[str, Any]:
    """All of it by the names of the cases, without the name of the folder that they are made in."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.chdir(folder)
            write_files()
            Path("leak.jsonl").write_text(lines([{"prompt": " what IS 3 + 3? ", "answer": "6"}]))
            Path("headless.csv").write_text("".join(f"{row['question']},{row['answer']}\n" for row in QUESTIONS))
            Path("broken.jsonl").write_text(
                lines(PLAIN[:5]) + '{"prompt": "a",}\n[1]\n' + '{"prompt": "a", "answer": NaN}\n'
            )
            Path("quote.csv").write_text(table(PLAIN).replace("What is 7 + 0?", '"What is 7 + 0?'))
            Path("columns.json").write_text(json.dumps({"question": ["1", "2"], "answer": ["1", "2"]}))
            model = str(save_tiny_model(Path("model")))
            build = PromptBuilder(tokenizer=tiny_tokenizer(), max_prompt_length=600, overlong="drop")
            tasks: dict[str, Callable[[], Any]] = {}
            for name, (dataset, how) in (
                *LOADED.items(),
                *((f"refused: {key}", case) for key, case in REFUSED.items()),
            ):
                tasks[f"load {name}"] = lambda dataset=dataset, how=how: loaded(dataset, how, build)  # type: ignore[misc]
            for name, bad in BAD.items():
                tasks[f"problems {name}"] = lambda bad=bad: problems(bad, build)  # type: ignore[misc]
            for name, (given, keys) in RECIPES.items():
                tasks[f"check {name}"] = lambda name=name, given=given, keys=keys: checked(name, given, keys, model)  # type: ignore[misc]
            for name in ARGUMENTS:
                tasks[f"check arguments {name}"] = lambda name=name: checked_arguments(list(RECIPES[name][0]), model)  # type: ignore[misc]
            made = {name: outcome(task) for name, task in tasks.items()}
            real = str(Path(folder).resolve())
            text = json.dumps(made, default=str).replace(real, "FOLDER").replace(folder, "FOLDER")
            return dict(json.loads(text.replace(str(Path(podium.__file__).parent), "PODIUM")))
        finally:
            os.chdir(before)
