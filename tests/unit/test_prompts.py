"""Rows become prompts: what is rendered, what is limited, what is passed on."""

from __future__ import annotations

import pytest

from podium.data import PromptBuilder
from podium.errors import ConfigError, DataError
from podium.testing import tiny_tokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


@pytest.fixture
def build(tokenizer):
    def make(row, *, index=7, **settings):
        return PromptBuilder(tokenizer=tokenizer, **settings)(row, id=3, row_index=index)

    return make


def test_plain_row(build, tokenizer):
    prompt = build({"prompt": "2+2=", "answer": "4"})
    assert prompt.token_ids == tuple(tokenizer("2+2=")["input_ids"])
    assert (prompt.text, prompt.content, prompt.is_chat, prompt.id, prompt.row) == ("2+2=", "2+2=", False, 3, 7)


def test_plain_row_gets_the_special_tokens_of_the_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.add_bos_token = True
    expected = tokenizer("ab")["input_ids"]
    assert expected[0] == tokenizer.bos_token_id  # else this test shows nothing
    assert PromptBuilder(tokenizer=tokenizer)({"prompt": "ab"}, id=0, row_index=0).token_ids == tuple(expected)


def test_chat_row_opens_the_assistant_turn(build, tokenizer):
    prompt = build({"prompt": CHAT})
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.token_ids == tuple(tokenizer(prompt.text, add_special_tokens=False)["input_ids"])
    assert prompt.is_chat
    assert prompt.content == CHAT


def test_a_last_assistant_turn_is_continued(build, tokenizer):
    prompt = build({"prompt": [*CHAT, {"role": "assistant", "content": "<answer>"}]})
    assert prompt.text.endswith("<|im_start|>assistant\n<answer>")
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_chat_template_kwargs_reach_the_template():
    template = "{{ messages[0]['content'] }}{% if think %} think{% endif %}"
    tokenizer = tiny_tokenizer(chat_template=template)
    row = {"prompt": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"think": False}}
    prompt = PromptBuilder(tokenizer=tokenizer, chat_template_kwargs={"think": True})(row, id=0, row_index=0)
    assert prompt.text == tokenizer.decode(prompt.token_ids) == "hi think"
    assert prompt.columns == {"chat_template_kwargs": {"think": False}}


def test_a_template_may_come_from_the_kwargs():
    builder = PromptBuilder(
        tokenizer=tiny_tokenizer(chat_template=None), chat_template_kwargs={"chat_template": "{{ messages|length }}"}
    )
    assert builder({"prompt": CHAT}, id=0, row_index=0).text == "2"


def test_columns_that_rewards_never_get(build):
    prompt = build({"prompt": "a", "completion": "b", "completion_ids": [1], "answer": "4", "level": 2})
    assert prompt.columns == {"answer": "4", "level": 2}


def test_no_template_is_said_with_a_cure(build):
    with pytest.raises(DataError, match=r"row 7: the prompt is a conversation.*no chat template.*M004(.|\n)*fix: "):
        PromptBuilder(tokenizer=tiny_tokenizer(chat_template=None))({"prompt": CHAT}, id=0, row_index=7)


def test_what_the_template_refuses_names_the_row():
    tokenizer = tiny_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"row 7: the chat template refused.*roles must alternate"):
        PromptBuilder(tokenizer=tokenizer)({"prompt": CHAT}, id=0, row_index=7)


def test_a_bad_row_is_refused_when_drawn(build):
    with pytest.raises(DataError, match="train_dataset, row 7: prompt is null"):
        build({"prompt": None})


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, None),
        ({"max_prompt_length": 5}, 5),
        ({"context_length": 100, "max_completion_length": 20}, 80),
        ({"context_length": 100, "max_completion_length": 20, "max_prompt_length": 90}, 80),
        ({"context_length": 100, "max_completion_length": 20, "max_prompt_length": 30}, 30),
        ({"max_completion_length": 20}, None),
    ],
)
def test_limit(tokenizer, settings, limit):
    assert PromptBuilder(tokenizer=tokenizer, **settings).limit == limit


@pytest.mark.parametrize("overlong", ["error", "drop", "truncate"])
def test_a_prompt_of_just_the_limit_is_taken_whole(build, overlong):
    assert len(build({"prompt": "x" * 5}, max_prompt_length=5, overlong=overlong).token_ids) == 5


def test_overlong_error_has_row_length_limit_and_cure(build):
    with pytest.raises(DataError) as caught:
        build({"prompt": "x" * 95}, context_length=100, max_completion_length=20, index=12)
    message = str(caught.value)
    for part in ("row 12", "95 tokens", "context of 100", "max_completion_length 20", "80", "max_completion_length=5"):
        assert part in message, part
    with pytest.raises(DataError, match=r"6 tokens, but max_prompt_length is 5(.|\n)*max_prompt_length=6"):
        build({"prompt": "x" * 6}, max_prompt_length=5)


def test_overlong_drop(build):
    assert build({"prompt": "x" * 6}, max_prompt_length=5, overlong="drop") is None


def test_overlong_truncate_keeps_the_last_tokens(build, tokenizer):
    prompt = build({"prompt": "abcdefgh", "answer": "4"}, max_prompt_length=3, overlong="truncate")
    assert tokenizer.decode(prompt.token_ids) == prompt.text == "fgh"
    assert prompt.content == "abcdefgh"
    assert prompt.columns == {"answer": "4"}


def test_no_room_at_all_is_said_before_any_row(tokenizer):
    with pytest.raises(ConfigError, match="no room for a prompt: the model has 64 positions"):
        PromptBuilder(tokenizer=tokenizer, context_length=64, max_completion_length=64)
    with pytest.raises(ConfigError, match="max_prompt_length is 0"):
        PromptBuilder(tokenizer=tokenizer, max_prompt_length=0)
