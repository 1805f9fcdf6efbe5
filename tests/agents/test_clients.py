"""The official clients of OpenAI and Anthropic at the endpoint of programs, streaming and not."""

from __future__ import annotations

import functools
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from podium.agents.chat import ChatFormat, tool_format
from podium.agents.programs.episode import program_rollouts
from podium.agents.programs.program import FunctionProgram
from podium.agents.setup import ProgramLimits
from podium.engines.live.engine import LiveEngine
from podium.records import Prompt, SamplingSettings
from podium.testing import tiny_model
from tests.unit.agents_setup import DOT, tool_tokenizer

TOKENIZER = tool_tokenizer()
CHAT = tool_format(TOKENIZER, {}, needs_tools=True)
MODEL = tiny_model("llama", max_position_embeddings=4096)
CONTENT = [{"role": "user", "content": "begin"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Add.", "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]


def played(body: Callable[[str, str], Any], *, ends: Any = range(10, 60), top_p: float = 1.0, **changes: Any) -> Any:
    """One episode of a function; what it raises is raised here."""
    raised: list[BaseException] = []

    def run(base_url: str, api_key: str) -> float:
        try:
            body(base_url, api_key)
        except BaseException as error:  # noqa: BLE001
            raised.append(error)
        return 1.0

    prompt = Prompt(id=0, row=0, token_ids=tuple(CHAT.prompt(CONTENT)[0]), text="", content=CONTENT)
    ended = frozenset({2, *ends})
    settings = SamplingSettings(num_completions=1, max_tokens=900, seed=2, end_ids=ended, top_p=top_p)
    how = ProgramLimits(**{"timeout": 60.0, "max_turns": None, "context_length": 4096, **changes})
    kept = {"chat": CHAT, "limits": how, "evaluation": True}  # which needs no answer
    result = program_rollouts(FunctionProgram(run), LiveEngine(MODEL, TOKENIZER), [prompt], settings, **kept)
    if raised:
        raise raised[0]
    return result.groups[0].completions[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn is a text and two calls."""

    def parse(self: ChatFormat, token_ids: Any, *, prefix: Any, tools: Any = ()) -> dict[str, Any]:
        made = [{"type": "function", "function": {"name": "add", "arguments": {"a": i}}} for i in range(2)]
        return {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": made if tools else [],
            "reasoning_content": "Hm.",
        }

    monkeypatch.setattr(ChatFormat, "parse", parse)


def client(base_url: str, api_key: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key=api_key)


# ---- chat completions ----


def test_a_chat_completion() -> None:
    def body(base_url: str, api_key: str) -> None:
        made = client(base_url, api_key).chat.completions.create(
            model="gpt", messages=CONTENT, logprobs=True, temperature=0.2, max_completion_tokens=7, user="me"
        )
        [choice] = made.choices
        assert (made.object, made.model, choice.index) == ("chat.completion", "gpt", 0)
        assert choice.finish_reason in ("stop", "length")
        assert choice.message.role == "assistant"
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == made.usage.completion_tokens <= 7
        assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
        applied = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 7}
        assert made.podium == {"settings": applied, "not_as_asked": ["temperature"]}
        assert [each.id for each in client(base_url, api_key).models.list()] == ["policy"]

    played(body)


def test_a_stream_is_the_same_text() -> None:
    texts: list[str] = []

    def whole(base_url: str, api_key: str) -> None:
        made = client(base_url, api_key).chat.completions.create(model="m", messages=CONTENT)
        texts.append(made.choices[0].message.content or "")

    def parts(base_url: str, api_key: str) -> None:
        how: dict[str, Any] = {"model": "m", "messages": CONTENT, "stream_options": {"include_usage": True}}
        chunks = list(client(base_url, api_key).chat.completions.create(**how, stream=True))
        texts.append("".join(each.choices[0].delta.content or "" for each in chunks if each.choices))
        assert chunks[-1].usage.completion_tokens > 0
        assert chunks[-2].choices[0].finish_reason in ("stop", "length")

    played(whole)
    played(parts)
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("calls")
def test_calls_of_tools_go_there_and_back() -> None:
    def body(base_url: str, api_key: str) -> None:
        messages: list[Any] = list(CONTENT)
        made = client(base_url, api_key).chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert made.choices[0].finish_reason == "tool_calls"
        calls = made.choices[0].message.tool_calls or []
        assert [(each.function.name, each.function.arguments) for each in calls] == [
            ("add", '{"a": 0}'),
            ("add", '{"a": 1}'),
        ]
        assert len({each.id for each in calls}) == 2
        messages.append(made.choices[0].message)
        messages += [{"role": "tool", "tool_call_id": each.id, "content": "3"} for each in calls]
        with client(base_url, api_key).chat.completions.stream(model="m", messages=messages, tools=TOOLS) as stream:
            final = stream.get_final_completion()
        assert len(final.choices[0].message.tool_calls or ()) == 2

    completion = played(body)
    assert len(completion.turns) == 2
    assert not completion.branches
    assert [each["role"] for each in completion.turns[0].replies] == ["tool", "tool"]
    assert completion.turns[0].replies[0]["name"] == "add"


def test_stop_ends_a_text_before_it() -> None:
    def body(base_url: str, api_key: str) -> None:
        ask = client(base_url, api_key).chat.completions.create
        text = ask(model="m", messages=CONTENT, max_tokens=30).choices[0].message.content or ""
        inside = next(each for each in text[2:] if each.isalnum())
        again = ask(model="m", messages=CONTENT, max_tokens=30, stop=[inside]).choices[0]
        assert inside not in (again.message.content or "")

    played(body, ends=())


BAD: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str]] = {
    "several choices": ({"n": 2}, openai.BadRequestError, "'n' can only be 1"),
    "an unknown argument": ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "Unrecognized request argument"),
    "no messages": ({"messages": []}, openai.BadRequestError, "at least one message"),
    "messages that are text": (
        {"messages": "What is 2 + 3?"},
        openai.BadRequestError,
        "'messages' is text; give a list",
    ),
    "a message that is text": (
        {"messages": [*CONTENT, *"Wha"]},
        openai.BadRequestError,
        r"'messages\[1\]' is text, not an object",
    ),
    "another form": ({"response_format": {"type": "poem"}}, openai.BadRequestError, "'response_format' must be one of"),
    "a bias": ({"logit_bias": {"1": 5}}, openai.BadRequestError, "'logit_bias' can only"),
    "other tokens": ({"logprobs": True, "top_logprobs": 3}, openai.BadRequestError, "'top_logprobs' can only"),
    "another choice": ({"tools": TOOLS, "tool_choice": "perhaps"}, openai.BadRequestError, "'tool_choice' must be one"),
    "no tokens": ({"max_tokens": 0}, openai.BadRequestError, "at least 1"),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_honoured_is_an_error_of_openai(case: str) -> None:
    changes, kind, words = BAD[case]

    def body(base_url: str, api_key: str) -> None:
        with pytest.raises(kind, match=words) as raised:
            client(base_url, api_key).chat.completions.create(**{"model": "m", "messages": CONTENT, **changes})
        assert isinstance(raised.value.body, dict)
        assert set(raised.value.body) == {"message", "type", "param", "code"}

    played(body)


SCHEMA = {"name": "x", "schema": PARAMETERS}


def test_a_form_that_is_prescribed_is_not_forced_and_the_answer_says_so() -> None:
    """As Pydantic AI, LangChain and the Agents SDK ask for theirs; the tokens are the policy's own."""

    def body(base_url: str, api_key: str) -> None:
        ask = functools.partial(client(base_url, api_key).chat.completions.create, model="m", messages=CONTENT)
        choice: Any = {"type": "function", "function": {"name": "add"}}
        for forced in ("required", choice):
            made = ask(tools=TOOLS, tool_choice=forced)
            assert made.podium["not_as_asked"] == ["tool_choice"]  # type: ignore[attr-defined]
        forms: list[Any] = [{"type": "json_object"}, {"type": "json_schema", "json_schema": SCHEMA}]
        for form in forms:
            made = ask(response_format=form)
            assert made.podium["not_as_asked"] == ["response_format"]  # type: ignore[attr-defined]
        text: Any = {"format": {"type": "json_schema", **SCHEMA}}
        response = client(base_url, api_key).responses.create(model="m", input="x", text=text)
        assert response.podium["not_as_asked"] == ["response_format"]  # type: ignore[attr-defined]

    played(body)


def test_an_answer_has_the_numbers_it_was_drawn_with_and_names_those_that_are_others() -> None:
    def body(base_url: str, api_key: str) -> None:
        how: dict[str, Any] = {"model": "m", "temperature": 1.0, "top_p": 0.5}
        chat = client(base_url, api_key).chat.completions.create(messages=CONTENT, **how)
        assert chat.podium["not_as_asked"] == ["top_p"]  # type: ignore[attr-defined]
        response = client(base_url, api_key).responses.create(input="x", max_output_tokens=1, **how)
        assert response.podium["not_as_asked"] == ["top_p"]  # type: ignore[attr-defined]
        assert (response.temperature, response.top_p, response.max_output_tokens) == (1.0, 0.9, 1)
        assert response.status == response.output[0].status == "incomplete"

    played(body, ends=(), top_p=0.9)


def test_models_are_listed_and_found_by_name() -> None:
    def body(base_url: str, api_key: str) -> None:
        models = client(base_url, api_key).models
        assert [each.id for each in models.list()] == ["policy"]
        assert models.retrieve("gpt-5/mini").id == "gpt-5/mini"

    played(body)


def test_answers_on_a_kept_connection_come_at_once() -> None:
    """Frameworks keep theirs open: no answer's body may wait until the client has acknowledged its headers."""
    seconds: list[float] = []

    def body(base_url: str, api_key: str) -> None:
        with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}) as kept:
            for _ in range(10):
                begun = time.perf_counter()
                assert kept.get(f"{base_url}/models").status_code == 200
                seconds.append(time.perf_counter() - begun)

    played(body)
    assert min(seconds[1:]) < 0.03  # the delay is 0.04


