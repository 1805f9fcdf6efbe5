"""Tables and rows as people have them: read where that is safe, else named with what to type, which works."""

# ruff: noqa: E501 - a case is a line

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset

from podium.checks import check_recipe
from podium.cli.words import recipe_and_flags
from podium.data.rows import DataSpec, load, load_data
from podium.data.selection import is_held_out
from podium.errors import DataError
from podium.testing import save_tiny_model, tiny_tokenizer

QUESTIONS = [(f"What is {n} + 1?", str(n + 1)) for n in range(40)]
COMMAS = "question,answer\n" + "".join(f"{question},{answer}\n" for question, answer in QUESTIONS)
LINES = "".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in QUESTIONS)
ACCENTS = COMMAS.replace("What is", "Café: what is")
JUDGED = {"rewards": ["answer_format", {"name": "numeric_match", "weight": 2}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(words: str, model: str) -> list[Any]:
    """What `podium check` finds with these words."""
    return check_recipe(
        *recipe_and_flags([*shlex.split(words), "--model", model, "--max_completion_length", "32"], "check")
    )


def errors(found: list[Any]) -> list[Any]:
    return [finding for finding in found if finding.severity == "error"]


def said(found: list[Any]) -> str:
    return "; ".join(f"{each.severity}[{each.code}] {each.what} -> {each.fix}" for each in found)


def workbook(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, COMMAS)
    return stream.getvalue()


# ---- read as they are ----


def defect(line: str, text: str, *values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.defect(line, text), id=f"{line} {text}")


READ = [
    defect("W2", "semicolons", "t.csv", COMMAS.replace(",", ";").encode(), "a semicolon between"),
    defect("W2", "tabs", "t.csv", COMMAS.replace(",", "\t").encode(), "a tab"),
    defect("W2", "sep=;", "t.csv", ("sep=;\r\n" + COMMAS.replace(",", ";").replace("\n", "\r\n")).encode(), "a semicolon between"),
    defect("W2", "bars", "t.csv", COMMAS.replace(",", "|").encode(), "a bar"),
    defect("W9", ".tsv", "t.tsv", COMMAS.replace(",", "\t").encode(), None),
    defect("W9", ".csv.gz", "t.csv.gz", gzip.compress(COMMAS.encode()), "gzip"),
    defect("W9", ".jsonl.gz", "t.jsonl.gz", gzip.compress(LINES.encode()), "gzip"),
    defect("W9", ".csv.bz2", "t.csv.bz2", bz2.compress(COMMAS.encode()), "bzip2"),
    defect("W9", ".jsonl.xz", "t.jsonl.xz", lzma.compress(LINES.encode()), "xz"),
    defect("W3", "Excel's Unicode text", "t.csv", ACCENTS.replace(",", "\t").encode("utf-16"), "UTF-16, a tab"),
    defect("W3", "UTF-16 without a mark", "t.csv", COMMAS.encode("utf-16-le"), "UTF-16-le"),
    defect("W3", "JSONL in UTF-16", "t.jsonl", LINES.encode("utf-16"), "UTF-16"),
    defect("W3", "a byte-order mark", "t.csv", COMMAS.encode("utf-8-sig"), "byte-order mark"),
    defect("N", "gzip under the name .csv", "t.csv", gzip.compress(COMMAS.encode()), "gzip"),
    defect("N", ".ndjson", "t.ndjson", LINES.encode(), None),
    defect("N", "T.CSV", "T.CSV", COMMAS.encode(), None),
    defect("N", "spaces in the header", "t.csv", COMMAS.replace("question,answer", "Question , Answer").encode(), None),
    defect("N", "lines that end in separators", "t.csv", COMMAS.replace("\n", ";;\n").replace(",", ";").encode(), "a semicolon between"),
    defect("N", "rows of separators alone", "t.csv", (COMMAS + ",\n,\n").encode(), None),
    defect("N", "line ends of an old Mac", "t.csv", COMMAS.replace("\n", "\r").encode(), None),
    defect("N", "a column of indices without a name", "t.csv", "".join(("," if n == 0 else f"{n},") + line + "\n" for n, line in enumerate(COMMAS.splitlines())).encode(), None),
]  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "content", "words"), READ)
def test_a_table_is_read(
    folder: Path, model: str, now: Callable[[str], None], name: str, content: bytes, words: str | None
) -> None:
    """In check and in training the same rows; what is unusual about the file is a note."""
    (folder / name).write_bytes(content)
    found = check(f"--dataset {name}", model)
    assert not errors(found), said(found)
    notes = [finding.what for finding in found if finding.code == "D028"]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]
    now(notes[0] if notes else "read, no error")
    train, held_out = load(
        name, prompt="{Question}" if "Question" in content.decode("latin-1") else "{question}", held_out=0.1
    )
    assert len(train) + len(held_out) == 40
    assert "What is 3 + 1?" in [*train["prompt"], *held_out["prompt"]] or "Café: what is 3 + 1?" in [
        *train["prompt"],
        *held_out["prompt"],
    ]


