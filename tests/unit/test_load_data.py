"""Datasets by name: what is read, and what is said about files that cannot be."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from podium import data
from podium.data.rows import DataSpec, load_data, opening_of
from podium.data.sources import file_source, load_splits
from podium.data.survey import RowSurvey, survey_rows
from podium.errors import DataError
from podium.stages.running import _dataset as stage_rows

ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}]


def write(path, content: str | bytes):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", JSONL),
        ("rows.jsonl", codecs.BOM_UTF8 + JSONL.encode()),
        ("rows.json", JSONL),
        ("rows.json", json.dumps(ROWS, indent=2)),
        ("rows.csv", "prompt,answer\n1+1,2\n2+2,4\n"),
    ],
)
def test_files_are_read(tmp_path, name, content):
    train, held_out = load_data(DataSpec(dataset=write(tmp_path / name, content)))
    assert [row["prompt"] for row in train] == ["1+1", "2+2"]
    assert held_out is None


def test_a_text_file_has_one_prompt_a_line(tmp_path):
    train, _ = load_data(DataSpec(dataset=write(tmp_path / "rows.txt", "one\ntwo\n")))
    assert train["prompt"][:] == ["one", "two"]


def test_parquet_and_saved_folders_are_read(tmp_path):
    rows = Dataset.from_list(ROWS)
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(str(tmp_path / "saved"))
    assert len(load_splits(str(tmp_path / "rows.parquet"))["train"]) == 2
    train, held_out = load_data(DataSpec(dataset=str(tmp_path / "saved")))
    assert (len(train), len(held_out)) == (2, 1)


def test_an_eval_file_and_a_task_are_held_out(tmp_path):
    path = write(tmp_path / "rows.jsonl", JSONL)
    train, held_out = load_data(DataSpec(dataset="builtin:additions", eval_dataset=path))
    assert (len(train), len(held_out)) == (320, 2)
    assert load_data(DataSpec(dataset="builtin:additions", use_test_split="no"))[1] is None


def test_a_mixture_is_cut_to_shares_and_split(tmp_path):
    one = write(tmp_path / "one.jsonl", JSONL * 5)
    two = write(tmp_path / "two.jsonl", JSONL * 20)
    parts = (
        {"path": one, "fraction": 1.0, "columns": ["prompt"]},
        {"path": two, "fraction": 3.0, "columns": ["prompt"]},
    )
    train, held_out = load_data(DataSpec(datasets=parts, test_split_size=0.25, use_test_split="needed"))
    assert (len(train), len(held_out)) == (30, 10)
    assert train.column_names == ["prompt"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", JSONL + '{"prompt": "c",}\n', r"d.jsonl line 3, column 1[56]: not valid JSON .*\n.*\n +\^"),
        ("d.jsonl", '{"prompt": "c", "answer": NaN}', "line 1: NaN is not JSON"),
        ("d.jsonl", "[1]\n", r"line 1: expected an object.*got list"),
        ("d.jsonl", " \n", "no rows"),
        ("d.jsonl", "", r"empty \(0 bytes\)"),
        ("d.json", '[{"prompt": "a"},\n {"prompt" "b"}]', r"line 2, column 12: not valid JSON"),
        ("d.json", '{"version": 1, "data": [{"prompt": "a"}]}', "one object with the keys version, data"),
        ("d.json", "[1, 2]", "row 0 is int"),
        ("d.csv", "prompt,answer\na,b\nc,d,e\n", "line 3 has 3 fields, the header has 2"),
        ("d.csv", b"prompt,answer\ncaf\xe9,b\n", "line 2: byte 0xE9 is not UTF-8"),
        ("d.parquet", "hello world", 'starts with "hell", not with "PAR1"'),
        ("d.xlsx", "x", "not a kind of file that is read"),
    ],
)
def test_broken_files_are_named_with_the_place(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        load_splits(write(tmp_path / name, content))


def test_all_broken_lines_are_listed(tmp_path):
    with pytest.raises(DataError) as caught:
        load_splits(write(tmp_path / "d.jsonl", "x\n" * 3))
    assert [f"line {n}" in str(caught.value) for n in (1, 2, 3, 4)] == [True, True, True, False]


def test_missing_files_get_near_names(tmp_path):
    write(tmp_path / "train.jsonl", JSONL)
    with pytest.raises(DataError, match=r"no file or folder .*trian.jsonl\. Similar: .*train.jsonl"):
        load_splits(str(tmp_path / "trian.jsonl"))


def test_a_missing_split_names_those_there_are(tmp_path):
    with pytest.raises(DataError, match=r"no split `validation`, but train, test\.\n  fix: dataset_train_split: train"):
        load_data(DataSpec(dataset="builtin:additions", dataset_train_split="validation"))


def test_a_column_has_a_second_name(tmp_path):
    """In a file, in a dataset, in a part of a mixture; what it holds stays as it is."""
    rows = [{"question": f"q{n}", "test_list": ["assert f(1) == 1"], "completions": n} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = {"tests": "test_list", "drawn": "completions"}
    mixture = [{"path": str(tmp_path / "rows.jsonl"), "columns": names}]
    for source, more in ((str(tmp_path / "rows.jsonl"), names), (Dataset.from_list(rows), names), (mixture, None)):
        train, _ = data.load(source, prompt="{question}", columns=more)
        assert train[2]["tests"] == train[2]["test_list"] == ["assert f(1) == 1"]
        assert train[2]["drawn"] == 2
    with pytest.raises(DataError, match="`columns` names the column `test`") as error:
        data.load(Dataset.from_list(rows), prompt="{question}", columns={"tests": "test"})
    assert error.value.code == "D052"


AS_WRITTEN = {
    "keys": [{"min": 1}, {"regex": "a"}],
    "order": [{"b": 1, "a": 2}, {"a": 2, "b": 1}],
    "nested": [{"of": {"min": 1}}, {"of": {"max": 0.3333333333333333}}],
    "in lists": [[{"name": "a", "args": {"x": 1}}], [{"name": "b", "args": {"y": 1}}, {"name": "c"}]],
    "numbers": [1, 2.5],
    "numbers in objects": [{"x": 1}, {"x": 1.5}],
    "numbers and texts": [7, "7"],
    "large": [10**30, 1],
    "truths": [True, 1],
    "empty": [{}, {"a": []}],
    "alike": [{"min": 1}, {"min": 2}],
}
"""By kind, the values of a column in two rows, which Arrow would change; and some that it keeps."""


def read_by(tmp_path, way: str):
    """The two rows of `AS_WRITTEN` as one of the ways to data gives them; by a mixture the first of them again."""
    rows = [{"prompt": f"row {n}", **{name: values[n] for name, values in AS_WRITTEN.items()}} for n in range(2)]
    lines = [json.dumps(row) + "\n" for row in rows]
    if way == "stages":
        return stage_rows(rows)
    if way == "folder":
        for n, line in enumerate(lines):
            write(tmp_path / f"rows-{n}.jsonl", line)
        return load_data(DataSpec(dataset=str(tmp_path)))[0]
    path = write(tmp_path / f"rows{way}", json.dumps(rows)) if way == ".json" else ""
    path = path or write(tmp_path / "rows.jsonl", "".join(lines))
    if way == "mixture":
        return data.load([{"path": path}, {"path": write(tmp_path / "first.jsonl", lines[0])}])[0]
    return data.load(path, **({"system": "Check.", "answer": "{keys}"} if way == "templates" else {}))[0]


@pytest.mark.parametrize("way", [".jsonl", ".json", "templates", "stages", "folder", "mixture"])
def test_values_are_what_the_file_says(tmp_path, way):
    """An object gets no key of another row, an integer stays one; equal to the letter, so that `1` is not `1.0`."""
    rows = read_by(tmp_path, way)
    for name, values in AS_WRITTEN.items():
        assert repr(rows[name][:2]) == repr(values), name
        assert repr(rows[-1][name]) == repr(values[0 if way == "mixture" else 1]), name
    assert way != "templates" or repr(rows["answer"][:]) == repr(AS_WRITTEN["keys"])


@pytest.mark.parametrize("chat", [False, True])
def test_a_question_that_is_an_object_is_written_as_json(tmp_path, chat):
    """From any file; a message is no such object, and is left to the check."""
    rows = [{"q": {"a": n, "b": [n]}, "answer": str(2 * n)} for n in range(3)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).to_parquet(tmp_path / "t.parquet")
    for name in ("t.jsonl", "t.parquet"):
        prompts = data.load(str(tmp_path / name), prompt="{q}", chat=chat)[0]["prompt"]
        assert [each[0]["content"] if chat else each for each in prompts] == [json.dumps(row["q"]) for row in rows]
    message = [{"q": {"role": "user", "content": "1+1"}}]
    assert data.load(Dataset.from_list(message), prompt="{q}")[0]["prompt"] == [message[0]["q"]]


def test_rows_that_are_tried_are_the_rows_that_are_trained_on(tmp_path):
    """A check reads a file line by line and training a table: a column that a row lacks is null in both."""
    rows = [
        {"prompt": "a", "checks": {"min": 1}},
        {"prompt": "b", "checks": {"regex": "a"}, "limit": 3},
        {"prompt": "c"},
    ]
    path = write(tmp_path / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    tried = survey_rows(RowSurvey(source=file_source(Path(path)))).examples
    assert tried == [*load_data(DataSpec(dataset=path))[0]]
    assert tried[0] == {"prompt": "a", "checks": {"min": 1}, "limit": None}


def test_what_the_prompts_of_a_training_begin_with(tmp_path):
    """Turns that the first rows share, as of a built-in task; none of rows with one turn; None for plain prompts."""
    shared = [{"role": "system", "content": "Add."}]
    turns = [[*shared, {"role": "user", "content": f"{n}+{n}"}] for n in range(3)]
    rows = {"turns": turns, "alone": [each[1:] for each in turns], "text": [each[1]["content"] for each in turns]}
    found = {}
    for name, prompts in rows.items():
        content = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        found[name] = opening_of(DataSpec(dataset=write(tmp_path / f"{name}.jsonl", content)))
    assert found == {"turns": shared, "alone": [], "text": None}
    assert [turn["role"] for turn in opening_of(DataSpec(dataset="builtin:additions"))] == [
        "system",
        "user",
        "assistant",
    ]