def test_a_body_may_come_in_chunks() -> None:
    """As clients in other languages, and `curl -T -`, send what they do not know the length of."""
    content = json.dumps({"messages": CONTENT, "max_tokens": 2}).encode()

    def body(base_url: str, api_key: str) -> None:
        def send(*chunks: bytes) -> httpx.Response:
            return kept.post(f"{base_url}/chat/completions", content=iter(chunks))

        with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}) as kept:
            for chunks in ([content], [content[:7], content[7:]], [bytes([each]) for each in content]):
                assert send(*chunks).json()["object"] == "chat.completion"
            assert send(b"{").json()["error"]["message"] == "We could not parse the JSON body of your request."
            assert send(*[b" " * 4_000_000] * 5).status_code == 413
            smaller = b"%x\r\n%b\r\n-2\r\n0" % (len(content), content)  # a negative one would lower the sum
            for size in (b"-5", b"x", b"", b"0" * 2000 + b"2", smaller):
                head = (
                    f"POST {httpx.URL(base_url).path}/chat/completions HTTP/1.1\r\nAuthorization: Bearer {api_key}\r\n"
                )
                address = "127.0.0.1", httpx.URL(base_url).port or 0
                with socket.create_connection(address, timeout=20) as raw:
                    raw.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n{}\r\n0\r\n\r\n")
                    assert raw.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 413")

    played(body)