@pytest.mark.defect("N", "a field longer than 131,072 characters, lines within quotes, empty lines")
def test_long_and_quoted_fields(folder: Path, now: Callable[[str], None]) -> None:
    text = "x" * 200_000 + "\n\nend"
    (folder / "t.csv").write_text(f'prompt,answer\n"{text}",007\n\n"say ""hi"", then",\n')
    rows = load("t.csv").train[:]
    assert rows == {"prompt": [text, 'say "hi", then'], "answer": ["007", None]}
    now("read whole")


# ---- named, with a cure ----

NAMED = [
    defect("W3", "a workbook called .csv", {"t.csv": workbook("xl/workbook.xml")}, "t.csv", "D039", "an Excel workbook (.xlsx)", "CSV UTF-8"),
    defect("W3", "a zip called .csv", {"t.csv": workbook("rows.csv")}, "t.csv", "D039", "t.csv is a zip archive", "unzip t.csv, then dataset: rows.csv"),
    defect("W9", "a workbook", {"t.xlsx": workbook("xl/workbook.xml")}, "t.xlsx", "D039", "an Excel workbook (.xlsx)", "dataset: t.csv"),
    defect("W9", "an old workbook", {"t.xls": b"\xd0\xcf\x11\xe0" * 9}, "t.xls", "D039", "an Excel workbook (.xls)", "dataset: t.csv"),
    defect("W9", "zstd", {"t.csv.zst": b"\x28\xb5\x2f\xfd123"}, "t.csv.zst", "D039", "compressed with zstd", "unzstd -o t.csv t.csv.zst"),
    defect("W1", "letters of Windows", {"t.csv": ACCENTS.encode("cp1252")}, "t.csv", "D026", "line 2: byte 0xE9 is not UTF-8; the file looks like cp1252", "iconv -f cp1252 -t utf-8 t.csv"),
    defect("W1", "a file that is not there", {"rows.csv": b"x"}, "row.csv", "D025", "no file or folder row.csv", "rows.csv"),
    defect("W1", "an empty file", {"t.csv": b""}, "t.csv", "D024", "t.csv is empty (0 bytes)", "again"),
    defect("W12", "a header alone", {"t.csv": b"question,answer\n"}, "t.csv", "D024", "t.csv has no rows, only a header", "again"),
    defect("W12", "two CSV files with different columns", {"d/a.csv": b"question,answer\n1+1,2\n", "d/b.csv": b"frage,antwort\n1+1,2\n"}, "d", "D058", "The files in d have different columns: d/a.csv has answer, question; d/b.csv has antwort, frage.", "dataset: one of them"),
    defect("N", "Shift-JIS", {"t.csv": COMMAS.replace("What is", "質問です").encode("shift-jis")}, "t.csv", "D026", "which encoding it is is not known", "iconv -f ENCODING"),
    defect("N", "a web page", {"t.csv": b"<!DOCTYPE html><html>"}, "t.csv", "D039", "a web page, not the data", "download the file itself"),
    defect("N", "a pointer of Git LFS", {"t.parquet": b"version https://git-lfs.github.com/spec/v1\n"}, "t.parquet", "D039", "a pointer of Git LFS", "git lfs pull"),
    defect("N", "half a gzip file", {"t.csv.gz": gzip.compress(COMMAS.encode())[:90]}, "t.csv.gz", "D039", "t.csv.gz is damaged", "download it again"),
    defect("N", "JSON over lines called .jsonl", {"t.jsonl": json.dumps([{"question": "1+1"}], indent=2).encode()}, "t.jsonl", "D004", "JSON over several lines", "mv t.jsonl t.json"),
    defect("N", "a SQLite file", {"t.csv": b"SQLite format 3\x00"}, "t.csv", "D039", "a SQLite database", "sqlite3 -csv"),
]  # fmt: skip


