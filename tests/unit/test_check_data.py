"""Every bad row and column is found at once, before any weight is loaded."""

from __future__ import annotations

import logging
import time

import pytest
from datasets import Dataset

from podium.data import PromptBuilder, check_dataset, check_row, find_problems, prompts, survey
from podium.data.sources import keeps_rows
from podium.data.survey import checked_rows
from podium.errors import DataError
from podium.testing import tiny_tokenizer

GOOD_CHAT = [{"role": "user", "content": "2+2?"}]


def chat(**message):
    return [message]


@pytest.mark.parametrize(
    ("prompt", "code", "text"),
    [
        ("", "D002", "prompt is empty"),
        (" \n\t", "D003", "only whitespace"),
        (None, "D005", "prompt is null"),
        (5, "D006", "prompt is int 5"),
        ({"role": "user", "content": "x"}, "D006", "prompt is dict"),
        ([], "D007", "no messages"),
        (chat(role="user", content=None), "D008", r"message 1 \(user\): content is null"),
        (chat(content="x"), "D009", "message 1: `role` missing; it has `content`"),
        (chat(role="user"), "D009", r"message 1 \(user\): `content` missing; it has `role`"),
        (chat(role="user", content=5), "D009", "content is int 5"),
        (chat(role="user", content=[{"type": "text"}]), "D009", "content is list"),
        ([*GOOD_CHAT, "hello"], "D009", "message 2 is str 'hello'"),
        (chat(role="robot", content="x"), "D010", 'unknown role "robot"'),
        ([*GOOD_CHAT, {"role": "usr", "content": "x"}], "D010", "message 2"),
        (chat(role="user", content="  "), "D003", "no text in any message"),
        (
            chat(role="user", content=[{"type": "video"}, {"type": "text", "text": "x"}]),
            "D036",
            "content of type video",
        ),
    ],
)
def test_a_bad_prompt_is_named(prompt, code, text):
    finding = check_row({"prompt": prompt, "answer": "4"}, 8)
    assert finding.code == code
    assert finding.fix
    first = "fine" if isinstance(prompt, str) else GOOD_CHAT
    with pytest.raises(DataError, match=f"train_dataset, row 1: .*{text}"):
        check_dataset([{"prompt": first}, {"prompt": prompt}], "train_dataset")


@pytest.mark.parametrize(
    "prompt",
    [
        "2+2=",
        GOOD_CHAT,
        tuple(GOOD_CHAT),
        [{"role": "system", "content": ""}, *GOOD_CHAT],
        chat(role="user", content=[{"type": "text", "text": "x"}]),
        [*GOOD_CHAT, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}, *GOOD_CHAT],
    ],
)
def test_good_prompts(prompt):
    assert check_row({"prompt": prompt}, 0) is None


def test_a_role_that_the_template_names_is_accepted():
    row = {"prompt": chat(role="documents", content="x")}
    assert check_row(row, 0).code == "D010"
    assert check_row(row, 0, chat_template="{% if message.role == 'documents' %}") is None


def test_suggestions():
    assert "Did you mean `user`?" in check_row({"prompt": chat(role="usr", content="x")}, 0).fix
    assert "rename `from` to `role`" in check_row({"prompt": [{"from": "human", "value": "x"}]}, 0).fix
    assert 'rename_column("question", "prompt")' in check_row({"question": "x", "answer": "y"}, 0).fix


def test_all_problems_at_once_and_each_cure_once():
    rows = [{"prompt": None}, {"prompt": "fine"}, {"prompt": ""}, {"prompt": 5}]
    with pytest.raises(DataError) as caught:
        check_dataset(rows, "train_dataset")
    message = str(caught.value)
    assert message.startswith("train_dataset has 3 problems:")
    for part in ("row 0: prompt is null", "row 2: prompt is empty", "row 3: prompt is int 5"):
        assert part in message
    assert message.count("leave such rows out") == 1


def test_a_long_list_is_cut_and_counted():
    with pytest.raises(DataError) as caught:
        check_dataset([{"prompt": None}] * 25, "eval_dataset")
    message = str(caught.value)
    assert message.count("prompt is null") == 20
    assert "and 5 more" in message
    assert "row 19:" in message
    assert "row 20:" not in message


