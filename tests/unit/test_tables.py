"""What `podium init` takes everyday tables for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from benchmarks.tables import TABLES, outcome
from podium.checks import settings
from podium.checks.setup import Setup
from podium.data import load
from podium.errors import ConfigError
from podium.errors.rule import broken
from podium.planning.columns import chosen_columns
from podium.planning.propose import Table, Wishes, propose

ORDERED = (
    ("in_words number", ""),
    ("name initials", "Write the initials."),
    ("date iso", "Write the date in words."),
    ("letters word", ""),
    ("topic message", "Assign a topic to each message."),
    ("de en", "translate English to German"),
    ("plural singular", "Make the plural"),
    ("respuesta pregunta", ""),
)
"""Two columns whose names say neither, and a sentence of the task."""


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("columns", "sentence"), ORDERED)
def test_two_columns_without_a_name_are_read_from_left_to_right_and_it_is_said(
    columns: str, sentence: str, turned: bool
) -> None:
    """Neither what they hold nor the sentence decides: `topic` has three values."""
    left, right = reversed(columns.split()) if turned else columns.split()
    rows = tuple({name: f"{name} {i % 3 if name == 'topic' else i}" for name in (left, right)} for i in range(30))
    made = propose(Table(names=(left, right), rows=rows), Wishes(sentence=sentence), count=len)
    assert (made.settings["prompt"], made.settings["answer"]) == (f"{{{left}}}", f"{{{right}}}")
    assert made.chosen.other == f'--prompt "{{{right}}}" --answer "{{{left}}}"'


@pytest.mark.parametrize("columns", ["word letter n", "message agent mood", "x y z"])
def test_more_columns_than_names_tell_are_asked_for(columns: str) -> None:
    """None is chosen by what it holds: `mood` has three values, and that is no reason."""
    names = columns.split()
    rows = [{name: f"{name} {i % 3 if name == 'mood' else i}" for name in names} for i in range(30)]
    with pytest.raises(ConfigError, match="cannot be told") as error:
        chosen_columns(names, rows)
    assert error.value.fix.startswith("--prompt")


NESTED = {
    "gold": ({"gold": ["Rome", "Roma"], "annotator": "Bob"}, "{annotations.gold}", ["Rome", "Roma"]),
    "an object": ({"city": "Rome", "river": "Tiber"}, "{annotations}", {"city": "Rome", "river": "Tiber"}),
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", NESTED)
def test_fields_of_objects_are_asked_and_told(tmp_path: Path, name: str, suffix: str) -> None:
    """A usual name of a field tells it; worked examples are recognised in the rows and left out of them."""
    annotations, template, gold = NESTED[name]
    rows = [
        {
            "context": {"text": f"Note {i} on a city.", "lang": "en"},
            "question": f"Which one is no. {i}?",
            "annotations": annotations,
        }
        for i in range(60)
    ]
    made = propose(Table(names=tuple(rows[0]), rows=tuple(rows)), count=len).settings
    assert made["answer"] == template
    assert made["prompt"] == "context.text: {context.text}\nquestion: {question}"
    file = tmp_path / f"rows.{suffix}"
    dataset = Dataset.from_list(rows)
    dataset.to_json(file) if suffix == "jsonl" else dataset.to_parquet(file)
    keys = {key: made[key] for key in ("prompt", "answer", "system", "examples", "held_out") if key in made}
    sides = load(str(file), **keys)
    assert sides.train[0]["answer"] == gold
    assert len(sides.train) + len(sides.held_out) == 60 - len(made["examples"])
    assert "Bob" not in str(made["examples"])


def test_an_object_in_a_question_is_the_same_text_in_a_row_and_in_an_example(tmp_path: Path) -> None:
    rows = [{"facts": {"n": i, "ok": True}, "ask": f"Is {i} even?", "answer": "yes"} for i in range(40)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    example = {"facts": json.dumps(rows[3]["facts"]), "ask": rows[3]["ask"], "answer": "yes"}
    train = load(str(file), prompt="{facts} {ask}", examples=[example]).train
    assert len(train) == 39
    assert train[0]["prompt"][-1]["content"] == '{"n": 0, "ok": true} Is 0 even?'


def test_everyday_tables_are_read_as_they_are_meant_or_turned_by_a_flag(tmp_path: Path) -> None:
    assert len({table.name for table in TABLES}) == len(TABLES) == 68
    found = [outcome(table, tmp_path) for table in TABLES]
    wrong = [each for each in found if each.wrong]
    assert [each.table.name for each in wrong if each.kind and not each.turned] == []
    assert [each.table.name for each in wrong if not each.kind] == ["json-columns", "letter-count"], "asked for"
    assert sum(not each.wrong for each in found) >= 50


def test_columns_that_were_assumed_by_their_order_are_said_with_the_flags_that_turn_them() -> None:
    """Of `podium train --dataset nouns.csv`, which writes no recipe and asks nothing."""
    rows = [{"noun": f"cat{i}", "plural": f"cat{i}s", "prompt": f"cat{i}", "answer": f"cat{i}s"} for i in range(9)]
    survey = SimpleNamespace(columns=dict.fromkeys(rows[0]), examples=rows)
    assumed = {"prompt": "{noun}", "answer": "{plural}"}
    [found] = broken(settings.WRITTEN[0], Setup(assumed=assumed, train=survey))
    assert '--prompt "{plural}" --answer "{noun}"' in found.fix
    [found] = broken(settings.WRITTEN[0], Setup(assumed={"prompt": "{noun}"}, train=survey))
    assert "--prompt" not in found.fix