@pytest.mark.cases(8)
@pytest.mark.parametrize(("files", "name", "code", "what", "fix"), NAMED)
def test_a_file_that_cannot_be_read_is_the_only_finding(
    folder: Path,
    model: str,
    now: Callable[[str], None],
    files: dict[str, bytes],
    name: str,
    code: str,
    what: str,
    fix: str,
) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)
    found = check(f"--dataset {name}", model)
    assert [finding.code for finding in found] == [code], said(found)
    assert what in found[0].what
    assert fix in found[0].fix
    now(said(found))
    with pytest.raises(DataError, match=re.escape(found[0].what[-30:].rstrip("."))):
        load(name)


@pytest.mark.defect("W3", "UTF-16 cut in the middle of a character")
def test_text_that_stops_being_what_it_began_as(folder: Path) -> None:
    (folder / "t.csv").write_bytes(ACCENTS.encode("utf-16") + b"\x00\xd8x")
    with pytest.raises(DataError, match="begins as UTF-16 and goes on as something else"):
        load("t.csv")


@pytest.mark.defect("W5", "one broken line in a JSONL of 20")
def test_one_broken_line_is_one_error(folder: Path, model: str, now: Callable[[str], None]) -> None:
    lines = LINES.splitlines()[:20]
    lines[5] = lines[5][:-1]
    (folder / "t.jsonl").write_text("\n".join(lines))
    found = errors(check("--dataset t.jsonl", model))
    assert [(each.code, "t.jsonl line 6" in each.what) for each in found] == [("D004", True)], said(found)
    now(said(found))


@pytest.mark.defect("N", "a quote that is not closed")
def test_an_open_quote_is_named_by_its_line(folder: Path, model: str, now: Callable[[str], None]) -> None:
    (folder / "t.csv").write_text(COMMAS.replace("What is 7 + 1?", '"What is 7 + 1?'))
    found = errors(check("--dataset t.csv", model))
    assert [each.code for each in found] == ["D027"], said(found)
    assert "t.csv line 9: a quote that is not closed" in found[0].what
    now(said(found))


@pytest.mark.defect("N", "a number of 5,000 digits in a JSONL")
def test_a_huge_number_is_one_error(folder: Path, model: str, now: Callable[[str], None]) -> None:
    (folder / "t.jsonl").write_text(LINES + '{"question": "x", "answer": ' + "9" * 5000 + "}\n")
    found = errors(check("--dataset t.jsonl", model))
    assert [each.code for each in found] == ["D004"], said(found)
    now(said(found)[:200])


# ---- folders ----


@pytest.mark.defect("S2", "10 rows of .csv and 30 of .jsonl in one folder")
def test_a_folder_of_two_kinds_is_read_whole(folder: Path, now: Callable[[str], None]) -> None:
    (folder / "d").mkdir()
    (folder / "d" / "a.csv").write_text("".join(COMMAS.splitlines(keepends=True)[:11]))
    (folder / "d" / "b.jsonl").write_text("".join(LINES.splitlines(keepends=True)[10:]))
    train, _ = load("d")
    assert train["question"][:] == [question for question, _ in QUESTIONS]
    now(f"{len(train)} rows")