@pytest.mark.parametrize("kind", [list, Dataset.from_list, lambda rows: Dataset.from_list(rows).to_iterable_dataset()])
def test_columns(kind):
    rows = kind([{"question": "2+2", "answer": "4", "completions": "x"}])
    with pytest.raises(DataError) as caught:
        check_dataset(rows, "train_dataset")
    message = str(caught.value)
    assert "no `prompt` column; the columns are `question`, `answer`, `completions`" in message
    assert 'train_dataset = train_dataset.rename_column("question", "prompt")' in message
    assert "column `completions` has a name that is reserved" in message


@pytest.mark.parametrize(
    "column", ["prompts", "completions", "trainer_state", "log_extra", "log_metric", "environments"]
)
def test_reserved_columns(column):
    with pytest.raises(DataError, match=f"column `{column}` has a name that is reserved"):
        check_dataset([{"prompt": "a", column: 1}], "train_dataset")


@pytest.mark.parametrize("rows", [[], Dataset.from_dict({"prompt": []}), Dataset.from_dict({})])
def test_no_rows(rows):
    with pytest.raises(DataError, match="train_dataset, no rows"):
        check_dataset(rows, "train_dataset")


def test_no_rows_on_the_held_out_side():
    """As where all rows of an environment have one prompt."""
    with pytest.raises(DataError, match="rows with the same prompt are all on one side"):
        check_dataset([], "rows.jsonl (held out)")


def test_an_empty_stream():
    stream = Dataset.from_dict({"prompt": ["a"]}).to_iterable_dataset().filter(lambda row: False)
    with pytest.raises(DataError, match="no rows"):
        check_dataset(stream, "train_dataset")


def test_chat_and_plain_mixed():
    rows = [{"prompt": GOOD_CHAT}] * 5 + [{"prompt": "plain"}] * 2
    with pytest.raises(DataError, match=r"5 rows are chat, 2 are plain \(plain: rows 5, 6\)"):
        check_dataset(rows, "train_dataset")


def test_fewer_prompts_than_a_round():
    rows = [{"prompt": "a"}] * 3
    check_dataset(rows, "train_dataset", num_needed=3)
    with pytest.raises(DataError, match="3 prompts, but one generation round takes 8"):
        check_dataset(rows, "train_dataset", num_needed=8)


def test_chat_without_a_template():
    bare = tiny_tokenizer(chat_template=None)
    for settings in ({"tokenizer": bare}, {"builder": PromptBuilder(tokenizer=bare)}):
        with pytest.raises(DataError, match="no chat template"):
            check_dataset([{"prompt": GOOD_CHAT}], "train_dataset", **settings)
        check_dataset([{"prompt": "plain"}], "train_dataset", **settings)


@pytest.fixture
def lengths(tokenizer):
    def make(*sizes, **settings):
        rows = [{"prompt": "x" * size} for size in sizes]
        return rows, PromptBuilder(tokenizer=tokenizer, **settings)

    return make


def test_prompts_beyond_the_context(lengths):
    rows, builder = lengths(5, 200, 80, 81, context_length=100, max_completion_length=20)
    with pytest.raises(DataError) as caught:
        check_dataset(rows, "train_dataset", builder=builder)
    for part in ("2 prompts are too long", "context of 100", "max_completion_length 20", "row 1: 200 tokens"):
        assert part in str(caught.value), part


def test_too_long_ones_may_be_left_out(lengths, caplog):
    rows, builder = lengths(5, 200, 8, max_prompt_length=10, overlong="drop")
    with caplog.at_level(logging.WARNING):
        check_dataset(rows, "train_dataset", builder=builder, num_needed=2)
    assert "1 prompt is too long: max_prompt_length is 10 (longest, row 1: 200 tokens); left out" in caplog.text
    with pytest.raises(
        DataError, match="2 prompts once 1 too long ones are left out, but one generation round takes 3"
    ):
        check_dataset(rows, "train_dataset", builder=builder, num_needed=3)
    with pytest.raises(DataError, match="0 prompts once 1 too long"):
        check_dataset(rows[1:2], "train_dataset", builder=builder)


def test_the_template_is_tried_on_every_row():
    template = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}x"
    builder = PromptBuilder(tokenizer=tiny_tokenizer(chat_template=template))
    with pytest.raises(DataError, match="row 1: the chat template refused the conversation: one turn only"):
        check_dataset([{"prompt": GOOD_CHAT}, {"prompt": GOOD_CHAT * 2}], "train_dataset", builder=builder)


