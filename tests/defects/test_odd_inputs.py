"""Inputs that nobody here thought of before: sound ones that pass as they are, wrong ones with a fix that works."""

# ruff: noqa: E501, RUF001 - a case is a line, in any letters

from __future__ import annotations

import bz2
import datetime
import functools
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from podium.cli.words import recipe_and_flags
from podium.data.rows import load
from podium.errors import PodiumError
from podium.recipe.document import open_document
from podium.recipe.reading import survey_recipe
from podium.recipe.rewards import RewardReader
from podium.rewards.resolve import resolve_rewards

Say = Callable[[str], None]

ROWS = [{"question": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(12)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def x(line: str, text: str, *values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.defect(line, text), id=f"{line} {text}")


def lines(rows: list[Any], **how: Any) -> bytes:
    return "".join(json.dumps(row, **how) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> Callable[[Path], None]:
    return lambda path: Dataset.from_list(rows).to_parquet(path) and None


def saved(rows: list[dict[str, Any]]) -> Callable[[Path], None]:
    return lambda path: Dataset.from_list(rows).save_to_disk(path)


def saved_splits(path: Path) -> None:
    DatasetDict(train=Dataset.from_list(ROWS[:8]), test=Dataset.from_list(ROWS[8:])).save_to_disk(path)


# ---- X1: tables that are sound ----

Q = {"prompt": "{question}"}
TABLES = [
    x("X1", "a header in capitals", "t.csv", b"QUESTION,ANSWER\n1+1,2\n", {"prompt": "{QUESTION}", "answer": "{ANSWER}"}, ("1+1", "2")),
    x("X1", "Chinese columns and texts", "t.csv", "问题,答案\n一加一,二\n".encode(), {"prompt": "{问题}", "answer": "{答案}"}, ("一加一", "二")),
    x("X1", "Arabic", "t.jsonl", lines([{"سؤال": "ما هو ١+١؟", "جواب": "٢"}], ensure_ascii=False), {"prompt": "{سؤال}", "answer": "{جواب}"}, ("ما هو ١+١؟", "٢")),
    x("X1", "emoji in a name of a column", "t.jsonl", lines([{"❓": "1+1", "answer": "2"}]), {"prompt": "{❓}"}, ("1+1", "2")),
    x("X1", "a column with a space", "t.csv", b"the question,answer\n1+1,2\n", {"prompt": "{the question}"}, ("1+1", "2")),
    x("X1", "a column with a dot", "t.jsonl", lines([{"q.text": "1+1", "answer": "2"}]), {"prompt": "{q.text}"}, ("1+1", "2")),
    x("X1", "a column with a dash", "t.csv", b"q-1,answer\n1+1,2\n", {"prompt": "{q-1}"}, ("1+1", "2")),
    x("X1", "a column that is a number", "t.jsonl", lines([{"1": "1+1", "answer": "2"}]), {"prompt": "{1}"}, ("1+1", "2")),
    x("X1", "a column called class", "t.jsonl", lines([{"class": "1+1", "answer": "2"}]), {"prompt": "{class}"}, ("1+1", "2")),
    x("X1", "lines of Windows", "t.csv", b"question,answer\r\n1+1,2\r\n", Q, ("1+1", "2")),
    x("X1", "JSONL with lines of Windows", "t.jsonl", lines(ROWS).replace(b"\n", b"\r\n"), Q, ("What is 0 + 2?", "2")),
    x("X1", "JSONL without a last line end", "t.jsonl", lines(ROWS).rstrip(), Q, ("What is 0 + 2?", "2")),
    x("X1", "JSONL with empty lines", "t.jsonl", lines(ROWS).replace(b"\n", b"\n\n"), Q, ("What is 0 + 2?", "2")),
    x("X1", "JSONL with spaces in front", "t.jsonl", b"  " + lines(ROWS), Q, ("What is 0 + 2?", "2")),
    x("X1", "a JSON list on one line", "t.json", json.dumps(ROWS).encode(), Q, ("What is 0 + 2?", "2")),
    x("X1", "a JSON list, indented", "t.json", json.dumps(ROWS, indent=4).encode(), Q, ("What is 0 + 2?", "2")),
    x("X1", "an object a line in .json", "t.json", lines(ROWS), Q, ("What is 0 + 2?", "2")),
    x("X1", "numbers as answers", "t.jsonl", lines([{"question": "1+1", "answer": 2}]), Q, ("1+1", 2)),
    x("X1", "decimal answers", "t.jsonl", lines([{"question": "1/2", "answer": 0.5}]), Q, ("1/2", 0.5)),
    x("X1", "true and false as answers", "t.jsonl", lines([{"question": "Is 7 prime?", "answer": True}, {"question": "8?", "answer": False}]), Q, ("Is 7 prime?", True)),
    x("X1", "lists of answers", "t.jsonl", lines([{"question": "A prime?", "answer": ["2", "3"]}]), Q, ("A prime?", ["2", "3"])),
    x("X1", "a list of one answer", "t.jsonl", lines([{"question": "1+1", "answer": ["2"]}]), Q, ("1+1", ["2"])),
    x("X1", "an object as an answer", "t.jsonl", lines([{"question": "1+1", "answer": {"value": 2, "unit": "m"}}]), Q, ("1+1", {"value": 2, "unit": "m"})),
    x("X1", "dates as answers", "t.csv", b"question,answer\nWhen?,2024-02-29\n", Q, ("When?", "2024-02-29")),
    x("X1", "zeros in front", "t.csv", b"question,answer\nZIP?,01067\n", Q, ("ZIP?", "01067")),
    x("X1", "a huge whole number", "t.jsonl", lines([{"question": "2^80?", "answer": str(2**80)}]), Q, ("2^80?", str(2**80))),
    x("X1", "an answer called None", "t.csv", b"question,answer\nNothing?,None\n", Q, ("Nothing?", "None")),
    x("X1", "an answer called NA", "t.csv", b"question,answer\nNamibia's code?,NA\n", Q, ("Namibia's code?", "NA")),
    x("X1", "an answer with a comma", "t.csv", b'question,answer\n"Half?","0,5"\n', Q, ("Half?", "0,5")),
    x("X1", "quotes in quotes", "t.csv", b'question,answer\n"Say ""a""","a"\n', Q, ('Say "a"', "a")),
    x("X1", "line ends in a field", "t.csv", b'question,answer\n"a\nb",2\n', Q, ("a\nb", "2")),
    x("X1", "braces in a text", "t.jsonl", lines([{"question": "What is {x} in {{y}}?", "answer": "z"}]), Q, ("What is {x} in {{y}}?", "z")),
    x("X1", "a per cent sign and a backslash", "t.jsonl", lines([{"question": "50% of \\frac{1}{2}\\n?", "answer": "1/4"}]), Q, ("50% of \\frac{1}{2}\\n?", "1/4")),
    x("X1", "an empty optional column", "t.csv", b"question,answer,hint\n1+1,2,\n", Q, ("1+1", "2")),
    x("X1", "a column of nulls alone", "t.jsonl", lines([{"question": "1+1", "answer": "2", "note": None}]), Q, ("1+1", "2")),
    x("X1", "keys that some rows lack", "t.jsonl", lines([{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4", "level": 3}]), Q, ("1+1", "2")),
    x("X1", "a very long prompt", "t.jsonl", lines([{"question": "x" * 300_000, "answer": "2"}]), Q, ("x" * 300_000, "2")),
    x("X1", "one row", "t.csv", b"question,answer\n1+1,2\n", Q, ("1+1", "2")),
    x("X1", "a semicolon table with decimal commas", "t.csv", b"question;answer\nHalf?;0,5\n", Q, ("Half?", "0,5")),
    x("X1", "Parquet", "t.parquet", parquet(ROWS), Q, ("What is 0 + 2?", "2")),
    x("X1", "Parquet with dates", "t.parquet", parquet([{"question": "When?", "answer": datetime.date(2024, 2, 29)}]), Q, ("When?", datetime.date(2024, 2, 29))),
    x("X1", "Parquet with lists", "t.parquet", parquet([{"question": "A prime?", "answer": ["2", "3"]}]), Q, ("A prime?", ["2", "3"])),
    x("X1", "save_to_disk", "saved", saved(ROWS), Q, ("What is 0 + 2?", "2")),
    x("X1", "save_to_disk with splits", "splits", saved_splits, Q, ("What is 0 + 2?", "2")),
    x("X1", ".jsonl.gz", "t.jsonl.gz", gzip.compress(lines(ROWS)), Q, ("What is 0 + 2?", "2")),
    x("X1", ".json.bz2", "t.json.bz2", bz2.compress(json.dumps(ROWS).encode()), Q, ("What is 0 + 2?", "2")),
    x("X1", "a folder of two files", "d/a.jsonl", lines(ROWS[:6]), Q, ("What is 0 + 2?", "2")),
    x("X1", "a name with spaces and letters with accents", "Übung 1 (neu).csv", b"question,answer\n1+1,2\n", Q, ("1+1", "2")),
    x("X1", "a name of two dots", "data.v2.csv", b"question,answer\n1+1,2\n", Q, ("1+1", "2")),
    x("X1", "a name in Japanese", "質問.jsonl", lines(ROWS), Q, ("What is 0 + 2?", "2")),
    x("X1", "a conversation", "t.jsonl", lines([{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}]), {}, ([{"role": "user", "content": "1+1"}], "2")),
    x("X1", "a conversation with a system message", "t.jsonl", lines([{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}], "answer": "2"}]), {}, ([{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}], "2")),
    x("X1", "nested JSON beside the question", "t.jsonl", lines([{"question": "1+1", "answer": "2", "meta": {"tags": ["a", {"b": [1]}]}}]), Q, ("1+1", "2")),
    x("X1", "text around a column", "t.csv", b"question,answer\n1+1,2\n", {"prompt": "Q: {question}\nA:", "answer": "{answer}"}, ("Q: 1+1\nA:", "2")),
    x("X1", "two columns in one prompt", "t.csv", b"a,b,answer\n1,2,3\n", {"prompt": "{a} + {b} ="}, ("1 + 2 =", "3")),
    x("X1", "an answer after a mark", "t.csv", b"question,answer\n1+1,so it is #### 2\n", {**Q, "answer_from": "after ####"}, ("1+1", "2")),
]  # fmt: skip


@pytest.mark.cases(24)
@pytest.mark.parametrize(("name", "content", "how", "first"), TABLES)
def test_a_sound_table_is_read_as_it_is(
    folder: Path, now: Say, name: str, content: Any, how: dict[str, Any], first: tuple[Any, Any]
) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    content(path) if callable(content) else path.write_bytes(content)
    if name == "d/a.jsonl":
        (folder / "d/b.jsonl").write_bytes(lines(ROWS[6:]))
        name = "d"
    rows = load(name, **how).train
    assert len(rows) >= 1
    assert (rows[0]["prompt"], rows[0]["answer"]) == first
    now("read")


PLACES: list[Any] = [
    x("X2", "a link to a file", lambda f: (f / "link.jsonl").symlink_to("rows.jsonl"), "link.jsonl", "."),
    x("X2", "a link to a folder", lambda f: ((f / "real").mkdir(), (f / "real/r.jsonl").write_bytes(lines(ROWS)), (f / "ln").symlink_to("real")), "ln", "."),
    x("X2", "a path through a linked folder", lambda f: ((f / "real").mkdir(), (f / "real/r.jsonl").write_bytes(lines(ROWS)), (f / "ln").symlink_to("real")), "ln/r.jsonl", "."),
    x("X2", "a path above the working directory", lambda f: (f / "deep/er").mkdir(parents=True), "../../rows.jsonl", "deep/er"),
    x("X2", "./ in front", lambda f: None, "./rows.jsonl", "."),
    x("X2", "// within", lambda f: (f / "d").mkdir(), "d//..//rows.jsonl", "."),
    x("X2", "~", lambda f: None, "~/rows.jsonl", "."),
    x("X2", "brackets in a name that is there", lambda f: (f / "r[1].jsonl").write_bytes(lines(ROWS)), "r[1].jsonl", "."),
    x("X2", "a question mark in a name that is there", lambda f: (f / "r?.jsonl").write_bytes(lines(ROWS)), "r?.jsonl", "."),
    x("X2", "an equals sign in a name that is there", lambda f: (f / "n=1.jsonl").write_bytes(lines(ROWS)), "n=1.jsonl", "."),
]  # fmt: skip


@pytest.mark.parametrize(("make", "name", "cwd"), PLACES)
def test_a_sound_path_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Any], name: str, cwd: str
) -> None:
    (folder / "rows.jsonl").write_bytes(lines(ROWS))
    make(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder / cwd)
    assert len(load(name, prompt="{question}").train) == 12


# ---- X3: recipes that are sound ----

BASE = "model: builtin:smollm2-135m-instruct\ndataset: rows.jsonl\nprompt: '{question}'\nrewards: [numeric_match]\n"


def problems(text: str | bytes, overrides: dict[str, Any] | None = None) -> list[Any]:
    Path("run.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return survey_recipe(open_document("run.yaml"), overrides or {})[1]


RECIPES = [
    x("X3", "lines of Windows", BASE.replace("\n", "\r\n"), {}),
    x("X3", "a byte-order mark", b"\xef\xbb\xbf" + BASE.encode(), {}),
    x("X3", "UTF-16, as Notepad writes", BASE.encode("utf-16"), {}),
    x("X3", "JSON", json.dumps({"model": "builtin:smollm2-135m-instruct", "dataset": "rows.jsonl", "prompt": "{question}", "rewards": ["numeric_match"], "max_steps": 5}), {"max_steps": 5}),
    x("X3", "--- at the top", "---\n" + BASE, {}),
    x("X3", "... at the end", BASE + "...\n", {}),
    x("X3", "comments and empty lines", "# mine\n\n" + BASE + "\n# end", {}),
    x("X3", "anchors and aliases", BASE + "max_steps: &n 5\nsave_steps: *n\n", {"max_steps": 5, "save_steps": 5}),
    x("X3", "a number as text", BASE + "learning_rate: '1e-5'\n", {"learning_rate": 1e-5}),
    x("X3", "1e-6 without a point", BASE + "learning_rate: 1e-6\n", {"learning_rate": 1e-6}),
    x("X3", "a whole number where a fraction may be", BASE + "temperature: 1\n", {"temperature": 1}),
    x("X3", "null", BASE + "max_grad_norm: 1.0\neval_dataset: null\n", {}),
    x("X3", "a key with nothing behind it", BASE + "system:\n", {}),
    x("X3", "a block of text", BASE + "system: |\n  Think.\n  Then answer.\n", {"system": "Think.\nThen answer.\n"}),
    x("X3", "folded text", BASE + "system: >-\n  Think.\n  Then answer.\n", {"system": "Think. Then answer."}),
    x("X3", "typographic quotes within a text", BASE + "system: Say “yes” or “no” only.\n", {"system": "Say “yes” or “no” only."}),
    x("X3", "typographic quotes around a text, in straight ones", BASE + 'system: "“Answer.”"\n', {"system": "“Answer.”"}),
    x("X3", "a no-break space in a text", BASE + "system: 'Write 10\u00a0km.'\n", {"system": "Write 10\u00a0km."}),
    x("X3", "a text with : in quotes", BASE + 'system: "Note: answer."\n', {"system": "Note: answer."}),
    x("X3", "a weight of 0", BASE.replace("[numeric_match]", "[numeric_match, {name: answer_format, weight: 0}]"), {}),
    x("X3", "a negative weight", BASE.replace("[numeric_match]", "[numeric_match, {name: token_budget, weight: -0.5}]"), {}),
    x("X3", "one reward without a list", BASE.replace("[numeric_match]", "numeric_match"), {}),
    x("X3", "TRL's names", "model_name_or_path: builtin:smollm2-135m-instruct\ndataset_name: rows.jsonl\nreward_funcs: [numeric_match]\nprompt: '{question}'\n", {}),
    x("X3", "rewards in a block", BASE.replace("rewards: [numeric_match]", "rewards:\n- numeric_match\n- name: answer_format\n  weight: 0.5"), {}),
    x("X3", "environment variables", BASE + "env:\n  MY_LIMIT: 5\n  TOKENIZERS_PARALLELISM: 'false'\n", {}),
    x("X3", "an adapter on every layer", BASE + "lora: {r: 8, lora_alpha: 16, target_modules: all-linear}\n", {}),
    x("X3", "a list of two filters", BASE + "filter:\n- answer != ''\n- question != ''\n", {}),
    x("X3", "letters with accents in output_dir", BASE + "output_dir: läufe/übung 1\n", {"output_dir": "läufe/übung 1"}),
    x("X3", "on_finding", BASE + "on_finding: {D016: ignore, M101: stop}\n", {}),
    x("X3", "yes in a text", BASE + "system: yes\n", {"system": "yes"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "values"), RECIPES)
def test_a_sound_recipe_has_no_problem(folder: Path, text: str | bytes, values: dict[str, Any]) -> None:
    (folder / "rows.jsonl").write_bytes(lines(ROWS))
    assert [str(each) for each in problems(text)] == []
    given = open_document("run.yaml").values
    for key, value in values.items():
        assert float(given[key]) == value if isinstance(value, float) else given[key] == value


# ---- X4: rewards that are sound ----


class Judge:
    """A callable object with a state."""

    def __init__(self, right: float = 1.0) -> None:
        self.right = right

    def __call__(self, completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        return [self.right * (text == told) for text, told in zip(completions, answer, strict=True)]

    def method(self, completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        return self(completions, answer)


def plain(completions: list[Any], answer: list[str]) -> list[float]:
    return [float(text == told) for text, told in zip(completions, answer, strict=True)]


async def waiting(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return plain(completions, answer)


def with_default(completions: list[Any], answer: list[str], strict: bool = True, **kwargs: Any) -> list[float]:
    return plain(completions, answer)


def keywords_alone(*, completions: list[Any], answer: list[str]) -> list[float]:
    return plain(completions, answer)


@functools.cache
def _cached(text: str, told: str) -> float:
    return float(text == told)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


REWARDS = [
    x("X4", "a function", plain),
    x("X4", "a lambda", lambda completions, answer, **_: [float(a == b) for a, b in zip(completions, answer, strict=True)]),
    x("X4", "an object of a class", Judge()),
    x("X4", "a method of an object", Judge().method),
    x("X4", "a partial", functools.partial(with_default, strict=False)),
    x("X4", "a partial of a partial", functools.partial(functools.partial(with_default, strict=False), strict=True)),
    x("X4", "an async function", waiting),
    x("X4", "arguments by keyword alone", keywords_alone),
    x("X4", "a decorated function", wrapped(plain)),
    x("X4", "one that uses a cache", lambda completions, answer, **_: [_cached(a, b) for a, b in zip(completions, answer, strict=True)]),
    x("X4", "a class method", type("Scorer", (), {"score": classmethod(lambda cls, completions, answer, **_: plain(completions, answer))}).score),
    x("X4", "a static method", type("Scorer", (), {"score": staticmethod(plain)}).score),
    x("X4", "kwargs alone", lambda **columns: plain(columns["completions"], columns["answer"])),
]  # fmt: skip


@pytest.mark.parametrize("function", REWARDS)
def test_a_sound_reward_is_taken(function: Any) -> None:
    (reward,) = resolve_rewards(function)
    given = {"completions": ["2", "3"], "answer": ["2", "4"]}
    values = reward.function(**given)
    if reward.is_async:
        import asyncio

        values = asyncio.run(values)
    assert values == [1.0, 0.0]


FILES = [
    x("X4", "a file in a folder with accents", "bewertung/prüfung.py", "def f(completions, answer, **k): return [float(a == b) for a, b in zip(completions, answer)]", "f"),
    x("X4", "a name that is a module of Python's", "random.py", "import random as r\ndef f(completions, answer, **k): return [float(a == b) for a, b in zip(completions, answer)]", "f"),
    x("X4", "a module beside it", "mine.py", "from helper_of_mine import same\ndef f(completions, answer, **k): return [same(a, b) for a, b in zip(completions, answer)]", "f"),
    x("X4", "an object made in the file", "obj.py", "class F:\n    def __call__(self, completions, answer, **k): return [float(a == b) for a, b in zip(completions, answer)]\njudge = F()", "judge"),
    x("X4", "a class that is made with no arguments", "cls.py", "class F:\n    def __call__(self, completions, answer, **k): return [float(a == b) for a, b in zip(completions, answer)]", "F"),
    x("X4", "a factory", "fac.py", "def make():\n    def f(completions, answer, **k): return [float(a == b) for a, b in zip(completions, answer)]\n    return f", "make"),
    x("X4", "lines of Windows and a byte-order mark", "win.py", "\ufeffdef f(completions, answer, **k):\r\n    return [float(a == b) for a, b in zip(completions, answer)]\r\n", "f"),
]  # fmt: skip


def read_rewards(entries: Any) -> tuple[list[Any], list[Any]]:
    reader = RewardReader(folder=Path(), where=lambda place: "run.yaml:4")
    specs = reader.read(entries, "rewards")
    return list(specs), reader.problems


@pytest.mark.cases(3)
@pytest.mark.parametrize(("name", "code", "function"), FILES)
def test_a_sound_reward_file_is_taken(folder: Path, name: str, code: str, function: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(code, encoding="utf-8", newline="")
    (folder / "helper_of_mine.py").write_text("def same(a, b): return float(a == b)\n")
    specs, wrong = read_rewards([f"{name}:{function}"])
    assert not wrong
    assert specs[0].function(completions=["2", "3"], answer=["2", "4"]) == [1.0, 0.0]


# ---- X5: tables that are wrong ----

WRONG_TABLES = [
    x("X5", "one name of a column is misspelt", {"t.csv": b"qestion,answer\n1+1,2\n"}, "t.csv", Q, "question", "qestion"),
    x("X5", "prompts that are numbers", {"t.jsonl": lines([{"prompt": 5, "answer": "2"}])}, "t.jsonl", {}, "prompt is int 5", "a prompt is a string"),
    x("X5", "a trailing comma in JSONL", {"t.jsonl": b'{"prompt": "a",}\n'}, "t.jsonl", {}, "line 1", "one JSON object"),
    x("X5", "JSON with a comment", {"t.jsonl": b'{"prompt": "a"} // mine\n'}, "t.jsonl", {}, "line 1", "one JSON object"),
    x("X5", "two objects on a line", {"t.jsonl": b'{"prompt": "a"}{"prompt": "b"}\n'}, "t.jsonl", {}, "line 1", "a line of its own"),
    x("X5", "a dict as Python prints it", {"t.jsonl": b"{'prompt': 'a', 'answer': None}\n"}, "t.jsonl", {}, "line 1", "$ python"),
    x("X5", "texts, one a line, as JSON", {"t.jsonl": b'"a"\n"b"\n'}, "t.jsonl", {}, "expected an object", "$ python"),
    x("X5", "a title above the header", {"t.csv": b"Exam 2024,\nquestion,answer\n1+1,2\n"}, "t.csv", Q, "line 2 has the names", "$ tail"),
    x("X5", "comments above the header", {"t.csv": b"# mine\n# of May\nquestion,answer\n1+1,2\n"}, "t.csv", Q, "line 3 has the names", "$ tail"),
    x("X5", "columns in a JSON object", {"t.json": json.dumps({"question": ["1+1"] * 2, "answer": ["2"] * 2}).encode()}, "t.json", Q, "one object with the keys", "$ python"),
    x("X5", "a comma in an answer without quotes", {"t.csv": b"question,answer\nHalf?,0,5\n"}, "t.csv", Q, "3 fields", "quote"),
    x("X5", "an address", {}, "https://example.com/a/q.csv?raw=1", {}, "is an address", "curl -LO"),
    x("X5", "an address of the hub", {}, "hf://datasets/org/name/q.csv", {}, "is an address", "hf download org/name q.csv --repo-type dataset"),
    x("X5", "a page of the hub", {}, "https://huggingface.co/datasets/openai/gsm8k", {}, "is an address", "openai/gsm8k"),
    x("X5", "a file: address", {"t.csv": b"a,b\n"}, "file:///data/t.csv", {}, "is an address", "/data/t.csv"),
    x("X5", "a pattern", {"a.jsonl": lines(ROWS), "b.jsonl": lines(ROWS)}, "*.jsonl", {}, "2 match", "a.jsonl, b.jsonl"),
    x("X5", "standard input", {}, "-", {}, "standard input", "rows.jsonl"),
    x("X5", "separators of Windows", {"t.jsonl": lines(ROWS)}, ".\\t.jsonl", {}, "separators of Windows", "./t.jsonl"),
    x("X5", "a link to nothing", {"->gone.csv": b"l.csv"}, "l.csv", {}, "a link to gone.csv", "ln -sfn"),
    x("X5", "a link to itself", {"->l.csv": b"l.csv"}, "l.csv", {}, "a link to l.csv", "ln -sfn"),
    x("X5", "a name without its ending", {"questions.csv": b"a,b\n"}, "questions", {}, "but questions.csv", "questions.csv"),
    x("X5", "an ending without its dot", {"t.jsonl": lines(ROWS)}, "./tjsonl", {}, "no file or folder", "t.jsonl"),
    x("X5", "a folder without data", {"d/readme.md": b"x"}, "d", {}, "cannot be read as a dataset", "a file in it"),
    x("X5", "messages of ShareGPT", {"t.jsonl": lines([{"prompt": [{"from": "human", "value": "1+1"}]}])}, "t.jsonl", {}, "`role` missing", "`human` to `user`"),
]  # fmt: skip


@pytest.mark.cases(12)
@pytest.mark.parametrize(("files", "name", "how", "says", "fix"), WRONG_TABLES)
def test_a_wrong_table_is_one_message_with_its_way_out(
    folder: Path, now: Say, files: dict[str, bytes], name: str, how: dict[str, Any], says: str, fix: str
) -> None:
    from podium.data.survey import check_dataset

    for file, content in files.items():
        if file.startswith("->"):
            (folder / content.decode()).symlink_to(file[2:])
            continue
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content)
    try:
        check_dataset(load(name, **how).train, "rows")
        pytest.fail("nothing is said")
    except PodiumError as error:
        what, way = str(error), error.fix or error.findings[0].fix
    now(f"{what} -> {way}")
    assert says in what
    if not fix.startswith("$ "):
        assert fix in way
        return
    command, _, to = way.partition("; then ")
    assert command.startswith(fix[2:])
    command = re.sub(r"^python ", f"{sys.executable} ", command)
    subprocess.run(command, shell=True, check=True, cwd=folder, env={**os.environ, "PYTHONPATH": ""})
    made = to.removeprefix("dataset: ") if to.startswith("dataset: ") else command.rpartition("> ")[2]
    assert len(load(made, **how).train) >= 1


# ---- X6: recipes that are wrong ----

WRONG_RECIPES = [
    x("X6", "keys under training:", "training:\n  max_steps: 5\n", "unknown key `training`", "max_steps: 5"),
    x("X6", "keys two levels down", "trainer:\n  args:\n    beta: 0.1\n", "unknown key `trainer`", "beta: 0.1"),
    x("X6", "a merge key", "<<: {max_steps: 5}\n", "unknown key `<<`", "max_steps: 5"),
    x("X6", "an alias of nothing", "max_steps: *n\n", "undefined alias", None),
    x("X6", "a second document", "---\nmax_steps: 5\n", "another document", "take out line"),
    x("X6", "a no-break space behind :", "max_steps:\u00a05\n", "could not find", None),
    x("X6", "a no-break space in a key", "max\u00a0steps: 5\n", "holds a space that is none", None),
    x("X6", "a zero-width space in a key", "max_steps\u200b: 5\n", "holds a space that is none", None),
    x("X6", "a full-width colon", "max_steps：5\n", "could not find", None),
    x("X6", "typographic quotes", "output_dir: “runs/a”\n", "typographic quotes", '"runs/a"'),
    x("X6", "guillemets", "output_dir: «runs/a»\n", "typographic quotes", '"runs/a"'),
    x("X6", "a value that begins with @", "output_dir: @runs\n", "goes in quotes", 'output_dir: "@runs"'),
    x("X6", "a value that begins with a backtick", "output_dir: `runs`\n", "goes in quotes", 'output_dir: "`runs`"'),
    x("X6", "a value that begins with *", "system: *bold* words\n", "goes in quotes", 'system: "*bold* words"'),
    x("X6", "an open bracket", "filter: [a\n", "expected", None),
    x("X6", "an open quote", 'system: "abc\n', "end of stream", None),
    x("X6", "examples as a file", "examples: rows.jsonl\n", "`examples`", "examples: 2"),
    x("X6", "a fraction of steps", "max_steps: 5.5\n", "`max_steps`", "max_steps: 6"),
    x("X6", "a decimal comma", "temperature: 0,9\n", "`temperature`", "temperature: 0.9"),
    x("X6", "thousands with commas", "max_steps: 1,000\n", "`max_steps`", "max_steps: 1000"),
    x("X6", "a rank alone", "lora: 8\n", "`lora`", "lora: {r: 8}"),
    x("X6", "a typographic minus", "learning_rate: 1e−5\n", "`learning_rate`", "learning_rate: 1e-05"),
    x("X6", "a key in capitals", "MAX_STEPS: 5\n", "unknown key `MAX_STEPS`", "max_steps"),
    x("X6", "a key with dashes", "max-steps: 5\n", "unknown key `max-steps`", "max_steps"),
    x("X6", "a key twice", "seed: 1\nseed: 2\n", "`seed` is already set", "delete line"),
    x("X6", "a tag", "seed: !!int 3\n", "tags", "leave it out"),
    x("X6", "a held-out share of 20", "held_out: 20\n", "`held_out`", "held_out: 0.2"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "says", "fix"), WRONG_RECIPES)
def test_a_wrong_recipe_is_named_by_its_line_with_its_cure(
    folder: Path, now: Say, line: str, says: str, fix: str | None
) -> None:
    (folder / "rows.jsonl").write_bytes(lines(ROWS))
    try:
        found = problems(BASE + line)
        what, way = f"{found[0].where}: {found[0].what}", found[0].fix
        assert len(found) == 1
    except PodiumError as error:
        what, way = error.what, error.fix
    now(f"{what} -> {way}")
    assert says in what
    assert re.search(r"run\.yaml:\d", what)
    assert "podium explain" not in way
    assert (fix or "line" if fix is None and "*" not in line else fix or "write") in way
    if fix and re.match(r"\w+: ", fix):  # a line of a recipe: it stands in place of the wrong one
        assert problems(BASE + fix + "\n") == []


def test_a_second_document_in_a_file_that_begins_with_dashes(folder: Path) -> None:
    (folder / "rows.jsonl").write_bytes(lines(ROWS))
    with pytest.raises(PodiumError) as error:
        problems(f"---\n{BASE}---\nmax_steps: 5\n")
    assert error.value.fix.startswith("one recipe in a file: take out line")


# ---- X7: rewards that are wrong ----

WRONG_REWARDS = [
    x("X7", "a file without a function", "r.py", "which function", "r.py:f"),
    x("X7", "as pytest writes it", "r.py::f", "FILE.py:FUNCTION", "r.py:f"),
    x("X7", "with #", "r.py#g", "FILE.py:FUNCTION", "r.py:g"),
    x("X7", "with a space", "r.py f", "FILE.py:FUNCTION", "r.py:f"),
    x("X7", "a file with a dot", "r.py.f", "FILE.py:FUNCTION", "r.py:f"),
    x("X7", "two in one text", "numeric_match, answer_format", "several rewards", "rewards: [numeric_match, answer_format]"),
    x("X7", "a method of a class", "r.py:R.score", "no function `R.score`", "def score(completions, **kwargs): return R().score(completions, **kwargs)"),
    x("X7", "a notebook", "n.ipynb", "a notebook", "jupyter nbconvert --to script n.ipynb"),
    x("X7", "a cell of a notebook", "n.ipynb:f", "a notebook", "jupyter nbconvert --to script n.ipynb"),
    x("X7", "an address", "https://example.com/r.py", "is an address", "curl -LO"),
    x("X7", "a pattern", "*.py", "is a pattern", "r.py"),
    x("X7", "a module that is not there", "nowhere_at_all:f", "no module `nowhere_at_all`", "FILE.py:FUNCTION"),
    x("X7", "a misspelt name", "numeric_mach", "no reward `numeric_mach`", "numeric_match"),
    x("X7", "a misspelt function", "r.py:ff", "no function `ff`", "f"),
    x("X7", "a number of the file", "r.py:number", "is int", "r.py:"),
    x("X7", "no argument at all", "r.py:nothing", "gave list", "def nothing(completions, **kwargs)"),
    x("X7", "an unknown argument", {"function": "r.py:limited", "args": {"limt": 3}}, "no argument `limt`", "limit"),
    x("X7", "a weight in words", {"name": "numeric_match", "weight": "high"}, "`weight`", "weight: 1"),
    x("X7", "a number", 5, "a reward is a name", "rewards: ["),
]  # fmt: skip


@pytest.mark.cases(5)
@pytest.mark.parametrize(("entry", "says", "fix"), WRONG_REWARDS)
def test_a_wrong_reward_is_one_message_with_its_way_out(
    folder: Path, now: Say, entry: Any, says: str, fix: str
) -> None:
    code = "number = 3\nclass R:\n    def score(self, completions, **kwargs): return [0.0] * len(completions)\n"
    code += (
        "def f(completions, **kwargs): return [0.0] * len(completions)\ndef g(completions, **kwargs): return [0.0]\n"
    )
    code += "def nothing(): return [0.0]\ndef limited(completions, limit=3): return [0.0]\n"
    (folder / "r.py").write_text(code)
    (folder / "n.ipynb").write_text("{}")
    specs, wrong = read_rewards([entry])
    assert not specs
    (problem,) = wrong
    now(f"{problem.what} -> {problem.fix}")
    assert says in problem.what
    assert fix in problem.fix
    if re.fullmatch(r"r\.py:\w+", fix):
        assert read_rewards([fix])[1] == []


# ---- X8: command lines ----

WRONG_WORDS = [
    x("X8", "an em dash", ["run.yaml", "—max_steps", "5"], "--max_steps"),
    x("X8", "an en dash with =", ["run.yaml", "–max_steps=5"], "--max_steps 5"),
    x("X8", "one dash", ["run.yaml", "-max_steps", "5"], "--max_steps"),
    x("X8", "no dash", ["run.yaml", "max_steps=5"], "--max_steps 5"),
    x("X8", "a plus, as Hydra has it", ["run.yaml", "+max_steps=5"], "--max_steps 5"),
    x("X8", "a colon", ["run.yaml", "--max_steps:5"], "--max_steps 5"),
    x("X8", "a flag and its value in one word", ["run.yaml", "--max_steps 5"], "--max_steps 5"),
    x("X8", "a key in a mapping", ["run.yaml", "--lora.r=8"], "--lora '{r: 8}'"),
    x("X8", "a typographic dash behind a flag", ["run.yaml", "--beta", "0.1", "—seed", "3"], "--seed"),
    x("X8", "a flag twice", ["run.yaml", "--seed", "1", "--seed", "2"], ""),
]  # fmt: skip


@pytest.mark.parametrize(("words", "fix"), WRONG_WORDS)
def test_a_word_that_is_nearly_a_flag_is_refused_with_the_flag(
    folder: Path, now: Say, words: list[str], fix: str
) -> None:
    with pytest.raises(PodiumError) as caught:
        recipe_and_flags(words, "check")
    now(str(caught.value))
    assert fix in caught.value.fix


SOUND_WORDS = [
    x("X8", "-c", ["-c", "run.yaml"], "run.yaml", {}),
    x("X8", "--recipe", ["--recipe", "run.yaml", "--seed", "3"], "run.yaml", {"seed": 3}),
    x("X8", "--config_file", ["--config_file=run.yaml"], "run.yaml", {}),
    x("X8", "a negative number", ["run.yaml", "--beta", "-1"], "run.yaml", {"beta": -1}),
    x("X8", "a text that begins with a dash of typography", ["run.yaml", "--system", "— be brief"], "run.yaml", {"system": "— be brief"}),
    x("X8", "= in a value", ["run.yaml", "--prompt", "a=b {question}"], "run.yaml", {"prompt": "a=b {question}"}),
    x("X8", "= in a path", ["runs/n=1/run.yaml"], "runs/n=1/run.yaml", {}),
    x("X8", "an empty value", ["run.yaml", "--report_to="], "run.yaml", {"report_to": None}),
    x("X8", "a mapping", ["run.yaml", "--lora", "{r: 8}"], "run.yaml", {"lora": {"r": 8}}),
    x("X8", "--no-", ["run.yaml", "--no-bf16"], "run.yaml", {"bf16": False}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "path", "values"), SOUND_WORDS)
def test_sound_words_are_read(folder: Path, words: list[str], path: str, values: dict[str, Any]) -> None:
    assert recipe_and_flags(words, "check") == (path, values)