@pytest.mark.defect("N", "a folder with train.csv and test.csv; answers such as 007")
def test_a_folder_of_splits_keeps_fields_as_text(folder: Path, now: Callable[[str], None]) -> None:
    (folder / "d").mkdir()
    (folder / "d" / "train.csv").write_text("prompt,answer\na,007\n")
    (folder / "d" / "test.csv").write_text("prompt;answer\nb;008\n")
    train, held_out = load("d")
    assert (train["answer"][:], held_out["answer"][:]) == (["007"], ["008"])
    now("007 stays 007, splits by their names")


@pytest.mark.slow
@pytest.mark.defect("W12", "a split that is not there: the cure names one that is")
@pytest.mark.defect("N", "dataset_train_split of a file")
def test_the_cure_of_a_missing_split_works(folder: Path, model: str, now: Callable[[str], None]) -> None:
    (folder / "d").mkdir()
    (folder / "d" / "test.csv").write_text(COMMAS)
    [found] = errors(check("--dataset d", model))
    assert (found.code, found.fix) == ("D038", "dataset_train_split: test")
    key, _, value = found.fix.partition(": ")
    assert not errors(check(f"--dataset d --{key} {value}", model))
    now(said([found]))
    (folder / "t.csv").write_text(COMMAS)
    [found] = errors(check("--dataset t.csv --dataset_train_split test", model))
    assert (found.code, found.fix) == ("D038", "dataset_train_split: train")


# ---- columns ----

COLUMNS = [
    defect("D8", "text, label", "text,label", '--prompt "{text}" --answer "{label}"'),
    defect("F10", "frage, antwort", "frage,antwort", '--prompt "{frage}" --answer "{antwort}"'),
    defect("W10", "id, input, gold", "input,gold", '--prompt "{input}" --answer "{gold}"'),
    defect("W7", "prompts, completions", "prompts,completions", '--prompt "{prompts}" --answer "{completions}"'),
    defect("N", "Frage mit Leerzeichen", "Die Frage,Die Antwort", '--prompt "{Die Frage}" --answer "{Die Antwort}"'),
]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("header", "flags"), COLUMNS)
def test_two_columns_of_other_names_are_told_and_of_three_it_is_one_error_whose_cure_works(
    folder: Path, model: str, now: Callable[[str], None], header: str, flags: str
) -> None:
    (folder / "t.csv").write_text(COMMAS.replace("question,answer", header))
    words = "--dataset t.csv"
    assert not errors(told := check(words, model)), said(told)
    assert all(f'"{{{each}}}"' in told[0].what for each in header.split(",")), said(told)
    lines = [f"{line},{number}" for number, line in enumerate(COMMAS.splitlines())]
    (folder / "three.csv").write_text("\n".join(["x,y,z", *lines[1:]]) + "\n")
    found = check("--dataset three.csv", model)
    assert [each.code for each in found] == ["D001"], said(found)
    assert found[0].fix.startswith('--prompt "{x} {y}" --answer "{z}"')
    for line in (f"{words} {flags}", f"--dataset three.csv {found[0].fix.partition(';')[0]}"):
        assert not errors(cured := check(line, model)), said(cured)
    now(said(found))
    names = dict(zip(("prompt", "answer"), (f"{{{each}}}" for each in header.split(",")), strict=True))
    train, _ = load("t.csv", **names)
    assert not {"prompts", "completions"} & set(train.column_names)


@pytest.mark.defect("W7", "in Python one call renames both")
def test_the_cure_in_python_works(now: Callable[[str], None]) -> None:
    from podium.data import find_problems

    dataset = Dataset.from_dict({"prompts": ["1+1"], "completions": ["2"]})
    [found] = find_problems(dataset, "dataset")
    scope = {"dataset": dataset}
    exec(found.fix.partition(": ")[2], scope)
    assert find_problems(scope["dataset"], "dataset") == []
    now(found.fix)


