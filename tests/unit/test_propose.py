"""Settings that follow from a table: its columns, the shape of its answers, its worked examples."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from podium.data import load
from podium.data.columns import Columns
from podium.data.selection import is_held_out, parse_condition
from podium.errors import ConfigError
from podium.planning.columns import chosen_columns
from podium.planning.propose import LOOKED_AT, NUM_EXAMPLES, SHAPES, Table, Wishes, propose
from podium.rewards import library_reward


def table(answers: list[object], **more: object) -> Table:
    rows = tuple({"question": f"Question number {n}?", "answer": answer} for n, answer in enumerate(answers))
    return Table(names=("question", "answer"), rows=rows, **more)


CASES = {
    "label": [["good", "bad", "so so"][n % 3] for n in range(90)],
    "number": [str(n % 4) for n in range(90)],
    "choice": ["ABCD"[n % 4] for n in range(90)],
    "worked": [f"{n} and {n} is {2 * n}\n#### {2 * n}" for n in range(90)],
    "json": [json.dumps({"name": "Ana", "age": n}) for n in range(90)],
    "date": [f"2024-05-{n % 28 + 1:02}" for n in range(90)],
    "list": [f"ant, bee {n}, cat" for n in range(90)],
    "text": [f"{n} centimetres" for n in range(90)],
    "long": [f"It was {n} years ago that " + "one thing led to another " * 20 for n in range(90)],
}


@pytest.mark.parametrize("shape", CASES)
def test_the_right_answer_has_the_highest_rewards_and_a_wrong_one_less(shape: str) -> None:
    made = propose(table(CASES[shape]), count=len)
    assert made.shape == shape
    columns = Columns(answer_from=made.settings.get("answer_from"))
    golds = [columns(row)["answer"] for row in table(CASES[shape]).rows[:30]]
    wrong = golds[1:] + golds[:1]
    texts, others = golds, wrong
    if SHAPES[shape].tagged:
        texts, others = ([f"<answer>{each}</answer>" for each in some] for some in (golds, wrong))
    total = {"right": 0.0, "wrong": 0.0}
    for entry in made.settings["rewards"]:
        name, args = (entry, {}) if isinstance(entry, str) else (entry["name"], entry.get("args", {}))
        columns_of = {} if "format" in name else {"answer": golds}
        for kind, completions in (("right", texts), ("wrong", others)):
            total[kind] += sum(library_reward(name, **args)(completions=completions, **columns_of))
    assert total["right"] > total["wrong"]
    assert made.settings["max_completion_length"] > max(map(len, texts)) or shape in ("worked", "long")
    accuracy = made.settings.get("accuracy")
    names = [each if isinstance(each, str) else each["name"] for each in made.settings["rewards"]]
    assert accuracy in (*names, None)


@pytest.mark.parametrize(
    ("answers", "shape"),
    [
        (["yes"] * 40, "text"),  # one label is none
        (["A", "B", "B and C"] * 9, "label"),
        (["red", "blue"], "text"),  # too few rows to call them labels
        (["7", "none"] * 9, "label"),
        (["7", "about 3 apples", "2"], "text"),
        ([3, 4.5], "number"),
        (["0,5", "12,5", "0"], "number"),
        (["02139", "12345", "10001"], "text"),  # a code: 2139 is another one
        ([{"a": 1}, {"a": 2}], "json"),
        ([["Rome", "Roma"], ["Paris"]], "text"),  # several right answers
        (["No, I have never been there in all my life.", "Yes, it was a very good one to be in, too."], "text"),
    ],
)
def test_shapes_at_their_edges(answers: list[object], shape: str) -> None:
    assert propose(table(answers), count=len).shape == shape


def test_examples_are_neither_trained_nor_tested_on(tmp_path: Path) -> None:
    answers = ["good", "bad"] * 60
    made = propose(table(answers), count=len).settings
    rows = table(answers).rows
    assert len(made["examples"]) == NUM_EXAMPLES
    assert sorted(each["answer"] for each in made["examples"]) == ["bad", "bad", "good", "good"]
    assert not any(is_held_out(each["question"], made["held_out"]) for each in made["examples"])
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ("prompt", "system", "examples", "held_out")
    train, held_out = load(str(file), **{key: made[key] for key in keys})
    asked = [prompt[-1]["content"] for side in (train, held_out) for prompt in side["prompt"]]
    shown = {each["question"] for each in made["examples"]}
    assert sorted([*asked, *shown]) == sorted(row["question"] for row in rows)
    assert len(held_out) >= 15


def test_rows_that_are_examples_are_left_out_of_a_test_split_and_of_a_dataset() -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": f"{n}+{n}", "answer": str(2 * n)} for n in range(9)])
    for dataset in (rows, {"train": rows, "test": rows}):
        loaded = load(dataset, examples=[{"prompt": "3+3", "answer": "6"}])
        for side in filter(None, loaded):
            assert [prompt[-1]["content"] for prompt in side["prompt"]] == [f"{n}+{n}" for n in range(9) if n != 3]


def test_what_is_there_is_not_held_out_again() -> None:
    assert "held_out" not in propose(table(["7", "8"] * 40, has_test=True), count=len).settings


def test_a_larger_table_holds_out_a_smaller_share() -> None:
    shares = [propose(table(["7", "8"] * count), count=len).settings["held_out"] for count in (40, 400)]
    assert shares == [0.2, 0.1]


def test_rewards_that_read_tags_get_them() -> None:
    made = propose(table(["7", "8"] * 40), Wishes(tagged=True), count=len).settings
    assert "<answer>" in made["system"]
    assert all(each["answer"].startswith("<answer>") for each in made["examples"])


def test_other_models_have_no_settings_of_the_built_in_one() -> None:
    made = propose(table(["7", "8"] * 40), Wishes(model="org/model")).settings
    assert not {"learning_rate", "max_steps", "adam_beta2"} & made.keys()
    assert made["model"] == "org/model"


# ---- columns ----


def rows_of(**columns: list[object]) -> list[dict[str, object]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


LONG = [f"A rather long text with the number {n} in it" for n in range(40)]


@pytest.mark.parametrize(
    ("columns", "given", "prompt", "answer", "doubtful"),
    [
        ({"question": LONG, "answer": LONG}, (), "{question}", None, False),
        ({"prompt": LONG, "completion": LONG}, (), None, "{completion}", False),
        ({"label": ["a"] * 40, "text": LONG}, (), "{text}", "{label}", False),
        ({"noun": LONG, "plural": LONG}, (), "{noun}", "{plural}", True),
        ({"plural": LONG, "noun": LONG}, (), "{plural}", "{noun}", True),
        ({"ticket": LONG, "team": ["a", "b"] * 20}, (), "{ticket}", "{team}", True),
        ({"tgt": LONG, "src": LONG, "date": LONG}, (), "{src}", "{tgt}", False),
        (
            {"word": ["tree"] * 40, "letter": LONG, "answer": ["1", "2"] * 20},
            (),
            "word: {word}\nletter: {letter}",
            None,
            False,
        ),
        (
            {"word": ["a", "b"] * 20, "letter": ["a"] * 40, "answer": ["1", "2"] * 20},
            (),
            "{word} {letter}",
            None,
            False,
        ),
        ({"id": LONG, "source": LONG, "target": LONG, "date": LONG}, (), "{source}", "{target}", False),
        ({"note": ["a", "b"] * 20, "mail": LONG}, (), "{note}", "{mail}", True),
        ({"id": LONG, "mail": LONG, "kind": ["a", "b"] * 20}, (), "{mail}", "{kind}", True),
        ({"mail": LONG, "from": LONG, "kind": ["a", "b"] * 20}, ("{mail}", None), "{mail}", None, False),
        ({"mail": LONG, "from": LONG, "kind": ["a", "b"] * 20}, ("mail", "kind"), "{mail}", "{kind}", False),
        ({"a": LONG, "b": LONG, "c": LONG}, ("{a} {b}", None), "{a} {b}", "{c}", False),
        ({"question": LONG, "tests": LONG}, (), "{question}", None, False),
        (
            {"question": LONG, "level": LONG, "correct_option": ["a", "b"] * 20},
            (),
            "{question}",
            "{correct_option}",
            False,
        ),
        ({"question": LONG, "correct_answer": LONG, "answer": LONG}, (), "{question}", "{correct_answer}", False),
    ],
)
def test_columns(
    columns: dict[str, list[object]],
    given: tuple[str | None, ...],
    prompt: str | None,
    answer: str | None,
    doubtful: bool,
) -> None:
    chosen = chosen_columns(list(columns), rows_of(**columns), *given)
    assert (chosen.prompt, chosen.answer, bool(chosen.other)) == (prompt, answer, doubtful)


def test_the_other_reading_is_flags_that_take_it() -> None:
    columns = {"noun": LONG, "plural": LONG[1:] + LONG[:1]}
    chosen = chosen_columns(list(columns), rows_of(**columns))
    assert chosen.other == '--prompt "{plural}" --answer "{noun}"'
    turned = chosen_columns(list(columns), rows_of(**columns), "{plural}", "{noun}")
    assert (turned.prompt, turned.answer, turned.other) == ("{plural}", "{noun}", "")


def test_capitals_count_unless_the_labels_differ_in_them() -> None:
    def args_of(answers: list[object]) -> object:
        made = propose(table(answers), count=len)
        assert ("capitals aside" in "".join(made.understood)) is ("args" in made.settings["rewards"][0])
        return made.settings["rewards"][0].get("args")

    assert args_of([f"WORD {'ABCDE'[n % 5]}{n}" for n in range(40)]) is None
    assert args_of(["yes", "no"] * 20) is None
    assert args_of(["Yes", "yes", "NO", "no"] * 10) == {"ignore_case": True}


def test_columns_that_cannot_be_told_are_an_error_with_the_flags() -> None:
    columns = {"a": LONG, "b": LONG, "c": LONG}
    with pytest.raises(ConfigError, match="cannot be told; the columns are `a`, `b`, `c`") as caught:
        chosen_columns(list(columns), rows_of(**columns))
    assert caught.value.fix == '--prompt "{a} {b}" --answer "{c}", or others of them'
    with pytest.raises(ConfigError, match="there is no column `d`"):
        chosen_columns(list(columns), rows_of(**columns), "{a} {d}")


def test_rows_that_decide_are_bounded() -> None:
    answers = ["7"] * LOOKED_AT + ["none"] * 40
    assert propose(table(answers), count=len).shape == "number"


def test_every_label_has_an_example_and_is_listed_once() -> None:
    six = ["billing", "login", "shipping", "hardware", "cancellation", "returns"]
    made = propose(table(six * 20), Wishes(sentence="Name the team."), count=len).settings
    assert {each["answer"] for each in made["examples"]} == set(six)
    assert made["system"].startswith("Name the team. Answer with one of these alone: ")
    told = Wishes(sentence="Answer Yes or No.")
    assert propose(table(["yes", "no"] * 20), told, count=len).settings["system"] == "Answer Yes or No."
    not_told = Wishes(sentence="Answer with yes, or do not know.")
    assert "one of these" in propose(table(["yes", "no"] * 20), not_told, count=len).settings["system"]


def test_rows_with_empty_cells_are_left_out_on_both_sides(tmp_path: Path) -> None:
    answers = [None if n % 7 == 0 else n for n in range(60)]
    rows = [{"my question": "" if n % 9 == 4 else f"After {n}?", "answer": answer} for n, answer in enumerate(answers)]
    made = propose(Table(names=("my question", "answer"), rows=tuple(rows)), count=len).settings
    assert made["filter"] == ["my question != ''", "answer != ''"]
    assert "filter" not in propose(table([1, 2] * 20), count=len).settings
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    conditions = tuple(map(parse_condition, made["filter"]))
    for share in (0.3, 0.7):  # the empty question is on either side
        both = load(str(file), prompt=made["prompt"], held_out=share, filter=conditions)
        kept = [row for side in (both.train, both.held_out) for row in side]
        assert len(kept) == sum(bool(row["my question"]) and row["answer"] is not None for row in rows)
    easy = load(str(file), prompt=made["prompt"], held_out=0.5, filter=(parse_condition("answer < 5"),))
    assert max(each for each in easy.held_out["answer"] if each is not None) > 5


def test_conversations_that_end_with_their_answer() -> None:
    def turns(n: int) -> dict:
        asked, told = (
            {"role": "user", "content": f"Is {n} even?"},
            {"role": "assistant", "content": "no" if n % 2 else "yes"},
        )
        return {"messages": [asked, told]}

    table = Table(names=("messages",), rows=tuple(turns(n) for n in range(60)))
    made = propose(table, Wishes(sentence="Say whether it is even."))
    assert (made.shape, made.settings["answer_from"]) == ("label", "last turn")
    assert made.settings["system"] == "Say whether it is even. Answer with one of these alone: no, yes."
    one_more = Table(names=("messages",), rows=(*table.rows, {"messages": turns(1)["messages"][:1]}))
    assert "answer_from" not in propose(one_more).settings  # not all of them do


def sharegpt(n: int) -> dict:
    turns = [{"from": "human", "value": f"Is {n} even?"}, {"from": "gpt", "value": "no" if n % 2 else "yes"}]
    return {"id": f"x{n}", "conversations": turns, "source": f"book {n % 3}", "lang": "en"}


def verl(n: int) -> dict:
    asked = [{"role": "user", "content": f"What is {n} + 1? Think, then write the answer after ####."}]
    gold = {"style": "rule", "ground_truth": str(n + 1)}
    return {"data_source": "sums", "prompt": asked, "ability": "math", "reward_model": gold, "extra_info": {"index": n}}


def test_short_choices_keep_the_names_by_which_an_answer_takes_one() -> None:
    rows = [{"question": f"{n}+1=?", "A": n, "B": n + 1, "C": n + 2, "answer": "BC"[n % 2]} for n in range(9)]
    assert chosen_columns(list(rows[0]), rows).prompt == "question: {question}\nA: {A}\nB: {B}\nC: {C}"
    assert chosen_columns(["a", "b", "label"], [{"a": 1, "b": n, "label": n + 1} for n in range(9)]).prompt == "{a} {b}"


def test_objects_with_other_fields_in_other_rows() -> None:
    """The instruction names the fields of all answers, and the example of one is JSON."""
    rows = [{"name": f"P{n}", **({"age": n} if n % 2 else {})} for n in range(40)]
    made = propose(table(list(rows)), count=len)
    assert made.settings["system"] == "Answer with one JSON object with the fields name, age, and nothing else."
    assert any('the fields name, age, such as `{"name": "P0"}`' in line for line in made.understood)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tables_of_other_trainers_are_read_as_they_are_meant(tmp_path: Path, suffix: str) -> None:
    """ShareGPT's turns of `from` and `value`, and verl's `reward_model`, of rows with and without types."""
    for row, prompt, answer, system in (
        (sharegpt, "Is 1 even?", "no", True),
        (verl, "What is 1 + 1? Think, then write the answer after ####.", "2", False),
    ):
        rows = [row(n) for n in range(60)]
        made = propose(Table(names=tuple(rows[0]), rows=tuple(rows)), count=len).settings
        file = tmp_path / f"{row.__name__}.{suffix}"
        dataset = Dataset.from_list(rows)
        dataset.to_json(file) if suffix == "jsonl" else dataset.to_parquet(file)
        ways = {key: made.get(key) for key in ("prompt", "answer", "answer_from", "system")}
        found = [*load(str(file), **ways).train]
        assert found[1]["prompt"][-1] == {"role": "user", "content": prompt}
        assert found[1]["answer"] == answer
        assert ("system" in made) is system, "verl's prompts say how to answer"
        sides = load(str(file), **ways, held_out=made["held_out"])
        assert len(sides.train) + len(sides.held_out) == 60
        assert sides.held_out


def test_a_column_with_an_answer_is_taken_before_the_last_turn() -> None:
    rows = [{**sharegpt(n), "label": str(n % 2)} for n in range(60)]
    made = propose(Table(names=tuple(rows[0]), rows=tuple(rows)), count=len).settings
    assert made["answer"] == "{label}"
    assert "answer_from" not in made


def published(name: str, n: int) -> dict:
    """A row in the form of a dataset that many have."""
    texts = [f"item {n + i}" for i in range(4)]
    solution = rf"We have ${n} \cdot {n} = \boxed{{{n * n}}}$."
    return {
        "MATH": {"problem": f"Compute {n}^2.", "level": "Level 1", "type": "Algebra", "solution": solution},
        "MMLU": {"question": f"Which is {n}?", "subject": "math", "choices": texts, "answer": n % 4},
        "ARC": {
            "id": f"q{n}",
            "question": f"Which is {n}?",
            "choices": {"text": texts, "label": ["A", "B", "C", "D"]},
            "answerKey": "ABCD"[n % 4],
        },
        "SQuAD": {
            "id": f"q{n}",
            "title": "Pets",
            "context": f"Ann has {n} cats.",
            "question": "How many cats has Ann?",
            "answers": {"text": [str(n)], "answer_start": [8]},
        },
        "TriviaQA": {
            "question": f"Who is number {n}?",
            "question_id": f"tc_{n}",
            "answer": {"value": f"Person {n}", "aliases": [f"Person {n}", f"P. {n}"]},
        },
        "WinoGrande": {
            "sentence": f"Ann {n} helped Bob.",
            "option1": f"Ann {n}",
            "option2": "Bob",
            "answer": "12"[n % 2],
        },
        "PIQA": {"goal": f"Open jar {n}", "sol1": f"Turn lid {n}", "sol2": "Eat it", "label": n % 2},
        "preferences": {"prompt": f"Greet person {n}.", "chosen": f"Hello {n}!", "rejected": "Go away!"},
        "UltraFeedback": {
            "prompt": f"Greet person {n}.",
            "prompt_id": f"{n:x}",
            "chosen": [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"Hello {n}!"}],
            "rejected": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Go away!"}],
        },
        "prompt and completion": {
            "prompt": [{"role": "user", "content": f"Greet person {n}."}],
            "completion": [{"role": "assistant", "content": f"Hello {n}!"}],
        },
        "Countdown": {"target": n + 20, "nums": [n, 10, 10]},
    }[name]


@pytest.mark.cases(8)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("name", "shape", "prompt", "answer"),
    [
        ("MATH", "boxed", "Compute 3^2.", "9"),
        ("MMLU", "choice", "Which is 3?\nA. item 3\nB. item 4\nC. item 5\nD. item 6", 3),
        ("ARC", "choice", "Which is 3?\nA. item 3\nB. item 4\nC. item 5\nD. item 6", "D"),
        ("SQuAD", "number", "context: Ann has 3 cats.\nquestion: How many cats has Ann?", ["3"]),
        ("TriviaQA", "text", "Who is number 3?", ["Person 3", "P. 3"]),
        ("WinoGrande", "number", "sentence: Ann 3 helped Bob.\noption1: Ann 3\noption2: Bob", "2"),
        ("PIQA", "number", "goal: Open jar 3\nsol1: Turn lid 3\nsol2: Eat it", "1"),
        ("preferences", "text", "Greet person 3.", "Hello 3!"),
        ("UltraFeedback", "text", "Greet person 3.", "Hello 3!"),
        ("prompt and completion", "text", "Greet person 3.", "Hello 3!"),
        ("Countdown", "number", "[3, 10, 10]", "23"),
    ],
)
def test_published_forms_of_rows(
    tmp_path: Path, suffix: str, name: str, shape: str, prompt: str, answer: object
) -> None:
    rows = [published(name, n) for n in range(60)]
    made = propose(Table(names=tuple(rows[0]), rows=tuple(rows)), count=len)
    file, dataset = tmp_path / f"rows.{suffix}", Dataset.from_list(rows)
    dataset.to_json(file) if suffix == "jsonl" else dataset.to_parquet(file)
    ways = {key: made.settings.get(key) for key in ("prompt", "answer", "answer_from", "system")}
    found = load(str(file), **ways).train[3]
    assert (made.shape, found["prompt"][-1]["content"], found["answer"]) == (shape, prompt, answer)


def test_choices_that_stand_in_the_question_are_not_repeated() -> None:
    rows = [{"question": f"{n}? yes or no", "choices": ["yes", "no"], "answer": n % 2} for n in range(60)]
    assert propose(Table(names=tuple(rows[0]), rows=tuple(rows)), count=len).settings["prompt"] == "{question}"


def rows_like(**first: object) -> Table:
    """Forty rows, in whose texts the row's number stands in place of `#`; a list of lists gives one after the other."""
    rows = []
    for n in range(40):
        values = {name: each[n % len(each)] if isinstance(each, list) else each for name, each in first.items()}
        rows.append({name: x.replace("#", str(n)) if isinstance(x, str) else x for name, x in values.items()})
    return Table(names=tuple(first), rows=tuple(rows))


