"""Requests and answers in OpenAI's JSON: what is asked becomes an `Asked`, what was drawn becomes an answer.

Nothing here is trusted: a body is whatever the program, or a model that writes its code, has sent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.data.images import DATA_URL, image_blocks, opened, with_blocks
from podium.errors import DataError
from podium.records import Message, canonical, plain_call

LONGEST_BODY = 16_000_000
"""Bytes of a request."""
MOST_PIXELS = 100_000_000
"""Those of all images of a request: 300 MB, of a body of any length, as a file of a few bytes may have millions."""
MOST_MESSAGES = 10_000
AS_MESSAGES = '[{"role": "user", "content": "..."}]'
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

DECIDED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
    *("parallel_tool_calls", "reasoning_effort", "reasoning", "thinking", "verbosity"),
)
"""Arguments that the recipe or the policy decides whatever is asked; the answer says so of all that are not true."""
UNUSED = (
    *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    "prediction",  # the same tokens, sooner
)
"""Arguments that change nothing here, whatever they are."""
TAKEN = {
    "chat": ("messages", "tools", "max_completion_tokens"),
    "text": ("prompt",),
    "both": ("model", "n", "stop", "stream", "stream_options", "max_tokens", "logprobs", "return_token_ids"),
}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "background": (False,),
    "modalities": (["text"],),
}
"""Arguments that can be honoured at these values alone; None always is."""
FORMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tool_choice": (("auto", "none"), ("required", "any", "tool", "function", "allowed_tools")),
    "response_format": (("text",), ("json_object", "json_schema")),
}
"""Arguments that prescribe the form of an answer: their types that ask for none, and those that do. Tokens are drawn
from the policy as it is, or they could not be trained on: it learns the form by its reward, and the answer says so."""


class ApiError(Exception):
    """An error that the program is answered with, in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(self.status)
        kind = kind or "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request: what is to be continued, and how the answer is wanted."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Of `/v1/completions`, continued as it is; None: the messages are."""
    model: str = ""
    max_tokens: int | None = None
    """None: as many as the recipe allows."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    decided: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that were given and that the recipe decides, with what was asked for."""
    previous: str | None = None
    """The id of the response that was named to be continued; its messages are among `messages`."""
    instructions: str | None = None
    """Those of a response, which answers repeat; the first of `messages` has them."""

    @property
    def key(self) -> str:
        """Equal for two requests that continue the same."""
        return json.dumps([self.prompt, [canonical(message) for message in self.messages], self.tools, self.max_tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was drawn for a request."""

    id: str
    message: Message
    finish: str
    """`stop`, `length` or `tool_calls`."""
    stop: str
    """The one of the texts asked for that ended it; empty: none did."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    pieces: tuple[tuple[str, bytes], ...]
    """The text of each token, and its bytes."""
    applied: Mapping[str, Any]
    """The recipe's settings with which it was answer."""


# ---- requests ----


def chat_request(body: Mapping[str, Any]) -> Asked:
    """A body of `/v1/chat/completions`. Raises `ApiError`."""
    messages = body.get("messages")
    if isinstance(messages, str):
        raise ApiError(400, f"'messages' is text; give a list: {AS_MESSAGES}", param="messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "'messages' must be a list with at least one message", param="messages")
    if len(messages) > MOST_MESSAGES:
        raise ApiError(400, f"'messages' has {len(messages)} messages, more than {MOST_MESSAGES}", param="messages")
    tools = _tools(body.get("tools") or [])
    tools = [] if body.get("tool_choice") == "none" else tools
    common = _common(body, "chat")
    limit = body.get("max_completion_tokens")
    common["max_tokens"] = common["max_tokens"] if limit is None else _count(limit, "max_completion_tokens")
    return Asked(messages=_messages(messages), tools=tuple(tools), logprobs=bool(body.get("logprobs")), **common)


def text_request(body: Mapping[str, Any]) -> Asked:
    """A body of `/v1/completions`. Raises `ApiError`."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    ids = isinstance(prompt, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt)
    if not prompt or not (isinstance(prompt, str) or ids):
        raise ApiError(400, "'prompt' must be one text, or the token ids of one", param="prompt")
    logprobs = body.get("logprobs")
    if logprobs not in (None, False, True, 0, 1):
        raise ApiError(400, "'logprobs' is known of the token drawn alone: give 0 or 1", param="logprobs")
    own = prompt if isinstance(prompt, str) else tuple(prompt)
    return Asked(prompt=own, logprobs=logprobs is not None and logprobs is not False, **_common(body, "text"))


def _common(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    known = (*TAKEN[kind], *TAKEN["both"], *DECIDED, *UNUSED, *NEUTRAL, *FORMS)
    for name, value in body.items():
        if name not in known and value is not None:
            raise ApiError(400, f"Unrecognized request argument supplied: {str(name)[:80]}", param=str(name)[:80])
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            only = " or ".join(map(json.dumps, NEUTRAL[name])) or "null"
            raise ApiError(400, f"'{name}' can only be {only} here", param=name, code="unsupported_value")
    stop = body.get("stop")
    stop = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop) or len(stop) > 16:
        raise ApiError(400, "'stop' must be a text, or a list of up to 16", param="stop")
    options = body.get("stream_options")
    return {
        "model": str(body.get("model") or "policy")[:200],
        "max_tokens": None if body.get("max_tokens") is None else _count(body["max_tokens"], "max_tokens"),
        "stop": tuple(stop),
        "stream": body.get("stream") is True,
        "usage_in_stream": isinstance(options, dict) and options.get("include_usage") is True,
        "token_ids": body.get("return_token_ids") is True,
        "decided": {
            **{name: body[name] for name in DECIDED if body.get(name) is not None and body[name] is not True},
            **{name: body[name] for name in _forms(body)},
        },
    }


def _forms(body: Mapping[str, Any]) -> list[str]:
    """The arguments that prescribe a form, by which nothing is drawn otherwise."""
    forms = {name: value for name in FORMS if (value := body.get(name)) is not None}
    kinds = {name: value.get("type") if isinstance(value, dict) else value for name, value in forms.items()}
    for name, kind in kinds.items():
        if kind not in (known := sum(FORMS[name], ())):
            only = ", ".join(map(json.dumps, known))
            raise ApiError(400, f"'{name}' must be one of {only}", param=name, code="unsupported_value")
    return [name for name, kind in kinds.items() if kind in FORMS[name][1]]


def _count(value: Any, name: str) -> int:
    if type(value) is not int or value < 1:
        raise ApiError(400, f"'{name}' must be a whole number of at least 1", param=name)
    return value


def _tools(entries: Any) -> list[dict[str, Any]]:
    """Tools as chat templates take them: functions with parameters, without what is not for the model (`strict`)."""
    made = []
    for entry in entries if isinstance(entries, list) else [None]:
        function = entry.get("function") if isinstance(entry, dict) and entry.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
            raise ApiError(400, "'tools' must be a list of functions, each with a name", param="tools")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}  # left out: it takes none
        if not isinstance(parameters, dict) or not isinstance(parameters.get("properties") or {}, dict):
            raise ApiError(400, f"'parameters' of the function {name[:80]!r} are no JSON schema", param="tools")
        described = {"description": text} if isinstance(text := function.get("description"), str) else {}
        made.append({"type": "function", "function": {"name": name, **described, "parameters": parameters}})
    return made


def _messages(entries: Sequence[Any]) -> tuple[Message, ...]:
    """Messages as chat templates take them: arguments of calls as mappings, results with their name."""
    names: dict[str, str] = {}
    made = []
    for i, sent in enumerate(entries):
        where = f"messages[{i}]"
        if not isinstance(sent, dict):
            kind = "text" if isinstance(sent, str) else f"a {type(sent).__name__}"
            raise ApiError(400, f"'{where}' is {kind}, not an object; give a list: {AS_MESSAGES}", param=where)
        role = ROLES.get(str(sent.get("role")))
        if role is None:
            raise ApiError(400, f"'{where}.role' must be one of {', '.join(ROLES)}", param=where)
        message: dict[str, Any] = {"role": role, "content": _content(sent.get("content"), where)}
        if role == "assistant":
            if isinstance(thought := sent.get("reasoning_content"), str) and thought:
                message["reasoning_content"] = thought
            if calls := _calls(sent.get("tool_calls"), where, names):
                message["tool_calls"] = calls
        elif role == "tool":
            message["name"] = names.get(str(sent.get("tool_call_id")), str(sent.get("name") or "tool"))
        made.append(message)
    return _with_images(made)


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """A text; blocks where there are images."""
    if content is None or isinstance(content, str):
        return _valid(content or "")
    if not isinstance(content, list):
        raise ApiError(400, f"'{where}.content' must be text, or a list of parts", param=where)
    blocks: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image_url":
            blocks.append({"type": "image", "image": _address(part.get(kind), where)})
        elif kind in ("text", "refusal") and isinstance(part.get(kind), str):
            blocks.append({"type": "text", "text": _valid(part[kind])})
        else:
            what = f"'{where}.content' has a part of type {str(kind)[:40]!r}; texts and images are taken"
            raise ApiError(400, what, param=where, code="unsupported_value")
    return blocks if image_blocks({"content": blocks}) else "".join(block["text"] for block in blocks)


def _address(sent: Any, where: str) -> str:
    """The data URL of a part with an image."""
    url = str(sent.get("url") if isinstance(sent, dict) else sent)
    if not url.startswith(DATA_URL):
        what = f"'{where}.content' has an image that is no data URL (data:image/png;base64,...); none is downloaded"
        raise ApiError(400, what, param=where, code="unsupported_value")
    return url


def _with_images(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages with their images opened, in RGB."""
    left = MOST_PIXELS

    def shown(url: str, number: int) -> Any:
        nonlocal left
        where = f"messages[{number - 1}]"
        try:
            image = opened(url, "the image", most_pixels=left)
        except DataError as error:
            raise ApiError(400, f"'{where}.content': {error.what}", param=where) from None
        left -= image.width * image.height
        return image

    return tuple(with_blocks(messages, shown))


def _valid(text: str) -> str:
    """Text without halves of surrogate pairs, which JSON can carry and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def _calls(entries: Any, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """Calls of an assistant message; `names` learns the name of each by its id."""
    if not entries:
        return []
    made = []
    for call in entries if isinstance(entries, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if call is None or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"'{where}.tool_calls' must be calls of functions", param=where)
        names[str(call.get("id"))] = function["name"]
        made.append(plain_call(function))
    return made


# ---- answers ----


def chat_answer(asked: Asked, answer: Answer) -> dict[str, Any]:
    """The body of a `chat.completion`."""
    return _answer(asked, answer, "chat.completion", {"message": _message(answer)}, _chat_logps(asked, answer))


def text_answer(asked: Asked, answer: Answer) -> dict[str, Any]:
    """The body of a `text_completion`."""
    return _answer(asked, answer, "text_completion", {"text": answer.message["content"]}, _text_logps(asked, answer))


def _answer(asked: Asked, answer: Answer, kind: str, content: Mapping[str, Any], logps: Any) -> dict[str, Any]:
    choice = {"index": 0, **content, "finish_reason": answer.finish, "logprobs": logps}
    head = _head(asked, answer, kind)
    choices = [_with_ids(choice, asked, answer)]
    return {**head, "choices": choices, "usage": _usage(answer), **_ids(asked, answer)}


def chat_chunks(asked: Asked, answer: Answer) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed `chat.completion`."""
    message = _message(answer)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.get("reasoning_content"):
        deltas.append({"reasoning_content": message["reasoning_content"]})
    content = message["content"] or ""
    deltas += [{"content": content[i : i + 64]} for i in range(0, len(content), 64)]
    calls = message.get("tool_calls") or ()
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls)]
    for i, delta in enumerate(deltas):
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": None,
            "logprobs": _chat_logps(asked, answer) if i == min(1, len(deltas) - 1) else None,
        }
        yield {**_head(asked, answer, "chat.completion.chunk"), "choices": [choice]}
    last = {"index": 0, "delta": {}, "finish_reason": answer.finish, "logprobs": None}
    choices = [_with_ids(last, asked, answer)]
    yield {**_head(asked, answer, "chat.completion.chunk"), "choices": choices, **_ids(asked, answer)}
    if asked.usage_in_stream:
        yield {**_head(asked, answer, "chat.completion.chunk"), "choices": [], "usage": _usage(answer)}