def test_errors_have_the_classes_of_the_client() -> None:
    def body(base_url: str, api_key: str) -> None:
        ask = {"model": "m", "messages": CONTENT}
        with pytest.raises(openai.AuthenticationError):
            client(base_url, "sk-other").chat.completions.create(**ask)
        with pytest.raises(openai.NotFoundError):
            client(base_url.replace("/sessions/", "/sessions/x"), api_key).chat.completions.create(**ask)
        with pytest.raises(openai.NotFoundError):
            client(base_url, api_key).embeddings.create(model="m", input="x")
        with pytest.raises(openai.NotFoundError, match="no path /v1/files to GET; there is: models"):
            client(base_url, api_key).files.list()
        client(base_url, api_key).chat.completions.create(**ask)
        with pytest.raises(openai.RateLimitError):  # at once: the client is told not to try again
            client(base_url, api_key).chat.completions.create(**ask)

    played(body, max_turns=1)


# ---- responses ----


def test_a_response() -> None:
    def body(base_url: str, api_key: str) -> None:
        made = client(base_url, api_key).responses.create(model="m", instructions="Be brief.", input="begin")
        assert made.status in ("completed", "incomplete")
        assert made.output[0].type == "message"
        assert made.instructions == "Be brief."
        again = [*made.output, {"role": "user", "content": [{"type": "input_text", "text": "more"}]}]
        talk: list[Any] = [{"role": "user", "content": "begin"}, *again]
        client(base_url, api_key).responses.create(model="m", instructions="Be brief.", input=talk)

    completion = played(body)
    assert len(completion.turns) == 2
    assert not completion.branches