# ---- few rows, many alike ----


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("rows", "codes"),
    [
        defect("W4", "one row", 1, ["D023"]),
        defect("W4", "thirty rows of one question", 30, []),
    ],
)
def test_few_questions_are_not_no_rows(
    folder: Path, model: str, now: Callable[[str], None], rows: int, codes: list[str]
) -> None:
    (folder / "t.csv").write_text("question,answer\n" + "What is 1 + 1?,2\n" * rows)
    found = check("--dataset t.csv", model)
    assert [each.code for each in errors(found)] == codes, said(found)
    assert ("D016" in [each.code for each in found]) == (rows > 1)
    now(said([each for each in found if each.severity != "note"]))


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.defect(
    "F10", "duplicates: the cure in the file's own format, spelling variants counted, contradictions named"
)
def test_the_cure_of_duplicates_works(folder: Path, model: str, now: Callable[[str], None], kind: str) -> None:
    more = [("what is  3 + 1?", "4"), ("What is 3 + 1?", "5")]
    (folder / "t.csv").write_text(COMMAS + "".join(f"{question},{answer}\n" for question, answer in more))
    (folder / "t.jsonl").write_text(LINES + "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in more))
    found = check(f"--dataset t.{kind} --held_out 0.001", model)
    by_code = {each.code: each for each in found}
    assert "2 rows repeat the prompt of another row" in by_code["D016"].what
    assert "row 41: `5`, row 3: `4`" in by_code["D041"].what
    now(said([by_code["D016"], by_code["D041"]]))
    command, _, after = by_code["D016"].fix.removeprefix("keep one of each: ").partition("; then dataset: ")
    subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
    assert len(load(after).train) == 40
    codes = {each.code for each in check(f"--dataset {after} --held_out 0.001", model)}
    assert not codes & {"D016", "D041"}


# ---- cures by keys ----


def lay_out(folder: Path, model: str, rows: list[Any], **keys: Any) -> Callable[..., list[Any]]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model": model,
        "dataset": "rows.jsonl",
        "per_device_train_batch_size": 64,
        "max_completion_length": 16,
        **JUDGED,
        **keys,
    }

    def run(**more: Any) -> list[Any]:
        (folder / "run.yaml").write_text(yaml.safe_dump({**values, **more}))
        return check_recipe("run.yaml")

    return run


PLAIN = [{"prompt": question, "answer": answer} for question, answer in QUESTIONS]
CHAT = [{"prompt": [{"role": "user", "content": question}], "answer": answer} for question, answer in QUESTIONS]

CURED = [
    defect("W10", "a prompt that is null", [*PLAIN, {"prompt": None, "answer": "1"}], {}, "D005"),
    defect("W10", "a prompt that is empty", [*PLAIN, {"prompt": "", "answer": "1"}], {}, "D002"),
    defect("W10", "an answer that is null", [*PLAIN, {"prompt": "1+1", "answer": None}], {}, "D018"),
    defect("W10", "texts and conversations", [*CHAT, *PLAIN[:2]], {}, "D013"),
    defect("W10", "answers of two types", [*PLAIN, {"prompt": "1+1", "answer": 2}], {}, "D019"),
    defect("W10", "a split", PLAIN, {"dataset_train_split": "all"}, "D038"),
    defect("D7", "texts for a chat model", PLAIN, {}, "D045"),
]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("rows", "keys", "code"), CURED)
def test_a_cure_by_keys_works(
    folder: Path, model: str, now: Callable[[str], None], rows: list[Any], keys: dict[str, Any], code: str
) -> None:
    run = lay_out(folder, model, rows, **keys)
    found = [each for each in run() if each.code == code]
    assert found
    now(said(found))
    line = found[0].fix.removeprefix("leave such rows out: ").partition(", a template")[0]
    assert not [each for each in run(**yaml.safe_load(line)) if each.code == code]


@pytest.mark.slow
@pytest.mark.defect("D7", "a chat model's name makes it a warning")
def test_a_chat_model_is_warned_of(folder: Path) -> None:
    model = str(save_tiny_model(folder / "tiny-instruct"))
    [found] = [each for each in lay_out(folder, model, PLAIN)() if each.code == "D045"]
    assert (found.severity, found.fix) == ("warning", "chat: true")
    assert "D045" not in [each.code for each in lay_out(folder, model, CHAT)()]
    assert "D045" not in [
        each.code
        for each in lay_out(folder, model, [{**row, "prompt": f"<|im_start|>user\n{row['prompt']}"} for row in PLAIN])()
    ]