@pytest.mark.parametrize(
    ("made", "answers"),
    [
        (rows_like(statement="# is even", is_true=[True, False]), {"True", "False"}),
        (rows_like(mission="Mission #", launched=[datetime.datetime(2024, 1, day) for day in (1, 2, 3)]), None),
        (rows_like(plot="A film about #", genres=[["drama", "horror"], ["comedy"]]), {"drama", "comedy"}),
    ],
    ids=["booleans", "dates of Parquet", "several labels"],
)
def test_examples_show_what_is_rewarded(made: Table, answers: set[str] | None) -> None:
    settings = propose(made).settings
    told = made.names[-1]
    shown = {each[told] for each in settings["examples"]}
    assert answers is None or shown == answers
    golds = [row[told] if isinstance(row[told], list) else str(row[told]) for row in made.rows]
    for text in shown:
        assert max(library_reward("exact_match")(completions=[text] * len(golds), answer=golds)) == 1.0


def test_lists_in_the_question_are_shown_whole_and_not_trained_on(tmp_path: Path) -> None:
    endings = [[f"eats {n}", f"flies {n}", "sings"] for n in range(40)]
    rows = [{"ctx": f"A man, number {n},", "endings": endings[n], "label": n % 3} for n in range(40)]
    made = propose(Table(names=("ctx", "endings", "label"), rows=tuple(rows)))
    examples = made.settings["examples"]
    assert {each["endings"] for each in examples} <= {str(each) for each in endings}
    for prompt, names in ((made.settings["prompt"], ("ctx", "endings")), ("{endings}", ("endings",))):
        columns = Columns(prompt=prompt)
        asked = [columns.identity(row) for row in rows]
        assert all(columns.identity({name: each[name] for name in names}) in asked for each in examples)