@pytest.mark.usefixtures("calls")
def test_a_response_is_continued_by_its_id() -> None:
    """With what it was asked, its calls and their results; also a streamed one, and one that is not the last."""

    def body(base_url: str, api_key: str) -> None:
        tools: list[Any] = [{"type": "function", **FUNCTION}]
        made = client(base_url, api_key).responses

        def go_on(previous: str, given: Any) -> Any:
            return made.create(model="m", input=given, previous_response_id=previous, tools=tools)

        first = made.create(model="m", input="begin", tools=tools)
        calls = [each for each in first.output if each.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": each.call_id, "output": "3"} for each in calls]
        second = go_on(first.id, results)
        assert second.previous_response_id == first.id
        with made.stream(model="m", input="more", previous_response_id=second.id, tools=tools) as stream:
            third = stream.get_final_response()
        go_on(third.id, "and more")
        go_on(second.id, "another way")

    completion = played(body)
    assert [len(each.turns) for each in completion.sequences] == [1, 4]
    [aside, whole] = completion.sequences
    asked = [x for turn in whole.turns for x in turn.replies]
    assert [(x["role"], x["content"]) for x in asked] == [
        *[("tool", "3")] * 2,
        ("user", "more"),
        ("user", "and more"),
    ]
    assert whole.prompt is not None
    assert aside.prompt is not None
    behind_two = whole.prompt.token_ids + whole.token_ids[: whole.turns[1].stop]
    assert aside.prompt.token_ids[: len(behind_two)] == behind_two


def test_responses_that_cannot_be_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown ones, those that were not to be stored, and those that had to make room for newer ones."""
    monkeypatch.setattr("podium.agents.programs.dialects.KEPT_BYTES", 5000)

    def body(base_url: str, api_key: str) -> None:
        made = client(base_url, api_key).responses

        def unknown(previous: str) -> None:
            with pytest.raises(openai.BadRequestError) as raised:
                made.create(model="m", input="more", previous_response_id=previous)
            message = f"Previous response with id '{previous}' not found."
            param, code = "previous_response_id", "previous_response_not_found"
            said = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
            assert raised.value.body == said

        unknown("resp_1")
        unknown(made.create(model="m", input="begin", store=False).id)
        old, new = (made.create(model="m", input=text * 500).id for text in ("old ", "new "))
        assert made.create(model="m", input="more", previous_response_id=new).usage.input_tokens > 500
        unknown(old)
        with pytest.raises(openai.BadRequestError, match="'input' must be"):
            made.create(model="m", input=[], previous_response_id=new)

    played(body)


@pytest.mark.usefixtures("calls")
def test_a_streamed_response_with_calls() -> None:
    def body(base_url: str, api_key: str) -> None:
        tools: list[Any] = [{"type": "function", **FUNCTION}]
        with client(base_url, api_key).responses.stream(model="m", input="begin", tools=tools) as stream:
            kinds = [each.type for each in stream]
            final = stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert final.output_text == "I add."
        calls = [each for each in final.output if each.type == "function_call"]
        assert [each.arguments for each in calls] == ['{"a": 0}', '{"a": 1}']
        results = [{"type": "function_call_output", "call_id": each.call_id, "output": "3"} for each in calls]
        kept = [each.model_dump(exclude_none=True) for each in final.output]
        for each in kept:
            each.pop("parsed_arguments", None)
        talk: list[Any] = [{"role": "user", "content": "begin"}, *kept, *results]
        client(base_url, api_key).responses.create(model="m", input=talk, tools=tools)

    completion = played(body)
    assert len(completion.turns) == 2
    assert not completion.branches


# ---- Anthropic's messages ----


@pytest.fixture
def claude() -> Callable[[str, str], Any]:
    anthropic = pytest.importorskip("anthropic", reason="needs the package anthropic")
    return lambda base_url, key: anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=key)


@pytest.mark.slow
def test_a_message(claude: Any) -> None:
    def body(base_url: str, api_key: str) -> None:
        ask = claude(base_url, api_key).messages.create
        made = ask(model="m", max_tokens=50, system="Be brief.", messages=CONTENT)
        assert (made.type, made.role) == ("message", "assistant")
        assert made.stop_reason in ("end_turn", "max_tokens")
        more = {"role": "user", "content": [{"type": "text", "text": "more"}]}
        ask(
            model="m",
            max_tokens=50,
            system="Be brief.",
            messages=[*CONTENT, {"role": "assistant", "content": made.content}, more],
        )

    completion = played(body)
    assert len(completion.turns) == 2
    assert not completion.branches


@pytest.mark.slow
@pytest.mark.usefixtures("calls")
def test_a_streamed_message_with_calls(claude: Any) -> None:
    def body(base_url: str, api_key: str) -> None:
        tools = [{"name": "add", "description": "Add.", "input_schema": PARAMETERS}]
        with claude(base_url, api_key).messages.stream(
            model="m", max_tokens=50, messages=CONTENT, tools=tools
        ) as stream:
            assert "".join(stream.text_stream) == "I add."
            final = stream.get_final_message()
        assert final.stop_reason == "tool_use"
        calls = [each for each in final.content if each.type == "tool_use"]
        assert [each.input for each in calls] == [{"a": 0}, {"a": 1}]
        results = [{"type": "tool_result", "tool_use_id": each.id, "content": "3"} for each in calls]
        talk = [*CONTENT, {"role": "assistant", "content": final.content}, {"role": "user", "content": results}]
        claude(base_url, api_key).messages.create(model="m", max_tokens=50, messages=talk, tools=tools)

    completion = played(body)
    assert len(completion.turns) == 2
    assert not completion.branches


def post(base_url: str, api_key: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(base_url + path, json={"model": "m", **body}, headers={"x-api-key": api_key}, timeout=60)


def test_a_path_may_have_slashes_too_many() -> None:
    def body(base_url: str, api_key: str) -> None:
        for path in ("//chat/completions", "/chat/completions/", "/chat/completions/?a=b"):
            assert post(base_url, api_key, path, messages=CONTENT, max_tokens=4).status_code == 200
        assert post(base_url, api_key, "/chat/other/", messages=CONTENT).status_code == 404

    played(body)


def test_a_message_says_which_text_stopped_it() -> None:
    def body(base_url: str, api_key: str) -> None:
        ask = functools.partial(post, base_url, api_key, "/messages", max_tokens=200, messages=CONTENT)
        assert ask().json()["stop_sequence"] is None
        letters = list("aeiounrtslcmdhpy")
        made = ask(stop_sequences=letters).json()
        assert made["stop_reason"] == "stop_sequence"
        assert made["stop_sequence"] in letters
        lines = ask(stop_sequences=letters, stream=True).text.splitlines()
        [delta] = [json.loads(line[6:])["delta"] for line in lines if line.startswith('data: {"type": "message_delta"')]
        assert delta["stop_reason"] == "stop_sequence"
        assert delta["stop_sequence"] in letters

    played(body, ends=())


@pytest.mark.slow
def test_errors_of_anthropic(claude: Any) -> None:
    import anthropic

    def body(base_url: str, api_key: str) -> None:
        ask: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": CONTENT}
        with pytest.raises(anthropic.AuthenticationError):
            claude(base_url, "sk-other").messages.create(**ask)
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DOT}}
        with pytest.raises(anthropic.BadRequestError, match="takes text alone"):
            claude(base_url, api_key).messages.create(**{**ask, "messages": [{"role": "user", "content": [image]}]})
        claude(base_url, api_key).messages.create(**ask)
        with pytest.raises(anthropic.RateLimitError, match="max_turns"):
            claude(base_url, api_key).messages.create(**ask)

    played(body, max_turns=1)