# ---- conversations ----


@pytest.mark.defect("W6", "content as parts of text")
def test_parts_of_text_are_a_text(folder: Path, model: str, now: Callable[[str], None]) -> None:
    from podium.data import PromptBuilder

    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]
    rows = [{"prompt": [{"role": "user", "content": each}], "answer": "2"} for each in (parts, "What is 1 + 1?")]
    build = PromptBuilder(tokenizer=tiny_tokenizer())
    first, second = (build(row, id=0, row_index=0) for row in rows)
    assert first is not None
    assert second is not None
    assert (first.token_ids, first.text) == (second.token_ids, second.text)
    found = lay_out(
        folder,
        model,
        [{"prompt": [{"role": "user", "content": [{"type": "text", "text": q}]}], "answer": a} for q, a in QUESTIONS],
    )()
    assert not errors(found), said(found)
    now("read as a text")


# ---- which rows are held out ----

TEMPLATES = ("{question}", "Question: {question}\nAnswer:", "{question} Think first.", "Q. {question}")


@pytest.mark.defect("D13", "a prompt that is reworded keeps its side")
def test_the_row_decides_its_side(now: Callable[[str], None]) -> None:
    rows = Dataset.from_list([{"question": question, "answer": answer} for question, answer in QUESTIONS])
    sides = [load(rows, prompt=template, held_out=0.25).held_out["question"][:] for template in TEMPLATES]
    assert all(side == sides[0] for side in sides)
    assert 0 < len(sides[0]) < len(QUESTIONS)
    assert sides[0] == [
        question for question, _ in QUESTIONS if is_held_out(question, 0.25)
    ]  # as it was without words around
    now(f"{len(sides[0])} of 40 held out under all of {len(TEMPLATES)} templates")
    two = Dataset.from_list([{"a": a, "b": b} for a in range(9) for b in range(9)])
    made = [load(two, prompt=template, held_out=0.25).held_out for template in ("{a} + {b} = ?", "Add {b} to {a}.")]
    assert made[0]["a"][:] == made[1]["a"][:]


@pytest.mark.parametrize("variant", ["  WHAT is 3 + 1? ", "What\tis 3 + 1?", "What is 3 + 1?\n"])
@pytest.mark.defect("D13", "spelling variants of a question are on one side")
def test_variants_are_on_one_side(variant: str) -> None:
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert is_held_out(variant, share) == is_held_out("What is 3 + 1?", share)
        assert is_held_out("Cafe\u0301 or tea?", share) == is_held_out("Caf\u00e9 or tea?", share)


@pytest.mark.defect("D13", "the same rows from CSV, JSONL, JSON and Parquet")
@pytest.mark.defect("N", "dates in JSONL stay texts")
def test_formats_give_the_same_rows_and_sides(folder: Path, now: Callable[[str], None]) -> None:
    rows = [{"question": f"2024-01-{n + 1:02}", "answer": f"{n:03}"} for n in range(28)]
    Dataset.from_list(rows).to_parquet("t.parquet")
    (folder / "t.csv").write_text("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows))
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "t.json").write_text(json.dumps(rows))
    made = [load(f"t.{kind}", prompt="On {question}?", held_out=0.3) for kind in ("csv", "jsonl", "json", "parquet")]
    assert all(each.train[:] == made[0].train[:] and each.held_out[:] == made[0].held_out[:] for each in made)
    assert made[0].train[0]["prompt"].startswith("On 2024-01-")
    now("equal rows, equal sides")


