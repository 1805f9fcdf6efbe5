"""`/v1/responses` and `/v1/messages` as conversations of a chat, and the arguments of every path."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from podium.agents.chat import TooManyTokens, bounded, tool_format
from podium.agents.programs.dialects import message_request, response_request
from podium.agents.programs.sessions import ProgramSession, SessionLimits
from podium.agents.programs.wire import ApiError, chat_answer, chat_chunks, chat_request, text_request
from podium.engines.base import Drawn
from podium.records import SamplingSettings
from tests.unit.agents_setup import tool_tokenizer

CONTENT = [{"role": "user", "content": "begin"}]


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def test_assistant_messages_in_a_row_stay_apart_and_the_parts_of_a_turn_are_one() -> None:
    call = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "1"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    text = {"type": "message", **said([{"type": "output_text", "text": "I add."}])}
    asked = response_request({"input": [*CONTENT, said("one"), said("two"), thought, thought, text, call, call]})
    one, two, turn = asked.messages[1:]
    assert (one, two) == (said("one"), said("two"))
    assert (turn["content"], turn["reasoning_content"], len(turn["tool_calls"])) == ("I add.", "Hm.Hm.", 2)


def test_a_message_that_should_be_continued_is_refused() -> None:
    """Its prefix would have to be left out of what the model draws, and of what is trained."""
    with pytest.raises(ApiError, match="prefill"):
        message_request({"max_tokens": 4, "messages": [*CONTENT, said("{")]})


def test_an_empty_turn_of_anthropics_is_a_message() -> None:
    asked = message_request({"max_tokens": 4, "messages": [*CONTENT, said([]), *CONTENT]})
    assert asked.messages == (*CONTENT, said(""), *CONTENT)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "5"}]}
    assert [each["role"] for each in message_request({"max_tokens": 4, "messages": [result]}).messages] == ["tool"]


def test_what_the_policy_decides_is_said() -> None:
    one = {"type": "auto", "disable_parallel_tool_use": True}
    message = {"max_tokens": 4, "messages": CONTENT, "thinking": {"type": "disabled"}, "tool_choice": one}
    assert tuple(message_request(message).decided) == ("parallel_tool_calls", "thinking")
    chat = {"messages": CONTENT, "reasoning_effort": "low", "parallel_tool_calls": False}
    assert tuple(chat_request(chat).decided) == ("parallel_tool_calls", "reasoning_effort")
    assert tuple(response_request({"input": "begin", "reasoning": {"effort": "low"}}).decided) == ("reasoning",)
    assert not chat_request({"messages": CONTENT, "parallel_tool_calls": True}).decided


def test_arguments_that_are_null_or_ask_for_nothing_are_taken() -> None:
    chat_request({"messages": CONTENT, "web_search_options": None})
    message_request({"max_tokens": 4, "messages": CONTENT, "container": None})
    nothing = {"max_tool_calls": None, "background": None, "conversation": None, "top_logprobs": 0}
    for background in (None, False):
        response_request({"input": "begin", **nothing, "background": background})
    for asked in ({"max_tool_calls": 3}, {"background": True}, {"top_logprobs": 2}):
        with pytest.raises(ApiError, match=next(iter(asked))):
            response_request({"input": "begin", **asked})


def test_tools_are_the_same_whoever_sends_them_and_however() -> None:
    """With what chat templates read, and without what is for the server alone; a function may take nothing."""
    parameters = {"type": "object", "properties": {}}
    function = {"name": "now", "description": "The time.", "parameters": parameters}
    more = {"strict": True, "cache_control": {"type": "ephemeral"}}
    ways = [{**function, "parameters": None}, {"name": "now", "description": "The time."}, {**function, **more}]
    for way in ways:
        schema = {"input_schema": way.get("parameters")}
        asked = [
            chat_request({"messages": CONTENT, "tools": [{"type": "function", "function": way}]}),
            response_request({"input": "begin", "tools": [{"type": "function", **way}]}),
            message_request({"max_tokens": 4, "messages": CONTENT, "tools": [{"type": "custom", **way, **schema}]}),
            message_request({"max_tokens": 4, "messages": CONTENT, "tools": [{**way, **schema}]}),
        ]
        assert [each.tools for each in asked] == [({"type": "function", "function": function},)] * 4
    for wrong in ("x", {"properties": [1]}):
        tools = [{"type": "function", "function": {"name": "now", "parameters": wrong}}]
        with pytest.raises(ApiError, match="'parameters' of the function 'now' are no JSON schema"):
            chat_request({"messages": CONTENT, "tools": tools})
    given = {"max_tokens": 4, "messages": CONTENT, "tools": [{"type": "bash_20250124", "name": "bash"}]}
    with pytest.raises(ApiError, match="can only be functions"):
        message_request(given)


def test_arguments_that_change_no_token_are_taken_on_both_paths_of_openai() -> None:
    for argument in ({"prompt_cache_retention": "24h"}, {"safety_identifier": "x"}, {"metadata": {"a": "b"}}):
        assert not chat_request({"messages": CONTENT, **argument}).decided
        assert not response_request({"input": "begin", **argument}).decided
    assert not chat_request({"messages": CONTENT, "prediction": {"type": "content", "content": "x"}}).decided


def session_of(tokenizer: Any) -> ProgramSession:
    limits = SessionLimits(
        settings=SamplingSettings(num_completions=1, max_tokens=999, end_ids=frozenset({2})),
        context_length=None,
        vocabulary=len(tokenizer),
        max_requests=9,
    )
    return ProgramSession(tool_format(tokenizer, {}, needs_tools=True), limits)


@pytest.mark.parametrize("more", [{}, {"tools": []}, {"tool_choice": "none"}])
def test_a_call_where_no_tools_are_offered_is_text(more: dict[str, Any]) -> None:
    """As at OpenAI: a client that has offered none reads `content`. The next request goes on with its tokens."""
    tokenizer = tool_tokenizer()
    session = session_of(tokenizer)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    offered = {"tools": [{"type": "function", "function": {"name": "now"}}]}
    ids = [*tokenizer(call, add_special_tokens=False)["input_ids"], 2]

    how = {**offered, **more} if "tool_choice" in more else more

    def drawn(messages: Any, **settings: Any) -> dict[str, Any]:
        asked = chat_request({"messages": messages, **settings})
        made = session.settle(session.place(asked), Drawn(None, ids, [-1.0] * len(ids)), seconds=0.0, own=0.0)
        return chat_answer(asked, made)["choices"][0]

    choice = drawn(CONTENT, **how)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", call)
    assert "tool_calls" not in choice["message"]
    drawn([*CONTENT, choice["message"], *CONTENT], **how)
    assert len(session.branches) == 1
    assert session.counts["calls"] == 0
    assert drawn(CONTENT, **offered)["finish_reason"] == "tool_calls"
    assert session.counts["calls"] == 1


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


def called(arguments: str) -> list[dict[str, Any]]:
    """A conversation that sends a call back, with its result."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "1", "content": "noon"}
    return [*CONTENT, {**said(""), "tool_calls": [call]}, result]