def test_an_item_of_several_is_said_to_be_enough() -> None:
    said = " ".join(propose(rows_like(plot="A film about #", genres=[["drama", "horror"], ["comedy"]])).understood)
    assert "any one of the items of {genres}" in said
    assert "any one" not in " ".join(
        propose(rows_like(plot="A film about #", genres=[["drama"], ["comedy"]])).understood
    )


def test_empty_answers_are_no_labels_and_no_examples() -> None:
    made = propose(rows_like(text="Report #", name=["", "Bob Roy", "Gus Ito"]))
    assert made.settings["filter"] == ["name != ''"]
    assert made.about == "one of few labels (Bob Roy, Gus Ito)"
    assert {each["name"] for each in made.settings["examples"]} == {"Bob Roy", "Gus Ito"}


def test_a_column_without_a_value_is_no_answer() -> None:
    made = propose(rows_like(question="Write program #", input_output='{"inputs": ["#"]}', starter_code=""))
    assert not made.shape
    assert "filter" not in made.settings


@pytest.mark.parametrize(
    ("made", "prompt"),
    [
        (rows_like(comment="I think # is bad", sentiment=["pos", "neg"]), "comment"),
        (rows_like(comment="It is #", sentiment=["pos", "neg"], notes="none", id="#"), "comment"),
        (rows_like(question="Is it #?", options=[["0", f"{n}"] for n in range(40)], answer_idx=["A", "B"]), "options"),
    ],
    ids=["comments", "comments with notes", "options"],
)
def test_columns_of_the_question(made: Table, prompt: str) -> None:
    assert f"{{{prompt}}}" in str(propose(made).settings["prompt"])