def text_chunks(asked: Asked, answer: Answer) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed `text_completion`."""
    whole = text_answer(asked, answer)
    usage = whole.pop("usage")
    yield whole
    if asked.usage_in_stream:
        yield {**whole, "choices": [], "usage": usage}


def _head(asked: Asked, answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": kind,
        "created": int(time.time()),
        "model": asked.model,
        "podium": decided(asked, answer),
    }


def decided(asked: Asked, answer: Answer) -> dict[str, Any]:
    """The settings with which an answer was answer, and the requested ones that differ from them."""
    other = [name for name, value in asked.decided.items() if answer.applied.get(name) != value]
    return {"settings": dict(answer.applied), "not_as_asked": other}


def _usage(answer: Answer) -> dict[str, int]:
    prompt = len(answer.prompt_ids)
    completion = len(answer.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _ids(asked: Asked, answer: Answer) -> dict[str, Any]:
    return {"prompt_token_ids": list(answer.prompt_ids)} if asked.token_ids else {}


def _with_ids(choice: dict[str, Any], asked: Asked, answer: Answer) -> dict[str, Any]:
    return {**choice, "token_ids": list(answer.token_ids)} if asked.token_ids else choice


def _message(answer: Answer) -> dict[str, Any]:
    """The message with calls as OpenAI writes them."""
    message = {**answer.message, "refusal": None}
    if calls := calls_of(answer):
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return message


def calls_of(answer: Answer) -> list[dict[str, Any]]:
    """The calls of a message with an id each, and arguments in a text."""
    name = answer.id.removeprefix("chatcmpl-").replace("-", "_")
    return [_call(call, f"call_{name}_{i}") for i, call in enumerate(answer.message.get("tool_calls") or ())]


def _call(call: Mapping[str, Any], id: str) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": call["function"]["name"], "arguments": text}}


def _chat_logps(asked: Asked, answer: Answer) -> dict[str, Any] | None:
    if not asked.logprobs:
        return None
    pairs = zip(answer.pieces, answer.logps, strict=True)
    content = [{"token": text, "logprob": p, "bytes": [*own], "top_logprobs": []} for (text, own), p in pairs]
    return {"content": content, "refusal": None}


def _text_logps(asked: Asked, answer: Answer) -> dict[str, Any] | None:
    if not asked.logprobs:
        return None
    texts = [text for text, _ in answer.pieces]
    offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
    tops = [{text: p} for text, p in zip(texts, answer.logps, strict=True)]
    return {
        "tokens": texts,
        "token_logprobs": list(answer.logps),
        "top_logprobs": tops,
        "text_offset": offsets,
    }