@pytest.mark.parametrize("depth", [65, 480, 900, 5000])
def test_arguments_of_a_call_that_are_nested_too_deep_are_text(depth: int) -> None:
    """Rendered by recursion they would end the round; sent back, they are what the model has written."""
    session = session_of(tool_tokenizer())
    asked = chat_request({"messages": called(nested(depth))})
    placed = session.place(asked)
    assert nested(depth).replace('"', '\\"') in session.chat.tokenizer.decode(placed.ids)
    plain = chat_request({"messages": called(nested(60))}).messages[1]["tool_calls"][0]["function"]["arguments"]
    assert plain == json.loads(nested(60))


def test_a_drawn_call_that_is_nested_too_deep_is_the_text_of_its_turn() -> None:
    tokenizer = tool_tokenizer()
    session = session_of(tokenizer)
    tools = [{"type": "function", "function": {"name": "now"}}]

    def drawn(depth: int) -> dict[str, Any]:
        text = f'<tool_call>\n{{"name": "now", "arguments": {nested(depth)}}}\n</tool_call>'
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], 2]
        placed = session.place(chat_request({"messages": CONTENT, "tools": tools}))
        return dict(session.settle(placed, Drawn(None, ids, [-1.0] * len(ids)), seconds=0.0, own=0.0).message)

    assert "tool_calls" in drawn(60)
    assert "tool_calls" not in (deep := drawn(65))
    assert nested(65) in deep["content"]


def test_a_template_that_fails_is_an_error_of_its_request() -> None:
    session = session_of(tool_tokenizer())
    session.chat.tokenizer.chat_template = "{{ 1 // (messages | length - 1) }}"
    with pytest.raises(ApiError, match="division") as caught:
        session.place(chat_request({"messages": CONTENT}))
    assert caught.value.status == 400


def test_a_long_request_is_refused_before_it_is_tokenized() -> None:
    """Of a text that has more tokens than the model has positions, a part is enough to know."""
    seen: list[int] = []

    def encode(text: str) -> list[int]:
        seen.append(len(text))
        return [0] * (len(text) // 4)

    with pytest.raises(TooManyTokens):
        bounded(encode, "word" * 4_000_000, 512)
    assert sum(seen) < 20_000
    assert len(bounded(encode, "word" * 4_000_000, None)) == 4_000_000
    assert bounded(lambda text: [len(text)], " " * 4_000_000, 512) == [4_000_000]  # some tokenizers drop spaces
    assert len(bounded(encode, "word" * 513, 512)) == 513


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "a" * 1_000_000}]},
        {"messages": [{"role": "user", "content": "<|im_end|>" * 100_000}]},
        {"messages": CONTENT * 10_000},
        {"prompt": "ab " * 300_000},
        {"prompt": [5] * 1_000_000},
    ],
)
def test_what_does_not_fit_into_the_model_is_an_error_400(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(tool_tokenizer())
    session.limits = replace(session.limits, context_length=512)
    asked = text_request(body) if "prompt" in body else chat_request(body)
    with pytest.raises(ApiError, match="maximum context length is 512 tokens; the request has") as caught:
        session.place(asked)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_token_ids_that_the_model_does_not_have_are_refused() -> None:
    session = session_of(tool_tokenizer())
    most = session.limits.vocabulary
    with pytest.raises(ApiError, match=f"token id {most}; those of this model end at {most - 1}"):
        session.place(text_request({"prompt": [5, most]}))
    assert session.place(text_request({"prompt": [5, most - 1]})).ids == (5, most - 1)


@pytest.mark.parametrize("text", ["né 😀", ""])
def test_streamed_log_probabilities_have_the_bytes_of_each_token(text: str) -> None:
    """Also of tokens that are a part of a character, and of the one that ends an answer without text."""
    tokenizer = tool_tokenizer()
    session = session_of(tokenizer)
    asked = chat_request({"messages": CONTENT, "logprobs": True, "stream": True})
    ids = [*tokenizer(text)["input_ids"], 2]
    drawn = session.settle(session.place(asked), Drawn(None, ids, [-1.0] * len(ids)), seconds=0.0, own=0.0)
    [content] = [x["content"] for chunk in chat_chunks(asked, drawn) if (x := chunk["choices"][0]["logprobs"])]
    assert len(content) == len(ids)
    assert b"".join(bytes(each["bytes"]) for each in content[:-1]).decode() == text