@pytest.mark.parametrize(
    ("answers", "shape"),
    [
        (["12,50 €", "3,00 €"] * 20, "number"),
        (["\u22127", "1/4", "0.5 %", "¥12"] * 10, "number"),
        ([r"\frac{1}{2}", "p - q", "9", r"3\sqrt{13}"] * 10, "formula"),
        (["2024-05-01 00:00:00"] * 20, "date"),
    ],
)
def test_answers_that_rewards_of_the_library_read(answers: list[str], shape: str) -> None:
    made = propose(table([*answers]))
    assert made.shape == shape
    if shape != "formula":
        name = made.settings["accuracy"]
        assert set(library_reward(name)(completions=answers, answer=answers)) == {1.0}


def test_a_wrong_fraction_is_as_far_as_its_value() -> None:
    """The scale came from denominators, so that a fraction twice as large earned as much as the right one."""
    made = propose(table([f"{n}/40" for n in range(1, 39)]))
    scale = next(each["args"]["scale"] for each in made.settings["rewards"] if each != made.settings["rewards"][0])
    assert 0.05 < scale < 0.2


ASSERTED = {"test_list": ["assert f(1) == 2"], "code": "def f(x): return x + 1"}
PAIRS = {"input_output": '{"inputs": ["1"], "outputs": ["2"]}', "starter_code": "def f(x):"}


@pytest.mark.parametrize(
    ("columns", "settings"),
    [
        (
            ASSERTED,
            {
                "prompt": "{text} It must pass these tests: {test_list}",
                "answer": "{code}",
                "columns": {"tests": "test_list"},
            },
        ),
        (PAIRS, {"prompt": "{text}", "columns": {"tests": "input_output"}}),
        (
            {"test": "from solution import f\ndef test_f(): assert f(1) == 2", "text": "Write `f`."},
            {"prompt": "{text}", "columns": {"tests": "test"}},
        ),
        ({"tests": "assert f(1) == 2"}, {"prompt": "{text} It must pass these tests: {tests}"}),
        ({"test_cases": ["by hand", "by night"], "label": "a"}, {"prompt": "{text}", "answer": "{label}"}),
    ],
)
def test_a_column_of_tests_is_told_by_what_it_holds(columns: dict[str, Any], settings: dict[str, Any]) -> None:
    rows = tuple({"text": f"Write f number {n}.", **columns} for n in range(20))
    made = propose(Table(names=tuple({"text": "", **columns}), rows=rows)).settings
    assert {key: made[key] for key in ("prompt", "answer", "columns") if key in made} == settings
    assert ("code_stages" in str(made["rewards"])) is ("label" not in columns)
