"""Rows from a name: templates, answers in solutions, splits by content, mixtures, orders, pass rates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from podium.data import load
from podium.data.columns import Columns, answer_extractor
from podium.data.selection import fingerprint, is_held_out
from podium.data.sources import load_splits
from podium.errors import ConfigError, DataError


def qa(path: Path, count: int = 200, **more: Any) -> str:
    lines = [f"What is {n // 20} + {n % 20}?,{n // 20 + n % 20}" for n in range(count)]
    path.write_text("\n".join(["question,expert_answer", *lines]) + "\n")
    return str(path)


def write_rates(path: Path, prompts: list[Any], rates: list[float]) -> str:
    rows = [{"fingerprint": fingerprint(p), "pass_rate": rate} for p, rate in zip(prompts, rates, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- templates ----


def test_templates_make_a_conversation_with_earlier_turns(tmp_path: Path) -> None:
    made = load(
        qa(tmp_path / "qa.csv"),
        prompt="{question} Be brief.",
        answer="{expert_answer}",
        system="Add.",
        examples=[{"question": "1+1?", "expert_answer": "<answer>2</answer>"}],
    )
    row = made.train[1]
    assert row["prompt"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1? Be brief."},
        {"role": "assistant", "content": "<answer>2</answer>"},
        {"role": "user", "content": "What is 0 + 1? Be brief."},
    ]
    assert (row["answer"], row["question"], row["expert_answer"]) == ("1", "What is 0 + 1?", "1")
    assert made.held_out is None


def test_a_template_alone_leaves_a_text_and_chat_makes_a_turn(tmp_path: Path) -> None:
    path = qa(tmp_path / "qa.csv", 3)
    assert load(path, prompt="{question}").train[0]["prompt"] == "What is 0 + 0?"
    [turn] = load(path, prompt="{question}", chat=True).train[0]["prompt"]
    assert turn == {"role": "user", "content": "What is 0 + 0?"}


@pytest.mark.parametrize(
    ("template", "row", "made"),
    [
        ("{a}", {"a": [1, 2]}, [1, 2]),
        ("{a}", {"a": 7}, "7"),
        ("{a} {b}", {"a": 7, "b": None}, None),
        ("{{a}} {a}", {"a": 1}, "{a} 1"),
        ("{{{a}}}", {"a": 1}, "{1}"),
        ("{the question}", {"the question": "x"}, "x"),
        ("{a.b}", {"a.b": "x"}, "x"),
    ],
)
def test_what_a_template_gives(template: str, row: dict[str, Any], made: Any) -> None:
    assert Columns(answer=template)(row)["answer"] == made


@pytest.mark.parametrize("template", ["{a[0]}", "{a!r}", "{a:>99999999}", "{0}", "{__class__}", "{a[0].b}"])
def test_a_template_evaluates_nothing(template: str) -> None:
    """Whatever is in the braces is looked up as the name of a column, and there is none."""
    assert Columns(prompt=template)({"a": 7})["prompt"] is None
    with pytest.raises(DataError, match="names the column"):
        load(Dataset.from_list([{"a": 7}]), prompt=template)


@pytest.mark.parametrize("name", ["__class__", "real", "real.imag"])
@pytest.mark.parametrize("value", [7, "x", [1], {"b": 1}, [{"real": 1}]])
def test_attributes_of_a_value_are_no_fields(tmp_path: Path, name: str, value: Any) -> None:
    """From a dataset or a file; keys of objects alone are fields, in whichever row they are."""
    row = {"a": value}
    assert Columns(prompt=f"{{a.{name}}}")(row)["prompt"] is None
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for rows in (Dataset.from_list([row]), str(tmp_path / "rows.jsonl")):
        with pytest.raises(DataError, match=f"`prompt` names the field `{name}` of the objects in the column `a`"):
            load(rows, prompt=f"{{a.{name}}}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"a": None}) + "\n" + json.dumps({"a": {"b": {"c": 2}}}) + "\n")
    assert load(str(tmp_path / "rows.jsonl"), prompt="{a.b.c}").train["prompt"][:] == [None, "2"]


@pytest.mark.parametrize(
    ("way", "text", "found"),
    [
        ("after ####", "2+2\n#### 4\n", "4"),
        ("last number", "from 3 to 1,234.", "1234"),
        ("after Answer:", "so\nAnswer: blue", "blue"),
        ("boxed", r"\boxed{7}", "7"),
        (r"is (\w+)", "it is so", "so"),
        ("after ####", "no mark", None),
    ],
)
def test_the_answer_in_a_solution(way: str, text: str, found: str | None) -> None:
    assert Columns(answer_from=way)({"answer": text})["answer"] == found
    with pytest.raises(ConfigError, match="no regular expression"):
        answer_extractor("([")


def test_a_csv_field_is_text(tmp_path: Path) -> None:
    """Guessed types would make 007 a 7, and every answer 7.0 where one is missing."""
    (tmp_path / "qa.csv").write_text('\ufeffprompt,answer\na,007\nb,\n"c, d",NA\n')
    assert load(str(tmp_path / "qa.csv")).train[:] == {"prompt": ["a", "b", "c, d"], "answer": ["007", None, "NA"]}


# ---- the split ----


def test_a_split_depends_on_the_content_of_the_prompt_alone(tmp_path: Path) -> None:
    path = qa(tmp_path / "qa.csv")
    lines = Path(path).read_text().splitlines()
    (tmp_path / "other.csv").write_text("\n".join([lines[0], *reversed(lines[1:]), *lines[1:50]]) + "\n")
    split = {"prompt": "{question}", "held_out": 0.2}
    first = load(path, **split)
    train, held_out = (set(rows["question"]) for rows in load(str(tmp_path / "other.csv"), system="Add.", **split))
    assert (set(first.train["question"]), set(first.held_out["question"])) == (train, held_out)
    assert not train & held_out
    assert abs(len(held_out) - 40) < 3 * math.sqrt(200 * 0.2 * 0.8)


def test_a_larger_share_holds_out_what_a_smaller_one_does() -> None:
    texts = [f"question {n}" for n in range(1000)]
    small, large = ({text for text in texts if is_held_out(text, share)} for share in (0.1, 0.3))
    assert small < large


def test_white_space_capitals_and_the_system_message_do_not_change_sides() -> None:
    turn = {"role": "user", "content": "What is 1+1?"}
    assert fingerprint("What is\n1+1?") == fingerprint("what is 1+1?")
    for share in (0.1, 0.5, 0.9):
        assert is_held_out([{"role": "system", "content": "x"}, turn], share) is is_held_out([turn], share)


def test_a_stream_is_cut_alike(tmp_path: Path) -> None:
    path = qa(tmp_path / "qa.csv")
    given = {"prompt": "{question}", "answer": "{expert_answer}", "system": "Add.", "held_out": 0.2}
    whole, stream = load(path, **given), load(path, dataset_streaming=True, **given)
    for ours, theirs in zip(whole, stream, strict=True):
        assert list(ours) == list(theirs)


# ---- where rows come from ----


def rows_of_three(count: int = 3):
    for n in range(count):
        yield {"prompt": f"{n}+1", "answer": n + 1, **({"late": "x"} if n else {})}


def test_functions_datasets_and_their_dicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = load(rows_of_three).train
    assert made["answer"][:] == [1, 2, 3]
    assert made["late"][:] == [None, "x", "x"]
    assert load({"train": made, "test": made.select([0])}).held_out[0]["prompt"] == "0+1"
    assert load(made).train is made
    Path("rows.py").write_text("def make(size, of='x'):\n    return [{'prompt': of * n} for n in range(1, size + 1)]\n")
    assert load("rows.py:make?size=2&of=ab").train["prompt"][:] == ["ab", "abab"]


def test_reasoning_gym_by_name() -> None:
    pytest.importorskip("reasoning_gym")
    easy, hard = (load(f"reasoning-gym:chain_sum?size=5&seed=2&difficulty={n}").train for n in (0, 5))
    assert easy[:] == load("reasoning-gym:chain_sum?size=5&seed=2&difficulty=0").train[:]
    assert max(map(len, easy["prompt"])) < max(map(len, hard["prompt"]))
    assert len(load("reasoning-gym:chain_sum?size=3&min_terms=3&allow_negation=true").train) == 3


# ---- mixtures ----


def test_a_mixture_keeps_the_shares_and_repeats_no_row(tmp_path: Path) -> None:
    parts = [
        {"path": qa(tmp_path / "qa.csv", 200), "weight": 1, "prompt": "{question}"},
        {"path": Dataset.from_list([{"prompt": f"say {n}"} for n in range(90)]), "weight": 3},
    ]
    one, again, other = (load(parts, seed=seed).train["prompt"][:] for seed in (1, 1, 2))
    assert one == again
    assert set(one) != set(other)
    assert len(one) == len(set(one)) == 120
    said = [prompt.startswith("say") for prompt in one]
    assert sum(said) == 90
    assert all(abs(sum(said[k : k + 20]) - 15) <= 1 for k in range(0, 100, 20))


def test_a_mixture_without_weights_is_all_of_it_and_splits_by_content(tmp_path: Path) -> None:
    path = qa(tmp_path / "qa.csv", 100)
    made = load([path, path], prompt="{question}", held_out=0.3)
    assert len(made.train) + len(made.held_out) == 200
    assert not set(made.train["prompt"]) & set(made.held_out["prompt"])


# ---- orders and pass rates ----


def test_an_order_by_a_column(tmp_path: Path) -> None:
    path = qa(tmp_path / "qa.csv", 50)
    easy = load(path, prompt="{question}", order="easy_first", difficulty="expert_answer").train
    levels = [int(level) for level in easy["expert_answer"]]
    assert levels == sorted(levels)
    hard = load(path, prompt="{question}", order="hard_first", difficulty="expert_answer").train
    assert [int(level) for level in hard["expert_answer"]] == sorted(levels, reverse=True)


def test_pass_rates_leave_out_and_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = Dataset.from_list([{"prompt": f"question {n}"} for n in range(6)])
    rates = write_rates(tmp_path / "r.jsonl", rows["prompt"][:5], [0.0, 0.9, 0.5, 1.0, 0.7])
    with caplog.at_level("INFO", logger="podium"):
        kept = load(rows, pass_rates=rates).train["prompt"][:]
    assert kept == ["question 1", "question 2", "question 4", "question 5"]
    assert "2 of 6 rows are left out by their pass rates" in caplog.text
    assert "1 solved too rarely, 1 solved too often; 1 without a measured rate stay" in caplog.text
    assert load(rows, pass_rates=rates, pass_rate=(0.6, 1.0)).train["prompt"][:] == [
        f"question {n}" for n in (1, 3, 4, 5)
    ]
    ordered = load(rows, pass_rates=rates, pass_rate=(0, 1), order="easy_first").train["prompt"][:]
    assert ordered == [f"question {n}" for n in (3, 1, 4, 2, 0, 5)]


def test_held_out_rows_are_not_filtered(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": f"question {n}"} for n in range(50)])
    rates = write_rates(tmp_path / "r.jsonl", rows["prompt"][:], [0.0] * 49 + [0.5])
    made = load(rows, pass_rates=rates, held_out=0.4)
    plain = load(rows, held_out=0.4)
    assert made.held_out["prompt"][:] == plain.held_out["prompt"][:]
    assert len(made.train) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"held_out": 0.2, "eval_dataset": "x.csv"}, "both say what is held out"),
        ({"order": "easy_first"}, "needs to know what is hard"),
        ({"pass_rate": (0, 1)}, "needs measured rates"),
        ({"difficulty": "x"}, "does nothing without an order"),
        ({"prompt": "{q}"}, "names the column `q`"),
        ({"prompt": "{question"}, "has no other half"),
    ],
)
def test_mistakes_are_one_message(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(qa(tmp_path / "qa.csv", 5), **arguments)


def test_what_is_no_dataset() -> None:
    with pytest.raises(DataError, match="got int"):
        load(5)
    with pytest.raises(DataError, match=r"a mixture has path.*got prompt"):
        load([{"prompt": "rows in a list"}])
    with pytest.raises(DataError, match="row 1 is int"):
        load_splits(lambda: [{"prompt": "x"}, 7])