def test_continued_rows_are_mentioned(caplog):
    rows = [{"prompt": [*GOOD_CHAT, {"role": "assistant", "content": "It is"}]}]
    with caplog.at_level(logging.WARNING):
        check_dataset(rows, "train_dataset")
    assert "1 row ends with an assistant turn" in caplog.text


def test_a_stream_is_looked_at_and_not_used_up():
    stream = Dataset.from_list([{"prompt": "a"}] * 150 + [{"prompt": ""}]).to_iterable_dataset()
    check_dataset(stream, "train_dataset", num_needed=1000)  # row 150 is checked when it is drawn
    bad = Dataset.from_list([{"prompt": "a"}, {"prompt": ""}]).to_iterable_dataset()
    with pytest.raises(DataError, match="row 1: prompt is empty"):
        check_dataset(bad, "train_dataset")
    assert len(list(bad)) == 2


def test_what_can_be_read_only_once_is_left_alone():
    rows = ({"prompt": text} for text in ["a", ""])
    findings = find_problems(rows, "train_dataset")
    assert len(list(rows)) == 2
    assert findings == []


def test_a_transform_may_make_the_prompt():
    dataset = Dataset.from_list([{"question": "a"}, {"question": ""}])
    dataset.set_transform(lambda batch: {"prompt": batch["question"]})
    with pytest.raises(DataError, match="row 1: prompt is empty"):
        check_dataset(dataset, "train_dataset")


def test_rows_of_other_types():
    with pytest.raises(DataError, match="row 1: the row is str 'b'"):
        check_dataset([{"prompt": "a"}, "b"], "train_dataset")
    with pytest.raises(DataError, match="row 1: no `prompt`; the row has `question`"):
        check_dataset([{"prompt": "a"}, {"question": "b"}], "train_dataset")


def test_ten_thousand_rows_take_three_seconds_of_the_processor_at_most(tokenizer):
    dataset = Dataset.from_list([{"prompt": GOOD_CHAT, "answer": str(n)} for n in range(10_000)])
    start = time.process_time()
    check_dataset(dataset, "train_dataset")
    assert time.process_time() - start < 3  # 0.2 s on a quiet machine


def test_checked_rows_are_not_surveyed_again_unless_prompts_have_other_limits(lengths, monkeypatch):
    rows, builder = lengths(5, 200, 8, max_prompt_length=10, overlong="drop")
    checked = checked_rows(rows, "train_dataset", num_needed=2, builder=builder)
    assert checked.too_long == (1,)
    assert checked.without_too_long(builder) == [rows[0], rows[2]]
    surveyed = []
    monkeypatch.setattr(survey, "check_row", lambda row, *_, **__: surveyed.append(row))
    assert checked_rows(checked, "train_dataset", num_needed=2, builder=builder) is checked
    assert not surveyed
    _, shorter = lengths(max_prompt_length=6, overlong="drop")
    assert checked_rows(checked, "train_dataset", num_needed=1, builder=shorter).too_long == (1, 2)
    assert surveyed == rows


@pytest.mark.parametrize(
    ("kind", "is_kept"),
    [
        (Dataset.from_list, True),
        (lambda rows: Dataset.from_list([{"prompt": ""}, *rows]).select([1, 2, 3]), True),
        (lambda rows: Dataset.from_list(rows).with_transform(dict), False),
        (lambda rows: Dataset.from_list(rows).to_iterable_dataset(), False),
        (list, False),
        (iter, False),
    ],
    ids=["dataset", "selected", "transformed", "stream", "list", "iterator"],
)
def test_a_draw_checks_the_rows_that_may_not_be_those_of_the_survey(kind, is_kept, tokenizer, monkeypatch):
    rows = kind([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    assert keeps_rows(rows) is is_kept
    drawn = []
    monkeypatch.setattr(prompts, "check_row", lambda row, *_, **__: drawn.append(row["prompt"]))
    builder = PromptBuilder(tokenizer=tokenizer)
    texts = [builder(row, id=0, row_index=0, checked=is_kept).text for row in rows]
    assert texts == ["a", "b", "c"]
    assert drawn == ([] if is_kept else texts)