# ---- streams ----


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        defect("N", "a stream without max_steps", {}, "max_steps must be set"),
        defect("N", "a stream and dispatch_batches", {"max_steps": 3, "accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=False"),
        defect("N", "a stream and dynamic_sampling", {"max_steps": 3, "dynamic_sampling": True}, "draws replacements"),
    ],
)  # fmt: skip
def test_settings_that_a_stream_cannot_have(
    folder: Path, model: str, now: Callable[[str], None], make_trainer: Any, keys: dict[str, Any], words: str
) -> None:
    run = lay_out(folder, model, PLAIN, dataset_streaming=True, **keys)
    found = errors(run())
    assert len(found) == 1, said(found)
    assert words in found[0].what
    assert not errors(run(**yaml.safe_load(found[0].fix)))
    now(said(found))
    stream = Dataset.from_list(PLAIN).to_iterable_dataset()
    with pytest.raises(ValueError, match=words):
        make_trainer(rows=stream, **{"max_steps": -1, **keys})


@pytest.mark.defect("N", "a stream's settings of accelerate and dataloaders, as TRL sets them")
def test_a_stream_gets_the_settings_that_it_needs(make_trainer: Any) -> None:
    trainer = make_trainer(rows=Dataset.from_list(PLAIN).to_iterable_dataset(), max_steps=1, dataloader_num_workers=2)
    assert trainer.args.accelerator_config.dispatch_batches is False
    assert trainer.args.dataloader_num_workers == 0


# ---- the hub ----


@pytest.mark.defect("G1", "a hub client whose HTTP library is not httpx")
def test_another_http_library_is_caught(monkeypatch: pytest.MonkeyPatch, now: Callable[[str], None]) -> None:
    import huggingface_hub
    from huggingface_hub import errors as hub

    from podium.errors import HubError, ModelError
    from podium.models.check import check_model_name
    from podium.runs.shipping.hub import find_repository

    class HTTPError(Exception):
        """Of httpx2."""

    class ConnectError(HTTPError): ...

    class HfHubHTTPError(HTTPError, OSError): ...

    def refused(*_: Any, **__: Any) -> None:
        raise ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(hub, "HfHubHTTPError", HfHubHTTPError)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refused)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", refused)
    monkeypatch.setattr("datasets.load_dataset", refused)
    with pytest.raises(HubError, match=r"The hub cannot be reached \(ConnectError\)") as said_by_push:
        find_repository("name", public=False)
    with pytest.raises(ModelError, match="cannot be reached"):
        check_model_name("owner/name")
    with pytest.raises(DataError, match="the hub's dataset of that name cannot be had"):
        load_data(DataSpec(dataset="owner/name"))
    now(str(said_by_push.value))


# ---- words ----


@pytest.mark.defect("D15", "D052 of an example without an answer")
def test_an_example_without_an_answer(now: Callable[[str], None]) -> None:
    with pytest.raises(DataError, match="number 1 has no `answer`, its answer; it has `question`") as caught:
        load(Dataset.from_list([{"question": "1+1", "gold": "2"}]), prompt="{question}", examples=[{"question": "1+2"}])
    assert 'answer: "{COLUMN}"' in caught.value.fix
    now(str(caught.value))


# ---- podium init ----


@pytest.mark.defect("D5", "columns of other names have flags, which the message names")
@pytest.mark.defect("D5", "init's recipe and train --dataset assume alike")
def test_init_takes_the_columns(folder: Path, model: str, now: Callable[[str], None]) -> None:
    from typer.testing import CliRunner

    from podium.cli import app
    from podium.recipe.assume import assume

    lines = [f"{line},{number}" for number, line in enumerate(COMMAS.splitlines())]
    (folder / "t.csv").write_text("\n".join(["satz,loesung,nummer", *lines[1:]]) + "\n")
    init = ["init", "one", "--data", "t.csv", "--yes", "--no-sample"]
    refused = CliRunner().invoke(app, init)
    assert refused.exit_code == 2
    now(refused.stderr)
    suggested = re.search(r"fix: (--prompt \S+ \S+ --answer) \S+, or others of them", " ".join(refused.stderr.split()))
    assert shlex.split(suggested[1]) == ["--prompt", "{satz} {loesung}", "--answer"]
    flags = ["--prompt", "{satz}", "--answer", "{loesung}"]
    assert CliRunner().invoke(app, [*init, *flags]).exit_code == 0
    recipe = yaml.safe_load((folder / "one" / "run.yaml").read_text())
    assumed = assume({"dataset": "t.csv", "prompt": "{satz}", "answer": "{loesung}"}, alone=True)
    alike = (
        "examples",
        "held_out",
        "temperature",
        "learning_rate",
        "num_generations",
        "loss_type",
        "per_device_train_batch_size",
    )
    recipe["learning_rate"] = float(recipe["learning_rate"])
    assert {key: recipe[key] for key in alike} == {key: assumed[key] for key in alike}
    (folder / "one").joinpath("run.yaml").write_text(
        (folder / "one" / "run.yaml").read_text().replace("builtin:smollm2-135m-instruct", model)
    )
    found = check_recipe(
        "one/run.yaml", {"dataset": "t.csv", "rewards": JUDGED["rewards"], "accuracy": "numeric_match"}
    )
    assert not errors(found), said(found)


@pytest.mark.defect("N", "init with a column that is not there")
def test_init_names_a_column_that_is_not_there(folder: Path, now: Callable[[str], None]) -> None:
    from typer.testing import CliRunner

    from podium.cli import app

    (folder / "t.csv").write_text(COMMAS)
    refused = CliRunner().invoke(app, ["init", "one", "--data", "t.csv", "--yes", "--answer", "anser"])
    assert "there is no column `anser`; the columns are `question`, `answer`" in " ".join(refused.stderr.split())
    assert "Did you mean `answer`?" in refused.stderr
    now(refused.stderr)


@pytest.mark.parametrize(
    "rows",
    [
        [{"a": 1, "b": None}, {"a": 2, "b": None}, {"a": 3, "b": "x"}],
        [{"a": 1}, {"a": 2}, {"a": 3, "b": "x"}],
        [{"a": 1}, {"a": 2}, {"a": "3"}],
        [{"a": [1]}, {"a": [2]}, {"a": {"c": 1}}],
        [{"a": "1"}, {"a": "2"}, {"a": [{"role": "user", "content": "x"}]}],
    ],
)
@pytest.mark.defect("N", "a column whose type changes far down in a JSONL")
def test_a_type_that_changes_late(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> None:
    monkeypatch.setattr("podium.data.files.CHUNK", 2)
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = sorted({name for row in rows for name in row})
    for made in (load("t.jsonl").train, load("t.jsonl", system="Answer.", prompt="{a}").train.remove_columns("prompt")):
        assert list(made) == [{name: row.get(name) for name in names} for row in rows]  # a number stays a number


@pytest.mark.slow
@pytest.mark.defect("W10", "held-out rows that are trained on, spelt otherwise")
def test_a_share_in_place_of_overlapping_rows(folder: Path, model: str, now: Callable[[str], None]) -> None:
    (folder / "held.jsonl").write_text(json.dumps({"prompt": " what IS 3 + 1? ", "answer": "4"}) + "\n")
    run = lay_out(folder, model, PLAIN)
    [found] = [each for each in run(eval_dataset="held.jsonl") if each.code == "D017"]
    now(said([found]))
    assert "held_out: 0.1" in found.fix
    assert not [each for each in run(held_out=0.1) if each.code == "D017"]


@pytest.mark.defect("W1", "training says no more than the check does")
def test_training_on_a_file_that_cannot_be_read_says_one_thing(folder: Path, now: Callable[[str], None]) -> None:
    from typer.testing import CliRunner

    from podium.cli import app

    (folder / "t.csv").write_bytes(workbook("xl/workbook.xml"))
    refused = CliRunner().invoke(app, ["train", "--dataset", "t.csv"])
    assert refused.exit_code == 2
    first, _, message = refused.stderr.partition("\n")
    assert first.startswith("Reading the recipe, its rows and its rewards")
    words = " ".join(message.split())
    assert "t.csv is an Excel workbook (.xlsx). [D039]" in words
    assert "rewards" not in words
    now(words)
